//! Nothing is acknowledged as done unless its own transaction was really committed.

use crate::support::{Order, Scripted, Step, TestBed};

/// The first attempt meets the step, the retry none: the event must end up applied.
async fn is_applied_by_the_retry(step: Step) {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    let script = Scripted::new(move |_, before| if before == 0 { step.clone() } else { Step::Apply });
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.has_processed(1).await;
    service.stop().await;
    assert_eq!(script.attempts(&order.event_id).len(), 2, "the first attempt was no success");
    assert_eq!(bed.reservations_of(&order).await, 2);
    bed.finish().await;
}

/// Every attempt meets the step: after the budget the event is in the failure queue, and nothing in the database.
async fn is_never_done(step: Step) {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 50);
    let (bad, innocents) = (Order::new(2), Order::many(5));
    let script = Scripted::only(&bad.event_id, move |_| step.clone());
    let service = bed.start_with(script).await;
    bed.broker.publish_all(Order::EVENT, [&bad].into_iter().chain(&innocents).map(Order::body)).await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].body, bad.body().into_bytes());
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    bed.has_processed(5).await;
    service.stop().await;
    assert_eq!(bed.reservations_of(&bad).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_swallowed_sql_error_is_never_acknowledged() {
    is_never_done(Step::Swallow("select 1/0")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_whose_error_was_swallowed_once_is_applied_by_the_retry() {
    is_applied_by_the_retry(Step::Swallow("select 1/0")).await;
    is_applied_by_the_retry(Step::SwallowFirst("insert into processed_event select event_id from processed_event"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_rolls_back_is_never_acknowledged_as_done() {
    is_never_done(Step::Swallow("rollback")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_was_rolled_back_once_is_applied_by_the_retry() {
    is_applied_by_the_retry(Step::Swallow("rollback")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_rolls_back_and_begins_anew_is_never_acknowledged_as_done() {
    is_never_done(Step::Swallow("rollback and chain")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_was_rolled_back_and_begun_anew_is_applied_by_the_retry() {
    is_applied_by_the_retry(Step::Swallow("rollback and chain")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_commits_is_not_acknowledged_as_done() {
    for commit in ["commit", "commit and chain"] {
        let mut bed = TestBed::new().await;
        bed.set_ladder(1, 3_600_000);
        let order = Order::new(2);
        let script = Scripted::new(move |_, before| if before == 0 { Step::Swallow(commit) } else { Step::Apply });
        bed.broker.publish(Order::EVENT, order.body()).await;
        bed.drain_with(script.clone()).await;
        let retried = bed.broker.take(&bed.broker.retry_queue(3_600_000)).await;
        assert_eq!(retried.len(), 1, "{commit}: the first attempt was no success");
        // What it committed cannot be undone; the guard knows it.
        bed.broker.send_to(&bed.broker.queue(), &retried[0]).await;
        bed.drain_with(script.clone()).await;
        assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (1, 2), "{commit}");
        bed.finish().await;
    }
}

/// A constraint of the test's own that is checked at the commit, and is broken with this SQLSTATE as long as the
/// condition holds.
async fn deferred(bed: &TestBed, sqlstate: &str, condition: &str) {
    bed.execute(&format!(
        "create sequence hits;
         create function refuse() returns trigger language plpgsql as $fault$
         begin if {condition} then raise 'deferred' using errcode = '{sqlstate}'; end if; return null; end $fault$;
         create constraint trigger refuse after insert on reservation deferrable initially deferred
         for each row execute function refuse()"
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constraint_that_is_checked_at_the_commit_is_a_failure_of_the_event() {
    for (sqlstate, reason) in [("23514", "rejected"), ("23503", "retries-exhausted")] {
        let mut bed = TestBed::new().await;
        bed.set_ladder(1, 50);
        deferred(&bed, sqlstate, "new.quantity = 666").await;
        let (bad, innocents) = (Order::of("666"), Order::many(10));
        let service = bed.start().await;
        let orders = innocents[..5].iter().chain([&bad]).chain(&innocents[5..]);
        bed.broker.publish_all(Order::EVENT, orders.map(Order::body)).await;
        let failed = bed.broker.failed(1).await;
        assert_eq!(failed[0].text("failure-reason"), reason, "{sqlstate}");
        assert!(failed[0].text("failure-detail").contains(sqlstate), "{}", failed[0].text("failure-detail"));
        bed.has_processed(10).await;
        service.stop().await;
        assert_eq!(bed.reservations().await, 10, "{sqlstate}");
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serialization_failure_at_the_commit_is_run_again_in_place() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    deferred(&bed, "40001", "nextval('hits') <= 3").await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations_of(&order).await), (1, 1));
    bed.finish().await;
}
