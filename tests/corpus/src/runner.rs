//! A program run both ways, and what was seen.

use std::sync::{Mutex, PoisonError};

use kiln::{Backend, Break, Explanation, manual_seed};

use crate::{Program, Step};

/// Both runs of a program begin with this seed, unless told otherwise.
pub const SEED: u64 = 20;

/// Held while a program runs: the random stream is one for the whole process.
static STREAM: Mutex<()> = Mutex::new(());

/// What was seen of a program.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its name.
    pub name: &'static str,
    /// The file it is in, without the ending.
    pub theme: &'static str,
    /// Why the compiled run is wrong, if it is.
    pub wrong: Option<String>,
    /// How many numbers were compared.
    pub numbers: usize,
    /// Calls of its compiled steps.
    pub calls: usize,
    /// Graphs captured.
    pub graphs: usize,
    /// Lines at which a graph ends before the step does.
    pub breaks: Vec<Break>,
    /// Lines at which a call went on eagerly.
    pub fallbacks: Vec<Break>,
    /// Why graphs run op by op, where they do.
    pub interpreted: Vec<String>,
    /// Why the program was captured another time.
    pub recompiles: Vec<String>,
    /// What `explain()` says of its steps.
    pub explanations: Vec<Explanation>,
}

impl Report {
    /// Whether the compiled program gives what the eager one gives.
    pub fn is_right(&self) -> bool {
        self.wrong.is_none()
    }

    /// Whether every call of its steps was one compiled graph.
    pub fn is_whole(&self) -> bool {
        self.graphs > 0 && self.breaks.is_empty() && self.fallbacks.is_empty() && self.interpreted.is_empty()
    }
}

/// Counts over all programs.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Programs.
    pub programs: usize,
    /// Those with the right results.
    pub right: usize,
    /// Those captured as one graph a call.
    pub whole: usize,
    /// Graphs.
    pub graphs: usize,
    /// Breaks.
    pub breaks: usize,
    /// Recompilations.
    pub recompiles: usize,
}

/// Runs a program eagerly, then compiled for `backend`.
pub fn run(program: &Program, backend: Backend) -> Report {
    run_from(program, backend, SEED)
}

/// The same from another seed.
pub fn run_from(program: &Program, backend: Backend, seed: u64) -> Report {
    let _alone = STREAM.lock().unwrap_or_else(PoisonError::into_inner);
    manual_seed(seed);
    let eager = (program.body)(&Step::eager());
    let step = Step::compiled(program.name, backend);
    manual_seed(seed);
    let compiled = (program.body)(&step);
    let (wrong, numbers) = match (&eager, &compiled) {
        (Ok(eager), _) if eager.is_empty() => (Some("the program gives nothing back".into()), 0),
        (Ok(eager), Ok(compiled)) => (eager.difference(compiled).map(|d| d.to_string()), eager.len()),
        (Ok(eager), Err(error)) => (Some(format!("the compiled program fails: {error}")), eager.len()),
        (Err(error), _) => (Some(format!("the program fails: {error}")), 0),
    };
    let explanations = step.explain();
    Report {
        name: program.name,
        theme: program.theme,
        wrong,
        numbers,
        calls: explanations.iter().map(|e| e.calls).sum(),
        graphs: explanations.iter().map(|e| e.graphs.len()).sum(),
        breaks: explanations.iter().flat_map(|e| e.breaks.clone()).collect(),
        fallbacks: explanations.iter().flat_map(|e| e.fallbacks.clone()).collect(),
        interpreted: explanations
            .iter()
            .flat_map(|e| &e.graphs)
            .filter_map(|g| g.interpreted.as_ref().map(|why| why.to_string()))
            .collect(),
        recompiles: explanations.iter().flat_map(|e| &e.recompiles).map(ToString::to_string).collect(),
        explanations,
    }
}

/// The sums of reports.
pub fn totals<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Totals {
    reports.into_iter().fold(Totals::default(), |sum, report| Totals {
        programs: sum.programs + 1,
        right: sum.right + usize::from(report.is_right()),
        whole: sum.whole + usize::from(report.is_whole()),
        graphs: sum.graphs + report.graphs,
        breaks: sum.breaks + report.breaks.len(),
        recompiles: sum.recompiles + report.recompiles.len(),
    })
}
