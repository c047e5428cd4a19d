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

use clap::{Parser, ValueEnum};

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
    let folder = reports.join(machine.folder());
    let mut results = Results::default();
    let whole = only.is_empty();
    for section in Section::value_variants() {
        if whole || only.contains(section) {
            results.measure(*section, &world).await?;
        }
        if whole {
            // As far as it has got: it takes an hour, and may not be let finish.
            results.write(&machine, &folder)?;
        }
    }
    println!("\n{}", results.text(&machine));
    if whole {
        println!("written to {}", folder.display());
    }
    Ok(if results.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
