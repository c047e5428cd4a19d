//! What is measured, section by section.

use std::time::Duration;

use anyhow::{Context, ensure};

use crate::growth::{self, Purge};
use crate::latency::{self, Latencies};
use crate::load::{Ids, Loaded, Mix};
use crate::sample::Sample;
use crate::world::{Drain, Queue, Settings, Until, World};
use crate::yardstick::pgbench;

/// Runs of what is compared; the median counts.
const ROUNDS: u64 = 3;

/// Orders of a drain that a target is about: some eight seconds, in which the tenths of its two ends count for little.
const ORDERS: u64 = 400_000;

/// Orders of a drain over or beside millions of rows: some four seconds. A purge meanwhile finds enough to do.
const ORDERS_OVER: u64 = 200_000;

/// Numbers of workers that are compared; the default is among them.
pub const WORKERS: [u32; 4] = [1, 2, 3, 4];

/// Each load has numbers, and so ids, of its own.
const APART: u64 = 10_000_000;

/// Seconds of a measurement of latencies.
const SECONDS: u32 = 20;

/// Starts of the process.
const STARTS: u32 = 11;

/// Messages that wait before the longest drain.
const BACKLOG: u64 = 1_000_000;

/// Rows of `processed_event` before a drain.
const ROWS: [u64; 3] = [1_000_000, 10_000_000, 50_000_000];

/// Rows that are purged beside a drain.
const PURGED: u64 = 10_000_000;

/// The parts of a full run, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Section {
    /// The drains that the targets are about, beside their yardstick.
    Drains,
    /// Lone events, steady streams, starts.
    Latency,
    /// A million messages that wait.
    Backlog,
    /// Millions of rows.
    Growth,
    /// Millions of rows that are purged meanwhile.
    Purge,
    /// Workers and sizes of batches.
    Sizes,
}

/// Several drains of one kind.
#[derive(Clone, Debug, Default)]
pub struct Series(pub Vec<Drain>);

impl Series {
    /// Messages a second.
    pub fn rate(&self) -> Sample {
        self.0.iter().map(Drain::rate).collect()
    }

    /// Milliseconds of CPU for a thousand messages.
    pub fn cost(&self, of: impl Fn(&Drain) -> Duration) -> Sample {
        self.0.iter().map(|drain| drain.cost(of(drain))).collect()
    }

    /// MiB.
    pub fn peak_memory(&self) -> Sample {
        let mib = |drain: &Drain| f64::from(u32::try_from(drain.peak_memory / 1024).unwrap_or(u32::MAX)) / 1024.0;
        self.0.iter().map(mib).collect()
    }
}

/// The same work on different things, side by side in each round.
#[derive(Debug, Default)]
pub struct Drains {
    /// pgbench with 8 clients, one transaction an event: the yardstick.
    pub pgbench: Sample,
    /// Its mean before and after each drain of a quorum queue, and of the duplicates.
    pub beside_quorum: Sample,
    /// Its mean before and after each drain of a classic queue.
    pub beside_classic: Sample,
    pub quorum: Series,
    pub classic: Series,
    pub duplicates: Series,
    pub failing: Series,
    pub malformed: Series,
}

/// Drains a queue that holds what `mix` says, from empty tables.
async fn fresh(
    world: &World,
    queue: Queue,
    first: u64,
    orders: u64,
    mix: Mix,
    settings: Settings<'_>,
) -> anyhow::Result<(Loaded, Drain)> {
    world.empty_tables().await?;
    let loaded = world.load(queue, first, orders, mix).await?;
    let until = if loaded.failing > 0 { Until::Applied(loaded.events) } else { Until::Empty };
    if loaded.failing > 0 {
        world.let_some_fail(loaded.failing).await?;
    }
    let drain = world.drain(queue, loaded, settings, until).await?;
    world.verify(queue, loaded).await?;
    if loaded.failing > 0 {
        world.let_none_fail().await?;
    }
    Ok((loaded, drain))
}

