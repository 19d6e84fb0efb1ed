//! Rows: limits, signs, tests of numbers, and fillings.

use crate::decompose::one as result;
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
                  decompose: Some(choices::clamp_steps),
                  eval: Eval::both(|a| -nan_max(-nan_max(a[0], a[1]), -a[2]), |a| a[0].max(a[1]).min(a[2])), samples: choices::clamp_samples };
            /// x, and min where it is less
            [pointwise clamp_min clamp_min_] "clamp_min" ClampMin (x, min) () {}
                { ty: types::arithmetic, grad: Grad::Fn(choices::clamp_min),
                  decompose: Some(choices::clamp_min_steps), eval: Eval::both(|a| nan_max(a[0], a[1]), |a| a[0].max(a[1])),
                  samples: samples::binary };
            /// x, and max where it is more
            [pointwise clamp_max clamp_max_] "clamp_max" ClampMax (x, max) () {}
                { ty: types::arithmetic, grad: Grad::Fn(choices::clamp_max),
                  decompose: Some(choices::clamp_max_steps), eval: Eval::both(|a| -nan_max(-a[0], -a[1]), |a| a[0].min(a[1])),
                  samples: samples::binary };
            /// y − alpha · x
            [pointwise rsub rsub_] "rsub" Rsub (x, y) (alpha) {}
                { ty: types::arithmetic_not_bool, grad: Grad::Decompose, decompose: Some(choices::rsub_steps),
                  eval: Eval::both(|a| a[1] - alpha(a) * a[0], |a| a[1].wrapping_sub(alpha_int(a).wrapping_mul(a[0]))),
                  samples: samples::binary_not_bool };

            // ---- pointwise: signs ------------------------------------------------------------------------------

            /// −1, 0 or 1
            [pointwise sign sign_] "sign" Sign (x) () {}
                { ty: types::arithmetic, grad: Grad::Zero, decompose: Some(choices::sign_steps),
                  eval: Eval::both(|a| if a[0] > 0.0 { 1.0 } else if a[0] < 0.0 { -1.0 } else { 0.0 }, |a| a[0].signum()),
                  samples: samples::unary };
            /// Whether the sign bit is set
            [pointwise signbit signbit_] "signbit" Signbit (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::signbit_steps),
                  eval: Eval::compare(|a| a[0].is_sign_negative(), |a| a[0] < 0), samples: samples::unary };
            /// |x| with the sign of y
            [pointwise copysign copysign_] "copysign" Copysign (x, y) () {}
                { ty: types::float_arithmetic, grad: Grad::Fn(choices::copysign),
                  eval: Eval::float(|a| a[0].copysign(a[1])), function: Some(Function::Copysign),
                  samples: || samples::binary_on(samples::NUMBERS, samples::NonZero) };
            /// 0 left of zero, 1 right of it, values at it
            [pointwise heaviside heaviside_] "heaviside" Heaviside (x, values) () {}
                { ty: types::arithmetic, grad: Grad::Zero, decompose: Some(choices::heaviside_steps),
                  eval: Eval::both(|a| if a[0] == 0.0 { a[1] } else if a[0] > 0.0 { 1.0 } else { 0.0 },
                  |a| if a[0] == 0 { a[1] } else { i64::from(a[0] > 0) }), samples: samples::binary };

            // ---- pointwise: tests ------------------------------------------------------------------------------

            /// x is not a number
            [pointwise isnan isnan_] "isnan" Isnan (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::isnan_steps),
                  eval: Eval::compare(|a| a[0].is_nan(), |_| false), samples: samples::unary };
            /// x is infinite
            [pointwise isinf isinf_] "isinf" Isinf (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::isinf_steps),
                  eval: Eval::compare(|a| a[0].is_infinite(), |_| false), samples: samples::unary };
            /// x is neither infinite nor NaN
            [pointwise isfinite isfinite_] "isfinite" Isfinite (x) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::isfinite_steps),
                  eval: Eval::compare(|a| a[0].is_finite(), |_| true), samples: samples::unary };
            /// Either is not zero
            [pointwise logical_or logical_or_] "logical_or" LogicalOr (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::or_steps),
                  eval: Eval::compare(|a| a[0] != 0.0 || a[1] != 0.0, |a| a[0] != 0 || a[1] != 0),
                  samples: samples::binary };
            /// Just one is not zero
            [pointwise logical_xor logical_xor_] "logical_xor" LogicalXor (x, y) () {}
                { ty: types::compare, grad: Grad::Zero, decompose: Some(choices::xor_steps),
                  eval: Eval::compare(|a| (a[0] != 0.0) != (a[1] != 0.0), |a| (a[0] != 0) != (a[1] != 0)),
                  samples: samples::binary };

            // ---- fillings --------------------------------------------------------------------------------------

            /// x with NaN and the infinities replaced
            [pointwise nan_to_num_with nan_to_num_with_] "nan_to_num" NanToNum (x, nan, posinf, neginf) () {}
                { ty: choices::nan_to_num_type, grad: Grad::Decompose, decompose: Some(choices::nan_to_num_steps),
                  eval: Eval::both(|a| if a[0].is_nan() { a[1] } else if a[0] == f64::INFINITY { a[2] }
                  else if a[0] == f64::NEG_INFINITY { a[3] } else { a[0] }, |a| a[0]), samples: choices::nan_to_num_samples };
            /// x, and value where the mask holds
            [index masked_fill _none] "masked_fill" MaskedFill (x, mask, value) () {}
                { ty: choices::masked_fill_type, grad: Grad::Decompose, decompose: Some(choices::masked_fill_steps),
                  level: Level::Composite, eval: Eval::Structural, samples: choices::masked_fill_samples };
            /// value in the shape of x
            [create full_like _none] "full_like" FullLike (x, value) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps), level: Level::Composite,
                  eval: Eval::Structural, samples: || choices::like_samples(|dtype| Op::FullLike { dtype }, true) };
            /// Zeros in the shape of x
            [create zeros_like _none] "zeros_like" ZerosLike (x) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps), level: Level::Composite,
                  eval: Eval::Structural, samples: || choices::like_samples(|dtype| Op::ZerosLike { dtype }, false) };
            /// Ones in the shape of x
            [create ones_like _none] "ones_like" OnesLike (x) () { dtype: DType }
                { ty: choices::like_type, grad: Grad::Zero, decompose: Some(choices::like_steps), level: Level::Composite,
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

pub(crate) fn clamp_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    let raised = cx.maximum(args[0], args[1])?;
    result(cx.minimum(raised, args[2]))
}

