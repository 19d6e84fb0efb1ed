//! Rows: activations. Their parameters are numbers known at run time.

use crate::decompose::one as result;
use crate::formula::Term;
use crate::gradient::{Cx, Grads, g};
use crate::samples::{Any, FLOATS, calls, t};
use crate::types::{Rule, common_device, float, one, tensor};
use crate::{DType, Dims, EmitExt, GradCall, Op, Result, Sample, ScalarKind, Shape, Ty, Value, Values, Why};

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
                { ty: activations::ty, grad: rule!(|g, x| { let s = x.sigmoid(); [g * (s * (x * (1.0 - s) + 1.0))] }),
                  decompose: steps!(|x| x * x.sigmoid()), function: Some(Function::Silu),
                  eval: Eval::float(|a| a[0] / (1.0 + (-a[0]).exp())),
                  samples: samples::unary_float };
            /// x · tanh(log(1 + eˣ))
            [pointwise mish mish_] "mish" Mish (x) () {}
                { ty: activations::ty, grad: rule!(|g, x| {
                      let t = activations::log_one_plus_exp(x).tanh();
                      [g * (t + x * x.sigmoid() * (1.0 - t * t))]
                  }),
                  decompose: steps!(|x| x * activations::log_one_plus_exp(x).tanh()),
                  function: Some(Function::Mish),
                  eval: Eval::float(|a| a[0] * (nan_max(a[0], 0.0) + (-a[0].abs()).exp().ln_1p()).tanh()), samples: samples::unary_float };
            /// x where positive, alpha·(eˣ − 1) elsewhere
            [pointwise elu elu_] "elu" Elu (x, alpha) () {}
                { ty: activations::ty, grad: rule!(|g, x, alpha| [x.le(0.0).where_(g * (x.minimum(0.0).exp() * alpha), g)]),
                  decompose: steps!(|x, alpha| x.gt(0.0).where_(x, x.minimum(0.0).expm1() * alpha)),
                  function: Some(Function::Elu),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * a[0].exp_m1() }), samples: || samples::activation(&[1.25]) };
            /// x where positive, alpha·(e^(x/alpha) − 1) elsewhere
            [pointwise celu celu_] "celu" Celu (x, alpha) () {}
                { ty: activations::ty, grad: rule!(|g, x, alpha| [x.le(0.0).where_(g * (x.minimum(0.0) / alpha).exp(), g)]),
                  decompose: steps!(|x, alpha| x.gt(0.0).where_(x, (x.minimum(0.0) / alpha).expm1() * alpha)),
                  function: Some(Function::Celu),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * (a[0] / a[1]).exp_m1() }), samples: || samples::activation(&[1.5]) };
            /// elu with the factors that keep mean and variance
            [pointwise selu selu_] "selu" Selu (x) () {}
                { ty: activations::ty, grad: rule!(|g, x| [x.le(0.0).where_(
                      g * (x.minimum(0.0).exp() * (activations::SELU_SCALE * activations::SELU_ALPHA)),
                      g * activations::SELU_SCALE,
                  )]),
                  decompose: steps!(|x| x.elu(activations::SELU_ALPHA) * activations::SELU_SCALE),
                  function: Some(Function::Selu),
                  eval: Eval::float(|a| activations::SELU_SCALE * if a[0] > 0.0 { a[0] } else { activations::SELU_ALPHA * a[0].exp_m1() }),
                  samples: || samples::activation(&[]) };
            /// x where positive, negative_slope·x elsewhere
            [pointwise leaky_relu leaky_relu_] "leaky_relu" LeakyRelu (x, negative_slope) () {}
                { ty: activations::ty, grad: rule!(|g, x, slope| [x.gt(0.0).where_(g, g * slope)]),
                  decompose: steps!(|x, slope| x.gt(0.0).where_(x, x * slope)),
                  function: Some(Function::LeakyRelu),
                  eval: Eval::float(|a| if a[0] > 0.0 { a[0] } else { a[1] * a[0] }), samples: || samples::activation(&[0.01]) };
            /// min(max(x, 0), 6)
            [pointwise relu6 relu6_] "relu6" Relu6 (x) () {}
                { ty: activations::limits_ty, grad: rule!(|g, x| [x.ge(6.0).where_(0.0, x.le(0.0).where_(0.0, g))]),
                  decompose: Some(activations::relu6_steps),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], 0.0), -6.0), |a| a[0].clamp(0, 6)),
                  samples: || samples::activation_of(samples::NUMBERS, &[]) };
            /// x limited to [min_val, max_val]; at the edges its slope is 0
            [pointwise hardtanh hardtanh_] "hardtanh" Hardtanh (x, min_val, max_val) () {}
                { ty: activations::limits_ty, grad: rule!(|g, x, min, max| [x.ge(max).where_(0.0, x.le(min).where_(0.0, g))]),
                  decompose: Some(activations::hardtanh_steps),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], a[1]), -a[2]), |a| a[0].max(a[1]).min(a[2])),
                  samples: || samples::activation_of(samples::NUMBERS, &[-0.75, 1.5]) };
            /// min(max(x + 3, 0), 6) / 6
            [pointwise hardsigmoid hardsigmoid_] "hardsigmoid" Hardsigmoid (x) () {}
                { ty: activations::ty, grad: rule!(|g, x| [x.gt(-3.0).logical_and(x.lt(3.0)).where_(g / 6.0, 0.0)]),
                  decompose: steps!(|x| activations::ramp(x) / 6.0),
                  function: Some(Function::Hardsigmoid),
                  eval: Eval::float(|a| -nan_max(-nan_max(a[0] + 3.0, 0.0), -6.0) / 6.0), samples: || samples::activation(&[]) };
            /// x · hardsigmoid(x)
            [pointwise hardswish hardswish_] "hardswish" Hardswish (x) () {}
                { ty: activations::ty, grad: rule!(|g, x| [x.le(-3.0).where_(0.0, x.ge(3.0).where_(g, g * (x / 3.0 + 0.5)))]),
                  decompose: steps!(|x| x * activations::ramp(x) / 6.0),
                  function: Some(Function::Hardswish),
                  eval: Eval::float(|a| a[0] * -nan_max(-nan_max(a[0] + 3.0, 0.0), -6.0) / 6.0), samples: || samples::activation(&[]) };
            /// x, and 0 where |x| ≤ lambd
            [pointwise hardshrink hardshrink_] "hardshrink" Hardshrink (x, lambd) () {}
                { ty: activations::ty, grad: rule!(|g, x, lambd| [x.abs().le(lambd).where_(0.0, g)]),
                  decompose: steps!(|x, lambd| x.abs().le(lambd).where_(0.0, x)),
                  function: Some(Function::Hardshrink),
                  eval: Eval::float(|a| if a[0].abs() <= a[1] { 0.0 } else { a[0] }), samples: || samples::activation(&[0.5]) };
            /// x moved towards 0 by lambd
            [pointwise softshrink softshrink_] "softshrink" Softshrink (x, lambd) () {}
                { ty: activations::ty, grad: rule!(|g, x, lambd| [x.abs().le(lambd).where_(0.0, g)]), decompose: steps!(|x, lambd| {
                      let nothing = x * 0.0; // NaN stays
                      x.gt(lambd).where_(x - lambd, x.lt(-lambd).where_(x + lambd, nothing))
                  }),
                  function: Some(Function::Softshrink),
                  eval: Eval::float(|a| if a[0] > a[1] { a[0] - a[1] } else if a[0] < -a[1] { a[0] + a[1] } else { a[0] * 0.0 }),
                  samples: || samples::activation(&[0.5]) };
            /// x − tanh x
            [pointwise tanhshrink tanhshrink_] "tanhshrink" Tanhshrink (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| { let y = x.tanh(); [g * (y * y)] }),
                  decompose: steps!(|x| x - x.tanh()),
                  eval: Eval::float(|a| a[0] - a[0].tanh()), samples: || samples::activation_of(samples::NUMBERS, &[]) };
            /// x where it is above the threshold, value elsewhere
            [pointwise threshold threshold_] "threshold" Threshold (x, threshold, value) () {}
                { ty: activations::limits_ty, grad: rule!(|g, x, threshold, _value| [x.le(threshold).where_(0.0, g)]),
                  decompose: Some(activations::threshold_steps),
                  eval: Eval::both(|a| if a[0] <= a[1] { a[2] } else { a[0] }, |a| if a[0] <= a[1] { a[2] } else { a[0] }),
                  samples: || samples::activation_of(samples::NUMBERS, &[0.1, 3.0]) };
            /// log(1 + e^(beta·x)) / beta, and x where beta·x is above the threshold
            [pointwise softplus softplus_] "softplus" Softplus (x, beta, threshold) () {}
                { ty: activations::ty, grad: rule!(|g, x, beta, threshold| {
                      let scaled = x * beta;
                      [scaled.gt(threshold).where_(g, g * scaled.sigmoid())]
                  }),
                  decompose: steps!(|x, beta, threshold| {
                      let scaled = x * beta;
                      scaled.gt(threshold).where_(x, activations::log_one_plus_exp(scaled) / beta)
                  }),
                  function: Some(Function::Softplus),
                  eval: Eval::float(|a| if a[0] * a[1] > a[2] { a[0] } else { (a[0] * a[1]).exp().ln_1p() / a[1] }),
                  samples: || samples::activation(&[1.5, 4.0]) };
            /// log(1 / (1 + e⁻ˣ))
            [pointwise log_sigmoid log_sigmoid_] "log_sigmoid" LogSigmoid (x) () {}
                { ty: activations::ty, grad: rule!(|g, x| [g * (-x).sigmoid()]),
                  decompose: steps!(|x| -activations::log_one_plus_exp(-x)),
                  function: Some(Function::LogSigmoid),
                  eval: Eval::float(|a| a[0].min(0.0) - (-a[0].abs()).exp().ln_1p()), samples: || samples::activation(&[]) };
            /// x where positive, weight·x elsewhere; one weight, or one for each channel (dim 1)
            [composite prelu _none] "prelu" Prelu (x, weight) () {}
                { ty: activations::prelu_type, grad: Grad::Fn(activations::prelu), decompose: Some(activations::prelu_steps), eval: Eval::Structural, samples: activations::prelu_samples };
        ]}
    };
}

