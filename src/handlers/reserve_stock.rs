//! Reserves the goods of placed orders.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::message::OrderPlaced;

/// Writes one reservation a line, all lines of all orders in one statement.
///
/// `cancelled` are the orders among them that were cancelled before they were placed, under the locks that say so: their
/// goods are released at once.
pub(super) async fn reserve(
    conn: &mut PgConnection,
    orders: &[&OrderPlaced],
    cancelled: &HashSet<Uuid>,
) -> sqlx::Result<()> {
    let lines = orders.iter().map(|order| order.lines.len()).sum();
    let (mut ids, mut order_ids) = (Vec::with_capacity(lines), Vec::with_capacity(lines));
    let (mut product_ids, mut thousandths) = (Vec::with_capacity(lines), Vec::with_capacity(lines));
    let mut released = Vec::with_capacity(lines);
    for order in orders {
        let order_id = order.order_id.as_uuid();
        for line in &order.lines {
            ids.push(Uuid::now_v7());
            order_ids.push(order_id);
            product_ids.push(line.product_id.as_uuid());
            thousandths.push(line.quantity.thousandths());
            released.push(cancelled.contains(&order_id));
        }
    }
    sqlx::query!(
        // In a select list PostgreSQL walks the arrays in step; in the from clause it would first store each as a table.
        "insert into reservation (id, order_id, product_id, quantity, released_at)
         select id, order_id, product_id, thousandths * 0.001, -- exact: numeric times numeric
                case when released then now() end
         from (select unnest($1::uuid[]), unnest($2::uuid[]), unnest($3::uuid[]), unnest($4::bigint[]), unnest($5::bool[]))
              as line (id, order_id, product_id, thousandths, released)",
        &ids,
        &order_ids,
        &product_ids,
        &thousandths,
        &released
    )
    .execute(conn)
    .await?;
    Ok(())
}
