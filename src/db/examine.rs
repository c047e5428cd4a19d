//! What the database is, has and grants: facts for `doctor`, which judges them. Only reads.

use std::time::Duration;

use anyhow::anyhow;
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{DatabaseUrl, explain};

/// What the service does with each table.
const RIGHTS: [(&str, &str); 9] = [
    ("processed_event", "select"),
    ("processed_event", "insert"),
    ("processed_event", "delete"), // the purge
    ("reservation", "select"),
    ("reservation", "insert"),
    ("reservation", "update"),
    ("order_status", "select"),
    ("order_status", "insert"),
    ("order_status", "update"),
];

/// The indexes that the service relies on, by table and column, whatever their name; true for a unique key, without which
/// nothing recognises a copy.
const INDEXES: [(&str, &str, bool); 5] = [
    ("processed_event", "event_id", true),
    ("processed_event", "processed_at", false),
    ("reservation", "order_id", false),
    ("reservation", "product_id", false),
    ("order_status", "order_id", true),
];

/// The database as it was found.
#[derive(Debug)]
pub struct Facts {
    /// The server and its settings.
    pub server: Server,
    /// The tables that the service needs.
    pub tables: Vec<Table>,
    /// The indexes that it relies on.
    pub indexes: Vec<Index>,
    /// What has been migrated; none when that may not be read.
    pub migrations: Option<Migrations>,
    /// How far the server's clock is ahead of this machine's.
    pub clock_ahead: TimeDelta,
    /// Whether two sessions came to one process of the server: a proxy between gives it to whoever has a transaction.
    pub is_pooled: bool,
}

/// The server, and what is set for this user and database.
#[derive(Debug)]
pub struct Server {
    /// As a number, e.g. 150004.
    pub version_number: i32,
    /// As a text.
    pub version: String,
    /// The user that the service is there.
    pub user: String,
    /// The schema that new tables would be created in; none when none on the search path may be used.
    pub schema: Option<String>,
    /// Whether tables may be created there.
    pub may_create: bool,
    /// Whether it follows another server.
    pub is_standby: bool,
    /// `default_transaction_read_only`
    pub is_read_only: bool,
    /// `default_transaction_isolation`
    pub isolation: String,
    /// `synchronous_commit`
    pub synchronous_commit: String,
    /// `server_encoding`
    pub encoding: String,
    /// Which of the settings that keep data through a crash are off.
    pub unsafe_settings: Vec<String>,
    /// How many more sessions this user may open; the limits of server, database and user together.
    pub free_connections: i64,
}

/// A table that the service needs.
#[derive(Debug)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Whether it is there.
    pub exists: bool,
    /// What this user may not do with it.
    pub missing_rights: Vec<String>,
}

/// An index that the service relies on.
#[derive(Debug)]
pub struct Index {
    /// Its table.
    pub table: String,
    /// Its column.
    pub column: String,
    /// Whether it must be unique.
    pub is_key: bool,
    /// Whether it is there, valid, and of all rows.
    pub exists: bool,
}

/// Migrations by their version and name.
#[derive(Debug, Default)]
pub struct Migrations {
    /// Not applied yet.
    pub pending: Vec<String>,
    /// Applied with another text than this release has.
    pub changed: Vec<String>,
    /// Applied by a newer release.
    pub unknown: Vec<i64>,
}

/// Looks at the database; connecting and looking may each take so long.
///
/// # Errors
/// Why it cannot be reached, or read.
pub async fn examine(url: &DatabaseUrl, patience: Duration) -> anyhow::Result<Facts> {
    let silent = |_| anyhow!("no answer within {patience:?}");
    let connected = tokio::time::timeout(patience, connect(url)).await.map_err(silent)?;
    let mut connection = connected.map_err(explain)?;
    let facts = tokio::time::timeout(patience, look(url, &mut connection)).await.map_err(silent)?;
    connection.close().await.ok();
    facts.map_err(explain)
}

async fn connect(url: &DatabaseUrl) -> sqlx::Result<PgConnection> {
    let options = url.options().clone().application_name("stock-service doctor");
    PgConnection::connect_with(&options).await.map_err(|error| url.name_fault(error))
}

async fn look(url: &DatabaseUrl, conn: &mut PgConnection) -> sqlx::Result<Facts> {
    begin(url, conn).await?;
    let process = backend(conn).await?;
    let facts = Facts {
        server: server(conn).await?,
        tables: tables(conn).await?,
        indexes: indexes(conn).await?,
        migrations: migrations(conn, &sqlx::migrate!()).await?,
        clock_ahead: clock_ahead(conn).await?,
        is_pooled: false,
    };
    end(conn).await?;
    // Two sessions, and a transaction in one after the other. Where there is no room for a second one, nothing is known.
    let is_pooled = match connect(url).await {
        Ok(mut second) => {
            begin(url, &mut second).await?;
            let second_process = backend(&mut second).await?;
            end(&mut second).await?;
            second.close().await.ok();
            second_process == process
        }
        Err(_) => false,
    };
    Ok(Facts { is_pooled, ..facts })
}

/// Whatever is done by mistake here, the server refuses it.
async fn begin(url: &DatabaseUrl, conn: &mut PgConnection) -> sqlx::Result<()> {
    let begin = format!("begin isolation level read committed read only; {}", url.forget_statements());
    sqlx::raw_sql(AssertSqlSafe(begin)).execute(conn).await?;
    Ok(())
}

