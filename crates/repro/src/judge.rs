//! Whether an outcome is right: its error against doubles is at most twice eager's own.
//!
//! [Note: what rounding may do] Eager's own error may be small by luck, above all where it is one number, and a result
//! next to a jump (an argmax of near-equal scores, a mask) is either of two. So what looks wrong is looked at again:
//! the program is played a few times with every result off by a unit in the last place, and whatever that does to it,
//! rounding may do as well.

use std::cell::OnceCell;

use kiln_ir::{DType, Result};
use kiln_tensor::Tensor;

use crate::case::Case;
use crate::play::{Arithmetic, Outcome, Seen, play};

/// How often a program is played with noise.
const NOISES: u64 = 4;
/// How much more than eager's error is allowed.
const FACTOR: f64 = 2.0;
/// Units in the last place of the value itself that are allowed in any case.
const ULPS: f64 = 4.0;

/// What an outcome is.
#[derive(Clone, PartialEq, Debug)]
pub enum Verdict {
    /// Within what rounding explains.
    Right,
    /// Something else.
    Wrong {
        /// Where it shows first.
        seen: Seen,
        /// In words.
        what: String,
    },
}

/// Eager's outcome of a case, and how exact it is.
pub struct Judge<'a> {
    case: &'a Case,
    /// What eager gives.
    pub eager: Outcome,
    wide: Option<Outcome>,
    noisy: OnceCell<Vec<Outcome>>,
}

impl<'a> Judge<'a> {
    /// Plays a case eagerly, in its own numbers and in doubles.
    pub fn new(case: &'a Case) -> Result<Judge<'a>> {
        let eager = play(case, Arithmetic::Own, &|run| run())?;
        Ok(Judge { case, eager, wide: None, noisy: OnceCell::new() }.with_wide())
    }

    fn with_wide(mut self) -> Judge<'a> {
        // An op that has no doubles leaves eager as the only measure.
        self.wide = play(self.case, Arithmetic::Wide, &|run| run()).ok();
        self
    }

    /// Judges what somebody else made of the case.
    pub fn verdict(&self, got: &Outcome) -> Verdict {
        self.judged(got, |_| true)
    }

    /// The same of values alone: whether gradients flow through them is not looked at.
    pub fn verdict_of_values(&self, got: &Outcome) -> Verdict {
        self.judged(got, |seen| !matches!(seen, Seen::Gradient(_)))
    }

    fn judged(&self, got: &Outcome, counts: impl Fn(&Seen) -> bool) -> Verdict {
        let eager = &self.eager;
        if got.refused != eager.refused && counts(&Seen::Gradient(0)) {
            let what = format!(
                "of the results with gradients {:?} can't be differentiated, eagerly {:?}",
                got.refused, eager.refused
            );
            let seen = eager.seen.first().map_or(Seen::Live(0, 0), |(seen, _)| *seen);
            return Verdict::Wrong { seen, what };
        }
        for (number, (seen, eager)) in eager.seen.iter().enumerate().filter(|(_, (seen, _))| counts(seen)) {
            let got = got.seen.get(number).and_then(|(_, tensor)| tensor.as_ref());
            let what = match (got, eager) {
                (None, None) => None,
                (Some(_), None) => Some("there is one, eagerly there is none".to_string()),
                (None, Some(_)) => Some("there is none, eagerly there is one".to_string()),
                (Some(got), Some(eager)) => self.difference(number, got, eager),
            };
            if let Some(what) = what {
                return Verdict::Wrong { seen: *seen, what };
            }
        }
        Verdict::Right
    }

