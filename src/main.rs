//! The binary: parses the command line and runs the command.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    stock_service::cli::Cli::parse().run()
}
