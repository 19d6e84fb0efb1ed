//! Rows: pointwise functions.

use std::f64::consts;

use crate::decompose::one as result;
use crate::gradient::{Cx, Grads, g, one};
use crate::types::{Rule, arithmetic_not_bool, broadcast_all};
use crate::{DType, EmitExt, GradCall, Op, Result, Ty, Value, Values};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_functions {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_activations! { $callback [
            $($rows)*

            /// eˣ
            [pointwise exp exp_] "exp" Exp (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::exp),
                  eval: Eval::float(|a| a[0].exp()), function: Some(Function::Exp), samples: samples::unary };
            /// 2ˣ
            [pointwise exp2 exp2_] "exp2" Exp2 (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::exp2),
                  eval: Eval::float(|a| a[0].exp2()), function: Some(Function::Exp2), samples: samples::unary };
            /// eˣ − 1
            [pointwise expm1 expm1_] "expm1" Expm1 (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::expm1),
                  eval: Eval::float(|a| a[0].exp_m1()), function: Some(Function::Expm1), samples: samples::unary };
            /// Natural logarithm
            [pointwise log log_] "log" Log (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::log),
                  eval: Eval::float(|a| a[0].ln()), function: Some(Function::Log), samples: samples::unary_positive };
            /// Logarithm to base 2
            [pointwise log2 log2_] "log2" Log2 (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::log2),
                  eval: Eval::float(|a| a[0].log2()), function: Some(Function::Log2), samples: samples::unary_positive };
            /// Logarithm to base 10
            [pointwise log10 log10_] "log10" Log10 (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::log10),
                  eval: Eval::float(|a| a[0].log10()), function: Some(Function::Log10), samples: samples::unary_positive };
            /// log(1 + x)
            [pointwise log1p log1p_] "log1p" Log1p (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::log1p),
                  eval: Eval::float(|a| a[0].ln_1p()), function: Some(Function::Log1p), samples: samples::unary_positive };
            /// log(eˣ + eʸ)
            [pointwise logaddexp logaddexp_] "logaddexp" Logaddexp (x, y) () {}
                { ty: types::float_only, grad: Grad::Fn(functions::logaddexp),
                  decompose: Some(functions::logaddexp_steps),
                  eval: Eval::float(|a| if a[0] == a[1] && a[0].is_infinite() { a[0] } else {
                      nan_max(a[0], a[1]) + (-(a[0] - a[1]).abs()).exp().ln_1p() }),
                  samples: || samples::binary_on(samples::FLOATS, samples::Any) };
            /// x · log y, and 0 where x is 0
            [pointwise xlogy xlogy_] "xlogy" Xlogy (x, y) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::xlogy),
                  decompose: Some(functions::xlogy_steps),
                  eval: Eval::float(|a| if a[0] == 0.0 && !a[1].is_nan() { 0.0 } else { a[0] * a[1].ln() }),
                  samples: || samples::binary_on(samples::NUMBERS, samples::Positive) };
            /// log(x / (1 − x)), x first limited to [eps, 1 − eps] where eps is given
            [pointwise logit logit_] "logit" Logit (x) (eps) {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::logit),
                  decompose: Some(functions::logit_steps),
                  eval: Eval::float(|a| { let x = a.get(1).map_or(a[0], |e| nan_max(a[0], *e).min(1.0 - e)); (x / (1.0 - x)).ln() }),
                  samples: functions::logit_samples };
            /// Square root
            [pointwise sqrt sqrt_] "sqrt" Sqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sqrt),
                  eval: Eval::float(|a| a[0].sqrt()), function: Some(Function::Sqrt), samples: samples::unary_positive };
            /// 1 / √x
            [pointwise rsqrt rsqrt_] "rsqrt" Rsqrt (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::rsqrt),
                  decompose: Some(decompose::rsqrt), eval: Eval::float(|a| 1.0 / a[0].sqrt()),
                  function: Some(Function::Rsqrt), samples: samples::unary_positive };
            /// x · x
            [pointwise square square_] "square" Square (x) () {}
                { ty: functions::square_type, grad: Grad::Decompose, decompose: Some(functions::square_steps),
                  eval: Eval::both(|a| a[0] * a[0], |a| a[0].wrapping_mul(a[0])), function: Some(Function::Square),
                  samples: samples::unary };
            /// Sine
            [pointwise sin sin_] "sin" Sin (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::sin),
                  eval: Eval::float(|a| a[0].sin()), function: Some(Function::Sin), samples: samples::unary };
            /// Cosine
            [pointwise cos cos_] "cos" Cos (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::cos),
                  eval: Eval::float(|a| a[0].cos()), function: Some(Function::Cos), samples: samples::unary };
            /// Tangent
            [pointwise tan tan_] "tan" Tan (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::tan),
                  eval: Eval::float(|a| a[0].tan()), function: Some(Function::Tan),
                  samples: || samples::unary_on(samples::ALL, samples::Between(-1.2, 1.2)) };
            /// The angle whose sine is x
            [pointwise asin asin_] "asin" Asin (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::asin),
                  eval: Eval::float(|a| a[0].asin()), function: Some(Function::Asin), samples: functions::inside };
            /// The angle whose cosine is x
            [pointwise acos acos_] "acos" Acos (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::acos),
                  eval: Eval::float(|a| a[0].acos()), function: Some(Function::Acos), samples: functions::inside };
            /// The angle whose tangent is x
            [pointwise atan atan_] "atan" Atan (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::atan),
                  eval: Eval::float(|a| a[0].atan()), function: Some(Function::Atan), samples: samples::unary };
            /// The angle of the point with this height y and this x
            [pointwise atan2 atan2_] "atan2" Atan2 (y, x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::atan2),
                  eval: Eval::float(|a| a[0].atan2(a[1])), function: Some(Function::Atan2),
                  samples: || samples::binary_on(samples::ALL, samples::NonZero) };
            /// Hyperbolic sine
            [pointwise sinh sinh_] "sinh" Sinh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::sinh),
                  eval: Eval::float(|a| a[0].sinh()), function: Some(Function::Sinh), samples: samples::unary };
            /// Hyperbolic cosine
            [pointwise cosh cosh_] "cosh" Cosh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::cosh),
                  eval: Eval::float(|a| a[0].cosh()), function: Some(Function::Cosh), samples: samples::unary };
            /// Hyperbolic tangent
            [pointwise tanh tanh_] "tanh" Tanh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::tanh),
                  eval: Eval::float(|a| a[0].tanh()), function: Some(Function::Tanh), samples: samples::unary };
            /// The number whose hyperbolic sine is x
            [pointwise asinh asinh_] "asinh" Asinh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::asinh),
                  eval: Eval::float(|a| a[0].asinh()), function: Some(Function::Asinh), samples: samples::unary };
            /// The number ≥ 0 whose hyperbolic cosine is x
            [pointwise acosh acosh_] "acosh" Acosh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::acosh),
                  eval: Eval::float(|a| a[0].acosh()), function: Some(Function::Acosh),
                  samples: || samples::unary_on(samples::ALL, samples::Between(1.2, 9.0)) };
            /// The number whose hyperbolic tangent is x
            [pointwise atanh atanh_] "atanh" Atanh (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::atanh),
                  eval: Eval::float(|a| a[0].atanh()), function: Some(Function::Atanh), samples: functions::inside };
            /// sin(πx) / πx, and 1 at 0
            [pointwise sinc sinc_] "sinc" Sinc (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::sinc),
                  decompose: Some(functions::sinc_steps),
                  eval: Eval::float(|a| { let z = std::f64::consts::PI * a[0]; if a[0] == 0.0 { 1.0 } else { z.sin() / z } }),
                  samples: samples::unary_float };
            /// Degrees as radians
            [pointwise deg2rad deg2rad_] "deg2rad" Deg2rad (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Decompose, decompose: Some(functions::deg2rad_steps),
                  eval: Eval::float(|a| a[0] * (std::f64::consts::PI / 180.0)), samples: samples::unary_not_bool };
            /// Radians as degrees
            [pointwise rad2deg rad2deg_] "rad2deg" Rad2deg (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Decompose, decompose: Some(functions::rad2deg_steps),
                  eval: Eval::float(|a| a[0] * (180.0 / std::f64::consts::PI)), samples: samples::unary_not_bool };
            /// Error function
            [pointwise erf erf_] "erf" Erf (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::erf),
                  eval: Eval::float(|a| erf(a[0])), function: Some(Function::Erf), samples: samples::unary };
            /// 1 − erf x
            [pointwise erfc erfc_] "erfc" Erfc (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::erfc),
                  eval: Eval::float(|a| erfc(a[0])), function: Some(Function::Erfc), samples: samples::unary };
            /// The number whose erf is x
            [pointwise erfinv erfinv_] "erfinv" Erfinv (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::erfinv),
                  eval: Eval::float(|a| erfinv(a[0])), function: Some(Function::Erfinv), samples: functions::inside };
            /// log |Γ(x)|
            [pointwise lgamma lgamma_] "lgamma" Lgamma (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::lgamma),
                  eval: Eval::float(|a| lgamma(a[0])), samples: samples::unary_positive };
            /// The derivative of lgamma
            [pointwise digamma digamma_] "digamma" Digamma (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::digamma),
                  eval: Eval::float(|a| digamma(a[0])), samples: samples::unary_positive };
            /// The derivative of digamma, PyTorch's polygamma of order 1
            [pointwise trigamma trigamma_] "trigamma" Trigamma (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(functions::trigamma),
                  eval: Eval::float(|a| trigamma(a[0])), samples: samples::unary_positive };
            /// The derivative of trigamma, PyTorch's polygamma of order 2
            [pointwise tetragamma tetragamma_] "tetragamma" Tetragamma (x) () {}
                { ty: types::float_arithmetic, grad: Grad::NotDifferentiable("polygamma of order 3 is not in the table"),
                  eval: Eval::float(|a| tetragamma(a[0])), samples: samples::unary_positive };
            /// 1 / (1 + e⁻ˣ)
            [pointwise sigmoid sigmoid_] "sigmoid" Sigmoid (x) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(gradient::sigmoid),
                  eval: Eval::float(|a| 1.0 / (1.0 + (-a[0]).exp())), function: Some(Function::Sigmoid), samples: samples::unary };
            /// max(x, 0)
            [pointwise relu relu_] "relu" Relu (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::relu),
                  decompose: Some(decompose::relu), eval: Eval::both(|a| nan_max(a[0], 0.0), |a| a[0].max(0)),
                  function: Some(Function::Relu), samples: samples::unary_not_bool };
            /// x · Φ(x), by the error function or by tanh
            [activation gelu gelu_] "gelu" Gelu (x) () { approximate: Approximate }
                { ty: types::float_only, grad: Grad::Fn(gradient::gelu),
                  decompose: Some(decompose::gelu), eval: Eval::float_op(eval_gelu), function: Some(Function::Gelu), samples: samples::gelu };
        ]}
    };
}

