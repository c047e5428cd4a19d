//! A transaction is whole or nothing, is told by its first fault, and never lives on in somebody else's.

use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use stock_service::db::Database;
use stock_service::handlers::Handlers;
use stock_service::inbox::{Dispatch, Fresh};
use stock_service::message::Stop;

use crate::support::{Order, Proxy, TestBed, Way, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn an_order_whose_session_is_killed_in_the_middle_is_there_whole_or_not_at_all() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let service = bed.start().await;
    // Each line takes its time, so that there is a middle.
    bed.on_reservation("perform nextval('hits'), pg_sleep(0.005);").await;
    for round in 1..=20 {
        let order = Order::new(50);
        bed.broker.publish(Order::EVENT, order.body()).await;
        let lines_before = bed.count("select last_value from hits").await;
        let in_the_middle = async || bed.count("select last_value from hits").await >= lines_before + 10;
        eventually("it is in the middle", in_the_middle).await;
        bed.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and application_name = 'stock-service'",
        )
        .await;
        while bed.processed().await < round {
            let lines = bed.reservations_of(&order).await;
            assert!(lines == 0 || lines == 50, "{lines} of 50 lines");
        }
        assert_eq!(bed.reservations_of(&order).await, 50);
    }
    service.stop().await;
    assert!(bed.count("select last_value from hits").await > 20 * 50 + 20 * 10, "they were not disturbed");
    bed.finish().await;
}

/// The real handlers; when they fail, the session is killed before anybody can roll back.
struct KilledAfterFailure(PgPool);

impl Dispatch for KilledAfterFailure {
    async fn dispatch(&self, conn: &mut PgConnection, fresh: &[Fresh<'_>]) -> Result<(), Stop> {
        let session: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *conn).await?;
        let result = Handlers.dispatch(conn, fresh).await;
        if result.is_err() {
            sqlx::query("select pg_terminate_backend($1, 10000)").bind(session).execute(&self.0).await?;
        }
        result
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_cause_is_told_when_the_rollback_fails_too() {
    let bed = TestBed::new().await;
    bed.on_reservation("if new.quantity = 666 then raise 'scripted' using errcode = '23514'; end if;").await;
    let (bad, good) = (Order::of("666"), Order::new(1));
    bed.broker.publish_all(Order::EVENT, [&bad, &good].map(Order::body)).await;
    bed.drain_with(KilledAfterFailure(bed.pool.clone())).await;
    let failed = bed.broker.failed(1).await;
    assert_eq!(failed[0].text("failure-reason"), "rejected");
    assert!(failed[0].text("failure-detail").contains("23514"), "{}", failed[0].text("failure-detail"));
    assert_eq!((bed.processed().await, bed.reservations_of(&good).await), (1, 1));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_before_leaves_no_transaction_open_around_what_comes_after() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed.set("consume.workers", "1");
    bed.on_reservation("if new.quantity = 666 then raise 'scripted' using errcode = '23514'; end if;").await;
    let service = bed.start().await;
    for n in 1..=50 {
        let (bad, good) = (Order::of("666"), Order::new(1));
        bed.broker.publish(Order::EVENT, bad.body()).await;
        bed.broker.publish(Order::EVENT, good.body()).await;
        bed.has_processed(n).await; // another session sees it at once
    }
    bed.broker.has(&bed.broker.failure_queue(), 50).await;
    let open = "select count(*) from pg_stat_activity
                where datname = current_database() and application_name = 'stock-service' and xact_start is not null";
    eventually("nobody is in a transaction", async || bed.count(open).await == 0).await;
    service.stop().await;
    bed.broker.failed(50).await;
    assert_eq!(bed.reservations().await, 50);
    bed.finish().await;
}

/// Runs a transaction on this pool of one connection; its session's process.
async fn next_session(database: &Database) -> i32 {
    let mut transaction = database.begin().await.expect("a transaction");
    let session = sqlx::query_scalar("select pg_backend_pid()").fetch_one(transaction.connection()).await;
    transaction.commit().await.expect("a commit");
    session.expect("a transaction that nothing has failed in")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_given_up_on_takes_its_session_with_it() {
    let mut bed = TestBed::new().await;
    let proxy = Proxy::before(bed.variable("DATABASE_URL")).await;
    bed.set("database.url", proxy.url());
    let database = Database::new(&bed.settings().database, 1);
    let open = "select count(*) from pg_stat_activity
                where datname = current_database() and state = 'idle in transaction'";
    let are_open = async |transactions| {
        eventually("the server has done it", async || bed.count(open).await == transactions).await;
    };
    let first = next_session(&database).await;
    assert_eq!(next_session(&database).await, first, "an orderly end gives it back");

    // Dropped in the middle.
    let mut transaction = database.begin().await.expect("a transaction");
    let insert = "insert into processed_event select gen_random_uuid()";
    sqlx::raw_sql(insert).execute(transaction.connection()).await.expect("an insert");
    drop(transaction);
    let second = next_session(&database).await;
    assert_ne!(second, first);

    // While the answer to the begin is on its way.
    proxy.delay(Way::ToClient, Duration::from_secs(1));
    tokio::select! {
        _ = database.begin() => panic!("the answer was not late"),
        () = are_open(1) => {}
    }
    proxy.delay(Way::ToClient, Duration::ZERO);
    let third = next_session(&database).await;
    assert_ne!(third, second);

    // While the answer to the commit is on its way.
    let transaction = database.begin().await.expect("a transaction");
    are_open(1).await;
    proxy.delay(Way::ToClient, Duration::from_secs(1));
    tokio::select! {
        _ = transaction.commit() => panic!("the answer was not late"),
        () = are_open(0) => {}
    }
    proxy.delay(Way::ToClient, Duration::ZERO);
    assert_ne!(next_session(&database).await, third);

    assert_eq!(bed.processed().await, 0, "what was dropped was rolled back");
    database.close().await;
    bed.finish().await;
}
