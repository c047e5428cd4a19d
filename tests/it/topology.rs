//! What is declared at the broker, and what the broker itself does with messages that wear out.

use lapin::types::AMQPValue;

use crate::support::{Order, Scripted, Step, TestBed, eventually, text};

/// The arguments of DESIGN's main queue.
fn main_arguments(bed: &TestBed) -> Vec<(&'static str, AMQPValue)> {
    vec![
        ("x-queue-type", text("quorum")),
        ("x-delivery-limit", AMQPValue::LongLongInt(30)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(&bed.broker.failure_queue())),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ]
}

/// The arguments of a retry queue.
fn retry_arguments(bed: &TestBed, delay: i64) -> Vec<(&'static str, AMQPValue)> {
    vec![
        ("x-queue-type", text("quorum")),
        ("x-message-ttl", AMQPValue::LongLongInt(delay)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(&bed.broker.queue())),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ]
}

/// The arguments of the failure queue.
fn failure_arguments() -> Vec<(&'static str, AMQPValue)> {
    vec![("x-queue-type", text("quorum")), ("x-delivery-limit", AMQPValue::LongLongInt(2_147_483_647))]
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queues_have_the_documented_arguments_and_no_others() {
    let bed = TestBed::bare().await;
    bed.database().migrate().await.expect("a new schema");
    let service = bed.start().await;
    let (main, failed) = (bed.broker.queue(), bed.broker.failure_queue());
    // The broker compares all arguments, so a declaration that succeeds says it all.
    bed.broker.try_declare(&main, &main_arguments(&bed)).await.expect("the main queue");
    bed.broker.try_declare(&failed, &failure_arguments()).await.expect("the failure queue");
    for delay in [50, 100, 200] {
        let queue = bed.broker.retry_queue(u32::try_from(delay).expect("a delay"));
        bed.broker.try_declare(&queue, &retry_arguments(&bed, delay)).await.expect("a retry queue");
    }
    // And one that differs fails, so the broker does compare.
    for (queue, arguments) in [(&main, main_arguments(&bed)), (&failed, failure_arguments())] {
        let differing: Vec<_> = arguments
            .into_iter()
            .map(|(name, value)| (name, if name == "x-delivery-limit" { AMQPValue::LongInt(20) } else { value }))
            .collect();
        assert!(bed.broker.try_declare(queue, &differing).await.is_err(), "{queue}");
    }
    assert!(!bed.broker.exists(&bed.broker.retry_queue(400)).await);
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_bound_to_every_event_that_has_a_handler_and_to_nothing_else() {
    let bed = TestBed::bare().await;
    bed.database().migrate().await.expect("a new schema");
    let service = bed.start().await;
    let all = bed.broker.own_queue("all");
    bed.broker.declare(&all, &[]).await;
    bed.broker.bind(&all, "#").await;
    service.stop().await;
    for key in ["order.order.placed.v1", "order.order.status_changed.v1", "order.order.cancelled.v1", "x", ""] {
        bed.broker.publish(key, Order::new(1).body()).await;
    }
    assert_eq!(bed.broker.depth(&bed.broker.queue()).await, 2);
    assert_eq!(bed.broker.depth(&all).await, 5, "a topic exchange");
    bed.drain().await;
    bed.broker.account_for(3); // those that were not for us
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn classic_queues_work_end_to_end() {
    let mut bed = TestBed::bare().await;
    bed.set("amqp.queue_type", "classic");
    bed.database().migrate().await.expect("a new schema");
    let (recovering, rejected, orders) = (Order::new(1), Order::new(1), Order::many(20));
    let (once, never) = (recovering.event_id.clone(), rejected.event_id.clone());
    let script = Scripted::new(move |message, before| match message.id.to_string() {
        id if id == once && before < 2 => Step::Fail,
        id if id == never => Step::Reject,
        _ => Step::Apply,
    });
    let service = bed.start_with(script).await;
    bed.broker
        .try_declare(&bed.broker.failure_queue(), &[("x-queue-type", text("classic"))])
        .await
        .expect("a classic failure queue");
    let all = orders.iter().chain(&orders[..5]).chain([&recovering, &rejected]);
    bed.broker.publish_all(Order::EVENT, all.map(Order::body)).await;
    bed.has_processed(21).await;
    assert_eq!(bed.broker.failed(1).await[0].body, rejected.body().into_bytes());
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_wears_out_is_in_the_failure_queue_and_not_nowhere() {
    let bed = TestBed::new().await;
    let body = Order::new(1).body();
    bed.broker.publish(Order::EVENT, &body).await;
    // A process that dies of the message, again and again.
    let mut deaths = 0;
    while bed.broker.depth(&bed.broker.failure_queue()).await == 0 {
        eventually("it is back, or gone", async || {
            bed.broker.depth(&bed.broker.queue()).await + bed.broker.depth(&bed.broker.failure_queue()).await == 1
        })
        .await;
        if bed.broker.depth(&bed.broker.queue()).await == 1 {
            bed.broker.hold(&bed.broker.queue(), 1).await.close(200, "".into()).await.expect("a goodbye");
            deaths += 1;
            assert!(deaths <= 40, "it never wears out");
        }
    }
    assert!(deaths > 25, "only {deaths} returns");
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].body, body.as_bytes());
    assert!(failed[0].header("x-death").is_some(), "with the broker's own headers");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_at_failed_messages_never_wears_them_out() {
    let bed = TestBed::new().await;
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.drain().await;
    for _ in 0..60 {
        bed.broker.has(&bed.broker.failure_queue(), 1).await;
        bed.broker.hold(&bed.broker.failure_queue(), 1).await.close(200, "".into()).await.expect("a goodbye");
    }
    assert_eq!(bed.broker.failed(1).await[0].body, b"no event");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stops_and_starts_over_unstarted_messages_move_none_to_the_failure_queue() {
    let mut bed = TestBed::new().await;
    bed.set("consume.batch_size", "10");
    let orders = Order::many(100);
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    let lock = bed.hold_reservations().await;
    bed.set("database.timeout", "10min");
    for stops in 1..=25 {
        let service = bed.spawn(&["consume"]);
        bed.blocked(stops).await; // it has a batch in hand; the sessions of those before it wait on
        service.signal("TERM").await;
        service.has_said("stopping").await;
        service.signal("TERM").await; // at once: the batch in hand never ends
        service.end().await;
        bed.broker.has(&bed.broker.queue(), 100).await;
    }
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    drop(lock);
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.broker.depth(&bed.broker.failure_queue()).await), (100, 0));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes three minutes on a broker with its own defaults; `make test` runs it"]
async fn a_copy_whose_delay_ends_while_the_queue_is_missing_waits_for_it() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 300);
    bed.declare().await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.delete(&bed.broker.queue()).await;
    bed.broker.has(&bed.broker.retry_queue(300), 0).await; // its delay is over, and it has nowhere to go
    let service = bed.start().await;
    // The broker tries again on its own schedule, up to three minutes later.
    crate::support::eventually_within(std::time::Duration::from_secs(200), "it comes", async || {
        bed.processed().await == 1
    })
    .await;
    service.stop().await;
    bed.finish().await;
}
