//! What a worker has taken from the queue and not decided about.

use std::collections::VecDeque;
use std::time::Duration;

use backon::ExponentialBackoff;
use tokio::time::Instant;

use crate::broker::Parcel;
use crate::message::{Message, Suspicion};
use crate::outage::{Outage, outage_pauses};

/// A decoded delivery that nothing has been decided about.
pub(super) struct Pending {
    pub(super) message: Message,
    pub(super) parcel: Parcel,
}

/// What a worker has taken and not decided about.
pub(super) struct Hand {
    /// In the order of arrival.
    pub(super) rest: VecDeque<Pending>,
    /// Messages that were interrupted alone; each is tried alone, now and then, beside the others.
    pub(super) suspects: Vec<Suspect>,
    /// The most messages of the next transaction.
    pub(super) limit: usize,
    /// Whether the last transaction was a suspect's: then it is the others' turn, whose way a slow one must not bar.
    pub(super) others_turn: bool,
    /// What keeps this worker from working.
    pub(super) outage: Outage,
}

impl Hand {
    pub(super) fn new(limit: usize, outage: Outage) -> Self {
        Self { rest: VecDeque::new(), suspects: Vec::new(), limit, others_turn: false, outage }
    }

    /// How many messages it holds.
    pub(super) fn len(&self) -> usize {
        self.rest.len() + self.suspects.len()
    }

    /// Takes a suspect whose time has come, every other time.
    pub(super) fn due_suspect(&mut self) -> Option<Suspect> {
        if std::mem::take(&mut self.others_turn) {
            return None;
        }
        let now = Instant::now();
        let due = self.suspects.iter().position(|suspect| suspect.record.due <= now)?;
        self.others_turn = true;
        Some(self.suspects.swap_remove(due))
    }

    /// When the next suspect is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.suspects.iter().map(|suspect| suspect.record.due).min()
    }

    /// Takes the next messages, as many as may be tried at once.
    pub(super) fn next_slice(&mut self) -> Option<VecDeque<Pending>> {
        let size = self.limit.min(self.rest.len());
        (size > 0).then(|| self.rest.drain(..size).collect())
    }
}

/// A message that was interrupted alone. Mostly it is innocent, and the database away; but a message may also be the
/// one that breaks its connection, or waits for ever.
pub(super) struct Suspect {
    pub(super) pending: Pending,
    pub(super) record: Record,
}

/// What speaks against a suspect.
pub(super) struct Record {
    interruptions: u32,
    since: Instant,
    /// How many events had been applied when it was first interrupted.
    applied: u64,
    due: Instant,
    pauses: ExponentialBackoff,
}

impl Record {
    /// Begins one, of a message that has not been interrupted alone before; `applied` events have been by now.
    pub(super) fn new(applied: u64) -> Self {
        let now = Instant::now();
        Self { interruptions: 0, since: now, applied, due: now, pauses: outage_pauses() }
    }

    /// Adds an interruption; the message is due again after a pause.
    pub(super) fn interrupted(mut self) -> Self {
        self.interruptions += 1;
        self.due = Instant::now() + self.pauses.next().unwrap_or_default();
        self
    }

    /// Whether one more interruption proves it: others went through while it did not.
    pub(super) fn is_proof(&self, suspicion: Suspicion, applied: u64) -> bool {
        /// Interruptions, the new one included. A restart of the database makes one or two.
        const ENOUGH: u32 = 5;
        /// Longer than it takes to restart a database.
        const LONG: Duration = Duration::from_secs(30);

        let often = self.interruptions + 1 >= ENOUGH && applied > self.applied;
        match suspicion {
            Suspicion::None => false,
            Suspicion::Timeout => often, // each has taken its time
            Suspicion::BrokenConnection => often && self.since.elapsed() >= LONG,
        }
    }
}
