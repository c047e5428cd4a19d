//! One transaction for many events: claim, dispatch, seal, commit; and a search by halves when one of them fails.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::anyhow;
use chrono::Utc;
use futures_util::FutureExt;
use sqlx::PgConnection;
use tokio::time::Instant;

use super::guard::{Claim, Fresh, claim};
use crate::db::{Database, explain, sqlstate};
use crate::message::{Failure, Interruption, Message, Outcome, Stop, Suspicion};
use crate::telemetry::{Fault, Monitor, Pulse, Step};

/// What happens on each event. The one seam between the guarantee and the business.
pub trait Dispatch: Send + Sync + 'static {
    /// Runs all handlers of all these events, in the transaction that `conn` is in.
    ///
    /// Handlers write; they neither commit nor roll back. An error undoes the whole slice.
    ///
    /// With no events it is a probe, and must run its statements all the same: what is missing, locked or forbidden shows
    /// before a message is taken.
    fn dispatch(&self, conn: &mut PgConnection, fresh: &[Fresh<'_>]) -> impl Future<Output = Result<(), Stop>> + Send;
}

/// Applies batches of events exactly once.
#[derive(Debug)]
pub struct Processor<D> {
    database: Database,
    dispatch: D,
    applied: AtomicU64,
    monitor: Monitor,
}

/// How far a batch got.
#[derive(Debug)]
pub struct Progress {
    /// What happened to its first messages, in order: to all of them, unless one has failed or the service was interrupted.
    pub outcomes: Vec<Outcome>,
    /// What kept the rest from being done, if it was not a culprit.
    pub interrupted: Option<Interrupted>,
}

/// The service could not go on; the next `tried` messages were in the transaction that did not get through.
#[derive(Debug)]
pub struct Interrupted {
    /// What was in the way.
    pub interruption: Interruption,
    /// How many messages were in that transaction.
    pub tried: usize,
}

/// Why a slice could not be applied, when contention is over with.
enum Blocked {
    Event(Failure),
    Service(Interruption),
}

impl<D: Dispatch> Processor<D> {
    /// A processor for any number of workers.
    pub fn new(database: Database, dispatch: D, monitor: Monitor) -> Self {
        Self { database, dispatch, applied: AtomicU64::new(0), monitor }
    }

    /// How many events have been applied so far, by all workers.
    pub fn applied(&self) -> u64 {
        self.applied.load(Ordering::Relaxed)
    }

    /// Applies the batch in one transaction, if it can be; else as much of it as stands before the first culprit, and
    /// tells what is wrong with that. The rest has no outcome then: how to go on with it is the caller's to decide.
    ///
    /// The culprit is found by halves, so a batch of one and a batch of many are the same code. `pulse` beats with each
    /// transaction.
    pub async fn process(&self, batch: &[&Message], pulse: &Pulse) -> Progress {
        let mut outcomes = Vec::with_capacity(batch.len());
        // What failed together ends here; so does what is tried next.
        let (mut bad, mut end) = (batch.len(), batch.len());
        loop {
            let slice = &batch[outcomes.len()..end];
            match self.apply_despite_contention(slice, pulse).await {
                Ok(applied) => {
                    outcomes.extend(applied);
                    if end == bad {
                        return Progress { outcomes, interrupted: None };
                    }
                }
                Err(Blocked::Service(interruption)) => {
                    return Progress { outcomes, interrupted: Some(Interrupted { interruption, tried: slice.len() }) };
                }
                Err(Blocked::Event(failure)) if slice.len() == 1 => {
                    outcomes.push(Outcome::Failed(failure));
                    return Progress { outcomes, interrupted: None };
                }
                Err(Blocked::Event(_)) => bad = end,
            }
            // What went through is out of it: no need to try again whether the other half fails.
            end = bad - (bad - outcomes.len()) / 2;
        }
    }

    /// Whether events could be applied: all of a transaction, with none.
    ///
    /// # Errors
    /// What is in the way of all events.
    pub async fn probe(&self) -> Result<(), Interruption> {
        match self.apply(&[]).await {
            Err(Stop::Service(interruption)) => Err(interruption),
            Err(Stop::Contention { cause, timed_out: true }) => {
                Err(Interruption { cause, suspicion: Suspicion::Timeout })
            }
            // The database works. A handler that fails without events may not fail with some.
            Ok(_) | Err(Stop::Contention { .. } | Stop::Event(_)) => Ok(()),
        }
    }

    /// Contention is no failure: the same again goes through, mostly. But what has waited for as long as a statement may
    /// is not made to wait again here, where all others of its worker wait with it: whoever holds the slice tries it
    /// again, in smaller pieces.
    async fn apply_despite_contention(&self, slice: &[&Message], pulse: &Pulse) -> Result<Vec<Outcome>, Blocked> {
        /// Runs after the first one. A deadlock picks one victim a time, so a handful clears any ordinary crowd.
        const AGAIN: u32 = 5;

        let begun = Instant::now();
        let mut run = 0;
        loop {
            pulse.beat();
            let (cause, timed_out) = match self.apply(slice).await {
                Ok(outcomes) => return Ok(outcomes),
                Err(Stop::Event(failure)) => return Err(Blocked::Event(failure)),
                Err(Stop::Service(interruption)) => return Err(Blocked::Service(interruption)),
                Err(Stop::Contention { cause, timed_out }) => (cause, timed_out),
            };
            if run == AGAIN || begun.elapsed() >= self.database.statement_timeout() {
                return Err(match timed_out {
                    true => Blocked::Service(Interruption { cause, suspicion: Suspicion::Timeout }),
                    false => Blocked::Event(Failure::Retryable(cause)),
                });
            }
            tracing::debug!(error = %format!("{cause:#}"), run, "contention, running again");
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..=20 << run))).await;
            run += 1;
        }
    }

    /// One transaction.
    async fn apply(&self, slice: &[&Message]) -> Result<Vec<Outcome>, Stop> {
        let limit = self.database.transaction_timeout();
        let result = tokio::time::timeout(limit, self.transact(slice)).await.unwrap_or_else(|_| {
            let cause = anyhow!("no answer from the database within {limit:?}");
            Err(Interruption { cause, suspicion: Suspicion::BrokenConnection }.into())
        });
        match &result {
            Ok(outcomes) => self.note_commit(slice, outcomes),
            Err(stop) => {
                let (fault, cause) = match stop {
                    Stop::Event(Failure::Retryable(cause) | Failure::Permanent(cause)) => (Fault::Event, cause),
                    Stop::Contention { cause, .. } => (Fault::Contention, cause),
                    Stop::Service(Interruption { cause, .. }) => (Fault::Service, cause),
                };
                self.monitor.metrics.transaction_failure(fault, sqlstate(cause));
            }
        }
        result
    }

    fn note_commit(&self, slice: &[&Message], outcomes: &[Outcome]) {
        let Monitor { metrics, health } = &self.monitor;
        let now = Utc::now();
        let mut applied = 0;
        for (message, outcome) in slice.iter().zip(outcomes) {
            if matches!(outcome, Outcome::Applied) {
                applied += 1;
                metrics.lag(now - message.occurred_at);
            }
        }
        self.applied.fetch_add(applied, Ordering::Relaxed);
        if !slice.is_empty() {
            metrics.batch(slice.len());
        }
        health.committed();
    }

    async fn transact(&self, slice: &[&Message]) -> Result<Vec<Outcome>, Stop> {
        // Whatever keeps a transaction from beginning is no event's fault.
        let begun = self.database.begin().await;
        let mut transaction =
            begun.map_err(|error| Interruption { cause: explain(error), suspicion: Suspicion::None })?;
        match self.claim_and_dispatch(transaction.connection(), slice).await {
            Ok(outcomes) => {
                let begun = Instant::now();
                transaction.commit().await.map_err(|error| Stop::from(error).during("commit"))?;
                self.monitor.metrics.step(Step::Commit, begun.elapsed());
                Ok(outcomes)
            }
            Err(stop) => {
                // The first cause is the one to report, whatever the rollback says. Anything but an event's own
                // failure takes its connection along: it may be broken, or have statements that do not fit it.
                if matches!(stop, Stop::Event(_)) {
                    transaction.rollback().await.ok();
                }
                Err(stop)
            }
        }
    }

    async fn claim_and_dispatch(&self, conn: &mut PgConnection, slice: &[&Message]) -> Result<Vec<Outcome>, Stop> {
        let mut outcomes = Vec::with_capacity(slice.len());
        let mut fresh = Vec::with_capacity(slice.len());
        let begun = Instant::now();
        let claims = claim(conn, slice).await.map_err(|error| Stop::from(error).during("guard"))?;
        self.monitor.metrics.step(Step::Guard, begun.elapsed());
        for claim in claims {
            match claim {
                Claim::Fresh(message) => {
                    fresh.push(message);
                    outcomes.push(Outcome::Applied);
                }
                Claim::Duplicate => outcomes.push(Outcome::Duplicate),
            }
        }
        if !fresh.is_empty() || slice.is_empty() {
            let begun = Instant::now();
            AssertUnwindSafe(self.dispatch.dispatch(conn, &fresh))
                .catch_unwind()
                .await
                .unwrap_or_else(|panic| Err(Failure::Retryable(anyhow!("panic: {}", panic_text(&*panic))).into()))?;
            self.monitor.metrics.step(Step::Handlers, begun.elapsed());
        }
        Ok(outcomes)
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