async fn end(conn: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql("rollback").execute(conn).await?;
    Ok(())
}

async fn backend(conn: &mut PgConnection) -> sqlx::Result<i32> {
    sqlx::query_scalar!("select pg_backend_pid() as \"pid!\"").fetch_one(conn).await
}

async fn server(conn: &mut PgConnection) -> sqlx::Result<Server> {
    sqlx::query_as!(
        Server,
        "select current_setting('server_version_num')::int as \"version_number!\",
                current_setting('server_version') as \"version!\",
                current_user::text as \"user!\",
                current_schema()::text as schema,
                coalesce(has_schema_privilege(current_schema(), 'create'), false) as \"may_create!\",
                pg_is_in_recovery() as \"is_standby!\",
                current_setting('default_transaction_read_only')::bool as \"is_read_only!\",
                current_setting('default_transaction_isolation') as \"isolation!\",
                current_setting('synchronous_commit') as \"synchronous_commit!\",
                current_setting('server_encoding') as \"encoding!\",
                array(select name from unnest(array['fsync', 'full_page_writes']) as name
                      where not current_setting(name)::bool) as \"unsafe_settings!\",
                -- the session that asks is gone when the service comes; a limit of -1 is none
                1 + least(
                    current_setting('max_connections')::bigint
                        - current_setting('superuser_reserved_connections')::bigint
                        - coalesce(current_setting('reserved_connections', true)::bigint, 0)
                        - (select sum(numbackends) from pg_stat_database)::bigint,
                    (select nullif(datconnlimit, -1) - numbackends
                     from pg_database join pg_stat_database using (datname)
                     where datname = current_database()),
                    (select nullif(rolconnlimit, -1) from pg_roles where rolname = current_user)
                        - (select count(*) from pg_stat_activity where usename = current_user)
                ) as \"free_connections!\""
    )
    .fetch_one(conn)
    .await
}

async fn tables(conn: &mut PgConnection) -> sqlx::Result<Vec<Table>> {
    let (names, rights): (Vec<_>, Vec<_>) =
        RIGHTS.map(|(name, right)| (name.to_owned(), right.to_owned())).into_iter().unzip();
    sqlx::query_as!(
        Table,
        "select name as \"name!\",
                to_regclass(name) is not null as \"exists!\",
                coalesce(array_agg(privilege order by privilege) filter (where not has_table_privilege(to_regclass(name), privilege)), '{}')
                    as \"missing_rights!\"
         from unnest($1::text[], $2::text[]) as need (name, privilege)
         group by name order by name",
        &names,
        &rights
    )
    .fetch_all(conn)
    .await
}

async fn indexes(conn: &mut PgConnection) -> sqlx::Result<Vec<Index>> {
    let tables = INDEXES.map(|(table, ..)| table.to_owned());
    let columns = INDEXES.map(|(_, column, _)| column.to_owned());
    let keys = INDEXES.map(|(.., is_key)| is_key);
    sqlx::query_as!(
        Index,
        "select need.name as \"table!\", need.attribute as \"column!\", need.is_key as \"is_key!\",
                exists (select from pg_index as i
                        join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
                        where i.indrelid = to_regclass(need.name) and a.attname = need.attribute
                          and i.indisvalid and i.indpred is null
                          and (not need.is_key or i.indisunique and i.indnkeyatts = 1)) as \"exists!\"
         from unnest($1::text[], $2::text[], $3::bool[]) as need (name, attribute, is_key)",
        &tables,
        &columns,
        &keys
    )
    .fetch_all(conn)
    .await
}

async fn migrations(conn: &mut PgConnection, migrator: &Migrator) -> sqlx::Result<Option<Migrations>> {
    const TABLE: &str = "_sqlx_migrations";
    let may_read: Option<bool> = sqlx::query_scalar("select has_table_privilege(to_regclass($1), 'select')")
        .bind(TABLE)
        .fetch_one(&mut *conn)
        .await?;
    let applied: Vec<(i64, Vec<u8>)> = match may_read {
        Some(true) => {
            sqlx::query_as("select version, checksum from _sqlx_migrations where success").fetch_all(conn).await?
        }
        Some(false) => return Ok(None),
        None => Vec::new(), // there is no such table yet
    };
    let mut found = Migrations::default();
    for migration in migrator.iter() {
        let name = format!("{} ({})", migration.version, migration.description);
        match applied.iter().find(|(version, _)| *version == migration.version) {
            None => found.pending.push(name),
            Some((_, checksum)) if **checksum != *migration.checksum => found.changed.push(name),
            Some(_) => {}
        }
    }
    let is_ours = |version: i64| migrator.iter().any(|migration| migration.version == version);
    found.unknown = applied.into_iter().map(|(version, _)| version).filter(|version| !is_ours(*version)).collect();
    Ok(Some(found))
}

/// Measured against the middle of the question's way, so that a slow network counts half at most.
async fn clock_ahead(conn: &mut PgConnection) -> sqlx::Result<TimeDelta> {
    let asked = Utc::now();
    let there: DateTime<Utc> = sqlx::query_scalar!("select clock_timestamp() as \"now!\"").fetch_one(conn).await?;
    Ok(there - (asked + (Utc::now() - asked) / 2))
}
