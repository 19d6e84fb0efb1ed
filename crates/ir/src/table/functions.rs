//! Rows: pointwise functions.

use std::f64::consts;

use crate::formula::{Term, steps};
use crate::gradient::{Cx, Grads, g};
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
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * y]),
                  eval: Eval::float(|a| a[0].exp()), function: Some(Function::Exp), samples: samples::unary };
            /// 2ˣ
            [pointwise exp2 exp2_] "exp2" Exp2 (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (y * std::f64::consts::LN_2)]),
                  eval: Eval::float(|a| a[0].exp2()), function: Some(Function::Exp2), samples: samples::unary };
            /// eˣ − 1
            [pointwise expm1 expm1_] "expm1" Expm1 (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (y + 1.0)]),
                  eval: Eval::float(|a| a[0].exp_m1()), function: Some(Function::Expm1), samples: samples::unary };
            /// Natural logarithm
            [pointwise log log_] "log" Log (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / x]),
                  eval: Eval::float(|a| a[0].ln()), function: Some(Function::Log), samples: samples::unary_positive };
            /// Logarithm to base 2
            [pointwise log2 log2_] "log2" Log2 (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / (x * std::f64::consts::LN_2)]),
                  eval: Eval::float(|a| a[0].log2()), function: Some(Function::Log2), samples: samples::unary_positive };
            /// Logarithm to base 10
            [pointwise log10 log10_] "log10" Log10 (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / (x * std::f64::consts::LN_10)]),
                  eval: Eval::float(|a| a[0].log10()), function: Some(Function::Log10), samples: samples::unary_positive };
            /// log(1 + x)
            [pointwise log1p log1p_] "log1p" Log1p (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / (x + 1.0)]),
                  eval: Eval::float(|a| a[0].ln_1p()), function: Some(Function::Log1p), samples: samples::unary_positive };
            /// log(eˣ + eʸ)
            [pointwise logaddexp logaddexp_] "logaddexp" Logaddexp (x, y) () {}
                { ty: types::float_only, grad: rule!(|g, x, y| [g * (x - y).sigmoid(), g * (y - x).sigmoid()]),
                  decompose: steps!(promoted |x, y| {
                      // Equal infinities are themselves.
                      let apart = x.eq(y).where_(0.0, x - y);
                      x.maximum(y) + (-apart.abs()).exp().log1p()
                  }),
                  eval: Eval::float(|a| if a[0] == a[1] && a[0].is_infinite() { a[0] } else {
                      nan_max(a[0], a[1]) + (-(a[0] - a[1]).abs()).exp().ln_1p() }),
                  samples: || samples::binary_on(samples::FLOATS, samples::Any) };
            /// x · log y, and 0 where x is 0
            [pointwise xlogy xlogy_] "xlogy" Xlogy (x, y) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x, y| [
                      x.eq(0.0).logical_and(y.le(0.0)).where_(0.0, g.xlogy(y)),
                      g * (x / y),
                  ]),
                  decompose: steps!(promoted |x, y| x.eq(0.0).logical_and(y.eq(y)).where_(0.0, x * y.log())),
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
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g / (y * 2.0)]),
                  eval: Eval::float(|a| a[0].sqrt()), function: Some(Function::Sqrt), samples: samples::unary_positive };
            /// 1 / √x
            [pointwise rsqrt rsqrt_] "rsqrt" Rsqrt (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (y * y * y * -0.5)]),
                  decompose: steps!(|x| 1.0 / x.sqrt()), eval: Eval::float(|a| 1.0 / a[0].sqrt()),
                  function: Some(Function::Rsqrt), samples: samples::unary_positive };
            /// x · x
            [pointwise square square_] "square" Square (x) () {}
                { ty: functions::square_type, grad: rule!(|g, x| { let half = g * x; [half + half] }), decompose: steps!(promoted |x| x * x),
                  eval: Eval::both(|a| a[0] * a[0], |a| a[0].wrapping_mul(a[0])), function: Some(Function::Square),
                  samples: samples::unary };
            /// Sine
            [pointwise sin sin_] "sin" Sin (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.cos()]),
                  eval: Eval::float(|a| a[0].sin()), function: Some(Function::Sin), samples: samples::unary };
            /// Cosine
            [pointwise cos cos_] "cos" Cos (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [-(g * x.sin())]),
                  eval: Eval::float(|a| a[0].cos()), function: Some(Function::Cos), samples: samples::unary };
            /// Tangent
            [pointwise tan tan_] "tan" Tan (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (y * y + 1.0)]),
                  eval: Eval::float(|a| a[0].tan()), function: Some(Function::Tan),
                  samples: || samples::unary_on(samples::ALL, samples::Between(-1.2, 1.2)) };
            /// The angle whose sine is x
            [pointwise asin asin_] "asin" Asin (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * (1.0 - x * x).rsqrt()]),
                  eval: Eval::float(|a| a[0].asin()), function: Some(Function::Asin), samples: functions::inside };
            /// The angle whose cosine is x
            [pointwise acos acos_] "acos" Acos (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [-(g * (1.0 - x * x).rsqrt())]),
                  eval: Eval::float(|a| a[0].acos()), function: Some(Function::Acos), samples: functions::inside };
            /// The angle whose tangent is x
            [pointwise atan atan_] "atan" Atan (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / (x * x + 1.0)]),
                  eval: Eval::float(|a| a[0].atan()), function: Some(Function::Atan), samples: samples::unary };
            /// The angle of the point with this height y and this x
            [pointwise atan2 atan2_] "atan2" Atan2 (y, x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, y, x| {
                      let (y, x) = (y.float(), x.float());
                      let square = x * x + y * y;
                      let share = square.eq(0.0).where_(0.0, g / square);
                      [share * x, -(share * y)]
                  }),
                  eval: Eval::float(|a| a[0].atan2(a[1])), function: Some(Function::Atan2),
                  samples: || samples::binary_on(samples::ALL, samples::NonZero) };
            /// √(x² + y²), without overflow in between
            [pointwise hypot hypot_] "hypot" Hypot (x, y) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x, y; z| [g * (x / z), g * (y / z)]),
                  eval: Eval::float(|a| a[0].hypot(a[1])), function: Some(Function::Hypot),
                  samples: || samples::binary_on(samples::FLOATS, samples::NonZero) };
            /// Hyperbolic sine
            [pointwise sinh sinh_] "sinh" Sinh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.cosh()]),
                  eval: Eval::float(|a| a[0].sinh()), function: Some(Function::Sinh), samples: samples::unary };
            /// Hyperbolic cosine
            [pointwise cosh cosh_] "cosh" Cosh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.sinh()]),
                  eval: Eval::float(|a| a[0].cosh()), function: Some(Function::Cosh), samples: samples::unary };
            /// Hyperbolic tangent
            [pointwise tanh tanh_] "tanh" Tanh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (1.0 - y * y)]),
                  eval: Eval::float(|a| a[0].tanh()), function: Some(Function::Tanh), samples: samples::unary };
            /// The number whose hyperbolic sine is x
            [pointwise asinh asinh_] "asinh" Asinh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * (x * x + 1.0).rsqrt()]),
                  eval: Eval::float(|a| a[0].asinh()), function: Some(Function::Asinh), samples: samples::unary };
            /// The number ≥ 0 whose hyperbolic cosine is x
            [pointwise acosh acosh_] "acosh" Acosh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * (x * x - 1.0).rsqrt()]),
                  eval: Eval::float(|a| a[0].acosh()), function: Some(Function::Acosh),
                  samples: || samples::unary_on(samples::ALL, samples::Between(1.2, 9.0)) };
            /// The number whose hyperbolic tangent is x
            [pointwise atanh atanh_] "atanh" Atanh (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g / (1.0 - x * x)]),
                  eval: Eval::float(|a| a[0].atanh()), function: Some(Function::Atanh), samples: functions::inside };
            /// sin(πx) / πx, and 1 at 0
            [pointwise sinc sinc_] "sinc" Sinc (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * functions::sinc_slope(x)]),
                  decompose: steps!(|x| {
                      let x = x.float();
                      let turned = x * std::f64::consts::PI;
                      x.eq(0.0).where_(1.0, turned.sin() / turned)
                  }),
                  eval: Eval::float(|a| { let z = std::f64::consts::PI * a[0]; if a[0] == 0.0 { 1.0 } else { z.sin() / z } }),
                  samples: samples::unary_float };
            /// Degrees as radians
            [pointwise deg2rad deg2rad_] "deg2rad" Deg2rad (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x| [g * (std::f64::consts::PI / 180.0)]),
                  decompose: steps!(|x| x * (std::f64::consts::PI / 180.0)),
                  eval: Eval::float(|a| a[0] * (std::f64::consts::PI / 180.0)), samples: samples::unary_not_bool };
            /// Radians as degrees
            [pointwise rad2deg rad2deg_] "rad2deg" Rad2deg (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x| [g * (180.0 / std::f64::consts::PI)]),
                  decompose: steps!(|x| x * (180.0 / std::f64::consts::PI)),
                  eval: Eval::float(|a| a[0] * (180.0 / std::f64::consts::PI)), samples: samples::unary_not_bool };
            /// Error function
            [pointwise erf erf_] "erf" Erf (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * ((-(x * x)).exp() * std::f64::consts::FRAC_2_SQRT_PI)]),
                  eval: Eval::float(|a| erf(a[0])), function: Some(Function::Erf), samples: samples::unary };
            /// 1 − erf x
            [pointwise erfc erfc_] "erfc" Erfc (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [-(g * ((-(x * x)).exp() * std::f64::consts::FRAC_2_SQRT_PI))]),
                  eval: Eval::float(|a| erfc(a[0])), function: Some(Function::Erfc), samples: samples::unary };
            /// The number whose erf is x
            [pointwise erfinv erfinv_] "erfinv" Erfinv (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * ((y * y).exp() * (0.5 * std::f64::consts::PI.sqrt()))]),
                  eval: Eval::float(|a| erfinv(a[0])), function: Some(Function::Erfinv), samples: functions::inside };
            /// log |Γ(x)|
            [pointwise lgamma lgamma_] "lgamma" Lgamma (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.digamma()]),
                  eval: Eval::float(|a| lgamma(a[0])), function: Some(Function::Lgamma), samples: samples::unary_positive };
            /// The derivative of lgamma
            [pointwise digamma digamma_] "digamma" Digamma (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.trigamma()]),
                  eval: Eval::float(|a| digamma(a[0])), function: Some(Function::Digamma), samples: samples::unary_positive };
            /// The derivative of digamma, PyTorch's polygamma of order 1
            [pointwise trigamma trigamma_] "trigamma" Trigamma (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x| [g * x.tetragamma()]),
                  eval: Eval::float(|a| trigamma(a[0])), function: Some(Function::Trigamma), samples: samples::unary_positive };
            /// The derivative of trigamma, PyTorch's polygamma of order 2
            [pointwise tetragamma tetragamma_] "tetragamma" Tetragamma (x) () {}
                { ty: types::float_arithmetic, grad: Grad::NotDifferentiable("polygamma of order 3 is not in the table"),
                  eval: Eval::float(|a| tetragamma(a[0])), function: Some(Function::Tetragamma), samples: samples::unary_positive };
            /// 1 / (1 + e⁻ˣ)
            [pointwise sigmoid sigmoid_] "sigmoid" Sigmoid (x) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, _x; y| [g * (y * (1.0 - y))]),
                  eval: Eval::float(|a| 1.0 / (1.0 + (-a[0]).exp())), function: Some(Function::Sigmoid), samples: samples::unary };
            /// max(x, 0)
            [pointwise relu relu_] "relu" Relu (x) () {}
                { ty: types::arithmetic_not_bool, grad: rule!(|g, _x; y| [y.le(0.0).where_(0.0, g)]),
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

pub(crate) fn logit_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    steps!(cx, args, |x; eps| {
        let x = x.float();
        // Not clamp: with an eps above one half the lower limit comes first.
        let x = eps.fold(x, |x, eps| x.lt(eps).where_(eps, x.minimum(1.0 - eps)));
        (x / (1.0 - x)).log()
    })
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

/// sinc's slope: π·(t·cos t − sin t) / t² with t = πx; near zero, where that cancels, its series.
pub(crate) fn sinc_slope(x: Term<'_>) -> Term<'_> {
    let t = x * consts::PI;
    let is_near = t.abs().lt(1.0);
    // Each way sees what it is good for: the other's infinities would come back through the next derivative.
    let (near, far) = (is_near.where_(t, 0.0), is_near.where_(1.0, t));
    let square = near * near;
    let [highest, others @ ..] = SINC_SLOPE;
    let series = others.into_iter().fold(near.number(highest), |sum, factor| square * sum + factor);
    let quotient = (far * far.cos() - far.sin()) / (far * far);
    is_near.where_(near * series, quotient) * consts::PI
}

/// THE SCALAR FUNCTIONS of floats: one row each, handed to the macro `$callback`.
///
/// ```text
/// /// What it computes.
/// Variant "name" instructions rare |cx, arguments| body over a lane;
///     exact the same in double precision, for tests, integers |arguments| the same on i64, if there is such;
/// ```
///
/// Instructions are what a vector of floats takes, as `cargo test --release -p kiln-tensor costs -- --ignored` measures
/// it in one run (what it can't tell from a multiplication is counted); `rare` says that the body has a [rare part](crate::math::Rare). The enum [`Function`](crate::math::Function), eager loops, generated C and the accuracy tests are
/// made of these rows.
#[doc(hidden)]
#[macro_export]
macro_rules! scalar_functions {
    ($callback:ident) => { $callback! {
        /// a + b.
        Add "add" 1 |cx, x, y| cx.add(x, y);
            exact Two(|x, y| x + y), integers |a, b| a.wrapping_add(b);
        /// a − b.
        Sub "sub" 1 |cx, x, y| cx.sub(x, y);
            exact Two(|x, y| x - y), integers |a, b| a.wrapping_sub(b);
        /// a · b.
        Mul "mul" 1 |cx, x, y| cx.mul(x, y);
            exact Two(|x, y| x * y), integers |a, b| a.wrapping_mul(b);
        /// a / b.
        Div "div" 7 |cx, x, y| cx.div(x, y);
            exact Two(|x, y| x / y);
        /// −x.
        Neg "neg" 1 |cx, x| cx.neg(x);
            exact One(|x| -x), integers |a| a.wrapping_neg();
        /// |x|.
        Abs "abs" 1 |cx, x| cx.abs(x);
            exact One(f64::abs), integers |a| a.wrapping_abs();
        /// x · x.
        Square "square" 1 |cx, x| cx.mul(x, x);
            exact One(|x| x * x), integers |a| a.wrapping_mul(a);
        /// √x.
        Sqrt "sqrt" 10 |cx, x| cx.sqrt(x);
            exact One(f64::sqrt);
        /// 1 / √x.
        Rsqrt "rsqrt" 19 |cx, x| composite::rsqrt(cx, x);
            exact One(|x| 1.0 / x.sqrt());
        /// 1 / x.
        Reciprocal "reciprocal" 7 |cx, x| composite::reciprocal(cx, x);
            exact One(|x| 1.0 / x);
        /// eˣ.
        Exp "exp" 16 |cx, x| exponential::exp(cx, x);
            exact One(f64::exp);
        /// eˣ − 1.
        Expm1 "expm1" 16 |cx, x| exponential::expm1(cx, x);
            exact One(f64::exp_m1);
        /// 2ˣ.
        Exp2 "exp2" 16 |cx, x| exponential::exp2(cx, x);
            exact One(f64::exp2);
        /// log x.
        Log "log" 25 |cx, x| logarithm::log(cx, x);
            exact One(f64::ln);
        /// log(1 + x).
        Log1p "log1p" 34 |cx, x| logarithm::log1p(cx, x);
            exact One(f64::ln_1p);
        /// log₂ x.
        Log2 "log2" 34 |cx, x| logarithm::log2(cx, x);
            exact One(f64::log2);
        /// log₁₀ x.
        Log10 "log10" 34 |cx, x| logarithm::log10(cx, x);
            exact One(f64::log10);
        /// sin x.
        Sin "sin" 34 rare |cx, x| cx.in_double::<trigonometric::Sin, 1>([x]);
            exact One(f64::sin);
        /// cos x.
        Cos "cos" 37 rare |cx, x| cx.in_double::<trigonometric::Cos, 1>([x]);
            exact One(f64::cos);
        /// tan x.
        Tan "tan" 61 rare |cx, x| cx.in_double::<trigonometric::Tan, 1>([x]);
            exact One(f64::tan);
        /// The angle whose sine is x.
        Asin "asin" 46 |cx, x| cx.in_double::<arcs::Asin, 1>([x]);
            exact One(f64::asin);
        /// The angle whose cosine is x.
        Acos "acos" 61 |cx, x| cx.in_double::<arcs::Acos, 1>([x]);
            exact One(f64::acos);
        /// The angle whose tangent is x.
        Atan "atan" 61 |cx, x| cx.in_double::<arcs::Atan, 1>([x]);
            exact One(f64::atan);
        /// The angle of the point (y, x): arguments y, x.
        Atan2 "atan2" 85 |cx, y, x| cx.in_double::<arcs::Atan2, 2>([y, x]);
            exact Two(f64::atan2);
        /// The length of the hypotenuse over x and y.
        Hypot "hypot" 40 |cx, x, y| cx.in_double::<power::Hypot, 2>([x, y]);
            exact Two(f64::hypot);
        /// sinh x.
        Sinh "sinh" 28 |cx, x| hyperbolic::sinh(cx, x);
            exact One(f64::sinh);
        /// cosh x.
        Cosh "cosh" 22 |cx, x| hyperbolic::cosh(cx, x);
            exact One(f64::cosh);
        /// tanh x.
        Tanh "tanh" 25 |cx, x| exponential::tanh(cx, x);
            exact One(f64::tanh);
        /// The number whose sinh is x.
        Asinh "asinh" 64 |cx, x| hyperbolic::asinh(cx, x);
            exact One(f64::asinh);
        /// The number ≥ 0 whose cosh is x.
        Acosh "acosh" 58 |cx, x| hyperbolic::acosh(cx, x);
            exact One(super::accuracy::acosh);
        /// The number whose tanh is x.
        Atanh "atanh" 46 |cx, x| hyperbolic::atanh(cx, x);
            exact One(super::accuracy::atanh);
        /// erf x.
        Erf "erf" 28 |cx, x| error_function::erf(cx, x);
            exact One(|x| Function::Erf.eval_f64(&[x]));
        /// 1 − erf x.
        Erfc "erfc" 73 |cx, x| error_function::erfc(cx, x);
            exact One(|x| Function::Erfc.eval_f64(&[x]));
        /// The number whose erf is x.
        Erfinv "erfinv" 151 |cx, x| cx.in_double::<error_function::Erfinv, 1>([x]);
            exact One(|x| Function::Erfinv.eval_f64(&[x]));
        /// log |Γ(x)|.
        Lgamma "lgamma" 319 |cx, x| cx.in_double::<gamma::Lgamma, 1>([x]);
            exact One(super::special::lgamma);
        /// The derivative of lgamma.
        Digamma "digamma" 274 |cx, x| cx.in_double::<gamma::Digamma, 1>([x]);
            exact One(super::special::digamma);
        /// The derivative of digamma.
        Trigamma "trigamma" 151 |cx, x| cx.in_double::<gamma::Trigamma, 1>([x]);
            exact One(super::special::trigamma);
        /// The derivative of trigamma.
        Tetragamma "tetragamma" 199 |cx, x| cx.in_double::<gamma::Tetragamma, 1>([x]);
            exact One(super::special::tetragamma);
        /// 1 / (1 + e⁻ˣ).
        Sigmoid "sigmoid" 22 |cx, x| exponential::sigmoid(cx, x);
            exact One(super::accuracy::sigmoid);
        /// gelu, erf form.
        Gelu "gelu" 34 |cx, x| error_function::gelu(cx, x);
            exact OfArgument(|x| 0.5 * x * Function::Erfc.eval_f64(&[-x * ROOT_HALF]));
        /// gelu, tanh form.
        GeluTanh "gelu_tanh" 37 |cx, x| error_function::gelu_tanh(cx, x);
            exact OfArgument(|x| { x * super::accuracy::sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)) });
        /// max(x, 0).
        Relu "relu" 1 |cx, x| composite::relu(cx, x);
            exact One(|x| if x > 0.0 || x.is_nan() { x } else { 0.0 }), integers |a| a.max(0);
        /// x · σ(x).
        Silu "silu" 24 |cx, x| activation::silu(cx, x);
            exact Formula;
        /// x · tanh(log(1 + eˣ)).
        Mish "mish" 80 |cx, x| activation::mish(cx, x);
            exact Formula;
        /// log(1 + e^(beta·x)) / beta: arguments x, beta, threshold.
        Softplus "softplus" 64 |cx, x, beta, threshold| activation::softplus(cx, x, beta, threshold);
            exact Formula;
        /// log(1 / (1 + e⁻ˣ)).
        LogSigmoid "log_sigmoid" 52 |cx, x| activation::log_sigmoid(cx, x);
            exact Formula;
        /// x where positive, alpha·(eˣ − 1) elsewhere.
        Elu "elu" 20 |cx, x, alpha| activation::elu(cx, x, alpha);
            exact Formula;
        /// x where positive, alpha·(e^(x/alpha) − 1) elsewhere.
        Celu "celu" 27 |cx, x, alpha| activation::celu(cx, x, alpha);
            exact Formula;
        /// elu with the factors that keep mean and variance.
        Selu "selu" 21 |cx, x| activation::selu(cx, x);
            exact Formula;
        /// x where positive, slope·x elsewhere.
        LeakyRelu "leaky_relu" 3 |cx, x, slope| activation::leaky_relu(cx, x, slope);
            exact Formula;
        /// min(max(x + 3, 0), 6) / 6.
        Hardsigmoid "hardsigmoid" 12 |cx, x| activation::hardsigmoid(cx, x);
            exact Formula;
        /// x · hardsigmoid(x).
        Hardswish "hardswish" 13 |cx, x| activation::hardswish(cx, x);
            exact Formula;
        /// x, and 0 where |x| ≤ lambd.
        Hardshrink "hardshrink" 3 |cx, x, lambd| activation::hardshrink(cx, x, lambd);
            exact Formula;
        /// x moved towards 0 by lambd.
        Softshrink "softshrink" 5 |cx, x, lambd| activation::softshrink(cx, x, lambd);
            exact Formula;
        /// −1, 0 or 1.
        Sign "sign" 4 |cx, x| composite::sign(cx, x);
            exact Formula, integers |a| a.signum();
        /// x with NaN and the infinities replaced: arguments x, nan, posinf, neginf.
        NanToNum "nan_to_num" 5 |cx, x, nan, posinf, neginf| composite::nan_to_num(cx, x, nan, posinf, neginf);
            exact Formula, integers |x, _nan, _posinf, _neginf| x;
        /// Largest integer ≤ x.
        Floor "floor" 1 |cx, x| cx.floor(x);
            exact One(f64::floor), integers |a| a;
        /// Smallest integer ≥ x.
        Ceil "ceil" 1 |cx, x| composite::ceil(cx, x);
            exact One(f64::ceil), integers |a| a;
        /// Nearest integer, ties to even.
        Round "round" 1 |cx, x| cx.round_ties_even(x);
            exact One(f64::round_ties_even), integers |a| a;
        /// The integer part.
        Trunc "trunc" 1 |cx, x| composite::trunc(cx, x);
            exact One(f64::trunc), integers |a| a;
        /// |x| with the sign of y.
        Copysign "copysign" 1 |cx, x, y| composite::copysign(cx, x, y);
            exact Two(f64::copysign);
        /// The rest of x / y that has the sign of x.
        Fmod "fmod" 10 rare |cx, x, y| composite::fmod(cx, x, y);
            exact Two(|x, y| x % y);
        /// The rest of x / y that has the sign of y.
        Remainder "remainder" 16 rare |cx, x, y| composite::remainder(cx, x, y);
            exact Formula;
        /// ⌊x / y⌋.
        FloorDivide "floor_divide" 34 rare |cx, x, y| composite::floor_divide(cx, x, y);
            exact Formula;
        /// The integer part of x / y.
        DivTrunc "div_trunc" 7 |cx, x, y| composite::div_trunc(cx, x, y);
            exact Formula;
        /// The larger argument, NaN winning.
        Maximum "maximum" 3 |cx, x, y| composite::maximum(cx, x, y);
            exact Two(|x, y| if x.is_nan() || y.is_nan() { f64::NAN } else { x.max(y) }), integers |a, b| a.max(b);
        /// The smaller argument, NaN winning.
        Minimum "minimum" 3 |cx, x, y| composite::minimum(cx, x, y);
            exact Two(|x, y| if x.is_nan() || y.is_nan() { f64::NAN } else { x.min(y) }), integers |a, b| a.min(b);
        /// x limited to [min, max], NaN winning: arguments x, min, max.
        Clamp "clamp" 4 |cx, x, min, max| composite::clamp(cx, x, min, max);
            exact Formula, integers |x, min, max| x.max(min).min(max);
        /// xʸ.
        Pow "pow" 154 |cx, x, y| cx.in_double::<power::Pow, 2>([x, y]);
            exact Two(f64::powf), integers |a, b| int_pow(a, b);
        /// x³, as a power.
        Cube "cube" 5 |cx, x| cx.in_double::<power::Cube, 1>([x]);
            exact Formula;
        /// Interpolation between (a, b) by weight: arguments a, b, weight.
        Lerp "lerp" 4 |cx, a, b, weight| composite::lerp(cx, a, b, weight);
            exact Formula;
        /// x + value·a·b: arguments x, a, b, value.
        Addcmul "addcmul" 4 |cx, x, a, b, value| composite::addcmul(cx, x, a, b, value);
            exact Formula, integers |x, a, b, value| x.wrapping_add(value.wrapping_mul(a).wrapping_mul(b));
        /// x + value·a/b: arguments x, a, b, value.
        Addcdiv "addcdiv" 7 |cx, x, a, b, value| composite::addcdiv(cx, x, a, b, value);
            exact Formula;
        /// x + alpha·y: arguments x, y, alpha.
        AddAlpha "add_alpha" 4 |cx, x, y, alpha| composite::add_alpha(cx, x, y, alpha);
            exact Formula, integers |x, y, alpha| x.wrapping_add(alpha.wrapping_mul(y));
        /// x − alpha·y: arguments x, y, alpha.
        SubAlpha "sub_alpha" 4 |cx, x, y, alpha| composite::sub_alpha(cx, x, y, alpha);
            exact Formula, integers |x, y, alpha| x.wrapping_sub(alpha.wrapping_mul(y));
    }};
}
