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
    voice: Voice,
    pauses: ExponentialBackoff,
    part: Part,
    held: Held,
}

impl Outage {
    /// None yet, for this part of the service.
    pub(crate) fn new(monitor: &Monitor, part: &str) -> Self {
        let part = monitor.health.part(part, Matters::Consuming);
        Self { since: None, voice: Voice::default(), pauses: outage_pauses(), part, held: monitor.metrics.held() }
    }

    /// Says why so many `messages` are held: readiness and a metric at once, the log as `Voice` does. Gives the next
    /// pause.
    pub(crate) fn pause(&mut self, interruption: &Interruption, messages: usize) -> Duration {
        let text = interruption.to_string();
        self.part.blocked(&text);
        let hold = match interruption.suspicion {
            Suspicion::Timeout => Hold::Timeout,
            Suspicion::None | Suspicion::BrokenConnection => Hold::Database,
        };
        self.held.set(messages, hold);
        let since = *self.since.get_or_insert_with(Instant::now);
        let lasted = since.elapsed();
        if self.voice.speaks(lasted, Instant::now()) {
            let held_for = (lasted >= Duration::from_secs(1)).then(|| tracing::field::debug(lasted));
            tracing::warn!(cause = text, held_for, messages, "events cannot be applied, holding them");
        }
        match refuses_login(&interruption.cause) {
            true => REFUSED,
            false => self.pauses.next().unwrap_or_default(),
        }
    }

    pub(crate) fn over(&mut self) {
        if let Some(since) = self.since.take() {
            if self.voice.spoke() {
                tracing::info!(after = ?since.elapsed(), "events are applied again");
            }
            self.pauses = outage_pauses();
            self.part.free();
            self.held.set(0, Hold::Database);
        }
    }
}

/// When the log hears of outages: at the beginning of one, and then once a minute. One that begins within a minute after
/// that must last before it is worth a line: a database that drops its sessions each second would fill the log.
#[derive(Debug, Default)]
struct Voice {
    said: Option<Instant>,
    /// Whether this outage has been spoken of.
    spoke: bool,
}

impl Voice {
    /// Whether to speak of an outage that has lasted for so long.
    fn speaks(&mut self, lasted: Duration, now: Instant) -> bool {
        /// Longer than a database that is restarted again and again is away.
        const LASTING: Duration = Duration::from_secs(10);

        let is_news = !self.spoke && lasted >= LASTING;
        let speaks = is_news || self.said.is_none_or(|said| now - said >= Duration::from_secs(60));
        if speaks {
            (self.said, self.spoke) = (Some(now), true);
        }
        speaks
    }

    /// Whether the outage that is over was spoken of.
    fn spoke(&mut self) -> bool {
        std::mem::take(&mut self.spoke)
    }
}

/// Pauses between attempts while the database is away: short enough that work goes on within seconds of its return.
pub(crate) fn outage_pauses() -> ExponentialBackoff {
    let pauses =
        ExponentialBuilder::new().with_min_delay(Duration::from_millis(50)).with_max_delay(Duration::from_secs(4));
    pauses.with_jitter().without_max_times().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_long_outage_is_spoken_of_once_a_minute() {
        let (mut voice, begun) = (Voice::default(), Instant::now());
        let lines = (0..180).filter(|second| voice.speaks(SECOND * *second, begun + SECOND * *second)).count();
        assert_eq!(lines, 3);
        assert!(voice.spoke());
    }

    #[test]
    fn outages_that_come_every_second_are_spoken_of_once_a_minute() {
        let (mut voice, begun) = (Voice::default(), Instant::now());
        let lines = (0..180).filter(|second| {
            let speaks = voice.speaks(Duration::ZERO, begun + SECOND * *second);
            assert_eq!(voice.spoke(), speaks, "its end is told if its beginning was");
            speaks
        });
        assert_eq!(lines.count(), 3);
    }

    #[test]
    fn an_outage_soon_after_another_is_spoken_of_when_it_lasts() {
        let (mut voice, begun) = (Voice::default(), Instant::now());
        assert!(voice.speaks(Duration::ZERO, begun) && voice.spoke());
        let lines: Vec<_> =
            (0..30).filter(|second| voice.speaks(SECOND * *second, begun + SECOND * (*second + 5))).collect();
        assert_eq!(lines, [10]);
    }
}
