//! Did every event take effect exactly once? Answered by SQL and the broker alone: the
//! stock service is not asked what it believes.

use crate::{
    broker::{Broker, Depths, Failed},
    shop::Shop,
};
use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};
use std::fmt;

/// What a trial must at least have been through to prove anything.
pub(crate) struct Demands {
    /// Percent of the valid messages that are copies.
    pub(crate) copies: f64,
    pub(crate) lost_acknowledgements: i64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// A figure that nothing is demanded of.
    None,
    Right,
    Wrong,
}

#[derive(Clone)]
enum Figure {
    Number(i64),
    Text(String),
}

struct Line {
    key: &'static str,
    label: String,
    value: Figure,
    mark: Mark,
    note: String,
}

pub(crate) struct Report {
    sections: Vec<(&'static str, Vec<Line>)>,
}

/// One row, all figures: read in one statement, so that they fit together.
#[derive(sqlx::FromRow)]
struct Figures {
    orders: i64,
    lines: i64,
    status_changes: i64,
    cancelled: i64,
    by_relay: i64,
    by_crashed_relay: i64,
    by_replay: i64,
    malformed: i64,
    unconfirmed: i64,
    unpublished: i64,
    distinct_events: i64,
    processed: i64,
    processed_unknown: i64,
    kills: i64,
    lost_acknowledgements: i64,
    reservations: i64,
    orders_right: i64,
    lines_missing: i64,
    lines_too_many: i64,
    holding_though_cancelled: i64,
    released_for_nothing: i64,
    status_wrong: i64,
}

/// A malformed message as it was published.
#[derive(sqlx::FromRow)]
struct Sent {
    body: Vec<u8>,
    defect: String,
    expected_reason: String,
    confirmed: bool,
}

impl Report {
    pub(crate) async fn make(shop: &Shop, broker: &Broker, demands: &Demands) -> Result<Self> {
        let figures: Figures = sqlx::query_as(include_str!("report.sql"))
            .fetch_one(shop.pool())
            .await
            .context("cannot read the tables: have the stock service's migrations run?")?;
        let sent: Vec<Sent> = sqlx::query_as(
            "select body, defect, expected_reason, confirmed_at is not null as confirmed
             from shop.publication where kind = 'malformed' order by id",
        )
        .fetch_all(shop.pool())
        .await?;
        let depths = broker.depths().await?;
        let failed = broker.failed_messages().await?;

        Ok(Self {
            sections: vec![
                ("Orders in the shop", shop_lines(&figures)),
                ("Messages that the broker confirmed", message_lines(&figures, demands)),
                ("Events in the stock database", event_lines(&figures, &depths, demands)),
                ("Goods and states", stock_lines(&figures)),
                ("Queues", queue_lines(broker, &depths, &sent)),
                ("Failed messages, body unchanged to the byte", failed_lines(&sent, failed)),
            ],
        })
    }

    pub(crate) fn right(&self) -> bool {
        self.sections.iter().flat_map(|(_, lines)| lines).all(|line| line.mark != Mark::Wrong)
    }

