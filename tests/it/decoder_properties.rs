//! Every spelling that the grammar allows means the same, and no other spelling is read.

use std::sync::LazyLock;

use fastrand::Rng;
use proptest::prelude::*;
use regex::Regex;
use stock_service::message::{Event, Message, Undecodable, decode};

/// An order as its producer knows it.
#[derive(Clone, Debug)]
struct Known {
    event_id: u128,
    order_id: u128,
    customer_id: u128,
    /// Product, and quantity in thousandths.
    lines: Vec<(u128, i64)>,
    /// Seconds since the epoch, of four-digit years.
    occurred_at: i64,
}

fn known() -> impl Strategy<Value = Known> {
    let id = || 1..u128::MAX;
    let quantity = prop_oneof![1..=999_999_999_999_i64, 1..10_000_i64, (1..1_000_i64).prop_map(|n| n * 1000)];
    let lines = proptest::collection::vec((id(), quantity), 1..5);
    (id(), id(), id(), lines, 0..250_000_000_000_i64).prop_map(
        |(event_id, order_id, customer_id, lines, occurred_at)| Known {
            event_id,
            order_id,
            customer_id,
            lines,
            occurred_at,
        },
    )
}

/// Writes an order in one of the many spellings of the grammar.
struct Pen(Rng);

impl Pen {
    fn blank(&mut self) -> String {
        (0..self.0.usize(0..3)).map(|_| *self.0.choice(&[' ', '\n', '\r', '\t']).expect("some")).collect()
    }

    /// A JSON string, some of its characters as escapes.
    fn string(&mut self, text: &str) -> String {
        let mut json = String::from('"');
        for c in text.chars() {
            let must = c < ' ' || c == '"' || c == '\\';
            match (must || self.0.u8(0..8) == 0, c) {
                (true, '"' | '\\' | '/') if self.0.bool() => json.extend(['\\', c]),
                (true, _) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let hex = format!("{unit:04x}");
                        json += "\\u";
                        json += &if self.0.bool() { hex.to_uppercase() } else { hex };
                    }
                }
                (false, _) => json.push(c),
            }
        }
        json.push('"');
        json
    }

    fn id(&mut self, id: u128) -> String {
        let text = uuid::Uuid::from_u128(id).to_string();
        let any_case = text.chars().map(|c| if self.0.bool() { c.to_ascii_uppercase() } else { c }).collect::<String>();
        self.string(&any_case)
    }

    fn quantity(&mut self, thousandths: i64) -> String {
        let (whole, mut decimals) = (thousandths / 1000, format!("{:03}", thousandths % 1000));
        let mut text = whole.to_string();
        text.insert_str(0, &"0".repeat(self.0.usize(0..=9 - text.len())));
        while decimals.ends_with('0') && self.0.bool() {
            decimals.pop();
        }
        if !decimals.is_empty() {
            text = format!("{text}.{decimals}");
        }
        self.string(&text)
    }

    fn time(&mut self, seconds: i64) -> String {
        let offset = self.0.i32(-1439..=1439);
        let zone = chrono::FixedOffset::east_opt(offset * 60).expect("less than a day");
        let time = chrono::DateTime::from_timestamp(seconds, 0).expect("a time").with_timezone(&zone);
        let fraction = match self.0.usize(0..12) {
            0 => String::new(),
            digits => format!(".{:0digits$}", self.0.u8(0..10)),
        };
        let t = if self.0.bool() { 'T' } else { 't' };
        let (sign, minutes) = (if offset < 0 { '-' } else { '+' }, offset.abs());
        let written = time.format("%Y-%m-%d/%H:%M:%S").to_string().replace('/', &t.to_string());
        let zone = match offset {
            0 => (*self.0.choice(&["Z", "z", "+00:00", "-00:00"]).expect("some")).to_owned(),
            _ => format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60),
        };
        self.string(&format!("{written}{fraction}{zone}"))
    }

    /// A value that nobody reads.
    fn unknown(&mut self, depth: usize) -> String {
        match self.0.usize(0..if depth == 0 { 6 } else { 8 }) {
            0 => "null".to_owned(),
            1 => "true".to_owned(),
            2 => "-1.5e400".to_owned(),
            3 => "123456789012345678901234567890".to_owned(),
            4 => self.string("a \"quoted\" é 😀 \\ / \u{0} text"),
            5 => self.string(""),
            6 => format!("[{}]", [self.unknown(depth - 1), self.unknown(depth - 1)].join(",")),
            _ => {
                let members = vec![("event_id", "7".to_owned()), ("", self.unknown(depth - 1))];
                self.object(members)
            }
        }
    }

    /// An object of these members in any order.
    fn object(&mut self, mut members: Vec<(&str, String)>) -> String {
        self.0.shuffle(&mut members);
        let mut json = String::from('{');
        for (n, (key, value)) in members.iter().enumerate() {
            if n > 0 {
                json.push(',');
            }
            json += &[self.blank(), self.string(key), self.blank(), ":".to_owned(), self.blank()].concat();
            json += value;
            json += &self.blank();
        }
        json + "}"
    }

    /// An object of the contract: with some members more than it knows, which are not the contract's for this place.
    fn known_object(&mut self, mut members: Vec<(&'static str, String)>) -> String {
        for key in ["unknown", "", "Event_id", "__proto__", "order-id", "é"] {
            if self.0.u8(0..4) == 0 {
                members.push((key, self.unknown(3)));
            }
        }
        self.object(members)
    }

    fn either(&mut self, camel: &'static str, snake: &'static str) -> &'static str {
        if self.0.bool() { camel } else { snake }
    }

    fn write(&mut self, known: &Known) -> String {
        let mut lines = Vec::new();
        for (product, quantity) in &known.lines {
            let members = vec![
                (self.either("productId", "product_id"), self.id(*product)),
                ("quantity", self.quantity(*quantity)),
            ];
            let line = self.known_object(members);
            lines.push([self.blank(), line, self.blank()].concat());
        }
        let payload = vec![
            (self.either("orderId", "order_id"), self.id(known.order_id)),
            (self.either("customerId", "customer_id"), self.id(known.customer_id)),
            ("lines", format!("[{}]", lines.join(","))),
        ];
        let envelope = vec![
            ("event_id", self.id(known.event_id)),
            ("event_name", self.string("order.order.placed.v1")),
            ("occurred_at", self.time(known.occurred_at)),
            ("payload", self.known_object(payload)),
        ];
        let object = self.known_object(envelope);
        [self.blank(), object, self.blank()].concat()
    }
}

