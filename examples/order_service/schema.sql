-- What the shop knows: its orders, its outbox, and what the broker confirmed. The stock
-- service neither reads nor writes any of it; the report compares the two sides.
-- Every statement may run again: each command of the order service begins with this file.

create schema if not exists shop;

create table if not exists shop.orders (
    id           uuid primary key,
    customer_id  uuid not null,
    status       text not null default 'placed',
    version      bigint not null default 0,  -- counts the changes of the status
    cancelled_at timestamptz,                -- stays set, whatever the status becomes later
    placed_at    timestamptz not null default now()
);

-- Two lines of one product, even with the same quantity, are two lines.
create table if not exists shop.order_line (
    order_id   uuid not null references shop.orders,
    line       int not null,
    product_id uuid not null,
    quantity   numeric(12, 3) not null,
    primary key (order_id, line)
);

-- The relay publishes in this order. A row that is to go out late gets a later number.
create sequence if not exists shop.outbox_position;

-- One row an event, written in the transaction of what it tells. The body is stored as it
-- is published, so that every copy is the same to the byte.
create table if not exists shop.outbox (
    event_id     uuid primary key,
    name         text not null,
    order_id     uuid not null references shop.orders,
    body         text not null,
    position     bigint not null default nextval('shop.outbox_position'),
    created_at   timestamptz not null default now(),
    published_at timestamptz
);

create index if not exists outbox_unpublished on shop.outbox (position) where published_at is null;
create index if not exists outbox_of_order on shop.outbox (order_id);

-- One row a message: the witness against which the queues and the stock tables are counted.
-- It is written apart from the outbox's mark, so that it also holds what a relay published
-- before it crashed; and before the message is sent, so that it holds what was sent when
-- this service itself, or the broker, was killed.
create table if not exists shop.publication (
    id              bigint generated always as identity primary key,
    kind            text not null check (kind in ('relay', 'crashed-relay', 'replay', 'malformed')),
    event_id        uuid references shop.outbox,
    body            bytea,  -- of a malformed message, which has no row in the outbox
    defect          text,   -- what is wrong with it
    expected_reason text,   -- the failure-reason that it must get
    confirmed_at    timestamptz,  -- null: nobody knows whether it arrived
    check ((kind = 'malformed') = (event_id is null)),
    check ((kind = 'malformed') = (body is not null and defect is not null and expected_reason is not null))
);

-- One row a worker that was killed right after a commit.
create table if not exists shop.worker_kill (
    id                    bigint generated always as identity primary key,
    commits               bigint not null,  -- rows in processed_event since the trial began
    settled               bigint not null,  -- messages gone from the queue since then
    lost_acknowledgements bigint not null generated always as (commits - settled) stored,
    killed_at             timestamptz not null default now()
);
