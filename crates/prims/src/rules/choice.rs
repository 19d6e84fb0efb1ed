//! Rules of truth values: `where`, comparisons, logic.

use kiln_ir::{DType, EmitExt, Fault, Op, Ty, planted};

use super::NO;
use crate::Rule;

/// The rules.
pub const CHOICE: &[Rule] = &[
    Rule {
        name: "where_same",
        law: "where(c, x, x) → x",
        apply: |_, call| match (call.op, call.args) {
            (Op::Where {}, &[_, x, y]) if x == y => Ok(Some(x)),
            _ => NO,
        },
        examples: &["graph(%0: bool[9], %1: f32[9]) { %2 = where(%0, %1, %1) : f32[9] return %2 }"],
    },
    Rule {
        name: "where_known",
        law: "where(true, x, y) → x, where(false, x, y) → y",
        apply: |cx, call| match (call.op, call.args) {
            (Op::Where {}, &[c, x, y]) => Ok(cx.constant(c).map(|c| if c.as_bool() { x } else { y })),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9], %1: f32[9]) { %2 = constant() {value: true} : boolean %3 = where(%2, %0, %1) : f32[9] return %3 }",
            "graph(%0: f32[9], %1: f32[9]) { %2 = constant() {value: false} : boolean %3 = where(%2, %0, %1) : f32[9] return %3 }",
        ],
    },
    Rule {
        name: "where_not",
        law: "where(not c, x, y) → where(c, y, x)",
        apply: |cx, call| {
            let (Op::Where {}, &[c, x, y]) = (call.op, call.args) else { return NO };
            match cx.through(c, |op| matches!(op, Op::LogicalNot {})) {
                Some(c) if is_truth(cx.ty_of(c)) => {
                    let (x, y) = if planted(Fault::WhereNotKeepsOrder) { (y, x) } else { (x, y) };
                    cx.where_(c, y, x).map(Some)
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: bool[9], %1: f32[9], %2: f32[9]) { %3 = logical_not(%0) : bool[9] %4 = where(%3, %1, %2) : f32[9] return %4 }",
        ],
    },
    Rule {
        name: "not_not",
        law: "not not x → x for truth values",
        apply: |cx, call| match (call.op, call.args) {
            (Op::LogicalNot {}, &[x]) => Ok(cx.through(x, |op| matches!(op, Op::LogicalNot {}))),
            _ => NO,
        },
        examples: &[
            "graph(%0: bool[9]) { %1 = logical_not(%0) : bool[9] %2 = logical_not(%1) : bool[9] return %2 }",
        ],
    },
    Rule {
        name: "not_equal",
        law: "not (x = y) → x ≠ y, not (x ≠ y) → x = y (not so for <: NaN)",
        apply: |cx, call| {
            let (Op::LogicalNot {}, &[x]) = (call.op, call.args) else { return NO };
            match cx.producer(x) {
                Some((Op::Eq {}, args)) => cx.ne(args[0], args[1]).map(Some),
                Some((Op::Ne {}, args)) => cx.eq(args[0], args[1]).map(Some),
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[9], %1: f32[9]) { %2 = eq(%0, %1) : bool[9] %3 = logical_not(%2) : bool[9] return %3 }",
            "graph(%0: f32[9]) { %2 = ne(%0, %0) : bool[9] %3 = logical_not(%2) : bool[9] return %3 }",
        ],
    },
    Rule {
        name: "and_same",
        law: "x and x → x, x and true → x, for truth values",
        apply: |cx, call| match (call.op, call.args) {
            (Op::LogicalAnd {}, &[x, y]) if x == y => Ok(Some(x)),
            (Op::LogicalAnd {}, &[x, y]) if cx.constant(y).is_some_and(|c| c.as_bool()) => Ok(Some(x)),
            (Op::LogicalAnd {}, &[x, y]) if cx.constant(x).is_some_and(|c| c.as_bool()) => Ok(Some(y)),
            _ => NO,
        },
        examples: &[
            "graph(%0: bool[9]) { %1 = logical_and(%0, %0) : bool[9] return %1 }",
            "graph(%0: bool[9]) { %1 = constant() {value: true} : boolean %2 = logical_and(%1, %0) : bool[9] return %2 }",
        ],
    },
];

fn is_truth(ty: &Ty) -> bool {
    match ty {
        Ty::Tensor(t) => t.dtype == DType::Bool,
        Ty::Scalar(kind) => kind.dtype() == DType::Bool,
        Ty::List(items) => items.kinds().all(|t| t.dtype == DType::Bool),
    }
}
