//! Waiting for what comes to hold, never for time.

use std::time::Duration;

use tokio::time::Instant;

/// The longest that anything a test waits for may take. Far beyond the ordinary, for machines that are shared.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the condition holds; panics, naming it, when it does not come to hold.
pub async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    eventually_within(PATIENCE, what, condition).await;
}

/// Waits no longer than this until the condition holds.
pub async fn eventually_within(limit: Duration, what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
