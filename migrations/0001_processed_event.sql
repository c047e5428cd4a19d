-- The guard's memory: one row an event that took effect, inserted in the same transaction as the effect.
-- The primary key decides when two workers have the same event at the same moment.
create table processed_event (
    -- the producer's id; equal ids are one event
    event_id     uuid        primary key,
    -- by the database's clock, which is also the one that the purge measures with
    processed_at timestamptz not null default now()
);

-- The purge walks the oldest rows in small steps; without this each step would read the whole table.
create index processed_event_processed_at on processed_event (processed_at);
