//! Rows: limits, signs, tests of numbers, and fillings.

use crate::decompose::one as result;
use crate::formula::rule;
use crate::gradient::{self, Cx, Grads, g};
use crate::samples::{self, ALL, Any, FLOATS, Fixed, NUMBERS, Number, calls, t, with_op};
use crate::table::functions::promoted;
use crate::types::{Rule, broadcast_all, one, tensor};
use crate::{DType, EmitExt, GradCall, Op, Result, Sample, Scalar, Shape, TensorTy, Ty, Value, Values, Why};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_choices {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_functions! { $callback [
            $($rows)*

            // ---- pointwise: limits -----------------------------------------------------------------------------

            /// x limited to [min, max]
            [pointwise clamp clamp_] "clamp" Clamp (x, min, max) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(choices::clamp),
                  decompose: steps!(promoted |x, min, max| x.maximum(min).minimum(max)),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], a[1]), -a[2]), |a| a[0].max(a[1]).min(a[2])),
                  function: Some(Function::Clamp), samples: choices::clamp_samples };
            /// x, and min where it is less
            [pointwise clamp_min clamp_min_] "clamp_min" ClampMin (x, min) () {}
                { ty: types::arithmetic, grad: Grad::Fn(choices::clamp_min),
                  decompose: steps!(|x, min| x.maximum(min)), eval: Eval::both(|a| nan_max(a[0], a[1]), |a| a[0].max(a[1])),
                  samples: samples::binary };
            /// x, and max where it is more
            [pointwise clamp_max clamp_max_] "clamp_max" ClampMax (x, max) () {}
                { ty: types::arithmetic, grad: Grad::Fn(choices::clamp_max),
                  decompose: steps!(|x, max| x.minimum(max)), eval: Eval::both(|a| -nan_max(-a[0], -a[1]), |a| a[0].min(a[1])),
                  samples: samples::binary };
            /// y − alpha · x
            [pointwise rsub rsub_] "rsub" Rsub (x, y) (alpha) {}
                { ty: types::arithmetic_not_bool, grad: Grad::Fn(gradient::rsub), decompose: Some(choices::rsub_steps),
                  eval: Eval::both(|a| a[1] - alpha(a) * a[0], |a| a[1].wrapping_sub(alpha_int(a).wrapping_mul(a[0]))),
                  samples: samples::binary_not_bool };

            // ---- pointwise: signs ------------------------------------------------------------------------------

            /// −1, 0 or 1
            [pointwise sign sign_] "sign" Sign (x) () {}
                { ty: types::arithmetic, grad: Grad::Zero, decompose: steps!(|x| {
                      let positive = x.gt(0);
                      if x.dtype() == DType::Bool { positive } else { positive.to(x.dtype()) - x.lt(0).to(x.dtype()) }
                  }),
                  eval: Eval::both(|a| if a[0] > 0.0 { 1.0 } else if a[0] < 0.0 { -1.0 } else { 0.0 }, |a| a[0].signum()),
                  function: Some(Function::Sign), samples: samples::unary };
            /// Whether the sign bit is set
            [pointwise signbit signbit_] "signbit" Signbit (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x| if x.dtype().is_float() { x.number(1.0).copysign(x).lt(0) } else { x.lt(0) }),
                  eval: Eval::compare(|a| a[0].is_sign_negative(), |a| a[0] < 0), samples: samples::unary };
            /// |x| with the sign of y
            [pointwise copysign copysign_] "copysign" Copysign (x, y) () {}
                { ty: types::float_arithmetic, grad: rule!(|g, x, y| [g * (x.sign() * x.number(1.0).copysign(y)), g * 0.0]),
                  eval: Eval::float(|a| a[0].copysign(a[1])), function: Some(Function::Copysign),
                  samples: || samples::binary_on(samples::NUMBERS, samples::NonZero) };
            /// 0 left of zero, 1 right of it, values at it
            [pointwise heaviside heaviside_] "heaviside" Heaviside (x, values) () {}
                { ty: types::arithmetic, grad: Grad::Zero, decompose: steps!(promoted |x, values| {
                      let dtype = if x.is_number() { values.dtype() } else { x.dtype() };
                      x.eq(0).where_(values, x.gt(0).to(dtype))
                  }),
                  eval: Eval::both(|a| if a[0] == 0.0 { a[1] } else if a[0] > 0.0 { 1.0 } else { 0.0 },
                  |a| if a[0] == 0 { a[1] } else { i64::from(a[0] > 0) }), samples: samples::binary };

            // ---- pointwise: tests ------------------------------------------------------------------------------

            /// x is not a number
            [pointwise isnan isnan_] "isnan" Isnan (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x| x.ne(x)),
                  eval: Eval::compare(|a| a[0].is_nan(), |_| false), samples: samples::unary };
            /// x is infinite
            [pointwise isinf isinf_] "isinf" Isinf (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x| if x.dtype().is_float() { x.abs().eq(f64::INFINITY) } else { x.ne(x) }),
                  eval: Eval::compare(|a| a[0].is_infinite(), |_| false), samples: samples::unary };
            /// x is neither infinite nor NaN
            [pointwise isfinite isfinite_] "isfinite" Isfinite (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x| if x.dtype().is_float() { x.abs().lt(f64::INFINITY) } else { x.eq(x) }),
                  eval: Eval::compare(|a| a[0].is_finite(), |_| true), samples: samples::unary };
            /// Either is not zero
            [pointwise logical_or logical_or_] "logical_or" LogicalOr (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x, y| x.to(DType::Bool).maximum(y.to(DType::Bool))),
                  eval: Eval::compare(|a| a[0] != 0.0 || a[1] != 0.0, |a| a[0] != 0 || a[1] != 0),
                  samples: samples::binary };
            /// Just one is not zero
            [pointwise logical_xor logical_xor_] "logical_xor" LogicalXor (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: steps!(|x, y| x.to(DType::Bool).ne(y.to(DType::Bool))),
                  eval: Eval::compare(|a| (a[0] != 0.0) != (a[1] != 0.0), |a| (a[0] != 0) != (a[1] != 0)),
                  samples: samples::binary };

            // ---- fillings --------------------------------------------------------------------------------------

            /// x with NaN and the infinities replaced
            [pointwise nan_to_num_with nan_to_num_with_] "nan_to_num" NanToNum (x, nan, posinf, neginf) () {}
                { ty: choices::nan_to_num_type, grad: rule!(|g, x, _nan, _posinf, _neginf| [x.abs().lt(f64::INFINITY).where_(g, 0.0)]), decompose: steps!(|x, nan, posinf, neginf| if x.dtype().is_float() {
                      let filled = x.eq(f64::INFINITY).where_(posinf, x.eq(x).where_(x, nan));
                      x.eq(f64::NEG_INFINITY).where_(neginf, filled)
                  } else { x }),
                  eval: Eval::both(|a| if a[0].is_nan() { a[1] } else if a[0] == f64::INFINITY { a[2] }
                  else if a[0] == f64::NEG_INFINITY { a[3] } else { a[0] }, |a| a[0]), function: Some(Function::NanToNum), samples: choices::nan_to_num_samples };
            /// x, and value where the mask holds
            [index masked_fill _none] "masked_fill" MaskedFill (x, mask, value) () {}
                { ty: choices::masked_fill_type, grad: Grad::Decompose, decompose: Some(choices::masked_fill_steps), eval: Eval::Structural, samples: choices::masked_fill_samples };
            /// value in the shape of x
            [create full_like _none] "full_like" FullLike (x, value) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps),
                  eval: Eval::Structural, samples: || choices::like_samples(|dtype| Op::FullLike { dtype }, true) };
            /// Zeros in the shape of x
            [create zeros_like _none] "zeros_like" ZerosLike (x) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps),
                  eval: Eval::Structural, samples: || choices::like_samples(|dtype| Op::ZerosLike { dtype }, false) };
            /// Ones in the shape of x
            [create ones_like _none] "ones_like" OnesLike (x) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps),
                  eval: Eval::Structural, samples: || choices::like_samples(|dtype| Op::OnesLike { dtype }, false) };
        ]}
    };
}

