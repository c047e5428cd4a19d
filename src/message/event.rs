//! The closed set of events that this service understands, each with the payload of its version.

use std::fmt;

use serde::{Deserialize, Deserializer, de};

use super::Undecodable;
use super::envelope::{Object, parse};
use crate::stock::{CustomerId, OrderId, ProductId, Quantity, deserialize_text};

/// An event with a handler, decoded.
#[derive(Debug)]
pub enum Event {
    /// An order was placed: its goods are to be reserved.
    OrderPlaced(OrderPlaced),
    /// An order's status changed; `cancelled` releases its goods.
    OrderStatusChanged(OrderStatusChanged),
}

impl Event {
    /// The names of all events that have a handler; `stock.events` is bound to each.
    pub const NAMES: [&str; 2] = [OrderPlaced::NAME, OrderStatusChanged::NAME];

    pub(super) fn decode(name: &str, payload: &str) -> Result<Self, Undecodable> {
        match name {
            OrderPlaced::NAME => parse(payload, "payload").map(Self::OrderPlaced),
            OrderStatusChanged::NAME => parse(payload, "payload").map(Self::OrderStatusChanged),
            _ => Err(Undecodable::unknown(name)),
        }
    }

    /// The event's name, for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::OrderPlaced(_) => OrderPlaced::NAME,
            Self::OrderStatusChanged(_) => OrderStatusChanged::NAME,
        }
    }

    /// How many rows the event writes, about: what bounds the size of a transaction.
    pub fn lines(&self) -> usize {
        match self {
            Self::OrderPlaced(order) => order.lines.len(),
            Self::OrderStatusChanged(_) => 1,
        }
    }
}

/// The payload of `order.order.placed.v1`.
#[derive(Debug, Deserialize)]
pub struct OrderPlaced {
    /// The order; its id is the key of everything that is stored.
    #[serde(rename = "orderId", alias = "order_id")]
    pub order_id: OrderId,
    /// Who placed it.
    #[serde(rename = "customerId", alias = "customer_id")]
    pub customer_id: CustomerId,
    /// 1 to 10,000 lines; two lines of one product are two reservations.
    #[serde(deserialize_with = "lines")]
    pub lines: Vec<Line>,
}

impl OrderPlaced {
    /// The event's name and routing key.
    pub const NAME: &'static str = "order.order.placed.v1";
}

/// A line of an order: so much of a product.
#[derive(Debug, Deserialize)]
pub struct Line {
    /// What is reserved.
    #[serde(rename = "productId", alias = "product_id")]
    pub product_id: ProductId,
    /// How much of it.
    pub quantity: Quantity,
}

/// The payload of `order.order.status_changed.v1`.
#[derive(Debug, Deserialize)]
pub struct OrderStatusChanged {
    /// The order whose status changed.
    #[serde(rename = "orderId", alias = "order_id")]
    pub order_id: OrderId,
    /// The new status: 1 to 64 characters; [`CANCELLED`](Self::CANCELLED) is the one that means something here.
    #[serde(deserialize_with = "status")]
    pub status: String,
    /// Counts the order's changes, from 1; a newer version replaces an older one.
    #[serde(deserialize_with = "version")]
    pub version: i64,
}

impl OrderStatusChanged {
    /// The event's name and routing key.
    pub const NAME: &'static str = "order.order.status_changed.v1";
    /// The status of an order that holds no goods any more.
    pub const CANCELLED: &'static str = "cancelled";
}

fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Line>, D::Error> {
    struct Lines;

    impl<'de> de::Visitor<'de> for Lines {
        type Value = Vec<Line>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array of lines")
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            const MAX: usize = 10_000; // the contract's; keeps one order within one transaction of bounded size

            let mut lines = Vec::new();
            while let Some(Object(line)) = seq.next_element()? {
                if lines.len() == MAX {
                    return Err(de::Error::custom(format_args!("more than {MAX} lines")));
                }
                lines.push(line);
            }
            if lines.is_empty() {
                return Err(de::Error::custom("an order needs at least one line"));
            }
            Ok(lines)
        }
    }

    deserializer.deserialize_seq(Lines)
}

fn status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserialize_text(deserializer, "a status as a string", |text| {
        if !(1..=64).contains(&text.chars().count()) {
            return Err("must have 1 to 64 characters");
        }
        if text.contains('\0') {
            return Err("must not contain U+0000, which PostgreSQL cannot store");
        }
        Ok(text.to_owned())
    })
}

/// An integer from 1 to 2^63 − 1; 1.0 and 1e0 are no integers here.
fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    struct Version;

    impl de::Visitor<'_> for Version {
        type Value = i64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a whole number from 1 to 9223372036854775807")
        }

        fn visit_u64<E: de::Error>(self, number: u64) -> Result<i64, E> {
            let version = i64::try_from(number).ok().filter(|version| *version > 0);
            version.ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
        }

        fn visit_i64<E: de::Error>(self, number: i64) -> Result<i64, E> {
            // The parser gives only negative numbers here.
            Err(E::invalid_value(de::Unexpected::Signed(number), &self))
        }
    }

    deserializer.deserialize_i64(Version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(status: &str, version: &str) -> Result<Event, Undecodable> {
        let payload =
            format!(r#"{{"orderId":"01939c5e-7d49-7f00-8000-5a1d2c3b4e5f","status":{status},"version":{version}}}"#);
        Event::decode(OrderStatusChanged::NAME, &payload)
    }

    #[test]
    fn every_bound_name_has_a_decoder() {
        for name in Event::NAMES {
            assert!(matches!(Event::decode(name, "{}"), Err(Undecodable::Malformed(_))), "{name}");
        }
    }

    #[test]
    fn a_version_is_an_integer_from_1() {
        assert!(changed("\"paid\"", "1").is_ok());
        assert!(changed("\"paid\"", "9223372036854775807").is_ok());
        for version in ["0", "-1", "1.0", "1e0", "\"1\"", "null", "9223372036854775808"] {
            assert!(changed("\"paid\"", version).is_err(), "{version}");
        }
    }

    #[test]
    fn a_status_has_1_to_64_characters() {
        assert!(changed(&format!("\"{}\"", "é".repeat(64)), "1").is_ok());
        for status in ["\"\"".to_owned(), format!("\"{}\"", "é".repeat(65)), "\"\\u0000\"".to_owned(), "1".to_owned()]
        {
            assert!(changed(&status, "1").is_err(), "{status}");
        }
    }

    #[test]
    fn an_order_has_at_most_10_000_lines() {
        let line = r#"{"productId":"01939c5e-7d49-7f00-8000-5a1d2c3b4e5f","quantity":"1"}"#;
        let order = |lines: usize| {
            let id = "01939c5e-7d49-7f00-8000-5a1d2c3b4e5f";
            let payload =
                format!(r#"{{"orderId":"{id}","customerId":"{id}","lines":[{}]}}"#, vec![line; lines].join(","));
            Event::decode(OrderPlaced::NAME, &payload)
        };
        assert_eq!(order(10_000).unwrap().lines(), 10_000);
        assert!(order(10_001).unwrap_err().to_string().contains("more than 10000 lines"));
    }
}
