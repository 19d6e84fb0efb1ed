//! Rows: reductions.

use crate::decompose::one as result;
use crate::formula::{Term, rule, steps};
use crate::gradient::{Cx, Grads, one, share, zeros_like};
use crate::samples::{FLOATS, reductions};
use crate::types::{Rule, check_dims, float, tensor};
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
                  eval: Eval::Reduce,
                  prim: Some(reductions::is_prim_sum), kernel: true, samples: samples::reduction };
            /// Mean over dims
            [reduction mean _none] "mean" Mean (x) () { dims: Dims, keepdim: bool }
                { ty: types::mean, grad: Grad::Fn(gradient::mean), decompose: Some(decompose::mean),
                  eval: Eval::Structural, kernel: true, samples: samples::mean };
            /// Largest element over dims; NaN if there is one
            [reduction amax _none] "amax" Amax (x) () { dims: Dims, keepdim: bool }
                { ty: types::amax, grad: Grad::Fn(gradient::amax),
                  decompose: Some(decompose::keepdim), eval: Eval::Reduce,
                  prim: Some(|op, _| matches!(op, Op::Amax { dims, keepdim: false } if !dims.is_empty())), kernel: true, samples: samples::amax };
            /// Smallest element over dims; NaN if there is one
            [reduction amin _none] "amin" Amin (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::amin),
                  decompose: Some(reductions::amin_steps), eval: Eval::Structural,
                  kernel: true, samples: || samples::reductions(samples::ALL, false, |dims, keepdim| Op::Amin { dims, keepdim }) };
            /// Whether any element over dims is not zero
            [reduction any _none] "any" Any (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Zero, decompose: Some(reductions::any_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Any { dims, keepdim }) };
            /// Whether all elements over dims are not zero
            [reduction all _none] "all" All (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Zero, decompose: Some(reductions::all_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::All { dims, keepdim }) };
            /// How many elements over dims are not zero
            [reduction count_nonzero _none] "count_nonzero" CountNonzero (x) () { dims: Dims }
                { ty: reductions::ty, grad: Grad::Zero, decompose: Some(reductions::count_nonzero_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, _| Op::CountNonzero { dims }) };
            /// Product over dims; truth values and integers are multiplied as i64
            [reduction prod _none] "prod" Prod (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(products::prod),
                  eval: Eval::Structural, refuses: Refuses::NotFloats, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Prod { dims, keepdim }) };
            /// The gradient of prod's x, for a gradient that keeps the dims
            [composite prod_backward _none] "prod_backward" ProdBackward (grad, x) () { dims: Dims }
                { ty: products::backward_type, grad: Grad::Fn(products::backward),
                  decompose: Some(products::backward_steps), eval: Eval::Structural, samples: products::backward_samples };
            /// Sum over dims, NaN counted as 0
            [reduction nansum _none] "nansum" Nansum (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Decompose, decompose: Some(reductions::nansum_steps),
                  eval: Eval::Structural, samples: || samples::reductions(samples::ALL, true, |dims, keepdim| Op::Nansum { dims, keepdim }) };
            /// log Σ exp(x) over dims
            [reduction logsumexp _none] "logsumexp" Logsumexp (x) () { dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::logsumexp),
                  decompose: Some(reductions::logsumexp_steps), eval: Eval::Structural,
                  samples: || samples::reductions(samples::FLOATS, true, |dims, keepdim| Op::Logsumexp { dims, keepdim }) };
            /// Σ (x − mean)² / (n − correction) over dims
            [reduction var _none] "var" Var (x) () { dims: Dims, correction: i64, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::var),
                  decompose: Some(reductions::var_steps), eval: Eval::Structural, samples: || reductions::var_samples(false) };
            /// The square root of var
            [reduction std _none] "std" Std (x) () { dims: Dims, correction: i64, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::std),
                  decompose: Some(reductions::std_steps), eval: Eval::Structural, samples: || reductions::var_samples(true) };
            /// (Σ |x|^ord)^(1/ord) over dims; ord 0 counts what is not zero, ±∞ is the largest or smallest |x|
            [reduction linalg_vector_norm _none] "linalg_vector_norm" LinalgVectorNorm (x) () { ord: Scalar, dims: Dims, keepdim: bool }
                { ty: reductions::ty, grad: Grad::Fn(reductions::norm),
                  decompose: Some(reductions::norm_steps), eval: Eval::Structural, samples: reductions::norm_samples };
            /// exp(x) / Σ exp(x) over one dim
            [composite softmax _none] "softmax" Softmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::softmax),
                  decompose: Some(decompose::softmax), eval: Eval::Structural,
                  kernel: true, samples: samples::softmax };
            /// x − log Σ exp(x) over one dim
            [composite log_softmax _none] "log_softmax" LogSoftmax (x) () { dim: usize }
                { ty: types::softmax, grad: Grad::Fn(gradient::log_softmax),
                  decompose: Some(decompose::log_softmax), eval: Eval::Structural,
                  kernel: true, samples: samples::log_softmax };
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
    if needs_elements(op)
        && let Some(&dim) = dims.iter().find(|&&d| x.shape[d] == 0)
    {
        return Err(Why::Empty { dim });
    }
    let dtype = match op {
        Op::Any { .. } | Op::All { .. } => DType::Bool,
        Op::CountNonzero { .. } => DType::I64,
        Op::Prod { .. } | Op::Nansum { .. } if !x.dtype.is_float() => DType::I64,
        Op::Logsumexp { .. } if !x.dtype.is_float() => DType::F32,
        Op::Var { .. } | Op::Std { .. } | Op::LinalgVectorNorm { .. } => float(args, 0, "x")?.dtype,
        _ => x.dtype,
    };
    crate::types::one(TensorTy { dtype, device: x.device, shape: x.shape.reduced(dims, keepdim) })
}

