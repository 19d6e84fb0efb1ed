//! Rows: activations. Their parameters are numbers known at run time.

use crate::decompose::one as result;
use crate::gradient::{Cx, Grads, g};
use crate::samples::{Any, FLOATS, calls, t};
use crate::types::{Rule, common_device, one, tensor};
use crate::{DType, EmitExt, GradCall, Op, Result, Sample, ScalarKind, Shape, Ty, Value, Values, Why};

/// selu's factors.
pub(crate) const SELU_ALPHA: f64 = 1.6732632423543772;
pub(crate) const SELU_SCALE: f64 = 1.0507009873554805;

#[doc(hidden)]
#[macro_export]
macro_rules! rows_activations {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_reductions! { $callback [
            $($rows)*

            /// x / (1 + e⁻ˣ)
            [pointwise silu silu_] "silu" Silu (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::silu),
                  decompose: Some(activations::silu_steps), eval: Eval::float(|a| a[0] / (1.0 + (-a[0]).exp())),
                  samples: samples::unary_float };
            /// x · tanh(log(1 + eˣ))
            [pointwise mish mish_] "mish" Mish (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::mish),
                  decompose: Some(activations::mish_steps),
                  eval: Eval::float(|a| a[0] * (nan_max(a[0], 0.0) + (-a[0].abs()).exp().ln_1p()).tanh()), samples: samples::unary_float };
            /// x where positive, alpha·(eˣ − 1) elsewhere
            [pointwise elu elu_] "elu" Elu (x, alpha) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::elu),
                  decompose: Some(activations::elu_steps),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * a[0].exp_m1() }), samples: || samples::activation(&[1.25]) };
            /// x where positive, alpha·(e^(x/alpha) − 1) elsewhere
            [pointwise celu celu_] "celu" Celu (x, alpha) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::celu),
                  decompose: Some(activations::celu_steps),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * (a[0] / a[1]).exp_m1() }), samples: || samples::activation(&[1.5]) };
            /// elu with the factors that keep mean and variance
            [pointwise selu selu_] "selu" Selu (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::selu),
                  decompose: Some(activations::selu_steps),
                  eval: Eval::float(|a| activations::SELU_SCALE * if a[0] > 0.0 { a[0] } else { activations::SELU_ALPHA * a[0].exp_m1() }),
                  samples: || samples::activation(&[]) };
            /// x where positive, negative_slope·x elsewhere
            [pointwise leaky_relu leaky_relu_] "leaky_relu" LeakyRelu (x, negative_slope) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::leaky_relu),
                  decompose: Some(activations::leaky_relu_steps),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * a[0] }), samples: || samples::activation(&[0.01]) };
            /// min(max(x, 0), 6)
            [pointwise relu6 relu6_] "relu6" Relu6 (x) () {}
                { ty: activations::limits_ty, grad: Grad::Fn(activations::relu6),
                  decompose: Some(activations::relu6_steps),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], 0.0), -6.0), |a| a[0].clamp(0, 6)),
                  samples: || samples::activation_of(samples::NUMBERS, &[]) };
            /// x limited to [min_val, max_val]; at the edges its slope is 0
            [pointwise hardtanh hardtanh_] "hardtanh" Hardtanh (x, min_val, max_val) () {}
                { ty: activations::limits_ty, grad: Grad::Fn(activations::hardtanh),
                  decompose: Some(activations::hardtanh_steps),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], a[1]), -a[2]), |a| a[0].max(a[1]).min(a[2])),
                  samples: || samples::activation_of(samples::NUMBERS, &[-0.75, 1.5]) };
            /// min(max(x + 3, 0), 6) / 6
            [pointwise hardsigmoid hardsigmoid_] "hardsigmoid" Hardsigmoid (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::hardsigmoid),
                  decompose: Some(activations::hardsigmoid_steps),
                  eval: Eval::float(|a| -nan_max(-nan_max(a[0] + 3.0, 0.0), -6.0) / 6.0), samples: || samples::activation(&[]) };
            /// x · hardsigmoid(x)
            [pointwise hardswish hardswish_] "hardswish" Hardswish (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::hardswish),
                  decompose: Some(activations::hardswish_steps),
                  eval: Eval::float(|a| a[0] * -nan_max(-nan_max(a[0] + 3.0, 0.0), -6.0) / 6.0), samples: || samples::activation(&[]) };
            /// x, and 0 where |x| ≤ lambd
            [pointwise hardshrink hardshrink_] "hardshrink" Hardshrink (x, lambd) () {}
                { ty: activations::ty, grad: Grad::Decompose, decompose: Some(activations::hardshrink_steps),
                  eval: Eval::float(|a| if a[0].abs() <= a[1] { 0.0 } else { a[0] }), samples: || samples::activation(&[0.5]) };
            /// x moved towards 0 by lambd
            [pointwise softshrink softshrink_] "softshrink" Softshrink (x, lambd) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::softshrink), decompose: Some(activations::softshrink_steps),
                  eval: Eval::float(|a| if a[0] > a[1] { a[0] - a[1] } else if a[0] < -a[1] { a[0] + a[1] } else { a[0] * 0.0 }),
                  samples: || samples::activation(&[0.5]) };
            /// x − tanh x
            [pointwise tanhshrink tanhshrink_] "tanhshrink" Tanhshrink (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Decompose, decompose: Some(activations::tanhshrink_steps),
                  eval: Eval::float(|a| a[0] - a[0].tanh()), samples: || samples::activation_of(samples::NUMBERS, &[]) };
            /// x where it is above the threshold, value elsewhere
            [pointwise threshold threshold_] "threshold" Threshold (x, threshold, value) () {}
                { ty: activations::limits_ty, grad: Grad::Decompose, decompose: Some(activations::threshold_steps),
                  eval: Eval::both(|a| if a[0] <= a[1] { a[2] } else { a[0] }, |a| if a[0] <= a[1] { a[2] } else { a[0] }),
                  samples: || samples::activation_of(samples::NUMBERS, &[0.1, 3.0]) };
            /// log(1 + e^(beta·x)) / beta, and x where beta·x is above the threshold
            [pointwise softplus softplus_] "softplus" Softplus (x, beta, threshold) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::softplus),
                  decompose: Some(activations::softplus_steps),
                  eval: Eval::float(|a| if a[0] * a[1] > a[2] { a[0] } else { (a[0] * a[1]).exp().ln_1p() / a[1] }),
                  samples: || samples::activation(&[1.5, 4.0]) };
            /// log(1 / (1 + e⁻ˣ))
            [pointwise log_sigmoid log_sigmoid_] "log_sigmoid" LogSigmoid (x) () {}
                { ty: activations::ty, grad: Grad::Fn(activations::log_sigmoid),
                  decompose: Some(activations::log_sigmoid_steps),
                  eval: Eval::float(|a| a[0].min(0.0) - (-a[0].abs()).exp().ln_1p()), samples: || samples::activation(&[]) };
            /// x where positive, weight·x elsewhere; one weight, or one for each channel (dim 1)
            [composite prelu _none] "prelu" Prelu (x, weight) () {}
                { ty: activations::prelu_type, grad: Grad::Decompose, decompose: Some(activations::prelu_steps),
                  level: Level::Composite, eval: Eval::Structural, samples: activations::prelu_samples };
        ]}
    };
}

