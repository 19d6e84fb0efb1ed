//! Runs a call, eagerly or compiled, and compares what comes out with PyTorch's.

use kiln::{Compile, DType, GradOptions, Result, Tensor, grad};

use crate::args::{Args, Outcome, Stop};
use crate::bundle::{Bundle, Call, Stored, Tensors};
use crate::calls::{self, Outputs};

/// How a call runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Op by op.
    Eager,
    /// In one region, gradients included.
    Compiled,
}

/// What became of a call.
pub enum Verdict {
    /// As PyTorch's, or nearer to float64; how many of value, gradient and second gradient were compared.
    Agrees(usize),
    /// Kiln has no such call.
    Unmapped(String),
    /// Another result, or none.
    Differs {
        /// `value`, `gradient`, `second` or `refused`.
        stage: &'static str,
        /// What is different.
        what: String,
    },
}

const STAGES: [&str; 3] = ["value", "gradient", "second"];

/// Factors of outputs before gradients are taken, as `samples.py` has them.
fn weight(y: &Tensor) -> Result<Tensor> {
    let numbers = (0..y.numel()).map(|i| ((i * 5 % 7) as f64 - 2.5) / 4.0).collect();
    Tensor::from_vec::<f64>(numbers, y.shape())?.to_dtype(y.dtype())
}

/// Gradients of the weighted outputs that have any.
fn pulled(outputs: &[Option<Tensor>], inputs: &[&Tensor], create_graph: bool) -> Result<Outputs> {
    let outputs: Vec<&Tensor> = outputs.iter().flatten().filter(|y| y.requires_grad()).collect();
    if outputs.is_empty() || inputs.is_empty() {
        return Ok(vec![None; inputs.len()]);
    }
    let weights = outputs.iter().map(|y| weight(y)).collect::<Result<Vec<_>>>()?;
    let weights: Vec<Option<&Tensor>> = weights.iter().map(Some).collect();
    grad(&outputs, inputs, &weights, GradOptions { create_graph, allow_unused: true, ..Default::default() })
}

/// Outputs, gradients, second gradients: as many of them as the sample has.
fn results(call: &Call, args: &Args) -> Outcome<Vec<Outputs>> {
    let inputs: Vec<&Tensor> = args.tensors.iter().filter(|t| t.dtype().is_float()).collect();
    let mut all = vec![calls::run(&call.op, args)?];
    if call.gradients.is_some() {
        all.push(pulled(&all[0], &inputs, call.seconds.is_some())?);
        if call.seconds.is_some() {
            all.push(pulled(&all[1], &inputs, false)?);
        }
    }
    Ok(all)
}

/// Runs a call and compares.
pub fn check(call: &Call, bundle: &Bundle, mode: Mode) -> Verdict {
    let refused = |error: &dyn std::fmt::Display| Verdict::Differs {
        stage: "refused",
        what: error.to_string().lines().next().unwrap_or_default().into(),
    };
    let args = match Args::of(call, bundle) {
        Ok(args) => args,
        Err(error) => return refused(&error),
    };
    if call.gradients.is_some() {
        for tensor in args.tensors.iter().filter(|t| t.dtype().is_float()) {
            if let Err(error) = tensor.requires_grad_(true) {
                return refused(&error);
            }
        }
    }
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match mode {
        Mode::Eager => results(call, &args),
        Mode::Compiled => Compile::new().region().try_run(|| results(call, &args)),
    }));
    let got = match ran {
        Err(_) => return refused(&"a panic"),
        Ok(Err(Stop::Unmapped(why))) => return Verdict::Unmapped(why),
        Ok(Err(Stop::Refused(error))) => return refused(&error),
        Ok(Ok(got)) => got,
    };
    let wanted = [&call.outputs, &call.gradients, &call.seconds];
    for (k, (got, stage)) in got.iter().zip(STAGES).enumerate() {
        let exact = call.exact.as_ref().map(|exact| &exact[k]);
        match compare_all(bundle, got, wanted[k], exact) {
            Ok(None) => {}
            Ok(Some(what)) => return Verdict::Differs { stage, what },
            Err(error) => return refused(&error),
        }
    }
    Verdict::Agrees(got.len())
}

