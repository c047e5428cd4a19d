//! The database: its pool, its schema, the transaction that everything runs in, and the one table that tells
//! whose fault an error is.

mod blame;
pub mod examine;
mod url;

use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Postgres};

pub use self::blame::{explain, refuses_login, sqlstate};
pub use self::url::{DatabaseUrl, SslMode};
use crate::settings::DatabaseSettings;

/// How long a connection from the pool is waited for. Short, so that an outage is noticed, and its end too; the
/// pool is large enough that nobody waits in ordinary times.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the reason for a failed connection is waited for; a server that refuses does so at once.
const WHY_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a connection may take on its way back into the pool; it is closed then.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// The pool, and how a transaction on it begins. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Database {
    pool: PgPool,
    url: DatabaseUrl,
    begin: std::sync::Arc<str>,
    forget: &'static str,
    statement_timeout: Duration,
}

impl Database {
    /// Sets up the pool; nothing is connected yet.
    pub fn new(settings: &DatabaseSettings, connections: u32) -> Self {
        let options = settings.url.options().clone().application_name("stock-service");
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // A ping before each use costs a round trip a batch; a dead connection is met as an interruption,
            // which costs no attempt.
            .test_before_acquire(false)
            .connect_lazy_with(options);
        // Everything that a transaction relies on is set by the transaction itself: a pooling proxy may give it any
        // session, and the server's defaults are somebody else's.
        let milliseconds = settings.timeout.as_millis();
        let forget = settings.url.forget_statements();
        let begin = format!(
            "begin isolation level read committed; {forget}\
             set local synchronous_commit = on; \
             set local statement_timeout = {milliseconds}; \
             set local lock_timeout = {milliseconds}; \
             set local idle_in_transaction_session_timeout = {milliseconds}; \
             savepoint seal"
        );
        Self { pool, url: settings.url.clone(), begin: begin.into(), forget, statement_timeout: settings.timeout }
    }

    /// Begins a transaction: READ COMMITTED, durable, with bounded waits.
    ///
    /// # Errors
    /// Whatever keeps the pool from giving a connection, or the server from beginning.
    pub async fn begin(&self) -> sqlx::Result<Transaction> {
        let connection = match self.pool.acquire().await {
            // The pool tries to connect until its time is up, and keeps why it could not to itself.
            Err(sqlx::Error::PoolTimedOut) => return Err(self.url.name_fault(self.why_not_connected().await)),
            Err(error) => return Err(self.url.name_fault(error)),
            Ok(connection) => connection,
        };
        // Owned by the transaction before the first statement: a `begin` that is given up on must not bring its
        // connection back to the pool.
        let mut transaction = Transaction { connection, limit: self.transaction_timeout(), ended: false };
        let begin = sqlx::raw_sql(AssertSqlSafe(self.begin.clone())).execute(transaction.connection());
        bounded(self.transaction_timeout(), begin).await?;
        Ok(transaction)
    }

    /// Begins a transaction and gives it up: whether the database answers.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn ping(&self) -> sqlx::Result<()> {
        self.begin().await?.rollback().await
    }

    /// Waits for a statement no longer than a transaction may take. The server bounds each statement by itself; this is
    /// for a network that has gone silent.
    ///
    /// # Errors
    /// The statement's own, or a timeout.
    pub async fn bounded<T>(&self, statement: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
        bounded(self.transaction_timeout(), statement).await
    }

    async fn why_not_connected(&self) -> sqlx::Error {
        match tokio::time::timeout(WHY_TIMEOUT, PgConnection::connect_with(&self.pool.connect_options())).await {
            Ok(Err(error)) => error,
            Ok(Ok(_)) | Err(_) => sqlx::Error::PoolTimedOut,
        }
    }

    /// The longest that a statement, or its wait for a lock, may take.
    pub fn statement_timeout(&self) -> Duration {
        self.statement_timeout
    }

    /// The longest that a transaction may take, seen from here, where a silent network is noticed too: one that takes
    /// two full statements' time is talking to a server that does not answer any more.
    pub fn transaction_timeout(&self) -> Duration {
        self.statement_timeout * 2
    }

    /// Ends all sessions; one that does not end in a moment ends with the process.
    pub async fn close(&self) {
        tokio::time::timeout(Duration::from_secs(1), self.pool.close()).await.ok();
    }

    /// Brings the schema up to date. Several at once are safe: one works, the others wait.
    ///
    /// # Errors
    /// The migrator's, with the migration that failed; nothing of it is kept then.
    pub async fn migrate(&self) -> anyhow::Result<Migrated> {
        let mut migrator = sqlx::migrate!();
        migrator
            // The lock of sqlx's migrator belongs to a session, which a pooling proxy does not give.
            .set_locking(false)
            // The release before the newest one must still start beside it.
            .set_ignore_missing(true);
        /// Any number, the same in every release.
        const LOCK: i64 = 0x5700_c5e7;

        let mut transaction = self.begin().await.map_err(explain)?;
        let pending = self.bounded(pending(transaction.connection(), &migrator)).await.map_err(explain)?;
        transaction.rollback().await?;
        if pending == 0 {
            return Ok(Migrated { applied: 0 });
        }
        // One of sqlx's own: its migrator makes savepoints of what would end ours.
        let mut transaction = self.pool.begin_with("begin isolation level read committed").await?;
        let limit = AssertSqlSafe(format!("{}set local lock_timeout = '1min'", self.forget));
        sqlx::raw_sql(limit).execute(&mut *transaction).await?;
        sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
        let applied = self::pending(&mut transaction, &migrator).await?;
        migrator.run(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(Migrated { applied })
    }
}

