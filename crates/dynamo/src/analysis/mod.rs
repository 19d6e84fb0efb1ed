//! What recording has to know of a segment so far and replay does not: aliases and layouts; the tape is in
//! [`tape`].

mod tape;
mod trace;

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use kiln_aot::trace::{GradTarget, Variable, VariableInfo};
use kiln_ir::{Class, Layout, Loc, Op, Ty};

pub(crate) use tape::{Far, Reach, TapeCall};
pub(crate) use trace::{add_inputs, trace};

use crate::event::{ApplyEvent, BackwardEvent, CallEvent, Event, GradEvent, KeyArg, Made, Mark, MarkEvent};
use crate::guard::Guard;
use crate::trie::Trie;
use crate::why::Reason;

/// What is known of one variable.
#[derive(Clone, Debug)]
struct Known {
    /// Its type, and how it came if it is an input.
    info: Arc<VariableInfo>,
    /// The variable whose memory it is a view of (itself, if none).
    base: Variable,
    layout: Option<Arc<Layout>>,
    requires_grad: bool,
    /// Of a base: the calls that changed it in place.
    writes: Vec<usize>,
    /// Not cut off from what it is a view of, and made where gradients are recorded.
    tracked: bool,
}

/// A call as the analysis needs it: the guards of a long list would be most of it.
struct Done {
    /// `None`: a pass that is on the tape itself. What is behind it is not known here.
    op: Option<Op>,
    args: SmallVec<[KeyArg; 4]>,
    /// The variable it made.
    out: Option<Variable>,
    loc: Loc,
}

/// The state of a recording, rebuilt from the trie when recording begins and kept up to date after.
pub(crate) struct Analysis {
    /// When recording began.
    pub(crate) started: Instant,
    variables: Vec<Known>,
    calls: Vec<Done>,
    /// Inputs that share their storage with another.
    shared: FxHashSet<Variable>,
    /// Calls whose tape a `backward` used up.
    freed: FxHashSet<usize>,
    /// Whether a pass is on the tape itself.
    pub(crate) twice: bool,
    /// Gradients that may share their memory with something else.
    unowned: FxHashSet<Variable>,
    /// Whether a `backward` put gradients into leaves.
    delivered: bool,
    /// The leaves of calls that wrote: for every variable, the calls that gave it history.
    history: Vec<Vec<usize>>,
    /// For leaves that were told so inside: whether they require a gradient, from a call on.
    told: FxHashMap<Variable, Vec<(usize, bool)>>,
    /// Variables whose gradient is retained, and the call that made them.
    retained: Vec<(Variable, usize)>,
    /// The custom functions that were applied.
    functions: Vec<Applied>,
    /// Those of them that gradients reached in the pass that is going on.
    reached: Vec<u32>,
}

/// A custom function, as a call.
struct Applied {
    name: Arc<str>,
    call: usize,
    outputs: SmallVec<[Variable; 1]>,
}

impl Analysis {
    /// The analysis of the segment that ends at `at`.
    pub(crate) fn of(trie: &Trie, at: u32) -> Analysis {
        let mut analysis = Analysis {
            started: Instant::now(),
            variables: Vec::new(),
            calls: Vec::new(),
            shared: FxHashSet::default(),
            freed: FxHashSet::default(),
            twice: false,
            unowned: FxHashSet::default(),
            history: Vec::new(),
            delivered: false,
            told: FxHashMap::default(),
            retained: Vec::new(),
            functions: Vec::new(),
            reached: Vec::new(),
        };
        for index in trie.path(at) {
            analysis.add(&trie.node(index).event);
        }
        analysis
    }

    fn push(&mut self, known: Known) -> Variable {
        self.variables.push(known);
        self.history.push(Vec::new());
        self.variables.len() as Variable - 1
    }

    pub(crate) fn add_input(&mut self, guard: &Guard) {
        let base = self.variables.len() as Variable;
        if let Some(other) = guard.shares_with {
            self.shared.extend([base, other]);
        }
        let layout = guard.info.input.as_ref().map(|input| input.layout.clone());
        let requires_grad = guard.requires_grad;
        self.push(Known {
            info: guard.info.clone(),
            base,
            layout,
            requires_grad,
            writes: Vec::new(),
            tracked: true,
        });
    }

