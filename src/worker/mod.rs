//! The corridor: deliveries in, through the inbox, and their settlement out, until a stop.
//!
//! The one place where the broker and the database meet.

mod hand;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::hand::{Hand, Pending, Record, Suspect};
use crate::broker::{self, Limits, Parcel, Publisher, Received, Settler, Subscription, Topology};
use crate::db::{Database, explain};
use crate::inbox::{Dispatch, Interrupted, Processor};
use crate::message::{Failure, Interruption, Message, Outcome, RetryPolicy, Verdict};
use crate::outage::Outage;
use crate::settings::{AmqpSettings, ConsumeSettings, Settings};
use crate::stock::harmless;

/// How long nothing must have come before the queue is asked whether it is empty, when that ends the work.
const IDLE: Duration = Duration::from_millis(100);

/// How long nothing must have come before a worker looks whether its channel still lives. A stream of deliveries that is
/// opened in the moment in which the connection breaks may neither yield nor end.
const WATCH: Duration = Duration::from_secs(1);

/// All workers of a process, and the connection that they share.
#[derive(Debug)]
pub struct Workers<D> {
    amqp: AmqpSettings,
    consume: ConsumeSettings,
    policy: RetryPolicy,
    topology: Topology,
    database: Database,
    processor: Processor<D>,
    until_empty: bool,
}

impl<D: Dispatch> Workers<D> {
    /// Workers that apply events with `dispatch`. With `until_empty` they end when the queue is empty and nothing is in
    /// hand; retry queues are not waited for.
    pub fn new(settings: &Settings, database: Database, dispatch: D, until_empty: bool) -> Self {
        Self {
            topology: Topology::new(&settings.amqp, &settings.retry),
            amqp: settings.amqp.clone(),
            consume: settings.consume.clone(),
            policy: settings.retry.clone(),
            processor: Processor::new(database.clone(), dispatch),
            database,
            until_empty,
        }
    }

    /// Consumes until `stop`, connecting again for ever. On a stop the batch in hand is finished and settled, and the
    /// rest given back.
    pub async fn run(self, stop: CancellationToken) {
        let this = Arc::new(self);
        let publisher = Publisher::new(this.amqp.url.clone(), this.topology.clone());
        let mut pauses = reconnect_pauses();
        let mut applied = 0;
        while let Err(error) = this.session(&publisher, &stop).await {
            // Only what got work done starts with short pauses again: a broker that takes the connection and refuses
            // the rest is not to be hurried.
            let so_far = this.processor.applied();
            if so_far > std::mem::replace(&mut applied, so_far) {
                pauses = reconnect_pauses();
            }
            let pause = pauses.next().unwrap_or_default();
            tracing::warn!(broker = this.amqp.url.place(), error = format!("{error:#}"), ?pause, "not consuming");
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                break;
            }
        }
        publisher.close().await;
    }

    /// One connection's life. All that hangs on it is made anew with it, so no recovery has to be trusted.
    async fn session(self: &Arc<Self>, publisher: &Publisher, stop: &CancellationToken) -> anyhow::Result<()> {
        let setup = async {
            // Messages that are taken while nothing can be done with them only grow old in the window.
            self.wait_for_database().await;
            let connection = broker::connect(&self.amqp.url, "consume").await.context("cannot connect")?;
            self.topology.ensure(&connection).await?;
            anyhow::Ok(connection)
        };
        let Some(connection) = stop.run_until_cancelled(setup).await else { return Ok(()) };
        let connection = Arc::new(connection?);
        tracing::info!(broker = self.amqp.url.place(), queue = self.topology.queue(), "consuming");

        let ending = stop.child_token();
        // The first worker alone meets what may kill the process; see `Subscription::open`.
        let wide_open = CancellationToken::new();
        let mut workers = JoinSet::new();
        for number in 0..self.consume.workers {
            let (this, publisher, ending) = (self.clone(), publisher.clone(), ending.clone());
            let (connection, wide_open) = (connection.clone(), wide_open.clone());
            workers.spawn(async move {
                if number > 0 && ending.run_until_cancelled(wide_open.cancelled()).await.is_none() {
                    return Ok(());
                }
                let _opens_at_the_end = wide_open.clone().drop_guard();
                let limits = Limits { messages: this.consume.batch_size, body: this.consume.max_body };
                let queue = this.topology.queue();
                let subscription = Subscription::open(&connection, queue, this.consume.prefetch, limits).await?;
                let settler = Settler::new(&subscription, publisher, this.topology.clone());
                let hand = Hand::new(this.consume.batch_size);
                Worker { shared: this, subscription, settler, hand, wide_open, ending }.run().await
            });
        }
        let mut result = Ok(());
        while let Some(ended) = workers.join_next().await {
            let ended = ended.context("a worker panicked").flatten();
            if ended.is_err() {
                ending.cancel();
                result = result.and(ended);
            }
        }
        broker::close(&connection).await;
        result
    }

    async fn wait_for_database(&self) {
        let mut outage = Outage::default();
        loop {
            let answer = async { self.database.begin().await?.rollback().await };
            match answer.await {
                Ok(()) => return outage.over(),
                Err(error) => sleep(outage.pause(&explain(&error))).await,
            }
        }
    }
}

