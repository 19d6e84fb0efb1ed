//! Compiled calls checked against eager ones while a program runs: `Compile::verify`, `KILN_VERIFY` and `KILN_REPRO`.
//!
//! A segment that is to be checked is saved as a [`Case`] before it runs, with copies of what it begins with. Then it runs
//! as always, and the case is played eagerly: the values that outlive the segment, the inputs that it changes and the
//! gradients must be eager's, as exactly as rounding allows. If they aren't, the case is made smaller, its stage is
//! found, and the error names both and the file.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kiln_aot::Recording;
use kiln_ir::{Error, Result};
use kiln_repro::{Case, Judge, Outcome, Seen, Verdict};
use kiln_runtime::warn;
use kiln_tensor::Tensor;

use crate::analysis;
use crate::bisect::{self, Failure, Found};
use crate::compiling;
use crate::options::Compile;
use crate::region::Site;
use crate::segment::Segment;
use crate::state::{Held, State};

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
}

impl Checks {
    /// As asked for; `None`: nothing is checked.
    pub(crate) fn of(options: &Compile) -> Option<Box<Checks>> {
        let every = options.verify.asked().0;
        let crash = repro() == Some(Repro::Crash);
        (every > 0 || crash).then(|| Box::new(Checks { every, crash, calls: AtomicUsize::new(0) }))
    }
}

/// Runs a segment of a region whose calls are checked.
pub(crate) fn run(checks: &Checks, site: &Site, segment: &Segment, state: &mut State) -> Result<()> {
    let number = checks.calls.fetch_add(1, Ordering::Relaxed);
    let verify = checks.every > 0 && number.is_multiple_of(checks.every);
    if !verify && !checks.crash {
        return segment.run(site, state);
    }
    let case = case_of(site, state)?;
    if checks.crash
        && let Some(failure) =
            bisect::reproduce_apart(&case)?.filter(|failure| !matches!(failure, Failure::Wrong(_)))
    {
        tell(&investigated(&case, &failure)?);
        return crate::interpret::run(site, state);
    }
    if !verify {
        return segment.run(site, state);
    }
    // Playing draws no random numbers: they were drawn when the ops were recorded.
    let judge = Judge::new(&case)?;
    segment.run(site, state)?;
    let mut verdict = judge.verdict_of_values(&outcome(&case, state)?);
    if verdict == Verdict::Right && judge.eager.seen.iter().any(|(seen, _)| matches!(seen, Seen::Gradient(_)))
    {
        // Gradients that flow later are those of the same program with a pass at its end.
        verdict = match bisect::reproduce(&case)? {
            Some(Failure::Wrong(what)) => Verdict::Wrong { seen: Seen::Live(0, 0), what },
            _ => Verdict::Right,
        };
    }
    let Verdict::Wrong { seen, what } = verdict else { return Ok(()) };
    let told = investigated(&case, &Failure::Wrong(format!("{seen}: {what}")))?;
    if repro().is_some() {
        tell(&told);
    }
    Err(Error::Bug { what: told.lines.join("; "), at: told.found.loc })
}

/// What a segment is about to do, and with what.
fn case_of(site: &Site, state: &State) -> Result<Case> {
    let trace = analysis::trace(state.trie(site), state.at);
    let recording = Recording { trace, live: compiling::variables(&state.live) };
    let mut case = Case::of(recording, |variable| state.input(variable), state.numbers.to_vec())?;
    case.options = site.options.text();
    Ok(case)
}

/// What can be seen of a segment that has run.
fn outcome(case: &Case, state: &State) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let dense = |tensor: &Tensor| tensor.detach()?.deep_clone()?.contiguous();
    for &variable in &case.recording.live {
        let items = match state.variables.get(variable as usize) {
            Some(Held::List(list)) => list.items()?.to_vec(),
            _ => state.held(variable).into_iter().cloned().collect(),
        };
        for (item, tensor) in items.iter().enumerate() {
            outcome.seen.push((Seen::Live(variable, item), Some(dense(tensor)?)));
        }
    }
    for (variable, _) in case.recording.inputs() {
        let input = state.input(variable).map(dense).transpose()?;
        outcome.seen.push((Seen::Input(variable), input));
    }
    Ok(outcome)
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
