//! In-place forms against their out-of-place forms: values and gradients, on results, on views, under `no_grad`,
//! eagerly and compiled, in one graph and with a break after the change.

use kiln_dynamo::{Backend, Compile};
use kiln_ir::{Class, Grad, Op, Row, Ty};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{DType, Device, Result, Tensor, no_grad, run_op, run_op_in_place};

use crate::cases::{Case, Layout, whole};

/// What is changed.
#[derive(Copy, Clone, PartialEq, Debug)]
enum Target {
    /// The result of an op.
    Result,
    /// One of two planes of the result of an op.
    Plane,
    /// The result of an op, its dims in reverse order.
    Reversed,
    /// The result of an op, while no gradients are recorded.
    Unrecorded,
}

const TARGETS: [Target; 4] = [Target::Result, Target::Plane, Target::Reversed, Target::Unrecorded];

/// A call whose result fits into its first operand.
struct Change {
    case: Case,
    target: Target,
    /// What the target is computed from.
    leaf: Tensor,
}

fn reversed(x: &Tensor) -> Result<Tensor> {
    let dims: Vec<i64> = (0..x.rank() as i64).rev().collect();
    x.permute(&dims[..])
}

/// Not the same gradient everywhere.
fn weighted(x: &Tensor) -> Result<Tensor> {
    let weights = Tensor::arange(1, 1 + x.numel() as i64, &x.device())?.to_dtype(DType::F64)?;
    let weights = weights.mul(0.37)?.sin()?.reshape(x.shape())?;
    x.to_dtype(DType::F64)?.mul(&weights)?.sum()
}

impl Change {
    fn new(case: Case, x: &Tensor, target: Target) -> Result<Change> {
        let leaf = match target {
            Target::Result | Target::Unrecorded => x.mul(1.0)?,
            Target::Plane => Tensor::stack([&x.mul(0.5)?, x], 0)?,
            Target::Reversed => reversed(x)?.contiguous()?,
        };
        leaf.requires_grad_(true)?;
        Ok(Change { case, target, leaf })
    }

    /// The whole memory and the part of it that is changed.
    fn memory(&self) -> Result<(Tensor, Tensor)> {
        let whole = self.leaf.mul(1.0)?;
        let part = match self.target {
            Target::Result | Target::Unrecorded => whole.clone(),
            Target::Plane => whole.select(0, 1)?,
            Target::Reversed => reversed(&whole)?,
        };
        Ok((whole, part))
    }

    fn args<'a>(&'a self, first: &'a Tensor) -> Vec<Arg<'a>> {
        let mut args = self.case.args();
        args[0] = Arg::Tensor(first);
        args
    }

    /// What is in the memory after the change, which is made in place.
    fn in_place(&self) -> Result<Tensor> {
        let (whole, part) = self.memory()?;
        let args = self.args(&part);
        if self.target == Target::Unrecorded {
            no_grad_run(|| run_op_in_place(&self.case.sample.op, &args))?;
        } else {
            run_op_in_place(&self.case.sample.op, &args)?;
        }
        Ok(whole)
    }

    /// The same without any change in place.
    fn out_of_place(&self) -> Result<Tensor> {
        let (whole, part) = self.memory()?;
        let output = run_op(&self.case.sample.op, &self.args(&part))?;
        let Output::Tensor(new) = output else { unreachable!("no sample makes a list") };
        let new = new.to_dtype(whole.dtype())?;
        match self.target {
            Target::Result => Ok(new),
            Target::Plane => Tensor::stack([&whole.select(0, 0)?, &new], 0),
            Target::Reversed => reversed(&new),
            // New values, and the gradient that the old ones had.
            Target::Unrecorded => new.detach()?.add(&whole.sub(&whole.detach()?)?),
        }
    }

    /// The gradients of all float operands; none is as good as zeros.
    fn grads(&self) -> Result<Vec<Tensor>> {
        let others = self.case.tensors.iter().skip(1).flatten().filter(|t| t.dtype().is_float());
        let grad = |t: &Tensor| t.grad().map_or_else(|| t.detach()?.zeros_like(), Ok);
        std::iter::once(&self.leaf).chain(others).map(grad).collect()
    }

    fn name(&self) -> String {
        let operands: Vec<String> = self.case.tensors.iter().flatten().map(|t| t.ty().to_string()).collect();
        format!(
            "{}_ {:?} of {} on {:?}",
            self.case.row.name,
            self.case.sample.op.attributes(),
            operands.join(" × "),
            self.target
        )
    }
}

fn no_grad_run<R>(body: impl FnOnce() -> R) -> R {
    let _mode = no_grad();
    body()
}

