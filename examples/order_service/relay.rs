//! From the outbox to the broker: as it should be, and with accidents.

use crate::{
    broker::{Broker, Message, Publisher},
    event::{self, Malformed},
    shop::{Kind, OutboxRow, Shop},
};
use anyhow::Result;
use uuid::Uuid;

/// Publishes all that is unpublished: first the broker's confirmation, then the mark.
/// A crash between the two publishes again, and nothing is ever lost.
pub(crate) async fn relay(shop: &Shop, broker: &Broker) -> Result<usize> {
    let publisher = broker.publisher().await?;
    let mut count = 0;
    loop {
        let rows = shop.unpublished(Publisher::WINDOW).await?;
        if rows.is_empty() {
            return Ok(count);
        }
        send(shop, &publisher, Kind::Relay, &rows).await?;
        shop.mark_published(&rows).await?;
        count += rows.len();
    }
}

/// Publishes `limit` rows and stops before they are marked.
pub(crate) async fn crash_before_marking(shop: &Shop, broker: &Broker, limit: usize) -> Result<usize> {
    let publisher = broker.publisher().await?;
    let rows = shop.unpublished(limit).await?;
    send(shop, &publisher, Kind::CrashedRelay, &rows).await?;
    Ok(rows.len())
}

/// Publishes all events of the last `seconds` once more.
pub(crate) async fn replay(shop: &Shop, broker: &Broker, seconds: f64) -> Result<usize> {
    let publisher = broker.publisher().await?;
    let rows = shop.published_within(seconds).await?;
    send(shop, &publisher, Kind::Replay, &rows).await?;
    Ok(rows.len())
}

async fn send(shop: &Shop, publisher: &Publisher<'_>, kind: Kind, rows: &[OutboxRow]) -> Result<()> {
    for window in rows.chunks(Publisher::WINDOW) {
        let messages: Vec<Message<'_>> = window
            .iter()
            .map(|row| Message {
                id: row.event_id,
                order_id: Some(row.order_id),
                routing_key: &row.name,
                body: row.body.as_bytes(),
            })
            .collect();
        let attempts = shop.log_attempts(kind, window).await?;
        publisher.publish(&messages).await?;
        shop.log_confirmed(&attempts).await?;
    }
    Ok(())
}

/// Publishes one malformed message of each kind and returns what is wrong with them.
pub(crate) async fn malformed(shop: &Shop, broker: &Broker) -> Result<Vec<Malformed>> {
    let publisher = broker.publisher().await?;
    let messages = event::malformed();
    for message in &messages {
        // The routing key is one that the queue is bound to, and there is a message id:
        // neither may make up for what the body lacks.
        let sent =
            Message { id: Uuid::now_v7(), order_id: None, routing_key: event::ORDER_PLACED, body: &message.body };
        let attempt = shop.log_malformed(message).await?;
        publisher.publish(&[sent]).await?;
        shop.log_confirmed(&[attempt]).await?;
    }
    Ok(messages)
}
