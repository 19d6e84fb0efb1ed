//! Compares Kiln with PyTorch, call by call: run by `cargo xtask torch`, which makes the calls first.
//!
//! ```text
//! kiln-torch --names                        the OpInfos that Kiln has calls for
//! kiln-torch FOLDER LIST [--all] [OP ...]   runs the calls of a folder; LIST explains what may differ
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod bundle;
mod calls;
mod check;
mod differences;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words == ["--names"] {
        println!("{}", calls::names().join("\n"));
        return ExitCode::SUCCESS;
    }
    let (options, words): (Vec<String>, Vec<String>) = words.into_iter().partition(|w| w.starts_with("--"));
    let [folder, list, ops @ ..] = &words[..] else {
        eprintln!("usage: kiln-torch FOLDER LIST [--all] [--eager] [OP ...]");
        return ExitCode::from(2);
    };
    let run = report::Run {
        folder: PathBuf::from(folder),
        list: PathBuf::from(list),
        ops: ops.to_vec(),
        all: options.iter().any(|o| o == "--all"),
        eager_only: options.iter().any(|o| o == "--eager"),
    };
    if report::run(&run) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
