//! A look into the queues where messages wait, without taking any.

use std::time::Duration;

use chrono::{DateTime, Utc};
use lapin::Connection;
use lapin::message::BasicGetMessage;
use lapin::options::{BasicGetOptions, BasicNackOptions};
use lapin::protocol::AMQPSoftError;
use lapin::types::AMQPValue;

use super::headers::FAILED_AT;
use super::{BrokerError, Topology, answer};

/// The most messages of a queue that are looked at: a second of work. They stand in the order in which they came, so the
/// oldest is among the first, unless somebody sent old ones again.
const LOOK: usize = 1_000;

/// How long ago the oldest message in the failure and retry queues failed, or was made: by its `failed-at`, else its
/// `timestamp`; zero when none waits. Looks at the first 1,000 of each queue and gives them back. A queue that does not
/// exist holds nothing.
///
/// # Errors
/// The broker's or the network's: without the right to read a queue nothing is known of it.
pub async fn oldest_waiting(connection: &Connection, topology: &Topology) -> Result<Duration, BrokerError> {
    let mut oldest = None;
    for queue in topology.retry_queues().into_iter().chain([topology.failure_queue()]) {
        let channel = answer(connection.create_channel()).await?;
        for _ in 0..LOOK {
            match answer(channel.basic_get(queue.as_str().into(), BasicGetOptions::default())).await {
                Ok(Some(message)) => oldest = [oldest, made_at(&message)].into_iter().flatten().min(),
                Ok(None) => break,
                Err(error) if error.is(AMQPSoftError::NOTFOUND) => break,
                Err(error) => return Err(error),
            }
        }
        if channel.status().connected() {
            let all = BasicNackOptions { multiple: true, requeue: true };
            answer(channel.basic_nack(0, all)).await?;
            answer(channel.close(200, "looked".into())).await?;
        }
    }
    // What was made by a clock that is ahead has no age yet.
    Ok(oldest.map_or(Duration::ZERO, |time| (Utc::now() - time).to_std().unwrap_or_default()))
}

fn made_at(message: &BasicGetMessage) -> Option<DateTime<Utc>> {
    let properties = &message.delivery.properties;
    let failed_at = match properties.headers().as_ref().and_then(|table| table.inner().get(FAILED_AT)) {
        Some(AMQPValue::LongString(text)) => std::str::from_utf8(text.as_bytes()).ok(),
        _ => None,
    };
    let failed_at = failed_at.and_then(|text| DateTime::parse_from_rfc3339(text).ok()).map(|time| time.to_utc());
    let timestamp = properties.timestamp().as_ref().and_then(|seconds| i64::try_from(*seconds).ok());
    failed_at.or_else(|| DateTime::from_timestamp(timestamp?, 0))
}
