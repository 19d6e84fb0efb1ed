//! Resident memory of a training step: measured in processes of their own, as the system counts it.

use serde::{Deserialize, Serialize};

use crate::cases::Case;
use crate::failure::{Done, Failure};
use crate::{How, child, output};

/// Steps before the peak is looked at, and steps that it is looked at in.
const STEPS: [usize; 2] = [2, 3];

/// The most resident memory at once during steps, above what the process had with the model, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Resident {
    /// Of eager steps.
    pub eager: u64,
    /// Of compiled ones; what the compiler has left behind counts.
    pub compiled: u64,
}

/// What the child process reports; nothing where the system does not tell.
#[derive(Serialize, Deserialize)]
struct Report {
    bytes: Option<u64>,
}

/// The child's side: builds the workload, runs a few steps, and looks at the peak of a few more.
pub fn run(case: Case, how: &How, eager: bool) -> Done {
    let workload = case.build(&how.device.find()?)?;
    let model = status("VmRSS:");
    let region = how.compile()?.disable(eager).region();
    let mut peak = None;
    for steps in STEPS {
        // The peak so far is forgotten; where that is not allowed, building the model counts too.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        for _ in 0..steps {
            region.run(|| workload.step())?;
        }
        peak = status("VmHWM:");
    }
    let bytes = peak.zip(model).map(|(peak, model)| peak.saturating_sub(model));
    output::print(&serde_json::to_string(&Report { bytes }).map_err(std::io::Error::from)?)?;
    Ok(())
}

/// A line of the process's status, in bytes.
fn status(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// The parent's side, for the cases that it makes sense for.
pub fn measure(case: Case, how: &How) -> Result<Option<Resident>, Failure> {
    if !matches!(case, Case::GptTrain | Case::NetworkTrain(_)) {
        return Ok(None);
    }
    let both = child(case, how, true)?.zip(child(case, how, false)?);
    Ok(both.map(|(eager, compiled)| Resident { eager, compiled }))
}

fn child(case: Case, how: &How, eager: bool) -> Result<Option<u64>, Failure> {
    let mut command = child::command(&std::env::current_exe()?, "peak-memory", case, how);
    if eager {
        command.arg("--eager");
    }
    child::report(&mut command, case).map(|report: Report| report.bytes)
}
