//! Rows: reductions.

use crate::decompose::one as result;
use crate::gradient::{Cx, Grads, g, one, spread, zeros_like};
use crate::samples::{FLOATS, reductions};
use crate::table::functions::float;
use crate::types::{Rule, check_dims, tensor};
use crate::{
    DType, Dims, EmitExt, GradCall, Op, Result, Sample, Scalar, Shape, TensorTy, Ty, Value, Values, Why,
};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_reductions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_order! { $callback [
            $($rows)*

            /// Sum over dims; truth values and integers are summed as i64
            [reduction sum _none] "sum" Sum (x) () { dims: Dims, keepdim: bool }
                { ty: types::sum, grad: Grad::Fn(gradient::sum), decompose: Some(decompose::keepdim),
                  eval: Eval::Reduce, samples: samples::reduction };
            /// Mean over dims
            [reduction mean _none] "mean" Mean (x) () { dims: Dims, keepdim: bool }
                { ty: types::mean, grad: Grad::Fn(gradient::mean), decompose: Some(decompose::mean), level: Level::Composite,
                  eval: Eval::Structural, samples: samples::mean };
            /// Largest element over dims; NaN if there is one
            [reduction amax _none] "amax" Amax (x) () { dims: Dims, keepdim: bool }
                { ty: types::amax, grad: Grad::Fn(gradient::amax),
                  decompose: Some(decompose::keepdim), eval: Eval::Reduce, samples: samples::amax };
            /// Smallest element over dims; NaN if there is one
            [reduction amin _none] "amin" Amin (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::amin), level: Level::Composite,
                  decompose: Some(reductions::amin_steps), eval: Eval::Structural,
                  samples: || samples::reductions(samples::ALL, false, |dims, keepdim| Op::Amin { dims, keepdim }) };
            /// Whether any element over dims is not zero
            [reduction any _none] "any" Any (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Zero, level: Level::Composite, decompose: Some(reductions::any_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Any { dims, keepdim }) };
            /// Whether all elements over dims are not zero
            [reduction all _none] "all" All (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Zero, level: Level::Composite, decompose: Some(reductions::all_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::All { dims, keepdim }) };
            /// How many elements over dims are not zero
            [reduction count_nonzero _none] "count_nonzero" CountNonzero (x) () { dims: Dims }
                { ty: reductions::ty, grad: Grad::Zero, level: Level::Composite, decompose: Some(reductions::count_nonzero_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, _| Op::CountNonzero { dims }) };
            /// Product over dims; truth values and integers are multiplied as i64
            [reduction prod _none] "prod" Prod (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(products::prod),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Prod { dims, keepdim }) };
            /// The gradient of prod's x, for a gradient that keeps the dims
            [composite prod_backward _none] "prod_backward" ProdBackward (grad, x) () { dims: Dims }
                { ty: products::backward_type, grad: Grad::Fn(products::backward), level: Level::Composite,
                  decompose: Some(products::backward_steps), eval: Eval::Structural, samples: products::backward_samples };
            /// Sum over dims, NaN counted as 0
            [reduction nansum _none] "nansum" Nansum (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Decompose, level: Level::Composite, decompose: Some(reductions::nansum_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Nansum { dims, keepdim }) };
            /// log Σ exp(x) over dims
            [reduction logsumexp _none] "logsumexp" Logsumexp (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::logsumexp), level: Level::Composite,
                  decompose: Some(reductions::logsumexp_steps), eval: Eval::Structural,
                  samples: || samples::reductions(samples::FLOATS, true, |dims, keepdim| Op::Logsumexp { dims, keepdim }) };
            /// Σ (x − mean)² / (n − correction) over dims
            [reduction var _none] "var" Var (x) () { dims: Dims, correction: i64, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::var), level: Level::Composite,
                  decompose: Some(reductions::var_steps), eval: Eval::Structural, samples: || reductions::var_samples(false) };
            /// The square root of var
            [reduction std _none] "std" Std (x) () { dims: Dims, correction: i64, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::std), level: Level::Composite,
                  decompose: Some(reductions::std_steps), eval: Eval::Structural, samples: || reductions::var_samples(true) };
            /// (Σ |x|^ord)^(1/ord) over dims; ord 0 counts what is not zero, ±∞ is the largest or smallest |x|
            [reduction linalg_vector_norm _none] "linalg_vector_norm" LinalgVectorNorm (x) () { ord: Scalar, dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::norm), level: Level::Composite,
                  decompose: Some(reductions::norm_steps), eval: Eval::Structural, samples: reductions::norm_samples };
            /// exp(x) / Σ exp(x) over one dim
            [composite softmax _none] "softmax" Softmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::softmax), level: Level::Composite,
                  decompose: Some(decompose::softmax), eval: Eval::Structural, samples: samples::softmax };
            /// x − log Σ exp(x) over one dim
            [composite log_softmax _none] "log_softmax" LogSoftmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::log_softmax), level: Level::Composite,
                  decompose: Some(decompose::log_softmax), eval: Eval::Structural, samples: samples::log_softmax };
        ]}
    };
}

