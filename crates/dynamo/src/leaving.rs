//! What leaves a compiled function with gradients, and the parts of a backward that goes on outside of it.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_aot::trace::Variable;
use kiln_aot::{BackwardPart, Functional, Gradients, GraphInput, Home, SavedFrom, Survivor, Trace};
use kiln_inductor::Layout as InputLayout;
use kiln_ir::{Error, Strides, Ty, Value};

use crate::analysis::{Analysis, Far, TapeCall};
use crate::graph_cache::PartFacts;
use crate::pipeline::Front;
use crate::region::Site;
use crate::segment::{Backward, Code, Tape};
use crate::why::{NotCompiled, Result};

/// Results whose tape was used up, and what of it a pass would meet first.
pub(crate) type UsedUp = Vec<(Variable, Option<TapeCall>)>;

/// What a graph takes from the program and leaves to it.
#[derive(Clone)]
pub(crate) struct Edges {
    pub(crate) inputs: Vec<GraphInput>,
    pub(crate) survivors: Vec<Survivor>,
    pub(crate) used_up: UsedUp,
    pub(crate) gradients: Option<Gradients>,
}

impl From<Front> for Edges {
    fn from(front: Front) -> Edges {
        let Functional { inputs, survivors, .. } = front.functional;
        Edges { inputs, survivors, used_up: front.used_up, gradients: front.gradients }
    }
}

/// The results that leave with a tape that a `backward` inside used up, and those that leave with a good one.
pub(crate) fn leaving(
    site: &Site,
    trace: &Trace,
    tape: &Analysis,
    functional: &Functional,
) -> Result<(UsedUp, Option<Gradients>)> {
    let mut outputs = Vec::new();
    // Behind a custom function nothing is sure: a pass that comes may not get there. What is behind a pass that is
    // on the tape itself shows in the graph only.
    let is_used_up =
        |s: &&Survivor| (tape.twice && s.used_up) || tape.reach_as_far(&[s.variable], Far::Functions).freed;
    let (used_up, leaving): (Vec<&Survivor>, Vec<&Survivor>) =
        functional.survivors.iter().filter(|s| s.requires_grad).partition(is_used_up);
    let used_up = used_up.iter().map(|s| (s.variable, tape.first_used_up(s.variable))).collect();
    if leaving.iter().any(|s| tape.reach_as_far(&[s.variable], Far::Functions).overwritten) {
        return Err(NotCompiled::Overwritten);
    }
    if leaving.iter().any(|s| s.twice) {
        return Err(NotCompiled::OwnTape);
    }
    if let Some(reason) =
        leaving.iter().find_map(|s| tape.stays_inside(s.variable, &tape.reach(&[s.variable])))
    {
        site.split();
        return Err(NotCompiled::StaysInside(reason));
    }
    for survivor in leaving {
        let (home, layout) = &survivor.homes[0];
        match home {
            Home::Output(i) if functional.is_whole(*i, layout) && !outputs.iter().any(|(_, o)| o == i) => {
                outputs.push((survivor.variable, *i));
            }
            _ => return Err(NotCompiled::SharedView),
        }
    }
    if outputs.is_empty() {
        return Ok((used_up, None));
    }
    let wants = |v: &Variable| trace.variables[*v as usize].input.as_ref().is_some_and(|i| i.requires_grad);
    let inputs = functional.inputs.iter().enumerate().filter_map(|(i, input)| match input {
        GraphInput::Variable(v) => wants(v).then_some((i, *v)),
        GraphInput::Number(_) => None,
    });
    let inputs: Vec<(usize, Variable)> = inputs.collect();
    let graph = &functional.graph;
    let targets: FxHashSet<Value> = graph.writes.iter().map(|w| w.target).collect();
    if inputs.iter().any(|&(i, _)| targets.contains(&graph.inputs[i])) {
        return Err(NotCompiled::ChangedLeaf);
    }
    let outputs = in_parts(tape, functional, outputs)?;
    Ok((used_up, Some(Gradients { outputs, inputs })))
}

