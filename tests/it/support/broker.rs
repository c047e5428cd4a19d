//! The broker as a test sees it: publishes, counts and takes messages by itself.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::events::{Order, StatusChange};
use super::message::{Message, persistent, table, text};
use super::{PATIENCE, eventually};
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeleteOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPSoftError};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ErrorKind};

/// The retry queues of the ordinary test: 50, 100 and 200 ms.
const LADDER: [u32; 3] = [50, 100, 200];

/// One test's exchange and queues.
#[derive(Debug)]
pub struct Broker {
    url: String,
    name: String,
    link: tokio::sync::Mutex<Option<Link>>,
    published: Mutex<Vec<Vec<u8>>>,
    /// Bodies of messages that the test has taken; two copies of one message count once.
    taken: Mutex<HashSet<Vec<u8>>>,
    accounted_for: AtomicI64,
    /// The delays of all retry queues that the test has the service use.
    delays: Mutex<BTreeSet<u32>>,
    /// Further queues of the test.
    declared: Mutex<BTreeSet<String>>,
}

/// A connection of the test's own, and a channel that confirms.
#[derive(Clone, Debug)]
struct Link {
    connection: Arc<Connection>,
    channel: Channel,
}

impl Link {
    async fn open(url: &str) -> lapin::Result<Self> {
        let connection = Arc::new(Connection::connect(url, ConnectionProperties::default()).await?);
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { connection, channel })
    }

    fn is_alive(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }
}

impl Broker {
    pub fn new(url: &str, name: &str) -> Self {
        Self {
            url: url.to_owned(),
            name: name.to_owned(),
            link: tokio::sync::Mutex::default(),
            published: Mutex::default(),
            taken: Mutex::default(),
            accounted_for: AtomicI64::new(0),
            delays: Mutex::new(LADDER.into()),
            declared: Mutex::default(),
        }
    }

