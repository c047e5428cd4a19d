//! The events of the shop, written by hand, field by field: as another team would write
//! them that has nothing but the contract. None of the values needs escaping in JSON.

use chrono::{SecondsFormat, Utc};
use uuid::Uuid;

pub(crate) const ORDER_PLACED: &str = "order.order.placed.v1";
pub(crate) const STATUS_CHANGED: &str = "order.order.status_changed.v1";

/// An event before it is stored in the outbox.
pub(crate) struct Event {
    pub(crate) id: Uuid,
    pub(crate) name: &'static str,
    pub(crate) order_id: Uuid,
    pub(crate) body: String,
}

pub(crate) struct Line {
    pub(crate) product_id: Uuid,
    /// As it stands in the event: "2", "2.000" and "002" are the same quantity.
    pub(crate) quantity: String,
}

pub(crate) fn order_placed(order_id: Uuid, customer_id: Uuid, lines: &[Line]) -> Event {
    let lines: Vec<String> = lines
        .iter()
        .map(|line| format!(r#"{{"productId":"{}","quantity":"{}"}}"#, line.product_id, line.quantity))
        .collect();
    // Nobody has promised the stock service that no other field ever comes: "currency".
    let payload = format!(
        r#"{{"orderId":"{order_id}","customerId":"{customer_id}","currency":"EUR","lines":[{}]}}"#,
        lines.join(",")
    );
    event(ORDER_PLACED, order_id, &payload)
}

pub(crate) fn status_changed(order_id: Uuid, status: &str, version: i64) -> Event {
    let payload = format!(r#"{{"orderId":"{order_id}","status":"{status}","version":{version}}}"#);
    event(STATUS_CHANGED, order_id, &payload)
}

fn event(name: &'static str, order_id: Uuid, payload: &str) -> Event {
    let id = Uuid::now_v7();
    let occurred_at = Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true);
    let body =
        format!(r#"{{"event_id":"{id}","event_name":"{name}","occurred_at":"{occurred_at}","payload":{payload}}}"#);
    Event { id, name, order_id, body }
}

/// A message that no service could obey, and what must become of it.
pub(crate) struct Malformed {
    pub(crate) defect: &'static str,
    pub(crate) expected_reason: &'static str,
    pub(crate) body: Vec<u8>,
}

/// One message of each kind: a good one, with one thing wrong.
pub(crate) fn malformed() -> Vec<Malformed> {
    // The good message, as an event and as its text.
    let good = || {
        let line = Line { product_id: Uuid::now_v7(), quantity: "1.000".to_owned() };
        order_placed(Uuid::now_v7(), Uuid::now_v7(), &[line])
    };
    let changed = |from: &str, to: &str| good().body.replacen(from, to, 1).into_bytes();
    let kind = |defect, expected_reason, body| Malformed { defect, expected_reason, body };

    vec![
        kind("the JSON ends in the middle", "malformed", {
            let mut body = good().body.into_bytes();
            body.truncate(body.len() / 2);
            body
        }),
        kind("not a UTF-8 text", "malformed", {
            let mut body = changed("EUR", "E?R");
            for byte in &mut body {
                if *byte == b'?' {
                    *byte = 0xff;
                }
            }
            body
        }),
        kind("no event_id", "malformed", {
            let good = good();
            good.body.replacen(&format!(r#""event_id":"{}","#, good.id), "", 1).into_bytes()
        }),
        kind("event_id is the nil UUID", "malformed", {
            let good = good();
            good.body.replacen(&good.id.to_string(), &Uuid::nil().to_string(), 1).into_bytes()
        }),
        kind("quantity is a JSON number", "malformed", changed(r#""1.000""#, "1.000")),
        kind("quantity is 0.000", "malformed", changed("1.000", "0.000")),
        kind("quantity with four decimals", "malformed", changed("1.000", "1.0005")),
        kind(
            "an order without lines",
            "malformed",
            order_placed(Uuid::now_v7(), Uuid::now_v7(), &[]).body.into_bytes(),
        ),
        kind("version is a text", "malformed", {
            let body = status_changed(Uuid::now_v7(), "paid", 1).body;
            body.replacen(r#""version":1"#, r#""version":"1""#, 1).into_bytes()
        }),
        kind("an event that nobody knows", "unknown-event", changed(ORDER_PLACED, "order.order.painted.v1")),
    ]
}
