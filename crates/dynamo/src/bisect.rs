//! Which stage is wrong: a case is compiled up to every [stage](Rung), the rest run by its definition, and the first
//! stage whose outcome is not eager's is where the mistake is. Then the case is made smaller while that stage is still
//! wrong in the same way.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kiln_aot::trace::Event;
use kiln_ir::{Line, Loc, Op, Result};
use kiln_repro::{Arithmetic, Case, Judge, Live, Outcome, Progress, Verdict, minify, play};
use kiln_runtime::isolate::{Fate, Limits, isolate};
use kiln_runtime::threads;

use crate::backend::Backend;
use crate::explain::Explanation;
use crate::options::{Compile, Mode};
use crate::region::Region;
use crate::rung::Rung;
use crate::why::NotCompiled;

/// How a compiled program fails where eager does not.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Failure {
    /// A value that is not eager's: where it shows first, and how it differs.
    Wrong(String),
    /// An error that eager does not give.
    Error(String),
    /// A panic.
    Panic(String),
    /// Kernels that the C compiler refuses.
    Compiler(String),
    /// It runs op by op, because a pass failed.
    Pass(String),
    /// The graph ends in the middle.
    Break(String),
    /// The process was ended by a signal.
    Killed(String),
    /// It does not end.
    Hang,
    /// It takes more memory than it may.
    Memory,
}

impl Failure {
    /// What kind it is: what stays the same while a case is made smaller.
    pub fn kind(&self) -> &'static str {
        match self {
            Failure::Wrong(_) => "wrong result",
            Failure::Error(_) => "error",
            Failure::Panic(_) => "panic",
            Failure::Compiler(_) => "compiler error",
            Failure::Pass(_) => "failed pass",
            Failure::Break(_) => "graph break",
            Failure::Killed(_) => "crash",
            Failure::Hang => "hang",
            Failure::Memory => "out of memory",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text().lines().next() {
            Some(text) => write!(f, "{}: {text}", self.kind()),
            None => f.write_str(self.kind()),
        }
    }
}

/// Where a mistake is.
#[derive(Clone, Debug)]
pub struct Found {
    /// How it shows.
    pub failure: Failure,
    /// The first stage that is wrong, if one is.
    pub stage: Option<Rung>,
    /// What in it: the rewrite rule, the kernels, the library call.
    pub detail: Option<String>,
    /// The user's line of the last op of the case, if it has one.
    pub loc: Loc,
    /// The first stage whose outcome is wrong: mostly the same.
    shows: Rung,
    /// The whole compilation that fails.
    whole: Rung,
}

impl Found {
    /// A failure that does not show again.
    pub(crate) fn only(failure: Failure) -> Found {
        Found {
            failure,
            stage: None,
            detail: None,
            loc: Loc::UNKNOWN,
            shows: Rung::Threads,
            whole: Rung::Threads,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.failure)?;
        match self.stage {
            Some(stage) => write!(f, "stage {stage}")?,
            None => write!(f, "no stage: the same ops don't fail again")?,
        }
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        if self.loc.is_known() { write!(f, ", at {}", self.loc) } else { Ok(()) }
    }
}

/// The stages that a mistake shows from, in order: each does what those before it do.
const LADDER: [Rung; 18] = [
    Rung::Capture,
    Rung::Functionalise,
    Rung::Joint,
    Rung::Partition,
    Rung::Decompose,
    Rung::Simplify,
    Rung::Accumulate,
    Rung::Join,
    Rung::Rewrite,
    Rung::Lower,
    Rung::Fuse,
    Rung::Schedule,
    Rung::Memory,
    Rung::C,
    Rung::Threads,
    Rung::Replay,
    Rung::Codec,
    Rung::General,
];

/// Runs a case as it was compiled: how it fails, if it does.
pub fn reproduce(case: &Case) -> Result<Option<Failure>> {
    Ok(highest(case, &Judge::new(case)?, Where::Here)?.map(|(_, failure)| failure))
}

/// The same in a process of its own, which it can't take down.
pub fn reproduce_apart(case: &Case) -> Result<Option<Failure>> {
    Ok(highest(case, &Judge::new(case)?, Where::Apart(CHILD.time))?.map(|(_, failure)| failure))
}

