//! `stock-service consume`: builds everything, runs it, and stops it.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::purge::scheduled_purges;
use crate::db::Database;
use crate::handlers::Handlers;
use crate::outage::Outage;
use crate::settings::Settings;
use crate::worker::Workers;

/// Consume the queue until SIGTERM or SIGINT, and purge on a schedule
///
/// The first signal finishes and settles the batch in hand and gives the rest back; a second one ends at once. Either
/// way nothing is lost and nothing takes effect twice.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  DATABASE_URL=postgres://stock:secret@db/stock AMQP_URL=amqp://stock:secret@mq/%2f \
    stock-service consume"
)]
pub(super) struct Args {
    /// End when the queue is empty and nothing is in hand; retry queues are not waited for
    #[arg(long)]
    until_empty: bool,
}

pub(super) async fn run(args: Args, settings: Settings) -> anyhow::Result<()> {
    let stop = stop_on_signals()?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        database = %settings.database.url,
        broker = %settings.amqp.url,
        queue = settings.amqp.queue,
        workers = settings.consume.workers,
        "starting"
    );
    let database = Database::new(&settings.database, settings.connections());
    let working = work(args, &settings, &database, &stop);
    let too_late = async {
        stop.cancelled().await;
        tokio::time::sleep(settings.consume.grace).await;
    };
    tokio::select! {
        biased;
        () = working => tracing::info!("stopped"),
        () = too_late => tracing::warn!(grace = ?settings.consume.grace, "stopped in the middle, the rest goes back to the queue"),
    }
    Ok(())
}

async fn work(args: Args, settings: &Settings, database: &Database, stop: &CancellationToken) {
    if settings.database.migrate_on_start && stop.run_until_cancelled(migrate(database)).await.is_none() {
        return;
    }
    let purges = settings.purge.enabled.then(|| {
        let purges = scheduled_purges(settings.clone(), database.clone());
        AbortOnDropHandle::new(tokio::spawn(stop.clone().run_until_cancelled_owned(purges)))
    });
    Workers::new(settings, database.clone(), Handlers, args.until_empty).run(stop.clone()).await;
    drop(purges);
    database.close().await;
}

/// Migrates as soon as the database lets it.
async fn migrate(database: &Database) {
    let mut outage = Outage::default();
    loop {
        match database.migrate().await {
            Ok(migrated) => return tracing::info!(applied = migrated.applied, "schema up to date"),
            Err(error) => tokio::time::sleep(outage.pause(&format!("cannot migrate: {error:#}"))).await,
        }
    }
}

/// A token that the first SIGTERM or SIGINT cancels. The second one ends the process at once: the broker and the
/// database take back what it had.
fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        let mut any = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        let signal = any().await;
        tracing::info!(signal, "stopping");
        token.cancel();
        let signal = any().await;
        tracing::warn!(signal, "ending at once");
        std::process::exit(1);
    });
    Ok(stop)
}
