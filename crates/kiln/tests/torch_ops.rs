//! Every row of the op table against PyTorch: results and gradients that `fixtures/ops.py` recorded.
//!
//! A fixture (`fixtures/ops/<row>.jsonl`) holds whole calls, one to a line: op, attributes, operands, what
//! PyTorch returned, and the gradients of `(y·y·0.1 + y·0.37).sum()`. To add those of new rows:
//!
//! ```text
//! KILN_CALLS=/tmp/calls cargo test -p kiln --test torch_ops      # writes the calls that have no fixture yet
//! python3 crates/kiln/tests/fixtures/ops.py /tmp/calls           # asks PyTorch, writes the fixtures
//! ```

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kiln::ir::{Class, Domain, Grad, Op, Row, Sample, SampleArg, Scalar, TensorTy, Ty};
use kiln::tensor::{Arg, DType, Output, Result, Shape, Tensor, run_op};
use kiln_testkit::{Argument, Array, Rng, random_array, special_argument};
use serde::{Deserialize, Serialize};

/// Fixtures a row has at least.
const ENOUGH: usize = 4;

/// Rows without a fixture, and why.
fn exempt(row: &Row) -> Option<&'static str> {
    match row.class {
        Class::List => Some("lists are Kiln's own"),
        Class::Constant => Some("a number of the program text"),
        Class::Custom => Some("the user's own"),
        Class::Random => Some("PyTorch draws from another stream"),
        _ => None,
    }
}

/// One number; what JSON can't say is text.
#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(untagged)]
enum Number {
    Int(i64),
    Float(f64),
    Word(Word),
}

#[derive(Serialize, Deserialize, Clone, Copy)]
enum Word {
    #[serde(rename = "nan")]
    Nan,
    #[serde(rename = "inf")]
    Infinity,
    #[serde(rename = "-inf")]
    NegativeInfinity,
    #[serde(rename = "-0")]
    NegativeZero,
}

impl Number {
    fn of(x: f64) -> Number {
        match x {
            x if x.is_nan() => Number::Word(Word::Nan),
            f64::INFINITY => Number::Word(Word::Infinity),
            f64::NEG_INFINITY => Number::Word(Word::NegativeInfinity),
            x if x == 0.0 && x.is_sign_negative() => Number::Word(Word::NegativeZero),
            x if x.fract() == 0.0 && x.abs() < 1e6 => Number::Int(x as i64),
            x => Number::Float(x),
        }
    }

    fn float(self) -> f64 {
        match self {
            Number::Int(i) => i as f64,
            Number::Float(x) => x,
            Number::Word(Word::Nan) => f64::NAN,
            Number::Word(Word::Infinity) => f64::INFINITY,
            Number::Word(Word::NegativeInfinity) => f64::NEG_INFINITY,
            Number::Word(Word::NegativeZero) => -0.0,
        }
    }

