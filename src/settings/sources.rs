//! Where settings come from: TOML, the environment, and the files that the environment names.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use config::{Config, Environment, FileFormat, ValueKind};

use crate::stock::harmless;

/// The names that the URLs have everywhere, beside those of ours.
const USUAL: [(&str, &str); 2] = [("database.url", "DATABASE_URL"), ("amqp.url", "AMQP_URL")];

/// Settings in TOML, by key; none of what cannot be read.
pub(super) fn text_layer(text: &str) -> BTreeMap<String, String> {
    layer(config::File::from_str(text, FileFormat::Toml)).unwrap_or_default()
}

/// A file's settings by key, or what is wrong with the file.
pub(super) fn file_layer(path: &Path) -> Result<BTreeMap<String, String>, String> {
    layer(config::File::from(path).format(FileFormat::Toml)).map_err(|_| match path.exists() {
        // The parser's text quotes the line at fault, which may hold a password.
        true => format!("{}: is no readable TOML", path.display()),
        false => format!("{}: there is no such file", path.display()),
    })
}

/// The settings of the variables that begin with `STOCK__`, by key.
pub(super) fn environment_layer(environment: HashMap<String, String>) -> BTreeMap<String, String> {
    let ours = environment.into_iter().filter(|(name, _)| name.starts_with("STOCK__")).collect();
    let variables = Environment::with_prefix("STOCK").prefix_separator("__").separator("__").source(Some(ours));
    layer(variables).unwrap_or_default()
}

/// The settings of the variables that have usual names, by key.
pub(super) fn usual_layer(environment: &HashMap<String, String>) -> BTreeMap<String, String> {
    USUAL.into_iter().filter_map(|(key, name)| Some((key.to_owned(), environment.get(name)?.clone()))).collect()
}

/// The usual name of the variable that sets a key, if it has one.
pub(super) fn usual_variable(key: &str) -> Option<&'static str> {
    USUAL.into_iter().find(|(usual, _)| *usual == key).map(|(_, name)| name)
}

/// The variable that sets a key.
pub(super) fn variable(key: &str) -> String {
    format!("STOCK__{}", key.to_uppercase().replace('.', "__"))
}

/// Puts in the place of each variable that names a file (`DATABASE_URL_FILE`) the one that holds the value
/// (`DATABASE_URL`), so that a secret need not stand in the environment. Gives by key the variable that named the file.
pub(super) fn read_files(
    environment: &mut HashMap<String, String>,
    keys: &BTreeMap<String, String>,
    problems: &mut Vec<String>,
) -> BTreeMap<String, String> {
    let mut from_files = BTreeMap::new();
    for key in keys.keys() {
        for name in usual_variable(key).map(str::to_owned).into_iter().chain([variable(key)]) {
            let of_file = format!("{name}_FILE");
            let Some(path) = environment.remove(&of_file) else { continue };
            if environment.contains_key(&name) {
                problems.push(format!("{of_file}: {name} is set, too; only one of them may be"));
                continue;
            }
            match content(&path) {
                Ok(value) => {
                    environment.insert(name, value);
                    from_files.insert(key.clone(), of_file);
                }
                Err(fault) => problems.push(format!("{of_file}: {fault}")),
            }
        }
    }
    from_files
}

/// What a file holds, without the line break at its end, which editors and `echo` leave.
fn content(path: &str) -> Result<String, String> {
    /// Far more than any setting; the file may be an endless one.
    const MOST: u64 = 64 << 10;

    if path.trim().is_empty() {
        return Err("is set but empty".to_owned());
    }
    if path.contains("://") {
        return Err("must be the path of a file".to_owned()); // not quoted: it is the secret itself
    }
    let fault = |what: &str| Err(format!("the file {} {what}", harmless(path)));
    let mut bytes = Vec::new();
    if let Err(error) = File::open(path).and_then(|file| file.take(MOST + 1).read_to_end(&mut bytes)) {
        return match error.kind() {
            ErrorKind::NotFound => fault("does not exist"),
            ErrorKind::IsADirectory => fault("is a folder"),
            kind => fault(&format!("cannot be read: {kind}")),
        };
    }
    if bytes.len() as u64 > MOST {
        return fault("has more than 64 KiB");
    }
    let Ok(text) = String::from_utf8(bytes) else { return fault("is not UTF-8") };
    let text = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
    match text.trim().is_empty() {
        true => fault("is empty"),
        false => Ok(text.to_owned()),
    }
}

fn layer(source: impl config::Source + Send + Sync + 'static) -> Result<BTreeMap<String, String>, config::ConfigError> {
    Config::builder().add_source(source).build()?.cache.into_table().map(|table| flat(&table))
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
