//! Rows: padding.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_padding {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_scatter! { $callback [
            $($rows)*

            /// x with a number before and after its elements
            [index constant_pad_nd _none] "constant_pad_nd" ConstantPadNd (x, value) () { widths: Pairs }
                { ty: padding::constant_type, grad: Grad::Fn(padding::constant_grad),
                  decompose: Some(padding::constant), eval: Eval::Structural,
                  kernel: true, samples: padding::constant_samples };
            /// x with its elements mirrored at both ends
            [index reflection_pad _none] "reflection_pad" ReflectionPad (x) () { widths: Pairs }
                { ty: padding::repeating_type, grad: Grad::Fn(padding::repeating_grad),
                  decompose: Some(padding::repeating), eval: Eval::Structural,
                  kernel: true, samples: padding::reflection_samples };
            /// x with its first and last elements repeated
            [index replication_pad _none] "replication_pad" ReplicationPad (x) () { widths: Pairs }
                { ty: padding::repeating_type, grad: Grad::Fn(padding::repeating_grad),
                  decompose: Some(padding::repeating), eval: Eval::Structural,
                  kernel: true, samples: padding::replication_samples };
        ]}
    };
}

use super::shapes::iota;
use crate::gradient::{Cx, Grads, g};
use crate::samples::{ALL, t, with_op};
use crate::types::{Rule, checked, tensor};
use crate::{
    Domain, EmitExt, GradCall, Op, Pairs, Result, Sample, SampleArg, Scalar, Shape, TensorTy, Ty, Value,
    Values, Why,
};

fn widths(op: &Op) -> Option<(Shape, Shape)> {
    match op {
        Op::ConstantPadNd { widths } | Op::ReflectionPad { widths } | Op::ReplicationPad { widths } => {
            Some((widths.firsts(), widths.seconds()))
        }
        _ => None,
    }
}

fn padded(op: &Op, x: &TensorTy) -> Rule {
    let Some((before, after)) = widths(op) else { return crate::types::one(x.clone()) };
    let rank = x.shape.rank();
    for widths in [&before, &after] {
        if widths.rank() != rank {
            return Err(Why::sizes("the number of padded dims and the tensor's", widths.rank(), rank));
        }
    }
    let shape = (0..rank).map(|d| x.shape[d].saturating_add(before[d]).saturating_add(after[d])).collect();
    checked(TensorTy { shape, ..x.clone() })
}

pub(crate) fn constant_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    if args[1].is_scalar() {
        padded(op, x)
    } else {
        Err(Why::Operand { argument: "value", expected: "a number" })
    }
}

pub(crate) fn repeating_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let result = padded(op, x)?;
    let Some((before, after)) = widths(op) else { return Ok(result) };
    let mirrored = matches!(op, Op::ReflectionPad { .. });
    for d in 0..x.shape.rank() {
        let (widest, size) = (before[d].max(after[d]), x.shape[d]);
        let most = if mirrored { size.saturating_sub(1) } else { size.min(1).saturating_mul(usize::MAX) };
        if widest > most {
            let limit = if mirrored { "less than the size of dim" } else { "the size of dim" };
            return Err(Why::Limit { argument: "padding", most, limit, dim: Some(d), got: widest });
        }
    }
    Ok(result)
}

/// Filled tensors, one per padded dim, with what is inside put into them.
pub(crate) fn constant(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Some((before, after)) = widths(op) else { return Ok(smallvec::smallvec![args[0]]) };
    let mut ty = cx.tensor_ty(args[0]);
    let mut value = args[0];
    for d in 0..ty.shape.rank() {
        if before[d] + after[d] > 0 {
            let size = ty.shape[d];
            ty.shape[d] += before[d] + after[d];
            let filled = cx.full(args[1], ty.shape.clone(), ty.dtype, ty.device)?;
            value = cx.slice_scatter(filled, value, d, before[d], before[d] + size, 1)?;
        }
    }
    Ok(smallvec::smallvec![value])
}

