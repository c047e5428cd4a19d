//! Has the stock service nothing left to do?

use crate::{acts::say_once, broker::Broker};
use anyhow::Result;
use std::time::{Duration, Instant};
use tokio::time::sleep;

const PAUSE: Duration = Duration::from_millis(500);
/// Beside running workers nothing must be left for so long. What they have in hand is counted
/// every 5 s: the count was then made after the last message had left the queues.
const SURE_AFTER: Duration = Duration::from_secs(10);

/// Waits until nothing is left, but no longer than `patience`, and whatever becomes of the
/// broker meanwhile.
pub(crate) async fn wait(patience: Duration, broker: impl AsyncFn() -> Result<Broker>) {
    let started = Instant::now();
    let mut nothing_since = None;
    let mut said = String::new();
    while started.elapsed() < patience {
        match look(&broker).await {
            Ok(Left { messages: false, workers: false }) => return,
            Ok(Left { messages: false, workers: true }) => {
                if nothing_since.get_or_insert_with(Instant::now).elapsed() >= SURE_AFTER {
                    return;
                }
            }
            Ok(Left { messages: true, .. }) => nothing_since = None,
            Err(error) => {
                nothing_since = None;
                say_once(&mut said, format!("waiting: {error:#}"));
            }
        }
        sleep(PAUSE).await;
    }
}

struct Left {
    messages: bool,
    workers: bool,
}

async fn look(broker: impl AsyncFn() -> Result<Broker>) -> Result<Left> {
    let depths = broker().await?.depths().await?;
    let messages = depths.main.messages + depths.retry > 0 || depths.in_hand != Some(0);
    Ok(Left { messages, workers: depths.main.consumers > 0 })
}
