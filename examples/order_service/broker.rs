//! The broker, seen from outside the stock service: publish, count, look into a queue.

use crate::management::Management;
use anyhow::{Context as _, Result, bail, ensure};
use chrono::Utc;
use futures_util::future;
use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties, ErrorKind, ExchangeKind,
    options::{
        BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
        ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions,
    },
    types::{AMQPValue, FieldTable},
};
use uuid::Uuid;

/// Messages on their way at once. One at a time would cost a round trip each.
const WINDOW: usize = 256;
/// The delays of the stock service's retries, in milliseconds, as they are by default.
const RETRY_DELAYS: [u32; 3] = [1000, 2000, 4000];
const NOT_FOUND: u16 = 404;

pub(crate) struct Broker {
    connection: Connection,
    exchange: String,
    queue: String,
    management: Option<Management>,
}

/// A message to publish.
pub(crate) struct Message<'a> {
    pub(crate) id: Uuid,
    pub(crate) order_id: Option<Uuid>,
    pub(crate) routing_key: &'a str,
    pub(crate) body: &'a [u8],
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Depth {
    /// Messages that wait. Those in a consumer's hands are not among them.
    pub(crate) messages: u32,
    pub(crate) consumers: u32,
}

/// The stock service's queues.
pub(crate) struct Depths {
    pub(crate) main: Depth,
    /// Messages in the consumers' hands, as they were at most 5 s ago. Nobody knows of
    /// running consumers whose broker has no management page.
    pub(crate) in_hand: Option<u32>,
    /// Added up over the delays.
    pub(crate) retry: u32,
    pub(crate) failed: u32,
}

/// A message of the failure queue.
pub(crate) struct Failed {
    pub(crate) body: Vec<u8>,
    pub(crate) reason: String,
    pub(crate) detail: String,
    pub(crate) attempts: Option<i64>,
}

impl Broker {
    pub(crate) async fn connect(url: &str, exchange: &str, queue: &str, management: Option<u16>) -> Result<Self> {
        let management = management.map(|port| Management::new(url, port)).transpose()?;
        let connection =
            Connection::connect(url, ConnectionProperties::default()).await.context("cannot connect to RabbitMQ")?;
        Ok(Self { connection, exchange: exchange.to_owned(), queue: queue.to_owned(), management })
    }

    pub(crate) fn queue(&self) -> &str {
        &self.queue
    }

    fn retry_queues(&self) -> impl Iterator<Item = String> {
        RETRY_DELAYS.into_iter().map(|delay| format!("{}.retry.{delay}", self.queue))
    }

    pub(crate) fn failure_queue(&self) -> String {
        format!("{}.failed", self.queue)
    }

