//! Rows: scans and order along one dim.

use crate::gradient::{Cx, Grads, g, one};
use crate::samples::{ALL, Any, LINES, NUMBERS, t, with_op};
use crate::types::{Rule, one as only, tensor};
use crate::{DType, EmitExt, GradCall, Op, Result, Sample, Shape, TensorTy, Ty, Value, Why};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_order {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_contractions! { $callback [
            $($rows)*

            /// Where the largest element of one dim is, the first of several; NaN is the largest
            [index argmax _none] "argmax" Argmax (x) () { dim: usize, keepdim: bool }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::positions(|dim, keepdim| Op::Argmax { dim, keepdim }) };
            /// Where the smallest element of one dim is, the first of several; NaN is the smallest
            [index argmin _none] "argmin" Argmin (x) () { dim: usize, keepdim: bool }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::positions(|dim, keepdim| Op::Argmin { dim, keepdim }) };
            /// Where the median of one dim is, the lower of two; the first NaN if there is one
            [index median_index _none] "median_index" MedianIndex (x) () { dim: usize, keepdim: bool }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::positions(|dim, keepdim| Op::MedianIndex { dim, keepdim }) };
            /// The order that sorts one dim, equals as they were; NaN is the largest
            [index argsort _none] "argsort" Argsort (x) () { dim: usize, descending: bool }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: order::argsort_samples };
            /// Where the k largest or smallest of one dim are, in order; NaN is the largest
            [index topk_index _none] "topk_index" TopkIndex (x) () { k: usize, dim: usize, largest: bool }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: order::topk_samples };
            /// Where the largest element of one dim up to each is, the last of several; NaN is the largest
            [index cummax_index _none] "cummax_index" CummaxIndex (x) () { dim: usize }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::scans(samples::ALL, |dim, _| Op::CummaxIndex { dim }) };
            /// Where the smallest element of one dim up to each is, the last of several; NaN is the smallest
            [index cummin_index _none] "cummin_index" CumminIndex (x) () { dim: usize }
                { ty: order::ty, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::scans(samples::ALL, |dim, _| Op::CumminIndex { dim }) };
            /// Sums of all elements of one dim up to each, or from each on
            [reduction cumsum _none] "cumsum" Cumsum (x) () { dim: usize, reverse: bool }
                { ty: order::ty, grad: Grad::Fn(order::cumsum), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::scans(samples::ALL, |dim, reverse| Op::Cumsum { dim, reverse }) };
            /// Products of all elements of one dim up to each
            [reduction cumprod _none] "cumprod" Cumprod (x) () { dim: usize }
                { ty: order::ty, grad: Grad::Fn(products::cumprod), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::scans(samples::ALL, |dim, _| Op::Cumprod { dim }) };
            /// log Σ exp of all elements of one dim up to each, or from each on
            [reduction logcumsumexp _none] "logcumsumexp" Logcumsumexp (x) () { dim: usize, reverse: bool }
                { ty: order::ty, grad: Grad::Fn(order::logcumsumexp), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: || order::scans(samples::FLOATS, |dim, reverse| Op::Logcumsumexp { dim, reverse }) };
        ]}
    };
}

pub(crate) fn positions(op: fn(usize, bool) -> Op) -> Vec<Sample> {
    LINES
        .iter()
        .enumerate()
        .map(|(i, (s, dim))| with_op(op(*dim, i % 2 == 1), NUMBERS, vec![t(s, Any)]))
        .collect()
}

pub(crate) fn argsort_samples() -> Vec<Sample> {
    let op = |i: usize, dim| Op::Argsort { dim, descending: i % 2 == 1 };
    LINES.iter().enumerate().map(|(i, (s, dim))| with_op(op(i, *dim), ALL, vec![t(s, Any)])).collect()
}

pub(crate) fn topk_samples() -> Vec<Sample> {
    let size = |shape: &[usize], dim: usize| shape.get(dim).copied().unwrap_or(1);
    let op = |i: usize, k, dim| Op::TopkIndex { k, dim, largest: i % 2 == 1 };
    LINES
        .iter()
        .enumerate()
        .map(|(i, (s, dim))| with_op(op(i, size(s, *dim).div_ceil(2), *dim), NUMBERS, vec![t(s, Any)]))
        .collect()
}

