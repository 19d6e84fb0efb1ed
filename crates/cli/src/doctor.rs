//! `kiln doctor`: does this machine have what Kiln needs, and what is to be installed if not.
//!
//! Things are tried, not only looked for: a kernel is compiled and loaded from where kernels are kept.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kiln_runtime::{CcError, Compiler, Isa, KernelCache, Source, cpu, pool, threads};

use crate::failure::{Done, Failure};
use crate::output::{self, bytes, count, time};

/// How a check went.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// As it should be.
    Fine,
    /// Works, and could be better.
    Note,
    /// Something has to be done.
    Missing,
}

/// What a check found.
struct Finding {
    name: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do about it.
    advice: Option<String>,
}

impl Finding {
    fn fine(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, verdict: Verdict::Fine, found: found.into(), advice: None }
    }

    fn note(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { name, verdict: Verdict::Note, found: found.into(), advice: Some(advice.into()) }
    }

    fn missing(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { name, verdict: Verdict::Missing, found: found.into(), advice: Some(advice.into()) }
    }
}

/// Prints the table; fails if something has to be done.
pub fn run() -> Done {
    let findings = [
        Finding::fine("kiln", format!("{} on {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS)),
        cpu(),
        instructions(),
        thread_count(),
        Finding::fine("memory", bytes(pool::machine_bytes() as f64)),
        compiler(),
        cache(),
        cuda(Path::new("/")),
    ];
    output::print(&text(&findings))?;
    let missing = findings.iter().filter(|finding| finding.verdict == Verdict::Missing);
    let what: Vec<&str> = missing.map(|finding| finding.name).collect();
    if what.is_empty() { Ok(()) } else { Err(Failure::Unwell { what }) }
}

/// A row for each check, and below it what to do.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { name, verdict, found, advice } in findings {
        let mark = match verdict {
            Verdict::Fine => "ok",
            Verdict::Note => "- ",
            Verdict::Missing => "!!",
        };
        // Writing to a string can't fail.
        let _ = writeln!(text, "{mark}  {name:width$}  {found}");
        for line in advice.iter().flat_map(|advice| advice.lines()) {
            let _ = writeln!(text, "    {:width$}  > {line}", "");
        }
    }
    text
}

fn cpu() -> Finding {
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = listed.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown model", |(_, model)| model.trim());
    Finding::fine("CPU", format!("{model}, {}", std::env::consts::ARCH))
}

/// The features that decide which code is made, as far as the CPU has them.
fn features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! detected {
            ($($feature:tt),*) => {
                [$(($feature, is_x86_feature_detected!($feature))),*]
            };
        }
        let all = detected!("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512vl", "avx512dq", "avx512bw");
        all.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

fn instructions() -> Finding {
    let (chosen, best) = (cpu::isa(), Isa::detect());
    let features = features();
    let features = if features.is_empty() { "no vector extensions".into() } else { features.join(" ") };
    let found = format!("{}, {}-byte vectors ({features})", chosen.name(), chosen.register_bytes());
    match (chosen == best, chosen) {
        (false, _) => Finding::note(
            "instructions",
            found,
            format!("set by KILN_ISA; the default here is {}", best.name()),
        ),
        (true, Isa::Plain) => Finding::note(
            "instructions",
            found,
            "kernels use what every CPU has; one with AVX2 or AVX-512 is quicker",
        ),
        (true, _) => Finding::fine("instructions", found),
    }
}

fn thread_count() -> Finding {
    let cores = cpu::machine().cores;
    let used = threads::count();
    let found = format!("{used} of {}", count(cores, "core"));
    if used < cores && std::env::var_os("KILN_NUM_THREADS").is_some() {
        let found = format!("{found}, set by KILN_NUM_THREADS");
        return Finding::note("threads", found, "without it there would be more");
    }
    Finding::fine("threads", found)
}

