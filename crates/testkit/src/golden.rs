//! Golden files: an input, the stage it goes through, and the text that must come out.
//!
//! ```text
//! ; test simplify
//! ; Two negations are none.
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
//! The first line names the stage and what it is to be told, in the words of the test that runs the folder. A file
//! that shows an error says so with the last of them, `fails`, so that a slip in an input is not taken for a refusal.
//! `BLESS=1 cargo test` writes what comes out into the files; read the difference before you keep it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What parts the input from the expectation.
const EXPECT: &str = "; expect\n";

/// Whether what is on disk is to be renewed: `BLESS=1`, and nothing else.
pub fn blesses() -> bool {
    std::env::var_os("BLESS").is_some_and(|value| value == "1")
}

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
        let count = self.failures.len();
        write!(f, "{count} golden file(s) failed; BLESS=1 renews texts that differ: read what changed")
    }
}

impl std::error::Error for Mismatch {}

/// A golden file.
#[derive(Clone, Debug)]
pub struct Golden {
    /// Where it is.
    pub path: PathBuf,
    /// The words after `; test`: the stage and what it is told.
    pub header: String,
    /// All text above the expectation, header and comments included.
    pub input: String,
    /// The text that must come out, unless there is none yet.
    pub expected: Option<String>,
}

impl Golden {
    fn read(path: &Path) -> Result<Golden, String> {
        let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
        let (input, expected) = match text.find(&format!("\n{EXPECT}")) {
            Some(at) => (&text[..=at], Some(text[at + 1 + EXPECT.len()..].to_string())),
            None => (text.as_str(), None),
        };
        let header = text.lines().next().and_then(|line| line.strip_prefix("; test "));
        let header = header.ok_or("its first line is not `; test <stage>`")?.trim().to_string();
        Ok(Golden { path: path.to_path_buf(), header, input: input.to_string(), expected })
    }