/// A float tensor, and numbers.
pub(crate) fn ty(_: &Op, args: &[Ty]) -> Rule {
    crate::table::choices::numbers_from(args, 1, "every parameter")?;
    if args.contains(&Ty::Scalar(ScalarKind::Bool)) {
        return Err(Why::DType { argument: "every number", expected: "not a truth value", got: DType::Bool });
    }
    match &args[0] {
        Ty::Tensor(x) if !x.dtype.is_float() => {
            Err(Why::DType { argument: "x", expected: "floating point", got: x.dtype })
        }
        Ty::Scalar(_) => one(Ty::Scalar(ScalarKind::Float)),
        x => one(x.clone()),
    }
}

/// Rows whose parameters are only compared with x or put in its place: integers have them, too.
pub(crate) fn limits_ty(op: &Op, args: &[Ty]) -> Rule {
    match &args[0] {
        Ty::Tensor(x) if x.dtype != DType::Bool => {
            crate::table::choices::numbers_from(args, 1, "every parameter")?;
            one(x.clone())
        }
        _ => ty(op, args),
    }
}

/// The parameters as x's dtype takes them: those of integers are truncated.
fn parameters(cx: Cx<'_>, x: Value, numbers: &[Value]) -> Result<Vec<Value>> {
    let whole = match cx.ty(x) {
        Ty::Tensor(ty) => !ty.dtype.is_float(),
        Ty::List(items) => items.kinds().all(|ty| !ty.dtype.is_float()),
        Ty::Scalar(_) => false,
    };
    let mut taken = Vec::with_capacity(numbers.len());
    for &number in numbers {
        taken.push(match cx.ty(number) {
            Ty::Scalar(ScalarKind::Int) => number,
            Ty::Scalar(ScalarKind::Float) if !whole => number,
            _ => cx.to(number, if whole { DType::I64 } else { DType::F64 })?,
        });
    }
    Ok(taken)
}

