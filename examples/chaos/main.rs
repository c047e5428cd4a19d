//! Three replicas of the service under a steady load, and everything that can go wrong with them, their servers and
//! their networks; then all is mended, and an audit tells whether every event took effect exactly once.
//!
//! A seed decides which messages are published and which faults come; the same seed, the same ones.

#![allow(unreachable_pub, reason = "nobody imports an example")]

mod audit;
mod faults;
mod load;
mod logs;
#[path = "../../tests/it/support/proxy.rs"]
#[allow(dead_code, clippy::expect_used, reason = "the tests' own, which use all of it")]
mod proxy;
mod published;
mod publisher;
mod replica;
mod servers;
mod stock;
mod story;
mod watch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use fastrand::Rng;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::audit::Finding;
use crate::faults::{Networks, REPLICAS, Rounds, World};
use crate::load::{Load, RATE};
use crate::proxy::Proxy;
use crate::published::Published;
use crate::publisher::Publisher;
use crate::replica::Replica;
use crate::servers::Servers;
use crate::story::Story;
use crate::watch::Watch;

/// The longest that it may take after the faults until an event is applied.
const LONGEST_RECOVERY: Duration = Duration::from_secs(60);

/// Time of peace before the first fault. RabbitMQ 3.10 never gets a quorum queue to work again if it is killed in the
/// second in which it made it.
const PEACE: Duration = Duration::from_secs(3);

/// Who the replicas are to the broker; the password must be found in no log.
const USER: &str = "stock-chaos";
const PASSWORD: &str = "S3CR3T-amqp";

/// Replicas of the service, a load, and faults. Use `make chaos`.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long faults are made
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Decides the messages and the faults; a random one if not given
    #[arg(long)]
    seed: Option<u32>,
    /// The binary of stock-service
    service: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let Arguments { seconds, seed, service } = Arguments::parse();
    let seed = seed.unwrap_or_else(|| fastrand::u32(..));
    println!("chaos for {seconds} s, seed {seed}");
    let logs = std::env::temp_dir().join(format!("stock-chaos-{seed}-{}", std::process::id()));
    std::fs::create_dir(&logs)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let ended = tokio::select! {
        all_right = run(&service, seconds, seed, &logs) => Ok(all_right),
        // The replicas die with the future that holds them.
        _ = tokio::signal::ctrl_c() => Err(130),
        _ = terminate.recv() => Err(143),
    };
    match ended {
        Ok(Ok(true)) => {
            std::fs::remove_dir_all(&logs)?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(failed) => {
            Servers::from_environment()?.save_logs(&logs)?;
            println!("logs: {}; once more: make chaos CHAOS_SECONDS={seconds} SEED={seed}", logs.display());
            failed.map(|_| ExitCode::FAILURE)
        }
        Err(interrupted) => {
            std::fs::remove_dir_all(&logs)?;
            Ok(ExitCode::from(interrupted))
        }
    }
}

/// Tells whether all was right.
async fn run(service: &Path, seconds: u32, seed: u32, logs: &Path) -> anyhow::Result<bool> {
    let mut rng = Rng::with_seed(seed.into());
    // The last round may begin in the last second, and take its time.
    let messages = (seconds + 120) * RATE;
    let load = Arc::new(Load::new(rng.fork(), usize::try_from(messages)?));
    let world = prepare(service, &load, logs).await?;

    let publisher = Publisher::start(&load, &world.servers.broker);
    sleep(PEACE).await;
    let story = Story::happen(&world, Rounds::new(rng.fork()), Duration::from_secs(seconds.into())).await?;
    let fates = publisher.finish().await;
    let published = Published::new(&load, &fates);

    println!();
    for (fault, times) in &story.faults {
        println!("{times:>5} x {fault}");
    }
    let during = stock::applied(&mut stock::connect(&world.servers.database).await?).await?.len();
    let drained = audit::drain(&world, &published).await?;
    let work = format!("{during} events applied during the faults, the last one {drained:.1?} later");
    let mut findings = vec![Finding::new("work", work, vec![])];
    findings.extend(story.findings());
    findings.extend(audit::audit(&world, &published).await?);

    println!();
    for finding in &findings {
        println!("{finding}");
    }
    Ok(findings.iter().all(Finding::is_right))
}

/// Three replicas that consume, and a database that refuses some orders for a while.
async fn prepare(service: &Path, load: &Load, logs: &Path) -> anyhow::Result<World> {
    let servers = Servers::from_environment()?;
    let mut broker = servers.broker.clone();
    servers.rabbitmqctl(&["add_user", USER, PASSWORD]).await?;
    servers.rabbitmqctl(&["set_permissions", USER, ".*", ".*", ".*"]).await?;
    broker.set_username(USER).and_then(|()| broker.set_password(Some(PASSWORD))).ok().context("a URL with a host")?;

    let mut networks = Vec::new();
    for _ in 0..REPLICAS {
        let (broker, database) = (Proxy::before(broker.as_str()).await, Proxy::before(servers.database.as_str()).await);
        networks.push(Networks { broker, database });
    }
    let mut replicas: Vec<_> =
        networks.iter().zip(1..).map(|(its, number)| Replica::new(number, service, its, logs)).collect();
    replicas[0].migrate().await?;
    for replica in &mut replicas {
        replica.start()?;
    }
    let watch = Watch::start(replicas.iter().map(|replica| replica.log.clone()));
    watch.all_ready(LONGEST_RECOVERY).await.context("the replicas do not become ready")?;
    stock::refuse(&mut stock::connect(&servers.database).await?, load).await?;
    Ok(World { servers, networks, replicas: replicas.into_iter().map(Mutex::new).collect(), watch })
}
