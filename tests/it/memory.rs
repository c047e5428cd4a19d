//! Nothing is kept of a message that is settled.

use crate::support::{Order, Process, TestBed, eventually};

const DUPLICATES: usize = 4_000;
const FAILURES: usize = 400;

/// Works off known events, events that are retried and then parked, and what is no event.
async fn round(bed: &TestBed, known: &[Order]) {
    let failing: Vec<_> = (0..FAILURES).map(|_| Order::of("666").body()).collect();
    let malformed = (0..FAILURES).map(|n| format!("no event {n}"));
    bed.broker.publish_all(Order::EVENT, known.iter().cycle().take(DUPLICATES).map(Order::body)).await;
    bed.broker.publish_all(Order::EVENT, failing.into_iter().chain(malformed)).await;
    let parked = u32::try_from(2 * FAILURES).expect("a count");
    bed.broker.has(&bed.broker.failure_queue(), parked).await;
    eventually("all is settled", async || bed.broker.in_work().await == 0).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
}

async fn ends(process: Process) {
    process.signal("TERM").await;
    assert_eq!(process.end().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_retries_and_failures_leave_nothing_in_memory() {
    // Caches, pools and the allocator's own take up to 6 MiB, less than 3 of it after the first four rounds.
    const WARM_UP: usize = 4;
    const ROUNDS: usize = 6;

    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 50);
    bed.set_variable("RUST_LOG", "error,stock_service=off"); // a line for each failure would grow the test's own memory
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
    let known = Order::many(200);
    let process = bed.spawn(&["consume"]);
    bed.broker.publish_all(Order::EVENT, known.iter().map(Order::body)).await;
    bed.has_processed(200).await;
    for _ in 0..WARM_UP {
        round(&bed, &known).await;
    }
    let before = process.memory();
    for _ in 0..ROUNDS {
        round(&bed, &known).await;
    }
    let grown = process.memory().saturating_sub(before);
    let messages = u64::try_from(ROUNDS * (DUPLICATES + 2 * FAILURES)).expect("a count");
    // Less than a body for each.
    assert!(grown * 1024 < messages * 200, "{grown} KiB more than {before} KiB after {messages} messages");
    ends(process).await;
    bed.finish().await;
}