fn compare_all(
    bundle: &Bundle,
    got: &Outputs,
    want: &Tensors,
    exact: Option<&Tensors>,
) -> Result<Option<String>> {
    let Some(want) = want else { return Ok(None) };
    if got.len() != want.len() {
        return Ok(Some(format!("{} tensors instead of {}", got.len(), want.len())));
    }
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let exact = exact.and_then(|exact| exact.as_ref()?.get(i)?.as_ref());
        let difference = match (got, want) {
            (_, None) => None,
            // A gradient that nothing depends on: zeros are as good as none. An output is not compared.
            (None, Some(want)) => unneeded(bundle, want)?,
            (Some(got), Some(want)) => compare(bundle, got, want, exact)?,
        };
        if let Some(what) = difference {
            let place = if want.is_some() && i > 0 { format!("#{i} ") } else { String::new() };
            return Ok(Some(format!("{place}{what}")));
        }
    }
    Ok(None)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.detach()?.to_dtype(DType::F64)?.to_vec::<f64>()
}

fn unneeded(bundle: &Bundle, want: &Stored) -> Result<Option<String>> {
    let is_float = DType::from_name(&want.dtype).is_some_and(DType::is_float);
    let noise = DType::from_name(&want.dtype).map_or(0.0, noise);
    let other = is_float && numbers(&bundle.tensor(want)?)?.iter().any(|&x| x.abs() > noise || x.is_nan());
    Ok(other.then(|| "no gradient".into()))
}

/// `torch.testing.assert_close`'s tolerances: relative and absolute.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (1e-3, 1e-5),
        DType::BF16 => (1.6e-2, 1e-5),
        DType::F32 => (1.3e-6, 1e-5),
        _ => (1e-7, 1e-7),
    }
}

/// What is left where terms of size 1 cancel; halves have float64 to be measured by.
fn noise(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 8.0 * f64::EPSILON,
        DType::F32 => 4.0 * f64::from(f32::EPSILON),
        _ => 0.0,
    }
}

fn compare(bundle: &Bundle, got: &Tensor, want: &Stored, exact: Option<&Stored>) -> Result<Option<String>> {
    if got.dtype().name() != want.dtype || got.shape()[..] != want.shape[..] {
        return Ok(Some(format!("{} instead of {}{:?}", got.ty(), want.dtype, want.shape)));
    }
    let dtype = got.dtype();
    let want = bundle.tensor(want)?;
    if !dtype.is_float() {
        let whole = |t: &Tensor| t.detach()?.to_dtype(DType::I64)?.to_vec::<i64>();
        let (got, want) = (whole(got)?, whole(&want)?);
        let wrong = got.iter().zip(&want).position(|(g, w)| g != w);
        return Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], want[i])));
    }
    let exact = match exact {
        Some(exact) => Some(bundle.tensor(exact)?).filter(|exact| exact.shape() == want.shape()),
        None => None,
    };
    // What float64 has, as this dtype says it: too large is infinite.
    let nearest = exact.as_ref().map(|exact| numbers(&exact.to_dtype(dtype)?)).transpose()?;
    let exact = exact.as_ref().map(numbers).transpose()?;
    let (got, want) = (numbers(got)?, numbers(&want)?);
    let (relative, absolute) = tolerance(dtype);
    // What is small altogether is compared by its own measure.
    let most = want.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    let absolute = (absolute * most.min(1.0)).max(noise(dtype));
    let same = |g: f64, w: f64| g == w || (g.is_nan() && w.is_nan());
    let is_close = |i: usize| {
        let (g, w) = (got[i], want[i]);
        if same(g, w) || (g - w).abs() <= absolute + relative * w.abs() {
            return true;
        }
        let (Some(exact), Some(nearest)) = (&exact, &nearest) else { return false };
        let e = exact[i];
        let error = if w.is_finite() { 2.0 * (w - e).abs() } else { 0.0 };
        same(g, nearest[i]) || (g - e).abs() <= error + absolute + relative * e.abs()
    };
    let wrong: Vec<usize> = (0..got.len()).filter(|&i| !is_close(i)).collect();
    let Some(&first) = wrong.first() else { return Ok(None) };
    // Altogether as near as PyTorch's: where terms cancel, single elements are chance.
    if let Some(exact) = &exact {
        let worst = |x: &[f64]| {
            x.iter().zip(exact).fold(0.0f64, |most, (x, e)| {
                if same(*x, *e) {
                    most
                } else if (x - e).is_nan() {
                    f64::INFINITY
                } else {
                    most.max((x - e).abs())
                }
            })
        };
        let (ours, theirs) = (worst(&got), worst(&want));
        if ours.is_finite() && ours <= 2.0 * theirs {
            return Ok(None);
        }
    }
    let reference = exact.map(|exact| format!(" (float64: {:e})", exact[first])).unwrap_or_default();
    let (g, w) = (got[first], want[first]);
    Ok(Some(format!("{} of {} at {first}: {g:e} instead of {w:e}{reference}", wrong.len(), got.len())))
}
