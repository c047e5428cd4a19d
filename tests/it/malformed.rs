//! Whatever breaks the contract is in the failure queue at once, untouched, and harms nobody.

use serde_json::{Value, json};

use crate::support::{Order, StatusChange, TestBed, id};

/// A good order as JSON, to be spoiled.
fn envelope() -> Value {
    serde_json::from_str(&Order::new(1).body()).expect("JSON")
}

/// A good order with one value replaced, by its path.
pub fn with(pointer: &str, value: Value) -> Vec<u8> {
    let mut envelope = envelope();
    *envelope.pointer_mut(pointer).expect(pointer) = value;
    envelope.to_string().into_bytes()
}

/// A good order without a key.
fn without(parent: &str, key: &str) -> Vec<u8> {
    let mut envelope = envelope();
    envelope.pointer_mut(parent).expect(parent).as_object_mut().expect("an object").remove(key).expect(key);
    envelope.to_string().into_bytes()
}

/// A good order's text with one part replaced.
fn replaced(from: &str, to: &str) -> Vec<u8> {
    let body = Order::new(1).body();
    assert!(body.contains(from), "{from}");
    body.replacen(from, to, 1).into_bytes()
}

fn change(field: &str, value: Value) -> Vec<u8> {
    let mut envelope: Value = serde_json::from_str(&StatusChange::new(&Order::new(1), "paid", 1).body()).expect("JSON");
    envelope["payload"][field] = value;
    envelope.to_string().into_bytes()
}

