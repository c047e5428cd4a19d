//! What fails leaves nothing behind, and applies later or lands in the failure queue.

use crate::support::{Order, Scripted, Step, TestBed, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_handler_leaves_no_claim_and_no_reservation() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 3_600_000);
    let order = Order::new(3);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain_with(Scripted::new(|_, _| Step::Fail)).await;
    assert_eq!((bed.processed().await, bed.reservations().await), (0, 0));
    assert_eq!(bed.count("select count(*) from order_status").await, 0);
    assert_eq!(bed.broker.take(&bed.broker.retry_queue(3_600_000)).await.len(), 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_retry_after_a_failure_applies_the_event() {
    let bed = TestBed::new().await;
    let order = Order::new(3);
    let script = Scripted::new(|_, before| if before < 2 { Step::Fail } else { Step::Apply });
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.has_processed(1).await;
    service.stop().await;
    assert_eq!(script.attempts(&order.event_id).len(), 3);
    assert_eq!(bed.reservations_of(&order).await, 3);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_second_handler_fails_the_first_leaves_nothing() {
    let bed = TestBed::new().await;
    // The first handler writes the order's status, the second one its reservations.
    bed.on_reservation("if nextval('hits') <= 2 then raise 'scripted'; end if;").await;
    let order = Order::new(1);
    let service = bed.start().await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.has_processed(1).await;
    service.stop().await;
    assert_eq!(bed.count("select last_value from hits").await, 3, "the retries ran both again");
    assert_eq!(bed.count("select count(*) from order_status").await, 1);
    assert_eq!(bed.reservations_of(&order).await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_whose_reservations_fail_is_not_known() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed.on_reservation("if new.quantity = 3.500 then raise 'the third line'; end if;").await;
    let (bad, good) = (Order::new(3), Order::new(2));
    bed.broker.publish_all(Order::EVENT, [bad.body(), good.body()]).await;
    bed.drain().await;
    assert_eq!(bed.count("select count(*) from order_status").await, 1);
    assert_eq!((bed.reservations_of(&bad).await, bed.reservations_of(&good).await), (0, 2));
    assert_eq!(bed.broker.failed(1).await[0].text("failure-reason"), "retries-exhausted");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_a_handler_counts_as_one_attempt() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 50);
    let (bad, innocents) = (Order::new(1), Order::many(10));
    let script = Scripted::only(&bad.event_id, |_| Step::Panic);
    let service = bed.start_with(script.clone()).await;
    bed.broker
        .publish_all(Order::EVENT, innocents[..5].iter().chain([&bad]).chain(&innocents[5..]).map(Order::body))
        .await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    assert_eq!(failed[0].number("failed-attempts"), 2);
    bed.has_processed(10).await;
    // The worker that caught it goes on.
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(11).await;
    service.stop().await;
    assert_eq!(bed.reservations_of(&bad).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_once_is_retried_and_applied() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    let script = Scripted::new(|_, before| if before == 0 { Step::Panic } else { Step::Apply });
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.has_processed(1).await;
    service.stop().await;
    assert_eq!(script.attempts(&order.event_id).len(), 2);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_fails_forever_costs_the_others_nothing() {
    let bed = TestBed::new().await;
    let (bad, innocents) = (Order::new(1), Order::many(30));
    let script = Scripted::only(&bad.event_id, |_| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish_all(Order::EVENT, [&bad].into_iter().chain(&innocents).map(Order::body)).await;
    let failed = bed.broker.failed(1).await;
    bed.has_processed(30).await;
    service.stop().await;
    assert_eq!(failed[0].body, bad.body().into_bytes());
    eventually("no copy of an innocent is retried", async || bed.broker.in_work().await == 0).await;
    bed.finish().await;
}
