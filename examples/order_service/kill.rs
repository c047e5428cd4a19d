//! Kills a worker between its commit and its acknowledgement, and proves it by counting.
//!
//! Nothing in a worker says "now". But its commits can be seen from outside, and a kill
//! right behind one finds some acknowledgement unsent more often than not. Whether it did
//! is counted afterwards, when the broker has taken back what the dead worker held: every
//! message that is gone from the queue was acknowledged, every row of `processed_event`
//! was committed, and if there are more rows than messages gone, acknowledgements were lost.

use crate::{
    broker::{Broker, Depth},
    relay,
    report::grouped,
    shop::Shop,
};
use anyhow::{Context as _, Result, bail, ensure};
use chrono::{DateTime, Utc};
use std::{
    fs::File,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tokio::time::sleep;

/// A worker commits or does something else worth telling within this time.
const PATIENCE: Duration = Duration::from_secs(30);
/// A worker that has committed nothing for so long has nothing to do.
const IDLE: Duration = Duration::from_millis(500);
/// Fewer events in the queue than this are not a load.
const LOAD: u32 = 1000;

pub(crate) struct Trial {
    pub(crate) kills: u32,
    pub(crate) lost: i64,
}

/// Starts workers, one after another, and kills each right after a commit, until an
/// acknowledgement is lost.
pub(crate) async fn kill_workers(
    shop: &Shop,
    broker: &Broker,
    tries: u32,
    command: &[String],
    log: Option<&Path>,
) -> Result<Trial> {
    // With copies or somebody else's messages in the queue the count would say nothing.
    let before = settled_depth(broker).await?;
    ensure!(
        before == Depth::default(),
        "the queue {} must be empty and without consumers, not with {} messages and {} consumers",
        broker.queue(),
        before.messages,
        before.consumers
    );
    let start = Count::take(shop, broker, before).await?;

    for kills in 1..=tries {
        if broker.depth(broker.queue()).await?.messages < LOAD {
            shop.place(usize::try_from(2 * LOAD)?).await?;
            relay::relay(shop, broker).await?;
        }
        let mut worker = Worker::start(command, log)?;
        kill_after_a_commit(shop, &mut worker).await?;
        let now = Count::take(shop, broker, settled_depth(broker).await?).await?;
        let (commits, settled) = (now.rows - start.rows, now.gone - start.gone);
        let lost = commits - settled;
        ensure!(lost >= 0, "{} messages were acknowledged without a commit: their events are lost", -lost);
        sqlx::query("insert into shop.worker_kill (commits, settled) values ($1, $2)")
            .bind(commits)
            .bind(settled)
            .execute(shop.pool())
            .await?;
        println!(
            "kill {kills}: {} events committed since the first, {} messages gone, {lost} acknowledgements lost",
            grouped(commits),
            grouped(settled)
        );
        if lost > 0 {
            return Ok(Trial { kills, lost });
        }
    }
    Ok(Trial { kills: tries, lost: 0 })
}

async fn kill_after_a_commit(shop: &Shop, worker: &mut Worker) -> Result<()> {
    let newest = || sqlx::query_scalar("select processed_at from processed_event order by processed_at desc limit 1");
    let mut connection = shop.pool().acquire().await?;
    let mut seen: Option<DateTime<Utc>> = None;
    let mut first_look = true;
    // Not always the first commit: batches grow, and so does the chance.
    let mut commits_to_see = fastrand::u32(2..=8);
    let mut last_commit = None;
    let started = Instant::now();
    loop {
        let now = newest()
            .fetch_optional(&mut *connection)
            .await
            .context("cannot read processed_event: have the stock service's migrations run?")?;
        if now != seen && !first_look {
            commits_to_see -= 1;
            last_commit = Some(Instant::now());
        }
        (seen, first_look) = (now, false);
        // The queue may run dry before that: then this kill finds nothing, and the next may.
        if commits_to_see == 0 || last_commit.is_some_and(|last| last.elapsed() > IDLE) {
            return worker.kill();
        }
        if let Some(status) = worker.0.try_wait()? {
            bail!("the worker ended by itself before it could be killed: {status}");
        }
        ensure!(started.elapsed() < PATIENCE, "the worker has committed nothing for {} s", PATIENCE.as_secs());
    }
}

/// What stands on both sides: rows committed, and messages settled for good.
struct Count {
    rows: i64,
    gone: i64,
}

impl Count {
    async fn take(shop: &Shop, broker: &Broker, main: Depth) -> Result<Self> {
        let rows = sqlx::query_scalar("select count(*) from processed_event").fetch_one(shop.pool()).await?;
        let published: i64 =
            sqlx::query_scalar("select count(confirmed_at) from shop.publication").fetch_one(shop.pool()).await?;
        let rest = broker.depths().await?;
        let waiting = main.messages + rest.retry + rest.failed;
        Ok(Self { rows, gone: published - i64::from(waiting) })
    }
}

/// The depth of the queue once the broker has taken back what a dead worker held.
async fn settled_depth(broker: &Broker) -> Result<Depth> {
    const LOOKS: u32 = 5;
    let deadline = Instant::now() + PATIENCE;
    let (mut last, mut same) = (None, 0);
    while Instant::now() < deadline {
        let depth = broker.depth(broker.queue()).await?;
        same = if depth.consumers == 0 && last == Some(depth) { same + 1 } else { 0 };
        if same == LOOKS {
            return Ok(depth);
        }
        last = Some(depth);
        sleep(Duration::from_millis(20)).await;
    }
    bail!("the queue {} does not come to rest: somebody publishes or consumes", broker.queue())
}

/// A worker that doesn't outlive us, whatever goes wrong here.
struct Worker(Child);

impl Worker {
    fn start(command: &[String], log: Option<&Path>) -> Result<Self> {
        let (program, arguments) = command.split_first().context("no command to start a worker with")?;
        let log = match log {
            Some(path) => Stdio::from(
                File::options()
                    .create(true)
                    .append(true)
                    .open(path)
                    .with_context(|| format!("cannot write the log {}", path.display()))?,
            ),
            None => Stdio::inherit(),
        };
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        Ok(Self(child))
    }

    /// SIGKILL: no handler of the worker hears of it.
    fn kill(&mut self) -> Result<()> {
        self.0.kill().context("cannot kill the worker")?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After `kill` both do nothing; before it, the error that led here is told instead.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
