//! Many events in one transaction, each with a fate of its own.

use crate::support::{Order, Scripted, Step, TestBed};

#[tokio::test(flavor = "multi_thread")]
async fn one_poison_event_does_not_hold_back_its_batch() {
    let bed = TestBed::new().await;
    let orders: Vec<_> = (0..40).map(|_| Order::new(2)).collect();
    for order in &orders {
        bed.broker.publish(Order::EVENT, order.body()).await;
    }
    let poison = orders[23].event_id.clone();
    let script = Scripted::new(move |message, _| match message.id.to_string() == poison {
        true => Step::Reject,
        false => Step::Apply,
    });
    bed.drain_with(script).await;
    assert_eq!(bed.processed().await, 39);
    assert_eq!(bed.reservations().await, 78);
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].body, orders[23].body().into_bytes());
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    bed.finish().await;
}
