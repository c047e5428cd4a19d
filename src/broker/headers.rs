//! What a copy of a message carries: everything of the application's, nothing that would act a second time.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ShortString};

use crate::message::Reason;

/// Retries that a message has behind it; absent means 0. Not `x-…`: those names are the broker's.
const RETRY_COUNT: &str = "retry-count";
const FAILURE_REASON: &str = "failure-reason";
const FAILURE_DETAIL: &str = "failure-detail";
/// When a message failed, RFC 3339.
pub(super) const FAILED_AT: &str = "failed-at";
const FAILED_ATTEMPTS: &str = "failed-attempts";
const ORIGINAL_EXCHANGE: &str = "original-exchange";
const ORIGINAL_ROUTING_KEY: &str = "original-routing-key";
/// The headers that a copy had to leave behind to fit a frame.
const DROPPED_HEADERS: &str = "dropped-headers";

/// The longest `failure-detail`, in bytes: enough for a cause, and no stack of them.
const DETAIL_LIMIT: usize = 1024;

/// What headers leave of a frame: room for the other properties, at most 256 bytes each, the names of dropped headers, and
/// what the broker adds when a copy comes back from a retry queue.
const ROOM: usize = 8 * 1024;

/// What the broker itself writes about a message's way. It is not ours to send, and old entries would make the broker
/// see a cycle where there is none.
const BOOKKEEPING: [&str; 9] = [
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
    "x-delivery-count",
    "x-acquired-count",
];

/// Headers that would act on the copy as they did on its original, kept under other names: they send it to further
/// queues, have a queue drop it as a repetition of its original, or have one hold it back once more.
const ACTING: [(&str, &str); 6] = [
    ("CC", "original-cc"),
    ("BCC", "original-bcc"),
    ("x-deduplication-header", "original-deduplication-header"),
    ("x-delay", "original-delay"),
    ("x-opt-delivery-delay", "original-delivery-delay"),
    ("x-opt-delivery-time", "original-delivery-time"),
];

/// What arrived, apart from its body.
#[derive(Debug)]
pub struct Original {
    /// The exchange it came through last.
    pub exchange: ShortString,
    /// The routing key it came with last.
    pub routing_key: ShortString,
    /// Its properties and headers.
    pub properties: BasicProperties,
}

impl Original {
    /// The producer's id of the message, for logs.
    pub fn message_id(&self) -> Option<&str> {
        self.properties.message_id().as_ref().map(ShortString::as_str)
    }

    /// What ties the message to others, for logs.
    pub fn correlation_id(&self) -> Option<&str> {
        self.properties.correlation_id().as_ref().map(ShortString::as_str)
    }

    /// The content encoding, if it says one.
    pub fn content_encoding(&self) -> Option<&str> {
        self.properties.content_encoding().as_ref().map(ShortString::as_str)
    }

