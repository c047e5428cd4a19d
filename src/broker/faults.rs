//! What ended a connection, as the connection itself tells it.

use std::fmt;
use std::pin::Pin;

use futures_util::{FutureExt, Stream, StreamExt};
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::{Connection, ErrorKind, Event};

/// A message came that the client cannot read, which ended its connection. The broker counts that, and moves the message
/// when it has come as often as it may.
#[derive(Debug, thiserror::Error)]
#[error("a message came that cannot be read: {0}")]
pub struct Unreadable(String);

/// The faults of one connection.
///
/// What is under way when a connection ends learns of it in many ways: by the cause, by a channel in the wrong state, by no
/// answer at all. The connection knows the cause.
pub struct Faults(Pin<Box<dyn Stream<Item = Event> + Send>>);

impl Faults {
    /// The faults of this connection from now on.
    pub fn of(connection: &Connection) -> Self {
        Self(Box::pin(connection.events_listener()))
    }

    /// The message that could not be read, if one has ended the connection.
    pub fn unreadable(&mut self) -> Option<Unreadable> {
        while let Some(Some(event)) = self.0.next().now_or_never() {
            if let Event::Error(error) = event
                && is_unreadable(&error)
            {
                return Some(Unreadable(error.to_string()));
            }
        }
        None
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

/// Bytes in a header's name that are no UTF-8, or headers that the broker's own have made larger than a frame.
fn is_unreadable(error: &lapin::Error) -> bool {
    match error.kind() {
        ErrorKind::ParsingError(_) => true,
        ErrorKind::ProtocolError(error) => *error.kind() == AMQPErrorKind::Hard(AMQPHardError::FRAMEERROR),
        _ => false,
    }
}