    /// Takes note of an event.
    pub(crate) fn add(&mut self, event: &Event) {
        match event {
            Event::Start | Event::Break => {}
            Event::Call(call) => self.add_call(call),
            Event::Backward(backward) => self.add_backward(backward),
            Event::Grad(grad) => self.add_grad(grad),
            Event::Mark(event) => self.add_mark(event),
            Event::Apply(event) => self.add_application(event),
        }
    }

    fn add_mark(&mut self, event: &MarkEvent) {
        let variable = event.variable as usize;
        match event.mark {
            Mark::RequiresGrad(on) => {
                let before = (0, self.variables[variable].requires_grad);
                let told = self.told.entry(event.variable).or_insert_with(|| vec![before]);
                told.push((self.calls.len(), on));
                self.variables[variable].requires_grad = on;
            }
            Mark::Retain | Mark::Watch => {
                let maker = self.history[variable].last().copied();
                self.retained.extend(maker.map(|maker| (event.variable, maker)));
            }
        }
    }

    fn add_application(&mut self, event: &ApplyEvent) {
        for guard in &event.guards {
            self.add_input(guard);
        }
        let call = self.calls.len();
        let args = event.inputs.iter().map(|&input| KeyArg::Variable(input)).collect();
        self.calls.push(Done { op: None, args, out: None, loc: event.loc });
        for &output in &event.outputs {
            self.variables[output as usize].requires_grad = true;
            self.history[output as usize].push(call);
        }
        let (name, outputs) = (event.name.clone(), event.outputs.clone());
        self.functions.push(Applied { name, call, outputs });
    }

    /// Whether gradients flowed through a variable when a call read it.
    fn required(&self, variable: Variable, call: usize) -> bool {
        match self.told.get(&variable) {
            Some(told) => told.iter().rev().find(|(from, _)| *from <= call).is_some_and(|(_, on)| *on),
            None => self.variables[variable as usize].requires_grad,
        }
    }

    /// Whether gradients end in a variable as it was before a call: an input, or a leaf that was made inside and not
    /// changed by an op on the tape.
    fn is_source(&self, variable: Variable, before: usize) -> bool {
        let arrived = self.variables[variable as usize].info.input.as_ref();
        let changed = || self.history[variable as usize].iter().any(|&call| call < before);
        arrived.is_some_and(|input| input.requires_grad) || (self.told.contains_key(&variable) && !changed())
    }

    fn add_call(&mut self, call: &CallEvent) {
        self.variables.reserve(call.guards.len() + 1);
        self.history.reserve(call.guards.len() + 1);
        for guard in &call.guards {
            self.add_input(guard);
        }
        let first = match call.args.first() {
            Some(KeyArg::Variable(v)) => Some(*v),
            _ => None,
        };
        let index = self.calls.len();
        let out = match (&call.made, first) {
            (Made::Changed { requires_grad, alike }, Some(target)) => {
                self.write(target);
                if *requires_grad {
                    for &changed in alike.iter().chain([&target]) {
                        self.variables[changed as usize].requires_grad = true;
                        self.history[changed as usize].push(index);
                    }
                    if let Some(told) = self.told.get_mut(&target) {
                        told.push((index + 1, true));
                    }
                }
                None
            }
            (Made::Changed { .. }, None) => None,
            (Made::Variable { ty, requires_grad }, _) => {
                let view = match (call.op.row().class, first) {
                    (Class::View, Some(source)) => {
                        let source = &self.variables[source as usize];
                        let layout = source.layout.as_ref().and_then(|l| l.view(&call.op));
                        let tracked =
                            source.tracked && call.grad_enabled && !matches!(call.op, Op::Detach {});
                        layout.map(|layout| (source.base, layout, tracked))
                    }
                    _ => None,
                };
                let own = self.variables.len() as Variable;
                let (base, layout, tracked) = match (view, ty) {
                    (Some((base, layout, tracked)), _) => (base, Some(layout), tracked),
                    (None, Ty::Tensor(t)) => (own, Some(Layout::contiguous(t.shape.clone())), true),
                    (None, _) => (own, None, true),
                };
                let info = Arc::new(VariableInfo { ty: ty.clone(), input: None });
                let (layout, requires_grad) = (layout.map(Arc::new), *requires_grad);
                let out = self.push(Known { info, base, layout, requires_grad, writes: Vec::new(), tracked });
                if requires_grad {
                    self.history[out as usize].push(index);
                }
                Some(out)
            }
        };
        self.calls.push(Done { op: Some(call.op.clone()), args: call.args.clone(), out, loc: call.loc });
    }

