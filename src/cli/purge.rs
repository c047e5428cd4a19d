//! `stock-service purge`, and the same purge on `consume`'s schedule.

use std::time::Duration;

use anyhow::{Context, bail};
use chrono::{SecondsFormat, Utc};
use indicatif::{ProgressBar, ProgressStyle};

use super::{PATIENCE, say, with_database};
use crate::broker::{self, Topology};
use crate::db::{Database, explain};
use crate::inbox::purge::{self, Rival};
use crate::settings::{Settings, UNITS, parse_duration};
use crate::telemetry::{Metrics, Purge};

/// Delete the rows of `processed_event` that are older than a horizon
///
/// A row may go once no copy of its event can arrive any more: the horizon must be longer than producers can replay
/// and than messages can wait in the failure and retry queues.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  stock-service purge --horizon 30d --dry-run")]
pub(super) struct Args {
    /// How old a row must be: a whole number and s, min, h, d or w
    #[arg(long, value_name = "AGE", value_parser = horizon)]
    horizon: Duration,

    /// Count the rows and delete none
    #[arg(long)]
    dry_run: bool,

    /// Purge although the horizon is below `purge.minimum_horizon` or younger than waiting messages; never below 1h
    #[arg(long)]
    force: bool,
}

/// No force goes below this: copies of the last minutes are on their way at any time.
const LEAST: Duration = Duration::from_secs(3600);

fn horizon(text: &str) -> Result<Duration, String> {
    parse_duration(text, &UNITS[1..])
}

pub(super) async fn run(args: Args, settings: Settings) -> anyhow::Result<()> {
    check(args.horizon, args.force, &settings).await?;
    with_database(&settings, async |database| purge(&args, database).await).await
}

async fn purge(args: &Args, database: &Database) -> anyhow::Result<()> {
    let cutoff = purge::cutoff(database, args.horizon).await?;
    say(&format!("cutoff {}", cutoff.to_rfc3339_opts(SecondsFormat::Secs, true)))?;
    if args.dry_run {
        let rows = purge::count(database, cutoff).await.map_err(explain).context("cannot count")?;
        return say(&format!("{rows} rows would be deleted"));
    }
    let bar = progress_bar(database, cutoff).await?;
    let purged = purge::purge(database, cutoff, Rival::Wait, |rows| bar.inc(rows)).await;
    let deleted = bar.position();
    bar.finish_and_clear();
    let rows = purged
        .map_err(explain)
        .with_context(|| format!("the purge broke off after {deleted} rows, which stay deleted"))?;
    say(&format!("{rows} rows deleted"))
}

/// Refuses a horizon that copies may outlive.
async fn check(horizon: Duration, force: bool, settings: &Settings) -> anyhow::Result<()> {
    if horizon < LEAST {
        bail!("a horizon below 1h is never allowed: copies of such events are still on their way");
    }
    if force {
        return Ok(());
    }
    let minimum = settings.purge.minimum_horizon;
    if horizon < minimum {
        bail!(
            "the horizon is below purge.minimum_horizon ({minimum:?}): a copy that arrives later would take effect a \
             second time. --force overrides"
        );
    }
    match tokio::time::timeout(PATIENCE, longest_wait(settings)).await.unwrap_or_else(|_| bail!("no answer")) {
        Ok(wait) if horizon < wait => bail!(
            "a message in the failure or retry queues is {} hours old, retry delays included: sent again after the \
             purge it would take effect a second time. Empty the queue first, or override with --force",
            wait.as_secs() / 3600
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!(
            broker = settings.amqp.url.place(),
            error = format!("{error:#}"),
            "cannot ask the broker for messages older than the horizon"
        ),
    }
    Ok(())
}

/// The age of the oldest message that waits in the failure or retry queues, plus all retry delays.
async fn longest_wait(settings: &Settings) -> anyhow::Result<Duration> {
    let connection = broker::connect(&settings.amqp.url, "purge").await?;
    let topology = Topology::new(&settings.amqp, &settings.retry);
    let oldest = broker::oldest_waiting(&connection, &topology).await;
    broker::close(&connection).await;
    Ok(oldest? + settings.retry.all_delays())
}

async fn progress_bar(database: &Database, cutoff: chrono::DateTime<Utc>) -> anyhow::Result<ProgressBar> {
    let bar = ProgressBar::new(0); // shows on a terminal only
    if !bar.is_hidden() {
        bar.set_length(purge::count(database, cutoff).await.map_err(explain)?);
        bar.set_style(ProgressStyle::with_template("{wide_bar} {human_pos}/{human_len} rows, {eta} left")?);
    }
    Ok(bar)
}

/// Purges every `purge.every`, for ever. Replicas that come at the same time leave the work to one.
pub(super) async fn scheduled_purges(settings: Settings, database: Database, metrics: Metrics) {
    loop {
        // Up to a tenth earlier: replicas that were started together need not come together.
        tokio::time::sleep(settings.purge.every.mul_f64(1.0 - 0.1 * fastrand::f64())).await;
        let purged = async {
            check(settings.purge.horizon, false, &settings).await?;
            let cutoff = purge::cutoff(&database, settings.purge.horizon).await?;
            let purged = purge::purge(&database, cutoff, Rival::Yield, |rows| metrics.purged(rows)).await;
            anyhow::Ok((cutoff, purged.map_err(explain)?))
        };
        match purged.await {
            Ok((cutoff, rows)) => {
                metrics.purge(Purge::Done);
                tracing::info!(%cutoff, rows, "purged");
            }
            Err(error) => {
                metrics.purge(Purge::Failed);
                tracing::warn!(error = format!("{error:#}"), "not purged");
            }
        }
    }
}
