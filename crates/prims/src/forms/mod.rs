//! Other forms of prims, which loops like better: small products as sums, places of extremes as two reductions, adaptive
//! averages as plain ones. Which of them pay is for whoever lowers the graph to say.

mod averages;
mod extremes;
mod products;

pub use averages::as_plain;
pub use extremes::take_apart;
pub use products::inline;

use kiln_ir::{Graph, Node, Value};

/// A copy of a graph in which the first result of every node that is `found` is what `emit` makes of it, from the
/// node's operands in the copy. `None` if no node is.
pub fn replace<F>(
    graph: &Graph,
    found: impl Fn(&Node) -> Option<F>,
    mut emit: impl FnMut(&mut Graph, &Node, &[Value], F) -> Value,
) -> Option<Graph> {
    if graph.nodes.iter().all(|node| found(node).is_none()) {
        return None;
    }
    let (mut result, mut map) = Graph::with_inputs_of(graph);
    for node in &graph.nodes {
        let args: Vec<Value> = node.args.iter().map(|arg| map[arg.index()]).collect();
        if let Some(found) = found(node) {
            map[node.outs[0].index()] = emit(&mut result, node, &args, found);
            continue;
        }
        let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
        let outs = result.push(node.op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    result.outputs = graph.outputs.iter().map(|output| map[output.index()]).collect();
    result.writes = graph.writes.iter().map(|write| write.renumbered(&map)).collect();
    Some(result)
}
