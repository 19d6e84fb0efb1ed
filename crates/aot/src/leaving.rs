//! Gradients over the edge of a trace: which traces can be one graph, which leaves nothing reached, and what of a
//! functional graph a gradient meets.

use rustc_hash::FxHashSet;

use kiln_ir::{Grad, Layout, Loc, Op, Result, Value, carries_gradient};

use crate::trace::{Event, Trace, TraceArg, Variable};
use crate::{Functional, Joint, joint};

/// A change in place that no graph can hold: its target is an input, and gradients flow through the change.
#[derive(Clone, PartialEq, Debug)]
pub struct ChangedInput {
    /// The op.
    pub op: &'static str,
    /// The user's line.
    pub loc: Loc,
}

impl Trace {
    /// Whether the trace can become a graph.
    pub fn check(&self) -> std::result::Result<(), ChangedInput> {
        let mut requires: Vec<bool> = self
            .variables
            .iter()
            .map(|v| v.input.as_ref().is_some_and(|input| input.requires_grad))
            .collect();
        for event in &self.events {
            match event {
                Event::Grad { results, create_graph: true, .. } => {
                    results.iter().flatten().for_each(|&result| requires[result as usize] = true);
                }
                Event::RequiresGrad { variable, on, .. } => requires[*variable as usize] = *on,
                Event::Apply { outputs, .. } => {
                    outputs.iter().for_each(|&output| requires[output as usize] = true);
                }
                Event::Call { op, args, out, in_place, grad_enabled, loc } => {
                    let wants =
                        |arg: &TraceArg| matches!(arg, TraceArg::Variable(v) if requires[*v as usize]);
                    let flows = *grad_enabled && flows_through(op) && args.iter().any(wants);
                    let target = match (in_place, args.first()) {
                        (true, Some(TraceArg::Variable(target))) => Some(*target),
                        _ => *out,
                    };
                    let Some(target) = target else { continue };
                    let variable = &self.variables[target as usize];
                    let flows = flows && carries_gradient(&variable.ty);
                    if *in_place && flows && variable.input.is_some() {
                        return Err(ChangedInput { op: op.name(), loc: *loc });
                    }
                    requires[target as usize] |= flows;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Leaves that were used where gradients are recorded and that no pass reached, if there was one; `in_steps`: one
    /// was there that delivers its gradients bit by bit.
    pub fn without_gradient(&self, in_steps: bool) -> Vec<Variable> {
        let (mut used, mut reached) = (FxHashSet::default(), FxHashSet::default());
        let mut walked = in_steps;
        for event in &self.events {
            match event {
                Event::Call { op, args, grad_enabled: true, .. } if flows_through(op) => {
                    used.extend(args.iter().filter_map(|arg| match arg {
                        TraceArg::Variable(v) => Some(*v),
                        TraceArg::Number(_) | TraceArg::Constant(_) => None,
                    }));
                }
                Event::Backward { targets, .. } => {
                    walked = true;
                    reached.extend(targets.iter().map(|(leaf, _)| *leaf));
                }
                Event::Grad { inputs, .. } => reached.extend(inputs),
                _ => {}
            }
        }
        let waits = |v: &Variable| {
            let input = self.variables[*v as usize].input.as_ref();
            used.contains(v) && !reached.contains(v) && input.is_some_and(|i| i.requires_grad && i.leaf)
        };
        if walked { (0..self.variables.len() as Variable).filter(waits).collect() } else { Vec::new() }
    }
}

fn flows_through(op: &Op) -> bool {
    !matches!(op.row().grad, Grad::Zero)
}

impl Functional {
    /// Which values gradients of a value flow to.
    pub fn differentiated(&self, value: Value) -> Vec<bool> {
        let mut met = vec![false; self.graph.value_count()];
        met[value.index()] = true;
        for (index, node) in self.graph.nodes.iter().enumerate().rev() {
            let flows = self.is_recorded(index) && flows_through(&node.op);
            if flows && node.outs.iter().any(|out| met[out.index()]) {
                node.args.iter().for_each(|arg| met[arg.index()] |= carries_gradient(self.graph.ty(*arg)));
            }
        }
        met
    }

    /// Whether gradients flow through a node.
    pub fn is_recorded(&self, node: usize) -> bool {
        self.recorded.get(node).copied().unwrap_or(false)
    }

    /// Whether a layout covers an output as it is, not as a view.
    pub fn is_whole(&self, output: usize, layout: &Layout) -> bool {
        let shape = self.graph.ty(self.graph.outputs[output]).as_tensor().map(|t| &t.shape);
        layout.is_contiguous() && shape == Some(&layout.shape)
    }
}

/// Which results of a graph leave with gradients, and which inputs those reach.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Variable and output, by the part of the backward that begins at them: those that depend on others come later.
    pub outputs: Vec<Vec<(Variable, usize)>>,
    /// Inputs of the graph: position and variable.
    pub inputs: Vec<(usize, Variable)>,
}

impl Gradients {
    /// The graph with its backward.
    pub fn joint(&self, functional: &Functional) -> Result<Joint> {
        let outputs: Vec<Vec<usize>> =
            self.outputs.iter().map(|part| part.iter().map(|(_, output)| *output).collect()).collect();
        let outputs: Vec<&[usize]> = outputs.iter().map(Vec::as_slice).collect();
        let inputs: Vec<usize> = self.inputs.iter().map(|(input, _)| *input).collect();
        joint(&functional.graph, &outputs, &inputs, &|node| functional.is_recorded(node))
    }
}
