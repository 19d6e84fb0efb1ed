//! Decompositions of composite rows into simpler ones. Each states the exact order of operations, which the
//! eager kernels follow too, so that eager and compiled results agree bit for bit.

use std::f64::consts;

use smallvec::smallvec;

use crate::formula::{Term, steps};
use crate::gradient::Cx;
use crate::gradient::sum_along;
use crate::table::functions::promoted;
use crate::{Approximate, DType, Dims, EmitExt, Op, Reduction, Result, Scalar, Shape, Ty, Value, Values};

pub(crate) fn one(value: Result<Value>) -> Result<Values> {
    Ok(smallvec![value?])
}

/// x + alpha·y → add(x, mul(alpha, y))
pub(crate) fn add(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let scaled = cx.mul(args[2], args[1])?;
    one(cx.add(args[0], scaled))
}

/// x − alpha·y → sub(x, mul(alpha, y))
pub(crate) fn sub(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let scaled = cx.mul(args[2], args[1])?;
    one(cx.sub(args[0], scaled))
}

/// The op on operands converted to the type they are computed in, its result converted back; `None` if no
/// operand is of a narrow dtype. Halves never are: [`Op::decompose`] widened them.
///
/// mm(x, y) : i8 → to(mm(to(x, i64), to(y, i64)), i8)
fn widened(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Option<Values>> {
    let tys: Vec<Ty> = args.iter().map(|&v| cx.ty(v).clone()).collect();
    if !tys.iter().filter_map(Ty::as_tensor).any(|t| t.dtype.is_narrow()) {
        return Ok(None);
    }
    let mut wide = Vec::with_capacity(args.len());
    for (&arg, ty) in args.iter().zip(&tys) {
        wide.push(match ty {
            Ty::Tensor(t) if t.dtype.is_narrow() => cx.to(arg, t.dtype.computing())?,
            _ => arg,
        });
    }
    let result = cx.emit(op.clone(), &wide)?[0];
    let dtype = tys.iter().filter_map(Ty::as_tensor).map(|t| t.dtype).next().unwrap_or(DType::F32);
    Ok(Some(smallvec![cx.to(result, dtype)?]))
}

/// A prim but for narrow dtypes, which are computed in a wider one.
pub(crate) fn contraction(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    match widened(cx, op, args)? {
        Some(result) => Ok(result),
        None => cx.emit(op.clone(), args),
    }
}

/// Random numbers of a narrow dtype are drawn in the type they are computed in.
pub(crate) fn random(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (dtype, wide) = match op {
        Op::Rand { shape, dtype, device } if dtype.is_narrow() => {
            (*dtype, Op::Rand { shape: shape.clone(), dtype: dtype.computing(), device: *device })
        }
        Op::Randn { shape, dtype, device } if dtype.is_narrow() => {
            (*dtype, Op::Randn { shape: shape.clone(), dtype: dtype.computing(), device: *device })
        }
        other => return cx.emit(other.clone(), args),
    };
    let drawn = cx.emit(wide, args)?[0];
    one(cx.to(drawn, dtype))
}

pub(crate) fn identity(_: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    Ok(smallvec![args[0]])
}

pub(crate) fn relu(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    // Of two zeros the second is taken: −0.0 stays what it is, as in the scalar function.
    let zero = cx.number(Scalar::Int(0))?;
    one(cx.maximum(zero, args[0]))
}

/// erf form: (x·½)·(1 + erf(x·√½));  tanh form: (x·½)·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
pub(crate) fn gelu(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let is_tanh = matches!(op, Op::Gelu { approximate: Approximate::Tanh });
    steps!(cx, args, |x| {
        let bent = if is_tanh {
            ((x + x * x * x * 0.044715) * (2.0 / consts::PI).sqrt()).tanh()
        } else {
            (x * consts::FRAC_1_SQRT_2).erf()
        };
        x * 0.5 * (bent + 1.0)
    })
}

/// Whether a value is, or holds, truth values, with which differences are not defined.
fn holds_truth(ty: &Ty) -> bool {
    match ty {
        Ty::Tensor(t) => t.dtype == DType::Bool,
        Ty::Scalar(kind) => kind.dtype() == DType::Bool,
        Ty::List(items) => items.kinds().any(|t| t.dtype == DType::Bool),
    }
}

/// w < ½: x + w·(end − x), else end − (end − x)·(1 − w)
pub(crate) fn lerp(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (half, unit) = (cx.number(0.5)?, cx.number(1.0)?);
    let mut number = |v: Value| if holds_truth(cx.ty(v)) { cx.mul(v, unit) } else { Ok(v) };
    let (x, end, weight) = (number(args[0])?, number(args[1])?, number(args[2])?);
    let span = cx.sub(end, x)?;
    let forward = cx.mul(weight, span)?;
    let near = cx.add(x, forward)?;
    let rest = cx.sub(unit, weight)?;
    let backward = cx.mul(span, rest)?;
    let far = cx.sub(end, backward)?;
    let size = cx.abs(weight)?;
    let small = cx.lt(size, half)?;
    one(cx.where_(small, near, far))
}

/// x + (value·a)·b
pub(crate) fn addcmul(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    let whole =
        matches!((cx.ty(args[0]), cx.ty(args[3])), (Ty::Tensor(x), Ty::Scalar(_)) if !x.dtype.is_float());
    let value = if whole { cx.to(args[3], DType::I64)? } else { args[3] };
    let scaled = cx.mul(value, args[1])?;
    let product = cx.mul(scaled, args[2])?;
    one(cx.add(args[0], product))
}

pub(crate) fn copy(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let x = cx.tensor_ty(args[0]);
    if cx.ty(args[1]).is_scalar() {
        return one(cx.full(args[1], x.shape, x.dtype, x.device));
    }
    let src = cx.tensor_ty(args[1]);
    let converted = if src.dtype == x.dtype { args[1] } else { cx.to(args[1], x.dtype)? };
    if src.shape == x.shape { Ok(smallvec![converted]) } else { one(cx.expand(converted, x.shape)) }
}

/// Reductions drop their dims; a reshape keeps them with size 1. A sum over truth values is one of integers.
pub(crate) fn keepdim(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let ty = cx.tensor_ty(args[0]);
    let (reduced, dims) = match op {
        Op::Sum { dims, .. } => {
            let wide = if ty.dtype.is_float() { ty.dtype } else { DType::I64 };
            let x = if ty.dtype == wide { args[0] } else { cx.to(args[0], wide)? };
            (if dims.is_empty() { x } else { cx.sum(x, dims.clone(), false)? }, dims)
        }
        Op::Amax { dims, .. } => {
            (if dims.is_empty() { args[0] } else { cx.amax(args[0], dims.clone(), false)? }, dims)
        }
        _ => return Ok(smallvec![args[0]]),
    };
    match op {
        Op::Sum { keepdim: true, .. } | Op::Amax { keepdim: true, .. } => {
            one(cx.reshape(reduced, ty.shape.reduced(dims, true)))
        }
        _ => Ok(smallvec![reduced]),
    }
}

pub(crate) fn mean(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Mean { dims, keepdim } = op else { return Ok(smallvec![args[0]]) };
    let shape = cx.tensor_ty(args[0]).shape;
    let count: usize = dims.iter().map(|&d| shape[d]).product();
    let total = cx.sum(args[0], dims.clone(), *keepdim)?;
    let count = cx.number(count as f64)?;
    one(cx.div(total, count))
}

/// s = x − max x, exp(s) and Σ exp(s) along one dim: what both softmaxes are made of.
fn exponentials(x: Term<'_>, dim: usize) -> [Term<'_>; 3] {
    let largest = if x.shape().rank() == 0 { x } else { x.amax(Dims::from(dim), true) };
    let shifted = x - largest;
    let e = shifted.exp();
    [shifted, e, sum_along(e, dim)]
}

/// e = exp(x − max x);  e / Σ e
pub(crate) fn softmax(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (x, Op::Softmax { dim }) = (args[0], op) else { return Ok(smallvec![args[0]]) };
    if cx.tensor_ty(x).shape.numel() == 0 {
        return Ok(smallvec![x]);
    }
    steps!(cx, args, |x| {
        let [_, e, total] = exponentials(x, *dim);
        // One division a row: the sum is at least 1, so its reciprocal is an ordinary number.
        e * total.reciprocal()
    })
}

/// s = x − max x;  s − log Σ exp(s)
pub(crate) fn log_softmax(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (x, Op::LogSoftmax { dim }) = (args[0], op) else { return Ok(smallvec![args[0]]) };
    if cx.tensor_ty(x).shape.numel() == 0 {
        return Ok(smallvec![x]);
    }
    steps!(cx, args, |x| {
        let [shifted, _, total] = exponentials(x, *dim);
        shifted - total.log()
    })
}

pub(crate) fn addmm(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    if let Some(result) = widened(cx, op, args)? {
        return Ok(result);
    }
    let product = cx.mm(args[1], args[2])?;
    one(cx.add(product, args[0]))
}

/// Rows flattened to a matrix, product with the transposed weight, bias added.
pub(crate) fn linear(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    if let Some(result) = widened(cx, op, args)? {
        return Ok(result);
    }
    let (x, weight) = (args[0], args[1]);
    let (x_shape, w_shape) = (cx.tensor_ty(x).shape, cx.tensor_ty(weight).shape);
    let rows: usize = x_shape[..x_shape.rank() - 1].iter().product();
    let flat = if x_shape.rank() == 2 { x } else { cx.reshape(x, Shape::from([rows, w_shape[1]]))? };
    let wt = cx.permute(weight, Dims::from([1, 0]))?;
    let mut y = cx.mm(flat, wt)?;
    if let Some(&bias) = args.get(2) {
        y = cx.add(y, bias)?;
    }
    let mut shape = x_shape;
    let last = shape.rank() - 1;
    shape[last] = w_shape[0];
    if shape.rank() == 2 { Ok(smallvec![y]) } else { one(cx.reshape(y, shape)) }
}

pub(crate) fn transpose(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Transpose { dim0, dim1 } = op else { return Ok(smallvec![args[0]]) };
    let mut dims = Dims::all(cx.tensor_ty(args[0]).shape.rank());
    dims.swap(*dim0, *dim1);
    one(cx.permute(args[0], dims))
}

/// low + (high − low)·rand
pub(crate) fn uniform(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Uniform { shape, dtype, device } = op else { return Ok(smallvec![args[0]]) };
    let mut number = |v: Value| if holds_truth(cx.ty(v)) { cx.to(v, DType::F64) } else { Ok(v) };
    let (low, high) = (number(args[0])?, number(args[1])?);
    let unit = cx.rand(args[2], args[3], shape.clone(), dtype.computing(), *device)?;
    let span = cx.sub(high, low)?;
    let scaled = cx.mul(unit, span)?;
    let result = cx.add(scaled, low)?;
    if dtype.is_narrow() { one(cx.to(result, *dtype)) } else { Ok(smallvec![result]) }
}

pub(crate) fn nll_loss(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::NllLoss { reduction, ignore_index } = op else { return Ok(smallvec![args[0]]) };
    let input = cx.tensor_ty(args[0]);
    let rows = if input.shape.rank() == 2 { input.shape[0] } else { 1 };
    let classes = input.shape[input.shape.rank() - 1];
    let ignore = cx.number(Scalar::Int(*ignore_index))?;
    let (zero_class, zero, unit) = (cx.number(Scalar::Int(0))?, cx.number(0.0)?, cx.number(1.0)?);
    let matrix = cx.reshape(args[0], Shape::from([rows, classes]))?;
    let target = cx.reshape(args[1], Shape::from([rows]))?;
    let counted = cx.ne(target, ignore)?;
    let safe = cx.where_(counted, target, zero_class)?;
    let safe = cx.reshape(safe, Shape::from([rows, 1]))?;
    let picked = cx.gather(matrix, safe, 1)?;
    let picked = cx.reshape(picked, Shape::from([rows]))?;
    let loss = cx.neg(picked)?;
    let loss = cx.where_(counted, loss, zero)?;
    match reduction {
        Reduction::None => {
            let shape = if input.shape.rank() == 2 { Shape::from([rows]) } else { Shape::scalar() };
            one(cx.reshape(loss, shape))
        }
        Reduction::Sum => one(cx.sum(loss, Dims::from(0), false)),
        Reduction::Mean => {
            let total = cx.sum(loss, Dims::from(0), false)?;
            let ones = cx.full(unit, Shape::from([rows]), input.dtype, input.device)?;
            let weights = cx.where_(counted, ones, zero)?;
            let count = cx.sum(weights, Dims::from(0), false)?;
            one(cx.div(total, count))
        }
    }
}

pub(crate) fn cross_entropy(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::CrossEntropy { reduction, ignore_index } = op else { return Ok(smallvec![args[0]]) };
    let dim = cx.tensor_ty(args[0]).shape.rank() - 1;
    let log_probability = cx.log_softmax(args[0], dim)?;
    one(cx.nll_loss(log_probability, args[1], *reduction, *ignore_index))
}
