//! The order service of the demo: what stands on the other side of the queue.
//!
//! It places orders, publishes their events through an outbox and a relay, has the
//! accidents that such services have, and reports what became of it all. It shares no
//! code with the stock service, on purpose: it is a witness of the contract. `scripts/demo`
//! plays the whole piece; each command here is one act of it.

mod broker;
mod event;
mod kill;
mod own;
mod relay;
mod report;
mod shop;

use anyhow::{Result, ensure};
use broker::Broker;
use clap::{Parser, Subcommand};
use report::{Demands, Report, grouped};
use shop::Shop;
use std::{env, path::PathBuf, process::ExitCode, time::Instant};

/// What a shell says of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// The demo's order service: places orders, publishes their events with every kind of
/// accident, and reports what the stock service made of them.
///
/// The servers are those of `DATABASE_URL` and `AMQP_URL`.
#[derive(Parser)]
#[command(name = "order_service")]
struct Cli {
    /// The topic exchange for the events.
    #[arg(long, global = true, default_value = "events")]
    exchange: String,
    /// The stock service's queue; `.retry.<ms>` and `.failed` follow its name.
    #[arg(long, global = true, default_value = "stock.events")]
    queue: String,
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
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
    let database_url = variable("DATABASE_URL", "postgres://stock:stock@localhost:5432/stock");
    let shop = async || Shop::open(&database_url).await;
    let amqp_url = variable("AMQP_URL", "amqp://guest:guest@localhost:5672/%2f");
    let broker = async || Broker::connect(&amqp_url, cli.exchange, cli.queue).await;
    let started = Instant::now();
    let took = || format!("{:.1} s", started.elapsed().as_secs_f64());

    match cli.command {
        Task::Place { orders } => {
            let shop = shop().await?;
            let lines = shop.place(orders).await?;
            let changes = shop.change(orders / 5).await?;
            let overtaken = shop.delay_placed_events_of_cancelled_orders().await?;
            println!(
                "{} orders with {} lines in {}; {} of them changed at once ({} events, {} cancelled)",
                number(orders),
                number(lines),
                took(),
                number(changes.orders),
                number(changes.events),
                number(changes.cancelled),
            );
            println!(
                "out of order in the outbox: {} cancellations before their orders, {} versions after newer ones",
                overtaken, changes.late
            );
        }
        Task::Change { orders } => {
            let changes = shop().await?.change(orders).await?;
            println!(
                "{} orders changed: {} events, {} cancelled; {} versions go out after newer ones",
                number(changes.orders),
                number(changes.events),
                number(changes.cancelled),
                changes.late
            );
        }
        Task::Relay { crash_before_marking: None } => {
            let published = relay::relay(&shop().await?, &broker().await?).await?;
            println!("{} events published in {}", number(published), took());
        }
        Task::Relay { crash_before_marking: Some(limit) } => {
            let published = relay::crash_before_marking(&shop().await?, &broker().await?, limit).await?;
            println!("{} events published, none marked as published", number(published));
        }
        Task::Replay { last } => {
            let published = relay::replay(&shop().await?, &broker().await?, last).await?;
            println!("{} events published once more in {}", number(published), took());
        }
        Task::Malformed => {
            let messages = relay::malformed(&shop().await?, &broker().await?).await?;
            let defects: Vec<&str> = messages.iter().map(|message| message.defect).collect();
            println!("{} messages: {}", messages.len(), defects.join(", "));
        }
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
        Task::Report { min_copies, min_lost_acknowledgements, json } => {
            let demands = Demands { copies: min_copies, lost_acknowledgements: min_lost_acknowledgements };
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

fn variable(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn number(number: usize) -> String {
    grouped(i64::try_from(number).unwrap_or(i64::MAX))
}