    fn write(&mut self, target: Variable) {
        for target in self.elements(target) {
            let base = self.variables[target as usize].base;
            self.variables[base as usize].writes.push(self.calls.len());
        }
    }

    /// The elements of a packed list.
    fn items(&self, list: Variable) -> Option<&[KeyArg]> {
        let known = self.variables.get(list as usize);
        let is_list = known.is_some_and(|known| matches!(known.info.ty, Ty::List(_)));
        let mut calls = self.calls.iter().filter(|_| is_list);
        let call = calls.find(|call| call.out == Some(list) && matches!(call.op, Some(Op::List {})))?;
        Some(&call.args)
    }

    /// A tensor, or the elements of a packed list.
    fn elements(&self, target: Variable) -> Vec<Variable> {
        let variable = |arg: &KeyArg| if let KeyArg::Variable(v) = arg { Some(*v) } else { None };
        match self.items(target) {
            Some(items) => items.iter().filter_map(variable).collect(),
            None => vec![target],
        }
    }

    fn add_backward(&mut self, event: &BackwardEvent) {
        for guard in &event.guards {
            self.add_input(guard);
        }
        let outputs: Vec<Variable> = event.outputs.iter().map(|(output, _)| *output).collect();
        let visited = self.reach(&outputs).calls;
        if !event.retain_graph {
            self.freed.extend(visited);
        }
        self.delivered |= event.targets.iter().any(|(_, _, outside)| !outside);
        for &(leaf, target, _) in &event.targets {
            match target {
                GradTarget::New(_) => {
                    self.push_gradient(leaf, false);
                }
                GradTarget::Accumulate(existing) => self.write(existing),
            }
        }
    }

    /// A new variable: the gradient of another.
    fn push_gradient(&mut self, of: Variable, requires_grad: bool) -> Variable {
        let ty = self.variables[of as usize].info.ty.clone();
        let layout = ty.as_tensor().map(|t| Arc::new(Layout::contiguous(t.shape.clone())));
        let base = self.variables.len() as Variable;
        let info = Arc::new(VariableInfo { ty, input: None });
        self.push(Known { info, base, layout, requires_grad, writes: Vec::new(), tracked: true })
    }

    fn add_grad(&mut self, event: &GradEvent) {
        for guard in &event.guards {
            self.add_input(guard);
        }
        self.delivered |= event.key.step.as_ref().is_some_and(|step| step.toward.is_none());
        self.free(event);
        if event.key.create_graph {
            self.twice = true;
            self.calls.push(Done { op: None, args: SmallVec::new(), out: None, loc: event.loc });
        }
        for (&input, found) in event.key.inputs.iter().zip(&event.found) {
            let Some(requires_grad) = *found else { continue };
            let gradient = self.push_gradient(input, requires_grad);
            if event.key.create_graph {
                self.unowned.insert(gradient);
            }
            if requires_grad {
                self.history[gradient as usize].push(self.calls.len() - 1);
            }
        }
    }

    pub(crate) fn layout_overlaps(&self, variable: Variable) -> bool {
        self.variables[variable as usize].layout.as_ref().is_some_and(|layout| layout.overlaps_itself())
    }

    /// The first element of a packed list several of whose elements share one place in memory.
    pub(crate) fn overlapping_item(&self, list: Variable) -> Option<usize> {
        // Neighbours mostly lie alike, and what lies as the one before it need not be looked at again.
        let mut before: Option<&Arc<Layout>> = None;
        self.items(list)?.iter().position(|item| {
            let KeyArg::Variable(item) = item else { return false };
            let Some(layout) = &self.variables[*item as usize].layout else { return false };
            let again = before.replace(layout).is_some_and(|before| Arc::ptr_eq(before, layout));
            !again && layout.overlaps_itself()
        })
    }