pub(crate) fn clamp_samples() -> Vec<Sample> {
    let number = |x| Number(Scalar::Int(x));
    let mut all = calls(
        NUMBERS,
        vec![
            vec![t(&[5], Any), number(-1), number(1)],
            vec![t(&[4, 37], Any), t(&[37], Any), t(&[4, 1], Any)],
            vec![t(&[], Any), number(0), t(&[3], Any)],
            vec![t(&[0], Any), number(0), number(2)],
            vec![t(&[2, 19], Any), number(2), number(-2)],
        ],
    );
    all.extend(calls(
        NUMBERS,
        vec![vec![t(&[6, 7], Any), Number(Scalar::Float(-0.5)), Number(Scalar::Float(0.75))]],
    ));
    all
}

pub(crate) fn nan_to_num_samples() -> Vec<Sample> {
    let number = |x| Number(Scalar::Float(x));
    let mut args: Vec<_> = samples::UNARY_SHAPES
        .iter()
        .map(|s| vec![t(s, Any), number(0.5), number(9.0), number(-9.0)])
        .collect();
    args.push(vec![t(&[33], Any), number(0.0), number(f64::from(f32::MAX)), number(f64::from(f32::MIN))]);
    calls(NUMBERS, args)
}

pub(crate) fn masked_fill_samples() -> Vec<Sample> {
    let mask = |s: &[usize]| Fixed(DType::Bool, Shape::from(s), Any);
    let mut all = calls(
        ALL,
        vec![
            vec![t(&[5], Any), mask(&[5]), Number(Scalar::Bool(true))],
            vec![t(&[4, 37], Any), mask(&[37]), Number(Scalar::Bool(false))],
            vec![t(&[3], Any), mask(&[2, 1]), t(&[], Any)],
            vec![t(&[0], Any), mask(&[]), Number(Scalar::Bool(true))],
        ],
    );
    all.extend(calls(FLOATS, vec![vec![t(&[2, 19], Any), mask(&[2, 19]), Number(Scalar::Float(-1e4))]]));
    all
}