pub(crate) fn scans(dtypes: &'static [DType], op: fn(usize, bool) -> Op) -> Vec<Sample> {
    let mut all: Vec<Sample> = LINES
        .iter()
        .enumerate()
        .map(|(i, (s, dim))| with_op(op(*dim, i % 2 == 1), dtypes, vec![t(s, Any)]))
        .collect();
    all.push(with_op(op(0, true), dtypes, vec![t(&[3, 0], Any)]));
    all
}

pub(crate) fn ty(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let (rank, wide) = (x.shape.rank(), if x.dtype.is_float() { x.dtype } else { DType::I64 });
    let (Op::Argmax { dim, .. }
    | Op::Argmin { dim, .. }
    | Op::MedianIndex { dim, .. }
    | Op::Argsort { dim, .. }
    | Op::TopkIndex { dim, .. }
    | Op::CummaxIndex { dim }
    | Op::CumminIndex { dim }
    | Op::Cumsum { dim, .. }
    | Op::Cumprod { dim }
    | Op::Logcumsumexp { dim, .. }) = *op
    else {
        return only(x.clone());
    };
    if dim >= rank.max(1) {
        return Err(Why::Dim { dim: dim as i64, rank });
    }
    let size = x.shape.get(dim).copied().unwrap_or(1);
    let (dtype, shape): (DType, Shape) = match *op {
        Op::Argmax { keepdim, .. } | Op::Argmin { keepdim, .. } | Op::MedianIndex { keepdim, .. } => {
            if x.dtype == DType::Bool {
                return Err(Why::DType { argument: "x", expected: "numeric", got: x.dtype });
            }
            if size == 0 {
                return Err(Why::Empty { dim });
            }
            let dims = if rank == 0 { crate::Dims::default() } else { crate::Dims::from(dim) };
            (DType::I64, x.shape.reduced(&dims, keepdim))
        }
        Op::Argsort { .. } | Op::CummaxIndex { .. } | Op::CumminIndex { .. } => (DType::I64, x.shape.clone()),
        Op::TopkIndex { k, .. } => {
            if k > size {
                let limit = "the size of dim";
                return Err(Why::Limit { argument: "k", most: size, limit, dim: Some(dim), got: k });
            }
            let mut shape = x.shape.clone();
            if rank > 0 {
                shape[dim] = k;
            }
            (DType::I64, shape)
        }
        Op::Logcumsumexp { .. } if !x.dtype.is_float() => {
            return Err(Why::DType { argument: "x", expected: "floating point", got: x.dtype });
        }
        _ => (wide, x.shape.clone()),
    };
    only(TensorTy { dtype, device: x.device, shape })
}

pub(crate) fn cumsum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Cumsum { dim, reverse }) = (g!(call), call.op) else { return Ok(vec![None]) };
    one(cx.cumsum(g, *dim, !reverse))
}

/// Stands for log 0 where −∞ would make NaN of differences.
const NOTHING: f64 = -1e30;

/// exp(x + log Σ from each on of `weights`·exp(−y)), for the weights that are positive.
fn weighted(cx: Cx<'_>, weights: Value, x: Value, y: Value, dim: usize, reverse: bool) -> Result<Value> {
    let (zero, unit, nothing) = (cx.number(0.0)?, cx.number(1.0)?, cx.number(NOTHING)?);
    let counts = cx.gt(weights, zero)?;
    // Not a logarithm of zero, whose slope would be infinite.
    let weights = cx.where_(counts, weights, unit)?;
    let log = cx.log(weights)?;
    let log = cx.sub(log, y)?;
    let log = cx.where_(counts, log, nothing)?;
    let sum = cx.logcumsumexp(log, dim, reverse)?;
    let sum = cx.add(sum, x)?;
    cx.exp(sum)
}

pub(crate) fn logcumsumexp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // exp(x)·Σ g·exp(−y) from each on, positive and negative g apart, in logarithms
    let (g, &Op::Logcumsumexp { dim, reverse }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let x = call.inputs[0];
    // Anew, and not as it was rounded: its exponential is needed.
    let y = cx.logcumsumexp(x, dim, reverse)?;
    // Sums of nothing have no gradient to give.
    let (least, zero) = (cx.number(f64::NEG_INFINITY)?, cx.number(0.0)?);
    let empty = cx.eq(y, least)?;
    let y = cx.where_(empty, zero, y)?;
    let minus = cx.neg(g)?;
    let up = weighted(cx, g, x, y, dim, !reverse)?;
    let down = weighted(cx, minus, x, y, dim, !reverse)?;
    one(cx.sub(up, down))
}
