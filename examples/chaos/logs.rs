//! What the replicas and the broker said.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::Context;
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;

/// One line a message is what these are for; all others must be few, however many messages wait.
const ABOUT_ONE_MESSAGE: [&str; 2] = ["failed, to be retried", "failed, to be parked in the failure queue"];

/// What was found in a replica's log.
#[derive(Debug, Default)]
pub struct Log {
    /// The most lines of any minute that are not about one message.
    pub busiest_minute: usize,
    /// Events that failed for a while.
    pub retries: usize,
    /// Lines that should not be there.
    pub wrong: Vec<String>,
}

impl Log {
    /// Reads a log that must hold none of these secrets.
    pub fn read(path: &Path, secrets: &[&str]) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut log = Self::default();
        let mut minute: VecDeque<DateTime<Utc>> = VecDeque::new();
        for (line, number) in text.lines().zip(1..) {
            if secrets.iter().any(|secret| line.contains(*secret)) {
                log.wrong.push(format!("{}:{number} holds a password", path.display()));
            }
            // The last line of a replica that was killed may be half a line.
            let Ok(entry) = serde_json::from_str::<Value>(line) else { continue };
            let message = entry["message"].as_str().unwrap_or_default();
            if message == "panic" {
                log.wrong.push(line.to_owned());
            }
            log.retries += usize::from(message == ABOUT_ONE_MESSAGE[0]);
            if ABOUT_ONE_MESSAGE.contains(&message) {
                continue;
            }
            let time: DateTime<Utc> = entry["timestamp"].as_str().context("a line without a time")?.parse()?;
            minute.push_back(time);
            while minute.front().is_some_and(|first| *first <= time - TimeDelta::minutes(1)) {
                minute.pop_front();
            }
            log.busiest_minute = log.busiest_minute.max(minute.len());
        }
        Ok(log)
    }
}
