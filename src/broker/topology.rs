//! The exchange, the queues and the bindings: their names, their arguments, and why.

use std::time::Duration;

use anyhow::{Context, anyhow};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::protocol::AMQPSoftError;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ExchangeKind};

use super::{BrokerError, answer};
use crate::message::{Event, RetryPolicy};
use crate::settings::AmqpSettings;

/// The type of all queues of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueType {
    /// Replicated and durable, counts deliveries, and dead-letters at least once.
    Quorum,
    /// Neither poison protection nor safe dead-lettering.
    Classic,
}

/// How often the broker hands out one message before it dead-letters it: what kills the process, or its connection,
/// each time. Far above what an ordinary day of restarts costs an innocent message.
const DELIVERY_LIMIT: i64 = 30;

/// Looking at failed messages must never wear them out. −1 means 0 to the broker, and absent means 20 on 4.x.
const NO_DELIVERY_LIMIT: i64 = 2_147_483_647;

/// What the service needs at the broker.
#[derive(Clone, Debug)]
pub struct Topology {
    exchange: String,
    queue: String,
    delays: Vec<Duration>,
    queue_type: QueueType,
    declare: bool,
}

impl Topology {
    /// The topology for these settings.
    pub fn new(amqp: &AmqpSettings, retry: &RetryPolicy) -> Self {
        Self {
            exchange: amqp.exchange.clone(),
            queue: amqp.queue.clone(),
            delays: retry.delays(),
            queue_type: amqp.queue_type,
            declare: amqp.declare,
        }
    }

    /// The queue that is consumed.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The exchange of all events.
    pub fn exchange(&self) -> &str {
        &self.exchange
    }

    /// The queue where copies wait for `delay`. The delay is in the name, so that a changed configuration can start
    /// beside the queues of the old one.
    pub fn retry_queue(&self, delay: Duration) -> String {
        format!("{}.retry.{}", self.queue, delay.as_millis())
    }

    /// The names of all retry queues.
    pub fn retry_queues(&self) -> Vec<String> {
        self.delays.iter().map(|delay| self.retry_queue(*delay)).collect()
    }

    /// The queue where failed messages wait for a person.
    pub fn failure_queue(&self) -> String {
        format!("{}.failed", self.queue)
    }

