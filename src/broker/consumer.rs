//! Deliveries in: a window that opens slowly, batches of what is waiting, and the right to settle each once.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use futures_util::future::join_all;
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::{DeliveryTag, FieldTable};
use lapin::{Acker, Channel, Connection, Consumer};

use super::answer;
use super::headers::Original;
use crate::message::{Message, Undecodable, decode};
use crate::stock::harmless;
use crate::telemetry::Metrics;

/// The bounds of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Messages of a batch.
    pub messages: usize,
    /// Bytes of a body.
    pub body: usize,
}

/// The most lines of one transaction. Beyond a few thousand rows a statement gains nothing more, and the work that a
/// failure throws away grows. One order may have as many by itself.
const MAX_LINES: usize = 10_000;

/// How much the window grows with each settled batch. The broker gives back the messages of a process that died in any
/// order, so those around what killed it may share its next window, too: of 5,000 that wait, one dies with it at most 10
/// times of 30 in 3,000 simulated runs; if the window grew fourfold, 21 times.
const GROWTH: u16 = 2;

/// The most originals that may wait for a copy when a window that is opened anew for others is full of such, too. Bounds
/// the memory: what else the channel has delivered is at most a window.
const MAX_HELD: usize = 10_000;

/// A delivery: what it means to us, and everything that it takes to settle it.
#[derive(Debug)]
pub struct Received {
    /// What it means.
    pub content: Result<Message, Undecodable>,
    /// How it came.
    pub parcel: Parcel,
}

/// A delivery as it came, and the right to settle it.
#[derive(Debug)]
pub struct Parcel {
    /// Retries behind it.
    pub retries: u32,
    /// Properties, headers and address.
    pub original: Original,
    /// The bytes as they came.
    pub body: Vec<u8>,
    /// The right to settle it.
    pub(super) receipt: Receipt,
}

/// The right to settle one delivery, once, on the channel that it came by.
#[derive(Debug)]
#[must_use]
pub(super) struct Receipt {
    tag: DeliveryTag,
    acker: Acker,
}

impl Receipt {
    /// Whether the channel that it came by is still there.
    pub(super) fn is_valid(&self) -> bool {
        self.acker.usable()
    }
}

/// One worker's consumer, on a channel of its own.
#[derive(Debug)]
pub struct Subscription {
    channel: Channel,
    consumer: Consumer,
    queue: String,
    window: u16,
    prefetch: u16,
    /// Whether the consumer was ended, so that another one is due.
    paused: bool,
    /// How many originals were held when the window was opened; they are no part of it.
    held: usize,
    limits: Limits,
    /// The tag of the last delivery; a channel counts its deliveries from 1.
    last_tag: DeliveryTag,
    metrics: Metrics,
    /// Taken from an earlier consumer of this channel, or one too many for the last batch.
    waiting: VecDeque<Received>,
    unsettled: Arc<Unsettled>,
}

impl Subscription {
    /// Subscribes with a window of one message.
    ///
    /// A message that kills the process, or its connection, takes all that is in the window with it, and each such
    /// return counts towards the broker's delivery limit. So the window grows only with what has been settled, and the
    /// culprit comes to stand alone before its neighbours' counts are worth mentioning.
    ///
    /// # Errors
    /// The broker's.
    pub async fn open(
        connection: &Connection,
        queue: &str,
        prefetch: u16,
        limits: Limits,
        metrics: Metrics,
    ) -> anyhow::Result<Self> {
        let channel = answer(connection.create_channel()).await?;
        let consumer = subscribe(&channel, queue, 1).await?;
        Ok(Self {
            channel,
            consumer,
            queue: queue.to_owned(),
            window: 1,
            prefetch,
            paused: false,
            held: 0,
            limits,
            last_tag: 0,
            metrics,
            waiting: VecDeque::new(),
            unsettled: Arc::default(),
        })
    }