pub(crate) fn clamp_min_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    result(cx.maximum(args[0], args[1]))
}

pub(crate) fn clamp_max_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    result(cx.minimum(args[0], args[1]))
}

/// A limit that is a number lets the gradient through where x is beyond it, not on it; one that is a tensor
/// shares it with x where they are equal, as maximum and minimum do.
fn is_number(cx: Cx<'_>, limit: Value) -> bool {
    matches!(cx.ty(limit), Ty::Scalar(_))
}

pub(crate) fn clamp(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, x, min, max) = (g!(call), call.inputs[0], call.inputs[1], call.inputs[2]);
    if is_number(cx, min) && is_number(cx, max) {
        let (above, below, zero) = (cx.gt(x, min)?, cx.lt(x, max)?, cx.number(0.0)?);
        let inside = cx.logical_and(above, below)?;
        return Ok(vec![Some(cx.where_(inside, g, zero)?), None, None]);
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

fn limit(cx: Cx<'_>, call: &GradCall<'_>, lower: bool) -> Grads {
    let (g, x, limit) = (g!(call), call.inputs[0], call.inputs[1]);
    if is_number(cx, limit) {
        let (inside, zero) = (if lower { cx.gt(x, limit)? } else { cx.lt(x, limit)? }, cx.number(0.0)?);
        return Ok(vec![Some(cx.where_(inside, g, zero)?), None]);
    }
    if lower { gradient::maximum(cx, call) } else { gradient::minimum(cx, call) }
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

pub(crate) fn sign_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, zero, dtype) = (args[0], cx.number(Scalar::Int(0))?, dtype(cx, args[0]));
    let positive = cx.gt(x, zero)?;
    if dtype == DType::Bool {
        return Ok(smallvec::smallvec![positive]);
    }
    let negative = cx.lt(x, zero)?;
    let (positive, negative) = (cx.to(positive, dtype)?, cx.to(negative, dtype)?);
    result(cx.sub(positive, negative))
}

