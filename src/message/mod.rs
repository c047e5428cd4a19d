//! What a delivery means: bytes to [`Message`], and what became of it. No socket and no database here.

mod envelope;
mod event;
mod outcome;
mod retry_policy;

use chrono::{DateTime, Utc};

pub use envelope::{EventId, decode};
pub use event::{Event, Line, OrderPlaced, OrderStatusChanged};
pub use outcome::{Failure, Interruption, Outcome, Reason, Stop, Suspicion, Verdict};
pub use retry_policy::RetryPolicy;

/// A delivery's body, decoded: nothing in it can be wrong any more.
#[derive(Debug)]
pub struct Message {
    /// What makes two messages the same event.
    pub id: EventId,
    /// When it happened, by the producer's clock.
    pub occurred_at: DateTime<Utc>,
    /// What happened.
    pub event: Event,
}

/// Why a body is no message of ours. Permanent: no later attempt could read it.
#[derive(Debug, thiserror::Error)]
pub enum Undecodable {
    /// It breaks the contract; the text names the place and the rule.
    #[error("{0}")]
    Malformed(String),
    /// It is an event, but none that has a handler; the name is quoted and shortened.
    #[error("event_name: no handler for {0}")]
    UnknownEvent(String),
}
