//! From a trace with in-place changes and views to a graph in which nothing changes.
//!
//! ```text
//! y = x[0:2]        (a view)            %1 = slice(%0) {0..2}
//! y.mul_(2)                             %3 = mul(%1, 2)
//! z = x + 1                             %4 = slice_scatter(%0, %3) {0..2}
//!                                       %5 = add(%4, 1)
//!                                       write %0 <- %4
//! ```
//!
//! Variables form alias sets over a *base*. A view remembers how it is made from its base; changing it
//! scatters into the base, and the other views are made anew when they are next read. `backward()` and `grad()`
//! are expanded by the rows' gradient rules, in `passes`.

mod changes;
mod survivors;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use kiln_ir::{
    Class, EmitExt, Error, Fault, Grad, Graph, Layout, Loc, Op, Result, Ty, Value, Why, carries_gradient,
    planted,
};

use crate::leaves::{Remade, Root};
use crate::trace::{Event, Trace, TraceArg, Variable};

pub use survivors::{Home, Survivor, View};

/// What a graph input is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum GraphInput {
    /// A variable of the trace.
    Variable(Variable),
    /// A hole of the trace.
    Number(u32),
}

/// A functional graph and what its inputs and outputs are.
#[derive(Clone, PartialEq, Debug)]
pub struct Functional {
    /// The graph, at the level of the user's ops.
    pub graph: Arc<Graph>,
    /// What each input is.
    pub inputs: Vec<GraphInput>,
    /// The variables that outlive the trace.
    pub survivors: Vec<Survivor>,
    /// Per node: whether gradients flow through it.
    pub recorded: Vec<bool>,
}

/// What a base holds: a value, or (until someone asks) an element of a list value.
#[derive(Copy, Clone)]
pub(crate) enum Stored {
    Value(Value),
    Element(Value, usize),
}

pub(crate) struct Base {
    pub(crate) stored: Stored,
    /// When it was last changed, on the translator's clock.
    changed: u64,
    /// Whether it was changed at all.
    written: bool,
    /// For an input: its variable, its graph value, and all values it has had while it was a leaf.
    pub(crate) input: Option<(Variable, Value)>,
    pub(crate) leaf_values: SmallVec<[Value; 1]>,
    pub(crate) is_leaf: bool,
    /// The variable that is a leaf, or was one: an input, or one that was told to be.
    pub(crate) leaf: Option<Variable>,
}

#[derive(Clone)]
pub(crate) enum State {
    Unset,
    Tensor {
        base: usize,
        /// How it is made from its base, and the variable that the last step is made from: a gradient that is
        /// asked for a view must meet the views of that view.
        chain: Arc<[Op]>,
        source: Variable,
        layout: Arc<Layout>,
        cached: Option<(u64, Value)>,
        recorded: bool,
        remade: Remade,
    },
    Packed {
        items: Arc<[Variable]>,
        cached: Option<(u64, Value)>,
    },
    Made(Value),
}

pub(crate) struct Translator<'a> {
    trace: &'a Trace,
    pub(crate) graph: Graph,
    inputs: Vec<GraphInput>,
    numbers: Vec<Option<Value>>,
    /// The chain of what is no view.
    no_chain: Arc<[Op]>,
    pub(crate) states: Vec<State>,
    pub(crate) bases: Vec<Base>,
    pub(crate) clock: u64,
    /// Whether gradients flow through the nodes now being added.
    pub(crate) recording: bool,
    pub(crate) recorded: Vec<bool>,
    /// Per value: whether it carries gradient history.
    pub(crate) requires: Vec<bool>,
    /// Per node: whether a pass used up what it saved. Shorter than the graph: the rest is not.
    pub(crate) used_up: Vec<bool>,
    /// Per node: whether it belongs to a pass that is on the tape itself. Shorter than the graph: the rest does not.
    pub(crate) twice: Vec<bool>,
    /// Variables that gradients end in besides leaves with memory of their own.
    pub(crate) roots: FxHashMap<Variable, Root>,
}

