//! `doctor` finds what is wrong, says what to do about it, and changes nothing.

use std::time::Instant;

use chrono::{TimeDelta, Utc};
use lapin::types::AMQPValue;
use serde_json::Value;
use tokio::net::TcpListener;

use crate::support::{Finished, Order, Servers, TestBed, persistent, text, with_headers};

/// What `doctor --json` said.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    code: Option<i32>,
    findings: Vec<Value>,
}

impl Diagnosis {
    fn of(end: &Finished) -> Self {
        let findings = serde_json::from_str(&end.stdout).unwrap_or_else(|_| panic!("{}{}", end.stdout, end.stderr));
        Self { code: end.code(), findings }
    }

    /// Whether there is such a finding, with these words in it or in its remedy.
    fn has(&self, level: &str, check: &str, words: &str) -> bool {
        self.findings.iter().any(|finding| {
            finding["level"] == level && finding["check"] == check && finding.to_string().contains(words)
        })
    }

    fn assert_has(&self, level: &str, check: &str, words: &str) {
        assert!(self.has(level, check, words), "no {level} of {check} with {words:?} in {:#?}", self.findings);
        let code = if self.errors().is_empty() { 0 } else { 1 };
        assert_eq!(self.code, Some(code), "{:#?}", self.findings);
    }

    fn errors(&self) -> Vec<&Value> {
        self.findings.iter().filter(|finding| finding["level"] == "error").collect()
    }

    /// That is the only error there is.
    fn assert_only_error(&self, check: &str, words: &str) {
        self.assert_has("error", check, words);
        assert_eq!(self.errors().len(), 1, "{:#?}", self.errors());
    }

    /// The check, the finding and the remedy of the only error there is.
    pub(crate) fn only_error(&self) -> (String, String, String) {
        let errors = self.errors();
        assert_eq!((self.code, errors.len()), (Some(1), 1), "{:#?}", self.findings);
        let text = |key: &str| errors[0][key].as_str().expect("a text").to_owned();
        (text("check"), text("finding"), text("remedy"))
    }

    /// There are none but warnings, this one among them.
    fn assert_warns(&self, check: &str, words: &str) {
        self.assert_has("warning", check, words);
        assert!(self.errors().is_empty(), "{:#?}", self.errors());
    }
}

