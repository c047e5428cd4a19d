//! Publishes the load, as a relay would: confirmed, and for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::ensure;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::load::{Load, due};

/// Publishers at once, each with a connection; a confirm takes longer than messages are apart.
const LANES: usize = 4;

/// What is known of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fate {
    #[default]
    Unsent,
    /// Sent, but no confirm came: it may be in the queue or not.
    Perhaps,
    Confirmed,
}

/// A load on its way.
#[derive(Debug)]
pub struct Publisher {
    lanes: JoinSet<Vec<(usize, Fate)>>,
    stop: CancellationToken,
    messages: usize,
}

impl Publisher {
    pub fn start(load: &Arc<Load>, broker: &Url) -> Self {
        let (next, stop, begun) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new(), Instant::now());
        let mut lanes = JoinSet::new();
        for _ in 0..LANES {
            let lane = Lane { load: load.clone(), broker: broker.clone(), connection: None };
            lanes.spawn(lane.run(next.clone(), begun, stop.clone()));
        }
        Self { lanes, stop, messages: load.messages.len() }
    }

    /// Ends the load; the fates of all messages.
    pub async fn finish(self) -> Vec<Fate> {
        self.stop.cancel();
        let mut fates = vec![Fate::default(); self.messages];
        for (message, fate) in self.lanes.join_all().await.into_iter().flatten() {
            fates[message] = fate;
        }
        fates
    }
}

struct Lane {
    load: Arc<Load>,
    broker: Url,
    connection: Option<(Connection, Channel)>,
}

impl Lane {
    async fn run(mut self, next: Arc<AtomicUsize>, begun: Instant, stop: CancellationToken) -> Vec<(usize, Fate)> {
        let (messages, mut fates) = (self.load.messages.len(), Vec::new());
        loop {
            let message = next.fetch_add(1, Ordering::Relaxed);
            let turn = async {
                sleep_until(begun + due(message)).await;
                while !self.is_connected() {
                    if self.connect().await.is_err() {
                        sleep(Duration::from_millis(100)).await;
                    }
                }
            };
            if message >= messages || stop.run_until_cancelled(turn).await.is_none() {
                return fates;
            }
            let fate = match self.publish(message).await {
                Ok(()) => Fate::Confirmed,
                Err(_) => Fate::Perhaps,
            };
            if fate == Fate::Perhaps {
                // A late confirm on this channel would be taken for the next message's.
                self.connection = None;
            }
            fates.push((message, fate));
        }
    }

    fn is_connected(&self) -> bool {
        self.connection.as_ref().is_some_and(|(_, channel)| channel.status().connected())
    }

    async fn connect(&mut self) -> anyhow::Result<()> {
        let connect = async {
            let connection = Connection::connect(self.broker.as_str(), ConnectionProperties::default()).await?;
            let channel = connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            anyhow::Ok((connection, channel))
        };
        self.connection = Some(timeout(Duration::from_secs(5), connect).await??);
        Ok(())
    }

    async fn publish(&self, message: usize) -> anyhow::Result<()> {
        let Some((_, channel)) = &self.connection else { anyhow::bail!("not connected") };
        let (key, body) = self.load.wire(message);
        let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let persistent = BasicProperties::default().with_delivery_mode(2);
        let publish =
            async { channel.basic_publish("events".into(), key.into(), mandatory, &body, persistent).await?.await };
        let confirmation = timeout(Duration::from_secs(10), publish).await??;
        ensure!(confirmation == Confirmation::Ack(None), "{confirmation:?}");
        Ok(())
    }
}
