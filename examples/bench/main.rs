//! Measures the service as it is shipped, as a process of its own between real servers that sync to disk. Use `make bench`.
//!
//! The load is written by hand ([`load`]), what is measured is seen from outside ([`world`]), and the yardstick is
//! pgbench with the statements that no consumer can do without ([`yardstick`]).

#![allow(unreachable_pub, reason = "nobody imports an example")]

mod growth;
mod latency;
mod load;
mod machine;
mod measure;
mod plot;
mod process;
mod report;
mod sample;
mod world;
mod yardstick;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::machine::Machine;
use crate::measure::Section;
use crate::report::Results;
use crate::world::World;

/// Measures a binary of stock-service. Use `make bench`.
#[derive(Debug, Parser)]
struct Arguments {
    /// The binary of stock-service
    service: PathBuf,
    /// Only these sections, and no report
    #[arg(long, value_enum)]
    only: Vec<Section>,
    /// Where the report goes, in a folder named after the servers
    #[arg(long, default_value = "docs/benchmarks")]
    reports: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let Arguments { service, only, reports } = Arguments::parse();
    let world = World::from_environment(service).await?;
    yardstick::make_uuidv7(&world).await?;
    let machine = Machine::look(&world).await?;
    let wanted = |section| only.is_empty() || only.contains(&section);
    let mut results = Results::default();
    if wanted(Section::Drains) {
        results.drains = Some(measure::drains(&world).await?);
    }
    if wanted(Section::Latency) {
        results.latency = Some(measure::latency(&world).await?);
    }
    if wanted(Section::Backlog) {
        results.backlog = Some(measure::backlog(&world).await?);
    }
    if wanted(Section::Growth) {
        results.growth = Some(measure::growth(&world).await?);
    }
    if wanted(Section::Purge) {
        results.purged = Some(measure::purged(&world).await?);
    }
    if wanted(Section::Sizes) {
        results.sizes = Some(measure::sizes(&world).await?);
    }
    println!("\n{}", results.text(&machine));
    if results.is_complete() {
        let folder = reports.join(machine.folder());
        results.write(&machine, &folder)?;
        println!("written to {}", folder.display());
    }
    Ok(if results.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
