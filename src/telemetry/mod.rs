//! What the running service shows of itself: the log, metrics, and its health.

mod health;
mod metrics;

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

pub use health::{Finding, Health, Matters, Part, Pulse, Report};
pub use metrics::{Fate, Fault, Held, Hold, Link, Metrics, Placement, Purge, Step};

/// What the rooms report to, and `http` reads. Cheap to clone; clones are one.
#[derive(Clone, Debug, Default)]
pub struct Monitor {
    /// What is counted and timed.
    pub metrics: Metrics,
    /// What is in the way.
    pub health: Health,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    /// Text.
    Text,
    /// One JSON object a line.
    Json,
}

/// What is logged, as far as `RUST_LOG` does not say otherwise. The libraries report every lost connection by themselves,
/// and so do we, with what follows from it.
const DEFAULT_FILTER: &str = "info,lapin=off,sqlx=off";

/// Whether `text` can be read as a filter of levels.
pub fn is_log_filter(text: &str) -> bool {
    EnvFilter::try_new(text).is_ok()
}

/// Sends all logs to standard error from now on. What cannot be read of the filter is not heeded.
pub fn init(format: LogFormat, filter: Option<&str>) {
    // Of two levels of one target the later one counts.
    let filter = EnvFilter::new([DEFAULT_FILTER, filter.unwrap_or_default()].join(","));
    let terminal = std::io::stderr().is_terminal();
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(BoxMakeWriter::new(std::io::stderr));
    match format {
        LogFormat::Json => subscriber.json().flatten_event(true).init(),
        LogFormat::Auto if !terminal => subscriber.json().flatten_event(true).init(),
        LogFormat::Auto | LogFormat::Text => subscriber.with_ansi(terminal).init(),
    }
    // A panic is one line among the others, too; debug form, for its text may be foreign.
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(tracing::field::display);
        tracing::error!(place, text = ?info.payload_as_str(), "panic");
    }));
}
