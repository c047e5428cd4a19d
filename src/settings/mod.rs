//! Settings: embedded defaults, a file, the environment and the files that it names, flags; validated as a whole, every
//! fault by its key.

mod sources;
mod values;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use self::sources::{environment_layer, file_layer, read_files, text_layer, usual_layer, usual_variable, variable};
pub use self::values::{UNITS, mask, parse_duration};
use self::values::{duration, name, size, whole, yes_or_no};
use crate::broker::{AmqpUrl, QueueType};
use crate::db::DatabaseUrl;
use crate::message::RetryPolicy;
use crate::telemetry::{LogFormat, is_log_filter};

/// The commented defaults, which also say which keys there are.
pub const DEFAULTS: &str = include_str!("../../config/default.toml");

/// Everything that can be set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `[database]`
    pub database: DatabaseSettings,
    /// `[amqp]`
    pub amqp: AmqpSettings,
    /// `[retry]`, and `consume.unknown_event`
    pub retry: RetryPolicy,
    /// `[consume]`
    pub consume: ConsumeSettings,
    /// `[purge]`
    pub purge: PurgeSettings,
    /// `http.listen`; none when it is off
    pub http_listen: Option<SocketAddr>,
    /// `log.format`
    pub log_format: LogFormat,
    /// `RUST_LOG`, if it is set
    pub log_filter: Option<String>,
    effective: BTreeMap<String, String>,
}

/// `[database]`
#[derive(Clone, Debug)]
pub struct DatabaseSettings {
    /// Where it is.
    pub url: DatabaseUrl,
    /// Whether `consume` migrates.
    pub migrate_on_start: bool,
    /// The pool's size; `None` fits it to the workers.
    pub max_connections: Option<u32>,
    /// The bound of a statement and of a lock wait.
    pub timeout: Duration,
}

/// `[amqp]`
#[derive(Clone, Debug)]
pub struct AmqpSettings {
    /// Where it is.
    pub url: AmqpUrl,
    /// The topic exchange of all events.
    pub exchange: String,
    /// The queue to consume.
    pub queue: String,
    /// Whether to declare, or only to check, what must exist.
    pub declare: bool,
    /// The type of all queues.
    pub queue_type: QueueType,
}

/// `[consume]`
#[derive(Clone, Debug)]
pub struct ConsumeSettings {
    /// Workers of this process.
    pub workers: u16,
    /// Events of a transaction, at most.
    pub batch_size: usize,
    /// Unacknowledged messages of a worker, at most.
    pub prefetch: u16,
    /// Bytes of a body, at most.
    pub max_body: usize,
    /// How long a stop waits.
    pub grace: Duration,
}

/// `[purge]`
#[derive(Clone, Debug)]
pub struct PurgeSettings {
    /// Whether `consume` purges.
    pub enabled: bool,
    /// The schedule's horizon.
    pub horizon: Duration,
    /// The smallest horizon without force.
    pub minimum_horizon: Duration,
    /// How often the schedule runs.
    pub every: Duration,
}

/// All that is wrong with the settings, one line a fault.
#[derive(Debug, thiserror::Error)]
#[error("the configuration has {} fault{}:{}", .0.len(), if .0.len() == 1 { "" } else { "s" }, .0.iter().map(|line| format!("\n  {line}")).collect::<String>())]
pub struct Invalid(Vec<String>);

