//! The commands from outside: help, exit status, output.

use std::time::Instant;

use tokio::net::TcpListener;

use crate::support::{Order, Process, TestBed};

#[tokio::test(flavor = "multi_thread")]
async fn help_explains_every_command_and_shows_an_example() {
    for command in ["consume", "purge", "migrate", "config", "doctor", "check"] {
        let end = Process::spawn(&[command, "--help"], &[]).end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        assert!(end.stdout.contains("Usage:"), "{}", end.stdout);
        assert!(end.stdout.contains(&format!("stock-service {command}")), "{command}: {}", end.stdout);
        assert!(end.stdout.contains("Example"), "{command}: {}", end.stdout);
        let all = Process::spawn(&["--help"], &[]).end().await;
        assert!(all.stdout.contains(command), "{}", all.stdout);
    }
    let end = Process::spawn(&["--version"], &[]).end().await;
    assert_eq!((end.code(), end.stdout.trim()), (Some(0), concat!("stock-service ", env!("CARGO_PKG_VERSION"))));
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_usage_exits_with_2() {
    for arguments in [
        &[][..],
        &["no-such-command"],
        &["consume", "--no-such-flag"],
        &["migrate", "extra"],
        &["config", "--set", "x"],
    ] {
        let end = Process::spawn(arguments, &[]).end().await;
        assert_eq!(end.code(), Some(2), "{arguments:?}: {}{}", end.stdout, end.stderr);
        assert!(!end.stderr.is_empty(), "{arguments:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_twice_is_as_good_as_once() {
    let bed = TestBed::bare().await;
    for _ in 0..2 {
        let end = bed.spawn(&["migrate"]).end().await;
        assert_eq!(end.code(), Some(0), "{}", end.stderr);
        assert!(!end.stdout.is_empty(), "it says what it did");
    }
    assert_eq!(bed.processed().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consume_until_empty_ends_with_an_empty_queue() {
    let bed = TestBed::new().await;
    let orders = Order::many(300);
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(&orders[..100]).map(Order::body)).await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.broker.depth(&bed.broker.queue()).await, 0);
    assert_eq!((bed.processed().await, bed.reservations().await), (300, 300));
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "nothing to do is done: {}", end.stderr);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn until_empty_does_not_wait_for_retries() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 3_600_000);
    bed.on_reservation("raise 'scripted';").await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.broker.take(&bed.broker.retry_queue(3_600_000)).await.len(), 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_consume_waits_for_servers() {
    // One port refuses, one accepts and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let silent_place = format!("127.0.0.1:{}", silent.local_addr().expect("an address").port());
    let begun = Instant::now();
    let mut running = Vec::new();
    for place in ["127.0.0.1:1", &silent_place] {
        let url = format!("postgres://stock:stock@{place}/stock");
        let variables = [("DATABASE_URL".to_owned(), url), ("AMQP_URL".to_owned(), format!("amqp://a:b@{place}"))];
        for arguments in [&["migrate"][..], &["purge", "--horizon", "30d", "--force"], &["purge", "--horizon", "30d"]] {
            running.push((place, arguments, Process::spawn(arguments, &variables)));
        }
    }
    for (place, arguments, process) in running {
        let end = process.end().await;
        assert_eq!(end.code(), Some(1), "{arguments:?}: {}", end.stdout);
        assert!(end.stderr.contains(place), "{arguments:?}: {}", end.stderr);
        // The last one asks both servers, ten seconds each.
        let limit = if arguments.len() == 3 { 25 } else { 15 };
        assert!(begun.elapsed().as_secs() < limit, "{arguments:?} took {:?}", begun.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_one_json_object_a_line_on_standard_error_and_tell_failures_with_their_ids() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(0, 50);
    bed.set("log.format", "auto"); // json, for standard error is no terminal
    bed.set_variable("RUST_LOG", "info,stock_service=debug");
    bed.on_reservation("if new.quantity = 666 then raise 'scripted' using errcode = '23514'; end if;").await;
    let (good, bad) = (Order::new(1), Order::of("666"));
    let forged = "id\n{\"message\":\"forged\"}\u{1b}[31m";
    let properties = crate::support::persistent().with_message_id(forged.into()).with_correlation_id("c-1".into());
    for order in [&good, &good, &bad] {
        bed.broker.publish_with(Order::EVENT, order.body(), properties.clone()).await;
    }
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.stdout, "");
    let lines: Vec<serde_json::Value> =
        end.stderr.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    let of =
        |order: &Order| -> Vec<_> { lines.iter().filter(|line| line["event_id"] == order.event_id.as_str()).collect() };
    assert_eq!(of(&bad).iter().filter(|line| line["level"] == "ERROR").count(), 1, "one line per fact");
    assert!(of(&bad).iter().any(|line| line.to_string().contains("c-1") && line.to_string().contains("23514")));
    assert!(of(&good).iter().all(|line| line["level"] == "DEBUG"), "a duplicate is no news");
    assert!(of(&good).len() >= 2);
    assert!(!end.stderr.contains('\u{1b}'));
    bed.broker.failed(1).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_cannot_be_written_is_an_error_and_no_panic() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("the device that is always full");
    let mut config = std::process::Command::new(env!("CARGO_BIN_EXE_stock-service"));
    let failed = config.arg("config").stdout(full).output().expect("the binary");
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("standard output"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_is_no_text_is_refused_and_not_passed_over() {
    use std::os::unix::ffi::OsStrExt;

    let refused = std::process::Command::new(env!("CARGO_BIN_EXE_stock-service"))
        .arg("config")
        .env("STOCK__CONSUME__GRACE", std::ffi::OsStr::from_bytes(b"2\xe9s"))
        .output()
        .expect("the binary");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("consume.grace"));
}
