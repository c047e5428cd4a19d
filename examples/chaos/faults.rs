//! What goes wrong: the faults, when each comes, and how it is made and mended.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::proxy::{Proxy, Way};
use crate::replica::Replica;
use crate::servers::{Server, Servers};
use crate::watch::Watch;

/// How many replicas there are.
pub const REPLICAS: usize = 3;

/// How long a slow network keeps back each frame; a delivery has three.
const SLOW: Duration = Duration::from_millis(50);

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    ReplicaKilled,
    ReplicaStopped,
    ReplicaFrozen,
    ConnectionsClosed,
    SessionsEnded,
    ServerRestarted(Server),
    ServerKilled(Server),
    ServerFrozen(Server),
    MemoryAlarm,
    NetworkCut(Server),
    NetworkSilent(Server),
    NetworkDeaf(Server),
    NetworkSlow(Server),
}

use Fault::{
    ConnectionsClosed, MemoryAlarm, NetworkCut, NetworkDeaf, NetworkSilent, NetworkSlow, ReplicaFrozen, ReplicaKilled,
    ReplicaStopped, ServerFrozen, ServerKilled, ServerRestarted, SessionsEnded,
};
use Server::{Broker, Database};

/// What a fault is done to; of two at a time each has a target of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Replica,
    Server(Server),
    Network,
}

/// Each comes as often as it stands here.
const DECK: [Fault; 23] = [
    ReplicaKilled,
    ReplicaKilled,
    ReplicaStopped,
    ReplicaFrozen,
    ConnectionsClosed,
    ConnectionsClosed,
    SessionsEnded,
    SessionsEnded,
    ServerRestarted(Broker),
    ServerRestarted(Database),
    ServerKilled(Broker),
    ServerKilled(Database),
    ServerFrozen(Broker),
    ServerFrozen(Database),
    MemoryAlarm,
    NetworkCut(Broker),
    NetworkCut(Database),
    NetworkSilent(Broker),
    NetworkSilent(Database),
    NetworkDeaf(Broker),
    NetworkDeaf(Database),
    NetworkSlow(Broker),
    NetworkSlow(Database),
];

impl Fault {
    /// Whether no replica can work meanwhile, and each must notice at once.
    pub fn is_felt_by_all(self) -> bool {
        matches!(self, ServerRestarted(_) | ServerKilled(_))
    }

    fn target(self) -> Target {
        match self {
            ReplicaKilled | ReplicaStopped | ReplicaFrozen => Target::Replica,
            ConnectionsClosed | MemoryAlarm => Target::Server(Broker),
            SessionsEnded => Target::Server(Database),
            ServerRestarted(server) | ServerKilled(server) | ServerFrozen(server) => Target::Server(server),
            NetworkCut(_) | NetworkSilent(_) | NetworkDeaf(_) | NetworkSlow(_) => Target::Network,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplicaKilled => write!(f, "replica killed"),
            ReplicaStopped => write!(f, "replica stopped"),
            ReplicaFrozen => write!(f, "replica frozen"),
            ConnectionsClosed => write!(f, "broker closes all connections"),
            SessionsEnded => write!(f, "database ends all sessions"),
            MemoryAlarm => write!(f, "broker has a memory alarm"),
            ServerRestarted(server) => write!(f, "{server} restarted"),
            ServerKilled(server) => write!(f, "{server} killed"),
            ServerFrozen(server) => write!(f, "{server} frozen"),
            NetworkCut(server) => write!(f, "network to the {server} cut"),
            NetworkSilent(server) => write!(f, "network to the {server} silent"),
            NetworkDeaf(server) => write!(f, "network from the {server} silent"),
            NetworkSlow(server) => write!(f, "network to the {server} slow"),
        }
    }
}

/// One fault at one time.
#[derive(Clone, Debug)]
pub struct Strike {
    pub fault: Fault,
    /// From the beginning of its round.
    pub after: Duration,
    pub lasts: Duration,
    /// Whom it concerns, if it is about a replica or networks.
    pub replicas: Vec<usize>,
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {:.1} s", self.fault, self.lasts.as_secs_f64())?;
        if matches!(self.fault.target(), Target::Replica | Target::Network) {
            let numbers: Vec<_> = self.replicas.iter().map(|replica| (replica + 1).to_string()).collect();
            write!(f, ", replica {}", numbers.join(", "))?;
        }
        Ok(())
    }
}

/// Faults that overlap, and the time after them in which all is well.
#[derive(Debug)]
pub struct Round {
    pub strikes: Vec<Strike>,
    pub rest: Duration,
}

/// All rounds, without end, always the same ones for one seed.
#[derive(Debug)]
pub struct Rounds {
    rng: Rng,
    deck: Vec<Fault>,
}

impl Rounds {
    pub fn new(rng: Rng) -> Self {
        Self { rng, deck: Vec::new() }
    }