    /// Waits for a message and takes what else is here by then, never waiting for more.
    ///
    /// Cancel safe: a message is taken only when the batch is returned.
    ///
    /// # Errors
    /// The subscription has ended, whoever ended it and whether or not with an error.
    pub async fn next_batch(&mut self) -> anyhow::Result<Vec<Received>> {
        if self.waiting.is_empty() {
            let delivery = self.consumer.next().await;
            self.take(delivery)?;
        }
        let mut batch = Vec::new();
        let mut lines = 0;
        loop {
            while batch.len() < self.limits.messages {
                let Some(next) = self.waiting.front() else { break };
                lines += next.content.as_ref().map_or(0, |message| message.event.lines());
                if lines > MAX_LINES && !batch.is_empty() {
                    return Ok(batch);
                }
                batch.extend(self.waiting.pop_front());
            }
            if batch.len() == self.limits.messages {
                return Ok(batch);
            }
            match self.consumer.next().now_or_never() {
                Some(delivery) => self.take(delivery)?,
                None => return Ok(batch),
            }
        }
    }

    /// Without a wait between the stream and the record of what is unsettled: a delivery that is in neither would be
    /// acknowledged by the next frame that reaches beyond it.
    fn take(&mut self, delivery: Option<lapin::Result<Delivery>>) -> anyhow::Result<()> {
        let delivery = match delivery {
            Some(Ok(delivery)) => delivery,
            Some(Err(error)) => return Err(anyhow!("the subscription ended: {error}")),
            None => return Err(anyhow!("the broker cancelled the subscription")),
        };
        // A gap: one was lost on the way, and would stay unsettled for as long as this channel lives.
        ensure!(delivery.delivery_tag == self.last_tag + 1, "a delivery was lost on the way");
        self.last_tag = delivery.delivery_tag;
        self.metrics.delivered();
        // Left over from a connection that is gone: it will come again.
        if delivery.acker.usable() {
            self.unsettled.tags().insert(delivery.delivery_tag);
            self.waiting.push_back(Received::new(delivery, self.limits.body));
        }
        Ok(())
    }

    /// Whether what it delivered can still be settled.
    pub fn is_alive(&self) -> bool {
        self.channel.status().connected()
    }

    /// Whether the window is as wide as it gets.
    pub fn is_wide(&self) -> bool {
        self.window == self.prefetch
    }

    /// Ends the consumer if its window has yet to grow: now, before its batch is settled, its window is mostly full and
    /// hardly anything on its way. What is on its way to a consumer that has ended goes back to the queue, which counts
    /// that towards the delivery limit.
    ///
    /// # Errors
    /// The broker's.
    pub async fn pause_to_grow(&mut self) -> anyhow::Result<()> {
        match self.is_wide() {
            true => Ok(()),
            false => self.unsubscribe().await,
        }
    }

    /// Widens the window when a batch was `settled`; or opens a new one when messages that cannot be settled yet have
    /// used it up: `held` of them, wherever they are.
    ///
    /// By a new consumer on the channel: the broker does not widen that of a running one.
    ///
    /// # Errors
    /// The broker's.
    pub async fn adjust_window(&mut self, settled: bool, held: usize) -> anyhow::Result<()> {
        self.held = self.held.min(held);
        let window = usize::from(self.window);
        // As long as something is waiting here, none is missed.
        let used_up = self.waiting.is_empty() && held - self.held >= window.div_ceil(2) && held + window <= MAX_HELD;
        let grows = settled && !self.is_wide();
        if !grows && !used_up && !self.paused {
            return Ok(());
        }
        self.unsubscribe().await?;
        if grows {
            self.window = self.window.saturating_mul(GROWTH).min(self.prefetch);
        }
        self.held = held;
        self.subscribe_again().await
    }

    /// Ends the consumer, if it has not ended, and keeps what it had delivered by then.
    ///
    /// # Errors
    /// The broker's.
    pub async fn unsubscribe(&mut self) -> anyhow::Result<()> {
        if self.paused {
            return Ok(());
        }
        answer(self.channel.basic_cancel(self.consumer.tag(), BasicCancelOptions::default())).await?;
        self.paused = true;
        while let Some(Some(delivery)) = self.consumer.next().now_or_never() {
            self.take(Some(delivery))?;
        }
        Ok(())
    }

    async fn subscribe_again(&mut self) -> anyhow::Result<()> {
        self.consumer = subscribe(&self.channel, &self.queue, self.window).await?;
        self.paused = false;
        Ok(())
    }

    /// Whether the queue is empty, and nothing of it is on its way here. Ends the consumer to be sure, and opens it
    /// again when the queue is not.
    ///
    /// # Errors
    /// The broker's.
    pub async fn is_drained(&mut self) -> anyhow::Result<bool> {
        if self.ready_messages().await? > 0 {
            return Ok(false);
        }
        self.unsubscribe().await?;
        if self.waiting.is_empty() && self.ready_messages().await? == 0 {
            return Ok(true);
        }
        self.subscribe_again().await?;
        Ok(false)
    }

