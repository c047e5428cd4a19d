//! Bytes to [`Message`]: the one strict grammar of the contract. Whatever it refuses is permanent.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use chrono::{DateTime, NaiveTime, Timelike, Utc};
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, de};
use serde_json::value::RawValue;

use super::event::Event;
use super::{Message, Undecodable};
use crate::stock::{deserialize_text, id, quote};

id! {
    /// The identity of an event, set by its producer. Two messages with the same value are one event.
    EventId
}

/// What every event of the shop has around its payload.
#[derive(Deserialize)]
struct Envelope<'b> {
    event_id: EventId,
    #[serde(borrow)]
    event_name: Cow<'b, str>,
    occurred_at: OccurredAt,
    #[serde(borrow)]
    payload: &'b RawValue,
}

/// Decodes a message's body of at most `max_body` bytes, which its producer says is encoded so.
///
/// # Errors
/// [`Undecodable`] names the place, the rule and, shortened, what was sent.
pub fn decode(body: &[u8], content_encoding: Option<&str>, max_body: usize) -> Result<Message, Undecodable> {
    let plain = ["", "identity", "utf-8", "utf8"]; // some producers write the charset there
    if let Some(encoding) =
        content_encoding.filter(|given| !plain.iter().any(|plain| given.eq_ignore_ascii_case(plain)))
    {
        let what = format!("{} is not supported, only identity", quote(encoding));
        return Err(Undecodable::malformed("content_encoding", what));
    }
    if body.len() > max_body {
        let what = format!("{} bytes, consume.max_body allows {max_body}", body.len());
        return Err(Undecodable::malformed("", what));
    }
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        let near = body[at.saturating_sub(8)..body.len().min(at + 8)].escape_ascii();
        Undecodable::malformed("", format!("is not UTF-8 at byte {at}, near \"{near}\""))
    })?;
    check_text(text)?;
    let envelope: Envelope<'_> = parse(text, "")?;
    Ok(Message {
        id: envelope.event_id,
        occurred_at: envelope.occurred_at.0,
        event: Event::decode(&envelope.event_name, envelope.payload.get())?,
    })
}

/// Parses `text` as a JSON object of the shape `T`; `place` is where it stands in the body.
///
/// The path of an error is found by parsing once more: what is well-formed pays nothing for it.
pub(super) fn parse<'b, T: Deserialize<'b>>(text: &'b str, place: &str) -> Result<T, Undecodable> {
    match serde_json::from_str::<Object<T>>(text) {
        Ok(object) => Ok(object.0),
        Err(error) => {
            let mut again = serde_json::Deserializer::from_str(text);
            let path = match serde_path_to_error::deserialize::<_, Object<T>>(&mut again) {
                Err(located) => {
                    let path = located.path().to_string();
                    // Of the whole it says ".", of a key that could not be read "?".
                    let path = path.trim_end_matches(['.', '?']);
                    [place, path].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".")
                }
                Ok(_) => place.to_owned(), // a whole value followed by something else
            };
            // The place of a wrong value is its path; only bad JSON needs line and column, which count from where
            // `text` begins.
            let what = if error.is_data() || !place.is_empty() {
                let position = format!(" at line {} column {}", error.line(), error.column());
                let what = error.to_string();
                what.strip_suffix(&position).unwrap_or(&what).to_owned()
            } else {
                format!("is not JSON: {error}, near {}", near(text, error.line(), error.column()))
            };
            Err(Undecodable::malformed(&path, what))
        }
    }
}

/// A few characters around a position of the parser's, which counts lines from 1 and the bytes of a line.
fn near(text: &str, line: usize, column: usize) -> String {
    let begin: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let at = (begin + column).saturating_sub(1).min(text.len());
    quote(&text[text.floor_char_boundary(at.saturating_sub(10))..text.ceil_char_boundary(at + 10)])
}

