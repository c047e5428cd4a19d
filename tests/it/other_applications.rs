//! What others set for the database, and do in it, does not change what the service does.

use sqlx::AssertSqlSafe;
use stock_service::db::Database;

use crate::support::{Order, TestBed, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn a_stricter_isolation_by_default_fails_no_event_and_doubles_none() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed.set("consume.batch_size", "20");
    let name = bed.database_name();
    bed.execute(&format!("alter database {name} set default_transaction_isolation = 'serializable'")).await;
    // Slow, so that the replicas meet.
    bed.on_reservation(
        "if current_setting('transaction_isolation') <> 'read committed' then raise 'not its own isolation'; end if;
         perform pg_sleep(0.001);",
    )
    .await;
    let orders = Order::many(500);
    let twice: Vec<_> = orders.iter().flat_map(|order| [order.body(), order.body()]).collect();
    bed.broker.publish_all(Order::EVENT, twice).await;
    let replicas = [bed.start().await, bed.start().await];
    bed.has_processed(500).await;
    for replica in replicas {
        replica.stop().await;
    }
    bed.drain().await; // the last copies
    assert_eq!((bed.processed().await, bed.reservations().await), (500, 500));
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn timeouts_that_are_set_for_the_role_do_not_bind_the_service() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let user = bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    bed.execute(&format!(
        "alter role {user} set statement_timeout = '100ms';
         alter role {user} set lock_timeout = '100ms';
         alter role {user} set idle_in_transaction_session_timeout = '100ms'"
    ))
    .await;
    bed.on_reservation("perform nextval('hits'), pg_sleep(0.5);").await;
    bed.execute(&format!("grant usage on sequence hits to {user}")).await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    assert_eq!(bed.reservations_of(&order).await, 1);
    assert_eq!(bed.count("select last_value from hits").await, 1, "it went through at once");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_victim_of_a_deadlock_with_another_application_is_run_again() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    let user = bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    // Whose patience ends first is the victim.
    bed.execute(&format!("alter role {user} set deadlock_timeout = '10ms'")).await;
    // The other one holds something, waits for the order that the service has locked, and then the service wants it, too.
    let mut other = bed.side_session("select pg_advisory_xact_lock(7)").await;
    let session: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut other).await.expect("a session");
    bed.on_reservation(&format!(
        "if nextval('hits') = 1 then
             while cardinality(pg_blocking_pids({session})) = 0 loop perform pg_sleep(0.01); end loop;
         end if;
         perform pg_advisory_xact_lock(7);"
    ))
    .await;
    bed.execute(&format!("grant usage on sequence hits to {user}")).await;
    let service = bed.start().await;
    let again = Order { event_id: crate::support::id(), ..order.clone() };
    bed.broker.publish(Order::EVENT, again.body()).await;
    let has_the_order = "select count(*) from hits where is_called";
    eventually("the service has locked the order", async || bed.count(has_the_order).await == 1).await;
    let lock = format!("select from order_status where order_id = '{}' for update; commit", order.order_id);
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut other).await.expect("the service is the victim");
    bed.has_processed(2).await;
    service.stop().await;
    assert_eq!(bed.deadlocks().await, 1);
    assert_eq!(bed.reservations_of(&order).await, 2);
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_statement_cache_no_name_of_a_statement_is_taken_already() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    let url = format!("{}?statement-cache-capacity=0", bed.variable("DATABASE_URL"));
    bed.set("database.url", &url);
    // Behind a pooling proxy a session comes with what its last user has left in it.
    let database = Database::new(&bed.settings().database, 1);
    let mut transaction = database.begin().await.expect("a transaction");
    for n in 1..100 {
        let prepare = AssertSqlSafe(format!("prepare sqlx_s_{n} as select"));
        sqlx::raw_sql(prepare).execute(transaction.connection()).await.expect("a statement");
    }
    transaction.commit().await.expect("a commit");
    let mut transaction = database.begin().await.expect("a transaction");
    let statements = sqlx::query_scalar("select count(*) from pg_prepared_statements");
    let statements: i64 = statements.fetch_one(transaction.connection()).await.expect("a name that is free");
    assert_eq!(statements, 1, "its own");
    transaction.commit().await.expect("a commit");
    database.close().await;
    bed.finish().await;
}
