//! How many messages a worker has in hand.

use crate::http::{ends, ready};
use crate::support::{Order, TestBed, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn the_first_message_comes_alone_so_that_poison_does_not_drag_its_neighbours_along() {
    let bed = TestBed::new().await;
    bed.broker.publish_all(Order::EVENT, Order::many(200).iter().map(Order::body)).await;
    for _ in 0..2 {
        let lock = bed.hold_reservations().await;
        let worker = bed.spawn(&["consume"]);
        bed.blocked(1).await;
        assert_eq!(bed.broker.depth(&bed.broker.queue()).await, 199);
        worker.kill().await; // as the poison would
        bed.broker.has(&bed.broker.queue(), 200).await;
        drop(lock);
        bed.blocked(0).await;
    }
    bed.drain().await;
    assert_eq!(bed.processed().await, 200);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_holds_no_more_than_its_prefetch() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "2");
    bed.set("consume.prefetch", "5");
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, Order::many(100).iter().map(Order::body)).await;
    bed.has_processed(100).await;
    eventually("both workers", async || bed.broker.consumers().await == 2).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish_all(Order::EVENT, Order::many(100).iter().map(Order::body)).await;
    bed.blocked(2).await;
    for more in [100, 200] {
        assert!(bed.broker.depth(&bed.broker.queue()).await >= more - 10, "two workers with five each");
        bed.broker.publish_all(Order::EVENT, Order::many(100).iter().map(Order::body)).await;
    }
    drop(lock);
    bed.has_processed(400).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_the_work() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "20");
    let services = [bed.start().await, bed.start().await];
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish_all(Order::EVENT, Order::many(200).iter().map(Order::body)).await;
    bed.blocked(2).await; // both have some of it
    drop(lock);
    bed.has_processed(200).await;
    for service in services {
        service.stop().await;
    }
    assert_eq!(bed.reservations().await, 200);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_window_that_grows_gives_nothing_back() {
    let mut bed = TestBed::new().await;
    // A queue from which whatever is given back once goes to the failure queue.
    // A larger window may still be on its way when a busy machine ends its consumer.
    bed.set("consume.prefetch", "64");
    bed.set("amqp.declare", "false");
    bed.broker.replace_queue_with_limit(0).await;
    bed.broker.publish_all(Order::EVENT, Order::many(1_000).iter().map(Order::body)).await;
    let service = bed.start().await;
    eventually("all are somewhere", async || {
        bed.processed().await + i64::from(bed.broker.depth(&bed.broker.failure_queue()).await) == 1_000
    })
    .await;
    service.stop().await;
    assert_eq!(bed.processed().await, 1_000);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn originals_that_wait_for_a_copy_are_bounded_however_many_come() {
    const MESSAGES: u32 = 25_000;
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "2000");
    bed.set("amqp.declare", "false");
    let (process, endpoint) = ready(&mut bed).await;
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.publish_all(Order::EVENT, (0..MESSAGES).map(|n| format!("no event {n}"))).await;
    let held = async || endpoint.metric(r#"stock_service_held{cause="copy"}"#).await;
    let taken = async || f64::from(MESSAGES - bed.broker.depth(&bed.broker.queue()).await);
    eventually("it holds what it has, and gets no more", async || taken().await > 0.0 && held().await == taken().await)
        .await;
    let held = held().await;
    assert!((8_000.0..=12_000.0).contains(&held), "{held}: 10,000 and a window, at most");
    bed.declare().await;
    bed.broker.has(&bed.broker.failure_queue(), MESSAGES).await;
    ends(process).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
    bed.finish().await;
}
