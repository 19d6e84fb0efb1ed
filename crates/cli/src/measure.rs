//! Measuring one case: results, memory, time against eager and floor, first calls.

use std::cell::RefCell;

use kiln::benchmark::{Measurement, compare};
use kiln::prelude::*;
use kiln::{Counters, Error, Explanation, NotCompiled, Result, counters};
use kiln_runtime::{kept, pool};
use serde::Serialize;

use crate::cases::{Case, Workload};
use crate::failure::Failure;
use crate::first_call::{self, FirstCalls};
use crate::memory::{self, Resident};
use crate::progress::Progress;
use crate::{How, floor, output};

/// Relative to a tensor's largest magnitude, what compiled results may differ from eager's.
pub const TOLERANCE: f64 = 1e-5;
/// Peak memory and accuracy are looked at after this many equal steps.
pub const EQUAL_STEPS: usize = 3;

/// Everything known about a case.
pub struct Figures {
    pub case: Case,
    /// Eager, timed.
    pub eager: Measurement,
    /// Compiled, timed in the same rounds.
    pub compiled: Measurement,
    /// The hand-written loop, timed in the same rounds.
    pub floor: Option<Measurement>,
    /// First calls.
    pub first: FirstCalls,
    /// Kernels in all graphs.
    pub kernels: usize,
    /// Number of graphs.
    pub graphs: usize,
    /// Bytes the kernels read and write in a call.
    pub bytes_moved: u64,
    /// Memory that an eager step needs, above what was in use before it.
    pub peak_eager: usize,
    /// Memory that a compiled step needs, measured in the same way; arenas that programs keep between calls count.
    pub peak_compiled: usize,
    /// Bytes of constants in another form that compiled programs keep beside their inputs.
    pub kept: usize,
    /// What the system counts of it, where that is measured.
    pub resident: Option<Resident>,
    /// Compiled against eager after equal steps.
    pub difference: Difference,
    /// Both against f64.
    pub accuracy: Accuracy,
    /// What of it was not compiled, and why.
    pub notes: Vec<String>,
    /// Why kernels ran eagerly that should have been compiled.
    pub refusal: Option<String>,
}

/// Figures as one line of JSON.
#[derive(Serialize)]
pub struct Line<'a> {
    case: String,
    device: &'a str,
    mode: String,
    eager_us: f64,
    compiled_us: f64,
    first_call_s: f64,
    warm_first_call_s: f64,
    floor_us: Option<f64>,
    kernels: usize,
    peak_bytes_eager: usize,
    peak_bytes_compiled: usize,
    kept_bytes: usize,
    rss_bytes_eager: Option<u64>,
    rss_bytes_compiled: Option<u64>,
    max_rel_err: f64,
    f64_err_eager: f64,
    f64_err_compiled: f64,
}

impl Figures {
    /// For `--json`.
    pub fn line<'a>(&self, how: &How, device: &'a str) -> Line<'a> {
        let us = |measured: &Measurement| measured.median() * 1e6;
        Line {
            case: self.case.to_string(),
            device,
            mode: how.mode.to_string(),
            eager_us: us(&self.eager),
            compiled_us: us(&self.compiled),
            first_call_s: self.first.cold,
            warm_first_call_s: self.first.warm,
            floor_us: self.floor.as_ref().map(us),
            kernels: self.kernels,
            peak_bytes_eager: self.peak_eager,
            peak_bytes_compiled: self.peak_compiled,
            kept_bytes: self.kept,
            rss_bytes_eager: self.resident.map(|resident| resident.eager),
            rss_bytes_compiled: self.resident.map(|resident| resident.compiled),
            max_rel_err: self.difference.relative,
            f64_err_eager: self.accuracy.eager,
            f64_err_compiled: self.accuracy.compiled,
        }
    }

    /// Fails if compiled results are less exact than they may be, or were not compiled.
    pub fn check(&self) -> Result<(), Failure> {
        self.accuracy.check(&self.case.to_string())?;
        match &self.refusal {
            Some(reason) => Err(Failure::Refused { what: self.case.to_string(), reason: reason.clone() }),
            None => Ok(()),
        }
    }
}

