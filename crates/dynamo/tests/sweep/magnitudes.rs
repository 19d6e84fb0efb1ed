//! Every float row and its gradients, at magnitudes from 10⁻⁴ to 6 · 10⁴ and with offsets, in every float dtype,
//! against the same call in f64.
//!
//! Eager: as exact as the computation in f32, plus one rounding of the result. Compiled: an error of at most twice
//! eager's own, and 10⁻⁶ of the largest magnitude.

use kiln_dynamo::{Backend, Compile};
use kiln_ir::{Class, Domain, Grad, Op, Reads, Row, SampleArg, Ty};
use kiln_tensor::hook::Arg;
use kiln_tensor::{DType, Result, Tensor};

use crate::cases::{Case, Layout, whole};

/// Factor and offset of operands that may be anything.
const MAGNITUDES: [(f64, f64); 7] =
    [(1e-4, 0.0), (1e-2, 0.0), (1.0, 0.0), (300.0, 0.0), (2e4, 0.0), (1.0, 300.0), (1e-2, -30.0)];

/// The largest number of a dtype.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::BF16 => 3.3895e38,
        DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
    }
}

/// The smallest number of a dtype that has all its digits.
fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-14),
        DType::BF16 | DType::F32 => f64::from(f32::MIN_POSITIVE),
        _ => f64::MIN_POSITIVE,
    }
}

/// Half the distance of a number from its neighbours.
fn rounding(dtype: DType, x: f64) -> f64 {
    let (digits, least) = match dtype {
        DType::F16 => (11, 2f64.powi(-24)),
        DType::BF16 => (8, 2f64.powi(-133)),
        DType::F32 => (24, 2f64.powi(-149)),
        _ => (53, 0.0),
    };
    (x.abs() * 2f64.powi(-digits)).max(least / 2.0)
}

fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.detach()?.to_dtype(DType::F64)?.to_vec::<f64>()
}

/// A call's result and gradients, in the order of its operands.
struct Outcome {
    result: Tensor,
    grads: Vec<Option<Tensor>>,
}

impl Outcome {
    fn parts(&self) -> impl Iterator<Item = (String, &Tensor)> {
        let grads = self.grads.iter().enumerate();
        let grads = grads.filter_map(|(i, g)| Some((format!("gradient of operand {i}"), g.as_ref()?)));
        std::iter::once(("result".to_string(), &self.result)).chain(grads)
    }
}

/// The operands of a sample at a magnitude, rounded to a dtype; `wide` has the very same numbers in another.
fn scaled(
    row: &'static Row,
    i: usize,
    dtype: DType,
    wide: DType,
    (factor, offset): (f64, f64),
) -> Result<Option<Case>> {
    let samples = row.sample_calls();
    let Some(sample) = samples.iter().filter(|s| s.dtypes.contains(&dtype)).nth(i) else { return Ok(None) };
    let mut case = Case::new(row, sample, DType::F64, Layout::Contiguous, false, i as u64)?;
    for (arg, tensor) in sample.args.iter().zip(&mut case.tensors) {
        let (SampleArg::Tensor(_, domain), Some(t)) = (arg, tensor) else { continue };
        if !t.dtype().is_float() {
            continue;
        }
        let scaled = match domain {
            Domain::Any => t.mul(factor)?.add(offset)?,
            Domain::Positive | Domain::NonZero => t.mul(factor)?,
            Domain::Between(..) | Domain::Index(_) | Domain::Distinct(_) => t.clone(),
        };
        let most = 0.9 * largest(dtype);
        *t = scaled.clamp(-most, most)?.to_dtype(dtype)?.to_dtype(wide)?;
        t.requires_grad_(!matches!(row.grad, Grad::Zero | Grad::NotDifferentiable(_)))?;
    }
    Ok(Some(case))
}

/// Runs a case, and back from gradients of about 1 that are the same numbers in every dtype.
fn run(case: &Case) -> Result<Tensor> {
    let y = case.run()?;
    if y.requires_grad() && y.numel() > 0 {
        let n = y.numel() as i64;
        let pattern = Tensor::arange(0, n, &y.device())?.remainder(7)?.sub(3)?.to_dtype(y.dtype())?;
        y.backward_with(Some(&pattern.mul(0.25)?.reshape(y.shape())?), false)?;
    }
    y.detach()
}

fn outcome(case: &Case, result: Tensor) -> Outcome {
    Outcome { result, grads: case.tensors.iter().map(|t| t.as_ref().and_then(Tensor::grad)).collect() }
}