pub(crate) fn var_samples(root: bool) -> Vec<Sample> {
    let op: fn(Dims, bool) -> Op = if root {
        |dims, keepdim| Op::Std { dims, correction: 0, keepdim }
    } else {
        |dims, keepdim| Op::Var { dims, correction: 0, keepdim }
    };
    let mut all = reductions(FLOATS, false, op);
    // A single element has no spread to differentiate the root of.
    let ones = |dims: &Dims, shape: &Shape| dims.iter().map(|&d| shape[d]).product::<usize>() <= 1;
    all.retain(|sample| match (&sample.op, &sample.args[0]) {
        (Op::Std { dims, .. }, crate::SampleArg::Tensor(shape, _)) => !ones(dims, shape),
        _ => true,
    });
    let two: fn(Dims, bool) -> Op = if root {
        |dims, keepdim| Op::Std { dims, correction: 1, keepdim }
    } else {
        |dims, keepdim| Op::Var { dims, correction: 1, keepdim }
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
    let Op::Amin { dims, .. } = call.op else { return Ok(vec![None]) };
    let ty = cx.tensor_ty(call.inputs[0]);
    rule!(cx, call, |g, x; y| [share(g, x, y, &ty, dims)])
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
    steps!(cx, args, |x| {
        let (x, shape) = (x.float(), x.shape());
        if count(&shape, dims) == 0 {
            x.exp().sum(dims.clone(), *keepdim).log()
        } else {
            let largest = x.amax(dims.clone(), true);
            let largest = largest.isinf().where_(0.0, largest);
            let sum = (x - largest).exp().sum(dims.clone(), true).log() + largest;
            if *keepdim { sum } else { sum.reshape(shape.reduced(dims, false)) }
        }
    })
}

pub(crate) fn logsumexp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Logsumexp { dims, .. } = call.op else { return Ok(vec![None]) };
    let kept = cx.tensor_ty(call.inputs[0]).shape.reduced(dims, true);
    rule!(cx, call, |g, x; y| {
        let (g, y) = (g.reshape(kept.clone()), y.reshape(kept));
        let y = y.eq(f64::NEG_INFINITY).where_(0.0, y);
        [g * (x - y).exp()]
    })
}

/// x − mean over dims in f64, and what the squares are divided by. Squares of f32 would overflow where their root
/// does not, and differences from a mean that was rounded at the magnitude of x would lose digits.
fn deviation<'p>(x: Term<'p>, dims: &Dims, correction: i64) -> (Term<'p>, f64) {
    let divisor = (count(&x.shape(), dims) as f64 - correction as f64).max(0.0);
    let x = if x.dtype() == DType::F64 { x } else { x.to(DType::F64) };
    (x - x.mean(dims.clone(), true), divisor)
}

