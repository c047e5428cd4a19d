//! The signals that ask the process to end.

use anyhow::{Context, anyhow};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, from when it is made on. The process has to heed them itself: as process 1 of a container it
/// would otherwise not hear of them.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Listens to them instead of being ended by them.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?,
        })
    }

    /// The name of the next one.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Does a command's work, unless a signal comes first: then the work is dropped where it stands, and the database undoes
/// what is not committed.
///
/// # Errors
/// The work's, or that a signal came.
pub(super) async fn unless_stopped<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let mut signals = Signals::listen()?;
    tokio::select! {
        result = Box::pin(work) => result, // or it would be here twice, and that of the doctor is large
        signal = signals.next() => Err(anyhow!("ended by {signal}")),
    }
}
