//! Passes that user code takes part in: hooks of leaves, backwards of custom functions, retained gradients, and
//! `backward` with `create_graph`.
//!
//! User code must run on every call, so such a pass is gone in steps. Each step is a `grad()` of its own, one event:
//! first for the results of the custom function applied last, whose backward then runs on lazy tensors and says what
//! flows on from its inputs; then for the one before; at the end for the leaves, whose hooks run before the
//! gradients are added up. What the user's code does is recorded and checked like any other code, and all of it is
//! in the one graph. Steps repeat ops of those before them: common subexpressions find that.

use std::sync::Arc;

use smallvec::SmallVec;

use kiln_aot::trace::Variable;
use kiln_ir::{Loc, Result, TensorTy};
use kiln_tensor::autograd::Application;
use kiln_tensor::hook::{GradRequest, Tag};
use kiln_tensor::internal::TensorState;
use kiln_tensor::{Context, Function, Tensor, autograd, enable_grad, no_grad};

use crate::analysis;
use crate::event::{ApplyEvent, Event, GradKey, Mark, MarkEvent, StepKey};
use crate::record::OutputKey;
use crate::region::Site;
use crate::run::Run;
use crate::state::{Leave, State, recordings};
use crate::why::Reason;

/// A custom function that the segment applied. It names tensors of the segment by their numbers: a handle would
/// keep them, and they would be computed for nobody.
pub(crate) struct Applied {
    function: Arc<dyn Function>,
    context: Context,
    saved: Vec<Kept>,
    inputs: SmallVec<[Variable; 2]>,
    outputs: Vec<Variable>,
    types: (Vec<TensorTy>, Vec<TensorTy>),
    used_up: bool,
    loc: Loc,
}

enum Kept {
    Variable(Variable),
    Tensor(Tensor),
}

/// The next step of a pass, and what it gives.
pub(crate) enum PassStep {
    /// Gradients for the results of this custom function.
    Function(usize, Vec<Option<Tensor>>),
    /// The last gradients, and whose they are.
    Last(Vec<Tensor>, Vec<Option<Tensor>>),
}

impl State {
    /// `requires_grad_()` of a leaf, or `retain_grad()`, of a variable of the segment.
    pub(crate) fn mark(
        &mut self,
        site: &Site,
        variable: Variable,
        mark: Mark,
        loc: Loc,
    ) -> Result<(), Leave> {
        let fits =
            |event: &Event| matches!(event, Event::Mark(e) if e.variable == variable && e.mark == mark);
        self.follow_or(site, fits, || Event::Mark(MarkEvent { mark, variable, loc }))
    }

    /// Goes to the child that fits, or adds one.
    fn follow_or(
        &mut self,
        site: &Site,
        fits: impl Fn(&Event) -> bool,
        event: impl FnOnce() -> Event,
    ) -> Result<(), Leave> {
        let Some(child) = self.trie(site).find(self.at, fits) else { return self.extend(site, event()) };
        self.go_to(site, child);
        Ok(())
    }

    fn go_to(&mut self, site: &Site, child: u32) {
        if let Some(analysis) = &mut self.analysis {
            analysis.add(&recordings(&self.aside, site).node(child).event);
        }
        self.at = child;
        self.fresh.clear();
    }

