//! `cargo xtask sanitize`: memory and threads of the Rust side, under the tools that watch them.
//!
//! | tool | what it watches | what it needs |
//! |---|---|---|
//! | address sanitizer | every access of eager kernels, storages and matrix products, also past the end of a buffer that lies in a larger block of the pool | a nightly toolchain |
//! | loom | the lock-free protocols: every order of steps, every value that a load may see | nothing |
//! | Miri | pointers and counts of handles, by the language's own rules | a nightly toolchain with Miri |
//!
//! A tool that is not installed is left out, with the line that installs it. Kernels in C have checks of their own
//! (`KILN_SANITIZE`, docs/numerics.md).

use std::path::Path;
use std::process::{Command, Stdio};

use crate::stages::stage;

/// How a tool's run ended.
enum Outcome {
    Ran(bool),
    /// What to do to have it.
    Missing(&'static str),
}

/// Runs all of them; true if none that could be run found anything.
pub fn sanitize(root: &Path) -> bool {
    let tools: [(&str, fn(&Path) -> Outcome); 3] = [("address", address), ("loom", loom), ("miri", miri)];
    let outcomes = tools.map(|(name, run)| {
        let mut outcome = None;
        stage(name, || {
            let ended = run(root);
            let ok = !matches!(ended, Outcome::Ran(false));
            outcome = Some(ended);
            ok
        });
        (name, outcome)
    });
    println!();
    let mut ok = true;
    for (name, outcome) in outcomes {
        let text = match outcome {
            Some(Outcome::Ran(true)) => "ok".to_string(),
            Some(Outcome::Missing(how)) => format!("not run: {how}"),
            Some(Outcome::Ran(false)) | None => {
                ok = false;
                "FAILED".to_string()
            }
        };
        println!("{name:>8}  {text}");
    }
    ok
}

const NIGHTLY: &str = "there is no nightly toolchain; `rustup toolchain install nightly` gets one";
const MIRI: &str = "there is no Miri; `rustup +nightly component add miri rust-src` gets it";

/// A command of the nightly toolchain.
fn nightly(root: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(words).current_dir(root);
    command
}

fn is_there(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn ran(command: &mut Command) -> Outcome {
    match command.status() {
        Ok(status) => Outcome::Ran(status.success()),
        Err(error) => {
            eprintln!("error: {}: {error}", command.get_program().to_string_lossy());
            Outcome::Ran(false)
        }
    }
}

/// Eager tensors and what they run on, each buffer guarded at its end.
fn address(root: &Path) -> Outcome {
    let version = nightly(root, &["rustc", "-vV"]).output().ok().filter(|output| output.status.success());
    let Some(version) = version else { return Outcome::Missing(NIGHTLY) };
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let Some(host) = version.lines().find_map(|line| line.strip_prefix("host: ")) else {
        return Outcome::Missing(NIGHTLY);
    };
    // With a target of its own, so that procedural macros are built without; its functions exported, so that the pool
    // finds those that guard a buffer. What a process keeps to its end is no leak.
    let mut command = nightly(root, &["cargo", "test", "--target", host, "--target-dir", "target/sanitize"]);
    command.args(["--package", "kiln-tensor", "--lib", "--tests"]);
    command.env("RUSTFLAGS", "-Zsanitizer=address -Clink-args=-rdynamic --cfg sanitize_rust");
    command.env("KILN_SANITIZE", "address").env("ASAN_OPTIONS", "detect_leaks=0");
    ran(&mut command)
}

/// The models of the owner lock and of biased counts.
fn loom(root: &Path) -> Outcome {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--release", "--target-dir", "target/loom"]).current_dir(root);
    command.args(["--package", "kiln-runtime", "--package", "kiln-tensor", "--lib", "loom"]);
    ran(command.env("RUSTFLAGS", "--cfg loom"))
}

/// Handles, biased counts and the owner lock: what Miri can run, which knows neither C nor vectors.
fn miri(root: &Path) -> Outcome {
    if !is_there(&mut nightly(root, &["rustc", "--version"])) {
        return Outcome::Missing(NIGHTLY);
    }
    if !is_there(&mut nightly(root, &["cargo", "miri", "--version"])) {
        return Outcome::Missing(MIRI);
    }
    let mut command = nightly(root, &["cargo", "miri", "test", "--target-dir", "target/miri"]);
    command.args([
        "--package",
        "kiln-runtime",
        "--package",
        "kiln-tensor",
        "--lib",
        "--",
        "owner",
        "handle",
        "kept",
    ]);
    command
        .env("KILN_ISA", "plain")
        .env("KILN_NUM_THREADS", "1")
        .env("MIRIFLAGS", "-Zmiri-disable-isolation");
    ran(&mut command)
}