    /// The retries it has behind it, from any integer type or a decimal string.
    ///
    /// # Errors
    /// The type of a header that is no such number; it counts as 0.
    pub fn retries(&self) -> Result<u32, String> {
        let Some(value) = self.properties.headers().as_ref().and_then(|table| table.inner().get(RETRY_COUNT)) else {
            return Ok(0);
        };
        let number = match value {
            AMQPValue::ShortShortInt(n) => i64::from(*n),
            AMQPValue::ShortShortUInt(n) => i64::from(*n),
            AMQPValue::ShortInt(n) => i64::from(*n),
            AMQPValue::ShortUInt(n) => i64::from(*n),
            AMQPValue::LongInt(n) => i64::from(*n),
            AMQPValue::LongUInt(n) => i64::from(*n),
            AMQPValue::LongLongInt(n) => *n,
            AMQPValue::ShortString(text) => decimal(text.as_str().as_bytes()).ok_or("ShortString")?,
            AMQPValue::LongString(text) => decimal(text.as_bytes()).ok_or("LongString")?,
            other => return Err(format!("{:?}", other.get_type())),
        };
        Ok(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
    }
}

fn decimal(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    // More digits than an i64 has are a huge number, not no number.
    let huge = if digits.len() < text.len() { i64::MIN } else { i64::MAX };
    is_number.then(|| std::str::from_utf8(text).ok()?.parse().ok().or(Some(huge)))?
}

/// What a copy says that its original did not.
#[derive(Debug)]
pub enum Stamp {
    /// It is to be tried again; this will be retry number …, from 1.
    Retry(u32),
    /// It has failed. The counter goes: who sends it again means it.
    Failure {
        /// The kind of failure.
        reason: Reason,
        /// What went wrong.
        detail: String,
        /// Runs of the handlers, the first included.
        attempts: u32,
        /// When.
        at: DateTime<Utc>,
    },
}

impl Stamp {
    fn headers(&self) -> BTreeMap<ShortString, AMQPValue> {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let number = |number: u32| AMQPValue::LongInt(i32::try_from(number).unwrap_or(i32::MAX));
        match self {
            Self::Retry(retry) => BTreeMap::from([(RETRY_COUNT.into(), number(*retry))]),
            Self::Failure { reason, detail, attempts, at } => BTreeMap::from([
                (FAILURE_REASON.into(), text(reason.as_str())),
                (FAILURE_DETAIL.into(), text(&detail[..detail.floor_char_boundary(DETAIL_LIMIT)])),
                (FAILED_AT.into(), text(&at.to_rfc3339_opts(SecondsFormat::Millis, true))),
                (FAILED_ATTEMPTS.into(), number(*attempts)),
            ]),
        }
    }
}

/// The properties of a copy: the original's, less what would act a second time, with the stamp over them; its headers
/// fit a frame of `frame_max` bytes.
pub fn copy(original: &Original, stamp: &Stamp, frame_max: u32) -> BasicProperties {
    let p = &original.properties;
    let mut headers = p.headers().as_ref().map(|table| table.inner().clone()).unwrap_or_default();
    let mut own = stamp.headers();
    for (name, now) in [(ORIGINAL_EXCHANGE, &original.exchange), (ORIGINAL_ROUTING_KEY, &original.routing_key)] {
        // What the first copy said stays; what no copy can have said gives way.
        let first =
            headers.remove(name).filter(|value| matches!(value, AMQPValue::LongString(text) if text.len() < 256));
        own.insert(name.into(), first.unwrap_or_else(|| string(now)));
    }
    for name in BOOKKEEPING.iter().chain([&RETRY_COUNT]) {
        headers.remove(*name);
    }
    for (name, kept_as) in ACTING {
        if let Some(value) = headers.remove(name) {
            headers.insert(kept_as.into(), value);
        }
    }

    // Persistent, whatever the original was: a copy must survive the broker's restart.
    let mut copy = BasicProperties::default().with_delivery_mode(2);
    macro_rules! carry {
        ($($get:ident $with:ident),*) => { $(if let Some(value) = p.$get().clone() { copy = copy.$with(value); })* };
    }
    carry!(
        content_type with_content_type, content_encoding with_content_encoding, priority with_priority,
        correlation_id with_correlation_id, message_id with_message_id, timestamp with_timestamp, kind with_type,
        app_id with_app_id, cluster_id with_cluster_id
    );
    match p.reply_to() {
        // The broker refuses a copy that asks for direct replies; nobody waits for them any more.
        Some(pseudo) if pseudo.as_str().starts_with("amq.rabbitmq.reply-to") => {
            headers.insert("original-reply-to".into(), string(pseudo));
        }
        Some(queue) => copy = copy.with_reply_to(queue.clone()),
        None => {}
    }
    if let Some(expiration) = p.expiration() {
        // It would end the copy's wait early, or lose it.
        headers.insert("original-expiration".into(), string(expiration));
    }
    if let Some(user) = p.user_id() {
        // The broker refuses a copy in another user's name.
        headers.insert("original-user-id".into(), string(user));
    }
    headers.retain(|name, _| !own.contains_key(name));
    shrink(&mut headers, &own, frame_max);
    headers.extend(own);
    copy.with_headers(headers.into())
}

/// Drops the largest of `headers` until they fit a frame together with `own`, and names them: a content header cannot
/// be split, and a larger one costs the connection.
fn shrink(headers: &mut BTreeMap<ShortString, AMQPValue>, own: &BTreeMap<ShortString, AMQPValue>, frame_max: u32) {
    let size = |table: &BTreeMap<_, _>| table.iter().map(|(name, value)| entry_size(name, value)).sum::<usize>();
    let limit = (frame_max as usize).saturating_sub(ROOM);
    // A copy of a copy goes on with the list that it finds, which has its place in the room.
    let mut dropped = match headers.remove(DROPPED_HEADERS) {
        Some(AMQPValue::LongString(names)) => vec![String::from_utf8_lossy(names.as_bytes()).into_owned()],
        _ => Vec::new(),
    };
    let mut total = size(headers) + size(own);
    let mut by_size: Vec<_> = headers.iter().map(|(name, value)| (entry_size(name, value), name.clone())).collect();
    by_size.sort_unstable();
    while total > limit
        && let Some((size, name)) = by_size.pop()
    {
        total -= size;
        headers.remove(&name);
        dropped.push(name.as_str().to_owned());
    }
    if dropped.is_empty() {
        return;
    }
    let mut names = dropped.join(",");
    if names.len() > DETAIL_LIMIT {
        names.truncate(names.floor_char_boundary(DETAIL_LIMIT));
        names.push('…');
    }
    headers.insert(DROPPED_HEADERS.into(), AMQPValue::LongString(names.into()));
}

/// Bytes of a header on the wire: a short string, a type, a value
/// (<https://www.rabbitmq.com/amqp-0-9-1-errata#section_3>).
fn entry_size(name: &ShortString, value: &AMQPValue) -> usize {
    1 + name.as_str().len() + value_size(value)
}

fn value_size(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) | AMQPValue::ShortShortInt(_) | AMQPValue::ShortShortUInt(_) => 1,
        AMQPValue::ShortInt(_) | AMQPValue::ShortUInt(_) => 2,
        AMQPValue::LongInt(_) | AMQPValue::LongUInt(_) | AMQPValue::Float(_) => 4,
        AMQPValue::DecimalValue(_) => 5,
        AMQPValue::LongLongInt(_) | AMQPValue::Double(_) | AMQPValue::Timestamp(_) => 8,
        AMQPValue::ShortString(text) => 1 + text.as_str().len(),
        AMQPValue::LongString(text) => 4 + text.len(),
        AMQPValue::ByteArray(bytes) => 4 + bytes.len(),
        AMQPValue::FieldArray(values) => 4 + values.as_slice().iter().map(value_size).sum::<usize>(),
        AMQPValue::FieldTable(table) => 4 + table.inner().iter().map(|(n, v)| entry_size(n, v)).sum::<usize>(),
    }
}

