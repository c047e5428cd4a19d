//! An outage of the database is nobody's fault: no attempt is spent, and work goes on by itself.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Order, Servers, StatusChange, TestBed, eventually_within};

/// A bed whose messages have no second attempt: whoever is charged with one ends in the failure queue.
async fn strict_bed() -> TestBed {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed
}

/// Ends the service's sessions, and nobody else's.
const END_SESSIONS: &str = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                            where datname = current_database() and application_name = 'stock-service'";

/// Breaks the database under a running service, sends orders, waits until the service has met the fault, mends it.
async fn holds_while(bed: TestBed, break_it: &str, mend_it: &str) {
    let orders = Order::many(60);
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, orders[..20].iter().map(Order::body)).await;
    bed.has_processed(20).await;
    bed.execute(break_it).await;
    let failures = "select xact_rollback from pg_stat_database where datname = current_database()";
    let before = bed.count(failures).await;
    bed.broker.publish_all(Order::EVENT, orders[20..].iter().map(Order::body)).await;
    eventually_within(Duration::from_secs(60), "it was tried", async || bed.count(failures).await >= before + 4).await;
    assert_eq!(bed.reservations().await, 20);
    bed.execute(mend_it).await;
    bed.has_processed(60).await;
    service.stop().await;
    assert_eq!(bed.reservations().await, 60);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "no attempt was spent");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_table_costs_no_attempt() {
    let bed = strict_bed().await;
    holds_while(bed, "alter table processed_event rename to away", "alter table away rename to processed_event").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_column_costs_no_attempt() {
    let bed = strict_bed().await;
    holds_while(
        bed,
        "alter table reservation rename column product_id to away",
        "alter table reservation rename column away to product_id",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_costs_no_attempt() {
    let mut bed = strict_bed().await;
    let user = bed.demote().await;
    holds_while(
        bed,
        &format!("revoke insert on reservation from {user}"),
        &format!("grant insert on reservation to {user}"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_became_read_only_costs_no_attempt() {
    let bed = strict_bed().await;
    let name = bed.database_name();
    holds_while(
        bed,
        &format!("alter database {name} set default_transaction_read_only = on; {END_SESSIONS}"),
        // Not another session is ended: those that answered 25006 must not be used again.
        &format!("set transaction read write; alter database {name} reset default_transaction_read_only"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_takes_no_connections_costs_no_attempt() {
    let bed = strict_bed().await;
    let orders = Order::many(40);
    let name = bed.database_name();
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, orders[..20].iter().map(Order::body)).await;
    bed.has_processed(20).await;
    bed.execute_beside(&format!("alter database {name} with allow_connections false")).await;
    bed.execute_beside(&END_SESSIONS.replace("current_database()", &format!("'{name}'"))).await;
    bed.broker.publish_all(Order::EVENT, orders[20..].iter().map(Order::body)).await;
    // Some were taken, and are held: not ready any more, and not let go either.
    eventually_within(Duration::from_secs(60), "some are taken", async || {
        bed.broker.depth(&bed.broker.queue()).await < 20
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await; // how long the outage lasts
    bed.execute_beside(&format!("alter database {name} with allow_connections true")).await;
    bed.has_processed(40).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "no attempt was spent");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_killed_all_the_time_cost_no_attempt_and_double_nothing() {
    let mut bed = strict_bed().await;
    bed.set("consume.batch_size", "10");
    let orders: Vec<_> = (0..300).map(|_| Order::new(3)).collect();
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(&orders[..60]).map(Order::body)).await;
    for order in &orders[..50] {
        bed.broker.publish(StatusChange::EVENT, StatusChange::new(order, "cancelled", 1).body()).await;
    }
    let service = bed.start().await;
    let deadline = Instant::now() + Duration::from_secs(120);
    // From 30 s on, who was interrupted alone five times is to blame; the fault ends well before.
    let end_of_fault = Instant::now() + Duration::from_secs(15);
    let mut kills = 0;
    let mut pause = tokio::time::interval(Duration::from_millis(25)); // the fault's own rhythm
    while bed.processed().await < 350 {
        assert!(Instant::now() < deadline, "{} processed", bed.processed().await);
        pause.tick().await;
        if kills < 150 && Instant::now() < end_of_fault {
            kills += bed.count(END_SESSIONS).await;
        }
    }
    assert!(kills >= 8, "only {kills} sessions were there to be killed");
    service.stop().await;
    bed.drain().await; // the last copies, which a stop may have given back
    assert_eq!((bed.processed().await, bed.reservations().await), (350, 900));
    assert_eq!(bed.count("select count(*) from reservation where released_at is not null").await, 150);
    assert_eq!(bed.broker.in_work().await, 0);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_that_outlasts_the_brokers_patience_wears_no_message_out() {
    // The broker takes back what is unacknowledged for too long, half an hour by default, and counts each time.
    let servers = Servers::start_rabbitmq().await;
    let patience = "application:set_env(rabbit, consumer_timeout, 1000),
                    application:set_env(rabbit, channel_tick_interval, 500).";
    servers.rabbitmqctl(&["eval", patience]).await;
    let mut bed = servers.bed().await;
    bed.set_ladder(0, 50);
    bed.set("amqp.declare", "false");
    let (queue, failed) = (bed.broker.queue(), bed.broker.failure_queue());
    bed.broker.replace_queue_with_limit(3).await;
    let service = bed.start().await;
    bed.execute("alter table reservation rename to away").await;
    bed.broker.publish_all(Order::EVENT, Order::many(5).iter().map(Order::body)).await;
    bed.broker.has(&queue, 4).await; // one was taken
    bed.broker.has(&queue, 5).await; // and taken back
    tokio::time::sleep(Duration::from_secs(8)).await; // how long the outage goes on
    bed.broker.has(&queue, 5).await;
    bed.execute("alter table away rename to reservation").await;
    bed.has_processed(5).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&failed).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_locked_for_long_costs_no_attempt() {
    let mut bed = strict_bed().await;
    bed.set("database.timeout", "1s");
    let orders = Order::many(5);
    let service = bed.start().await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    // Longer than all runs in place together: then it is held like an outage, for nobody else commits.
    let begun = Instant::now();
    let sessions = "select count(*) from pg_stat_activity
                    where datname = current_database() and wait_event_type = 'Lock'";
    eventually_within(Duration::from_secs(60), "it waits for long", async || {
        begun.elapsed() > Duration::from_secs(9) && bed.count(sessions).await > 0
    })
    .await;
    drop(lock);
    bed.has_processed(5).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "no attempt was spent");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_change_under_prepared_statements_costs_no_attempt() {
    let bed = strict_bed().await;
    let service = bed.start().await;
    let orders = Order::many(100);
    let changes = [
        "alter table reservation add column note text default ''",
        "alter table processed_event add column note text default ''",
        "alter table order_status alter column status type varchar(100)",
        "drop index reservation_order_id; create index reservation_order_id on reservation (order_id)",
        "alter table reservation alter column quantity type numeric(14, 3)",
    ];
    for (some, change) in orders.chunks(20).zip(changes) {
        bed.broker.publish_all(Order::EVENT, some.iter().map(Order::body)).await;
        bed.execute(change).await;
    }
    bed.has_processed(100).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}
