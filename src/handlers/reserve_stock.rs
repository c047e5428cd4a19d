//! Reserves the goods of placed orders.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::message::OrderPlaced;

/// Writes one reservation a line, all lines of all orders in one statement.
///
/// Their rows in `order_status` are locked by now, so what it says of a cancellation is final: goods of an order that
/// was cancelled before it was placed are released at once.
pub(super) async fn reserve(conn: &mut PgConnection, orders: &[&OrderPlaced]) -> sqlx::Result<()> {
    let lines = orders.iter().map(|order| order.lines.len()).sum();
    let (mut ids, mut order_ids) = (Vec::with_capacity(lines), Vec::with_capacity(lines));
    let (mut product_ids, mut thousandths) = (Vec::with_capacity(lines), Vec::with_capacity(lines));
    for order in orders {
        for line in &order.lines {
            ids.push(Uuid::now_v7());
            order_ids.push(order.order_id.as_uuid());
            product_ids.push(line.product_id.as_uuid());
            thousandths.push(line.quantity.thousandths());
        }
    }
    sqlx::query!(
        "insert into reservation (id, order_id, product_id, quantity, released_at)
         select line.id, line.order_id, line.product_id, line.thousandths * 0.001, -- exact: numeric times numeric
                case when known.cancelled_at is not null then now() end
         from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[]) as line (id, order_id, product_id, thousandths)
         join order_status as known using (order_id)",
        &ids,
        &order_ids,
        &product_ids,
        &thousandths
    )
    .execute(conn)
    .await?;
    Ok(())
}
