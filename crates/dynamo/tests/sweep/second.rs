//! Second derivatives of every row against finite differences of the first ones, in f64; at zeros, too.

use kiln_ir::{Domain, Grad, Op, Row, SampleArg};
use kiln_tensor::{DType, GradOptions, Result, Tensor, grad};

use crate::cases::{Case, Layout};

fn weights(y: &Tensor, phase: f64) -> Result<Tensor> {
    let n = Tensor::arange(1, 1 + y.numel() as i64, &y.device())?.to_dtype(DType::F64)?;
    n.mul(0.7)?.add(phase)?.sin()?.reshape(y.shape())
}

/// The gradients of a weighted sum of the result with respect to the float operands.
fn first(case: &Case, create_graph: bool) -> Result<Vec<Tensor>> {
    let y = case.run()?;
    let loss = y.mul(&weights(&y, 0.3)?)?.sum()?;
    let operands: Vec<&Tensor> = floats(case);
    if !loss.requires_grad() {
        return operands.iter().map(|x| x.detach()?.zeros_like()).collect();
    }
    let options = GradOptions { create_graph, allow_unused: true, ..GradOptions::default() };
    let grads = grad(&[&loss], &operands, &[], options)?;
    grads.into_iter().zip(operands).map(|(g, x)| g.map_or_else(|| x.detach()?.zeros_like(), Ok)).collect()
}

fn floats(case: &Case) -> Vec<&Tensor> {
    case.tensors.iter().flatten().filter(|t| t.dtype() == DType::F64).collect()
}

/// A weighted sum of the first gradients.
fn slope(case: &Case, create_graph: bool) -> Result<Tensor> {
    let mut total = Tensor::from_vec(vec![0f64], 1)?.sum()?;
    for g in first(case, create_graph)? {
        total = total.add(&g.mul(&weights(&g, 1.1)?)?.sum()?)?;
    }
    Ok(total)
}

/// The same call with one element of one operand moved.
fn moved(case: &Case, operand: usize, element: usize, by: f64) -> Result<f64> {
    let mut tensors = Vec::new();
    let mut at = 0;
    for tensor in &case.tensors {
        tensors.push(match tensor {
            Some(t) if t.dtype() == DType::F64 => {
                let mut values = t.detach()?.to_vec::<f64>()?;
                if at == operand {
                    values[element] += by;
                }
                at += 1;
                let t = Tensor::from_vec(values, t.shape())?;
                t.requires_grad_(true)?;
                Some(t)
            }
            other => other.clone(),
        });
    }
    let case = Case { row: case.row, sample: case.sample.clone(), layout: case.layout, tensors };
    slope(&case, false)?.item::<f64>()
}

fn check(case: &Case) -> Result<Option<String>> {
    let total = slope(case, true)?;
    let operands = floats(case);
    let options = GradOptions { allow_unused: true, ..GradOptions::default() };
    let second = if total.requires_grad() {
        grad(&[&total], &operands, &[], options)?
    } else {
        vec![None; operands.len()]
    };
    for (operand, (x, got)) in operands.iter().zip(second).enumerate() {
        let got = got.map_or_else(|| x.detach()?.zeros_like(), Ok)?.to_vec::<f64>()?;
        for element in (0..got.len()).step_by(got.len().div_ceil(6).max(1)) {
            let h = 1e-5;
            let want = (moved(case, operand, element, h)? - moved(case, operand, element, -h)?) / (2.0 * h);
            let close = (got[element] - want).abs() <= 2e-4 * want.abs().max(1.0);
            if !close {
                return Ok(Some(format!(
                    "operand {operand} at {element}: {} instead of {want}",
                    got[element]
                )));
            }
        }
    }
    Ok(None)
}

/// The samples of a row that are small; with zeros among the elements if asked for.
fn cases(row: &'static Row, zeros: bool) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (i, sample) in row.sample_calls().iter().enumerate() {
        let small = |arg: &SampleArg| match arg {
            SampleArg::Tensor(shape, _) | SampleArg::Fixed(_, shape, _) => shape.numel() <= 160,
            SampleArg::Number(_) => true,
        };
        if !sample.dtypes.contains(&DType::F64) || !sample.args.iter().all(small) {
            continue;
        }
        let mut case = Case::new(row, sample, DType::F64, Layout::Contiguous, false, 77 + i as u64)?;
        for (arg, tensor) in sample.args.iter().zip(&mut case.tensors) {
            let (SampleArg::Tensor(_, domain), Some(t)) = (arg, tensor) else { continue };
            if zeros && matches!(domain, Domain::Any | Domain::NonZero) {
                // One or two zeros a line.
                let mut values = t.to_vec::<f64>()?;
                values.iter_mut().skip(1).step_by(3 + i % 2).for_each(|x| *x = 0.0);
                *t = Tensor::from_vec(values, t.shape())?;
            }
        }
        for t in case.tensors.iter().flatten().filter(|t| t.dtype() == DType::F64) {
            t.requires_grad_(true)?;
        }
        cases.push(case);
    }
    Ok(cases)
}

fn sweep(rows: impl Iterator<Item = &'static Row>, zeros: bool) {
    let (mut failures, mut checked) = (Vec::new(), 0);
    for row in rows.filter(|row| matches!(row.grad, Grad::Fn(_) | Grad::Decompose)) {
        for case in cases(row, zeros).unwrap() {
            checked += 1;
            let operands: Vec<String> = case.tensors.iter().flatten().map(|t| t.ty().to_string()).collect();
            let what =
                || format!("{} {:?} of {}", row.name, case.sample.op.attributes(), operands.join(" × "));
            match check(&case) {
                Ok(None) => {}
                Ok(Some(text)) => failures.push(format!("{}: {text}", what())),
                Err(error) => failures.push(format!("{}: {error}", what())),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {checked} fail\n{}", failures.len(), failures.join("\n"));
    assert!(checked > 20, "{checked} calls were checked");
}

#[test]
fn second_derivatives_are_finite_differences_of_the_first() {
    // The slope of tetragamma, which the second derivative of trigamma needs, is not in the table.
    sweep(Op::ROWS.iter().filter(|row| row.name != "trigamma"), false);
}

#[test]
fn second_derivatives_at_zeros() {
    let smooth = [
        "prod",
        "prod_backward",
        "cumprod",
        "mul",
        "cumsum",
        "logcumsumexp",
        "logsumexp",
        "softmax",
        "square",
        "mm",
    ];
    sweep(Op::ROWS.iter().filter(|row| smooth.contains(&row.name)), true);
}
