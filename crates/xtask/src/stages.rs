//! The stages of `cargo xtask test`: each is shown with its time, all run even if one fails.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::tidy as rules;

/// fmt, clippy, tidy, tests. The last line is `N passed, M failed`.
pub fn test(root: &Path) -> bool {
    if !tools_are_here(root) {
        return false;
    }
    let mut totals = Totals::default();
    let clippy = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    let results = [
        stage("fmt", || cargo(root, &["fmt", "--all", "--check"])),
        stage("clippy", || cargo(root, &clippy)),
        stage("tidy", || tidy(root)),
        stage("test", || run_tests(root, &mut totals)),
    ];
    println!();
    for result in &results {
        println!(
            "{:>8}  {:>7.1} s  {}",
            result.name,
            result.seconds,
            if result.ok { "ok" } else { "FAILED" }
        );
    }
    println!("{} passed, {} failed", totals.passed, totals.failed);
    totals.failed == 0 && results.iter().all(|result| result.ok)
}

/// Prints what is against the rules; true if nothing is.
pub fn tidy(root: &Path) -> bool {
    let problems = rules::check(root);
    for problem in &problems {
        eprintln!("tidy: {problem}");
    }
    if !problems.is_empty() {
        eprintln!("tidy: {} to put right", problems.len());
    }
    problems.is_empty()
}

/// Formats all code.
pub fn fmt(root: &Path) -> bool {
    cargo(root, &["fmt", "--all"])
}

struct StageResult {
    name: &'static str,
    seconds: f64,
    ok: bool,
}

fn stage(name: &'static str, run: impl FnOnce() -> bool) -> StageResult {
    println!("── {name}");
    let start = Instant::now();
    let ok = run();
    let seconds = start.elapsed().as_secs_f64();
    println!("── {name}: {} in {seconds:.1} s", if ok { "ok" } else { "FAILED" });
    StageResult { name, seconds, ok }
}

fn command(root: &Path, words: &[&str]) -> Command {
    // The cargo that runs this task; the same toolchain then runs all stages.
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(root);
    command
}

fn cargo(root: &Path, words: &[&str]) -> bool {
    match command(root, words).status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("error: cannot run cargo {}: {error}", words[0]);
            false
        }
    }
}

/// rustfmt and clippy are toolchain components that a minimal installation lacks.
fn tools_are_here(root: &Path) -> bool {
    let missing: Vec<&str> = [("fmt", "rustfmt"), ("clippy", "clippy")]
        .into_iter()
        .filter(|(word, _)| {
            let run =
                command(root, &[word, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
            !run.is_ok_and(|status| status.success())
        })
        .map(|(_, component)| component)
        .collect();
    if !missing.is_empty() {
        eprintln!("error: missing {0}; install with: rustup component add {0}", missing.join(" "));
    }
    missing.is_empty()
}

/// What the test runners reported, summed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    passed: u64,
    failed: u64,
}

impl Totals {
    /// Adds a line of the form `test result: ok. 5 passed; 0 failed; …`; ignores all others.
    fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.split_once("test result: ") else { return };
        let count = |word: &str| {
            let before = counts.split_once(word)?.0;
            before.split_whitespace().next_back()?.parse::<u64>().ok()
        };
        self.passed += count(" passed").unwrap_or(0);
        self.failed += count(" failed").unwrap_or(0);
    }
}

/// All tests, documentation's included; their output passes through as it comes.
fn run_tests(root: &Path, totals: &mut Totals) -> bool {
    let mut command = command(root, &["test", "--workspace", "--no-fail-fast"]);
    let mut child = match command.stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("error: cannot run cargo test: {error}");
            return false;
        }
    };
    if let Some(output) = child.stdout.take() {
        let mut screen = std::io::stdout().lock();
        let mut reader = BufReader::new(output);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            totals.add(&String::from_utf8_lossy(&line));
            // Nobody reading on is no reason to stop testing.
            let _ = screen.write_all(&line);
            line.clear();
        }
    }
    child.wait().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_over_runners() {
        let mut totals = Totals::default();
        for line in [
            "running 3 tests",
            "test a ... ok",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s\n",
            "7 passed, but not in a result line",
        ] {
            totals.add(line);
        }
        assert_eq!(totals, Totals { passed: 13, failed: 2 });
    }
}
