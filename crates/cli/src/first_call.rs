//! First calls, timed in processes of their own: cold with an empty kernel cache, warm with the same again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kiln::benchmark::Spread;
use serde::{Deserialize, Serialize};

use crate::cases::Case;
use crate::failure::{Done, Failure};
use crate::{How, child, output};

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
    let this = std::env::current_exe()?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let once = once(&this, case, how)?;
        cold.push(once.cold);
        warm.push(once.warm);
    }
    Ok(FirstCalls { cold: Spread::of(&cold).median, warm: Spread::of(&warm).median })
}

/// Both first calls of one binary, measured once.
pub fn once(binary: &Path, case: Case, how: &How) -> Result<FirstCalls, Failure> {
    let cache = Folder::new();
    let call = || {
        let mut command = child::command(binary, "first-call", case, how);
        child::report(command.env("KILN_CACHE_DIR", &cache.0), case).map(|report: Report| report.first_call_s)
    };
    Ok(FirstCalls { cold: call()?, warm: call()? })
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
