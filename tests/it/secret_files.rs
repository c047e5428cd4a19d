//! Settings, and above all secrets, from the files that variables name.

use std::fs;

use crate::support::{Finished, Order, Process, TemporaryFile, TestBed, temporary_file};

/// Runs `config` with these variables only; no server is needed.
async fn config(variables: &[(&str, &str)]) -> Finished {
    let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Process::spawn(&["config"], &variables).end().await
}

/// A file that holds the value of a variable, which then names the file instead.
fn move_to_file(bed: &mut TestBed, name: &str) -> TemporaryFile {
    let file = temporary_file(&format!("{}\n", bed.variable(name)));
    bed.unset_variable(name);
    bed.set_variable(&format!("{name}_FILE"), file.path());
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_works_with_both_urls_and_other_settings_from_files() {
    let mut bed = TestBed::new().await;
    let files = ["DATABASE_URL", "AMQP_URL", "STOCK__AMQP__QUEUE"].map(|name| move_to_file(&mut bed, name));
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.reservations().await, 1);
    drop(files);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_line_break_at_the_end_of_a_file_is_none_of_the_value() {
    for (content, accepted) in [
        ("postgres://u:p@db/x", true),
        ("postgres://u:p@db/x\n", true),
        ("postgres://u:p@db/x\r\n", true),
        ("postgres://u:p@db/x\n\n", false),
        ("postgres://u:p@\ndb/x", false),
        (" postgres://u:p@db/x", false),
    ] {
        let file = temporary_file(content);
        let end = config(&[("DATABASE_URL_FILE", file.path())]).await;
        assert_eq!(end.code(), Some(if accepted { 0 } else { 2 }), "{content:?}: {}{}", end.stdout, end.stderr);
        assert_eq!(end.stdout.contains("url = \"postgres://u:***@db/x\""), accepted, "{content:?}: {}", end.stdout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_has_the_rank_of_its_variable() {
    let (file, other) = (temporary_file("postgres://u:p@from-file/x"), "postgres://u:p@long-name/x");
    let end = config(&[("DATABASE_URL_FILE", file.path()), ("STOCK__DATABASE__URL", other)]).await;
    assert!(end.stdout.contains("@long-name/"), "{}{}", end.stdout, end.stderr);
    let end = config(&[("STOCK__DATABASE__URL_FILE", file.path()), ("DATABASE_URL", other)]).await;
    assert!(end.stdout.contains("@from-file/"), "{}{}", end.stdout, end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_a_file_is_reported_at_once_by_its_variable_and_path() {
    let empty = temporary_file("\n");
    let latin = temporary_file("");
    fs::write(latin.path(), b"S3CR3T \xe9").expect("a writable file");
    let large = temporary_file(&"S3CR3T".repeat(20_000));
    let wrong = temporary_file("S3CR3T");
    let folder = std::env::temp_dir();
    let folder = folder.to_str().expect("UTF-8");
    let variables = [
        ("DATABASE_URL_FILE", "/no/such/file"),
        ("AMQP_URL_FILE", empty.path()),
        ("STOCK__AMQP__EXCHANGE_FILE", folder),
        ("STOCK__AMQP__QUEUE_FILE", latin.path()),
        ("STOCK__LOG__FORMAT_FILE", large.path()),
        ("STOCK__CONSUME__WORKERS_FILE", wrong.path()),
        ("STOCK__CONSUME__WROKERS_FILE", wrong.path()),
        ("STOCK__RETRY__DELAY_FILE", ""),
        ("STOCK__HTTP__LISTEN", "off"),
        ("STOCK__HTTP__LISTEN_FILE", wrong.path()),
        ("STOCK__DATABASE__URL_FILE", "postgres://u:S3CR3T@h/d"), // the secret where its file belongs
    ];
    let end = config(&variables).await;
    assert_eq!(end.code(), Some(2), "{}", end.stdout);
    for (variable, place, fault) in [
        ("DATABASE_URL_FILE", "/no/such/file", "does not exist"),
        ("AMQP_URL_FILE", empty.path(), "is empty"),
        ("STOCK__AMQP__EXCHANGE_FILE", folder, "is a folder"),
        ("STOCK__AMQP__QUEUE_FILE", latin.path(), "is not UTF-8"),
        ("STOCK__LOG__FORMAT_FILE", large.path(), "has more than 64 KiB"),
        ("STOCK__CONSUME__WORKERS_FILE", "consume.workers", "must be a whole number"),
        ("STOCK__CONSUME__WROKERS_FILE", "", "there is no such key"),
        ("STOCK__RETRY__DELAY_FILE", "", "is set but empty"),
        ("STOCK__HTTP__LISTEN_FILE", "STOCK__HTTP__LISTEN is set, too", "only one"),
        ("STOCK__DATABASE__URL_FILE", "", "must be the path of a file"),
    ] {
        let line = end.stderr.lines().find(|line| line.contains(variable));
        let line = line.unwrap_or_else(|| panic!("{variable} is missing in {}", end.stderr));
        assert!(line.contains(place) && line.contains(fault), "{line}");
    }
    assert!(end.stderr.contains("10 faults"), "{}", end.stderr);
    assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_may_not_be_read_is_named() {
    // Root may read any file, whatever its mode; but nothing is ever at address 0 of a process.
    let end = config(&[("AMQP_URL_FILE", "/proc/self/mem")]).await;
    assert_eq!(end.code(), Some(2), "{}", end.stdout);
    assert!(end.stderr.contains("AMQP_URL_FILE: the file /proc/self/mem cannot be read"), "{}", end.stderr);
}
