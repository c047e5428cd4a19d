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
    /// Messages that have not failed before.
    first: Lane,
    /// Those that have: they may fail again, and are not to take the others along each time.
    again: Lane,
    /// Messages that were interrupted alone; each is tried alone, now and then, beside the others.
    pub(super) suspects: Vec<Suspect>,
    /// Whether the last transaction was a suspect's: then it is the others' turn, whose way a slow one must not bar.
    pub(super) others_turn: bool,
    /// What keeps this worker from working.
    pub(super) outage: Outage,
}

/// Messages in the order of arrival, and how many of them are tried together.
pub(super) struct Lane {
    waiting: VecDeque<Pending>,
    limit: usize,
    batch_size: usize,
}

/// Whether a message has failed before.
#[derive(Clone, Copy)]
pub(super) enum Attempt {
    First,
    Again,
}

impl Hand {
    pub(super) fn new(batch_size: usize, outage: Outage) -> Self {
        let lane = |limit| Lane { waiting: VecDeque::new(), limit, batch_size };
        Self { first: lane(batch_size), again: lane(1), suspects: Vec::new(), others_turn: false, outage }
    }

    /// How many messages it holds.
    pub(super) fn len(&self) -> usize {
        self.first.waiting.len() + self.again.waiting.len() + self.suspects.len()
    }

    /// Whether it holds none but suspects.
    pub(super) fn is_free(&self) -> bool {
        self.len() == self.suspects.len()
    }

    pub(super) fn lane(&mut self, attempt: Attempt) -> &mut Lane {
        match attempt {
            Attempt::First => &mut self.first,
            Attempt::Again => &mut self.again,
        }
    }

    /// Adds a message, behind all others of its kind.
    pub(super) fn take(&mut self, pending: Pending) {
        let attempt = if pending.parcel.retries == 0 { Attempt::First } else { Attempt::Again };
        self.lane(attempt).waiting.push_back(pending);
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
    pub(super) fn next_slice(&mut self) -> Option<(Attempt, VecDeque<Pending>)> {
        [Attempt::First, Attempt::Again].into_iter().find_map(|attempt| {
            let Lane { waiting, limit, .. } = self.lane(attempt);
            let size = waiting.len().min(*limit);
            (size > 0).then(|| (attempt, waiting.drain(..size).collect()))
        })
    }
}

impl Lane {
    /// Puts back what was taken and not decided about.
    pub(super) fn put_back(&mut self, mut slice: VecDeque<Pending>) {
        slice.append(&mut self.waiting);
        self.waiting = slice;
    }

    /// A slice went through. A little more the next time.
    ///
    /// More by a constant, and a half after each culprit, comes to rest at `sqrt(2 * MORE / p)` messages, where a share
    /// `p` of them fails; and so does the size that costs least, about `sqrt(6 / p)` as measured: fewer pay for more
    /// transactions, more for the work that each culprit undoes.
    pub(super) fn went_through(&mut self) {
        const MORE: usize = 4;
        self.limit = (self.limit + MORE).min(self.batch_size);
    }

    /// A slice had a culprit.
    pub(super) fn failed(&mut self) {
        self.limit = (self.limit / 2).max(1);
    }

    /// The service was interrupted while so many were tried. An eighth, as if one of them were to blame: if one is, it
    /// stands alone soon; if none is, little is lost.
    pub(super) fn interrupted(&mut self, tried: usize) {
        self.limit = (tried / 8).max(1);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_tries_fewer_after_each_culprit_and_a_few_more_after_each_slice_without() {
        let mut lane = Lane { waiting: VecDeque::new(), limit: 10, batch_size: 12 };
        lane.went_through();
        assert_eq!(lane.limit, 12, "never more than a batch");
        for limit in [6, 3, 1, 1] {
            lane.failed();
            assert_eq!(lane.limit, limit, "never none");
        }
        lane.went_through();
        assert_eq!(lane.limit, 5);
        for (tried, limit) in [(80, 10), (3, 1)] {
            lane.interrupted(tried);
            assert_eq!(lane.limit, limit);
        }
    }
}
