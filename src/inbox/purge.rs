//! Forgets old events: rows of `processed_event` that no copy can ask for any more.

use std::time::Duration;

use anyhow::anyhow;
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::db::{Database, explain};

/// Rows of one step: a transaction of some ten milliseconds, which nobody waits for noticeably.
const STEP: i64 = 5_000;

/// The lock that keeps two purges apart, in every release the same number. Held for a step at a time: it belongs to a
/// transaction, which is all that a pooling proxy gives.
const LOCK: i64 = 0x5700_c5e8;

/// What to do when another purge is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// Take turns with it, a step each.
    Wait,
    /// Leave the rest to it.
    Yield,
}

/// The time before which rows are `horizon` old, by the database's clock: the same that stamped them.
///
/// # Errors
/// The database's; or a horizon that reaches back beyond its calendar.
pub async fn cutoff(database: &Database, horizon: Duration) -> anyhow::Result<DateTime<Utc>> {
    let mut transaction = database.begin().await.map_err(explain)?;
    let now = sqlx::query_scalar!("select now() as \"now!\"").fetch_one(transaction.connection());
    let now = database.bounded(now).await.map_err(explain)?;
    transaction.rollback().await.map_err(explain)?;
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

/// Deletes the rows older than `cutoff`, the oldest first, a step at a time, and tells `progress` after each how many it
/// were. Gives their number.
///
/// It rests after each step for as long as the step took, so that consumption keeps the larger part of the database.
/// What was deleted stays deleted, however the purge ends.
///
/// # Errors
/// The database's.
pub async fn purge(
    database: &Database,
    cutoff: DateTime<Utc>,
    rival: Rival,
    mut progress: impl FnMut(u64),
) -> sqlx::Result<u64> {
    let mut rows = 0;
    // Where the last step ended: without it, each step would read over the dead index entries of all before it.
    let mut oldest = None;
    loop {
        let begun = tokio::time::Instant::now();
        let mut transaction = database.begin().await?;
        let conn = transaction.connection();
        let step = database.bounded(async {
            match lock(conn, rival).await? {
                true => delete(conn, oldest, cutoff).await.map(Some),
                false => Ok(None),
            }
        });
        let step = step.await?;
        transaction.commit().await?;
        let Some(Step { rows: deleted, newest: Some(newest) }) = step else { return Ok(rows) };
        rows += deleted;
        progress(deleted);
        if deleted < STEP.unsigned_abs() {
            return Ok(rows);
        }
        oldest = Some(newest);
        tokio::time::sleep(begun.elapsed()).await;
    }
}

/// Takes the lock for this transaction; false when another purge has it and is not waited for.
async fn lock(conn: &mut PgConnection, rival: Rival) -> sqlx::Result<bool> {
    match rival {
        Rival::Wait => sqlx::query!("select pg_advisory_xact_lock($1)", LOCK).execute(conn).await.map(|_| true),
        Rival::Yield => {
            sqlx::query_scalar!("select pg_try_advisory_xact_lock($1) as \"locked!\"", LOCK).fetch_one(conn).await
        }
    }
}

struct Step {
    rows: u64,
    /// The `processed_at` of the newest row deleted; none when there was no row.
    newest: Option<DateTime<Utc>>,
}

/// Deletes the oldest rows from `from` on.
async fn delete(conn: &mut PgConnection, from: Option<DateTime<Utc>>, cutoff: DateTime<Utc>) -> sqlx::Result<Step> {
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
    Ok(Step { rows: step.rows.unsigned_abs(), newest: step.newest })
}
