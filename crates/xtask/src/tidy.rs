//! Tidy: the repository's own rules, the ones no other tool checks.
//!
//! | rule | why |
//! |---|---|
//! | crates keep to their layer | the table in `layers.rs` is the architecture |
//! | a file starts with `//!` | its first line says what it is about |
//! | at most 600 lines, 900 in tests | past that there are two ideas in it |
//! | no tabs, no trailing spaces | |
//! | `unsafe` only where listed, each with its SAFETY line | the rest of Kiln is safe Rust |
//! | libraries don't print | what they have to say is a value or a warning |
//! | no paths of one machine | |
//! | the code map is whole, a changelog exists | documents that can go stale are checked |

use std::path::{Path, PathBuf};

use crate::layers;
use crate::source::code_only;

/// The most lines of a file under a crate's `src`.
const MOST_LINES: usize = 600;
/// The most lines of any other file.
const MOST_ELSEWHERE: usize = 900;

/// Where `unsafe` may stand, and why.
const UNSAFE: &[(&str, &str)] = &[
    ("crates/runtime/", "raw memory, threads, loaded code"),
    ("crates/tensor/", "storages and the kernels on them"),
    ("crates/dynamo/src/kernels.rs", "where a checked plan becomes a program"),
    ("crates/dynamo/src/device.rs", "the same for other devices"),
    ("crates/dynamo/tests/sweep/simulated.rs", "an engine, whose memory is raw"),
    ("crates/inductor/tests/", "running the generated kernels"),
    ("crates/cli/src/floor.rs", "the hand-written loops that compiled code is measured against"),
    ("crates/cli/src/allocations.rs", "counting calls of the global allocator"),
    ("crates/kiln/tests/counts.rs", "counting calls of the global allocator"),
];

/// Crates that are no libraries: they may print.
const PRINTS: &[&str] = &["crates/cli/", "crates/xtask/", "tests/torch/"];

/// Macros that no library may use.
const BANNED: &[&str] = &["println!", "eprintln!", "print!", "eprint!", "dbg!", "todo!", "unimplemented!"];

/// How many lines above an unsafe block its SAFETY line may start.
const SAFETY_REACH: usize = 8;

/// Everything that is against the rules, one line each.
pub fn check(root: &Path) -> Vec<String> {
    let mut problems = layers::check(root);
    for path in files(root) {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        match std::fs::read_to_string(&path) {
            Ok(text) => problems.extend(check_file(&name, &text)),
            Err(error) => problems.push(format!("{name}: {error}")),
        }
    }
    problems.extend(check_documents(root));
    problems
}

/// The text files under the rules, in order.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if path.is_dir() {
                // `shared` and hidden folders hold no sources of the project.
                if !name.starts_with('.') && name != "target" && !(folder == root && name == "shared") {
                    folders.push(path);
                }
            } else if [".rs", ".toml", ".md", ".py"].iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn check_file(name: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.contains('\t') {
            problems.push(format!("{name}:{number}: a tab"));
        }
        if line.ends_with(' ') {
            problems.push(format!("{name}:{number}: a trailing space"));
        }
        if let Some(path) = machine_path(line) {
            problems.push(format!("{name}:{number}: {path} is a path of one machine"));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        problems.push(format!("{name}: no newline at the end"));
    }
    if name.ends_with(".rs") {
        problems.extend(check_rust(name, text));
    }
    problems
}

fn check_rust(name: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if !text.starts_with("//!") {
        problems.push(format!("{name}:1: the first line must say what the file is about: `//! …`"));
    }
    let count = text.lines().count();
    let is_short = name.starts_with("crates/") && name.contains("/src/");
    let most = if is_short { MOST_LINES } else { MOST_ELSEWHERE };
    if count > most {
        problems.push(format!("{name}: {count} lines, at most {most}: there are two ideas in it"));
    }
    let code = code_only(text);
    let lines: Vec<&str> = text.lines().collect();
    let library = name.contains("/src/")
        && !name.ends_with("/tests.rs")
        && !PRINTS.iter().any(|prefix| name.starts_with(prefix));
    // A test module is the last thing in its file.
    let tests_from = code.find("#[cfg(test)]\nmod tests {").map(|at| code[..at].lines().count());
    for (number, line) in (1..).zip(code.lines()) {
        if has_word(line, "unsafe") {
            if !UNSAFE.iter().any(|(prefix, _)| name.starts_with(prefix)) {
                let places: Vec<&str> = UNSAFE.iter().map(|(prefix, _)| *prefix).collect();
                problems.push(format!("{name}:{number}: `unsafe` is only for {}", places.join(", ")));
            } else if opens_unsafe(line) && !safety_near(&lines, number) {
                problems.push(format!("{name}:{number}: no SAFETY comment says why this is sound"));
            }
        }
        if library && tests_from.is_none_or(|from| number <= from) {
            for banned in BANNED {
                if has_word(line, banned) {
                    problems.push(format!("{name}:{number}: `{banned}` in a library"));
                }
            }
        }
    }
    problems
}

