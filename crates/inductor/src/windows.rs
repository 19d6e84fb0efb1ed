//! What is put into a window by `slice_scatter` is a value of its own.
//!
//! ```text
//! %2 = f(%1)                             %2 = f(%1)
//! %3 = slice_scatter(%2, %1)             %3 = to(%1)
//!                                        %4 = slice_scatter(%2, %3)
//! ```
//!
//! A kernel stores its result wherever it goes, windows among others, and a window is filled after what surrounds
//! it. Were `%1` the window itself, its kernel would have to run before `f`, which reads it, and after.

use std::borrow::Cow;

use kiln_ir::{Graph, Op, Ty, Value};

/// Gives every window that somebody else reads, too, a value of its own.
pub(crate) fn set_apart(graph: Cow<'_, Graph>) -> Cow<'_, Graph> {
    let mut uses = vec![0usize; graph.value_count()];
    let written = graph.writes.iter().map(|write| &write.value);
    for value in graph.nodes.iter().flat_map(|node| &node.args).chain(&graph.outputs).chain(written) {
        uses[value.index()] += 1;
    }
    let is_shared = |window: Value| uses[window.index()] > 1;
    let window = |op: &Op, args: &[Value]| match op {
        Op::SliceScatter { .. } if is_shared(args[1]) => Some(args[1]),
        _ => None,
    };
    if !graph.nodes.iter().any(|node| window(&node.op, &node.args).is_some()) {
        return graph;
    }
    let mut result = Graph::new();
    let mut map: Vec<Value> = vec![Value(u32::MAX); graph.value_count()];
    for &input in &graph.inputs {
        map[input.index()] = result.input(graph.ty(input).clone());
    }
    for node in &graph.nodes {
        let mut args: Vec<Value> = node.args.iter().map(|arg| map[arg.index()]).collect();
        if let (Some(window), Some(own)) = (window(&node.op, &node.args), args.get_mut(1))
            && let Ty::Tensor(ty) = graph.ty(window)
        {
            let op = Op::To { dtype: ty.dtype };
            *own = result.push(op, &[*own], [graph.ty(window).clone()], false, node.loc)[0];
        }
        let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
        let outs = result.push(node.op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    result.outputs = graph.outputs.iter().map(|output| map[output.index()]).collect();
    result.writes = graph.writes.iter().map(|write| write.renumbered(&map)).collect();
    Cow::Owned(result)
}