impl Settings {
    /// Reads the defaults, the file, the environment and `flags` (key, value), the later over the earlier.
    ///
    /// # Errors
    /// [`Invalid`] lists every fault by its key, quoting no value that may be a secret.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &[(String, String)],
    ) -> Result<Self, Invalid> {
        let mut problems = Vec::new();
        let defaults = text_layer(DEFAULTS);
        let mut values = defaults.clone();
        let mut add = |layer: BTreeMap<String, String>, names: &dyn Fn(&str) -> String| {
            for (key, value) in layer {
                match defaults.contains_key(&key) {
                    false => problems.push(format!("{}: there is no such key", names(&key))),
                    true if value.trim().is_empty() => problems.push(format!("{}: is set but empty", names(&key))),
                    true => drop(values.insert(key, value)),
                }
            }
        };
        let mut others = Vec::new();
        if let Some(path) = file {
            match file_layer(path) {
                Ok(layer) => add(layer, &|key| format!("{key} in {}", path.display())),
                Err(fault) => others.push(fault),
            }
        }
        let mut environment: HashMap<_, _> = environment.into_iter().collect();
        let from_files = read_files(&mut environment, &defaults, &mut others);
        add(usual_layer(&environment), &|key| usual_variable(key).unwrap_or_default().to_owned());
        let log_filter = environment.get("RUST_LOG").filter(|text| !text.is_empty()).cloned();
        if log_filter.as_ref().is_some_and(|text| !is_log_filter(text)) {
            others.push("RUST_LOG: must be a filter such as stock_service=debug".to_owned());
        }
        add(environment_layer(environment), &variable);
        add(flags.iter().cloned().collect(), &|key| format!("--set {key}"));
        problems.extend(others);

        let mut reader = Reader { values: &values, defaults: &defaults, from_files: &from_files, problems };
        let mut settings = Self::read(&mut reader);
        let problems = reader.problems;
        if !problems.is_empty() {
            return Err(Invalid(problems));
        }
        values.insert("database.url".to_owned(), settings.database.url.to_string());
        values.insert("amqp.url".to_owned(), settings.amqp.url.to_string());
        settings.effective = values;
        settings.log_filter = log_filter;
        Ok(settings)
    }

    fn read(reader: &mut Reader<'_>) -> Self {
        let settings = Self {
            database: DatabaseSettings {
                url: reader.read("database.url", str::parse),
                migrate_on_start: reader.read("database.migrate_on_start", yes_or_no),
                max_connections: reader.read("database.max_connections", |text| match text {
                    "auto" => Ok(None),
                    number => whole(2, 1000)(number).map(Some),
                }),
                timeout: reader.read("database.timeout", duration("1s", "1h")),
            },
            amqp: AmqpSettings {
                url: reader.read("amqp.url", str::parse),
                exchange: reader.read("amqp.exchange", name),
                queue: reader.read("amqp.queue", name),
                declare: reader.read("amqp.declare", yes_or_no),
                queue_type: reader.read("amqp.queue_type", |text| match text {
                    "quorum" => Ok(QueueType::Quorum),
                    "classic" => Ok(QueueType::Classic),
                    _ => Err("must be quorum or classic"),
                }),
            },
            retry: RetryPolicy {
                max_retries: reader.read("retry.max_retries", whole(0, 100)),
                // A queue's TTL is at least 1 ms and at most 2^32 − 1 ms, some 49 days.
                delay: reader.read("retry.delay", duration("1ms", "49d")),
                multiplier: reader.read("retry.multiplier", whole(1, 100)),
                max_delay: reader.read("retry.max_delay", duration("1ms", "49d")),
                ignore_unknown: reader.read("consume.unknown_event", |text| match text {
                    "fail" => Ok(false),
                    "ignore" => Ok(true),
                    _ => Err("must be fail or ignore"),
                }),
            },
            consume: ConsumeSettings {
                workers: reader.read("consume.workers", whole(1, 64)),
                batch_size: reader.read("consume.batch_size", whole(1, 10_000)),
                prefetch: reader.read("consume.prefetch", whole(1, 65_535)),
                max_body: reader.read("consume.max_body", size),
                grace: reader.read("consume.grace", duration("1s", "1h")),
            },
            purge: PurgeSettings {
                enabled: reader.read("purge.enabled", yes_or_no),
                horizon: reader.read("purge.horizon", duration("1h", "5200w")),
                minimum_horizon: reader.read("purge.minimum_horizon", duration("1h", "5200w")),
                every: reader.read("purge.every", duration("1s", "52w")),
            },
            http_listen: reader.read("http.listen", |text| match text {
                "off" => Ok(None),
                address => address.parse().map(Some).map_err(|_| "must be ADDRESS:PORT, such as 0.0.0.0:9464, or off"),
            }),
            log_format: reader.read("log.format", |text| match text {
                "auto" => Ok(LogFormat::Auto),
                "text" => Ok(LogFormat::Text),
                "json" => Ok(LogFormat::Json),
                _ => Err("must be auto, text or json"),
            }),
            log_filter: None,
            effective: BTreeMap::new(),
        };
        if settings.retry.delay > settings.retry.max_delay {
            reader.problems.push("retry.delay: must not be longer than retry.max_delay".to_owned());
        }
        if settings.purge.horizon < settings.purge.minimum_horizon {
            reader.problems.push("purge.horizon: must not be shorter than purge.minimum_horizon".to_owned());
        }
        if settings.database.max_connections.is_some_and(|n| n < u32::from(settings.consume.workers) + 2) {
            reader.problems.push("database.max_connections: must be at least consume.workers and 2 more".to_owned());
        }
        settings
    }

    /// The pool's size: one connection for each worker, and two for the purge and what else needs one.
    pub fn connections(&self) -> u32 {
        self.database.max_connections.unwrap_or_else(|| u32::from(self.consume.workers) + 2)
    }

    /// The effective settings as TOML in the file's form and order, secrets masked.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        for line in DEFAULTS.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']');
                text.push_str(if text.is_empty() { "" } else { "\n" });
                text.push_str(&format!("{line}\n"));
            } else if let Some((key, default)) = line.split_once(" = ") {
                let value = &self.effective[&format!("{section}.{key}")];
                // What is a string in the defaults is one here.
                let value =
                    if default.starts_with('"') { toml::Value::from(value.clone()).to_string() } else { value.clone() };
                text.push_str(&format!("{key} = {value}\n"));
            }
        }
        text
    }
}

/// Takes one key after another; a fault is noted and the default stands in, so that all faults are found.
struct Reader<'a> {
    values: &'a BTreeMap<String, String>,
    defaults: &'a BTreeMap<String, String>,
    /// By key the variable that named the file.
    from_files: &'a BTreeMap<String, String>,
    problems: Vec<String>,
}