    fn strike(&mut self, fault: Fault, after: Duration) -> Strike {
        let rng = &mut self.rng;
        // Most are over soon; some outlast heartbeats and timeouts.
        let seconds = if rng.u32(..8) == 0 { 12.0 + 10.0 * rng.f64() } else { 1.0 + 4.0 * rng.f64() };
        let mut replicas: Vec<_> = (0..REPLICAS).collect();
        rng.shuffle(&mut replicas);
        let affected = match fault.target() {
            Target::Replica => 1,
            _ => rng.usize(1..=REPLICAS),
        };
        replicas.truncate(affected);
        Strike { fault, after, lasts: Duration::from_secs_f64(seconds), replicas }
    }
}

impl Iterator for Rounds {
    type Item = Round;

    fn next(&mut self) -> Option<Round> {
        let overlapping = self.rng.choice([1, 1, 2, 2, 3])?;
        let mut strikes: Vec<Strike> = Vec::new();
        let mut after = Duration::ZERO;
        while strikes.len() < overlapping {
            if self.deck.is_empty() {
                self.deck.extend(DECK);
                self.rng.shuffle(&mut self.deck);
            }
            let fits = |fault: &Fault| strikes.iter().all(|strike| strike.fault.target() != fault.target());
            let Some(position) = self.deck.iter().position(fits) else { break };
            let fault = self.deck.remove(position);
            strikes.push(self.strike(fault, after));
            after += Duration::from_secs_f64(3.0 * self.rng.f64());
        }
        let rest = Duration::from_secs_f64(1.0 + 3.0 * self.rng.f64());
        Some(Round { strikes, rest })
    }
}

/// The networks of one replica, a proxy before each server.
#[derive(Debug)]
pub struct Networks {
    pub broker: Proxy,
    pub database: Proxy,
}

impl Networks {
    fn to(&self, server: Server) -> &Proxy {
        match server {
            Broker => &self.broker,
            Database => &self.database,
        }
    }
}

/// What faults are done to.
#[derive(Debug)]
pub struct World {
    pub servers: Servers,
    pub networks: Vec<Networks>,
    pub replicas: Vec<Mutex<Replica>>,
    pub watch: Watch,
}

impl World {
    /// Does it, waits as long as it lasts, and mends it.
    pub async fn suffer(&self, strike: &Strike) -> anyhow::Result<()> {
        let (servers, lasts) = (&self.servers, strike.lasts);
        let replica = async || self.replicas[strike.replicas[0]].lock().await;
        let networks = |server, change: fn(&Proxy)| {
            for replica in &strike.replicas {
                change(self.networks[*replica].to(server));
            }
        };
        match strike.fault {
            ReplicaKilled => {
                let mut replica = replica().await;
                replica.kill().await?;
                sleep(lasts).await;
                replica.start()?;
            }
            ReplicaStopped => {
                let mut replica = replica().await;
                replica.stop().await?;
                sleep(lasts).await;
                replica.start()?;
            }
            ReplicaFrozen => {
                let replica = replica().await;
                replica.freeze().await?;
                sleep(lasts).await;
                replica.thaw().await?;
            }
            ConnectionsClosed => {
                again_for(lasts, async || servers.rabbitmqctl(&["close_all_connections", "chaos"]).await.map(drop))
                    .await?;
            }
            SessionsEnded => again_for(lasts, async || servers.end_sessions().await).await?,
            ServerRestarted(server) => {
                servers.control(server, "stop").await?;
                sleep(lasts).await;
                servers.control(server, "start").await?;
            }
            ServerKilled(server) => {
                servers.control(server, "kill").await?;
                sleep(lasts).await;
                servers.control(server, "start").await?;
            }
            ServerFrozen(server) => {
                servers.control(server, "freeze").await?;
                sleep(lasts).await;
                servers.control(server, "thaw").await?;
            }
            MemoryAlarm => {
                servers.rabbitmqctl(&["set_vm_memory_high_watermark", "absolute", "1"]).await?;
                sleep(lasts).await;
                servers.rabbitmqctl(&["set_vm_memory_high_watermark", "0.4"]).await?;
            }
            NetworkCut(server) => {
                networks(server, |network| network.turn_away(true));
                sleep(lasts).await;
                networks(server, |network| network.turn_away(false));
            }
            NetworkSilent(server) => {
                networks(server, Proxy::black_hole);
                sleep(lasts).await;
                networks(server, Proxy::speak);
            }
            // What the replicas say arrives, a commit or an acknowledgement; they do not know.
            NetworkDeaf(server) => {
                networks(server, |network| network.silence(Way::ToClient));
                sleep(lasts).await;
                networks(server, Proxy::speak);
            }
            NetworkSlow(server) => {
                networks(server, |network| network.delay(Way::ToServer, SLOW));
                sleep(lasts).await;
                networks(server, |network| network.delay(Way::ToServer, Duration::ZERO));
            }
        }
        Ok(())
    }
}

/// What takes but a moment is done every second.
async fn again_for(time: Duration, fault: impl AsyncFn() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        fault().await?;
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}
