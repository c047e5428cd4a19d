//! What the broker is, has and grants: facts for `doctor`, which judges them. Declares nothing that is missing, and takes
//! no message.

use std::str::from_utf8;

use futures_util::{AsyncReadExt, AsyncWriteExt, StreamExt};
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    QueueDeclareOptions,
};
use lapin::protocol::{AMQPClass, AMQPErrorKind, AMQPHardError, AMQPSoftError, connection, parse_class};
use lapin::tcp::AsyncTcpStream;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ErrorKind, Event, ExchangeKind};

use super::connection::{secure, unless_cut_off};
use super::{AmqpUrl, BrokerError, Topology, answer, within};

/// What the broker says of itself before anybody logs in.
#[derive(Debug)]
pub struct Product {
    /// `RabbitMQ`, or what else speaks the protocol.
    pub name: String,
    /// Its version, e.g. 3.10.8.
    pub version: String,
}

/// Asks the broker what it is. A handshake of our own, up to the broker's first word: lapin keeps that to itself.
///
/// # Errors
/// The network's, or that what answers is no AMQP broker.
pub async fn product(url: &AmqpUrl) -> Result<Product, BrokerError> {
    /// The protocol's name and version.
    const GREETING: &[u8] = b"AMQP\x00\x00\x09\x01";
    /// Far more than a first word ever is.
    const MAX_FRAME: u32 = 0x2_0000;

    let start = async {
        let runtime = lapin::runtime::default_runtime()?;
        let stream = AsyncTcpStream::connect(&runtime, runtime.to_socket_addrs(url.address())).await?;
        let mut stream = secure(stream, url).await?;
        stream.write_all(GREETING).await?;
        stream.flush().await?;
        // A frame: type, channel and size; the payload; an end mark.
        let mut head = [0; 7];
        stream.read_exact(&mut head).await?;
        // A method on the connection's own channel; anything else is another protocol.
        let [1, 0, 0, size @ ..] = head else { return Ok(None) };
        let mut payload = vec![0; u32::from_be_bytes(size).min(MAX_FRAME) as usize];
        stream.read_exact(&mut payload).await?;
        match parse_class(&payload[..]) {
            Ok((_, AMQPClass::Connection(connection::AMQPMethod::Start(start)))) => Ok(Some(start)),
            _ => Ok(None),
        }
    };
    // Boxed, for a stream with TLS is large.
    let start = within(url.connect_timeout, Box::pin(start)).await;
    let start = start.map_err(|error| unless_cut_off(error, url.is_secure()))?.ok_or(BrokerError::Stranger)?;
    let property = |name| match start.server_properties.inner().get(name) {
        Some(AMQPValue::LongString(text)) => from_utf8(text.as_bytes()).unwrap_or_default().to_owned(),
        _ => String::new(),
    };
    Ok(Product { name: property("product"), version: property("version") })
}

/// Why the broker refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The right is missing, or the login is wrong.
    Access,
    /// The vhost is missing, or closed to the user.
    Vhost,
    /// Something exists in another form.
    Mismatch,
    /// Something does not exist.
    Missing,
    /// Anything else; the network too.
    Other,
}

impl BrokerError {
    /// Why the broker refused.
    pub fn refusal(&self) -> Refusal {
        let Self::Lapin(error) = self else { return Refusal::Other };
        match error.kind() {
            ErrorKind::ProtocolError(error) => match error.kind() {
                AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => Refusal::Access,
                AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => Refusal::Vhost,
                AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED) => Refusal::Mismatch,
                AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => Refusal::Missing,
                _ => Refusal::Other,
            },
            _ => Refusal::Other,
        }
    }
}

/// The exchange or a queue as it was found.
#[derive(Debug)]
pub struct Part {
    /// Its kind and name.
    pub name: String,
    /// Whether it is there and as the service would declare it.
    pub state: Result<(), BrokerError>,
    /// Messages that are ready, of a queue that exists.
    pub messages: u32,
    /// Consumers, of a queue that exists.
    pub consumers: u32,
}

/// Looks at the exchange and at each queue, the consumed one last.
///
/// Only a declaration compares arguments, so what exists is declared again; what is missing is left missing.
///
/// # Errors
/// The connection's.
pub async fn topology(connection: &Connection, topology: &Topology) -> Result<Vec<Part>, BrokerError> {
    let mut parts = vec![exchange(connection, topology.exchange()).await?];
    for (name, arguments) in topology.queues() {
        parts.push(queue(connection, &name, arguments).await?);
    }
    Ok(parts)
}

