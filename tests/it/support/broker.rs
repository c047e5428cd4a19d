//! The broker as a test sees it: publishes, counts and takes messages by itself.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeleteOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

/// A message taken out of a queue.
#[derive(Debug)]
pub struct Message {
    pub body: Vec<u8>,
    pub properties: BasicProperties,
    pub redelivered: bool,
}

impl Message {
    /// A header as it is.
    pub fn header(&self, name: &str) -> Option<&AMQPValue> {
        self.properties.headers().as_ref()?.inner().get(name)
    }

    /// A header that must be text.
    pub fn text(&self, name: &str) -> String {
        match self.header(name) {
            Some(AMQPValue::LongString(text)) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
            other => panic!("header {name} is {other:?}"),
        }
    }
}

/// One test's exchange and queues.
#[derive(Debug)]
pub struct Broker {
    connection: Connection,
    channel: Channel,
    name: String,
    published: Mutex<Vec<Vec<u8>>>,
    taken: AtomicI64,
}

impl Broker {
    pub async fn connect(url: &str, name: &str) -> Self {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("the broker");
        let channel = connection.create_channel().await.expect("a channel");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        Self { connection, channel, name: name.to_owned(), published: Mutex::default(), taken: AtomicI64::new(0) }
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    pub fn exchange(&self) -> String {
        format!("{}.events", self.name)
    }

    pub fn queue(&self) -> String {
        format!("{}.stock.events", self.name)
    }

    pub fn retry_queue(&self, milliseconds: u32) -> String {
        format!("{}.retry.{milliseconds}", self.queue())
    }

    pub fn failure_queue(&self) -> String {
        format!("{}.failed", self.queue())
    }

    /// Publishes an event's body under its name, as a relay would.
    pub async fn publish(&self, event_name: &str, body: impl AsRef<[u8]>) {
        self.publish_with(event_name, body, BasicProperties::default().with_delivery_mode(2)).await;
    }

    /// Publishes with these properties; the broker has it when this returns.
    pub async fn publish_with(&self, routing_key: &str, body: impl AsRef<[u8]>, properties: BasicProperties) {
        self.send(&self.exchange(), routing_key, body.as_ref(), properties).await;
    }

    /// Publishes straight into a queue, as a person does who sends a message again.
    pub async fn send_to(&self, queue: &str, message: &Message) {
        self.send("", queue, &message.body, message.properties.clone()).await;
    }

    async fn send(&self, exchange: &str, routing_key: &str, body: &[u8], properties: BasicProperties) {
        let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm =
            self.channel.basic_publish(exchange.into(), routing_key.into(), mandatory, body, properties).await;
        let confirmation = confirm.expect("a publish").await.expect("a confirm");
        assert_eq!(confirmation, Confirmation::Ack(None), "published to {exchange:?} {routing_key:?}");
        self.published.lock().expect("no panic").push(body.to_vec());
    }

    /// How many messages this test has published.
    pub fn published(&self) -> i64 {
        i64::try_from(self.published.lock().expect("no panic").len()).expect("a count")
    }

    /// How many messages this test has taken out of queues.
    pub fn taken(&self) -> i64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The ids of all published bodies that have a canonical one.
    pub fn distinct_valid_events(&self) -> HashSet<String> {
        let published = self.published.lock().expect("no panic");
        let ids = published.iter().filter_map(|body| {
            let envelope: serde_json::Value = serde_json::from_slice(body).ok()?;
            Some(envelope.get("event_id")?.as_str()?.to_lowercase())
        });
        ids.collect()
    }

    /// Messages that are ready in a queue; 0 when it does not exist.
    pub async fn depth(&self, queue: &str) -> u32 {
        self.passive(queue).await.map_or(0, |(messages, _)| messages)
    }

    /// Consumers of the main queue.
    pub async fn consumers(&self) -> u32 {
        self.passive(&self.queue()).await.map_or(0, |(_, consumers)| consumers)
    }

    async fn passive(&self, queue: &str) -> Option<(u32, u32)> {
        // A channel of its own: a queue that is missing closes it.
        let channel = self.connection.create_channel().await.expect("a channel");
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
        channel.close(200, "".into()).await.expect("a goodbye");
        Some((queue.message_count(), queue.consumer_count()))
    }

    /// Messages that are ready in the main queue and in the retry queues of the usual ladders.
    pub async fn in_work(&self) -> u32 {
        let mut messages = self.depth(&self.queue()).await;
        for delay in [50, 100, 200] {
            messages += self.depth(&self.retry_queue(delay)).await;
        }
        messages
    }

    /// Takes all messages that are ready in a queue.
    pub async fn take(&self, queue: &str) -> Vec<Message> {
        let mut messages = Vec::new();
        while let Some(got) =
            self.channel.basic_get(queue.into(), BasicGetOptions::default()).await.expect("an existing queue")
        {
            got.delivery.acker.ack(BasicAckOptions::default()).await.expect("an acknowledgement");
            self.taken.fetch_add(1, Ordering::Relaxed);
            messages.push(Message {
                body: got.delivery.data,
                properties: got.delivery.properties,
                redelivered: got.delivery.redelivered,
            });
        }
        messages
    }

    /// Declares a queue of the test's own, with these arguments.
    pub async fn declare(&self, queue: &str, arguments: &[(&str, AMQPValue)]) {
        let table: BTreeMap<_, _> = arguments.iter().map(|(name, value)| ((*name).into(), value.clone())).collect();
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(queue.into(), durable, table.into()).await.expect("a new queue");
    }

    /// Binds a queue of the test's own to the exchange of the events.
    pub async fn bind(&self, queue: &str, routing_key: &str) {
        let bind = self.channel.queue_bind(
            queue.into(),
            self.exchange().into(),
            routing_key.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        bind.await.expect("a binding");
    }

    /// Deletes a queue, with all that is in it.
    pub async fn delete(&self, queue: &str) {
        self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.expect("a deletion");
    }

    /// Removes everything of the test.
    pub async fn remove(&self) {
        for queue in [self.queue(), self.failure_queue()] {
            self.delete(&queue).await;
        }
        for delay in [50, 100, 200] {
            self.delete(&self.retry_queue(delay)).await;
        }
        let exchange = self.exchange();
        self.channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default()).await.expect("a deletion");
        self.connection.close(200, "".into()).await.expect("a goodbye");
    }
}

/// A header value that is text.
pub fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text))
}
