//! Handlers that fail, panic and wait on command.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use anyhow::anyhow;
use sqlx::PgConnection;
use stock_service::handlers::Handlers;
use stock_service::inbox::{Dispatch, Fresh};
use stock_service::message::{Failure, Message, Stop};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// What becomes of a slice when one message of it meets this.
#[derive(Clone, Debug)]
pub enum Step {
    /// The real handlers run.
    Apply,
    /// The handlers run, and then it fails for now.
    Fail,
    /// It fails for good.
    Reject,
    /// It panics.
    Panic,
    /// It waits for a permit, and applies then.
    Wait(Arc<Semaphore>),
    /// A statement of the test's own runs and its error is swallowed, before the handlers.
    Swallow(&'static str),
    /// A statement of the test's own runs after the handlers; its error counts.
    Then(&'static str),
}

type Script = Box<dyn Fn(&Message, usize) -> Step + Send + Sync>;

/// The real handlers, with a script before them. Clones share what is recorded.
#[derive(Clone)]
pub struct Scripted {
    script: Arc<Script>,
    attempts: Arc<Mutex<HashMap<String, Vec<Instant>>>>,
    entered: Arc<Semaphore>,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").field("attempts", &self.attempts).finish_non_exhaustive()
    }
}

impl Scripted {
    /// `script` gets a message and how often it was tried before, in whichever slice.
    pub fn new(script: impl Fn(&Message, usize) -> Step + Send + Sync + 'static) -> Self {
        Self { script: Arc::new(Box::new(script)), attempts: Arc::default(), entered: Arc::new(Semaphore::new(0)) }
    }

    /// When the event was handed to the handlers, each time.
    pub fn attempts(&self, event_id: &str) -> Vec<Instant> {
        self.attempts.lock().expect("no panic").get(event_id).cloned().unwrap_or_default()
    }

    /// Waits until one more slice has come to the handlers.
    pub async fn entered(&self) {
        let entered = tokio::time::timeout(super::PATIENCE, self.entered.acquire()).await;
        entered.expect("a slice in time").expect("open").forget();
    }
}

impl Dispatch for Scripted {
    async fn dispatch(&self, conn: &mut PgConnection, fresh: &[Fresh<'_>]) -> Result<(), Stop> {
        let mut steps = Vec::new();
        for fresh in fresh {
            let message = fresh.message();
            let mut attempts = self.attempts.lock().expect("no panic");
            let before = attempts.entry(message.id.to_string()).or_default();
            steps.push((self.script)(message, before.len()));
            before.push(Instant::now());
        }
        self.entered.add_permits(1);
        for step in &steps {
            match step {
                Step::Swallow(sql) => drop(sqlx::raw_sql(*sql).execute(&mut *conn).await),
                Step::Wait(gate) => gate.acquire().await.expect("open").forget(),
                _ => {}
            }
        }
        Handlers.dispatch(conn, fresh).await?;
        for step in steps {
            match step {
                Step::Fail => return Err(Failure::Retryable(anyhow!("scripted")).into()),
                Step::Reject => return Err(Failure::Permanent(anyhow!("scripted")).into()),
                Step::Panic => panic!("scripted"),
                Step::Then(sql) => drop(sqlx::raw_sql(sql).execute(&mut *conn).await?),
                Step::Apply | Step::Wait(_) | Step::Swallow(_) => {}
            }
        }
        Ok(())
    }
}
