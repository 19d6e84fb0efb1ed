//! The partition of a joint graph into a forward and a backward that hand saved values over.
//!
//! [Note: what is saved]
//! Backward needs some values that the forward computes. Each is either saved or computed again from saved
//! ones. Which is cheapest is a minimum cut: a value costs its bytes (nothing if the program keeps it
//! anyway, as an input or a result), a cheap node (pointwise, view, creation) may run again, everything else
//! (products, reductions, random numbers) may not. The cut nearest to backward is taken, so that of equal
//! cuts the one with the least work done twice wins. A chain of cheap nodes beyond [`MOST_WORK`] is not run
//! again whatever it saves.

use kiln_ir::{Class, Def, Fault, Graph, Node, Op, Result, Stage, Ty, Value, Write, planted};

use crate::Joint;

/// The most work (one per arithmetic op, more for functions) that a value may take to compute again.
const MOST_WORK: u64 = 64;

/// A forward and a backward graph that together compute what the joint graph computes.
#[derive(Clone, Debug)]
pub struct Partition {
    /// From the program's inputs: its results, then the fresh saved values. Keeps the write-backs.
    pub forward: Graph,
    /// How many of the forward's results are the program's own.
    pub forward_outputs: usize,
    /// The parts of the backward, as in the joint graph.
    pub backward: Vec<BackwardPart>,
    /// What it costs.
    pub report: Report,
}

/// A part of the backward, as a graph.
#[derive(Clone, Debug)]
pub struct BackwardPart {
    /// From the saved values, then the tangents: the gradients.
    pub graph: Graph,
    /// Where each of its first inputs comes from.
    pub saved: Vec<Saved>,
    /// As in [`Part`](crate::Part): the results of this graph.
    pub grads: Vec<Option<usize>>,
}

/// A value that backward takes over.
#[derive(Clone, PartialEq, Debug)]
pub struct Saved {
    /// Where it comes from.
    pub what: SavedFrom,
    /// Its type.
    pub ty: Ty,
}

/// Where a saved value comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum SavedFrom {
    /// The program's input with this number, as it was passed.
    Input(usize),
    /// The program's result with this number.
    Output(usize),
    /// The forward's extra result with this number, counted from `forward_outputs`. An input that the
    /// program overwrites is saved this way too: the result is a copy of its old value.
    Fresh(usize),
}

/// What a partition costs.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Bytes of fresh saved values.
    pub bytes_saved: usize,
    /// Bytes of values computed a second time in backward.
    pub bytes_recomputed: usize,
    /// Nodes that run in forward and again in backward.
    pub nodes_recomputed: usize,
}

/// Splits a joint graph.
pub fn partition(joint: &Joint) -> Result<Partition> {
    let graph = &joint.graph;
    let facts = Facts::of(joint);
    let saved = facts.cut(graph);
    let outputs = &graph.outputs[..joint.forward_outputs];

    // Where each saved value comes from.
    let mut fresh = Vec::new();
    let mut sources = Vec::new();
    for &value in &saved {
        let written = graph.writes.iter().any(|w| w.target == value);
        let what = match graph.def(value) {
            Def::Input(i) if !written || planted(Fault::SavedAfterWrite) => SavedFrom::Input(i as usize),
            _ => match outputs.iter().position(|&o| o == value) {
                Some(i) if !written => SavedFrom::Output(i),
                _ => {
                    fresh.push(value);
                    SavedFrom::Fresh(fresh.len() - 1)
                }
            },
        };
        sources.push(Saved { what, ty: graph.ty(value).clone() });
    }

    let forward_results: Vec<Value> = outputs.iter().chain(&fresh).copied().collect();
    let forward_inputs = &graph.inputs[..joint.forward_inputs];
    let mut writes = &graph.writes[..];
    if planted(Fault::ForwardForgetsWrite) {
        writes = writes.split_last().map_or(writes, |(_, others)| others);
    }
    let forward = extract(graph, forward_inputs, &forward_results, writes);
    let saved: Vec<(Value, Saved)> = saved.into_iter().zip(sources).collect();
    let mut again = vec![false; graph.nodes.len()];
    let mut backward = Vec::with_capacity(joint.parts.len());
    for part in &joint.parts {
        let gradients: Vec<Value> = part.grads.iter().flatten().map(|&i| graph.outputs[i]).collect();
        let tangents = &joint.tangents()[part.tangents.clone()];
        let need = Need::of(graph, saved.iter().map(|(v, _)| v), &gradients);
        let saved: Vec<&(Value, Saved)> = saved.iter().filter(|(v, _)| need.values[v.index()]).collect();
        let inputs: Vec<Value> = saved.iter().map(|(v, _)| *v).chain(tangents.iter().copied()).collect();
        let extract = extract(graph, &inputs, &gradients, &[]);
        extract.taken.iter().zip(&mut again).for_each(|(taken, again)| *again |= taken);
        let mut next = 0..;
        backward.push(BackwardPart {
            graph: extract.graph,
            saved: saved.into_iter().map(|(_, saved)| saved.clone()).collect(),
            grads: part.grads.iter().map(|grad| grad.and_then(|_| next.next())).collect(),
        });
    }
    if cfg!(debug_assertions) {
        forward.graph.verify(Stage::Functional, "partition (forward)")?;
        for part in &backward {
            part.graph.verify(Stage::Functional, "partition (backward)")?;
        }
    }

    let twice: Vec<usize> = (0..graph.nodes.len())
        .filter(|&n| forward.taken[n] && again[n] && !matches!(graph.nodes[n].op, Op::Constant { .. }))
        .collect();
    let report = Report {
        bytes_saved: fresh.iter().map(|&v| bytes(graph.ty(v))).sum(),
        bytes_recomputed: twice.iter().flat_map(|&n| &graph.nodes[n].outs).map(|&v| bytes(graph.ty(v))).sum(),
        nodes_recomputed: twice.len(),
    };
    Ok(Partition { forward: forward.graph, forward_outputs: joint.forward_outputs, backward, report })
}