/// Rows whose results are numbers computed from floats.
fn rows() -> Vec<&'static Row> {
    let moves = [Class::Random, Class::Create, Class::Constant, Class::List];
    Op::ROWS.iter().filter(|row| !moves.contains(&row.class)).collect()
}

/// What rounding the result costs the gradients, where the rule reads it: its slope in the result is a few times the
/// largest gradient. A result that the dtype can't hold, too large or with few digits left, excuses all.
fn from_rounded_result(case: &Case, dtype: DType, result: &Tensor, exact: &Tensor) -> Result<f64> {
    let ty = |arg: &Arg<'_>| match arg {
        Arg::Tensor(t) => Ty::Tensor(t.ty()),
        Arg::Number(x) => Ty::Scalar(x.kind()),
        Arg::List(_) => unreachable!("no sample has a list"),
    };
    let tys: Vec<Ty> = case.args().iter().map(ty).collect();
    let needs: Vec<bool> =
        case.tensors.iter().map(|t| t.as_ref().is_some_and(Tensor::requires_grad)).collect();
    if !Reads::of(&case.sample.op, &tys, &Ty::Tensor(result.ty()), &needs)?.result {
        return Ok(0.0);
    }
    let least = 2.0 * smallest_normal(dtype);
    let is_held = |x: &f64| *x == 0.0 || !x.is_finite() || (least..=largest(dtype)).contains(&x.abs());
    if !values(exact)?.iter().all(is_held) {
        return Ok(f64::INFINITY);
    }
    let size = values(result)?.iter().filter(|x| x.is_finite()).fold(1f64, |a, x| a.max(x.abs()));
    Ok(12.0 * 0.75 * rounding(dtype, size))
}

/// What is wrong with a result of a dtype, given that of f32 and that of f64 from the same numbers.
fn worse(dtype: DType, got: &Tensor, single: &Tensor, exact: &Tensor, more: f64) -> Result<Option<String>> {
    let (got, single, exact) = (values(got)?, values(single)?, values(exact)?);
    let finite = exact.iter().filter(|x| x.is_finite()).fold(0f64, |a, x| a.max(x.abs()));
    // What cancels in f32 is lost in f32; sums run in another order.
    let lost = single.iter().zip(&exact).filter(|(s, e)| s.is_finite() && e.is_finite());
    let lost = lost.fold(0f64, |a, (s, e)| a.max((s - e).abs())) + finite * 2f64.powi(-22);
    for ((&got, &single), &exact) in got.iter().zip(&single).zip(&exact) {
        // What overflows in f32 may do so in a half; so may what does not fit.
        let excused =
            !exact.is_finite() || !single.is_finite() || exact.abs() > largest(dtype) * (1.0 - 1e-3);
        let allowed = 2.0 * lost + 2.1 * rounding(dtype, exact) + more;
        let allowed = if more > 0.0 { allowed + 6.0 * rounding(dtype, exact) } else { allowed };
        let right = allowed == f64::INFINITY || (got - exact).abs() <= allowed;
        if !excused && !right {
            return Ok(Some(format!("{got:e} instead of {exact:e}, f32 gives {single:e}")));
        }
    }
    Ok(None)
}

fn check_eager(row: &'static Row, dtype: DType) -> Result<Vec<String>> {
    let mut failures = Vec::new();
    for i in 0..if whole() { usize::MAX } else { 4 } {
        for magnitude in MAGNITUDES {
            let Some(own) = scaled(row, i, dtype, dtype, magnitude)? else { return Ok(failures) };
            let (Some(single), Some(exact)) = (
                scaled(row, i, dtype, DType::F32, magnitude)?,
                scaled(row, i, dtype, DType::F64, magnitude)?,
            ) else {
                return Ok(failures);
            };
            let (a, b, c) = (run(&own)?, run(&single)?, run(&exact)?);
            if !c.dtype().is_float() {
                continue;
            }
            let rounded = from_rounded_result(&own, dtype, &a, &c)?;
            let (own_, single, exact) = (outcome(&own, a), outcome(&single, b), outcome(&exact, c));
            for (((what, got), (_, single)), (_, exact)) in
                own_.parts().zip(single.parts()).zip(exact.parts())
            {
                let more = if what == "result" { 0.0 } else { rounded };
                if let Some(text) = worse(dtype, got, single, exact, more)? {
                    failures.push(format!(
                        "{} {:?} of {} at {magnitude:?}, {what}: {text}",
                        row.name,
                        own.sample.op.attributes(),
                        own.tensors
                            .iter()
                            .flatten()
                            .map(|t| t.ty().to_string())
                            .collect::<Vec<_>>()
                            .join(" × "),
                    ));
                }
            }
        }
    }
    Ok(failures)
}

