-- A copy of each order's state, fed by events that may arrive late and in any order.
create table order_status (
    order_id     uuid        primary key,
    status       text        not null,
    -- the producer's count of changes: only a newer one replaces the copy; 0 is "placed", before any change
    version      bigint      not null check (version >= 0),
    -- set by the first cancellation, however stale its version, and never taken back
    cancelled_at timestamptz,
    updated_at   timestamptz not null default now()
);
