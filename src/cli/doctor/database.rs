//! The database: what is right with it, what is not, and the way out.

use chrono::TimeDelta;

use super::super::PATIENCE;
use super::findings::Findings;
use crate::db::examine::{self, Facts, Migrations, Server};
use crate::db::{DatabaseUrl, SslMode, sqlstate};
use crate::settings::Settings;
use crate::tls::TlsFault;

/// Rows, purge and everything that the guarantee rests on go by the database's clock alone. This machine's stamps
/// `failed-at`, by which the purge knows how old a failed message is.
const CLOCK_TOLERANCE: TimeDelta = TimeDelta::seconds(5);

pub(super) async fn examine(settings: &Settings) -> Findings {
    let mut findings = Findings::default();
    match examine::examine(&settings.database.url, PATIENCE).await {
        Ok(facts) => judge(&facts, settings, &mut findings),
        Err(error) => {
            let place = settings.database.url.place();
            match error.downcast::<TlsFault>() {
                Ok(TlsFault { cause, remedy }) => {
                    findings.fail("database.tls", format!("no connection by TLS to {place}: {cause}"), remedy);
                }
                Err(error) => {
                    let finding = format!("cannot examine the database at {place}: {error:#}");
                    findings.fail("database.reachable", finding, way_in(sqlstate(&error)));
                }
            }
        }
    }
    findings
}

/// What to do when the database does not even let us look.
fn way_in(sqlstate: Option<&str>) -> &'static str {
    match sqlstate {
        Some("28P01") => "correct user and password in DATABASE_URL (database.url)",
        Some("28000") => {
            "correct the user in DATABASE_URL (database.url), or let it in: create the role, pg_hba.conf; that may ask \
             for TLS (sslmode) or for a client certificate (sslcert and sslkey)"
        }
        Some("3D000") => "create the database, or correct its name in DATABASE_URL (database.url)",
        Some("42501") => "grant connect on the database, and usage on the schema, to the user",
        Some("26000" | "42P05") => {
            "a transaction-pooling proxy is in between: add ?statement-cache-capacity=0 to DATABASE_URL (database.url), or \
             use pgbouncer 1.21 or newer with max_prepared_statements"
        }
        Some("53300") => {
            "too many sessions: raise max_connections or the limits of database and role, or lower \
             database.max_connections"
        }
        Some("55000") => "let it take connections again: alter database ... with allow_connections true",
        Some("57P03") => "it is starting, stopping or recovering: wait, then look at the server's log",
        Some(_) => "look at the server's log",
        None => {
            "correct host and port in DATABASE_URL (database.url), start the server, or open the way to it \
             (listen_addresses, firewall, sslmode)"
        }
    }
}

fn judge(facts: &Facts, settings: &Settings, findings: &mut Findings) {
    let server = &facts.server;
    let place = settings.database.url.place();
    findings.ok("database.reachable", format!("at {place}, as {}", server.user));
    judge_tls(&settings.database.url, findings);
    judge_server(server, findings);
    judge_connections(server, settings, findings);
    if facts.is_pooled {
        findings.ok(
            "database.proxy",
            "a transaction-pooling proxy is in between; before pgbouncer 1.21, and without its max_prepared_statements, \
             DATABASE_URL needs ?statement-cache-capacity=0",
        );
    }
    judge_clock(facts.clock_ahead, findings);
    judge_schema(facts, settings, findings);
}

fn judge_tls(url: &DatabaseUrl, findings: &mut Findings) {
    let weakness = match url.ssl_mode() {
        SslMode::VerifyFull => {
            return findings.ok("database.tls", "encrypted, and the server is verified (sslmode=verify-full)");
        }
        _ if !url.is_remote() => return,
        SslMode::VerifyCa => {
            "sslmode=verify-ca: any host's certificate is taken if a CA has issued it that this system trusts"
        }
        SslMode::Require => "sslmode=require: encrypted, but nobody verifies who is at the other end",
        SslMode::Prefer => {
            "sslmode=prefer, the default: nobody verifies who is at the other end, nor that there is TLS"
        }
        SslMode::Disable => "sslmode=disable: the password and all data travel without TLS",
    };
    findings.warn(
        "database.tls",
        weakness,
        "use sslmode=verify-full in DATABASE_URL (database.url), unless you trust the network",
    );
}

