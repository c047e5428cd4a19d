//! However often an event arrives, it takes effect once.

use std::sync::Arc;

use stock_service::message::{Outcome, decode};
use tokio::sync::Semaphore;

use crate::support::{Order, Scripted, Step, TestBed, eventually, id, persistent};

#[tokio::test(flavor = "multi_thread")]
async fn the_same_event_delivered_twice_reserves_once() {
    let bed = TestBed::new().await;
    let service = bed.start().await;
    let order = Order::new(3);
    bed.broker.publish(Order::EVENT, order.body()).await;
    eventually("the first delivery is applied", async || bed.processed().await == 1).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    let marker = Order::new(1);
    bed.broker.publish(Order::EVENT, marker.body()).await;
    eventually("what came after it is applied", async || bed.reservations_of(&marker).await == 1).await;
    assert_eq!(bed.reservations_of(&order).await, 3);
    assert_eq!(bed.processed().await, 2);
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0, "both deliveries are acknowledged");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_in_one_batch_reserve_once() {
    let bed = TestBed::new().await;
    let (order, other) = (Order::new(2), Order::new(1));
    for body in [other.body(), order.body(), order.body(), order.body().replace("event_id", "event\\u005fid")] {
        bed.broker.publish(Order::EVENT, body).await;
    }
    let script = Scripted::apply();
    bed.drain_with(script.clone()).await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(script.attempts(&order.event_id).len(), 1, "no handler runs for a copy");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_copies_in_one_batch_the_first_wins() {
    let bed = TestBed::new().await;
    let first = Order::new(1);
    let second = Order { event_id: first.event_id.clone(), ..Order::new(4) };
    let bodies = [Order::new(1).body(), first.body(), second.body(), first.body()];
    let messages = bodies.each_ref().map(|body| decode(body.as_bytes(), None, 1 << 20).expect("a good order"));
    let progress = bed.processor(Scripted::apply()).process(&messages.each_ref(), &bed.pulse()).await;
    let applied: Vec<_> = progress.outcomes.iter().map(|outcome| matches!(outcome, Outcome::Applied)).collect();
    assert_eq!(applied, [true, true, false, false]);
    assert_eq!((bed.reservations_of(&first).await, bed.reservations_of(&second).await), (1, 0));
    bed.remove().await; // nothing came by the broker
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_with_the_same_events_in_opposite_order_do_not_deadlock() {
    let bed = TestBed::new().await;
    let (one, other) = (bed.processor(Scripted::apply()), bed.processor(Scripted::apply()));
    let pulse = bed.pulse();
    for _ in 0..10 {
        let bodies: Vec<_> = Order::many(300).iter().map(Order::body).collect();
        let messages: Vec<_> =
            bodies.iter().map(|body| decode(body.as_bytes(), None, 1 << 20).expect("a good order")).collect();
        let (forth, back): (Vec<_>, Vec<_>) = (messages.iter().collect(), messages.iter().rev().collect());
        let (first, second) = tokio::join!(one.process(&forth, &pulse), other.process(&back, &pulse));
        let applied =
            first.outcomes.iter().chain(&second.outcomes).filter(|outcome| matches!(outcome, Outcome::Applied));
        assert_eq!(applied.count(), 300);
    }
    drop((one, other));
    assert_eq!(bed.deadlocks().await, 0);
    assert_eq!((bed.processed().await, bed.reservations().await), (3_000, 3_000));
    bed.remove().await; // nothing came by the broker
}

/// One message at a time and worker, so that a copy goes to the other service.
async fn narrow_bed() -> TestBed {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "1");
    bed
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_with_the_same_event_reserve_once() {
    let bed = narrow_bed().await;
    let gate = Arc::new(Semaphore::new(0));
    let order = Order::new(2);
    let held = gate.clone();
    let first = Scripted::new(move |_, _| Step::held(&held));
    let service = bed.start_with(first.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    first.entered().await;
    let second = Scripted::apply();
    let other_service = bed.start_with(second.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await; // on the key: the first one's end decides
    gate.add_permits(1);
    bed.has_processed(1).await;
    service.stop().await;
    other_service.stop().await;
    assert_eq!(bed.reservations().await, 2);
    assert_eq!(second.attempts(&order.event_id).len(), 0, "the second worker's handlers did not run");
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_worker_applies_what_the_first_one_rolls_back() {
    let mut bed = narrow_bed().await;
    bed.set_ladder(1, 50);
    let gate = Arc::new(Semaphore::new(0));
    let order = Order::new(2);
    let held = gate.clone();
    let first = Scripted::new(move |_, _| Step::held_and_failed(&held));
    let service = bed.start_with(first.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    first.entered().await;
    let second = Scripted::apply();
    let other_service = bed.start_with(second.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    gate.add_permits(1);
    bed.has_processed(1).await;
    assert_eq!(second.attempts(&order.event_id).len(), 1, "the second worker applied it");
    service.stop().await;
    other_service.stop().await;
    let all_is_settled = async || {
        bed.drain().await;
        bed.broker.in_work().await == 0
    };
    eventually("the first one's retry is recognised", all_is_settled).await;
    assert_eq!(bed.reservations().await, 2);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_event_takes_effect_once() {
    let mut bed = TestBed::new().await;
    bed.set("consume.batch_size", "100");
    let (order, others) = (Order::new(2), Order::many(20));
    let copies = (0..1000).map(|_| order.body());
    bed.broker.publish_all(Order::EVENT, copies.chain(others.iter().map(Order::body))).await;
    let script = Scripted::apply();
    bed.drain_with(script.clone()).await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(bed.processed().await, 21);
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    assert_eq!(bed.broker.in_work().await, 0, "none of them is retried");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_id_that_is_known_is_a_duplicate_whatever_else_it_says() {
    let bed = TestBed::new().await;
    let first = Order::new(1);
    let impostor = Order { event_id: first.event_id.clone(), ..Order::new(4) };
    let same_batch = Order { event_id: first.event_id.clone(), ..Order::new(5) };
    for order in [&first, &same_batch] {
        bed.broker.publish(Order::EVENT, order.body()).await;
    }
    bed.drain().await;
    bed.broker.publish(Order::EVENT, impostor.body()).await;
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (1, 1));
    assert_eq!(bed.reservations_of(&first).await, 1, "the first one wins");
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_event_id_makes_two_messages_one_event() {
    let bed = TestBed::new().await;
    let (twice, one, other) = (Order::new(1), Order::new(1), Order::new(1));
    let shared = id();
    for (order, message_id) in
        [(&twice, id()), (&twice, id()), (&one, shared.clone()), (&other, shared), (&twice, "no id".to_owned())]
    {
        let properties = persistent().with_message_id(message_id.into());
        bed.broker.publish_with(Order::EVENT, order.body(), properties).await;
    }
    bed.drain().await;
    for order in [&twice, &one, &other] {
        assert_eq!(bed.reservations_of(order).await, 1);
    }
    assert_eq!(bed.processed().await, 3);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_are_equal_when_their_values_are() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    let upper = Order { event_id: order.event_id.to_uppercase(), ..order.clone() };
    for body in [upper.body(), order.body()] {
        bed.broker.publish(Order::EVENT, body).await;
    }
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (1, 1));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_another_consumer_gave_back_is_applied_at_once() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50); // anything but a first attempt would end in the failure queue
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    let other = bed.broker.hold(&bed.broker.queue(), 1).await;
    other.close(200, "".into()).await.expect("a goodbye");
    bed.broker.has(&bed.broker.queue(), 1).await; // with the redelivered flag
    let script = Scripted::apply();
    bed.drain_with(script.clone()).await;
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    assert_eq!(bed.reservations_of(&order).await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_replay_of_a_whole_period_handlers_see_only_what_is_new() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let (old, new) = (Order::many(2_000), Order::many(200));
    bed.broker.publish_all(Order::EVENT, old.iter().map(Order::body)).await;
    bed.drain().await;
    let replay = old.chunks(10).zip(&new).flat_map(|(some, one)| some.iter().chain([one]));
    bed.on_reservation("perform nextval('hits');").await;
    bed.broker.publish_all(Order::EVENT, replay.map(Order::body)).await;
    let service = bed.start().await;
    eventually("all that is new is applied", async || bed.reservations().await == 2_200).await;
    service.stop().await;
    assert_eq!(bed.count("select last_value from hits").await, 200, "no handler saw a copy");
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (2_200, 2_200));
    bed.finish().await;
}
