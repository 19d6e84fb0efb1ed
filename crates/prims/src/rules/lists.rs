//! Rules of packing and unpacking lists.

use kiln_ir::{Fault, Op, planted};

use super::NO;
use crate::Rule;

/// The rules.
pub const LISTS: &[Rule] = &[
    Rule {
        name: "get_of_list",
        law: "list(a, b, …)[i] → its element",
        apply: |cx, call| {
            let (Op::ListGet { index }, &[list]) = (call.op, call.args) else { return NO };
            match cx.graph.producer(list) {
                Some(node) if matches!(node.op, Op::List {}) => {
                    let index = if planted(Fault::OtherElement) { index + 1 } else { *index };
                    Ok(node.args.get(index).copied())
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[3], %1: f64[2]) { %2 = list(%0, %1) : list(1 x f32[3], 1 x f64[2]) %3 = list_get(%2) {index: 1} : f64[2] return %3 }",
        ],
    },
    Rule {
        name: "list_of_gets",
        law: "list(l[0], l[1], …) → l",
        apply: |cx, call| {
            let (Op::List {}, args) = (call.op, call.args) else { return NO };
            let mut list = None;
            for (i, &arg) in args.iter().enumerate() {
                match cx.producer(arg) {
                    Some((Op::ListGet { index }, from))
                        if index == i && list.is_none_or(|l| l == from[0]) =>
                    {
                        list = Some(from[0]);
                    }
                    _ => return NO,
                }
            }
            Ok(list)
        },
        examples: &[
            "graph(%0: list(2 x f32[3])) { %1 = list_get(%0) {index: 0} : f32[3] %2 = list_get(%0) {index: 1} : f32[3] %3 = list(%1, %2) : list(2 x f32[3]) return %3 }",
        ],
    },
];
