//! Gradient rules: one function per row, whose body is the mathematics. `g` is the gradient of the result.
//!
//! A rule returns one entry per operand; the engine that calls it fits each to its operand's shape and dtype
//! ([`fit`]), so rules ignore broadcasting and conversion.

use crate::{Approximate, Dims, Emit, EmitExt, GradCall, Op, Reduction, Result, Scalar, Shape, Ty, Value};

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

pub(crate) fn identity(_: Cx<'_>, call: &GradCall<'_>) -> Grads {
    Ok(vec![call.g()])
}

pub(crate) fn add(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    Ok(match call.inputs.get(2) {
        None => vec![Some(g), Some(g)],
        Some(&alpha) => {
            let gy = if call.wants(1) { Some(cx.mul(g, alpha)?) } else { None };
            vec![Some(g), gy, None]
        }
    })
}

pub(crate) fn sub(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let gy = if call.wants(1) { Some(cx.neg(g)?) } else { None };
    Ok(match call.inputs.get(2) {
        None => vec![Some(g), gy],
        Some(&alpha) => vec![Some(g), gy.map(|gy| cx.mul(gy, alpha)).transpose()?, None],
    })
}

pub(crate) fn mul(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, y) = (g!(call), call.inputs[0], call.inputs[1]);
    let gx = if call.wants(0) { Some(cx.mul(g, y)?) } else { None };
    let gy = if call.wants(1) { Some(cx.mul(g, x)?) } else { None };
    Ok(vec![gx, gy])
}

pub(crate) fn div(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, y) = (g!(call), call.inputs[0], call.inputs[1]);
    let gx = cx.div(g, y)?;
    let gy = match call.wants(1) {
        // −(g/y)·(x/y)
        true => {
            let quotient = cx.div(x, y)?;
            let product = cx.mul(gx, quotient)?;
            Some(cx.neg(product)?)
        }
        false => None,
    };
    Ok(vec![Some(gx), gy])
}

pub(crate) fn pow(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, y) = (g!(call), call.inputs[0], call.inputs[1]);
    let (zero, one) = (cx.number(0.0)?, cx.number(1.0)?);
    let gx = match call.wants(0) {
        // y·xʸ⁻¹, and 0 where y = 0 even if x is 0 too
        true => {
            let less = cx.sub(y, one)?;
            let power = cx.pow(x, less)?;
            let slope = cx.mul(power, y)?;
            let product = cx.mul(g, slope)?;
            let flat = cx.eq(y, zero)?;
            Some(cx.where_(flat, zero, product)?)
        }
        false => None,
    };
    let gy = match call.wants(1) {
        // xʸ·log x, and 0 where x = 0 and y ≥ 0
        true => {
            let log = cx.log(x)?;
            let slope = cx.mul(call.y(), log)?;
            let product = cx.mul(g, slope)?;
            let at_zero = cx.eq(x, zero)?;
            let not_negative = cx.ge(y, zero)?;
            let flat = cx.logical_and(at_zero, not_negative)?;
            Some(cx.where_(flat, zero, product)?)
        }
        false => None,
    };
    Ok(vec![gx, gy])
}

/// The winner gets the gradient; a tie is shared equally. Beside NaN nobody loses.
fn winner(
    cx: Cx<'_>,
    call: &GradCall<'_>,
    x_loses: fn(&mut dyn Emit, Value, Value) -> Result<Value>,
) -> Grads {
    let (g, x, y) = (g!(call), call.inputs[0], call.inputs[1]);
    let (zero, half) = (cx.number(0.0)?, cx.number(0.5)?);
    let tie = cx.eq(x, y)?;
    let shared = cx.mul(g, half)?;
    let mut grads = Vec::new();
    for (a, b) in [(x, y), (y, x)] {
        let loses = x_loses(cx, a, b)?;
        let alone = cx.where_(loses, zero, g)?;
        grads.push(Some(cx.where_(tie, shared, alone)?));
    }
    Ok(grads)
}

pub(crate) fn maximum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    winner(cx, call, |cx, a, b| cx.lt(a, b))
}

pub(crate) fn minimum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    winner(cx, call, |cx, a, b| cx.gt(a, b))
}

pub(crate) fn neg(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    one(cx.neg(g))
}

pub(crate) fn abs(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x) = (g!(call), call.inputs[0]);
    let zero = cx.number(0.0)?;
    let (positive, negative) = (cx.gt(x, zero)?, cx.lt(x, zero)?);
    let minus = cx.neg(g)?;
    let below = cx.where_(negative, minus, zero)?;
    one(cx.where_(positive, g, below))
}

