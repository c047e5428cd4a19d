//! The events of the contract, written by hand: the tests are a second witness of it.

use serde_json::json;
use uuid::Uuid;

/// A fresh id, as the producers make them.
pub fn id() -> String {
    Uuid::now_v7().to_string()
}

/// An order and its `order.order.placed.v1`.
#[derive(Clone, Debug)]
pub struct Order {
    pub event_id: String,
    pub order_id: String,
    pub customer_id: String,
    /// Product and quantity.
    pub lines: Vec<(String, String)>,
}

impl Order {
    pub const EVENT: &str = "order.order.placed.v1";

    /// A new order of so many lines.
    pub fn new(lines: usize) -> Self {
        Self {
            event_id: id(),
            order_id: id(),
            customer_id: id(),
            lines: (1..=lines).map(|n| (id(), format!("{n}.500"))).collect(),
        }
    }

    /// A new order of one line with this quantity, by which a trigger can tell it apart.
    pub fn of(quantity: &str) -> Self {
        Self { lines: vec![(id(), quantity.to_owned())], ..Self::new(0) }
    }

    /// So many new orders of one line.
    pub fn many(orders: usize) -> Vec<Self> {
        (0..orders).map(|_| Self::new(1)).collect()
    }

    pub fn body(&self) -> String {
        let lines: Vec<_> =
            self.lines.iter().map(|(product, quantity)| json!({"productId": product, "quantity": quantity})).collect();
        json!({
            "event_id": self.event_id,
            "event_name": Self::EVENT,
            "occurred_at": "2026-11-30T09:15:27.412Z",
            "payload": {"orderId": self.order_id, "customerId": self.customer_id, "lines": lines},
        })
        .to_string()
    }
}

/// An `order.order.status_changed.v1`.
#[derive(Clone, Debug)]
pub struct StatusChange {
    pub event_id: String,
    pub order_id: String,
    pub status: String,
    pub version: i64,
}

impl StatusChange {
    pub const EVENT: &str = "order.order.status_changed.v1";

    pub fn new(order: &Order, status: &str, version: i64) -> Self {
        Self { event_id: id(), order_id: order.order_id.clone(), status: status.to_owned(), version }
    }

    pub fn body(&self) -> String {
        json!({
            "event_id": self.event_id,
            "event_name": Self::EVENT,
            "occurred_at": "2026-11-30T09:15:27.412Z",
            "payload": {"orderId": self.order_id, "status": self.status, "version": self.version},
        })
        .to_string()
    }
}
