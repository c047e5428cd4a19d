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

use self::hand::{Attempt, Hand, Pending, Record, Suspect};
use crate::broker::{self, Faults, Limits, Parcel, Publisher, Received, Settler, Subscription, Topology, Unreadable};
use crate::db::Database;
use crate::inbox::{Dispatch, Interrupted, Processor};
use crate::message::{Failure, Interruption, Message, Outcome, RetryPolicy, Verdict};
use crate::outage::Outage;
use crate::settings::{AmqpSettings, ConsumeSettings, Settings};
use crate::stock::harmless;
use crate::telemetry::{Fate, Link, Matters, Monitor, Part, Pulse};

/// How long nothing must have come before the queue is asked whether it is empty, when that ends the work.
const IDLE: Duration = Duration::from_millis(100);

/// How long nothing must have come before a worker looks whether its channel still lives. A stream of deliveries that is
/// opened in the moment in which the connection breaks may neither yield nor end.
const WATCH: Duration = Duration::from_secs(1);

/// How long nothing must have come before a worker subscribes anew. A broker may take messages for delivered that never
/// came here (after an election among its nodes, for instance); the end of the channel gives them back.
const RENEWAL: Duration = Duration::from_secs(60);

/// How many messages that cannot be read, or deliveries of one, are met without a pause: more than the delivery limit.
const ENOUGH: u32 = 40;

/// The longest that the way to a subscription may take from one beat to the next: a declaration for each of a hundred
/// retry queues, each within its limit, is the longest step.
const SETUP_LIMIT: Duration = Duration::from_secs(1200);

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
    monitor: Monitor,
    /// Whether it consumes.
    subscribed: Part,
    /// Held by the one that asks whether the database works: one asks for all.
    asking: tokio::sync::Mutex<()>,
}

impl<D: Dispatch> Workers<D> {
    /// Workers that apply events with `dispatch`. With `until_empty` they end when the queue is empty and nothing is in
    /// hand; retry queues are not waited for.
    pub fn new(settings: &Settings, database: Database, dispatch: D, until_empty: bool, monitor: Monitor) -> Self {
        let subscribed = monitor.health.part("broker", Matters::Consuming);
        subscribed.blocked("not connected yet");
        Self {
            topology: Topology::new(&settings.amqp, &settings.retry),
            amqp: settings.amqp.clone(),
            consume: settings.consume.clone(),
            policy: settings.retry.clone(),
            processor: Processor::new(database.clone(), dispatch, monitor.clone()),
            database,
            until_empty,
            monitor,
            subscribed,
            asking: tokio::sync::Mutex::default(),
        }
    }

