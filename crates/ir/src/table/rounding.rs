//! Rows: rounding, division that rounds, and bits.

use crate::decompose::one as result;
use crate::gradient::Cx;
use crate::samples::{self, Any, Between, NUMBERS, NonZero, Number, binary_on, calls, t, with_op};
use crate::table::functions::promoted;
use crate::types::{Rule, broadcast_all, tensor};
use crate::{DType, Division, EmitExt, Op, Result, Sample, Scalar, Shape, Ty, Value, Values, Why};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_rounding {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_choices! { $callback [
            $($rows)*

            // ---- pointwise: rounding ---------------------------------------------------------------------------

            /// The largest integer ≤ x
            [pointwise floor floor_] "floor" Floor (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Zero, eval: Eval::both(|a| a[0].floor(), |a| a[0]),
                  function: Some(Function::Floor), samples: rounding::samples };
            /// The smallest integer ≥ x
            [pointwise ceil ceil_] "ceil" Ceil (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Zero, eval: Eval::both(|a| a[0].ceil(), |a| a[0]),
                  function: Some(Function::Ceil), samples: rounding::samples };
            /// The nearest integer, the even one of two
            [pointwise round round_] "round" Round (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Zero, eval: Eval::both(|a| a[0].round_ties_even(), |a| a[0]),
                  function: Some(Function::Round), samples: rounding::samples };
            /// The integer part
            [pointwise trunc trunc_] "trunc" Trunc (x) () {}
                { ty: types::arithmetic_not_bool, grad: Grad::Zero, eval: Eval::both(|a| a[0].trunc(), |a| a[0]),
                  function: Some(Function::Trunc), samples: rounding::samples };
            /// What is left of x without its integer part
            [pointwise frac frac_] "frac" Frac (x) () {}
                { ty: types::arithmetic_not_bool, grad: rule!(|g, _x| [g]), decompose: steps!(|x| x - x.trunc()),
                  eval: Eval::both(|a| a[0] - a[0].trunc(), |_| 0), samples: rounding::samples };

            // ---- pointwise: division that rounds ---------------------------------------------------------------

            /// ⌊x / y⌋
            [pointwise floor_divide floor_divide_] "floor_divide" FloorDivide (x, y) () {}
                { ty: rounding::division_type, grad: Grad::Zero, decompose: Some(rounding::integers),
                  eval: Eval::both(|a| (a[0] / a[1]).floor(), |a| rounding::divide(Division::FloorDivide, a[0], a[1])),
                  function: Some(Function::FloorDivide),
                  prim: Some(rounding::of_floats), samples: rounding::division_samples };
            /// The integer part of x / y
            [pointwise div_trunc div_trunc_] "div_trunc" DivTrunc (x, y) () {}
                { ty: rounding::division_type, grad: Grad::Zero, decompose: Some(rounding::integers),
                  eval: Eval::both(|a| (a[0] / a[1]).trunc(), |a| rounding::divide(Division::DivTrunc, a[0], a[1])),
                  function: Some(Function::DivTrunc),
                  prim: Some(rounding::of_floats), samples: rounding::division_samples };
            /// What is left of x after whole multiples of y, with the sign of y
            [pointwise remainder remainder_] "remainder" Remainder (x, y) () {}
                { ty: rounding::division_type, grad: rule!(|g, x, y| [g, -(g * x.floor_divide(y))]),
                  decompose: Some(rounding::integers),
                  eval: Eval::both(|a| a[0] - (a[0] / a[1]).floor() * a[1], |a| rounding::divide(Division::Remainder, a[0], a[1])),
                  function: Some(Function::Remainder),
                  prim: Some(rounding::of_floats), samples: rounding::division_samples };
            /// What is left of x after whole multiples of y, with the sign of x
            [pointwise fmod fmod_] "fmod" Fmod (x, y) () {}
                { ty: rounding::division_type, grad: rule!(|g, x, y| [g, -(g * x.div_trunc(y))]),
                  decompose: Some(rounding::integers),
                  eval: Eval::both(|a| a[0] % a[1], |a| rounding::divide(Division::Fmod, a[0], a[1])),
                  function: Some(Function::Fmod),
                  prim: Some(rounding::of_floats), samples: rounding::division_samples };
            /// The division of integers that its attribute names; by zero it is an error
            [index integer_division _none] "integer_division" IntegerDivision (x, y) () { division: Division }
                { ty: rounding::integer_type, grad: Grad::Zero, eval: Eval::Structural, samples: rounding::integer_samples };

            // ---- pointwise: bits -------------------------------------------------------------------------------

            /// Bits that are set in both
            [pointwise bitwise_and bitwise_and_] "bitwise_and" BitwiseAnd (x, y) () {}
                { ty: rounding::bits_type, grad: Grad::Zero, eval: Eval::both(|_| f64::NAN, |a| a[0] & a[1]), samples: rounding::bits_samples };
            /// Bits that are set in either
            [pointwise bitwise_or bitwise_or_] "bitwise_or" BitwiseOr (x, y) () {}
                { ty: rounding::bits_type, grad: Grad::Zero, eval: Eval::both(|_| f64::NAN, |a| a[0] | a[1]), samples: rounding::bits_samples };
            /// Bits that are set in one only
            [pointwise bitwise_xor bitwise_xor_] "bitwise_xor" BitwiseXor (x, y) () {}
                { ty: rounding::bits_type, grad: Grad::Zero, eval: Eval::both(|_| f64::NAN, |a| a[0] ^ a[1]), samples: rounding::bits_samples };
            /// Every bit flipped; of truth values, not
            [pointwise bitwise_not bitwise_not_] "bitwise_not" BitwiseNot (x) () {}
                { ty: rounding::bits_type, grad: Grad::Zero, decompose: steps!(|x| if x.dtype() == DType::Bool { x.logical_not() } else { x.number(-1) - x }), eval: Eval::Structural,
                  samples: || samples::unary_on(rounding::BITS, samples::Any) };
            /// Bits moved up by y places
            [pointwise bitwise_left_shift bitwise_left_shift_] "bitwise_left_shift" BitwiseLeftShift (x, y) () {}
                { ty: rounding::shift_type, grad: Grad::Zero,
                  eval: Eval::both(|_| f64::NAN, |a| if (0..64).contains(&a[1]) { a[0] << a[1] } else { 0 }),
                  samples: rounding::shift_samples };
            /// Bits moved down by y places, the sign filled in
            [pointwise bitwise_right_shift bitwise_right_shift_] "bitwise_right_shift" BitwiseRightShift (x, y) () {}
                { ty: rounding::shift_type, grad: Grad::Zero,
                  eval: Eval::both(|_| f64::NAN, |a| a[0] >> if (0..64).contains(&a[1]) { a[1] } else { 63 }),
                  samples: rounding::shift_samples };
        ]}
    };
}