    /// A custom function was applied.
    pub(crate) fn apply(&mut self, site: &Site, application: &Application<'_>) -> Result<(), Leave> {
        self.fresh.clear();
        let Application { function, context, inputs, outputs, loc, .. } = application;
        let inputs: SmallVec<[Variable; 2]> =
            inputs.iter().map(|input| self.number_of(input)).collect::<Result<_>>()?;
        let all = outputs.iter().map(|output| self.number_of(output)).collect::<Result<Vec<Variable>>>()?;
        let tys = |tensors: &mut dyn Iterator<Item = &Tensor>| -> Result<Vec<TensorTy>> {
            tensors.map(|tensor| self.tensor_ty(site, tensor)).collect()
        };
        let types = (tys(&mut application.inputs.iter().copied())?, tys(&mut outputs.iter())?);
        let carries = |place: &usize| types.1[*place].dtype.is_float();
        let made: SmallVec<[Variable; 1]> = (0..all.len()).filter(carries).map(|place| all[place]).collect();
        if all.iter().any(|&output| self.input(output).is_some()) {
            return Err(Leave::Eager(Reason::NotItsOwn));
        }
        let guards = self.guards()?;
        let known = self.trie(site).find(self.at, |event| match event {
            Event::Apply(event) => {
                event.inputs == inputs && event.outputs == made && self.guards_hold(&event.guards)
            }
            _ => false,
        });
        match known {
            Some(child) => self.go_to(site, child),
            None => {
                let fresh = self.fresh.clone();
                let analysis = self.analysis(site);
                let conflict = fresh.iter().find_map(|&(_, shares)| analysis.input_conflict(shares));
                if let Some(reason) = conflict {
                    return Err(Leave::Eager(reason));
                }
                let (inputs, outputs) = (inputs.clone(), made.clone());
                let name = function.name().into();
                self.extend(site, Event::Apply(ApplyEvent { name, inputs, outputs, guards, loc: *loc }))?;
            }
        }
        let keep = |tensor: &Tensor| match tensor.tag() {
            tag if tag.run() == self.id => Kept::Variable(tag.variable()),
            _ => Kept::Tensor(tensor.clone()),
        };
        let saved = context.saved().iter().map(keep).collect();
        let context = context.with_saved(Vec::new());
        (0..all.len()).filter(carries).for_each(|place| outputs[place].mark_requires_grad(true));
        let function = function.clone();
        self.functions.push(Applied {
            function,
            context,
            saved,
            inputs,
            outputs: all,
            types,
            used_up: false,
            loc: *loc,
        });
        Ok(())
    }

    /// The saved tensors of a function.
    fn saved_by(&self, applied: &Applied) -> Vec<Tensor> {
        let tensor = |kept: &Kept| match kept {
            Kept::Variable(variable) => self.held(*variable).cloned(),
            Kept::Tensor(tensor) => Some(tensor.clone()),
        };
        applied.saved.iter().filter_map(tensor).collect()
    }

    /// Puts a function whose forward was executed op by op on the tape.
    pub(crate) fn put_on_tape(&self, function: usize) {
        let Some(applied) = self.functions.get(function) else { return };
        let tensors = |variables: &[Variable]| -> Vec<Tensor> {
            variables.iter().filter_map(|&variable| self.held(variable).cloned()).collect()
        };
        let (inputs, outputs) = (tensors(&applied.inputs), tensors(&applied.outputs));
        let application = Application {
            function: applied.function.clone(),
            context: applied.context.with_saved(self.saved_by(applied)),
            inputs: &inputs.iter().collect::<Vec<_>>(),
            outputs: &outputs,
            used_up: applied.used_up,
            loc: applied.loc,
        };
        application.put_on_tape();
    }

    /// The step that is recorded here, if one is, of a pass for these variables (`None`: for the leaves).
    pub(crate) fn find_step(
        &self,
        site: &Site,
        outputs: &OutputKey,
        toward: Option<&[Variable]>,
        request: &GradRequest<'_>,
    ) -> Option<u32> {
        self.trie(site).find(self.at, |event| match event {
            Event::Grad(event) => {
                let same = |step: &StepKey| {
                    step.toward.as_deref() == toward
                        && step.retain_graph == request.retain_graph
                        && step.allow_unused == request.allow_unused
                };
                event.key.step.as_ref().is_some_and(same)
                    && event.key.outputs == *outputs
                    && event.key.create_graph == request.create_graph
                    && self.guards_hold(&event.guards)
            }
            _ => false,
        })
    }

    /// Whether user code takes part in a `grad()` that is about to be recorded.
    pub(crate) fn takes_steps(&mut self, site: &Site, key: &GradKey) -> Result<bool, Leave> {
        let analysis = self.analysis(site);
        let known = key.outputs.iter().map(|(output, _)| *output).filter(|v| *v < analysis.next());
        let outputs: Vec<Variable> = known.collect();
        let reach = analysis.reach(&outputs);
        let visited = analysis.on_the_way(&outputs, &key.inputs);
        let retained = analysis.retained_on(&visited).map_err(Leave::Eager)?;
        if retained.len() < analysis.retained_on(&reach.calls).map_err(Leave::Eager)?.len() {
            return Err(Leave::Eager(Reason::RetainedReached));
        }
        if !retained.is_empty() || !analysis.functions_on(&visited).is_empty() {
            return Ok(true);
        }
        if !analysis.twice {
            return Ok(false);
        }
        let outputs: OutputKey = key.outputs.iter().copied().filter(|(v, _)| outputs.contains(v)).collect();
        let survey = kiln_aot::survey_backward(&analysis::trace(self.trie(site), self.at), &outputs);
        Ok(survey.is_ok_and(|survey| !self.analysis(site).functions_of(&survey.inputs).is_empty()))
    }