pub(crate) fn like_samples(op: fn(DType) -> Op, value: bool) -> Vec<Sample> {
    let mut all = Vec::new();
    for (dtype, shape) in
        [(DType::F32, &[4, 37][..]), (DType::I64, &[]), (DType::Bool, &[0]), (DType::F64, &[3])]
    {
        let mut args = vec![t(shape, Any)];
        args.extend(value.then_some(Number(Scalar::Int(1))));
        all.push(with_op(op(dtype), ALL, args));
    }
    all
}

/// A limit that is a number lets the gradient through where x is beyond it, not on it; one that is a tensor
/// shares it with x where they are equal, as maximum and minimum do.
fn is_number(cx: Cx<'_>, limit: Value) -> bool {
    matches!(cx.ty(limit), Ty::Scalar(_))
}

pub(crate) fn clamp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, min, max) = (g!(call), call.inputs[0], call.inputs[1], call.inputs[2]);
    if is_number(cx, min) && is_number(cx, max) {
        return rule!(cx, call, |g, x, min, max| [x.gt(min).logical_and(x.lt(max)).where_(g, 0.0)]);
    }
    let raised = cx.maximum(x, min)?;
    let lowered = step(cx, &Op::Minimum {}, gradient::minimum, [raised, max], g, [true, call.wants(2)])?;
    let Some(g) = lowered[0] else { return Ok(vec![None; 3]) };
    let parts = step(cx, &Op::Maximum {}, gradient::maximum, [x, min], g, [call.wants(0), call.wants(1)])?;
    // Limits that are equal share nothing: x, min or max has it all.
    let (g, zero, narrow) = (g!(call), cx.number(0.0)?, cx.eq(min, max)?);
    let holders = [cx.eq(x, min)?, cx.lt(x, min)?, cx.gt(x, max)?];
    let mut grads = Vec::new();
    for (holds, part) in holders.into_iter().zip([parts[0], parts[1], lowered[1]]) {
        grads.push(match part {
            Some(part) => {
                let all = cx.where_(holds, g, zero)?;
                Some(cx.where_(narrow, all, part)?)
            }
            None => None,
        });
    }
    Ok(grads)
}

