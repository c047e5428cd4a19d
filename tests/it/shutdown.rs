//! A stop finishes what is in hand, gives the rest back, and ends in time.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Order, Process, TestBed, eventually};

/// Far below the grace period, far above what an idle process needs.
const PROMPT: Duration = Duration::from_secs(8);

/// Starts the binary, when the one before is gone for the broker, too, and waits until it consumes.
async fn consuming(bed: &TestBed) -> Process {
    eventually("nobody consumes", async || bed.broker.consumers().await == 0).await;
    let process = bed.spawn(&["consume"]);
    eventually("it consumes", async || bed.broker.consumers().await > 0).await;
    process
}

async fn ends_promptly_with_0(process: Process, signal: &str) {
    let begun = Instant::now();
    process.signal(signal).await;
    let end = process.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(begun.elapsed() < PROMPT, "{:?}: {}", begun.elapsed(), end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_service_stops_at_once_on_either_signal() {
    for signal in ["TERM", "INT"] {
        let bed = TestBed::new().await;
        let process = consuming(&bed).await;
        ends_promptly_with_0(process, signal).await;
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_under_load_loses_and_doubles_nothing() {
    let mut bed = TestBed::new().await;
    bed.set("consume.batch_size", "50");
    let orders = Order::many(1_500);
    bed.broker.publish_all(Order::EVENT, orders.iter().map(Order::body)).await;
    for signal in ["TERM", "INT", "TERM"] {
        let before = bed.processed().await;
        let process = consuming(&bed).await;
        eventually("it works", async || bed.processed().await > before + 50).await;
        ends_promptly_with_0(process, signal).await;
        // Settled is what is committed, and nothing is left unacknowledged: all the rest is ready again.
        let rest = u32::try_from(1_500 - bed.processed().await).expect("a count");
        bed.broker.has(&bed.broker.queue(), rest).await;
    }
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (1_500, 1_500));
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_finishes_the_batch_in_hand() {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    let process = consuming(&bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    process.signal("TERM").await;
    process.has_said("stopping").await;
    drop(lock);
    let end = process.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(bed.broker.in_work().await, 0, "it is acknowledged");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_does_not_end_within_the_grace_period_is_given_back() {
    let mut bed = TestBed::new().await;
    bed.set("consume.grace", "2s");
    let order = Order::new(2);
    let process = consuming(&bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    let begun = Instant::now();
    ends_promptly_with_0(process, "TERM").await;
    assert!(begun.elapsed() >= Duration::from_secs(2), "it was waited for");
    bed.broker.has(&bed.broker.queue(), 1).await;
    drop(lock);
    eventually("its session is gone", async || {
        bed.count("select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle' and pid <> pg_backend_pid()")
            .await
            == 0
    })
    .await;
    assert_eq!((bed.processed().await, bed.reservations().await), (0, 0));
    bed.drain().await;
    assert_eq!(bed.reservations_of(&order).await, 2);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once() {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    let mut process = consuming(&bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.blocked(1).await;
    process.signal("TERM").await;
    process.has_said("stopping").await;
    assert!(process.is_running(), "the batch in hand is waited for");
    let begun = Instant::now();
    process.signal("INT").await;
    process.end().await;
    assert!(begun.elapsed() < PROMPT);
    bed.broker.has(&bed.broker.queue(), 1).await;
    drop(lock);
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (1, 2));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_a_server_is_away_ends_at_once() {
    for (variable, url) in [
        ("AMQP_URL", "amqp://stock:stock@127.0.0.1:1/%2f"),
        ("DATABASE_URL", "postgres://stock:stock@127.0.0.1:1/stock"),
    ] {
        let mut bed = TestBed::new().await;
        let original = bed.variable(variable).to_owned();
        bed.set_variable(variable, url);
        let mut process = bed.spawn(&["consume"]);
        process.has_said("127.0.0.1:1").await;
        assert!(process.is_running(), "it waits for its servers");
        ends_promptly_with_0(process, "TERM").await;
        bed.set_variable(variable, &original);
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_gives_back_what_was_taken_and_not_begun() {
    let mut bed = TestBed::new().await;
    bed.set("consume.batch_size", "5");
    let orders = Order::many(200);
    let process = consuming(&bed).await;
    bed.broker.publish_all(Order::EVENT, orders[..100].iter().map(Order::body)).await;
    bed.has_processed(100).await; // the window is open by now
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish_all(Order::EVENT, orders[100..].iter().map(Order::body)).await;
    eventually("all are taken", async || bed.broker.depth(&bed.broker.queue()).await == 0).await;
    process.signal("TERM").await;
    process.has_said("stopping").await;
    drop(lock);
    let end = process.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    let rest = u32::try_from(200 - bed.processed().await).expect("a count");
    assert!(rest > 0, "a stop does not work everything off");
    bed.broker.has(&bed.broker.queue(), rest).await;
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (200, 200));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_runs_once_ends_at_once_on_either_signal() {
    let bed = TestBed::new().await;
    bed.execute("insert into processed_event values (gen_random_uuid(), now() - interval '40 days')").await;
    let lock = bed.side_session("lock table processed_event, _sqlx_migrations in access exclusive mode").await;
    let mut sessions = 0;
    for command in [&["purge", "--horizon", "30d"][..], &["migrate"]] {
        for signal in ["TERM", "INT"] {
            let process = bed.spawn(command);
            sessions += 1; // those of the commands before do not hear of their end while they wait
            bed.blocked(sessions).await;
            let begun = Instant::now();
            process.signal(signal).await;
            let end = process.end().await;
            // Whoever does not heed a signal has no exit status, and as process 1 of a container would not end.
            assert_eq!(end.code(), Some(1), "{command:?}, {signal}: {:?}", end.status);
            assert!(end.stderr.contains(signal), "{command:?}: {}", end.stderr);
            assert!(begun.elapsed() < PROMPT, "{command:?}, {signal}: {:?}", begun.elapsed());
        }
    }
    drop(lock);
    bed.blocked(0).await;
    assert_eq!(bed.processed().await, 1, "what was not committed is undone");
    bed.remove().await;
}