    /// The next step of a pass from `seeds` on; the functions in `done` had theirs.
    fn step_on(
        &mut self,
        site: &Site,
        seeds: &[(Tensor, Option<Tensor>)],
        request: &GradRequest<'_>,
        done: &[usize],
    ) -> Result<PassStep, Leave> {
        self.fresh.clear();
        let mut outputs = OutputKey::new();
        for (tensor, weight) in seeds {
            let output = self.number_of(tensor)?;
            outputs.push((output, weight.as_ref().map(|weight| self.number_of(weight)).transpose()?));
        }
        let toward: SmallVec<[Variable; 4]> =
            request.inputs.iter().map(|input| self.number_of(input)).collect::<Result<_>>()?;
        let toward = (!request.inputs.is_empty()).then_some(toward);
        match self.find_step(site, &outputs, toward.as_deref(), request) {
            Some(child) => {
                if let Event::Grad(event) = &*self.trie(site).node(child).event
                    && toward.is_some()
                    && self.has_hooks(event.reached.iter().map(|&(input, _)| input))
                {
                    return Err(Leave::Eager(Reason::Hook));
                }
                self.go_to(site, child);
            }
            None => self.record_step(site, outputs, toward, request, done)?,
        }
        let aside = self.aside.clone();
        let Event::Grad(event) = &*recordings(&aside, site).node(self.at).event else {
            return Err(Leave::Eager(Reason::Lost));
        };
        let grads = self.make_found(site)?;
        Ok(match event.key.step.as_ref().and_then(|step| step.function) {
            Some(function) => PassStep::Function(function as usize, grads),
            None => {
                let whose = event.key.inputs.iter().filter_map(|&input| self.held(input).cloned());
                PassStep::Last(whose.collect(), grads)
            }
        })
    }

    fn record_step(
        &mut self,
        site: &Site,
        outputs: OutputKey,
        toward: Option<SmallVec<[Variable; 4]>>,
        request: &GradRequest<'_>,
        done: &[usize],
    ) -> Result<(), Leave> {
        let way = self.way(site, &outputs, toward.as_deref())?;
        let leaves = || way.leaves.iter().map(|&(leaf, _)| leaf);
        if toward.is_some() && self.has_hooks(leaves()) {
            return Err(Leave::Eager(Reason::Hook));
        }
        let next = way.functions.iter().copied().filter(|function| !done.contains(function)).max();
        let inputs: SmallVec<[Variable; 4]> = match next {
            Some(function) => {
                let saved = self.functions.get(function).into_iter().flat_map(|applied| &applied.saved);
                let saved = saved.filter_map(|kept| match kept {
                    Kept::Variable(variable) => Some(*variable),
                    Kept::Tensor(_) => None,
                });
                let read: Vec<Variable> = saved.collect();
                let analysis = self.analysis(site);
                let used = read.into_iter().chain(analysis.inputs_of(function));
                let used = used.chain(analysis.outputs_of(function).iter().copied());
                if analysis.changed_since(function, used) {
                    return Err(Leave::Eager(Reason::FunctionChanged));
                }
                SmallVec::from_slice(analysis.outputs_of(function))
            }
            None => match &toward {
                Some(toward) => toward.iter().copied().chain(way.retained).collect(),
                None => leaves().chain(way.retained).collect(),
            },
        };
        let step = StepKey {
            toward,
            retain_graph: request.retain_graph,
            allow_unused: request.allow_unused,
            function: next.map(|k| k as u32),
        };
        let asked = step.toward.as_ref().map_or(0, SmallVec::len);
        let key = GradKey {
            outputs,
            inputs,
            retain_graph: request.retain_graph || next.is_some(),
            create_graph: request.create_graph,
            allow_unused: true,
            step: Some(step),
        };
        let Some(mut event) = self.record_grad(site, key, request.loc)? else {
            return Err(Leave::Eager(Reason::UserCode));
        };
        if next.is_none() && !request.allow_unused && event.found[..asked].contains(&None) {
            return Err(Leave::Eager(Reason::Independent));
        }
        event.reached = way.leaves;
        self.extend(site, Event::Grad(event))
    }