fn report(failures: &[String]) {
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn eager_halves_are_rounded_once() {
    let mut failures = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for row in rows() {
            match check_eager(row, dtype) {
                Ok(found) => failures.extend(found),
                Err(error) => failures.push(format!("{}, {dtype}: {error}", row.name)),
            }
        }
    }
    report(&failures);
}

/// The largest error of a tensor, where the exact numbers and eager's are finite; and whether it has others.
fn error(got: &[f64], eager: &[f64], exact: &[f64]) -> f64 {
    got.iter()
        .zip(eager)
        .zip(exact)
        .filter(|((_, eager), exact)| eager.is_finite() && exact.is_finite())
        .fold(
            0f64,
            |a, ((got, _), exact)| if got.is_finite() { a.max((got - exact).abs()) } else { f64::INFINITY },
        )
}

fn check_compiled(rows: &[&'static Row], dtype: DType) -> Result<Vec<String>> {
    let cases = |wide: DType| -> Result<Vec<(Case, (f64, f64))>> {
        let mut cases = Vec::new();
        for row in rows {
            // The first samples are small or empty, the last are large.
            let count = row.sample_calls().iter().filter(|s| s.dtypes.contains(&dtype)).count();
            for i in (0..count).rev().take(if whole() { usize::MAX } else { 1 }) {
                for magnitude in MAGNITUDES {
                    cases.extend(scaled(row, i, dtype, wide, magnitude)?.map(|case| (case, magnitude)));
                }
            }
        }
        Ok(cases)
    };
    let (eager, compiled, exact) = (cases(dtype)?, cases(dtype)?, cases(DType::F64)?);
    let all =
        |cases: &[(Case, (f64, f64))]| cases.iter().map(|(case, _)| run(case)).collect::<Result<Vec<_>>>();
    let (want, truth) = (all(&eager)?, all(&exact)?);
    let region = Compile::new().backend(Backend::Inductor).option("opt_level", "0")?.region();
    let got = region.run(|| all(&compiled))?;
    let mut failures = Vec::new();
    for (n, (case, magnitude)) in compiled.iter().enumerate() {
        if !truth[n].dtype().is_float() {
            continue;
        }
        let got = outcome(case, got[n].clone());
        let (want, truth) = (outcome(&eager[n].0, want[n].clone()), outcome(&exact[n].0, truth[n].clone()));
        for (((what, got), (_, want)), (_, truth)) in got.parts().zip(want.parts()).zip(truth.parts()) {
            let (got, want, truth) = (values(got)?, values(want)?, values(truth)?);
            let largest = truth.iter().filter(|x| x.is_finite()).fold(0f64, |a, x| a.max(x.abs()));
            let (own, eagers) = (error(&got, &want, &truth), error(&want, &want, &truth));
            let allowed = 2.0 * eagers + 1e-6 * largest + rounding(dtype, largest);
            if own > allowed {
                failures.push(format!(
                    "{} {:?} of {} at {magnitude:?}, {what}: an error of {own:e}, eager's is {eagers:e}, largest {largest:e}",
                    case.row.name,
                    case.sample.op.attributes(),
                    case.tensors.iter().flatten().map(|t| t.ty().to_string()).collect::<Vec<_>>().join(" × "),
                ));
            }
        }
    }
    Ok(failures)
}

fn compiled(dtype: DType) {
    let rows = rows();
    // A scalar function is eager's to the bit; what is made of several steps is not.
    let made = |row: &&&'static Row| whole() || row.class != Class::Pointwise || row.function.is_none();
    let rows: Vec<&'static Row> = rows.iter().filter(made).copied().collect();
    let mut failures = Vec::new();
    for rows in rows.chunks(12) {
        match check_compiled(rows, dtype) {
            Ok(found) => failures.extend(found),
            Err(error) => failures.push(format!("from {} on, {dtype}: {error}", rows[0].name)),
        }
    }
    report(&failures);
}

#[test]
fn compiled_f16() {
    compiled(DType::F16);
}

#[test]
fn compiled_bf16() {
    compiled(DType::BF16);
}

#[test]
fn compiled_f32() {
    compiled(DType::F32);
}
