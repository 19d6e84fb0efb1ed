//! First calls, timed in processes of their own: cold with an empty kernel cache, warm with the same again.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kiln::benchmark::Spread;
use serde::{Deserialize, Serialize};

use crate::cases::Case;
use crate::failure::{Done, Failure};
use crate::{How, output};

/// How often each is measured; the median counts.
const TIMES: usize = 3;

/// Seconds a user waits for the first compiled call.
#[derive(Debug, Clone, Copy)]
pub struct FirstCalls {
    /// With an empty cache directory.
    pub cold: f64,
    /// In a new process, from the disk cache.
    pub warm: f64,
}

/// What the child process reports.
#[derive(Serialize, Deserialize)]
struct Report {
    first_call_s: f64,
}

/// The child's side: builds the workload, lets one eager step make gradients and optimizer state, then times
/// the first compiled call.
pub fn run(case: Case, how: &How) -> Done {
    let workload = case.build(&how.device.find()?)?;
    workload.step()?;
    let start = Instant::now();
    let region = how.compile()?.region();
    region.run(|| workload.step())?;
    let report = Report { first_call_s: start.elapsed().as_secs_f64() };
    output::print(&serde_json::to_string(&report).map_err(std::io::Error::from)?)?;
    Ok(())
}

/// The parent's side.
pub fn measure(case: Case, how: &How) -> Result<FirstCalls, Failure> {
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let cache = Folder::new();
        cold.push(child(case, how, &cache)?);
        warm.push(child(case, how, &cache)?);
    }
    Ok(FirstCalls { cold: Spread::of(&cold).median, warm: Spread::of(&warm).median })
}

fn child(case: Case, how: &How, cache: &Folder) -> Result<f64, Failure> {
    let output = Command::new(std::env::current_exe()?)
        .args([
            "first-call",
            &case.to_string(),
            "--device",
            how.device.name(),
            "--mode",
            &how.mode.to_string(),
            "--isa",
            &how.isa,
        ])
        .env("KILN_CACHE_DIR", &cache.0)
        .stdin(Stdio::null())
        .output()?;
    let failed = |reason: String| Failure::FirstCall { case: case.to_string(), reason };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or_default();
        return Err(failed(format!("{}: {}", output.status, last.trim_start_matches("error: "))));
    }
    let report: Report = serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))?;
    Ok(report.first_call_s)
}

/// A cache directory of its own, which Kiln makes on first use; removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Folder(std::env::temp_dir().join(format!("kiln-first-call-{}-{number}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Where it can't be removed, it is the system's temporary folder all the same.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
