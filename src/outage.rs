//! A time in which the database does not work: how long to pause, and when to speak of it.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

use crate::db::refuses_login;
use crate::message::{Interruption, Suspicion};
use crate::telemetry::{Held, Hold, Matters, Monitor, Part};

/// The pause when the server refuses the login: ten attempts a minute, at most.
const REFUSED: Duration = Duration::from_secs(7);

/// A time in which the database does not work: how long to pause, and when to speak of it.
#[derive(Debug)]
pub(crate) struct Outage {
    since: Option<Instant>,
    said: Option<Instant>,
    pauses: ExponentialBackoff,
    part: Part,
    held: Held,
}

impl Outage {
    /// None yet, for this part of the service.
    pub(crate) fn new(monitor: &Monitor, part: &str) -> Self {
        let part = monitor.health.part(part, Matters::Consuming);
        Self { since: None, said: None, pauses: outage_pauses(), part, held: monitor.metrics.held() }
    }

    /// Says why so many `messages` are held: readiness and a metric at once, the log at the beginning and then once a
    /// minute. Gives the next pause.
    pub(crate) fn pause(&mut self, interruption: &Interruption, messages: usize) -> Duration {
        let text = interruption.to_string();
        self.part.blocked(&text);
        let hold = match interruption.suspicion {
            Suspicion::Timeout => Hold::Timeout,
            Suspicion::None | Suspicion::BrokenConnection => Hold::Database,
        };
        self.held.set(messages, hold);
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.said.is_none_or(|said| said.elapsed() >= Duration::from_secs(60)) {
            let held_for = self.said.replace(Instant::now()).map(|_| tracing::field::debug(since.elapsed()));
            tracing::warn!(cause = text, held_for, messages, "events cannot be applied, holding them");
        }
        match refuses_login(&interruption.cause) {
            true => REFUSED,
            false => self.pauses.next().unwrap_or_default(),
        }
    }

    pub(crate) fn over(&mut self) {
        if let Some(since) = self.since.take() {
            tracing::info!(after = ?since.elapsed(), "events are applied again");
            (self.said, self.pauses) = (None, outage_pauses());
            self.part.free();
            self.held.set(0, Hold::Database);
        }
    }
}

/// Pauses between attempts while the database is away: short enough that work goes on within seconds of its return.
pub(crate) fn outage_pauses() -> ExponentialBackoff {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_millis(50)).with_max_delay(Duration::from_secs(4));
    pauses.with_jitter().without_max_times().build()
}