    /// A channel that publishes with confirms, to the exchange, which it creates if need be.
    pub(crate) async fn publisher(&self) -> Result<Publisher<'_>> {
        let channel = self.connection.create_channel().await?;
        channel
            .exchange_declare(
                self.exchange.as_str().into(),
                ExchangeKind::Topic,
                ExchangeDeclareOptions { durable: true, ..Default::default() },
                FieldTable::default(),
            )
            .await
            .with_context(|| format!("cannot declare the exchange {}", self.exchange))?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Publisher { channel, exchange: &self.exchange })
    }

    /// A queue that doesn't exist is an empty one.
    pub(crate) async fn depth(&self, queue: &str) -> Result<Depth> {
        // A channel for each: the answer "not found" closes it.
        let channel = self.connection.create_channel().await?;
        match channel.queue_declare(queue.into(), QueueDeclareOptions::default().passive(), FieldTable::default()).await
        {
            Ok(found) => {
                channel.close(200, "done".into()).await?;
                Ok(Depth { messages: found.message_count(), consumers: found.consumer_count() })
            }
            Err(error) => match error.kind() {
                ErrorKind::ProtocolError(answer) if answer.get_id() == NOT_FOUND => Ok(Depth::default()),
                _ => Err(error).with_context(|| format!("cannot count the queue {queue}")),
            },
        }
    }

    pub(crate) async fn depths(&self) -> Result<Depths> {
        let mut retry = 0;
        for queue in self.retry_queues() {
            retry += self.depth(&queue).await?.messages;
        }
        let failed = self.depth(&self.failure_queue()).await?.messages;
        let main = self.depth(&self.queue).await?;
        let in_hand = match &self.management {
            _ if main.consumers == 0 => Some(0),
            Some(management) => Some(management.unsettled(&self.queue).await?),
            None => None,
        };
        Ok(Depths { main, in_hand, retry, failed })
    }

    /// Reads all messages of the failure queue and gives them back.
    pub(crate) async fn failed_messages(&self) -> Result<Vec<Failed>> {
        let queue = self.failure_queue();
        let mut found = Vec::new();
        if self.depth(&queue).await?.messages == 0 {
            return Ok(found);
        }
        let channel = self.connection.create_channel().await?;
        let mut last_tag = None;
        while let Some(message) = channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await? {
            last_tag = Some(message.delivery.delivery_tag);
            let headers = message.delivery.properties.headers().clone().unwrap_or_default();
            let header = |name: &str| headers.inner().get(name);
            found.push(Failed {
                reason: header("failure-reason").map(text).unwrap_or_default(),
                detail: header("failure-detail").map(text).unwrap_or_default(),
                attempts: header("failed-attempts").and_then(integer),
                body: message.delivery.data,
            });
        }
        if let Some(tag) = last_tag {
            channel.basic_nack(tag, BasicNackOptions { multiple: true, requeue: true }).await?;
        }
        // Waits for the broker's answer, and so for the return as well.
        channel.close(200, "done".into()).await?;
        Ok(found)
    }

    /// Deletes the exchange and the stock service's queues, with all that is in them.
    pub(crate) async fn remove_topology(&self) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        let queues = [self.queue.clone(), self.failure_queue()];
        for queue in queues.into_iter().chain(self.retry_queues()) {
            channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        channel.exchange_delete(self.exchange.as_str().into(), ExchangeDeleteOptions::default()).await?;
        Ok(())
    }
}

pub(crate) struct Publisher<'a> {
    channel: Channel,
    exchange: &'a str,
}

impl Publisher<'_> {
    /// The size in which to cut what is to be published.
    pub(crate) const WINDOW: usize = WINDOW;

    /// Publishes a window of messages and returns when the broker has confirmed them all.
    pub(crate) async fn publish(&self, window: &[Message<'_>]) -> Result<()> {
        ensure!(window.len() <= WINDOW, "a window of {} messages is too large", window.len());
        let mut confirms = Vec::with_capacity(window.len());
        for message in window {
            let mut properties = BasicProperties::default()
                .with_message_id(message.id.to_string().into())
                .with_content_type("application/json".into())
                .with_timestamp(u64::try_from(Utc::now().timestamp())?)
                .with_delivery_mode(2); // persistent
            if let Some(order_id) = message.order_id {
                properties = properties.with_correlation_id(order_id.to_string().into());
            }
            // Mandatory: a message that no queue takes comes back instead of vanishing.
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let routing_key = message.routing_key.into();
            confirms.push(
                self.channel
                    .basic_publish(self.exchange.into(), routing_key, options, message.body, properties)
                    .await?,
            );
        }
        // A return may be handed to the wrong message of the window, but it is not lost:
        // so one return makes the whole window an error.
        for confirm in future::try_join_all(confirms).await? {
            ensure!(confirm.is_ack(), "the broker refused a message");
            if let Some(returned) = confirm.take_message() {
                bail!(
                    "no queue of the exchange {} takes {}: has the stock service declared its queue?",
                    self.exchange,
                    returned.delivery.routing_key
                );
            }
        }
        Ok(())
    }
}

fn text(value: &AMQPValue) -> String {
    match value {
        AMQPValue::LongString(text) => text.to_string(),
        AMQPValue::ShortString(text) => text.to_string(),
        other => format!("{other:?}"),
    }
}

fn integer(value: &AMQPValue) -> Option<i64> {
    match value {
        AMQPValue::ShortShortInt(number) => Some(i64::from(*number)),
        AMQPValue::ShortInt(number) => Some(i64::from(*number)),
        AMQPValue::LongInt(number) => Some(i64::from(*number)),
        AMQPValue::LongUInt(number) => Some(i64::from(*number)),
        AMQPValue::LongLongInt(number) => Some(*number),
        _ => None,
    }
}
