//! Rules of arithmetic that hold for floating-point numbers bit for bit.

use kiln_ir::{DType, EmitExt, Fault, Op, Scalar, Ty, Value, planted};

use super::NO;
use crate::{Rewriter, Rule};

/// The rules.
pub const ARITHMETIC: &[Rule] = &[
    Rule {
        name: "mul_one",
        law: "x · 1 → x",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Mul {}, &[x, one]) if is(cx, one, 1.0) => Ok(Some(x)),
            (Op::Mul {}, &[one, x]) if is(cx, one, 1.0) => Ok(Some(x)),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = constant() {value: 1.0} : float %2 = mul(%0, %1) : f32[9] return %2 }",
            "graph(%0: i64[9]) { %1 = constant() {value: 1} : int %2 = mul(%1, %0) : i64[9] return %2 }",
            "graph(%0: float) { %1 = constant() {value: 1} : int %2 = mul(%1, %0) : float return %2 }",
        ],
    },
    Rule {
        name: "mul_minus_one",
        law: "x · −1 → −x",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Mul {}, &[x, one]) if is(cx, one, -1.0) && cx.ty_of(x) == call.out => cx.neg(x).map(Some),
            (Op::Mul {}, &[one, x]) if is(cx, one, -1.0) && cx.ty_of(x) == call.out => cx.neg(x).map(Some),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = constant() {value: -1.0} : float %2 = mul(%0, %1) : f32[9] return %2 }",
            "graph(%0: i64[9]) { %1 = constant() {value: -1} : int %2 = mul(%1, %0) : i64[9] return %2 }",
        ],
    },
    Rule {
        name: "div_one",
        law: "x / 1 → x",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Div {}, &[x, one]) if is(cx, one, 1.0) => Ok(Some(x)),
            _ => NO,
        },
        examples: &[
            "graph(%0: f64[9]) { %1 = constant() {value: 1} : int %2 = div(%0, %1) : f64[9] return %2 }",
        ],
    },
    Rule {
        name: "div_power_of_two",
        law: "x / 2ⁿ → x · 2⁻ⁿ: both are the same real number, rounded once",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Div {}, &[x, c]) => match cx.constant(c).and_then(|c| inverse_power_of_two(c, call.out)) {
                Some(inverse) => {
                    let inverse = cx.number(inverse)?;
                    cx.mul(x, inverse).map(Some)
                }
                None => NO,
            },
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = constant() {value: 1024} : int %2 = div(%0, %1) : f32[9] return %2 }",
            "graph(%0: f64[9]) { %1 = constant() {value: -0.25} : float %2 = div(%0, %1) : f64[9] return %2 }",
        ],
    },
    Rule {
        name: "sub_zero",
        law: "x − 0 → x (not x + 0: −0 + 0 is 0)",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Sub {}, &[x, zero]) if is_positive_zero(cx, zero) => Ok(Some(x)),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = constant() {value: 0.0} : float %2 = sub(%0, %1) : f32[9] return %2 }",
            "graph(%0: i64[9]) { %1 = constant() {value: 0} : int %2 = sub(%0, %1) : i64[9] return %2 }",
        ],
    },
    Rule {
        name: "add_zero",
        law: "x + 0 → x for integers and truth values; x + −0 → x for floats",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Add {}, &[x, zero]) if is_added_zero(cx, zero, call.out) => Ok(Some(x)),
            (Op::Add {}, &[zero, x]) if is_added_zero(cx, zero, call.out) => Ok(Some(x)),
            _ => NO,
        },
        examples: &[
            "graph(%0: i64[9]) { %1 = constant() {value: 0} : int %2 = add(%0, %1) : i64[9] return %2 }",
            "graph(%0: f32[9]) { %1 = constant() {value: -0.0} : float %2 = add(%1, %0) : f32[9] return %2 }",
        ],
    },
    Rule {
        name: "neg_neg",
        law: "−(−x) → x",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Neg {}, &[x]) => Ok(negated(cx, x)),
            _ => NO,
        },
        examples: &["graph(%0: f32[9]) { %1 = neg(%0) : f32[9] %2 = neg(%1) : f32[9] return %2 }"],
    },
    Rule {
        name: "abs_of_sign",
        law: "|−x| → |x|, ||x|| → |x|, but for unsigned integers, whose negative is as positive as they are",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Abs {}, _) if holds_unsigned(call.out) => NO,
            (Op::Abs {}, &[x]) => match cx.through(x, |op| matches!(op, Op::Neg {} | Op::Abs {})) {
                Some(inner) => cx.abs(inner).map(Some),
                None => NO,
            },
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = neg(%0) : f32[9] %2 = abs(%1) : f32[9] return %2 }",
            "graph(%0: i64[9]) { %1 = abs(%0) : i64[9] %2 = abs(%1) : i64[9] return %2 }",
        ],
    },
    Rule {
        name: "add_neg",
        law: "x + (−y) → x − y, x − (−y) → x + y",
        apply: |cx, call| {
            let (Op::Add {} | Op::Sub {}, &[x, y]) = (call.op, call.args) else { return NO };
            // In one dtype only: the smallest integer is its own negative, but not as a float.
            match negated(cx, y) {
                Some(y) if cx.ty_of(y) == call.out && cx.ty_of(x) == call.out => match call.op {
                    Op::Add {} if !planted(Fault::SignLost) => cx.sub(x, y).map(Some),
                    _ => cx.add(x, y).map(Some),
                },
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[9], %1: f32[9]) { %2 = neg(%1) : f32[9] %3 = add(%0, %2) : f32[9] return %3 }",
            "graph(%0: i64[9], %1: i64[9]) { %2 = neg(%1) : i64[9] %3 = sub(%0, %2) : i64[9] return %3 }",
        ],
    },
    Rule {
        name: "neg_mul_neg",
        law: "(−x) · (−y) → x · y, (−x) / (−y) → x / y",
        apply: |cx, call| {
            let (Op::Mul {} | Op::Div {}, &[x, y]) = (call.op, call.args) else { return NO };
            match (negated(cx, x), negated(cx, y)) {
                (Some(x), Some(y)) if cx.ty_of(x) == call.out && cx.ty_of(y) == call.out => match call.op {
                    Op::Mul {} => cx.mul(x, y).map(Some),
                    _ => cx.div(x, y).map(Some),
                },
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[9], %1: f32[9]) { %2 = neg(%0) : f32[9] %3 = neg(%1) : f32[9] %4 = mul(%2, %3) : f32[9] return %4 }",
            "graph(%0: f64[9], %1: f64[9]) { %2 = neg(%0) : f64[9] %3 = neg(%1) : f64[9] %4 = div(%2, %3) : f64[9] return %4 }",
        ],
    },
    Rule {
        name: "extreme_of_same",
        law: "max(x, x) → x, max(max(x, y), y) → max(x, y), max(x, max(x, y)) → max(x, y); min alike",
        apply: |cx, call| {
            let (Op::Maximum {} | Op::Minimum {}, &[x, y]) = (call.op, call.args) else { return NO };
            if x == y {
                return Ok(Some(x));
            }
            match (cx.producer(x), cx.producer(y)) {
                (Some((op, inner)), _) if op == *call.op && inner[1] == y => Ok(Some(x)),
                (_, Some((op, inner))) if op == *call.op && inner[0] == x => Ok(Some(y)),
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = maximum(%0, %0) : f32[9] return %1 }",
            "graph(%0: f32[9], %1: f32[9]) { %2 = maximum(%0, %1) : f32[9] %3 = maximum(%0, %2) : f32[9] return %3 }",
            "graph(%0: f32[9], %1: f32[9]) { %2 = minimum(%0, %1) : f32[9] %3 = minimum(%2, %1) : f32[9] return %3 }",
        ],
    },
];

