//! The commands: one file each, and what they share.

mod check;
mod consume;
mod doctor;
mod health;
mod purge;
mod signals;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Parser, Subcommand};

use self::signals::unless_stopped;
use crate::db::{Database, explain};
use crate::settings::{Invalid, Settings};
use crate::telemetry;

/// Only `consume` waits for servers that are not there.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reserves the goods of every placed order in PostgreSQL, exactly once in effect, from a RabbitMQ queue that delivers
/// at least once.
#[derive(Debug, Parser)]
#[command(
    version,
    arg_required_else_help = true,
    after_help = "Settings: config/default.toml lists them all; \
    `stock-service config` prints those in effect. DATABASE_URL and AMQP_URL are read from the environment, or from the \
    files that DATABASE_URL_FILE and AMQP_URL_FILE name."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,

    /// A TOML file with settings that override the defaults
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    /// One setting, over all other sources, e.g. --set consume.workers=4; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Consume(consume::Args),
    Purge(purge::Args),
    /// Bring the database's schema up to date
    #[command(after_help = "Example:\n  DATABASE_URL=postgres://stock:secret@db/stock stock-service migrate")]
    Migrate,
    Health(health::Args),
    /// Print the settings in effect as TOML, secrets masked
    #[command(after_help = "Example:\n  STOCK__CONSUME__WORKERS=4 stock-service config")]
    Config,
    Doctor(doctor::Args),
    Check(check::Args),
}

impl Cli {
    /// Runs the command; an error is printed as one chain on standard error.
    #[expect(clippy::print_stderr, reason = "the last word of a command is for a person, not for the log")]
    pub fn run(self) -> ExitCode {
        match self.try_run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("stock-service: {error:#}");
                ExitCode::from(if error.is::<Invalid>() { 2 } else { 1 })
            }
        }
    }

    fn try_run(self) -> anyhow::Result<()> {
        let settings = Settings::load(self.config.as_deref(), environment(), &self.set)?;
        telemetry::init(settings.log_format, settings.log_filter.as_deref());
        // One thread for all tasks: they wait most of the time, and handing them to and fro among several costs up to a
        // tenth of the throughput. Not the main one, whose stack RUST_MIN_STACK does not set.
        let thread = std::thread::Builder::new().name("tasks".to_owned()).spawn(|| self.run_tasks(settings))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn run_tasks(self, settings: Settings) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(async {
            match self.command {
                Command::Consume(args) => consume::run(args, settings).await,
                Command::Purge(args) => unless_stopped(purge::run(args, settings)).await,
                Command::Health(args) => unless_stopped(health::run(args, &settings)).await,
                Command::Migrate => unless_stopped(migrate(&settings)).await,
                Command::Config => say(settings.to_toml().trim_end()),
                Command::Doctor(args) => unless_stopped(doctor::run(args, &settings)).await,
                Command::Check(args) => check::run(&args, &settings),
            }
        });
        // Whatever still runs, a lookup of a name for instance, is not waited for.
        runtime.shutdown_background();
        result
    }
}

/// The environment. What is no Unicode cannot be a valid setting; it is read as far as it can be, and refused by its key.
fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |part: std::ffi::OsString| part.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

/// Prints a line of a command's result.
fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot write to standard output")
}

fn key_value(text: &str) -> Result<(String, String), &'static str> {
    let (key, value) = text.split_once('=').ok_or("must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

async fn migrate(settings: &Settings) -> anyhow::Result<()> {
    let migrated = with_database(settings, async |database| database.migrate().await.context("cannot migrate")).await?;
    match migrated.applied {
        0 => say("the schema is up to date"),
        applied => say(&format!("{applied} migrations applied")),
    }
}

/// Does a command's work on the database, if it answers; says where it was looked for when it does not. Ends its
/// sessions in any case.
async fn with_database<T>(
    settings: &Settings,
    work: impl AsyncFnOnce(&Database) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let database = Database::new(&settings.database, 2);
    let place = settings.database.url.place();
    let result = match tokio::time::timeout(PATIENCE, database.ping()).await {
        Ok(Ok(())) => work(&database).await,
        Ok(Err(error)) => Err(explain(error).context(format!("cannot reach the database at {place}"))),
        Err(_) => Err(anyhow!("the database at {place} does not answer within {PATIENCE:?}")),
    };
    database.close().await;
    result
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
