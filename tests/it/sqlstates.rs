//! Whose fault an error of the database is, told by its SQLSTATE.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Order, TestBed, eventually_within};

/// A bed whose messages have no second attempt, so that the failure queue shows who was charged with one.
async fn strict_bed() -> TestBed {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed
}

/// A trigger's body that raises one state for each quantity.
fn raise_by_quantity(states: &[&str]) -> String {
    let arms = states.iter().zip(1000..).map(|(state, quantity)| {
        format!("if new.quantity = {quantity} then raise 'scripted' using errcode = '{state}'; end if;")
    });
    arms.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_data_does_wrong_is_permanent_and_what_else_an_event_does_is_retried() {
    let bed = strict_bed().await;
    let permanent = ["23514", "22003", "23505", "22P02", "23502", "23P01", "22012"];
    let retried = ["P0001", "23503", "25P02", "42601", "42883", "0L000", "21000"];
    let states: Vec<_> = permanent.into_iter().chain(retried).collect();
    bed.on_reservation(&raise_by_quantity(&states)).await;
    let orders: Vec<_> = states.iter().zip(1000..).map(|(_, quantity)| Order::of(&quantity.to_string())).collect();
    let innocents = Order::many(20);
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(&innocents).map(Order::body)).await;
    bed.drain().await;
    assert_eq!(bed.processed().await, 20);
    let failed = bed.broker.failed(14).await;
    for (order, state) in orders.iter().zip(&states) {
        let copy = failed.iter().find(|copy| copy.body == order.body().as_bytes()).expect("its copy");
        let expected = if permanent.contains(state) { "rejected" } else { "retries-exhausted" };
        assert_eq!(copy.text("failure-reason"), expected, "{state}");
        assert!(copy.text("failure-detail").contains(state), "{}", copy.text("failure-detail"));
        assert_eq!(copy.number("failed-attempts"), 1, "{state}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contention_is_run_again_in_place() {
    for state in ["40001", "40P01", "55P03", "57014"] {
        let bed = strict_bed().await;
        bed.on_reservation(&format!(
            "if nextval('hits') <= 4 then raise 'scripted' using errcode = '{state}'; end if;"
        ))
        .await;
        let order = Order::new(1);
        bed.broker.publish(Order::EVENT, order.body()).await;
        bed.drain().await;
        assert_eq!(bed.reservations_of(&order).await, 1, "{state}");
        assert_eq!(bed.count("select last_value from hits").await, 5, "{state}");
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_does_not_fit_its_session_is_run_again_on_another() {
    for state in ["0A000", "26000", "42P05"] {
        let bed = strict_bed().await;
        bed.execute("create sequence session").await; // remembers, for a rollback does not undo it
        bed.on_reservation(&format!(
            "if nextval('hits') <= 2 then
                 perform setval('session', pg_backend_pid());
                 raise 'scripted' using errcode = '{state}';
             end if;
             if (select last_value from session) = pg_backend_pid() then raise 'the same session'; end if;"
        ))
        .await;
        let order = Order::new(1);
        bed.broker.publish(Order::EVENT, order.body()).await;
        bed.drain().await;
        assert_eq!(bed.reservations_of(&order).await, 1, "{state}");
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn contention_without_end_is_the_events_own() {
    let bed = strict_bed().await;
    bed.on_reservation("if new.quantity = 666 then raise 'scripted' using errcode = '40001'; end if;").await;
    let (bad, innocents) = (Order::of("666"), Order::many(10));
    bed.broker.publish_all(Order::EVENT, [&bad].into_iter().chain(&innocents).map(Order::body)).await;
    bed.drain().await;
    assert_eq!(bed.processed().await, 10);
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    assert!(failed[0].text("failure-detail").contains("40001"));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_without_end_is_the_events_own_when_others_go_through() {
    for state in ["55P03", "57014"] {
        let bed = strict_bed().await;
        bed.on_reservation(&format!("if new.quantity = 666 then raise 'scripted' using errcode = '{state}'; end if;"))
            .await;
        let bad = Order::of("666");
        let service = bed.start().await;
        bed.broker.publish(Order::EVENT, bad.body()).await;
        let mut others = 0;
        let begun = Instant::now();
        while bed.broker.depth(&bed.broker.failure_queue()).await == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{state} is never blamed");
            bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
            others += 1;
            bed.has_processed(others).await;
        }
        assert_eq!(bed.broker.failed(1).await[0].text("failure-reason"), "retries-exhausted", "{state}");
        service.stop().await;
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_is_held_like_an_outage_when_nobody_goes_through() {
    let bed = strict_bed().await;
    // Six runs in place are one interruption, and seven of these are more than would prove it to blame if others went
    // through meanwhile.
    bed.on_reservation("if nextval('hits') <= 42 then raise 'scripted' using errcode = '55P03'; end if;").await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    assert_eq!(bed.reservations_of(&order).await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_world_costs_no_attempt() {
    let states = [
        "08006", "28000", "53100", "53200", "53300", "57P01", "57P02", "57P03", "58030", "XX000", "25006", "25P03",
        "3D000", "3F000", "42P01", "42703", "42501",
    ];
    let bed = strict_bed().await;
    // Each order fails twice in its state, and then it goes through.
    let states_by_quantity: String = states
        .iter()
        .zip(1000..)
        .map(|(state, quantity)| {
            format!(
                "if new.quantity = {quantity} and nextval('hits') % 3 <> 0 then
                     raise 'scripted' using errcode = '{state}';
                 end if;"
            )
        })
        .collect();
    bed.on_reservation(&states_by_quantity).await;
    let service = bed.start().await;
    for ((state, quantity), processed) in states.iter().zip(1000..).zip(1..) {
        bed.broker.publish(Order::EVENT, Order::of(&quantity.to_string()).body()).await;
        let done = async || {
            assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "{state} was charged");
            bed.processed().await == processed
        };
        eventually_within(Duration::from_secs(60), state, done).await;
    }
    service.stop().await;
    assert_eq!(bed.reservations().await, 17);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_sets_isolation_durability_and_timeouts_by_itself() {
    let bed = strict_bed().await;
    let name = bed.database_name();
    bed.execute(&format!(
        "alter database {name} set default_transaction_isolation = 'serializable';
         alter database {name} set synchronous_commit = off;
         alter database {name} set lc_messages = 'C'"
    ))
    .await;
    bed.on_reservation(
        "if current_setting('transaction_isolation') <> 'read committed' then raise 'isolation'; end if;
         if current_setting('synchronous_commit') <> 'on' then raise 'durability'; end if;
         if current_setting('statement_timeout') = '0' then raise 'statement_timeout'; end if;
         if current_setting('lock_timeout') = '0' then raise 'lock_timeout'; end if;",
    )
    .await;
    bed.broker.publish_all(Order::EVENT, Order::many(20).iter().map(Order::body)).await;
    bed.drain().await;
    let failed = bed.broker.take(&bed.broker.failure_queue()).await;
    assert!(failed.is_empty(), "{}", failed[0].text("failure-detail"));
    assert_eq!(bed.processed().await, 20);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_kills_its_session_is_blamed_after_30_seconds_and_holds_up_nobody() {
    let bed = strict_bed().await;
    bed.on_reservation("if new.quantity = 666 then perform pg_terminate_backend(pg_backend_pid()); end if;").await;
    let (killer, innocents) = (Order::of("666"), Order::many(100));
    let service = bed.start().await;
    let begun = Instant::now();
    let orders = innocents[..50].iter().chain([&killer]).chain(&innocents[50..]);
    bed.broker.publish_all(Order::EVENT, orders.map(Order::body)).await;
    bed.has_processed(100).await;
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(15), "the others were held up for {waited:?}");
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "an outage looks the same for a while");
    // Whom to blame shows only while others go through.
    let mut others = 100;
    while bed.broker.depth(&bed.broker.failure_queue()).await == 0 {
        assert!(begun.elapsed() < Duration::from_secs(150), "it is never blamed");
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        others += 1;
        let published = Instant::now();
        bed.has_processed(others).await;
        let waited = published.elapsed();
        assert!(waited < Duration::from_secs(10), "another one was held up for {waited:?}");
    }
    assert!(begun.elapsed() >= Duration::from_secs(30), "blamed after {:?}", begun.elapsed());
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].body, killer.body().into_bytes());
    assert_eq!(failed[0].text("failure-reason"), "retries-exhausted");
    service.stop().await;
    bed.finish().await;
}
