//! Rules of conversion between dtypes.

use kiln_ir::{DType, EmitExt, Fault, Op, Scalar, planted};

use super::NO;
use crate::Rule;

/// The rules.
pub const CONVERSION: &[Rule] = &[
    Rule {
        name: "same_dtype",
        law: "to(x) → x if x is of that dtype already",
        apply: |cx, call| match (call.op, call.args) {
            // A number converted to a smaller dtype keeps its kind, but is rounded or wrapped.
            (Op::To { dtype }, _) if call.out.is_scalar() && dtype.kind().dtype() != *dtype => NO,
            (Op::To { .. }, &[x]) if cx.ty_of(x) == call.out => Ok(Some(x)),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = to(%0) {dtype: f32} : f32[9] return %1 }",
            "graph(%0: list(2 x f32[9])) { %1 = foreach_to(%0) {dtype: f32} : list(2 x f32[9]) return %1 }",
        ],
    },
    Rule {
        name: "widen_first",
        law: "to(to(x, wider), d) → to(x, d) if every x exists in the wider dtype",
        apply: |cx, call| {
            let (Op::To { dtype }, &[middle]) = (call.op, call.args) else { return NO };
            let Some(x) = cx.through(middle, |op| matches!(op, Op::To { .. })) else { return NO };
            match (cx.ty_of(x).as_tensor(), cx.ty_of(middle).as_tensor()) {
                (Some(from), Some(through))
                    if through.dtype.holds(from.dtype) || planted(Fault::NarrowingDropped) =>
                {
                    cx.to(x, *dtype).map(Some)
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[9]) { %1 = to(%0) {dtype: f64} : f64[9] %2 = to(%1) {dtype: f32} : f32[9] return %2 }",
            "graph(%0: f32[9]) { %1 = to(%0) {dtype: f64} : f64[9] %2 = to(%1) {dtype: i64} : i64[9] return %2 }",
            "graph(%0: bool[9]) { %1 = to(%0) {dtype: i64} : i64[9] %2 = to(%1) {dtype: f32} : f32[9] return %2 }",
            "graph(%0: f16[9]) { %1 = to(%0) {dtype: f32} : f32[9] %2 = to(%1) {dtype: f16} : f16[9] return %2 }",
            "graph(%0: i16[9]) { %1 = to(%0) {dtype: i32} : i32[9] %2 = to(%1) {dtype: u8} : u8[9] return %2 }",
            "graph(%0: u8[9]) { %1 = to(%0) {dtype: bf16} : bf16[9] %2 = to(%1) {dtype: i8} : i8[9] return %2 }",
        ],
    },
    Rule {
        name: "convert_full",
        law: "to(full(c), d) → full(c) of dtype d, if c exists in the first dtype",
        apply: |cx, call| {
            let (Op::To { dtype }, &[x]) = (call.op, call.args) else { return NO };
            let Some((Op::Full { shape, dtype: first, device }, args)) = cx.producer(x) else { return NO };
            match cx.constant(args[0]) {
                Some(c) if exists(c, first) => cx.full(args[0], shape, *dtype, device).map(Some),
                _ => NO,
            }
        },
        examples: &[
            "graph() { %0 = constant() {value: 1.0} : float %1 = full(%0) {shape: [3], dtype: f32, device: cpu} : f32[3] %2 = to(%1) {dtype: f64} : f64[3] return %2 }",
            "graph() { %0 = constant() {value: -2} : int %1 = full(%0) {shape: [3], dtype: i64, device: cpu} : i64[3] %2 = to(%1) {dtype: bool} : bool[3] return %2 }",
        ],
    },
];

/// Whether a number goes into a dtype and comes back the same.
fn exists(c: Scalar, dtype: DType) -> bool {
    let there = c.to_dtype(dtype).as_f64();
    // Integers beyond 2⁵³ and negative zero are not worth the care they would need.
    c.as_f64().abs() < 9e15 && there.to_bits() == c.as_f64().to_bits()
}
