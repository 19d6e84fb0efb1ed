//! Products in f32 of operands that are halves, for what goes on with the sums: a bias is added, or a scale, before
//! they are rounded. Conversions come last, so that such a product reads the halves themselves. Of a batched product one
//! operand may be f32: those of attention multiply its weights.
//!
//! ```text
//! %2 = to(%0) {dtype: f32}               %2 = to(%0) {dtype: f32}
//! %3 = to(%1) {dtype: f32}               %3 = permute(%1) {dims: [1, 0]}
//! %4 = permute(%3) {dims: [1, 0]}        %4 = to(%3) {dtype: f32}
//! %5 = mm(%2, %4)                        %5 = mm(%2, %4)
//! ```

use std::borrow::Cow;

use kiln_ir::{DType, Def, Graph, Node, Op, TensorTy, Ty, Value};
use kiln_prims::forms::replace;

use crate::Layout;

/// What is converted to f32 behind views, and the views, the last one first.
fn behind_views(graph: &Graph, mut value: Value) -> Option<(Value, Vec<(Op, TensorTy)>)> {
    let mut views = Vec::new();
    loop {
        let node = graph.producer(value)?;
        let &x = node.args.first()?;
        let from = graph.ty(x).as_tensor()?;
        match &node.op {
            Op::To { dtype: DType::F32 } if from.dtype.is_float() && from.dtype.is_narrow() => {
                return Some((x, views));
            }
            Op::Permute { .. } | Op::Reshape { .. } | Op::Expand { .. } | Op::Slice { .. } => {
                views.push((node.op.clone(), graph.ty(value).as_tensor()?.clone()));
                value = x;
            }
            _ => return None,
        }
    }
}

/// The halves that operands of a product are, behind views: it reads them, and not a copy in f32.
fn found(graph: &Graph, node: &Node) -> [Option<(Value, Vec<(Op, TensorTy)>)>; 2] {
    let (Op::Mm {} | Op::Bmm {}, &[lhs, rhs]) = (&node.op, &node.args[..]) else { return [None, None] };
    let dtype = |value: Value| graph.tensor_of(value).dtype;
    match [lhs, rhs].map(|arg| behind_views(graph, arg)) {
        // One in f32 would be slower, and so would be what goes on with rows of it.
        [Some(lhs), Some(rhs)] if dtype(lhs.0) == dtype(rhs.0) => [Some(lhs), Some(rhs)],
        halves if matches!(node.op, Op::Bmm {}) => halves,
        _ => [None, None],
    }
}

/// The halves that the input of a convolution is, which widens a few planes of them at a time. All operands have to lie
/// in order: `layouts` are the inputs'.
fn planes(graph: &Graph, layouts: &[Layout], node: &Node) -> Option<Value> {
    let (Op::Convolution { groups, .. }, &[x, weight]) = (&node.op, &node.args[..]) else { return None };
    let (half, views) = behind_views(graph, x)?;
    let in_order = |value: Value| match graph.def(value) {
        Def::Input(number) => {
            layouts[number as usize].strides == graph.tensor_of(value).shape.contiguous_strides()
        }
        Def::Node { node, .. } => {
            let op = &graph.nodes[node as usize].op;
            op.computes() || matches!(op, Op::To { .. })
        }
    };
    let is_direct = kiln_plan::sums_planes(*groups, graph.tensor_of(x).shape[1]);
    (is_direct && views.is_empty() && in_order(half) && in_order(weight)).then_some(half)
}

/// The halves that operands of a product or a convolution are: it reads them, and not a copy in f32.
pub(crate) fn operands(graph: &Graph, layouts: &[Layout], node: &Node) -> [Option<Value>; 2] {
    if let Some(x) = planes(graph, layouts, node) {
        return [Some(x), None];
    }
    found(graph, node).map(|half| half.filter(|(_, views)| views.is_empty()).map(|(half, _)| half))
}

/// Puts the conversions of products' operands last.
pub(crate) fn widen_last(graph: Cow<'_, Graph>) -> Cow<'_, Graph> {
    let is_behind = |node: &Node| {
        let found = found(&graph, node);
        let views = found.iter().flatten().any(|(_, views)| !views.is_empty());
        views.then(|| found.map(|half| half.is_some()))
    };
    let emit = |result: &mut Graph, node: &Node, args: &[Value], halves: [bool; 2]| {
        let args = args.iter().zip(halves);
        let args: Vec<Value> = args
            .map(|(&arg, is_half)| if is_half { converted_last(result, arg, node) } else { arg })
            .collect();
        let out = graph.ty(node.outs[0]).clone();
        result.push(node.op.clone(), &args, [out], node.in_place, node.loc)[0]
    };
    let replaced = replace(&graph, is_behind, emit);
    replaced.map_or(graph, Cow::Owned)
}

fn converted_last(graph: &mut Graph, value: Value, node: &Node) -> Value {
    let Some((mut half, views)) = behind_views(graph, value) else { return value };
    if views.is_empty() {
        return value;
    }
    let dtype = graph.tensor_of(half).dtype;
    for (view, ty) in views.into_iter().rev() {
        let ty = Ty::Tensor(TensorTy { dtype, ..ty });
        half = graph.push(view, &[half], [ty], false, node.loc)[0];
    }
    let ty = graph.ty(value).clone();
    graph.push(Op::To { dtype: DType::F32 }, &[half], [ty], false, node.loc)[0]
}
