//! Rows: picking and placing slices and elements along one dim.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_scatter {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_indexing! { $callback [
            $($rows)*

            /// The slices of x at index (one dim) along one dim
            [index index_select _none] "index_select" IndexSelect (x, index) () { dim: usize }
                { ty: scatter::index_select_type, grad: Grad::Fn(scatter::index_select_grad), decompose: Some(scatter::index_select), eval: Eval::Structural,
                  kernel: true, samples: scatter::index_select_samples };
            /// x with the slices of src added at index (one dim) along one dim
            [index index_add _none] "index_add" IndexAdd (x, index, src) () { dim: usize }
                { ty: scatter::index_write_type, grad: Grad::Fn(scatter::index_add_grad),
                  eval: Eval::Structural, samples: scatter::index_add_samples };
            /// x with the slices of src put at index (one dim) along one dim
            [index index_copy _none] "index_copy" IndexCopy (x, index, src) () { dim: usize }
                { ty: scatter::index_write_type, grad: Grad::Fn(scatter::index_copy_grad),
                  eval: Eval::Structural, samples: scatter::index_copy_samples };
            /// x with the elements of src put at index along one dim
            [index scatter _none] "scatter" Scatter (x, index, src) () { dim: usize }
                { ty: scatter::scatter_type, grad: Grad::Fn(scatter::scatter_grad),
                  eval: Eval::Structural, samples: scatter::scatter_samples };
            /// x with the elements of src added at index along one dim
            [index scatter_add _none] "scatter_add" ScatterAdd (x, index, src) () { dim: usize }
                { ty: scatter::scatter_type, grad: Grad::Fn(scatter::scatter_add_grad),
                  eval: Eval::Structural, samples: scatter::scatter_add_samples };
            /// x with the elements of src that meet at an index along one dim reduced to one, with x's own or without
            [index scatter_reduce _none] "scatter_reduce" ScatterReduce (x, index, src) () { dim: usize, reduce: ScatterReduce, include_self: bool }
                { ty: scatter::scatter_type, grad: Grad::Fn(scatter::scatter_reduce_grad),
                  eval: Eval::Structural, samples: scatter::scatter_reduce_samples };
        ]}
    };
}

use super::indexing::{any, check_index_dtype, index_of};
use crate::decompose::one as decomposed;
use crate::gradient::{Cx, Grads, g, zeros_like};
use crate::samples::{ALL, NUMBERS, with_op};
use crate::types::{Rule, check_dims, check_index, checked, common_device, one, same_kind_of, tensor};
use crate::{
    DType, Dims, Domain, EmitExt, GradCall, Op, Result, Sample, ScatterReduce, Shape, TensorTy, Ty, Value,
    Values, Why,
};

/// The dim of a row that works along one.
fn dim_of(op: &Op) -> usize {
    match *op {
        Op::IndexSelect { dim }
        | Op::IndexAdd { dim }
        | Op::IndexCopy { dim }
        | Op::Scatter { dim }
        | Op::ScatterAdd { dim }
        | Op::ScatterReduce { dim, .. } => dim,
        _ => 0,
    }
}

// ---- slices along one dim ------------------------------------------------------------------------------

fn check_line(x: &TensorTy, index: &TensorTy, dim: usize) -> Result<(), Why> {
    check_index_dtype(index)?;
    check_dims(&Dims::from(dim), x.shape.rank())?;
    match index.shape.rank() {
        1 => Ok(()),
        got => Err(Why::Rank { argument: "index", expected: "1", got }),
    }
}

pub(crate) fn index_select_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, index, dim) = (tensor(args, 0, "x")?, tensor(args, 1, "index")?, dim_of(op));
    common_device(args)?;
    check_line(x, index, dim)?;
    let mut shape = x.shape.clone();
    shape[dim] = index.shape[0];
    checked(TensorTy { shape, ..x.clone() })
}

/// A gather whose index is the same all over the other dims.
pub(crate) fn index_select(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (mut shape, dim) = (cx.tensor_ty(args[0]).shape, dim_of(op));
    let count = cx.tensor_ty(args[1]).shape[0];
    let mut line: Shape = shape.iter().map(|_| 1).collect();
    (line[dim], shape[dim]) = (count, count);
    let index = if shape.rank() == 1 { args[1] } else { cx.reshape(args[1], line)? };
    let index = if shape.rank() == 1 { index } else { cx.expand(index, shape)? };
    decomposed(cx.gather(args[0], index, dim))
}

pub(crate) fn index_select_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let zeros = zeros_like(cx, call.inputs[0])?;
    Ok(vec![Some(cx.index_add(zeros, call.inputs[1], g, dim_of(call.op))?), None])
}

pub(crate) fn index_write_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, index, src) = (tensor(args, 0, "x")?, tensor(args, 1, "index")?, tensor(args, 2, "src")?);
    common_device(args)?;
    check_line(x, index, dim_of(op))?;
    same_kind_of(x, src)?;
    let mut slices = x.shape.clone();
    slices[dim_of(op)] = index.shape[0];
    if slices == src.shape { one(x.clone()) } else { Err(Why::shape("src", slices, src.shape.clone())) }
}

