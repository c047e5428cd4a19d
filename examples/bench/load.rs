//! The load: orders by the contract, written by hand, and published without any code of the service.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use anyhow::ensure;
use fastrand::Rng;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};

use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, PublisherConfirm};
use url::Url;
use uuid::Uuid;

/// Lines of every order.
pub const LINES: u64 = 3;

/// How far behind its original a copy comes: about as far as a relay that begins a page of its outbox again.
const COPY_DISTANCE: usize = 50;

/// Messages whose confirms are waited for at once, on one connection.
const IN_FLIGHT: usize = 2_000;

/// Orders of a sequence get ids from here on, a thousand a millisecond.
const EPOCH: Duration = Duration::from_millis(1_764_000_000_000);

/// Which version the event ids have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Ascending, as the contract recommends.
    V7,
    /// Random.
    V4,
}

/// What is mixed into a load.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    pub ids: Ids,
    /// Of a hundred messages so many are published twice; none of those that fail for a while.
    pub copies_percent: u32,
    /// Of a thousand orders so many fail for a while.
    pub failing_per_mille: u32,
    /// Of a thousand orders so many can never be read.
    pub malformed_per_mille: u32,
}

impl Mix {
    /// 5 % copies, and nothing that fails.
    pub const ORDINARY: Self = Self { ids: Ids::V7, copies_percent: 5, failing_per_mille: 0, malformed_per_mille: 0 };
}

/// What was published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// All, with copies and malformed ones.
    pub messages: u64,
    /// Events that are to be applied.
    pub events: u64,
    /// Events among them that fail for a while.
    pub failing: u64,
    /// Messages that belong into the failure queue.
    pub malformed: u64,
}

/// A quantity that marks a line as one that fails for a while; what follows the point, and the thousands, number it.
pub const FAILING_FROM: u64 = 900_000_000;

/// One order's message.
pub struct Order {
    pub event_id: Uuid,
    pub body: Vec<u8>,
}

impl Order {
    /// The order of this number: the same number, the same order. `failing` numbers those that fail for a while.
    pub fn new(number: u64, ids: Ids, failing: Option<u64>) -> Self {
        let mut rng = Rng::with_seed(number);
        let milliseconds = u64::try_from(EPOCH.as_millis()).unwrap_or_default() + number / 1000;
        let mut random = [0; 10];
        rng.fill(&mut random);
        // The counter stands where it makes ids of one millisecond ascend.
        let counter = u16::try_from(number % 1000).unwrap_or_default().to_be_bytes();
        random[..2].copy_from_slice(&counter);
        let event_id = match ids {
            Ids::V7 => uuid::Builder::from_unix_timestamp_millis(milliseconds, &random).into_uuid(),
            Ids::V4 => uuid::Builder::from_random_bytes(rng.u128(..).to_be_bytes()).into_uuid(),
        };
        let mut id = || {
            uuid::Builder::from_unix_timestamp_millis(
                milliseconds,
                &rng.u128(..).to_be_bytes()[..10].try_into().unwrap_or_default(),
            )
            .into_uuid()
        };
        let (order, customer) = (id(), id());
        let lines: Vec<_> = (0..LINES)
            .map(|line| {
                let quantity = match failing {
                    Some(which) if line == 0 => format!("{}.{:03}", FAILING_FROM + which / 1000, which % 1000),
                    _ => format!("{}.{:03}", 1 + (number + line) % 20, number % 1000),
                };
                format!(r#"{{"productId":"{}","quantity":"{quantity}"}}"#, id())
            })
            .collect();
        let body = format!(
            r#"{{"event_id":"{event_id}","event_name":"order.order.placed.v1","occurred_at":"{}","payload":{{"orderId":"{order}","customerId":"{customer}","lines":[{}]}}}}"#,
            chrono::DateTime::<chrono::Utc>::from(SystemTime::now())
                .to_rfc3339_opts(chrono::SecondsFormat::Millis, true),
            lines.join(",")
        );
        Self { event_id, body: body.into_bytes() }
    }
}

/// A channel with confirms, straight to one queue.
pub struct Publisher {
    _connection: Connection,
    channel: Channel,
    queue: String,
    unconfirmed: VecDeque<PublisherConfirm>,
}

impl Publisher {
    pub async fn connect(broker: &Url, queue: &str) -> anyhow::Result<Self> {
        let connection = Connection::connect(broker.as_str(), ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { _connection: connection, channel, queue: queue.to_owned(), unconfirmed: VecDeque::new() })
    }

    /// Writes a persistent message; its confirm is waited for later.
    pub async fn publish(&mut self, body: &[u8]) -> anyhow::Result<()> {
        let persistent = BasicProperties::default().with_delivery_mode(2);
        let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm =
            self.channel.basic_publish("".into(), self.queue.as_str().into(), mandatory, body, persistent).await?;
        self.unconfirmed.push_back(confirm);
        while self.unconfirmed.len() > IN_FLIGHT {
            self.confirmed().await?;
        }
        Ok(())
    }

    /// Waits for all confirms.
    pub async fn finish(&mut self) -> anyhow::Result<()> {
        while !self.unconfirmed.is_empty() {
            self.confirmed().await?;
        }
        Ok(())
    }

    async fn confirmed(&mut self) -> anyhow::Result<()> {
        if let Some(confirm) = self.unconfirmed.pop_front() {
            let confirmation = confirm.await?;
            ensure!(confirmation == Confirmation::Ack(None), "not confirmed: {confirmation:?}");
        }
        Ok(())
    }

    /// Publishes orders from the number `first` on.
    pub async fn load(&mut self, first: u64, orders: u64, mix: Mix) -> anyhow::Result<Loaded> {
        let mut rng = Rng::with_seed(first);
        let mut loaded = Loaded::default();
        let mut copies: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
        for number in first..first + orders {
            if rng.u32(..1000) < mix.malformed_per_mille {
                self.publish(br#"{"event_name":"order.order.placed.v1"}"#).await?;
                loaded.malformed += 1;
            } else {
                let failing = (rng.u32(..1000) < mix.failing_per_mille).then_some(loaded.failing);
                loaded.failing += u64::from(failing.is_some());
                loaded.events += 1;
                let Order { body, .. } = Order::new(number, mix.ids, failing);
                self.publish(&body).await?;
                // A copy of one that fails would still be on its way when all events are applied.
                if rng.u32(..100) < mix.copies_percent && failing.is_none() {
                    copies.push_back((number, body));
                }
            }
            loaded.messages += 1;
            while let Some((_, body)) = copies.pop_front_if(|(original, _)| number - *original >= COPY_DISTANCE as u64)
            {
                self.publish(&body).await?;
                loaded.messages += 1;
            }
        }
        for (_, body) in copies {
            self.publish(&body).await?;
            loaded.messages += 1;
        }
        self.finish().await?;
        Ok(loaded)
    }
}