pub async fn drains(world: &World) -> anyhow::Result<Drains> {
    let mut drains = Drains::default();
    for round in 0..ROUNDS {
        let first = round * APART;
        // What is compared stands side by side.
        let before = pgbench(world, 8, 1).await?;
        let failing = Mix { failing_per_mille: 10, ..Mix::ORDINARY };
        drains.failing.0.push(fresh(world, Queue::Quorum, first, ORDERS, failing, &[]).await?.1);
        let (loaded, drain) = fresh(world, Queue::Quorum, first, ORDERS, Mix::ORDINARY, &[]).await?;
        drains.quorum.0.push(drain);
        // The same once more, over the rows of the first time.
        let again = world.load(Queue::Quorum, first, ORDERS, Mix { copies_percent: 0, ..Mix::ORDINARY }).await?;
        drains.duplicates.0.push(world.drain(Queue::Quorum, again, &[], Until::Empty).await?);
        world.verify(Queue::Quorum, loaded).await?;
        let between = pgbench(world, 8, 1).await?;
        drains.classic.0.push(fresh(world, Queue::Classic, first, ORDERS, Mix::ORDINARY, &[]).await?.1);
        let after = pgbench(world, 8, 1).await?;
        let malformed = Mix { malformed_per_mille: 1, ..Mix::ORDINARY };
        drains.malformed.0.push(fresh(world, Queue::Quorum, first, ORDERS, malformed, &[]).await?.1);

        [before, between, after].into_iter().for_each(|rate| drains.pgbench.push(rate));
        drains.beside_quorum.push(f64::midpoint(before, between));
        drains.beside_classic.push(f64::midpoint(between, after));
        println!("drains, round {} of {ROUNDS}", round + 1);
    }
    Ok(drains)
}

/// One combination of settings.
#[derive(Debug)]
pub struct Size {
    pub queue: Queue,
    pub workers: u32,
    pub batch_size: u32,
    pub series: Series,
}

/// Throughput by workers and sizes of batches, and what pgbench makes of the same.
#[derive(Debug, Default)]
pub struct Sizes {
    pub service: Vec<Size>,
    /// Clients, events of a transaction, events a second.
    pub pgbench: Vec<(u32, u32, f64)>,
}

pub async fn sizes(world: &World) -> anyhow::Result<Sizes> {
    let mut sizes = Sizes::default();
    for (clients, events) in [(1, 1), (8, 1), (32, 1), (1, 100), (2, 100), (4, 100)] {
        sizes.pgbench.push((clients, events, pgbench(world, clients, events).await?));
    }
    for queue in [Queue::Quorum, Queue::Classic] {
        for workers in WORKERS {
            for batch_size in [1, 10, 100, 500, 1000] {
                sizes.service.push(Size { queue, workers, batch_size, series: Series::default() });
            }
        }
    }
    // Round by round: a machine that is slow for some minutes is so to all of them.
    for round in 0..ROUNDS {
        for Size { queue, workers, batch_size, series } in &mut sizes.service {
            let settings = [
                ("consume.workers", workers.to_string()),
                ("consume.batch_size", batch_size.to_string()),
                ("consume.prefetch", (2 * *batch_size).max(20).to_string()),
            ];
            // About as long each.
            let orders = match *batch_size {
                1 => 5_000,
                10 => 30_000,
                _ => 100_000,
            };
            series.0.push(fresh(world, *queue, round * APART, orders, Mix::ORDINARY, &settings).await?.1);
        }
        println!("sizes, round {} of {ROUNDS}", round + 1);
    }
    Ok(sizes)
}

/// From publish to commit, and what that is compared to.
#[derive(Debug)]
pub struct Latency {
    pub queue: Queue,
    pub transaction: Latencies,
    pub round_trip: Latencies,
    /// By events a second.
    pub commit: Vec<(u32, Latencies)>,
    pub start: Latencies,
}

