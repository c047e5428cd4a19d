//! What was published, compared with what became of it: one by one, not by sums.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use crate::audit::Finding;
use crate::load::{Kind, Load, Message};
use crate::publisher::Fate;
use crate::stock::{Reservation, Status};

/// The load, and what is known of its publication.
#[derive(Debug)]
pub struct Published<'a> {
    load: &'a Load,
    fates: &'a [Fate],
    /// By an event's id, the messages of it that the broker confirmed.
    confirmed: HashMap<Uuid, usize>,
    /// By an event's id, those that nobody knows of.
    perhaps: HashMap<Uuid, usize>,
}

impl<'a> Published<'a> {
    pub fn new(load: &'a Load, fates: &'a [Fate]) -> Self {
        let (mut confirmed, mut perhaps) = (HashMap::new(), HashMap::new());
        for (message, fate) in fates.iter().enumerate() {
            let Some(event) = load.event(message) else { continue };
            match fate {
                Fate::Unsent => {}
                Fate::Perhaps => *perhaps.entry(event.id).or_default() += 1,
                Fate::Confirmed => *confirmed.entry(event.id).or_default() += 1,
            }
        }
        Self { load, fates, confirmed, perhaps }
    }

    /// Confirmed events that have not been applied.
    pub fn missing(&self, applied: &HashSet<Uuid>) -> Vec<Uuid> {
        self.confirmed.keys().filter(|id| !applied.contains(id)).copied().collect()
    }

    /// The bodies of malformed messages with this fate.
    pub fn malformed(&self, fate: Fate) -> HashSet<&[u8]> {
        let messages = self.load.messages.iter().zip(self.fates).filter(|(_, its)| **its == fate);
        messages
            .filter_map(|(message, _)| if let Message::Malformed(body) = message { Some(&**body) } else { None })
            .collect()
    }

    /// Every message that the broker confirmed is an applied event, a copy of one, or a failed message.
    pub fn events(&self, applied: &[Uuid]) -> Finding {
        let (count, applied): (usize, HashSet<_>) = (applied.len(), applied.iter().copied().collect());
        let mut wrong: Vec<_> = self.missing(&applied).iter().map(|id| format!("{id} was lost")).collect();
        let known = |id: &&Uuid| self.confirmed.contains_key(id) || self.perhaps.contains_key(id);
        wrong.extend(applied.iter().filter(|id| !known(id)).map(|id| format!("{id} came from nowhere")));
        let sum = |events: &HashMap<Uuid, usize>| events.values().sum::<usize>();
        let by_confirm = applied.iter().filter(|id| self.confirmed.contains_key(id)).count();
        let figures = format!(
            "{} confirmed = {by_confirm} applied + {} copies; {} perhaps, of which {} applied",
            sum(&self.confirmed),
            sum(&self.confirmed) - by_confirm,
            sum(&self.perhaps),
            count - by_confirm,
        );
        Finding::new("events", figures, wrong)
    }

    /// Each applied order has its lines, once, and they are released if it was cancelled.
    pub fn goods(&self, applied: &HashSet<Uuid>, reservations: Vec<Reservation>) -> Finding {
        let mut cancelled = HashSet::new();
        let mut expected: BTreeMap<Uuid, Vec<(Uuid, String)>> = BTreeMap::new();
        for event in self.load.events.iter().filter(|event| applied.contains(&event.id)) {
            match &event.kind {
                Kind::Placed(lines) => {
                    let lines = lines.iter().map(|line| (line.product_id, line.quantity())).collect();
                    expected.insert(event.order_id, lines);
                }
                Kind::Changed { status: "cancelled", .. } => drop(cancelled.insert(event.order_id)),
                Kind::Changed { .. } => {}
            }
        }
        let figures =
            format!("{} lines of {} orders, {} cancelled", reservations.len(), expected.len(), cancelled.len());
        let mut wrong = Vec::new();
        let mut found: BTreeMap<Uuid, Vec<(Uuid, String)>> = BTreeMap::new();
        for (order, product, quantity, released) in reservations {
            found.entry(order).or_default().push((product, quantity));
            if released != cancelled.contains(&order) {
                let holds = if released { "was released, but not cancelled" } else { "was cancelled, but holds goods" };
                wrong.push(format!("order {order} {holds}: product {product}"));
            }
        }
        for lines in found.values_mut().chain(expected.values_mut()) {
            lines.sort_unstable();
        }
        let orders: HashSet<_> = found.keys().chain(expected.keys()).collect();
        for order in orders {
            if found.get(order) != expected.get(order) {
                wrong.push(format!("order {order} holds {:?}, not {:?}", found.get(order), expected.get(order)));
            }
        }
        Finding::new("goods", figures, wrong)
    }

    /// Each order has the newest status that was applied, and is cancelled if it ever was.
    pub fn states(&self, applied: &HashSet<Uuid>, statuses: Vec<Status>) -> Finding {
        let mut expected: HashMap<Uuid, (&str, i64, bool)> = HashMap::new();
        for event in self.load.events.iter().filter(|event| applied.contains(&event.id)) {
            let order = expected.entry(event.order_id).or_insert(("placed", 0, false));
            if let Kind::Changed { status, version } = &event.kind {
                // The load's events are in the order of their versions.
                *order = (status, *version, order.2 || *status == "cancelled");
            }
        }
        let figures = format!("{} orders", statuses.len());
        let mut wrong = Vec::new();
        for (order, status, version, cancelled) in statuses {
            let expected = expected.remove(&order);
            if expected != Some((&status, version, cancelled)) {
                wrong.push(format!("order {order} is {status} {version} {cancelled}, not {expected:?}"));
            }
        }
        wrong.extend(expected.keys().map(|order| format!("order {order} is unknown")));
        Finding::new("status of the orders", figures, wrong)
    }

    /// Each malformed message is in the failure queue, body unchanged, and nothing else is.
    pub fn failures(&self, failed: &[(Vec<u8>, String)]) -> Finding {
        let (confirmed, perhaps) = (self.malformed(Fate::Confirmed), self.malformed(Fate::Perhaps));
        let found: HashSet<&[u8]> = failed.iter().map(|(body, _)| &**body).collect();
        let text = String::from_utf8_lossy;
        let mut wrong: Vec<_> = confirmed.difference(&found).map(|body| format!("lost: {}", text(body))).collect();
        let strange = failed.iter().filter(|(body, _)| !confirmed.contains(&**body) && !perhaps.contains(&**body));
        wrong.extend(strange.map(|(body, headers)| format!("does not belong here: {} {headers}", text(body))));
        let figures = format!(
            "{} confirmed, {} perhaps; {} found, and {} second copies",
            confirmed.len(),
            perhaps.len(),
            found.len(),
            failed.len() - found.len()
        );
        Finding::new("malformed messages", figures, wrong)
    }
}