    fn int(self) -> i64 {
        match self {
            Number::Int(i) => i,
            other => other.float() as i64,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Operand {
    Tensor { dtype: String, shape: Vec<usize>, values: Vec<Number> },
    Number { number: Number, kind: String },
}

/// A call, and what PyTorch made of it.
#[derive(Serialize, Deserialize)]
struct Call {
    op: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    args: Vec<Operand>,
    /// Whether gradients are asked for.
    backward: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Operand>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gradients: Option<Vec<Option<Vec<Number>>>>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ops")
}

fn numbers(array: &Array) -> Vec<Number> {
    let is_float = array.dtype.is_float();
    (0..array.numel())
        .map(|i| if is_float { Number::of(array.float(i)) } else { Number::Int(array.int(i)) })
        .collect()
}

/// An operand whose floats are short in text: multiples of 1/32 within the domain.
fn short(rng: &mut Rng, dtype: DType, shape: &Shape, domain: Domain) -> Operand {
    let array = random_array(rng, &TensorTy::new(dtype, shape), domain);
    let values = if dtype.is_float() {
        let rounded = |x: f64| match (x * 32.0).round() / 32.0 {
            0.0 if domain != Domain::Any => x.signum() / 32.0,
            rounded => rounded,
        };
        (0..array.numel()).map(|i| Number::of(rounded(array.float(i)))).collect()
    } else {
        numbers(&array)
    };
    Operand::Tensor { dtype: dtype.name().into(), shape: shape.to_vec(), values }
}

fn number(x: Scalar) -> Operand {
    let value = match x {
        Scalar::Float(x) => Number::of(x),
        other => Number::Int(other.as_i64()),
    };
    Operand::Number { number: value, kind: x.kind().name().into() }
}

fn call(row: &Row, sample: &Sample, args: Vec<Operand>, backward: bool) -> Call {
    let attributes = sample.op.attributes().into_iter().map(|(name, text)| (name.into(), text)).collect();
    Call { op: row.name.into(), attributes, args, backward, result: None, gradients: None }
}

/// The calls that a row's fixture is made of: all samples of moderate size in f32, some in the other dtypes,
/// and special values for pointwise rows.
fn calls(row: &Row) -> Vec<Call> {
    let is_differentiated = !matches!(row.grad, Grad::Zero | Grad::NotDifferentiable(_));
    let size = |sample: &Sample| -> usize {
        let sizes = sample.args.iter().map(|arg| match arg {
            SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _) => shape.numel(),
            SampleArg::Number(_) => 1,
        });
        sizes.sum()
    };
    let samples: Vec<Sample> = row.sample_calls().into_iter().filter(|s| size(s) <= 400).collect();
    let mut calls = Vec::new();
    let has = |dtype: DType| samples.iter().any(|s| s.dtypes.contains(&dtype));
    let main = if has(DType::F32) { DType::F32 } else { DType::I64 };
    for dtype in DType::ALL {
        let fitting = samples.iter().filter(|s| s.dtypes.contains(&dtype));
        let most = if dtype == main { 12 } else { 2 };
        // Not only the small ones that samples tend to begin with.
        let skip = if dtype == main { 0 } else { 1 };
        let count = fitting.clone().count();
        for (i, sample) in fitting.enumerate().skip(if count > most { skip } else { 0 }).take(most) {
            let mut rng = Rng::new((i * 16 + dtype as usize) as u64);
            let operand = |arg: &SampleArg| match arg {
                SampleArg::Tensor(shape, domain) => short(&mut rng, dtype, shape, *domain),
                SampleArg::Fixed(dtype, shape, domain) => short(&mut rng, *dtype, shape, *domain),
                SampleArg::Number(x) => number(*x),
            };
            let args = sample.args.iter().map(operand).collect();
            calls.push(call(row, sample, args, is_differentiated && dtype.is_float()));
        }
    }
    let is_plain = |sample: &&Sample| sample.args.iter().all(|arg| matches!(arg, SampleArg::Tensor(..)));
    if row.class == Class::Pointwise
        && let Some(sample) = samples.iter().find(|s| is_plain(s) && s.dtypes.contains(&DType::F32))
    {
        let mut rng = Rng::new(7);
        let args = sample.args.iter().map(|_| {
            let special = special_argument(&mut rng, &Ty::Tensor(TensorTy::new(DType::F32, [40])));
            let Argument::Tensor(array) = special else { unreachable!("a tensor was asked for") };
            Operand::Tensor { dtype: "f32".into(), shape: vec![40], values: numbers(&array) }
        });
        let args = args.collect();
        calls.push(call(row, sample, args, false));
    }
    calls
}

/// How a tensor operand lies in memory.
#[derive(Copy, Clone, Debug)]
enum Layout {
    Contiguous,
    Reversed,
}

fn tensor(dtype: DType, shape: &[usize], values: &[Number], layout: Layout) -> Result<Tensor> {
    let dense = if dtype.is_float() {
        Tensor::from_vec(values.iter().map(|x| x.float()).collect::<Vec<f64>>(), shape)?
    } else {
        Tensor::from_vec(values.iter().map(|x| x.int()).collect::<Vec<i64>>(), shape)?
    };
    let dense = dense.to_dtype(dtype)?;
    match layout {
        Layout::Contiguous => Ok(dense),
        Layout::Reversed => {
            let reversed: Vec<i64> = (0..shape.len() as i64).rev().collect();
            dense.permute(&reversed[..])?.clone_tensor()?.permute(&reversed[..])
        }
    }
}

fn tolerance(op: &str, dtype: DType) -> f64 {
    match dtype.name() {
        // PyTorch's own have ten digits.
        "f64" if matches!(op, "digamma" | "trigamma") => 1e-8,
        "f64" => 1e-11,
        "f32" => 1e-5,
        "f16" => 4e-3,
        "bf16" => 3e-2,
        _ => 0.0,
    }
}

fn compare(op: &str, got: &Tensor, dtype: DType, shape: &[usize], want: &[Number]) -> Result<Option<String>> {
    if got.dtype() != dtype || got.shape()[..] != *shape {
        return Ok(Some(format!("{} instead of {dtype}{shape:?}", got.ty())));
    }
    if !dtype.is_float() {
        let (got, want) = (got.to_vec_cast::<i64>()?, want.iter().map(|x| x.int()).collect::<Vec<i64>>());
        let wrong = got.iter().zip(&want).position(|(g, w)| g != w);
        return Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], want[i])));
    }
    let tolerance = tolerance(op, dtype);
    let close =
        |g: f64, w: f64| g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * (w.abs() + 1.0);
    let got = got.to_vec_cast::<f64>()?;
    let wrong = got.iter().zip(want).position(|(g, w)| !close(*g, w.float()));
    Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], want[i].float())))
}

