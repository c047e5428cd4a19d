//! Where the database is, and whether the way there is by TLS.

use std::fmt;
use std::io::ErrorKind;
use std::str::FromStr;

use sqlx::postgres::{PgConnectOptions, PgSslMode};

use crate::tls::{Files, Names, TlsFault, is_remote};

/// The parameters have the names that all clients of PostgreSQL read.
const TLS: Names = Names {
    url: "DATABASE_URL (database.url)",
    authorities: "sslrootcert",
    certificate: "sslcert",
    key: "sslkey",
    without: "turn it on at the server (ssl = on), or choose sslmode in DATABASE_URL (database.url) for a network that \
              you trust",
};

/// Where the database is: a URL whose password never shows.
#[derive(Clone)]
pub struct DatabaseUrl {
    options: PgConnectOptions,
    url: url::Url,
    files: Files,
}

/// Whether the way to the database is by TLS, and who is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// No TLS.
    Disable,
    /// TLS if the server has it; nobody is verified.
    Prefer,
    /// TLS; nobody is verified.
    Require,
    /// The server's certificate is verified, but not that it is this host's.
    VerifyCa,
    /// The server is verified.
    VerifyFull,
}

impl SslMode {
    /// Whether the server's certificate is looked at.
    fn verifies(self) -> bool {
        matches!(self, Self::VerifyCa | Self::VerifyFull)
    }
}

impl DatabaseUrl {
    /// What to connect with.
    pub fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    /// What a transaction begins with so that no name of a statement is taken; nothing, as long as sqlx keeps count.
    ///
    /// Without a cache sqlx names each statement all the same, and leaves it behind in the session. A pooling proxy gives
    /// that to somebody else, who counts from one, too.
    pub(super) fn forget_statements(&self) -> &'static str {
        let is_off = |(key, value): (_, _)| key == "statement-cache-capacity" && value == "0";
        if self.url.query_pairs().any(is_off) { "deallocate all; " } else { "" }
    }

    /// Host and port, for errors and logs.
    pub fn place(&self) -> String {
        let (host, port) = (self.options.get_host(), self.options.get_port());
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Whether the way there is by TLS, and who is verified.
    pub fn ssl_mode(&self) -> SslMode {
        match self.options.get_ssl_mode() {
            PgSslMode::Disable | PgSslMode::Allow => SslMode::Disable, // sqlx never tries TLS for the latter
            PgSslMode::Prefer => SslMode::Prefer,
            PgSslMode::Require => SslMode::Require,
            PgSslMode::VerifyCa => SslMode::VerifyCa,
            PgSslMode::VerifyFull => SslMode::VerifyFull,
        }
    }

    /// Whether the way there leaves this machine.
    pub fn is_remote(&self) -> bool {
        self.options.get_socket().is_none() && is_remote(self.options.get_host())
    }

    /// Why no connection came about, with the fault of TLS by its name, if it was one: sqlx names no file, and no way out.
    pub(super) fn name_fault(&self, error: sqlx::Error) -> sqlx::Error {
        let fault = match &error {
            sqlx::Error::Tls(inner) => {
                let fault = TlsFault::find(&**inner, &TLS);
                Some(fault.unwrap_or_else(|| TlsFault::speaks_none(inner.to_string(), &TLS)))
            }
            sqlx::Error::Io(inner) => TlsFault::find(inner, &TLS),
            _ => None,
        };
        let is_of_a_file = match &error {
            sqlx::Error::Io(inner) => {
                matches!(inner.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::IsADirectory)
            }
            other => matches!(other, sqlx::Error::Configuration(_)),
        };
        // A file without certificates is no error to sqlx; nobody is trusted then.
        let fault = if is_of_a_file || fault.is_some() { self.files.read().err().or(fault) } else { None };
        fault.map_or(error, |fault| sqlx::Error::Tls(Box::new(fault)))
    }
}

impl FromStr for DatabaseUrl {
    type Err = &'static str; // never quotes what it read: a part of it may be the password

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RULE: &str = "must be a URL such as postgres://user:password@host:5432/database, with special characters \
                            of user and password percent-encoded";
        const MODES: &str = "sslmode must be disable, prefer, require, verify-ca or verify-full";
        /// What sqlx reads; it passes over anything else, a misspelt sslmode too. It knows more names for some.
        const PARAMETERS: [&str; 13] = [
            "sslmode",
            "sslrootcert",
            "sslcert",
            "sslkey",
            "statement-cache-capacity",
            "host",
            "hostaddr",
            "port",
            "dbname",
            "user",
            "password",
            "application_name",
            "options",
        ];

