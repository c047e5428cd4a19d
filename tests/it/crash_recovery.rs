//! A worker that is killed loses nothing and doubles nothing.

use crate::support::{Order, Proxy, StatusChange, TestBed, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_commit_and_ack_is_absorbed() {
    let mut bed = TestBed::new().await;
    let proxy = Proxy::before(bed.variable("AMQP_URL")).await;
    let direct = bed.variable("AMQP_URL").to_owned();
    bed.set("amqp.url", proxy.url());
    let orders: Vec<_> = (0..10).map(|_| Order::new(2)).collect();
    proxy.lose_acknowledgements();
    let worker = bed.spawn(&["consume"]);
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    // The window opens with what is settled, and nothing is here: one commit is all that can be waited for.
    eventually("a commit", async || bed.processed().await > 0).await;
    worker.kill().await;
    drop(proxy); // and with it the connection
    bed.broker.has(&bed.broker.queue(), 10).await; // none was acknowledged
    bed.set("amqp.url", &direct);
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (10, 20));
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_retry_copy_and_ack_is_absorbed() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 200);
    bed.on_reservation("if nextval('hits') = 1 then raise 'scripted'; end if;").await;
    let proxy = Proxy::before(bed.variable("AMQP_URL")).await;
    let direct = bed.variable("AMQP_URL").to_owned();
    bed.set("amqp.url", proxy.url());
    let order = Order::new(2);
    proxy.lose_acknowledgements();
    let worker = bed.spawn(&["consume"]);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.broker.has(&bed.broker.retry_queue(200), 1).await;
    worker.kill().await;
    drop(proxy);
    bed.broker.has(&bed.broker.queue(), 2).await; // the original, and the copy whose delay is over
    bed.set("amqp.url", &direct);
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (1, 2));
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_again_and_again_loses_and_doubles_nothing() {
    let mut bed = TestBed::new().await;
    bed.set("consume.batch_size", "50");
    let orders: Vec<_> = (0..2_000).map(|_| Order::new(2)).collect();
    let copies = orders.iter().step_by(10);
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(copies).map(Order::body)).await;
    let cancelled: Vec<_> = orders[..100].iter().map(|order| StatusChange::new(order, "cancelled", 1).body()).collect();
    bed.broker.publish_all(StatusChange::EVENT, cancelled).await;
    let mut kills = 0;
    loop {
        let before = bed.processed().await;
        if before >= 1_900 {
            break;
        }
        let worker = bed.spawn(&["consume"]);
        eventually("it works", async || bed.processed().await > before + 100 + kills * 7).await;
        worker.kill().await;
        kills += 1;
    }
    assert!(kills >= 5, "only {kills} kills");
    let last = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(last.code(), Some(0), "{}", last.stderr);
    assert_eq!((bed.processed().await, bed.reservations().await), (2_100, 4_000));
    assert_eq!(bed.count("select count(distinct (order_id, product_id)) from reservation").await, 4_000);
    assert_eq!(bed.count("select count(*) from reservation where released_at is not null").await, 200);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_in_its_transaction_leaves_the_event_to_the_next_one() {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    let lock = bed.hold_reservations().await;
    let worker = bed.spawn(&["consume"]);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    worker.kill().await;
    bed.broker.has(&bed.broker.queue(), 1).await;
    drop(lock);
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (1, 2));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_work_of_a_killed_replica_is_taken_over_by_another() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    let lock = bed.hold_reservations().await;
    let first = bed.spawn(&["consume"]);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    let second = bed.start().await;
    first.kill().await;
    drop(lock);
    bed.has_processed(1).await;
    second.stop().await;
    assert_eq!((bed.broker.in_work().await, bed.reservations_of(&order).await), (0, 1));
    bed.finish().await;
}

/// As often as the delivery limit allows, and more: a message that was never begun may wear out, but not vanish.
#[tokio::test(flavor = "multi_thread")]
async fn kills_over_unstarted_messages_lose_none() {
    let bed = TestBed::new().await;
    bed.broker.publish_all(Order::EVENT, Order::many(60).iter().map(Order::body)).await;
    for _ in 0..32 {
        let lock = bed.hold_reservations().await;
        let worker = bed.spawn(&["consume"]);
        bed.blocked(1).await;
        worker.kill().await;
        drop(lock);
        bed.blocked(0).await;
        let ready = async || bed.broker.depth(&bed.broker.queue()).await;
        let failed = async || bed.broker.depth(&bed.broker.failure_queue()).await;
        eventually("all are back, or worn out", async || ready().await + failed().await == 60).await;
    }
    bed.drain().await;
    let failed = bed.broker.take(&bed.broker.failure_queue()).await.len();
    assert!((1..=2).contains(&failed), "the window is one message, so one wears out and not {failed}");
    assert_eq!(bed.processed().await, 60 - i64::try_from(failed).expect("a count"));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_kills_its_process_wears_out_and_its_neighbours_are_applied() {
    const LIMIT: i32 = 15; // half of our own: a neighbour must not come near that one

    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    bed.broker.replace_queue_with_limit(LIMIT).await;
    bed.on_reservation("if new.quantity = 666 then perform pg_advisory_xact_lock(1); end if;").await;
    let trap = bed.side_session("select pg_advisory_xact_lock(1)").await;
    let (poison, orders) = (Order::of("666"), Order::many(200));
    let (before, after) = orders.split_at(100);
    bed.broker.publish_all(Order::EVENT, before.iter().chain([&poison]).chain(after).map(Order::body)).await;
    let trapped =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'";
    let is_over = async || bed.broker.depth(&bed.broker.failure_queue()).await > 0;
    let mut deaths = 0;
    while !is_over().await {
        let worker = bed.spawn(&["consume"]);
        eventually("the poison is at work, or over", async || bed.count(trapped).await > 0 || is_over().await).await;
        worker.kill().await;
        deaths += 1;
        // What the process had begun ends with it.
        bed.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and application_name = 'stock-service'",
        )
        .await;
        let is_gone = async || bed.broker.consumers().await == 0 && bed.count(trapped).await == 0;
        eventually("it is gone", is_gone).await;
    }
    drop(trap);
    bed.drain().await;
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    let bodies: Vec<_> = failed.iter().map(|copy| String::from_utf8_lossy(&copy.body).into_owned()).collect();
    assert_eq!(bodies, [poison.body()], "the poison, and no neighbour, after {deaths} deaths");
    // It wore out by its deaths. A message on its way to a consumer that ends, for its window is to grow, goes back as
    // well, and the broker counts that: seldom, and hardly twice.
    assert!(deaths > LIMIT - 2, "{deaths} deaths");
    assert_eq!((bed.processed().await, bed.reservations().await), (200, 200));
    bed.finish().await;
}
