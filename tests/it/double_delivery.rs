//! However often an event arrives, it takes effect once.

use crate::support::{Order, Scripted, Step, TestBed, eventually};

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
    let script = Scripted::new(|_, _| Step::Apply);
    bed.drain_with(script.clone()).await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(script.attempts(&order.event_id).len(), 1, "no handler runs for a copy");
    bed.finish().await;
}
