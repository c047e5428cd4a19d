//! The ladder of retries: its delays, its end, and who gets the copies.

use std::time::Duration;

use crate::support::{Order, Scripted, Step, TestBed, id, persistent};

#[tokio::test(flavor = "multi_thread")]
async fn each_retry_waits_its_delay_and_then_the_message_is_parked() {
    let bed = TestBed::new().await; // 50, 100 and 200 ms
    let order = Order::new(1);
    let script = Scripted::new(|_, _| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    let failed = bed.broker.failed(1).await;
    service.stop().await;
    let attempts = script.attempts(&order.event_id);
    assert_eq!(attempts.len(), 4, "one attempt and three retries");
    for (pair, least) in attempts.windows(2).zip([50, 100, 200]) {
        let waited = pair[1] - pair[0];
        assert!(waited >= Duration::from_millis(least), "{waited:?} instead of {least} ms");
    }
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    assert_eq!(failed[0].number("failed-attempts"), 4);
    assert_eq!(failed[0].header("retry-count"), None, "sent again, it has a fresh budget");
    assert_eq!(failed[0].body, order.body().into_bytes());
    assert_eq!(bed.broker.in_work().await, 0, "exactly one copy is left");
    assert_eq!((bed.processed().await, bed.reservations().await), (0, 0));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_copy_carries_its_count_to_the_queue_of_its_delay() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(3, 3_600_000);
    bed.set("retry.max_delay", "2h"); // the third delay would be 4 h, and shares the queue of the second
    let order = Order::new(1);
    let script = Scripted::new(|_, _| Step::Fail);
    bed.broker.publish(Order::EVENT, order.body()).await;
    for (count, delay) in [(1, 3_600_000), (2, 7_200_000), (3, 7_200_000)] {
        bed.drain_with(script.clone()).await;
        let copies = bed.broker.take(&bed.broker.retry_queue(delay)).await;
        assert_eq!(copies.len(), 1, "retry {count}");
        assert_eq!(copies[0].number("retry-count"), count);
        assert_eq!(copies[0].body, order.body().into_bytes());
        assert_eq!(bed.broker.in_work().await, 0, "the original is gone");
        // As the broker would, when the delay is over.
        bed.broker.send_to(&bed.broker.queue(), &copies[0]).await;
    }
    bed.drain_with(script.clone()).await;
    assert_eq!(bed.broker.failed(1).await[0].number("failed-attempts"), 4);
    assert!(!bed.broker.exists(&bed.broker.retry_queue(14_400_000)).await, "no delay is longer than max_delay");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_of_0_means_one_attempt() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let order = Order::new(1);
    let script = Scripted::new(|_, _| Step::Fail);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain_with(script.clone()).await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    assert_eq!(failed[0].number("failed-attempts"), 1);
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_for_good_is_parked_on_its_first_delivery() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    // Longer than a frame, and with everything that a copy made of parsed values would lose.
    let body = format!(
        " \t{}\r\n",
        order.body().replacen(
            '{',
            &format!("{{\"x\": [1.0, 1e2, \"\\u00e9é\"], \"pad\":\"{}\",", "p".repeat(300_000)),
            1
        )
    );
    let script = Scripted::new(|_, _| Step::Reject);
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, &body).await;
    let failed = bed.broker.failed(1).await;
    service.stop().await;
    assert!(failed[0].body == body.as_bytes(), "byte for byte");
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    assert_eq!(failed[0].number("failed-attempts"), 1);
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_services_queue_receives_each_event_once_whatever_is_retried() {
    let bed = TestBed::new().await;
    let other = bed.broker.own_queue("other");
    bed.broker.declare(&other, &[]).await;
    bed.broker.bind(&other, "order.#").await;
    let (failing, rejected, recovering, good) = (Order::new(1), Order::new(1), Order::new(1), Order::new(1));
    let (f, r, once) = (failing.event_id.clone(), rejected.event_id.clone(), recovering.event_id.clone());
    let script = Scripted::new(move |message, before| match message.id.to_string() {
        id if id == f => Step::Fail,
        id if id == r => Step::Reject,
        id if id == once && before == 0 => Step::Fail,
        _ => Step::Apply,
    });
    let service = bed.start_with(script).await;
    for order in [&failing, &rejected, &recovering, &good] {
        bed.broker.publish(Order::EVENT, order.body()).await;
    }
    bed.has_processed(2).await;
    bed.broker.failed(2).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&other).await, 4, "exactly what was published");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_comes_back_to_our_queue_whatever_address_the_message_had() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 20);
    let (exchange, queue) = (bed.broker.exchange(), bed.broker.queue());
    let other = bed.broker.own_queue("other");
    bed.broker.declare(&other, &[]).await;
    bed.broker.bind(&other, "#").await;
    bed.broker.bind(&queue, "order.x").await;
    bed.broker.bind(&queue, "").await;
    let addresses =
        [(exchange.as_str(), Order::EVENT), (exchange.as_str(), "order.x"), (exchange.as_str(), ""), ("", &queue)];
    let orders = Order::many(addresses.len());
    let script = Scripted::new(|_, _| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    for ((exchange, key), order) in addresses.iter().zip(&orders) {
        bed.broker.send(exchange, key, order.body().as_bytes(), persistent()).await;
    }
    let failed = bed.broker.failed(4).await;
    service.stop().await;
    for ((exchange, key), order) in addresses.iter().zip(&orders) {
        assert_eq!(script.attempts(&order.event_id).len(), 3, "{exchange} {key}");
        let copy = failed.iter().find(|message| message.body == order.body().as_bytes()).expect("its copy");
        assert_eq!(copy.text("original-exchange"), *exchange);
        assert_eq!(copy.text("original-routing-key"), *key);
    }
    assert_eq!(bed.broker.depth(&other).await, 3, "what went through the exchange, once");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_counted_by_message_and_not_by_message_id() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 20);
    let shared = id();
    let orders = Order::many(6);
    let script = Scripted::new(|_, _| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    for (n, order) in orders.iter().enumerate() {
        let properties = match n {
            0 => persistent(),
            1 => persistent().with_message_id("".into()),
            _ => persistent().with_message_id(shared.as_str().into()),
        };
        bed.broker.publish_with(Order::EVENT, order.body(), properties).await;
    }
    bed.broker.failed(6).await;
    service.stop().await;
    for order in &orders {
        assert_eq!(script.attempts(&order.event_id).len(), 2);
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_delay_is_not_held_up_by_a_long_one() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 50);
    bed.set("retry.multiplier", "100"); // 50 ms, then 5 s
    bed.broker.also_delays(5_000);
    let (slow, quick) = (Order::new(1), Order::new(1));
    let slow_id = slow.event_id.clone();
    let script = Scripted::new(move |message, before| match before == 0 || message.id.to_string() == slow_id {
        true => Step::Fail,
        false => Step::Apply,
    });
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, slow.body()).await;
    bed.broker.has(&bed.broker.retry_queue(5_000), 1).await;
    bed.broker.publish(Order::EVENT, quick.body()).await;
    bed.has_processed(1).await;
    assert_eq!(script.attempts(&slow.event_id).len(), 2, "the slow one still waits");
    bed.broker.failed(1).await; // the slow one ends too
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_delays_start_beside_the_queues_of_the_old_ones() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 4_000);
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.has(&bed.broker.retry_queue(4_000), 1).await;
    bed.set_ladder(2, 30);
    let script = Scripted::apply();
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(2).await; // the old copy comes back by itself
    service.stop().await;
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    assert!(bed.broker.exists(&bed.broker.retry_queue(4_000)).await, "nothing is deleted");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_climbs_a_long_ladder_twice_and_is_dropped_as_no_cycle() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(5, 10);
    let orders = Order::many(5);
    let script = Scripted::new(|_, _| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    for message in bed.broker.failed(5).await {
        bed.broker.send_to(&bed.broker.queue(), &message).await;
    }
    let failed = bed.broker.failed(5).await;
    service.stop().await;
    for order in &orders {
        assert_eq!(script.attempts(&order.event_id).len(), 12);
        assert!(failed.iter().any(|message| message.body == order.body().as_bytes()));
    }
    bed.finish().await;
}
