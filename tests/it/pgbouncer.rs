//! The service behind pgbouncer in transaction mode: each transaction may meet another session than the one before.

use crate::support::{Order, Pgbouncer, Scripted, StatusChange, Step, TestBed, eventually};

/// A bed whose service talks to the database through a pgbouncer with so few connections that workers take turns.
async fn pooled(bed: &mut TestBed) -> Pgbouncer {
    let pgbouncer = Pgbouncer::before(bed.variable("DATABASE_URL"), 2).await;
    bed.set("database.url", pgbouncer.url());
    pgbouncer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_is_made_by_several_at_once_and_made_only_once() {
    let mut bed = TestBed::bare().await;
    let _pgbouncer = pooled(&mut bed).await;
    let migrations = [(); 3].map(|()| bed.spawn(&["migrate"]));
    let mut applied = 0;
    for migration in migrations {
        let end = migration.end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        applied += usize::from(end.stdout.contains("migrations applied"));
    }
    assert_eq!(applied, 1, "one works, and the others wait and find it done");
    bed.declare().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_with_two_workers_each_apply_every_event_once() {
    let mut bed = TestBed::new().await;
    let _pgbouncer = pooled(&mut bed).await;
    bed.set_ladder(0, 50); // a name of a statement that is missing or taken would show in the failure queue
    bed.set("consume.batch_size", "50");
    let orders = Order::many(2_000);
    let changes: Vec<_> = orders.iter().map(|order| StatusChange::new(order, "shipped", 1)).collect();
    let copies = orders.iter().step_by(2).map(Order::body);
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body).chain(copies)).await;
    bed.broker.publish_all(StatusChange::EVENT, changes.iter().map(StatusChange::body)).await;
    let replicas = [bed.start().await, bed.start().await];
    bed.has_processed(4_000).await;
    for replica in replicas {
        replica.stop().await;
    }
    bed.drain().await; // the last copies
    assert_eq!((bed.processed().await, bed.reservations().await), (4_000, 2_000));
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_event_is_retried_and_parked_and_its_neighbours_are_applied() {
    let mut bed = TestBed::new().await;
    let _pgbouncer = pooled(&mut bed).await;
    let (flaky, bad) = (Order::new(1), Order::new(1));
    let ids = (flaky.event_id.clone(), bad.event_id.clone());
    let script = Scripted::new(move |message, before| match message.id.to_string() {
        id if id == ids.0 && before == 0 => Step::Fail,
        id if id == ids.1 => Step::Fail,
        _ => Step::Apply,
    });
    let orders = Order::many(50);
    let service = bed.start_with(script).await;
    bed.broker.publish_all(Order::EVENT, orders.iter().chain([&flaky, &bad]).map(Order::body)).await;
    bed.has_processed(51).await;
    assert_eq!(bed.broker.failed(1).await.len(), 1);
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn its_restart_costs_no_attempt_and_no_event() {
    let mut bed = TestBed::new().await;
    let mut pgbouncer = pooled(&mut bed).await;
    bed.set_ladder(0, 50);
    bed.set("consume.batch_size", "10");
    bed.on_reservation("perform pg_sleep(0.002);").await;
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, Order::many(600).iter().map(Order::body)).await;
    for share in [100, 300] {
        eventually("it is in the middle", async || bed.processed().await >= share).await;
        assert!(bed.processed().await < 600, "too late to be in the middle");
        pgbouncer.restart().await;
    }
    bed.has_processed(600).await;
    service.stop().await;
    bed.drain().await; // whose acknowledgement was lost
    assert_eq!(bed.reservations().await, 600);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_events_are_purged_by_hand_and_on_schedule() {
    const OLD: &str = "insert into processed_event (event_id, processed_at)
                       select gen_random_uuid(), now() - interval '60 days' from generate_series(1, 12000)";

    let mut bed = TestBed::new().await;
    let _pgbouncer = pooled(&mut bed).await;
    bed.execute(OLD).await;
    let end = bed.spawn(&["purge", "--horizon", "30d"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(end.stdout.contains("12000 rows deleted"), "{}", end.stdout);

    bed.execute(OLD).await;
    bed.set("purge.every", "1s");
    let replicas = [(); 2].map(|()| bed.spawn(&["consume"]));
    eventually("the schedule purges", async || bed.processed().await == 0).await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    for replica in replicas {
        replica.signal("TERM").await;
        let end = replica.end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        assert!(!end.stderr.contains("not purged"), "{}", end.stderr);
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_knows_it_and_says_which_setting_is_missing() {
    let mut bed = TestBed::new().await;
    let pgbouncer = pooled(&mut bed).await;
    let end = bed.spawn(&["doctor"]).end().await;
    assert_eq!(end.code(), Some(0), "{}{}", end.stdout, end.stderr);
    assert!(end.stdout.contains("a transaction-pooling proxy is in between"), "{}", end.stdout);

    // The second one meets the names of the first one's statements, unless pgbouncer keeps them apart.
    bed.set("database.url", pgbouncer.url().split('?').next().expect("a URL"));
    let doctor = async || bed.spawn(&["doctor"]).end().await;
    match Pgbouncer::keeps_statements_apart().await {
        true => {
            for _ in 0..4 {
                assert_eq!(doctor().await.code(), Some(0));
            }
        }
        false => {
            let is_told = async || doctor().await.stdout.contains("add ?statement-cache-capacity=0");
            eventually("the setting is told", is_told).await;
        }
    }
    bed.finish().await;
}
