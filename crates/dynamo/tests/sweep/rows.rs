//! Every row, on all its samples, dtypes and layouts of operands, compiled and compared with eager, forwards and
//! (for floats) backwards, with the backward pass in the compiled function or after it. The samples of a row, or of
//! a few rows, share one region. The backends that run op by op call it twice, with other numbers: what was recorded
//! must not keep any of the first ones.

use std::sync::Mutex;

use kiln_dynamo::{Backend, Compile};
use kiln_ir::{Class, Grad, Op, Row, SampleArg};
use kiln_tensor::{DType, Result, Tensor};
use kiln_testkit::tolerance;

use crate::cases::{Case, LAYOUTS, Layout, whole};

/// Where the backward pass runs.
#[derive(Copy, Clone, PartialEq, Debug)]
enum Backward {
    /// In the compiled function: one graph.
    Inside,
    /// After it: a graph for each direction.
    Outside,
}

/// All cases' results. Those that leave with gradients are halved: a view that leaves with gradients runs op by
/// op, and it is not the views alone that are of interest here.
fn forward(cases: &[Case], pass: Backward) -> Result<Vec<Tensor>> {
    let result = |case: &Case| match (case.run()?, pass) {
        (y, Backward::Outside) if y.requires_grad() => y.mul(0.5),
        (y, Backward::Inside | Backward::Outside) => Ok(y),
    };
    cases.iter().map(result).collect()
}

/// Gradients of all results into the operands.
fn backward(outputs: &[Tensor]) -> Result<()> {
    let mut total: Option<Tensor> = None;
    for y in outputs.iter().filter(|y| y.requires_grad()) {
        // Not the same gradient everywhere.
        let part = ((y * y * 0.1) + (y * 0.37)).ok()?.sum()?.to_dtype(DType::F64)?;
        total = Some(match total {
            Some(total) => total.add(&part)?,
            None => part,
        });
    }
    total.map_or(Ok(()), |total| total.backward())
}

fn difference(got: &Tensor, want: &Tensor, through: f64) -> Result<Option<String>> {
    if got.ty() != want.ty() {
        return Ok(Some(format!("{} instead of {}", got.ty(), want.ty())));
    }
    if !want.dtype().is_float() {
        let (got, want) = (got.to_vec_cast::<i64>()?, want.to_vec_cast::<i64>()?);
        return Ok((got != want).then(|| format!("{got:?} instead of {want:?}")));
    }
    // Wide results that came by way of halves are no better than halves.
    let tolerance = tolerance(want.dtype()).max(through);
    let (got, want) = (got.to_vec_cast::<f64>()?, want.to_vec_cast::<f64>()?);
    let scale = want.iter().filter(|x| x.is_finite()).fold(1.0f64, |a, x| a.max(x.abs()));
    let close = |g: f64, w: f64| g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * scale;
    let wrong = got.iter().zip(&want).position(|(g, w)| !close(*g, *w));
    Ok(wrong.map(|i| format!("at {i}: {} instead of {}", got[i], want[i])))
}

/// What default numerics promise: an error of at most twice eager's own, and 10⁻⁶ of the largest magnitude, or of
/// `least` if that is larger. `exact` is computed in f64 from the same numbers.
fn inexact(got: &Tensor, eager: &Tensor, exact: &Tensor, least: f64) -> Result<Option<String>> {
    if got.dtype() != DType::F32 || exact.dtype() != DType::F64 {
        return Ok(None);
    }
    let exact = exact.to_vec_cast::<f64>()?;
    let largest = exact.iter().filter(|x| x.is_finite()).fold(least, |a, x| a.max(x.abs()));
    let error = |tensor: &Tensor| -> Result<f64> {
        let values = tensor.to_vec_cast::<f64>()?;
        let finite = values.iter().zip(&exact).filter(|(_, exact)| exact.is_finite());
        Ok(finite.fold(0.0f64, |a, (x, exact)| a.max((x - exact).abs())))
    };
    let (own, allowed) = (error(got)?, 2.0 * error(eager)? + 1e-6 * largest);
    Ok((own > allowed).then(|| format!("an error of {own:e}, {allowed:e} is allowed")))
}