/// Samples strictly between −1 and 1.
pub(crate) fn inside() -> Vec<crate::Sample> {
    crate::samples::unary_on(crate::samples::FLOATS, crate::Domain::Between(-0.95, 0.95))
}

pub(crate) fn logit_samples() -> Vec<crate::Sample> {
    let unit = crate::Domain::Between(0.05, 0.95);
    let mut samples = crate::samples::unary_on(crate::samples::FLOATS, unit);
    for mut sample in crate::samples::unary_on(crate::samples::FLOATS, unit) {
        sample.args.push(crate::SampleArg::Number(0.125.into()));
        samples.push(sample);
    }
    samples
}

/// Integers as f32, floats as they are.
pub(crate) fn float(cx: Cx<'_>, x: Value) -> Result<Value> {
    let whole = match cx.ty(x) {
        Ty::Tensor(t) => !t.dtype.is_float(),
        Ty::Scalar(_) => false,
        Ty::List(items) => items.kinds().all(|t| !t.dtype.is_float()),
    };
    if whole { cx.to(x, DType::F32) } else { Ok(x) }
}

/// Truth values are squared as integers, as PyTorch's powers of 2 are.
pub(crate) fn square_type(op: &Op, args: &[Ty]) -> Rule {
    match &args[0] {
        Ty::Tensor(x) if x.dtype == DType::Bool => broadcast_all(args, DType::I64),
        _ => arithmetic_not_bool(op, args),
    }
}

