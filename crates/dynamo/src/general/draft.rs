//! Drafts: what the passes make of a recording, with plans whose numbers can be exchanged.

use kiln_aot::{GraphInput, Joint, Partition, Survivor};
use kiln_inductor::{General, Layout as InputLayout, Numbers, Options, Wipe};
use kiln_ir::{Graph, Shape, Strides, Ty};
use kiln_runtime::threads;

use crate::analysis::{self, Analysis};
use crate::graph_cache::{Outline, PartFacts};
use crate::kernels;
use crate::pipeline::{self, Gradients, UsedUp};
use crate::region::Site;
use crate::trie::{Event, KeyArg, LiveSet, Made, ROOT, Trie};

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
    pub(super) inputs: Vec<GraphInput>,
    pub(super) survivors: Vec<Survivor>,
    pub(super) used_up: UsedUp,
    pub(super) gradients: Option<Gradients>,
    pub(super) forward: Drawn,
    pub(super) forward_outputs: usize,
    pub(super) parts: Vec<(PartFacts, Drawn)>,
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
        pipeline::compilable(&trace)?;
        let functional = kiln_aot::functionalise(&trace, &pipeline::variables(live)).map_err(text)?;
        let (used_up, gradients) = pipeline::leaving(site, &trace, &tape, &functional)?;
        let layouts = pipeline::layouts(&trace, &functional.inputs);
        let prims = |graph: &Graph| kiln_prims::lower_rounding(graph, pipeline::rounding(site)).map_err(text);
        let inputs = functional.inputs.clone();
        let Some(gradients) = gradients else {
            let forward = Drawn::of(site, &prims(&functional.graph)?, &layouts)?;
            return Ok(Draft {
                inputs,
                forward_outputs: functional.graph.outputs.len(),
                survivors: functional.survivors,
                used_up,
                gradients: None,
                forward,
                parts: Vec::new(),
            });
        };
        let joint = gradients.joint(&functional).map_err(text)?;
        let joint = Joint { graph: prims(&joint.graph)?, ..joint };
        let Partition { forward: graph, forward_outputs, backward, report: _ } =
            kiln_aot::partition(&joint).map_err(text)?;
        let forward = Drawn::of(site, &graph, &layouts)?;
        let mut parts = Vec::with_capacity(backward.len());
        for (outputs, part) in gradients.outputs.iter().zip(backward) {
            if outputs.len() > 1 {
                return Err("several results leave with gradients".into());
            }
            let drawn = Drawn::of(site, &part.graph, &pipeline::backward_layouts(&layouts, &part))?;
            let saved = part.saved.iter().map(|saved| saved.what).zip(pipeline::lines(&part.graph));
            parts.push((PartFacts { saved: saved.collect(), grads: part.grads, partial: None }, drawn));
        }
        let survivors = functional.survivors;
        let gradients = Some(gradients);
        Ok(Draft { inputs, survivors, used_up, gradients, forward, forward_outputs, parts })
    }

    pub(super) fn drawn(&self) -> impl Iterator<Item = &Drawn> {
        [&self.forward].into_iter().chain(self.parts.iter().map(|(_, drawn)| drawn))
    }

    fn drawn_mut(&mut self) -> impl Iterator<Item = &mut Drawn> {
        [&mut self.forward].into_iter().chain(self.parts.iter_mut().map(|(_, drawn)| drawn))
    }

    /// Drops what only people read.
    pub(super) fn without_text(mut self) -> Draft {
        for drawn in self.drawn_mut() {
            drawn.general = drawn.general.clone().without_text();
        }
        self
    }

    /// Calls for every number, in a fixed order.
    pub(super) fn each_number(&mut self, numbers: &mut dyn Numbers) {
        each_survivor(&mut self.survivors, numbers);
        for drawn in self.drawn_mut() {
            each_output(&mut drawn.outline, numbers);
            drawn.general.each_number(numbers);
        }
    }

    /// Works out what follows from the numbers.
    pub(super) fn settle(&mut self) {
        self.drawn_mut().for_each(|drawn| drawn.general.settle());
    }

    pub(super) fn form(&self) -> DraftForm {
        let mut survivors = self.survivors.clone();
        each_survivor(&mut survivors, &mut Wipe);
        let mut outlines: Vec<Outline> = self.drawn().map(|drawn| drawn.outline.clone()).collect();
        outlines.iter_mut().for_each(|outline| each_output(outline, &mut Wipe));
        DraftForm {
            inputs: self.inputs.clone(),
            survivors,
            outlines,
            plans: self.drawn().map(|drawn| drawn.general.form()).collect(),
            parts: self.parts.iter().map(|(facts, _)| facts.clone()).collect(),
            forward_outputs: self.forward_outputs,
        }
    }
}

impl Drawn {
    fn of(site: &Site, graph: &Graph, layouts: &std::sync::Arc<[InputLayout]>) -> Result<Drawn, String> {
        let settings = &site.options.settings;
        let options = Options {
            input_layouts: layouts.clone(),
            isa: kernels::c_isa(settings.build().isa),
            threads: threads::count(),
            tuning: settings.tuning(),
            // Every size has a plan of its own, and would keep things of its own.
            constants: false,
            general: true,
        };
        let general = General::lower(graph, &options).map_err(|error| format!("inductor: {error}"))?;
        Ok(Drawn { outline: Outline::of(graph)?, general })
    }
}

fn text(error: kiln_ir::Error) -> String {
    error.to_string()
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
