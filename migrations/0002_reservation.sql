-- The goods held for an order: one row a line. Nothing is deleted; a release is a fact of its own.
create table reservation (
    -- v7, set by the service: rows of one time lie together in the index
    id          uuid           primary key,
    order_id    uuid           not null,
    -- two lines of one product are two reservations, so there is no unique key on (order_id, product_id)
    product_id  uuid           not null,
    -- NaN sorts above every number and would pass a plain "> 0"
    quantity    numeric(12, 3) not null check (quantity > 0 and quantity <> 'NaN'),
    reserved_at timestamptz    not null default now(),
    -- set when the order is cancelled, or at once when it already was
    released_at timestamptz
);

-- "What does this order hold?": asked by every cancellation.
create index reservation_order_id on reservation (order_id);
-- "How much of this product is reserved?": asked by whoever plans the stock.
create index reservation_product_id on reservation (product_id);
