//! What the tests stand on.

mod broker;
mod certificates;
mod database;
mod events;
mod http;
mod message;
mod pgbouncer;
mod process;
mod proxy;
mod scripted;
mod servers;
mod service;
mod wait;

use sqlx::{AssertSqlSafe, PgConnection, PgPool};
use stock_service::broker::Topology;
use stock_service::db::Database;
use stock_service::handlers::Handlers;
use stock_service::inbox::{Dispatch, Processor};
use stock_service::settings::Settings;
use stock_service::telemetry::{Monitor, Pulse};
use stock_service::worker::Workers;
use tokio_util::sync::CancellationToken;

pub use broker::Broker;
pub use certificates::{Authority, Identity};
pub use events::{Order, StatusChange, id};
pub use http::Endpoint;
pub use message::{Message, persistent, table, text, with_headers};
pub use pgbouncer::Pgbouncer;
pub use process::{Finished, Process, TemporaryFile, temporary_file};
pub use proxy::{Proxy, Way};
pub use scripted::{Scripted, Step};
pub use servers::Servers;
pub use service::Service;
pub use wait::{PATIENCE, eventually, eventually_within};

/// One test's servers: a database, an exchange and queues of its own.
#[derive(Debug)]
pub struct TestBed {
    /// The test's own view of the database: plain queries, so that what checks the guarantee does not share its SQL.
    pub pool: PgPool,
    /// The test's own view of the broker.
    pub broker: Broker,
    /// For what the test applies by itself.
    monitor: Monitor,
    environment: Vec<(String, String)>,
    /// The URL of the server's own database, which no test works in.
    server: String,
    /// A database user of the test's own.
    user: Option<String>,
    finished: bool,
}

impl TestBed {
    /// A migrated database, and exchange and queues that nobody else has.
    pub async fn new() -> Self {
        Self::bare().await.furnish().await
    }

    /// An empty database and names only, for tests of what makes the rest.
    pub async fn bare() -> Self {
        let server = |name| std::env::var(name).expect("it names a server; `make test` sets it");
        Self::bare_on(&server("DATABASE_URL"), &server("AMQP_URL")).await
    }

    /// Migrates, and declares exchange and queues.
    pub async fn furnish(self) -> Self {
        self.database().migrate().await.expect("a new schema");
        self.declare().await;
        self
    }

    async fn bare_on(server: &str, amqp_url: &str) -> Self {
        if let Ok(filter) = std::env::var("RUST_LOG") {
            // What the service says inside a test; only the first test gets to say so.
            tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init().ok();
        }
        let (name, database_url) = database::create(server).await;
        let environment = [
            ("DATABASE_URL", database_url.as_str()),
            ("AMQP_URL", amqp_url),
            ("STOCK__AMQP__EXCHANGE", &format!("{name}.events")),
            ("STOCK__AMQP__QUEUE", &format!("{name}.stock.events")),
            ("STOCK__RETRY__DELAY", "50ms"), // the ladder of an ordinary test: 50, 100, 200 ms
            ("STOCK__LOG__FORMAT", "json"),
            ("STOCK__HTTP__LISTEN", "off"), // or services that run side by side would want one port
        ];
        let environment = environment.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        let pool = PgPool::connect(&database_url).await.expect("the new database");
        let broker = Broker::new(amqp_url, &name);
        let (monitor, server) = (Monitor::default(), server.to_owned());
        Self { pool, broker, monitor, environment, server, user: None, finished: false }
    }

    /// Changes the retries: so many, the first after so many milliseconds, each further one after twice as long.
    pub fn set_ladder(&mut self, retries: u32, milliseconds: u32) {
        self.set("retry.max_retries", &retries.to_string());
        self.set("retry.delay", &format!("{milliseconds}ms"));
        self.set("retry.max_delay", "1d");
        for retry in 0..retries {
            self.broker.also_delays(milliseconds << retry);
        }
    }

    /// Declares exchange and queues for the settings as they are by now, even when the service itself must not.
    pub async fn declare(&self) {
        let mut settings = self.settings();
        settings.amqp.declare = true;
        let topology = Topology::new(&settings.amqp, &settings.retry);
        let connection = self.broker.connection().await;
        topology.ensure(&connection).await.expect("new queues");
    }

    /// Changes a setting for what is started from now on, e.g. `retry.delay`.
    pub fn set(&mut self, key: &str, value: &str) {
        self.set_variable(&format!("STOCK__{}", key.to_uppercase().replace('.', "__")), value);
    }

