//! The service inside the test's own process.

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::PATIENCE;

/// The service, running in this process.
#[derive(Debug)]
#[must_use]
pub struct Service {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Service {
    pub(super) fn new(stop: CancellationToken, task: JoinHandle<()>) -> Self {
        Self { stop, task }
    }

    /// Stops it as a SIGTERM would, and waits for its end.
    pub async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("a stop in time").expect("no panic");
    }
}
