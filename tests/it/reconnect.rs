//! Connections to the broker break; the service notices, and goes on by itself.

use std::time::Duration;

use crate::support::{Order, PATIENCE, Proxy, Scripted, Step, TestBed, eventually, eventually_within};

/// A bed whose service talks to the broker through a proxy.
async fn proxied_bed() -> (TestBed, Proxy) {
    let mut bed = TestBed::new().await;
    let proxy = Proxy::before(bed.variable("AMQP_URL")).await;
    bed.set("amqp.url", proxy.url());
    (bed, proxy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_is_made_again_and_again() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.workers", "2");
    bed.set("consume.prefetch", "1"); // or the second worker waits until the first one's window has grown
    let service = bed.start().await;
    for n in 1..=4 {
        proxy.cut();
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        bed.has_processed(n).await;
    }
    eventually("as many consumers as workers", async || bed.broker.consumers().await == 2).await;
    service.stop().await;
    assert_eq!(bed.broker.consumers().await, 0);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_told_by_the_service_alone_whatever_else_is_to_be_logged() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("log.format", "json");
    bed.set_variable("RUST_LOG", "info,stock_service=debug");
    let process = bed.spawn(&["consume"]);
    eventually("it consumes", async || bed.broker.consumers().await > 0).await;
    proxy.cut();
    process.has_said("not consuming").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    process.signal("TERM").await;
    let end = process.end().await;
    for line in end.stderr.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        assert!(line["target"].as_str().is_some_and(|target| target.starts_with("stock_service")), "{line}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_cut_under_load_lose_and_double_nothing() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.batch_size", "20");
    bed.set("consume.prefetch", "50");
    bed.set_ladder(2, 50);
    let (good, failing, rejected) = (Order::many(600), Order::many(20), Order::many(20));
    let fails: Vec<_> = failing.iter().map(|order| order.event_id.clone()).collect();
    let rejects: Vec<_> = rejected.iter().map(|order| order.event_id.clone()).collect();
    let script = Scripted::new(move |message, _| match message.id.to_string() {
        id if fails.contains(&id) => Step::Fail,
        id if rejects.contains(&id) => Step::Reject,
        _ => Step::Apply,
    });
    let mut bodies: Vec<_> = good.iter().chain(&good[..60]).chain(&failing).chain(&rejected).map(Order::body).collect();
    fastrand::shuffle(&mut bodies);
    bodies.extend((0..10).map(|n| format!("no event {n}")));
    let service = bed.start_with(script).await;
    let mut processed = 0;
    for part in bodies.chunks(150) {
        bed.broker.publish_all(Order::EVENT, part.to_vec()).await;
        let before = processed;
        eventually("some are processed", async || bed.processed().await > before).await;
        proxy.cut();
        processed = bed.processed().await;
    }
    bed.has_processed(600).await;
    let all_is_settled = async || {
        let queues = (bed.broker.in_work().await, bed.broker.depth(&bed.broker.failure_queue()).await);
        queues.0 == 0 && queues.1 >= 50
    };
    eventually("all others are parked", all_is_settled).await;
    service.stop().await;
    assert_eq!(bed.reservations().await, 600);
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    // A cut between copy and acknowledgement may leave a second copy; none may be missing.
    for order in failing.iter().chain(&rejected) {
        assert!(failed.iter().any(|copy| copy.body == order.body().as_bytes()));
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_after_its_connection_broke_is_recognised_when_it_comes_again() {
    let (bed, proxy) = proxied_bed().await;
    let order = Order::new(2);
    let script = Scripted::apply();
    let service = bed.start_with(script.clone()).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    proxy.cut();
    drop(lock);
    bed.has_processed(1).await;
    let marker = Order::new(1);
    bed.broker.publish(Order::EVENT, marker.body()).await;
    bed.has_processed(2).await; // in the order of the queue, after the copy
    service.stop().await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(script.attempts(&order.event_id).len(), 1);
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_at_any_moment_around_a_commit_is_survived() {
    const ROUNDS: u32 = 8;

    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.workers", "1");
    let service = bed.start().await;
    for round in 1..=ROUNDS {
        let lock = bed.side_session("lock table reservation in access exclusive mode").await;
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        bed.blocked(1).await;
        drop(lock);
        // The fault's own moment: somewhere between the commit, its acknowledgement and what comes after.
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..6_000))).await;
        proxy.cut();
        bed.has_processed(i64::from(round)).await;
        eventually("it consumes again", async || bed.broker.consumers().await == 1).await;
    }
    service.stop().await;
    bed.drain().await; // the last one may have lost its acknowledgement, and be back
    assert_eq!(bed.reservations().await, i64::from(ROUNDS));
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_original_is_kept_until_its_copy_is_confirmed() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set_ladder(1, 3_600_000);
    bed.declare().await;
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
    let direct = bed.variable("AMQP_URL").to_owned();
    proxy.lose_confirms();
    let worker = bed.spawn(&["consume"]);
    let (failing, innocents) = (Order::of("666"), Order::many(20));
    bed.broker.publish(Order::EVENT, failing.body()).await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.broker.has(&bed.broker.retry_queue(3_600_000), 1).await;
    bed.has_processed(20).await; // nobody else waits for that confirm
    worker.kill().await;
    drop(proxy);
    eventually("its messages are back", async || bed.broker.depth(&bed.broker.queue()).await > 0).await;
    // The original comes again, and fails again.
    bed.set("amqp.url", &direct);
    bed.drain().await;
    let copies = bed.broker.take(&bed.broker.retry_queue(3_600_000)).await;
    assert_eq!(copies.len(), 2);
    assert!(copies.iter().all(|copy| copy.body == failing.body().as_bytes()));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_a_confirm_is_missing_ends_within_the_grace_period() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.grace", "3s");
    proxy.lose_confirms();
    let worker = bed.spawn(&["consume"]);
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.broker.has(&bed.broker.failure_queue(), 1).await;
    let begun = std::time::Instant::now();
    worker.signal("TERM").await;
    let end = worker.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    drop(proxy);
    bed.broker.has(&bed.broker.queue(), 1).await; // it was never confirmed, so it was never let go
    for queue in [bed.broker.queue(), bed.broker.failure_queue()] {
        assert_eq!(bed.broker.take(&queue).await[0].body, b"no event");
    }
    bed.finish().await;
}

/// The window is one message, so no later one can tell of the gap.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute; `make test` runs it"]
async fn an_idle_subscription_is_renewed_which_gives_back_what_never_arrived() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "1");
    let service = bed.start().await;
    proxy.lose_deliveries(true);
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.broker.has(&bed.broker.queue(), 0).await; // the broker takes it for delivered
    proxy.lose_deliveries(false);
    eventually_within(2 * PATIENCE, "it comes again", async || bed.processed().await == 1).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_that_never_arrived_is_noticed_by_the_next_one() {
    let (mut bed, proxy) = proxied_bed().await;
    bed.set("consume.workers", "1");
    let service = bed.start().await;
    let orders = Order::many(20);
    bed.broker.publish_all(Order::EVENT, orders[..10].iter().map(Order::body)).await;
    bed.has_processed(10).await; // the window is wide by now
    proxy.lose_deliveries(true);
    bed.broker.publish(Order::EVENT, orders[10].body()).await;
    bed.broker.has(&bed.broker.queue(), 0).await;
    proxy.lose_deliveries(false);
    bed.broker.publish_all(Order::EVENT, orders[11..].iter().map(Order::body)).await;
    bed.has_processed(20).await;
    service.stop().await;
    assert_eq!(bed.reservations().await, 20);
    bed.finish().await;
}
