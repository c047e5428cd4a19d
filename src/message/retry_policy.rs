//! What happened to what the broker is told: a pure table, no clock and no I/O.

use std::time::Duration;

use super::{Failure, Outcome, Reason, Undecodable, Verdict};

/// How often and after which delays a failed event is tried again.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Retries after the first attempt; 0 means none.
    pub max_retries: u32,
    /// The delay before the first retry.
    pub delay: Duration,
    /// Each further delay is the one before times this.
    pub multiplier: u32,
    /// No delay is longer.
    pub max_delay: Duration,
    /// Whether an event without a handler is acknowledged and counted, instead of parked.
    pub ignore_unknown: bool,
}

impl RetryPolicy {
    /// Decides about a message that came with `retries` retries behind it.
    ///
    /// Whatever `retries` says, a message has had its attempt when it comes here, and gets no more than the
    /// budget again.
    pub fn judge(&self, outcome: &Outcome, retries: u32) -> Verdict {
        let attempts = retries.saturating_add(1);
        match outcome {
            Outcome::Applied | Outcome::Duplicate => Verdict::Ack,
            Outcome::Failed(Failure::Permanent(cause)) => {
                Verdict::Park { reason: Reason::Rejected, detail: format!("{cause:#}"), attempts }
            }
            Outcome::Failed(Failure::Retryable(cause)) if retries < self.max_retries => {
                Verdict::Retry { retry: attempts, delay: self.delay_of(attempts), detail: format!("{cause:#}") }
            }
            Outcome::Failed(Failure::Retryable(cause)) => {
                Verdict::Park { reason: Reason::RetriesExhausted, detail: format!("{cause:#}"), attempts }
            }
        }
    }

    /// Decides about a body that is no message.
    pub fn judge_undecodable(&self, undecodable: &Undecodable) -> Verdict {
        let reason = match undecodable {
            Undecodable::UnknownEvent(_) if self.ignore_unknown => return Verdict::Ack,
            Undecodable::UnknownEvent(_) => Reason::UnknownEvent,
            Undecodable::Malformed(_) => Reason::Malformed,
        };
        Verdict::Park { reason, detail: undecodable.to_string(), attempts: 1 }
    }

    /// The delays of all retries, shortest first, each once: there is a queue for each.
    pub fn delays(&self) -> Vec<Duration> {
        let mut delays: Vec<_> = (1..=self.max_retries).map(|retry| self.delay_of(retry)).collect();
        delays.dedup();
        delays
    }

    /// The delays of all retries together: how long a message that fails each time is on its way.
    pub fn all_delays(&self) -> Duration {
        (1..=self.max_retries).map(|retry| self.delay_of(retry)).sum()
    }

    fn delay_of(&self, retry: u32) -> Duration {
        let factor = self.multiplier.saturating_pow(retry.saturating_sub(1));
        self.delay.saturating_mul(factor).min(self.max_delay)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn policy(max_retries: u32) -> RetryPolicy {
        RetryPolicy {
            max_retries,
            delay: Duration::from_secs(1),
            multiplier: 2,
            max_delay: Duration::from_secs(5),
            ignore_unknown: false,
        }
    }

    fn retryable() -> Outcome {
        Outcome::Failed(Failure::Retryable(anyhow!("later")))
    }

    #[test]
    fn each_retry_waits_longer_up_to_the_limit() {
        let seconds: Vec<_> = (1..=5).map(|retry| policy(5).delay_of(retry).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 5, 5]);
        assert_eq!(policy(5).delays().len(), 4, "equal delays share a queue");
        assert_eq!(policy(5).all_delays().as_secs(), 17, "but each is waited for");
        assert_eq!(policy(u32::from(u8::MAX)).delay_of(200), Duration::from_secs(5), "no overflow");
    }

    #[test]
    fn a_failure_is_retried_until_the_budget_is_spent() {
        for retries in 0..3 {
            let Verdict::Retry { retry, .. } = policy(3).judge(&retryable(), retries) else { panic!("{retries}") };
            assert_eq!(retry, retries + 1);
        }
        for retries in [3, 4, u32::MAX] {
            let verdict = policy(3).judge(&retryable(), retries);
            assert!(matches!(verdict, Verdict::Park { reason: Reason::RetriesExhausted, .. }), "{retries}");
        }
    }

    #[test]
    fn a_budget_of_0_means_one_attempt() {
        let verdict = policy(0).judge(&retryable(), 0);
        assert!(matches!(verdict, Verdict::Park { reason: Reason::RetriesExhausted, attempts: 1, .. }));
        assert!(policy(0).delays().is_empty());
    }

    #[test]
    fn what_can_never_succeed_is_parked_at_once() {
        let verdict = policy(3).judge(&Outcome::Failed(Failure::Permanent(anyhow!("never"))), 0);
        assert!(matches!(verdict, Verdict::Park { reason: Reason::Rejected, attempts: 1, .. }));
    }

    #[test]
    fn unknown_events_are_parked_unless_they_are_to_be_ignored() {
        let unknown = Undecodable::UnknownEvent("x".to_owned());
        let mut policy = policy(3);
        assert!(matches!(policy.judge_undecodable(&unknown), Verdict::Park { reason: Reason::UnknownEvent, .. }));
        policy.ignore_unknown = true;
        assert_eq!(policy.judge_undecodable(&unknown), Verdict::Ack);
        let malformed = Undecodable::Malformed("x".to_owned());
        assert!(matches!(policy.judge_undecodable(&malformed), Verdict::Park { reason: Reason::Malformed, .. }));
    }
}
