//! The order service of the demo: what stands on the other side of the queue.
//!
//! It places orders, publishes their events through an outbox and a relay, has the
//! accidents that such services have, and reports what became of it all. It shares no
//! code with the stock service, on purpose: it is a witness of the contract. `play` plays
//! the whole piece beside a stock service that runs, as docker-compose.yml has it; with
//! its acts as commands of their own, `scripts/demo-local` adds accidents of the workers.

mod acts;
mod broker;
mod event;
mod kill;
mod management;
mod own;
mod relay;
mod report;
mod settling;
mod shop;

use anyhow::{Context as _, Result, ensure};
use broker::Broker;
use clap::{Parser, Subcommand};
use report::{Demands, Report, grouped};
use shop::Shop;
use std::{env, fs, path::PathBuf, process::ExitCode, time::Duration};

/// What a shell says of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// The demo's order service: places orders, publishes their events with every kind of
/// accident, and reports what the stock service made of them.
///
/// The servers are those of `DATABASE_URL` and `AMQP_URL`, or of the files that
/// `DATABASE_URL_FILE` and `AMQP_URL_FILE` name.
#[derive(Parser)]
#[command(name = "order_service")]
struct Cli {
    /// The topic exchange for the events.
    #[arg(long, global = true, default_value = "events")]
    exchange: String,
    /// The stock service's queue; `.retry.<ms>` and `.failed` follow its name.
    #[arg(long, global = true, default_value = "stock.events")]
    queue: String,
    /// The port of the broker's management page, which tells what running workers have in hand.
    #[arg(long, global = true, value_name = "PORT")]
    management: Option<u16>,
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Wait for the servers and the stock service, then place, relay, change, replay and spoil, one after the other.
    Play {
        #[arg(long, default_value_t = 5000)]
        orders: usize,
    },
    /// Place orders; every fifth changes its status at once. Events go to the outbox.
    Place {
        #[arg(long, default_value_t = 5000)]
        orders: usize,
    },
    /// Change the status of orders that were placed before.
    Change {
        #[arg(long, default_value_t = 1000)]
        orders: usize,
    },
    /// Publish what is unpublished in the outbox.
    Relay {
        /// Publish N events, then stop before they are marked as published.
        #[arg(long, value_name = "N")]
        crash_before_marking: Option<usize>,
    },
    /// Publish all events of a period once more.
    Replay {
        /// The period: those published in the last so many seconds.
        #[arg(long, value_name = "SECONDS")]
        last: f64,
    },
    /// Publish messages that no service could obey.
    Malformed,
    /// Start a worker under load and kill it right after a commit, until an acknowledgement is lost.
    ///
    /// Example: `order_service kill-worker -- stock-service consume`
    KillWorker {
        #[arg(long, default_value_t = 20)]
        tries: u32,
        /// Where the workers' standard error goes.
        #[arg(long)]
        log: Option<PathBuf>,
        /// How to start a worker.
        #[arg(last = true, required = true)]
        worker: Vec<String>,
    },
    /// Succeeds if no message waits in the stock service's queue or for a retry.
    Drained,
    /// Report whether every event took effect exactly once; fails if not.
    Report {
        /// Wait for up to so long until the stock service has nothing left to do.
        #[arg(long, default_value_t = 0, value_name = "SECONDS")]
        wait: u64,
        /// Demand that at least so many percent of the valid messages were copies.
        #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
        min_copies: f64,
        /// Demand that at least so many acknowledgements were lost.
        #[arg(long, default_value_t = 0, value_name = "N")]
        min_lost_acknowledgements: i64,
        #[arg(long)]
        json: bool,
    },
    /// Create a database on the server of `DATABASE_URL` and print its URL.
    CreateDatabase { name: String },
    /// Drop a database that create-database has made.
    DropDatabase { name: String },
    /// Delete the exchange and the stock service's queues, with all that is in them.
    RemoveTopology,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let database_url = variable("DATABASE_URL", "postgres://stock:stock@localhost:5432/stock")?;
    let shop = async || Shop::open(&database_url).await;
    let amqp_url = variable("AMQP_URL", "amqp://guest:guest@localhost:5672/%2f")?;
    let broker = async || Broker::connect(&amqp_url, &cli.exchange, &cli.queue, cli.management).await;

    match cli.command {
        Task::Play { orders } => {
            let (shop, broker) = acts::wait_for_everybody(shop, broker).await;
            acts::play(&shop, &broker, orders).await?;
        }
        Task::Place { orders } => acts::place(&shop().await?, orders).await?,
        Task::Change { orders } => acts::change(&shop().await?, orders).await?,
        Task::Relay { crash_before_marking: None } => acts::relay(&shop().await?, &broker().await?).await?,
        Task::Relay { crash_before_marking: Some(limit) } => {
            acts::crash_before_marking(&shop().await?, &broker().await?, limit).await?;
        }
        Task::Replay { last } => {
            acts::replay(&shop().await?, &broker().await?, Duration::try_from_secs_f64(last)?).await?;
        }
        Task::Malformed => acts::malformed(&shop().await?, &broker().await?).await?,
        Task::KillWorker { tries, log, worker } => {
            let (shop, broker) = (shop().await?, broker().await?);
            let trial = tokio::select! {
                trial = kill::kill_workers(&shop, &broker, tries, &worker, log.as_deref()) => trial?,
                // The worker of the moment goes too: it ends with the future that holds it.
                _ = tokio::signal::ctrl_c() => return Ok(ExitCode::from(INTERRUPTED)),
            };
            ensure!(trial.lost > 0, "{} workers were killed, but none between commit and acknowledgement", trial.kills);
        }
        Task::Drained => {
            let depths = broker().await?.depths().await?;
            let (waiting, retry) = (depths.main.messages + depths.retry, depths.retry);
            println!("{} messages wait, {} of them for a retry", grouped(waiting.into()), grouped(retry.into()));
            if waiting > 0 {
                return Ok(ExitCode::FAILURE);
            }
        }
        Task::Report { wait, min_copies, min_lost_acknowledgements, json } => {
            let demands = Demands { copies: min_copies, lost_acknowledgements: min_lost_acknowledgements };
            settling::wait(Duration::from_secs(wait), &broker).await;
            let report = Report::make(&shop().await?, &broker().await?, &demands).await?;
            if json {
                println!("{:#}", report.json());
            } else {
                println!("{report}");
            }
            if !report.right() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Task::CreateDatabase { name } => println!("{}", own::create_database(&database_url, &name).await?),
        Task::DropDatabase { name } => own::drop_database(&database_url, &name).await?,
        Task::RemoveTopology => broker().await?.remove_topology().await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A variable's value, or that of the file which the variable `…_FILE` names.
fn variable(name: &str, default: &str) -> Result<String> {
    if let Ok(value) = env::var(name) {
        return Ok(value);
    }
    let Some(path) = env::var_os(format!("{name}_FILE")) else { return Ok(default.to_owned()) };
    let content = fs::read_to_string(&path).with_context(|| format!("cannot read {} ({name}_FILE)", path.display()))?;
    Ok(content.trim_end().to_owned())
}