/// Whether a value is known to be this number.
fn is(cx: &Rewriter<'_>, value: Value, number: f64) -> bool {
    cx.constant(value).is_some_and(|c| c.as_f64() == number)
}

/// Whether a value is known to be 0, not −0.
fn is_positive_zero(cx: &Rewriter<'_>, value: Value) -> bool {
    cx.constant(value).is_some_and(|c| c.as_f64().to_bits() == 0)
}

fn is_added_zero(cx: &Rewriter<'_>, value: Value, out: &Ty) -> bool {
    match (cx.constant(value), float_dtype(out)) {
        (Some(Scalar::Float(c)), _) => c.to_bits() == (-0.0f64).to_bits(),
        (Some(c), None) => c.as_i64() == 0,
        _ => false,
    }
}

/// The common floating-point dtype of what a value is or holds.
fn float_dtype(ty: &Ty) -> Option<DType> {
    let dtype = match ty {
        Ty::Tensor(t) => t.dtype,
        Ty::Scalar(kind) => kind.dtype(),
        Ty::List(items) => items.kinds().map(|t| t.dtype).min()?,
    };
    dtype.is_float().then_some(dtype)
}

/// Whether a value is, or holds, unsigned integers.
fn holds_unsigned(ty: &Ty) -> bool {
    match ty {
        Ty::Tensor(t) => t.dtype == DType::U8,
        Ty::Scalar(_) => false,
        Ty::List(items) => items.kinds().any(|t| t.dtype == DType::U8),
    }
}

/// The operand of a negation.
fn negated(cx: &Rewriter<'_>, value: Value) -> Option<Value> {
    cx.through(value, |op| matches!(op, Op::Neg {}))
}

/// 1/c, if c and it are powers of two well inside the dtype's range.
fn inverse_power_of_two(c: Scalar, out: &Ty) -> Option<f64> {
    let most = match float_dtype(out)? {
        DType::F64 => 1000,
        DType::F16 => 14,
        _ => 120,
    };
    let c = c.as_f64();
    let exponent = ((c.to_bits() >> 52) & 0x7ff) as i64 - 1023;
    let is_power = c.is_normal() && c.to_bits() << 12 == 0;
    (is_power && exponent != 0 && exponent.abs() <= most).then(|| 1.0 / c)
}

impl Rewriter<'_> {
    /// The type of a value, for comparison with a call's.
    pub(super) fn ty_of(&self, value: Value) -> &Ty {
        self.graph.ty(value)
    }
}