fn read(body: &str) -> Result<Message, Undecodable> {
    decode(body.as_bytes(), None, 1 << 20)
}

fn means(message: &Message, known: &Known) {
    let id = |id: u128| uuid::Uuid::from_u128(id);
    let Event::OrderPlaced(order) = &message.event else { panic!("{message:?}") };
    assert_eq!(message.id.as_uuid(), id(known.event_id));
    assert_eq!(message.occurred_at.timestamp(), known.occurred_at);
    assert_eq!(order.order_id.as_uuid(), id(known.order_id));
    assert_eq!(order.customer_id.as_uuid(), id(known.customer_id));
    let lines: Vec<_> =
        order.lines.iter().map(|line| (line.product_id.as_uuid(), line.quantity.thousandths())).collect();
    let sent: Vec<_> = known.lines.iter().map(|(product, quantity)| (id(*product), *quantity)).collect();
    assert_eq!(lines, sent);
}

macro_rules! rule {
    ($text:expr) => {
        LazyLock::new(|| Regex::new($text).expect("a rule"))
    };
}

/// Another witness of the grammar: what an id is, and its value.
fn id_by_rule(text: &str) -> Option<String> {
    static RULE: LazyLock<Regex> = rule!(r"^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$");
    let digits = text.replace('-', "");
    let is_one = RULE.is_match(text) && !digits.chars().all(|c| c == '0') && !digits.chars().all(|c| "fF".contains(c));
    is_one.then(|| text.to_lowercase())
}

/// What a quantity is, and its value in thousandths.
fn quantity_by_rule(text: &str) -> Option<i64> {
    static RULE: LazyLock<Regex> = rule!(r"^([0-9]{1,9})(?:\.([0-9]{1,3}))?$");
    let parts = RULE.captures(text)?;
    let digits = format!("{}{:0<3}", &parts[1], parts.get(2).map_or("", |decimals| decimals.as_str()));
    digits.parse().ok().filter(|thousandths| *thousandths > 0)
}

/// What a time is.
fn is_time_by_rule(text: &str) -> bool {
    static RULE: LazyLock<Regex> = rule!(concat!(
        "^([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt]([0-9]{2}):([0-9]{2}):([0-9]{2})",
        r"(?:\.[0-9]+)?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))$",
    ));
    let Some(parts) = RULE.captures(text) else { return false };
    let number = |n: usize| parts.get(n).map_or(0, |digits| digits.as_str().parse::<i64>().expect("digits"));
    let (year, month, day) = (number(1), number(2), number(3));
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        4 | 6 | 9 | 11 => 30,
        2 if is_leap => 29,
        2 => 28,
        _ => 31,
    };
    let sign = if parts.get(7).is_some_and(|sign| sign.as_str() == "-") { -1 } else { 1 };
    let utc_minute = number(4) * 60 + number(5) - sign * (number(8) * 60 + number(9));
    let is_last_minute = utc_minute.rem_euclid(1440) == 1439;
    (1..=12).contains(&month)
        && (1..=days).contains(&day)
        && number(4) < 24
        && number(5) < 60
        && (number(6) < 60 || (number(6) == 60 && is_last_minute))
        && number(8) < 24
        && number(9) < 60
}

/// What may come in the place of a character: what the rules allow somewhere, and what looks like it.
const OTHERS: &str = "0123456789abcdefABCDEFgGxO-+.,: TtZzeEoN_/\\'\"\n\t\u{0}−٢２а\u{feff}\u{200b}";

