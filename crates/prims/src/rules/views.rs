//! Rules of views, joins and filled tensors.

use kiln_ir::{Class, Dims, EmitExt, Fault, Op, Ty, planted, result_dtype};
use smallvec::SmallVec;

use super::NO;
use crate::Rule;

/// The rules.
pub const VIEWS: &[Rule] = &[
    Rule {
        name: "same_view",
        law: "reshape, expand, slice, permute that change nothing → x",
        apply: |cx, call| {
            let &[x] = call.args else { return NO };
            let same = match call.op {
                Op::Reshape { .. } | Op::Expand { .. } | Op::Slice { .. } => cx.ty_of(x) == call.out,
                Op::Permute { dims } => dims.iter().enumerate().all(|(i, &d)| i == d),
                _ => false,
            };
            Ok(same.then_some(x))
        },
        examples: &[
            "graph(%0: f32[2, 3]) { %1 = reshape(%0) {shape: [2, 3]} : f32[2, 3] return %1 }",
            "graph(%0: f32[2, 3]) { %1 = expand(%0) {shape: [2, 3]} : f32[2, 3] return %1 }",
            "graph(%0: f32[2, 3]) { %1 = permute(%0) {dims: [0, 1]} : f32[2, 3] return %1 }",
            "graph(%0: f32[2, 3]) { %1 = slice(%0) {dim: 1, start: 0, end: 3, step: 1} : f32[2, 3] return %1 }",
        ],
    },
    Rule {
        name: "reshape_reshape",
        law: "reshape(reshape(x)) → reshape(x)",
        apply: |cx, call| {
            let (Op::Reshape { shape }, &[middle]) = (call.op, call.args) else { return NO };
            match cx.through(middle, |op| matches!(op, Op::Reshape { .. })) {
                Some(x) => cx.reshape(x, shape.clone()).map(Some),
                None => NO,
            }
        },
        examples: &[
            "graph(%0: f32[2, 3]) { %1 = reshape(%0) {shape: [6]} : f32[6] %2 = reshape(%1) {shape: [3, 2]} : f32[3, 2] return %2 }",
        ],
    },
    Rule {
        name: "permute_permute",
        law: "permute(permute(x, p), q) → permute(x, q of p)",
        apply: |cx, call| {
            let (Op::Permute { dims: outer }, &[middle]) = (call.op, call.args) else { return NO };
            match cx.producer(middle) {
                Some((Op::Permute { dims: inner }, args)) => {
                    let dims: Dims = outer.iter().map(|&d| inner[d]).collect();
                    cx.permute(args[0], dims).map(Some)
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[2, 3, 4]) { %1 = permute(%0) {dims: [2, 0, 1]} : f32[4, 2, 3] %2 = permute(%1) {dims: [2, 0, 1]} : f32[3, 4, 2] return %2 }",
        ],
    },
    Rule {
        name: "expand_expand",
        law: "expand(expand(x)) → expand(x)",
        apply: |cx, call| {
            let (Op::Expand { shape }, &[middle]) = (call.op, call.args) else { return NO };
            match cx.through(middle, |op| matches!(op, Op::Expand { .. })) {
                Some(x) => cx.expand(x, shape.clone()).map(Some),
                None => NO,
            }
        },
        examples: &[
            "graph(%0: f32[3, 1]) { %1 = expand(%0) {shape: [3, 4]} : f32[3, 4] %2 = expand(%1) {shape: [2, 3, 4]} : f32[2, 3, 4] return %2 }",
        ],
    },
    Rule {
        name: "slice_slice",
        law: "a slice of a slice of the same dim → one slice",
        apply: |cx, call| {
            let (Op::Slice { dim, start, step, .. }, &[middle]) = (call.op, call.args) else { return NO };
            let Some((Op::Slice { dim: d, start: first, step: stride, .. }, args)) = cx.producer(middle)
            else {
                return NO;
            };
            let Some(len) = call.out.as_tensor().map(|t| t.shape[*dim]) else { return NO };
            if d != *dim {
                return NO;
            }
            let first = if planted(Fault::SliceOfSliceStart) { 0 } else { first };
            let (start, step) = (first + start * stride, step * stride);
            match len.checked_sub(1) {
                Some(last) => cx.slice(args[0], d, start, start + last * step + 1, step).map(Some),
                None => cx.slice(args[0], d, 0, 0, 1).map(Some),
            }
        },
        examples: &[
            "graph(%0: f32[19]) { %1 = slice(%0) {dim: 0, start: 1, end: 18, step: 3} : f32[6] %2 = slice(%1) {dim: 0, start: 1, end: 6, step: 2} : f32[3] return %2 }",
            "graph(%0: f32[9]) { %1 = slice(%0) {dim: 0, start: 1, end: 9, step: 3} : f32[3] %2 = slice(%1) {dim: 0, start: 3, end: 3, step: 1} : f32[0] return %2 }",
        ],
    },
    Rule {
        name: "scatter_all",
        law: "slice_scatter over the whole dim → src",
        apply: |cx, call| match (call.op, call.args) {
            (Op::SliceScatter { .. }, &[_, src]) if cx.ty_of(src) == call.out => Ok(Some(src)),
            _ => NO,
        },
        examples: &[
            "graph(%0: f32[4], %1: f32[4]) { %2 = slice_scatter(%0, %1) {dim: 0, start: 0, end: 4, step: 1} : f32[4] return %2 }",
        ],
    },
    Rule {
        name: "cat_of_one",
        law: "cat without its empty operands; cat(x) → x",
        apply: |cx, call| {
            let Op::Cat { dim } = call.op else { return NO };
            let Some(out) = call.out.as_tensor() else { return NO };
            let full = |ty: &Ty| ty.as_tensor().is_some_and(|t| t.shape[*dim] > 0);
            let rest: Vec<_> = call.args.iter().copied().filter(|&v| full(cx.ty_of(v))).collect();
            match rest[..] {
                [x] => Ok(Some(x)),
                [] => Ok(call.args.first().copied()),
                _ if rest.len() < call.args.len() => {
                    // An empty operand may still have decided the dtype.
                    let tys: Vec<Ty> = rest.iter().map(|&v| cx.ty_of(v).clone()).collect();
                    if result_dtype(&tys) == out.dtype { cx.cat(&rest, *dim).map(Some) } else { NO }
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: f32[4]) { %1 = cat(%0) {dim: 0} : f32[4] return %1 }",
            "graph(%0: f32[2, 3], %1: f32[2, 0], %2: f32[2, 1]) { %3 = cat(%0, %1, %2) {dim: 1} : f32[2, 4] return %3 }",
        ],
    },
    Rule {
        name: "largest_of_one",
        law: "amax over dims of size 1 → reshape",
        apply: |cx, call| {
            let (Op::Amax { dims, .. }, &[x]) = (call.op, call.args) else { return NO };
            match (cx.ty_of(x).as_tensor(), call.out.as_tensor()) {
                (Some(have), Some(out)) if dims.iter().all(|&d| have.shape[d] == 1) => {
                    cx.reshape(x, out.shape.clone()).map(Some)
                }
                _ => NO,
            }
        },
        examples: &["graph(%0: f32[4, 1]) { %1 = amax(%0) {dims: [1], keepdim: false} : f32[4] return %1 }"],
    },
    Rule {
        name: "view_of_full",
        law: "a view of full(v) → full(v) of the view's shape",
        apply: |cx, call| {
            let (Class::View, &[x], Ty::Tensor(out)) = (call.op.row().class, call.args, call.out) else {
                return NO;
            };
            match cx.producer(x) {
                Some((Op::Full { dtype, device, .. }, args)) if !matches!(call.op, Op::Detach {}) => {
                    cx.full(args[0], out.shape.clone(), dtype, device).map(Some)
                }
                _ => NO,
            }
        },
        examples: &[
            "graph(%0: float) { %1 = full(%0) {shape: [2, 1], dtype: f32, device: cpu} : f32[2, 1] %2 = expand(%1) {shape: [2, 5]} : f32[2, 5] return %2 }",
        ],
    },
    Rule {
        name: "full_operand",
        law: "f(x, full(v)) → f(x, v), if the op computes in the same dtype and shape",
        apply: |cx, call| {
            if call.op.row().class != Class::Pointwise
                || matches!(call.op, Op::To { .. } | Op::Copy {} | Op::Clone {})
            {
                return NO;
            }
            let first = usize::from(matches!(call.op, Op::Where {}));
            for (i, &arg) in call.args.iter().enumerate().skip(first) {
                let Some((Op::Full { dtype, .. }, number)) = cx.producer(arg) else { continue };
                let mut args: SmallVec<[_; 4]> = call.args.into();
                args[i] = number[0];
                let tys: Vec<Ty> = args.iter().map(|&v| cx.ty_of(v).clone()).collect();
                let computes_alike = tys[first..].iter().any(|ty| ty.as_tensor().is_some())
                    && result_dtype(&tys[first..]) == dtype
                    && call.args[first..]
                        .iter()
                        .all(|&v| cx.ty_of(v).as_tensor().is_none_or(|t| t.dtype == dtype));
                if computes_alike && call.op.infer(&tys).is_ok_and(|outs| outs[0] == *call.out) {
                    return cx.emit_one(call.op.clone(), &args).map(Some);
                }
            }
            NO
        },
        examples: &[
            "graph(%0: f32[4], %1: float) { %2 = full(%1) {shape: [4], dtype: f32, device: cpu} : f32[4] %3 = sub(%2, %0) : f32[4] return %3 }",
            "graph(%0: bool[4], %1: f32[4], %2: float) { %3 = full(%2) {shape: [4], dtype: f32, device: cpu} : f32[4] %4 = where(%0, %3, %1) : f32[4] return %4 }",
        ],
    },
];
