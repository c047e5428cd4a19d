//! The report: targets first, then everything that was measured.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::machine::Machine;
use crate::measure::{self, Drains, Growth, Latency, Purged, Section, Series, Sizes};
use crate::plot;
use crate::sample::readable;
use crate::world::{Drain, Queue, World};

/// Everything of a run; what was not measured is missing.
#[derive(Debug, Default)]
pub struct Results {
    pub drains: Option<Drains>,
    pub sizes: Option<Sizes>,
    pub latency: Option<Vec<Latency>>,
    pub backlog: Option<Drain>,
    pub growth: Option<Growth>,
    pub purged: Option<Purged>,
}

/// A figure, and the bound that it is to keep.
struct Target {
    what: &'static str,
    figure: Option<f64>,
    bound: Bound,
    unit: &'static str,
}

enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    fn is_met(&self) -> Option<bool> {
        self.figure.map(|figure| match self.bound {
            Bound::AtLeast(bound) => figure >= bound,
            Bound::AtMost(bound) => figure <= bound,
        })
    }
}

impl Results {
    /// Measures a section.
    pub async fn measure(&mut self, section: Section, world: &World) -> anyhow::Result<()> {
        match section {
            Section::Drains => self.drains = Some(measure::drains(world).await?),
            Section::Latency => self.latency = Some(measure::latency(world).await?),
            Section::Backlog => self.backlog = Some(measure::backlog(world).await?),
            Section::Growth => self.growth = Some(measure::growth(world).await?),
            Section::Purge => self.purged = Some(measure::purged(world).await?),
            Section::Sizes => self.sizes = Some(measure::sizes(world).await?),
        }
        Ok(())
    }

    /// Whether no target was missed.
    pub fn is_good(&self) -> bool {
        self.targets().iter().all(|target| target.is_met() != Some(false))
    }

    fn targets(&self) -> Vec<Target> {
        use Bound::{AtLeast, AtMost};

        let drains = self.drains.as_ref();
        let quorum = drains.map(|drains| &drains.quorum);
        let share = |series: &Series| series.cost(|d| d.cpu.service).against(&series.cost(|d| d.cpu.all())).median();
        let growth = self.growth.as_ref();
        let of_latency = |queue| self.latency.iter().flatten().find(move |latency| latency.queue == queue);
        let lone = |latency: &Latency| {
            let bare = latency.transaction.quantile(500) + latency.round_trip.quantile(500);
            let (_, lone) = latency.commit.first()?;
            Some(lone.quantile(500).as_secs_f64() / bare.as_secs_f64())
        };
        let largest = growth.and_then(|growth| {
            let (_, _, series) = growth.filled.iter().rfind(|(ids, ..)| *ids == crate::load::Ids::V7)?;
            Some(series.rate().median()? / growth.empty.rate().median()?) // one after the other, so not paired
        });
        let target = |what, figure, bound, unit| Target { what, figure, bound, unit };
        vec![
            target(
                "drain of a classic queue, against pgbench",
                drains.and_then(|d| d.classic.rate().against(&d.beside_classic).median()),
                AtLeast(4.0),
                " x",
            ),
            target(
                "drain of a quorum queue, against pgbench",
                drains.and_then(|d| d.quorum.rate().against(&d.beside_quorum).median()),
                AtLeast(4.5),
                " x",
            ),
            target(
                "the service's own CPU for 1,000 messages",
                quorum.and_then(|series| series.cost(|d| d.cpu.service).median()),
                AtMost(15.0),
                " ms",
            ),
            target("its share of all CPU", quorum.and_then(share), AtMost(1.0 / 3.0), ""),
            target(
                "duplicates only, against pgbench",
                drains.and_then(|d| d.duplicates.rate().against(&d.beside_quorum).median()),
                AtLeast(5.0),
                " x",
            ),
            target(
                "lone event, quorum queue: p50 against a bare transaction plus a bare round trip",
                of_latency(Queue::Quorum).and_then(lone),
                AtMost(1.3),
                " x",
            ),
            target("lone event, classic queue: the same", of_latency(Queue::Classic).and_then(lone), AtMost(1.3), " x"),
            target(
                "1 % failing for a while, against the clean drain",
                drains.and_then(|d| d.failing.rate().against(&d.quorum.rate()).median()),
                AtLeast(0.3),
                " x",
            ),
            target("50 million rows with v7 ids, against an empty table", largest, AtLeast(0.85), " x"),
            target(
                "during a purge of 10 million rows, against without",
                self.purged.as_ref().and_then(|purged| purged.meanwhile.rate().against(&purged.before.rate()).median()),
                AtLeast(0.85),
                " x",
            ),
            target(
                "peak memory with a million messages waiting",
                self.backlog.and_then(|drain| Series(vec![drain]).peak_memory().median()),
                AtMost(64.0),
                " MiB",
            ),
            target(
                "start to first commit",
                of_latency(Queue::Quorum).map(|latency| latency.start.quantile(500).as_secs_f64() * 1000.0),
                AtMost(150.0),
                " ms",
            ),
        ]
    }

