//! A transaction-pooling proxy between the service and the database.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use super::{TemporaryFile, eventually, temporary_file};

/// A pgbouncer in transaction mode; it is killed when this is dropped.
#[derive(Debug)]
pub struct Pgbouncer {
    child: Child,
    port: u16,
    url: String,
    settings: TemporaryFile,
    _users: TemporaryFile,
}

impl Pgbouncer {
    /// One before the server of this URL, with so many connections to each database of it.
    pub async fn before(database: &str, connections: usize) -> Self {
        let mut url = url::Url::parse(database).expect("a URL");
        let (host, server_port) = (url.host_str().expect("a host").to_owned(), url.port().unwrap_or(5432));
        let users = temporary_file(&format!("\"{}\" \"{}\"\n", url.username(), url.password().expect("a password")));
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
        let settings = temporary_file(&format!(
            "[databases]
             * = host={host} port={server_port}
             [pgbouncer]
             listen_addr = 127.0.0.1
             listen_port = {port}
             unix_socket_dir =
             auth_type = plain
             auth_file = {}
             pool_mode = transaction
             default_pool_size = {connections}
             server_login_retry = 1
             ",
            users.path()
        ));
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(port)).expect("a port");
        url.set_query(Some("statement-cache-capacity=0"));
        let child = spawn(&settings);
        let this = Self { child, port, url: url.into(), settings, _users: users };
        this.answers().await;
        this
    }

    /// The URL of the same database by this proxy, with what it takes to work behind it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Kills it, with all of its connections, and starts it again.
    pub async fn restart(&mut self) {
        self.child.kill().await.expect("a child");
        self.child = spawn(&self.settings);
        self.answers().await;
    }

    /// Whether it does so by itself: `max_prepared_statements` is above 0 by default from 1.24 on.
    pub async fn keeps_statements_apart() -> bool {
        let said = command().arg("--version").output().await.expect("pgbouncer").stdout;
        let said = String::from_utf8(said).expect("text");
        let version = said.trim_start_matches("PgBouncer ").split(['.', '\n']);
        version.map_while(|part| part.parse::<u32>().ok()).ge([1, 24])
    }

    async fn answers(&self) {
        eventually("pgbouncer answers", async || TcpStream::connect(("127.0.0.1", self.port)).await.is_ok()).await;
    }
}

fn command() -> Command {
    let mut command = Command::new("pgbouncer");
    // Debian has it where only root looks.
    command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").expect("a path")));
    command
}

fn spawn(settings: &TemporaryFile) -> Child {
    let mut command = command();
    // It refuses to run as root.
    if std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0) {
        command.args(["-u", "nobody"]);
    }
    command.arg("--quiet").arg(settings.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    command.spawn().expect("pgbouncer; scripts/with-servers installs it when PGBOUNCER=1 is set")
}