/// The gradient of x; parameters have none.
fn first(call: &GradCall<'_>, grad: Result<Value>) -> Grads {
    let mut grads = vec![Some(grad?)];
    grads.resize(call.inputs.len(), None);
    Ok(grads)
}

pub(crate) fn silu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let s = cx.sigmoid(args[0])?;
    result(cx.mul(args[0], s))
}

pub(crate) fn silu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // s·(1 + x·(1 − s))
    let (g, x, unit) = (g!(call), call.inputs[0], cx.number(1.0)?);
    let s = cx.sigmoid(x)?;
    let rest = cx.sub(unit, s)?;
    let bend = cx.mul(x, rest)?;
    let bend = cx.add(bend, unit)?;
    let slope = cx.mul(s, bend)?;
    first(call, cx.mul(g, slope))
}

/// log(1 + eˣ) = max(x, 0) + log1p(e^−|x|).
fn log_one_plus_exp(cx: Cx<'_>, x: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    let positive = cx.maximum(x, zero)?;
    let size = cx.abs(x)?;
    let minus = cx.neg(size)?;
    let e = cx.exp(minus)?;
    let rest = cx.log1p(e)?;
    cx.add(positive, rest)
}

pub(crate) fn mish_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let inner = log_one_plus_exp(cx, args[0])?;
    let t = cx.tanh(inner)?;
    result(cx.mul(args[0], t))
}

pub(crate) fn mish(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // t + x·sigmoid(x)·(1 − t²)
    let (g, x, unit) = (g!(call), call.inputs[0], cx.number(1.0)?);
    let inner = log_one_plus_exp(cx, x)?;
    let t = cx.tanh(inner)?;
    let square = cx.mul(t, t)?;
    let rest = cx.sub(unit, square)?;
    let s = cx.sigmoid(x)?;
    let bend = cx.mul(x, s)?;
    let bend = cx.mul(bend, rest)?;
    let slope = cx.add(t, bend)?;
    first(call, cx.mul(g, slope))
}

/// min(x, 0): what the exponential of an activation sees, so that it never overflows.
fn negative_part(cx: Cx<'_>, x: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    cx.minimum(x, zero)
}

/// x where positive, `other` elsewhere.
fn positive_or(cx: Cx<'_>, x: Value, positive: Value, other: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    let above = cx.gt(x, zero)?;
    cx.where_(above, positive, other)
}

/// `bent` where x is 0 or less, `straight` elsewhere, at NaN too.
fn unless_negative(cx: Cx<'_>, x: Value, bent: Value, straight: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    let below = cx.le(x, zero)?;
    cx.where_(below, bent, straight)
}

pub(crate) fn elu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let below = negative_part(cx, args[0])?;
    let e = cx.expm1(below)?;
    let scaled = cx.mul(e, args[1])?;
    result(positive_or(cx, args[0], args[0], scaled))
}

pub(crate) fn elu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x) = (g!(call), call.inputs[0]);
    let below = negative_part(cx, x)?;
    let e = cx.exp(below)?;
    let slope = cx.mul(e, call.inputs[1])?;
    let bent = cx.mul(g, slope)?;
    first(call, unless_negative(cx, x, bent, g))
}

pub(crate) fn celu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let below = negative_part(cx, args[0])?;
    let below = cx.div(below, args[1])?;
    let e = cx.expm1(below)?;
    let scaled = cx.mul(e, args[1])?;
    result(positive_or(cx, args[0], args[0], scaled))
}

pub(crate) fn celu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x) = (g!(call), call.inputs[0]);
    let below = negative_part(cx, x)?;
    let below = cx.div(below, call.inputs[1])?;
    let e = cx.exp(below)?;
    let bent = cx.mul(g, e)?;
    first(call, unless_negative(cx, x, bent, g))
}

