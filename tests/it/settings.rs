//! Where settings come from, what overrides what, and what is said about wrong ones.

use crate::support::{Finished, Process, temporary_file};

/// Runs the binary with these arguments and variables only; no server is needed.
async fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Finished {
    let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Process::spawn(arguments, &variables).end().await
}

/// The value of a key in what `config` prints.
async fn effective(key: &str, arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let end = run(&[&["config"], arguments].concat(), variables).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    let table: toml::Table = end.stdout.parse().expect("TOML");
    let (section, name) = key.split_once('.').expect("a section");
    match &table[section][name] {
        toml::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_override_the_environment_which_overrides_the_file_which_overrides_the_defaults() {
    let file = temporary_file("[retry]\nmax_retries = 5\ndelay = \"2s\"\nmultiplier = 7\n");
    let with_file = ["--config", file.path()];
    let variable = ("STOCK__RETRY__MAX_RETRIES", "6");
    let key = "retry.max_retries";
    assert_eq!(effective(key, &[], &[]).await, "3");
    assert_eq!(effective(key, &with_file, &[]).await, "5");
    assert_eq!(effective(key, &with_file, &[variable]).await, "6");
    let flags = ["--config", file.path(), "--set", "retry.max_retries=8"];
    assert_eq!(effective(key, &flags, &[variable]).await, "8");
    assert_eq!(effective("retry.multiplier", &flags, &[variable]).await, "7", "what is not overridden stays");
    assert_eq!(effective("retry.max_delay", &flags, &[variable]).await, "15min");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_defaults_are_in_effect() {
    for (key, value) in [
        ("database.url", "postgres://stock:***@localhost:5432/stock"),
        ("database.migrate_on_start", "true"),
        ("database.timeout", "30s"),
        ("amqp.url", "amqp://guest:***@localhost:5672/%2f"),
        ("amqp.exchange", "events"),
        ("amqp.queue", "stock.events"),
        ("amqp.declare", "true"),
        ("amqp.queue_type", "quorum"),
        ("retry.max_retries", "3"),
        ("retry.delay", "1s"),
        ("retry.multiplier", "2"),
        ("retry.max_delay", "15min"),
        ("consume.max_body", "1MiB"),
        ("consume.unknown_event", "fail"),
        ("consume.grace", "25s"),
        ("purge.enabled", "true"),
        ("purge.horizon", "30d"),
        ("purge.minimum_horizon", "14d"),
        ("purge.every", "1h"),
    ] {
        assert_eq!(effective(key, &[], &[]).await, value, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_usual_names_of_the_urls_are_read() {
    let variables = [("DATABASE_URL", "postgres://a:p@db/x"), ("AMQP_URL", "amqp://b:p@mq:5673/v")];
    assert_eq!(effective("database.url", &[], &variables).await, "postgres://a:***@db/x");
    assert_eq!(effective("amqp.url", &[], &variables).await, "amqp://b:***@mq:5673/v");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_config_prints_can_be_given_back_as_a_file() {
    let variables = [("STOCK__AMQP__QUEUE", "a \"strange\" queue"), ("STOCK__CONSUME__MAX_BODY", "64KiB")];
    let end = run(&["config"], &variables).await;
    let file = temporary_file(&end.stdout);
    let again = run(&["config", "--config", file.path()], &[]).await;
    assert_eq!((again.code(), again.stdout), (Some(0), end.stdout), "{}", again.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_is_reported_at_once_by_its_key() {
    let file = temporary_file("[retry]\nmax_retires = 5\n[nonsense]\nkey = 1\n");
    let variables = [
        ("DATABASE_URL", ""),
        ("AMQP_URL", "amqp://user:S3CR3T@host:port/"),
        ("STOCK__CONSUME__WORKERS", "0"),
        ("STOCK__CONSUME__PREFETCH", "65536"),
        ("STOCK__CONSUME__BATCH_SIZE", "-1"),
        ("STOCK__CONSUME__BACTH_SIZE", "1"),
        ("STOCK__CONSUME__UNKNOWN_EVENT", "drop"),
        ("STOCK__CONSUME__MAX_BODY", "1e6"),
        ("STOCK__RETRY__DELAY", "-5s"),
        ("STOCK__RETRY__MULTIPLIER", "two"),
        ("STOCK__AMQP__QUEUE_TYPE", "stream"),
        ("STOCK__AMQP__QUEUE", ""),
        ("STOCK__AMQP__DECLARE", "yes"),
        ("STOCK__PURGE__EVERY", "1 h"),
        ("STOCK__DATABASE__TIMEOUT", "0s"),
    ];
    for command in [&["config"][..], &["consume"], &["migrate"], &["purge", "--horizon", "30d"]] {
        let end = run(&[command, &["--config", file.path(), "--set", "no.such=1"]].concat(), &variables).await;
        assert_eq!(end.code(), Some(2), "{command:?}: {}", end.stderr);
        for key in [
            "retry.max_retires",
            "nonsense.key",
            "DATABASE_URL",
            "amqp.url",
            "consume.workers",
            "consume.prefetch",
            "consume.batch_size",
            "STOCK__CONSUME__BACTH_SIZE",
            "consume.unknown_event",
            "consume.max_body",
            "retry.delay",
            "retry.multiplier",
            "amqp.queue_type",
            "STOCK__AMQP__QUEUE",
            "amqp.declare",
            "purge.every",
            "database.timeout",
            "no.such",
        ] {
            assert!(end.stderr.contains(key), "{key} is missing in {}", end.stderr);
        }
        assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
        assert_eq!(end.stdout, "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silly_values_are_refused_one_by_one() {
    for (key, values) in [
        ("retry.delay", &["0", "0ms", "abc", "-5s", "400d", "9999999999999s", "1", "1.5.2s", "5 s", "１s"][..]),
        ("retry.max_retries", &["-1", "1.5", "1e3", "", "four", "99999999999999999999"]),
        ("consume.prefetch", &["0", "-1", "65536"]),
        ("consume.workers", &["0", "-1", "100000"]),
        ("database.max_connections", &["0", "-1", "2"]), // each worker needs one, and two are for all else
        ("purge.horizon", &["30", "1d", "30ms", "P30D"]),
        ("purge.minimum_horizon", &["59min", "0s"]),
        ("consume.max_body", &["0B", "1", "1KB", "-1MiB", "1TiB"]),
        ("amqp.queue", &["", " ", "amq.queue"]),
    ] {
        for value in values {
            let end = run(&["config", "--set", &format!("{key}={value}")], &[]).await;
            assert_eq!(end.code(), Some(2), "{key}={value}: {}", end.stdout);
            assert!(end.stderr.contains(key), "{key}={value}: {}", end.stderr);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn urls_that_could_be_misread_are_refused_and_not_quoted() {
    for url in [
        "amqp://u:S3CR3T@ss:w/rd#%?é@h",
        "amqp://u:S3CR3T#x@h/%2f",
        "amqp://h/",
        "amqp://u:S3CR3T@h/a/b",
        "http://u:S3CR3T@h/",
        "S3CR3T",
        "amqp://u:S3CR3T@h/%2f\n",
        "amqp://u:S3CR3T@h:99999/%2f",
        "amqp://",
    ] {
        let end = run(&["config"], &[("AMQP_URL", url)]).await;
        assert_eq!(end.code(), Some(2), "{url}: {}", end.stdout);
        assert!(end.stderr.contains("amqp.url"), "{}", end.stderr);
        assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
    }
    for url in ["postgres://u:S3CR3T@ss:w/rd#%?é@h/d", "mysql://u:S3CR3T@h/d", "S3CR3T"] {
        let end = run(&["config"], &[("DATABASE_URL", url)]).await;
        assert_eq!(end.code(), Some(2), "{url}: {}", end.stdout);
        assert!(end.stderr.contains("database.url"), "{}", end.stderr);
        assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_read_is_named() {
    let broken = temporary_file("[database\nurl = \"postgres://u:S3CR3T@h/d\"\n");
    for path in ["/no/such/file.toml", broken.path()] {
        let end = run(&["config", "--config", path], &[]).await;
        assert_eq!(end.code(), Some(2), "{}", end.stdout);
        assert!(end.stderr.contains(path), "{}", end.stderr);
        assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
    }
}
