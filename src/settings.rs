//! Settings: embedded defaults, a file, the environment, flags; validated as a whole, every fault by its key.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use config::{Config, Environment, File, FileFormat, ValueKind};

use crate::broker::{AmqpUrl, QueueType};
use crate::db::DatabaseUrl;
use crate::message::RetryPolicy;
use crate::telemetry::{LogFormat, is_log_filter};

/// The commented defaults, which also say which keys there are.
pub const DEFAULTS: &str = include_str!("../config/default.toml");

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
        let defaults = flat(&source(File::from_str(DEFAULTS, FileFormat::Toml)).unwrap_or_default());
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
            match source(File::from(path).format(FileFormat::Toml)) {
                Ok(table) => add(flat(&table), &|key| format!("{key} in {}", path.display())),
                // The parser's text quotes the line at fault, which may hold a password.
                Err(_) if path.exists() => others.push(format!("{}: is no readable TOML", path.display())),
                Err(_) => others.push(format!("{}: there is no such file", path.display())),
            }
        }
        let environment: HashMap<_, _> = environment.into_iter().collect();
        let short = [("database.url", "DATABASE_URL"), ("amqp.url", "AMQP_URL")];
        let short = short.into_iter().filter_map(|(key, name)| Some((key.to_owned(), environment.get(name)?.clone())));
        add(short.collect(), &|key| format!("{}_URL", key.trim_end_matches(".url").to_uppercase()));
        let log_filter = environment.get("RUST_LOG").filter(|text| !text.is_empty()).cloned();
        if log_filter.as_ref().is_some_and(|text| !is_log_filter(text)) {
            others.push("RUST_LOG: must be a filter such as info,stock_service=debug".to_owned());
        }
        let long = environment.into_iter().filter(|(name, _)| name.starts_with("STOCK__")).collect();
        let long = Environment::with_prefix("STOCK").prefix_separator("__").separator("__").source(Some(long));
        add(flat(&source(long).unwrap_or_default()), &|key| {
            format!("STOCK__{}", key.to_uppercase().replace('.', "__"))
        });
        add(flags.iter().cloned().collect(), &|key| format!("--set {key}"));
        problems.extend(others);

        let mut reader = Reader { values: &values, defaults: &defaults, problems };
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
    problems: Vec<String>,
}

impl Reader<'_> {
    fn read<T, E: fmt::Display>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, E>) -> T {
        match parse(&self.values[key]) {
            Ok(value) => value,
            Err(rule) => {
                self.problems.push(match key.ends_with(".url") {
                    true => format!("{key}: {rule}"),
                    false => format!("{key}: {rule}, got {}", crate::stock::quote(&self.values[key])),
                });
                match parse(&self.defaults[key]) {
                    Ok(default) => default,
                    Err(_) => unreachable!("a test loads the defaults"),
                }
            }
        }
    }
}

fn source(
    source: impl config::Source + Send + Sync + 'static,
) -> Result<config::Map<String, config::Value>, config::ConfigError> {
    Config::builder().add_source(source).build()?.cache.into_table()
}

/// Nested tables as dotted keys.
fn flat(table: &config::Map<String, config::Value>) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    for (key, value) in table {
        match &value.kind {
            ValueKind::Table(inner) => {
                keys.extend(flat(inner).into_iter().map(|(rest, value)| (format!("{key}.{rest}"), value)));
            }
            kind => drop(keys.insert(key.clone(), kind.to_string())),
        }
    }
    keys
}

/// Parses a duration: a whole number and one of the units, nothing else.
///
/// # Errors
/// The rule that was broken.
pub fn parse_duration(text: &str, units: &[(&str, u64)]) -> Result<Duration, String> {
    let rule = || {
        let names: Vec<_> = units.iter().map(|(name, _)| *name).collect();
        format!("must be a whole number and one of {}, such as 30d", names.join(", "))
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let &(_, milliseconds) = units.iter().find(|(name, _)| *name == unit).ok_or_else(rule)?;
    let number: u64 = number.parse().map_err(|_| rule())?;
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(|| "is too long".to_owned())
}

/// The units of settings, in milliseconds; those of a horizon on the command line are all but the first.
pub const UNITS: [(&str, u64); 6] =
    [("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000), ("w", 604_800_000)];

fn duration(least: &'static str, most: &'static str) -> impl Fn(&str) -> Result<Duration, String> {
    move |text| {
        let duration = parse_duration(text, &UNITS)?;
        match duration < parse_duration(least, &UNITS)? || duration > parse_duration(most, &UNITS)? {
            true => Err(format!("must be {least} to {most}")),
            false => Ok(duration),
        }
    }
}

fn whole<T: FromStr + PartialOrd + Copy + fmt::Display>(least: T, most: T) -> impl Fn(&str) -> Result<T, String> {
    move |text| match text.parse() {
        Ok(number) if (least..=most).contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(number),
        _ => Err(format!("must be a whole number from {least} to {most}")),
    }
}

fn yes_or_no(text: &str) -> Result<bool, &'static str> {
    text.parse().map_err(|_| "must be true or false")
}

fn size(text: &str) -> Result<usize, &'static str> {
    const RULE: &str = "must be a whole number and B, KiB or MiB, from 1KiB to 128MiB";

    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return Err(RULE),
    };
    // 128 MiB is the largest message of RabbitMQ 3.
    let size = number.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    size.filter(|size| (1 << 10..=128 << 20).contains(size)).ok_or(RULE)
}

/// A broker's name for a queue or an exchange: a short string, some of it needed for the suffixes.
fn name(text: &str) -> Result<String, &'static str> {
    match text.len() <= 200 && !text.starts_with("amq.") && !text.chars().any(char::is_control) {
        true => Ok(text.to_owned()),
        false => Err("must have at most 200 bytes, no control characters, and not begin with amq."),
    }
}

/// Writes a URL without its secrets.
///
/// # Errors
/// The formatter's.
pub fn mask(url: &url::Url, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut masked = url.clone();
    if url.password().is_some() && masked.set_password(Some("***")).is_err() {
        return f.write_str("***");
    }
    if url.query().is_some() {
        let shown = url.query_pairs().map(|(key, value)| match key.contains("pass") {
            true => (key, "***".into()),
            false => (key, value),
        });
        masked.query_pairs_mut().clear().extend_pairs(shown).finish();
    }
    fmt::Display::fmt(&masked, f)
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

    #[test]
    fn a_duration_has_one_spelling() {
        for (text, seconds) in [("30d", 2_592_000), ("720h", 2_592_000), ("4w", 2_419_200), ("15min", 900), ("1s", 1)] {
            assert_eq!(parse_duration(text, &UNITS).unwrap().as_secs(), seconds, "{text}");
        }
        for text in [
            "",
            "30",
            "d",
            "30D",
            "-30d",
            "+30d",
            "P30D",
            "4weeks",
            "30 d",
            "1.5d",
            "30d x",
            "abc",
            "99999999999999999999d",
            "99999999999999d",
        ] {
            assert!(parse_duration(text, &UNITS).is_err(), "{text}");
        }
        assert!(parse_duration("5ms", &UNITS[1..]).is_err(), "a horizon knows no milliseconds");
    }
}
