//! `stock-service check`: tells what the service would do with a message body, and why.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Serialize;

use super::say;
use crate::message::{Event, Message, Verdict, decode};
use crate::settings::Settings;

/// Tell of message bodies what the service would do with them, and why
///
/// For whoever writes a producer. Asks no server: an event that would be applied may still be a copy of an earlier one.
/// Exit status 0 when each would be applied (or ignored), 1 when one would go to the failure queue.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  stock-service check order.json\n  my-producer --print | stock-service check -\n\n\
    consume.max_body and consume.unknown_event are honoured. docs/contract has the contract.")]
pub(super) struct Args {
    /// Files with one message body each; - is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Print an array of JSON objects: file, end (applied, ignored, failed), event, reason, detail
    #[arg(long)]
    json: bool,
}

/// A body and what would become of it.
#[derive(Debug, Serialize)]
struct Check {
    file: String,
    #[serde(flatten)]
    end: End,
}

/// What would become of a body.
#[derive(Debug, Serialize)]
#[serde(tag = "end", rename_all = "lowercase")]
enum End {
    Applied {
        event: &'static str,
        detail: String,
    },
    Ignored {
        detail: String,
    },
    /// `reason` and `detail` are the headers `failure-reason` and `failure-detail`.
    Failed {
        reason: &'static str,
        detail: String,
    },
}

pub(super) fn run(args: &Args, settings: &Settings) -> anyhow::Result<()> {
    let mut checks = Vec::new();
    for file in &args.files {
        let body = read(file).with_context(|| format!("cannot read {}", file.display()))?;
        checks.push(Check { file: file.display().to_string(), end: End::of(&body, settings) });
    }
    if args.json {
        say(&serde_json::to_string_pretty(&checks)?)?;
    } else {
        for Check { file, end } in &checks {
            say(&format!("{file}: {end}"))?;
        }
    }
    match checks.iter().filter(|check| matches!(check.end, End::Failed { .. })).count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} would go to the failure queue", checks.len()),
    }
}

fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    if file == Path::new("-") {
        let mut body = Vec::new();
        std::io::stdin().read_to_end(&mut body)?;
        return Ok(body);
    }
    std::fs::read(file)
}

impl End {
    /// Decides as the worker does.
    fn of(body: &[u8], settings: &Settings) -> Self {
        match decode(body, None, settings.consume.max_body) {
            Ok(message) => Self::Applied { event: message.event.name(), detail: summary(&message) },
            Err(undecodable) => match settings.retry.judge_undecodable(&undecodable) {
                Verdict::Park { reason, detail, .. } => Self::Failed { reason: reason.as_str(), detail },
                // What cannot be read is never tried again: if it is not parked, it is let go.
                Verdict::Ack | Verdict::Retry { .. } => Self::Ignored { detail: undecodable.to_string() },
            },
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Applied { event, detail } => write!(f, "applied as {event} ({detail})"),
            Self::Ignored { detail } => write!(f, "ignored: {detail}"),
            Self::Failed { reason, detail } => write!(f, "failure queue: {reason}: {detail}"),
        }
    }
}

/// What was read, in a few words that show a producer whether it is what was meant.
fn summary(message: &Message) -> String {
    match &message.event {
        Event::OrderPlaced(order) => match order.lines.len() {
            1 => "1 line".to_owned(),
            lines => format!("{lines} lines"),
        },
        Event::OrderStatusChanged(change) => format!("version {}", change.version),
    }
}
