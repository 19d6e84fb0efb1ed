//! Gradient rules: one function per row, whose body is the mathematics. `g` is the gradient of the result.
//!
//! A rule returns one entry per operand; the engine that calls it fits each to its operand's shape and dtype
//! ([`fit`]), so rules ignore broadcasting and conversion.

use std::f64::consts;

use crate::formula::{Term, rule};
use crate::{
    Approximate, Dims, Emit, EmitExt, GradCall, Op, Reduction, Result, Scalar, Shape, TensorTy, Ty, Value,
};

pub(crate) type Grads = Result<Vec<Option<Value>>>;
pub(crate) type Cx<'a> = &'a mut dyn Emit;

/// Sums a gradient over the dims that broadcasting added or repeated and converts it to the operand's dtype.
pub(crate) fn fit(cx: Cx<'_>, grad: Value, operand: Value) -> Result<Value> {
    let (have, want) = (cx.tensor_ty(grad), cx.tensor_ty(operand));
    let mut grad = grad;
    if have.shape != want.shape {
        let lead = have.shape.rank() - want.shape.rank();
        let dims: Dims = (0..have.shape.rank())
            .filter(|&d| d < lead || (want.shape[d - lead] == 1 && have.shape[d] != 1))
            .collect();
        if !dims.is_empty() {
            grad = cx.sum(grad, dims, false)?;
        }
        if cx.tensor_ty(grad).shape != want.shape {
            grad = cx.reshape(grad, want.shape.clone())?;
        }
    }
    if have.dtype != want.dtype { cx.to(grad, want.dtype) } else { Ok(grad) }
}

impl GradCall<'_> {
    /// Runs the rule of a row and fits every gradient to its operand. Operands that don't want a gradient
    /// get none.
    pub fn run(&self, cx: &mut dyn Emit, rule: crate::op::GradFn) -> Grads {
        let mut grads = if self.is_half(cx) { self.widened(cx, rule)? } else { rule(cx, self)? };
        for (i, slot) in grads.iter_mut().enumerate() {
            *slot = match *slot {
                Some(grad) if self.wants(i) => Some(fit(cx, grad, self.inputs[i])?),
                _ => None,
            };
        }
        Ok(grads)
    }

    /// The gradient of operand `i`, if it is wanted: a rule that computes no others has nothing saved for them.
    pub(crate) fn wanted(
        &self,
        cx: Cx<'_>,
        i: usize,
        gradient: impl FnOnce(Cx<'_>) -> Result<Value>,
    ) -> Result<Option<Value>> {
        if self.wants(i) { gradient(cx).map(Some) } else { Ok(None) }
    }

    pub(crate) fn g(&self) -> Option<Value> {
        self.grads[0]
    }

    pub(crate) fn y(&self) -> Value {
        self.outputs[0]
    }
}

/// `g` or an early return without gradients.
macro_rules! g {
    ($call:expr) => {
        match $call.g() {
            Some(g) => g,
            None => return Ok(vec![None; $call.inputs.len()]),
        }
    };
}
pub(crate) use g;

/// A rule with one operand.
pub(crate) fn one(grad: Result<Value>) -> Grads {
    Ok(vec![Some(grad?)])
}

pub(crate) fn add(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    Ok(match call.inputs.get(2) {
        None => vec![Some(g), Some(g)],
        Some(&alpha) => {
            let gy = call.wanted(cx, 1, |cx| cx.mul(g, alpha))?;
            vec![Some(g), gy, None]
        }
    })
}

pub(crate) fn sub(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let gy = call.wanted(cx, 1, |cx| cx.neg(g))?;
    Ok(match call.inputs.get(2) {
        None => vec![Some(g), gy],
        Some(&alpha) => vec![Some(g), gy.map(|gy| cx.mul(gy, alpha)).transpose()?, None],
    })
}

/// y − alpha · x
pub(crate) fn rsub(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let mut gx = call.wanted(cx, 0, |cx| cx.neg(g))?;
    if let Some(&alpha) = call.inputs.get(2) {
        gx = gx.map(|gx| cx.mul(gx, alpha)).transpose()?;
    }
    let mut grads = vec![gx, call.wants(1).then_some(g)];
    grads.resize(call.inputs.len(), None);
    Ok(grads)
}

/// The winner gets the gradient; a tie is shared equally. Beside NaN nobody loses.
fn winner<'p>(g: Term<'p>, loses: Term<'p>, tie: Term<'p>) -> Term<'p> {
    tie.where_(g * 0.5, loses.where_(0.0, g))
}

pub(crate) fn maximum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    rule!(cx, call, |g, x, y| {
        let tie = x.eq(y);
        [winner(g, x.lt(y), tie), winner(g, y.lt(x), tie)]
    })
}

pub(crate) fn minimum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    rule!(cx, call, |g, x, y| {
        let tie = x.eq(y);
        [winner(g, x.gt(y), tie), winner(g, y.gt(x), tie)]
    })
}

pub(crate) fn gelu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let is_tanh = matches!(call.op, Op::Gelu { approximate: Approximate::Tanh });
    rule!(cx, call, |g, x| [g * if is_tanh { gelu_tanh_slope(x) } else { gelu_slope(x) }])
}