/// Where a case is run.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Where {
    Here,
    /// In a child process, for at most so long.
    Apart(Duration),
}

impl Where {
    /// Where a failure of this kind is looked for: what may end the process has its own.
    fn of(failure: &Failure) -> Where {
        match failure {
            Failure::Killed(_) => Where::Apart(CHILD.time),
            Failure::Hang => Where::Apart(PATIENCE),
            _ => Where::Here,
        }
    }
}

/// Whole compilations: from all stages but those that need several calls, to those.
const WHOLE: [Rung; 4] = [Rung::Threads, Rung::Replay, Rung::Codec, Rung::General];

/// The first whole compilation that fails, and how.
fn highest(case: &Case, judge: &Judge<'_>, place: Where) -> Result<Option<(Rung, Failure)>> {
    for rung in WHOLE {
        if let Some(failure) = attempt_at(place, case, judge, &Options::of(case, rung)?) {
            return Ok(Some((rung, failure)));
        }
    }
    Ok(None)
}

/// What a child process may take: more is a failure of its own.
const CHILD: Limits = Limits { time: Duration::from_secs(5), memory: Some(2 << 30), prints: false };
/// How long a program runs before it is taken to be one of those that don't end, once one is known to be.
const PATIENCE: Duration = Duration::from_millis(700);

/// [`attempt`], here or in a child process.
fn attempt_at(place: Where, case: &Case, judge: &Judge<'_>, options: &Options) -> Option<Failure> {
    let Where::Apart(time) = place else { return attempt(case, judge, options) };
    // Kernels are compiled here: the child has them, and its time is that of running.
    if options.compile.rung.is_none() {
        let compile = Compile { only_built: true, ..options.compile.clone() };
        let _ = attempt(case, judge, &Options { compile, ..*options });
    }
    let body = || attempt(case, judge, options).map(|failure| failure.to_bytes()).unwrap_or_default();
    match isolate(&Limits { time, ..CHILD }, body) {
        Ok(Fate::Returned(bytes)) => Failure::from_bytes(&bytes),
        Ok(Fate::Panicked(text)) => Some(Failure::Panic(text)),
        Ok(Fate::TimedOut) => Some(Failure::Hang),
        Ok(Fate::OutOfMemory) => Some(Failure::Memory),
        Ok(fate @ (Fate::Killed(_) | Fate::Exited(_))) => Some(Failure::Killed(fate.to_string())),
        Err(error) => Some(Failure::Error(format!("no child process: {error}"))),
    }
}