        // The URL parser drops blanks and line ends where they are least expected.
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(RULE);
        }
        let url = url::Url::parse(text).map_err(|_| RULE)?;
        if !matches!(url.scheme(), "postgres" | "postgresql") || url.fragment().is_some() {
            return Err(RULE);
        }
        let parameter = |name: &str| url.query_pairs().filter(|(key, _)| key == name).last().map(|(_, value)| value);
        if !url.query_pairs().all(|(key, _)| PARAMETERS.contains(&&*key) || key.starts_with("options[")) {
            return Err(
                "its parameters may be sslmode, sslrootcert, sslcert, sslkey, statement-cache-capacity, host, \
                        hostaddr, port, dbname, user, password, application_name and options",
            );
        }
        // sqlx reads `allow`, but never tries TLS then.
        let modes = ["disable", "prefer", "require", "verify-ca", "verify-full"];
        if parameter("sslmode").is_some_and(|mode| !modes.contains(&&*mode)) {
            return Err(MODES);
        }
        // Nothing here has floats; and pgbouncer refuses who asks for a session with other ones than the server's.
        let mut options = PgConnectOptions::from_str(text).map_err(|_| RULE)?.extra_float_digits(None);
        if let Some(url::Host::Ipv6(address)) = url.host()
            && parameter("host").is_none()
        {
            options = options.host(&address.to_string()); // without brackets, which are no part of a certificate's name
        }
        // sqlx falls back on the environment, as all clients do.
        let file = |name: &str, variable: &str| {
            parameter(name).map(|path| path.into_owned()).or_else(|| std::env::var(variable).ok())
        };
        let authorities = file("sslrootcert", "PGSSLROOTCERT");
        let identity = match (file("sslcert", "PGSSLCERT"), file("sslkey", "PGSSLKEY")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err("sslcert and sslkey belong together"),
        };
        let files = Files { names: &TLS, authorities, identity };
        let url = Self { options, url, files };
        // sqlx would pass over the file, and accept any certificate.
        match url.files.authorities.is_some() && !url.ssl_mode().verifies() {
            true => Err("sslrootcert is for sslmode=verify-full (or verify-ca); no other mode verifies the server"),
            false => Ok(url),
        }
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::settings::mask(&self.url, f)
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_never_shows_its_password() {
        let url: DatabaseUrl = "postgres://stock:p%40ss@db:5433/stock?sslmode=disable".parse().unwrap();
        assert_eq!(url.place(), "db:5433");
        assert!(!format!("{url} {url:?}").contains("ss@"), "{url}");
        for text in ["", "mysql://h/d", "postgres://stock:S3CR3T@ss:w/rd#%?é@db/stock", "db:5432"] {
            let error = text.parse::<DatabaseUrl>().unwrap_err();
            assert!(!error.contains("S3CR3T"), "{error}");
        }
    }

    #[test]
    fn what_would_be_passed_over_is_refused() {
        for parameters in [
            "sslmod=verify-full",
            "ssl-mode=verify-full",
            "sslmode=verify_full",
            "sslmode=allow",
            "channel_binding=require",
            "sslrootcert=/ca.pem",
            "sslmode=require&sslrootcert=/ca.pem",
            "sslmode=verify-full&sslcert=/c.pem",
            "sslmode=verify-full&sslkey=/k.pem",
        ] {
            assert!(format!("postgres://u:p@h/d?{parameters}").parse::<DatabaseUrl>().is_err(), "{parameters}");
        }
        for parameters in ["sslmode=verify-full&sslrootcert=/ca.pem", "sslmode=require&sslcert=/c.pem&sslkey=/k.pem"] {
            assert!(format!("postgres://u:p@h/d?{parameters}").parse::<DatabaseUrl>().is_ok(), "{parameters}");
        }
    }

    #[test]
    fn a_host_is_remote_unless_it_is_this_machine() {
        for (url, is_remote) in [
            ("postgres://u:p@localhost/d", false),
            ("postgres://u:p@127.0.0.2/d", false),
            ("postgres://u:p@[::1]/d", false),
            ("postgres:///d?host=/run/postgresql", false),
            ("postgres://u:p@db/d", true),
            ("postgres://u:p@10.0.0.1/d", true),
            ("postgres://u:p@localhost/d?host=db", true),
        ] {
            assert_eq!(url.parse::<DatabaseUrl>().unwrap().is_remote(), is_remote, "{url}");
        }
    }
}