/// Sends each body among innocents: each must end in the failure queue as it was, with this reason.
pub async fn all_are_parked(bodies: Vec<Vec<u8>>, reason: &str) {
    let bed = TestBed::new().await;
    let innocents = Order::many(bodies.len());
    let service = bed.start().await;
    for (body, innocent) in bodies.iter().zip(&innocents) {
        bed.broker.publish(Order::EVENT, body).await;
        bed.broker.publish(Order::EVENT, innocent.body()).await;
    }
    let count = u32::try_from(bodies.len()).expect("a count");
    bed.has_processed(i64::from(count)).await;
    let mut failed = bed.broker.failed(count).await;
    service.stop().await;
    for body in &bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]);
        let at = failed.iter().position(|message| message.body == *body);
        let message = failed.swap_remove(at.unwrap_or_else(|| panic!("changed or missing: {shown}")));
        assert_eq!(message.text("failure-reason"), reason, "{shown}");
        assert_eq!(message.number("failed-attempts"), 1, "{shown}");
        assert!(!message.text("failure-detail").is_empty(), "{shown}");
    }
    assert_eq!(bed.processed().await, i64::from(count), "no rows but the innocents'");
    assert_eq!(bed.reservations().await, i64::from(count));
    assert_eq!(bed.count("select count(*) from order_status").await, i64::from(count));
    assert_eq!(bed.broker.in_work().await, 0, "no retries");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_json_object_is_parked() {
    let order = Order::new(1).body();
    let utf16 = order.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut latin1 = replaced("{\"", "{\"x\":\"@\",\"");
    let at = latin1.iter().position(|byte| *byte == b'@').expect("a place");
    latin1[at] = 0xe9;
    let texts = [
        "",
        " ",
        "\n",
        "\0",
        "null",
        "{",
        "[]",
        "\"text\"",
        "42",
        "true",
        "{}",
        "{'a':1}",
        "//comment",
        "<xml/>",
        "a:1:{s:1:\"a\";i:1;}",
        &order[..order.len() - 1],
        &format!("{order}garbage"),
        &format!("{order}{order}"),
        &format!("{order},"),
        &format!("\u{feff}{order}"),
        &order.replacen("{\"", "{\"x\":NaN,\"", 1),
        &order.replacen("{\"", "{\"x\":1,,\"", 1),
        &order.replacen('}', ",}", 1),
        &format!("[{order}]"),
    ];
    let mut bodies: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    bodies.extend([utf16, latin1, b"\xc0\xaf\xff".to_vec()]);
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_without_a_usable_id_is_parked_and_never_gets_one() {
    let mut bodies = vec![without("", "event_id")];
    for value in [json!(null), json!(0), json!([]), json!({}), json!(true)] {
        bodies.push(with("/event_id", value));
    }
    let good = id();
    let texts = [
        "",
        " ",
        "undefined",
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        &good.replace('-', ""),
        &format!("{{{good}}}"),
        &format!("urn:uuid:{good}"),
        &format!(" {good}"),
        &format!("{good}\n"),
        &good[..35],
        &format!("{good}0"),
        &format!("{}g", &good[..35]),
        &format!("{}\u{430}", &good[..35]),
        &good.replace('-', "_"),
    ];
    bodies.extend(texts.map(|text| with("/event_id", json!(text))));
    // Not even two of the same are one event.
    bodies.push(bodies[0].clone());
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_known_key_given_twice_is_parked() {
    let other = id();
    all_are_parked(
        vec![
            replaced("{\"event_id\"", &format!("{{\"event_id\":\"{other}\",\"event_id\"")),
            replaced("\"event_id\"", &format!("\"event\\u005fid\":\"{other}\",\"event_id\"")),
            replaced("\"payload\"", "\"payload\":{},\"payload\""),
            replaced("\"event_name\"", "\"event_name\":\"order.order.placed.v1\",\"event_name\""),
            replaced("\"orderId\"", &format!("\"orderId\":\"{other}\",\"orderId\"")),
            replaced("\"orderId\"", &format!("\"order_id\":\"{other}\",\"orderId\"")),
            replaced("\"lines\"", "\"lines\":[],\"lines\""),
            replaced("\"quantity\"", "\"quantity\":\"1\",\"quantity\""),
            replaced("\"productId\"", &format!("\"product_id\":\"{other}\",\"productId\"")),
            replaced("\"occurred_at\"", "\"occurred_at\":\"2026-01-01T00:00:00Z\",\"occurred_at\""),
        ],
        "malformed",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_of_the_wrong_shape_is_parked() {
    let mut bodies = vec![without("", "payload"), without("/payload", "orderId"), without("/payload", "customerId")];
    bodies.extend([without("/payload", "lines"), without("", "occurred_at"), without("", "event_name")]);
    for value in [json!(null), json!([]), json!(""), json!(0), json!({})] {
        bodies.push(with("/payload", value));
    }
    for value in [json!(null), json!([]), json!({}), json!("[]"), json!([null]), json!([[]]), json!([1]), json!([{}])] {
        bodies.push(with("/payload/lines", value));
    }
    for field in ["orderId", "customerId", "lines/0/productId"] {
        for value in [json!(null), json!(""), json!(7), json!("x"), json!("00000000-0000-0000-0000-000000000000")] {
            bodies.push(with(&format!("/payload/{field}"), value));
        }
    }
    let line = [id().into(), json!("1")];
    bodies.push(with("/payload/lines/0", json!(line))); // an array of an object's values is no object
    bodies.push(with("/payload/lines", json!(vec![json!({"productId": id(), "quantity": "1"}); 10_001])));
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_other_spelling_of_a_quantity_is_parked() {
    let mut bodies = vec![without("/payload/lines/0", "quantity")];
    for value in [json!(2), json!(2.0), json!(null), json!(true), json!([]), json!({})] {
        bodies.push(with("/payload/lines/0/quantity", value));
    }
    let texts = [
        "",
        " ",
        " 2",
        "2 ",
        "2\n",
        "0",
        "0.000",
        "-0",
        "-1",
        "+2",
        ".5",
        "2.",
        "2,000",
        "1,5",
        "0.0001",
        "2.0005",
        "1000000000",
        "999999999.9999",
        "\u{662}",
        "\u{ff12}",
        "0x10",
        "NaN",
        "nan",
        "Infinity",
        "-inf",
        "1e3",
        "1e1000000000",
        "1.2.3",
    ];
    bodies.extend(texts.map(|text| with("/payload/lines/0/quantity", json!(text))));
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_is_no_rfc_3339_with_an_offset_is_parked() {
    let texts = [
        "",
        "2026-03-01T12:00:00",
        "2026-03-01",
        "1772366400",
        "Sun, 01 Mar 2026 12:00:00 GMT",
        "2026-02-30T12:00:00Z",
        "2026-03-01T24:00:00Z",
        "2026-13-01T12:00:00Z",
        "2026-03-01T12:00:00+02:60",
        "2026-03-01 12:00:00Z",
        "2026-03-01T12:00:00+0000",
        "2026-03-01T12:00:60Z",
        "infinity",
        "epoch",
        "+10000-01-01T00:00:00Z",
        "-0001-01-01T00:00:00Z",
        " 2026-03-01T12:00:00Z",
        "2026-03-01T12:00:00Z ",
    ];
    let mut bodies: Vec<_> = texts.map(|text| with("/occurred_at", json!(text))).into();
    bodies.extend([json!(null), json!(1_772_366_400)].map(|value| with("/occurred_at", value)));
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_change_of_the_wrong_shape_is_parked() {
    let mut bodies = Vec::new();
    let versions =
        [json!(0), json!(-1), json!(1.0), json!("1"), json!(null), json!(true), json!(9_223_372_036_854_775_808_u64)];
    bodies.extend(versions.map(|version| change("version", version)));
    let statuses = [json!(""), json!("é".repeat(65)), json!(null), json!(1), json!("a\0b")];
    bodies.extend(statuses.map(|status| change("status", status)));
    bodies.extend([json!(null), json!("x")].map(|order| change("orderId", order)));
    all_are_parked(bodies, "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nesting_and_surrogates_are_refused_in_ignored_fields_too() {
    let nested = |depth: usize| format!("\"x\":{}{},", "[".repeat(depth), "]".repeat(depth));
    all_are_parked(
        vec![
            replaced("{\"", &format!("{{{}\"", nested(128))), // 129 with the envelope
            replaced("\"lines\"", &format!("{}\"lines\"", nested(127))),
            replaced("{\"", &format!("{{\"x\":{}", "[".repeat(500_000))),
            replaced("{\"", &format!("{{{}\"", nested(200_000))),
            replaced("{\"", "{\"x\":\"\\ud800\",\""),
            replaced("{\"", "{\"\\udc00\":1,\""),
        ],
        "malformed",
    )
    .await;
}
