//! Golden files: an input, the stage it goes through, and the text that must come out.
//!
//! ```text
//! ; test simplify
//! graph(%0: f32[4]) {
//!   %1 = neg(%0) : f32[4]
//!   %2 = neg(%1) : f32[4]
//!   return %2
//! }
//! ; expect
//! graph(%0: f32[4]) {
//!   return %0
//! }
//! ```
//!
//! `BLESS=1 cargo test` writes what comes out into the files; read the difference before you keep it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What did not come out as a golden file says.
#[derive(Debug)]
pub struct Mismatch {
    failures: Vec<(PathBuf, String)>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, what) in &self.failures {
            writeln!(f, "{}:\n{what}", path.display())?;
        }
        write!(f, "{} golden file(s) failed; BLESS=1 renews them", self.failures.len())
    }
}

impl std::error::Error for Mismatch {}

/// Runs every `*.kir` file below `dir` through `stage(name, input text)` and compares the text that comes
/// out; an error is compared as the text `error: …`. Returns how many files there were.
pub fn run<E: fmt::Display>(
    dir: impl AsRef<Path>,
    stage: impl Fn(&str, &str) -> Result<String, E>,
) -> Result<usize, Mismatch> {
    let bless = std::env::var_os("BLESS").is_some_and(|v| v == "1");
    let mut files = Vec::new();
    let mut failures = Vec::new();
    if let Err(error) = collect(dir.as_ref(), &mut files) {
        failures.push((dir.as_ref().to_path_buf(), error.to_string()));
    }
    files.sort();
    for path in &files {
        if let Err(what) = one(path, &stage, bless) {
            failures.push((path.clone(), what));
        }
    }
    if failures.is_empty() { Ok(files.len()) } else { Err(Mismatch { failures }) }
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "kir") {
            files.push(path);
        }
    }
    Ok(())
}

fn one<E: fmt::Display>(
    path: &Path,
    stage: &impl Fn(&str, &str) -> Result<String, E>,
    bless: bool,
) -> Result<(), String> {
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    let (head, want) = match text.split_once("; expect\n") {
        Some((head, want)) => (head, want),
        None => (text.as_str(), ""),
    };
    let name = head
        .lines()
        .find_map(|line| line.strip_prefix("; test "))
        .ok_or("there is no `; test <stage>` line")?
        .trim();
    let got = match stage(name, head) {
        Ok(text) => text,
        Err(error) => format!("error: {error}\n"),
    };
    if got == want {
        return Ok(());
    }
    if bless {
        return fs::write(path, format!("{head}; expect\n{got}")).map_err(|e| e.to_string());
    }
    Err(diff(want, &got))
}

/// The lines of two texts, with − before those only expected and + before those only there.
pub fn diff(want: &str, got: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (want.lines().collect(), got.lines().collect());
    // Lengths of the longest common subsequences of the rests.
    let mut common = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i][j] =
                if a[i] == b[j] { common[i + 1][j + 1] + 1 } else { common[i + 1][j].max(common[i][j + 1]) };
        }
    }
    let (mut i, mut j, mut text) = (0, 0, String::new());
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            text += &format!("    {}\n", a[i]);
            (i, j) = (i + 1, j + 1);
        } else if i < a.len() && (j == b.len() || common[i + 1][j] >= common[i][j + 1]) {
            text += &format!("  - {}\n", a[i]);
            i += 1;
        } else {
            text += &format!("  + {}\n", b[j]);
            j += 1;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diffs_show_what_changed() {
        assert_eq!(diff("a\nb\nc\n", "a\nx\nc\n"), "    a\n  - b\n  + x\n    c\n");
        assert_eq!(diff("", "a"), "  + a\n");
    }

    #[test]
    fn files_are_compared() {
        let dir = std::env::temp_dir().join(format!("kiln-golden-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("one.kir"), "; test upper\nabc\n; expect\nABC\n").unwrap();
        let upper = |stage: &str, text: &str| -> Result<String, String> {
            assert_eq!(stage, "upper");
            Ok(text.lines().skip(1).map(|l| l.to_uppercase() + "\n").collect())
        };
        assert_eq!(run(&dir, upper).unwrap(), 1);
        fs::write(dir.join("two.kir"), "; test upper\nabc\n; expect\nABD\n").unwrap();
        if std::env::var_os("BLESS").is_none() {
            let message = run(&dir, upper).unwrap_err().to_string();
            assert!(message.contains("  - ABD\n  + ABC\n"), "{message}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
