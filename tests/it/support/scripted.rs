//! Handlers that fail, panic and wait on command.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
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
    /// It waits for a permit after the handlers, with all their locks, and goes on as the other step says.
    Held(Arc<Semaphore>, Box<Step>),
    /// A statement of the test's own runs before the handlers, and its error is swallowed.
    SwallowFirst(&'static str),
    /// A statement of the test's own runs after the handlers, and its error is swallowed.
    Swallow(&'static str),
}

impl Step {
    /// Waits with all locks, and then commits.
    pub fn held(gate: &Arc<Semaphore>) -> Self {
        Self::Held(gate.clone(), Box::new(Self::Apply))
    }

    /// Waits with all locks, and then fails.
    pub fn held_and_failed(gate: &Arc<Semaphore>) -> Self {
        Self::Held(gate.clone(), Box::new(Self::Fail))
    }
}

type Script = Box<dyn Fn(&Message, usize) -> Step + Send + Sync>;

/// The real handlers, with a script before them. Clones share what is recorded.
#[derive(Clone)]
pub struct Scripted {
    script: Arc<Script>,
    attempts: Arc<Mutex<HashMap<String, Vec<Instant>>>>,
    entered: Arc<Semaphore>,
    slices: Arc<AtomicUsize>,
    most_lines: Arc<AtomicUsize>,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").field("attempts", &self.attempts).finish_non_exhaustive()
    }
}

impl Scripted {
    /// `script` gets a message and its attempts before this one.
    pub fn new(script: impl Fn(&Message, usize) -> Step + Send + Sync + 'static) -> Self {
        Self {
            script: Arc::new(Box::new(script)),
            attempts: Arc::default(),
            entered: Arc::new(Semaphore::new(0)),
            slices: Arc::default(),
            most_lines: Arc::default(),
        }
    }

    /// The real handlers and nothing else, recorded.
    pub fn apply() -> Self {
        Self::new(|_, _| Step::Apply)
    }

    /// This step for one event, the real handlers for all others.
    pub fn only(event_id: &str, step: impl Fn(usize) -> Step + Send + Sync + 'static) -> Self {
        let event_id = event_id.to_owned();
        Self::new(move |message, before| match message.id.to_string() == event_id {
            true => step(before),
            false => Step::Apply,
        })
    }

    /// How many slices have come to the handlers.
    pub fn slices(&self) -> usize {
        self.slices.load(Ordering::Relaxed)
    }

    /// When the event was handed to the handlers: each time alone, and each time in a slice that went through. A slice
    /// that fails is no attempt of its members, for it is halved.
    pub fn attempts(&self, event_id: &str) -> Vec<Instant> {
        self.attempts.lock().expect("no panic").get(event_id).cloned().unwrap_or_default()
    }

    /// The most lines that were in one slice.
    pub fn most_lines(&self) -> usize {
        self.most_lines.load(Ordering::Relaxed)
    }

    fn record(&self, fresh: &[Fresh<'_>]) {
        let mut attempts = self.attempts.lock().expect("no panic");
        for fresh in fresh {
            attempts.entry(fresh.message().id.to_string()).or_default().push(Instant::now());
        }
    }

    /// Waits until one more slice has come to the handlers.
    pub async fn entered(&self) {
        let entered = tokio::time::timeout(super::PATIENCE, self.entered.acquire()).await;
        entered.expect("a slice in time").expect("open").forget();
    }
}

impl Dispatch for Scripted {
    async fn dispatch(&self, conn: &mut PgConnection, fresh: &[Fresh<'_>]) -> Result<(), Stop> {
        if fresh.is_empty() {
            return Handlers.dispatch(conn, fresh).await; // a probe, which no script is about
        }
        let mut steps = Vec::new();
        for fresh in fresh {
            let message = fresh.message();
            let before = self.attempts(&message.id.to_string()).len();
            steps.push((self.script)(message, before));
        }
        let is_alone = fresh.len() == 1;
        if is_alone {
            self.record(fresh);
        }
        self.slices.fetch_add(1, Ordering::Relaxed);
        let lines = fresh.iter().map(|fresh| fresh.message().event.lines()).sum();
        self.most_lines.fetch_max(lines, Ordering::Relaxed);
        self.entered.add_permits(1);
        for step in &steps {
            if let Step::SwallowFirst(sql) = step {
                drop(sqlx::raw_sql(*sql).execute(&mut *conn).await);
            }
        }
        Handlers.dispatch(conn, fresh).await?;
        for mut step in steps {
            while let Step::Held(gate, then) = step {
                gate.acquire().await.expect("open").forget();
                step = *then;
            }
            match step {
                Step::Fail => return Err(Failure::Retryable(anyhow!("scripted")).into()),
                Step::Reject => return Err(Failure::Permanent(anyhow!("scripted")).into()),
                Step::Panic => panic!("scripted"),
                Step::Swallow(sql) => drop(sqlx::raw_sql(sql).execute(&mut *conn).await),
                Step::Apply | Step::Held(..) | Step::SwallowFirst(_) => {}
            }
        }
        if !is_alone {
            self.record(fresh);
        }
        Ok(())
    }
}
