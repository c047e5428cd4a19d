//! Every metric of the service, declared once with its help text; docs/OPERATION.md lists them, and a test compares.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::message::{Event, Reason};

/// Declares the values that a label can have: a closed set, so that no message can make a series.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its text in metrics and logs.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
                encoder.write_str(self.as_str())
            }
        }
    };
}

label! {
    /// What became of a delivery.
    Fate {
        /// Its event took effect.
        Applied = "applied",
        /// Its event had taken effect before.
        Duplicate = "duplicate",
        /// Its event has no handler, and that is to be ignored.
        Ignored = "ignored",
        /// It failed for now: a copy goes to a retry queue.
        Retried = "retried",
        /// It failed for good: a copy goes to the failure queue.
        Parked = "parked",
    }
}

label! {
    /// A part of the way of a batch.
    Step {
        /// The insert that tells new events from duplicates.
        Guard = "guard",
        /// All handlers.
        Handlers = "handlers",
        /// Seal and commit.
        Commit = "commit",
        /// Acknowledgements; copies are placed aside.
        Settlement = "settlement",
    }
}

label! {
    /// Whose fault it is that a transaction failed.
    Fault {
        /// One of its events'.
        Event = "event",
        /// Nobody's: others were in the way.
        Contention = "contention",
        /// The database's, or the way to it.
        Service = "service",
    }
}

label! {
    /// Why messages are held.
    Hold {
        /// The database is away or refuses everybody.
        Database = "database",
        /// Something waits for a lock or a result for longer than it may.
        Timeout = "timeout",
        /// A copy cannot be placed.
        Copy = "copy",
    }
}

label! {
    /// One of the two connections to the broker.
    Link {
        /// Deliveries and acknowledgements.
        Consume = "consume",
        /// Copies.
        Publish = "publish",
    }
}

label! {
    /// What the broker did with a copy.
    Placement {
        /// It is in its queue.
        Confirmed = "confirmed",
        /// Its queue does not exist.
        Returned = "returned",
        /// Its queue does not take it.
        Refused = "refused",
        /// The broker lets nobody publish.
        Blocked = "blocked",
        /// The broker did not answer, or broke off.
        Failed = "failed",
    }
}