/// Σ (x − mean)² / (n − correction) in f64.
fn variance<'p>(x: Term<'p>, dims: &Dims, correction: i64, keepdim: bool) -> Term<'p> {
    let (difference, divisor) = deviation(x, dims, correction);
    (difference * difference).sum(dims.clone(), keepdim) / divisor
}

/// A result that was computed in f64, in the dtype of x.
fn as_operand<'p>(result: Term<'p>, x: Term<'p>) -> Term<'p> {
    if x.dtype() == DType::F64 { result } else { result.to(x.dtype()) }
}

pub(crate) fn var_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Var { dims, correction, keepdim } = op else { return Ok(args.into()) };
    steps!(cx, args, |x| as_operand(variance(x, dims, *correction, *keepdim), x))
}

pub(crate) fn var(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Var { dims, correction, .. } = call.op else { return Ok(vec![None]) };
    rule!(cx, call, |g, x| {
        let g = g.reshape(x.shape().reduced(dims, true));
        let (difference, divisor) = deviation(x, dims, *correction);
        [difference * (g * (2.0 / divisor))]
    })
}

pub(crate) fn std_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::Std { dims, correction, keepdim } = op else { return Ok(args.into()) };
    steps!(cx, args, |x| as_operand(variance(x, dims, *correction, *keepdim).sqrt(), x))
}

pub(crate) fn std(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Std { dims, correction, .. } = call.op else { return Ok(vec![None]) };
    let kept = cx.tensor_ty(call.inputs[0]).shape.reduced(dims, true);
    rule!(cx, call, |g, x; y| {
        let (g, y) = (g.reshape(kept.clone()), y.reshape(kept));
        let (difference, divisor) = deviation(x, dims, *correction);
        // In this order, as the product could overflow; 0 where nothing is spread.
        let share = y.eq(0.0).where_(0.0, g / y / divisor);
        [difference * share]
    })
}

pub(crate) fn norm_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::LinalgVectorNorm { ord, dims, keepdim } = op else { return Ok(args.into()) };
    let (dims, keepdim) = (dims.clone(), *keepdim);
    steps!(cx, args, |x| match ord.as_f64() {
        0.0 => x.ne(0.0).to(x.dtype()).sum(dims, keepdim),
        1.0 => x.abs().sum(dims, keepdim),
        2.0 => (x * x).sum(dims, keepdim).sqrt(),
        f64::INFINITY => x.abs().amax(dims, keepdim),
        f64::NEG_INFINITY => x.abs().amin(dims, keepdim),
        ord => x.abs().pow(ord).sum(dims, keepdim).pow(1.0 / ord),
    })
}

pub(crate) fn norm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::LinalgVectorNorm { ord, dims, .. } = call.op else { return Ok(vec![None]) };
    let ty = cx.tensor_ty(call.inputs[0]);
    if ord.as_f64() == 0.0 {
        return one(zeros_like(cx, call.inputs[0]));
    }
    let kept = ty.shape.reduced(dims, true);
    rule!(cx, call, |g, x; y| {
        let g = g.reshape(kept.clone());
        // Not every norm's rule reads the result.
        let y = || y.reshape(kept);
        [match ord.as_f64() {
            1.0 => x.sign() * g,
            ord if ord.is_infinite() => x.sign() * share(g, x.abs(), y(), &ty, dims),
            // 0 where a vector is.
            2.0 => { let y = y(); x * y.eq(0.0).where_(0.0, g / y) },
            ord => {
                let y = y();
                let power = x.eq(0.0).where_(0.0, x.abs().pow(ord - 1.0));
                x.sign() * power * y.eq(0.0).where_(0.0, g * y.pow(1.0 - ord))
            }
        }]
    })
}

/// Sums that drop dims, of floats or of integers that are wide enough.
pub(crate) fn is_prim_sum(op: &Op, args: &[Ty]) -> bool {
    let is_summed = |t: &TensorTy| t.dtype.is_float() || t.dtype == DType::I64;
    matches!(op, Op::Sum { dims, keepdim: false } if !dims.is_empty())
        && args[0].as_tensor().is_some_and(is_summed)
}