    /// The file's name without its ending.
    pub fn name(&self) -> String {
        self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The text that must come out, or nothing.
    pub fn expected(&self) -> &str {
        self.expected.as_deref().unwrap_or_default()
    }

    fn check<E: fmt::Display>(
        &self,
        stage: &impl Fn(&str, &str) -> Result<String, E>,
        bless: bool,
    ) -> Result<(), String> {
        let (words, fails) = match self.header.strip_suffix("fails") {
            Some(words) => (words.trim_end(), true),
            None => (self.header.as_str(), false),
        };
        let got = match stage(words, &self.input) {
            Ok(text) if fails => {
                return Err(format!("the header says that it fails, but it does not:\n{text}"));
            }
            Ok(text) => text,
            Err(error) if fails => format!("error: {error}\n"),
            Err(error) => {
                return Err(format!("error: {error}\n(if that is right, the header ends in `fails`)"));
            }
        };
        match &self.expected {
            Some(want) if *want == got => Ok(()),
            _ if bless => {
                let newline = if self.input.ends_with('\n') { "" } else { "\n" };
                let text = format!("{}{newline}{EXPECT}{got}", self.input);
                fs::write(&self.path, text).map_err(|e| e.to_string())
            }
            Some(want) => Err(diff(want, &got)),
            None => Err(format!("there is no `; expect` line; this comes out:\n{got}")),
        }
    }
}

/// Every golden file below `dir`, by path. There must be one, and nothing else may lie there.
pub fn files(dir: impl AsRef<Path>) -> Result<Vec<Golden>, Mismatch> {
    let (mut paths, mut failures, mut files) = (Vec::new(), Vec::new(), Vec::new());
    if let Err(error) = collect(dir.as_ref(), &mut paths) {
        failures.push((dir.as_ref().to_path_buf(), error.to_string()));
    } else if paths.is_empty() {
        failures.push((dir.as_ref().to_path_buf(), "there is no golden file here".to_string()));
    }
    paths.sort();
    for path in paths {
        if path.extension().is_none_or(|extension| extension != "kir") {
            failures.push((path, "golden files end in .kir: nothing would run this one".to_string()));
            continue;
        }
        match Golden::read(&path) {
            Ok(file) => files.push(file),
            Err(what) => failures.push((path, what)),
        }
    }
    if failures.is_empty() { Ok(files) } else { Err(Mismatch { failures }) }
}

/// Runs every golden file below `dir` through `stage(header's words, input text)` and compares the text that comes
/// out. Returns how many files there were.
pub fn run<E: fmt::Display>(
    dir: impl AsRef<Path>,
    stage: impl Fn(&str, &str) -> Result<String, E>,
) -> Result<usize, Mismatch> {
    run_with(dir, stage, blesses())
}

fn run_with<E: fmt::Display>(
    dir: impl AsRef<Path>,
    stage: impl Fn(&str, &str) -> Result<String, E>,
    bless: bool,
) -> Result<usize, Mismatch> {
    let files = files(dir)?;
    let failures: Vec<(PathBuf, String)> =
        files.iter().filter_map(|file| Some((file.path.clone(), file.check(&stage, bless).err()?))).collect();
    if failures.is_empty() { Ok(files.len()) } else { Err(Mismatch { failures }) }
}

/// Fails with the names that no file shows. `what` says what the names are of, and what to do about one.
#[track_caller]
pub fn assert_all_shown<'a>(
    what: &str,
    names: impl IntoIterator<Item = &'a str>,
    shows: impl Fn(&str) -> bool,
) {
    let missing: Vec<&str> = names.into_iter().filter(|name| !shows(name)).collect();
    assert!(missing.is_empty(), "no golden file shows {what}:\n  {}", missing.join("\n  "));
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
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

    /// Text in capitals, without the header; there is none for a text with a digit.
    fn upper(words: &str, text: &str) -> Result<String, String> {
        assert_eq!(words, "upper");
        match text.chars().find(char::is_ascii_digit) {
            Some(digit) => Err(format!("{digit} has no capital")),
            None => Ok(text.lines().skip(1).map(|l| l.to_uppercase() + "\n").collect()),
        }
    }

    /// A folder with these files.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str, files: &[(&str, &str)]) -> Folder {
            let folder = std::env::temp_dir().join(format!("kiln-golden-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            files.iter().for_each(|(file, text)| fs::write(folder.join(file), text).unwrap());
            Folder(folder)
        }

        /// What is said about the folder when nothing is renewed.
        fn told(&self) -> String {
            run_with(&self.0, upper, false).map_or_else(|e| e.to_string(), |count| format!("{count} agree"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_are_compared_and_renewed_only_when_asked() {
        let good = ("good.kir", "; test upper\nabc\n; expect\nABC\n");
        let folder = Folder::new("compare", &[good]);
        assert_eq!(folder.told(), "1 agree");

        let bad = "; test upper\nabc\n; expect\nABD\n";
        fs::write(folder.0.join("bad.kir"), bad).unwrap();
        let told = folder.told();
        assert!(told.contains("bad.kir:\n  - ABD\n  + ABC\n"), "{told}");
        assert!(told.contains("BLESS=1 renews") && !told.contains("good.kir"), "{told}");
        assert_eq!(fs::read_to_string(folder.0.join("bad.kir")).unwrap(), bad);

        run_with(&folder.0, upper, true).unwrap();
        assert_eq!(folder.told(), "2 agree");
        assert_eq!(fs::read_to_string(folder.0.join("bad.kir")).unwrap(), good.1);
    }

    #[test]
    fn a_file_without_an_expectation_fails_until_it_is_renewed() {
        let folder = Folder::new("fresh", &[("fresh.kir", "; test upper\nabc")]);
        assert!(folder.told().contains("there is no `; expect` line"), "{}", folder.told());
        run_with(&folder.0, upper, true).unwrap();
        assert_eq!(folder.told(), "1 agree");
    }

    #[test]
    fn errors_are_announced() {
        let folder = Folder::new("errors", &[("one.kir", "; test upper\na1\n")]);
        assert!(run_with(&folder.0, upper, true).is_err());
        assert!(folder.told().contains("error: 1 has no capital"), "{}", folder.told());
        fs::write(folder.0.join("one.kir"), "; test upper fails\na1\n; expect\nerror: 1 has no capital\n")
            .unwrap();
        assert_eq!(folder.told(), "1 agree");
        fs::write(folder.0.join("one.kir"), "; test upper fails\na\n; expect\nA\n").unwrap();
        assert!(folder.told().contains("says that it fails, but it does not"), "{}", folder.told());
    }

    #[test]
    fn what_nothing_would_run_fails() {
        let folder = Folder::new("empty", &[]);
        assert!(folder.told().contains("there is no golden file here"), "{}", folder.told());
        fs::write(folder.0.join("one.kir"), "abc\n; expect\nABC\n").unwrap();
        assert!(folder.told().contains("its first line is not `; test <stage>`"), "{}", folder.told());
        fs::write(folder.0.join("one.kir"), "; test upper\nabc\n; expect\nABC\n").unwrap();
        fs::write(folder.0.join("two.txt"), "; test upper\nabc\n; expect\nABC\n").unwrap();
        assert!(folder.told().contains("nothing would run this one"), "{}", folder.told());
        fs::remove_file(folder.0.join("two.txt")).unwrap();
        assert_eq!(folder.told(), "1 agree");
        assert!(files(folder.0.join("nowhere")).is_err());
    }

    #[test]
    #[should_panic(expected = "no golden file shows a letter:\n  c")]
    fn what_is_missing_is_named() {
        assert_all_shown("a letter", ["a", "b", "c"], |letter| "ab".contains(letter));
    }
}
