//! Many events in one transaction, each with a fate of its own.

use std::collections::HashSet;

use lapin::types::AMQPValue;
use sqlx::PgConnection;
use stock_service::message::{Failure, Outcome, decode};

use crate::support::{Order, Scripted, StatusChange, Step, TestBed, eventually, text, with_headers};

/// Publishes the orders one by one, so that the window opens, and has the worker wait with the last one for what it gives:
/// what is published meanwhile is the next batch.
async fn hold_up_behind(bed: &TestBed, orders: &[Order]) -> PgConnection {
    let (last, first) = orders.split_last().expect("an order");
    for (order, processed) in first.iter().zip(1..) {
        bed.broker.publish(Order::EVENT, order.body()).await;
        bed.has_processed(processed).await;
    }
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, last.body()).await;
    bed.blocked(1).await;
    lock
}

#[tokio::test(flavor = "multi_thread")]
async fn one_poison_event_does_not_hold_back_its_batch() {
    let bed = TestBed::new().await;
    let orders: Vec<_> = (0..40).map(|_| Order::new(2)).collect();
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    bed.drain_with(Scripted::only(&orders[23].event_id, |_| Step::Reject)).await;
    assert_eq!(bed.processed().await, 39);
    assert_eq!(bed.reservations().await, 78);
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].body, orders[23].body().into_bytes());
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_gives_none_of_its_neighbours_back() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    // A queue from which whatever is given back once goes to the failure queue.
    bed.set("amqp.declare", "false");
    bed.broker.delete(&bed.broker.queue()).await;
    let arguments = [
        ("x-queue-type", text("quorum")),
        ("x-delivery-limit", AMQPValue::LongInt(0)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(&bed.broker.failure_queue())),
    ];
    bed.broker.declare(&bed.broker.queue(), &arguments).await;
    bed.broker.bind(&bed.broker.queue(), Order::EVENT).await;
    let orders = Order::many(80);
    let (rejected, retried) = (orders[50].event_id.clone(), orders[60].event_id.clone());
    let script = Scripted::new(move |message, before| match message.id.to_string() {
        id if id == rejected => Step::Reject,
        id if id == retried && before == 0 => Step::Fail,
        _ => Step::Apply,
    });
    let service = bed.start_with(script).await;
    let lock = hold_up_behind(&bed, &orders[..21]).await;
    let rest = ["no event".to_owned()].into_iter().chain(orders[21..].iter().map(Order::body));
    bed.broker.publish_all(Order::EVENT, rest).await;
    bed.broker.has(&bed.broker.queue(), 0).await; // all are in the window
    drop(lock);
    bed.has_processed(79).await;
    let mut reasons: Vec<_> = bed.broker.failed(2).await.iter().map(|message| message.text("failure-reason")).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["malformed", "rejected"]);
    service.stop().await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_culprit_of_32_costs_8_transactions_at_most() {
    for culprit in [0, 13, 31] {
        let bed = TestBed::new().await;
        let bodies: Vec<_> = Order::many(32).iter().map(Order::body).collect();
        let messages: Vec<_> =
            bodies.iter().map(|body| decode(body.as_bytes(), None, 1 << 20).expect("a good order")).collect();
        let script = Scripted::only(&messages[culprit].id.to_string(), |_| Step::Reject);
        let processor = bed.processor(script.clone());
        let mut outcomes = Vec::new();
        while outcomes.len() < messages.len() {
            let rest: Vec<_> = messages[outcomes.len()..].iter().collect();
            let progress = processor.process(&rest, &bed.pulse()).await;
            assert!(progress.interrupted.is_none());
            assert!(!progress.outcomes.is_empty());
            outcomes.extend(progress.outcomes);
        }
        // The whole, its halves down to one, perhaps that one, and the rest.
        assert!((7..=8).contains(&script.slices()), "culprit {culprit}: {}", script.slices());
        for (at, outcome) in outcomes.iter().enumerate() {
            match outcome {
                Outcome::Applied => assert_ne!(at, culprit),
                Outcome::Failed(Failure::Permanent(_)) => assert_eq!(at, culprit),
                outcome => panic!("{at}: {outcome:?}"),
            }
        }
        assert_eq!((bed.processed().await, bed.reservations().await), (31, 31));
        bed.remove().await; // nothing came by the broker
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_culprits_in_a_batch_are_all_found() {
    let bed = TestBed::new().await;
    let orders = Order::many(90);
    let culprits: HashSet<_> = orders.iter().step_by(3).map(|order| order.event_id.clone()).collect();
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    let bad = culprits.clone();
    bed.drain_with(Scripted::new(move |message, _| match bad.contains(&message.id.to_string()) {
        true => Step::Reject,
        false => Step::Apply,
    }))
    .await;
    assert_eq!((bed.processed().await, bed.reservations().await), (60, 60));
    let failed: HashSet<_> = bed.broker.failed(30).await.into_iter().map(|message| message.body).collect();
    let expected = orders.iter().filter(|order| culprits.contains(&order.event_id));
    assert_eq!(failed, expected.map(|order| order.body().into_bytes()).collect());
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_before_takes_no_neighbours_along_when_it_fails_again() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    bed.set("retry.max_retries", "1");
    let orders = Order::many(50);
    let script = Scripted::only(&orders[30].event_id, |_| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    let lock = hold_up_behind(&bed, &orders[..21]).await;
    for order in &orders[21..] {
        let retries = i32::from(order.event_id == orders[30].event_id);
        let headers = with_headers(&[("retry-count", AMQPValue::LongInt(retries))]);
        bed.broker.publish_with(Order::EVENT, order.body(), headers).await;
    }
    bed.broker.has(&bed.broker.queue(), 0).await; // all are there for one batch
    let before = script.slices();
    drop(lock);
    assert_eq!(bed.broker.failed(1).await[0].text("failure-reason"), "retries-exhausted");
    bed.has_processed(49).await;
    assert_eq!(script.slices() - before, 2, "its neighbours, and it alone");
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn good_duplicate_malformed_rejected_and_retried_messages_share_a_batch() {
    let bed = TestBed::new().await;
    let orders = Order::many(60);
    let (rejected, retried) = (orders[10].event_id.clone(), orders[20].event_id.clone());
    let mut bodies: Vec<_> = orders.iter().map(Order::body).collect();
    bodies.insert(30, orders[5].body());
    bodies.insert(25, "{\"event_id\":".to_owned());
    bodies.insert(15, orders[14].body());
    bed.broker.publish_all(Order::EVENT, bodies).await;
    let script = Scripted::new(move |message, before| match message.id.to_string() {
        id if id == rejected => Step::Reject,
        id if id == retried && before == 0 => Step::Fail,
        _ => Step::Apply,
    });
    let service = bed.start_with(script).await;
    bed.has_processed(59).await;
    let mut reasons: Vec<_> = bed.broker.failed(2).await.iter().map(|message| message.text("failure-reason")).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["malformed", "rejected"]);
    service.stop().await;
    assert_eq!(bed.reservations().await, 59);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_and_windows_of_any_size_do_the_same() {
    for (batch_size, prefetch, workers) in [("1", "1", "1"), ("1", "50", "2"), ("50", "3", "2"), ("7", "7", "3")] {
        let mut bed = TestBed::new().await;
        bed.set("consume.batch_size", batch_size);
        bed.set("consume.prefetch", prefetch);
        bed.set("consume.workers", workers);
        let orders = Order::many(40);
        bed.broker.publish_all(Order::EVENT, orders.iter().chain(&orders[..10]).map(Order::body)).await;
        bed.drain_with(Scripted::only(&orders[17].event_id, |_| Step::Reject)).await;
        assert_eq!((bed.processed().await, bed.reservations().await), (39, 39), "{batch_size} {prefetch} {workers}");
        assert_eq!(bed.broker.failed(1).await[0].text("failure-reason"), "rejected");
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_of_thousands_of_lines_are_applied_whole() {
    let bed = TestBed::new().await;
    let largest = Order::new(10_000);
    let large: Vec<_> = (0..3).map(|_| Order::new(6_000)).collect();
    let innocents = Order::many(20);
    let orders = innocents[..10].iter().chain(&large).chain([&largest]).chain(&innocents[10..]);
    bed.broker.publish_all(Order::EVENT, orders.map(Order::body)).await;
    bed.drain().await;
    assert_eq!(bed.reservations_of(&largest).await, 10_000);
    for order in &large {
        assert_eq!(bed.reservations_of(order).await, 6_000);
    }
    assert_eq!((bed.processed().await, bed.reservations().await), (24, 28_020));
    assert_eq!(
        bed.text("select max(quantity) || ' ' || sum(quantity) from reservation group by order_id order by max(quantity) desc limit 1").await,
        Some("10000.500 50010000.000".to_owned())
    );
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_has_a_bounded_number_of_lines() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "20"); // wide open after a few batches
    let (innocents, large) = (Order::many(60), (0..8).map(|_| Order::new(3_000)).collect::<Vec<_>>());
    let script = Scripted::apply();
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(60).await; // the window is open
    let lock = bed.side_session("lock table processed_event in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.blocked(1).await;
    bed.broker.publish_all(Order::EVENT, large.iter().map(Order::body)).await;
    bed.broker.has(&bed.broker.queue(), 0).await; // all are there for one batch
    drop(lock);
    bed.has_processed(69).await;
    service.stop().await;
    assert!((3_000..=10_000).contains(&script.most_lines()), "{} lines at once", script.most_lines());
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_event_does_not_wait_for_others() {
    let bed = TestBed::new().await;
    let service = bed.start().await;
    let warm_up = Order::many(20);
    bed.broker.publish_all(Order::EVENT, warm_up.iter().map(Order::body)).await;
    bed.has_processed(20).await;
    let mut best = std::time::Duration::MAX;
    for n in 0..5 {
        let begun = std::time::Instant::now();
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        eventually("it is applied", async || bed.processed().await == 21 + n).await;
        best = best.min(begun.elapsed());
    }
    // The bed itself looks every 20 ms; a wait for more messages would be a constant on top of each.
    assert!(best.as_millis() < 100, "{best:?}");
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_kinds_of_events_share_a_batch_and_its_fate() {
    let bed = TestBed::new().await;
    let orders = Order::many(20);
    for order in &orders {
        bed.broker.publish(Order::EVENT, order.body()).await;
        bed.broker.publish(StatusChange::EVENT, StatusChange::new(order, "paid", 1).body()).await;
    }
    bed.drain_with(Scripted::only(&orders[9].event_id, |_| Step::Reject)).await;
    assert_eq!(bed.processed().await, 39);
    assert_eq!(bed.count("select count(*) from order_status where status = 'paid' and version = 1").await, 20);
    assert_eq!(bed.reservations_of(&orders[9]).await, 0);
    assert_eq!(bed.broker.failed(1).await.len(), 1);
    bed.finish().await;
}