/// Φ(x) + x·φ(x)
fn gelu_slope(x: Term<'_>) -> Term<'_> {
    let cumulative = ((x * consts::FRAC_1_SQRT_2).erf() + 1.0) * 0.5;
    let density = (x * x * -0.5).exp() * (1.0 / (2.0 * consts::PI).sqrt());
    cumulative + x * density
}

/// ½·(1 + t) + ½·x·(1 − t²)·c·(1 + 3k·x²) where t = tanh(c·(x + k·x³))
fn gelu_tanh_slope(x: Term<'_>) -> Term<'_> {
    let (c, k) = ((2.0 / consts::PI).sqrt(), 0.044715);
    let square = x * x;
    let t = ((x + square * x * k) * c).tanh();
    let inner = (square * (3.0 * k) + 1.0) * c;
    (t + 1.0) * 0.5 + (1.0 - t * t) * inner * x * 0.5
}

pub(crate) fn choose(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // Conditions never want a gradient.
    rule!(cx, call, |g, condition, _x, _y| [g, condition.where_(g, 0.0), condition.where_(0.0, g)])
}

pub(crate) fn copy(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let gx = call.wanted(cx, 0, |cx| zeros_like(cx, call.inputs[0]))?;
    Ok(vec![gx, Some(g)])
}

/// Puts back the dims that a reduction removed and repeats `g` over them.
pub(crate) fn spread<'p>(g: Term<'p>, shape: &Shape, dims: &Dims) -> Term<'p> {
    let kept = shape.reduced(dims, true);
    let g = if g.shape() != kept { g.reshape(kept) } else { g };
    g.expand(shape.clone())
}

pub(crate) fn sum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Sum { dims, .. } = call.op else { return Ok(vec![None]) };
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    rule!(cx, call, |g, _x| [spread(g, &shape, dims)])
}

pub(crate) fn mean(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Mean { dims, .. } = call.op else { return Ok(vec![None]) };
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    let count: usize = dims.iter().map(|&d| shape[d]).product();
    rule!(cx, call, |g, _x| [spread(g / count as f64, &shape, dims)])
}

pub(crate) fn amax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Amax { dims, .. } = call.op else { return Ok(vec![None]) };
    let ty = cx.tensor_ty(call.inputs[0]);
    rule!(cx, call, |g, x; y| [share(g, x, y, &ty, dims)])
}

/// g shared equally between the elements of x, which is of this type, that equal `value`.
pub(crate) fn share<'p>(g: Term<'p>, x: Term<'p>, value: Term<'p>, ty: &TensorTy, dims: &Dims) -> Term<'p> {
    let hit = x.eq(spread(value, &ty.shape, dims)).to(ty.dtype);
    let count = hit.sum(dims.clone(), true);
    hit * (g.reshape(ty.shape.reduced(dims, true)) / count)
}

pub(crate) fn softmax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::Softmax { dim } = *call.op else { return Ok(vec![None]) };
    rule!(cx, call, |g, _x; y| [y * (g - sum_along(g * y, dim))])
}

pub(crate) fn log_softmax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::LogSoftmax { dim } = *call.op else { return Ok(vec![None]) };
    rule!(cx, call, |g, _x; y| [g - y.exp() * sum_along(g, dim)])
}

/// Sum over one dim, kept with size 1; a 0-d tensor is its own sum.
pub(crate) fn sum_along(x: Term<'_>, dim: usize) -> Term<'_> {
    if x.shape().rank() == 0 { x } else { x.sum(Dims::from(dim), true) }
}

fn transposed(x: Term<'_>) -> Term<'_> {
    x.permute(Dims::from([1, 0]))
}

pub(crate) fn mm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    rule!(cx, call, |g, x, y| [g.mm(transposed(y)), transposed(x).mm(g)])
}

pub(crate) fn addmm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    rule!(cx, call, |g, _bias, x, y| [g, g.mm(transposed(y)), transposed(x).mm(g)])
}

pub(crate) fn linear(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (x_shape, w_shape) = (cx.tensor_ty(call.inputs[0]).shape, cx.tensor_ty(call.inputs[1]).shape);
    let rows: usize = x_shape[..x_shape.rank() - 1].iter().product();
    rule!(cx, call, |g, x, weight| {
        let flat = g.reshape(Shape::from([rows, w_shape[0]]));
        [
            flat.mm(weight).reshape(x_shape),
            transposed(flat).mm(x.reshape(Shape::from([rows, w_shape[1]]))),
            flat.sum(Dims::from(0), false),
        ]
    })
}

pub(crate) fn reshape(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    one(cx.reshape(g, shape))
}

pub(crate) fn permute(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Permute { dims }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let mut back = dims.clone();
    for (i, &d) in dims.iter().enumerate() {
        back[d] = i;
    }
    one(cx.permute(g, back))
}

pub(crate) fn transpose(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Transpose { dim0, dim1 }) = (g!(call), call.op) else { return Ok(vec![None]) };
    one(cx.transpose(g, *dim0, *dim1))
}

