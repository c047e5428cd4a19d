//! `stock-service doctor`: looks at everything that the service relies on, and says what to do about what it finds.

mod broker;
mod database;
mod findings;

use anyhow::bail;

use self::findings::{Findings, Level};
use super::say;
use crate::settings::Settings;

/// Check settings, database, broker and queues, each finding with its remedy
///
/// Changes nothing: what is missing is left missing. Warnings don't change the exit status, errors make it 1.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  DATABASE_URL=postgres://stock:secret@db/stock AMQP_URL=amqp://stock:secret@mq/%2f \
    stock-service doctor"
)]
pub(super) struct Args {
    /// Print an array of JSON objects: level, check, finding, remedy
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args, settings: &Settings) -> anyhow::Result<()> {
    let mut findings = Findings::default();
    findings.ok("settings", "valid; `stock-service config` prints them");
    // Each server by itself: one that does not answer hides nothing about the other.
    let (database, broker) = tokio::join!(database::examine(settings), broker::examine(settings));
    findings.0.extend(database.0);
    findings.0.extend(broker.0);
    match args.json {
        true => say(&serde_json::to_string_pretty(&findings.0)?)?,
        false => print(&findings)?,
    }
    match findings.count(Level::Error) {
        0 => Ok(()),
        1 => bail!("1 error found"),
        errors => bail!("{errors} errors found"),
    }
}

fn print(findings: &Findings) -> anyhow::Result<()> {
    for finding in &findings.0 {
        let level = match finding.level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Error => "ERROR",
        };
        say(&format!("{level:8} {:24} {}", finding.check, finding.finding))?;
        if let Some(remedy) = &finding.remedy {
            say(&format!("{:33} -> {remedy}", ""))?;
        }
    }
    say(&format!("errors: {}, warnings: {}", findings.count(Level::Error), findings.count(Level::Warning)))
}
