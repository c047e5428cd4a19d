//! What the running service says of itself over HTTP, and to its container.

use std::collections::BTreeSet;

use stock_service::telemetry::Metrics;

use crate::support::{Endpoint, Order, Process, StatusChange, TestBed, eventually};

/// Starts the binary with an endpoint of its own.
async fn listening(bed: &mut TestBed) -> (Process, Endpoint) {
    bed.set("http.listen", "127.0.0.1:0");
    let process = bed.spawn(&["consume"]);
    let endpoint = Endpoint::of(&process).await;
    (process, endpoint)
}

/// Starts the binary with an endpoint of its own, and waits until it is ready.
pub async fn ready(bed: &mut TestBed) -> (Process, Endpoint) {
    let (process, endpoint) = listening(bed).await;
    endpoint.is_ready(true).await;
    (process, endpoint)
}

pub async fn ends(process: Process) {
    process.signal("TERM").await;
    assert_eq!(process.end().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_consumes_is_ready_and_live() {
    let mut bed = TestBed::new().await;
    let (process, endpoint) = ready(&mut bed).await;
    assert_eq!(bed.broker.consumers().await, 1);
    assert_eq!(endpoint.get("/readyz").await.1, r#"{"ready":true,"not_ready":[],"warnings":[]}"#);
    assert_eq!(endpoint.get("/livez").await, (200, r#"{"live":true,"fatal":[]}"#.to_owned()));
    assert_eq!(endpoint.get("/elsewhere").await.0, 404);
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_broker_it_is_live_and_not_ready_and_says_why() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.url", "amqp://stock:S3CR3T@127.0.0.1:1/%2f");
    let (process, endpoint) = listening(&mut bed).await;
    let cause = endpoint.is_not_ready_for("broker").await;
    assert!(!cause.contains("S3CR3T"), "{cause}");
    assert_eq!(endpoint.get("/livez").await.0, 200);
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_service_notices_that_its_database_is_away_and_that_it_is_back() {
    let mut bed = TestBed::new().await;
    let name = bed.database_name();
    let (process, endpoint) = ready(&mut bed).await;
    bed.execute_beside(&format!("alter database {name} with allow_connections false")).await;
    bed.execute_beside(&format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity
         where datname = '{name}' and application_name = 'stock-service'"
    ))
    .await;
    let cause = endpoint.is_not_ready_for("database").await;
    assert!(cause.contains("SQLSTATE") || cause.contains("terminat"), "{cause}");
    assert_eq!(endpoint.get("/livez").await.0, 200);
    bed.execute_beside(&format!("alter database {name} with allow_connections true")).await;
    endpoint.is_ready(true).await;
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_holds_is_not_ready_and_its_messages_and_their_cause_are_counted() {
    let mut bed = TestBed::new().await;
    bed.set("database.timeout", "1s");
    bed.set("consume.workers", "1");
    let (process, endpoint) = ready(&mut bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    let cause = endpoint.is_not_ready_for("worker 0").await;
    assert!(cause.contains("SQLSTATE 5"), "{cause}");
    assert_eq!(endpoint.metric(r#"stock_service_held{cause="timeout"}"#).await, 1.0);
    assert_eq!(endpoint.metric("stock_service_ready").await, 0.0);
    // Either of the two timeouts may come first.
    let timeouts = r#"stock_service_transaction_failures_total{fault="contention",class="5"#;
    assert!(endpoint.get("/metrics").await.1.contains(timeouts));
    drop(lock);
    bed.has_processed(1).await;
    endpoint.is_ready(true).await;
    assert_eq!(endpoint.metric(r#"stock_service_held{cause="timeout"}"#).await, 0.0);
    assert_eq!(endpoint.metric("stock_service_ready").await, 1.0);
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_stuck_in_a_transaction_is_not_ready_before_that_has_timed_out() {
    let mut bed = TestBed::new().await;
    let (process, endpoint) = ready(&mut bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.blocked(1).await;
    let cause = endpoint.is_not_ready_for("worker 0").await;
    assert!(cause.contains("one step"), "{cause}");
    assert_eq!(endpoint.get("/livez").await.0, 200, "it can still come through by itself");
    drop(lock);
    endpoint.is_ready(true).await;
    assert_eq!(bed.processed().await, 1);
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_ended_is_not_ready_until_there_is_another() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    let (process, endpoint) = ready(&mut bed).await;
    bed.broker.delete(&bed.broker.queue()).await;
    let cause = endpoint.is_not_ready_for("broker").await;
    assert!(!cause.is_empty());
    bed.declare().await;
    endpoint.is_ready(true).await;
    assert!(endpoint.metric(r#"stock_service_reconnects_total{connection="consume"}"#).await >= 1.0);
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_that_cannot_be_placed_are_a_warning_for_all_else_goes_on() {
    let mut bed = TestBed::new().await;
    bed.set("amqp.declare", "false");
    let (process, endpoint) = ready(&mut bed).await;
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.publish(Order::EVENT, "no event").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    let warned = async || endpoint.get("/readyz").await.1.contains(r#""warnings":[{"part":"copies""#);
    eventually("a warning", warned).await;
    assert_eq!(endpoint.get("/readyz").await.0, 200);
    assert_eq!(endpoint.metric(r#"stock_service_held{cause="copy"}"#).await, 1.0);
    assert!(endpoint.metric(r#"stock_service_copies_total{result="returned"}"#).await >= 1.0);
    bed.declare().await;
    bed.broker.has(&bed.broker.failure_queue(), 1).await;
    let calm = async || endpoint.get("/readyz").await.1.contains(r#""warnings":[]"#);
    eventually("no warning any more", calm).await;
    assert_eq!(endpoint.metric(r#"stock_service_held{cause="copy"}"#).await, 0.0);
    ends(process).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_stopping_is_live_and_not_ready() {
    let mut bed = TestBed::new().await;
    let (process, endpoint) = ready(&mut bed).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.blocked(1).await;
    process.signal("TERM").await;
    endpoint.is_not_ready_for("service").await;
    assert_eq!(endpoint.get("/livez").await.0, 200);
    drop(lock);
    assert_eq!(process.end().await.code(), Some(0));
    assert_eq!(bed.processed().await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_ends_the_start_and_names_the_setting() {
    let mut bed = TestBed::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    bed.set("http.listen", &taken.local_addr().expect("an address").to_string());
    let end = bed.spawn(&["consume"]).end().await;
    assert_eq!(end.code(), Some(1));
    assert!(end.stderr.contains("http.listen") && end.stderr.contains("in use"), "{}", end.stderr);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_asks_the_running_worker() {
    let mut bed = TestBed::new().await;
    let (process, endpoint) = ready(&mut bed).await;
    bed.set("http.listen", &endpoint.address());
    for arguments in [&["health"][..], &["health", "--live"]] {
        let end = bed.spawn(arguments).end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        assert!(end.stdout.starts_with('{'), "{}", end.stdout);
    }
    bed.broker.delete(&bed.broker.queue()).await;
    ends(process).await;
    let end = bed.spawn(&["health"]).end().await;
    assert_eq!(end.code(), Some(1), "nobody is there");
    assert!(end.stderr.contains(&endpoint.address()) && end.stderr.contains("http.listen"), "{}", end.stderr);
    bed.set("http.listen", "off");
    let end = bed.spawn(&["health"]).end().await;
    assert_eq!(end.code(), Some(1));
    assert!(end.stderr.contains("http.listen is off"), "{}", end.stderr);
    bed.declare().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_fails_while_the_worker_is_not_ready() {
    let mut bed = TestBed::new().await;
    let name = bed.database_name();
    bed.execute_beside(&format!("alter database {name} with allow_connections false")).await;
    let (process, endpoint) = listening(&mut bed).await;
    bed.set("http.listen", &endpoint.address());
    let end = bed.spawn(&["health"]).end().await;
    assert_eq!(end.code(), Some(1));
    assert!(end.stdout.contains("\"ready\":false") && end.stderr.contains("503"), "{}{}", end.stdout, end.stderr);
    assert_eq!(bed.spawn(&["health", "--live"]).end().await.code(), Some(0), "an outage is no reason to restart it");
    bed.execute_beside(&format!("alter database {name} with allow_connections true")).await;
    ends(process).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_each_delivery_is_counted() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 50);
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
    let (process, endpoint) = listening(&mut bed).await;
    let orders = Order::many(10);
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(&orders[..3]).map(Order::body)).await;
    bed.broker.publish(StatusChange::EVENT, StatusChange::new(&orders[0], "paid", 1).body()).await;
    bed.broker.publish(Order::EVENT, Order::of("666").body()).await;
    bed.broker.publish_all(Order::EVENT, ["no event".to_owned(), "{}".to_owned()]).await;
    bed.has_processed(11).await;
    bed.broker.has(&bed.broker.failure_queue(), 3).await;
    for (series, value) in [
        (r#"stock_service_deliveries_total{event="order.order.placed.v1",outcome="applied"}"#, 10.0),
        (r#"stock_service_deliveries_total{event="order.order.placed.v1",outcome="duplicate"}"#, 3.0),
        (r#"stock_service_deliveries_total{event="order.order.placed.v1",outcome="retried"}"#, 1.0),
        (r#"stock_service_deliveries_total{event="order.order.placed.v1",outcome="parked"}"#, 1.0),
        (r#"stock_service_deliveries_total{event="order.order.status_changed.v1",outcome="applied"}"#, 1.0),
        (r#"stock_service_deliveries_total{event="other",outcome="parked"}"#, 2.0),
        (r#"stock_service_failures_total{reason="malformed"}"#, 2.0),
        (r#"stock_service_failures_total{reason="retries-exhausted"}"#, 1.0),
        (r#"stock_service_lag_seconds_count"#, 11.0),
        (r#"stock_service_copies_total{result="confirmed"}"#, 4.0),
    ] {
        eventually(&format!("{series} is {value}"), async || endpoint.metric(series).await == value).await;
    }
    for series in [
        "stock_service_batch_size_count",
        r#"stock_service_step_seconds_count{step="guard"}"#,
        r#"stock_service_step_seconds_count{step="handlers"}"#,
        r#"stock_service_step_seconds_count{step="commit"}"#,
        r#"stock_service_step_seconds_count{step="settlement"}"#,
        "stock_service_last_delivery_timestamp_seconds",
    ] {
        assert!(endpoint.metric(series).await > 0.0, "{series}");
    }
    ends(process).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_make_no_series_whatever_they_say() {
    let mut bed = TestBed::new().await;
    let (process, endpoint) = listening(&mut bed).await;
    let series = async || endpoint.get("/metrics").await.1.lines().filter(|line| !line.starts_with('#')).count();
    endpoint.is_ready(true).await;
    let before = series().await;
    let bodies: Vec<_> = (0..500)
        .map(|n| Order::new(1).body().replace(Order::EVENT, &format!("order.made.up.v{n}")))
        .chain((0..500).map(|n| format!("{{\"{n}\":")))
        .collect();
    bed.broker.publish_all(Order::EVENT, bodies).await;
    bed.broker.has(&bed.broker.failure_queue(), 1_000).await;
    assert_eq!(series().await, before);
    ends(process).await;
    assert_eq!(bed.broker.take(&bed.broker.failure_queue()).await.len(), 1_000);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scheduled_purge_is_counted() {
    let mut bed = TestBed::new().await;
    bed.set("purge.every", "1s");
    bed.execute(
        "insert into processed_event (event_id, processed_at)
         select gen_random_uuid(), now() - interval '31 days' from generate_series(1, 7)",
    )
    .await;
    let (process, endpoint) = listening(&mut bed).await;
    let rows = async || endpoint.metric("stock_service_purged_rows_total").await == 7.0;
    eventually("7 rows are counted", rows).await;
    let done = async || endpoint.metric(r#"stock_service_purges_total{result="done"}"#).await >= 1.0;
    eventually("the purge is counted", done).await;
    assert!(endpoint.metric("stock_service_last_purge_timestamp_seconds").await > 0.0);
    ends(process).await;
    bed.remove().await; // the audit knows nothing of rows that a test wrote
}

#[test]
fn every_metric_is_documented_by_its_name_type_and_help() {
    let text = Metrics::default().to_text();
    let words = |kind: &str| -> Vec<(String, String)> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("# {kind} stock_service_")));
        lines.filter_map(|line| line.split_once(' ')).map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
    };
    let types = words("TYPE");
    let expected: BTreeSet<_> = words("HELP")
        .into_iter()
        .map(|(name, help)| {
            let kind = types.iter().find(|(other, _)| *other == name).map(|(_, kind)| kind.as_str()).expect("a type");
            // The page adds this to the name of a counter's series, and the version to its own.
            let suffix = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            (format!("stock_service_{name}{suffix}"), kind.to_owned(), help.trim_end_matches('.').to_owned())
        })
        .collect();
    assert!(expected.len() > 12, "{expected:?}");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/OPERATION.md");
    let document = std::fs::read_to_string(path).expect("the document");
    let documented: BTreeSet<_> = document
        .lines()
        .filter_map(|line| {
            let cells: Vec<_> = line.strip_prefix("| `stock_service_")?.split(" | ").collect();
            let name = cells[0].split(['`', '{']).next()?;
            let help = cells[2].trim_end_matches(" |");
            Some((format!("stock_service_{name}"), cells[1].to_owned(), help.to_owned()))
        })
        .collect();
    assert_eq!(documented, expected);
}