pub(crate) fn selu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (alpha, scale) = (cx.number(SELU_ALPHA)?, cx.number(SELU_SCALE)?);
    let elu = cx.elu(args[0], alpha)?;
    result(cx.mul(elu, scale))
}

pub(crate) fn selu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, factor) = (g!(call), call.inputs[0], cx.number(SELU_SCALE * SELU_ALPHA)?);
    let scale = cx.number(SELU_SCALE)?;
    let straight = cx.mul(g, scale)?;
    let below = negative_part(cx, x)?;
    let e = cx.exp(below)?;
    let slope = cx.mul(e, factor)?;
    let bent = cx.mul(g, slope)?;
    first(call, unless_negative(cx, x, bent, straight))
}

pub(crate) fn leaky_relu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let scaled = cx.mul(args[0], args[1])?;
    result(positive_or(cx, args[0], args[0], scaled))
}

pub(crate) fn leaky_relu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let scaled = cx.mul(g, call.inputs[1])?;
    first(call, positive_or(cx, call.inputs[0], g, scaled))
}

pub(crate) fn hardtanh_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let limits = parameters(cx, args[0], &args[1..])?;
    let raised = cx.maximum(args[0], limits[0])?;
    result(cx.minimum(raised, limits[1]))
}

/// g strictly between the limits, 0 elsewhere.
fn between(cx: Cx<'_>, x: Value, low: Value, high: Value, g: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    let (above, below) = (cx.gt(x, low)?, cx.lt(x, high)?);
    let inside = cx.logical_and(above, below)?;
    cx.where_(inside, g, zero)
}

/// 0 at the limits and beyond them, g elsewhere, at NaN too.
fn unless_limited(cx: Cx<'_>, x: Value, low: Value, high: Value, g: Value) -> Result<Value> {
    let zero = cx.number(0.0)?;
    let (below, above) = (cx.le(x, low)?, cx.ge(x, high)?);
    let grad = cx.where_(below, zero, g)?;
    cx.where_(above, zero, grad)
}

pub(crate) fn hardtanh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    first(call, unless_limited(cx, call.inputs[0], call.inputs[1], call.inputs[2], g))
}

pub(crate) fn relu6_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (low, high) = (cx.number(0.0)?, cx.number(6.0)?);
    result(cx.hardtanh(args[0], low, high))
}

pub(crate) fn relu6(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, low, high) = (g!(call), cx.number(0.0)?, cx.number(6.0)?);
    first(call, unless_limited(cx, call.inputs[0], low, high, g))
}

/// min(max(x + 3, 0), 6)
fn ramp(cx: Cx<'_>, x: Value) -> Result<Value> {
    let (low, high, three) = (cx.number(0.0)?, cx.number(6.0)?, cx.number(3.0)?);
    let moved = cx.add(x, three)?;
    let raised = cx.maximum(moved, low)?;
    cx.minimum(raised, high)
}

pub(crate) fn hardsigmoid_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (ramp, six) = (ramp(cx, args[0])?, cx.number(6.0)?);
    result(cx.div(ramp, six))
}

pub(crate) fn hardsigmoid(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, low, high, six) = (g!(call), cx.number(-3.0)?, cx.number(3.0)?, cx.number(6.0)?);
    let share = cx.div(g, six)?;
    first(call, between(cx, call.inputs[0], low, high, share))
}

pub(crate) fn hardswish_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (ramp, six) = (ramp(cx, args[0])?, cx.number(6.0)?);
    let product = cx.mul(args[0], ramp)?;
    result(cx.div(product, six))
}

pub(crate) fn hardswish(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // 0 up to −3, x/3 + ½ between, 1 from 3 on
    let (g, x, zero) = (g!(call), call.inputs[0], cx.number(0.0)?);
    let (three, minus, half) = (cx.number(3.0)?, cx.number(-3.0)?, cx.number(0.5)?);
    let slope = cx.div(x, three)?;
    let slope = cx.add(slope, half)?;
    let bent = cx.mul(g, slope)?;
    // NaN is neither low nor high.
    let (low, high) = (cx.le(x, minus)?, cx.ge(x, three)?);
    let grad = cx.where_(high, g, bent)?;
    first(call, cx.where_(low, zero, grad))
}