impl Reader<'_> {
    fn read<T, E: fmt::Display>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, E>) -> T {
        match parse(&self.values[key]) {
            Ok(value) => value,
            Err(rule) => {
                self.problems.push(match self.from_files.get(key) {
                    // What is in a file may be a secret, if only by mistake.
                    Some(variable) => format!("{key}: {rule}; it was read from the file in {variable}"),
                    None if key.ends_with(".url") => format!("{key}: {rule}"),
                    None => format!("{key}: {rule}, got {}", crate::stock::quote(&self.values[key])),
                });
                match parse(&self.defaults[key]) {
                    Ok(default) => default,
                    Err(_) => unreachable!("a test loads the defaults"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(environment: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Settings, Invalid> {
        let owned = |pairs: &[(&str, &str)]| -> Vec<_> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        Settings::load(None, owned(environment), &owned(flags))
    }

    #[test]
    fn the_embedded_defaults_are_valid_and_printed_as_they_stand() {
        let settings = load(&[], &[]).unwrap();
        let printed = settings.to_toml();
        for (ours, theirs) in printed
            .lines()
            .filter(|l| !l.is_empty())
            .zip(DEFAULTS.lines().filter(|l| !l.is_empty() && !l.starts_with('#')))
        {
            match ours.starts_with("url") {
                true => assert!(ours.contains(":***@"), "{ours}"),
                false => assert_eq!(ours, theirs),
            }
        }
    }

    #[test]
    fn what_is_printed_can_be_read_again() {
        let path = std::env::temp_dir().join(format!("stock-service-{}.toml", std::process::id()));
        let flags = [("retry.max_retries", "7"), ("amqp.queue", "a \"queue\"")];
        std::fs::write(&path, load(&[], &flags).unwrap().to_toml()).unwrap();
        let again = Settings::load(Some(&path), [], &[]);
        std::fs::remove_file(&path).unwrap();
        let again = again.unwrap();
        assert_eq!((again.retry.max_retries, again.amqp.queue.as_str()), (7, "a \"queue\""));
    }

    #[test]
    fn flags_override_the_environment_which_overrides_the_file_which_overrides_the_defaults() {
        let path = std::env::temp_dir().join(format!("stock-service-layers-{}.toml", std::process::id()));
        std::fs::write(&path, "[retry]\nmax_retries = 5\nmultiplier = 3\ndelay = \"2s\"\n").unwrap();
        let environment = [("STOCK__RETRY__MULTIPLIER", "4"), ("STOCK__RETRY__DELAY", "3s"), ("HOME", "")];
        let environment = environment.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let flags = [("retry.delay".to_owned(), "4s".to_owned())];
        let settings = Settings::load(Some(&path), environment, &flags);
        std::fs::remove_file(&path).unwrap();
        let retry = settings.unwrap().retry;
        assert_eq!((retry.max_retries, retry.multiplier, retry.delay.as_secs()), (5, 4, 4));
        assert_eq!(retry.max_delay.as_secs(), 900);
    }

    #[test]
    fn the_usual_names_of_the_urls_are_read_and_the_long_ones_override_them() {
        let url = "postgres://a:b@short/stock";
        let settings = load(&[("DATABASE_URL", url), ("AMQP_URL", "amqp://u:p@broker")], &[]).unwrap();
        assert_eq!(settings.database.url.place(), "short:5432");
        assert_eq!(settings.amqp.url.place(), "broker:5672");
        let long = [("DATABASE_URL", url), ("STOCK__DATABASE__URL", "postgres://a:b@long/stock")];
        assert_eq!(load(&long, &[]).unwrap().database.url.place(), "long:5432");
    }

    #[test]
    fn every_fault_is_reported_at_once_by_its_key() {
        let error = load(
            &[
                ("STOCK__CONSUME__WORKERS", "0"),
                ("STOCK__CONSUME__PREFETCH", "65536"),
                ("STOCK__CONSUME__BACTH_SIZE", "1"),
                ("STOCK__PURGE__HORIZON", "1d"),
                ("STOCK__RETRY__DELAY", "-5s"),
                ("STOCK__AMQP__QUEUE", ""),
                ("DATABASE_URL", ""),
                ("AMQP_URL", "amqp://u:S3CR3T@host:port"),
                ("RUST_LOG", "info,=,,verbose=="),
            ],
            &[("nothing", "1")],
        )
        .unwrap_err()
        .to_string();
        for key in [
            "10 faults",
            "RUST_LOG",
            "consume.workers: must be a whole number from 1 to 64, got \"0\"",
            "consume.prefetch",
            "STOCK__CONSUME__BACTH_SIZE: there is no such key",
            "purge.horizon",
            "retry.delay",
            "STOCK__AMQP__QUEUE: is set but empty",
            "DATABASE_URL: is set but empty",
            "amqp.url",
            "--set nothing",
        ] {
            assert!(error.contains(key), "{key} is missing in: {error}");
        }
        assert!(!error.contains("S3CR3T"), "{error}");
    }
}