/// The dtypes that have bits.
pub(crate) const BITS: &[DType] = &[DType::Bool, DType::I64];

pub(crate) fn samples() -> Vec<Sample> {
    let mut all = samples::unary_not_bool();
    all.extend(samples::unary_on(NUMBERS, Between(-20.0, 20.0)));
    all
}

pub(crate) fn division_samples() -> Vec<Sample> {
    binary_on(NUMBERS, NonZero)
}

pub(crate) fn integer_samples() -> Vec<Sample> {
    let mut all = Vec::new();
    for division in Division::ALL {
        for (x, y) in [(&[5][..], &[5][..]), (&[4, 37], &[37]), (&[2, 3], &[]), (&[0], &[1])] {
            all.push(with_op(
                Op::IntegerDivision { division },
                &[DType::I64],
                vec![t(x, Any), t(y, NonZero)],
            ));
        }
    }
    all
}

pub(crate) fn bits_samples() -> Vec<Sample> {
    let mut all = binary_on(BITS, Any);
    all.extend(calls(BITS, vec![vec![t(&[4, 9], Any), Number(Scalar::Bool(true))]]));
    all
}

pub(crate) fn shift_samples() -> Vec<Sample> {
    binary_on(&[DType::I64], Between(-3.0, 70.0))
}

/// The quotient or rest of integers; 0 where there is none, which callers make an error.
pub(crate) fn divide(division: Division, x: i64, y: i64) -> i64 {
    division.checked(x, y).unwrap_or(0)
}

/// Numbers, of which integers have no result beside a tensor: division by zero must be an error, and folding
/// numbers can't fail.
pub(crate) fn division_type(_: &Op, args: &[Ty]) -> Rule {
    match crate::result_dtype(args) {
        DType::Bool => Err(Why::DType { argument: "operands", expected: "numeric", got: DType::Bool }),
        dtype if !dtype.is_float() && args.iter().all(Ty::is_scalar) => {
            Err(Why::Operand { argument: "at least one operand", expected: "a tensor" })
        }
        dtype => broadcast_all(args, dtype),
    }
}

pub(crate) fn integer_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, y) = (tensor(args, 0, "x")?, tensor(args, 1, "y")?);
    for (argument, t) in [("x", x), ("y", y)] {
        if t.dtype.is_float() || t.dtype == DType::Bool || x.dtype != y.dtype {
            return Err(Why::DType {
                argument,
                expected: "an integer tensor of the other operand's dtype",
                got: t.dtype,
            });
        }
    }
    broadcast_all(args, x.dtype)
}

pub(crate) fn bits_type(_: &Op, args: &[Ty]) -> Rule {
    match crate::result_dtype(args) {
        got if got.is_float() => Err(Why::DType { argument: "operands", expected: "integer or bool", got }),
        dtype => broadcast_all(args, dtype),
    }
}

pub(crate) fn shift_type(_: &Op, args: &[Ty]) -> Rule {
    match crate::result_dtype(args) {
        got if got.is_float() || got == DType::Bool => {
            Err(Why::DType { argument: "operands", expected: "integer", got })
        }
        dtype => broadcast_all(args, dtype),
    }
}

/// Whether the operands of a division are integers.
fn whole(tys: &[Ty]) -> bool {
    !crate::result_dtype(tys).is_float()
}

/// The division of integers as a checked step; that of floats is a function already.
pub(crate) fn integers(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let tys: Vec<Ty> = args.iter().map(|&v| cx.ty(v).clone()).collect();
    let division = match op {
        Op::FloorDivide {} => Division::FloorDivide,
        Op::DivTrunc {} => Division::DivTrunc,
        Op::Remainder {} => Division::Remainder,
        _ => Division::Fmod,
    };
    if tys.iter().any(|ty| ty.as_list().is_some()) {
        // Only single tensors are checked.
        return crate::element_by_element(cx, op, args);
    }
    if !whole(&tys) {
        return cx.emit(op.clone(), args);
    }
    let device = tys.iter().find_map(Ty::as_tensor).map(|t| t.device).unwrap_or_default();
    let dtype = crate::result_dtype(&tys);
    let args = promoted(cx, op, args)?;
    let mut tensors = Vec::new();
    for arg in args {
        tensors.push(if cx.ty(arg).is_scalar() {
            cx.full(arg, Shape::scalar(), dtype, device)?
        } else {
            arg
        });
    }
    result(cx.integer_division(tensors[0], tensors[1], division))
}

/// Divisions of integers are checked steps, tensor by tensor.
pub(crate) fn of_floats(_: &Op, args: &[Ty]) -> bool {
    args.iter().all(|ty| ty.as_list().is_none()) && crate::result_dtype(args).is_float()
}
