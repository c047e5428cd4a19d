//! Whether the work of months makes the next event dearer.

use std::process::Stdio;

use anyhow::bail;
use sqlx::Row;
use tokio::process::{Child, Command};

use crate::load::Ids;
use crate::world::World;

/// Fills `processed_event` up to so many rows, spread evenly over a day, so many days ago.
///
/// Without indexes while it does so: made afterwards they are as dense as those that grew with ascending keys, and more
/// dense than those that grew with random ones.
pub async fn fill(world: &World, from: u64, to: u64, ids: Ids, days_ago: u32) -> anyhow::Result<()> {
    let indexes = sqlx::query("select indexname, indexdef from pg_indexes where tablename = 'processed_event'")
        .fetch_all(&world.pool)
        .await?;
    let id = match ids {
        // 12 digits of time, the version, 3 of a counter, the variant, 15 that are random enough.
        Ids::V7 => {
            "(lpad(to_hex(1700000000000 + n / 1000), 12, '0') || '7' || lpad(to_hex(n % 1000), 3, '0')
                     || '8' || lpad(to_hex((n * 7919) % 281474976710656), 15, '0'))::uuid"
        }
        Ids::V4 => "gen_random_uuid()",
    };
    let mut statements = vec!["set maintenance_work_mem = '1GB'".to_owned()];
    statements.push("alter table processed_event drop constraint processed_event_pkey".to_owned());
    let others = indexes.iter().filter(|index| index.get::<&str, _>("indexname") != "processed_event_pkey");
    let others: Vec<(String, String)> = others.map(|index| (index.get("indexname"), index.get("indexdef"))).collect();
    statements.extend(others.iter().map(|(name, _)| format!("drop index {name}")));
    statements.push(format!(
        "insert into processed_event (event_id, processed_at)
         select {id}, now() - interval '{days_ago} days' + n * interval '1 day' / {to}
         from generate_series({from}::bigint, {to}::bigint - 1) as n"
    ));
    statements.push("alter table processed_event add primary key (event_id)".to_owned());
    statements.extend(others.into_iter().map(|(_, definition)| definition));
    let mut connection = world.pool.acquire().await?;
    for statement in statements {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut *connection).await?;
    }
    drop(connection);
    world.settle().await
}

/// A purge by hand, beside what else goes on.
pub struct Purge(Child);

impl Purge {
    pub fn start(world: &World) -> anyhow::Result<Self> {
        let mut purge = Command::new(&world.service);
        purge.args(["purge", "--horizon", "30d", "--set", "amqp.queue=bench.quorum"]);
        purge
            .env("DATABASE_URL", world.database.as_str())
            .env("AMQP_URL", world.broker.as_str())
            .env("RUST_LOG", "off");
        purge.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        Ok(Self(purge.spawn()?))
    }

    /// Ends it in the middle; what it has deleted stays deleted.
    ///
    /// # Errors
    /// It has ended by itself.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        if let Some(status) = self.0.try_wait()? {
            bail!("{status}");
        }
        Ok(self.0.kill().await?)
    }
}