/// Splits a joint graph without any choice, for whoever looks for a mistake in [`partition`]: backward gets the program's
/// inputs, those that it changes as copies, and computes everything again.
pub fn partition_again(joint: &Joint) -> Result<Partition> {
    let graph = &joint.graph;
    let inputs = &graph.inputs[..joint.forward_inputs];
    let changed: Vec<Value> = inputs
        .iter()
        .copied()
        .filter(|input| graph.writes.iter().any(|write| write.target == *input))
        .collect();
    let saved = inputs.iter().enumerate().map(|(number, input)| {
        let fresh = changed.iter().position(|other| other == input);
        let what = fresh.map_or(SavedFrom::Input(number), SavedFrom::Fresh);
        Saved { what, ty: graph.ty(*input).clone() }
    });
    let saved: Vec<Saved> = saved.collect();
    let results: Vec<Value> =
        graph.outputs[..joint.forward_outputs].iter().chain(&changed).copied().collect();
    let forward = extract(graph, inputs, &results, &graph.writes).graph;
    let backward = joint.parts.iter().map(|part| {
        let gradients: Vec<Value> = part.grads.iter().flatten().map(|&i| graph.outputs[i]).collect();
        let tangents = &joint.tangents()[part.tangents.clone()];
        let inputs: Vec<Value> = inputs.iter().chain(tangents).copied().collect();
        let mut next = 0..;
        BackwardPart {
            graph: extract(graph, &inputs, &gradients, &[]).graph,
            saved: saved.clone(),
            grads: part.grads.iter().map(|grad| grad.and_then(|_| next.next())).collect(),
        }
    });
    let backward = backward.collect();
    Ok(Partition { forward, forward_outputs: joint.forward_outputs, backward, report: Report::default() })
}

/// What some results are computed from, given some values.
struct Need {
    given: Vec<bool>,
    values: Vec<bool>,
}

impl Need {
    fn of<'a>(
        graph: &Graph,
        given_values: impl IntoIterator<Item = &'a Value>,
        results: impl IntoIterator<Item = &'a Value>,
    ) -> Need {
        let mut given = vec![false; graph.value_count()];
        given_values.into_iter().for_each(|v| given[v.index()] = true);
        let mut values = vec![false; graph.value_count()];
        results.into_iter().for_each(|v| values[v.index()] = true);
        let mut need = Need { given, values };
        for node in graph.nodes.iter().rev() {
            if need.runs(node) {
                node.args.iter().for_each(|v| need.values[v.index()] = true);
            }
        }
        need
    }

    /// Whether a node has to run.
    fn runs(&self, node: &Node) -> bool {
        node.outs.iter().any(|v| self.values[v.index()] && !self.given[v.index()])
    }
}

struct Extract {
    graph: Graph,
    /// Which nodes of the joint graph it has.
    taken: Vec<bool>,
}

/// The part of a graph that computes `results` from `inputs`.
fn extract(graph: &Graph, inputs: &[Value], results: &[Value], writes: &[Write]) -> Extract {
    let need = Need::of(graph, inputs, results.iter().chain(writes.iter().map(|w| &w.value)));
    let taken: Vec<bool> = graph.nodes.iter().map(|node| need.runs(node)).collect();
    let mut result = Graph::new();
    let mut map = vec![Value(u32::MAX); graph.value_count()];
    for &input in inputs {
        map[input.index()] = result.input(graph.ty(input).clone());
    }
    for (_, node) in graph.nodes.iter().enumerate().filter(|(n, _)| taken[*n]) {
        let args: Vec<Value> = node.args.iter().map(|v| map[v.index()]).collect();
        let tys = node.outs.iter().map(|&v| graph.ty(v).clone());
        let outs = result.push(node.op.clone(), &args, tys, false, node.loc);
        for (from, to) in node.outs.iter().zip(outs).filter(|(from, _)| !need.given[from.index()]) {
            map[from.index()] = to;
        }
    }
    result.outputs = results.iter().map(|v| map[v.index()]).collect();
    result.writes = writes.iter().map(|w| w.renumbered(&map)).collect();
    Extract { graph: result, taken }
}

