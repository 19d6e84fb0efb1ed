//! `cargo xtask torch`: what Kiln computes beside what PyTorch computes, over OpInfo's samples and Kiln's own.
//!
//! `tests/torch/samples.py` writes calls and PyTorch's answers to `target/torch-samples`, a file for each operator,
//! which are kept; `kiln-torch` (tests/torch) runs them and prints one table.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the virtual environment that `--install` makes.
const ENVIRONMENT: &str = "target/torch";

/// What PyTorch's samples need.
const PACKAGES: &[&str] = &["torch", "numpy", "expecttest"];

/// Runs everything; words after `torch` are options and the names of operators.
pub fn torch(root: &Path, words: &[&str]) -> bool {
    let (options, ops): (Vec<&str>, Vec<&str>) = words.iter().copied().partition(|w| w.starts_with("--"));
    if let Some(unknown) = options.iter().find(|o| !["--install", "--all", "--eager"].contains(o)) {
        eprintln!("error: unknown option `{unknown}`; there are --install, --all and --eager");
        return false;
    }
    if options.contains(&"--install") && !install(root) {
        return false;
    }
    let Some(python) = python(root) else {
        eprintln!(
            "error: no Python with PyTorch: `cargo xtask torch --install` puts one under {ENVIRONMENT}, \
             or KILN_PYTHON names one"
        );
        return false;
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    if !ran(Command::new(cargo).args(["build", "--package", "kiln-torch"]).current_dir(root)) {
        return false;
    }
    let runner = root.join("target/debug/kiln-torch");
    let samples = root.join("target/torch-samples");
    let names = match Command::new(&runner).arg("--names").output() {
        Ok(output) => output.stdout,
        Err(error) => {
            eprintln!("error: {}: {error}", runner.display());
            return false;
        }
    };
    let list = samples.join("names.txt");
    if let Err(error) = std::fs::create_dir_all(&samples).and_then(|()| std::fs::write(&list, names)) {
        eprintln!("error: {}: {error}", list.display());
        return false;
    }
    let jobs = std::thread::available_parallelism().map_or(2, usize::from).to_string();
    let mut write = Command::new(python);
    write.arg(root.join("tests/torch/samples.py")).args([&samples, &list]).arg(jobs);
    if !ran(&mut write) {
        return false;
    }
    let mut compare = Command::new(runner);
    compare.arg(&samples).arg(root.join("docs/torch-differences.md"));
    compare.args(options.iter().filter(|o| **o != "--install")).args(ops);
    // Samples are small; kernels are kept from run to run, apart from the user's.
    compare.env("KILN_NUM_THREADS", "1").env("KILN_CACHE_DIR", root.join("target/torch-kernels"));
    ran(&mut compare)
}

fn ran(command: &mut Command) -> bool {
    match command.status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("error: {}: {error}", command.get_program().to_string_lossy());
            false
        }
    }
}

/// A virtual environment with PyTorch for the CPU, from pip's index as it is configured.
fn install(root: &Path) -> bool {
    let environment = root.join(ENVIRONMENT);
    let base = std::env::var_os("KILN_PYTHON").unwrap_or_else(|| "python3".into());
    let pip = environment.join("bin/pip");
    (pip.exists() || ran(Command::new(base).args(["-m", "venv"]).arg(&environment)))
        && ran(Command::new(pip).args(["install", "--quiet"]).args(PACKAGES))
}

/// The first Python that has PyTorch: the one under `target`, the one that is named, the usual one.
fn python(root: &Path) -> Option<PathBuf> {
    let named = std::env::var_os("KILN_PYTHON").map(PathBuf::from);
    let all = [Some(root.join(ENVIRONMENT).join("bin/python")), named, Some(PathBuf::from("python3"))];
    all.into_iter().flatten().find(|python| {
        let mut test = Command::new(python);
        test.args(["-c", "import torch, numpy, expecttest"]).stderr(std::process::Stdio::null());
        test.status().is_ok_and(|status| status.success())
    })
}
