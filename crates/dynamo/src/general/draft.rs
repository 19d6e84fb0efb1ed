//! Drafts: what the passes make of a recording, with plans whose numbers can be exchanged.

use std::sync::Arc;

use kiln_aot::{GraphInput, Survivor};
use kiln_inductor::{General, Numbers, Wipe};
use kiln_ir::{Device, Graph, Shape, Stage, Strides, Ty};
use kiln_prims::How;

use crate::analysis::{self, Analysis};
use crate::compiling;
use crate::device;
use crate::event::{Event, KeyArg, Made};
use crate::graph_cache::{Made as Lowered, Outline, PartFacts};
use crate::leaving::Edges;
use crate::pipeline::{self, Driver, Part};
use crate::region::Site;
use crate::trie::{LiveSet, ROOT, Trie};
use crate::why::{self, NotCompiled};

use super::shapes::with_slots;

/// A graph, lowered for any sizes.
#[derive(Clone)]
pub(super) struct Drawn {
    pub(super) outline: Outline,
    pub(super) general: General,
}

/// See the [module](self).
#[derive(Clone)]
pub(super) struct Draft {
    pub(super) edges: Edges,
    pub(super) made: Lowered<Drawn>,
}

/// What is left of a draft when numbers are not looked at.
#[derive(PartialEq)]
pub(super) struct DraftForm {
    inputs: Vec<GraphInput>,
    survivors: Vec<Survivor>,
    outlines: Vec<Outline>,
    plans: Vec<kiln_inductor::Form>,
    parts: Vec<PartFacts>,
    forward_outputs: usize,
}

impl Draft {
    /// The draft of the segment that ends at a node.
    pub(super) fn of(site: &Site, trie: &Trie, at: u32, live: &LiveSet) -> Result<Draft, String> {
        let (trace, tape) = (analysis::trace(trie, at), Analysis::of(trie, at));
        let mut drafting = Drafting { site };
        let front = pipeline::front(site, (&trace, &tape, &compiling::variables(live)), &mut drafting);
        let front = front.map_err(|why| why.to_string())?;
        let parts = front.gradients.as_ref().map_or(&[][..], |gradients| &gradients.outputs);
        if parts.iter().any(|outputs| outputs.len() > 1) {
            return Err(NotCompiled::SeveralResults.to_string());
        }
        let made = pipeline::back(&front, &mut drafting).map_err(|why| why.to_string())?;
        Ok(Draft { edges: front.into(), made })
    }

    /// Drops what only people read.
    pub(super) fn without_text(mut self) -> Draft {
        for drawn in self.made.codes_mut() {
            drawn.general = drawn.general.clone().without_report();
        }
        self
    }

    /// Calls for every number, in a fixed order.
    pub(super) fn each_number(&mut self, numbers: &mut dyn Numbers) {
        each_survivor(&mut self.edges.survivors, numbers);
        for drawn in self.made.codes_mut() {
            each_output(&mut drawn.outline, numbers);
            drawn.general.each_number(numbers);
        }
    }

    /// Works out what follows from the numbers.
    pub(super) fn settle(&mut self) {
        self.made.codes_mut().for_each(|drawn| drawn.general.settle());
    }

    pub(super) fn form(&self) -> DraftForm {
        let mut survivors = self.edges.survivors.clone();
        each_survivor(&mut survivors, &mut Wipe);
        let mut outlines: Vec<Outline> = self.made.codes().map(|drawn| drawn.outline.clone()).collect();
        outlines.iter_mut().for_each(|outline| each_output(outline, &mut Wipe));
        DraftForm {
            inputs: self.edges.inputs.clone(),
            survivors,
            outlines,
            plans: self.made.codes().map(|drawn| drawn.general.form()).collect(),
            parts: self.made.parts.iter().map(|(facts, _)| facts.clone()).collect(),
            forward_outputs: self.made.forward_outputs,
        }
    }
}

/// The driver that drafts.
struct Drafting<'a> {
    site: &'a Site,
}