    /// Consumes until `stop`, connecting again for ever. On a stop the batch in hand is finished and settled, and the
    /// rest given back.
    pub async fn run(self, stop: CancellationToken) {
        let this = Arc::new(self);
        let publisher = Publisher::new(this.amqp.url.clone(), this.topology.clone(), this.monitor.metrics.clone());
        let pulse = this.monitor.health.pulse("consumption", SETUP_LIMIT);
        let mut pauses = reconnect_pauses();
        let mut unreadable = 0;
        let mut applied = 0;
        while let Err(error) = this.session(&publisher, &pulse, &stop).await {
            // Only what got work done starts with short pauses again: a broker that takes the connection and refuses
            // the rest is not to be hurried.
            let so_far = this.processor.applied();
            if so_far > std::mem::replace(&mut applied, so_far) {
                pauses = reconnect_pauses();
                unreadable = 0;
            }
            // What cannot be read holds up all others until it has come as often as the broker lets it.
            unreadable += u32::from(error.is::<Unreadable>());
            let pause = match error.is::<Unreadable>() && unreadable <= ENOUGH {
                true => Duration::from_millis(50),
                false => pauses.next().unwrap_or_default(),
            };
            let error = format!("{error:#}");
            this.subscribed.blocked(&error);
            tracing::warn!(broker = %this.amqp.url, error, ?pause, "not consuming");
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                break;
            }
            this.monitor.metrics.reconnect(Link::Consume);
        }
        publisher.close().await;
    }

    /// One connection's life. All that hangs on it is made anew with it, so no recovery has to be trusted.
    async fn session(
        self: &Arc<Self>,
        publisher: &Publisher,
        pulse: &Pulse,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        pulse.beat();
        let setup = async {
            // Messages that are taken while nothing can be done with them only grow old in the window; and the broker,
            // which takes back what is unsettled for half an hour, counts each time.
            let mut outage = Outage::new(&self.monitor, "database");
            self.database_works(&mut outage, pulse, 0).await;
            outage.over();
            let connection = broker::connect(&self.amqp.url, "consume").await.context("cannot connect")?;
            self.topology.ensure(&connection).await?;
            anyhow::Ok(connection)
        };
        let Some(connection) = stop.run_until_cancelled(setup).await else { return Ok(()) };
        let connection = Arc::new(connection?);
        let mut faults = Faults::of(&connection);
        tracing::info!(broker = %self.amqp.url, queue = self.topology.queue(), "consuming");

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
                let name = format!("worker {number}");
                while let End::Renewal =
                    Worker::subscribe(&this, &name, &connection, &publisher, &wide_open, &ending).await?.run().await?
                {
                    tracing::debug!(name, "subscribing anew");
                }
                Ok(())
            });
        }
        pulse.rest(); // from now on the workers beat
        let mut result = Ok(());
        while let Some(ended) = workers.join_next().await {
            let ended = ended.context("a worker panicked").flatten();
            if ended.is_err() {
                ending.cancel();
                result = result.and(ended);
            }
        }
        broker::close(&connection).await;
        // Whichever worker met it first, and in whatever it was about to do, that was the cause.
        match result {
            Err(_) if let Some(unreadable) = faults.unreadable() => Err(unreadable.into()),
            result => result,
        }
    }

    /// Waits until events could be applied. Of several that wait, one asks.
    async fn database_works(&self, outage: &mut Outage, pulse: &Pulse, messages: usize) {
        pulse.rest();
        let _asking = self.asking.lock().await;
        loop {
            pulse.beat();
            match self.processor.probe().await {
                Ok(()) => return,
                Err(interruption) => sleep(outage.pause(&interruption, messages)).await,
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
    pulse: Pulse,
    wide_open: CancellationToken,
    ending: CancellationToken,
}

/// Why a worker has ended without a fault.
enum End {
    /// It was asked to, or the queue is empty and that was to be the end.
    Stop,
    /// Nothing has come for long.
    Renewal,
}

impl<D: Dispatch> Worker<D> {
    async fn subscribe(
        shared: &Arc<Workers<D>>,
        name: &str,
        connection: &broker::Connection,
        publisher: &Publisher,
        wide_open: &CancellationToken,
        ending: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let Workers { consume, topology, database, monitor, .. } = &**shared;
        // Two transactions, one of which is rolled back, and what it takes to begin and to settle them.
        let pulse = monitor.health.pulse(name, database.transaction_timeout() * 2 + Duration::from_secs(60));
        let limits = Limits { messages: consume.batch_size, body: consume.max_body };
        let metrics = monitor.metrics.clone();
        let subscription = Subscription::open(connection, topology.queue(), consume.prefetch, limits, metrics).await?;
        shared.subscribed.free();
        Ok(Self {
            settler: Settler::new(&subscription, publisher.clone(), topology.clone(), monitor),
            hand: Hand::new(consume.batch_size, Outage::new(monitor, name)),
            shared: shared.clone(),
            subscription,
            pulse,
            wide_open: wide_open.clone(),
            ending: ending.clone(),
        })
    }

    async fn run(mut self) -> anyhow::Result<End> {
        let end = self.work().await?;
        self.pulse.rest(); // what follows is bounded by the grace period
        self.subscription.unsubscribe().await?;
        // Half of the grace, so that there is time to give back what is not placed by then.
        tokio::time::timeout(self.shared.consume.grace / 2, self.settler.finish()).await.ok();
        self.subscription.give_back().await?;
        Ok(end)
    }

    async fn work(&mut self) -> anyhow::Result<End> {
        let mut last_came = Instant::now();
        loop {
            self.pulse.beat();
            if self.ending.is_cancelled() {
                return Ok(End::Stop);
            }
            // Nothing may be done for deliveries that cannot be settled any more; others have them again.
            ensure!(self.subscription.is_alive(), "the channel is gone");
            ensure!(self.settler.is_alive(), "no copies are made any more");
            let settled = if let Some(suspect) = self.hand.due_suspect() {
                self.try_suspect(suspect).await
            } else if let Some((attempt, slice)) = self.hand.next_slice() {
                self.try_slice(attempt, slice).await
            } else {
                let due = self.hand.next_due();
                tokio::select! {
                    biased;
                    () = self.ending.cancelled() => return Ok(End::Stop),
                    batch = self.subscription.next_batch() => {
                        last_came = Instant::now();
                        let batch = batch?;
                        self.subscription.pause_to_grow().await?;
                        self.receive(batch).await
                    }
                    () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => false,
                    () = sleep(if self.shared.until_empty { IDLE } else { WATCH }) => {
                        let nothing_in_hand = self.hand.suspects.is_empty() && self.settler.placing() == 0;
                        if self.shared.until_empty && nothing_in_hand && self.subscription.is_drained().await? {
                            return Ok(End::Stop);
                        }
                        if nothing_in_hand && last_came.elapsed() >= RENEWAL {
                            return Ok(End::Renewal);
                        }
                        false
                    }
                }
            };
            if self.hand.is_free() {
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
                Ok(message) => self.hand.take(Pending { message, parcel }),
                Err(undecodable) => {
                    let verdict = self.shared.policy.judge_undecodable(&undecodable);
                    self.tell(None, &parcel, &verdict, Fate::Ignored);
                    decided.push((parcel, verdict));
                }
            }
        }
        let settled = !decided.is_empty();
        self.settler.settle(decided).await;
        settled
    }

    /// Tries the next messages in one transaction. Tells whether any are settled.
    async fn try_slice(&mut self, attempt: Attempt, mut slice: VecDeque<Pending>) -> bool {
        let (interrupted, failed) = self.process(&mut slice).await;
        let lane = self.hand.lane(attempt);
        let Some(Interrupted { interruption, tried }) = interrupted else {
            match failed {
                true => lane.failed(),
                false => lane.went_through(),
            }
            lane.put_back(slice);
            self.hand.outage.over();
            return true;
        };
        lane.interrupted(tried);
        let alone = if tried == 1 { slice.pop_front() } else { None };
        lane.put_back(slice);
        if let Some(pending) = alone {
            let record = Record::new(self.shared.processor.applied()).interrupted();
            self.hand.suspects.push(Suspect { pending, record });
        }
        self.hold(&interruption).await;
        false
    }

    /// Tries a message alone that was interrupted alone before. Tells whether it is settled.
    async fn try_suspect(&mut self, suspect: Suspect) -> bool {
        let Suspect { pending, record } = suspect;
        let mut slice = VecDeque::from([pending]);
        let (interrupted, _) = self.process(&mut slice).await;
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

    /// Applies what it can of the slice and settles it; the rest stays in the slice. Tells also whether one has failed.
    async fn process(&self, slice: &mut VecDeque<Pending>) -> (Option<Interrupted>, bool) {
        let messages: Vec<_> = slice.iter().map(|pending| &pending.message).collect();
        let progress = self.shared.processor.process(&messages, &self.pulse).await;
        let done = slice.drain(..progress.outcomes.len()).zip(&progress.outcomes);
        let decided: Vec<_> = done
            .map(|(Pending { message, parcel }, outcome)| {
                let verdict = self.judge(&message, &parcel, outcome);
                (parcel, verdict)
            })
            .collect();
        self.settler.settle(decided).await;
        let failed = matches!(progress.outcomes.last(), Some(Outcome::Failed(_))); // none comes after a culprit
        (progress.interrupted, failed)
    }

    fn judge(&self, message: &Message, parcel: &Parcel, outcome: &Outcome) -> Verdict {
        let verdict = self.shared.policy.judge(outcome, parcel.retries);
        let done = if matches!(outcome, Outcome::Applied) { Fate::Applied } else { Fate::Duplicate };
        self.tell(Some(message), parcel, &verdict, done);
        verdict
    }

    /// Counts and logs what became of one message; `done` says what an acknowledgement means.
    fn tell(&self, message: Option<&Message>, parcel: &Parcel, verdict: &Verdict, done: Fate) {
        let fate = match verdict {
            Verdict::Ack => done,
            Verdict::Retry { .. } => Fate::Retried,
            Verdict::Park { .. } => Fate::Parked,
        };
        let metrics = &self.shared.monitor.metrics;
        metrics.delivery(message.map(|message| message.event.name()), fate);
        if let Verdict::Park { reason, .. } = verdict {
            metrics.failure(*reason);
        }
        log(message, parcel, verdict, done);
    }

    /// Waits with everything in hand, and no attempt is spent.
    async fn hold(&mut self, interruption: &Interruption) {
        let messages = self.hand.len();
        let pause = self.hand.outage.pause(interruption, messages);
        let over = async {
            sleep(pause).await;
            self.shared.database_works(&mut self.hand.outage, &self.pulse, messages).await;
        };
        self.ending.run_until_cancelled(over).await;
    }
}

/// One line for what became of one message.
fn log(message: Option<&Message>, parcel: &Parcel, verdict: &Verdict, done: Fate) {
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
        Verdict::Ack => say!(debug, done.as_str()),
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