/// The changes that a row can make. Attributes and operands beyond the first are the samples'.
fn changes(row: &'static Row, dtype: DType, target: Target) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    let has_none = matches!(row.grad, Grad::NotDifferentiable(_));
    if has_none
        || matches!(row.class, Class::View | Class::Random | Class::Create | Class::Constant | Class::List)
    {
        return Ok(changes);
    }
    let samples = row.sample_calls();
    for (i, sample) in samples.iter().enumerate().filter(|(_, s)| s.dtypes.contains(&dtype)) {
        let case = Case::new(row, sample, dtype, Layout::Contiguous, true, i as u64)?;
        let Some(first) = case.tensors[0].as_ref().map(Tensor::detach).transpose()? else { continue };
        let tys: Vec<Ty> = case
            .args()
            .iter()
            .map(|arg| match arg {
                Arg::Tensor(t) => Ty::Tensor(t.ty()),
                Arg::Number(x) => Ty::Scalar(x.kind()),
                Arg::List(_) => unreachable!("no sample has a list"),
            })
            .collect();
        let Ok(outs) = case.sample.op.infer(&tys) else { continue };
        let fits = matches!(&outs[0], Ty::Tensor(out) if out.shape == first.shape() && out.dtype == dtype);
        if fits && first.dtype() == dtype {
            changes.push(Change::new(case, &first, target)?);
        }
    }
    Ok(changes)
}

/// How the changes run.
#[derive(Copy, Clone, PartialEq, Debug)]
enum Way {
    Eager,
    Compiled(Backend),
    /// With a value that is read after every change.
    Broken(Backend),
}

fn run(changes: &[Change], way: Way) -> Result<Vec<Tensor>> {
    let body = |broken: bool| {
        let mut results = Vec::new();
        let mut total = Tensor::zeros((), &Device::Cpu)?.to_dtype(DType::F64)?;
        for change in changes {
            let whole = change.in_place()?;
            if broken {
                whole.to_dtype(DType::F64)?.sum()?.item::<f64>()?;
            }
            total = total.add(&weighted(&whole)?)?;
            results.push(whole.detach()?);
        }
        if total.requires_grad() {
            total.backward()?;
        }
        Ok(results)
    };
    match way {
        Way::Eager => body(false),
        Way::Compiled(backend) => {
            Compile::new().backend(backend).option("opt_level", "0")?.region().run(|| body(false))
        }
        Way::Broken(backend) => {
            Compile::new().backend(backend).option("opt_level", "0")?.region().run(|| body(true))
        }
    }
}

fn same(got: &Tensor, want: &Tensor, tolerance: f64) -> Result<bool> {
    let (got, want) =
        (got.to_dtype(DType::F64)?.to_vec::<f64>()?, want.to_dtype(DType::F64)?.to_vec::<f64>()?);
    let scale = want.iter().filter(|x| x.is_finite()).fold(1.0f64, |a, x| a.max(x.abs()));
    let close =
        |(g, w): (&f64, &f64)| g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= tolerance * scale;
    Ok(got.len() == want.len() && got.iter().zip(&want).all(close))
}

fn check(rows: &[&'static Row], dtype: DType, target: Target, way: Way) -> Result<Vec<String>> {
    let all = |rows: &[&'static Row]| -> Result<Vec<Change>> {
        Ok(rows
            .iter()
            .map(|row| changes(row, dtype, target))
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .flatten()
            .collect())
    };
    let (reference, changed) = (all(rows)?, all(rows)?);
    let mut failures = Vec::new();
    let got = run(&changed, way)?;
    for ((change, reference), got) in changed.iter().zip(&reference).zip(&got) {
        let want = reference.out_of_place()?;
        if want.requires_grad() {
            weighted(&want)?.backward()?;
        }
        // Parts of another size are summed in another order.
        let tolerance = 8.0 * kiln_testkit::tolerance(dtype);
        if !same(got, &want, tolerance)? {
            failures.push(format!("{way:?}: {}: {got} instead of {want}", change.name()));
        }
        for (i, (got, want)) in change.grads()?.iter().zip(&reference.grads()?).enumerate() {
            if !same(got, want, tolerance)? {
                failures.push(format!("{way:?}: {}: gradient {i} is {got} instead of {want}", change.name()));
            }
        }
    }
    Ok(failures)
}

fn sweep(dtypes: &[DType], ways: &[Way], step: usize) {
    let mut failures = Vec::new();
    for &dtype in dtypes {
        for target in TARGETS {
            for &way in ways {
                let together = if way == Way::Eager { 1 } else { 12 };
                let rows: Vec<&'static Row> = Op::ROWS.iter().collect();
                for rows in rows.chunks(together).step_by(step) {
                    match check(rows, dtype, target, way) {
                        Ok(found) => failures.extend(found),
                        Err(error) => failures
                            .push(format!("{way:?}, {dtype}, {target:?}, from {} on: {error}", rows[0].name)),
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn eager() {
    sweep(&[DType::F64, DType::F16], &[Way::Eager], 1);
}

#[test]
fn aot_eager() {
    sweep(&[DType::F64], &[Way::Compiled(Backend::AotEager), Way::Broken(Backend::AotEager)], 1);
}

#[test]
fn inductor() {
    let step = if whole() { 1 } else { 8 };
    sweep(&[DType::F64], &[Way::Compiled(Backend::Inductor), Way::Broken(Backend::Inductor)], step);
}
