-- All figures of the report that stand in tables, in one row: "shop" is the order service's
-- own record, the tables without a schema are the stock service's.
with expected as (
    select order_id, product_id, quantity, count(*) as lines from shop.order_line group by 1, 2, 3
), reserved as (
    select order_id, product_id, quantity, count(*) as lines from reservation group by 1, 2, 3
), confirmed as (
    select kind, event_id from shop.publication where confirmed_at is not null
), compared as (
    -- Two equal lines of an order are two reservations, so the numbers are compared too.
    select order_id, coalesce(expected.lines, 0) as due, coalesce(reserved.lines, 0) as found
    from expected full join reserved using (order_id, product_id, quantity)
)
select
    (select count(*) from shop.orders) as orders,
    (select count(*) from shop.order_line) as lines,
    (select count(*) from shop.outbox where name = 'order.order.status_changed.v1') as status_changes,
    (select count(*) from shop.orders where cancelled_at is not null) as cancelled,

    (select count(*) from confirmed where kind = 'relay') as by_relay,
    (select count(*) from confirmed where kind = 'crashed-relay') as by_crashed_relay,
    (select count(*) from confirmed where kind = 'replay') as by_replay,
    (select count(*) from confirmed where kind = 'malformed') as malformed,
    (select count(*) from shop.publication where confirmed_at is null) as unconfirmed,
    (select count(*) from shop.outbox where published_at is null) as unpublished,

    (select count(distinct event_id) from confirmed) as distinct_events,
    (select count(*) from processed_event) as processed,
    (select count(*) from processed_event p
     where not exists (select from shop.publication where publication.event_id = p.event_id)) as processed_unknown,
    (select count(*) from shop.worker_kill) as kills,
    (select coalesce(sum(lost_acknowledgements), 0)::bigint from shop.worker_kill) as lost_acknowledgements,

    (select count(*) from reservation) as reservations,
    (select count(*) from shop.orders
     where not exists (select from compared where order_id = orders.id and due <> found)) as orders_right,
    (select coalesce(sum(due - found), 0)::bigint from compared where due > found) as lines_missing,
    (select coalesce(sum(found - due), 0)::bigint from compared where found > due) as lines_too_many,
    (select count(*) from reservation join shop.orders on orders.id = order_id
     where cancelled_at is not null and released_at is null) as holding_though_cancelled,
    (select count(*) from reservation join shop.orders on orders.id = order_id
     where cancelled_at is null and released_at is not null) as released_for_nothing,
    -- Orders that the shop doesn't know are wrong as well.
    (select count(*) from shop.orders o full join order_status s on s.order_id = o.id
     where (o.status, o.version, o.cancelled_at is null) is distinct from
           (s.status, s.version, s.cancelled_at is null)
        or o.id is null or s.order_id is null) as status_wrong