    /// Declares everything, or checks that it exists when it must not be declared. Nothing is ever deleted or changed.
    ///
    /// # Errors
    /// The broker's reason with the queue or exchange, and the way out.
    pub async fn ensure(&self, connection: &Connection) -> anyhow::Result<()> {
        if !self.declare {
            return self.check(connection).await;
        }
        let channel = answer(connection.create_channel()).await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let exchange = self.exchange.as_str();
        answer(channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default()))
            .await
            .map_err(|error| refused(&error, &format!("exchange {exchange}"), "amqp.exchange"))?;
        for (name, arguments) in self.queues() {
            self.queue_declare(&channel, &name, arguments).await?;
        }
        for event in Event::NAMES {
            let bind = channel.queue_bind(
                self.queue.as_str().into(),
                exchange.into(),
                event.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            );
            answer(bind).await.with_context(|| format!("cannot bind queue {} to exchange {exchange}", self.queue))?;
        }
        answer(channel.close(200, "declared".into())).await?;
        Ok(())
    }

    /// A passive declaration compares nothing but the name, and bindings cannot be asked for. Each on a channel of its
    /// own, which a refusal closes.
    async fn check(&self, connection: &Connection) -> anyhow::Result<()> {
        let exchange = self.exchange.as_str();
        let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let channel = answer(connection.create_channel()).await?;
        let look = channel.exchange_declare(exchange.into(), ExchangeKind::Topic, passive, FieldTable::default());
        must_exist(&format!("exchange {exchange}"), answer(look).await, &channel).await?;
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        for (name, _) in self.queues() {
            let channel = answer(connection.create_channel()).await?;
            let look = channel.queue_declare(name.as_str().into(), passive, FieldTable::default());
            must_exist(&format!("queue {name}"), answer(look).await.map(drop), &channel).await?;
        }
        Ok(())
    }

    /// All queues with their arguments, the targets of dead letters first: no message may find its way out missing.
    pub(super) fn queues(&self) -> Vec<(String, FieldTable)> {
        let mut queues = vec![(self.failure_queue(), self.failure_arguments())];
        queues.extend(self.delays.iter().map(|delay| (self.retry_queue(*delay), self.retry_arguments(*delay))));
        queues.push((self.queue.clone(), self.main_arguments()));
        queues
    }

    async fn queue_declare(&self, channel: &Channel, name: &str, arguments: FieldTable) -> anyhow::Result<()> {
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        answer(channel.queue_declare(name.into(), durable, arguments))
            .await
            .map_err(|error| refused(&error, &format!("queue {name}"), "amqp.queue"))?;
        Ok(())
    }

    fn main_arguments(&self) -> FieldTable {
        let mut arguments = self.dead_letter_arguments(&self.failure_queue());
        if self.queue_type == QueueType::Quorum {
            insert(&mut arguments, "x-delivery-limit", AMQPValue::LongLongInt(DELIVERY_LIMIT));
        }
        arguments
    }

    fn retry_arguments(&self, delay: Duration) -> FieldTable {
        let mut arguments = self.dead_letter_arguments(&self.queue);
        // The queue's and not the messages': one queue a delay keeps them in the order in which they end. No expiry of
        // the queue itself: it would take the messages with it.
        let milliseconds = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
        insert(&mut arguments, "x-message-ttl", AMQPValue::LongLongInt(milliseconds));
        arguments
    }

    fn failure_arguments(&self) -> FieldTable {
        let mut arguments = self.type_arguments();
        if self.queue_type == QueueType::Quorum {
            insert(&mut arguments, "x-delivery-limit", AMQPValue::LongLongInt(NO_DELIVERY_LIMIT));
        }
        arguments
    }

    fn type_arguments(&self) -> FieldTable {
        let mut arguments = FieldTable::default();
        let queue_type = match self.queue_type {
            QueueType::Quorum => "quorum",
            QueueType::Classic => "classic",
        };
        insert(&mut arguments, "x-queue-type", AMQPValue::LongString(queue_type.into()));
        arguments
    }

    /// Dead letters go by the default exchange straight to a queue: no other service gets them.
    fn dead_letter_arguments(&self, target: &str) -> FieldTable {
        let mut arguments = self.type_arguments();
        insert(&mut arguments, "x-dead-letter-exchange", AMQPValue::LongString("".into()));
        insert(&mut arguments, "x-dead-letter-routing-key", AMQPValue::LongString(target.into()));
        insert(&mut arguments, "x-overflow", AMQPValue::LongString("reject-publish".into()));
        if self.queue_type == QueueType::Quorum {
            // The broker keeps a dead letter until its target has it. Needs reject-publish, and is refused by classic
            // queues.
            insert(&mut arguments, "x-dead-letter-strategy", AMQPValue::LongString("at-least-once".into()));
        }
        arguments
    }
}

/// Judges a look at something that is not to be declared.
async fn must_exist(what: &str, found: Result<(), BrokerError>, channel: &Channel) -> anyhow::Result<()> {
    match found {
        Ok(()) => Ok(answer(channel.close(200, "checked".into())).await?),
        // RabbitMQ 4.3 lets only those look who may configure it. If it is missing, that shows when it is needed.
        Err(error) if error.is(AMQPSoftError::ACCESSREFUSED) => {
            tracing::debug!(what, "may not be looked at, taken as being there");
            Ok(())
        }
        Err(error) => Err(error).with_context(|| format!("{what} must exist, for amqp.declare is false")),
    }
}

fn insert(table: &mut FieldTable, name: &str, value: AMQPValue) {
    table.insert(name.into(), value);
}

/// The broker's own text names what differs; this adds the way out.
fn refused(error: &BrokerError, what: &str, key: &str) -> anyhow::Error {
    match error.is(AMQPSoftError::PRECONDITIONFAILED) {
        true => anyhow!(
            "cannot declare {what}: {error}. Nothing was changed. Make it fit by hand, choose another name ({key}) or \
             type (amqp.queue_type), or take it as it is with amqp.declare = false"
        ),
        false => anyhow!("cannot declare {what}: {error}"),
    }
}