/// A float tensor, and numbers.
pub(crate) fn ty(_: &Op, args: &[Ty]) -> Rule {
    crate::table::choices::numbers_from(args, 1, "every parameter")?;
    if args.contains(&Ty::Scalar(ScalarKind::Bool)) {
        return Err(Why::DType {
            argument: "number arguments",
            expected: "integer or floating point",
            got: DType::Bool,
        });
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

pub(crate) fn hardtanh_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let limits = parameters(cx, args[0], &args[1..])?;
    result(cx.clamp(args[0], limits[0], limits[1]))
}

pub(crate) fn relu6_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let (least, most) = (cx.number(0.0)?, cx.number(6.0)?);
    hardtanh_steps(cx, op, &[args[0], least, most])
}

pub(crate) fn threshold_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let numbers = parameters(cx, args[0], &args[1..])?;
    let below = cx.le(args[0], numbers[0])?;
    result(cx.where_(below, numbers[1], args[0]))
}

/// log(1 + eˣ) = max(x, 0) + log1p(e^−|x|).
pub(crate) fn log_one_plus_exp(x: Term<'_>) -> Term<'_> {
    x.maximum(0.0) + (-x.abs()).exp().log1p()
}

/// min(max(x + 3, 0), 6)
pub(crate) fn ramp(x: Term<'_>) -> Term<'_> {
    (x + 3.0).maximum(0.0).minimum(6.0)
}

pub(crate) fn prelu_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, weight) = (tensor(args, 0, "x")?, tensor(args, 1, "weight")?);
    common_device(args)?;
    float(args, 0, "x")?;
    if weight.dtype != x.dtype {
        return Err(Why::DType { argument: "weight", expected: x.dtype.name(), got: weight.dtype });
    }
    if weight.shape.rank() > 1 {
        return Err(Why::Rank { argument: "weight", expected: "0 or 1", got: weight.shape.rank() });
    }
    let (weights, channels) = (weight.shape.numel(), x.shape.get(1).copied().unwrap_or(1));
    if weights != 1 && weights != channels {
        return Err(Why::sizes("the number of weights and of channels", weights, channels));
    }
    one(x.clone())
}