pub(crate) fn constant_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Some((before, _))) = (g!(call), widths(call.op)) else { return Ok(vec![None, None]) };
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    let mut grad = g;
    for d in 0..shape.rank() {
        if cx.tensor_ty(grad).shape[d] != shape[d] {
            grad = cx.slice(grad, d, before[d], before[d] + shape[d], 1)?;
        }
    }
    Ok(vec![Some(grad), None])
}

/// From where the elements of a padded dim of this size come: clamped, or mirrored by |i| at the start and
/// last − |last − i| at the end.
fn origins(cx: Cx<'_>, op: &Op, x: &TensorTy, d: usize, (before, after): (&Shape, &Shape)) -> Result<Value> {
    let len = x.shape[d] + before[d] + after[d];
    let at = iota(cx, (-(before[d] as i64), 1), len, (0, 1), x.device)?;
    let last = cx.number(Scalar::Int(x.shape[d] as i64 - 1))?;
    match op {
        Op::ReflectionPad { .. } => {
            let distance = cx.abs(at)?;
            let from_end = cx.sub(last, distance)?;
            let distance = cx.abs(from_end)?;
            cx.sub(last, distance)
        }
        _ => {
            let zero = cx.number(Scalar::Int(0))?;
            let low = cx.maximum(at, zero)?;
            cx.minimum(low, last)
        }
    }
}

/// Each padded dim picks its elements.
pub(crate) fn repeating(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Some((before, after)) = widths(op) else { return Ok(smallvec::smallvec![args[0]]) };
    let x = cx.tensor_ty(args[0]);
    let mut value = args[0];
    for d in (0..x.shape.rank()).filter(|&d| before[d] + after[d] > 0) {
        let from = origins(cx, op, &x, d, (&before, &after))?;
        value = cx.index_select(value, from, d)?;
    }
    Ok(smallvec::smallvec![value])
}

/// Each padded dim gives its elements' gradients back, the last one first.
pub(crate) fn repeating_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Some((before, after))) = (g!(call), widths(call.op)) else { return Ok(vec![None]) };
    let x = cx.tensor_ty(call.inputs[0]);
    let mut grad = g;
    for d in (0..x.shape.rank()).rev().filter(|&d| before[d] + after[d] > 0) {
        let mut ty = cx.tensor_ty(grad);
        ty.shape[d] = x.shape[d];
        let zero = cx.number(0.0)?;
        let zeros = cx.full(zero, ty.shape, ty.dtype, ty.device)?;
        let from = origins(cx, call.op, &x, d, (&before, &after))?;
        grad = cx.index_add(zeros, from, grad, d)?;
    }
    Ok(vec![Some(grad)])
}

/// Shape, widths before, widths after.
const PADS: &[(&[usize], &[usize], &[usize])] = &[
    (&[5], &[2], &[1]),
    (&[4, 37], &[0, 3], &[0, 0]),
    (&[3, 4], &[1, 2], &[2, 1]),
    (&[2, 3, 17], &[0, 2, 5], &[0, 0, 16]),
    (&[0, 2], &[0, 1], &[0, 1]),
];

type Make = fn(Pairs) -> Op;

fn samples(op: Make, extra: Vec<SampleArg>) -> Vec<Sample> {
    PADS.iter()
        .map(|&(shape, before, after)| {
            let args = [vec![t(shape, Domain::Any)], extra.clone()].concat();
            with_op(op(Pairs::new(before, after)), ALL, args)
        })
        .collect()
}

pub(crate) fn constant_samples() -> Vec<Sample> {
    let op: Make = |widths| Op::ConstantPadNd { widths };
    let mut all = samples(op, vec![SampleArg::Number(Scalar::Int(1))]);
    all.push(with_op(
        op(Pairs::default()),
        ALL,
        vec![t(&[], Domain::Any), SampleArg::Number(Scalar::Int(0))],
    ));
    all
}

pub(crate) fn reflection_samples() -> Vec<Sample> {
    samples(|widths| Op::ReflectionPad { widths }, Vec::new())
}

pub(crate) fn replication_samples() -> Vec<Sample> {
    samples(|widths| Op::ReplicationPad { widths }, Vec::new())
}