    /// Changes a variable for what is started from now on.
    pub fn set_variable(&mut self, name: &str, value: &str) {
        self.unset_variable(name);
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Takes a variable away from what is started from now on.
    pub fn unset_variable(&mut self, name: &str) {
        self.environment.retain(|(key, _)| key != name);
    }

    /// A variable of what is started from now on.
    pub fn variable(&self, name: &str) -> &str {
        let variable = self.environment.iter().find(|(key, _)| key == name);
        variable.map(|(_, value)| value.as_str()).expect(name)
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
        let (stop, monitor) = (CancellationToken::new(), Monitor::default());
        let workers = Workers::new(&self.settings(), self.database(), dispatch, false, monitor.clone());
        let task = tokio::spawn(workers.run(stop.clone()));
        // Not by the broker's count, which is late to tell of a consumer that has gone.
        let consumes = async || monitor.health.report().not_ready.iter().all(|finding| finding.part != "broker");
        eventually("the service consumes", consumes).await;
        Service::new(stop, task)
    }

    /// Works until the queue is empty and nothing is in hand, with the real handlers.
    pub async fn drain(&self) {
        self.drain_with(Handlers).await;
    }

    /// Works until the queue is empty and nothing is in hand, with these handlers.
    pub async fn drain_with<D: Dispatch>(&self, dispatch: D) {
        let workers = Workers::new(&self.settings(), self.database(), dispatch, true, Monitor::default());
        let run = workers.run(CancellationToken::new());
        tokio::time::timeout(PATIENCE, run).await.expect("an empty queue in time");
    }

    /// What applies messages, without a broker.
    pub fn processor<D: Dispatch>(&self, dispatch: D) -> Processor<D> {
        Processor::new(self.database(), dispatch, self.monitor.clone())
    }

    /// What a loop of the test's own beats.
    pub fn pulse(&self) -> Pulse {
        self.monitor.health.pulse("test", PATIENCE)
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

    /// A value out of the database, as text.
    pub async fn text(&self, sql: &str) -> Option<String> {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.expect(sql)
    }

    /// Runs statements of the test's own.
    pub async fn execute(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.expect(sql);
    }

    /// Runs a statement that must not be run inside the test's own database.
    pub async fn execute_beside(&self, sql: &str) {
        database::execute(&self.server, sql.to_owned()).await;
    }

    /// A session of the test's own beside all others, inside a transaction that has run these statements; dropping it
    /// rolls back.
    pub async fn side_session(&self, sql: &str) -> PgConnection {
        let mut session = self.pool.acquire().await.expect("a connection").detach();
        let statements = AssertSqlSafe(format!("begin; {sql}"));
        sqlx::raw_sql(statements).execute(&mut session).await.expect("a side session");
        session
    }

    /// Has each new reservation wait for as long as this lives. Unlike a locked table it lets pass a statement that
    /// inserts none, which is how the service sees whether it could work.
    pub async fn hold_reservations(&self) -> PgConnection {
        self.execute(
            "create or replace function hold() returns trigger language plpgsql as
             $hold$ begin perform pg_advisory_xact_lock_shared(1); return new; end $hold$;
             create or replace trigger hold before insert on reservation for each row execute function hold()",
        )
        .await;
        self.side_session("select pg_advisory_xact_lock(1)").await
    }

    /// The name of the test's database, and what the names of its queues begin with.
    pub fn database_name(&self) -> String {
        self.broker.name().to_owned()
    }

    /// Has what is started from now on use a database user of its own, who may work with the rows and nothing else.
    pub async fn demote(&mut self) -> String {
        let user = format!("{}_user", self.database_name());
        self.execute(&format!(
            "create role {user} login password 'S3CR3T-user';
             grant select, insert, update, delete on all tables in schema public to {user}"
        ))
        .await;
        let mut url = url::Url::parse(self.variable("DATABASE_URL")).expect("a URL");
        url.set_username(&user).expect("a user");
        url.set_password(Some("S3CR3T-user")).expect("a password");
        self.set("database.url", url.as_str());
        self.user = Some(user.clone());
        user
    }

    /// Waits until so many sessions wait for a lock.
    pub async fn blocked(&self, sessions: i64) {
        let waiting = "select count(*) from pg_stat_activity
                       where datname = current_database() and wait_event_type = 'Lock'";
        eventually(&format!("{sessions} sessions wait for a lock"), async || self.count(waiting).await == sessions)
            .await;
    }

    /// How many deadlocks there have been, once the service is gone: a session tells its own at its end.
    pub async fn deadlocks(&self) -> i64 {
        let sessions = "select count(*) from pg_stat_activity
                        where datname = current_database() and application_name = 'stock-service'";
        eventually("all sessions have ended", async || self.count(sessions).await == 0).await;
        self.count("select deadlocks from pg_stat_database where datname = current_database()").await
    }

    /// Has each new reservation run this, as the body of a trigger; `new.quantity` tells a test's lines apart.
    pub async fn on_reservation(&self, body: &str) {
        self.execute(&format!(
            "create sequence hits;
             create function fault() returns trigger language plpgsql as $fault$ begin {body} return new; end $fault$;
             create trigger fault before insert on reservation for each row execute function fault()"
        ))
        .await;
    }

    /// Waits until so many events are recorded as processed.
    pub async fn has_processed(&self, events: i64) {
        eventually(&format!("{events} events processed"), async || self.processed().await == events).await;
    }

    /// The audit that ends every test: whatever was published is accounted for by applied events, recognised copies
    /// and messages that the test has taken; no message and no open transaction is left. Then everything is removed.
    pub async fn finish(self) {
        for queue in self.broker.queues() {
            assert_eq!(self.broker.depth(&queue).await, 0, "messages are left in {queue}");
        }
        let taken = self.broker.taken();
        let (published, processed) = (self.broker.published(), self.processed().await);
        assert!(
            processed + taken <= published,
            "{published} published, but {processed} processed and {taken} taken: something came from nowhere"
        );
        let distinct = i64::try_from(self.broker.distinct_valid_events().len()).expect("a count");
        assert!(processed + taken >= distinct, "{distinct} events, {processed} processed, {taken} taken: one is lost");
        let orphans = "select count(*) from reservation r
                       where not exists (select from order_status s where s.order_id = r.order_id)";
        assert_eq!(self.count(orphans).await, 0, "a reservation without its order");
        self.remove().await;
    }

    /// Removes everything without the audit, which knows nothing of rows that a test wrote or deleted by itself. No
    /// transaction may be open here either.
    pub async fn remove(mut self) {
        let open = "select count(*) from pg_stat_activity
                    where datname = current_database() and state like 'idle in transaction%'";
        // The server notices the end of a process a moment later.
        eventually("no transaction is left open", async || self.count(open).await == 0).await;
        self.broker.remove().await;
        self.pool.close().await;
        database::drop(&self.server, &self.database_name(), self.user.as_deref()).await;
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