impl Driver for Drafting<'_> {
    type Code = Drawn;

    fn pass<T>(&mut self, name: &'static str, pass: impl FnOnce() -> kiln_ir::Result<T>) -> why::Result<T> {
        pass().map_err(|error| NotCompiled::pass(name, error))
    }

    fn look(&mut self, _: &'static str, _: &Arc<Graph>, _: Stage) -> why::Result<()> {
        Ok(())
    }

    fn prims(&self) -> Option<How> {
        Some(compiling::prims(self.site))
    }

    fn lower(&mut self, part: &Part<'_>) -> why::Result<Drawn> {
        let failed = |error: String| NotCompiled::pass("inductor", error);
        match device::of(part.graph).map_err(failed)? {
            Device::Cpu => {}
            device => return Err(failed(format!("plans for {device} are for one size each"))),
        }
        // Every size has a plan of its own, and would keep things of its own.
        let options = compiling::lowering(&self.site.options.settings, &part.layouts, false, true);
        let general = General::lower(part.graph, &options).map_err(|error| failed(error.to_string()))?;
        Ok(Drawn { outline: Outline::of(part.graph).map_err(failed)?, general })
    }
}

fn each_size(shape: &mut Shape, strides: &mut Strides, numbers: &mut dyn Numbers) {
    shape.iter_mut().for_each(|size| *size = numbers.int(*size as i64) as usize);
    strides.iter_mut().for_each(|stride| *stride = numbers.int(*stride as i64) as isize);
}

fn each_survivor(survivors: &mut [Survivor], numbers: &mut dyn Numbers) {
    for (_, layout) in survivors.iter_mut().flat_map(|survivor| &mut survivor.homes) {
        each_size(&mut layout.shape, &mut layout.strides, numbers);
        layout.offset = numbers.int(layout.offset as i64) as usize;
    }
}

fn each_output(outline: &mut Outline, numbers: &mut dyn Numbers) {
    for output in &mut outline.outputs {
        each_size(&mut output.shape, &mut Strides::new(), numbers);
    }
}

/// The recording of a segment with other numbers in its slots: a trie of its own, and where in it the segment
/// ends. An error if the ops refuse such sizes.
pub(super) fn recording_with(trie: &Trie, at: u32, slots: &[i64]) -> Result<(Trie, u32), String> {
    let (scratch, mut end) = (Trie::new(), ROOT);
    let mut tys: Vec<Ty> = Vec::new();
    let mut slots = slots.iter().copied();
    for index in trie.path(at) {
        let mut event = with_slots(&trie.node(index).event, &mut |slot| slots.next().unwrap_or(slot.value));
        tys.extend(event.guards().iter().map(|guard| guard.info.ty.clone()));
        match &mut event {
            Event::Call(call) => {
                if let Made::Variable { ty, .. } = &mut call.made {
                    let of = |arg: &KeyArg| match arg {
                        KeyArg::Variable(v) => tys[*v as usize].clone(),
                        KeyArg::Number(kind, _) => Ty::Scalar(*kind),
                    };
                    let args: Vec<Ty> = call.args.iter().map(of).collect();
                    let made = call.op.infer(&args);
                    let made = made.map_err(|why| call.op.error(&args, why, call.loc).to_string())?;
                    *ty = made[0].clone();
                    tys.push(ty.clone());
                }
            }
            Event::Backward(event) => {
                for (input, target, _) in &event.targets {
                    if let kiln_aot::trace::GradTarget::New(_) = target {
                        tys.push(tys[*input as usize].clone());
                    }
                }
            }
            Event::Grad(event) => {
                for (input, found) in event.key.inputs.iter().zip(&event.found) {
                    if found.is_some() {
                        tys.push(tys[*input as usize].clone());
                    }
                }
            }
            Event::Start | Event::Break | Event::Mark(_) | Event::Apply(_) => {}
        }
        end = scratch.insert(end, event);
    }
    Ok((scratch, end))
}
