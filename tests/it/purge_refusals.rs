//! `purge` refuses horizons that copies of events may outlive, and what is no horizon.

use chrono::{TimeDelta, Utc};
use lapin::BasicProperties;

use crate::purge::{remember, run};
use crate::support::{Finished, Order, TestBed, persistent, text, with_headers};

/// Nothing was deleted, and the exit status says why.
async fn refuses(bed: &TestBed, arguments: &[&str], code: i32) -> Finished {
    let before = bed.processed().await;
    let end = run(bed, arguments).await;
    assert_eq!(end.code(), Some(code), "{arguments:?}: {}{}", end.stdout, end.stderr);
    assert!(!end.stderr.is_empty(), "{arguments:?} says nothing");
    assert_eq!(bed.processed().await, before, "{arguments:?}");
    end
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_horizon_is_a_usage_error() {
    let bed = TestBed::new().await;
    remember(&bed, 5, "4000 days").await;
    for horizon in [
        "4weeks",
        "30",
        "30D",
        "-30d",
        "+30d",
        "P30D",
        "abc",
        "",
        "30 d",
        "30 d x",
        "1.5.2d",
        "99999999999999999d",
        "30days",
        "d",
        "٣d",
        "0x1d",
        "1e3d",
        "30d ",
        " 30d",
        "30ms",
        "30M",
        "30m",
        "1e1000000000d",
    ] {
        refuses(&bed, &["purge", &format!("--horizon={horizon}")], 2).await;
    }
    refuses(&bed, &["purge"], 2).await;
    refuses(&bed, &["purge", "--horizon"], 2).await;
    refuses(&bed, &["purge", "--horizon", "30d", "--horizon", "31d"], 2).await;
    refuses(&bed, &["purge", "--horizon", "30d", "--no-such-flag"], 2).await;
    refuses(&bed, &["purge", "30d"], 2).await;
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enormous_horizon_deletes_nothing_and_does_not_crash() {
    let bed = TestBed::new().await;
    remember(&bed, 5, "4000 days").await;
    for horizon in ["99999999999d", "400000w", "106751991167d"] {
        let end = run(&bed, &["purge", "--horizon", horizon]).await;
        assert!(matches!(end.code(), Some(0..=2)), "{horizon}: {}", end.stderr);
        assert!(!end.stderr.contains("panicked"), "{}", end.stderr);
    }
    assert_eq!(bed.processed().await, 5);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn purging_below_the_minimum_horizon_is_refused() {
    let mut bed = TestBed::new().await;
    remember(&bed, 5, "20 days").await;
    remember(&bed, 5, "2 hours").await;
    let end = refuses(&bed, &["purge", "--horizon", "13d"], 1).await;
    assert!(end.stderr.contains("purge.minimum_horizon"), "{}", end.stderr);
    refuses(&bed, &["purge", "--horizon", "13d", "--dry-run"], 1).await;
    let end = run(&bed, &["purge", "--horizon", "13d", "--force"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.processed().await, 5);
    for horizon in ["59min", "3599s", "0s", "0d"] {
        refuses(&bed, &["purge", "--horizon", horizon, "--force"], 1).await;
    }
    bed.set("purge.minimum_horizon", "1h");
    let end = run(&bed, &["purge", "--horizon", "1h"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.processed().await, 0);
    bed.remove().await;
}

/// A message of this kind waits in a queue: a shorter horizon is refused, a longer one is not, and force overrides.
async fn refuses_for(queue: impl Fn(&TestBed) -> String, properties: BasicProperties) {
    let bed = TestBed::new().await;
    remember(&bed, 5, "60 days").await;
    let queue = queue(&bed);
    bed.broker.send("", &queue, b"no event", properties).await;
    refuses(&bed, &["purge", "--horizon", "35d"], 1).await;
    refuses(&bed, &["purge", "--horizon", "35d"], 1).await; // a look wears nothing out
    let end = run(&bed, &["purge", "--horizon", "50d", "--dry-run"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    let end = run(&bed, &["purge", "--horizon", "35d", "--force"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.processed().await, 0);
    bed.broker.has(&queue, 1).await;
    let left = bed.broker.take(&queue).await;
    assert_eq!(left[0].body, b"no event", "the look changed nothing");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_horizon_shorter_than_a_failed_message_is_old_is_refused() {
    let failed_at = (Utc::now() - TimeDelta::days(40)).to_rfc3339();
    let newer = u64::try_from((Utc::now() - TimeDelta::days(1)).timestamp()).expect("a time");
    refuses_for(
        |bed| bed.broker.failure_queue(),
        with_headers(&[("failed-at", text(&failed_at))]).with_timestamp(newer),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_time_of_failure_the_timestamp_decides() {
    let old = u64::try_from((Utc::now() - TimeDelta::days(40)).timestamp()).expect("a time");
    refuses_for(|bed| bed.broker.failure_queue(), persistent().with_timestamp(old)).await;
    let odd = with_headers(&[("failed-at", text("yesterday"))]).with_timestamp(old);
    refuses_for(|bed| bed.broker.failure_queue(), odd).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_waits_for_its_retry_counts_too() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 3_600_000);
    bed.declare().await;
    remember(&bed, 5, "60 days").await;
    let old = u64::try_from((Utc::now() - TimeDelta::days(40)).timestamp()).expect("a time");
    let retry_queue = bed.broker.retry_queue(3_600_000);
    bed.broker.send("", &retry_queue, b"no event", persistent().with_timestamp(old)).await;
    refuses(&bed, &["purge", "--horizon", "35d"], 1).await;
    bed.broker.has(&retry_queue, 1).await;
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delays_are_added_to_the_age() {
    let mut bed = TestBed::new().await;
    // Two delays of 20 days, which share a queue.
    bed.set("retry.delay", "20d");
    bed.set("retry.max_delay", "20d");
    bed.set("retry.max_retries", "2");
    bed.broker.also_delays(1_728_000_000);
    remember(&bed, 5, "60 days").await;
    let failed_at = (Utc::now() - TimeDelta::days(5)).to_rfc3339();
    bed.broker
        .send("", &bed.broker.failure_queue(), b"no event", with_headers(&[("failed-at", text(&failed_at))]))
        .await;
    refuses(&bed, &["purge", "--horizon", "42d"], 1).await;
    let end = run(&bed, &["purge", "--horizon", "50d"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_needs_no_broker() {
    let mut bed = TestBed::new().await;
    remember(&bed, 5, "60 days").await;
    let original = bed.variable("AMQP_URL").to_owned();
    bed.set_variable("AMQP_URL", "amqp://stock:stock@127.0.0.1:1/%2f");
    let end = run(&bed, &["purge", "--horizon", "30d"]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(end.stderr.contains("127.0.0.1:1"), "it says whom it could not ask: {}", end.stderr);
    assert_eq!(bed.processed().await, 0);
    bed.set_variable("AMQP_URL", &original);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_schedule_too_refuses_for_a_message_that_waits() {
    let mut bed = TestBed::new().await;
    bed.set("purge.every", "1s");
    remember(&bed, 5, "60 days").await;
    let failed_at = (Utc::now() - TimeDelta::days(40)).to_rfc3339();
    bed.broker
        .send("", &bed.broker.failure_queue(), b"no event", with_headers(&[("failed-at", text(&failed_at))]))
        .await;
    let service = bed.spawn(&["consume"]);
    service.has_said("purge").await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.has_processed(6).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
    bed.has_processed(1).await; // the queue is empty, and the next purge works
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.remove().await;
}
