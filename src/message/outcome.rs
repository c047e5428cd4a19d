//! What happened to a message, and what the broker is to be told.

use std::time::Duration;

/// What the database did with one message.
#[derive(Debug)]
pub enum Outcome {
    /// Its handlers ran and their transaction is committed.
    Applied,
    /// An earlier copy of the event was applied; no handler ran.
    Duplicate,
    /// The event could not be applied; nothing of it is in the database.
    Failed(Failure),
}

/// Why an event could not be applied: the event's fault, or at least nobody else's.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A later attempt may succeed.
    #[error("{0:#}")]
    Retryable(anyhow::Error),
    /// No later attempt can succeed.
    #[error("{0:#}")]
    Permanent(anyhow::Error),
}

/// The service could not work: the database is away or refuses everybody. Says nothing about the event,
/// and costs it no attempt.
#[derive(Debug, thiserror::Error)]
#[error("{cause:#}")]
pub struct Interruption {
    /// What the database or the network said.
    pub cause: anyhow::Error,
    /// Whether an event could have caused it.
    pub suspicion: Suspicion,
}

/// Whether an interruption may be the work of the event that met it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspicion {
    /// Hardly: the server refuses everybody.
    None,
    /// It waited for a lock or a result as long as it may, again and again.
    Timeout,
    /// Its connection broke.
    BrokenConnection,
}

/// Why a transaction ended without a commit.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The event's fault.
    #[error(transparent)]
    Event(#[from] Failure),
    /// Others were in the way; the same again may go through.
    #[error("{cause:#}")]
    Contention {
        /// What the database said.
        cause: anyhow::Error,
        /// It waited as long as it may (a lock, a statement), rather than being refused at once.
        timed_out: bool,
    },
    /// Nobody's event could have been applied.
    #[error(transparent)]
    Service(#[from] Interruption),
}

impl Stop {
    /// Says what was being done.
    #[must_use]
    pub fn during(self, step: &'static str) -> Self {
        match self {
            Self::Event(Failure::Retryable(cause)) => Failure::Retryable(cause.context(step)).into(),
            Self::Event(Failure::Permanent(cause)) => Failure::Permanent(cause.context(step)).into(),
            Self::Contention { cause, timed_out } => Self::Contention { cause: cause.context(step), timed_out },
            Self::Service(Interruption { cause, suspicion }) => {
                Interruption { cause: cause.context(step), suspicion }.into()
            }
        }
    }
}

/// What the broker is told about a delivery.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Done with: acknowledge.
    Ack,
    /// A copy goes to the retry queue of this delay; then acknowledge.
    Retry {
        /// Which retry this will be, from 1.
        retry: u32,
        /// How long the copy waits.
        delay: Duration,
        /// What went wrong.
        detail: String,
    },
    /// A copy goes to the failure queue; then acknowledge.
    Park {
        /// The kind of failure.
        reason: Reason,
        /// What went wrong.
        detail: String,
        /// Runs of the handlers, the first included.
        attempts: u32,
    },
}

/// Why a message is in the failure queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The body breaks the contract.
    Malformed,
    /// No handler for the event.
    UnknownEvent,
    /// A handler or the database refused it for good.
    Rejected,
    /// It failed as often as it may.
    RetriesExhausted,
}

impl Reason {
    /// All reasons that there are.
    pub const ALL: [Self; 4] = [Self::Malformed, Self::UnknownEvent, Self::Rejected, Self::RetriesExhausted];

    /// The reason as it stands in the `failure-reason` header.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownEvent => "unknown-event",
            Self::Rejected => "rejected",
            Self::RetriesExhausted => "retries-exhausted",
        }
    }
}
