//! The right to settle each delivery once, and the gathering of acknowledgements.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use lapin::Acker;
use lapin::options::BasicAckOptions;
use lapin::types::DeliveryTag;
use tokio::time::Instant;

use super::answer;

/// How long an acknowledgement may wait for those of older deliveries. A copy is placed, and a slice of a batch tried, in
/// a fraction of it; what takes longer may take very long.
const PATIENCE: Duration = Duration::from_millis(250);

/// The right to settle one delivery, once, on the channel that it came by.
#[derive(Debug)]
#[must_use]
pub(super) struct Receipt {
    pub(super) tag: DeliveryTag,
    pub(super) acker: Acker,
}

impl Receipt {
    /// Whether the channel that it came by is still there.
    pub(super) fn is_valid(&self) -> bool {
        self.acker.usable()
    }
}

/// What one channel has delivered and nobody has settled: it tells how far one acknowledgement may reach.
///
/// The broker pays for each acknowledgement that comes by itself, and little for one that reaches back over hundreds. So
/// those behind a delivery that is not decided yet wait for it, a moment.
#[derive(Debug, Default)]
pub(super) struct Unsettled {
    state: Mutex<State<Acker>>,
    /// Held while frames are written: one that reaches further must not overtake that of a single delivery, for the
    /// broker closes a channel that acknowledges twice.
    writing: tokio::sync::Mutex<()>,
}

/// What there is to acknowledge, with what it takes to do so.
#[derive(Debug)]
struct State<A> {
    /// Deliveries about which nothing is decided.
    open: BTreeSet<DeliveryTag>,
    /// Those to be acknowledged, once nothing older is open.
    waiting: BTreeMap<DeliveryTag, A>,
    /// Since when the first of them waits for what it waits for.
    since: Option<Instant>,
    /// The most that may wait: they are a part of the window, which must not be used up by them.
    most: usize,
}

/// What to write: the first ones by one frame, the others one by one.
struct Frames<A> {
    together: BTreeMap<DeliveryTag, A>,
    singly: BTreeMap<DeliveryTag, A>,
}

impl<A> Default for State<A> {
    fn default() -> Self {
        Self { open: BTreeSet::new(), waiting: BTreeMap::new(), since: None, most: 0 }
    }
}

impl<A> State<A> {
    fn take_due(&mut self) -> Frames<A> {
        let first_open = self.open.first().copied().unwrap_or(DeliveryTag::MAX);
        let behind = self.waiting.split_off(&first_open);
        let together = std::mem::replace(&mut self.waiting, behind);
        if !together.is_empty() {
            self.since = None;
        }
        let is_overdue = self.since.is_some_and(|since| since.elapsed() >= PATIENCE);
        let singly = match is_overdue || self.waiting.len() > self.most {
            true => std::mem::take(&mut self.waiting),
            false => BTreeMap::new(),
        };
        self.since = (!self.waiting.is_empty()).then(|| self.since.unwrap_or_else(Instant::now));
        Frames { together, singly }
    }
}

impl Unsettled {
    fn state(&self) -> MutexGuard<'_, State<Acker>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // no step leaves it half done
    }

    /// Records a delivery.
    pub(super) fn delivered(&self, tag: DeliveryTag) {
        self.state().open.insert(tag);
    }

    /// Says how wide the window is.
    pub(super) fn fit(&self, window: u16) {
        self.state().most = usize::from(window) / 2;
    }

    /// Whether anything is to be given back.
    pub(super) fn is_empty(&self) -> bool {
        self.state().open.is_empty()
    }

    /// Acknowledges these, now or soon. Tells how many acknowledgements could not be sent; their messages will come again.
    pub(super) async fn acknowledge(&self, receipts: impl IntoIterator<Item = Receipt>) -> usize {
        let _writing = self.writing.lock().await;
        let frames = {
            let mut state = self.state();
            for Receipt { tag, acker } in receipts {
                state.open.remove(&tag);
                state.waiting.insert(tag, acker);
            }
            state.take_due()
        };
        frames.write().await
    }

    /// Acknowledges what still waits, whatever it waits for. Tells how many could not be sent.
    pub(super) async fn flush(&self) -> usize {
        let _writing = self.writing.lock().await;
        let singly = std::mem::take(&mut self.state().waiting);
        Frames { together: BTreeMap::new(), singly }.write().await
    }
}

impl Frames<Acker> {
    /// Tells how many acknowledgements could not be sent.
    async fn write(self) -> usize {
        let mut lost = 0;
        if let Some((_, last)) = self.together.last_key_value()
            && !ack(last, true).await
        {
            lost += self.together.len();
        }
        // Written one behind the other, and waited for together.
        let singly = self.singly.values().map(|acker| ack(acker, false));
        lost + join_all(singly).await.into_iter().filter(|arrived| !arrived).count()
    }
}

/// Whether the acknowledgement went out. lapin answers `false`, not an error, when the channel is gone; and nothing at
/// all when the connection breaks in this very moment.
async fn ack(acker: &Acker, multiple: bool) -> bool {
    answer(acker.ack(BasicAckOptions { multiple })).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `open` undecided, what is written of `decided` and how: together, singly, and what waits.
    fn written(state: &mut State<()>, decided: &[DeliveryTag]) -> [Vec<DeliveryTag>; 3] {
        for tag in decided {
            state.open.remove(tag);
            state.waiting.insert(*tag, ());
        }
        let Frames { together, singly } = state.take_due();
        [&together, &singly, &state.waiting].map(|acks| acks.keys().copied().collect())
    }

    fn delivered(last: DeliveryTag, most: usize) -> State<()> {
        State { open: (1..=last).collect(), most, ..State::default() }
    }

    #[test]
    fn what_is_behind_an_open_delivery_waits_for_it_and_goes_with_it() {
        let mut state = delivered(5, 3);
        assert_eq!(written(&mut state, &[1, 2, 4]), [vec![1, 2], vec![], vec![4]]);
        assert_eq!(written(&mut state, &[5]), [vec![], vec![], vec![4, 5]]);
        assert_eq!(written(&mut state, &[3]), [vec![3, 4, 5], vec![], vec![]]);
        assert_eq!(state.since, None);
    }

    #[test]
    fn no_more_wait_than_the_window_can_spare() {
        let mut state = delivered(5, 2);
        assert_eq!(written(&mut state, &[2, 3]), [vec![], vec![], vec![2, 3]]);
        assert_eq!(written(&mut state, &[4]), [vec![], vec![2, 3, 4], vec![]]);
        assert_eq!(written(&mut state, &[1]), [vec![1], vec![], vec![]]);
    }

    #[test]
    fn none_waits_for_long() {
        let mut state = delivered(5, 3);
        assert_eq!(written(&mut state, &[2]), [vec![], vec![], vec![2]]);
        state.since = state.since.map(|since| since - PATIENCE);
        assert_eq!(written(&mut state, &[]), [vec![], vec![2], vec![]]);
    }
}