/// Tensors converted to the dtype of the op's result: the steps of a decomposition see two operands at a time.
pub(crate) fn promoted(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Vec<Value>> {
    let tys: Vec<Ty> = args.iter().map(|&v| cx.ty(v).clone()).collect();
    let dtype = match op.infer(&tys).ok().and_then(|outs| outs.first().cloned()) {
        Some(Ty::Tensor(t)) => t.dtype,
        _ => return Ok(args.to_vec()),
    };
    let mut converted = Vec::with_capacity(args.len());
    for (&arg, ty) in args.iter().zip(&tys) {
        converted.push(match ty {
            Ty::Tensor(t) if t.dtype != dtype => cx.to(arg, dtype)?,
            _ => arg,
        });
    }
    Ok(converted)
}

fn scaled(cx: Cx<'_>, x: Value, factor: f64) -> Result<Value> {
    let factor = cx.number(factor)?;
    cx.mul(x, factor)
}

/// 1 + sign·x².
fn one_and_square(cx: Cx<'_>, x: Value, sign: f64) -> Result<Value> {
    let x = float(cx, x)?;
    let unit = cx.number(1.0)?;
    let square = cx.mul(x, x)?;
    if sign < 0.0 { cx.sub(unit, square) } else { cx.add(square, unit) }
}

pub(crate) fn exp2(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = scaled(cx, call.y(), consts::LN_2)?;
    one(cx.mul(g, slope))
}

pub(crate) fn expm1(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, unit) = (g!(call), cx.number(1.0)?);
    let slope = cx.add(call.y(), unit)?;
    one(cx.mul(g, slope))
}