fn bytes(ty: &Ty) -> usize {
    match ty {
        Ty::Tensor(t) => t.bytes(),
        Ty::List(items) => items.runs().map(|(t, run)| t.bytes() * run.len()).sum(),
        Ty::Scalar(_) => 8,
    }
}

/// What the cut has to know of each value of the joint graph.
struct Facts {
    /// Depends on a tangent, so only backward can compute it.
    backward: Vec<bool>,
    /// Backward reads it (or returns it).
    wanted: Vec<bool>,
    /// It may be computed again.
    again: Vec<bool>,
    /// What it costs to save it.
    cost: Vec<u64>,
}

impl Facts {
    fn of(joint: &Joint) -> Facts {
        let graph = &joint.graph;
        let count = graph.value_count();
        let mut facts = Facts {
            backward: vec![false; count],
            wanted: vec![false; count],
            again: vec![false; count],
            cost: vec![0; count],
        };
        joint.tangents().iter().for_each(|v| facts.backward[v.index()] = true);
        let mut work = vec![0u64; count];
        for node in &graph.nodes {
            let late = node.args.iter().any(|v| facts.backward[v.index()]);
            let chain = node
                .args
                .iter()
                .filter(|v| facts.again[v.index()])
                .fold(work_of(&node.op), |sum, v| sum.saturating_add(work[v.index()]));
            for out in &node.outs {
                facts.backward[out.index()] = late;
                facts.again[out.index()] = is_cheap(node.op.row().class) && chain <= MOST_WORK;
                work[out.index()] = chain;
            }
        }
        let (outputs, gradients) = graph.outputs.split_at(joint.forward_outputs);
        let mut needed = vec![false; count];
        gradients.iter().for_each(|v| needed[v.index()] = true);
        for node in graph.nodes.iter().rev() {
            if node.outs.iter().any(|v| needed[v.index()] && facts.backward[v.index()]) {
                node.args.iter().for_each(|v| needed[v.index()] = true);
            }
        }
        let mut kept = vec![false; count];
        graph.inputs.iter().chain(outputs).for_each(|v| kept[v.index()] = true);
        graph.writes.iter().for_each(|w| kept[w.target.index()] = false);
        for i in 0..count {
            facts.wanted[i] = needed[i] && !facts.backward[i];
            facts.cost[i] = if kept[i] { 0 } else { bytes(graph.ty(Value(i as u32))) as u64 };
        }
        facts
    }

    /// The values to save, in the order of the joint graph.
    fn cut(&self, graph: &Graph) -> Vec<Value> {
        let count = graph.value_count();
        // Only what some wanted value is computed from takes part.
        let mut part: Vec<bool> = self.wanted.clone();
        for node in graph.nodes.iter().rev() {
            if node.outs.iter().any(|v| part[v.index()] && self.again[v.index()]) {
                node.args.iter().for_each(|v| part[v.index()] = true);
            }
        }
        // Each value is an edge from 2v to 2v + 1 whose capacity is its cost, scaled so that of equal
        // bytes fewer values win.
        let (source, sink) = (2 * count, 2 * count + 1);
        let mut flow = crate::flow::Flow::new(2 * count + 2);
        for v in (0..count).filter(|&v| part[v]) {
            flow.edge(2 * v, 2 * v + 1, self.cost[v].saturating_mul(1024).saturating_add(1));
            if self.wanted[v] {
                flow.edge(2 * v + 1, sink, crate::flow::UNLIMITED);
            }
            match graph.def(Value(v as u32)) {
                Def::Node { node, .. } if self.again[v] => {
                    for arg in &graph.nodes[node as usize].args {
                        flow.edge(2 * arg.index() + 1, 2 * v, crate::flow::UNLIMITED);
                    }
                }
                _ => flow.edge(source, 2 * v, crate::flow::UNLIMITED),
            }
        }
        let sink_side = flow.sink_side(source, sink);
        (0..count)
            .filter(|&v| part[v] && !sink_side[2 * v] && sink_side[2 * v + 1])
            .map(|v| Value(v as u32))
            .collect()
    }
}

/// Whether ops of this class are worth running a second time.
fn is_cheap(class: Class) -> bool {
    match class {
        Class::Pointwise | Class::View | Class::Create | Class::Constant => true,
        Class::Reduction
        | Class::Index
        | Class::Random
        | Class::Contraction
        | Class::Composite
        | Class::List
        | Class::Custom => false,
    }
}

fn work_of(op: &Op) -> u64 {
    match op {
        Op::Exp {}
        | Op::Log {}
        | Op::Tanh {}
        | Op::Erf {}
        | Op::Sigmoid {}
        | Op::Pow {}
        | Op::Gelu { .. } => 8,
        Op::Div {} | Op::Sqrt {} | Op::Rsqrt {} | Op::Reciprocal {} | Op::Addcdiv {} => 2,
        other if other.row().class == Class::Pointwise => 1,
        _ => 0,
    }
}