    /// The other variables that have the memory of one that is changed on the tape: the change is in their history,
    /// too. `Err`: it can't be said here.
    pub(crate) fn alike(&self, target: Variable) -> Result<SmallVec<[Variable; 2]>, Reason> {
        const WHY: Reason = Reason::SharedViews;
        // What arrives with the op in hand has no views yet.
        if target >= self.next() {
            return Ok(SmallVec::new());
        }
        let sharing = |variable: Variable| {
            let base = self.variables.get(variable as usize).map(|known| known.base);
            let others = (0..self.next()).filter(move |other| *other != variable);
            others.filter(move |other| Some(self.variables[*other as usize].base) == base)
        };
        if let Some(items) = self.items(target) {
            let shared =
                items.iter().any(|item| matches!(item, KeyArg::Variable(v) if sharing(*v).next().is_some()));
            return if shared { Err(WHY) } else { Ok(SmallVec::new()) };
        }
        let alike: SmallVec<[Variable; 2]> = sharing(target).collect();
        if alike.is_empty() {
            return Ok(alike);
        }
        let special = |v: Variable| {
            let known = &self.variables[v as usize];
            !known.tracked
                || known.info.input.is_some()
                || self.told.contains_key(&v)
                || self.retained.iter().any(|(retained, _)| *retained == v)
                || self.functions.iter().any(|function| function.outputs.contains(&v))
        };
        if alike.iter().copied().chain([target]).any(special) { Err(WHY) } else { Ok(alike) }
    }

    /// The variables whose memory a tensor, or the elements of a list, lie in.
    pub(crate) fn bases(&self, target: Variable) -> Vec<Variable> {
        let mut bases = self.elements(target);
        // What arrives with the op in hand is not known yet, and no view of anything here.
        let base = |v: &mut Variable| *v = self.variables.get(*v as usize).map_or(*v, |known| known.base);
        bases.iter_mut().for_each(base);
        bases
    }

    /// Why an in-place op over lists can't be captured, if it can't: eager goes element by element, so a later
    /// element would see what an earlier one wrote.
    pub(crate) fn list_conflict(&self, args: &[KeyArg]) -> Option<Reason> {
        let mut operands = args.iter().filter_map(|arg| match arg {
            KeyArg::Variable(list) => Some(self.bases(*list)),
            KeyArg::Number(..) => None,
        });
        let targets = operands.next()?;
        // By variable, the element that is written there. Lists arrive together, so the numbers lie close.
        let lowest = targets.iter().copied().min()?;
        let mut owner: Vec<Option<u32>> = Vec::new();
        for (i, base) in (0..).zip(targets) {
            let place = (base - lowest) as usize;
            owner.resize(owner.len().max(place + 1), None);
            if owner[place].replace(i).is_some() {
                return Some(Reason::SharedElements);
            }
        }
        let owner_of = |base: Variable| owner.get(base.checked_sub(lowest)? as usize).copied().flatten();
        let foreign = |(i, base): (u32, &Variable)| owner_of(*base).is_some_and(|j| j != i);
        operands.any(|bases| (0..).zip(&bases).any(foreign)).then_some(Reason::ListOverlap)
    }

    /// Why an in-place change of a variable can't be captured, if it can't.
    pub(crate) fn conflict(&self, target: Variable) -> Option<Reason> {
        let from_list = |v: Variable| {
            self.variables[v as usize].info.input.is_none()
                && self
                    .calls
                    .iter()
                    .any(|call| call.out == Some(v) && matches!(call.op, Some(Op::ListGet { .. })))
        };
        for base in self.bases(target) {
            if self.shared.contains(&base) {
                return Some(Reason::SharedInputs);
            }
            let known = self.variables.get(base as usize);
            let overlaps =
                |known: &Known| known.layout.as_ref().is_some_and(|layout| layout.overlaps_itself());
            if known.is_some_and(|known| known.info.input.is_some() && overlaps(known)) {
                return Some(Reason::InputOverlap);
            }
            if self.unowned.contains(&base) {
                return Some(Reason::TapedGradient);
            }
            if from_list(base) {
                return Some(Reason::ListElement);
            }
        }
        None
    }

    /// Why an input can't join, if it can't: it shares the storage of one that was changed.
    pub(crate) fn input_conflict(&self, shares_with: Option<Variable>) -> Option<Reason> {
        // One that arrives with the same op is not known yet, and nothing was done to it.
        let other = self.variables.get(shares_with? as usize)?;
        (!other.writes.is_empty()).then_some(Reason::SharesChanged)
    }

    /// The next variable's number.
    pub(crate) fn next(&self) -> Variable {
        self.variables.len() as Variable
    }
}