/// Results that leave with gradients, in parts: one that was computed from another comes in a later part.
fn in_parts(
    tape: &Analysis,
    functional: &Functional,
    mut outputs: Vec<(Variable, usize)>,
) -> Result<Vec<Vec<(Variable, usize)>>> {
    outputs.sort_by_key(|&(v, _)| tape.maker(v));
    let mut parts: Vec<Vec<(Variable, usize)>> = Vec::new();
    for &(variable, output) in &outputs {
        let calls = tape.reach(&[variable]).calls;
        let before = |&(v, _): &(Variable, usize)| {
            v != variable && tape.maker(v).is_some_and(|maker| calls.contains(&maker))
        };
        let part = parts.iter().rposition(|part| part.iter().any(before)).map_or(0, |part| part + 1);
        // Gradients flow over values of the graph: they must be met where the tape has them.
        let graph = &functional.graph;
        let met = functional.differentiated(graph.outputs[output]);
        let agrees = |(v, o): &(Variable, usize)| {
            *v == variable || before(&(*v, *o)) == met[graph.outputs[*o].index()]
        };
        if parts.iter().flatten().any(|other| !agrees(other)) {
            return Err(NotCompiled::SameValue);
        }
        match parts.get_mut(part) {
            Some(part) => part.push((variable, output)),
            None => parts.push(vec![(variable, output)]),
        }
    }
    Ok(parts)
}

/// Parts of a backward, each with what it takes and gives.
pub(crate) fn connect(
    tape: &Analysis,
    gradients: &Gradients,
    forward_outputs: usize,
    codes: Vec<(PartFacts, Code)>,
) -> Vec<Arc<Backward>> {
    // Gradients are for inputs, and for the results of parts that come before.
    let mut targets: Vec<Variable> = gradients.inputs.iter().map(|&(_, v)| v).collect();
    let mut ends: FxHashMap<usize, Variable> = FxHashMap::default();
    let mut parts = Vec::with_capacity(codes.len());
    for (outputs, (facts, code)) in gradients.outputs.iter().zip(codes) {
        let tape_of = |v: Variable| Tape::new(tape, tape.reach_as_far(&[v], Far::Makers(&ends)));
        let given = targets.iter().zip(facts.grads).filter_map(|(&v, result)| Some((v, result?)));
        parts.push(Arc::new(Backward {
            code: Arc::new(code),
            saved: facts.saved,
            partial: facts.partial,
            grads: given.collect(),
            tapes: outputs.iter().map(|&(v, _)| tape_of(v)).collect(),
            tangents: outputs.clone(),
            forward_outputs,
        }));
        for &(variable, _) in outputs {
            targets.push(variable);
            ends.extend(tape.maker(variable).map(|maker| (maker, variable)));
        }
    }
    parts
}

/// How the inputs of a graph lie.
pub(crate) fn layouts(trace: &Trace, inputs: &[GraphInput]) -> Result<Arc<[InputLayout]>> {
    let layout = |input: &GraphInput| match input {
        // A number lies nowhere.
        GraphInput::Number(_) => Ok(InputLayout { strides: Strides::new() }),
        GraphInput::Variable(v) => {
            let input = trace.variables[*v as usize].input.as_ref();
            let unknown = || Error::bug(format!("input {v} of a graph has no layout"));
            let input = input.ok_or_else(|| NotCompiled::pass("layouts", unknown()))?;
            Ok(InputLayout { strides: input.layout.strides.clone() })
        }
    };
    inputs.iter().map(layout).collect()
}

/// How the inputs of a part of a backward lie: saved inputs as those of the forward, everything else dense.
pub(crate) fn backward_layouts(forward: &[InputLayout], part: &BackwardPart) -> Result<Arc<[InputLayout]>> {
    let dense = |ty: &Ty| match ty {
        Ty::Tensor(ty) => Ok(InputLayout { strides: ty.shape.contiguous_strides() }),
        Ty::Scalar(_) => Ok(InputLayout { strides: Strides::new() }),
        Ty::List(_) => Err(NotCompiled::pass("layouts", Error::bug("a list is the input of a backward"))),
    };
    let saved = |i: usize| part.saved.get(i).map(|saved| saved.what);
    let inputs = part.graph.inputs.iter().enumerate();
    let layout = |(i, &value): (usize, &Value)| match saved(i) {
        Some(SavedFrom::Input(k)) => Ok(forward[k].clone()),
        _ => dense(part.graph.ty(value)),
    };
    inputs.map(layout).collect()
}
