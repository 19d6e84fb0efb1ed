//! The stages of `cargo xtask test`: each is shown with its time, all run even if one fails.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::{deny as dependencies, tidy as rules};

/// fmt, tidy, clippy, deny, tests. The last line is `N passed, M failed`.
pub fn test(root: &Path, whole: bool) -> bool {
    if !tools_are_here(root) {
        return false;
    }
    let mut totals = Totals::default();
    let fmt = stage("fmt", || cargo(root, &["fmt", "--all", "--check"]));
    let tidy = stage("tidy", || tidy(root));
    let clippy = stage("clippy", || lint(root));
    // Behind clippy: by then everything is downloaded.
    let deny = stage("deny", || deny(root));
    let tests = stage("test", || run_tests(root, clippy.ok, whole, &mut totals));
    let results = [fmt, tidy, clippy, deny, tests];
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
    tell("tidy", &rules::check(root))
}

/// Prints what is against `deny.toml`; true if nothing is.
pub fn deny(root: &Path) -> bool {
    let host = Command::new("rustc").arg("-vV").output().map(|output| output.stdout).unwrap_or_default();
    let host = String::from_utf8_lossy(&host);
    let host = host.lines().find_map(|line| line.strip_prefix("host: "));
    let mut words = vec!["metadata", "--format-version", "1", "--locked"];
    // Crates of other systems need not be downloaded for it.
    words.extend(host.iter().flat_map(|host| ["--filter-platform", host]));
    tell("deny", &dependencies::check(root, command(root, &words)))
}

fn tell(stage: &str, problems: &[String]) -> bool {
    for problem in problems {
        eprintln!("{stage}: {problem}");
    }
    if !problems.is_empty() {
        eprintln!("{stage}: {} to put right", problems.len());
    }
    problems.is_empty()
}

/// Writes the pages that are made from the code.
pub fn docs(root: &Path) -> bool {
    let words = ["test", "--quiet", "--package", "kiln-testkit", "--lib", "op_docs"];
    command(root, &words).env("BLESS", "1").status().is_ok_and(|status| status.success())
}

/// Whether `kiln` compiles without its features, and with each of them alone.
pub fn features(root: &Path) -> bool {
    let alone = |feature: &str| {
        let words = ["check", "--package", "kiln", "--no-default-features", "--features", feature];
        stage(if feature.is_empty() { "none" } else { feature }, || cargo(root, &words)).ok
    };
    // All of them, even if one fails.
    ["", "models", "data", "torch-files"].map(alone).iter().all(|ok| *ok)
}

/// Formats all code.
pub fn fmt(root: &Path) -> bool {
    cargo(root, &["fmt", "--all"])
}

/// How a stage ended.
pub struct StageResult<'a> {
    name: &'a str,
    seconds: f64,
    pub ok: bool,
}

/// Runs a stage, with a line before and after it.
pub fn stage(name: &str, run: impl FnOnce() -> bool) -> StageResult<'_> {
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

/// Builds all tests by clippy's compiler, which finds what there is to find in the same pass; true if that is
/// nothing. `cargo clippy` would only look, and everything be compiled once more for the tests.
fn lint(root: &Path) -> bool {
    let mut warnings = 0;
    let words = ["test", "--workspace", "--no-run", "--message-format=json"];
    let built = each_line(linting(&mut command(root, &words)), |line| {
        let Ok(message) = serde_json::from_slice::<serde_json::Value>(line) else { return };
        if message["reason"] == "compiler-message" {
            let diagnostic = &message["message"];
            eprint!("{}", diagnostic["rendered"].as_str().unwrap_or_default());
            warnings += usize::from(diagnostic["level"] == "warning");
        }
    });
    if warnings > 0 {
        eprintln!("clippy: {warnings} warning(s)");
    }
    built && warnings == 0
}

/// The command, with clippy's compiler for the workspace's crates. It lies beside cargo.
fn linting(command: &mut Command) -> &mut Command {
    let cargo = std::env::var_os("CARGO").map(PathBuf::from);
    let beside = cargo.and_then(|cargo| Some(cargo.parent()?.join("clippy-driver")));
    let driver = beside.filter(|driver| driver.exists()).unwrap_or_else(|| "clippy-driver".into());
    command.env("RUSTC_WORKSPACE_WRAPPER", driver)
}

/// Runs a command and hands on what it prints, line by line; true if it ends well.
fn each_line(command: &mut Command, mut each: impl FnMut(&[u8])) -> bool {
    let mut child = match command.stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("error: cannot run cargo: {error}");
            return false;
        }
    };
    if let Some(output) = child.stdout.take() {
        let mut reader = BufReader::new(output);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            each(&line);
            line.clear();
        }
    }
    child.wait().is_ok_and(|status| status.success())
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

/// All tests, documentation's included; their output passes through as it comes. What clippy finds can keep it from
/// building them: then the compiler does.
fn run_tests(root: &Path, linted: bool, whole: bool, totals: &mut Totals) -> bool {
    let mut screen = std::io::stdout().lock();
    let mut tests = command(root, &["test", "--workspace", "--no-fail-fast"]);
    if whole {
        tests.env("KILN_WHOLE", "1");
    }
    each_line(if linted { linting(&mut tests) } else { &mut tests }, |line| {
        totals.add(&String::from_utf8_lossy(line));
        // Nobody reading on is no reason to stop testing.
        let _ = screen.write_all(line);
    })
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
