//! Small matrix products as sums over loops.
//!
//! ```text
//! %2 = mm(%0, %1) : f32[4, 8]            %2 = expand(reshape(%0)) : f32[4, 8, 3]
//!                                        %3 = expand(reshape(permute(%1))) : f32[4, 8, 3]
//!                                        %4 = mul(%2, %3)
//!                                        %5 = sum(%4) {dims: [2]} : f32[4, 8]
//! ```
//!
//! Such a product needs no step of its own: what makes its operands and what goes on with its result is part of the
//! same kernel. The library's tiles are far quicker where there is something to multiply, so this is for sizes at
//! which a call costs more than the product.

use std::borrow::Cow;

use kiln_ir::{Graph, Loc, Node, Op, Shape, TensorTy, Ty, Value};

use super::replace;

/// Writes the products whose sizes are all at most `most` as sums.
pub fn inline(graph: Cow<'_, Graph>, most: usize) -> Cow<'_, Graph> {
    let found = |node: &Node| {
        let sizes = sizes(&graph, &node.op, &node.args, most)?;
        Some((graph.ty(node.outs[0]).as_tensor()?, sizes))
    };
    let emit = |result: &mut Graph, node: &Node, args: &[Value], (ty, sizes): (&TensorTy, Sizes)| {
        sum(result, ty, args, sizes, node.loc)
    };
    let replaced = replace(&graph, found, emit);
    replaced.map_or(graph, Cow::Owned)
}

/// Batch (if it is a product of batches); rows, columns and inner size.
type Sizes = (Option<usize>, [usize; 3]);

/// The sizes of a product of floats that is small enough.
fn sizes(graph: &Graph, op: &Op, args: &[Value], most: usize) -> Option<Sizes> {
    if !matches!(op, Op::Mm {} | Op::Bmm {}) {
        return None;
    }
    let (lhs, rhs) = (graph.ty(args[0]).as_tensor()?, graph.ty(args[1]).as_tensor()?);
    let batch = matches!(op, Op::Bmm {}).then(|| lhs.shape[0]);
    let [m, k] = [lhs.shape[lhs.shape.rank() - 2], lhs.shape[lhs.shape.rank() - 1]];
    let n = rhs.shape[rhs.shape.rank() - 1];
    let is_small = [m, n, k].iter().all(|size| (1..=most).contains(size));
    (lhs.dtype.is_float() && is_small).then_some((batch, [m, n, k]))
}

/// The product as a sum over its last dim.
fn sum(graph: &mut Graph, ty: &TensorTy, args: &[Value], (batch, [m, n, k]): Sizes, loc: Loc) -> Value {
    let shape = |sizes: &[usize]| -> Shape { batch.into_iter().chain(sizes.iter().copied()).collect() };
    let mut push = |op: Op, args: &[Value], shape: Shape| {
        graph.push(op, args, [Ty::Tensor(TensorTy { shape, ..ty.clone() })], false, loc)[0]
    };
    let whole = shape(&[m, n, k]);
    // Columns of the right one become rows.
    let lead = usize::from(batch.is_some());
    let dims = (0..lead).chain([lead + 1, lead]).collect();
    let turned = push(Op::Permute { dims }, &[args[1]], shape(&[n, k]));
    let [lhs, rhs] = [(args[0], shape(&[m, 1, k])), (turned, shape(&[1, n, k]))].map(|(operand, thin)| {
        let operand = push(Op::Reshape { shape: thin.clone() }, &[operand], thin);
        push(Op::Expand { shape: whole.clone() }, &[operand], whole.clone())
    });
    let products = push(Op::Mul {}, &[lhs, rhs], whole);
    let dims = std::iter::once(lead + 2).collect();
    push(Op::Sum { dims, keepdim: false }, &[products], shape(&[m, n]))
}