fn logarithm(cx: Cx<'_>, call: &GradCall<'_>, base: f64) -> Grads {
    let g = g!(call);
    let scale = scaled(cx, call.inputs[0], base)?;
    one(cx.div(g, scale))
}

pub(crate) fn log2(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    logarithm(cx, call, consts::LN_2)
}

pub(crate) fn log10(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    logarithm(cx, call, consts::LN_10)
}

pub(crate) fn log1p(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, unit) = (g!(call), cx.number(1.0)?);
    let more = cx.add(call.inputs[0], unit)?;
    one(cx.div(g, more))
}

/// m + log1p(e^−|x − y|), m the larger; equal infinities are themselves.
pub(crate) fn logaddexp_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    let (x, y) = (args[0], args[1]);
    let zero = cx.number(0.0)?;
    let larger = cx.maximum(x, y)?;
    let same = cx.eq(x, y)?;
    let apart = cx.sub(x, y)?;
    let apart = cx.where_(same, zero, apart)?;
    let apart = cx.abs(apart)?;
    let apart = cx.neg(apart)?;
    let e = cx.exp(apart)?;
    let more = cx.log1p(e)?;
    result(cx.add(larger, more))
}

pub(crate) fn logaddexp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // The share of each is sigmoid of its lead.
    let g = g!(call);
    let mut grads = Vec::new();
    for (i, (a, b)) in [(0, 1), (1, 0)].into_iter().enumerate() {
        grads.push(match call.wants(i) {
            true => {
                let lead = cx.sub(call.inputs[a], call.inputs[b])?;
                let share = cx.sigmoid(lead)?;
                Some(cx.mul(g, share)?)
            }
            false => None,
        });
    }
    Ok(grads)
}

pub(crate) fn xlogy_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    let (x, y) = (args[0], args[1]);
    let zero = cx.number(0.0)?;
    let log = cx.log(y)?;
    let product = cx.mul(x, log)?;
    let nothing = cx.eq(x, zero)?;
    let number = cx.eq(y, y)?;
    let nothing = cx.logical_and(nothing, number)?;
    result(cx.where_(nothing, zero, product))
}