/// What the parser itself lets pass: nesting (it skips ignored values without counting) and lone
/// surrogates in ignored strings, which are no Unicode text. And what it has no good word for: a body that
/// looks empty, or right, to the eye.
///
/// Looks at well-formed JSON only; in anything else the parser finds the fault afterwards.
fn check_text(text: &str) -> Result<(), Undecodable> {
    const MAX_DEPTH: usize = 128; // the usual limit of JSON parsers, this one's own included

    if text.trim_ascii().is_empty() {
        return Err(Undecodable::malformed("", "is empty".to_owned()));
    }
    if text.starts_with('\u{feff}') {
        return Err(Undecodable::malformed("", "begins with a byte order mark (EF BB BF)".to_owned()));
    }
    let bytes = text.as_bytes();
    // Almost every body has no escapes, and too few brackets to be nested too deep: no need to look at each byte in
    // turn. Counted by bytes, many at once.
    let openings = |chunk: &[u8]| chunk.iter().map(|byte| u8::from(matches!(byte, b'{' | b'['))).sum::<u8>();
    if bytes.chunks(255).map(|chunk| usize::from(openings(chunk))).sum::<usize>() <= MAX_DEPTH && !text.contains('\\') {
        return Ok(());
    }
    let (mut depth, mut in_string, mut at) = (0_usize, false, 0);
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match (in_string, byte) {
            (_, b'"') => in_string = !in_string,
            (true, b'\\') => {
                let escape = &bytes[at..];
                at += 1;
                if escape.first() != Some(&b'u') {
                    continue;
                }
                match code_unit(escape) {
                    Some(0xD800..=0xDBFF) => match code_unit(escape.get(6..).unwrap_or_default()) {
                        Some(0xDC00..=0xDFFF) if escape[5] == b'\\' => at += 10, // both halves
                        _ => return Err(lone_surrogate(at)),
                    },
                    Some(0xDC00..=0xDFFF) => return Err(lone_surrogate(at)),
                    _ => {}
                }
            }
            (false, b'{' | b'[') => {
                depth += 1;
                if depth > MAX_DEPTH {
                    let what = format!("nested more than {MAX_DEPTH} deep at byte {at}");
                    return Err(Undecodable::malformed("", what));
                }
            }
            (false, b'}' | b']') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

fn lone_surrogate(at: usize) -> Undecodable {
    Undecodable::malformed("", format!("has a lone surrogate in a string at byte {at}"))
}

/// The UTF-16 code unit of an escape that begins at its `u`.
fn code_unit(escape: &[u8]) -> Option<u16> {
    let digits = escape.strip_prefix(b"u")?.get(..4)?;
    u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// A JSON object and nothing else: serde's derived readers would take an array of the fields as well.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> de::Visitor<'de> for Visitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Visitor(PhantomData))
    }
}

/// RFC 3339 with an offset. It decides nothing but how late an event is.
struct OccurredAt(DateTime<Utc>);

impl OccurredAt {
    fn parse(text: &str) -> Result<Self, &'static str> {
        const RULE: &str = "must be an RFC 3339 time with an offset";

        // chrono's own parser is close to the RFC, but takes a blank for the T, a sign before the year, and U+2212 for the
        // minus of the offset.
        let bytes = text.as_bytes();
        if !(text.is_ascii()
            && bytes.first().is_some_and(u8::is_ascii_digit)
            && matches!(bytes.get(10), Some(b'T' | b't')))
        {
            return Err(RULE);
        }
        let time = DateTime::parse_from_rfc3339(text).map_err(|_| RULE)?.to_utc();
        // It also takes second 60 anywhere; a leap second is the last one of a UTC day.
        let last_second = NaiveTime::from_hms_opt(23, 59, 59);
        if time.nanosecond() >= 1_000_000_000 && time.time().with_nanosecond(0) != last_second {
            return Err("has a second 60 that is no leap second");
        }
        Ok(Self(time))
    }
}

impl<'de> Deserialize<'de> for OccurredAt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "an RFC 3339 time as a string", Self::parse)
    }
}

impl Undecodable {
    /// Something is wrong at `place`, a path such as `payload.lines[2].quantity`, or "" for the whole.
    pub(super) fn malformed(place: &str, mut what: String) -> Self {
        // The parser quotes a value of a wrong type in full, with the rule behind it.
        if what.len() > 300 {
            let middle = what.floor_char_boundary(130)..what.ceil_char_boundary(what.len() - 130);
            what.replace_range(middle, "…");
        }
        let place = match place {
            "" => "body".to_owned(),
            // The path quotes keys as they were sent.
            place => place.chars().take(100).flat_map(char::escape_debug).collect(),
        };
        Self::Malformed(format!("{place}: {what}"))
    }

