//! A copy that cannot be placed holds its original, and nobody else's.

use std::time::Duration;

use lapin::types::AMQPValue;
use tokio::time::Instant;

use crate::support::{Endpoint, Order, Scripted, Step, TestBed, eventually, persistent, text};

/// A queue that holds one message and refuses all further ones. Classic: quorum queues overshoot such limits.
fn room_for_one() -> [(&'static str, AMQPValue); 2] {
    [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", text("reject-publish"))]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_queue_that_vanished_is_declared_again() {
    let bed = TestBed::new().await;
    let (failing, innocents) = (Order::new(1), Order::many(10));
    let script = Scripted::only(&failing.event_id, |before| if before == 0 { Step::Fail } else { Step::Apply });
    let service = bed.start_with(script).await;
    bed.broker.delete(&bed.broker.retry_queue(50)).await;
    bed.broker.publish_all(Order::EVENT, [&failing].into_iter().chain(&innocents).map(Order::body)).await;
    bed.has_processed(11).await;
    service.stop().await;
    assert!(bed.broker.exists(&bed.broker.retry_queue(50)).await);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_queue_that_vanished_is_declared_again() {
    let bed = TestBed::new().await;
    let innocents = Order::many(10);
    let service = bed.start().await;
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(10).await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].body, b"no event");
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_declare_the_original_waits_for_its_failure_queue() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    let innocents = Order::many(30);
    let service = bed.start().await;
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(30).await; // none of them is held up
    assert!(!bed.broker.exists(&bed.broker.failure_queue()).await);
    bed.declare().await;
    assert_eq!(bed.broker.failed(1).await[0].body, b"no event");
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_queue_that_refuses_holds_the_originals_and_nothing_else() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    bed.set("consume.prefetch", "5"); // the windows of both workers, however they grew, are fewer than what will be held
    let failure_queue = bed.broker.failure_queue();
    bed.broker.delete(&failure_queue).await;
    bed.broker.declare(&failure_queue, &room_for_one()).await;
    let service = bed.start().await;
    let malformed: Vec<_> = (0..40).map(|n| format!("no event {n}")).collect();
    bed.broker.publish_all(Order::EVENT, malformed.clone()).await;
    bed.broker.has(&failure_queue, 1).await;
    let innocents = Order::many(50);
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(50).await;
    assert_eq!(bed.broker.depth(&failure_queue).await, 1, "the queue is full all the while");
    service.stop().await;
    bed.broker.has(&bed.broker.queue(), 39).await; // their originals are given back
    // With room for all, all arrive, each once.
    let first = bed.broker.failed(1).await;
    bed.broker.delete(&failure_queue).await;
    bed.broker.declare(&failure_queue, &[]).await;
    bed.drain().await;
    let rest = bed.broker.failed(39).await;
    let mut bodies: Vec<_> =
        first.into_iter().chain(rest).map(|message| String::from_utf8(message.body).expect("text")).collect();
    bodies.sort_unstable();
    let mut expected = malformed;
    expected.sort_unstable();
    assert_eq!(bodies, expected);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_was_refused_is_placed_as_soon_as_there_is_room() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    let failure_queue = bed.broker.failure_queue();
    bed.broker.delete(&failure_queue).await;
    bed.broker.declare(&failure_queue, &room_for_one()).await;
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, ["one", "two"].map(str::to_owned)).await;
    bed.broker.has(&failure_queue, 1).await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    let first = bed.broker.failed(1).await;
    let second = bed.broker.failed(1).await; // without a restart
    assert_ne!(first[0].body, second[0].body);
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_queue_that_refuses_holds_the_originals_and_nothing_else() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 3_600_000);
    bed.declare().await;
    bed.set("amqp.declare", "false");
    let retry_queue = bed.broker.retry_queue(3_600_000);
    bed.broker.delete(&retry_queue).await;
    bed.broker.declare(&retry_queue, &room_for_one()).await;
    let (failing, innocents) = (Order::many(4), Order::many(30));
    let ids: Vec<_> = failing.iter().map(|order| order.event_id.clone()).collect();
    let script = Scripted::new(move |message, _| match ids.contains(&message.id.to_string()) {
        true => Step::Fail,
        false => Step::Apply,
    });
    let service = bed.start_with(script).await;
    bed.broker.publish_all(Order::EVENT, failing.iter().chain(&innocents).map(Order::body)).await;
    bed.has_processed(30).await;
    bed.broker.has(&retry_queue, 1).await;
    for order in &failing {
        assert_eq!(bed.reservations_of(order).await, 0);
    }
    service.stop().await;
    bed.broker.has(&bed.broker.queue(), 3).await;
    for queue in [&bed.broker.queue(), &retry_queue] {
        bed.broker.take(queue).await;
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_gives_back_what_cannot_be_placed() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    let failure_queue = bed.broker.failure_queue();
    let service = bed.start().await;
    bed.broker.delete(&failure_queue).await;
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    service.stop().await;
    bed.broker.has(&bed.broker.queue(), 1).await;
    assert_eq!(bed.broker.take(&bed.broker.queue()).await[0].body, b"no event");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_refuses_is_asked_again_after_growing_pauses() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    bed.set("http.listen", "127.0.0.1:0");
    let failure_queue = bed.broker.failure_queue();
    bed.broker.delete(&failure_queue).await;
    bed.broker.declare(&failure_queue, &room_for_one()).await;
    bed.broker.send("", &failure_queue, b"in the way", persistent()).await;
    let service = bed.spawn(&["consume"]);
    let endpoint = Endpoint::of(&service).await;
    let begun = Instant::now();
    bed.broker.publish(Order::EVENT, "no event").await;
    let refused = async || endpoint.metric(r#"stock_service_copies_total{result="refused"}"#).await;
    eventually("a third attempt", async || refused().await >= 3.0).await;
    assert!(begun.elapsed() >= Duration::from_secs(1 + 2), "three attempts in {:?}", begun.elapsed());
    service.has_said("the queue refused it").await;
    bed.broker.failed(1).await; // the one in the way
    assert_eq!(bed.broker.failed(1).await[0].body, b"no event");
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.finish().await;
}
