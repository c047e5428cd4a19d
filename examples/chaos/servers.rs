//! The two servers, and what can be done to them from outside.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, ensure};
use sqlx::{Connection, PgConnection};
use tokio::process::Command;
use url::Url;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    Broker,
    Database,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Broker => "broker",
            Self::Database => "database",
        })
    }
}

/// Servers that `scripts/with-servers` has started for us alone.
#[derive(Debug)]
pub struct Servers {
    folder: PathBuf,
    pub database: Url,
    pub broker: Url,
}

impl Servers {
    pub fn from_environment() -> anyhow::Result<Self> {
        let variable = |name| std::env::var(name).with_context(|| format!("{name} is not set: use `make chaos`"));
        Ok(Self {
            folder: variable("STOCK_TEST_SERVERS")?.into(),
            database: variable("DATABASE_URL")?.parse()?,
            broker: variable("AMQP_URL")?.parse()?,
        })
    }

    /// Stops, kills, starts, freezes or thaws a server, and returns when that is done.
    pub async fn control(&self, server: Server, action: &str) -> anyhow::Result<()> {
        let server = match server {
            Server::Broker => "rabbitmq",
            Server::Database => "postgres",
        };
        self.run("control", &[server, action]).await.map(drop)
    }

    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.run("rabbitmqctl", arguments).await
    }

    async fn run(&self, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(self.folder.join(program));
        let output = command.args(arguments).stdin(Stdio::null()).output().await.context(program.to_owned())?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&output.stdout) + &text(&output.stderr);
        ensure!(output.status.success(), "{program} {}: {}: {said}", arguments.join(" "), output.status);
        Ok(said)
    }

    /// Ends all sessions of the service.
    pub async fn end_sessions(&self) -> anyhow::Result<()> {
        let mut connection = PgConnection::connect(self.database.as_str()).await?;
        let end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'stock-service'";
        sqlx::raw_sql(end).execute(&mut connection).await?;
        Ok(())
    }

    /// The messages in each queue, those included that somebody has in hand.
    pub async fn queues(&self) -> anyhow::Result<BTreeMap<String, usize>> {
        let table = self.rabbitmqctl(&["--quiet", "list_queues", "--no-table-headers", "name", "messages"]).await?;
        let queues = table.lines().filter_map(|line| {
            let (name, messages) = line.split_once('\t')?;
            Some((name.to_owned(), messages.parse().ok()?))
        });
        Ok(queues.collect())
    }

    /// All that the broker has said.
    pub fn broker_log(&self) -> anyhow::Result<String> {
        let bytes = std::fs::read(self.folder.join("rabbitmq.log")).context("rabbitmq.log")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Copies what the servers have said, before it goes with them.
    pub fn save_logs(&self, folder: &Path) -> anyhow::Result<()> {
        for log in ["rabbitmq.log", "postgres.log"] {
            std::fs::copy(self.folder.join(log), folder.join(log)).context(log)?;
        }
        Ok(())
    }
}