    pub(super) fn unknown(event_name: &str) -> Self {
        Self::UnknownEvent(quote(event_name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(body: &[u8]) -> Result<Message, Undecodable> {
        super::decode(body, None, 4 << 20)
    }

    const ENVELOPE: &str = r#"{"event_id":"0190163d-8694-739b-aea5-966c26f8ad90","event_name":"order.order.placed.v1",
        "occurred_at":"2026-03-01T12:00:00Z",
        "payload":{"orderId":"0190163d-8694-739b-aea5-966c26f8ad91","customerId":"0190163d-8694-739b-aea5-966c26f8ad92",
                   "lines":[{"productId":"0190163d-8694-739b-aea5-966c26f8ad93","quantity":"2.000"}]}}"#;

    fn reason(body: &str) -> String {
        match decode(body.as_bytes()) {
            Ok(message) => panic!("was read as {message:?}: {body}"),
            Err(reason) => reason.to_string(),
        }
    }

    fn replaced(from: &str, to: &str) -> String {
        assert!(ENVELOPE.contains(from), "{from}");
        ENVELOPE.replacen(from, to, 1)
    }

    #[test]
    fn the_example_of_the_contract_is_read() {
        let message = decode(ENVELOPE.as_bytes()).unwrap();
        assert_eq!(message.id.to_string(), "0190163d-8694-739b-aea5-966c26f8ad90");
        assert_eq!(message.occurred_at.to_rfc3339(), "2026-03-01T12:00:00+00:00");
        let Event::OrderPlaced(order) = message.event else { panic!("{:?}", message.event) };
        assert_eq!(order.lines.len(), 1);
        assert_eq!(order.lines[0].quantity.to_string(), "2.000");
    }

    #[test]
    fn what_producers_may_change_is_tolerated() {
        for body in [
            replaced("\"orderId\"", "\"order_id\""),
            replaced("\"productId\"", "\"product_id\""),
            replaced("{\"event_id\"", "{\"\":null,\"x\":[1e400,12345678901234567890,{\"__proto__\":[]}],\"event_id\""),
            replaced("\"event_id\"", "\"event\\u005fid\""),
            replaced("\"quantity\"", "\"note\":\"\\ud83d\\ude00\\\"\\\\\",\"quantity\""),
            replaced("2026-03-01T12:00:00Z", "2026-02-28t23:59:59.999999999+14:00"),
            replaced("2026-03-01T12:00:00Z", "2016-12-31T23:59:60Z"),
            replaced("2026-03-01T12:00:00Z", "2026-03-01T12:00:00.1234567891-00:00"),
            replaced("2026-03-01T12:00:00Z", "0001-01-01T00:00:00Z"),
            replaced("0190163d-8694-739b-aea5-966c26f8ad90", "0190163D-8694-739B-AEA5-966C26F8AD90"),
            format!(" \n{ENVELOPE}\t "),
            replaced("\"lines\"", &format!("\"x\":{}{},\"lines\"", "[".repeat(126), "]".repeat(126))),
        ] {
            if let Err(reason) = decode(body.as_bytes()) {
                panic!("{reason}: {body}");
            }
        }
    }

    #[test]
    fn what_is_refused_is_named_with_its_place() {
        for (body, place, rule) in [
            (replaced("\"2.000\"", "2.000"), "payload.lines[0].quantity", "invalid type: floating point `2.0`"),
            (replaced("\"2.000\"", "2"), "payload.lines[0].quantity", "decimal as a string"),
            (replaced("\"2.000\"", "\"2.0005\""), "payload.lines[0].quantity", "got \"2.0005\""),
            (replaced("\"2.000\"", "null"), "payload.lines[0].quantity", "invalid type: null"),
            (replaced("-966c26f8ad91", ""), "payload.orderId", "36 characters"),
            (replaced("-966c26f8ad92", ""), "payload.customerId", "36 characters"),
            (replaced("\"customerId\"", "\"other\""), "payload", "missing field `customerId`"),
            (
                replaced("\"orderId\"", "\"order_id\":\"0190163d-8694-739b-aea5-966c26f8ad91\",\"orderId\""),
                "payload",
                "duplicate field `orderId`",
            ),
            (
                replaced("{\"event_id\"", "{\"event_id\":\"0190163d-8694-739b-aea5-966c26f8ad90\",\"event\\u005fid\""),
                "",
                "duplicate field `event_id`",
            ),
            (
                replaced("{\"productId\":\"0190163d-8694-739b-aea5-966c26f8ad93\",\"quantity\":\"2.000\"}", ""),
                "payload.lines",
                "at least one",
            ),
            (
                replaced(
                    "{\"productId\":\"0190163d-8694-739b-aea5-966c26f8ad93\",\"quantity\":\"2.000\"}",
                    "[\"0190163d-8694-739b-aea5-966c26f8ad93\",\"2.000\"]",
                ),
                "payload.lines[0]",
                "expected an object",
            ),
            (
                replaced("\"lines\":[", &format!("\"lines\":\"{}\",\"x\":[", "y".repeat(100_000))),
                "payload.lines",
                "expected an array of lines",
            ),
            (replaced("12:00:00Z", "12:00:00"), "occurred_at", "RFC 3339"),
            (replaced("T12:00:00Z", " 12:00:00Z"), "occurred_at", "RFC 3339"),
            (replaced("12:00:00Z", "12:00:60Z"), "occurred_at", "leap second"),
            (replaced("12:00:00Z", "24:00:00Z"), "occurred_at", "RFC 3339"),
            (replaced("12:00:00Z", "12:00:00+02:60"), "occurred_at", "RFC 3339"),
            (replaced("12:00:00Z", "12:00:00+0000"), "occurred_at", "RFC 3339"),
            (replaced("12:00:00Z", "12:00:00\u{2212}01:00"), "occurred_at", "RFC 3339"),
            (replaced("2026-03-01T", "+10000-03-01T"), "occurred_at", "RFC 3339"),
            (replaced("\"2026-03-01T12:00:00Z\"", "1772366400"), "occurred_at", "invalid type: integer"),
            (replaced("\"order.order.placed.v1\"", "7"), "event_name", "invalid type"),
            (format!("{ENVELOPE}x"), "", "trailing characters"),
            (format!("\u{feff}{ENVELOPE}"), "", "byte order mark"),
            ("[]".to_owned(), "", "expected an object"),
            ("null".to_owned(), "", "expected an object"),
            (String::new(), "", "is empty"),
            (replaced("{\"event_id\"", "{\"x\":\"\\ud800\",\"event_id\""), "", "surrogate"),
            (replaced("{\"event_id\"", "{\"x\":\"\\udc00\",\"event_id\""), "", "surrogate"),
            (replaced("{\"event_id\"", "{\"x\":\"\\ud800\\ud800\",\"event_id\""), "", "surrogate"),
            (replaced("\"lines\"", &format!("\"x\":{}{},\"lines\"", "[".repeat(127), "]".repeat(127))), "", "nested"),
            (replaced("{\"event_id\"", &format!("{{\"x\":{}", "[".repeat(1_000_000))), "", "nested"),
        ] {
            let reason = reason(&body);
            let place = if place.is_empty() { "body" } else { place };
            assert!(reason.starts_with(&format!("{place}: ")), "{place}: {reason}");
            assert!(reason.contains(rule), "{rule}: {reason}");
        }
        assert!(matches!(decode(b"{\"\xff\":1}"), Err(Undecodable::Malformed(_))));
    }

    #[test]
    fn a_body_is_plain_and_within_its_limit() {
        for encoding in [None, Some(""), Some("identity"), Some("UTF-8"), Some("utf8")] {
            assert!(super::decode(ENVELOPE.as_bytes(), encoding, ENVELOPE.len()).is_ok(), "{encoding:?}");
        }
        let refused = super::decode(ENVELOPE.as_bytes(), Some("gzip"), ENVELOPE.len()).unwrap_err().to_string();
        assert!(refused.starts_with("content_encoding: \"gzip\""), "{refused}");
        assert!(super::decode(ENVELOPE.as_bytes(), None, ENVELOPE.len() - 1).is_err());
    }

    #[test]
    fn an_event_name_is_matched_byte_for_byte() {
        for name in
            ["Order.Order.Placed.V1", " order.order.placed.v1", "order.order.placed.v1\\n", "order.order.placed.v2", ""]
        {
            let body = replaced("order.order.placed.v1", name);
            assert!(matches!(decode(body.as_bytes()), Err(Undecodable::UnknownEvent(_))), "{name}");
        }
    }
}
