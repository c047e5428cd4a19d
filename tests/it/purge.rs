//! `purge` deletes what is older than the horizon, and nothing else.

use chrono::{DateTime, TimeDelta, Utc};

use crate::support::{Finished, Order, TestBed, eventually};

/// Writes rows of events that were processed so long ago.
pub async fn remember(bed: &TestBed, rows: u32, age: &str) {
    bed.execute(&format!(
        "insert into processed_event (event_id, processed_at)
         select gen_random_uuid(), now() - interval '{age}' from generate_series(1, {rows})"
    ))
    .await;
}

/// Runs the binary to its end.
pub async fn run(bed: &TestBed, arguments: &[&str]) -> Finished {
    bed.spawn(arguments).end().await
}

/// The count that a purge printed: the one line with plain digits and "rows".
fn printed_count(end: &Finished) -> i64 {
    let line = end.stdout.lines().find(|line| line.contains("rows ")).unwrap_or_else(|| panic!("no count: {end:?}"));
    line.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no count: {line}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_purge_deletes_only_what_is_older_in_more_than_one_step() {
    let bed = TestBed::new().await;
    remember(&bed, 12_345, "31 days").await;
    remember(&bed, 1, "30 days 1 minute").await;
    remember(&bed, 1, "29 days 23 hours 59 minutes").await;
    remember(&bed, 700, "1 day").await;
    let order = Order::new(3);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    // Each step is a transaction of its own: a trigger sees them apart.
    bed.execute(
        "create table steps (transaction xid8, rows bigint);
         create function count_rows() returns trigger language plpgsql as $$
         begin insert into steps select pg_current_xact_id(), count(*) from gone; return null; end $$;
         create trigger count_rows after delete on processed_event referencing old table as gone
         for each statement execute function count_rows()",
    )
    .await;
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(printed_count(&end), 12_346);
    assert_eq!(bed.processed().await, 702);
    assert_eq!(bed.reservations_of(&order).await, 3, "reservations are not touched");
    assert!(bed.count("select count(distinct transaction) from steps where rows > 0").await > 2);
    assert!(bed.count("select max(rows) from steps").await <= 10_000);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cutoff_is_printed_first_in_utc() {
    let bed = TestBed::new().await;
    remember(&bed, 3, "40 days").await;
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    let first = end.stdout.lines().next().expect("a line");
    let text = first.split_whitespace().find(|word| word.contains('T')).expect(first);
    assert!(text.ends_with('Z'), "{text}");
    let cutoff: DateTime<Utc> = text.parse().expect("RFC 3339");
    let expected = Utc::now() - TimeDelta::days(30);
    assert!((cutoff - expected).abs() < TimeDelta::minutes(2), "{cutoff}");
    assert!(end.stdout.trim_end().lines().count() >= 2 && end.stdout.contains("3 rows"), "{}", end.stdout);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_decides_what_time_it_is_whatever_its_time_zone() {
    let bed = TestBed::new().await;
    let name = bed.database_name();
    bed.execute(&format!("alter database {name} set timezone = 'Asia/Kathmandu'")).await;
    remember(&bed, 2, "30 days 1 minute").await;
    remember(&bed, 2, "29 days 23 hours 59 minutes").await;
    let mut bed = bed;
    bed.set_variable("TZ", "America/St_Johns");
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(printed_count(&end), 2, "{}", end.stderr);
    assert_eq!(bed.processed().await, 2);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_counts_and_deletes_nothing() {
    let bed = TestBed::new().await;
    remember(&bed, 7, "40 days").await;
    remember(&bed, 2, "1 day").await;
    let end = run(&bed, &["purge", "--horizon", "30d", "--dry-run"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(printed_count(&end), 7);
    assert_eq!(bed.processed().await, 9);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_to_delete_is_no_failure() {
    let bed = TestBed::new().await;
    remember(&bed, 2, "1 day").await;
    for horizon in ["30d", "720h", "5w", "2592000s", "43200min"] {
        let end = run(&bed, &["purge", "--horizon", horizon]).await;
        assert_eq!((end.code(), printed_count(&end)), (Some(0), 0), "{horizon}: {}", end.stderr);
    }
    assert_eq!(bed.processed().await, 2);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_purges_at_once_share_the_work() {
    let bed = TestBed::new().await;
    remember(&bed, 40_000, "40 days").await;
    remember(&bed, 10, "1 day").await;
    let purges = [(); 3].map(|()| bed.spawn(&["purge", "--horizon", "30d"]));
    let mut counts = Vec::new();
    for purge in purges {
        let end = purge.end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        counts.push(printed_count(&end));
    }
    assert_eq!(counts.iter().sum::<i64>(), 40_000, "{counts:?}");
    assert_eq!(bed.processed().await, 10);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_that_cannot_work_fails() {
    let mut bed = TestBed::new().await;
    remember(&bed, 3, "40 days").await;
    let user = bed.demote().await;
    bed.execute(&format!("revoke delete on processed_event from {user}")).await;
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(end.code(), Some(1), "{}", end.stdout);
    assert_eq!(end.stderr.matches("processed_event").count(), 1, "said, and said once: {}", end.stderr);
    assert_eq!(bed.processed().await, 3);
    bed.execute("alter table processed_event rename to away").await;
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(end.code(), Some(1), "{}", end.stdout);
    assert_eq!(end.stderr.matches("does not exist").count(), 1, "{}", end.stderr);
    bed.execute("alter table away rename to processed_event").await;
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_purge_keeps_what_it_did_and_the_next_one_completes_it() {
    let bed = TestBed::new().await;
    remember(&bed, 12_000, "40 days").await;
    // The second step loses its session.
    bed.execute(
        "create sequence hits;
         create function fault() returns trigger language plpgsql as $$
         begin if nextval('hits') = 2 then perform pg_terminate_backend(pg_backend_pid()); end if; return null; end $$;
         create trigger fault before delete on processed_event for each statement execute function fault()",
    )
    .await;
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(end.code(), Some(1), "{}", end.stdout);
    let rest = bed.processed().await;
    assert!((1..12_000).contains(&rest), "{rest} rows left");
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!((end.code(), printed_count(&end)), (Some(0), rest), "{}", end.stderr);
    assert_eq!(bed.processed().await, 0);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consume_purges_on_its_schedule_and_works_all_the_while() {
    let mut bed = TestBed::new().await;
    bed.set("purge.every", "1s");
    remember(&bed, 6_000, "31 days").await;
    remember(&bed, 5, "29 days").await;
    let services = [bed.spawn(&["consume"]), bed.spawn(&["consume"])];
    bed.broker.publish_all(Order::EVENT, Order::many(50).iter().map(Order::body)).await;
    eventually("purged and consumed", async || bed.processed().await == 55).await;
    remember(&bed, 4, "31 days").await;
    eventually("purged again", async || bed.processed().await == 55).await;
    for service in &services {
        service.signal("TERM").await;
    }
    for service in services {
        assert_eq!(service.end().await.code(), Some(0));
    }
    assert_eq!(bed.reservations().await, 50);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_that_is_switched_off_deletes_nothing() {
    let mut bed = TestBed::new().await;
    bed.set("purge.every", "1s");
    bed.set("purge.enabled", "false");
    remember(&bed, 5, "31 days").await;
    let service = bed.spawn(&["consume"]);
    let begun = std::time::Instant::now();
    let mut orders = 0;
    while begun.elapsed().as_secs() < 3 {
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        orders += 1;
        eventually("it works", async || bed.reservations().await == orders).await;
    }
    assert_eq!(bed.processed().await, 5 + orders);
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_by_hand_waits_for_the_one_that_is_at_work() {
    let bed = TestBed::new().await;
    remember(&bed, 100, "40 days").await;
    let rival = bed.side_session("select pg_advisory_xact_lock(1459668456)").await; // the purge's own lock
    let purge = bed.spawn(&["purge", "--horizon", "30d"]);
    bed.blocked(1).await;
    drop(rival);
    let end = purge.end().await;
    assert_eq!((end.code(), bed.processed().await), (Some(0), 0), "{}{}", end.stdout, end.stderr);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_purges_never_delete_at_the_same_time() {
    let bed = TestBed::new().await;
    remember(&bed, 20_000, "60 days").await;
    // From before to after each deletion, which takes its time, a lock of the test's own is held.
    bed.execute(
        "create function enter() returns trigger language plpgsql as $$
         begin
             if not pg_try_advisory_lock(1) then raise 'another purge is deleting'; end if;
             perform pg_sleep(0.1);
             return null;
         end $$;
         create function leave() returns trigger language plpgsql as $$
         begin perform pg_advisory_unlock(1); return null; end $$;
         create trigger enter before delete on processed_event for each statement execute function enter();
         create trigger leave after delete on processed_event for each statement execute function leave()",
    )
    .await;
    let purges = [(); 3].map(|()| bed.spawn(&["purge", "--horizon", "30d"]));
    for purge in purges {
        let end = purge.end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
    }
    assert_eq!(bed.processed().await, 0);
    bed.remove().await;
}