pub(crate) fn reciprocal(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // −g·y²
    let (g, y) = (g!(call), call.y());
    let square = cx.mul(y, y)?;
    let product = cx.mul(g, square)?;
    one(cx.neg(product))
}

pub(crate) fn exp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    one(cx.mul(g, call.y()))
}

pub(crate) fn log(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    one(cx.div(g, call.inputs[0]))
}

pub(crate) fn sqrt(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g / 2y
    let (g, two) = (g!(call), cx.number(2.0)?);
    let twice = cx.mul(call.y(), two)?;
    one(cx.div(g, twice))
}

pub(crate) fn rsqrt(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // −½·g·y³
    let (g, y, half) = (g!(call), call.y(), cx.number(-0.5)?);
    let square = cx.mul(y, y)?;
    let cube = cx.mul(square, y)?;
    let slope = cx.mul(cube, half)?;
    one(cx.mul(g, slope))
}

pub(crate) fn tanh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·(1 − y²)
    let (g, y, unit) = (g!(call), call.y(), cx.number(1.0)?);
    let square = cx.mul(y, y)?;
    let slope = cx.sub(unit, square)?;
    one(cx.mul(g, slope))
}

pub(crate) fn erf(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·2/√π·e^(−x²)
    let (g, x) = (g!(call), call.inputs[0]);
    let scale = cx.number(std::f64::consts::FRAC_2_SQRT_PI)?;
    let square = cx.mul(x, x)?;
    let minus = cx.neg(square)?;
    let bell = cx.exp(minus)?;
    let slope = cx.mul(bell, scale)?;
    one(cx.mul(g, slope))
}

pub(crate) fn sigmoid(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·y·(1 − y)
    let (g, y, unit) = (g!(call), call.y(), cx.number(1.0)?);
    let rest = cx.sub(unit, y)?;
    let slope = cx.mul(y, rest)?;
    one(cx.mul(g, slope))
}

pub(crate) fn relu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, zero) = (g!(call), cx.number(0.0)?);
    let flat = cx.le(call.y(), zero)?;
    one(cx.where_(flat, zero, g))
}

pub(crate) fn gelu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x) = (g!(call), call.inputs[0]);
    let (half, unit) = (cx.number(0.5)?, cx.number(1.0)?);
    let slope = match call.op {
        Op::Gelu { approximate: Approximate::Tanh } => {
            // t = tanh(c·(x + k·x³));  ½(1 + t) + ½·x·(1 − t²)·c·(1 + 3k·x²)
            let c = cx.number((2.0 / std::f64::consts::PI).sqrt())?;
            let k = cx.number(0.044715)?;
            let k3 = cx.number(3.0 * 0.044715)?;
            let square = cx.mul(x, x)?;
            let cube = cx.mul(square, x)?;
            let bent = cx.mul(cube, k)?;
            let sum = cx.add(x, bent)?;
            let inner = cx.mul(sum, c)?;
            let t = cx.tanh(inner)?;
            let plus = cx.add(t, unit)?;
            let left = cx.mul(plus, half)?;
            let t2 = cx.mul(t, t)?;
            let dt = cx.sub(unit, t2)?;
            let bend = cx.mul(square, k3)?;
            let bend = cx.add(bend, unit)?;
            let dinner = cx.mul(bend, c)?;
            let right = cx.mul(dt, dinner)?;
            let right = cx.mul(right, x)?;
            let right = cx.mul(right, half)?;
            cx.add(left, right)?
        }
        _ => {
            // Φ(x) + x·φ(x)
            let scale = cx.number(std::f64::consts::FRAC_1_SQRT_2)?;
            let density = cx.number(1.0 / (2.0 * std::f64::consts::PI).sqrt())?;
            let scaled = cx.mul(x, scale)?;
            let e = cx.erf(scaled)?;
            let plus = cx.add(e, unit)?;
            let cdf = cx.mul(plus, half)?;
            let minus_half = cx.number(-0.5)?;
            let square = cx.mul(x, x)?;
            let exponent = cx.mul(square, minus_half)?;
            let bell = cx.exp(exponent)?;
            let pdf = cx.mul(bell, density)?;
            let right = cx.mul(x, pdf)?;
            cx.add(cdf, right)?
        }
    };
    one(cx.mul(g, slope))
}

