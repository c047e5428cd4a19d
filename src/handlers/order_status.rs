//! The copy of each order's state, and the release of a cancelled order's goods.

use sqlx::PgConnection;

use crate::message::OrderStatusChanged;
use crate::stock::OrderId;

/// Locks the rows of these orders, after creating those that are missing: `placed`, version 0.
///
/// Every handler works under these locks, so two workers with two events of one order see each other. All orders of
/// a transaction are locked by this one statement in the order of their ids, so two workers cannot deadlock.
pub(super) async fn lock(conn: &mut PgConnection, orders: impl Iterator<Item = OrderId>) -> sqlx::Result<()> {
    let mut ids: Vec<_> = orders.map(OrderId::as_uuid).collect();
    ids.sort_unstable();
    ids.dedup();
    sqlx::query!(
        // "do nothing" would not lock a row that is there; writing what it holds already does.
        "insert into order_status as known (order_id, status, version)
         select unnest($1::uuid[]), 'placed', 0
         on conflict (order_id) do update set status = known.status",
        &ids
    )
    .execute(conn)
    .await?;
    Ok(())
}

/// Applies the changes that are newer than what is known, and releases the goods of what was cancelled.
///
/// A cancellation counts however stale its version is, and is never taken back.
pub(super) async fn change(conn: &mut PgConnection, changes: &[&OrderStatusChanged]) -> sqlx::Result<()> {
    let orders: Vec<_> = changes.iter().map(|change| change.order_id.as_uuid()).collect();
    let statuses: Vec<_> = changes.iter().map(|change| change.status.clone()).collect();
    let versions: Vec<_> = changes.iter().map(|change| change.version).collect();
    sqlx::query!(
        // Of several changes of one order the newest counts, and of two with one version the first that came.
        "update order_status as known
         set status  = case when news.version > known.version then news.status else known.status end,
             version = greatest(news.version, known.version),
             cancelled_at = coalesce(known.cancelled_at, case when news.cancelled then now() end),
             updated_at = now()
         from (select order_id,
                      (array_agg(status order by version desc, position))[1] as status,
                      max(version) as version,
                      bool_or(status = $4) as cancelled
               from unnest($1::uuid[], $2::text[], $3::bigint[]) with ordinality
                    as change (order_id, status, version, position)
               group by order_id) as news
         where known.order_id = news.order_id
           and (news.version > known.version or news.cancelled and known.cancelled_at is null)",
        &orders,
        &statuses,
        &versions,
        OrderStatusChanged::CANCELLED
    )
    .execute(&mut *conn)
    .await?;

    let cancelled: Vec<_> = changes
        .iter()
        .filter(|change| change.status == OrderStatusChanged::CANCELLED)
        .map(|change| change.order_id.as_uuid())
        .collect();
    if !cancelled.is_empty() {
        // A statement of its own: its snapshot is taken under the locks and sees what the worker before committed.
        sqlx::query!(
            "update reservation set released_at = now() where order_id = any($1::uuid[]) and released_at is null",
            &cancelled
        )
        .execute(conn)
        .await?;
    }
    Ok(())
}