    /// Connects, or connects again when the connection is gone.
    async fn link(&self) -> Link {
        let mut current = self.link.lock().await;
        let connecting = async {
            loop {
                match &*current {
                    Some(link) if link.is_alive() => return link.clone(),
                    _ => *current = Link::open(&self.url).await.ok(),
                }
                if current.is_none() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        tokio::time::timeout(PATIENCE, connecting).await.expect("the broker in time")
    }

    /// Connects anew: a connection that the broker is closing may look well for another moment.
    pub async fn reconnect(&self) {
        *self.link.lock().await = None;
        self.link().await;
    }

    pub async fn connection(&self) -> Arc<Connection> {
        self.link().await.connection
    }

    async fn channel(&self) -> Channel {
        self.link().await.channel
    }

    /// What all names of the test begin with.
    pub fn name(&self) -> &str {
        &self.name
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

    /// A name for a queue of the test's own.
    pub fn own_queue(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }

    /// Remembers a retry queue beyond the ordinary ones, to count and to remove it.
    pub fn also_delays(&self, milliseconds: u32) {
        self.delays.lock().expect("no panic").insert(milliseconds);
    }

    /// All queues of the service.
    pub fn queues(&self) -> Vec<String> {
        [self.queue(), self.failure_queue()].into_iter().chain(self.retry_queues()).collect()
    }

    fn retry_queues(&self) -> Vec<String> {
        self.delays.lock().expect("no panic").iter().map(|delay| self.retry_queue(*delay)).collect()
    }

    /// Publishes an event's body under its name, as a relay would.
    pub async fn publish(&self, event_name: &str, body: impl AsRef<[u8]>) {
        self.publish_with(event_name, body, persistent()).await;
    }

    /// Publishes many bodies under one name, in this order, without waiting for each; the broker has them all when this
    /// returns.
    pub async fn publish_all(&self, event_name: &str, bodies: impl IntoIterator<Item = String>) {
        let (mut confirms, channel) = (Vec::new(), self.channel().await);
        for body in bodies {
            let (exchange, options) = (self.exchange(), BasicPublishOptions::default());
            let publish =
                channel.basic_publish(exchange.into(), event_name.into(), options, body.as_bytes(), persistent());
            confirms.push(publish.await.expect("a publish"));
            self.published.lock().expect("no panic").push(body.into_bytes());
        }
        for confirm in confirms {
            assert_eq!(confirm.await.expect("a confirm"), Confirmation::Ack(None));
        }
    }

    /// Publishes with these properties; the broker has it when this returns.
    pub async fn publish_with(&self, routing_key: &str, body: impl AsRef<[u8]>, properties: BasicProperties) {
        self.send(&self.exchange(), routing_key, body.as_ref(), properties).await;
    }

    /// Publishes straight into a queue, as a person does who sends a message again.
    pub async fn send_to(&self, queue: &str, message: &Message) {
        self.send("", queue, &message.body, message.properties.clone()).await;
    }

    /// Publishes to any exchange; the message must be routed, and the broker has it when this returns.
    pub async fn send(&self, exchange: &str, routing_key: &str, body: &[u8], properties: BasicProperties) {
        self.send_on(&self.channel().await, exchange, routing_key, body, properties).await;
    }

    /// Publishes on a channel of the caller's.
    pub async fn send_on(
        &self,
        channel: &Channel,
        exchange: &str,
        routing_key: &str,
        body: &[u8],
        properties: BasicProperties,
    ) {
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm = channel.basic_publish(exchange.into(), routing_key.into(), mandatory, body, properties).await;
        let confirmation = confirm.expect("a publish").await.expect("a confirm");
        assert_eq!(confirmation, Confirmation::Ack(None), "published to {exchange:?} {routing_key:?}");
        self.published.lock().expect("no panic").push(body.to_vec());
    }

    /// Remembers what another program has published for this test.
    pub fn also_published<'m>(&self, bodies: impl IntoIterator<Item = &'m str>) {
        self.published.lock().expect("no panic").extend(bodies.into_iter().map(|body| body.as_bytes().to_vec()));
    }

    /// How many messages this test has published.
    pub fn published(&self) -> i64 {
        i64::try_from(self.published.lock().expect("no panic").len()).expect("a count")
    }

    /// How many different messages this test has taken out of queues.
    pub fn taken(&self) -> i64 {
        let taken = i64::try_from(self.taken.lock().expect("no panic").len()).expect("a count");
        taken + self.accounted_for.load(Ordering::Relaxed)
    }

    /// Accounts for so many messages that the service may acknowledge and forget.
    pub fn account_for(&self, messages: i64) {
        self.accounted_for.fetch_add(messages, Ordering::Relaxed);
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
        self.consumers_of(&self.queue()).await
    }

    /// Consumers of a queue.
    pub async fn consumers_of(&self, queue: &str) -> u32 {
        self.passive(queue).await.map_or(0, |(_, consumers)| consumers)
    }

    async fn passive(&self, queue: &str) -> Option<(u32, u32)> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let asking = async {
            loop {
                // A channel of its own: a queue that is missing closes it.
                let asked = async {
                    let channel = self.connection().await.create_channel().await?;
                    let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await?;
                    channel.close(200, "".into()).await?;
                    lapin::Result::Ok((queue.message_count(), queue.consumer_count()))
                };
                match asked.await {
                    Ok(counts) => return Some(counts),
                    Err(error) if is_not_found(&error) => return None,
                    // The connection is gone, and the next one may know more.
                    Err(_) => self.reconnect().await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, asking).await.expect("an answer in time")
    }

    /// Whether a queue exists.
    pub async fn exists(&self, queue: &str) -> bool {
        self.passive(queue).await.is_some()
    }

    /// Messages that are ready in the main queue and in the retry queues.
    pub async fn in_work(&self) -> u32 {
        let mut messages = self.depth(&self.queue()).await;
        for queue in self.retry_queues() {
            messages += self.depth(&queue).await;
        }
        messages
    }

    /// Waits until so many messages are ready in a queue.
    pub async fn has(&self, queue: &str, messages: u32) {
        eventually(&format!("{messages} messages in {queue}"), async || self.depth(queue).await == messages).await;
    }

    /// Waits until so many messages are in the failure queue, and takes them.
    pub async fn failed(&self, messages: u32) -> Vec<Message> {
        self.has(&self.failure_queue(), messages).await;
        self.take(&self.failure_queue()).await
    }

    /// Takes all messages that are ready in a queue.
    pub async fn take(&self, queue: &str) -> Vec<Message> {
        let messages = self.overhear(queue).await;
        self.taken.lock().expect("no panic").extend(messages.iter().map(|message| message.body.clone()));
        messages
    }

    /// Takes all messages that are ready in a queue of the test's own, which got them beside the service.
    pub async fn overhear(&self, queue: &str) -> Vec<Message> {
        let mut messages = Vec::new();
        while let Some(got) =
            self.channel().await.basic_get(queue.into(), BasicGetOptions::default()).await.expect("an existing queue")
        {
            got.delivery.acker.ack(BasicAckOptions::default()).await.expect("an acknowledgement");
            messages.push(Message { body: got.delivery.data, properties: got.delivery.properties });
        }
        messages
    }

    /// Declares a queue with these arguments.
    pub async fn declare(&self, queue: &str, arguments: &[(&str, AMQPValue)]) {
        self.declared.lock().expect("no panic").insert(queue.to_owned());
        self.try_declare(queue, arguments).await.expect("a new queue");
    }

    /// Declares a queue with these arguments; when it exists with others, the broker says so.
    pub async fn try_declare(&self, queue: &str, arguments: &[(&str, AMQPValue)]) -> lapin::Result<()> {
        // A channel of its own: a refusal closes it.
        let channel = self.connection().await.create_channel().await.expect("a channel");
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.into(), durable, table(arguments)).await?;
        channel.close(200, "".into()).await
    }

    /// Takes so many messages and keeps them unacknowledged, as a consumer that is about to die; closing the channel
    /// gives them back.
    pub async fn hold(&self, queue: &str, messages: usize) -> Channel {
        let channel = self.connection().await.create_channel().await.expect("a channel");
        for _ in 0..messages {
            let got = channel.basic_get(queue.into(), BasicGetOptions::default()).await.expect("an existing queue");
            assert!(got.is_some(), "{queue} is empty");
        }
        channel
    }

    /// Binds a queue of the test's own to the exchange of the events.
    pub async fn bind(&self, queue: &str, routing_key: &str) {
        let (exchange, options) = (self.exchange(), QueueBindOptions::default());
        let channel = self.channel().await;
        let bind =
            channel.queue_bind(queue.into(), exchange.into(), routing_key.into(), options, FieldTable::default());
        bind.await.expect("a binding");
    }

    /// Replaces the queue by one that is as the service declares it but for its delivery limit.
    pub async fn replace_queue_with_limit(&self, limit: i32) {
        let (queue, failed) = (self.queue(), self.failure_queue());
        self.delete(&queue).await;
        let arguments = [
            ("x-queue-type", text("quorum")),
            ("x-delivery-limit", AMQPValue::LongInt(limit)),
            ("x-dead-letter-exchange", text("")),
            ("x-dead-letter-routing-key", text(&failed)),
        ];
        self.declare(&queue, &arguments).await;
        for event in [Order::EVENT, StatusChange::EVENT] {
            self.bind(&queue, event).await;
        }
    }

    /// Deletes a queue, with all that is in it.
    pub async fn delete(&self, queue: &str) {
        self.channel().await.queue_delete(queue.into(), QueueDeleteOptions::default()).await.expect("a deletion");
    }

    /// Removes everything of the test.
    pub async fn remove(&self) {
        let declared: Vec<_> = self.declared.lock().expect("no panic").iter().cloned().collect();
        for queue in self.queues().into_iter().chain(declared) {
            self.delete(&queue).await;
        }
        let exchange = self.exchange();
        self.channel()
            .await
            .exchange_delete(exchange.into(), ExchangeDeleteOptions::default())
            .await
            .expect("a deletion");
        self.connection().await.close(200, "".into()).await.expect("a goodbye");
    }
}

fn is_not_found(error: &lapin::Error) -> bool {
    let not_found = AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND);
    matches!(error.kind(), ErrorKind::ProtocolError(error) if *error.kind() == not_found)
}