fn judge_server(server: &Server, findings: &mut Findings) {
    match server.version_number >= 150_000 {
        true => findings.ok("database.version", format!("PostgreSQL {}", server.version)),
        false => findings.fail(
            "database.version",
            format!("PostgreSQL {} is too old", server.version),
            "upgrade it to PostgreSQL 15 or newer",
        ),
    }
    match (server.is_standby, server.is_read_only) {
        (true, _) => findings.fail(
            "database.writable",
            "the server is a standby, which takes no writes",
            "name the primary in DATABASE_URL (database.url), or promote this one",
        ),
        (false, true) => findings.fail(
            "database.writable",
            "transactions are read-only by default",
            "set default_transaction_read_only off again: of the server, the database, or the role",
        ),
        (false, false) => findings.ok("database.writable", "takes writes"),
    }
    match server.unsafe_settings.is_empty() {
        true => findings.ok("database.durability", "fsync and full_page_writes are on"),
        false => findings.warn(
            "database.durability",
            format!(
                "off: {}. A crash of the server may lose or damage what was committed",
                server.unsafe_settings.join(", ")
            ),
            "turn it on in postgresql.conf and reload, unless this server is only for tests",
        ),
    }
    findings.ok(
        "database.defaults",
        format!(
            "isolation {}, synchronous_commit {}; the service's own transactions are read committed and on",
            server.isolation, server.synchronous_commit
        ),
    );
    if server.encoding != "UTF8" {
        findings.warn(
            "database.encoding",
            format!("the database's encoding is {}: not every status of an order can be stored", server.encoding),
            "create the database with the encoding UTF8",
        );
    }
}

fn judge_connections(server: &Server, settings: &Settings, findings: &mut Findings) {
    let (free, needed) = (server.free_connections, i64::from(settings.connections()));
    match free >= needed {
        true => findings.ok("database.connections", format!("{free} more are free; each replica opens up to {needed}")),
        false => findings.warn(
            "database.connections",
            format!("only {free} more are free, and one more replica opens up to {needed}"),
            "raise max_connections or the limits of database and role, or lower consume.workers and \
             database.max_connections",
        ),
    }
}

fn judge_clock(ahead: TimeDelta, findings: &mut Findings) {
    let milliseconds = ahead.num_milliseconds().abs();
    let direction = if ahead < TimeDelta::zero() { "behind" } else { "ahead of" };
    let finding = format!(
        "the database's clock is {}.{:03} s {direction} this machine's",
        milliseconds / 1000,
        milliseconds % 1000
    );
    match ahead.abs() <= CLOCK_TOLERANCE {
        true => findings.ok("database.clock", finding),
        false => findings.warn(
            "database.clock",
            format!(
                "{finding}. Rows and purges go by the database's; failed-at, the log, and the age of failed messages \
                 that a purge respects go by this machine's"
            ),
            "synchronise both machines' clocks (NTP)",
        ),
    }
}

fn judge_schema(facts: &Facts, settings: &Settings, findings: &mut Findings) {
    let server = &facts.server;
    let Some(schema) = &server.schema else {
        findings.fail(
            "database.schema",
            format!("no schema on the search path may be used by {}", server.user),
            "grant usage on the schema to the user, or set its search_path",
        );
        return;
    };
    let migrates = settings.database.migrate_on_start;
    let pending = match &facts.migrations {
        Some(migrations) => {
            judge_migrations(migrations, migrates, findings);
            !migrations.pending.is_empty()
        }
        None => {
            let (finding, remedy) =
                ("what has been migrated may not be read", "grant select on _sqlx_migrations to the user");
            match migrates {
                true => findings.fail("schema.migrations", finding, remedy),
                false => findings.warn("schema.migrations", finding, remedy),
            }
            false
        }
    };
    if migrates && !server.may_create {
        let finding = format!("{} may not create tables in the schema {schema}", server.user);
        let remedy = "grant create on the schema to the user; or set database.migrate_on_start = false, and have \
                      `stock-service migrate` run by a user who may";
        match pending {
            true => findings.fail("schema.create", finding, remedy),
            false => findings.warn("schema.create", format!("{finding}, which the next release may need"), remedy),
        }
    }
    judge_tables(facts, pending, settings, findings);
}

fn judge_migrations(migrations: &Migrations, migrates: bool, findings: &mut Findings) {
    let check = "schema.migrations";
    let Migrations { pending, changed, unknown } = migrations;
    if !changed.is_empty() {
        findings.fail(
            check,
            format!("applied with another text than this release has: {}", changed.join(", ")),
            "run the release that the schema was made by, or restore the schema; a migration is never edited",
        );
    }
    if !unknown.is_empty() {
        let versions: Vec<_> = unknown.iter().map(i64::to_string).collect();
        findings.warn(
            check,
            format!("applied by a newer release than this one: {}", versions.join(", ")),
            "run the newer release; only the one right before it works beside it",
        );
    }
    if !pending.is_empty() {
        let finding = format!("not applied yet: {}", pending.join(", "));
        match migrates {
            true => {
                findings.warn(check, finding, "`consume` applies them at its start, or run `stock-service migrate`");
            }
            false => findings.fail(check, finding, "run `stock-service migrate`"),
        }
    }
    if changed.is_empty() && unknown.is_empty() && pending.is_empty() {
        findings.ok(check, "the schema is up to date");
    }
}

