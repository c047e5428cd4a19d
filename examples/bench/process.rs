//! What processes use, as Linux counts it.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

/// Length of one tick in `/proc/PID/stat`: `sysconf(_SC_CLK_TCK)` is 100 on every Linux that Rust runs on.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of a process and of all that descend from it, with those that have ended and been waited for.
pub fn cpu_of_family(pid: u32) -> Duration {
    let own = ticks(pid, 4).map_or(Duration::ZERO, |ticks| TICK * ticks);
    children(pid).into_iter().map(cpu_of_family).sum::<Duration>() + own
}

/// CPU time of one process.
pub fn cpu(pid: u32) -> Option<Duration> {
    ticks(pid, 2).map(|ticks| TICK * ticks)
}

/// The most memory that a process has had resident, in bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// User and system time (`fields` 2), and that of children which have ended (4).
fn ticks(pid: u32, fields: usize) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may have blanks; the times are fields 14 to 17, the name is the second.
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split(' ').skip(11).take(fields).filter_map(|field| field.parse::<u32>().ok()).sum())
}

fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

/// The pid in a file.
pub fn pid_in(file: &Path) -> anyhow::Result<u32> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.trim().parse().with_context(|| format!("{} holds no pid", file.display()))
}