impl Failure {
    /// What is told of it.
    fn text(&self) -> &str {
        match self {
            Failure::Wrong(text)
            | Failure::Error(text)
            | Failure::Panic(text)
            | Failure::Compiler(text)
            | Failure::Pass(text)
            | Failure::Break(text)
            | Failure::Killed(text) => text,
            Failure::Hang | Failure::Memory => "",
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        format!("{}\n{}", self.kind(), self.text()).into_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Failure> {
        let text = String::from_utf8_lossy(bytes);
        let (kind, text) = text.split_once('\n')?;
        let makers: [fn(String) -> Failure; 7] = [
            Failure::Wrong,
            Failure::Error,
            Failure::Panic,
            Failure::Compiler,
            Failure::Pass,
            Failure::Break,
            Failure::Killed,
        ];
        let told = makers.into_iter().map(|make| make(text.to_string()));
        told.chain([Failure::Hang, Failure::Memory]).find(|failure| failure.kind() == kind)
    }
}

/// Which stage is wrong, of a case that fails; `None` if it does not.
pub fn bisect(case: &Case) -> Result<Option<Found>> {
    let judge = Judge::new(case)?;
    // What may end the process is found out in another one.
    let Some((rung, failure)) = highest(case, &judge, Where::Apart(CHILD.time))? else { return Ok(None) };
    let place = Where::of(&failure);
    let top = LADDER.iter().position(|other| *other == rung).unwrap_or_default();
    let fails = |at: usize| -> Result<Option<Failure>> {
        let found = attempt_at(place, case, &judge, &Options::of(case, LADDER[at])?);
        Ok(found.filter(|found| found.kind() == failure.kind()))
    };
    // All stages below `right` are right, `wrong` is not.
    let (mut right, mut wrong, mut failure) = (0, top, failure.clone());
    while right < wrong {
        let middle = (right + wrong) / 2;
        match fails(middle)? {
            Some(found) => (wrong, failure) = (middle, found),
            None => right = middle + 1,
        }
    }
    let mut stage = LADDER[wrong];
    let mut shows = stage;
    // What was recorded for other calls may have been wrong from the beginning; so may what the first pass was given.
    let other = match stage {
        Rung::Replay => attempt_at(place, case, &judge, &Options::of(case, Rung::Capture)?).is_some(),
        Rung::Functionalise => !is_recorded(case),
        _ => false,
    };
    if other {
        stage = Rung::Capture;
        shows = if shows == Rung::Replay { Rung::Capture } else { shows };
    }
    if stage == Rung::C && attempt_at(place, case, &judge, &Options::of(case, Rung::Call)?).is_some() {
        (stage, shows) = (Rung::Call, Rung::Call);
    }
    let detail = if place == Where::Here { detail(case, &judge, stage)? } else { None };
    let loc = case.recording.trace.events.last().map_or(Loc::UNKNOWN, Event::loc);
    Ok(Some(Found { failure, stage: Some(stage), detail, loc, shows, whole: rung }))
}

/// Makes a case that fails smaller, and finds its stage: at most so long. `tell` hears how it goes.
pub fn investigate(
    case: &Case,
    limit: Duration,
    tell: &mut dyn FnMut(Progress),
) -> Result<Option<(Case, Found)>> {
    let Some(found) = bisect(case)? else { return Ok(None) };
    let (place, kind) = (Where::of(&found.failure), found.failure.kind());
    // Waiting once is enough.
    let whole = if found.failure == Failure::Hang { found.shows } else { found.whole };
    let stage = found.shows;
    let mut fails = |case: &Case| -> bool {
        let judged = || -> Result<bool> {
            let judge = Judge::new(case)?;
            let fails = |rung: Rung| -> Result<bool> {
                let found = attempt_at(place, case, &judge, &Options::of(case, rung)?);
                Ok(found.is_some_and(|found| found.kind() == kind))
            };
            // The stage is mostly the quicker one to try.
            Ok(fails(stage)? && (stage == whole || fails(whole)?))
        };
        judged().unwrap_or(false)
    };
    let mut small = minify(case, limit, &mut fails, tell)?;
    let found = bisect(&small)?.unwrap_or(found);
    small.notes = found.to_string().lines().map(str::to_string).collect();
    Ok(Some((small, found)))
}

/// How a case is compiled up to a stage.
struct Options {
    rung: Rung,
    compile: Compile,
}

impl Options {
    fn of(case: &Case, rung: Rung) -> Result<Options> {
        let mut compile: Compile =
            if case.options.is_empty() { Compile::new() } else { case.options.parse()? };
        compile.settings.graph_cache = rung == Rung::Codec;
        compile.dynamic = Some(rung == Rung::General);
        (compile.fullgraph, compile.disable) = (false, false);
        match rung {
            Rung::Capture => compile.backend = Backend::Eager.into(),
            Rung::Functionalise | Rung::Joint | Rung::Partition => {
                compile.backend = Backend::AotEager.into();
                compile.rung = Some(rung);
            }
            Rung::C | Rung::Threads | Rung::Replay | Rung::Codec | Rung::General => {}
            _ => compile.rung = Some(rung),
        }
        if compile.mode == Mode::Evaluation {
            compile.mode = Mode::Default;
        }
        Ok(Options { rung, compile })
    }
}

/// Runs a case up to a stage: how that fails.
fn attempt(case: &Case, judge: &Judge<'_>, options: &Options) -> Option<Failure> {
    let region = options.compile.clone().region();
    let before = threads::count();
    let single = options.rung != Rung::Threads;
    if single {
        threads::set_count(1);
    }
    let run = || -> Result<Outcome> {
        match options.rung {
            Rung::Codec => {
                drop(played(case, &options.compile.clone().region())?);
            }
            Rung::Capture | Rung::Replay => {
                for other in kiln_repro::other_calls(case) {
                    let _ = played(&other, &region);
                }
            }
            Rung::General => {
                for other in kiln_repro::other_sizes(case) {
                    // Other sizes may be no program at all.
                    let _ = played(&other, &region);
                }
            }
            _ => {}
        }
        played(case, &region)
    };
    let outcome = catch_unwind(AssertUnwindSafe(run));
    if single {
        threads::set_count(before);
    }
    match outcome {
        Err(panic) => Some(Failure::Panic(said(&*panic))),
        Ok(Err(error)) => Some(Failure::Error(error.to_string())),
        Ok(Ok(outcome)) => {
            let verdict = if options.rung == Rung::Functionalise {
                judge.verdict_of_values(&outcome)
            } else {
                judge.verdict(&outcome)
            };
            match verdict {
                Verdict::Wrong { seen, what } => Some(Failure::Wrong(format!("{seen}: {what}"))),
                Verdict::Right => other_failure(case, &region.explain(), options.rung),
            }
        }
    }
}

fn played(case: &Case, region: &Region) -> Result<Outcome> {
    play(case, Arithmetic::Own, &|run: &dyn Fn() -> Result<Live>| region.run(run))
}

/// What else is not as it should be, where results are right.
fn other_failure(case: &Case, explanation: &Explanation, rung: Rung) -> Option<Failure> {
    let told = |line: &Line, reason: &dyn fmt::Display| Failure::Break(format!("{reason}, at {line}"));
    // Where the program itself looks at a value, a graph has to end.
    let reads =
        case.recording.trace.events.iter().filter(|event| matches!(event, Event::Read { .. })).count();
    if let Some(at) = explanation.breaks.get(reads) {
        return Some(told(&at.loc, &at.reason));
    }
    if rung == Rung::Capture {
        return None;
    }
    // No program needs much more than all of its values at once.
    let most = 4 * case.bytes() + (4 << 20);
    if explanation.graphs.iter().any(|graph| graph.arena_bytes > most) {
        return Some(Failure::Memory);
    }
    explanation.graphs.iter().find_map(|graph| match &graph.interpreted {
        Some(NotCompiled::Compiler(error)) => Some(Failure::Compiler(error.clone())),
        Some(NotCompiled::Pass { name, error }) => Some(Failure::Pass(format!("{name}: {error}"))),
        _ if rung == Rung::Call => None,
        _ => graph.refused.first().cloned().map(Failure::Compiler),
    })
}

/// Whether what is recorded of a case is the case.
fn is_recorded(case: &Case) -> bool {
    let region = Compile::new().backend(Backend::Eager).region();
    if played(case, &region).is_err() {
        return true;
    }
    let names = |events: &[Event]| -> Vec<&'static str> {
        let name = |event: &Event| match event {
            Event::Call { op: Op::List {} | Op::ListGet { .. }, .. } => None,
            Event::Call { op, .. } => Some(op.name()),
            _ => None,
        };
        events.iter().filter_map(name).collect()
    };
    let events = &case.recording.trace.events;
    let breaks = events.iter().any(|event| matches!(event, Event::Read { .. }));
    breaks || names(events) == names(&region.last_trace().events)
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_string()
}

/// What in a stage is wrong.
fn detail(case: &Case, judge: &Judge<'_>, stage: Rung) -> Result<Option<String>> {
    let mut options = Options::of(case, stage)?;
    match stage {
        Rung::Simplify => {
            for rule in kiln_prims::rules::ALL.iter().flat_map(|theme| theme.iter()) {
                options.compile.without_rule = rule.name;
                if attempt(case, judge, &options).is_none() {
                    return Ok(Some(format!("rule {} ({})", rule.name, rule.law)));
                }
            }
            Ok(None)
        }
        Rung::C | Rung::Threads | Rung::Call => {
            let region = options.compile.clone().region();
            let run = || play(case, Arithmetic::Own, &|run: &dyn Fn() -> Result<Live>| region.run(run));
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                return Ok(None);
            }
            let explanation = region.explain();
            let steps = explanation.graphs.iter().flat_map(|graph| &graph.steps);
            let mut names: Vec<String> =
                steps.map(|step| format!("{} ({})", step.name, step.ops.join(", "))).collect();
            names.dedup();
            names.truncate(4);
            Ok((!names.is_empty()).then(|| names.join("; ")))
        }
        _ => Ok(None),
    }
}
