//! What is in the failure queue tells why, and can be sent again.

use chrono::{DateTime, Utc};
use stock_service::message::decode;

use crate::support::{Order, Scripted, Step, TestBed, text, with_headers};

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_sent_again_has_a_fresh_budget_and_can_be_applied() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 20);
    let order = Order::new(2);
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    let failed = bed.broker.failed(1).await;
    service.stop().await;
    bed.broker.send_to(&bed.broker.queue(), &failed[0]).await;
    let script = Scripted::new(|_, before| if before == 0 { Step::Fail } else { Step::Apply });
    let service = bed.start_with(script).await;
    bed.has_processed(1).await; // by the retry
    service.stop().await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_do_not_grow_when_a_message_fails_again_and_again() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 20);
    let (rejected, failing) = (Order::new(1), Order::new(1));
    let headers = with_headers(&[("tenant", text("a"))]);
    let rejected_id = rejected.event_id.clone();
    let script = Scripted::new(move |message, _| match message.id.to_string() == rejected_id {
        true => Step::Reject,
        false => Step::Fail,
    });
    let service = bed.start_with(script).await;
    for order in [&rejected, &failing] {
        bed.broker.publish_with(Order::EVENT, order.body(), headers.clone()).await;
    }
    let mut sizes = Vec::new();
    for _ in 0..10 {
        let failed = bed.broker.failed(2).await;
        // `failed-at` changes, and nothing but its digits.
        let mut properties: Vec<_> = failed.iter().map(|message| format!("{:?}", message.properties).len()).collect();
        properties.sort_unstable();
        sizes.push(properties);
        for message in &failed {
            assert_eq!(message.text("original-exchange"), bed.broker.exchange(), "the first address stays");
            assert_eq!(message.text("original-routing-key"), Order::EVENT);
            assert_eq!(message.header("tenant"), Some(&text("a")));
            bed.broker.send_to(&bed.broker.queue(), message).await;
        }
    }
    bed.broker.failed(2).await;
    service.stop().await;
    assert_eq!(sizes[1], sizes[9], "{sizes:?}");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_failure_said_is_replaced() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 20);
    let order = Order::new(1);
    let old = [
        ("failure-reason", text("malformed")),
        ("failure-detail", text("something else")),
        ("failed-at", text("2020-01-01T00:00:00Z")),
        ("failed-attempts", text("many")),
        ("original-exchange", text("first")),
        ("original-routing-key", text("address")),
    ];
    bed.broker.publish_with(Order::EVENT, order.body(), with_headers(&old)).await;
    bed.drain_with(Scripted::new(|_, _| Step::Reject)).await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    assert!(!failed[0].text("failure-detail").contains("something else"));
    assert_eq!(failed[0].number("failed-attempts"), 1);
    let at: DateTime<Utc> = failed[0].text("failed-at").parse().expect("RFC 3339");
    assert!((Utc::now() - at).num_seconds() < 120, "{at}");
    assert_eq!(failed[0].text("original-exchange"), "first", "set on the first copy and kept from then on");
    assert_eq!(failed[0].text("original-routing-key"), "address");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_detail_names_the_sqlstate_and_shows_no_row() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 20);
    bed.on_reservation(
        "raise 'R0W-DATA in the message' using errcode = '23514', detail = 'R0W-DATA', hint = 'R0W-DATA';",
    )
    .await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.drain().await;
    let failed = bed.broker.failed(1).await;
    let detail = failed[0].text("failure-detail");
    assert!(detail.contains("23514"), "{detail}");
    assert!(!format!("{:?}", failed[0].properties).contains("R0W-DATA"), "{:?}", failed[0].properties);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_constraint_error_shows_no_row() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 20);
    // An operator's own index, with a row in the way: PostgreSQL's detail quotes the key.
    bed.execute("create unique index one_line on reservation (quantity)").await;
    let (first, second) = (Order::of("4711.123"), Order::of("4711.123"));
    bed.broker.publish(Order::EVENT, first.body()).await;
    bed.drain().await;
    bed.broker.publish(Order::EVENT, second.body()).await;
    bed.drain().await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    let detail = failed[0].text("failure-detail");
    assert!(detail.contains("23505"), "{detail}");
    assert!(!detail.contains("4711"), "{detail}");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_detail_is_at_most_1_kib_however_much_was_sent() {
    let bed = TestBed::new().await;
    let mut order = Order::new(1);
    order.lines[0].0 = "é\u{1b}\n".repeat(60_000);
    bed.broker.publish(Order::EVENT, order.body()).await;
    let long_name = order.body().replacen(Order::EVENT, &"n".repeat(100_000), 1);
    bed.broker.publish(Order::EVENT, long_name).await;
    bed.drain().await;
    let failed = bed.broker.failed(2).await;
    for message in &failed {
        let detail = message.text("failure-detail");
        assert!(!detail.is_empty() && detail.len() <= 1024, "{} bytes", detail.len());
        assert!(!detail.contains(['\n', '\u{1b}']), "{detail:?}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_takes_from_the_failure_queue() {
    let bed = TestBed::new().await;
    let bodies: Vec<_> = (0..5).map(|n| format!("no event {n}")).collect();
    assert!(decode(bodies[0].as_bytes(), None, 1000).is_err());
    bed.broker.publish_all(Order::EVENT, bodies.clone()).await;
    for _ in 0..3 {
        let service = bed.start().await;
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        bed.broker.has(&bed.broker.failure_queue(), 5).await;
        assert_eq!(bed.broker.consumers_of(&bed.broker.failure_queue()).await, 0);
        service.stop().await;
    }
    bed.drain().await;
    let mut failed: Vec<_> =
        bed.broker.failed(5).await.into_iter().map(|message| String::from_utf8(message.body).expect("text")).collect();
    failed.sort_unstable();
    assert_eq!(failed, bodies);
    bed.finish().await;
}
