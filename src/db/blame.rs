//! Whose fault an error of the database is: the one table, by SQLSTATE and by the kind of error, never by text.

use anyhow::anyhow;

use crate::message::{Failure, Interruption, Stop, Suspicion};
use crate::tls::TlsFault;

/// Whose fault is it? The one place that decides, by SQLSTATE and by the kind of error, never by text.
impl From<sqlx::Error> for Stop {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;

        let service = |error, suspicion| Self::Service(Interruption { cause: explain(error), suspicion });
        let state = match &error {
            E::Database(database) => match database.code() {
                Some(code) => code.into_owned(),
                None => return service(error, Suspicion::None),
            },
            // The connection broke: the network, the server, or the event itself did it.
            E::Io(_) | E::Protocol(_) | E::WorkerCrashed => return service(error, Suspicion::BrokenConnection),
            E::Configuration(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::BeginFailed => {
                return service(error, Suspicion::None);
            }
            // The rest is about this statement's values and rows.
            _ => return Self::Event(Failure::Retryable(anyhow!("{error}"))),
        };
        match blame(&state) {
            Blame::Event { permanent: true } => Self::Event(Failure::Permanent(describe(&error))),
            Blame::Event { permanent: false } => Self::Event(Failure::Retryable(describe(&error))),
            Blame::Contention { timed_out } => Self::Contention { cause: describe(&error), timed_out },
            Blame::Service { broke_connection: true } => service(error, Suspicion::BrokenConnection),
            Blame::Service { broke_connection: false } => service(error, Suspicion::None),
        }
    }
}

#[derive(Debug, PartialEq)]
enum Blame {
    Event { permanent: bool },
    Contention { timed_out: bool },
    Service { broke_connection: bool },
}

/// The table of SQLSTATEs; <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
fn blame(state: &str) -> Blame {
    match state {
        // A row that this one refers to may still arrive.
        "23503" => Blame::Event { permanent: false },
        // Serialization failure, deadlock; and a cached statement that does not fit the session it met, which a
        // fresh connection cures.
        "40001" | "40P01" | "0A000" | "26000" | "42P05" => Blame::Contention { timed_out: false },
        // Lock not available, query canceled.
        "55P03" | "57014" => Blame::Contention { timed_out: true },
        // An administrator or a crash ended the session; it may have been this event that crashed it.
        "57P01" | "57P02" => Blame::Service { broke_connection: true },
        // Read-only, idle in transaction for too long; no database, no schema, no table, no column, no right.
        "25006" | "25P03" | "3D000" | "3F000" | "42P01" | "42703" | "42501" => {
            Blame::Service { broke_connection: false }
        }
        _ => match state.get(..2) {
            // Data exceptions and broken constraints: the same again will be refused again.
            Some("22" | "23") => Blame::Event { permanent: true },
            // The connection itself.
            Some("08") => Blame::Service { broke_connection: true },
            // No login, no resources, operator's intervention, system error, internal error.
            Some("28" | "53" | "58" | "XX") => Blame::Service { broke_connection: false },
            _ if state.starts_with("57P") => Blame::Service { broke_connection: false },
            _ => Blame::Event { permanent: false },
        },
    }
}

/// What the database said, and the SQLSTATE that it said it with.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Said {
    text: String,
    state: String,
}

/// The SQLSTATE behind an error, if the database said one.
pub fn sqlstate(error: &anyhow::Error) -> Option<&str> {
    error.downcast_ref::<Said>().map(|said| said.state.as_str())
}

/// Whether the server let nobody in: wrong credentials, or no such database. Those who watch over logins do not like
/// many attempts.
pub fn refuses_login(error: &anyhow::Error) -> bool {
    sqlstate(error).is_some_and(|state| state.starts_with("28") || state == "3D000")
}

/// An error that is about the service, with the database's own text: no row is part of it.
pub fn explain(error: sqlx::Error) -> anyhow::Error {
    let error = match error {
        sqlx::Error::Tls(inner) => match inner.downcast::<TlsFault>() {
            Ok(fault) => return anyhow::Error::new(*fault),
            Err(inner) => sqlx::Error::Tls(inner),
        },
        other => other,
    };
    let Some(database) = error.as_database_error() else { return anyhow!("{error}") };
    let state = database.code().unwrap_or_default().into_owned();
    Said { text: format!("{} (SQLSTATE {state})", database.message()), state }.into()
}

/// An error of the database without its text, which may quote rows: state, constraint, table.
fn describe(error: &sqlx::Error) -> anyhow::Error {
    let Some(database) = error.as_database_error() else { return anyhow!("{error}") };
    let state = database.code().unwrap_or_default().into_owned();
    let mut text = format!("SQLSTATE {state}");
    if let Some(constraint) = database.constraint() {
        text.push_str(&format!(", constraint {constraint}"));
    }
    if let Some(table) = database.table() {
        text.push_str(&format!(", table {table}"));
    }
    Said { text, state }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sqlstate_has_one_culprit() {
        for (states, expected) in [
            ("22003 22P02 23502 23505 23514 23P01", Blame::Event { permanent: true }),
            ("23503 25P01 25P02 3B001 P0001 42601 21000 0L000", Blame::Event { permanent: false }),
            ("40001 40P01 0A000 26000 42P05", Blame::Contention { timed_out: false }),
            ("55P03 57014", Blame::Contention { timed_out: true }),
            ("57P01 57P02 08006 08P01", Blame::Service { broke_connection: true }),
            (
                "57P03 57P04 57P05 28P01 28000 53300 53100 53200 58030 XX000 XX001 25006 25P03 3D000 3F000 42P01 42703 42501",
                Blame::Service { broke_connection: false },
            ),
        ] {
            for state in states.split(' ') {
                assert_eq!(blame(state), expected, "{state}");
            }
        }
    }

    #[test]
    fn errors_of_this_side_are_sorted_by_their_kind() {
        for error in [sqlx::Error::PoolTimedOut, sqlx::Error::PoolClosed, sqlx::Error::WorkerCrashed] {
            assert!(matches!(Stop::from(error), Stop::Service(_)));
        }
        assert!(matches!(Stop::from(sqlx::Error::Io(std::io::Error::other("x"))), Stop::Service(_)));
        assert!(matches!(Stop::from(sqlx::Error::RowNotFound), Stop::Event(Failure::Retryable(_))));
    }
}