pub async fn latency(world: &World) -> anyhow::Result<Vec<Latency>> {
    let mut all = Vec::new();
    for queue in [Queue::Quorum, Queue::Classic] {
        let mut commit = Vec::new();
        for a_second in [10, 100, 1000] {
            commit.push((a_second, latency::publish_to_commit(world, queue, a_second, SECONDS).await?));
        }
        all.push(Latency {
            queue,
            transaction: latency::bare_transaction(world, 10, SECONDS).await?,
            round_trip: latency::bare_round_trip(world, queue, 10, SECONDS).await?,
            commit,
            start: latency::start_to_commit(world, queue, STARTS).await?,
        });
    }
    Ok(all)
}

pub async fn backlog(world: &World) -> anyhow::Result<Drain> {
    Ok(fresh(world, Queue::Quorum, 100 * APART, BACKLOG, Mix::ORDINARY, &[]).await?.1)
}

/// Drains over a table that is full already.
#[derive(Debug, Default)]
pub struct Growth {
    pub empty: Series,
    /// Versions of ids, rows.
    pub filled: Vec<(Ids, u64, Series)>,
}

/// Drains over rows that are old enough to be purged.
#[derive(Debug, Default)]
pub struct Purged {
    /// While nobody purges them.
    pub before: Series,
    /// While they are purged.
    pub meanwhile: Series,
}

/// Drains over the rows that are there, beside a purge if there is to be one; its own rows are few beside them.
async fn over(world: &World, first: u64, ids: Ids, purge: bool) -> anyhow::Result<Drain> {
    const YOUNG: &str = "select count(*) from processed_event where processed_at > now() - interval '1 day'";

    world.execute("truncate reservation, order_status").await?;
    let loaded = world.load(Queue::Quorum, first, ORDERS_OVER, Mix { ids, ..Mix::ORDINARY }).await?;
    let before = world.count(YOUNG).await?;
    world.settle().await?;
    let purge = if purge { Some(Purge::start(world)?) } else { None };
    let drain = world.drain(Queue::Quorum, loaded, &[], Until::Empty).await?;
    if let Some(purge) = purge {
        purge.stop().await.context("the purge ended before the drain")?;
    }
    let applied = world.count(YOUNG).await? - before;
    ensure!(applied == loaded.events, "{applied} events were applied instead of {}", loaded.events);
    Ok(drain)
}

pub async fn growth(world: &World) -> anyhow::Result<Growth> {
    let mut growth = Growth::default();
    let mut first = 200 * APART;
    let mut next = || {
        first += APART;
        first
    };
    // Empty ones before, between and after the full ones: what the machine gives changes within minutes.
    world.empty_tables().await?;
    growth.empty.0.push(over(world, next(), Ids::V7, false).await?);
    for ids in [Ids::V7, Ids::V4] {
        world.empty_tables().await?;
        let mut filled = 0;
        for rows in ROWS {
            growth::fill(world, filled, rows, ids, 20).await?;
            filled = rows;
            let mut series = Series::default();
            for _ in 0..ROUNDS {
                series.0.push(over(world, next(), ids, false).await?);
            }
            println!("{rows} rows with {ids:?} ids: {}/s", series.rate());
            growth.filled.push((ids, rows, series));
        }
        world.empty_tables().await?;
        growth.empty.0.push(over(world, next(), Ids::V7, false).await?);
    }
    Ok(growth)
}

pub async fn purged(world: &World) -> anyhow::Result<Purged> {
    let mut purged = Purged::default();
    world.empty_tables().await?;
    growth::fill(world, 0, PURGED, Ids::V7, 40).await?;
    for round in 0..ROUNDS {
        let first = (400 + 2 * round) * APART;
        purged.before.0.push(over(world, first, Ids::V7, false).await?);
        // A part of the rows goes each time; there are enough of them for all rounds.
        purged.meanwhile.0.push(over(world, first + APART, Ids::V7, true).await?);
    }
    Ok(purged)
}