/// Whether the line begins something that needs a SAFETY comment: a block or an impl, not an `unsafe fn`.
fn opens_unsafe(line: &str) -> bool {
    ["unsafe {", "unsafe impl"].iter().any(|form| has_word(line, form))
}

fn safety_near(lines: &[&str], number: usize) -> bool {
    let end = number.min(lines.len());
    lines[end.saturating_sub(SAFETY_REACH + 1)..end].iter().any(|line| line.contains("SAFETY"))
}

/// Whether `word` stands in the line with no letter before it (nor after it, if it ends in one).
fn has_word(line: &str, word: &str) -> bool {
    let letter = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        let runs_on = word.ends_with(letter) && after.starts_with(letter);
        !before.ends_with(letter) && !runs_on
    })
}

/// A path that exists on somebody's machine only.
fn machine_path(line: &str) -> Option<String> {
    ["work", "root", "home", "Users"].iter().map(|folder| format!("/{folder}/")).find(|path| {
        line.match_indices(path.as_str()).any(|(at, _)| {
            // Inside a longer path, or after another slash, the folder is not at the root.
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-/}*".contains(c))
        })
    })
}

fn check_documents(root: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    if !root.join("CHANGELOG.md").exists() {
        problems.push("CHANGELOG.md: missing".into());
    }
    match std::fs::read_to_string(root.join("ARCHITECTURE.md")) {
        Ok(map) => {
            let unnamed = layers::folders().filter(|folder| !map.contains(folder.as_str()));
            problems.extend(
                unnamed.map(|folder| format!("ARCHITECTURE.md: the code map does not name {folder}")),
            );
        }
        Err(_) => problems.push("ARCHITECTURE.md: missing".into()),
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, text: &str, expected: &[&str]) {
        assert_eq!(check_file(name, text), expected, "{text}");
    }

    #[test]
    fn the_repository_is_tidy() {
        let problems = super::check(&crate::root());
        assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
    }

    #[test]
    fn layout() {
        check("crates/ir/src/a.rs", "//! A.\n", &[]);
        check(
            "crates/ir/src/a.rs",
            "\n",
            &["crates/ir/src/a.rs:1: the first line must say what the file is about: `//! …`"],
        );
        check(
            "a.md",
            "x \ny\tz",
            &["a.md:1: a trailing space", "a.md:2: a tab", "a.md: no newline at the end"],
        );
        let long = format!("//! A.\n{}", "\n".repeat(MOST_LINES));
        check(
            "crates/ir/src/a.rs",
            &long,
            &["crates/ir/src/a.rs: 601 lines, at most 600: there are two ideas in it"],
        );
        check("crates/ir/tests/a.rs", &long, &[]);
    }

    #[test]
    fn paths_of_one_machine() {
        let path = format!("/{}/x", "home");
        check(
            "a.md",
            &format!("see {path}\n"),
            &[&format!("a.md:1: {} is a path of one machine", &path[..6])],
        );
        check("a.md", &format!("see kiln{path}\n"), &[]);
    }

    #[test]
    fn unsafe_needs_its_place_and_reason() {
        let block = "//! A.\nfn f() { unsafe { g() } }\n";
        let bare = check_file("crates/nn/src/a.rs", block);
        assert!(bare.len() == 1 && bare[0].contains("`unsafe` is only for"), "{bare:?}");
        check(
            "crates/tensor/src/a.rs",
            block,
            &["crates/tensor/src/a.rs:2: no SAFETY comment says why this is sound"],
        );
        check("crates/tensor/src/a.rs", "//! A.\n// SAFETY: fine.\nfn f() { unsafe { g() } }\n", &[]);
        check(
            "crates/nn/src/a.rs",
            "//! A, unsafe in words only.\n// unsafe\nconst A: &str = \"unsafe\";\n",
            &[],
        );
    }

    #[test]
    fn libraries_do_not_print() {
        let text =
            "//! A.\nfn f() { println!(\"x\") }\n#[cfg(test)]\nmod tests { fn g() { println!(\"y\") } }\n";
        check("crates/nn/src/a.rs", text, &["crates/nn/src/a.rs:2: `println!` in a library"]);
        check("crates/nn/tests/a.rs", text, &[]);
        check("crates/cli/src/a.rs", text, &[]);
    }
}
