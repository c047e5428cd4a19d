//! `stock-service consume`: builds everything, runs it, and stops it.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::purge::scheduled_purges;
use super::signals::Signals;
use crate::db::Database;
use crate::handlers::Handlers;
use crate::http;
use crate::message::{Interruption, Suspicion};
use crate::outage::Outage;
use crate::settings::Settings;
use crate::telemetry::Monitor;
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
    let monitor = Monitor::default();
    let _serving = match settings.http_listen {
        Some(address) => {
            let listener = http::listen(address).await?;
            tracing::info!(address = %listener.local_addr()?, "listening for HTTP");
            let serve = http::serve(listener, monitor.clone(), database.clone());
            Some(AbortOnDropHandle::new(tokio::spawn(serve)))
        }
        None => None,
    };
    let working = work(args, &settings, &database, &monitor, &stop);
    let too_late = async {
        stop.cancelled().await;
        monitor.health.stopping();
        tokio::time::sleep(settings.consume.grace).await;
    };
    tokio::select! {
        biased;
        () = working => tracing::info!("stopped"),
        () = too_late => tracing::warn!(grace = ?settings.consume.grace, "stopped in the middle, the rest goes back to the queue"),
    }
    Ok(())
}

async fn work(args: Args, settings: &Settings, database: &Database, monitor: &Monitor, stop: &CancellationToken) {
    // Says "not connected yet" from here on.
    let workers = Workers::new(settings, database.clone(), Handlers, args.until_empty, monitor.clone());
    if settings.database.migrate_on_start && stop.run_until_cancelled(migrate(database, monitor)).await.is_none() {
        return;
    }
    let purges = settings.purge.enabled.then(|| {
        let purges = scheduled_purges(settings.clone(), database.clone(), monitor.metrics.clone());
        AbortOnDropHandle::new(tokio::spawn(stop.clone().run_until_cancelled_owned(purges)))
    });
    workers.run(stop.clone()).await;
    drop(purges);
    database.close().await;
}

/// Migrates as soon as the database lets it.
async fn migrate(database: &Database, monitor: &Monitor) {
    let mut outage = Outage::new(monitor, "schema");
    // Nobody may take a long migration for a hang and kill it in the middle.
    let _alive = monitor.health.pulse("migration", Duration::MAX);
    loop {
        match database.migrate().await {
            Ok(migrated) => return tracing::info!(applied = migrated.applied, "schema up to date"),
            Err(error) => {
                let cause = error.context("cannot migrate");
                let pause = outage.pause(&Interruption { cause, suspicion: Suspicion::None }, 0);
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// A token that the first SIGTERM or SIGINT cancels. The second one ends the process at once: the broker and the
/// database take back what it had.
fn stop_on_signals() -> anyhow::Result<CancellationToken> {
    let mut signals = Signals::listen()?;
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        let signal = signals.next().await;
        tracing::info!(signal, "stopping");
        token.cancel();
        let signal = signals.next().await;
        tracing::warn!(signal, "ending at once");
        std::process::exit(1);
    });
    Ok(stop)
}