/// The text itself, and each text with one character replaced, inserted or removed.
fn all_with_one_change(text: &str) -> Vec<String> {
    let chars: Vec<_> = text.chars().collect();
    let joined = |before: &[char], between: Option<char>, after: &[char]| -> String {
        before.iter().copied().chain(between).chain(after.iter().copied()).collect()
    };
    let mut texts = vec![text.to_owned()];
    for at in 0..=chars.len() {
        let (before, after) = chars.split_at(at);
        texts.extend(OTHERS.chars().map(|other| joined(before, Some(other), after)));
        if let Some((_, rest)) = after.split_first() {
            texts.push(joined(before, None, rest));
            texts.extend(OTHERS.chars().map(|other| joined(before, Some(other), rest)));
        }
    }
    texts
}

fn body(event_id: &str, order_id: &str, quantity: &str, occurred_at: &str) -> String {
    let id = "01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01";
    serde_json::json!({
        "event_id": event_id,
        "event_name": "order.order.placed.v1",
        "occurred_at": occurred_at,
        "payload": {
            "orderId": order_id,
            "customerId": id,
            "lines": [{"productId": id, "quantity": quantity}],
        },
    })
    .to_string()
}

/// The reason must name the place, or the body must have been read.
fn is_read_or_refused_at(place: &str, body: &str, is_right: bool) -> Option<Message> {
    match (read(body), is_right) {
        (Ok(message), true) => Some(message),
        (Err(Undecodable::Malformed(reason)), false) if reason.starts_with(&format!("{place}: ")) => None,
        (outcome, _) => panic!("right by the rule: {is_right}, but {outcome:?}: {body}"),
    }
}

const ID: &str = "01939C5E-7d4a-7c1b-9a55-3f6c2b1d8e02";
const QUANTITY: &str = "2.500";
const TIME: &str = "2026-11-30T09:15:27.412Z";

fn is_read_by_the_rule(quantity: &str) {
    let right = quantity_by_rule(quantity);
    let message = is_read_or_refused_at("payload.lines[0].quantity", &body(ID, ID, quantity, TIME), right.is_some());
    let read = message.map(|message| match message.event {
        Event::OrderPlaced(order) => order.lines[0].quantity.thousandths(),
        other => panic!("{other:?}"),
    });
    assert_eq!(read, right, "{quantity}");
}

#[test]
fn a_changed_character_of_an_id_is_refused_or_another_id() {
    for text in all_with_one_change(ID) {
        let right = id_by_rule(&text);
        let message = is_read_or_refused_at("event_id", &body(&text, ID, QUANTITY, TIME), right.is_some());
        assert_eq!(message.map(|message| message.id.to_string()), right);
        is_read_or_refused_at("payload.orderId", &body(ID, &text, QUANTITY, TIME), right.is_some());
    }
}

#[test]
fn a_changed_character_of_a_quantity_is_refused_or_another_quantity() {
    for quantity in [QUANTITY, "1", "0.001", "999999999.999"] {
        for text in all_with_one_change(quantity) {
            is_read_by_the_rule(&text);
        }
    }
}

#[test]
fn a_changed_character_of_a_time_is_refused_or_another_time() {
    for time in [TIME, "2024-02-29T23:59:59+00:00", "2016-12-31T23:59:60Z", "2017-01-01t09:29:60-14:30"] {
        for text in all_with_one_change(time) {
            is_read_or_refused_at("occurred_at", &body(ID, ID, QUANTITY, &text), is_time_by_rule(&text));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_spelling_of_the_grammar_means_the_same(known in known(), seed: u64) {
        let body = Pen(Rng::with_seed(seed)).write(&known);
        match read(&body) {
            Ok(message) => means(&message, &known),
            Err(reason) => panic!("{reason}: {body}"),
        }
    }

    #[test]
    fn any_quantity_is_read_by_the_rule(
        text in prop_oneof!["[0-9]{1,11}", "[0-9]{0,11}\\.[0-9]{0,5}", "0{1,3}\\.[01]{1,3}", "[0-9.eE+-]{0,12}"],
    ) {
        is_read_by_the_rule(&text);
    }

    #[test]
    fn one_changed_byte_does_no_harm(known in known(), seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let mut bytes = Pen(Rng::with_seed(seed)).write(&known).into_bytes();
        let at = rng.usize(0..bytes.len());
        bytes[at] = rng.u8(..);
        if let Err(reason) = decode(&bytes, None, 1 << 20) {
            let reason = reason.to_string();
            assert!(reason.len() <= 2_000 && !reason.contains(char::is_control), "{reason:?}");
        }
    }

    #[test]
    fn any_bytes_are_refused_with_a_short_and_harmless_reason(
        bytes in prop_oneof![
            any::<Vec<u8>>(),
            "([{}\\[\\],:\"\\\\]|event_id|payload|null|1e9|\\\\ud800|\n| ){0,60}".prop_map(String::into_bytes),
        ],
    ) {
        let reason = decode(&bytes, None, 1 << 20).expect_err("no message").to_string();
        assert!(reason.len() <= 2_000 && !reason.contains(char::is_control), "{reason:?}");
    }
}