    async fn ready_messages(&self) -> anyhow::Result<u32> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue =
            answer(self.channel.queue_declare(self.queue.as_str().into(), passive, FieldTable::default())).await?;
        Ok(queue.message_count())
    }

    /// The record of what this channel has delivered and nobody has settled.
    pub(super) fn unsettled(&self) -> Arc<Unsettled> {
        self.unsettled.clone()
    }

    /// Gives everything back that is not settled.
    ///
    /// By nack, which RabbitMQ 4.3 does not count towards the delivery limit; before that every return counts.
    ///
    /// # Errors
    /// The broker's; closing the connection gives everything back as well.
    pub async fn give_back(self) -> anyhow::Result<()> {
        let all = BasicNackOptions { multiple: true, requeue: true };
        if !self.unsettled.tags().is_empty() {
            answer(self.channel.basic_nack(0, all)).await?; // tag 0: all of the channel
        }
        answer(self.channel.close(200, "stopped".into())).await?;
        Ok(())
    }
}

async fn subscribe(channel: &Channel, queue: &str, window: u16) -> anyhow::Result<Consumer> {
    answer(channel.basic_qos(window, BasicQosOptions::default())).await?;
    let consume = channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
    answer(consume).await.with_context(|| format!("cannot consume queue {queue}"))
}

impl Received {
    fn new(delivery: Delivery, max_body: usize) -> Self {
        let original = Original {
            exchange: delivery.exchange,
            routing_key: delivery.routing_key,
            properties: delivery.properties,
        };
        let content = decode(&delivery.data, original.content_encoding(), max_body);
        let retries = original.retries().unwrap_or_else(|kind| {
            tracing::warn!(
                message_id = original.message_id().map(harmless),
                kind,
                "retry-count is no integer, taken as 0"
            );
            0
        });
        let receipt = Receipt { tag: delivery.delivery_tag, acker: delivery.acker };
        Self { content, parcel: Parcel { retries, original, body: delivery.data, receipt } }
    }
}

/// The delivery tags of one channel that nobody has settled yet: what tells how far one acknowledgement may reach.
#[derive(Debug, Default)]
pub(super) struct Unsettled {
    tags: std::sync::Mutex<BTreeSet<DeliveryTag>>,
    /// Held while frames are written: one that reaches further must not overtake that of a single delivery, for the
    /// broker closes a channel that acknowledges twice.
    writing: tokio::sync::Mutex<()>,
}

impl Unsettled {
    fn tags(&self) -> std::sync::MutexGuard<'_, BTreeSet<DeliveryTag>> {
        self.tags.lock().unwrap_or_else(std::sync::PoisonError::into_inner) // no step leaves it half done
    }

    /// Acknowledges: everything below the first unsettled delivery by one frame, for the broker pays for each, and
    /// the rest one by one. Tells how many acknowledgements could not be sent; their messages will come again.
    pub(super) async fn acknowledge(&self, mut receipts: Vec<Receipt>) -> usize {
        receipts.sort_unstable_by_key(|receipt| receipt.tag);
        let _writing = self.writing.lock().await;
        let first = {
            let mut tags = self.tags();
            for receipt in &receipts {
                tags.remove(&receipt.tag);
            }
            tags.first().copied().unwrap_or(DeliveryTag::MAX)
        };
        let below = receipts.partition_point(|receipt| receipt.tag < first);
        let mut lost = 0;
        if let Some(last) = below.checked_sub(1)
            && !acknowledge(&receipts[last], true).await
        {
            lost += below;
        }
        // Written one behind the other, and waited for together.
        let rest = receipts[below..].iter().map(|receipt| acknowledge(receipt, false));
        lost + join_all(rest).await.into_iter().filter(|arrived| !arrived).count()
    }
}

/// Whether the acknowledgement went out. lapin answers `false`, not an error, when the channel is gone; and nothing at
/// all when the connection breaks in this very moment.
async fn acknowledge(receipt: &Receipt, multiple: bool) -> bool {
    answer(receipt.acker.ack(BasicAckOptions { multiple })).await.unwrap_or(false)
}
