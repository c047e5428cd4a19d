//! Copies out: confirmed, mandatory, one at a time.

use std::sync::Arc;

use anyhow::Context;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use tokio::sync::Mutex;

use super::{AmqpUrl, Topology, answer, close, connect};

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
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Clone for Publisher {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), channel: None }
    }
}

impl Publisher {
    /// A publisher that connects when it is first needed.
    pub fn new(url: AmqpUrl, topology: Topology) -> Self {
        Self { shared: Arc::new(Shared { url, topology, connection: Mutex::new(None) }), channel: None }
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
    ) -> anyhow::Result<()> {
        let result = self.try_publish(queue, properties, body).await;
        result.with_context(|| format!("cannot place a copy in queue {queue}"))
    }

    async fn try_publish(
        &mut self,
        queue: &str,
        properties: impl Fn(u32) -> BasicProperties,
        body: &[u8],
    ) -> anyhow::Result<()> {
        let connection = self.shared.connection().await?;
        anyhow::ensure!(!connection.status().blocked(), "the broker blocks publishing");
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
                self.shared.topology.ensure(&connection).await?;
                anyhow::bail!("returned: {}", returned.reply_text)
            }
            Confirmation::Nack(None) => anyhow::bail!("the queue refused it"),
            Confirmation::NotRequested => anyhow::bail!("the channel does not confirm"),
        }
    }

    /// Closes the shared connection.
    pub async fn close(self) {
        if let Some(connection) = self.shared.connection.lock().await.take() {
            close(&connection).await;
        }
    }
}

impl Shared {
    async fn connection(&self) -> anyhow::Result<Arc<Connection>> {
        let mut shared = self.connection.lock().await;
        match &*shared {
            Some(connection) if connection.status().connected() => Ok(connection.clone()),
            _ => {
                let connection = Arc::new(connect(&self.url, "publish").await?);
                *shared = Some(connection.clone());
                Ok(connection)
            }
        }
    }
}
