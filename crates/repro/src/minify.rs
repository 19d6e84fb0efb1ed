//! Delta debugging: the smallest case that still fails in the same way.
//!
//! Events go first, by halves, then by smaller and smaller parts: what is left finds the values that the others would
//! have given it on the [trail](crate::trail). Then results, sizes, dtypes, numbers and values become as plain as the
//! failure allows. Each step keeps what fails, so it may be stopped at any time.

use std::time::{Duration, Instant};

use kiln_aot::trace::{Event, Variable};
use kiln_ir::{Result, Scalar};
use kiln_tensor::Tensor;

use crate::case::Case;
use crate::trail::Trail;
use crate::variants;

/// What is told on the way.
#[derive(Copy, Clone, Debug)]
pub struct Progress {
    /// Cases tried.
    pub tried: usize,
    /// Events of the smallest that fails.
    pub events: usize,
}

/// Makes a case that fails smaller. `fails` says whether another one fails in the same way; `tell` hears how it goes.
/// After `limit` what was found by then is the result.
pub fn minify(
    case: &Case,
    limit: Duration,
    fails: &mut dyn FnMut(&Case) -> bool,
    tell: &mut dyn FnMut(Progress),
) -> Result<Case> {
    let mut search = Search { best: case.clone(), until: Instant::now() + limit, tried: 0, fails, tell };
    search.events()?;
    search.results();
    search.values();
    loop {
        let before = search.size();
        search.sizes();
        search.dtypes();
        search.flags();
        search.events()?;
        search.results();
        if search.size() >= before || search.is_over() {
            break;
        }
    }
    search.values();
    Ok(search.best)
}

