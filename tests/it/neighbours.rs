//! What is in trouble stays out of the others' way.

use lapin::types::AMQPValue;

use crate::support::{Order, Scripted, StatusChange, Step, TestBed, text};

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_takes_no_copy_does_not_keep_copies_from_the_other_queues() {
    let mut bed = TestBed::new().await;
    // The failure queue is full; classic, for quorum queues overshoot such limits.
    bed.broker.delete(&bed.broker.failure_queue()).await;
    let full = [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", text("reject-publish"))];
    bed.broker.declare(&bed.broker.failure_queue(), &full).await;
    bed.set("amqp.declare", "false");
    bed.broker.publish_all(Order::EVENT, (0..60).map(|n| format!("no event {n}"))).await;
    let retried = Order::many(20);
    bed.broker.publish_all(Order::EVENT, retried.iter().map(Order::body)).await;
    let script = Scripted::new(|_, before| if before == 0 { Step::Fail } else { Step::Apply });
    let service = bed.start_with(script).await;
    bed.has_processed(20).await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 1, "59 copies are still held");
    service.stop().await;
    bed.broker.has(&bed.broker.queue(), 59).await;
    // With room for all, all arrive.
    bed.broker.failed(1).await;
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.declare(&bed.broker.failure_queue(), &[]).await;
    bed.drain().await;
    bed.broker.failed(59).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_somebody_keeps_locked_does_not_hold_up_its_batch() {
    let mut bed = TestBed::new().await;
    bed.set("database.timeout", "1s");
    let orders = Order::many(40);
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    bed.drain().await;
    // In the middle: the first ones come alone.
    let lock = format!("select from order_status where order_id = '{}' for update", orders[10].order_id);
    let lock = bed.side_session(&lock).await;
    let changes: Vec<_> = orders.iter().map(|order| StatusChange::new(order, "paid", 1)).collect();
    bed.broker.publish_all(StatusChange::EVENT, changes.iter().map(StatusChange::body)).await;
    let service = bed.start().await;
    bed.has_processed(79).await; // all but the one
    drop(lock);
    bed.has_processed(80).await;
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0, "and it was not charged");
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}