pub(crate) fn hardshrink_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (size, zero) = (cx.abs(args[0])?, cx.number(0.0)?);
    let small = cx.le(size, args[1])?;
    result(cx.where_(small, zero, args[0]))
}

pub(crate) fn softshrink_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, lambd, zero) = (args[0], args[1], cx.number(0.0)?);
    let minus = cx.neg(lambd)?;
    let (above, below) = (cx.gt(x, lambd)?, cx.lt(x, minus)?);
    let (less, more) = (cx.sub(x, lambd)?, cx.add(x, lambd)?);
    let nothing = cx.mul(x, zero)?; // NaN stays
    let low = cx.where_(below, more, nothing)?;
    result(cx.where_(above, less, low))
}

pub(crate) fn softshrink(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, zero) = (g!(call), cx.number(0.0)?);
    let size = cx.abs(call.inputs[0])?;
    let small = cx.le(size, call.inputs[1])?;
    first(call, cx.where_(small, zero, g))
}

pub(crate) fn tanhshrink_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let t = cx.tanh(args[0])?;
    result(cx.sub(args[0], t))
}

pub(crate) fn threshold_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let numbers = parameters(cx, args[0], &args[1..])?;
    let below = cx.le(args[0], numbers[0])?;
    result(cx.where_(below, numbers[1], args[0]))
}

pub(crate) fn softplus_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, beta, threshold) = (args[0], args[1], args[2]);
    let scaled = cx.mul(x, beta)?;
    let smooth = log_one_plus_exp(cx, scaled)?;
    let smooth = cx.div(smooth, beta)?;
    let straight = cx.gt(scaled, threshold)?;
    result(cx.where_(straight, x, smooth))
}

pub(crate) fn softplus(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, beta, threshold) = (g!(call), call.inputs[0], call.inputs[1], call.inputs[2]);
    let scaled = cx.mul(x, beta)?;
    let slope = cx.sigmoid(scaled)?;
    let bent = cx.mul(g, slope)?;
    let straight = cx.gt(scaled, threshold)?;
    first(call, cx.where_(straight, g, bent))
}

pub(crate) fn log_sigmoid_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let minus = cx.neg(args[0])?;
    let log = log_one_plus_exp(cx, minus)?;
    result(cx.neg(log))
}

pub(crate) fn log_sigmoid(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let minus = cx.neg(call.inputs[0])?;
    let slope = cx.sigmoid(minus)?;
    first(call, cx.mul(g, slope))
}

pub(crate) fn prelu_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, weight) = (tensor(args, 0, "x")?, tensor(args, 1, "weight")?);
    common_device(args)?;
    if !x.dtype.is_float() {
        return Err(Why::DType { argument: "x", expected: "floating point", got: x.dtype });
    }
    if weight.dtype != x.dtype {
        return Err(Why::DType { argument: "weight", expected: "of x's dtype", got: weight.dtype });
    }
    if weight.shape.rank() > 1 {
        return Err(Why::Rank { argument: "weight", expected: "0 or 1", got: weight.shape.rank() });
    }
    let (weights, channels) = (weight.shape.numel(), x.shape.get(1).copied().unwrap_or(1));
    if weights != 1 && weights != channels {
        return Err(Why::Sizes { what: "weights and channels", left: weights, right: channels });
    }
    one(x.clone())
}

pub(crate) fn prelu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, weight) = (cx.tensor_ty(args[0]), cx.tensor_ty(args[1]));
    let mut shape: Shape = x.shape.iter().map(|_| 1).collect();
    if weight.shape.numel() != 1 {
        shape[1] = weight.shape.numel();
    }
    let weight = cx.reshape(args[1], shape)?;
    let scaled = cx.mul(weight, args[0])?;
    result(positive_or(cx, args[0], args[0], scaled))
}

pub(crate) fn prelu_samples() -> Vec<Sample> {
    calls(
        FLOATS,
        vec![
            vec![t(&[5], Any), t(&[1], Any)],
            vec![t(&[4, 37], Any), t(&[37], Any)],
            vec![t(&[2, 3, 17], Any), t(&[3], Any)],
            vec![t(&[], Any), t(&[], Any)],
            vec![t(&[0, 3], Any), t(&[3], Any)],
        ],
    )
}