/// Measures a case from all sides.
pub fn measure(case: Case, how: &How, progress: &Progress) -> Result<Figures, Failure> {
    let device = how.device.find()?;
    let says = |what: &str| progress.says(&format!("{case}: {what}"));

    says("eager steps");
    let eager = Stand::new(case, &device)?;
    let (expected, peak_eager) = eager.run_equal_steps(case.equal_steps(), |workload| workload.step())?;

    says("compiling");
    let before = counters();
    let compiled = Stand::new(case, &device)?;
    let region = how.compile()?.region();
    let (found, peak_compiled) =
        compiled.run_equal_steps(case.equal_steps(), |workload| region.run(|| workload.step()))?;
    let difference = Difference::between(&expected, &found);

    says("the same steps in f64");
    let exact = Stand::new(case, &device)?;
    exact.workload.widen()?;
    let (exact, _) = exact.run_equal_steps(case.equal_steps(), |workload| workload.step())?;
    let accuracy = Accuracy::of(&expected, &found, &exact);
    drop((expected, found, exact));

    says("first calls in new processes");
    let first = first_call::measure(case, how)?;

    says("resident memory in new processes");
    let resident = memory::measure(case, how)?;

    says("timing");
    let failed: RefCell<Option<Error>> = RefCell::new(None);
    let note = |result: Result<Option<Tensor>>| {
        if let Err(error) = result {
            failed.borrow_mut().get_or_insert(error);
        }
    };
    let mut run_eager = || note(eager.workload.step());
    let mut run_compiled = || note(region.run(|| compiled.workload.step()));
    let mut floor = floor::of(case)?;
    let mut contestants: Vec<(&str, &mut dyn FnMut())> =
        vec![("eager", &mut run_eager), ("compiled", &mut run_compiled)];
    if let Some(floor) = &mut floor {
        contestants.push(("floor", floor));
    }
    let mut measured = progress.quietly(|| compare(&mut contestants, how.rounds())).into_iter();
    let (Some(eager), Some(compiled)) = (measured.next(), measured.next()) else {
        unreachable!("one measurement for each contestant")
    };
    let floor = measured.next();
    if let Some(error) = failed.take() {
        return Err(error.into());
    }

    let (explanation, kept) = (region.explain(), kept::bytes());
    let mut notes = notes(&explanation);
    let refusal = refusal(&explanation, counters() - before);
    if kept > 0 {
        notes.push(format!("keeps {} of packed weights", output::bytes(kept as f64)));
    }
    Ok(Figures {
        case,
        eager,
        compiled,
        floor,
        first,
        kernels: explanation.graphs.iter().map(|graph| graph.kernels).sum(),
        graphs: explanation.graphs.len(),
        bytes_moved: explanation
            .graphs
            .iter()
            .map(|graph| graph.bytes_read as u64 + graph.bytes_written as u64)
            .sum(),
        peak_eager,
        peak_compiled,
        kept,
        resident,
        difference,
        accuracy,
        notes,
        refusal,
    })
}

/// What the C compiler says of kernels that it failed on, if there are any; `counted` is of the same program.
pub fn refusal(explanation: &Explanation, counted: Counters) -> Option<String> {
    let whole = explanation.graphs.iter().find_map(|graph| match &graph.interpreted {
        Some(NotCompiled::Compiler(reason)) => Some(reason.as_str()),
        _ => None,
    });
    let first_line = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    whole.map(first_line).or_else(|| {
        let parts = explanation.graphs.iter().flat_map(|graph| &graph.fallbacks);
        let list: Vec<&str> = parts.map(String::as_str).collect();
        (counted.refused > 0).then(|| format!("{} of them: {}", counted.refused, list.join("; ")))
    })
}

/// Whatever keeps a case from being one compiled graph, in words.
fn notes(explanation: &Explanation) -> Vec<String> {
    let interpreted = explanation.graphs.iter().filter_map(|graph| graph.interpreted.as_ref());
    let eager = explanation.graphs.iter().flat_map(|graph| &graph.fallbacks);
    let breaks = explanation.breaks.iter().map(|at| format!("break at {}: {}", at.loc, at.reason));
    let fallbacks =
        explanation.fallbacks.iter().map(|at| format!("fell back to eager at {}: {}", at.loc, at.reason));
    let all = interpreted
        .map(|reason| format!("runs op by op: {reason}"))
        .chain(eager.map(|op| format!("runs eagerly inside: {op}")))
        .chain(breaks)
        .chain(fallbacks)
        .chain(explanation.recompiles.iter().map(ToString::to_string));
    // Each once, with how often it holds.
    let mut counted: Vec<(String, usize)> = Vec::new();
    for note in all {
        match counted.iter_mut().find(|(known, _)| *known == note) {
            Some((_, times)) => *times += 1,
            None => counted.push((note, 1)),
        }
    }
    let times =
        |(note, times): (String, usize)| if times > 1 { format!("{note} ({times} times)") } else { note };
    counted.into_iter().map(times).collect()
}

/// A workload with its state.
pub struct Stand {
    workload: Workload,
}

/// The tensors a run leaves behind, on the host.
type Results = Vec<Vec<f64>>;

impl Stand {
    /// Builds the case.
    pub fn new(case: Case, device: &Device) -> Result<Stand> {
        Ok(Stand { workload: case.build(device)? })
    }

    /// A few steps: what they leave behind, and the most memory that the storage pool handed out at once during
    /// the last one, above what was in use before it.
    pub fn run_equal_steps(
        &self,
        steps: usize,
        step: impl Fn(&Workload) -> Result<Option<Tensor>>,
    ) -> Result<(Results, usize)> {
        let (mut last, mut before) = (None, 0);
        for _ in 0..steps {
            drop(last.take());
            pool::reset_peak();
            let stats = pool::stats();
            // What a program keeps for its next call is there for this call alone.
            before = stats.live_bytes - stats.reserved_bytes.min(stats.live_bytes);
            last = step(&self.workload)?;
        }
        let peak = pool::stats().peak_live_bytes.saturating_sub(before);
        Ok((self.workload.results(last)?, peak))
    }
}

