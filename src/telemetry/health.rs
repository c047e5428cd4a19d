//! What the process knows about itself: what stands in its way, and whether its loops still turn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::stock::harmless;

/// The longest that one step may take before the service counts as not ready: far beyond an ordinary batch, and well
/// within what a person would call stuck.
const STUCK: Duration = Duration::from_secs(10);

/// A commit so recent says that the database answers.
const RECENT: Duration = Duration::from_secs(5);

/// What the process knows about itself. Cheap to clone; clones are one.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    parts: BTreeMap<u64, PartState>,
    loops: BTreeMap<u64, LoopState>,
    last_commit: Option<Instant>,
    stopping: bool,
    /// The key of the next part or loop.
    next: u64,
}

#[derive(Debug)]
struct PartState {
    name: String,
    matters: Matters,
    trouble: Option<(String, Instant)>,
}

#[derive(Debug)]
struct LoopState {
    name: String,
    limit: Duration,
    /// None while it waits for others that beat themselves.
    last_beat: Option<Instant>,
}

/// Whether trouble of a part keeps the service from being ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matters {
    /// Nothing is consumed.
    Consuming,
    /// All else goes on.
    Warning,
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What it is about.
    pub part: String,
    /// What is wrong.
    pub cause: String,
    /// For how long it has been.
    pub seconds: u64,
}

/// What is in the way.
#[derive(Debug, Default, serde::Serialize)]
pub struct Report {
    /// What keeps it from consuming; it is ready when there is nothing.
    pub not_ready: Vec<Finding>,
    /// What else is wrong.
    pub warnings: Vec<Finding>,
}

impl Health {
    /// A part that can be in trouble. It is not, until it says so.
    pub fn part(&self, name: &str, matters: Matters) -> Part {
        let mut state = self.state();
        let key = state.next_key();
        state.parts.insert(key, PartState { name: name.to_owned(), matters, trouble: None });
        Part { health: self.clone(), key }
    }

    /// A loop that shows that it turns by beating; one that has not for `limit` is stuck for good.
    pub fn pulse(&self, name: &str, limit: Duration) -> Pulse {
        let mut state = self.state();
        let key = state.next_key();
        state.loops.insert(key, LoopState { name: name.to_owned(), limit, last_beat: Some(Instant::now()) });
        Pulse { health: self.clone(), key }
    }

    /// Notes that the database has just committed something.
    pub fn committed(&self) {
        self.state().last_commit = Some(Instant::now());
    }

    /// Whether the database was seen to work a moment ago.
    pub fn has_committed_lately(&self) -> bool {
        self.state().last_commit.is_some_and(|last| last.elapsed() < RECENT)
    }

    /// Notes that the service was asked to stop: it is not ready from now on, and nobody must restart it.
    pub fn stopping(&self) {
        self.state().stopping = true;
    }

    /// Why the process cannot do its work any more, whatever its servers do; none while it can.
    pub fn fatal(&self) -> Vec<Finding> {
        let state = self.state();
        if state.stopping {
            return Vec::new();
        }
        if state.loops.is_empty() {
            let cause = "nothing runs any more".to_owned();
            return vec![Finding { part: "service".to_owned(), cause, seconds: 0 }];
        }
        state.stalled(|state| state.limit)
    }

    /// What is in the way by now.
    pub fn report(&self) -> Report {
        let state = self.state();
        let mut report = Report { not_ready: state.stalled(|state| STUCK.min(state.limit)), warnings: Vec::new() };
        for PartState { name, matters, trouble } in state.parts.values() {
            let Some((cause, since)) = trouble else { continue };
            let findings = match matters {
                Matters::Consuming => &mut report.not_ready,
                Matters::Warning => &mut report.warnings,
            };
            let seconds = since.elapsed().as_secs();
            findings.push(Finding { part: name.clone(), cause: cause.clone(), seconds });
        }
        if state.stopping {
            let cause = "it was asked to stop".to_owned();
            report.not_ready.push(Finding { part: "service".to_owned(), cause, seconds: 0 });
        }
        report
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // no step leaves it half done
    }
}

