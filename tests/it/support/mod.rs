//! What the tests stand on.

mod broker;
mod database;
mod events;
mod process;
mod scripted;

use std::time::Duration;

use sqlx::PgPool;
use stock_service::broker::Topology;
use stock_service::db::Database;
use stock_service::handlers::Handlers;
use stock_service::inbox::Dispatch;
use stock_service::settings::Settings;
use stock_service::worker::Workers;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use broker::{Broker, Message};
pub use events::{Order, StatusChange};
pub use process::Process;
pub use scripted::{Scripted, Step};

/// The longest that anything a test waits for may take. Far beyond the ordinary, for machines that are shared.
const PATIENCE: Duration = Duration::from_secs(60);

/// One test's servers: a database, an exchange and queues of its own.
#[derive(Debug)]
pub struct TestBed {
    /// The test's own view of the database: plain queries, so that what checks the guarantee does not share its SQL.
    pub pool: PgPool,
    /// The test's own view of the broker.
    pub broker: Broker,
    environment: Vec<(String, String)>,
    finished: bool,
}

impl TestBed {
    /// A migrated database, and exchange and queues that nobody else has.
    pub async fn new() -> Self {
        let bed = Self::bare().await;
        bed.database().migrate().await.expect("a new schema");
        bed.declare().await;
        bed
    }

    /// An empty database and names only, for tests of what makes the rest.
    pub async fn bare() -> Self {
        let (name, database_url) = database::create().await;
        let amqp_url = std::env::var("AMQP_URL").expect("AMQP_URL names the broker; `make test` sets it");
        let environment = [
            ("DATABASE_URL", database_url.as_str()),
            ("AMQP_URL", &amqp_url),
            ("STOCK__AMQP__EXCHANGE", &format!("{name}.events")),
            ("STOCK__AMQP__QUEUE", &format!("{name}.stock.events")),
            ("STOCK__RETRY__DELAY", "50ms"), // the ladder of an ordinary test: 50, 100, 200 ms
            ("STOCK__LOG__FORMAT", "json"),
        ];
        let environment = environment.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let pool = PgPool::connect(&database_url).await.expect("the new database");
        let broker = Broker::connect(&amqp_url, &name).await;
        Self { pool, broker, environment, finished: false }
    }

    /// Declares exchange and queues as the settings are by now.
    pub async fn declare(&self) {
        let settings = self.settings();
        let topology = Topology::new(&settings.amqp, &settings.retry);
        topology.ensure(self.broker.connection()).await.expect("new queues");
    }

    /// Changes a setting for what is started from now on, e.g. `retry.delay`.
    pub fn set(&mut self, key: &str, value: &str) {
        let name = format!("STOCK__{}", key.to_uppercase().replace('.', "__"));
        self.environment.retain(|(key, _)| *key != name);
        self.environment.push((name, value.to_owned()));
    }

    /// The settings of this test.
    pub fn settings(&self) -> Settings {
        Settings::load(None, self.environment.clone(), &[]).expect("valid settings")
    }

    /// The service's own way to the database.
    pub fn database(&self) -> Database {
        let settings = self.settings();
        Database::new(&settings.database, settings.connections())
    }

    /// Starts the service in this process, with the real handlers.
    pub async fn start(&self) -> Service {
        self.start_with(Handlers).await
    }

    /// Starts the service in this process, with these handlers, and waits until it consumes.
    pub async fn start_with<D: Dispatch>(&self, dispatch: D) -> Service {
        let before = self.broker.consumers().await;
        let stop = CancellationToken::new();
        let workers = Workers::new(&self.settings(), self.database(), dispatch, false);
        let task = tokio::spawn(workers.run(stop.clone()));
        eventually("the service consumes", async || self.broker.consumers().await > before).await;
        Service { stop, task }
    }

    /// Works until the queue is empty and nothing is in hand, with the real handlers.
    pub async fn drain(&self) {
        self.drain_with(Handlers).await;
    }

    /// Works until the queue is empty and nothing is in hand, with these handlers.
    pub async fn drain_with<D: Dispatch>(&self, dispatch: D) {
        let workers = Workers::new(&self.settings(), self.database(), dispatch, true);
        let run = workers.run(CancellationToken::new());
        tokio::time::timeout(PATIENCE, run).await.expect("an empty queue in time");
    }

    /// Starts the binary with these arguments.
    pub fn spawn(&self, arguments: &[&str]) -> Process {
        Process::spawn(arguments, &self.environment)
    }

    /// How many events are recorded as processed.
    pub async fn processed(&self) -> i64 {
        self.count("select count(*) from processed_event").await
    }

    /// How many reservations there are.
    pub async fn reservations(&self) -> i64 {
        self.count("select count(*) from reservation").await
    }

    /// How many reservations an order has.
    pub async fn reservations_of(&self, order: &Order) -> i64 {
        let count = sqlx::query_scalar("select count(*) from reservation where order_id = $1::uuid");
        count.bind(&order.order_id).fetch_one(&self.pool).await.expect("a count")
    }

    /// A number out of the database.
    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.expect("a count")
    }

    /// Runs a statement of the test's own.
    pub async fn execute(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&self.pool).await.expect(sql);
    }

    /// The audit that ends every test: whatever was published is accounted for by applied events, recognised copies
    /// and queued messages; no transaction was left open. Then everything is removed.
    pub async fn finish(mut self) {
        let waiting = self.broker.in_work().await + self.broker.depth(&self.broker.failure_queue()).await;
        let queued = i64::from(waiting) + self.broker.taken();
        let (published, processed) = (self.broker.published(), self.processed().await);
        assert!(
            processed + queued <= published,
            "{published} published, but {processed} processed and {queued} queued or taken: something came from nowhere"
        );
        let distinct = i64::try_from(self.broker.distinct_valid_events().len()).expect("a count");
        assert!(
            processed + queued >= distinct,
            "{distinct} events, {processed} processed, {queued} queued or taken: one is lost"
        );
        let open = "select count(*) from pg_stat_activity
                    where datname = current_database() and state like 'idle in transaction%'";
        assert_eq!(self.count(open).await, 0, "a transaction was left open");
        let orphans = "select count(*) from reservation r
                       where not exists (select from order_status s where s.order_id = r.order_id)";
        assert_eq!(self.count(orphans).await, 0, "a reservation without its order");
        self.broker.remove().await;
        self.pool.close().await;
        database::drop(&self.environment[0].1).await;
        self.finished = true;
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        if !self.finished && !std::thread::panicking() {
            panic!("a test ends with finish(), which is the audit");
        }
    }
}

/// The service, running in this process.
#[derive(Debug)]
#[must_use]
pub struct Service {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Service {
    /// Stops it as a SIGTERM would, and waits for its end.
    pub async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("a stop in time").expect("no panic");
    }
}

/// Waits until the condition holds; panics, naming it, when it does not come to hold.
pub async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
