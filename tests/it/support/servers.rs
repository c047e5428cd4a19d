//! Servers of a test's own, which it stops, kills, freezes and starts again.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use super::TestBed;

/// Servers that nobody else uses; they end when this is dropped, whatever state they are in.
#[derive(Debug)]
pub struct Servers {
    /// `scripts/with-servers`, which ends all when the command that it runs has read the end of this.
    child: Child,
    stdin: Option<ChildStdin>,
    folder: String,
    database_url: String,
    amqp_url: String,
}

impl Servers {
    /// A PostgreSQL, beside the RabbitMQ of all tests.
    pub async fn start_postgres() -> Self {
        Self::start_instead_of("DATABASE_URL").await
    }

    /// A RabbitMQ, beside the PostgreSQL of all tests. It takes seconds to start.
    pub async fn start_rabbitmq() -> Self {
        Self::start_instead_of("AMQP_URL").await
    }

    /// The script starts a server for a variable that isn't set.
    async fn start_instead_of(variable: &str) -> Self {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/with-servers"));
        command.args(["sh", "-c", "echo $STOCK_TEST_SERVERS $DATABASE_URL $AMQP_URL; exec cat"]);
        command.env_remove(variable).env_remove("ONLY"); // meant for the servers of all tests
        let streams = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = streams.spawn().expect("scripts/with-servers");
        let mut said = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut said).await.expect("text");
        let [folder, database_url, amqp_url] = said.split_whitespace().collect::<Vec<_>>()[..] else {
            let mut why = String::new();
            child.stderr.take().expect("a pipe").read_to_string(&mut why).await.expect("text");
            panic!("no servers: {why}");
        };
        let [folder, database_url, amqp_url] = [folder, database_url, amqp_url].map(str::to_owned);
        Self { stdin: child.stdin.take(), child, folder, database_url, amqp_url }
    }

    /// A migrated database, and exchange and queues, on these servers.
    pub async fn bed(&self) -> TestBed {
        self.bare_bed().await.furnish().await
    }

    /// An empty database and names only, on these servers.
    pub async fn bare_bed(&self) -> TestBed {
        TestBed::bare_on(&self.database_url, &self.amqp_url).await
    }

    pub fn postgres(&self) -> Server<'_> {
        Server { servers: self, name: "postgres" }
    }

    pub fn rabbitmq(&self) -> Server<'_> {
        Server { servers: self, name: "rabbitmq" }
    }

    /// Runs rabbitmqctl; what it printed.
    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> String {
        self.run("rabbitmqctl", arguments).await
    }

    /// What RabbitMQ has written to its log.
    pub fn rabbitmq_log(&self) -> String {
        self.log("rabbitmq")
    }

    /// What PostgreSQL has written to its log.
    pub fn postgres_log(&self) -> String {
        self.log("postgres")
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(format!("{}/{name}.log", self.folder)).expect("a log")
    }

    async fn run(&self, program: &str, arguments: &[&str]) -> String {
        let program = format!("{}/{program}", self.folder);
        let done = Command::new(&program).args(arguments).output().await.expect(&program);
        let (said, error) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{program} {arguments:?}: {said}{error}");
        said.into_owned()
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // Not for ever: a test that failed must end, and the script's watchdog goes on.
        for _ in 0..1_000 {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
    }
}

/// One of the servers.
#[derive(Clone, Copy, Debug)]
pub struct Server<'s> {
    servers: &'s Servers,
    name: &'static str,
}

impl Server<'_> {
    /// Stops it in order.
    pub async fn stop(self) {
        self.control("stop").await;
    }

    /// Kills all of its processes at once.
    pub async fn kill(self) {
        self.control("kill").await;
    }

    /// Starts it again, with its data, and waits until it answers.
    pub async fn start(self) {
        self.control("start").await;
    }

    /// Stops the time for all of its processes.
    pub async fn freeze(self) {
        self.control("freeze").await;
    }

    /// Has all of its processes go on.
    pub async fn thaw(self) {
        self.control("thaw").await;
    }

    async fn control(self, action: &str) {
        self.servers.run("control", &[self.name, action]).await;
    }
}
