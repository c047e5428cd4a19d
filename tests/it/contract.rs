//! The edges of the contract: what is accepted beside the letter, and which events are ours.

use lapin::BasicProperties;
use serde_json::json;

use crate::malformed::{all_are_parked, with};
use crate::support::{Order, StatusChange, TestBed, id, persistent};

#[tokio::test(flavor = "multi_thread")]
async fn what_producers_may_change_is_applied() {
    let bed = TestBed::new().await;
    let order = || Order::new(1).body();
    let nested = |depth: usize| format!("\"x\":{}{},", "[".repeat(depth), "]".repeat(depth));
    let extra = r#"{"":null,"x":[1e400,123456789012345678901,{"__proto__":[true]}],"#;
    let bodies = [
        order().replace("orderId", "order_id").replace("customerId", "customer_id").replace("productId", "product_id"),
        order().replacen('{', extra, 1),
        order().replace("\"lines\"", &format!("{}\"lines\"", nested(126))),
        order().replace("\"quantity\"", "\"note\":\"\\ud83d\\ude00 \\u0000\",\"quantity\""),
        format!(" \r\n\t{}\n ", order()),
        order().replace("\"event_id\"", "\"event\\u005fid\""),
        order().replace("2026-11-30T09:15:27.412Z", "2026-02-28t23:59:59.999999999+14:00"),
        order().replace("2026-11-30T09:15:27.412Z", "2026-03-01T12:00:00-00:00"),
        order().replace("2026-11-30T09:15:27.412Z", "0001-01-01T00:00:00Z"),
        order().replace("2026-11-30T09:15:27.412Z", "9999-12-31T23:59:59z"),
        Order { event_id: uuid::Uuid::from_u128(fastrand::u128(1..)).to_string(), ..Order::new(1) }.body(),
        Order { order_id: id().to_uppercase(), ..Order::new(1) }.body(),
    ];
    bed.broker.publish_all(Order::EVENT, bodies).await;
    bed.drain().await;
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    assert!(failed.is_empty(), "{}: {}", failed[0].text("failure-detail"), String::from_utf8_lossy(&failed[0].body));
    assert_eq!((bed.processed().await, bed.reservations().await), (12, 12));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_without_a_handler_is_parked() {
    let names = [
        "order.order.cancelled.v1",
        "order.order.placed.v2",
        "Order.Order.Placed.V1",
        " order.order.placed.v1",
        "order.order.placed.v1\n",
        "order.order.placed.v1.",
        "order\u{2024}order\u{2024}placed\u{2024}v1",
        "",
    ];
    let mut bodies: Vec<_> = names.map(|name| with("/event_name", json!(name))).into();
    bodies.push(with("/event_name", json!("n".repeat(300))));
    all_are_parked(bodies, "unknown-event").await;
    all_are_parked([json!(null), json!(1), json!({})].map(|name| with("/event_name", name)).into(), "malformed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_without_a_handler_is_let_go_when_it_is_to_be_ignored() {
    let mut bed = TestBed::new().await;
    bed.set("consume.unknown_event", "ignore");
    let order = Order::new(1);
    for body in
        [with("/event_name", json!("order.order.cancelled.v1")), b"no event".to_vec(), order.body().into_bytes()]
    {
        bed.broker.publish(Order::EVENT, body).await;
    }
    bed.drain().await;
    assert_eq!(bed.processed().await, 1, "an ignored event leaves no row");
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "malformed", "what is no event is never ignored");
    assert_eq!(bed.broker.in_work().await, 0);
    bed.broker.account_for(1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_envelope_decides_what_an_event_is_and_not_the_routing_key() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    bed.broker.publish(StatusChange::EVENT, order.body()).await;
    bed.broker.publish(Order::EVENT, StatusChange::new(&order, "paid", 1).body()).await;
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (2, 1));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_properties_is_like_any_other() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    for body in [order.body().as_str(), "no event"] {
        bed.broker.publish_with(Order::EVENT, body, BasicProperties::default()).await;
    }
    bed.drain().await;
    assert_eq!(bed.reservations_of(&order).await, 1);
    assert_eq!(bed.broker.failed(1).await.len(), 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_plain_text_whatever_its_type_says() {
    let bed = TestBed::new().await;
    let types = ["", "application/json", "Application/JSON; charset=utf-8", "text/plain", "application/x-protobuf"];
    for content_type in types {
        let properties = persistent().with_content_type(content_type.into());
        bed.broker.publish_with(Order::EVENT, Order::new(1).body(), properties).await;
    }
    for encoding in ["", "identity", "Identity", "utf-8", "UTF-8", "utf8", "UTF8"] {
        let properties = persistent().with_content_encoding(encoding.into());
        bed.broker.publish_with(Order::EVENT, Order::new(1).body(), properties).await;
    }
    for encoding in ["gzip", "deflate", "br", "zstd", "gzip, gzip", "utf-16", " "] {
        let properties = persistent().with_content_encoding(encoding.into());
        bed.broker.publish_with(Order::EVENT, Order::new(1).body(), properties).await;
    }
    bed.drain().await;
    assert_eq!(bed.processed().await, 12);
    let mut encodings = Vec::new();
    for message in bed.broker.failed(7).await {
        assert_eq!(message.text("failure-reason"), "malformed");
        encodings.extend(message.properties.content_encoding().clone());
    }
    assert_eq!(encodings.len(), 7, "the copies keep the property");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_above_the_limit_is_parked() {
    let mut bed = TestBed::new().await;
    bed.set("consume.max_body", "2KiB");
    let of = |bytes: usize| {
        let order = Order::new(1).body();
        order.replacen('{', &format!("{{\"pad\":\"{}\",", "p".repeat(bytes - order.len() - 9)), 1)
    };
    bed.broker.publish_all(Order::EVENT, [of(2048), of(2049), of(200_000)]).await;
    bed.drain().await;
    assert_eq!(bed.processed().await, 1);
    let mut sizes: Vec<_> = bed.broker.failed(2).await.iter().map(|message| message.body.len()).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [2049, 200_000]);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_body_is_parked_without_a_transaction() {
    let bed = TestBed::new().await;
    let service = bed.start().await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    let lock = bed.side_session("lock table processed_event in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, "no event").await;
    assert_eq!(bed.broker.failed(1).await[0].body, b"no event");
    drop(lock);
    service.stop().await;
    bed.finish().await;
}
