//! The binary as a process of its own.

use std::collections::HashSet;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use super::{PATIENCE, eventually};

/// A started `stock-service`; it is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    stdout: Output,
    stderr: Output,
}

/// What a process left.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// The exit status, if it ended by itself.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

/// One stream of a process, read all the time: a full pipe would stop it.
#[derive(Debug)]
struct Output {
    text: Arc<Mutex<Vec<u8>>>,
    reading: JoinHandle<()>,
}

impl Output {
    fn read(mut stream: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(Vec::new()));
        let shared = text.clone();
        let reading = tokio::spawn(async move {
            let mut buffer = vec![0; 8192];
            while let Ok(bytes @ 1..) = stream.read(&mut buffer).await {
                shared.lock().expect("no panic").extend_from_slice(&buffer[..bytes]);
            }
        });
        Self { text, reading }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().expect("no panic")).into_owned()
    }

    async fn whole(self) -> String {
        self.reading.await.expect("a reader");
        String::from_utf8(std::mem::take(&mut *self.text.lock().expect("no panic"))).expect("UTF-8")
    }
}

impl Process {
    pub fn spawn(arguments: &[&str], environment: &[(String, String)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stock-service"))
            .args(arguments)
            .env_clear()
            .envs(environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary");
        let stdout = Output::read(child.stdout.take().expect("a pipe"));
        let stderr = Output::read(child.stderr.take().expect("a pipe"));
        Self { child, stdout, stderr }
    }

    /// Sends a signal by its name, e.g. TERM.
    pub async fn signal(&self, name: &str) {
        let id = self.child.id().expect("a running process").to_string();
        let kill = Command::new("kill").args([&format!("-{name}"), &id]).status().await.expect("kill");
        assert!(kill.success(), "kill -{name} {id}");
    }

    /// How many descriptors it has open, with those of what libraries make when it is first needed.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(self.proc("fd")).expect("a running process").count()
    }

    /// How many sockets it has open.
    pub fn sockets(&self) -> usize {
        let descriptors = std::fs::read_dir(self.proc("fd")).expect("a running process");
        // One that is closed in the meantime has no target any more.
        let targets = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok());
        targets.filter(|target| target.to_string_lossy().starts_with("socket:")).collect::<HashSet<_>>().len()
    }

    /// Its memory that is in use, in KiB.
    pub fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(self.proc("status")).expect("a running process");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
        resident.trim_end_matches("kB").trim().parse().expect("a number")
    }

    /// What the system's list of processes shows of it.
    pub fn title(&self) -> String {
        std::fs::read_to_string(self.proc("cmdline")).expect("a running process")
    }

    fn proc(&self, file: &str) -> String {
        format!("/proc/{}/{file}", self.child.id().expect("a running process"))
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits until it has said this on standard error; for what is only said, and for tests about what is said.
    pub async fn has_said(&self, text: &str) {
        let said = async || self.stderr.so_far().contains(text);
        eventually(&format!("{text:?} on standard error"), said).await;
    }

    /// What it has said on standard error by now.
    pub fn stderr_so_far(&self) -> String {
        self.stderr.so_far()
    }

    /// Ends it without a warning, and waits until it is gone.
    pub async fn kill(mut self) {
        self.child.kill().await.expect("a child");
    }

    /// Waits for its end.
    pub async fn end(mut self) -> Finished {
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        let Ok(status) = status else { panic!("it does not end; it said: {}", self.stderr.so_far()) };
        let (stdout, stderr) = (self.stdout.whole().await, self.stderr.whole().await);
        Finished { status: status.expect("a child"), stdout, stderr }
    }
}

/// A file that is gone when this is dropped.
#[derive(Debug)]
pub struct TemporaryFile(String);

impl TemporaryFile {
    pub fn path(&self) -> &str {
        &self.0
    }

    pub fn content(&self) -> String {
        std::fs::read_to_string(&self.0).expect("text")
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // What cannot be removed is the system's to clean up.
        std::fs::remove_file(&self.0).ok();
    }
}

/// A file with this content.
pub fn temporary_file(content: &str) -> TemporaryFile {
    let path = std::env::temp_dir().join(format!("stock-service-test-{}", super::id()));
    std::fs::write(&path, content).expect("a writable folder");
    TemporaryFile(path.to_str().expect("UTF-8").to_owned())
}
