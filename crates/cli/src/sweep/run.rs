//! Runs a call of the sweep, eagerly and compiled, and times both in turns.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use kiln::benchmark::{Rounds, compare};
use kiln::ir::Scalar;
use kiln::tensor::{Arg, GradOptions, Output, Result, Tensor, grad, run_op};
use kiln::{Compile, DType, Device, Error};
use serde::{Deserialize, Serialize};

use super::calls::{Call, Operand, What};

/// A block of calls.
const BLOCK: Duration = Duration::from_millis(2);
/// Calls that take longer are made less often.
const LONG: Duration = Duration::from_millis(10);

/// A measured call, as a line of JSON.
#[derive(Serialize, Deserialize, Clone)]
pub struct Line {
    pub call: String,
    pub op: String,
    pub size: String,
    pub dtype: String,
    pub backward: bool,
    pub eager_us: f64,
    pub compiled_us: f64,
}

/// A call with its operands drawn.
struct Ready<'a> {
    call: &'a Call,
    operands: Vec<Drawn>,
    /// What the result's gradients are, for a call with a backward pass.
    weights: Vec<Tensor>,
}

enum Drawn {
    Tensor(Tensor),
    Number(Scalar),
}

impl Ready<'_> {
    fn new(call: &Call) -> Result<Ready<'_>> {
        let operands = call.args.iter().map(draw).collect::<Result<Vec<_>>>()?;
        let mut ready = Ready { call, operands, weights: Vec::new() };
        if call.backward {
            ready.floats().try_for_each(|tensor| tensor.requires_grad_(true).map(drop))?;
            let weigh = |y: &Tensor| Tensor::randn(y.shape(), &Device::Cpu)?.to_dtype(y.dtype());
            let results = ready.results()?;
            let floats = results.iter().filter(|y| y.requires_grad());
            ready.weights = floats.map(weigh).collect::<Result<_>>()?;
        }
        Ok(ready)
    }

    fn floats(&self) -> impl Iterator<Item = &Tensor> {
        self.operands.iter().filter_map(|operand| match operand {
            Drawn::Tensor(tensor) if tensor.dtype().is_float() => Some(tensor),
            _ => None,
        })
    }

    fn results(&self) -> Result<Vec<Tensor>> {
        let args: Vec<Arg<'_>> = self
            .operands
            .iter()
            .map(|operand| match operand {
                Drawn::Tensor(tensor) => Arg::Tensor(tensor),
                Drawn::Number(number) => Arg::Number(*number),
            })
            .collect();
        match &self.call.what {
            What::Method(method) => (method.call)(&args),
            What::Row(op) => match run_op(op, &args)? {
                Output::Tensor(y) if self.call.copied => Ok(vec![y.contiguous()?]),
                Output::Tensor(y) => Ok(vec![y]),
                Output::List(_) => Ok(Vec::new()),
            },
        }
    }

    /// The whole call: what it makes, or the gradients.
    fn run(&self) -> Result<Vec<Option<Tensor>>> {
        let results = self.results()?;
        if !self.call.backward {
            return Ok(results.into_iter().map(Some).collect());
        }
        let outputs: Vec<&Tensor> = results.iter().filter(|y| y.requires_grad()).collect();
        let inputs: Vec<&Tensor> = self.floats().collect();
        let weights: Vec<Option<&Tensor>> = self.weights.iter().map(Some).collect();
        grad(&outputs, &inputs, &weights, GradOptions { allow_unused: true, ..GradOptions::default() })
    }
}