pub(crate) fn choose(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, condition, zero) = (g!(call), call.inputs[0], cx.number(0.0)?);
    let gx = if call.wants(1) { Some(cx.where_(condition, g, zero)?) } else { None };
    let gy = if call.wants(2) { Some(cx.where_(condition, zero, g)?) } else { None };
    Ok(vec![None, gx, gy])
}

pub(crate) fn lerp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, end, weight) = (g!(call), call.inputs[0], call.inputs[1], call.inputs[2]);
    let gend = if call.wants(0) || call.wants(1) { Some(cx.mul(g, weight)?) } else { None };
    let gx = match gend {
        Some(gend) if call.wants(0) => Some(cx.sub(g, gend)?),
        _ => None,
    };
    let gweight = call.wanted(cx, 2, |cx| {
        let span = cx.sub(end, x)?;
        cx.mul(g, span)
    })?;
    Ok(vec![gx, gend, gweight])
}

pub(crate) fn addcmul(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, a, b, value) = (g!(call), call.inputs[1], call.inputs[2], call.inputs[3]);
    let product = |cx: Cx<'_>, x: Value, y: Value| {
        let scaled = cx.mul(g, x)?;
        cx.mul(scaled, y)
    };
    let ga = call.wanted(cx, 1, |cx| product(cx, value, b))?;
    let gb = call.wanted(cx, 2, |cx| product(cx, value, a))?;
    let gvalue = call.wanted(cx, 3, |cx| {
        let ab = cx.mul(a, b)?;
        cx.mul(g, ab)
    })?;
    Ok(vec![Some(g), ga, gb, gvalue])
}

pub(crate) fn addcdiv(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, a, b, value) = (g!(call), call.inputs[1], call.inputs[2], call.inputs[3]);
    let share = |cx: Cx<'_>| {
        let scaled = cx.mul(g, value)?;
        cx.div(scaled, b)
    };
    let ga = if call.wants(1) || call.wants(2) { Some(share(cx)?) } else { None };
    let gb = match ga {
        Some(ga) if call.wants(2) => {
            let quotient = cx.div(a, b)?;
            let product = cx.mul(ga, quotient)?;
            Some(cx.neg(product)?)
        }
        _ => None,
    };
    let gvalue = call.wanted(cx, 3, |cx| {
        let quotient = cx.div(a, b)?;
        cx.mul(g, quotient)
    })?;
    Ok(vec![Some(g), ga, gb, gvalue])
}

pub(crate) fn convert(_: Cx<'_>, call: &GradCall<'_>) -> Grads {
    Ok(vec![call.g()]) // `fit` converts back
}

pub(crate) fn copy(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let gx = if call.wants(0) { Some(zeros_like(cx, call.inputs[0])?) } else { None };
    Ok(vec![gx, Some(g)])
}

/// Puts back the dims that a reduction removed and repeats `g` over them.
pub(crate) fn spread(cx: Cx<'_>, g: Value, shape: &Shape, dims: &Dims) -> Result<Value> {
    let kept = shape.reduced(dims, true);
    let g = if cx.tensor_ty(g).shape != kept { cx.reshape(g, kept)? } else { g };
    cx.expand(g, shape.clone())
}

pub(crate) fn sum(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Sum { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    one(spread(cx, g, &shape, dims))
}

pub(crate) fn mean(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Mean { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    let count: usize = dims.iter().map(|&d| shape[d]).product();
    let count = cx.number(count as f64)?;
    let share = cx.div(g, count)?;
    one(spread(cx, share, &shape, dims))
}

pub(crate) fn amax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // Shared equally between the elements that are largest.
    let (g, Op::Amax { dims, .. }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let x = call.inputs[0];
    let ty = cx.tensor_ty(x);
    let largest = spread(cx, call.y(), &ty.shape, dims)?;
    let hit = cx.eq(x, largest)?;
    let hit = cx.to(hit, ty.dtype)?;
    let count = cx.sum(hit, dims.clone(), true)?;
    let g = cx.reshape(g, ty.shape.reduced(dims, true))?;
    let share = cx.div(g, count)?;
    one(cx.mul(hit, share))
}

pub(crate) fn softmax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // y·(g − Σ g·y)
    let (g, y, Op::Softmax { dim }) = (g!(call), call.y(), call.op) else { return Ok(vec![None]) };
    let product = cx.mul(g, y)?;
    let total = sum_along(cx, product, *dim)?;
    let rest = cx.sub(g, total)?;
    one(cx.mul(y, rest))
}

pub(crate) fn log_softmax(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g − eʸ·Σ g
    let (g, y, Op::LogSoftmax { dim }) = (g!(call), call.y(), call.op) else { return Ok(vec![None]) };
    let total = sum_along(cx, g, *dim)?;
    let probability = cx.exp(y)?;
    let share = cx.mul(probability, total)?;
    one(cx.sub(g, share))
}

/// Sum over one dim, kept with size 1; a 0-d tensor is its own sum.
pub(crate) fn sum_along(cx: Cx<'_>, x: Value, dim: usize) -> Result<Value> {
    match cx.tensor_ty(x).shape.rank() {
        0 => Ok(x),
        _ => cx.sum(x, Dims::from(dim), true),
    }
}

fn transposed(cx: Cx<'_>, x: Value) -> Result<Value> {
    cx.permute(x, Dims::from([1, 0]))
}

pub(crate) fn mm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    product_grads(cx, call, g!(call), 0)
}

