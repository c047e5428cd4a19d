//! The servers, and the service as a process between them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use lapin::options::{QueueDeclareOptions, QueuePurgeOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::process::{Child, Command};
use tokio::time::sleep;
use url::Url;

use crate::load::{FAILING_FROM, LINES, Loaded, Mix, Publisher};
use crate::process;

/// A kind of queue, and the name of one of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    Quorum,
    Classic,
}

impl Queue {
    pub fn kind(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }

    pub fn name(self) -> String {
        format!("bench.{}", self.kind())
    }
}

/// Settings of the service beside its defaults, by key.
pub type Settings<'a> = &'a [(&'a str, String)];

/// How an order of a failing kind fails: for so long after its first attempt.
pub const FAILS_FOR: Duration = Duration::from_millis(1500);

/// CPU time of the three that work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    pub service: Duration,
    pub postgres: Duration,
    pub rabbitmq: Duration,
}

impl Cpu {
    pub fn all(self) -> Duration {
        self.service + self.postgres + self.rabbitmq
    }
}

/// One run of the service over a loaded queue.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// Those that were done with by the end.
    pub messages: u64,
    /// From the first message that was settled to the last one.
    pub took: Duration,
    pub cpu: Cpu,
    /// Bytes.
    pub peak_memory: u64,
}

impl Drain {
    /// Messages a second.
    pub fn rate(&self) -> f64 {
        rate(self.messages, self.took)
    }

    /// Milliseconds of CPU for a thousand messages.
    pub fn cost(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / f64::from(u32::try_from(self.messages).unwrap_or(u32::MAX))
    }
}

/// So many a second.
pub fn rate(number: u64, took: Duration) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX)) / took.as_secs_f64()
}

/// When a drain has ended.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// The process has ended by itself: the queue is empty, and nothing in hand.
    Empty,
    /// Nothing is left in the queue but what is in hand. It goes on until so many events are applied; but that waits for the
    /// delays of the last retries, which are no work.
    Applied(u64),
}

/// Where the service tells what it has settled.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);

/// How many messages the running service has settled.
async fn settled() -> anyhow::Result<u64> {
    let (_, text) = stock_service::http::get(METRICS, "/metrics").await?;
    let series = text.lines().filter(|line| line.starts_with("stock_service_deliveries_total{"));
    let values = series.filter_map(|line| line.rsplit(' ').next());
    Ok(values.map(str::parse::<u64>).sum::<Result<u64, _>>()?)
}

/// Servers of our own, and the binary.
pub struct World {
    pub service: PathBuf,
    pub database: Url,
    pub broker: Url,
    pub pool: PgPool,
    /// The folder of PostgreSQL's programs.
    pub programs: PathBuf,
    postgres: u32,
    rabbitmq: u32,
    channel: Channel,
    _connection: Connection,
}

impl World {
    /// Finds what `scripts/with-servers` has started.
    pub async fn from_environment(service: PathBuf) -> anyhow::Result<Self> {
        let variable = |name| std::env::var(name).with_context(|| format!("{name} is not set: use `make bench`"));
        let database: Url = variable("DATABASE_URL")?.parse()?;
        let broker: Url = variable("AMQP_URL")?.parse()?;
        let pids = PathBuf::from(variable("STOCK_TEST_SERVERS")?).join("pids");
        let connection = Connection::connect(broker.as_str(), ConnectionProperties::default()).await?;
        let world = Self {
            service,
            pool: PgPoolOptions::new().max_connections(2).connect(database.as_str()).await?,
            database,
            broker,
            programs: variable("STOCK_TEST_PGBIN")?.into(),
            postgres: process::pid_in(&pids.join("postgres"))?,
            rabbitmq: process::pid_in(&pids.join("rabbitmq"))?,
            channel: connection.create_channel().await?,
            _connection: connection,
        };
        for queue in [Queue::Quorum, Queue::Classic] {
            // On an empty queue it makes tables and queues, and ends.
            world.ended(world.start(queue, &[], true)?).await?;
        }
        Ok(world)
    }

