//! The only home of AMQP: connections, topology, deliveries in, acknowledgements and copies out.

mod connection;
mod consumer;
pub mod examine;
mod faults;
pub mod headers;
mod publisher;
mod queues;
mod settler;
mod topology;
mod url;

use std::time::Duration;

pub use lapin::Connection;
use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPSoftError};

pub use connection::{close, connect};
pub use consumer::{Limits, Parcel, Received, Subscription};
pub use faults::{Faults, Unreadable};
pub use publisher::Publisher;
pub use queues::oldest_waiting;
pub use settler::Settler;
pub use topology::{QueueType, Topology};
pub use url::AmqpUrl;

use crate::tls::TlsFault;

/// The longest that a request to the broker may take; it answers within milliseconds, or not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the broker could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// It said so, or the connection did. No source: lapin's text holds that of its own sources.
    #[error("{0}")]
    Lapin(lapin::Error),
    /// No connection by TLS came about.
    #[error("{0}")]
    Tls(TlsFault),
    /// It is something else; a TLS listener, often.
    #[error("what answers there does not speak AMQP 0-9-1; a TLS listener wants amqps:// in AMQP_URL (amqp.url)")]
    Stranger,
    /// It said nothing for so long.
    #[error("no answer within {0:?}")]
    Silent(Duration),
}

impl BrokerError {
    /// Whether the broker refused with this code.
    fn is(&self, code: AMQPSoftError) -> bool {
        let Self::Lapin(error) = self else { return false };
        matches!(error.kind(), ErrorKind::ProtocolError(error) if *error.kind() == AMQPErrorKind::Soft(code))
    }
}

impl From<lapin::Error> for BrokerError {
    fn from(error: lapin::Error) -> Self {
        let fault = match error.kind() {
            ErrorKind::IOError(error) => TlsFault::find(&**error, &url::TLS),
            _ => None,
        };
        fault.map_or(Self::Lapin(error), Self::Tls)
    }
}

/// Waits for an answer of the broker, but not for ever.
async fn answer<T>(request: impl Future<Output = lapin::Result<T>>) -> Result<T, BrokerError> {
    within(ANSWER_TIMEOUT, request).await
}

async fn within<T>(limit: Duration, request: impl Future<Output = lapin::Result<T>>) -> Result<T, BrokerError> {
    match tokio::time::timeout(limit, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(BrokerError::Silent(limit)),
    }
}
