//! `stock-service check`: what would become of a body, without any server.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::{Finished, Order, Process, StatusChange, TemporaryFile, temporary_file};
use crate::vectors::{Vector, Verdict, schema, topics};

/// Runs it where no server is.
async fn check(arguments: &[&str]) -> Finished {
    let nowhere = [("DATABASE_URL", "postgres://a:b@127.0.0.1:1/c"), ("AMQP_URL", "amqp://a:b@127.0.0.1:1")];
    let nowhere = nowhere.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Process::spawn(&[&["check"], arguments].concat(), &nowhere).end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_body_would_be_applied() {
    let one = temporary_file(&Order::new(1).body());
    let three = temporary_file(&Order::new(3).body());
    let change = temporary_file(&StatusChange::new(&Order::new(1), "paid", 7).body());
    let end = check(&[one.path(), three.path(), change.path()]).await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(
        end.stdout,
        format!(
            "{}: applied as order.order.placed.v1 (1 line)\n\
             {}: applied as order.order.placed.v1 (3 lines)\n\
             {}: applied as order.order.status_changed.v1 (version 7)\n",
            one.path(),
            three.path(),
            change.path()
        )
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_body_is_told_with_its_place_and_makes_the_exit_status_1() {
    let (good, bad) = (temporary_file(&Order::new(1).body()), temporary_file(&Order::of("2.0005").body()));
    let end = check(&[good.path(), bad.path()]).await;
    assert_eq!(end.code(), Some(1));
    assert!(end.stdout.contains(": applied as"), "{}", end.stdout);
    let told = "failure queue: malformed: payload.lines[0].quantity: must be 1 to 9 digits";
    assert!(end.stdout.contains(&format!("{}: {told}", bad.path())), "{}", end.stdout);
    assert!(end.stderr.contains("1 of 2 would go to the failure queue"), "{}", end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_vector_that_is_all_body_is_told_as_it_ends() {
    let vectors: Vec<_> = topics().into_iter().filter(|(topic, _)| topic != "encoding").flat_map(|(_, v)| v).collect();
    let body = |vector: &Vector| String::from_utf8(vector.body()).expect("UTF-8");
    let files: Vec<_> = vectors.iter().map(|vector| temporary_file(&body(vector))).collect();
    let arguments: Vec<_> = ["--json"].into_iter().chain(files.iter().map(TemporaryFile::path)).collect();
    let end = check(&arguments).await;
    let told: Vec<Value> = serde_json::from_str(&end.stdout).expect("JSON");
    assert_eq!(told.len(), vectors.len());
    for (told, vector) in told.iter().zip(&vectors) {
        let expected = if vector.verdict == Verdict::Failed { "failed" } else { "applied" };
        assert_eq!(told["end"], expected, "{}", vector.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn json_says_everything_in_fields() {
    let bad = temporary_file("[]");
    let end = check(&["--json", bad.path()]).await;
    assert_eq!(end.code(), Some(1));
    let told: Value = serde_json::from_str(&end.stdout).expect("JSON");
    let detail = "body: invalid type: sequence, expected an object";
    assert_eq!(told, json!([{"file": bad.path(), "end": "failed", "reason": "malformed", "detail": detail}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_settings_decide_about_unknown_events_and_large_bodies() {
    let unknown = temporary_file(&Order::new(1).body().replace("placed.v1", "placed.v2"));
    let end = check(&[unknown.path()]).await;
    assert!(end.stdout.contains("failure queue: unknown-event: event_name: no handler for"), "{}", end.stdout);
    assert_eq!(end.code(), Some(1));
    let end = check(&[unknown.path(), "--set", "consume.unknown_event=ignore"]).await;
    assert!(end.stdout.contains(": ignored: event_name: no handler for"), "{}", end.stdout);
    assert_eq!(end.code(), Some(0));
    let large = temporary_file(&Order::new(20).body());
    let end = check(&[large.path(), "--set", "consume.max_body=1KiB"]).await;
    assert!(end.stdout.contains("consume.max_body allows 1024"), "{}{}", end.stdout, end.stderr);
    assert_eq!(end.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_read_is_an_error_that_names_it() {
    let end = check(&["/no/such/file"]).await;
    assert_eq!(end.code(), Some(1));
    assert!(end.stderr.contains("cannot read /no/such/file"), "{}", end.stderr);
    assert_eq!(check(&[]).await.code(), Some(2), "it needs a file");
}

#[test]
fn a_dash_is_standard_input() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stock-service"))
        .args(["check", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(Order::new(2).body().as_bytes()).expect("a reader");
    drop(stdin);
    let end = child.wait_with_output().expect("a child");
    assert_eq!(String::from_utf8_lossy(&end.stdout), "-: applied as order.order.placed.v1 (2 lines)\n");
    assert!(end.status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_examples_of_the_published_contract_would_be_applied() {
    for event in ["order.order.placed.v1", "order.order.status_changed.v1"] {
        let example = temporary_file(&schema(event)["examples"][0].to_string());
        let end = check(&[example.path()]).await;
        assert!(end.stdout.contains(&format!("applied as {event}")), "{}", end.stdout);
    }
}