/// The rows' samples in a dtype, with the numbers of one call.
fn cases(rows: &[&'static Row], dtype: DType, call: usize) -> Result<Vec<Case>> {
    let cases = rows.iter().map(|row| row_cases(row, dtype, call));
    Ok(cases.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Whether a row's float operands have gradients.
fn has_gradients(row: &Row, dtype: DType) -> bool {
    dtype.is_float() && !matches!(row.grad, Grad::Zero | Grad::NotDifferentiable(_))
}

fn row_cases(row: &'static Row, dtype: DType, call: usize) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let samples = row.sample_calls();
    let fitting = samples.iter().enumerate().filter(|(_, s)| s.dtypes.contains(&dtype));
    // Kernels for other dtypes differ from those for f32 and i64 in the type only: fewer samples and
    // layouts will do.
    let is_main = matches!(dtype, DType::F32 | DType::I64);
    for (i, sample) in fitting.take(if is_main { usize::MAX } else { 4 }) {
        for (k, layout) in LAYOUTS.into_iter().enumerate() {
            let tensors = sample.args.iter().any(|arg| !matches!(arg, SampleArg::Number(_)));
            // The other two take turns.
            let has_turn = layout == LAYOUTS[1 + i % 2] || whole();
            if layout == Layout::Contiguous || (tensors && is_main && has_turn) {
                let seed = (call * 100_000 + i * 10 + k) as u64;
                cases.push(Case::new(row, sample, dtype, layout, has_gradients(row, dtype), seed)?);
            }
        }
    }
    Ok(cases)
}

fn check(backend: Backend, rows: &[&'static Row], dtype: DType, pass: Backward) -> Result<Vec<String>> {
    let names = || rows.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    // What the C compiler does with the text differs little between types, and random programs have it do all it can:
    // these need not wait for it.
    let level = if dtype == DType::F32 { "1" } else { "0" };
    let region = Compile::new().backend(backend).option("opt_level", level)?.region();
    let mut failures = Vec::new();
    let calls = if backend == Backend::Inductor { 1 } else { 2 };
    for call in 0..calls {
        let (eager, compiled) = (cases(rows, dtype, call)?, cases(rows, dtype, call)?);
        if eager.is_empty() {
            return Ok(Vec::new());
        }
        let want = forward(&eager, pass)?;
        backward(&want)?;
        // Random rows would draw other numbers.
        let is_random = rows.iter().any(|row| row.class == Class::Random);
        let has_exact = backend == Backend::Inductor && dtype == DType::F32 && !is_random;
        let exact = if has_exact {
            let wide = eager.iter().map(Case::exact).collect::<Result<Vec<_>>>()?;
            let results = forward(&wide, pass)?;
            backward(&results)?;
            Some((wide, results))
        } else {
            None
        };
        let got = match pass {
            Backward::Inside => region.run(|| {
                let outputs = forward(&compiled, pass)?;
                backward(&outputs)?;
                outputs.iter().map(|y| y.detach()).collect::<Result<Vec<_>>>()
            })?,
            Backward::Outside => {
                let outputs = region.run(|| forward(&compiled, pass))?;
                backward(&outputs)?;
                outputs
            }
        };
        for (i, (case, other)) in compiled.iter().zip(&eager).enumerate() {
            let mut note = |what: &str, difference: Option<String>| {
                if let Some(text) = difference {
                    let operands: Vec<String> =
                        case.tensors.iter().flatten().map(|t| t.ty().to_string()).collect();
                    failures.push(format!(
                        "{backend}, backward {pass:?}, call {call}: {} {:?} of {} ({:?}), {what}: {text}",
                        case.row.name,
                        case.sample.op.attributes(),
                        operands.join(" × "),
                        case.layout
                    ));
                }
            };
            let involved = case.tensors.iter().flatten().chain([&want[i]]).map(|t| t.dtype());
            let through = involved.filter(|d| d.is_narrow()).map(tolerance).fold(0.0, f64::max);
            note("result", difference(&got[i], &want[i], through)?);
            // Halves on the way make the computation in f64 no better.
            if let Some((wide, results)) = exact.as_ref().filter(|_| through == 0.0) {
                note("result", inexact(&got[i], &want[i], &results[i], 0.0)?);
                let wide = wide[i].tensors.iter().flatten();
                // Gradients of norms cancel: their errors are those of what they are computed from.
                for ((a, b), wide) in
                    case.tensors.iter().flatten().zip(other.tensors.iter().flatten()).zip(wide)
                {
                    if let (Some(a), Some(b), Some(wide)) = (a.grad(), b.grad(), wide.grad()) {
                        note("gradient", inexact(&a, &b, &wide, 1.0)?);
                    }
                }
            }
            let operands = case.tensors.iter().flatten().zip(other.tensors.iter().flatten());
            for (k, (a, b)) in operands.enumerate() {
                let what = format!("gradient of operand {k}");
                match (a.grad(), b.grad()) {
                    (Some(a), Some(b)) => note(&what, difference(&a, &b, through)?),
                    (None, None) => {}
                    (a, _) => note(&what, Some(format!("there: {}", a.is_some()))),
                }
            }
        }
    }
    let explanation = region.explain();
    for graph in &explanation.graphs {
        if let Some(reason) = graph.interpreted.as_ref().filter(|_| backend != Backend::Eager) {
            failures.push(format!("{backend}: {} {dtype} is not compiled: {reason}", names()));
        }
    }
    for recompile in &explanation.recompiles {
        failures.push(format!("{backend}: {} {dtype}: {}", names(), recompile));
    }
    Ok(failures)
}

fn sweep(backend: Backend, dtypes: &[DType], pass: Backward) {
    // One sweep at a time: they share the two or three cores that compile kernels.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // Starting a C compiler takes longer than most kernels: several rows share a region.
    let together = if backend == Backend::Inductor { 8 } else { 1 };
    let mut failures = Vec::new();
    for &dtype in dtypes {
        let rows = Op::ROWS.iter().filter(|row| pass == Backward::Inside || has_gradients(row, dtype));
        for rows in rows.collect::<Vec<_>>().chunks(together) {
            match check(backend, rows, dtype, pass) {
                Ok(found) => failures.extend(found),
                Err(error) => failures.push(format!("{backend}: from {} on, {dtype}: {error}", rows[0].name)),
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
    // They would run op by op, and be right all the same.
    assert_eq!(kiln_dynamo::counters().refused, 0, "kernels that the C compiler fails on");
}

#[test]
fn inductor_f32() {
    sweep(Backend::Inductor, &[DType::F32], Backward::Inside);
}

#[test]
fn inductor_f64() {
    sweep(Backend::Inductor, &[DType::F64], Backward::Inside);
}

#[test]
fn inductor_integers() {
    sweep(Backend::Inductor, &[DType::I64, DType::Bool], Backward::Inside);
}

#[test]
fn inductor_halves() {
    sweep(Backend::Inductor, &[DType::F16, DType::BF16], Backward::Inside);
}

#[test]
fn inductor_narrow_integers() {
    sweep(Backend::Inductor, &[DType::I32, DType::I16, DType::I8, DType::U8], Backward::Inside);
}

#[test]
fn aot_eager() {
    sweep(Backend::AotEager, &DType::ALL, Backward::Inside);
}

#[test]
fn aot_eager_backward_outside() {
    sweep(Backend::AotEager, &[DType::F32, DType::F64, DType::BF16], Backward::Outside);
}

#[test]
fn eager() {
    sweep(Backend::Eager, &DType::ALL, Backward::Inside);
}

#[test]
fn eager_backward_outside() {
    sweep(Backend::Eager, &[DType::F32, DType::F64, DType::BF16], Backward::Outside);
}

/// What is promised to be eager's bits is so by clang, too, and every kernel is compiled by it.
#[test]
fn clang_gives_the_same_bits() {
    let numbered = (14..30).rev().map(|version| format!("clang-{version}"));
    let is_there = |name: &String| std::process::Command::new(name).arg("--version").output().is_ok();
    let clang = std::iter::once("clang".to_string()).chain(numbered).find(is_there);
    let (Some(clang), Err(_)) = (clang, std::env::var("KILN_CC")) else {
        return; // There is nothing to compare with.
    };
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["numerics::", "--nocapture"]).env("KILN_CC", clang).output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("can't be compiled"), "{text}");
    assert!(!text.contains(" 0 passed"), "no test has that name: {text}");
}
