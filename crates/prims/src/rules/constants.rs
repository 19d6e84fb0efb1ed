//! Arithmetic on numbers of the program text is done here and now, by the same function that computes with
//! run-time numbers on every call, so that both give the same bits.

use kiln_ir::{EmitExt, Fault, Scalar, planted};

use super::NO;
use crate::Rule;

/// The rules.
pub const CONSTANTS: &[Rule] = &[Rule {
    name: "fold",
    law: "f(a, b) → its value, for numbers a, b of the program text",
    apply: |cx, call| {
        if call.args.is_empty() || !call.out.is_scalar() {
            return NO;
        }
        let Some(args) = call.args.iter().map(|&v| cx.constant(v)).collect::<Option<Vec<Scalar>>>() else {
            return NO;
        };
        match call.op.fold(&args) {
            Some(value) if planted(Fault::FoldOffByOne) => {
                cx.number(Scalar::Float(value.as_f64() - 1.0).to_kind(value.kind())).map(Some)
            }
            Some(value) => cx.number(value).map(Some),
            None => NO,
        }
    },
    examples: &[
        "graph() { %0 = constant() {value: 1.0} : float %1 = constant() {value: 3} : int %2 = div(%0, %1) : float return %2 }",
        "graph() { %0 = constant() {value: 7} : int %1 = neg(%0) : int return %1 }",
        "graph() { %0 = constant() {value: 7} : int %1 = constant() {value: 7.5} : float %2 = lt(%0, %1) : boolean return %2 }",
        "graph() { %0 = constant() {value: 7.9} : float %1 = to(%0) {dtype: i64} : int return %1 }",
        "graph() { %0 = constant() {value: true} : boolean %1 = add(%0, %0) : boolean return %1 }",
        "graph() { %0 = constant() {value: 7.9} : float %1 = sqrt(%0) : float return %1 }",
    ],
}];
