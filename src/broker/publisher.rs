//! Copies out: confirmed, mandatory, one at a time.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::StreamExt;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Event};
use tokio_util::task::AbortOnDropHandle;

use super::{AmqpUrl, BrokerError, Topology, answer, close, connect};
use crate::telemetry::{Link, Metrics, Placement};

/// Publishes on a connection of its own: a broker alarm blocks a connection that publishes, acknowledgements included.
///
/// Clones share the connection; each has a channel, and awaits one confirm at a time on it, for with several
/// outstanding lapin can take a returned message for a confirmed one.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    channel: Option<Channel>,
}

#[derive(Debug)]
struct Shared {
    url: AmqpUrl,
    topology: Topology,
    metrics: Metrics,
    line: tokio::sync::Mutex<Line>,
}

/// The shared connection, as far as there is one.
#[derive(Debug, Default)]
struct Line {
    current: Option<Current>,
    /// Whether a connection was tried for before.
    tried: bool,
}

#[derive(Debug)]
struct Current {
    connection: Arc<Connection>,
    alarm: Alarm,
}

/// Why a copy is not known to be in its queue; it must be taken as not being there.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The queue does not exist. It has been declared again, if that is ours to do.
    #[error("returned: {0}")]
    Returned(String),
    /// The queue does not take it: it is full, for instance.
    #[error("the queue refused it")]
    Refused,
    /// An alarm of the broker's: it lets nobody publish.
    #[error("the broker blocks publishing: {0}")]
    Blocked(String),
    /// The broker's or the network's.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The queue does not exist, and could not be declared.
    #[error("{0:#}")]
    Undeclared(anyhow::Error),
}

impl PublishError {
    fn placement(&self) -> Placement {
        match self {
            Self::Returned(_) | Self::Undeclared(_) => Placement::Returned,
            Self::Refused => Placement::Refused,
            Self::Blocked(_) => Placement::Blocked,
            Self::Broker(_) => Placement::Failed,
        }
    }
}

impl Clone for Publisher {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), channel: None }
    }
}

impl Publisher {
    /// A publisher that connects when it is first needed.
    pub fn new(url: AmqpUrl, topology: Topology, metrics: Metrics) -> Self {
        Self { shared: Arc::new(Shared { url, topology, metrics, line: Default::default() }), channel: None }
    }

    /// Puts a message into a queue. `properties` gets the largest frame of the connection, which bounds the headers.
    ///
    /// # Errors
    /// Whatever leaves it open whether the message is in the queue; it must be taken as not being there.
    pub async fn publish(
        &mut self,
        queue: &str,
        properties: impl Fn(u32) -> BasicProperties,
        body: &[u8],
    ) -> Result<(), PublishError> {
        let result = self.try_publish(queue, properties, body).await;
        self.shared.metrics.copy(result.as_ref().map_or_else(PublishError::placement, |()| Placement::Confirmed));
        result
    }

    async fn try_publish(
        &mut self,
        queue: &str,
        properties: impl Fn(u32) -> BasicProperties,
        body: &[u8],
    ) -> Result<(), PublishError> {
        let connection = self.shared.connection().await?;
        let properties = properties(connection.configuration().frame_max());
        let channel = match &self.channel {
            Some(channel) if channel.status().connected() => channel,
            _ => {
                let channel = answer(connection.create_channel()).await?;
                answer(channel.confirm_select(ConfirmSelectOptions::default())).await?;
                self.channel.insert(channel)
            }
        };
        let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirmed =
            async { channel.basic_publish("".into(), queue.into(), mandatory, body, properties).await?.await };
        let confirmation = answer(confirmed).await;
        if confirmation.is_err() {
            // A late confirm on this channel would be taken for the next message's.
            self.channel = None;
        }
        match confirmation? {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => {
                // The queue vanished. It is declared again for the next attempt, if that is ours to do.
                self.shared.topology.ensure(&connection).await.map_err(PublishError::Undeclared)?;
                Err(PublishError::Returned(returned.reply_text.to_string()))
            }
            // Every channel here asks for confirms: one that is not asked for means as little as a refusal.
            Confirmation::Nack(None) | Confirmation::NotRequested => Err(PublishError::Refused),
        }
    }

    /// Closes the shared connection.
    pub async fn close(self) {
        if let Some(current) = self.shared.line.lock().await.current.take() {
            close(&current.connection).await;
        }
    }
}

impl Shared {
    /// The connection to publish on, a new one if there is none.
    async fn connection(&self) -> Result<Arc<Connection>, PublishError> {
        let mut line = self.line.lock().await;
        if let Some(current) = &line.current
            && current.connection.status().connected()
        {
            return match current.alarm.reason() {
                Some(reason) => Err(PublishError::Blocked(reason)),
                None => Ok(current.connection.clone()),
            };
        }
        line.current = None;
        if std::mem::replace(&mut line.tried, true) {
            self.metrics.reconnect(Link::Publish);
        }
        let connection = Arc::new(connect(&self.url, "publish").await?);
        let alarm = Alarm::listen(&connection, self.metrics.clone());
        line.current = Some(Current { connection: connection.clone(), alarm });
        Ok(connection)
    }
}

/// An alarm of the broker's (memory, disk), as far as this connection was told of it.
#[derive(Debug)]
struct Alarm {
    reason: Arc<Mutex<Option<String>>>,
    metrics: Metrics,
    _listening: AbortOnDropHandle<()>,
}

impl Alarm {
    fn listen(connection: &Connection, metrics: Metrics) -> Self {
        let reason = Arc::new(Mutex::new(None));
        let (mut events, shared, gauge) = (connection.events_listener(), reason.clone(), metrics.clone());
        let listening = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                let now = match event {
                    Event::ConnectionBlocked(reason) => {
                        tracing::warn!(reason, "the broker blocks publishing, copies are held");
                        Some(reason)
                    }
                    Event::ConnectionUnblocked => {
                        tracing::info!("the broker lets publish again");
                        None
                    }
                    _ => continue,
                };
                gauge.publishing_blocked(now.is_some());
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = now;
            }
        });
        Self { reason, metrics, _listening: AbortOnDropHandle::new(listening) }
    }

    fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Alarm {
    /// The next connection is told by itself.
    fn drop(&mut self) {
        self.metrics.publishing_blocked(false);
    }
}
