//! Runs a training loop eagerly and by every backend, and compares all that it reports, in order.
//!
//! A loop is a function of [`Step`], which runs its body as it is or compiled, and of the dtype it trains in.
//! The truth is the same loop, eagerly, in f64. At every step, each tensor's error against it must not be more
//! than twice eager's own error, plus 1e-6 of the tensor's size. Backend `eager` must give eager's very bits.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kiln::prelude::*;
use kiln::{Error, Explanation, Region, Result};

/// The body of a training loop, as it is or compiled.
pub struct Step(Option<Region>);

impl Step {
    pub fn run<T>(&self, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        match &self.0 {
            Some(region) => region.run(body),
            None => body(),
        }
    }
}

/// What a loop reports of one tensor after one step.
struct Entry {
    step: usize,
    label: String,
    numbers: Vec<f64>,
}

/// All that a loop reports, in order.
#[derive(Default)]
pub struct Record {
    entries: Vec<Entry>,
    step: usize,
}

impl Record {
    /// What follows belongs to this step.
    pub fn step(&mut self, step: usize) {
        self.step = step;
    }

    pub fn tensor(&mut self, label: &str, tensor: &Tensor) -> Result<()> {
        let numbers = tensor.to_dtype(DType::F64)?.to_vec_cast::<f64>()?;
        self.entries.push(Entry { step: self.step, label: label.to_string(), numbers });
        Ok(())
    }

    pub fn tensors<'a>(&mut self, label: &str, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
        let mut tensors = tensors.into_iter().enumerate();
        tensors.try_for_each(|(i, tensor)| self.tensor(&format!("{label} {i}"), tensor))
    }

    fn losses(&self) -> Vec<f64> {
        let losses = self.entries.iter().filter(|entry| entry.label == "loss");
        losses.flat_map(|entry| entry.numbers.iter().copied()).collect()
    }
}

/// A training loop.
pub type Program = fn(&Step, DType) -> Result<Record>;

/// The random stream is the process's: loops take turns.
static TURN: Mutex<()> = Mutex::new(());

fn run(program: Program, region: Option<Region>, dtype: DType) -> Result<Record> {
    manual_seed(11);
    program(&Step(region), dtype)
}

fn largest(numbers: impl Iterator<Item = f64>) -> f64 {
    // NaN is larger than all else.
    numbers.fold(0.0, |a: f64, b| if b.abs() <= a { a } else { b.abs() })
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    largest(a.iter().zip(b).map(|(a, b)| a - b))
}

/// How precise a loop is, and so how it is judged.
#[derive(Copy, Clone, PartialEq)]
pub enum Precision {
    /// f32 or better: eager's own error is that of the same tensor at the same step, or what it usually is in the
    /// run, relative to its size, if eager was lucky at this one.
    Single,
    /// Through bf16, where errors at one step are a matter of luck: eager's own error is the largest of the
    /// same tensor in all the run, relative to its size.
    Half,
}

/// Entries of `got` whose error is more than it may be.
fn failures(got: &Record, eager: &Record, truth: &Record, slack: f64, precision: Precision) -> Vec<String> {
    assert_eq!(got.entries.len(), truth.entries.len());
    assert_eq!(eager.entries.len(), truth.entries.len());
    let size = |entry: &Entry| largest(entry.numbers.iter().copied());
    let mut errors: HashMap<&str, Vec<f64>> = HashMap::new();
    for (eager, truth) in eager.entries.iter().zip(&truth.entries) {
        let error = distance(&eager.numbers, &truth.numbers) / size(truth).max(f64::MIN_POSITIVE);
        errors.entry(&truth.label).or_default().push(error);
    }
    errors.values_mut().for_each(|errors| errors.sort_by(f64::total_cmp));
    let mut failures = Vec::new();
    for ((got, eager), truth) in got.entries.iter().zip(&eager.entries).zip(&truth.entries) {
        let own = match precision {
            Precision::Single => {
                let usual = errors[truth.label.as_str()][errors[truth.label.as_str()].len() / 2];
                distance(&eager.numbers, &truth.numbers).max(usual * size(truth))
            }
            Precision::Half => errors[truth.label.as_str()].last().copied().unwrap_or(0.0) * size(truth),
        };
        let (error, size) = (distance(&got.numbers, &truth.numbers), size(truth));
        // So written that NaN fails.
        let holds = error <= 2.0 * own + slack * size;
        if !holds {
            let (step, label) = (truth.step, &truth.label);
            failures
                .push(format!("step {step}, {label}: error {error:.2e}, eager's {own:.2e}, size {size:.2e}"));
        }
    }
    failures
}