pub(crate) fn xlogy(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, y, zero) = (g!(call), call.inputs[0], call.inputs[1], cx.number(0.0)?);
    let gx = match call.wants(0) {
        true => {
            let product = cx.xlogy(g, y)?;
            let (nothing, outside) = (cx.eq(x, zero)?, cx.le(y, zero)?);
            let flat = cx.logical_and(nothing, outside)?;
            Some(cx.where_(flat, zero, product)?)
        }
        false => None,
    };
    let gy = match call.wants(1) {
        true => {
            let slope = cx.div(x, y)?;
            Some(cx.mul(g, slope)?)
        }
        false => None,
    };
    Ok(vec![gx, gy])
}

pub(crate) fn logit_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let unit = cx.number(1.0)?;
    let mut x = float(cx, args[0])?;
    if let Some(&eps) = args.get(1) {
        // Not clamp: with an eps above one half the lower limit comes first.
        let (most, below) = (cx.sub(unit, eps)?, cx.lt(x, eps)?);
        let lowered = cx.minimum(x, most)?;
        x = cx.where_(below, eps, lowered)?;
    }
    let rest = cx.sub(unit, x)?;
    let odds = cx.div(x, rest)?;
    result(cx.log(odds))
}

pub(crate) fn logit(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g / (x·(1 − x)); beyond the limits 0 with eps, NaN without
    let (g, x, unit, zero) = (g!(call), call.inputs[0], cx.number(1.0)?, cx.number(0.0)?);
    let rest = cx.sub(unit, x)?;
    let product = cx.mul(x, rest)?;
    let slope = cx.div(g, product)?;
    let (low, high, beyond) = match call.inputs.get(1) {
        Some(&eps) => (eps, cx.sub(unit, eps)?, zero),
        None => (zero, unit, cx.number(f64::NAN)?),
    };
    let (below, above) = (cx.lt(x, low)?, cx.gt(x, high)?);
    let grad = cx.where_(below, beyond, slope)?;
    let grad = cx.where_(above, beyond, grad)?;
    let mut grads = vec![Some(grad)];
    grads.resize(call.inputs.len(), None);
    Ok(grads)
}

pub(crate) fn square_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    result(cx.mul(args[0], args[0]))
}

pub(crate) fn sin(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.cos(call.inputs[0])?;
    one(cx.mul(g, slope))
}

pub(crate) fn cos(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.sin(call.inputs[0])?;
    let product = cx.mul(g, slope)?;
    one(cx.neg(product))
}

pub(crate) fn tan(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = one_and_square(cx, call.y(), 1.0)?;
    one(cx.mul(g, slope))
}

pub(crate) fn asin(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = one_and_square(cx, call.inputs[0], -1.0)?;
    let slope = cx.rsqrt(slope)?;
    one(cx.mul(g, slope))
}

pub(crate) fn acos(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let grads = asin(cx, call)?;
    match grads[0] {
        Some(grad) => one(cx.neg(grad)),
        None => Ok(grads),
    }
}

pub(crate) fn atan(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = one_and_square(cx, call.inputs[0], 1.0)?;
    one(cx.div(g, slope))
}

pub(crate) fn atan2(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // (x, −y)·g / (x² + y²), and 0 at the origin
    let (g, y, x) = (g!(call), call.inputs[0], call.inputs[1]);
    let (y, x, zero) = (float(cx, y)?, float(cx, x)?, cx.number(0.0)?);
    let (y2, x2) = (cx.mul(y, y)?, cx.mul(x, x)?);
    let square = cx.add(x2, y2)?;
    let share = cx.div(g, square)?;
    let origin = cx.eq(square, zero)?;
    let share = cx.where_(origin, zero, share)?;
    let gy = if call.wants(0) { Some(cx.mul(share, x)?) } else { None };
    let gx = match call.wants(1) {
        true => {
            let product = cx.mul(share, y)?;
            Some(cx.neg(product)?)
        }
        false => None,
    };
    Ok(vec![gy, gx])
}

pub(crate) fn sinh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.cosh(call.inputs[0])?;
    one(cx.mul(g, slope))
}