    pub async fn execute(&self, statement: impl Into<String>) -> anyhow::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(statement.into())).execute(&self.pool).await?;
        Ok(())
    }

    pub async fn count(&self, query: impl Into<String>) -> anyhow::Result<u64> {
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(query.into())).fetch_one(&self.pool).await?;
        Ok(u64::try_from(count)?)
    }

    /// Empties all tables, and settles what is left to do of earlier work, so that it is not paid for by the next.
    pub async fn empty_tables(&self) -> anyhow::Result<()> {
        self.execute("truncate processed_event, reservation, order_status").await?;
        self.settle().await
    }

    /// Has the database do what it would do sooner or later.
    pub async fn settle(&self) -> anyhow::Result<()> {
        for statement in ["vacuum analyze", "checkpoint"] {
            self.execute(statement).await?;
        }
        Ok(())
    }

    /// Loads the queue.
    pub async fn load(&self, queue: Queue, first: u64, orders: u64, mix: Mix) -> anyhow::Result<Loaded> {
        let mut publisher = Publisher::connect(&self.broker, &queue.name()).await?;
        let loaded = publisher.load(first, orders, mix).await?;
        self.execute("checkpoint").await?;
        Ok(loaded)
    }

    /// Starts the service, which ends by itself when the queue is empty if it is to.
    pub fn start(&self, queue: Queue, settings: Settings<'_>, until_empty: bool) -> anyhow::Result<Child> {
        let mut command = Command::new(&self.service);
        command.arg("consume").args(until_empty.then_some("--until-empty"));
        command
            .env("DATABASE_URL", self.database.as_str())
            .env("AMQP_URL", self.broker.as_str())
            .env("STOCK__AMQP__QUEUE", queue.name())
            .env("STOCK__AMQP__QUEUE_TYPE", queue.kind())
            .env("STOCK__HTTP__LISTEN", METRICS.to_string())
            .env("STOCK__PURGE__ENABLED", "false") // what is measured beside it, is started beside it
            .env("RUST_LOG", "off");
        for (key, value) in settings {
            command.args(["--set", &format!("{key}={value}")]);
        }
        let command = command.stdin(Stdio::null()).kill_on_drop(true);
        command.spawn().with_context(|| format!("cannot run {}", self.service.display()))
    }

    /// Waits for the end of a service that ends by itself.
    pub async fn ended(&self, mut service: Child) -> anyhow::Result<()> {
        let status = service.wait().await?;
        ensure!(status.success(), "the service ended with {status}");
        Ok(())
    }

    /// Stops the service in order.
    pub async fn stop(&self, service: Child) -> anyhow::Result<()> {
        let pid = service.id().context("the service has ended by itself")?;
        let kill = Command::new("kill").arg(pid.to_string()).status().await?;
        ensure!(kill.success(), "kill {pid}");
        self.ended(service).await
    }

    /// Messages of a queue that nobody has taken.
    pub async fn ready(&self, queue: &str) -> anyhow::Result<u64> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.into(), passive, FieldTable::default()).await?;
        Ok(queue.message_count().into())
    }

    /// Removes all messages of a queue; their number.
    pub async fn purge_queue(&self, queue: &str) -> anyhow::Result<u64> {
        Ok(self.channel.queue_purge(queue.into(), QueuePurgeOptions::default()).await?.into())
    }

    /// Has the service work off what was loaded, and checks that it did.
    pub async fn drain(
        &self,
        queue: Queue,
        loaded: Loaded,
        settings: Settings<'_>,
        until: Until,
    ) -> anyhow::Result<Drain> {
        let ready = self.ready(&queue.name()).await?;
        ensure!(ready == loaded.messages, "{ready} messages instead of {}", loaded.messages);
        let before = self.servers_cpu();
        let mut service = self.start(queue, settings, matches!(until, Until::Empty))?;
        let pid = service.id().context("the service has ended at once")?;
        let mut usage = (Duration::ZERO, 0);
        let (mut begun, mut emptied, mut done) = (None, None, loaded.messages);
        let ended = loop {
            if let Some(status) = service.try_wait()? {
                ensure!(status.success() && matches!(until, Until::Empty), "the service ended with {status}");
                break emptied.context("the service has ended without settling all")?;
            }
            usage = (process::cpu(pid).unwrap_or(usage.0), process::peak_memory(pid).unwrap_or(usage.1));
            // Nobody answers before it listens, and when it has ended.
            let settled = settled().await.unwrap_or_default();
            begun = begun.or_else(|| (settled > 0).then(Instant::now));
            emptied = emptied.or_else(|| (settled == loaded.messages).then(Instant::now));
            // A look costs a fraction of a millisecond; only the ends are worth many.
            let ends = begun.is_none() || settled + loaded.messages / 50 > loaded.messages;
            sleep(Duration::from_millis(if ends { 2 } else { 20 })).await;
            if let Until::Applied(events) = until
                && self.ready(&queue.name()).await? == 0
            {
                let now = Instant::now();
                let applied = self.count("select count(*) from processed_event").await?;
                done = loaded.messages * applied / loaded.events;
                while self.count("select count(*) from processed_event").await? < events {
                    sleep(Duration::from_millis(100)).await;
                }
                self.stop(service).await?;
                break now;
            }
        };
        let after = self.servers_cpu();
        let took = ended - begun.context("no message was settled")?;
        let left = self.ready(&queue.name()).await?;
        ensure!(left == 0, "{left} messages are left");
        let cpu = Cpu {
            service: usage.0,
            postgres: after.postgres - before.postgres,
            rabbitmq: after.rabbitmq - before.rabbitmq,
        };
        Ok(Drain { messages: done, took, cpu, peak_memory: usage.1 })
    }

    /// Fails unless just these orders were applied, each once and whole.
    pub async fn verify(&self, queue: Queue, loaded: Loaded) -> anyhow::Result<()> {
        let events = self.count("select count(*) from processed_event").await?;
        ensure!(events == loaded.events, "{events} events were applied instead of {}", loaded.events);
        // PostgreSQL 15 does not do without the alias.
        let broken = "select count(*)
                      from (select from reservation group by order_id
                            having count(*) <> 3 or count(distinct product_id) <> 3) as broken";
        let broken = self.count(broken).await?;
        ensure!(broken == 0, "{broken} orders do not have their lines once each");
        let lines = self.count("select count(*) from reservation").await?;
        ensure!(lines == loaded.events * LINES, "{lines} reservations of {} orders", loaded.events);
        let failed = self.purge_queue(&format!("{}.failed", queue.name())).await?;
        ensure!(failed == loaded.malformed, "{failed} failed messages instead of {}", loaded.malformed);
        Ok(())
    }

    /// CPU time of both servers so far.
    fn servers_cpu(&self) -> Cpu {
        Cpu {
            service: Duration::ZERO,
            postgres: process::cpu_of_family(self.postgres),
            rabbitmq: process::cpu_of_family(self.rabbitmq),
        }
    }

    /// From now on so many orders of the failing kind fail, each for a while.
    ///
    /// When one was first tried is kept in a sequence of its own, which no rollback takes back.
    pub async fn let_some_fail(&self, orders: u64) -> anyhow::Result<()> {
        let milliseconds = FAILS_FOR.as_millis();
        self.execute(format!(
            "create schema failing;
             do $$ begin for n in 0 .. {orders} loop execute format('create sequence failing.n%s', n); end loop; end $$;
             create function failing.refuse() returns trigger language plpgsql as $$
             declare
                 sequence regclass := format('failing.n%s', ((new.quantity - {FAILING_FROM}) * 1000)::bigint);
                 now_ms bigint := extract(epoch from clock_timestamp()) * 1000;
                 first_ms bigint := pg_sequence_last_value(sequence);
             begin
                 if first_ms is null then perform setval(sequence, now_ms); end if;
                 if first_ms is null or now_ms < first_ms + {milliseconds} then raise 'not yet'; end if;
                 return new;
             end $$;
             create trigger failing before insert on reservation for each row
                 when (new.quantity >= {FAILING_FROM}) execute function failing.refuse()"
        ))
        .await
    }

    /// From now on all go through.
    pub async fn let_none_fail(&self) -> anyhow::Result<()> {
        self.execute("drop schema failing cascade").await
    }
}