label! {
    /// How a scheduled purge ended.
    Purge {
        /// All old rows are gone, or another replica sees to them.
        Done = "done",
        /// It was refused, or broke off.
        Failed = "failed",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeliveryLabels {
    event: &'static str,
    outcome: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    step: Step,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabels {
    fault: Fault,
    /// The first two characters of the SQLSTATE.
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HoldLabels {
    cause: Hold,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LinkLabels {
    connection: Link,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlacementLabels {
    result: Placement,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PurgeLabels {
    result: Purge,
}

type Seconds = Gauge<f64, AtomicU64>;

/// Half a millisecond to half a minute, which is the longest that a statement may take by default.
const STEP_SECONDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// From what nobody notices to what a long outage makes.
const LAG_SECONDS: [f64; 12] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 86400.0];

const BATCH_SIZES: [f64; 13] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0];

/// All metrics. Cheap to clone; clones are one.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    deliveries: Family<DeliveryLabels, Counter>,
    failures: Family<ReasonLabels, Counter>,
    held: Family<HoldLabels, Gauge>,
    last_delivery: Seconds,
    lag: Histogram,
    batch_size: Histogram,
    steps: Family<StepLabels, Histogram>,
    transaction_failures: Family<FaultLabels, Counter>,
    reconnects: Family<LinkLabels, Counter>,
    copies: Family<PlacementLabels, Counter>,
    publishing_blocked: Gauge,
    acknowledgements_lost: Counter,
    purges: Family<PurgeLabels, Counter>,
    purged_rows: Counter,
    last_purge: Seconds,
    ready: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero. Their series are there from the beginning, so that a first increase is seen as one.
    fn new() -> Self {
        let mut registry = Registry::with_prefix("stock_service");
        registry.register("build", "The version that runs", Info::new([("version", env!("CARGO_PKG_VERSION"))]));

        let of_event = |event| Fate::ALL.iter().map(move |outcome| DeliveryLabels { event, outcome: *outcome });
        let deliveries = filled(Family::default(), Event::NAMES.into_iter().chain([OTHER]).flat_map(of_event));
        let help = "Deliveries that were decided about, by event and by what became of them";
        registry.register("deliveries", help, deliveries.clone());

        let failures = filled(Family::default(), Reason::ALL.map(|reason| ReasonLabels { reason: reason.as_str() }));
        registry.register(
            "failures",
            "Messages that were to be parked in the failure queue, by reason",
            failures.clone(),
        );

        let held = filled(Family::default(), Hold::ALL.iter().map(|cause| HoldLabels { cause: *cause }));
        registry.register("held", "Messages that are held until a fault is over, by its cause", held.clone());

        let last_delivery = Seconds::default();
        let help = "When the last delivery came, as Unix time; 0 before the first one";
        registry.register_with_unit("last_delivery_timestamp", help, Unit::Seconds, last_delivery.clone());

        let lag = Histogram::new(LAG_SECONDS);
        let help = "From an event's occurred_at until it was applied";
        registry.register_with_unit("lag", help, Unit::Seconds, lag.clone());

        let batch_size = Histogram::new(BATCH_SIZES);
        registry.register("batch_size", "Messages of a committed transaction", batch_size.clone());

        let histograms: Family<_, _, fn() -> _> = Family::new_with_constructor(|| Histogram::new(STEP_SECONDS));
        let steps = filled(histograms, Step::ALL.iter().map(|step| StepLabels { step: *step }));
        registry.register_with_unit("step", "How long the steps of a batch take", Unit::Seconds, steps.clone());

        let no_class = |fault: &Fault| FaultLabels { fault: *fault, class: NO_CLASS.to_owned() };
        let transaction_failures = filled(Family::default(), Fault::ALL.iter().map(no_class));
        let help = "Transactions that failed, by whose fault it is and the class of the SQLSTATE";
        registry.register("transaction_failures", help, transaction_failures.clone());

        let reconnects =
            filled(Family::default(), Link::ALL.iter().map(|connection| LinkLabels { connection: *connection }));
        let help = "Attempts to connect to the broker again";
        registry.register("reconnects", help, reconnects.clone());

        let copies = filled(Family::default(), Placement::ALL.iter().map(|result| PlacementLabels { result: *result }));
        let help = "Copies published to the retry and failure queues, by what the broker did with them";
        registry.register("copies", help, copies.clone());

        let publishing_blocked = Gauge::default();
        let help = "1 while the broker lets nobody publish, as far as a copy was tried";
        registry.register("publishing_blocked", help, publishing_blocked.clone());

        let acknowledgements_lost = Counter::default();
        let help = "Acknowledgements that could not be sent; their messages come again as duplicates";
        registry.register("acknowledgements_lost", help, acknowledgements_lost.clone());

        let purges = filled(Family::default(), Purge::ALL.iter().map(|result| PurgeLabels { result: *result }));
        registry.register("purges", "Scheduled purges, by how they ended", purges.clone());

        let purged_rows = Counter::default();
        registry.register("purged_rows", "Rows that scheduled purges have deleted", purged_rows.clone());

        let last_purge = Seconds::default();
        let help = "When the last scheduled purge was done, as Unix time; 0 before the first one";
        registry.register_with_unit("last_purge_timestamp", help, Unit::Seconds, last_purge.clone());

        let ready = Gauge::default();
        registry.register("ready", "1 while it consumes, as /readyz says", ready.clone());

        Self {
            registry: Arc::new(registry),
            deliveries,
            failures,
            held,
            last_delivery,
            lag,
            batch_size,
            steps,
            transaction_failures,
            reconnects,
            copies,
            publishing_blocked,
            acknowledgements_lost,
            purges,
            purged_rows,
            last_purge,
            ready,
        }
    }

    /// Counts a delivery that was decided about. `event` is one of the names that there are, none for all others.
    pub fn delivery(&self, event: Option<&'static str>, outcome: Fate) {
        self.deliveries.get_or_create(&DeliveryLabels { event: event.unwrap_or(OTHER), outcome }).inc();
    }

    /// Counts a parked message.
    pub fn failure(&self, reason: Reason) {
        self.failures.get_or_create(&ReasonLabels { reason: reason.as_str() }).inc();
    }

    /// A share of the messages that are held.
    pub fn held(&self) -> Held {
        Held { metrics: self.clone(), messages: 0, cause: Hold::Database }
    }

    /// Notes that a delivery came.
    pub fn delivered(&self) {
        self.last_delivery.set(unix_time());
    }

    /// Notes how long after it happened an event was applied. A producer's clock may be ahead.
    pub fn lag(&self, lag: chrono::Duration) {
        self.lag.observe(lag.to_std().unwrap_or_default().as_secs_f64());
    }

    /// Notes a committed transaction of so many messages.
    pub fn batch(&self, messages: usize) {
        self.batch_size.observe(u32::try_from(messages).unwrap_or(u32::MAX).into());
    }

    /// Notes how long a step took.
    pub fn step(&self, step: Step, took: Duration) {
        self.steps.get_or_create(&StepLabels { step }).observe(took.as_secs_f64());
    }

    /// Counts a transaction that failed. Of the SQLSTATE, if there was one, the class is kept: there are some forty.
    pub fn transaction_failure(&self, fault: Fault, state: Option<&str>) {
        let class = state.and_then(|state| state.get(..2)).unwrap_or(NO_CLASS).to_owned();
        self.transaction_failures.get_or_create(&FaultLabels { fault, class }).inc();
    }

    /// Counts an attempt to connect again.
    pub fn reconnect(&self, connection: Link) {
        self.reconnects.get_or_create(&LinkLabels { connection }).inc();
    }

    /// Counts a copy.
    pub fn copy(&self, result: Placement) {
        self.copies.get_or_create(&PlacementLabels { result }).inc();
    }

    /// Notes whether the broker lets nobody publish.
    pub fn publishing_blocked(&self, blocked: bool) {
        self.publishing_blocked.set(blocked.into());
    }

    /// Counts acknowledgements that could not be sent.
    pub fn acknowledgements_lost(&self, messages: usize) {
        self.acknowledgements_lost.inc_by(messages as u64);
    }

    /// Counts a step of a scheduled purge.
    pub fn purged(&self, rows: u64) {
        self.purged_rows.inc_by(rows);
    }

    /// Counts a scheduled purge.
    pub fn purge(&self, result: Purge) {
        self.purges.get_or_create(&PurgeLabels { result }).inc();
        if result == Purge::Done {
            self.last_purge.set(unix_time());
        }
    }

    /// Notes what `/readyz` says.
    pub fn ready(&self, ready: bool) {
        self.ready.set(ready.into());
    }

    /// All of them, in the text format of `OpenMetrics`.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Only the writer can fail, and a string does not.
        encode(&mut text, &self.registry).ok();
        text
    }
}

/// How many messages one worker, or its copies, hold; none any more when it is dropped.
#[derive(Debug)]
pub struct Held {
    metrics: Metrics,
    messages: i64,
    cause: Hold,
}

impl Held {
    /// Says how many there are by now, and why.
    pub fn set(&mut self, messages: usize, cause: Hold) {
        let messages = i64::try_from(messages).unwrap_or(i64::MAX);
        self.add(-self.messages);
        (self.messages, self.cause) = (messages, cause);
        self.add(messages);
    }

    fn add(&self, messages: i64) {
        self.metrics.held.get_or_create(&HoldLabels { cause: self.cause }).inc_by(messages);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.add(-self.messages);
    }
}

/// A family whose series are there from the beginning.
fn filled<L, M, C>(family: Family<L, M, C>, labels: impl IntoIterator<Item = L>) -> Family<L, M, C>
where
    L: Clone + std::hash::Hash + Eq,
    C: MetricConstructor<M>,
{
    for labels in labels {
        drop(family.get_or_create(&labels));
    }
    family
}

/// The label of whatever is no event of ours.
const OTHER: &str = "other";

/// The label of an error that came without an SQLSTATE.
const NO_CLASS: &str = "none";

fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_series_are_there_from_the_beginning_and_no_more_come_by_what_messages_say() {
        let metrics = Metrics::default();
        let series = |metrics: &Metrics| metrics.to_text().lines().filter(|line| !line.starts_with('#')).count();
        let before = series(&metrics);
        metrics.delivery(Some(Event::NAMES[0]), Fate::Applied);
        metrics.delivery(None, Fate::Parked);
        metrics.failure(Reason::Malformed);
        metrics.step(Step::Guard, Duration::from_millis(3));
        metrics.transaction_failure(Fault::Event, None);
        assert_eq!(series(&metrics), before);
        metrics.transaction_failure(Fault::Contention, Some("40P01"));
        metrics.transaction_failure(Fault::Contention, Some("40001"));
        assert_eq!(series(&metrics), before + 1, "one class");
    }

    #[test]
    fn what_is_held_is_the_sum_of_all_shares_and_ends_with_them() {
        let metrics = Metrics::default();
        let says = |line: &str| assert!(metrics.to_text().contains(line), "{line} in {}", metrics.to_text());
        let (mut one, mut other) = (metrics.held(), metrics.held());
        one.set(3, Hold::Database);
        other.set(4, Hold::Database);
        says("stock_service_held{cause=\"database\"} 7");
        one.set(2, Hold::Timeout);
        says("stock_service_held{cause=\"database\"} 4");
        says("stock_service_held{cause=\"timeout\"} 2");
        drop((one, other));
        says("stock_service_held{cause=\"database\"} 0");
        says("stock_service_held{cause=\"timeout\"} 0");
    }
}