/// The times of a call in the quickest of some rounds: over thousands of short measurements, what else the machine
/// does only ever adds.
pub fn measure(call: &Call, rounds: usize) -> Result<Line> {
    kiln::manual_seed(0);
    let ready = Ready::new(call)?;
    let region = Compile::new().region();
    let start = Instant::now();
    ready.run()?;
    let is_long = start.elapsed() > LONG;
    region.run(|| ready.run())?;
    let failed: RefCell<Option<Error>> = RefCell::new(None);
    let note = |error| *failed.borrow_mut() = Some(error);
    let mut eager = || ready.run().map(drop).unwrap_or_else(note);
    let mut compiled = || region.run(|| ready.run()).map(drop).unwrap_or_else(note);
    let count = if is_long { rounds.min(3) } else { rounds };
    let rounds = Rounds {
        warm_up: if is_long { 0 } else { 2 },
        settle: Duration::ZERO,
        min_rounds: count,
        max_rounds: count,
        min_time: Duration::ZERO,
        block: BLOCK,
    };
    let times = compare(&mut [("eager", &mut eager), ("compiled", &mut compiled)], rounds);
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let us = |i: usize| {
        times
            .get(i)
            .map_or(f64::NAN, |measured| measured.times.iter().fold(f64::INFINITY, |a, &b| a.min(b)) * 1e6)
    };
    Ok(Line {
        call: call.call.clone(),
        op: call.op.into(),
        size: call.size.into(),
        dtype: call.dtype().into(),
        backward: call.backward,
        eager_us: us(0),
        compiled_us: us(1),
    })
}

fn draw(operand: &Operand) -> Result<Drawn> {
    let (dtype, shape, domain, bounds, order) = match operand {
        Operand::Number { number, kind } => {
            let float = || number.parse::<f64>().unwrap_or_default();
            return Ok(Drawn::Number(match *kind {
                "boolean" => Scalar::Bool(number != "0"),
                "int" => Scalar::Int(number.parse().unwrap_or_default()),
                _ => Scalar::Float(float()),
            }));
        }
        Operand::Tensor { dtype, shape, domain, bounds, order } => (dtype, shape, *domain, bounds, order),
    };
    let dtype = DType::from_name(dtype).unwrap_or(DType::F32);
    let lies: Vec<usize> = order.iter().map(|&d| shape[d]).collect();
    let dense = values(dtype, &lies, domain, bounds)?;
    let mut back = vec![0i64; order.len()];
    order.iter().enumerate().for_each(|(place, &d)| back[d] = place as i64);
    Ok(Drawn::Tensor(if order.is_sorted() { dense } else { dense.permute(&back[..])? }))
}

fn values(dtype: DType, shape: &[usize], domain: &str, bounds: &[f64]) -> Result<Tensor> {
    let bound = |i: usize| bounds.get(i).copied().unwrap_or_default();
    let whole = |low: i64, high: i64| Tensor::randint(low, high, shape, &Device::Cpu)?.to_dtype(dtype);
    match (domain, dtype.is_float()) {
        ("index", _) => whole(0, bound(0).max(1.0) as i64),
        ("distinct", _) => {
            let size = (bound(0) as usize).max(1);
            let order = Tensor::randperm(size, &Device::Cpu)?.to_vec_cast::<i64>()?;
            let numel = shape.iter().product();
            let repeated: Vec<i64> = order.into_iter().cycle().take(numel).collect();
            Tensor::from_vec(repeated, shape)?.to_dtype(dtype)
        }
        _ if dtype == DType::Bool => whole(0, 2),
        ("positive", false) => whole(1, 5),
        ("nonzero", false) => whole(1, 5)?.mul(&whole(0, 2)?.mul(2)?.sub(1)?),
        ("between", false) => whole(bound(0).ceil() as i64, bound(1).floor() as i64 + 1),
        (_, false) => whole(-4, 5),
        (domain, true) => {
            let x = if domain == "between" {
                Tensor::rand(shape, &Device::Cpu)?.mul(bound(1) - bound(0))?.add(bound(0))?
            } else {
                let x = Tensor::randn(shape, &Device::Cpu)?;
                match domain {
                    "positive" => x.abs()?.add(0.25)?,
                    "nonzero" => x.add(&x.sign()?.mul(0.25)?)?,
                    _ => x,
                }
            };
            x.to_dtype(dtype)
        }
    }
}
