//! The binary as a process of its own.

use std::process::{ExitStatus, Stdio};

use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

use super::PATIENCE;

/// A started `stock-service`; it is killed when this is dropped.
#[derive(Debug)]
pub struct Process(Child);

/// What a process left.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Process {
    pub fn spawn(arguments: &[&str], environment: &[(String, String)]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_stock-service"))
            .args(arguments)
            .env_clear()
            .envs(environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary");
        Self(child)
    }

    /// Sends a signal by its name, e.g. TERM.
    pub async fn signal(&self, name: &str) {
        let id = self.0.id().expect("a running process").to_string();
        let kill = Command::new("kill").args([&format!("-{name}"), &id]).status().await.expect("kill");
        assert!(kill.success(), "kill -{name} {id}");
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("a child").is_none()
    }

    /// Waits for its end.
    pub async fn end(mut self) -> Finished {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let (mut out, mut err) = (self.0.stdout.take().expect("a pipe"), self.0.stderr.take().expect("a pipe"));
        let all = async {
            tokio::try_join!(out.read_to_string(&mut stdout), err.read_to_string(&mut stderr)).expect("text");
            self.0.wait().await.expect("a child")
        };
        let status = tokio::time::timeout(PATIENCE, all).await.expect("an end in time");
        Finished { status, stdout, stderr }
    }
}