    /// As Markdown.
    pub fn text(&self, machine: &Machine) -> String {
        let mut text = format!("# Measurements on {}\n\n", machine.servers());
        text += &machine.description();
        text += "\n## Targets\n\n| measure | target | measured | |\n| --- | --- | ---: | --- |\n";
        for target in self.targets() {
            let bound = match target.bound {
                Bound::AtLeast(bound) => format!("≥ {}{}", readable(bound), target.unit),
                Bound::AtMost(bound) => format!("≤ {}{}", readable(bound), target.unit),
            };
            let figure = target.figure.map_or("not measured".to_owned(), |f| format!("{}{}", readable(f), target.unit));
            let met = match target.is_met() {
                Some(true) => "met",
                Some(false) => "**missed**",
                None => "",
            };
            line(&mut text, &[target.what, &bound, &figure, met]);
        }
        if let Some(drains) = &self.drains {
            text += "\n## Drains\n\nMessages a second, and CPU for 1,000 messages in milliseconds; medians, and the range.\n\n";
            text += "| what | messages/s | service | PostgreSQL | RabbitMQ | peak memory, MiB |\n";
            text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
            let pgbench = drains.pgbench.to_string();
            line(&mut text, &["pgbench, 8 clients, one transaction an event", &pgbench, "", "", "", ""]);
            for (what, series) in [
                ("quorum queue, 5 % copies", &drains.quorum),
                ("classic queue, 5 % copies", &drains.classic),
                ("duplicates only, quorum queue", &drains.duplicates),
                ("1 % failing for a while, quorum queue", &drains.failing),
                ("0.1 % malformed, quorum queue", &drains.malformed),
            ] {
                drain_line(&mut text, what, series);
            }
        }
        if let Some(drain) = self.backlog {
            text += "\n## A million messages waiting\n\n";
            text += "| what | messages/s | service | PostgreSQL | RabbitMQ | peak memory, MiB |\n";
            text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
            drain_line(&mut text, "quorum queue, 5 % copies", &Series(vec![drain]));
        }
        if let Some(latency) = &self.latency {
            text += "\n## Latency\n\nFrom publish to commit, in milliseconds.\n\n";
            text += "| queue | what | p50 | p99 |\n| --- | --- | ---: | ---: |\n";
            for latency in latency {
                let mut row = |what: &str, latencies: &crate::latency::Latencies| {
                    let ms = |per_mille| readable(latencies.quantile(per_mille).as_secs_f64() * 1000.0);
                    line(&mut text, &[latency.queue.kind(), what, &ms(500), &ms(990)]);
                };
                row("bare transaction", &latency.transaction);
                row("bare round trip through the broker", &latency.round_trip);
                for (a_second, latencies) in &latency.commit {
                    row(&format!("{a_second} events/s"), latencies);
                }
                row("start of the process to first commit", &latency.start);
            }
        }
        if let Some(sizes) = &self.sizes {
            text += "\n## Workers and sizes of batches\n\nMessages a second.\n\n![by size](sizes.svg)\n\n";
            text +=
                "| queue | workers | batch size | messages/s | service's CPU |\n| --- | ---: | ---: | ---: | ---: |\n";
            for size in &sizes.service {
                let (workers, batch, rate) =
                    (size.workers.to_string(), size.batch_size.to_string(), size.series.rate());
                let cost = size.series.cost(|d| d.cpu.service).to_string();
                line(&mut text, &[size.queue.kind(), &workers, &batch, &rate.to_string(), &cost]);
            }
            text += "\n| pgbench clients | events a transaction | events/s |\n| ---: | ---: | ---: |\n";
            for (clients, events, rate) in &sizes.pgbench {
                line(&mut text, &[&clients.to_string(), &events.to_string(), &readable(*rate)]);
            }
        }
        if let Some(growth) = &self.growth {
            text += "\n## Growth\n\n![by rows](growth.svg)\n\n";
            text += "| rows in `processed_event` | messages/s | service | PostgreSQL | RabbitMQ | peak memory, MiB |\n";
            text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
            drain_line(&mut text, "none", &growth.empty);
            for (ids, rows, series) in &growth.filled {
                drain_line(&mut text, &format!("{} million, {ids:?} ids", rows / 1_000_000), series);
            }
        }
        if let Some(purged) = &self.purged {
            text += "\n## Purge\n\n";
            text += "| 10 million old rows in `processed_event` | messages/s | service | PostgreSQL | RabbitMQ | peak memory, MiB |\n";
            text += "| --- | ---: | ---: | ---: | ---: | ---: |\n";
            drain_line(&mut text, "which stay", &purged.before);
            drain_line(&mut text, "which are purged meanwhile", &purged.meanwhile);
        }
        text
    }

    /// Writes the report and its plots.
    pub fn write(&self, machine: &Machine, folder: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(folder)?;
        std::fs::write(folder.join("README.md"), self.text(machine))?;
        if let Some(sizes) = &self.sizes {
            plot::sizes(sizes, &folder.join("sizes.svg"))?;
        }
        if let Some(growth) = &self.growth {
            plot::growth(growth, &folder.join("growth.svg"))?;
        }
        Ok(())
    }
}

fn drain_line(text: &mut String, what: &str, series: &Series) {
    let cost = |of: fn(&Drain) -> Duration| series.cost(of).to_string();
    let cells = [
        what.to_owned(),
        series.rate().to_string(),
        cost(|d| d.cpu.service),
        cost(|d| d.cpu.postgres),
        cost(|d| d.cpu.rabbitmq),
        series.peak_memory().to_string(),
    ];
    line(text, &cells.each_ref().map(String::as_str));
}

fn line(text: &mut String, cells: &[&str]) {
    writeln!(text, "| {} |", cells.join(" | ")).unwrap_or_default();
}
