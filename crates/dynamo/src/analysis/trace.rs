//! A segment as `aot` reads it.

use std::sync::Arc;

use kiln_aot::trace::{Event as TraceEvent, GradTarget, Trace, TraceArg, Variable, VariableInfo};
use kiln_ir::{Fault, Op, planted};

use crate::event::{Event, KeyArg, Made, Mark, MarkEvent};
use crate::guard::Guard;
use crate::trie::Trie;

/// The trace of the segment that ends at `at`.
pub(crate) fn trace(trie: &Trie, at: u32) -> Trace {
    let mut trace = Trace::default();
    for index in trie.path(at) {
        match &*trie.node(index).event {
            Event::Start | Event::Break => {}
            Event::Call(call) => {
                add_inputs(&mut trace, &call.guards);
                let args = call
                    .args
                    .iter()
                    .enumerate()
                    .map(|(operand, arg)| match arg {
                        KeyArg::Variable(v) => TraceArg::Variable(*v),
                        KeyArg::Number(kind, class) => {
                            trace.numbers.push(*kind);
                            match call.op.number_of_class(operand, *class) {
                                Some(value) => TraceArg::Constant(value),
                                None => TraceArg::Number(trace.numbers.len() as u32 - 1),
                            }
                        }
                    })
                    .collect();
                let out = match &call.made {
                    Made::Changed { .. } => None,
                    Made::Variable { ty, .. } => {
                        trace.variables.push(Arc::new(VariableInfo { ty: ty.clone(), input: None }));
                        Some(trace.variables.len() as Variable - 1)
                    }
                };
                if planted(Fault::ChangeNotRecorded) && call.in_place && matches!(call.op, Op::Copy {}) {
                    continue;
                }
                trace.events.push(TraceEvent::Call {
                    op: call.op.clone(),
                    args,
                    out,
                    in_place: call.in_place,
                    grad_enabled: call.grad_enabled,
                    loc: call.loc,
                });
            }
            Event::Backward(event) => {
                add_inputs(&mut trace, &event.guards);
                for &(leaf, target, _) in &event.targets {
                    if let GradTarget::New(_) = target {
                        let ty = trace.variables[leaf as usize].ty.clone();
                        trace.variables.push(Arc::new(VariableInfo { ty, input: None }));
                    }
                }
                trace.events.push(TraceEvent::Backward {
                    outputs: event.outputs.to_vec(),
                    retain_graph: event.retain_graph,
                    targets: event.targets.iter().map(|&(leaf, target, _)| (leaf, target)).collect(),
                    loc: event.loc,
                });
            }
            Event::Grad(event) => {
                add_inputs(&mut trace, &event.guards);
                let results = event.results(trace.variables.len() as Variable);
                for (&input, _) in event.key.inputs.iter().zip(&results).filter(|(_, r)| r.is_some()) {
                    let ty = trace.variables[input as usize].ty.clone();
                    trace.variables.push(Arc::new(VariableInfo { ty, input: None }));
                }
                trace.events.push(TraceEvent::Grad {
                    outputs: event.key.outputs.to_vec(),
                    inputs: event.key.inputs.to_vec(),
                    results,
                    retain_graph: event.key.retain_graph,
                    create_graph: event.key.create_graph,
                    made: event.key.step.as_ref().is_some_and(|step| step.function.is_some()),
                    loc: event.loc,
                });
            }
            Event::Mark(MarkEvent { mark, variable, loc }) => trace.events.push(match mark {
                Mark::RequiresGrad(on) => {
                    TraceEvent::RequiresGrad { variable: *variable, on: *on, loc: *loc }
                }
                Mark::Retain | Mark::Watch => TraceEvent::Retain { variable: *variable, loc: *loc },
            }),
            Event::Apply(event) => {
                add_inputs(&mut trace, &event.guards);
                trace.events.push(TraceEvent::Apply { outputs: event.outputs.to_vec(), loc: event.loc });
            }
        }
    }
    trace
}

/// Inputs that arrive.
pub(crate) fn add_inputs(trace: &mut Trace, guards: &[Guard]) {
    trace.variables.reserve(guards.len() + 1);
    trace.variables.extend(guards.iter().map(|guard| guard.info.clone()));
}