pub(crate) fn index_add_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let gsrc = call.wanted(cx, 2, |cx| cx.index_select(g, call.inputs[1], dim_of(call.op)))?;
    Ok(vec![Some(g), None, gsrc])
}

pub(crate) fn index_copy_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, index, dim) = (g!(call), call.inputs[1], dim_of(call.op));
    let gx = call.wanted(cx, 0, |cx| {
        let zeros = zeros_like(cx, call.inputs[2])?;
        cx.index_copy(g, index, zeros, dim)
    })?;
    let gsrc = call.wanted(cx, 2, |cx| cx.index_select(g, index, dim))?;
    Ok(vec![gx, None, gsrc])
}

// ---- elements along one dim ----------------------------------------------------------------------------

pub(crate) fn scatter_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, index, src) = (tensor(args, 0, "x")?, tensor(args, 1, "index")?, tensor(args, 2, "src")?);
    let dim = dim_of(op);
    common_device(args)?;
    check_index(x.shape.rank(), index, dim)?;
    same_kind_of(x, src)?;
    if src.shape != index.shape {
        return Err(Why::shape("src", index.shape.clone(), src.shape.clone()));
    }
    for d in (0..x.shape.rank()).filter(|&d| d != dim) {
        if index.shape[d] > x.shape[d] {
            return Err(crate::types::index_too_long(d, index, x));
        }
    }
    if let (Op::ScatterReduce { reduce: ScatterReduce::Mean, .. }, DType::Bool) = (op, x.dtype) {
        return Err(Why::DType { argument: "x", expected: "numeric", got: DType::Bool });
    }
    one(x.clone())
}

/// `g` with zeros wherever something was put.
fn without_places(cx: Cx<'_>, g: Value, index: Value, dim: usize) -> Result<Value> {
    let (ty, zero) = (cx.tensor_ty(g), cx.number(0.0)?);
    let shape = cx.tensor_ty(index).shape;
    let zeros = cx.full(zero, shape, ty.dtype, ty.device)?;
    cx.scatter(g, index, zeros, dim)
}

pub(crate) fn scatter_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, index, dim) = (g!(call), call.inputs[1], dim_of(call.op));
    let gx = call.wanted(cx, 0, |cx| without_places(cx, g, index, dim))?;
    let gsrc = call.wanted(cx, 2, |cx| cx.gather(g, index, dim))?;
    Ok(vec![gx, None, gsrc])
}

pub(crate) fn scatter_add_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, index) = (g!(call), call.inputs[1]);
    let gsrc = call.wanted(cx, 2, |cx| cx.gather(g, index, dim_of(call.op)))?;
    Ok(vec![Some(g), None, gsrc])
}

pub(crate) fn scatter_reduce_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::ScatterReduce { dim, reduce, include_self }) = (g!(call), call.op) else {
        return Ok(vec![None, None, None]);
    };
    let (x, index, src, dim) = (call.inputs[0], call.inputs[1], call.inputs[2], *dim);
    let ty = cx.tensor_ty(x);
    let (zero, unit) = (cx.number(0.0)?, cx.number(1.0)?);
    let (gx, gsrc) = match reduce {
        ScatterReduce::Sum => (Some(g), call.wanted(cx, 2, |cx| cx.gather(g, index, dim))?),
        ScatterReduce::Mean => {
            // Each of the n that meet has a share of 1/n.
            let own = if *include_self { unit } else { zero };
            let own = cx.full(own, ty.shape.clone(), ty.dtype, ty.device)?;
            let places = cx.tensor_ty(index).shape;
            let ones = cx.full(unit, places, ty.dtype, ty.device)?;
            let count = cx.scatter_add(own, index, ones, dim)?;
            let count = cx.maximum(count, unit)?;
            let share = cx.div(g, count)?;
            (Some(share), call.wanted(cx, 2, |cx| cx.gather(share, index, dim))?)
        }
        ScatterReduce::Amax | ScatterReduce::Amin => {
            // Shared evenly between all that equal the result.
            let y = call.y();
            let best = cx.gather(y, index, dim)?;
            let (x_wins, src_wins) = (cx.eq(x, y)?, cx.eq(src, best)?);
            let (x_wins, src_wins) = (cx.to(x_wins, ty.dtype)?, cx.to(src_wins, ty.dtype)?);
            let x_wins = if *include_self { x_wins } else { without_places(cx, x_wins, index, dim)? };
            let count = cx.scatter_add(x_wins, index, src_wins, dim)?;
            let share = cx.div(g, count)?;
            let gsrc = call.wanted(cx, 2, |cx| {
                let share = cx.gather(share, index, dim)?;
                cx.mul(src_wins, share)
            })?;
            (call.wanted(cx, 0, |cx| cx.mul(x_wins, share))?, gsrc)
        }
        ScatterReduce::Prod => {
            // The product of the others: by division where that is allowed, anew where there is one zero.
            let product = |cx: Cx<'_>, x: Value, src: Value| {
                cx.scatter_reduce(x, index, src, dim, *reduce, *include_self)
            };
            let gx = call.wanted(cx, 0, |cx| {
                let x_zero = cx.eq(x, zero)?;
                let x_safe = cx.where_(x_zero, unit, x)?;
                let others = product(cx, x_safe, src)?;
                let gx = cx.mul(g, others)?;
                cx.div(gx, x_safe)
            })?;
            let gsrc = call.wanted(cx, 2, |cx| {
                let src_zero = cx.eq(src, zero)?;
                let none = cx.full(zero, ty.shape.clone(), ty.dtype, ty.device)?;
                let marks = cx.to(src_zero, ty.dtype)?;
                let zeros = cx.scatter_add(none, index, marks, dim)?;
                let zeros = cx.gather(zeros, index, dim)?;
                let alone = cx.eq(zeros, unit)?;
                let alone = cx.logical_and(src_zero, alone)?;
                let without = cx.where_(alone, unit, src)?;
                let without = product(cx, x, without)?;
                let lone = cx.mul(g, without)?;
                let lone = cx.gather(lone, index, dim)?;
                let src_safe = cx.where_(src_zero, unit, src)?;
                let whole = cx.mul(g, call.y())?;
                let whole = cx.gather(whole, index, dim)?;
                let whole = cx.div(whole, src_safe)?;
                cx.where_(alone, lone, whole)
            })?;
            (gx, gsrc)
        }
    };
    let gx = match gx {
        Some(gx) if !include_self && call.wants(0) => Some(without_places(cx, gx, index, dim)?),
        gx => gx,
    };
    Ok(vec![gx, None, gsrc])
}