    /// How a tensor differs more than it may.
    fn difference(&self, number: usize, got: &Tensor, eager: &Tensor) -> Option<String> {
        if got.shape() != eager.shape() || got.dtype() != eager.dtype() {
            let ty = |tensor: &Tensor| format!("{}{}", tensor.dtype(), tensor.shape());
            return Some(format!("it is {}, eagerly {}", ty(got), ty(eager)));
        }
        if got.to_bytes().ok()? == eager.to_bytes().ok()? {
            return None;
        }
        let of =
            |outcome: &Outcome| outcome.seen.get(number).and_then(|(_, tensor)| numbers(tensor.as_ref()?));
        let (got, own) = (numbers(got)?, numbers(eager)?);
        let mut wide = self.wide.as_ref().and_then(of).filter(|wide| wide.len() == own.len());
        // What is beyond the dtype's range is infinite in it.
        let most = largest(eager.dtype());
        for x in wide.iter_mut().flatten().filter(|x| x.abs() > most) {
            *x = f64::INFINITY.copysign(*x);
        }
        let exact = wide.as_ref().unwrap_or(&own);
        let ulp = ulp(eager.dtype());
        first_wrong(&got, &[&own], exact, ulp)?;
        let noisy = self.noisy.get_or_init(|| {
            let noisy = |seed| play(self.case, Arithmetic::Noisy(seed), &|run| run()).ok();
            (1..=NOISES).filter_map(noisy).collect()
        });
        let samples: Vec<Vec<f64>> = noisy.iter().filter_map(of).filter(|s| s.len() == own.len()).collect();
        let all: Vec<&Vec<f64>> = std::iter::once(&own).chain(&samples).collect();
        let (at, limit) = first_wrong(&got, &all, exact, ulp)?;
        let count = (0..got.len()).filter(|&i| !agrees(got[i], own[i], limit)).count();
        let wide = wide.map_or(String::new(), |wide| format!(", in doubles {}", wide[at]));
        let of = if got.len() == 1 { String::new() } else { format!(" ({count} of {} elements)", got.len()) };
        Some(format!("element {at} is {}, eagerly {}{wide}{of}", got[at], own[at]))
    }
}

/// A unit in the last place of 1; 0 where there is no rounding.
pub(crate) fn ulp(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 9.765_625e-4,
        DType::BF16 => 7.8125e-3,
        _ => 0.0,
    }
}

/// The largest number of a dtype.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::F32 | DType::BF16 => f64::from(f32::MAX),
        _ => f64::INFINITY,
    }
}

fn numbers(tensor: &Tensor) -> Option<Vec<f64>> {
    tensor.to_dtype(DType::F64).ok()?.to_vec::<f64>().ok()
}

/// Whether two numbers are within a limit of each other, or are the same in being none.
fn agrees(a: f64, b: f64, limit: f64) -> bool {
    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= limit
}

/// The first element that eager's errors don't explain, and how far from exact it could be.
///
/// An element may be off by twice its own error in any sample, and by what is usual among the others: those next to a jump
/// say nothing of them. Of very many elements some are beyond that by chance. So many are allowed as noise has: each sample
/// is judged by the others. None may be further off than twice the worst there is.
fn first_wrong(got: &[f64], samples: &[&Vec<f64>], exact: &[f64], ulp: f64) -> Option<(usize, f64)> {
    let count = exact.len();
    let error = |own: &[f64], i: usize| {
        let error = if own[i] == exact[i] { 0.0 } else { (own[i] - exact[i]).abs() };
        if error.is_finite() { error } else { 0.0 }
    };
    // By element, the largest error and the second largest: what is left without the sample that has the largest.
    let mut errors = vec![(0.0f64, 0.0f64, 0); count];
    for (number, own) in samples.iter().enumerate() {
        for (i, (first, second, whose)) in errors.iter_mut().enumerate() {
            let error = error(own, i);
            if error > *first {
                (*first, *second, *whose) = (error, *first, number);
            } else {
                *second = second.max(error);
            }
        }
    }
    let mut sorted: Vec<f64> = errors.iter().map(|(first, ..)| *first).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let worst = sorted.last().copied().unwrap_or(0.0);
    // Integers have no rounding: what is usual for them are jumps.
    let usual = if ulp > 0.0 { sorted.get(count * 19 / 20).copied().unwrap_or(worst) } else { 0.0 };
    let room = |i: usize| ULPS * ulp * if exact[i].is_finite() { exact[i].abs() } else { 0.0 };
    let limit = |i: usize, own: f64| FACTOR * own.max(2.0 * usual) + room(i);
    // What eager gives, with noise or without, is right by definition; so is what lies between.
    let explained = |i: usize, limit: f64| {
        agrees(got[i], exact[i], limit) || samples.iter().any(|own| agrees(got[i], own[i], limit))
    };
    let mut beyond = (0..count).filter(|&i| !explained(i, limit(i, errors[i].0)));
    let first = beyond.next()?;
    let many = 1 + beyond.count();
    let mut noise = vec![0; samples.len()];
    for (i, &(largest, second, whose)) in errors.iter().enumerate() {
        noise[whose] += usize::from(largest > limit(i, second));
    }
    let most = noise.into_iter().max().unwrap_or(0);
    let far = (0..count).find(|&i| !explained(i, limit(i, worst)));
    match far {
        Some(i) => Some((i, limit(i, worst))),
        None if ulp > 0.0 && many <= 2 * most => None,
        None => Some((first, limit(first, errors[first].0))),
    }
}