/// How far compiled results are from eager's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// The largest difference of two elements.
    pub absolute: f64,
    /// The largest over all tensors of: largest difference over largest magnitude.
    pub relative: f64,
}

impl Difference {
    /// Between eager's tensors and the same ones compiled.
    pub fn between(eager: &[Vec<f64>], compiled: &[Vec<f64>]) -> Difference {
        let mut worst = Difference { absolute: 0.0, relative: 0.0 };
        if eager.len() != compiled.len() {
            return Difference { absolute: f64::INFINITY, relative: f64::INFINITY };
        }
        for (a, b) in eager.iter().zip(compiled) {
            let one = Difference::of_tensors(a, b);
            worst.absolute = worst.absolute.max(one.absolute);
            worst.relative = worst.relative.max(one.relative);
        }
        worst
    }

    fn of_tensors(eager: &[f64], compiled: &[f64]) -> Difference {
        if eager.len() != compiled.len() {
            return Difference { absolute: f64::INFINITY, relative: f64::INFINITY };
        }
        let (mut absolute, mut magnitude) = (0.0f64, 0.0f64);
        for (&a, &b) in eager.iter().zip(compiled) {
            if a == b || (a.is_nan() && b.is_nan()) {
                magnitude = if a.is_finite() { magnitude.max(a.abs()) } else { magnitude };
                continue;
            }
            let difference = (a - b).abs();
            absolute = absolute.max(if difference.is_finite() { difference } else { f64::INFINITY });
            magnitude = if a.is_finite() { magnitude.max(a.abs()) } else { magnitude };
        }
        let relative = if absolute == 0.0 { 0.0 } else { absolute / magnitude.max(f64::MIN_POSITIVE) };
        Difference { absolute, relative }
    }

    /// Fails beyond the tolerance.
    pub fn check(&self, what: &str, allowed: f64) -> Result<(), Failure> {
        if self.relative <= allowed {
            Ok(())
        } else {
            Err(Failure::Differs { what: what.into(), relative: self.relative, allowed })
        }
    }
}

/// How far eager and compiled results are from those of the same steps in f64: the root of the mean square of all
/// differences over that of all results. One element alone says little after a training step: where a gradient is
/// nearly zero, rounding decides about a ReLU, or about the sign that Adam makes of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    pub eager: f64,
    pub compiled: f64,
}

impl Accuracy {
    /// Of the same tensors, run three ways.
    pub fn of(eager: &[Vec<f64>], compiled: &[Vec<f64>], exact: &[Vec<f64>]) -> Accuracy {
        let error = |results: &[Vec<f64>]| {
            let (mut squares, mut size) = (0.0, 0.0);
            for (x, exact) in results.iter().flatten().zip(exact.iter().flatten()) {
                let same = x == exact || (x.is_nan() && exact.is_nan());
                squares += if same { 0.0 } else { (x - exact).powi(2) };
                size += if exact.is_finite() { exact.powi(2) } else { 0.0 };
            }
            if squares == 0.0 { 0.0 } else { (squares / size.max(f64::MIN_POSITIVE)).sqrt() }
        };
        Accuracy { eager: error(eager), compiled: error(compiled) }
    }

    /// Fails where compiled results are off by more than twice as much as eager's.
    pub fn check(&self, what: &str) -> Result<(), Failure> {
        if self.compiled <= 2.0 * self.eager + 1e-6 {
            return Ok(());
        }
        Err(Failure::Inexact { what: what.into(), compiled: self.compiled, eager: self.eager })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(eager: &[f64], compiled: &[f64], absolute: f64, relative: f64) {
        let found = Difference::between(&[eager.to_vec()], &[compiled.to_vec()]);
        assert_eq!(found, Difference { absolute, relative });
    }

    #[test]
    fn differences() {
        check(&[1.0, -4.0], &[1.0, -4.0], 0.0, 0.0);
        check(&[1.0, -4.0], &[1.5, -4.0], 0.5, 0.125);
        check(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY], 0.0, 0.0);
        check(&[1.0], &[f64::NAN], f64::INFINITY, f64::INFINITY);
        check(&[1.0], &[1.0, 2.0], f64::INFINITY, f64::INFINITY);
    }

    #[test]
    fn compiled_results_may_be_twice_as_inexact() {
        let run = |eager: f64, compiled: f64| {
            Accuracy::of(&[vec![1.0, eager]], &[vec![1.0, compiled]], &[vec![1.0, 1.0]]).check("x").is_ok()
        };
        assert!(run(1.01, 1.015) && run(1.0, 1.0) && run(1.0, 1.000_000_5));
        assert!(!run(1.01, 1.03) && !run(1.0, 1.001) && !run(1.0, f64::NAN));
    }

    #[test]
    fn beyond_the_tolerance_is_a_failure() {
        assert!(Difference { absolute: 1.0, relative: 1e-6 }.check("x", TOLERANCE).is_ok());
        assert!(Difference { absolute: 0.0, relative: f64::INFINITY }.check("x", TOLERANCE).is_err());
        assert!(Difference { absolute: 0.0, relative: f64::NAN }.check("x", TOLERANCE).is_err());
    }
}