pub(crate) fn addmm(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let mut grads = vec![Some(g)];
    grads.extend(product_grads(cx, call, g, 1)?);
    Ok(grads)
}

/// Gradients of the matrix product whose operands start at `first`: g·yᵀ and xᵀ·g.
fn product_grads(cx: Cx<'_>, call: &GradCall<'_>, g: Value, first: usize) -> Grads {
    let (x, y) = (call.inputs[first], call.inputs[first + 1]);
    let gx = match call.wants(first) {
        true => {
            let yt = transposed(cx, y)?;
            Some(cx.mm(g, yt)?)
        }
        false => None,
    };
    let gy = match call.wants(first + 1) {
        true => {
            let xt = transposed(cx, x)?;
            Some(cx.mm(xt, g)?)
        }
        false => None,
    };
    Ok(vec![gx, gy])
}

pub(crate) fn linear(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, weight) = (g!(call), call.inputs[0], call.inputs[1]);
    let (x_shape, w_shape) = (cx.tensor_ty(x).shape, cx.tensor_ty(weight).shape);
    let rows: usize = x_shape[..x_shape.rank() - 1].iter().product();
    let flat = cx.reshape(g, Shape::from([rows, w_shape[0]]))?;
    let gx = match call.wants(0) {
        true => {
            let product = cx.mm(flat, weight)?;
            Some(cx.reshape(product, x_shape.clone())?)
        }
        false => None,
    };
    let gweight = match call.wants(1) {
        true => {
            let flat_x = cx.reshape(x, Shape::from([rows, w_shape[1]]))?;
            let gt = transposed(cx, flat)?;
            Some(cx.mm(gt, flat_x)?)
        }
        false => None,
    };
    let gbias = if call.wants(2) { Some(cx.sum(flat, Dims::from(0), false)?) } else { None };
    Ok(match call.inputs.len() {
        2 => vec![gx, gweight],
        _ => vec![gx, gweight, gbias],
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
    let gx = match call.wants(0) {
        true => {
            let zeros = zeros_like(cx, call.inputs[1])?;
            Some(cx.slice_scatter(g, zeros, *dim, *start, *end, *step)?)
        }
        false => None,
    };
    let gsrc = if call.wants(1) { Some(cx.slice(g, *dim, *start, *end, *step)?) } else { None };
    Ok(vec![gx, gsrc])
}

pub(crate) fn cat(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Cat { dim }) = (g!(call), call.op) else { return Ok(vec![None; call.inputs.len()]) };
    let mut start = 0;
    let mut grads = Vec::with_capacity(call.inputs.len());
    for (i, &x) in call.inputs.iter().enumerate() {
        let end = start + cx.tensor_ty(x).shape[*dim];
        grads.push(if call.wants(i) { Some(cx.slice(g, *dim, start, end, 1)?) } else { None });
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
    let matrix = Shape::from([rows, classes]);
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
    let share = cx.reshape(share, Shape::from([rows, 1]))?;
    let share = cx.expand(share, matrix.clone())?;
    let (first, step) = (cx.number(Scalar::Int(0))?, cx.number(Scalar::Int(1))?);
    let columns = cx.arange(first, step, classes, crate::DType::I64, input.device)?;
    let target = cx.reshape(target, Shape::from([rows, 1]))?;
    let hit = cx.eq(columns, target)?;
    let grad = cx.where_(hit, share, zero)?;
    Ok(vec![Some(cx.reshape(grad, input.shape)?), None])
}

/// Whether gradients flow through values of this type.
pub fn carries_gradient(ty: &Ty) -> bool {
    ty.as_tensor().is_some_and(|t| t.dtype.is_float())
}