    pub(crate) fn json(&self) -> Value {
        let mut figures = Map::new();
        let mut failed = Vec::new();
        for line in self.sections.iter().flat_map(|(_, lines)| lines) {
            let value = match line.value.clone() {
                Figure::Number(number) => Value::from(number),
                Figure::Text(text) => Value::from(text),
            };
            let right = (line.mark != Mark::None).then_some(line.mark == Mark::Right);
            if line.key == "failed_message" {
                failed.push(json!({"defect": line.label, "reason": value, "detail": line.note, "right": right}));
            } else {
                figures.insert(line.key.to_owned(), json!({"value": value, "right": right}));
            }
        }
        json!({"right": self.right(), "figures": figures, "failed_messages": failed})
    }
}

fn shop_lines(figures: &Figures) -> Vec<Line> {
    vec![
        count("orders", "placed", figures.orders, "one event each"),
        count("lines", "their lines", figures.lines, "one reservation each is due"),
        count("status_changes", "changes of status", figures.status_changes, "one event each"),
        count("cancelled", "orders cancelled", figures.cancelled, "they must hold no goods, whatever came first"),
    ]
}

fn message_lines(figures: &Figures, demands: &Demands) -> Vec<Line> {
    let valid = figures.valid_messages();
    let copies = figures.copies();
    #[expect(clippy::cast_precision_loss, reason = "a share in percent")]
    let share = if valid == 0 { 0.0 } else { 100.0 * copies as f64 / valid as f64 };
    let enough = if demands.copies > 0.0 { check(share >= demands.copies) } else { Mark::None };
    vec![
        count("by_relay", "by the relay", figures.by_relay, "each event once, then marked"),
        count(
            "by_crashed_relay",
            "by a crashed relay",
            figures.by_crashed_relay,
            "sent but not marked: sent again later",
        ),
        count("by_replay", "by a replay", figures.by_replay, "a whole period sent once more"),
        count("malformed", "malformed", figures.malformed, "nobody could obey them"),
        count(
            "unconfirmed",
            "not confirmed",
            figures.unconfirmed,
            "the shop or the broker went down: they may have arrived",
        ),
        count("copies", "copies", copies, &format!("{share:.1} % of the valid messages")).marked(enough),
        count("unpublished", "still in the outbox", figures.unpublished, "must be 0")
            .marked(check(figures.unpublished == 0)),
    ]
}

fn event_lines(figures: &Figures, depths: &Depths, demands: &Demands) -> Vec<Line> {
    // Nothing waits and nobody holds a message: then all are settled, and each valid one
    // was either an event's first or a duplicate.
    let waiting = i64::from(depths.main.messages + depths.retry + depths.failed);
    let gone = figures.valid_messages() + figures.malformed - waiting;
    let duplicates = gone - figures.processed;
    let mut lines = vec![
        count("distinct_events", "distinct events", figures.distinct_events, "published at least once"),
        count("processed", "processed", figures.processed, "rows in processed_event: as many")
            .marked(check(figures.processed == figures.distinct_events)),
        count("processed_unknown", "processed, never sent", figures.processed_unknown, "must be 0")
            .marked(check(figures.processed_unknown == 0)),
        count("duplicates", "duplicates discarded", duplicates, "messages gone without an effect: as many as copies")
            .marked(check(duplicates.abs_diff(figures.copies()) <= figures.unconfirmed.unsigned_abs())),
    ];
    let demanded = demands.lost_acknowledgements;
    if figures.kills > 0 || demanded > 0 {
        let enough = if demanded > 0 { check(figures.lost_acknowledgements >= demanded) } else { Mark::None };
        lines.push(
            count(
                "lost_acknowledgements",
                "acknowledgements lost",
                figures.lost_acknowledgements,
                &format!("committed, worker killed ({}), delivered again", figures.kills),
            )
            .marked(enough),
        );
    }
    lines
}

fn stock_lines(figures: &Figures) -> Vec<Line> {
    vec![
        count(
            "orders_right",
            "orders reserved once",
            figures.orders_right,
            "product and quantity of every line compared",
        )
        .marked(check(figures.orders_right == figures.orders)),
        count("reservations", "reservations", figures.reservations, "as many as lines")
            .marked(check(figures.reservations == figures.lines)),
        none("lines_missing", "lines not reserved", figures.lines_missing),
        none("lines_too_many", "lines reserved too often", figures.lines_too_many),
        none("holding_though_cancelled", "cancelled, goods held", figures.holding_though_cancelled),
        none("released_for_nothing", "not cancelled, released", figures.released_for_nothing),
        none("status_wrong", "orders with a wrong status", figures.status_wrong)
            .noted("last version, status and cancellation compared"),
    ]
}

fn queue_lines(broker: &Broker, depths: &Depths, malformed: &[Sent]) -> Vec<Line> {
    let main = depths.main;
    let confirmed = malformed.iter().filter(|message| message.confirmed).count();
    let as_due = usize::try_from(depths.failed).is_ok_and(|failed| (confirmed..=malformed.len()).contains(&failed));
    let in_hand = match depths.in_hand {
        Some(number) => none("in_hand", "in their hands", i64::from(number)),
        None => Line {
            key: "in_hand",
            label: "in their hands".to_owned(),
            value: Figure::Text("unknown".to_owned()),
            mark: Mark::Wrong,
            note: "must be 0; only the broker's management page could tell".to_owned(),
        },
    };
    vec![
        count("queue", broker.queue(), i64::from(main.messages), "waiting messages: must be 0")
            .marked(check(main.messages == 0)),
        count("consumers", "its consumers", i64::from(main.consumers), "of workers that still run"),
        in_hand,
        count("retry_queues", &format!("{}.retry.*", broker.queue()), i64::from(depths.retry), "must be 0")
            .marked(check(depths.retry == 0)),
        count("failure_queue", &broker.failure_queue(), i64::from(depths.failed), "as many as malformed")
            .marked(check(as_due)),
    ]
}

/// One line for each malformed message, and one for each that has no business there.
fn failed_lines(sent: &[Sent], mut failed: Vec<Failed>) -> Vec<Line> {
    let mut lines = Vec::new();
    for message in sent {
        let found = failed.iter().position(|candidate| candidate.body == message.body);
        let found = found.map(|index| failed.swap_remove(index));
        if found.is_some() || message.confirmed {
            lines.push(failed_line(&message.defect, found.as_ref(), &message.expected_reason));
        }
    }
    lines.extend(failed.iter().map(|message| {
        let body = String::from_utf8_lossy(&message.body);
        let mut line = failed_line("not one of ours", Some(message), "");
        line.note = format!("{}: {}", line.note, body);
        line
    }));
    lines
}

fn failed_line(label: &str, found: Option<&Failed>, expected: &str) -> Line {
    let (value, right, note) = match found {
        None => ("missing", false, format!("expected: {expected}")),
        Some(Failed { reason, detail, attempts, .. }) => {
            // What is refused at the door is not tried twice.
            let once = *attempts == Some(1);
            let note = if once { detail.clone() } else { format!("{detail} (attempts: {attempts:?})") };
            (reason.as_str(), reason == expected && once, note)
        }
    };
    Line {
        key: "failed_message",
        label: label.to_owned(),
        value: Figure::Text(value.to_owned()),
        mark: check(right),
        note,
    }
}

impl Figures {
    fn valid_messages(&self) -> i64 {
        self.by_relay + self.by_crashed_relay + self.by_replay
    }

