//! The user's line, read from the call stack, where the language does not pass it on: printing goes through
//! `Display`, which can't have `#[track_caller]`. That takes milliseconds, so it is done once for each break.

use std::backtrace::Backtrace;

use kiln_ir::Line;

/// Crates whose frames are not the user's.
const LIBRARIES: &[&str] = &["std", "core", "alloc", "kiln_dynamo", "kiln_tensor", "kiln_runtime", "kiln_ir"];
/// The same by their files, since debug information may name a function without its crate.
const STANDARD: &[&str] = &["/library/std/src/", "/library/core/src/", "/library/alloc/src/"];
const OWN: &[&str] = &["/dynamo/src/", "/tensor/src/", "/runtime/src/", "/ir/src/"];

/// The innermost line of the call stack that is neither Kiln's nor the standard library's.
pub(crate) fn line() -> Option<Line> {
    // Its text is all that the standard library shows of it.
    parse(&Backtrace::force_capture().to_string())
}

/// Finds the first frame of the user's in a backtrace's text: a line `  7: function`, then, where there is debug
/// information, `  at path:line:column`.
fn parse(text: &str) -> Option<Line> {
    let mut lines = text.lines().map(str::trim_start).peekable();
    while let Some(line) = lines.next() {
        let numbered = line.split_once(": ").filter(|(number, _)| number.parse::<u32>().is_ok());
        let Some((_, function)) = numbered else { continue };
        match lines.peek().and_then(|at| at.strip_prefix("at ")).and_then(Place::parse) {
            Some(place) if place.is_library() || of_library(function) == Some(true) => {}
            Some(Place { file, line, .. }) => return Some(Line::Found(format!("{file}:{line}"))),
            // `_start` and the like, which are of no crate, are nobody's.
            None if of_library(function) != Some(false) => {}
            None => return Some(Line::Found(function.to_string())),
        }
    }
    None
}

/// Whether a function is a library's, by the crate it begins with, if it is named: `core::fmt::write`,
/// `<kiln_tensor::Tensor as core::fmt::Display>::fmt`.
fn of_library(function: &str) -> Option<bool> {
    let name = function.trim_start_matches(['<', '&']);
    let name = name.strip_prefix("dyn ").unwrap_or(name);
    let (krate, _) = name.split_once("::")?;
    Some(LIBRARIES.contains(&krate.split('[').next().unwrap_or(krate)))
}

/// `./src/model.rs:42:9`, taken apart.
struct Place<'a> {
    folder: &'a str,
    file: &'a str,
    line: &'a str,
}

impl Place<'_> {
    fn parse(text: &str) -> Option<Place<'_>> {
        let (rest, _column) = text.rsplit_once(':')?;
        let (path, line) = rest.rsplit_once(':')?;
        let at = path.rfind(['/', '\\']).map_or(0, |slash| slash + 1);
        Some(Place { folder: &path[..at], file: &path[at..], line })
    }

    fn is_library(&self) -> bool {
        let folder = self.folder.replace('\\', "/");
        if STANDARD.iter().any(|part| folder.contains(part)) {
            return true;
        }
        // The standard library writes what lies below the current folder as `./`.
        let own = env!("CARGO_MANIFEST_DIR").trim_end_matches("/dynamo");
        let whole = match (folder.strip_prefix("./"), std::env::current_dir()) {
            (Some(rest), Ok(current)) => format!("{}/{rest}", current.display()),
            _ => folder,
        };
        whole.strip_prefix(own).is_some_and(|rest| OWN.iter().any(|part| rest.starts_with(part)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_frame_of_the_user_is_found() {
        let text = "   0: std::backtrace::Backtrace::force_capture\n             at /rustc/1/library/std/src/backtrace.rs:9:1\n   1: <kiln_tensor::tensor::Tensor as core::fmt::Display>::fmt\n             at /k/crates/tensor/src/print.rs:30:9\n   2: core::fmt::write\n   3: mine::step::{{closure}}\n             at /mine/src/main.rs:42:9\n   4: mine::main\n";
        assert_eq!(parse(text), Some(Line::Found("main.rs:42".into())));
        let bare = "   0: std::backtrace::Backtrace::create\n   1: core::fmt::write\n   2: mine::step\n   3: _start\n";
        assert_eq!(parse(bare), Some(Line::Found("mine::step".into())));
        assert_eq!(parse("disabled backtrace"), None);
        let own = format!("   0: {{closure#0}}\n   at {}/src/run.rs:1:2\n", env!("CARGO_MANIFEST_DIR"));
        let nameless = own + "   1: {closure#1}\n   at /mine/crates/dynamo/src/run.rs:7:3\n";
        assert_eq!(parse(&nameless), Some(Line::Found("run.rs:7".into())));
        assert_eq!(parse("   0: core::fmt::write\n   1: __libc_start_main\n"), None);
    }
}
