//! A replica of the service: the real binary as a process, on networks of its own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::faults::Networks;

/// Longer than `consume.grace`.
const LONGEST_STOP: Duration = Duration::from_secs(35);

/// A process that is started again and again; killed when this is dropped.
#[derive(Debug)]
pub struct Replica {
    pub log: PathBuf,
    name: String,
    service: PathBuf,
    broker: String,
    database: String,
    process: Option<Child>,
    /// Ends that were not asked for, and stops that went wrong.
    pub troubles: Vec<String>,
}

impl Replica {
    /// A replica that is not started yet; it logs into this folder.
    pub fn new(number: usize, service: &Path, networks: &Networks, logs: &Path) -> Self {
        let name = format!("replica-{number}");
        Self {
            log: logs.join(format!("{name}.log")),
            name,
            service: service.to_owned(),
            broker: networks.broker.url().to_owned(),
            database: networks.database.url().to_owned(),
            process: None,
            troubles: Vec::new(),
        }
    }

    /// Brings the database's schema up to date.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        let status = self.command("migrate")?.status().await?;
        ensure!(status.success(), "stock-service migrate: {status}");
        Ok(())
    }

    pub fn start(&mut self) -> anyhow::Result<()> {
        self.process = Some(self.command("consume")?.spawn().context("cannot start stock-service")?);
        Ok(())
    }

    fn command(&self, name: &str) -> anyhow::Result<Command> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.service);
        command
            .arg(name)
            .env("DATABASE_URL", &self.database)
            .env("AMQP_URL", &self.broker)
            .env("STOCK__LOG__FORMAT", "json")
            .env("STOCK__HTTP__LISTEN", "127.0.0.1:0")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        Ok(command)
    }

    /// SIGKILL: nobody in there hears of it.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.look();
        let mut process = self.process.take().context("no process")?;
        process.kill().await?;
        Ok(())
    }

    /// SIGTERM, and its end.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.look();
        let mut process = self.process.take().context("no process")?;
        signal(&process, "TERM").await?;
        match timeout(LONGEST_STOP, process.wait()).await {
            Ok(status) if status.as_ref().is_ok_and(std::process::ExitStatus::success) => {}
            Ok(status) => self.troubles.push(format!("{}: SIGTERM was answered with {}", self.name, status?)),
            Err(_) => self.troubles.push(format!("{}: SIGTERM was not answered in {LONGEST_STOP:?}", self.name)),
        }
        Ok(())
    }

    /// Stops all of it in the middle of whatever it does.
    pub async fn freeze(&self) -> anyhow::Result<()> {
        signal(self.process.as_ref().context("no process")?, "STOP").await
    }

    pub async fn thaw(&self) -> anyhow::Result<()> {
        signal(self.process.as_ref().context("no process")?, "CONT").await
    }

    /// Notes an end that was not asked for.
    pub fn look(&mut self) {
        if let Some(Ok(Some(status))) = self.process.as_mut().map(Child::try_wait) {
            self.troubles.push(format!("{}: ended by itself with {status}", self.name));
        }
    }
}

async fn signal(process: &Child, name: &str) -> anyhow::Result<()> {
    // One that has ended by itself hears no signal, and is noticed by its end.
    if let Some(id) = process.id() {
        let kill = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).status().await?;
        ensure!(kill.success(), "kill -{name} {id}");
    }
    Ok(())
}