    fn copies(&self) -> i64 {
        self.valid_messages() - self.distinct_events
    }
}

fn count(key: &'static str, label: &str, number: i64, note: &str) -> Line {
    Line { key, label: label.to_owned(), value: Figure::Number(number), mark: Mark::None, note: note.to_owned() }
}

fn none(key: &'static str, label: &str, number: i64) -> Line {
    count(key, label, number, "must be 0").marked(check(number == 0))
}

fn check(right: bool) -> Mark {
    if right { Mark::Right } else { Mark::Wrong }
}

/// 12345 as "12,345".
pub(crate) fn grouped(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}

/// What fits beside a figure; the JSON has the whole.
fn shortened(note: &str) -> String {
    const ROOM: usize = 80;
    let mut short: String = note.chars().take(ROOM).collect();
    if short.len() < note.len() {
        short.push('…');
    }
    short
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Figure::Number(number) => f.pad(&grouped(*number)),
            Figure::Text(text) => f.pad(text),
        }
    }
}

impl Line {
    fn marked(mut self, mark: Mark) -> Self {
        self.mark = mark;
        self
    }

    fn noted(mut self, note: &str) -> Self {
        note.clone_into(&mut self.note);
        self
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = || self.sections.iter().flat_map(|(_, lines)| lines);
        let labels = lines().map(|line| line.label.chars().count()).max().unwrap_or(0);
        let values = lines().map(|line| line.value.to_string().chars().count()).max().unwrap_or(0);
        for (title, lines) in &self.sections {
            writeln!(f, "{title}")?;
            for line in lines {
                let mark = match line.mark {
                    Mark::None => ' ',
                    Mark::Right => '✓',
                    Mark::Wrong => '✗',
                };
                let note = shortened(&line.note);
                writeln!(f, "  {:labels$}  {:>values$} {mark}  {note}", line.label, line.value)?;
            }
            writeln!(f)?;
        }
        let wrong = lines().filter(|line| line.mark == Mark::Wrong).count();
        if wrong == 0 {
            write!(f, "Verdict: exactly once. Every order is reserved once, and every message is accounted for.")
        } else {
            write!(f, "Verdict: WRONG. Look at the {wrong} lines marked ✗.")
        }
    }
}
