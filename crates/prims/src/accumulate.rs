//! Sums with what was scattered into zeros: scattered into the other summand.
//!
//! ```text
//! %3 = full(0) : f32[1000, 64]                      %3 = index_add(%0, %1, %2) {dim: 0}
//! %4 = index_add(%3, %1, %2) {dim: 0}        →
//! %5 = add(%0, %4)
//! ```
//!
//! A table that embeds tokens and gives their scores at the other end of the model has two gradients, of which one
//! is zero but for a few rows; this saves filling it and two passes over it. Elements that meet are added to the other
//! summand one by one, not to each other first, so the last bits may differ from eager's: with strict numerics it is
//! not done.

use kiln_ir::{Fault, Graph, Node, Op, Result, Scalar, Value, planted};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::remove_dead;

/// What is scattered, and where to.
struct Scatter {
    op: Op,
    index: Value,
    src: Value,
}

/// What a node adds to zeros; `None` if it is no such node.
fn onto_zeros(graph: &Graph, node: &Node) -> Option<Scatter> {
    match (&node.op, &node.args[..]) {
        (Op::IndexAdd { .. } | Op::ScatterAdd { .. }, &[base, index, src]) => {
            let full = graph.producer(base).filter(|node| matches!(node.op, Op::Full { .. }))?;
            let is_zero = match graph.producer(full.args[0])?.op {
                Op::Constant { value: Scalar::Float(number) } => number == 0.0,
                Op::Constant { value: Scalar::Int(number) } => number == 0,
                _ => false,
            };
            let op = || match node.op {
                Op::IndexAdd { dim } if planted(Fault::SummandReplaced) => Op::IndexCopy { dim },
                ref op => op.clone(),
            };
            is_zero.then(|| Scatter { op: op(), index, src })
        }
        (&Op::GatherBackward { dim, .. }, &[src, index]) => {
            // With one index a line the gradient is a choice for each element, which is added without being stored.
            let count = *graph.ty(index).as_tensor()?.shape.get(dim)?;
            (count > 1).then_some(Scatter { op: Op::ScatterAdd { dim }, index, src })
        }
        _ => None,
    }
}

/// Scatters into the other summand wherever the scattered one is needed for nothing else.
pub(crate) fn accumulate(graph: &Graph) -> Result<Graph> {
    let uses = graph.use_counts();
    let mut found: FxHashMap<Value, (Value, Scatter)> = FxHashMap::default();
    for node in graph.nodes.iter().filter(|node| matches!(node.op, Op::Add {})) {
        let [left, right] = node.args[..] else { continue };
        for (scattered, other) in [(right, left), (left, right)] {
            let scatter = graph.producer(scattered).and_then(|node| onto_zeros(graph, node));
            if let Some(scatter) = scatter.filter(|_| uses[scattered.index()] == 1)
                && graph.ty(other) == graph.ty(node.outs[0])
                && graph.ty(scattered) == graph.ty(other)
            {
                found.insert(node.outs[0], (other, scatter));
                break;
            }
        }
    }
    if found.is_empty() {
        return Ok(graph.clone());
    }
    let (mut result, mut map) = Graph::with_inputs_of(graph);
    for node in &graph.nodes {
        let (op, args): (&Op, SmallVec<[Value; 4]>) = match found.get(&node.outs[0]) {
            Some((other, Scatter { op, index, src })) => (op, SmallVec::from_slice(&[*other, *index, *src])),
            None => (&node.op, node.args.iter().copied().collect()),
        };
        let args: SmallVec<[Value; 4]> = args.iter().map(|value| map[value.index()]).collect();
        let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
        let outs = result.push(op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    result.outputs = graph.outputs.iter().map(|value| map[value.index()]).collect();
    result.writes = graph.writes.iter().map(|write| write.renumbered(&map)).collect();
    Ok(remove_dead(&result))
}