fn check(call: &Call, layout: Layout) -> Result<Option<String>> {
    let op = Op::parse(&call.op, &mut |name| call.attributes.get(name).cloned()).expect("attributes parse");
    let dtype = |name: &str| DType::from_name(name).expect("dtypes have names");
    let mut tensors = Vec::new();
    for arg in &call.args {
        tensors.push(match arg {
            Operand::Tensor { dtype: name, shape, values } => {
                let tensor = tensor(dtype(name), shape, values, layout)?;
                if call.backward && tensor.dtype().is_float() {
                    tensor.requires_grad_(true)?;
                }
                Some(tensor)
            }
            Operand::Number { .. } => None,
        });
    }
    let args = call.args.iter().zip(&tensors).map(|(arg, tensor)| match (arg, tensor) {
        (Operand::Number { number, kind }, _) => Arg::Number(match kind.as_str() {
            "boolean" => Scalar::Bool(number.int() != 0),
            "int" => Scalar::Int(number.int()),
            _ => Scalar::Float(number.float()),
        }),
        (_, Some(tensor)) => Arg::Tensor(tensor),
        (_, None) => unreachable!("made above"),
    });
    let args: Vec<Arg<'_>> = args.collect();
    let Output::Tensor(y) = run_op(&op, &args)? else { return Ok(Some("a list".into())) };
    let Some(Operand::Tensor { dtype: name, shape, values }) = &call.result else {
        return Ok(Some("the fixture has no result".into()));
    };
    if let Some(difference) = compare(&call.op, &y, dtype(name), shape, values)? {
        return Ok(Some(format!("result {difference}")));
    }
    let Some(gradients) = &call.gradients else { return Ok(None) };
    if y.requires_grad() {
        ((&y * &y * 0.1) + (&y * 0.37)).ok()?.sum()?.backward()?;
    }
    for (i, (tensor, want)) in tensors.iter().zip(gradients).enumerate() {
        let (Some(tensor), Some(want)) = (tensor, want) else { continue };
        let grad = match tensor.grad() {
            Some(grad) => grad,
            None => tensor.detach()?.mul(0.0)?,
        };
        if let Some(difference) = compare(&call.op, &grad, tensor.dtype(), &tensor.shape(), want)? {
            return Ok(Some(format!("gradient of operand {i} {difference}")));
        }
    }
    Ok(None)
}

fn fixtures(row: &Row) -> Vec<Call> {
    let text = std::fs::read_to_string(folder().join(row.name).with_extension("jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("a fixture parses")).collect()
}

fn describe(call: &Call) -> String {
    let operands = call.args.iter().map(|arg| match arg {
        Operand::Tensor { dtype, shape, .. } => format!("{dtype}{shape:?}"),
        Operand::Number { number, .. } => number.float().to_string(),
    });
    format!("{} {:?} of {}", call.op, call.attributes, operands.collect::<Vec<_>>().join(", "))
}

#[test]
fn rows_compute_what_pytorch_computes() {
    let mut failures = Vec::new();
    for row in Op::ROWS {
        for call in fixtures(row) {
            for layout in [Layout::Contiguous, Layout::Reversed] {
                match check(&call, layout) {
                    Ok(None) => continue,
                    Ok(Some(difference)) => {
                        failures.push(format!("{} ({layout:?}): {difference}", describe(&call)));
                    }
                    Err(error) => failures.push(format!("{} ({layout:?}): {error}", describe(&call))),
                }
                break;
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_row_has_fixtures() {
    let write_to = std::env::var_os("KILN_CALLS").map(PathBuf::from);
    let mut missing = Vec::new();
    for row in Op::ROWS.iter().filter(|row| exempt(row).is_none()) {
        let there = fixtures(row).len();
        if there >= ENOUGH {
            continue;
        }
        if let Some(folder) = &write_to {
            let lines = calls(row).into_iter().map(|call| serde_json::to_string(&call).unwrap() + "\n");
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join(row.name).with_extension("jsonl"), lines.collect::<String>()).unwrap();
        }
        missing.push(format!("{} ({there})", row.name));
    }
    assert!(missing.is_empty(), "rows with fewer than {ENOUGH} fixtures: {}", missing.join(", "));
}