fn judge_tables(facts: &Facts, pending: bool, settings: &Settings, findings: &mut Findings) {
    let user = &facts.server.user;
    let before = findings.0.len();
    for table in &facts.tables {
        let name = &table.name;
        if !table.exists {
            // Before its migration a missing table is no news.
            if !pending {
                findings.fail(
                    "schema.tables",
                    format!("the table {name} is missing, or in no schema on the search path"),
                    "restore it from a backup, or correct the user's search_path",
                );
            }
            continue;
        }
        let is_needed = |right: &&String| *right != "delete" || settings.purge.enabled;
        let missing: Vec<_> = table.missing_rights.iter().filter(is_needed).map(String::as_str).collect();
        if !missing.is_empty() {
            let missing = missing.join(", ");
            findings.fail(
                "schema.tables",
                format!("{user} lacks rights on {name}: {missing}"),
                format!("grant {missing} on {name} to {user}"),
            );
        }
    }
    for index in &facts.indexes {
        let (table, column) = (&index.table, &index.column);
        let has_table = facts.tables.iter().any(|found| found.name == *table && found.exists);
        match (index.exists || !has_table, index.is_key) {
            (true, _) => {}
            (false, true) => findings.fail(
                "schema.indexes",
                format!("{table} has no unique key on {column}: without it no copy is recognised"),
                format!("stop the service, remove what is double, and alter table {table} add primary key ({column})"),
            ),
            (false, false) => findings.warn(
                "schema.indexes",
                format!("{table} has no valid index on {column}: what asks by it reads the whole table"),
                format!("create index concurrently {table}_{column} on {table} ({column})"),
            ),
        }
    }
    if findings.0.len() == before && !pending {
        findings.ok("schema.tables", "tables, indexes and rights are there");
    }
}

#[cfg(test)]
mod tests {
    use super::super::findings::Level;
    use super::*;

    fn levels(judge: impl FnOnce(&mut Findings)) -> Vec<(&'static str, Level)> {
        let mut findings = Findings::default();
        judge(&mut findings);
        findings.0.iter().map(|finding| (finding.check, finding.level)).collect()
    }

    #[test]
    fn clocks_that_differ_are_a_warning_in_both_directions() {
        for (milliseconds, level) in
            [(0, Level::Ok), (5000, Level::Ok), (5001, Level::Warning), (-60_000, Level::Warning)]
        {
            let found = levels(|findings| judge_clock(TimeDelta::milliseconds(milliseconds), findings));
            assert_eq!(found, [("database.clock", level)], "{milliseconds}");
        }
    }

    #[test]
    fn an_old_server_and_a_standby_are_errors() {
        let server = Server {
            version_number: 140_011,
            version: "14.11".to_owned(),
            user: "stock".to_owned(),
            schema: Some("public".to_owned()),
            may_create: true,
            is_standby: true,
            is_read_only: false,
            isolation: "read committed".to_owned(),
            synchronous_commit: "on".to_owned(),
            encoding: "UTF8".to_owned(),
            unsafe_settings: Vec::new(),
            free_connections: 100,
        };
        let found = levels(|findings| judge_server(&server, findings));
        assert!(found.contains(&("database.version", Level::Error)), "{found:?}");
        assert!(found.contains(&("database.writable", Level::Error)), "{found:?}");
    }

    #[test]
    fn a_way_to_another_host_that_is_not_verified_is_a_warning() {
        for (url, level) in [
            ("postgres://u:p@db/d", Some(Level::Warning)),
            ("postgres://u:p@db/d?sslmode=disable", Some(Level::Warning)),
            ("postgres://u:p@db/d?sslmode=require", Some(Level::Warning)),
            ("postgres://u:p@db/d?sslmode=verify-ca", Some(Level::Warning)),
            ("postgres://u:p@db/d?sslmode=verify-full", Some(Level::Ok)),
            ("postgres://u:p@localhost/d", None),
        ] {
            let found = levels(|findings| judge_tls(&url.parse().unwrap(), findings));
            assert_eq!(found, Vec::from_iter(level.map(|level| ("database.tls", level))), "{url}");
        }
    }
}