/// The dims of a reduction, and whether they are kept.
pub(crate) fn dims(op: &Op) -> Option<(&Dims, bool)> {
    Some(match op {
        Op::Amin { dims, keepdim }
        | Op::Any { dims, keepdim }
        | Op::All { dims, keepdim }
        | Op::Prod { dims, keepdim }
        | Op::Nansum { dims, keepdim }
        | Op::Logsumexp { dims, keepdim }
        | Op::Var { dims, keepdim, .. }
        | Op::Std { dims, keepdim, .. }
        | Op::LinalgVectorNorm { dims, keepdim, .. } => (dims, *keepdim),
        Op::CountNonzero { dims } => (dims, false),
        _ => return None,
    })
}

/// Whether a reduction has no result over no elements.
fn needs_elements(op: &Op) -> bool {
    match op {
        Op::Amin { .. } => true,
        Op::LinalgVectorNorm { ord, .. } => ord.as_f64() < 0.0 || ord.as_f64().is_infinite(),
        _ => false,
    }
}

pub(crate) fn ty(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Some((dims, keepdim)) = dims(op) else { return Err(Why::Arity { expected: "1".into(), got: 0 }) };
    check_dims(dims, x.shape.rank())?;
    if needs_elements(op) && dims.iter().any(|&d| x.shape[d] == 0) {
        return Err(Why::Other("is not defined over no elements".into()));
    }
    let float_only = || match x.dtype.is_float() {
        true => Ok(x.dtype),
        false => Err(Why::DType { argument: "x", expected: "floating point", got: x.dtype }),
    };
    let dtype = match op {
        Op::Any { .. } | Op::All { .. } => DType::Bool,
        Op::CountNonzero { .. } => DType::I64,
        Op::Prod { .. } | Op::Nansum { .. } if !x.dtype.is_float() => DType::I64,
        Op::Logsumexp { .. } if !x.dtype.is_float() => DType::F32,
        Op::Var { .. } | Op::Std { .. } | Op::LinalgVectorNorm { .. } => float_only()?,
        _ => x.dtype,
    };
    crate::types::one(TensorTy { dtype, device: x.device, shape: x.shape.reduced(dims, keepdim) })
}

pub(crate) fn var_samples(root: bool) -> Vec<Sample> {
    let op: fn(Dims, bool) -> Op = match root {
        true => |dims, keepdim| Op::Std { dims, correction: 0, keepdim },
        false => |dims, keepdim| Op::Var { dims, correction: 0, keepdim },
    };
    let mut all = reductions(FLOATS, false, op);
    // A single element has no spread to differentiate the root of.
    let ones = |dims: &Dims, shape: &Shape| dims.iter().map(|&d| shape[d]).product::<usize>() <= 1;
    all.retain(|sample| match (&sample.op, &sample.args[0]) {
        (Op::Std { dims, .. }, crate::SampleArg::Tensor(shape, _)) => !ones(dims, shape),
        _ => true,
    });
    let two: fn(Dims, bool) -> Op = match root {
        true => |dims, keepdim| Op::Std { dims, correction: 1, keepdim },
        false => |dims, keepdim| Op::Var { dims, correction: 1, keepdim },
    };
    let large = |dims: &[usize]| two(Dims::from(dims), false);
    all.push(crate::samples::with_op(
        large(&[1]),
        FLOATS,
        vec![crate::samples::t(&[4, 37], crate::Domain::Any)],
    ));
    all.push(crate::samples::with_op(
        large(&[0, 2]),
        FLOATS,
        vec![crate::samples::t(&[2, 3, 17], crate::Domain::Any)],
    ));
    all
}