/// Trains eagerly and by every backend; tells what happened to the region of each.
pub fn check(precision: Precision, program: Program) -> Result<Vec<(Backend, Explanation)>> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (truth, eager) = (run(program, None, DType::F64)?, run(program, None, DType::F32)?);
    let losses = truth.losses();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last < 0.9 * first, "nothing is learned: the loss was {first} and is {last}");
    let mut explanations = Vec::new();
    for &backend in Backend::ALL {
        for dtype in [DType::F32, DType::F64] {
            let region = Compile::new().backend(backend).region();
            let got = run(program, Some(region.clone()), dtype)?;
            let failures = match (backend, dtype) {
                // What was captured, op by op: the same bits.
                (Backend::Eager, DType::F64) => failures(&got, &truth, &truth, 0.0, Precision::Single),
                (Backend::Eager, _) => failures(&got, &eager, &eager, 0.0, Precision::Single),
                // The truth has an error of its own, which nobody knows.
                (_, DType::F64) => failures(&got, &truth, &truth, 1e-10, Precision::Single),
                (_, _) => failures(&got, &eager, &truth, 1e-6, precision),
            };
            let count = failures.len();
            let shown = failures.into_iter().take(12).collect::<Vec<_>>().join("\n");
            assert!(count == 0, "{backend}, {dtype}: {count} of {}\n{shown}", got.entries.len());
            let explanation = region.explain();
            assert!(!explanation.given_up && explanation.fallbacks.is_empty(), "{explanation}");
            for graph in &explanation.graphs {
                let compiled = backend == Backend::Eager || graph.interpreted.is_none();
                assert!(compiled, "{explanation}");
            }
            explanations.push((backend, explanation));
        }
    }
    Ok(explanations)
}

/// Numbers between −scale and scale that are the same in every run, whatever the dtype.
pub fn numbers(shape: &[usize], salt: usize, scale: f64, dtype: DType) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let number = |i: usize| {
        let mixed = ((i + 1) as u64).wrapping_add(salt as u64 * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // 24 bits: exact in f32.
        ((mixed >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    };
    let exact: Vec<f32> = (0..count).map(|i| number(i) as f32).collect();
    Tensor::from_vec(exact, shape)?.to_dtype(dtype)
}

/// Numbers that are trained.
pub fn weight(shape: &[usize], salt: usize, dtype: DType) -> Result<Tensor> {
    let inputs: usize = shape[1..].iter().product();
    let weight = numbers(shape, salt, (3.0 / inputs as f64).sqrt(), dtype)?;
    weight.requires_grad_(true)?;
    Ok(weight)
}

/// The same number everywhere, and it is trained.
pub fn constant(size: usize, value: f64, dtype: DType) -> Result<Tensor> {
    let tensor = Tensor::full_of([size], value, dtype, &Device::Cpu)?;
    tensor.requires_grad_(true)?;
    Ok(tensor)
}

/// Samples and their classes: which of the first numbers is largest.
pub fn samples(shape: &[usize], classes: usize, salt: usize, dtype: DType) -> Result<(Tensor, Tensor)> {
    let x = numbers(shape, salt + 1000, 1.5, dtype)?;
    let rows = x.reshape([shape[0] as i64, -1])?.narrow(1, 0, classes)?;
    let class = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i64;
    let classes: Vec<i64> = rows.to_vec_cast::<f64>()?.chunks(classes).map(class).collect();
    Ok((x, Tensor::from_vec(classes, [shape[0]])?))
}
