//! Carries out what was decided about a delivery: copy first, let go after.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use chrono::Utc;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::consumer::{Parcel, Receipt, Subscription, Unsettled};
use super::headers::{self, Stamp};
use super::{Publisher, Topology};
use crate::message::Verdict;
use crate::stock::harmless;
use crate::telemetry::{Held, Hold, Matters, Metrics, Monitor, Part, Step};

/// Settles the deliveries of one subscription.
///
/// Acknowledgements go out at once. Copies are placed by a task of their own, one after another, those for each queue in
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

/// The copies that wait for one queue. When one cannot be placed the lane rests, and then the next one is tried.
struct Lane {
    copies: VecDeque<Copy>,
    pauses: ExponentialBackoff,
    due: Instant,
    /// Why the last one could not be placed.
    trouble: Option<String>,
}

impl Lane {
    fn new() -> Self {
        Self { copies: VecDeque::new(), pauses: pauses(), due: Instant::now(), trouble: None }
    }
}

impl Settler {
    /// Starts the task that places copies.
    pub fn new(subscription: &Subscription, publisher: Publisher, topology: Topology, monitor: &Monitor) -> Self {
        let (copies, waiting) = mpsc::unbounded_channel();
        let (unsettled, placing) = (subscription.unsettled(), Arc::new(AtomicUsize::new(0)));
        let metrics = monitor.metrics.clone();
        let desk = Desk {
            publisher,
            unsettled: unsettled.clone(),
            placing: placing.clone(),
            held: metrics.held(),
            part: monitor.health.part("copies", Matters::Warning),
            metrics: metrics.clone(),
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
    publisher: Publisher,
    unsettled: Arc<Unsettled>,
    placing: Arc<AtomicUsize>,
    metrics: Metrics,
    held: Held,
    part: Part,
}

impl Desk {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<(String, Copy)>) {
        let mut lanes: BTreeMap<String, Lane> = BTreeMap::new();
        loop {
            let due = lanes.values().map(|lane| lane.due).min();
            tokio::select! {
                biased;
                // New ones first, which costs no time: none may wait behind those of a queue that fails.
                copy = incoming.recv() => match copy {
                    Some((queue, copy)) => lanes.entry(queue).or_insert_with(Lane::new).copies.push_back(copy),
                    None => break,
                },
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let next = lanes.iter_mut().min_by_key(|(_, lane)| lane.due);
                    if let Some((queue, lane)) = next {
                        self.advance(queue, lane).await;
                    }
                    lanes.retain(|_, lane| !lane.copies.is_empty());
                    self.tell(&lanes);
                }
            }
        }
        for (queue, lane) in lanes {
            for copy in lane.copies {
                self.place(&queue, copy).await.ok();
            }
        }
    }

    /// Says how many originals are held for a copy that could not be placed, and why.
    fn tell(&mut self, lanes: &BTreeMap<String, Lane>) {
        let troubled = || lanes.values().filter(|lane| lane.trouble.is_some());
        self.held.set(troubled().map(|lane| lane.copies.len()).sum(), Hold::Copy);
        match troubled().find_map(|lane| lane.trouble.as_deref()) {
            Some(trouble) => self.part.blocked(trouble),
            None => self.part.free(),
        }
    }

    /// Places the lane's next copy; or puts it at the end, and the lane to rest.
    async fn advance(&mut self, queue: &str, lane: &mut Lane) {
        let Some(copy) = lane.copies.pop_front() else { return };
        match self.place(queue, copy).await {
            Ok(()) => {
                lane.pauses = pauses();
                lane.due = Instant::now();
                lane.trouble = None;
            }
            Err((copy, error)) => {
                let pause = lane.pauses.next().unwrap_or_default();
                lane.due = Instant::now() + pause;
                let message_id = copy.parcel.original.message_id().map(harmless);
                lane.copies.push_back(copy);
                let held = lane.copies.len();
                tracing::warn!(message_id, error, held, ?pause, "copy not placed, original held");
                lane.trouble = Some(error);
            }
        }
    }

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