pub(crate) fn norm_samples() -> Vec<Sample> {
    use crate::samples::{t, with_op};
    let mut all = Vec::new();
    for ord in [0.0, 1.0, 2.0, 3.5, 0.5, f64::INFINITY, f64::NEG_INFINITY] {
        for (shape, dims, keepdim) in
            [(&[5][..], &[0][..], false), (&[4, 37], &[1], true), (&[2, 3, 17], &[0, 2], false)]
        {
            let op = Op::LinalgVectorNorm { ord: Scalar::Float(ord), dims: Dims::from(dims), keepdim };
            all.push(with_op(op, FLOATS, vec![t(shape, crate::Domain::NonZero)]));
        }
    }
    let op = Op::LinalgVectorNorm { ord: Scalar::Int(2), dims: Dims::default(), keepdim: false };
    all.push(with_op(op, FLOATS, vec![t(&[], crate::Domain::NonZero)]));
    all
}

/// The number of elements over dims.
fn count(shape: &Shape, dims: &Dims) -> usize {
    dims.iter().map(|&d| shape[d]).product()
}

/// The largest of what is turned round; bits of integers turn round without overflow.
pub(crate) fn amin_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (x, Op::Amin { dims, keepdim }) = (args[0], op) else { return Ok(args.into()) };
    if cx.tensor_ty(x).dtype.is_float() {
        let minus = cx.neg(x)?;
        let largest = cx.amax(minus, dims.clone(), *keepdim)?;
        return result(cx.neg(largest));
    }
    let turned = cx.bitwise_not(x)?;
    let largest = cx.amax(turned, dims.clone(), *keepdim)?;
    result(cx.bitwise_not(largest))
}

pub(crate) fn amin(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // Shared equally between the elements that are smallest.
    let (g, Op::Amin { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let x = call.inputs[0];
    one(share(cx, x, call.y(), dims, g))
}

/// g shared equally between the elements that equal `value`.
fn share(cx: Cx<'_>, x: Value, value: Value, dims: &Dims, g: Value) -> Result<Value> {
    let ty = cx.tensor_ty(x);
    let value = spread(cx, value, &ty.shape, dims)?;
    let hit = cx.eq(x, value)?;
    let hit = cx.to(hit, ty.dtype)?;
    let count = cx.sum(hit, dims.clone(), true)?;
    let g = cx.reshape(g, ty.shape.reduced(dims, true))?;
    let share = cx.div(g, count)?;
    cx.mul(hit, share)
}

pub(crate) fn any_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (Op::Any { dims, keepdim }, zero) = (op, cx.number(Scalar::Int(0))?) else { return Ok(args.into()) };
    let truth = cx.to(args[0], DType::Bool)?;
    let count = cx.sum(truth, dims.clone(), *keepdim)?;
    result(cx.gt(count, zero))
}

pub(crate) fn all_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (Op::All { dims, keepdim }, zero) = (op, cx.number(Scalar::Int(0))?) else { return Ok(args.into()) };
    let lacking = cx.logical_not(args[0])?;
    let count = cx.sum(lacking, dims.clone(), *keepdim)?;
    result(cx.eq(count, zero))
}

pub(crate) fn count_nonzero_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::CountNonzero { dims } = op else { return Ok(args.into()) };
    let truth = cx.to(args[0], DType::Bool)?;
    result(cx.sum(truth, dims.clone(), false))
}

