//! Simplification: one walk over the graph with the rewrite rules and common subexpressions, then dead code.
//!
//! ```text
//! %1 = neg(%0) : f32[4]
//! %2 = neg(%1) : f32[4]
//! %3 = exp(%2) : f32[4]
//! %4 = exp(%0) : f32[4]
//! return %3, %4
//! ```
//! becomes
//! ```text
//! %1 = exp(%0) : f32[4]
//! return %1, %1
//! ```
//!
//! Results may come to be the same value, or an input: whoever runs the graph gives each its own memory.

use kiln_ir::{Emit, Graph, Node, Op, Result, Value, Write};
use smallvec::SmallVec;

use crate::dead::all_alive;
use crate::rules;
use crate::{Rewriter, Rule, remove_dead};

/// Simplifies a functional graph (of any level) by all rules.
pub fn simplify(graph: &Graph) -> Result<Graph> {
    Ok(simplify_by(graph, rules::ALL)?.0)
}

/// Simplifies by some rules; also returns the names of those that fired, in order.
pub fn simplify_by(graph: &Graph, rules: &[&[Rule]]) -> Result<(Graph, Vec<&'static str>)> {
    simplify_without(graph, rules, "")
}

/// [`simplify_by`], without the rule of this name.
pub(crate) fn simplify_without(
    graph: &Graph,
    rules: &[&[Rule]],
    without: &'static str,
) -> Result<(Graph, Vec<&'static str>)> {
    let mut rewriter = Rewriter::new(rules);
    rewriter.without = without;
    let (room, mut map) = Graph::with_inputs_of(graph);
    rewriter.graph = room;
    for node in &graph.nodes {
        rewriter.graph.loc = node.loc;
        let args: SmallVec<[Value; 4]> = node.args.iter().map(|v| map[v.index()]).collect();
        let outs = rewriter.emit(node.op.clone(), &args)?;
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    let fired = rewriter.fired().to_vec();
    let mut result = rewriter.graph;
    result.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    result.writes = graph
        .writes
        .iter()
        .map(|w| unpacked(&result, w.renumbered(&map)))
        // An input that keeps its value is not written.
        .filter(|w| w.target != w.value)
        .collect();
    // Built node by node, the graph is in the order of its text already.
    let result = if all_alive(&result) { result } else { remove_dead(&result) };
    Ok((result, fired))
}

/// A write-back of an element of a list that was just packed is one of that element.
fn unpacked(graph: &Graph, write: Write) -> Write {
    match (write.element, graph.producer(write.value)) {
        (Some(i), Some(Node { op: Op::List {}, args, .. })) => Write::whole(write.target, args[i as usize]),
        _ => write,
    }
}
