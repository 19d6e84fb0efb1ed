//! Dead code: nodes whose results nobody reads are left out. Inputs stay, used or not.

use kiln_ir::{Graph, Value};
use smallvec::SmallVec;

/// The graph without nodes that no result and no write-back needs.
pub fn remove_dead(graph: &Graph) -> Graph {
    let needed = needed(graph);
    let (mut result, mut map) = Graph::with_inputs_of(graph);
    for node in graph.nodes.iter().filter(|node| node.outs.iter().any(|v| needed[v.index()])) {
        let args: SmallVec<[Value; 4]> = node.args.iter().map(|v| map[v.index()]).collect();
        let tys = node.outs.iter().map(|&v| graph.ty(v).clone());
        let outs = result.push(node.op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    result.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    result.writes = graph.writes.iter().map(|w| w.renumbered(&map)).collect();
    result
}

/// Whether every node is needed: then there is nothing to remove.
pub(crate) fn all_alive(graph: &Graph) -> bool {
    let needed = needed(graph);
    graph.nodes.iter().all(|node| node.outs.iter().any(|v| needed[v.index()]))
}

/// Per value: whether a result or a write-back needs it.
fn needed(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.value_count()];
    for value in graph.outputs.iter().chain(graph.writes.iter().map(|w| &w.value)) {
        needed[value.index()] = true;
    }
    for node in graph.nodes.iter().rev() {
        if node.outs.iter().any(|v| needed[v.index()]) {
            node.args.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    needed
}
