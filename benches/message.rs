//! What one message costs in the service itself, without servers: `cargo bench --bench message`.

#![allow(missing_docs, reason = "criterion's macros write functions")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use stock_service::broker::headers::{Original, Stamp, copy};
use stock_service::message::{Failure, Outcome, RetryPolicy, decode};

/// An order of so many lines, as its producer writes it.
fn order(lines: usize) -> Vec<u8> {
    let line = r#"{"productId":"01939c5e-1111-7000-8000-000000000001","quantity":"2.000"}"#;
    format!(
        r#"{{"event_id":"01939c5e-7d4a-7c1b-9a55-3f6c2b1d8e01","event_name":"order.order.placed.v1","occurred_at":"2026-11-30T09:15:27.412Z","payload":{{"orderId":"01939c5e-7d49-7f00-8000-5a1d2c3b4e5f","customerId":"01939c5e-0000-7000-8000-000000000001","lines":[{}]}}}}"#,
        vec![line; lines].join(",")
    )
    .into_bytes()
}

/// A delivery with so many headers of the application's, and its retries.
fn original(headers: usize) -> Original {
    let mut table = FieldTable::default();
    for number in 0..headers {
        table.insert(ShortString::from(format!("trace-{number}")), AMQPValue::LongString("01939c5e".into()));
    }
    table.insert("retry-count".into(), AMQPValue::LongInt(2));
    let properties = BasicProperties::default().with_message_id("01939c5e".into()).with_headers(table);
    Original { exchange: "events".into(), routing_key: "order.order.placed.v1".into(), properties }
}

fn decoding(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    for lines in [1, 3, 100] {
        let body = order(lines);
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(format!("{lines} lines"), |bencher| {
            bencher.iter(|| decode(black_box(&body), None, 1 << 20));
        });
    }
    group.finish();
}

fn headers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("headers");
    for headers in [0, 10] {
        let original = original(headers);
        group.bench_function(format!("retry count among {headers} others"), |bencher| {
            bencher.iter(|| black_box(&original).retries());
        });
        group.bench_function(format!("a copy with {headers} others"), |bencher| {
            bencher.iter(|| copy(black_box(&original), &Stamp::Retry(3), 128 * 1024));
        });
    }
    group.finish();
}

fn verdicts(criterion: &mut Criterion) {
    let policy = RetryPolicy {
        max_retries: 3,
        delay: Duration::from_secs(1),
        multiplier: 2,
        max_delay: Duration::from_secs(900),
        ignore_unknown: false,
    };
    let mut group = criterion.benchmark_group("verdict");
    for (what, outcome) in [
        ("applied", Outcome::Applied),
        ("to be retried", Outcome::Failed(Failure::Retryable(anyhow::anyhow!("not yet")))),
    ] {
        group.bench_function(what, |bencher| bencher.iter(|| policy.judge(black_box(&outcome), 1)));
    }
    group.finish();
}

criterion_group!(benches, decoding, headers, verdicts);
criterion_main!(benches);
