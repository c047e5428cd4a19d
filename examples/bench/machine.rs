//! What the figures were measured on.

use std::process::Command;

use crate::world::World;

/// Hardware and versions.
#[derive(Debug)]
pub struct Machine {
    processor: String,
    cores: usize,
    memory_gib: u64,
    kernel: String,
    postgres: String,
    rabbitmq: String,
}

impl Machine {
    pub async fn look(world: &World) -> anyhow::Result<Self> {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let value = |text: &str, key| {
            let line = text.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let kib = value(&memory, "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        let version = Command::new(std::env::var("STOCK_TEST_RABBITMQCTL")?).arg("version").output()?;
        let postgres: String = sqlx::query_scalar("show server_version").fetch_one(&world.pool).await?;
        Ok(Self {
            processor: value(&cpu, "model name").unwrap_or_else(|| "unknown processor".to_owned()),
            cores: std::thread::available_parallelism()?.get(),
            memory_gib: kib.unwrap_or_default() / (1 << 20),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            postgres: postgres.split(' ').next().unwrap_or_default().to_owned(),
            rabbitmq: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
        })
    }

    /// The servers and their versions.
    pub fn servers(&self) -> String {
        format!("PostgreSQL {} and RabbitMQ {}", self.postgres, self.rabbitmq)
    }

    /// The name of a folder for this report: major versions only, so that a newer report replaces it.
    pub fn folder(&self) -> String {
        let major = |version: &str, parts| version.split('.').take(parts).collect::<Vec<_>>().join(".");
        format!("postgresql-{}-rabbitmq-{}", major(&self.postgres, 1), major(&self.rabbitmq, 2))
    }

    pub fn description(&self) -> String {
        let Self { processor, cores, memory_gib, kernel, .. } = self;
        format!(
            "By `make bench`, on {cores} cores ({processor}) with {memory_gib} GiB of memory, Linux {kernel}, shared by \
             PostgreSQL, RabbitMQ, the service and the bench itself. Both servers have their default settings; commits are \
             synced to disk. Orders of 3 lines, about 600 bytes, persistent. stock-service {} with its default settings \
             where nothing else is said, one process.\n",
            env!("CARGO_PKG_VERSION")
        )
    }
}
