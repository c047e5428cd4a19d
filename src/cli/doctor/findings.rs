//! What was found, how bad it is, and what to do about it.

use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// As it should be, or good to know.
    Ok,
    /// The service works, with less than it promises or not for ever.
    Warning,
    /// The service does not work, or breaks its promise.
    Error,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// What was looked at: a name that does not change, for scripts.
    pub(super) check: &'static str,
    pub(super) finding: String,
    pub(super) remedy: Option<String>,
}

/// All findings, in the order in which they were made.
#[derive(Debug, Default)]
pub(super) struct Findings(pub(super) Vec<Finding>);

impl Findings {
    pub(super) fn ok(&mut self, check: &'static str, finding: impl Into<String>) {
        self.0.push(Finding { level: Level::Ok, check, finding: finding.into(), remedy: None });
    }

    pub(super) fn warn(&mut self, check: &'static str, finding: impl Into<String>, remedy: impl Into<String>) {
        self.add(Level::Warning, check, finding, remedy);
    }

    pub(super) fn fail(&mut self, check: &'static str, finding: impl Into<String>, remedy: impl Into<String>) {
        self.add(Level::Error, check, finding, remedy);
    }

    pub(super) fn add(
        &mut self,
        level: Level,
        check: &'static str,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.0.push(Finding { level, check, finding: finding.into(), remedy: Some(remedy.into()) });
    }

    pub(super) fn count(&self, level: Level) -> usize {
        self.0.iter().filter(|finding| finding.level == level).count()
    }
}