struct Search<'a> {
    best: Case,
    until: Instant,
    tried: usize,
    fails: &'a mut dyn FnMut(&Case) -> bool,
    tell: &'a mut dyn FnMut(Progress),
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// What is to become smaller.
    fn size(&self) -> (usize, usize, usize) {
        let elements = self.best.inputs.values().map(|input| input.values.shape().numel());
        (self.best.len(), self.best.recording.live.len() + self.best.inputs.len(), elements.sum())
    }

    /// Takes a case if it fails.
    fn try_case(&mut self, case: Case) -> bool {
        if self.is_over() {
            return false;
        }
        self.tried += 1;
        let failed = (self.fails)(&case);
        if failed {
            self.best = case;
        }
        (self.tell)(Progress { tried: self.tried, events: self.best.len() });
        failed
    }

    /// Keeps as few events as possible.
    fn events(&mut self) -> Result<()> {
        let base = self.best.clone();
        let trail = Trail::new(&base)?;
        let mut kept: Vec<usize> = (0..base.len()).collect();
        let mut parts = 2;
        while kept.len() > 1 && !self.is_over() {
            let length = kept.len().div_ceil(parts);
            let chunks: Vec<(usize, usize)> = (0..kept.len())
                .step_by(length)
                .map(|begin| (begin, (begin + length).min(kept.len())))
                .collect();
            let mut found = None;
            // One part alone; then all but one, the last first: what is used by nothing goes first.
            if parts <= 4 {
                let alone = chunks.iter().map(|&(begin, end)| kept[begin..end].to_vec());
                found = alone.into_iter().find(|part| self.try_events(&trail, part)).map(|part| (part, 2));
            }
            if found.is_none() && (parts > 2 || chunks.len() == kept.len()) {
                let others = chunks.iter().rev().map(|&(begin, end)| [&kept[..begin], &kept[end..]].concat());
                let others = others.filter(|part| !part.is_empty()).collect::<Vec<_>>();
                found = others
                    .into_iter()
                    .find(|part| self.try_events(&trail, part))
                    .map(|part| (part, parts.saturating_sub(1).max(2)));
            }
            match found {
                Some((part, next)) => (kept, parts) = (part, next),
                None if length == 1 => break,
                None => parts = (2 * parts).min(kept.len()),
            }
        }
        Ok(())
    }

    fn try_events(&mut self, trail: &Trail<'_>, events: &[usize]) -> bool {
        !self.is_over() && trail.keep(events).is_some_and(|case| self.try_case(case))
    }

    /// Lets as little as possible outlive the case, and drops what then does nothing.
    fn results(&mut self) {
        let mut at = 0;
        while at < self.best.recording.live.len() && self.best.recording.live.len() > 1 && !self.is_over() {
            let mut case = self.best.clone();
            case.recording.live.remove(at);
            if !self.try_case(case) {
                at += 1;
            }
        }
        // An operand of the last op in place of its result.
        while let Some(Event::Call { args, out: Some(out), .. }) = self.best.recording.trace.events.last()
            && let [only] = self.best.recording.live[..]
            && only == *out
        {
            let made: Vec<Variable> = self.best.recording.trace.events.iter().flat_map(Event::made).collect();
            let operands: Vec<Variable> = args
                .iter()
                .filter_map(|arg| match arg {
                    kiln_aot::trace::TraceArg::Variable(v) => Some(*v),
                    _ => None,
                })
                .filter(|v| made.contains(v))
                .collect();
            let mut shorter = self.best.clone();
            shorter.recording.trace.events.pop();
            let found = operands.into_iter().any(|operand| {
                let mut case = shorter.clone();
                case.recording.live = vec![operand];
                self.try_case(case)
            });
            if !found {
                break;
            }
        }
    }

    /// Smaller sizes.
    fn sizes(&mut self) {
        let mut known = Vec::new();
        while let Some(size) = variants::largest(&self.best, &known).filter(|_| !self.is_over()) {
            known.push(size);
            for smaller in variants::smaller(size) {
                if let Some(case) = variants::resized(&self.best, size, smaller)
                    && self.try_case(case)
                {
                    known.push(smaller);
                    known.retain(|&other| other != smaller || smaller <= 2);
                    break;
                }
            }
        }
    }

    /// Plainer dtypes.
    fn dtypes(&mut self) {
        for from in ["bf16", "f16", "f64"] {
            if let Some(case) = variants::converted(&self.best, from, "f32") {
                self.try_case(case);
            }
        }
    }

    /// No gradients, and dense layouts, where the failure does not depend on them.
    fn flags(&mut self) {
        let inputs: Vec<Variable> = self.best.inputs.keys().copied().collect();
        for variable in inputs {
            for change in [variants::without_gradient, variants::dense] {
                if let Some(case) = change(&self.best, variable) {
                    self.try_case(case);
                }
            }
        }
    }

    /// Plain values and numbers.
    fn values(&mut self) {
        let inputs: Vec<Variable> = self.best.inputs.keys().copied().collect();
        for variable in inputs {
            let Some(input) = self.best.inputs.get(&variable) else { continue };
            let ty = input.values.clone();
            for plain in variants::plain_values(&ty) {
                let Ok(values) = plain else { continue };
                if same(&values, &ty) {
                    break;
                }
                let mut case = self.best.clone();
                case.inputs.entry(variable).and_modify(|input| input.values = values);
                if self.try_case(case) {
                    break;
                }
            }
        }
        for hole in 0..self.best.numbers.len() {
            for plain in [0i64, 1, 2] {
                let plain = match self.best.numbers[hole] {
                    Scalar::Float(_) => Scalar::Float(plain as f64),
                    Scalar::Int(_) => Scalar::Int(plain),
                    Scalar::Bool(_) => break,
                };
                if self.best.numbers[hole] == plain {
                    break;
                }
                let mut case = self.best.clone();
                case.numbers[hole] = plain;
                if self.try_case(case) {
                    break;
                }
            }
        }
    }
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    matches!((a.to_bytes(), b.to_bytes()), (Ok(a), Ok(b)) if a == b)
}
