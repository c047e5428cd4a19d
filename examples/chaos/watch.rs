//! What the replicas say of themselves while things go wrong.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::Value;
use stock_service::http;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// How often each replica is asked.
const OFTEN: Duration = Duration::from_millis(100);

/// The longest that an answer may take.
const PROMPT: Duration = Duration::from_secs(5);

/// What one replica has said.
#[derive(Debug, Default)]
struct Said {
    /// What it said last; a process that does not answer is not ready either.
    ready: bool,
    /// Whether it has not been ready since somebody looked.
    stumbled: bool,
    /// Answers that it cannot do its work any more and must be restarted.
    dead: Vec<String>,
}

/// Asks all replicas, all the time, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    replicas: Vec<Arc<Mutex<Said>>>,
    _asking: JoinSet<()>,
}

impl Watch {
    /// Watches the replicas that log into these files.
    pub fn start(logs: impl Iterator<Item = PathBuf>) -> Self {
        let (mut replicas, mut asking) = (Vec::new(), JoinSet::new());
        for log in logs {
            let said = Arc::<Mutex<Said>>::default();
            asking.spawn(ask(log, said.clone()));
            replicas.push(said);
        }
        Self { replicas, _asking: asking }
    }

    /// Waits until all are ready, and says how long that took.
    pub async fn all_ready(&self, limit: Duration) -> Option<Duration> {
        let begun = Instant::now();
        // What was said before is about what was before.
        self.replicas.iter().for_each(|said| lock(said).ready = false);
        let ready = async {
            while !self.replicas.iter().all(|said| lock(said).ready) {
                sleep(OFTEN).await;
            }
        };
        timeout(limit, ready).await.ok().map(|()| begun.elapsed())
    }

    /// The numbers of the replicas that have not been ready since the last look.
    pub fn stumbled(&self) -> Vec<usize> {
        let replicas = self.replicas.iter().zip(1..);
        replicas.filter(|(said, _)| std::mem::take(&mut lock(said).stumbled)).map(|(_, number)| number).collect()
    }

    /// All answers that somebody must be restarted, which no outage is a reason for.
    pub fn dead(&self) -> Vec<String> {
        self.replicas.iter().flat_map(|said| std::mem::take(&mut lock(said).dead)).collect()
    }
}

fn lock(said: &Mutex<Said>) -> MutexGuard<'_, Said> {
    said.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask(log: PathBuf, said: Arc<Mutex<Said>>) {
    let mut address = None;
    loop {
        let answers = match address {
            Some(address) => timeout(PROMPT, answers(address)).await.ok().and_then(Result::ok),
            None => None,
        };
        if answers.is_none() {
            // Each new process listens elsewhere.
            address = last_address(&log);
        }
        {
            let mut said = lock(&said);
            said.ready = answers.as_ref().is_some_and(|((status, _), _)| status.is_success());
            said.stumbled |= !said.ready;
            said.dead.extend(answers.and_then(|(_, (status, body))| (!status.is_success()).then_some(body)));
        }
        sleep(OFTEN).await;
    }
}

/// What it says to `/readyz` and `/livez`.
async fn answers(address: SocketAddr) -> anyhow::Result<(Answer, Answer)> {
    Ok((http::get(address, "/readyz").await?, http::get(address, "/livez").await?))
}

type Answer = (StatusCode, String);

/// Where the last process that logs into this file said that it listens.
fn last_address(log: &Path) -> Option<SocketAddr> {
    let text = std::fs::read_to_string(log).ok()?;
    let line = text.lines().rev().find(|line| line.contains("listening for HTTP"))?;
    serde_json::from_str::<Value>(line).ok()?["address"].as_str()?.parse().ok()
}
