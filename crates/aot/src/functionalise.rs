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

use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use kiln_ir::{
    Class, Dims, EmitExt, Error, Grad, Graph, Layout, Loc, Op, Result, Ty, Value, Why, Write,
    carries_gradient, refold,
};

use crate::leaves::{Remade, Root};
use crate::trace::{Event, Trace, TraceArg, Variable};

/// What a graph input is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum GraphInput {
    /// A variable of the trace.
    Variable(Variable),
    /// A hole of the trace.
    Number(u32),
}

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
                Some((clock, value)) if self.bases[*base].changed <= *clock => break *value,
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
                    let why =
                        "a view is read after the view or its base was moved to another place on the tape";
                    return Err(Error::op("functionalise", Why::Other(why.into()), self.graph.loc));
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

    /// An in-place op.
    fn change(&mut self, op: &Op, args: &[TraceArg], target: Variable) -> Result<()> {
        let values = self.args(args)?;
        self.check_history(target)?;
        let want = self.graph.ty(values[0]).clone();
        let mut value = self.emit(op.clone(), &values)?;
        let have = self.graph.ty(value).clone();
        if have != want {
            // The result is stored in the target's dtype.
            let dtype = match &want {
                Ty::Tensor(t) => t.dtype,
                Ty::List(items) if items.kinds().all(|t| t.dtype == items[0].dtype) => items[0].dtype,
                _ => return Err(bug("an in-place op over a list of several dtypes", self.graph.loc)),
            };
            value = self.emit(Op::To { dtype }, &[value])?;
        }
        self.write(target, value)
    }

    /// A change that is not recorded (under `no_grad`, or through a detached view) gives a tensor new values and
    /// leaves it its history. For leaves that is what `leaf_values` are for; in the middle of a tape it can't be
    /// said in a functional graph.
    fn check_history(&mut self, target: Variable) -> Result<()> {
        let targets: Vec<Variable> = match &self.states[target as usize] {
            State::Packed { items, .. } => items.to_vec(),
            _ => vec![target],
        };
        for target in targets {
            // An element of a list has no history.
            if let State::Tensor { base, .. } = self.states[target as usize]
                && let Base { stored: Stored::Value(whole), is_leaf: false, .. } = self.bases[base]
                && self.requires[whole.index()]
            {
                let part = self.read(target)?;
                if !(self.recording && self.requires[part.index()]) {
                    let why = "a value in the middle of a tape is changed without being recorded";
                    return Err(Error::op("functionalise", Why::Other(why.into()), self.graph.loc));
                }
            }
        }
        Ok(())
    }

    /// Gives a variable a new value, through its base.
    pub(crate) fn write(&mut self, variable: Variable, value: Value) -> Result<()> {
        self.clock += 1;
        match self.states[variable as usize].clone() {
            State::Unset => Err(bug("a variable is changed before it is made", self.graph.loc)),
            State::Made(_) => {
                self.states[variable as usize] = State::Made(value);
                Ok(())
            }
            State::Packed { items, .. } => {
                for (i, &item) in items.iter().enumerate() {
                    match &self.states[item as usize] {
                        State::Tensor { base, chain, .. } if chain.is_empty() => {
                            let base = *base;
                            self.store(base, Stored::Element(value, i));
                        }
                        _ => {
                            let element = self.emit(Op::ListGet { index: i }, &[value])?;
                            self.write(item, element)?;
                        }
                    }
                }
                self.states[variable as usize] = State::Packed { items, cached: Some((self.clock, value)) };
                Ok(())
            }
            State::Tensor { base, chain, .. } => {
                // What each step of the chain reads, outermost first; then back through the chain.
                let mut sources = vec![self.base_value(base)?];
                for op in chain.iter().take(chain.len().saturating_sub(1)) {
                    let last = sources[sources.len() - 1];
                    sources.push(self.emit(op.clone(), &[last])?);
                }
                let mut value = value;
                // A leaf has no history, whatever it is made of.
                let recording = self.recording;
                self.recording &= !self.bases[base].is_leaf;
                for (op, source) in chain.iter().zip(sources).rev() {
                    value = self.scatter(op, source, value)?;
                }
                self.recording = recording;
                self.store(base, Stored::Value(value));
                Ok(())
            }
        }
    }

    fn store(&mut self, base: usize, stored: Stored) {
        self.bases[base].stored = stored;
        self.bases[base].changed = self.clock;
        self.bases[base].written = true;
        if let (Stored::Value(value), true) = (stored, self.bases[base].is_leaf) {
            self.requires[value.index()] = true;
            self.bases[base].leaf_values.push(value);
        }
    }

    /// The source of a view op after the view was given `value`.
    fn scatter(&mut self, op: &Op, source: Value, value: Value) -> Result<Value> {
        let shape = self.graph.tensor_ty(source).shape;
        match op {
            Op::Reshape { .. } => self.emit(Op::Reshape { shape }, &[value]),
            Op::Permute { dims } => {
                let mut back = Dims::all(dims.len());
                for (i, &d) in dims.iter().enumerate() {
                    back[d] = i;
                }
                self.emit(Op::Permute { dims: back }, &[value])
            }
            Op::Transpose { .. } => self.emit(op.clone(), &[value]),
            Op::Slice { dim, start, end, step } => {
                let (dim, start, end, step) = (*dim, *start, *end, *step);
                self.emit(Op::SliceScatter { dim, start, end, step }, &[source, value])
            }
            Op::AsStrided { view, offset } => {
                let (view, offset) = (view.clone(), *offset);
                self.emit(Op::AsStridedScatter { view, offset }, &[source, value])
            }
            Op::Diagonal { offset, dim1, dim2 } => {
                let (offset, dim1, dim2) = (*offset, *dim1, *dim2);
                self.emit(Op::DiagonalScatter { offset, dim1, dim2 }, &[source, value])
            }
            Op::Unfold { dim, size, step } => {
                // Windows that overlap are not changed in place, so every element has one place.
                let (lined, positions) = refold(&mut self.graph, value, *dim, (*size, *step))?;
                self.note();
                self.emit(Op::IndexCopy { dim: *dim }, &[source, positions, lined])
            }
            Op::Detach {} => Ok(value),
            other => Err(bug(&format!("a change through {} has no inverse", other.name()), self.graph.loc)),
        }
    }

    fn finish(mut self, live: &[Variable]) -> Result<Functional> {
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
}

pub(crate) fn bug(what: &str, loc: Loc) -> Error {
    Error::op("functionalise", Why::Other(format!("{what}: this is a bug in Kiln")), loc)
}
