//! Carries out what was decided about a delivery: copy first, let go after.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use chrono::Utc;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::consumer::{Parcel, Receipt, Subscription, Unsettled};
use super::headers::{self, Stamp};
use super::{Publisher, Topology};
use crate::message::Verdict;
use crate::stock::harmless;
use crate::telemetry::{Held, Hold, Matters, Metrics, Monitor, Part, Step};

/// How many copies a worker has on their way at once, each on a channel of its own. A busy broker takes some 10 ms to
/// confirm one, so one at a time is a hundred a second, which a hundredth of the messages may well need.
const PLACERS: usize = 8;

/// Settles the deliveries of one subscription.
///
/// Acknowledgements go out at once. Copies are placed by a task of their own, a few at a time, those for each queue in
/// a lane: one that cannot be placed holds its original, and nobody else's.
#[derive(Debug)]
pub struct Settler {
    topology: Topology,
    unsettled: Arc<Unsettled>,
    copies: mpsc::UnboundedSender<(String, Copy)>, // bounded by the subscription's window, and `MAX_HELD`
    placing: Arc<AtomicUsize>,
    metrics: Metrics,
    task: AbortOnDropHandle<()>,
}

/// A copy to be placed, and the right to acknowledge its original then.
#[derive(Debug)]
struct Copy {
    parcel: Parcel,
    stamp: Stamp,
}

/// The copies that wait for one queue. When one cannot be placed the lane rests, and then the next one is tried, by
/// itself until one is placed.
struct Lane {
    copies: VecDeque<Copy>,
    /// How many are on their way.
    at_work: usize,
    pauses: ExponentialBackoff,
    due: Instant,
    /// Why the last one could not be placed.
    trouble: Option<String>,
}

impl Lane {
    fn new() -> Self {
        Self { copies: VecDeque::new(), at_work: 0, pauses: pauses(), due: Instant::now(), trouble: None }
    }

    /// Whether one of its copies may be sent on its way when it is due.
    fn may_advance(&self) -> bool {
        !self.copies.is_empty() && (self.at_work == 0 || self.trouble.is_none())
    }
}

impl Settler {
    /// Starts the task that places copies.
    pub fn new(subscription: &Subscription, publisher: Publisher, topology: Topology, monitor: &Monitor) -> Self {
        let (copies, waiting) = mpsc::unbounded_channel();
        let (unsettled, placing) = (subscription.unsettled(), Arc::new(AtomicUsize::new(0)));
        let metrics = monitor.metrics.clone();
        let placer = || Placer {
            publisher: publisher.clone(),
            unsettled: unsettled.clone(),
            placing: placing.clone(),
            metrics: metrics.clone(),
        };
        let desk = Desk {
            lanes: BTreeMap::new(),
            placers: std::iter::repeat_with(placer).take(PLACERS).collect(),
            held: metrics.held(),
            part: monitor.health.part("copies", Matters::Warning),
        };
        let task = AbortOnDropHandle::new(tokio::spawn(desk.run(waiting)));
        Self { topology, unsettled, copies, placing, metrics, task }
    }

    /// Acknowledges what is done with, and has copies made of the rest.
    pub async fn settle(&self, decided: impl IntoIterator<Item = (Parcel, Verdict)>) {
        let mut done = Vec::new();
        for (parcel, verdict) in decided {
            let (queue, stamp) = match verdict {
                Verdict::Ack => {
                    done.push(parcel.receipt);
                    continue;
                }
                Verdict::Retry { retry, delay, .. } => (self.topology.retry_queue(delay), Stamp::Retry(retry)),
                Verdict::Park { reason, detail, attempts } => {
                    (self.topology.failure_queue(), Stamp::Failure { reason, detail, attempts, at: Utc::now() })
                }
            };
            self.placing.fetch_add(1, Ordering::Relaxed);
            // Fails only when the task is gone; the original stays unsettled then, and `is_alive` tells.
            self.copies.send((queue, Copy { parcel, stamp })).ok();
        }
        if !done.is_empty() {
            let begun = Instant::now();
            acknowledge(&self.unsettled, done, &self.metrics).await;
            self.metrics.step(Step::Settlement, begun.elapsed());
        }
    }

    /// Whether copies are still made.
    pub fn is_alive(&self) -> bool {
        !self.copies.is_closed()
    }

    /// How many originals wait for their copy to be placed.
    pub fn placing(&self) -> usize {
        self.placing.load(Ordering::Relaxed)
    }

    /// Tries each copy that still waits once more, and ends. What could not be placed stays unsettled.
    pub async fn finish(self) {
        drop(self.copies);
        // A panic in the task is no reason to panic here: it leaves originals unsettled, and they come again.
        self.task.await.ok();
    }
}

/// Pauses between the attempts to place a copy in a queue that has failed to take one.
fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_secs(1))
        .with_max_delay(Duration::from_secs(10))
        .without_max_times()
        .build()
}

async fn acknowledge(unsettled: &Unsettled, receipts: Vec<Receipt>, metrics: &Metrics) {
    let lost = unsettled.acknowledge(receipts).await;
    if lost > 0 {
        metrics.acknowledgements_lost(lost);
        tracing::info!(lost, "acknowledgements not delivered, the messages will come again as duplicates");
    }
}