pub(crate) fn nansum_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (mut x, Op::Nansum { dims, keepdim }) = (args[0], op) else { return Ok(args.into()) };
    if cx.tensor_ty(x).dtype.is_float() {
        let (number, zero) = (cx.eq(x, x)?, cx.number(0.0)?);
        x = cx.where_(number, x, zero)?;
    }
    result(cx.sum(x, dims.clone(), *keepdim))
}

/// m + log Σ exp(x − m), m the largest, or 0 where that is infinite.
pub(crate) fn logsumexp_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Logsumexp { dims, keepdim } = op else { return Ok(args.into()) };
    let x = float(cx, args[0])?;
    let shape = cx.tensor_ty(x).shape;
    if count(&shape, dims) == 0 {
        let e = cx.exp(x)?;
        let total = cx.sum(e, dims.clone(), *keepdim)?;
        return result(cx.log(total));
    }
    let zero = cx.number(0.0)?;
    let largest = cx.amax(x, dims.clone(), true)?;
    let infinite = cx.isinf(largest)?;
    let largest = cx.where_(infinite, zero, largest)?;
    let shifted = cx.sub(x, largest)?;
    let e = cx.exp(shifted)?;
    let total = cx.sum(e, dims.clone(), true)?;
    let log = cx.log(total)?;
    let sum = cx.add(log, largest)?;
    if *keepdim {
        Ok([sum].into_iter().collect())
    } else {
        result(cx.reshape(sum, shape.reduced(dims, false)))
    }
}

pub(crate) fn logsumexp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·exp(x − y)
    let (g, Op::Logsumexp { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let x = call.inputs[0];
    let kept = cx.tensor_ty(x).shape.reduced(dims, true);
    let (g, y) = (cx.reshape(g, kept.clone())?, cx.reshape(call.y(), kept)?);
    let (nothing, zero) = (cx.number(f64::NEG_INFINITY)?, cx.number(0.0)?);
    let empty = cx.eq(y, nothing)?;
    let y = cx.where_(empty, zero, y)?;
    let shifted = cx.sub(x, y)?;
    let probability = cx.exp(shifted)?;
    one(cx.mul(g, probability))
}

/// x − mean over dims in f64, and what the squares are divided by. Squares of f32 would overflow where their root
/// does not, and differences from a mean that was rounded at the magnitude of x would lose digits.
fn deviation(cx: Cx<'_>, x: Value, dims: &Dims, correction: i64) -> Result<(Value, Value)> {
    let ty = cx.tensor_ty(x);
    let x = if ty.dtype == DType::F64 { x } else { cx.to(x, DType::F64)? };
    let mean = cx.mean(x, dims.clone(), true)?;
    let difference = cx.sub(x, mean)?;
    let divisor = cx.number((count(&ty.shape, dims) as f64 - correction as f64).max(0.0))?;
    Ok((difference, divisor))
}

/// Σ (x − mean)² / (n − correction) in f64.
fn variance(cx: Cx<'_>, x: Value, dims: &Dims, correction: i64, keepdim: bool) -> Result<Value> {
    let (difference, divisor) = deviation(cx, x, dims, correction)?;
    let square = cx.mul(difference, difference)?;
    let total = cx.sum(square, dims.clone(), keepdim)?;
    cx.div(total, divisor)
}

/// A result that was computed in f64, in the dtype of x.
fn as_operand(cx: Cx<'_>, result: Value, x: Value) -> Result<Values> {
    let dtype = cx.tensor_ty(x).dtype;
    Ok([if dtype == DType::F64 { result } else { cx.to(result, dtype)? }].into_iter().collect())
}

pub(crate) fn var_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Var { dims, correction, keepdim } = op else { return Ok(args.into()) };
    let variance = variance(cx, args[0], dims, *correction, *keepdim)?;
    as_operand(cx, variance, args[0])
}