async fn bounded<T>(limit: Duration, work: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let text = format!("no answer within {limit:?}");
        Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, text)))
    })
}

/// How many migrations have not been applied yet.
async fn pending(conn: &mut PgConnection, migrator: &Migrator) -> sqlx::Result<usize> {
    // Not by to_regclass, which in one transaction may go by what it knew before it waited for the lock.
    let exists = "select exists (select from pg_class where relname = '_sqlx_migrations' and pg_table_is_visible(oid))";
    let exists: bool = sqlx::query_scalar(exists).fetch_one(&mut *conn).await?;
    let applied: Vec<(i64, Vec<u8>)> = match exists {
        true => sqlx::query_as("select version, checksum from _sqlx_migrations where success").fetch_all(conn).await?,
        false => Vec::new(),
    };
    let is_applied = |version, checksum: &[u8]| applied.iter().any(|(v, c)| *v == version && **c == *checksum);
    Ok(migrator.iter().filter(|migration| !is_applied(migration.version, &migration.checksum)).count())
}

/// What a migration did.
#[derive(Debug)]
pub struct Migrated {
    /// Migrations applied; 0 when the schema was up to date.
    pub applied: usize,
}

/// A transaction that ends by [`commit`](Self::commit) or [`rollback`](Self::rollback), or takes its connection
/// with it: one that is dropped in the middle, however that came, never reaches the pool again. (sqlx would queue a
/// rollback and hand it out, open transaction included.)
#[derive(Debug)]
#[must_use]
pub struct Transaction {
    connection: PoolConnection<Postgres>,
    limit: Duration,
    ended: bool,
}

impl Transaction {
    /// The connection, to work with.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// Commits, if this is still the transaction that was begun, and whole.
    ///
    /// PostgreSQL answers the `commit` of an aborted transaction with a rollback and no error. So a seal is set when it
    /// begins and broken here: `release` fails in an aborted transaction, outside of one, and in any other than that
    /// which has the savepoint. `set constraints` brings forward what is deferred to the commit. One round trip for the
    /// three; none of them runs after one that failed.
    ///
    /// # Errors
    /// 25P02, 25P01 or 3B001 when a handler has aborted, ended or replaced the transaction; a deferred constraint's own
    /// error; or the connection's, and then nobody knows whether the commit took place.
    pub async fn commit(mut self) -> sqlx::Result<()> {
        let limit = self.limit;
        let commit = sqlx::raw_sql("release seal; set constraints all immediate; commit").execute(self.connection());
        bounded(limit, commit).await?;
        self.ended = true;
        Ok(())
    }

    /// Rolls back and gives the connection back to the pool.
    ///
    /// # Errors
    /// The connection's; it is closed then, which rolls back as well.
    pub async fn rollback(mut self) -> sqlx::Result<()> {
        let limit = self.limit;
        bounded(limit, sqlx::raw_sql("rollback").execute(self.connection())).await?;
        self.ended = true;
        Ok(())
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close_on_drop();
            return;
        }
        // The pool pings what comes back, and waits for the answer without a limit: a network that falls silent in
        // this moment would keep the place in the pool for as long as TCP has patience.
        tokio::spawn(tokio::time::timeout(RETURN_TIMEOUT, self.connection.return_to_pool()));
    }
}
