//! What is published: events by the contract, written by hand, and what only looks like them. All from one seed.

use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use uuid::Uuid;

/// Messages a second.
pub const RATE: u32 = 100;

/// The longest that the database refuses an order. Its retries come after 1, 3 and 7 seconds.
const LONGEST_REFUSAL: f64 = 5.0;

/// An event and its effect.
#[derive(Debug)]
pub struct Event {
    pub id: Uuid,
    pub order_id: Uuid,
    pub kind: Kind,
    /// Until when the database refuses it, from the beginning of the load.
    pub refused_until: Option<Duration>,
}

#[derive(Debug)]
pub enum Kind {
    Placed(Vec<Line>),
    Changed { status: &'static str, version: i64 },
}

/// A product, and its quantity in thousandths.
#[derive(Debug)]
pub struct Line {
    pub product_id: Uuid,
    pub quantity: u32,
}

impl Line {
    /// The quantity as the contract writes it, and the database.
    pub fn quantity(&self) -> String {
        format!("{}.{:03}", self.quantity / 1000, self.quantity % 1000)
    }
}

/// A message of the load.
#[derive(Debug)]
pub enum Message {
    /// An event by its number, for the first time or once more.
    Event(usize),
    /// A body that no service could obey.
    Malformed(Vec<u8>),
}

/// Everything that may be published, in its order.
#[derive(Debug, Default)]
pub struct Load {
    pub events: Vec<Event>,
    pub messages: Vec<Message>,
}

const PLACED: &str = "order.order.placed.v1";
const CHANGED: &str = "order.order.status_changed.v1";

impl Load {
    /// So many messages, always the same ones for one seed: orders and changes of their status, about as many of each;
    /// 5 % copies, 1 % malformed, 2 % refused for a while.
    pub fn new(mut rng: Rng, messages: usize) -> Self {
        let mut load = Self::default();
        // Orders and the versions of their status.
        let mut orders: Vec<(Uuid, i64)> = Vec::new();
        while load.messages.len() < messages {
            let percent = rng.u32(..100);
            let message = match percent {
                0 => Message::Malformed(malformed(&mut rng)),
                1..=5 if !load.events.is_empty() => {
                    // A relay's second try comes soon, a replay any time later.
                    let all = load.events.len();
                    let earliest = if rng.bool() { all.saturating_sub(50) } else { 0 };
                    Message::Event(rng.usize(earliest..all))
                }
                6..50 if !orders.is_empty() => {
                    let order = rng.usize(..orders.len());
                    let (order_id, version) = &mut orders[order];
                    *version += 1;
                    let status = rng.choice(["paid", "packed", "shipped", "cancelled"]).unwrap_or("paid");
                    let kind = Kind::Changed { status, version: *version };
                    let event = Event { id: id(&mut rng), order_id: *order_id, kind, refused_until: None };
                    load.add(event)
                }
                _ => {
                    let lines = (0..rng.usize(1..=5)).map(|_| line(&mut rng)).collect();
                    let order_id = id(&mut rng);
                    orders.push((order_id, 0));
                    let refused_until = matches!(percent, 98 | 99).then(|| {
                        due(load.messages.len()) + Duration::from_secs_f64(1.0 + rng.f64() * (LONGEST_REFUSAL - 1.0))
                    });
                    load.add(Event { id: id(&mut rng), order_id, kind: Kind::Placed(lines), refused_until })
                }
            };
            load.messages.push(message);
        }
        load
    }

    fn add(&mut self, event: Event) -> Message {
        self.events.push(event);
        Message::Event(self.events.len() - 1)
    }

    /// A message's event, unless it is malformed.
    pub fn event(&self, message: usize) -> Option<&Event> {
        match &self.messages[message] {
            Message::Event(event) => Some(&self.events[*event]),
            Message::Malformed(_) => None,
        }
    }

    /// A message's routing key and body.
    pub fn wire(&self, message: usize) -> (&'static str, Vec<u8>) {
        match &self.messages[message] {
            Message::Event(event) => {
                let event = &self.events[*event];
                (event.name(), event.body().to_string().into_bytes())
            }
            // The envelope decides, not the key.
            Message::Malformed(body) => (PLACED, body.clone()),
        }
    }
}

/// When a message is due, from the beginning of the load.
pub fn due(message: usize) -> Duration {
    Duration::from_secs(1) * u32::try_from(message).unwrap_or(u32::MAX) / RATE
}

impl Event {
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Placed(_) => PLACED,
            Kind::Changed { .. } => CHANGED,
        }
    }

    fn body(&self) -> Value {
        let order_id = self.order_id.to_string();
        let payload = match &self.kind {
            Kind::Placed(lines) => {
                let lines: Vec<_> = lines
                    .iter()
                    .map(|line| json!({"productId": line.product_id.to_string(), "quantity": line.quantity()}))
                    .collect();
                json!({"orderId": order_id, "customerId": order_id, "lines": lines})
            }
            Kind::Changed { status, version } => {
                json!({"orderId": order_id, "status": status, "version": version})
            }
        };
        json!({
            "event_id": self.id.to_string(),
            "event_name": self.name(),
            "occurred_at": "2026-11-30T09:15:27.412Z",
            "payload": payload,
        })
    }
}

/// An id from the seed, so version 4: the producers' version 7 has the time in it.
fn id(rng: &mut Rng) -> Uuid {
    uuid::Builder::from_random_bytes(rng.u128(..).to_be_bytes()).into_uuid()
}

fn line(rng: &mut Rng) -> Line {
    Line { product_id: id(rng), quantity: rng.u32(1..=20_000) }
}

/// A good order with one thing wrong. The ids in it tell it from all others.
fn malformed(rng: &mut Rng) -> Vec<u8> {
    let lines = vec![line(rng)];
    let good = Event { id: id(rng), order_id: id(rng), kind: Kind::Placed(lines), refused_until: None };
    let mut body = good.body();
    let defect = rng.u32(..6);
    match defect {
        0 => {} // its end is missing
        1 => body["event_id"] = json!(Uuid::nil().to_string()),
        2 => body["event_id"] = Value::Null,
        3 => body["payload"]["lines"][0]["quantity"] = json!(2.5),
        4 => body["payload"]["lines"] = json!([]),
        _ => body["event_name"] = json!("order.order.painted.v1"),
    }
    let mut body = body.to_string().into_bytes();
    if defect == 0 {
        body.truncate(body.len() - 2);
    }
    body
}
