//! A look into the queues where messages wait, without taking any.

use chrono::{DateTime, Utc};
use lapin::Connection;
use lapin::message::BasicGetMessage;
use lapin::options::{BasicGetOptions, BasicNackOptions};
use lapin::types::AMQPValue;

use super::headers::FAILED_AT;
use super::{BrokerError, Topology, answer};

/// When the oldest message in the failure and retry queues failed, or was made: the first of each queue, by its
/// `failed-at`, else its `timestamp`. A queue that does not exist holds nothing.
///
/// # Errors
/// The broker's or the network's.
pub async fn oldest_waiting(
    connection: &Connection,
    topology: &Topology,
) -> Result<Option<DateTime<Utc>>, BrokerError> {
    let mut oldest = None;
    for queue in topology.retry_queues().into_iter().chain([topology.failure_queue()]) {
        let channel = answer(connection.create_channel()).await?;
        let first = match answer(channel.basic_get(queue.into(), BasicGetOptions::default())).await {
            Ok(first) => first,
            Err(BrokerError::Lapin(error)) if error.is_amqp_soft_error() => continue,
            Err(error) => return Err(error),
        };
        if let Some(message) = first {
            let back = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
            answer(message.delivery.acker.nack(back)).await?;
            oldest = [oldest, made_at(&message)].into_iter().flatten().min();
        }
        answer(channel.close(200, "looked".into())).await?;
    }
    Ok(oldest)
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