/// The task that places copies.
struct Desk {
    lanes: BTreeMap<String, Lane>,
    /// Those that have nothing to do.
    placers: Vec<Placer>,
    held: Held,
    part: Part,
}

impl Desk {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<(String, Copy)>) {
        let mut at_work = FuturesUnordered::new();
        loop {
            while let Some((queue, copy, mut placer)) = self.next_task() {
                at_work.push(async move {
                    let result = placer.place(&queue, copy).await;
                    (queue, result, placer)
                });
            }
            let next_due = if self.placers.is_empty() { None } else { self.next_due() };
            tokio::select! {
                biased;
                // New ones first, which costs no time: none may wait behind those of a queue that fails.
                copy = incoming.recv() => match copy {
                    Some((queue, copy)) => self.lanes.entry(queue).or_insert_with(Lane::new).copies.push_back(copy),
                    None => break,
                },
                Some((queue, result, placer)) = at_work.next() => {
                    self.placers.push(placer);
                    self.note(queue, result);
                }
                () = tokio::time::sleep_until(next_due.unwrap_or_else(Instant::now)), if next_due.is_some() => {}
            }
        }
        while let Some((queue, result, placer)) = at_work.next().await {
            self.placers.push(placer);
            self.note(queue, result);
        }
        self.place_all_once_more().await;
    }

    /// A copy whose turn has come, and somebody to place it.
    fn next_task(&mut self) -> Option<(String, Copy, Placer)> {
        if self.placers.is_empty() {
            return None;
        }
        let now = Instant::now();
        let ready = self.lanes.iter_mut().filter(|(_, lane)| lane.may_advance() && lane.due <= now);
        let (queue, lane) = ready.min_by_key(|(_, lane)| lane.due)?;
        let copy = lane.copies.pop_front()?;
        let placer = self.placers.pop()?;
        lane.at_work += 1;
        Some((queue.clone(), copy, placer))
    }

    fn next_due(&self) -> Option<Instant> {
        self.lanes.values().filter(|lane| lane.may_advance()).map(|lane| lane.due).min()
    }

    /// Takes note of a copy that was placed, or was not and is put at the end of its lane, which is put to rest.
    fn note(&mut self, queue: String, result: Result<(), (Copy, String)>) {
        let now = Instant::now();
        let lane = self.lanes.entry(queue).or_insert_with(Lane::new);
        lane.at_work = lane.at_work.saturating_sub(1);
        match result {
            Ok(()) => {
                lane.pauses = pauses();
                lane.due = now;
                lane.trouble = None;
            }
            Err((copy, error)) => {
                // Of several that failed together one is enough.
                if lane.due <= now {
                    lane.due = now + lane.pauses.next().unwrap_or_default();
                }
                let message_id = copy.parcel.original.message_id().map(harmless);
                lane.copies.push_back(copy);
                let (held, pause) = (lane.copies.len(), lane.due - now);
                tracing::warn!(message_id, error, held, ?pause, "copy not placed, original held");
                lane.trouble = Some(error);
            }
        }
        self.lanes.retain(|_, lane| !lane.copies.is_empty() || lane.at_work > 0);
        self.tell();
    }

    /// Says how many originals are held for a copy that could not be placed, and why.
    fn tell(&mut self) {
        let troubled = || self.lanes.values().filter(|lane| lane.trouble.is_some());
        self.held.set(troubled().map(|lane| lane.copies.len()).sum(), Hold::Copy);
        match troubled().find_map(|lane| lane.trouble.as_deref()) {
            Some(trouble) => self.part.blocked(trouble),
            None => self.part.free(),
        }
    }

    async fn place_all_once_more(self) {
        let mut shares: Vec<_> = self.placers.into_iter().map(|placer| (placer, Vec::new())).collect();
        let copies =
            self.lanes.into_iter().flat_map(|(queue, lane)| lane.copies.into_iter().map(move |c| (queue.clone(), c)));
        for (number, copy) in copies.enumerate() {
            let placer = number % shares.len();
            shares[placer].1.push(copy);
        }
        join_all(shares.into_iter().map(|(mut placer, copies)| async move {
            for (queue, copy) in copies {
                placer.place(&queue, copy).await.ok();
            }
        }))
        .await;
    }
}

/// Places one copy at a time, on a channel of its own.
struct Placer {
    publisher: Publisher,
    unsettled: Arc<Unsettled>,
    placing: Arc<AtomicUsize>,
    metrics: Metrics,
}

impl Placer {
    /// Places a copy and acknowledges its original, or gives the copy back for later.
    async fn place(&mut self, queue: &str, copy: Copy) -> Result<(), (Copy, String)> {
        let Copy { parcel, stamp } = &copy;
        // An original that cannot be acknowledged any more comes again, and gets its copy then.
        if parcel.receipt.is_valid() {
            let properties = |frame_max| headers::copy(&parcel.original, stamp, frame_max);
            if let Err(error) = self.publisher.publish(queue, properties, &parcel.body).await {
                return Err((copy, format!("cannot place a copy in queue {queue}: {error}")));
            }
            acknowledge(&self.unsettled, vec![copy.parcel.receipt], &self.metrics).await;
        }
        self.placing.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}
