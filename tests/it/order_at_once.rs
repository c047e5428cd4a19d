//! Two workers with events of one order at the same moment see each other.

use std::sync::Arc;

use stock_service::message::{Outcome, decode};
use tokio::sync::Semaphore;

use crate::order_status::{changed, goods, placed, status};
use crate::support::{Order, Scripted, StatusChange, Step, TestBed};

/// An event's name and body.
type Event = (&'static str, String);

/// Two services, the second waiting for the first one's locks on the order.
async fn two_workers_at_once(known: bool, order: &Order, first: Event, second: Event) {
    let mut bed = TestBed::new().await;
    if known {
        let (event, body) = changed(order, "paid", 1);
        bed.broker.publish(event, body).await;
        bed.drain().await;
    }
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "1");
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let script = Scripted::new(move |_, _| Step::held(&held));
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(first.0, first.1).await;
    script.entered().await;
    let other_service = bed.start().await;
    bed.broker.publish(second.0, second.1).await;
    bed.blocked(1).await;
    gate.add_permits(1);
    bed.has_processed(if known { 3 } else { 2 }).await;
    service.stop().await;
    other_service.stop().await;
    assert_eq!(goods(&bed, order).await, "0 held 2 released");
    assert_eq!(status(&bed, order).await, "cancelled/2 cancelled");
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_waits_for_the_worker_that_places_the_order() {
    for known in [false, true] {
        let order = Order::new(2);
        two_workers_at_once(known, &order, placed(&order), changed(&order, "cancelled", 2)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn placing_an_order_waits_for_the_worker_that_cancels_it() {
    for known in [false, true] {
        let order = Order::new(2);
        two_workers_at_once(known, &order, changed(&order, "cancelled", 2), placed(&order)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_with_the_same_orders_in_opposite_order_do_not_deadlock() {
    let bed = TestBed::new().await;
    let orders = Order::many(300);
    let of_version =
        |version| -> Vec<_> { orders.iter().map(|order| StatusChange::new(order, "paid", version).body()).collect() };
    let (one, other) = (bed.processor(Scripted::apply()), bed.processor(Scripted::apply()));
    let pulse = bed.pulse();
    for version in (1..20).step_by(2) {
        let (forth, mut back) = (of_version(version), of_version(version + 1));
        back.reverse();
        let read = |bodies: &[String]| -> Vec<_> {
            bodies.iter().map(|body| decode(body.as_bytes(), None, 1 << 20).expect("a good change")).collect()
        };
        let (forth, back) = (read(&forth), read(&back));
        let (forth, back): (Vec<_>, Vec<_>) = (forth.iter().collect(), back.iter().collect());
        let (first, second) = tokio::join!(one.process(&forth, &pulse), other.process(&back, &pulse));
        assert!(first.outcomes.iter().chain(&second.outcomes).all(|outcome| matches!(outcome, Outcome::Applied)));
    }
    drop((one, other));
    assert_eq!(bed.deadlocks().await, 0);
    assert_eq!(bed.count("select count(*) from order_status where version = 20").await, 300);
    bed.remove().await; // nothing came by the broker
}

#[tokio::test(flavor = "multi_thread")]
async fn the_orders_of_a_batch_are_locked_in_the_order_of_their_ids() {
    let bed = TestBed::new().await;
    let (lower, higher) = (Order::new(1), Order::new(1)); // ids of version 7 grow
    bed.broker.publish_all(Order::EVENT, [lower.body(), higher.body()]).await;
    bed.drain().await;
    let row_of = |order: &Order| format!("select from order_status where order_id = '{}' for update", order.order_id);
    let lock = bed.side_session(&row_of(&lower)).await;
    let bodies = [&higher, &lower].map(|order| StatusChange::new(order, "paid", 1).body());
    let messages = bodies.map(|body| decode(body.as_bytes(), None, 1 << 20).expect("a good change"));
    let (processor, pulse) = (bed.processor(Scripted::apply()), bed.pulse());
    let working = tokio::spawn(async move { processor.process(&messages.each_ref(), &pulse).await.outcomes.len() });
    bed.blocked(1).await;
    // It waits for the lower one, and has not locked the higher one before, though that came first.
    bed.execute(&format!("{} nowait", row_of(&higher))).await;
    drop(lock);
    assert_eq!(working.await.expect("no panic"), 2);
    assert_eq!(bed.count("select count(*) from order_status where status = 'paid'").await, 2);
    bed.remove().await; // the changes did not come by the broker
}