impl State {
    fn next_key(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn stalled(&self, limit: impl Fn(&LoopState) -> Duration) -> Vec<Finding> {
        let stalled = self.loops.values().filter_map(|state| {
            let silent = state.last_beat?.elapsed();
            let cause = "one step takes very long".to_owned();
            let finding = || Finding { part: state.name.clone(), cause, seconds: silent.as_secs() };
            (silent > limit(state)).then(finding)
        });
        stalled.collect()
    }
}

/// One part's right to say that it is in trouble. It is in none any more when it is dropped.
#[derive(Debug)]
pub struct Part {
    health: Health,
    key: u64,
}

impl Part {
    /// Says what is in the way, from now on.
    pub fn blocked(&self, cause: &str) {
        self.set(|trouble| {
            let since = trouble.take().map_or_else(Instant::now, |(_, since)| since);
            *trouble = Some((harmless(cause).to_string(), since));
        });
    }

    /// Says that nothing is in the way any more.
    pub fn free(&self) {
        self.set(|trouble| *trouble = None);
    }

    fn set(&self, change: impl FnOnce(&mut Option<(String, Instant)>)) {
        if let Some(state) = self.health.state().parts.get_mut(&self.key) {
            change(&mut state.trouble);
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.health.state().parts.remove(&self.key);
    }
}

/// One loop's way to show that it turns. Nothing is expected of it any more when it is dropped.
#[derive(Debug)]
pub struct Pulse {
    health: Health,
    key: u64,
}

impl Pulse {
    /// Shows that it turns.
    pub fn beat(&self) {
        self.set(Some(Instant::now()));
    }

    /// Says that it waits for others, which beat themselves, until the next beat.
    pub fn rest(&self) {
        self.set(None);
    }

    fn set(&self, last_beat: Option<Instant>) {
        if let Some(state) = self.health.state().loops.get_mut(&self.key) {
            state.last_beat = last_beat;
        }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.health.state().loops.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_told_with_its_cause_until_it_is_over() {
        let health = Health::default();
        let (broker, copies) = (health.part("broker", Matters::Consuming), health.part("copies", Matters::Warning));
        assert!(health.report().not_ready.is_empty());
        broker.blocked("away");
        broker.blocked("refused\n");
        copies.blocked("full");
        let report = health.report();
        assert_eq!(report.not_ready, [Finding { part: "broker".into(), cause: "refused\\n".into(), seconds: 0 }]);
        assert_eq!(report.warnings[0].part, "copies");
        broker.free();
        drop(copies);
        assert!(health.report().not_ready.is_empty() && health.report().warnings.is_empty());
    }

    #[test]
    fn a_loop_that_does_not_turn_is_fatal_one_that_waits_for_others_is_not() {
        let health = Health::default();
        assert_eq!(health.fatal().len(), 1, "nothing runs");
        let (supervisor, worker) = (health.pulse("supervisor", STUCK), health.pulse("worker", Duration::ZERO));
        supervisor.rest();
        while worker_age(&health).is_zero() {}
        assert_eq!(health.fatal().iter().map(|finding| finding.part.as_str()).collect::<Vec<_>>(), ["worker"]);
        assert_eq!(health.report().not_ready.len(), 1);
        drop(worker);
        assert!(health.fatal().is_empty());
        drop(supervisor);
        assert_eq!(health.fatal().len(), 1);
        health.stopping();
        assert!(health.fatal().is_empty(), "nobody restarts what is stopping");
        assert_eq!(health.report().not_ready.len(), 1);
    }

    fn worker_age(health: &Health) -> Duration {
        health.state().loops.values().filter_map(|state| state.last_beat).map(|beat| beat.elapsed()).sum()
    }
}
