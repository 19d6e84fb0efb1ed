//! The joint graph: a functional graph and its gradients in one.

use std::ops::Range;

use kiln_ir::{Def, Fault, Grad, Graph, Result, Value, decomposition, differentiate, planted};
use smallvec::SmallVec;

/// The graph with those ops expanded whose gradient is that of their decomposition, so that forward and
/// backward share what it computes. Also returns, for each node, the node of `graph` it comes from.
pub fn expand_decomposed(graph: &Graph) -> Result<(Graph, Vec<usize>)> {
    let mut result = Graph::new();
    let map = copy_inputs(graph, &mut result);
    let origins = copy_nodes(graph, &mut result, map)?;
    Ok((result, origins))
}

fn copy_inputs(graph: &Graph, result: &mut Graph) -> Vec<Value> {
    let mut map = vec![Value(u32::MAX); graph.value_count()];
    for &input in &graph.inputs {
        map[input.index()] = result.input(graph.ty(input).clone());
    }
    map
}

/// Copies nodes, results and write-backs; returns the origin of each new node.
fn copy_nodes(graph: &Graph, result: &mut Graph, mut map: Vec<Value>) -> Result<Vec<usize>> {
    let mut origins = Vec::with_capacity(graph.nodes.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        let args: SmallVec<[Value; 4]> = node.args.iter().map(|v| map[v.index()]).collect();
        result.loc = node.loc;
        let outs = match node.op.row().grad {
            Grad::Decompose => decomposition(result, &node.op, &args)?,
            _ => {
                let tys = node.outs.iter().map(|&v| graph.ty(v).clone());
                result.push(node.op.clone(), &args, tys, node.in_place, node.loc)
            }
        };
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
        origins.resize(result.nodes.len(), index);
    }
    result.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    result.writes = graph.writes.iter().map(|w| w.renumbered(&map)).collect();
    Ok(origins)
}

/// One graph that computes the forward results and, from gradients of some of them, the gradients of some
/// inputs. Its inputs are the forward's, then the tangents; its results are the forward's, then the
/// gradients.
///
/// [Note: parts of a backward]
/// A result that another result was computed from is a place where gradients are met: somebody outside may ask
/// for its gradient, hook it, or change it on its way. So the backward of the later result ends there, and what
/// arrives goes on, together with what comes from outside, through the backward of the earlier one. Results that
/// don't depend on each other share a part.
#[derive(Clone, Debug)]
pub struct Joint {
    /// The graph.
    pub graph: Graph,
    /// How many of the inputs are the forward's; the rest are tangents.
    pub forward_inputs: usize,
    /// How many of the results are the forward's; the rest are gradients.
    pub forward_outputs: usize,
    /// The parts of the backward, from the inputs on.
    pub parts: Vec<Part>,
}

/// A part of a backward: from gradients of some results, those of inputs and of results of earlier parts.
#[derive(Clone, Debug)]
pub struct Part {
    /// Which tangents it takes.
    pub tangents: Range<usize>,
    /// For each input whose gradient was asked for, then for each result of the parts before: the result that
    /// holds what this part gives, if it gives any.
    pub grads: Vec<Option<usize>>,
}

impl Joint {
    /// The inputs that take the gradients of results.
    pub fn tangents(&self) -> &[Value] {
        &self.graph.inputs[self.forward_inputs..]
    }

    /// The joint graph after a pass that keeps inputs and results in place (all passes do).
    pub fn map(self, pass: impl FnOnce(&Graph) -> Result<Graph>) -> Result<Joint> {
        Ok(Joint { graph: pass(&self.graph)?, ..self })
    }
}

/// Builds the joint graph of a functional graph: gradients arrive for the results `outputs_with_grad`, part by
/// part, and leave for the inputs `inputs_with_grad` (all by position). A part's results may depend on those of
/// earlier parts only. See [`differentiate`] for `recorded`.
pub fn joint(
    graph: &Graph,
    outputs_with_grad: &[&[usize]],
    inputs_with_grad: &[usize],
    recorded: &dyn Fn(usize) -> bool,
) -> Result<Joint> {
    let mut result = Graph::new();
    let map = copy_inputs(graph, &mut result);
    let forward_inputs = result.inputs.len();
    let tangents: Vec<Value> = outputs_with_grad
        .iter()
        .flat_map(|part| part.iter())
        .map(|&i| result.input(graph.ty(graph.outputs[i]).clone()))
        .collect();
    let origins = copy_nodes(graph, &mut result, map)?;
    let forward_outputs = result.outputs.len();
    let mut wanted: Vec<Value> = inputs_with_grad.iter().map(|&i| result.inputs[i]).collect();
    let mut ends = vec![false; origins.len()];
    let mut parts = Vec::with_capacity(outputs_with_grad.len());
    let mut first = 0;
    for outputs in outputs_with_grad {
        let values: Vec<Value> = outputs.iter().map(|&i| result.outputs[i]).collect();
        let taken = first..first + values.len();
        first = taken.end;
        let mut seeds: Vec<(Value, Value)> =
            values.iter().copied().zip(tangents[taken.clone()].iter().copied()).collect();
        if planted(Fault::TangentsSwapped)
            && let [(one, first), (other, second), ..] = &mut seeds[..]
            && result.ty(*one) == result.ty(*other)
        {
            std::mem::swap(first, second);
        }
        // What earlier parts emitted is no part of the forward.
        let forward = |node: usize| {
            node < origins.len() && !ends[node] && (recorded(origins[node]) || planted(Fault::ThroughNoGrad))
        };
        let found = differentiate(&mut result, &seeds, &wanted, &forward)?;
        let grads = found.into_iter().map(|grad| {
            result.outputs.push(grad?);
            Some(result.outputs.len() - 1)
        });
        parts.push(Part { tangents: taken, grads: grads.collect() });
        for value in values {
            if let Def::Node { node, .. } = result.def(value) {
                ends[node as usize] = true;
            }
            wanted.push(value);
        }
    }
    if cfg!(debug_assertions) {
        result.verify(kiln_ir::Stage::Functional, "joint")?;
    }
    Ok(Joint { graph: result, forward_inputs, forward_outputs, parts })
}