pub(crate) fn var(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // 2·g·(x − mean) / (n − correction)
    let (g, Op::Var { dims, correction, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let (x, two) = (call.inputs[0], cx.number(2.0)?);
    let g = cx.reshape(g, cx.tensor_ty(x).shape.reduced(dims, true))?;
    let (difference, divisor) = deviation(cx, x, dims, *correction)?;
    let factor = cx.div(two, divisor)?;
    let scaled = cx.mul(g, factor)?;
    one(cx.mul(difference, scaled))
}

pub(crate) fn std_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Std { dims, correction, keepdim } = op else { return Ok(args.into()) };
    let variance = variance(cx, args[0], dims, *correction, *keepdim)?;
    let root = cx.sqrt(variance)?;
    as_operand(cx, root, args[0])
}

pub(crate) fn std(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·(x − mean) / (n − correction) / y, and 0 where nothing is spread
    let (g, Op::Std { dims, correction, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let (x, zero) = (call.inputs[0], cx.number(0.0)?);
    let kept = cx.tensor_ty(x).shape.reduced(dims, true);
    let (g, y) = (cx.reshape(g, kept.clone())?, cx.reshape(call.y(), kept)?);
    let (difference, divisor) = deviation(cx, x, dims, *correction)?;
    // In this order: the product could overflow.
    let share = cx.div(g, y)?;
    let share = cx.div(share, divisor)?;
    let flat = cx.eq(y, zero)?;
    let share = cx.where_(flat, zero, share)?;
    one(cx.mul(difference, share))
}

pub(crate) fn norm_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (x, Op::LinalgVectorNorm { ord, dims, keepdim }) = (args[0], op) else { return Ok(args.into()) };
    let (dims, keepdim) = (dims.clone(), *keepdim);
    match ord.as_f64() {
        0.0 => {
            let (zero, dtype) = (cx.number(0.0)?, cx.tensor_ty(x).dtype);
            let hit = cx.ne(x, zero)?;
            let hit = cx.to(hit, dtype)?;
            result(cx.sum(hit, dims, keepdim))
        }
        2.0 => {
            let square = cx.mul(x, x)?;
            let total = cx.sum(square, dims, keepdim)?;
            result(cx.sqrt(total))
        }
        ord => {
            let size = cx.abs(x)?;
            if ord == 1.0 {
                return result(cx.sum(size, dims, keepdim));
            }
            if ord.is_infinite() {
                return result(if ord > 0.0 {
                    cx.amax(size, dims, keepdim)
                } else {
                    cx.amin(size, dims, keepdim)
                });
            }
            let (power, root) = (cx.number(ord)?, cx.number(1.0 / ord)?);
            let powers = cx.pow(size, power)?;
            let total = cx.sum(powers, dims, keepdim)?;
            result(cx.pow(total, root))
        }
    }
}

pub(crate) fn norm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::LinalgVectorNorm { ord, dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let (x, ord, zero) = (call.inputs[0], ord.as_f64(), cx.number(0.0)?);
    if ord == 0.0 {
        return one(zeros_like(cx, x));
    }
    let kept = cx.tensor_ty(x).shape.reduced(dims, true);
    let g = cx.reshape(g, kept.clone())?;
    let sign = cx.sign(x)?;
    if ord == 1.0 {
        return one(cx.mul(sign, g));
    }
    let y = cx.reshape(call.y(), kept)?;
    if ord.is_infinite() {
        let size = cx.abs(x)?;
        let shared = share(cx, size, y, dims, g)?;
        return one(cx.mul(sign, shared));
    }
    // x·g/y for ord 2, sign x·|x|^(ord−1)·g·y^(1−ord) else; 0 where a vector is.
    let (scale, direction) = match ord {
        2.0 => (cx.div(g, y)?, x),
        _ => {
            let (up, down) = (cx.number(ord - 1.0)?, cx.number(1.0 - ord)?);
            let size = cx.abs(x)?;
            let power = cx.pow(size, up)?;
            let nothing = cx.eq(x, zero)?;
            let power = cx.where_(nothing, zero, power)?;
            let below = cx.pow(y, down)?;
            (cx.mul(g, below)?, cx.mul(sign, power)?)
        }
    };
    let flat = cx.eq(y, zero)?;
    let scale = cx.where_(flat, zero, scale)?;
    one(cx.mul(direction, scale))
}