pub(crate) async fn doctor(bed: &TestBed) -> Diagnosis {
    Diagnosis::of(&bed.spawn(&["doctor", "--json"]).end().await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_installation_has_no_error_and_every_finding_that_is_not_ok_has_a_remedy() {
    let bed = TestBed::new().await;
    let diagnosis = doctor(&bed).await;
    assert_eq!((diagnosis.code, diagnosis.errors().len()), (Some(0), 0), "{:#?}", diagnosis.findings);
    for check in [
        "settings",
        "database.reachable",
        "database.version",
        "database.writable",
        "database.defaults",
        "database.connections",
        "database.clock",
        "schema.migrations",
        "schema.tables",
        "broker.reachable",
        "broker.version",
        "broker.topology",
        "broker.publishing",
        "broker.consumer_timeout",
        "messages.waiting",
        "purge.horizon",
    ] {
        diagnosis.assert_has("ok", check, "");
    }
    // Servers for tests may be faster than they are safe.
    let is_durable =
        bed.text("select (current_setting('fsync')::bool and current_setting('full_page_writes')::bool)::text");
    let level = if is_durable.await.as_deref() == Some("true") { "ok" } else { "warning" };
    diagnosis.assert_has(level, "database.durability", "fsync");
    for finding in &diagnosis.findings {
        assert_eq!(finding["remedy"].is_null(), finding["level"] == "ok", "{finding}");
    }
    let end = bed.spawn(&["doctor"]).end().await;
    assert_eq!(end.code(), Some(0));
    for finding in &diagnosis.findings {
        let check = finding["check"].as_str().expect("a name");
        assert!(end.stdout.contains(check), "{check} is not in: {}", end.stdout);
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_declared_migrated_or_moved() {
    let bed = TestBed::bare().await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_warns("schema.migrations", "not applied yet: 1");
    diagnosis.assert_warns("broker.topology", &format!("missing: exchange {}", bed.broker.exchange()));
    for queue in bed.broker.queues() {
        assert!(!bed.broker.exists(&queue).await, "{queue} was declared");
        assert!(diagnosis.has("warning", "broker.topology", &queue), "{queue} is not reported");
    }
    assert_eq!(bed.text("select to_regclass('processed_event')::text").await, None);
    let bed = bed.furnish().await;
    let relations = "select count(*) from pg_class";
    let before = bed.count(relations).await;
    for n in 0..3 {
        let body = format!("waits {n}");
        bed.broker.send("", &bed.broker.queue(), body.as_bytes(), persistent()).await;
        bed.broker.send("", &bed.broker.failure_queue(), body.as_bytes(), persistent()).await;
    }
    doctor(&bed).await.assert_has("ok", "messages.waiting", "3 ready, 0 consumers");
    assert_eq!(bed.count(relations).await, before);
    for queue in [bed.broker.queue(), bed.broker.failure_queue()] {
        bed.broker.has(&queue, 3).await;
        let bodies: Vec<_> = bed.broker.take(&queue).await.into_iter().map(|message| message.body).collect();
        assert_eq!(bodies, [b"waits 0", b"waits 1", b"waits 2"], "{queue}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_service_must_not_do_by_itself_is_an_error_when_it_is_not_done() {
    let mut bed = TestBed::bare().await;
    bed.set("database.migrate_on_start", "false");
    bed.set("amqp.declare", "false");
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_has("error", "schema.migrations", "stock-service migrate");
    diagnosis.assert_has("error", "broker.topology", "amqp.declare");
    diagnosis.assert_has("ok", "broker.bindings", &bed.broker.exchange());
    assert_eq!(diagnosis.errors().len(), 2, "{:#?}", diagnosis.errors());
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_table_is_an_error() {
    let bed = TestBed::new().await;
    bed.execute("alter table reservation rename to away").await;
    doctor(&bed).await.assert_only_error("schema.tables", "reservation");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_index_is_a_warning_and_a_missing_key_an_error() {
    let bed = TestBed::new().await;
    bed.execute("drop index reservation_product_id").await;
    doctor(&bed).await.assert_warns("schema.indexes", "reservation_product_id");
    bed.execute("alter table processed_event drop constraint processed_event_pkey").await;
    doctor(&bed).await.assert_only_error("schema.indexes", "no copy is recognised");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_by_another_name_is_as_good() {
    let bed = TestBed::new().await;
    bed.execute("alter index reservation_product_id rename to by_product").await;
    doctor(&bed).await.assert_has("ok", "schema.tables", "indexes");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_on_a_table_is_an_error_with_the_grant_as_remedy() {
    let mut bed = TestBed::new().await;
    let user = bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    doctor(&bed).await.assert_has("ok", "schema.tables", "");
    bed.execute(&format!(
        "revoke insert, update on reservation from {user}; revoke delete on processed_event from {user}"
    ))
    .await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_has("error", "schema.tables", &format!("grant insert, update on reservation to {user}"));
    diagnosis.assert_has("error", "schema.tables", &format!("grant delete on processed_event to {user}"));
    bed.execute(&format!("grant insert, update on reservation to {user}")).await;
    bed.set("purge.enabled", "false");
    doctor(&bed).await.assert_has("ok", "schema.tables", ""); // without a purge nothing is deleted
    bed.execute(&format!("revoke select on _sqlx_migrations from {user}")).await;
    doctor(&bed).await.assert_warns("schema.migrations", "grant select on _sqlx_migrations");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_migrates_needs_the_right_to_create() {
    let mut bed = TestBed::bare().await;
    bed.demote().await;
    doctor(&bed).await.assert_only_error("schema.create", "may not create tables in the schema public");
    let owner = bed.variable("DATABASE_URL").to_owned();
    let demoted = bed.variable("STOCK__DATABASE__URL").to_owned();
    bed.set("database.url", &owner);
    let mut bed = bed.furnish().await;
    bed.set("database.url", &demoted);
    bed.set("purge.enabled", "false");
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_has("error", "schema.migrations", "grant select on _sqlx_migrations");
    assert!(!diagnosis.has("error", "schema.create", ""), "nothing is to be created now: {:#?}", diagnosis.findings);
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_another_release_is_told_from_one_that_was_tampered_with() {
    let bed = TestBed::new().await;
    bed.execute(
        "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
         values (999, 'of the future', true, '', 0)",
    )
    .await;
    doctor(&bed).await.assert_warns("schema.migrations", "newer release than this one: 999");
    bed.execute("update _sqlx_migrations set checksum = 'other' where version = 2").await;
    doctor(&bed).await.assert_only_error("schema.migrations", "another text than this release has: 2");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_database_is_an_error_and_a_stricter_isolation_none() {
    let bed = TestBed::new().await;
    let name = bed.database_name();
    bed.execute(&format!("alter database {name} set default_transaction_isolation = 'serializable'")).await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_has("ok", "database.defaults", "isolation serializable");
    assert!(diagnosis.errors().is_empty());
    bed.execute(&format!("alter database {name} set default_transaction_read_only = on")).await;
    doctor(&bed).await.assert_only_error("database.writable", "default_transaction_read_only");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_connections_for_one_more_replica_are_a_warning_before_they_are_an_error() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "2"); // so four connections
    let user = bed.demote().await; // limits do not bind a superuser
    bed.set("database.migrate_on_start", "false");
    bed.execute(&format!("alter role {user} connection limit 4")).await;
    doctor(&bed).await.assert_has("ok", "database.connections", "4 more are free");
    bed.execute(&format!("alter role {user} connection limit 3")).await;
    doctor(&bed).await.assert_warns("database.connections", "only 3 more are free");
    bed.execute(&format!("alter role {user} connection limit 0")).await;
    doctor(&bed).await.assert_only_error("database.reachable", "database.max_connections");
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoding_that_cannot_hold_every_text_is_a_warning() {
    let mut bed = TestBed::new().await;
    let (original, other) = (bed.variable("DATABASE_URL").to_owned(), format!("{}_latin", bed.database_name()));
    bed.execute_beside(&format!("create database {other} encoding 'LATIN1' locale 'C' template template0")).await;
    bed.set_variable("DATABASE_URL", &original.replace(&bed.database_name(), &other));
    let diagnosis = doctor(&bed).await;
    bed.set_variable("DATABASE_URL", &original);
    bed.execute_beside(&format!("drop database {other}")).await;
    diagnosis.assert_warns("database.encoding", "LATIN1");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_is_one_line_with_the_way_out_and_hides_nothing_of_the_other_server() {
    let mut bed = TestBed::new().await;
    bed.demote().await; // with a password, which a local server may not ask its owner for
    let (database_url, amqp_url) =
        (bed.variable("STOCK__DATABASE__URL").to_owned(), bed.variable("AMQP_URL").to_owned());
    let place = |url: &str| {
        let url = url::Url::parse(url).expect("a URL");
        format!("{}:{}", url.host_str().expect("a host"), url.port().expect("a port"))
    };
    let changed = |url: &str, change: &dyn Fn(&mut url::Url)| {
        let mut url = url::Url::parse(url).expect("a URL");
        change(&mut url);
        url.to_string()
    };
    let no_user = |url: &mut url::Url| {
        url.set_username("nobody").expect("a user");
        url.set_password(Some("S3CR3T")).expect("a password");
    };
    for (key, url, check, words) in [
        ("amqp.url", changed(&amqp_url, &no_user), "broker.reachable", "correct user and password in AMQP_URL"),
        ("amqp.url", changed(&amqp_url, &|url| url.set_path("/none")), "broker.reachable", "rabbitmqctl add_vhost"),
        ("database.url", changed(&database_url, &no_user), "database.reachable", "user"),
        (
            "database.url",
            changed(&database_url, &|url| url.set_path("/none")),
            "database.reachable",
            "create the database",
        ),
    ] {
        bed.set("amqp.url", &amqp_url);
        bed.set("database.url", &database_url);
        bed.set("database.migrate_on_start", "false");
        bed.set(key, &url);
        let end = bed.spawn(&["doctor", "--json"]).end().await;
        assert!(!end.stdout.contains("S3CR3T") && !end.stderr.contains("S3CR3T"), "{}{}", end.stdout, end.stderr);
        let diagnosis = Diagnosis::of(&end);
        diagnosis.assert_only_error(check, words);
        diagnosis.assert_only_error(check, &place(&url));
        let other = if key == "amqp.url" { "schema.tables" } else { "broker.topology" };
        diagnosis.assert_has("ok", other, "");
    }
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_are_not_there_or_say_nothing_are_named_within_10_seconds() {
    let mut bed = TestBed::new().await;
    let originals = ["DATABASE_URL", "AMQP_URL"].map(|name| bed.variable(name).to_owned());
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let silent = format!("127.0.0.1:{}", silent.local_addr().expect("an address").port());
    let postgres = url::Url::parse(&originals[0]).expect("a URL");
    let stranger = format!("{}:{}", postgres.host_str().expect("a host"), postgres.port().expect("a port"));
    for (database, broker) in
        [("127.0.0.1:1", "127.0.0.1:1"), (&silent, &silent), ("no-such-host.invalid:1", &stranger)]
    {
        bed.set_variable("DATABASE_URL", &format!("postgres://stock:stock@{database}/stock"));
        bed.set_variable("AMQP_URL", &format!("amqp://stock:stock@{broker}"));
        let begun = Instant::now();
        let diagnosis = doctor(&bed).await;
        // Ten seconds, both at once, and what a busy machine needs to start the program.
        assert!(begun.elapsed().as_secs() < 18, "{:?}", begun.elapsed());
        diagnosis.assert_has("error", "database.reachable", database);
        diagnosis.assert_has("error", "broker.reachable", broker);
        assert_eq!(diagnosis.errors().len(), 2, "{:#?}", diagnosis.errors());
    }
    bed.set_variable("DATABASE_URL", &originals[0]);
    bed.set_variable("AMQP_URL", &originals[1]);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_other_arguments_is_an_error_unless_it_is_to_be_taken_as_it_is() {
    for (changed, value) in [
        ("x-delivery-limit", AMQPValue::LongInt(7)),
        ("x-dead-letter-routing-key", text("elsewhere")),
        ("x-queue-type", text("classic")),
    ] {
        let mut bed = TestBed::new().await;
        bed.broker.delete(&bed.broker.queue()).await;
        let failure_queue = bed.broker.failure_queue();
        let arguments = [
            ("x-queue-type", text("quorum")),
            ("x-dead-letter-exchange", text("")),
            ("x-dead-letter-routing-key", text(&failure_queue)),
            ("x-overflow", text("reject-publish")),
            ("x-delivery-limit", AMQPValue::LongInt(30)),
            ("x-dead-letter-strategy", text("at-least-once")),
        ];
        // The last two are no arguments of a classic queue.
        let some = if changed == "x-queue-type" { 4 } else { 6 };
        let arguments = arguments.map(|(name, usual)| (name, if name == changed { value.clone() } else { usual }));
        bed.broker.declare(&bed.broker.queue(), &arguments[..some]).await;
        doctor(&bed).await.assert_only_error("broker.topology", &format!("inequivalent arg '{changed}'"));
        bed.set("amqp.declare", "false");
        doctor(&bed).await.assert_warns("broker.topology", &format!("inequivalent arg '{changed}'"));
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_of_another_type_is_an_error() {
    let bed = TestBed::bare().await;
    let fanout = lapin::ExchangeKind::Fanout;
    let channel = bed.broker.connection().await.create_channel().await.expect("a channel");
    let durable = lapin::options::ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel
        .exchange_declare(bed.broker.exchange().into(), fanout, durable, Default::default())
        .await
        .expect("an exchange");
    doctor(&bed).await.assert_only_error("broker.topology", &bed.broker.exchange());
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn classic_queues_are_a_warning() {
    let mut bed = TestBed::bare().await;
    bed.set("amqp.queue_type", "classic");
    let bed = bed.furnish().await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_warns("broker.queue_type", "kills the process");
    diagnosis.assert_has("ok", "broker.topology", "");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_messages_and_a_horizon_that_they_outlive_are_warnings() {
    let bed = TestBed::new().await;
    let failed_at = (Utc::now() - TimeDelta::days(40)).to_rfc3339();
    let properties = with_headers(&[("failed-at", text(&failed_at))]);
    bed.broker.send("", &bed.broker.failure_queue(), b"no event", properties).await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_warns("messages.failed", "1 messages wait for a person");
    diagnosis.assert_warns("purge.horizon", "40.0 days old");
    bed.broker.failed(1).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_horizon_below_the_retry_delays_is_a_warning() {
    let mut bed = TestBed::new().await;
    bed.set("retry.max_retries", "100");
    bed.set("retry.delay", "30min");
    bed.set("retry.multiplier", "1"); // one queue, but it is waited in a hundred times
    bed.set("retry.max_delay", "30min");
    bed.broker.also_delays(1_800_000);
    let mut bed = bed.furnish().await;
    doctor(&bed).await.assert_has("ok", "purge.horizon", "180000s");
    bed.set("purge.minimum_horizon", "49h");
    doctor(&bed).await.assert_warns("purge.horizon", "shorter than all retry delays");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_may_outlast_the_brokers_patience_are_a_warning() {
    let mut bed = TestBed::new().await;
    bed.set("database.timeout", "10min");
    doctor(&bed).await.assert_warns("broker.consumer_timeout", "consumer_timeout in rabbitmq.conf");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_at_the_broker_are_told_one_by_one() {
    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    servers.rabbitmqctl(&["add_user", "worker", "worker"]).await;
    let mut url = url::Url::parse(bed.variable("AMQP_URL")).expect("a URL");
    url.set_username("worker").expect("a user");
    url.set_password(Some("worker")).expect("a password");
    bed.set("amqp.url", url.as_str());
    doctor(&bed).await.assert_only_error("broker.reachable", "set_permissions");

    let permit = async |configure: &str, write: &str, read: &str| {
        servers.rabbitmqctl(&["set_permissions", "worker", configure, write, read]).await;
    };
    let list = async || servers.rabbitmqctl(&["list_queues", "name", "messages", "arguments", "--quiet"]).await;
    let before = list().await;
    permit(".*", ".*", ".*").await;
    doctor(&bed).await.assert_has("ok", "broker.topology", "as declared");
    permit("", ".*", ".*").await;
    doctor(&bed).await.assert_has("error", "broker.rights", "may not configure");
    bed.set("amqp.declare", "false");
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_has("ok", "broker.topology", "not compared");
    assert!(diagnosis.errors().is_empty(), "{:#?}", diagnosis.errors());
    permit("", "^nothing$", ".*").await;
    doctor(&bed).await.assert_only_error("broker.rights", "amq.default");
    permit("", ".*", "^nothing$").await;
    let diagnosis = doctor(&bed).await;
    diagnosis.assert_only_error("broker.rights", &format!("may not read from the queue {}", bed.broker.queue()));
    diagnosis.assert_has("warning", "purge.horizon", "purge.minimum_horizon alone");
    assert_eq!(list().await, before, "nothing was declared or changed");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_at_the_right_to_read_takes_no_message() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    doctor(&bed).await.assert_has("ok", "messages.waiting", "1 ready");
    let taken = bed.broker.take(&bed.broker.queue()).await;
    assert_eq!(taken.len(), 1);
    let counted = taken[0].properties.headers().as_ref().and_then(|headers| headers.inner().get("x-delivery-count"));
    assert!(matches!(counted, None | Some(AMQPValue::LongLongInt(0))), "a delivery was counted: {counted:?}");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_of_the_broker_is_an_error_that_says_why() {
    let servers = Servers::start_rabbitmq().await;
    let bed = servers.bed().await;
    servers.rabbitmqctl(&["set_vm_memory_high_watermark", "absolute", "1"]).await;
    doctor(&bed).await.assert_only_error("broker.publishing", "memory");
    servers.rabbitmqctl(&["set_vm_memory_high_watermark", "0.8"]).await;
    doctor(&bed).await.assert_has("ok", "broker.publishing", "");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_are_a_wrong_usage() {
    let mut bed = TestBed::new().await;
    bed.set("consume.workers", "0");
    let end = bed.spawn(&["doctor"]).end().await;
    bed.set("consume.workers", "1");
    assert_eq!(end.code(), Some(2));
    assert!(end.stderr.contains("consume.workers"), "{}", end.stderr);
    bed.finish().await;
}
