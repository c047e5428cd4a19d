//! Was every event applied once, and nothing lost? And is everybody well?

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use anyhow::ensure;
use sqlx::PgConnection;
use tokio::time::{Instant, sleep};

use crate::faults::World;
use crate::logs::Log;
use crate::published::Published;
use crate::stock::{self, FAILURE_QUEUE, Queues};
use crate::{LONGEST_RECOVERY, PASSWORD};

/// The longest that it may take in the end until nothing waits. The broker tries a dead letter again after 3 minutes.
const LONGEST_DRAIN: Duration = Duration::from_secs(240);

/// The longest that a session without work may be seen in a transaction: none is, but the look is not the moment's.
const PATIENCE: Duration = Duration::from_secs(5);

/// Lines of one replica in one minute, but for those about single messages.
const MOST_LINES: usize = 60;

/// How many discrepancies of one line are shown.
const SHOWN: usize = 10;

/// One line of the audit.
#[derive(Debug)]
pub struct Finding {
    what: &'static str,
    figures: String,
    wrong: Vec<String>,
}

impl Finding {
    pub fn new(what: &'static str, figures: impl Into<String>, wrong: Vec<String>) -> Self {
        Self { what, figures: figures.into(), wrong }
    }

    pub fn is_right(&self) -> bool {
        self.wrong.is_empty()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.is_right() { "ok   " } else { "WRONG" };
        write!(f, "{mark} {:<32} {}", self.what, self.figures)?;
        for wrong in self.wrong.iter().take(SHOWN) {
            write!(f, "\n        {wrong}")?;
        }
        match self.wrong.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n        and {more} more"),
        }
    }
}

/// Waits until nothing is left to do; tells how long that took.
pub async fn drain(world: &World, published: &Published<'_>) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let mut connection = stock::connect(&world.servers.database).await?;
    let mut is_drained = async || {
        let applied = stock::applied(&mut connection).await?.into_iter().collect();
        anyhow::Ok(published.missing(&applied).is_empty() && queues_with_messages(world).await?.is_empty())
    };
    while begun.elapsed() < LONGEST_DRAIN && !is_drained().await? {
        sleep(Duration::from_millis(500)).await;
    }
    Ok(begun.elapsed())
}

/// Stops the replicas, one after another, and compares what was published with what became of it.
pub async fn audit(world: &World, published: &Published<'_>) -> anyhow::Result<Vec<Finding>> {
    let servers = &world.servers;
    let queues = Queues::connect(&servers.broker).await?;
    let mut connection = stock::connect(&servers.database).await?;
    let mut findings = vec![open_transactions(&mut connection).await?, replicas(world, &queues).await?];

    let applied = stock::applied(&mut connection).await?;
    let distinct: HashSet<_> = applied.iter().copied().collect();
    findings.extend([
        published.events(&applied),
        published.goods(&distinct, stock::reservations(&mut connection).await?),
        published.states(&distinct, stock::statuses(&mut connection).await?),
        published.failures(&queues.take_failed().await?),
    ]);
    findings.push(Finding::new("queues", "all empty but for the failure queue", queues_with_messages(world).await?));
    findings.extend(what_was_said(world).await?);
    Ok(findings)
}

/// Where messages still have to be worked on, and how many.
async fn queues_with_messages(world: &World) -> anyhow::Result<Vec<String>> {
    let queues = world.servers.queues().await?;
    ensure!(queues.contains_key(FAILURE_QUEUE), "no {FAILURE_QUEUE} among {queues:?}");
    let left = queues.into_iter().filter(|(queue, messages)| *messages > 0 && queue != FAILURE_QUEUE);
    Ok(left.map(|(queue, messages)| format!("{messages} in {queue}")).collect())
}

async fn open_transactions(connection: &mut PgConnection) -> anyhow::Result<Finding> {
    let begun = Instant::now();
    let mut open = stock::open_transactions(connection).await?;
    while open > 0 && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(100)).await;
        open = stock::open_transactions(connection).await?;
    }
    let wrong = (open > 0).then(|| format!("{open} sessions are idle in transaction")).into_iter().collect();
    Ok(Finding::new("transactions", "none left open", wrong))
}

/// Each replica lives, consumes, and stops when it is asked to.
async fn replicas(world: &World, queues: &Queues) -> anyhow::Result<Finding> {
    let mut wrong = world.watch.dead();
    let ready = world.watch.all_ready(LONGEST_RECOVERY).await;
    if ready.is_none() {
        wrong.push(format!("not all are ready after {LONGEST_RECOVERY:?}"));
    }
    let mut consumers = queues.consumers().await?;
    let figures = format!("{} ready, with {consumers} consumers, and stopped in order", world.replicas.len());
    for (replica, number) in world.replicas.iter().zip(1..) {
        let mut replica = replica.lock().await;
        replica.stop().await?;
        wrong.append(&mut replica.troubles);
        let left = queues.consumers().await?;
        if left >= consumers {
            wrong.push(format!("replica {number} did not consume"));
        }
        consumers = left;
    }
    Ok(Finding::new("replicas", figures, wrong))
}

/// Few lines, no panic, no password; and no delivery that was settled twice, or on another channel than its own.
async fn what_was_said(world: &World) -> anyhow::Result<[Finding; 2]> {
    let password = world.servers.database.password().unwrap_or_default();
    let (mut busiest, mut retries, mut wrong) = (0, 0, Vec::new());
    for replica in &world.replicas {
        let mut log = Log::read(&replica.lock().await.log, &[PASSWORD, password])?;
        if log.busiest_minute >= MOST_LINES {
            wrong.push(format!("{} lines in a minute", log.busiest_minute));
        }
        wrong.append(&mut log.wrong);
        busiest = busiest.max(log.busiest_minute);
        retries += log.retries;
    }
    let replicas = format!("at most {busiest} lines in a minute, but for {retries} retries");

    let broker = world.servers.broker_log()?;
    let unknown: Vec<_> =
        broker.lines().filter(|line| line.contains("unknown delivery tag")).map(str::to_owned).collect();
    Ok([
        Finding::new("logs of the replicas", replicas, wrong),
        Finding::new("log of the broker", format!("{} lines", broker.lines().count()), unknown),
    ])
}
