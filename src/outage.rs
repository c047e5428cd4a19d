//! A time in which the database does not work: how long to pause, and when to speak of it.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// A time in which the database does not work: how long to pause, and when to speak of it.
#[derive(Default)]
pub(crate) struct Outage {
    since: Option<Instant>,
    said: Option<Instant>,
    pauses: Option<ExponentialBackoff>,
}

impl Outage {
    /// The next pause; says why at the beginning and then once a minute.
    pub(crate) fn pause(&mut self, cause: &str) -> Duration {
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.said.is_none_or(|said| said.elapsed() >= Duration::from_secs(60)) {
            let held_for = self.said.replace(Instant::now()).map(|_| tracing::field::debug(since.elapsed()));
            tracing::warn!(cause, held_for, "events cannot be applied, holding them");
        }
        self.pauses.get_or_insert_with(outage_pauses).next().unwrap_or_default()
    }

    pub(crate) fn over(&mut self) {
        if let Some(since) = self.since {
            tracing::info!(after = ?since.elapsed(), "events are applied again");
            *self = Self::default();
        }
    }
}

/// Pauses between attempts while the database is away: short enough that work goes on within seconds of its return.
pub(crate) fn outage_pauses() -> ExponentialBackoff {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_millis(50)).with_max_delay(Duration::from_secs(4));
    pauses.with_jitter().without_max_times().build()
}