pub(crate) fn cosh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.sinh(call.inputs[0])?;
    one(cx.mul(g, slope))
}

pub(crate) fn asinh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = one_and_square(cx, call.inputs[0], 1.0)?;
    let slope = cx.rsqrt(slope)?;
    one(cx.mul(g, slope))
}

pub(crate) fn acosh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, unit) = (g!(call), cx.number(1.0)?);
    let square = cx.mul(call.inputs[0], call.inputs[0])?;
    let slope = cx.sub(square, unit)?;
    let slope = cx.rsqrt(slope)?;
    one(cx.mul(g, slope))
}

pub(crate) fn atanh(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = one_and_square(cx, call.inputs[0], -1.0)?;
    one(cx.div(g, slope))
}

pub(crate) fn sinc_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, zero, unit) = (float(cx, args[0])?, cx.number(0.0)?, cx.number(1.0)?);
    let turned = scaled(cx, x, consts::PI)?;
    let sine = cx.sin(turned)?;
    let quotient = cx.div(sine, turned)?;
    let nothing = cx.eq(x, zero)?;
    result(cx.where_(nothing, unit, quotient))
}

/// Of sinc's slope by t² where t = πx is below 1: −2k / (2k + 1)! with alternating signs, the highest power first.
const SINC_SLOPE: [f64; 8] = [
    16.0 / 355_687_428_096_000.0,
    -14.0 / 1_307_674_368_000.0,
    12.0 / 6_227_020_800.0,
    -10.0 / 39_916_800.0,
    8.0 / 362_880.0,
    -6.0 / 5_040.0,
    4.0 / 120.0,
    -2.0 / 6.0,
];

pub(crate) fn sinc(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // π·(t·cos t − sin t) / t² with t = πx; near zero, where that cancels, its series
    let (g, zero, unit) = (g!(call), cx.number(0.0)?, cx.number(1.0)?);
    let t = scaled(cx, call.inputs[0], consts::PI)?;
    let size = cx.abs(t)?;
    let is_near = cx.lt(size, unit)?;
    // Each way sees what it is good for: the other's infinities would come back through the next derivative.
    let (near, far) = (cx.where_(is_near, t, zero)?, cx.where_(is_near, unit, t)?);

    let square = cx.mul(near, near)?;
    let mut series = cx.number(SINC_SLOPE[0])?;
    for coefficient in &SINC_SLOPE[1..] {
        let (product, coefficient) = (cx.mul(square, series)?, cx.number(*coefficient)?);
        series = cx.add(product, coefficient)?;
    }
    let series = cx.mul(near, series)?;

    let (sine, cosine) = (cx.sin(far)?, cx.cos(far)?);
    let product = cx.mul(far, cosine)?;
    let difference = cx.sub(product, sine)?;
    let square = cx.mul(far, far)?;
    let quotient = cx.div(difference, square)?;

    let slope = cx.where_(is_near, series, quotient)?;
    let slope = scaled(cx, slope, consts::PI)?;
    one(cx.mul(g, slope))
}

pub(crate) fn deg2rad_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    result(scaled(cx, args[0], consts::PI / 180.0))
}

pub(crate) fn rad2deg_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    result(scaled(cx, args[0], 180.0 / consts::PI))
}

pub(crate) fn erfc(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let grads = crate::gradient::erf(cx, call)?;
    match grads[0] {
        Some(grad) => one(cx.neg(grad)),
        None => Ok(grads),
    }
}

pub(crate) fn erfinv(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // g·½√π·e^(y²)
    let (g, y) = (g!(call), call.y());
    let square = cx.mul(y, y)?;
    let bell = cx.exp(square)?;
    let slope = scaled(cx, bell, 0.5 * consts::PI.sqrt())?;
    one(cx.mul(g, slope))
}

pub(crate) fn lgamma(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.digamma(call.inputs[0])?;
    one(cx.mul(g, slope))
}

pub(crate) fn trigamma(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.tetragamma(call.inputs[0])?;
    one(cx.mul(g, slope))
}

pub(crate) fn digamma(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let slope = cx.trigamma(call.inputs[0])?;
    one(cx.mul(g, slope))
}
