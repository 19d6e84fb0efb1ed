//! Windows of `slice_scatter`: what is put into them is a value of its own, and what is put into an input that is
//! written back goes right there.
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

use kiln_ir::{Def, Graph, Node, Op, TensorTy, Ty, Value};
use rustc_hash::FxHashMap;

use crate::Layout;
use crate::fuse::behind_reshapes;
use crate::lower::views::is_row_major;
use kiln_prims::forms::replace;

/// Gives every window that somebody else reads, too, a value of its own.
pub(crate) fn set_apart(graph: Cow<'_, Graph>) -> Cow<'_, Graph> {
    let mut uses = vec![0usize; graph.value_count()];
    let written = graph.writes.iter().map(|write| &write.value);
    for value in graph.nodes.iter().flat_map(|node| &node.args).chain(&graph.outputs).chain(written) {
        uses[value.index()] += 1;
    }
    let is_shared = |window: Value| uses[window.index()] > 1;
    let found = |node: &Node| match node.op {
        Op::SliceScatter { .. } if is_shared(node.args[1]) => graph.ty(node.args[1]).as_tensor(),
        _ => None,
    };
    let emit = |result: &mut Graph, node: &Node, args: &[Value], ty: &TensorTy| {
        let own =
            result.push(Op::To { dtype: ty.dtype }, &args[1..2], [Ty::Tensor(ty.clone())], false, node.loc)
                [0];
        let out = graph.ty(node.outs[0]).clone();
        result.push(node.op.clone(), &[args[0], own], [out], node.in_place, node.loc)[0]
    };
    let replaced = replace(&graph, found, emit);
    replaced.map_or(graph, Cow::Owned)
}

/// The index that puts rows where they belong, and the size it must be below; `None` if nothing is checked.
fn checked_by(graph: &Graph, value: Value) -> Option<(Value, usize)> {
    let node = graph.producer(value)?;
    match node.op {
        Op::IndexCopy { dim } => Some((node.args[1], *graph.ty(node.args[0]).as_tensor()?.shape.get(dim)?)),
        _ => None,
    }
}

/// The results of `slice_scatter` and `index_copy` that lie in an input from the start, with the number of the
/// write-back that says so. A cache that grows by a row a call is not copied for it.
///
/// ```text
/// %2 = slice_scatter(%0, %1) {dim: 0, start: 5, end: 6}
/// write %0 <- %2
/// ```
///
/// Nobody may need the old contents: the window is the input's only reader.
pub(crate) fn into_inputs(graph: &Graph, layouts: &[Layout]) -> FxHashMap<Value, usize> {
    let mut found = FxHashMap::default();
    for (w, write) in graph.writes.iter().enumerate().filter(|(_, write)| write.element.is_none()) {
        let (Def::Input(input), Some(node)) = (graph.def(write.target), graph.producer(write.value)) else {
            continue;
        };
        let Some(ty) = graph.ty(write.target).as_tensor() else { continue };
        let (x, fits) = match (&node.op, &node.args[..]) {
            (Op::SliceScatter { .. }, &[x, window]) => {
                (x, graph.ty(window).as_tensor().is_some_and(|part| part.shape.numel() < ty.shape.numel()))
            }
            (Op::IndexCopy { .. }, &[x, ..]) => (x, ty.shape.numel() > 0),
            _ => continue,
        };
        if x == write.target && fits && is_row_major(&ty.shape, &layouts[input as usize].strides) {
            found.insert(write.value, w);
        }
    }
    if found.is_empty() {
        return found;
    }
    let mut uses = vec![0usize; graph.value_count()];
    graph.nodes.iter().flat_map(|node| &node.args).for_each(|arg| uses[arg.index()] += 1);
    // Results leave in memory of their own, and so does what other inputs get.
    let mut leaves = vec![0usize; graph.value_count()];
    for &value in graph.outputs.iter().chain(graph.writes.iter().map(|write| &write.value)) {
        leaves[behind_reshapes(graph, value).index()] += 1;
    }
    found.retain(|value, w| {
        let target = graph.writes[*w].target.index();
        uses[target] == 1 && leaves[target] == 0 && leaves[value.index()] == 1
    });
    // An index that one of them was found to be in range with is in range for all, or none is changed in place: a
    // program that fails leaves no trace.
    let mut checked = found.keys().filter_map(|&value| checked_by(graph, value));
    if let Some(first) = checked.next()
        && checked.any(|other| other != first)
    {
        found.retain(|&value, _| checked_by(graph, value).is_none());
    }
    found
}
