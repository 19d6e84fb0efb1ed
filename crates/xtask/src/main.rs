//! Kiln's development tasks: `cargo xtask test`, `tidy`, `deny`, `features`, `sanitize`, `fmt`, `docs`, `torch`.
#![allow(clippy::print_stdout, clippy::print_stderr)]

#[cfg(test)]
mod api;
mod deny;
mod layers;
mod sanitize;
mod source;
mod stages;
mod tidy;
mod torch;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "\
Kiln's development tasks

  cargo xtask test      everything: fmt, tidy, clippy, deny, then all tests; ends with `N passed, M failed`;
                        --whole runs the sweeps that are sampled otherwise, which takes a few minutes more
  cargo xtask tidy      the repository's own rules (layers, file sizes, unsafe, docs that must be current)
  cargo xtask deny      licences, sources and bans of deny.toml, without cargo-deny
  cargo xtask features  kiln without its features, and with each of them alone
  cargo xtask sanitize  the address sanitizer, loom and Miri, as far as they are installed
  cargo xtask fmt       format all code
  cargo xtask docs      write docs/ops.md from the op table
  cargo xtask torch     compare every operator with PyTorch (--install puts one under target/; --all compiles every
                        sample, --eager none; operators by name)";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let root = root();
    let done = match words[..] {
        ["test"] => stages::test(&root, false),
        ["test", "--whole"] => stages::test(&root, true),
        ["tidy"] => stages::tidy(&root),
        ["deny"] => stages::deny(&root),
        ["features"] => stages::features(&root),
        ["sanitize"] => sanitize::sanitize(&root),
        ["fmt"] => stages::fmt(&root),
        ["docs"] => stages::docs(&root),
        ["torch", ref rest @ ..] => torch::torch(&root, rest),
        [] | ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("error: unknown task `{}`\n\n{USAGE}", words.join(" "));
            return ExitCode::from(2);
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The workspace's folder: two above this crate's.
fn root() -> PathBuf {
    let here = PathBuf::from(
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()),
    );
    here.ancestors().nth(2).map_or(here.clone(), PathBuf::from)
}
