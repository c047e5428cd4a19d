//! Forgets old events: rows of `processed_event` that no copy can ask for any more.

use std::time::Duration;

use anyhow::anyhow;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::db::Database;

/// Rows of one step: a transaction of some ten milliseconds, which nobody waits for noticeably.
const STEP: i64 = 5_000;

/// The lock that keeps two purges apart, in every release the same number. Held for a step at a time: it belongs to a
/// transaction, which is all that a pooling proxy gives.
const LOCK: i64 = 0x5700_c5e8;

/// What a purge did.
#[derive(Debug, PartialEq, Eq)]
pub struct Purged {
    /// Rows deleted.
    pub rows: u64,
    /// Another purge was at work, so this one left the rest to it.
    pub yielded: bool,
}

/// The time before which rows are `horizon` old, by the database's clock: the same that stamped them.
///
/// # Errors
/// The database's; or a horizon that reaches back beyond its calendar.
pub async fn cutoff(database: &Database, horizon: Duration) -> anyhow::Result<DateTime<Utc>> {
    let mut transaction = database.begin().await?;
    let now = sqlx::query_scalar!("select now() as \"now!\"").fetch_one(transaction.connection());
    let now = database.bounded(now).await?;
    transaction.rollback().await?;
    chrono::Duration::from_std(horizon)
        .ok()
        .and_then(|horizon| now.checked_sub_signed(horizon))
        .ok_or_else(|| anyhow!("a horizon of {horizon:?} reaches back beyond the calendar"))
}

/// How many rows are older than `cutoff`.
///
/// # Errors
/// The database's.
pub async fn count(database: &Database, cutoff: DateTime<Utc>) -> sqlx::Result<u64> {
    let mut transaction = database.begin().await?;
    let rows = sqlx::query_scalar!("select count(*) as \"rows!\" from processed_event where processed_at < $1", cutoff)
        .fetch_one(transaction.connection());
    let rows = database.bounded(rows).await?;
    transaction.rollback().await?;
    Ok(rows.unsigned_abs())
}

/// Deletes the rows older than `cutoff`, the oldest first, a step at a time, and tells after each how many it were.
///
/// It rests after each step for as long as the step took, so that consumption keeps the larger part of the database.
/// What was deleted stays deleted, however the purge ends.
///
/// # Errors
/// The database's.
pub async fn purge(database: &Database, cutoff: DateTime<Utc>, mut progress: impl FnMut(u64)) -> sqlx::Result<Purged> {
    let mut rows = 0;
    // Where the last step ended: without it, each step would read over the dead index entries of all before it.
    let mut oldest = None;
    loop {
        let begun = tokio::time::Instant::now();
        let mut transaction = database.begin().await?;
        let Some(step) = database.bounded(step(transaction.connection(), oldest, cutoff)).await? else {
            database.bounded(transaction.rollback()).await?;
            return Ok(Purged { rows, yielded: true });
        };
        database.bounded(transaction.commit()).await?;
        rows += step.rows;
        progress(step.rows);
        match step.newest {
            Some(newest) if step.rows == STEP.unsigned_abs() => oldest = Some(newest),
            _ => return Ok(Purged { rows, yielded: false }),
        }
        tokio::time::sleep(begun.elapsed()).await;
    }
}

struct Step {
    rows: u64,
    newest: Option<DateTime<Utc>>,
}

/// One step; `None` when another purge holds the lock.
async fn step(
    conn: &mut PgConnection,
    from: Option<DateTime<Utc>>,
    cutoff: DateTime<Utc>,
) -> sqlx::Result<Option<Step>> {
    let locked = sqlx::query_scalar!("select pg_try_advisory_xact_lock($1) as \"locked!\"", LOCK);
    if !locked.fetch_one(&mut *conn).await? {
        return Ok(None);
    }
    // Rows are never updated, so their places (ctid) hold still between the two parts.
    let step = sqlx::query!(
        "with gone as (
             delete from processed_event
             where ctid = any (array(select ctid from processed_event
                                     where processed_at >= coalesce($1::timestamptz, '-infinity') and processed_at < $2
                                     order by processed_at limit $3))
             returning processed_at)
         select count(*) as \"rows!\", max(processed_at) as newest from gone",
        from,
        cutoff,
        STEP
    )
    .fetch_one(conn)
    .await?;
    Ok(Some(Step { rows: step.rows.unsigned_abs(), newest: step.newest }))
}