/// The shape in which weights are broadcast over x, and the dims over which.
fn prelu_shape(cx: Cx<'_>, args: &[Value]) -> (Shape, Dims) {
    let (x, weights) = (cx.tensor_ty(args[0]).shape, cx.tensor_ty(args[1]).shape.numel());
    let over = |dim: &usize| weights == 1 || *dim != 1;
    let shape = (0..x.rank()).map(|dim| if over(&dim) { 1 } else { weights }).collect();
    (shape, (0..x.rank()).filter(over).collect())
}

pub(crate) fn prelu(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, zero) = (g!(call), call.inputs[0], cx.number(0.0)?);
    let positive = cx.gt(x, zero)?;
    let gx = call.wanted(cx, 0, |cx| {
        let (shape, _) = prelu_shape(cx, call.inputs);
        let weight = cx.reshape(call.inputs[1], shape)?;
        let scaled = cx.mul(g, weight)?;
        cx.where_(positive, g, scaled)
    })?;
    let gw = call.wanted(cx, 1, |cx| {
        let product = cx.mul(g, x)?;
        let shares = cx.where_(positive, zero, product)?;
        let (shape, (_, dims)) = (cx.tensor_ty(call.inputs[1]).shape, prelu_shape(cx, call.inputs));
        let sum = if dims.is_empty() { shares } else { cx.sum(shares, dims, false)? };
        cx.reshape(sum, shape)
    })?;
    Ok(vec![gx, gw])
}

pub(crate) fn prelu_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (shape, _) = prelu_shape(cx, args);
    let weight = cx.reshape(args[1], shape)?;
    let scaled = cx.mul(weight, args[0])?;
    let (zero, x) = (cx.number(0.0)?, args[0]);
    let positive = cx.gt(x, zero)?;
    result(cx.where_(positive, x, scaled))
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