// ---- samples -------------------------------------------------------------------------------------------

/// x, how many, dim.
const LINES: &[(&[usize], usize, usize)] = &[
    (&[9], 4, 0),
    (&[4, 37], 6, 0),
    (&[4, 37], 20, 1),
    (&[2, 3, 17], 2, 1),
    (&[5, 3], 0, 0),
    (&[7, 0], 3, 0),
];

pub(crate) fn index_select_samples() -> Vec<Sample> {
    LINES
        .iter()
        .map(|&(x, n, dim)| {
            with_op(Op::IndexSelect { dim }, ALL, vec![any(x), index_of(&[n], Domain::Index(x[dim]))])
        })
        .collect()
}

fn line_writes(dtypes: &'static [DType], op: fn(usize) -> Op, domain: fn(usize) -> Domain) -> Vec<Sample> {
    LINES
        .iter()
        .filter(|&&(x, n, dim)| n <= x[dim] || domain(1) != Domain::Distinct(1))
        .map(|&(x, n, dim)| {
            let mut src = x.to_vec();
            src[dim] = n;
            with_op(op(dim), dtypes, vec![any(x), index_of(&[n], domain(x[dim])), any(&src)])
        })
        .collect()
}

pub(crate) fn index_add_samples() -> Vec<Sample> {
    line_writes(ALL, |dim| Op::IndexAdd { dim }, Domain::Index)
}

pub(crate) fn index_copy_samples() -> Vec<Sample> {
    line_writes(ALL, |dim| Op::IndexCopy { dim }, Domain::Distinct)
}

/// x, index, dim.
const PLACES: &[(&[usize], &[usize], usize)] =
    &[(&[37, 2], &[5, 2], 0), (&[3, 40], &[3, 7], 1), (&[9], &[0], 0), (&[4, 30, 2], &[3, 4, 2], 1)];

fn scatters(dtypes: &'static [DType], op: impl Fn(usize) -> Op, domain: fn(usize) -> Domain) -> Vec<Sample> {
    PLACES
        .iter()
        .map(|&(x, index, dim)| {
            with_op(op(dim), dtypes, vec![any(x), index_of(index, domain(x[dim])), any(index)])
        })
        .collect()
}

pub(crate) fn scatter_samples() -> Vec<Sample> {
    scatters(ALL, |dim| Op::Scatter { dim }, Domain::Distinct)
}

pub(crate) fn scatter_add_samples() -> Vec<Sample> {
    let mut samples = scatters(ALL, |dim| Op::ScatterAdd { dim }, Domain::Index);
    let crowded = vec![any(&[3, 5]), index_of(&[8, 5], Domain::Index(3)), any(&[8, 5])];
    samples.push(with_op(Op::ScatterAdd { dim: 0 }, ALL, crowded));
    samples
}

pub(crate) fn scatter_reduce_samples() -> Vec<Sample> {
    let kinds = [
        ScatterReduce::Sum,
        ScatterReduce::Prod,
        ScatterReduce::Mean,
        ScatterReduce::Amax,
        ScatterReduce::Amin,
    ];
    let mut samples = Vec::new();
    for reduce in kinds {
        let dtypes = if reduce == ScatterReduce::Mean { NUMBERS } else { ALL };
        for include_self in [true, false] {
            let op = |dim| Op::ScatterReduce { dim, reduce, include_self };
            samples.extend(scatters(dtypes, op, Domain::Index));
            let crowded = vec![any(&[3, 5]), index_of(&[4, 5], Domain::Index(3)), any(&[4, 5])];
            samples.push(with_op(op(0), dtypes, crowded));
        }
    }
    samples
}
