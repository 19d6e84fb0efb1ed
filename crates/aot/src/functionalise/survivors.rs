//! What outlives a trace: which of its variables, and where their memory comes from.

use std::sync::Arc;

use kiln_ir::{Fault, Layout, Loc, Op, Result, Value, Write, planted};

use super::{Functional, State, Stored, Translator};
use crate::trace::Variable;

/// Where a live variable's memory comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Home {
    /// This output of the graph.
    Output(usize),
    /// The memory of this input variable.
    Input(Variable),
}

/// A variable that outlives the trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Survivor {
    /// The variable.
    pub variable: Variable,
    /// Its memory; for a list, that of each element.
    pub homes: Vec<(Home, Layout)>,
    /// Whether gradients flow through it.
    pub requires_grad: bool,
    /// Whether a pass inside used up some of its tape.
    pub used_up: bool,
    /// Whether gradients reach it through a pass that is on the tape itself.
    pub twice: bool,
    /// What it is a view of.
    pub view: View,
}

/// What a variable is a view of, for changes in place that come later.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum View {
    /// Of nothing, or of something that it was cut off from.
    Itself,
    /// Of this variable.
    Of(Variable),
    /// Of something, but it was made where no gradients are recorded.
    Unrecorded,
}

impl Translator<'_> {
    pub(super) fn finish(mut self, live: &[Variable]) -> Result<Functional> {
        self.recording = false;
        self.graph.loc = Loc::UNKNOWN;
        let mut survivors = Vec::new();
        let mut outputs: Vec<Option<usize>> = vec![None; self.bases.len()];
        for &variable in live {
            let survivor = match self.states[variable as usize].clone() {
                State::Unset => continue,
                State::Packed { .. } => continue, // its elements are variables of their own
                State::Made(list) => {
                    let items = self.graph.ty(list).as_list().cloned().unwrap_or_default();
                    let mut homes = Vec::new();
                    for (index, ty) in items.iter().enumerate() {
                        let value = self.emit(Op::ListGet { index }, &[list])?;
                        homes.push((
                            Home::Output(self.graph.outputs.len()),
                            Layout::contiguous(ty.shape.clone()),
                        ));
                        self.graph.outputs.push(value);
                    }
                    Survivor {
                        variable,
                        homes,
                        requires_grad: false,
                        used_up: false,
                        twice: false,
                        view: View::Itself,
                    }
                }
                State::Tensor { base, layout, chain, .. } => {
                    let value = self.read(variable)?;
                    // A leaf has no tape.
                    let requires_grad = self.requires[value.index()] && !self.is_leaf(variable);
                    let (used_up, twice) = self.passed(value);
                    let shares = |v: &&Variable| matches!(self.states[**v as usize], State::Tensor { base: b, .. } if b == base);
                    if requires_grad
                        && !chain.is_empty()
                        && self.bases[base].input.is_none()
                        && !layout.overlaps_itself()
                        && live.iter().filter(shares).count() == 1
                    {
                        // Gradients arrive for the view, and nobody else sees its base: it gets memory of its own.
                        let home = Home::Output(self.graph.outputs.len());
                        self.graph.outputs.push(value);
                        let layout = Layout::contiguous(layout.shape.clone());
                        let homes = vec![(home, layout)];
                        let view = View::Itself;
                        survivors.push(Survivor { variable, homes, requires_grad, used_up, twice, view });
                        continue;
                    }
                    outputs.resize(self.bases.len(), None);
                    let home = match (self.bases[base].input, outputs[base]) {
                        (Some((input, _)), _) => Home::Input(input),
                        (None, Some(output)) => Home::Output(output),
                        (None, None) => {
                            let value = self.base_value(base)?;
                            outputs[base] = Some(self.graph.outputs.len());
                            self.graph.outputs.push(value);
                            Home::Output(self.graph.outputs.len() - 1)
                        }
                    };
                    let homes = vec![(home, Arc::unwrap_or_clone(layout))];
                    let view = self.view(variable);
                    Survivor { variable, homes, requires_grad, used_up, twice, view }
                }
            };
            survivors.push(survivor);
        }
        for base in 0..self.bases.len() {
            if let (Some((_, target)), true) = (self.bases[base].input, self.bases[base].written) {
                match self.bases[base].stored {
                    Stored::Value(value) if value == target => {}
                    Stored::Value(value) if planted(Fault::WriteBackLost) && self.is_window(value) => {}
                    Stored::Value(value) => self.graph.writes.push(Write::whole(target, value)),
                    Stored::Element(value, i) => {
                        self.graph.writes.push(Write { target, value, element: Some(i as u32) });
                    }
                }
            }
        }
        self.note();
        Ok(Functional {
            graph: Arc::new(self.graph.into_canonical()),
            inputs: self.inputs,
            survivors,
            recorded: self.recorded,
        })
    }

    /// Whether a value is another with a window filled.
    fn is_window(&self, value: Value) -> bool {
        self.graph.producer(value).is_some_and(|node| matches!(node.op, Op::SliceScatter { .. }))
    }

    /// What a variable is a view of.
    fn view(&self, variable: Variable) -> View {
        let mut at = variable;
        while let State::Tensor { chain, source, recorded, .. } = &self.states[at as usize]
            && let Some(op) = chain.last()
            && !matches!(op, Op::Detach {})
        {
            if !recorded {
                return View::Unrecorded;
            }
            at = *source;
        }
        if at == variable { View::Itself } else { View::Of(at) }
    }
}