    /// Where a pass goes.
    fn way(&mut self, site: &Site, outputs: &OutputKey, toward: Option<&[Variable]>) -> Result<Way, Leave> {
        let twice = self.analysis(site).twice;
        let analysis = self.analysis(site);
        let known = outputs.iter().map(|(output, _)| *output).filter(|v| *v < analysis.next());
        let mut roots: Vec<Variable> = known.collect();
        let reach = analysis.reach(&roots);
        if reach.freed {
            return Err(Leave::Eager(Reason::PassFreed));
        }
        if reach.overwritten {
            return Err(Leave::Eager(Reason::Overwritten));
        }
        let visited = match toward {
            Some(inputs) => analysis.on_the_way(&roots, inputs),
            None => reach.calls.clone(),
        };
        let retained = analysis.retained_on(&visited).map_err(Leave::Eager)?;
        let (mut leaves, mut functions) =
            (analysis.in_order_of_arrival(&roots, &reach), analysis.functions_on(&visited));
        if twice {
            // What gradients reach behind a pass that is on the tape itself shows in its ops only.
            let trace = analysis::trace(self.trie(site), self.at);
            loop {
                let from: OutputKey = roots.iter().map(|&root| (root, None)).collect();
                let survey =
                    kiln_aot::survey_backward(&trace, &from).map_err(|_| Leave::Eager(Reason::NoCapture))?;
                let analysis = self.analysis(site);
                functions = analysis.functions_of(&survey.inputs);
                let behind: Vec<Variable> = functions.iter().flat_map(|&k| analysis.inputs_of(k)).collect();
                let before = roots.len();
                for input in behind {
                    if !roots.contains(&input) {
                        roots.push(input);
                    }
                }
                leaves = survey.inputs;
                if roots.len() == before {
                    break;
                }
            }
            let analysis = self.analysis(site);
            leaves.retain(|leaf| analysis.functions_of(&[*leaf]).is_empty());
        }
        let analysis = self.analysis(site);
        if leaves.iter().any(|&leaf| !analysis.is_leaf(leaf)) {
            return Err(Leave::Eager(Reason::UserCodeOutside));
        }
        Ok(Way { leaves: leaves.into_iter().map(|leaf| (leaf, true)).collect(), retained, functions })
    }
}

/// Where a pass goes: the leaves that it reaches, what is retained on the way, and the custom functions.
struct Way {
    leaves: Vec<(Variable, bool)>,
    retained: Vec<Variable>,
    functions: Vec<usize>,
}

/// How far a pass has come.
#[derive(Default)]
struct Walk {
    /// What flows on: from the outputs, and from the inputs of functions that had their turn.
    seeds: Vec<(Tensor, Option<Tensor>)>,
    /// Those functions.
    done: Vec<usize>,
    /// Those of them that a gradient reached: their backward was run.
    reached: Vec<usize>,
    /// Their results.
    closed: Vec<Tensor>,
}

impl Run {
    /// Goes a pass in steps, to its end or until it has to go on eagerly.
    fn walk(
        &self,
        walk: &mut Walk,
        request: &GradRequest<'_>,
    ) -> Result<(Vec<Tensor>, Vec<Option<Tensor>>), Leave> {
        let weights = request.weights.iter().copied().chain(std::iter::repeat(None));
        walk.seeds = request.outputs.iter().zip(weights).map(|(&o, w)| (o.clone(), w.cloned())).collect();
        loop {
            let mut state = self.lock();
            let (function, grads) = match state.step_on(self.site(), &walk.seeds, request, &walk.done)? {
                PassStep::Function(function, grads) => (function, grads),
                PassStep::Last(whose, grads) => {
                    for &function in walk.reached.iter().filter(|_| !request.retain_graph) {
                        state.functions[function].used_up = true;
                    }
                    return Ok((whose, grads));
                }
            };
            walk.done.push(function);
            let applied = &state.functions[function];
            let context = applied.context.with_saved(state.saved_by(applied));
            let inputs: Vec<Option<Tensor>> =
                applied.inputs.iter().map(|&input| state.held(input).cloned()).collect();
            walk.closed.extend(applied.outputs.iter().filter_map(|&output| state.held(output).cloned()));
            let (types, loc, code) = (applied.types.clone(), applied.loc, applied.function.clone());
            // Only the results that carry gradients were asked for.
            let mut grads = grads.into_iter();
            let each = |ty: &TensorTy| if ty.dtype.is_float() { grads.next().flatten() } else { None };
            let grads: Vec<Option<Tensor>> = types.1.iter().map(each).collect();
            let segment = state.id;
            drop(state);
            if grads.iter().all(Option::is_none) {
                continue;
            }
            walk.reached.push(function);
            let results = {
                let _mode = if request.create_graph { enable_grad() } else { no_grad() };
                autograd::gradients_of(&*code, &context, &grads, (&types.0, &types.1), loc)?
            };
            for (input, grad) in inputs.into_iter().zip(results) {
                if let (Some(input), Some(grad)) = (input, grad) {
                    walk.seeds.push((input, Some(grad)));
                }
            }
            let state = self.lock();
            if state.eager || state.id != segment {
                return Err(Leave::Eager(Reason::FunctionValue));
            }
        }
    }