/// Pauses between attempts to connect: ten a minute at most once they have grown.
fn reconnect_pauses() -> ExponentialBackoff {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_secs(1)).with_max_delay(Duration::from_secs(8));
    pauses.with_jitter().without_max_times().build()
}

/// One channel, one database connection, one batch at a time.
struct Worker<D> {
    shared: Arc<Workers<D>>,
    subscription: Subscription,
    settler: Settler,
    hand: Hand,
    wide_open: CancellationToken,
    ending: CancellationToken,
}

impl<D: Dispatch> Worker<D> {
    async fn run(mut self) -> anyhow::Result<()> {
        self.work().await?;
        self.subscription.unsubscribe().await?;
        // Half of the grace, so that there is time to give back what is not placed by then.
        tokio::time::timeout(self.shared.consume.grace / 2, self.settler.finish()).await.ok();
        self.subscription.give_back().await
    }

    async fn work(&mut self) -> anyhow::Result<()> {
        loop {
            if self.ending.is_cancelled() {
                return Ok(());
            }
            // Nothing may be done for deliveries that cannot be settled any more; others have them again.
            ensure!(self.subscription.is_alive(), "the channel is gone");
            ensure!(self.settler.is_alive(), "no copies are made any more");
            let settled = if let Some(suspect) = self.hand.due_suspect() {
                self.try_suspect(suspect).await
            } else if let Some(slice) = self.hand.next_slice() {
                self.try_slice(slice).await
            } else {
                let due = self.hand.next_due();
                tokio::select! {
                    biased;
                    () = self.ending.cancelled() => return Ok(()),
                    batch = self.subscription.next_batch() => self.receive(batch?).await,
                    () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => false,
                    () = sleep(if self.shared.until_empty { IDLE } else { WATCH }) => {
                        let nothing_in_hand = self.hand.suspects.is_empty() && self.settler.placing() == 0;
                        if self.shared.until_empty && nothing_in_hand && self.subscription.is_drained().await? {
                            return Ok(());
                        }
                        false
                    }
                }
            };
            if self.hand.rest.is_empty() {
                let held = self.settler.placing() + self.hand.suspects.len();
                self.subscription.adjust_window(settled, held).await?;
            }
            if self.subscription.is_wide() {
                self.wide_open.cancel();
            }
        }
    }

    /// Takes a batch in hand, after settling what is no message of ours: that needs no database. Tells whether it
    /// settled any.
    async fn receive(&mut self, batch: Vec<Received>) -> bool {
        let mut decided = Vec::new();
        for Received { content, parcel } in batch {
            match content {
                Ok(message) => self.hand.rest.push_back(Pending { message, parcel }),
                Err(undecodable) => {
                    let verdict = self.shared.policy.judge_undecodable(&undecodable);
                    log(None, &parcel, &verdict, "ignored");
                    decided.push((parcel, verdict));
                }
            }
        }
        let settled = !decided.is_empty();
        self.settler.settle(decided).await;
        settled
    }