fn string(text: &ShortString) -> AMQPValue {
    AMQPValue::LongString(text.as_str().into())
}

#[cfg(test)]
mod tests {
    use lapin::types::FieldArray;

    use super::*;

    const FRAME_MAX: u32 = 131_072;

    fn original(properties: BasicProperties) -> Original {
        Original { exchange: "events".into(), routing_key: "order.order.placed.v1".into(), properties }
    }

    fn with_headers(headers: &[(&str, AMQPValue)]) -> Original {
        let table = headers.iter().map(|(name, value)| ((*name).into(), value.clone())).collect::<BTreeMap<_, _>>();
        original(BasicProperties::default().with_headers(table.into()))
    }

    fn text(text: &str) -> AMQPValue {
        AMQPValue::LongString(text.into())
    }

    fn header<'p>(copy: &'p BasicProperties, name: &str) -> Option<&'p AMQPValue> {
        copy.headers().as_ref()?.inner().get(name)
    }

    fn failure(detail: &str) -> Stamp {
        let (reason, at) = (Reason::Rejected, DateTime::UNIX_EPOCH);
        Stamp::Failure { reason, detail: detail.to_owned(), attempts: 1, at }
    }

    fn failed(original: &Original) -> BasicProperties {
        copy(original, &failure("why"), FRAME_MAX)
    }

    #[test]
    fn the_retry_count_is_read_from_any_integer_and_is_0_otherwise() {
        for value in [
            AMQPValue::ShortShortInt(1),
            AMQPValue::ShortShortUInt(1),
            AMQPValue::ShortInt(1),
            AMQPValue::ShortUInt(1),
            AMQPValue::LongInt(1),
            AMQPValue::LongUInt(1),
            AMQPValue::LongLongInt(1),
            text("1"),
        ] {
            assert_eq!(with_headers(&[(RETRY_COUNT, value)]).retries(), Ok(1));
        }
        for value in [
            AMQPValue::Double(1.0),
            AMQPValue::Float(1.0),
            AMQPValue::Void,
            AMQPValue::Boolean(true),
            text(""),
            text("one"),
            text("1.0"),
            text("-"),
            AMQPValue::FieldArray(FieldArray::default()),
        ] {
            assert!(with_headers(&[(RETRY_COUNT, value)]).retries().is_err());
        }
        assert_eq!(original(BasicProperties::default()).retries(), Ok(0));
        assert_eq!(with_headers(&[(RETRY_COUNT, AMQPValue::LongLongInt(-7))]).retries(), Ok(0));
        assert_eq!(with_headers(&[(RETRY_COUNT, AMQPValue::LongLongInt(i64::MAX))]).retries(), Ok(u32::MAX));
        assert_eq!(with_headers(&[(RETRY_COUNT, text("99999999999999999999"))]).retries(), Ok(u32::MAX));
        assert_eq!(with_headers(&[(RETRY_COUNT, text("-99999999999999999999"))]).retries(), Ok(0));
    }

    #[test]
    fn a_copy_keeps_the_applications_properties_and_headers_with_their_types() {
        let mine = [
            ("tenant", text("t1")),
            ("x-custom", AMQPValue::ShortInt(7)),
            ("when", AMQPValue::Timestamp(5)),
            ("", AMQPValue::Void),
        ];
        let mut original = with_headers(&mine);
        original.properties = original
            .properties
            .with_message_id("m".into())
            .with_correlation_id("c".into())
            .with_priority(7)
            .with_type("t".into())
            .with_timestamp(3)
            .with_reply_to("client.queue".into())
            .with_delivery_mode(1);
        let copy = copy(&original, &Stamp::Retry(2), FRAME_MAX);
        for (name, value) in &mine {
            assert_eq!(header(&copy, name), Some(value), "{name}");
        }
        assert_eq!(header(&copy, RETRY_COUNT), Some(&AMQPValue::LongInt(2)));
        assert_eq!(copy.message_id(), original.properties.message_id());
        assert_eq!(copy.reply_to(), original.properties.reply_to());
        assert_eq!((*copy.priority(), *copy.timestamp(), *copy.delivery_mode()), (Some(7), Some(3), Some(2)));
        assert_eq!(header(&copy, ORIGINAL_EXCHANGE), Some(&text("events")));
    }

    #[test]
    fn what_would_act_a_second_time_is_kept_under_another_name() {
        let acting = ACTING.map(|(name, _)| (name, text(name)));
        let mut original = with_headers(&acting);
        original.properties = original
            .properties
            .with_expiration("5".into())
            .with_user_id("u".into())
            .with_reply_to("amq.rabbitmq.reply-to.g1h2".into());
        let copy = failed(&original);
        assert_eq!((copy.expiration(), copy.user_id(), copy.reply_to()), (&None, &None, &None));
        for (name, kept_as) in ACTING {
            assert_eq!((header(&copy, name), header(&copy, kept_as)), (None, Some(&text(name))), "{name}");
        }
        for name in ["original-expiration", "original-user-id", "original-reply-to"] {
            assert!(header(&copy, name).is_some(), "{name}");
        }
    }

    #[test]
    fn what_the_broker_wrote_is_not_sent_again() {
        let copy = failed(&with_headers(&BOOKKEEPING.map(|name| (name, text("theirs")))));
        for name in BOOKKEEPING {
            assert_eq!(header(&copy, name), None, "{name}");
        }
    }

    #[test]
    fn a_failure_copy_replaces_what_an_earlier_one_said_and_keeps_the_first_address() {
        let mut first = failed(&with_headers(&[(RETRY_COUNT, AMQPValue::LongInt(3))]));
        assert_eq!(header(&first, RETRY_COUNT), None);
        for _ in 0..30 {
            let replayed =
                Original { exchange: "".into(), routing_key: "stock.events".into(), properties: first.clone() };
            let again = failed(&replayed);
            assert_eq!(again, first);
            first = again;
        }
        assert_eq!(header(&first, ORIGINAL_ROUTING_KEY), Some(&text("order.order.placed.v1")));
    }

    #[test]
    fn the_detail_is_cut_to_1_kib() {
        let detail = "é".repeat(1000);
        let copy = copy(&with_headers(&[]), &failure(&detail), FRAME_MAX);
        let Some(AMQPValue::LongString(cut)) = header(&copy, FAILURE_DETAIL) else { panic!("{copy:?}") };
        assert_eq!(cut.len(), 1024);
    }

    #[test]
    fn headers_that_do_not_fit_a_frame_are_dropped_largest_first_and_named() {
        let copy = failed(&with_headers(&[
            ("small", text("s")),
            ("large", text(&"x".repeat(70_000))),
            ("larger", AMQPValue::ByteArray(vec![0; 80_000].into())),
        ]));
        assert_eq!(header(&copy, "larger"), None);
        assert_eq!(header(&copy, DROPPED_HEADERS), Some(&text("larger")));
        assert!(header(&copy, "large").is_some() && header(&copy, "small").is_some());
        assert!(header(&copy, FAILURE_REASON).is_some());
    }
    #[test]
    fn the_first_address_is_kept_unless_no_copy_can_have_said_it() {
        for forged in [AMQPValue::LongInt(1), text(&"x".repeat(256))] {
            let copy = failed(&with_headers(&[(ORIGINAL_EXCHANGE, forged), (ORIGINAL_ROUTING_KEY, text("first"))]));
            assert_eq!(header(&copy, ORIGINAL_EXCHANGE), Some(&text("events")));
            assert_eq!(header(&copy, ORIGINAL_ROUTING_KEY), Some(&text("first")));
        }
    }

    #[test]
    fn the_address_is_no_foreign_header_that_may_be_dropped() {
        let names: Vec<_> = (0..21_000).map(|n| format!("{n:04x}")).collect();
        let many: Vec<_> = names.iter().map(|name| (name.as_str(), AMQPValue::Void)).collect();
        let copy = failed(&with_headers(&many));
        assert_eq!(header(&copy, ORIGINAL_ROUTING_KEY), Some(&text("order.order.placed.v1")));
        assert!(header(&copy, DROPPED_HEADERS).is_some());
    }
}