fn compiler() -> Finding {
    const NAME: &str = "C compiler";
    const INSTALL: &str = "without one programs run eagerly; install it:\n\
        Debian, Ubuntu: apt install gcc libc6-dev    Fedora: dnf install gcc    Arch: pacman -S gcc\n\
        Alpine: apk add gcc musl-dev    macOS: xcode-select --install";
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(error @ CcError::Disabled) => {
            return Finding::missing(
                NAME,
                error.to_string(),
                "unset KILN_CC; until then programs run eagerly",
            );
        }
        Err(error) => return Finding::missing(NAME, error.to_string(), INSTALL),
    };
    let path = compiler.program().display();
    let found = match version(compiler.program()) {
        Some(version) => format!("{path}: {version}"),
        None => path.to_string(),
    };
    match try_kernel() {
        Ok(taken) => Finding::fine(NAME, format!("{found}, a kernel takes {}", time(taken.as_secs_f64()))),
        Err(reason) => {
            let reason: Vec<&str> = reason.lines().filter(|line| !line.trim().is_empty()).take(4).collect();
            let advice = format!("{}\n{INSTALL}", reason.join("\n"));
            Finding::missing(NAME, format!("{found}, but it can't compile and load a small kernel"), advice)
        }
    }
}

/// The first line of `--version`.
fn version(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().next().map(str::to_owned)
}

/// Compiles a kernel and loads it, on the file system where kernels are kept.
fn try_kernel() -> Result<Duration, String> {
    let place = KernelCache::global().directory().map_or_else(|_| std::env::temp_dir(), PathBuf::from);
    let folder = place.join(format!("doctor-{}", std::process::id()));
    let source = Source::new("void kiln_doctor(void) {}\n", &[]);
    let start = Instant::now();
    let loaded = KernelCache::at(&folder).load(&source).map(|_| start.elapsed());
    // What is left behind is small and would be cleared with the cache.
    let _ = std::fs::remove_dir_all(&folder);
    loaded.map_err(|error| error.to_string())
}

fn cache() -> Finding {
    const NAME: &str = "kernel cache";
    let cache = KernelCache::global();
    let (Ok(directory), Ok(limit)) = (cache.directory(), cache.limit()) else {
        let reason = cache.directory().err().map(ToString::to_string).unwrap_or_default();
        let advice = "every process compiles its kernels anew; set KILN_CACHE_DIR to a directory that is yours \
                      alone (chmod 700)";
        return Finding::missing(NAME, reason, advice);
    };
    let contents = cache.contents().unwrap_or_default();
    let found = format!(
        "{}: {}, {} of {}",
        directory.display(),
        count(contents.objects, "object"),
        bytes(contents.bytes as f64),
        bytes(limit as f64)
    );
    match cache.damaged().map_or(0, |damaged| damaged.len()) {
        0 => Finding::fine(NAME, found),
        damaged => Finding::note(
            NAME,
            format!("{found}, {damaged} damaged"),
            "damaged objects are compiled again when they are wanted; `kiln cache clear` removes all",
        ),
    }
}

/// Whether there is a driver, seen from the root of the file system.
fn cuda(root: &Path) -> Finding {
    let driver = std::fs::read_to_string(root.join("proc/driver/nvidia/version")).unwrap_or_default();
    match driver.lines().next() {
        Some(driver) => Finding::note("CUDA", driver.trim(), "this build of Kiln runs on the CPU alone"),
        None => Finding::fine("CUDA", "no NVIDIA driver; this build of Kiln runs on the CPU alone"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_stands_below_what_it_is_about() {
        let findings =
            [Finding::fine("CPU", "one"), Finding::missing("C compiler", "none", "install it\nor don't")];
        assert_eq!(
            text(&findings),
            "ok  CPU         one\n!!  C compiler  none\n                > install it\n                > or don't\n"
        );
    }

    #[test]
    fn a_driver_is_found() {
        let root = std::env::temp_dir().join(format!("kiln-doctor-{}", std::process::id()));
        assert_eq!(cuda(&root).verdict, Verdict::Fine);
        std::fs::create_dir_all(root.join("proc/driver/nvidia")).expect("made");
        std::fs::write(root.join("proc/driver/nvidia/version"), "NVRM version: 1\nGCC").expect("written");
        let found = cuda(&root);
        assert_eq!((found.verdict, found.found.as_str()), (Verdict::Note, "NVRM version: 1"));
        std::fs::remove_dir_all(&root).expect("removed");
    }
}
