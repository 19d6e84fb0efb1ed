//! Compiled calls checked against eager ones while a program runs: `Compile::verify`, `KILN_VERIFY` and `KILN_REPRO`.
//!
//! A call that is checked runs eagerly, and is recorded as a [`Case`] on the way; the program goes on with eager's results.
//! Then the case is played in the same compiled function: the values that outlive the call, the inputs that it changes
//! and the gradients must be eager's, as exactly as rounding allows. If they aren't, the case is made smaller, its
//! stage is found, and the error names both and the file.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustc_hash::FxHashSet;

use kiln_ir::{Error, Result};
use kiln_repro::{Arithmetic, Case, Judge, Live, Recorded, Verdict, play, record};
use kiln_runtime::warn;

use crate::bisect::{self, Failure, Found};
use crate::options::Compile;
use crate::region::Region;

/// How often compiled calls are checked: every n-th, from the first. 0 is never.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Every(pub usize);

/// How long a case is made smaller.
const LIMIT: Duration = Duration::from_secs(60);

/// What `KILN_REPRO` asks for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Repro {
    /// Every segment is tried in a process of its own before it runs here.
    Crash,
    /// Every call is checked.
    Accuracy,
}

fn repro() -> Option<Repro> {
    static ASKED: OnceLock<Option<Repro>> = OnceLock::new();
    *ASKED.get_or_init(|| match std::env::var("KILN_REPRO").as_deref() {
        Ok("crash") => Some(Repro::Crash),
        Ok("accuracy") => Some(Repro::Accuracy),
        Ok(other) if !other.is_empty() => {
            warn::once("KILN_REPRO", || format!("KILN_REPRO={other} is neither crash nor accuracy"));
            None
        }
        _ => None,
    })
}

impl Every {
    /// What the environment asks for where the program does not say.
    pub(crate) fn asked(self) -> Every {
        static ASKED: OnceLock<usize> = OnceLock::new();
        if self.0 > 0 {
            return self;
        }
        Every(*ASKED.get_or_init(|| {
            let accuracy = usize::from(repro() == Some(Repro::Accuracy));
            let text = std::env::var("KILN_VERIFY").unwrap_or_default();
            match text.trim().parse() {
                Ok(calls) => calls,
                Err(_) if text.is_empty() => accuracy,
                Err(_) => {
                    warn::once("KILN_VERIFY", || format!("KILN_VERIFY={text} is not a number of calls"));
                    accuracy
                }
            }
        }))
    }
}

/// What a region remembers of its checks.
#[derive(Default)]
pub(crate) struct Checks {
    every: usize,
    crash: bool,
    calls: AtomicUsize,
    /// Programs that were tried in a process of their own.
    tried: Mutex<FxHashSet<String>>,
}

thread_local! {
    /// Whether this thread is checking a call: what it runs is not checked itself.
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

struct Checking;

impl Checking {
    fn begin() -> Checking {
        CHECKING.set(true);
        Checking
    }
}

impl Drop for Checking {
    fn drop(&mut self) {
        CHECKING.set(false);
    }
}

impl Checks {
    /// As asked for; `None`: nothing is checked.
    pub(crate) fn of(options: &Compile) -> Option<Box<Checks>> {
        let every = options.verify.asked().0;
        let crash = repro() == Some(Repro::Crash);
        (every > 0 || crash).then(|| Box::new(Checks { every, crash, ..Checks::default() }))
    }

    /// Whether the call that begins now is checked.
    pub(crate) fn wants(&self) -> bool {
        if CHECKING.get() {
            return false;
        }
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        self.crash || self.every > 0 && number.is_multiple_of(self.every)
    }
}

/// Runs a call eagerly, so that its results are eager's, and the same program compiled: they must agree.
pub(crate) fn call<T, E: From<Error>>(
    checks: &Checks,
    region: &Region,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let Recorded { value, case } = record(body)?;
    match case {
        Ok(mut case) => {
            case.options = region.options().to_text();
            let _checking = Checking::begin();
            check(checks, region, &case)?;
        }
        Err(why) => warn::once(why, || format!("a call that can't be checked against eager: {why}")),
    }
    Ok(value)
}

fn check(checks: &Checks, region: &Region, case: &Case) -> Result<()> {
    if checks.crash && checks.tried.lock().insert(case.recording.to_string()) {
        let failure = bisect::reproduce_apart(case)?;
        if let Some(failure) = failure.filter(|failure| !matches!(failure, Failure::Wrong(_))) {
            tell(&investigated(case, &failure)?);
            return Ok(());
        }
    }
    if checks.every == 0 {
        return Ok(());
    }
    let judge = Judge::new(case)?;
    let failure = match play(case, Arithmetic::Own, &|run: &dyn Fn() -> Result<Live>| region.run(run)) {
        Err(error) => Failure::Error(error.to_string()),
        Ok(outcome) => match judge.verdict(&outcome) {
            Verdict::Right => return Ok(()),
            Verdict::Wrong { seen, what } => Failure::Wrong(format!("{seen}: {what}")),
        },
    };
    let told = investigated(case, &failure)?;
    if repro().is_some() {
        tell(&told);
    }
    Err(Error::Bug { what: told.lines.join("; "), at: told.found.loc })
}

/// What was found out, and where it is saved.
struct Told {
    found: Found,
    lines: Vec<String>,
}

/// Makes a case smaller, finds its stage, and saves it.
fn investigated(case: &Case, failure: &Failure) -> Result<Told> {
    let (small, found) = match bisect::investigate(case, LIMIT, &mut |_| {})? {
        Some(found) => found,
        // It fails here and not there: as it is, it can still be looked at.
        None => (case.clone(), Found::only(failure.clone())),
    };
    let path = folder().join(format!("{}.kir", name(&found)));
    std::fs::create_dir_all(folder())
        .map_err(|error| Error::Environment(format!("{}: {error}", folder().display())))?;
    small.write(&path)?;
    let mut lines: Vec<String> = found.to_string().lines().map(str::to_string).collect();
    lines.push(format!("kiln repro {}", path.display()));
    Ok(Told { found, lines })
}

fn tell(told: &Told) {
    let text = told.lines.join("\nkiln: ");
    warn::once(&text, || text.clone());
}

/// Where cases are saved: `KILN_REPRO_DIR`, else `kiln_repro` in the current folder.
fn folder() -> PathBuf {
    let asked = std::env::var_os("KILN_REPRO_DIR").filter(|folder| !folder.is_empty());
    asked.map_or_else(|| PathBuf::from("kiln_repro"), PathBuf::from)
}

/// A file name that is not taken.
fn name(found: &Found) -> String {
    let stage = found.stage.map_or("unknown", |stage| stage.name());
    let kind = found.failure.kind().replace(' ', "_");
    let names = (1..).map(|number| format!("{kind}_{stage}_{number}"));
    names.into_iter().find(|name| !folder().join(format!("{name}.kir")).exists()).unwrap_or_default()
}