pub(crate) fn signbit_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, zero) = (args[0], cx.number(Scalar::Int(0))?);
    if !dtype(cx, x).is_float() {
        return result(cx.lt(x, zero));
    }
    let unit = cx.number(1.0)?;
    let signed = cx.copysign(unit, x)?;
    result(cx.lt(signed, zero))
}

pub(crate) fn copysign(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    // ±g, and 0 where x is 0
    let (g, x, y, zero) = (g!(call), call.inputs[0], call.inputs[1], cx.number(0.0)?);
    let gx = call.wanted(cx, 0, |cx| {
        let (own, unit) = (cx.sign(x)?, cx.number(1.0)?);
        let wanted = cx.copysign(unit, y)?;
        let slope = cx.mul(own, wanted)?;
        cx.mul(g, slope)
    })?;
    let gy = call.wanted(cx, 1, |cx| cx.mul(g, zero))?;
    Ok(vec![gx, gy])
}

pub(crate) fn heaviside_steps(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = promoted(cx, op, args)?;
    let (x, zero) = (args[0], cx.number(Scalar::Int(0))?);
    let step = cx.gt(x, zero)?;
    let like = if cx.ty(x).is_scalar() { args[1] } else { x };
    let dtype = dtype(cx, like);
    let step = cx.to(step, dtype)?;
    let at_zero = cx.eq(x, zero)?;
    result(cx.where_(at_zero, args[1], step))
}

pub(crate) fn isnan_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    result(cx.ne(args[0], args[0]))
}

pub(crate) fn isinf_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    if !dtype(cx, args[0]).is_float() {
        return result(cx.ne(args[0], args[0]));
    }
    let (size, infinity) = (cx.abs(args[0])?, cx.number(f64::INFINITY)?);
    result(cx.eq(size, infinity))
}

pub(crate) fn isfinite_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    if !dtype(cx, args[0]).is_float() {
        return result(cx.eq(args[0], args[0]));
    }
    let (size, infinity) = (cx.abs(args[0])?, cx.number(f64::INFINITY)?);
    result(cx.lt(size, infinity))
}

pub(crate) fn or_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, y) = (cx.to(args[0], DType::Bool)?, cx.to(args[1], DType::Bool)?);
    result(cx.maximum(x, y))
}

pub(crate) fn xor_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (x, y) = (cx.to(args[0], DType::Bool)?, cx.to(args[1], DType::Bool)?);
    result(cx.ne(x, y))
}

/// Of x's type; the others are numbers.
pub(crate) fn nan_to_num_type(_: &Op, args: &[Ty]) -> Rule {
    numbers_from(args, 1, "nan, posinf and neginf")?;
    one(args[0].clone())
}

pub(crate) fn numbers_from(args: &[Ty], first: usize, argument: &'static str) -> Result<(), Why> {
    match args[first..].iter().all(Ty::is_scalar) {
        true => Ok(()),
        false => Err(Why::Operand { argument, expected: "a number" }),
    }
}

pub(crate) fn nan_to_num_steps(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let x = args[0];
    if !dtype(cx, x).is_float() {
        return Ok(smallvec::smallvec![x]);
    }
    let (infinity, minus) = (cx.number(f64::INFINITY)?, cx.number(f64::NEG_INFINITY)?);
    let (number, up, down) = (cx.eq(x, x)?, cx.eq(x, infinity)?, cx.eq(x, minus)?);
    let filled = cx.where_(number, x, args[1])?;
    let filled = cx.where_(up, args[2], filled)?;
    result(cx.where_(down, args[3], filled))
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
        return Err(Why::DType { argument: "value", expected: "of a category that x can hold", got });
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
