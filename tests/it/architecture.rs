//! Who may import whom, read off the sources.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// All source files, by their path below `src`.
fn sources() -> BTreeMap<PathBuf, String> {
    fn collect(folder: &Path, root: &Path, sources: &mut BTreeMap<PathBuf, String>) {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                collect(&path, root, sources);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("text");
                sources.insert(path.strip_prefix(root).expect("below src").to_owned(), text);
            }
        }
    }

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = BTreeMap::new();
    collect(&root, &root, &mut sources);
    assert!(sources.len() > 10, "{} sources", sources.len());
    sources
}

/// The room that a file belongs to: the first part of its path.
fn room(path: &Path) -> String {
    let first = path.components().next().expect("a path").as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// Code without comments, without the contents of plain strings, and without the unit tests at the end.
fn code(text: &str) -> String {
    let lines = text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    // Between the first and the second quotation mark of a line is text, and so on.
    let lines = lines.map(|line| line.split('"').step_by(2).collect::<Vec<_>>().join("\"\""));
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether the code names this crate or module in a path.
fn names(code: &str, path: &str) -> bool {
    code.match_indices(path).any(|(at, _)| {
        let before = code[..at].chars().next_back().unwrap_or(' ');
        let after = code[at + path.len()..].chars().next().unwrap_or(' ');
        ![before, after].iter().any(|next| next.is_alphanumeric() || *next == '_')
    })
}

/// In which rooms something is named.
fn assert_only_in(what: &str, rooms: &[&str]) {
    for (path, text) in sources() {
        let room = room(&path);
        assert!(rooms.contains(&room.as_str()) || !names(&code(&text), what), "{} names {what}", path.display());
    }
}

#[test]
fn a_room_that_is_named_in_a_path_is_found() {
    assert!(names("use sqlx::PgPool;", "sqlx"));
    assert!(names("use crate::{db, cli::run};", "cli"));
    assert!(!names("let clip = 1;", "cli"));
    assert!(!names("fn my_sqlx() {}", "sqlx"));
    assert!(!names(&code("// sqlx is not here\nlet it = \"sqlx\";\n#[cfg(test)]\nuse sqlx;"), "sqlx"));
    assert!(names(&code("let it = (\"is\", sqlx::query(\"here\"));"), "sqlx"));
}

#[test]
fn only_the_broker_knows_amqp() {
    assert_only_in("lapin", &["broker"]);
}

#[test]
fn only_the_database_the_inbox_and_the_handlers_know_sql() {
    assert_only_in("sqlx", &["db", "inbox", "handlers"]);
}

#[test]
fn the_message_and_the_stock_know_no_sockets() {
    for (path, text) in sources() {
        if ["message", "stock"].contains(&room(&path).as_str()) {
            for outside in ["sqlx", "lapin", "tokio", "broker", "inbox", "handlers", "db", "worker", "cli"] {
                assert!(!names(&code(&text), outside), "{} names {outside}", path.display());
            }
        }
    }
}

#[test]
fn only_the_worker_and_the_commands_know_both_worlds() {
    for (room_name, forbidden) in [
        ("broker", &["inbox", "handlers", "db", "worker", "cli"][..]),
        ("inbox", &["broker", "handlers", "worker", "cli"]),
        ("handlers", &["broker", "worker", "cli"]),
        ("db", &["broker", "inbox", "handlers", "worker", "cli"]),
        ("worker", &["handlers", "cli"]),
        ("telemetry", &["broker", "inbox", "handlers", "db", "worker", "cli"]),
    ] {
        for (path, text) in sources() {
            if room(&path) == room_name {
                for other in forbidden {
                    let path_of_other = format!("crate::{other}");
                    assert!(!names(&code(&text), &path_of_other), "{} imports {other}", path.display());
                }
            }
        }
    }
}

#[test]
fn nobody_imports_the_commands() {
    for (path, text) in sources() {
        let is_entry = ["main", "lib", "cli"].contains(&room(&path).as_str());
        assert!(is_entry || !names(&code(&text), "cli"), "{} names cli", path.display());
    }
}

#[test]
fn every_source_file_says_what_it_is_for() {
    for (path, text) in sources() {
        assert!(text.starts_with("//! "), "{} does not begin with its purpose", path.display());
    }
}

#[test]
fn no_source_file_is_too_long_to_be_read_in_one_sitting() {
    for (path, text) in sources() {
        let lines = code(&text).lines().count();
        assert!(lines <= 500, "{} has {lines} lines of code", path.display());
    }
}