    /// Tries the next messages in one transaction. Tells whether they are settled.
    async fn try_slice(&mut self, mut slice: VecDeque<Pending>) -> bool {
        let interrupted = self.process(&mut slice).await;
        let Some(Interrupted { interruption, tried }) = interrupted else {
            self.hand.limit = (self.hand.limit * 2).min(self.shared.consume.batch_size);
            self.hand.outage.over();
            return true;
        };
        // An eighth, as if one of them were to blame: if one is, it stands alone soon; if none is, little is lost.
        self.hand.limit = (tried / 8).max(1);
        if tried == 1
            && let Some(pending) = slice.pop_front()
        {
            let record = Record::new(self.shared.processor.applied()).interrupted();
            self.hand.suspects.push(Suspect { pending, record });
        }
        while let Some(pending) = slice.pop_back() {
            self.hand.rest.push_front(pending);
        }
        self.hold(&interruption).await;
        false
    }

    /// Tries a message alone that was interrupted alone before. Tells whether it is settled.
    async fn try_suspect(&mut self, suspect: Suspect) -> bool {
        let Suspect { pending, record } = suspect;
        let mut slice = VecDeque::from([pending]);
        let interrupted = self.process(&mut slice).await;
        let (Some(Interrupted { interruption, .. }), Some(pending)) = (interrupted, slice.pop_front()) else {
            self.hand.outage.over();
            return true;
        };
        if !record.is_proof(interruption.suspicion, self.shared.processor.applied()) {
            self.hand.suspects.push(Suspect { pending, record: record.interrupted() });
            self.hold(&interruption).await;
            return false;
        }
        let Pending { message, parcel } = pending;
        let outcome = Outcome::Failed(Failure::Retryable(interruption.cause.context("it interrupts the service")));
        let verdict = self.judge(&message, &parcel, &outcome);
        self.settler.settle([(parcel, verdict)]).await;
        true
    }

    /// Applies what it can of the slice and settles it; the rest stays in the slice.
    async fn process(&self, slice: &mut VecDeque<Pending>) -> Option<Interrupted> {
        let messages: Vec<_> = slice.iter().map(|pending| &pending.message).collect();
        let progress = self.shared.processor.process(&messages).await;
        let done = slice.drain(..progress.outcomes.len()).zip(&progress.outcomes);
        let decided: Vec<_> = done
            .map(|(Pending { message, parcel }, outcome)| {
                let verdict = self.judge(&message, &parcel, outcome);
                (parcel, verdict)
            })
            .collect();
        self.settler.settle(decided).await;
        progress.interrupted
    }

    fn judge(&self, message: &Message, parcel: &Parcel, outcome: &Outcome) -> Verdict {
        let verdict = self.shared.policy.judge(outcome, parcel.retries);
        log(Some(message), parcel, &verdict, if matches!(outcome, Outcome::Applied) { "applied" } else { "duplicate" });
        verdict
    }

    /// Waits with everything in hand, and no attempt is spent.
    async fn hold(&mut self, interruption: &Interruption) {
        let pause = self.hand.outage.pause(&interruption.to_string());
        self.ending.run_until_cancelled(sleep(pause)).await;
    }
}

/// One line for what became of one message.
fn log(message: Option<&Message>, parcel: &Parcel, verdict: &Verdict, done: &str) {
    let event_id = message.map(|message| tracing::field::display(message.id));
    let event = message.map(|message| message.event.name());
    // Escaped, for they are the producer's and could forge a line; and only when the line is written.
    macro_rules! say {
        ($level:ident, $text:expr $(, $field:ident = $value:expr)*) => {
            tracing::$level!(
                event_id,
                event,
                message_id = parcel.original.message_id().map(harmless),
                correlation_id = parcel.original.correlation_id().map(harmless),
                $($field = $value,)*
                "{}", $text
            )
        };
    }
    match verdict {
        Verdict::Ack => say!(debug, done),
        Verdict::Retry { retry, delay, detail } => {
            let delay = tracing::field::debug(delay);
            say!(warn, "failed, to be retried", retry = retry, delay = delay, detail = harmless(detail));
        }
        Verdict::Park { reason, detail, attempts } => {
            let (reason, detail) = (reason.as_str(), harmless(detail));
            say!(
                error,
                "failed, to be parked in the failure queue",
                reason = reason,
                attempts = attempts,
                detail = detail
            );
        }
    }
}
