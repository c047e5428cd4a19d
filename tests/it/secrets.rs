//! No password is ever shown, whatever goes wrong.

use crate::support::{Endpoint, Order, Process, TestBed};

const DATABASE: &str = "S3CR3T-pg";
const BROKER: &str = "S3CR3T-amqp";

/// The passwords as they are, percent-encoded, and as `amqplain` and `plain` logins send them.
fn assert_silent(output: &str, what: &str) {
    for secret in [DATABASE, BROKER, "S3CR3T", "S3CR3T%2D", "UzNDUjNU"] {
        if let Some(at) = output.find(secret) {
            let from = (0..=at.saturating_sub(150)).rev().find(|at| output.is_char_boundary(*at)).unwrap_or(0);
            panic!("{what}: …{}", &output[from..at + secret.len()]);
        }
    }
}

/// What a running process shows to others than its log.
async fn assert_pages_and_title_silent(process: &Process) {
    let endpoint = Endpoint::of(process).await;
    for path in ["/metrics", "/readyz", "/livez"] {
        assert_silent(&endpoint.get(path).await.1, path);
    }
    assert_silent(&process.title(), "the title");
}

/// URLs of the test's own servers with other passwords or places.
fn url(original: &str, password: &str, port: Option<u16>) -> String {
    let mut url = url::Url::parse(original).expect("a URL");
    url.set_password(Some(password)).expect("a password");
    if let Some(port) = port {
        url.set_port(Some(port)).expect("a port");
    }
    url.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_shows_a_password_when_its_servers_refuse_it() {
    let mut bed = TestBed::new().await;
    let (database, broker) = (bed.variable("DATABASE_URL").to_owned(), bed.variable("AMQP_URL").to_owned());
    let originals = (database.clone(), broker.clone());
    bed.set_variable("RUST_LOG", "trace,lapin=trace,sqlx=trace");
    bed.demote().await; // whose password is another secret
    for port in [None, Some(1)] {
        bed.set_variable("DATABASE_URL", &url(&database, DATABASE, port));
        bed.set_variable("AMQP_URL", &url(&broker, BROKER, port));
        let wrong = bed.variable("DATABASE_URL").to_owned();
        bed.set("database.url", &wrong);
        let commands = [&["migrate"][..], &["purge", "--horizon", "30d"], &["config"], &["--help"], &["--version"]];
        for (arguments, process) in commands.map(|arguments| (arguments, bed.spawn(arguments))) {
            let end = process.end().await;
            assert_silent(&format!("{}{}", end.stdout, end.stderr), &format!("{arguments:?} {port:?}"));
        }
    }
    bed.set_variable("DATABASE_URL", &originals.0);
    bed.set_variable("AMQP_URL", &originals.1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consume_shows_no_password_at_the_most_verbose_level() {
    let mut bed = TestBed::new().await;
    bed.set_variable("RUST_LOG", "trace,lapin=trace,sqlx=trace");
    bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    bed.set("http.listen", "127.0.0.1:0");
    bed.set_ladder(1, 50);
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
    let (good, bad) = (Order::new(1), Order::of("666"));
    let service = bed.spawn(&["consume"]);
    bed.broker.publish_all(Order::EVENT, [good.body(), bad.body(), "no event".to_owned()]).await;
    let failed = bed.broker.failed(2).await;
    bed.has_processed(1).await;
    // The database is lost, and comes back.
    bed.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename like 't%_user'").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(2).await;
    assert_pages_and_title_silent(&service).await;
    service.signal("TERM").await;
    let end = service.end().await;
    assert_silent(&end.stderr, "consume");
    for message in failed {
        assert_silent(&format!("{:?}", message.properties), "a copy");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consume_shows_no_password_while_the_broker_refuses_it() {
    let mut bed = TestBed::new().await;
    let broker = bed.variable("AMQP_URL").to_owned();
    bed.set_variable("RUST_LOG", "trace,lapin=trace,sqlx=trace");
    bed.set_variable("AMQP_URL", &url(&broker, BROKER, None));
    bed.set("http.listen", "127.0.0.1:0");
    let service = bed.spawn(&["consume"]);
    let place = url::Url::parse(&broker).expect("a URL");
    let place = format!("{}:{}", place.host_str().expect("a host"), place.port().expect("a port"));
    service.has_said("ACCESS_REFUSED").await;
    service.has_said(&place).await;
    assert_pages_and_title_silent(&service).await;
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_silent(&end.stderr, "consume");
    bed.set_variable("AMQP_URL", &broker);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn config_masks_passwords_wherever_they_stand() {
    let variables = [
        ("DATABASE_URL", "postgres://stock:S3CR3T-pg@h/d?sslmode=disable&application_name=x"),
        ("AMQP_URL", "amqps://stock:S3CR3T%2Damqp@h/%2f?heartbeat=5"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let end = Process::spawn(&["config"], &variables).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_silent(&format!("{}{}", end.stdout, end.stderr), "config");
    assert!(end.stdout.contains("@h/d") && end.stdout.contains("heartbeat=5"), "{}", end.stdout);
    let query = [("DATABASE_URL".to_owned(), "postgres://h/d?user=stock&password=S3CR3T-pg".to_owned())];
    let end = Process::spawn(&["config"], &query).end().await;
    assert_silent(&format!("{}{}", end.stdout, end.stderr), "a password in the query");
}