/// The gradients of one step of several.
fn step(
    cx: Cx<'_>,
    op: &Op,
    rule: crate::op::GradFn,
    inputs: [Value; 2],
    g: Value,
    needs: [bool; 2],
) -> Grads {
    rule(cx, &GradCall { op, inputs: &inputs, outputs: &[], grads: &[Some(g)], needs: &needs })
}

fn limit(cx: Cx<'_>, call: &GradCall<'_>, is_lower: bool) -> Grads {
    if is_number(cx, call.inputs[1]) {
        return rule!(cx, call, |g, x, limit| {
            let inside = if is_lower { x.gt(limit) } else { x.lt(limit) };
            [inside.where_(g, 0.0)]
        });
    }
    if is_lower { gradient::maximum(cx, call) } else { gradient::minimum(cx, call) }
}

pub(crate) fn clamp_min(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    limit(cx, call, true)
}

pub(crate) fn clamp_max(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    limit(cx, call, false)
}

pub(crate) fn rsub_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let mut args = promoted(cx, op, args)?;
    args.swap(0, 1);
    cx.emit(Op::Sub {}, &args)
}

/// The dtype of a value, or of a list's first element.
fn dtype(cx: Cx<'_>, x: Value) -> DType {
    cx.tensor_ty(x).dtype
}

/// Of x's type; the others are numbers.
pub(crate) fn nan_to_num_type(_: &Op, args: &[Ty]) -> Rule {
    numbers_from(args, 1, "each of nan, posinf and neginf")?;
    one(args[0].clone())
}

pub(crate) fn numbers_from(args: &[Ty], first: usize, argument: &'static str) -> Result<(), Why> {
    if args[first..].iter().all(Ty::is_scalar) {
        Ok(())
    } else {
        Err(Why::Operand { argument, expected: "a number" })
    }
}

pub(crate) fn masked_fill_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, mask) = (tensor(args, 0, "x")?, tensor(args, 1, "mask")?);
    if mask.dtype != DType::Bool {
        return Err(Why::DType { argument: "mask", expected: "bool", got: mask.dtype });
    }
    let got = match &args[2] {
        Ty::Tensor(t) if t.shape.rank() > 0 => {
            return Err(Why::Rank { argument: "value", expected: "0", got: t.shape.rank() });
        }
        Ty::Tensor(t) => t.dtype,
        // A number becomes an element, whatever its kind.
        Ty::Scalar(_) => x.dtype,
        Ty::List(_) => return Err(Why::Operand { argument: "value", expected: "a number or a 0-d tensor" }),
    };
    if got.kind() > x.dtype.kind() {
        return Err(Why::DType {
            argument: "value",
            expected: "of a kind x can hold (bool < integer < float)",
            got,
        });
    }
    broadcast_all(&args[..2], x.dtype)
}

pub(crate) fn masked_fill_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, mask, mut value) = (args[0], args[1], args[2]);
    let ty = cx.tensor_ty(x);
    let fits = match cx.ty(value) {
        Ty::Scalar(kind) => *kind <= ty.dtype.kind(),
        _ => dtype(cx, value) == ty.dtype,
    };
    if !fits {
        value = cx.to(value, ty.dtype)?;
    }
    result(cx.where_(mask, value, x))
}

pub(crate) fn like_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    numbers_from(args, 1, "value")?;
    match op {
        Op::FullLike { dtype } | Op::ZerosLike { dtype } | Op::OnesLike { dtype } => {
            one(TensorTy { dtype: *dtype, ..x.clone() })
        }
        _ => one(x.clone()),
    }
}

pub(crate) fn like_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let x = cx.tensor_ty(args[0]);
    let (value, dtype) = match op {
        Op::FullLike { dtype } => (args[1], *dtype),
        Op::OnesLike { dtype } => (cx.number(Scalar::Int(1))?, *dtype),
        Op::ZerosLike { dtype } => (cx.number(Scalar::Int(0))?, *dtype),
        _ => (cx.number(Scalar::Int(0))?, x.dtype),
    };
    result(cx.full(value, x.shape, dtype, x.device))
}