    /// What is left of a pass that is to go on eagerly, handed to `body`; the rest of the call is eager.
    fn go_on<T>(
        &self,
        walk: &Walk,
        request: &GradRequest<'_>,
        leave: Leave,
        body: impl FnOnce(&GradRequest<'_>) -> Result<T>,
    ) -> Result<T> {
        match leave {
            Leave::Error(error) => {
                self.lock().forget_fresh();
                return Err(error);
            }
            Leave::Eager(reason) => self.leave_for(reason, request.loc)?,
        }
        let outputs: Vec<&Tensor> = walk.seeds.iter().map(|(output, _)| output).collect();
        let weights: Vec<Option<&Tensor>> = walk.seeds.iter().map(|(_, weight)| weight.as_ref()).collect();
        let closed: Vec<&Tensor> = walk.closed.iter().collect();
        body(&GradRequest { outputs: &outputs, weights: &weights, closed: &closed, ..*request })
    }

    /// `backward()` in steps.
    pub(crate) fn backward_in_steps(&self, request: &GradRequest<'_>) -> Result<()> {
        let mut walk = Walk::default();
        let (whose, grads) = match self.walk(&mut walk, request) {
            Ok(found) => found,
            Err(leave) => return self.go_on(&walk, request, leave, autograd::run_backward),
        };
        drop(walk);
        let found: Vec<(Tensor, Tensor)> =
            whose.into_iter().zip(grads).filter_map(|(tensor, grad)| Some((tensor, grad?))).collect();
        let _mode = if request.create_graph { enable_grad() } else { no_grad() };
        let (leaves, retained): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|(tensor, _)| tensor.is_leaf());
        for (tensor, grad) in retained {
            autograd::deliver(&tensor, grad, request.create_graph, request.loc)?;
        }
        let mut ready = Vec::with_capacity(leaves.len());
        for (leaf, grad) in leaves {
            let before = grad.address();
            let mut grad = autograd::through_hooks(&leaf, grad)?;
            if grad.address() != before && !request.create_graph {
                // A hook may return a view, or something that it keeps.
                grad = grad.clone_tensor()?;
            }
            ready.push((leaf, grad));
        }
        for (leaf, grad) in ready {
            autograd::deliver(&leaf, grad, request.create_graph, request.loc)?;
        }
        Ok(())
    }

    /// `grad()` in steps.
    pub(crate) fn grad_in_steps(&self, request: &GradRequest<'_>) -> Result<Vec<Option<Tensor>>> {
        let mut walk = Walk::default();
        let (whose, mut grads) = match self.walk(&mut walk, request) {
            Ok(found) => found,
            Err(leave) => return self.go_on(&walk, request, leave, autograd::run_grad),
        };
        drop(walk);
        let asked = request.inputs.len();
        let retained: Vec<Option<Tensor>> = grads.drain(asked..).collect();
        let _mode = if request.create_graph { enable_grad() } else { no_grad() };
        for (tensor, grad) in whose.into_iter().skip(asked).zip(retained) {
            if let Some(grad) = grad {
                autograd::deliver(&tensor, grad, request.create_graph, request.loc)?;
            }
        }
        Ok(grads)
    }

    /// The variable that a tensor is, if the segment knows it.
    pub(crate) fn known(&self, state: &State, tensor: &Tensor) -> Option<Variable> {
        let tag: Tag = tensor.tag();
        if tag.run() == state.id {
            return Some(tag.variable());
        }
        if state.trusts_tags() {
            return None;
        }
        (0..state.variables.len() as Variable).find(|&v| state.input(v).is_some_and(|t| t.same(tensor)))
    }
}
