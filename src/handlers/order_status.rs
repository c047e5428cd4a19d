//! The copy of each order's state, and the release of a cancelled order's goods.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::message::OrderStatusChanged;
use crate::stock::OrderId;

/// Locks the rows of these orders, after creating those that are missing: `placed`, version 0. Gives those that have
/// been cancelled.
///
/// Every handler works under these locks, so two workers with two events of one order see each other. All orders of
/// a transaction are locked by this one statement in the order of their ids, so two workers cannot deadlock.
pub(super) async fn lock(
    conn: &mut PgConnection,
    orders: impl Iterator<Item = OrderId>,
) -> sqlx::Result<HashSet<Uuid>> {
    let mut ids: Vec<_> = orders.map(OrderId::as_uuid).collect();
    ids.sort_unstable();
    ids.dedup();
    let cancelled = sqlx::query_scalar!(
        // "do nothing" would not lock a row that is there; writing what it holds already does.
        "with locked as (
             insert into order_status as known (order_id, status, version)
             select unnest($1::uuid[]), 'placed', 0
             on conflict (order_id) do update set status = known.status
             returning order_id, cancelled_at)
         select order_id as \"order_id!\" from locked where cancelled_at is not null",
        &ids
    )
    .fetch_all(conn)
    .await?;
    Ok(cancelled.into_iter().collect())
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
        // The rows are there and locked. An update that joins them would do as well, but may keep a plan that reads all
        // of the table from when it was small; this one goes by the primary key.
        "insert into order_status as known (order_id, status, version, cancelled_at)
         select order_id,
                (array_agg(status order by version desc, position))[1],
                max(version),
                case when bool_or(status = $4) then now() end
         from unnest($1::uuid[], $2::text[], $3::bigint[]) with ordinality
              as change (order_id, status, version, position)
         group by order_id
         on conflict (order_id) do update
         set status = case when excluded.version > known.version then excluded.status else known.status end,
             version = greatest(excluded.version, known.version),
             cancelled_at = coalesce(known.cancelled_at, excluded.cancelled_at),
             updated_at = now()
         where excluded.version > known.version or excluded.cancelled_at is not null and known.cancelled_at is null",
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