/// Translates a trace; `live` are the variables that outlive it.
pub fn functionalise(trace: &Trace, live: &[Variable]) -> Result<Functional> {
    Translator::of(trace)?.finish(live)
}

impl Translator<'_> {
    /// Translates the events of a trace.
    pub(crate) fn of(trace: &Trace) -> Result<Translator<'_>> {
        let mut t = Translator {
            trace,
            graph: Graph::new(),
            inputs: Vec::new(),
            numbers: vec![None; trace.numbers.len()],
            no_chain: Arc::from([]),
            states: vec![State::Unset; trace.variables.len()],
            bases: Vec::with_capacity(trace.variables.len()),
            clock: 0,
            recording: false,
            recorded: Vec::new(),
            requires: Vec::new(),
            used_up: Vec::new(),
            twice: Vec::new(),
            roots: FxHashMap::default(),
        };
        for event in &trace.events {
            t.event(event)?;
        }
        Ok(t)
    }

    fn event(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Call { op, args, out, in_place, grad_enabled, loc } => {
                self.graph.loc = *loc;
                self.recording = *grad_enabled;
                match (out, in_place, args.first()) {
                    (_, true, Some(TraceArg::Variable(target))) => self.change(op, args, *target),
                    (Some(out), _, _) => self.call(op, args, *out),
                    _ => Err(bug("an op that neither makes nor changes a variable", *loc)),
                }
            }
            Event::Backward { outputs, targets, retain_graph, loc } => {
                self.graph.loc = *loc;
                self.backward(outputs, targets, *retain_graph)
            }
            Event::RequiresGrad { variable, on, loc } => {
                self.graph.loc = *loc;
                self.requires_grad(*variable, *on)
            }
            Event::Read { .. } => Ok(()),
            Event::Retain { variable, loc } => {
                self.graph.loc = *loc;
                self.retain(*variable);
                Ok(())
            }
            Event::Apply { outputs, loc } => {
                self.graph.loc = *loc;
                outputs.iter().try_for_each(|output| self.end_history(*output))
            }
            Event::Grad { outputs, inputs, results, retain_graph, create_graph, made, loc } => {
                self.graph.loc = *loc;
                let grads = self.gradients(outputs, (inputs, *made), *retain_graph, *create_graph)?;
                for (grad, result) in grads.into_iter().zip(results) {
                    match (grad, result) {
                        (Some(grad), Some(variable)) => self.define(*variable, grad),
                        (None, None) => {}
                        _ => return Err(bug("grad finds other gradients than it did", *loc)),
                    }
                }
                Ok(())
            }
        }
    }

    pub(crate) fn emit(&mut self, op: Op, args: &[Value]) -> Result<Value> {
        let value = self.graph.emit_one(op, args)?;
        self.note();
        Ok(value)
    }

    /// Brings the per-node and per-value notes up to date with the graph.
    pub(crate) fn note(&mut self) {
        while self.recorded.len() < self.graph.nodes.len() {
            let node = &self.graph.nodes[self.recorded.len()];
            self.recorded.push(self.recording);
            let flows = self.recording
                && !matches!(node.op.row().grad, Grad::Zero)
                && node.args.iter().any(|v| self.requires.get(v.index()).copied().unwrap_or(false));
            for &out in &node.outs {
                let carries = flows && carries_gradient(self.graph.ty(out));
                if self.requires.len() <= out.index() {
                    self.requires.resize(out.index() + 1, false);
                }
                self.requires[out.index()] = carries;
            }
        }
        self.requires.resize(self.graph.value_count(), false);
    }

    fn number(&mut self, hole: u32) -> Value {
        if let Some(value) = self.numbers[hole as usize] {
            return value;
        }
        let value = self.graph.input(Ty::Scalar(self.trace.numbers[hole as usize]));
        self.inputs.push(GraphInput::Number(hole));
        self.numbers[hole as usize] = Some(value);
        self.note();
        value
    }

    fn new_base(&mut self, stored: Stored) -> usize {
        self.bases.push(Base {
            stored,
            changed: self.clock,
            written: false,
            input: None,
            leaf_values: SmallVec::new(),
            is_leaf: false,
            leaf: None,
        });
        self.bases.len() - 1
    }

    fn tensor_state(&mut self, base: usize, variable: Variable, layout: Arc<Layout>) -> State {
        let (chain, recorded) = (self.no_chain.clone(), self.recording);
        State::Tensor { base, chain, source: variable, layout, cached: None, recorded, remade: Remade::View }
    }

    /// Makes sure an input variable has a base.
    pub(crate) fn open(&mut self, variable: Variable) -> Result<()> {
        if !matches!(self.states[variable as usize], State::Unset) {
            return Ok(());
        }
        let info = &self.trace.variables[variable as usize];
        let Some(input) = &info.input else {
            return Err(bug("a variable is read before it is made", self.graph.loc));
        };
        let value = self.graph.input(info.ty.clone());
        self.inputs.push(GraphInput::Variable(variable));
        self.note();
        self.requires[value.index()] = input.requires_grad;
        let base = self.new_base(Stored::Value(value));
        self.bases[base].input = Some((variable, value));
        self.bases[base].is_leaf = input.leaf && input.requires_grad;
        if input.requires_grad {
            self.bases[base].leaf_values = smallvec![value];
        }
        self.bases[base].leaf = Some(variable);
        // A view inside a larger storage is a base of its own: its layout starts here.
        self.states[variable as usize] = self.tensor_state(base, variable, input.layout.clone());
        Ok(())
    }

    fn base_value(&mut self, base: usize) -> Result<Value> {
        match self.bases[base].stored {
            Stored::Value(value) => Ok(value),
            Stored::Element(list, index) => {
                // The change that put it there is not on the tape, and neither is taking it out.
                let recording = std::mem::replace(&mut self.recording, false);
                let value = self.emit(Op::ListGet { index }, &[list])?;
                self.recording = recording;
                self.requires[value.index()] = self.bases[base].is_leaf;
                self.bases[base].stored = Stored::Value(value);
                if self.bases[base].is_leaf {
                    self.bases[base].leaf_values.push(value);
                }
                Ok(value)
            }
        }
    }

    /// The value of a variable now.
    pub(crate) fn read(&mut self, variable: Variable) -> Result<Value> {
        self.open(variable)?;
        if let State::Tensor { base, chain, .. } = &self.states[variable as usize]
            && chain.is_empty()
        {
            return self.base_value(*base);
        }
        match self.states[variable as usize].clone() {
            State::Unset => Err(bug("a variable without a state", self.graph.loc)),
            State::Made(value) => Ok(value),
            State::Packed { items, cached } => {
                if let Some((clock, value)) = cached
                    && items.iter().all(|&item| self.changed(item) <= clock)
                {
                    return Ok(value);
                }
                let values = items.iter().map(|&item| self.read(item)).collect::<Result<Vec<_>>>()?;
                let value = self.emit(Op::List {}, &values)?;
                self.states[variable as usize] = State::Packed { items, cached: Some((self.clock, value)) };
                Ok(value)
            }
            State::Tensor { .. } => self.read_view(variable),
        }
    }

    /// The value of a view: from the nearest view on the way to its base whose value is known.
    fn read_view(&mut self, view: Variable) -> Result<Value> {
        let mut steps = Vec::new();
        let mut at = view;
        let mut value = loop {
            let State::Tensor { base, chain, source, cached, .. } = &self.states[at as usize] else {
                return Err(bug("a view of what is no tensor", self.graph.loc));
            };
            match cached {
                Some((clock, value)) if self.bases[*base].changed <= *clock || planted(Fault::StaleView) => {
                    break *value;
                }
                _ if chain.is_empty() => {
                    let base = *base;
                    break self.base_value(base)?;
                }
                _ => {
                    steps.push(at);
                    at = *source;
                }
            }
        };
        let before = self.recording;
        for step in steps.into_iter().rev() {
            let State::Tensor { chain, recorded, remade, .. } = &self.states[step as usize] else { continue };
            let Some(op) = chain.last().cloned() else { continue };
            let remade = *remade;
            self.recording = *recorded && remade == Remade::View;
            value = self.emit(op, &[value])?;
            match remade {
                Remade::View => {}
                Remade::Root => self.add_root(step, value),
                Remade::Never => {
                    let reason =
                        "a view is read after the view or its base was moved to another place on the tape";
                    return Err(Error::op("functionalise", Why::NotCaptured { reason }, self.graph.loc));
                }
            }
            let now = Some((self.clock, value));
            if let State::Tensor { cached, .. } = &mut self.states[step as usize] {
                *cached = now;
            }
        }
        self.recording = before;
        Ok(value)
    }

    fn changed(&self, variable: Variable) -> u64 {
        match &self.states[variable as usize] {
            State::Tensor { base, .. } => self.bases[*base].changed,
            _ => 0,
        }
    }

    fn args(&mut self, args: &[TraceArg]) -> Result<Vec<Value>> {
        args.iter()
            .map(|arg| match arg {
                TraceArg::Variable(v) => self.read(*v),
                TraceArg::Number(hole) => Ok(self.number(*hole)),
                TraceArg::Constant(value) => self.emit(Op::Constant { value: *value }, &[]),
            })
            .collect()
    }

    fn call(&mut self, op: &Op, args: &[TraceArg], out: Variable) -> Result<()> {
        if let (Op::List {}, true) = (op, args.iter().all(|a| matches!(a, TraceArg::Variable(_)))) {
            let items: Arc<[Variable]> = args
                .iter()
                .filter_map(|a| if let TraceArg::Variable(v) = a { Some(*v) } else { None })
                .collect();
            for &item in items.iter() {
                self.open(item)?;
            }
            self.states[out as usize] = State::Packed { items, cached: None };
            return Ok(());
        }
        if let (Class::View, Some(TraceArg::Variable(source))) = (op.row().class, args.first()) {
            self.open(*source)?;
            if let State::Tensor { base, chain, layout, recorded, remade, .. } =
                self.states[*source as usize].clone()
                && let Some(layout) = layout.view(op)
            {
                // A view of a view that was not recorded has no history either.
                let recorded = self.recording && (recorded || chain.is_empty() || remade == Remade::Root);
                let chain = chain.iter().cloned().chain([op.clone()]).collect();
                let (source, layout) = (*source, Arc::new(layout));
                let remade = Remade::View;
                self.states[out as usize] =
                    State::Tensor { base, chain, source, layout, cached: None, recorded, remade };
                return Ok(());
            }
        }
        let values = self.args(args)?;
        // Gradients flow through the parts of such a composite, so the parts are what is recorded.
        let in_parts = self.recording && matches!(op.row().grad, Grad::Decompose);
        let parts = if in_parts { op.decompose(&mut self.graph, &values)? } else { None };
        let value = match parts {
            Some(parts) => {
                self.note();
                parts[0]
            }
            None => self.emit(op.clone(), &values)?,
        };
        self.define(out, value);
        Ok(())
    }

    /// A variable that an op made: dense memory of its own.
    pub(crate) fn define(&mut self, variable: Variable, value: Value) {
        self.states[variable as usize] = match self.graph.ty(value).clone() {
            Ty::Tensor(ty) => {
                let base = self.new_base(Stored::Value(value));
                self.tensor_state(base, variable, Arc::new(Layout::contiguous(ty.shape)))
            }
            Ty::List(_) | Ty::Scalar(_) => State::Made(value),
        };
    }
}

#[track_caller]
pub(crate) fn bug(what: &str, loc: Loc) -> Error {
    Error::bug(format!("functionalise: {what} ({loc})"))
}
