//! Carries out what was decided about a delivery: copy first, let go after.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use chrono::Utc;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::consumer::{Parcel, Receipt, Subscription, Unsettled};
use super::headers::{Stamp, copy};
use super::{Publisher, Topology};
use crate::message::Verdict;
use crate::stock::harmless;

/// Settles the deliveries of one subscription.
///
/// Acknowledgements go out at once. Copies are placed one after another by a task of their own: one that cannot be
/// placed holds its original, and nobody else's.
#[derive(Debug)]
pub struct Settler {
    topology: Topology,
    unsettled: Arc<Unsettled>,
    copies: mpsc::UnboundedSender<Copy>, // bounded by the subscription's window
    placing: Arc<AtomicUsize>,
    task: AbortOnDropHandle<Publisher>,
}

/// A copy to be placed, and the right to acknowledge its original then.
#[derive(Debug)]
struct Copy {
    parcel: Parcel,
    queue: String,
    stamp: Stamp,
    pauses: ExponentialBackoff,
    due: Instant,
}

impl Settler {
    /// Starts the task that places copies.
    pub fn new(subscription: &Subscription, publisher: Publisher, topology: Topology) -> Self {
        let (copies, waiting) = mpsc::unbounded_channel();
        let (unsettled, placing) = (subscription.unsettled(), Arc::new(AtomicUsize::new(0)));
        let desk = Desk { publisher, unsettled: unsettled.clone(), placing: placing.clone() };
        Self { topology, unsettled, copies, placing, task: AbortOnDropHandle::new(tokio::spawn(desk.run(waiting))) }
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
            let copy = Copy { parcel, queue, stamp, pauses: pauses(), due: Instant::now() };
            // Fails only when the task is gone; the original stays unsettled then, and `is_alive` tells.
            self.copies.send(copy).ok();
        }
        acknowledge(&self.unsettled, done).await;
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

/// Pauses between the attempts to place one copy.
fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_secs(1))
        .with_max_delay(Duration::from_secs(10))
        .without_max_times()
        .build()
}

async fn acknowledge(unsettled: &Unsettled, receipts: Vec<Receipt>) {
    let lost = unsettled.acknowledge(receipts).await;
    if lost > 0 {
        tracing::info!(lost, "acknowledgements not delivered, the messages will come again as duplicates");
    }
}

/// The task that places copies.
struct Desk {
    publisher: Publisher,
    unsettled: Arc<Unsettled>,
    placing: Arc<AtomicUsize>,
}

impl Desk {
    async fn run(mut self, mut incoming: mpsc::UnboundedReceiver<Copy>) -> Publisher {
        let mut waiting: Vec<Copy> = Vec::new();
        loop {
            let next = waiting.iter().map(|copy| copy.due).min();
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let now = Instant::now();
                    for copy in waiting.extract_if(.., |copy| copy.due <= now).collect::<Vec<_>>() {
                        waiting.extend(self.place(copy).await);
                    }
                }
                copy = incoming.recv() => match copy {
                    Some(copy) => waiting.extend(self.place(copy).await),
                    None => break,
                },
            }
        }
        for copy in waiting {
            self.place(copy).await;
        }
        self.publisher
    }

    /// Places a copy and acknowledges its original, or gives the copy back for later.
    async fn place(&mut self, mut waiting: Copy) -> Option<Copy> {
        let Copy { parcel, queue, stamp, .. } = &waiting;
        let properties = |frame_max| copy(&parcel.original, stamp, frame_max);
        let placed = self.publisher.publish(queue, properties, &parcel.body).await;
        match placed {
            Ok(()) => {
                acknowledge(&self.unsettled, vec![waiting.parcel.receipt]).await;
                self.placing.fetch_sub(1, Ordering::Relaxed);
                None
            }
            Err(error) => {
                let pause = waiting.pauses.next().unwrap_or_default();
                let error = format!("{error:#}");
                let message_id = waiting.parcel.original.message_id().map(harmless);
                tracing::warn!(message_id, error, ?pause, "copy not placed, original held");
                waiting.due = Instant::now() + pause;
                Some(waiting)
            }
        }
    }
}