pub(crate) fn expand(_: Cx<'_>, call: &GradCall<'_>) -> Grads {
    Ok(vec![call.g()]) // `fit` sums over the repeated dims
}

pub(crate) fn slice(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Slice { dim, start, end, step }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let zeros = zeros_like(cx, call.inputs[0])?;
    one(cx.slice_scatter(zeros, g, *dim, *start, *end, *step))
}

pub(crate) fn zeros_like(cx: Cx<'_>, x: Value) -> Result<Value> {
    let ty = cx.tensor_ty(x);
    let zero = cx.number(0.0)?;
    cx.full(zero, ty.shape, ty.dtype, ty.device)
}

pub(crate) fn slice_scatter(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::SliceScatter { dim, start, end, step }) = (g!(call), call.op) else {
        return Ok(vec![None, None]);
    };
    let gx = call.wanted(cx, 0, |cx| {
        let zeros = zeros_like(cx, call.inputs[1])?;
        cx.slice_scatter(g, zeros, *dim, *start, *end, *step)
    })?;
    let gsrc = call.wanted(cx, 1, |cx| cx.slice(g, *dim, *start, *end, *step))?;
    Ok(vec![gx, gsrc])
}

pub(crate) fn slice_add(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::SliceAdd { dim, start, end, step }) = (g!(call), call.op) else {
        return Ok(vec![None, None]);
    };
    let gsrc = call.wanted(cx, 1, |cx| cx.slice(g, *dim, *start, *end, *step))?;
    Ok(vec![Some(g), gsrc])
}

pub(crate) fn cat(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Cat { dim }) = (g!(call), call.op) else { return Ok(vec![None; call.inputs.len()]) };
    let mut start = 0;
    let mut grads = Vec::with_capacity(call.inputs.len());
    for (i, &x) in call.inputs.iter().enumerate() {
        let end = start + cx.tensor_ty(x).shape[*dim];
        grads.push(call.wanted(cx, i, |cx| cx.slice(g, *dim, start, end, 1))?);
        start = end;
    }
    Ok(grads)
}

pub(crate) fn gather(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Gather { dim }) = (g!(call), call.op) else { return Ok(vec![None, None]) };
    let (x, index) = (cx.tensor_ty(call.inputs[0]), call.inputs[1]);
    let size = x.shape[*dim];
    let mut grad = cx.gather_backward(g, index, *dim, size)?;
    // Where index is narrower than x in another dim, the rest of x has no part in the result.
    let have = cx.tensor_ty(grad).shape;
    if have != x.shape {
        let mut padded = have;
        for d in 0..x.shape.rank() {
            if padded[d] != x.shape[d] {
                let end = padded[d];
                padded[d] = x.shape[d];
                let zero = cx.number(0.0)?;
                let zeros = cx.full(zero, padded.clone(), x.dtype, x.device)?;
                grad = cx.slice_scatter(zeros, grad, d, 0, end, 1)?;
            }
        }
    }
    Ok(vec![Some(grad), None])
}

pub(crate) fn gather_backward(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::GatherBackward { dim, .. }) = (g!(call), call.op) else { return Ok(vec![None, None]) };
    Ok(vec![Some(cx.gather(g, call.inputs[1], *dim)?), None])
}

pub(crate) fn nll_loss(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // Row i gets −g (shared by the mean) at its target's column, 0 elsewhere and where the target is ignored.
    let (g, Op::NllLoss { reduction, ignore_index }) = (g!(call), call.op) else {
        return Ok(vec![None, None]);
    };
    let input = cx.tensor_ty(call.inputs[0]);
    let target = call.inputs[1];
    let classes = input.shape[input.shape.rank() - 1];
    let rows = if input.shape.rank() == 2 { input.shape[0] } else { 1 };
    let (zero, unit, ignore) = (cx.number(0.0)?, cx.number(1.0)?, cx.number(Scalar::Int(*ignore_index))?);
    let target = cx.reshape(target, Shape::from([rows]))?;
    let counted = cx.ne(target, ignore)?;
    let mut share = match reduction {
        Reduction::None => cx.reshape(g, Shape::from([rows]))?,
        _ => cx.expand(g, Shape::from([rows]))?,
    };
    if *reduction == Reduction::Mean {
        let ones = cx.full(unit, Shape::from([rows]), input.dtype, input.device)?;
        let weights = cx.where_(counted, ones, zero)?;
        let count = cx.sum(weights, Dims::from(0), false)?;
        share = cx.div(share, count)?;
    }
    let share = cx.neg(share)?;
    let share = cx.where_(counted, share, zero)?;
    let first = cx.number(Scalar::Int(0))?;
    let column = cx.where_(counted, target, first)?;
    let (share, column) =
        (cx.reshape(share, Shape::from([rows, 1]))?, cx.reshape(column, Shape::from([rows, 1]))?);
    let grad = cx.gather_backward(share, column, 1, classes)?;
    Ok(vec![Some(cx.reshape(grad, input.shape)?), None])
}

/// Whether gradients flow through values of this type.
pub fn carries_gradient(ty: &Ty) -> bool {
    ty.as_tensor().is_some_and(|t| t.dtype.is_float())
}
