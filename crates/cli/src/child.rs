//! Measurements in processes of their own: this binary (or another one) runs one case and reports a line of JSON.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;

use crate::How;
use crate::cases::Case;
use crate::failure::Failure;

/// The call of a hidden command, not started yet.
pub fn command(binary: &Path, name: &str, case: Case, how: &How) -> Command {
    let mut command = Command::new(binary);
    command.args([name, &case.to_string(), "--device", how.device.name()]);
    command.args(["--mode", &how.mode.to_string(), "--isa", &how.isa]);
    command
}

/// Runs it to its end, for what it reports.
pub fn report<T: DeserializeOwned>(command: &mut Command, case: Case) -> Result<T, Failure> {
    let ran = command.stdin(Stdio::null()).output()?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        let last = said.lines().last().unwrap_or_default();
        return Err(failed(case, format!("{}: {}", ran.status, last.trim_start_matches("error: "))));
    }
    serde_json::from_slice(&ran.stdout).map_err(|error| failed(case, error.to_string()))
}

/// What a child did wrong.
pub fn failed(case: Case, reason: String) -> Failure {
    Failure::Child { case: case.to_string(), reason }
}
