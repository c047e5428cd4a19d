//! A start on empty, missing, unfit and slow servers.

use std::time::Duration;

use lapin::types::AMQPValue;

use crate::support::{Order, Proxy, Scripted, Servers, TestBed, eventually, text};

#[tokio::test(flavor = "multi_thread")]
async fn five_replicas_start_at_once_on_empty_servers() {
    let mut bed = TestBed::bare().await;
    bed.set("consume.workers", "1");
    let replicas = [(); 5].map(|()| bed.spawn(&["consume"]));
    eventually("all consume", async || bed.broker.consumers().await == 5).await;
    bed.broker.publish_all(Order::EVENT, Order::many(50).iter().map(Order::body)).await;
    bed.has_processed(50).await;
    for replica in &replicas {
        replica.signal("TERM").await;
    }
    for replica in replicas {
        let end = replica.end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        assert!(!end.stderr.contains("\"ERROR\""), "{}", end.stderr);
    }
    assert_eq!(bed.reservations().await, 50);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_declare_a_missing_queue_is_named_and_waited_for() {
    let mut bed = TestBed::bare().await;
    bed.set("amqp.declare", "false");
    let mut service = bed.spawn(&["consume"]);
    service.has_said(&bed.broker.queue()).await;
    service.has_said("amqp.declare").await;
    assert!(service.is_running());
    assert!(!bed.broker.exists(&bed.broker.queue()).await, "nothing was declared");
    bed.declare().await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.finish().await;
}

/// A queue that exists with other arguments: nothing is deleted, the queue and the argument are named, and the service
/// starts as soon as it fits.
async fn names_and_waits(queue: impl Fn(&TestBed) -> String, arguments: &[(&str, AMQPValue)]) {
    let bed = TestBed::bare().await;
    let queue = queue(&bed);
    bed.broker.declare(&queue, arguments).await;
    bed.broker.send("", &queue, b"kept", crate::support::persistent()).await;
    let mut service = bed.spawn(&["consume"]);
    service.has_said("inequivalent arg 'x-").await;
    service.has_said(&queue).await;
    assert!(service.is_running(), "it goes on waiting");
    assert_eq!(bed.broker.take(&queue).await.len(), 1, "nothing is deleted");
    bed.broker.delete(&queue).await; // the operator's decision
    eventually("it consumes", async || bed.broker.consumers().await > 0).await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_another_type_is_named_and_not_touched() {
    names_and_waits(|bed| bed.broker.queue(), &[("x-queue-type", text("classic"))]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_another_limit_is_named_and_not_touched() {
    let arguments = [("x-queue-type", text("quorum")), ("x-delivery-limit", AMQPValue::LongInt(7))];
    names_and_waits(|bed| bed.broker.queue(), &arguments).await;
    names_and_waits(|bed| bed.broker.failure_queue(), &arguments).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_queue_with_another_delay_is_named_and_not_touched() {
    let arguments = [("x-queue-type", text("quorum")), ("x-message-ttl", AMQPValue::LongInt(3_600_000))];
    names_and_waits(|bed| bed.broker.retry_queue(50), &arguments).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unfit_queue_can_be_taken_as_it_is() {
    let mut bed = TestBed::new().await;
    bed.broker.delete(&bed.broker.queue()).await;
    bed.broker.declare(&bed.broker.queue(), &[("x-max-length", AMQPValue::LongInt(100))]).await;
    bed.broker.bind(&bed.broker.queue(), Order::EVENT).await;
    bed.set("amqp.declare", "false");
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.drain_with(Scripted::apply()).await;
    assert_eq!(bed.processed().await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_must_not_migrate_waits_for_its_schema() {
    let mut bed = TestBed::bare().await;
    bed.set("database.migrate_on_start", "false");
    bed.set_ladder(0, 50);
    bed.declare().await;
    bed.broker.publish_all(Order::EVENT, Order::many(20).iter().map(Order::body)).await;
    let service = bed.spawn(&["consume"]);
    service.has_said("processed_event").await;
    let end = bed.spawn(&["migrate"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    bed.has_processed(20).await;
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_takes_no_connections_yet_is_waited_for() {
    let bed = TestBed::bare().await;
    let name = bed.database_name();
    bed.execute_beside(&format!("alter database {name} with allow_connections false")).await;
    bed.declare().await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    let mut service = bed.spawn(&["consume"]);
    service.has_said("not currently accepting connections").await;
    assert!(service.is_running());
    bed.execute_beside(&format!("alter database {name} with allow_connections true")).await;
    eventually("it works", async || {
        bed.text("select to_regclass('reservation')::text").await.is_some() && bed.reservations().await == 1
    })
    .await;
    service.signal("TERM").await;
    assert_eq!(service.end().await.code(), Some(0));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_the_broker_ends_is_opened_again() {
    let bed = TestBed::new().await;
    let service = bed.start().await;
    for n in 1..=3 {
        bed.broker.delete(&bed.broker.queue()).await;
        eventually("the queue is declared again and consumed", async || bed.broker.consumers().await > 0).await;
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        bed.has_processed(n).await;
    }
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_at_the_database_is_named_and_not_hammered() {
    let mut bed = TestBed::new().await;
    let user = bed.demote().await;
    let proxy = Proxy::before(bed.variable("STOCK__DATABASE__URL")).await;
    bed.set("database.url", proxy.url());
    bed.execute(&format!("alter role {user} nologin")).await;
    bed.set("database.migrate_on_start", "false");
    let begun = std::time::Instant::now();
    let service = bed.spawn(&["consume"]);
    service.has_said("SQLSTATE 28000").await;
    eventually("a second attempt", async || proxy.accepted() >= 2).await;
    // Ten a minute are one in 6 s.
    assert!(begun.elapsed() > Duration::from_secs(6), "{:?}", begun.elapsed());
    bed.execute(&format!("alter role {user} login")).await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0));
    assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_may_have_any_characters_when_its_url_is_encoded() {
    const PASSWORD: &str = "p@ss:w/rd#%?é";

    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    let user = bed.demote().await;
    bed.execute(&format!("alter role {user} password '{PASSWORD}'")).await;
    servers.rabbitmqctl(&["add_user", &user, PASSWORD]).await;
    servers.rabbitmqctl(&["set_permissions", &user, "", ".*", ".*"]).await;
    for (key, original) in [("database.url", "DATABASE_URL"), ("amqp.url", "AMQP_URL")] {
        let mut url = url::Url::parse(bed.variable(original)).expect("a URL");
        url.set_username(&user).expect("a user");
        url.set_password(Some(PASSWORD)).expect("a password"); // which encodes it
        bed.set(key, url.as_str());
    }
    bed.set("database.migrate_on_start", "false");
    bed.set("amqp.declare", "false");
    bed.broker.publish_all(Order::EVENT, [Order::new(1).body(), "no event".to_owned()]).await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.processed().await, 1);
    bed.broker.failed(1).await;
    bed.finish().await;
}