async fn exchange(connection: &Connection, name: &str) -> Result<Part, BrokerError> {
    let declare = async |passive| {
        let channel = answer(connection.create_channel()).await?; // a refusal closes it
        let options = ExchangeDeclareOptions { passive, durable: true, ..ExchangeDeclareOptions::default() };
        let declared =
            answer(channel.exchange_declare(name.into(), ExchangeKind::Topic, options, FieldTable::default())).await;
        close(&channel).await;
        declared
    };
    let state = match declare(true).await {
        Ok(()) => declare(false).await,
        missing => missing,
    };
    Ok(Part { name: format!("exchange {name}"), state: unless_lost(connection, state)?, messages: 0, consumers: 0 })
}

async fn queue(connection: &Connection, name: &str, arguments: FieldTable) -> Result<Part, BrokerError> {
    let declare = async |passive, arguments| {
        let channel = answer(connection.create_channel()).await?;
        let options = QueueDeclareOptions { passive, durable: true, ..QueueDeclareOptions::default() };
        let declared = answer(channel.queue_declare(name.into(), options, arguments)).await;
        close(&channel).await;
        declared
    };
    let (mut messages, mut consumers) = (0, 0);
    let state = match declare(true, FieldTable::default()).await {
        Ok(queue) => {
            (messages, consumers) = (queue.message_count(), queue.consumer_count());
            declare(false, arguments).await.map(drop)
        }
        Err(missing) => Err(missing),
    };
    Ok(Part { name: format!("queue {name}"), state: unless_lost(connection, state)?, messages, consumers })
}

/// Whether the user may read from the queue. No message comes: the broker looks at the right first, and then refuses the
/// priority.
///
/// # Errors
/// The connection's.
pub async fn may_read(connection: &Connection, queue: &str) -> Result<bool, BrokerError> {
    let channel = answer(connection.create_channel()).await?;
    // One message at most, should a broker come to accept it.
    answer(channel.basic_qos(1, BasicQosOptions::default())).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-priority".into(), AMQPValue::LongString("none".into()));
    let consume = channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), arguments);
    let answer = answer(consume).await.map(drop);
    close(&channel).await;
    match unless_lost(connection, answer)? {
        Err(error) => Ok(error.refusal() != Refusal::Access),
        Ok(()) => Ok(true),
    }
}

/// Whether the broker takes what is published.
#[derive(Debug)]
pub enum Publishing {
    /// It does.
    Open,
    /// An alarm blocks it, for this reason.
    Blocked(String),
    /// The user may not write to the default exchange, by which copies go to their queues.
    Forbidden,
}

/// Publishes an empty message that no queue gets: only who publishes is told of an alarm. The connection must have
/// published nothing before, and is of no use after an alarm.
///
/// # Errors
/// The connection's.
pub async fn publishing(connection: &Connection, topology: &Topology) -> Result<Publishing, BrokerError> {
    let mut events = connection.events_listener();
    let channel = answer(connection.create_channel()).await?;
    answer(channel.confirm_select(ConfirmSelectOptions::default())).await?;
    let nowhere = format!("{}.doctor", topology.queue());
    let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
    let publish = channel.basic_publish("".into(), nowhere.into(), options, &[], properties);
    let published = async {
        let confirmed = answer(async { publish.await?.await.map(drop) }).await;
        // The broker confirms even what it was sent too late, but a blocked connection gets no further answer.
        let answered = match &confirmed {
            Ok(()) => answer(channel.close(200, "published".into())).await,
            Err(_) => Ok(()),
        };
        confirmed.and(answered)
    };
    let blocked = async {
        loop {
            match events.next().await {
                Some(Event::ConnectionBlocked(reason)) => return reason,
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    };
    let published = tokio::select! {
        biased;
        reason = blocked => return Ok(Publishing::Blocked(reason)),
        published = published => published,
    };
    match unless_lost(connection, published)? {
        Ok(()) => Ok(Publishing::Open),
        Err(error) if error.refusal() == Refusal::Access => Ok(Publishing::Forbidden),
        Err(error) => Err(error),
    }
}

/// What the broker refused is a fact; without a connection nothing is.
fn unless_lost<T>(
    connection: &Connection,
    answer: Result<T, BrokerError>,
) -> Result<Result<T, BrokerError>, BrokerError> {
    match answer {
        Err(error) if !connection.status().connected() => Err(error),
        Err(error @ BrokerError::Silent(_)) => Err(error),
        answer => Ok(answer),
    }
}

/// A channel that a refusal has closed needs no goodbye.
async fn close(channel: &Channel) {
    if channel.status().connected() {
        answer(channel.close(200, "looked".into())).await.ok();
    }
}
