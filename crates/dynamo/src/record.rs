//! What happens only where no call went before: checks, types, and what `backward()` will reach.

use smallvec::SmallVec;

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{Error, Grad, ListTy, Result, Ty, Why, carries_gradient};
use kiln_tensor::hook::{Arg, Call, GradRequest};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{
    Tensor, autograd, check_in_place, check_in_place_target, check_in_place_types, with_module,
};

use crate::analysis;
use crate::event::{BackwardEvent, Event, KeyArg, Made};
use crate::region::Site;
use crate::state::{Leave, State, recordings};
use crate::why::Reason;

/// What is differentiated, and from which gradient, if not from one.
pub(crate) type OutputKey = SmallVec<[(Variable, Option<Variable>); 1]>;

/// Inputs whose tape lies outside, with their gradients.
pub(crate) type Outside = Vec<(Tensor, Tensor)>;

impl State {
    /// What an op makes, worked out when it is recorded for the first time: all its checks are here.
    pub(crate) fn infer(&mut self, site: &Site, call: &Call<'_>) -> Result<Made, Leave> {
        let tys = self.arg_tys(site, call.args)?;
        let fail = |error: Error| Leave::Error(with_module(error, call.args));
        let outs = call.op.infer(&tys).map_err(|why| fail(call.op.error(&tys, why, call.loc)))?;
        let wants = |arg: &Arg<'_>| matches!(arg, Arg::Tensor(t) if t.requires_grad());
        let requires_grad = call.grad_enabled
            && carries_gradient(&outs[0])
            && !matches!(call.op.row().grad, Grad::Zero)
            && call.args.iter().any(wants);
        let list_wants = |arg: &Arg<'_>| match arg {
            Arg::List(list) => list.try_items().unwrap_or_default().iter().any(Tensor::requires_grad),
            _ => false,
        };
        let cuts = matches!(call.op.row().grad, Grad::Zero);
        if cuts
            && call.in_place
            && call.grad_enabled
            && call.args.first().is_some_and(|x| wants(x) || list_wants(x))
        {
            return Err(Leave::Eager(Reason::CutOff));
        }
        let through_list = call.grad_enabled && !cuts && call.args.iter().any(list_wants);
        if !call.in_place && through_list {
            return Err(Leave::Eager(Reason::ListGradient));
        }
        if !call.in_place {
            return match &outs[0] {
                Ty::Scalar(_) => Err(Leave::Eager(Reason::Numbers)),
                ty => Ok(Made::Variable { ty: ty.clone(), requires_grad }),
            };
        }
        let Some(KeyArg::Variable(target)) = self.args.first().copied() else {
            return Err(Leave::Eager(Reason::NoTarget));
        };
        let recorded = call.grad_enabled && call.args.iter().any(|arg| wants(arg) || list_wants(arg));
        let alike =
            if recorded { self.analysis(site).alike(target).map_err(Leave::Eager)? } else { SmallVec::new() };
        match (call.args.first(), &tys[0]) {
            (Some(Arg::List(_)), Ty::List(_)) => {
                let overlapping = self.analysis(site).overlapping_item(target);
                self.check_list_in_place(call, &tys, overlapping).map_err(fail)?;
            }
            _ => check_in_place(call, call.args, &tys).map_err(fail)?,
        }
        if through_list {
            return Err(Leave::Eager(Reason::ListGradient));
        }
        if let Ty::List(_) = tys[0] {
            let args = self.args.clone();
            if let Some(reason) = self.analysis(site).list_conflict(&args) {
                return Err(Leave::Eager(reason));
            }
        }
        if let Some(reason) = self.target_conflict(site, target) {
            return Err(Leave::Eager(reason));
        }
        if requires_grad && self.input(target).is_some() {
            return Err(Leave::Eager(Reason::ChangedInput));
        }
        let analysis = self.analysis(site);
        if target < analysis.next() && analysis.layout_overlaps(target) {
            let error = call.op.error(&tys, Why::Overlap, call.loc);
            return Err(fail(error.named(&format!("{}_", call.op.name()))));
        }
        Ok(Made::Changed { requires_grad, alike: if requires_grad { alike } else { SmallVec::new() } })
    }

    /// Why the target of an in-place op can't be changed in a captured program, if it can't.
    pub(crate) fn target_conflict(&mut self, site: &Site, target: Variable) -> Option<Reason> {
        let fresh = self.fresh.clone();
        let analysis = self.analysis(site);
        if target < analysis.next() {
            let conflict = analysis.conflict(target);
            // An input that arrives with this very op may share the target's storage.
            let arriving =
                fresh.iter().any(|&(_, shares)| shares.is_some_and(|v| analysis.bases(target).contains(&v)));
            conflict.or(arriving.then_some(Reason::SharedInputs))
        } else {
            let shares =
                fresh.iter().any(|&(v, shares)| (v == target && shares.is_some()) || shares == Some(target));
            shares.then_some(Reason::SharedInputs)
        }
    }

    /// The checks of an in-place op, for every element of a list, in eager's order. Several elements of tensor
    /// number `overlapping` share one place in memory.
    pub(crate) fn check_list_in_place(
        &self,
        call: &Call<'_>,
        tys: &[Ty],
        overlapping: Option<usize>,
    ) -> Result<()> {
        let (Some(Arg::List(list)), Some(targets)) = (call.args.first(), tys[0].as_list()) else {
            return Ok(());
        };
        let Some(tensors) = list.try_items() else { return Ok(()) };
        let lists: SmallVec<[&ListTy; 4]> = tys.iter().filter_map(Ty::as_list).collect();
        // Elements of equal types are judged by them once; the tensors themselves are looked at one by one.
        for run in ListTy::common_runs(&lists) {
            let element: SmallVec<[Ty; 4]> = tys.iter().map(|ty| element(ty, run.start)).collect();
            check_in_place_types(call, &element)?;
            for i in run.start..run.end.min(tensors.len()).min(targets.len()) {
                let tensor = &tensors[i];
                let args: SmallVec<[Arg<'_>; 4]> = call
                    .args
                    .iter()
                    .enumerate()
                    .map(|(k, arg)| match arg {
                        Arg::List(l) if k > 0 => {
                            l.try_items().map_or(Arg::Tensor(tensor), |items| Arg::Tensor(&items[i]))
                        }
                        Arg::List(_) => Arg::Tensor(tensor),
                        other => *other,
                    })
                    .collect();
                check_in_place_target(call, &args, &element, tensor)?;
                if overlapping == Some(i) {
                    let error = call.op.error(&element, Why::Overlap, call.loc);
                    return Err(error.named(&format!("{}_", call.op.name())));
                }
            }
        }
        Ok(())
    }

    /// `backward()`: one event, whose expansion into ops happens when the segment is compiled. `None`: user code
    /// takes part in the pass, which is gone in steps.
    pub(crate) fn backward(
        &mut self,
        site: &Site,
        request: &GradRequest<'_>,
    ) -> Result<Option<Outside>, Leave> {
        self.fresh.clear();
        let outputs = self.output_numbers(request)?;
        if request.create_graph || self.find_step(site, &outputs, None, request).is_some() {
            return Ok(None);
        }
        let aside = self.aside.clone();
        let trie = recordings(&aside, site);
        let candidates = trie.children(self.at);
        let mut found = None;
        for child in candidates {
            if let Event::Backward(event) = &*trie.node(child).event
                && event.outputs == outputs
                && event.retain_graph == request.retain_graph
                && self.targets_fit(&event.targets)?
                && self.guards_hold(&event.guards)
            {
                found = Some(child);
                break;
            }
        }
        match found {
            Some(child) => {
                if let Event::Backward(event) = &*trie.node(child).event {
                    if self.has_hooks(event.targets.iter().map(|&(input, ..)| input)) {
                        return Ok(None);
                    }
                    self.check_outside(event.targets.iter().map(|&(input, _, outside)| (input, !outside)))?;
                }
                if let Some(analysis) = &mut self.analysis {
                    analysis.add(&trie.node(child).event);
                }
                self.at = child;
                self.fresh.clear();
            }
            None => {
                if !self.record_backward(site, outputs, request)? {
                    return Ok(None);
                }
            }
        }
        // Recording may have gone aside.
        let aside = self.aside.clone();
        let Event::Backward(event) = &*recordings(&aside, site).node(self.at).event else {
            return Err(Leave::Eager(Reason::Lost));
        };
        let mut outside = Vec::new();
        for &(input, target, is_outside) in &event.targets {
            match target {
                GradTarget::Accumulate(_) => self.writes = true,
                GradTarget::New(_) => {
                    let grad = self.make(false);
                    let Some(tensor) = self.held(input).cloned() else { continue };
                    if is_outside { outside.push((tensor, grad)) } else { tensor.set_grad(Some(grad)) }
                }
            }
        }
        Ok(Some(outside))
    }

    /// The outputs of a request and their weights, as variables.
    pub(crate) fn output_numbers(&mut self, request: &GradRequest<'_>) -> Result<OutputKey> {
        let weights = request.weights.iter().copied().chain(std::iter::repeat(None));
        let mut outputs = OutputKey::new();
        for (output, weight) in request.outputs.iter().zip(weights) {
            let output = self.number_of(output)?;
            outputs.push((output, weight.map(|weight| self.number_of(weight)).transpose()?));
        }
        Ok(outputs)
    }

    /// A pass that fails changes no leaf. What this graph has for leaves is there before the pass goes on outside,
    /// so that must be sure to succeed.
    fn check_outside(&self, targets: impl Iterator<Item = (Variable, bool)> + Clone) -> Result<(), Leave> {
        let outside = targets.clone().filter(|(_, leaf)| !leaf);
        let tensors: SmallVec<[Tensor; 2]> = outside.filter_map(|(v, _)| self.held(v).cloned()).collect();
        let no_leaves = || !targets.clone().any(|(_, leaf)| leaf);
        if tensors.is_empty() || no_leaves() || autograd::goes_through(&tensors) {
            return Ok(());
        }
        Err(Leave::Eager(Reason::MayFailOutside))
    }

    /// Hooks are user code that must run on every pass.
    pub(crate) fn has_hooks(&self, mut leaves: impl Iterator<Item = Variable>) -> bool {
        leaves.any(|leaf| self.held(leaf).is_some_and(Tensor::has_hooks))
    }

    /// Whether the leaves have or lack gradients as they did; registers existing gradients as inputs.
    pub(crate) fn targets_fit(&mut self, targets: &[(Variable, GradTarget, bool)]) -> Result<bool> {
        for &(input, target, outside) in targets {
            let Some(tensor) = self.held(input).cloned() else { return Ok(false) };
            let fits = match (target, tensor.grad()) {
                (GradTarget::New(_), _) if outside => true,
                (GradTarget::New(_), None) => true,
                (GradTarget::Accumulate(existing), Some(grad)) => self.number_of(&grad)? == existing,
                _ => false,
            };
            if !fits {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Where a pass is on the tape itself, what gradients reach behind it shows in its ops only.
    fn reached_again(&mut self, site: &Site, outputs: &OutputKey) -> Result<Option<Vec<Variable>>, Leave> {
        if !self.analysis(site).twice {
            return Ok(None);
        }
        let survey = kiln_aot::survey_backward(&analysis::trace(self.trie(site), self.at), outputs)
            .map_err(|_| Leave::Eager(Reason::NoCapture))?;
        if survey.used_up { Err(Leave::Eager(Reason::BackwardFreed)) } else { Ok(Some(survey.inputs)) }
    }

    /// Records a pass, if no user code takes part in it.
    fn record_backward(
        &mut self,
        site: &Site,
        outputs: OutputKey,
        request: &GradRequest<'_>,
    ) -> Result<bool, Leave> {
        let analysis = self.analysis(site);
        let roots: SmallVec<[Variable; 2]> = outputs.iter().map(|(output, _)| *output).collect();
        if roots.iter().any(|root| *root >= analysis.next()) {
            return Err(Leave::Eager(Reason::ComputedOutside));
        }
        let reach = analysis.reach(&roots);
        if reach.freed {
            return Err(Leave::Eager(Reason::BackwardFreed));
        }
        if reach.overwritten {
            return Err(Leave::Eager(Reason::Overwritten));
        }
        if let Some((op, reason)) = reach.blocked {
            return Err(Leave::Error(Error::op(op.name(), Why::NotDifferentiable { reason }, request.loc)));
        }
        let retained = analysis.retained_on(&reach.calls).map_err(Leave::Eager)?;
        if !retained.is_empty() || !analysis.functions_on(&reach.calls).is_empty() {
            return Ok(false);
        }
        let inputs = match self.reached_again(site, &outputs)? {
            // What a pass on the tape hides may be a custom function's.
            Some(inputs) if !self.analysis(site).functions_of(&inputs).is_empty() => return Ok(false),
            Some(inputs) => inputs,
            None => reach.inputs,
        };
        let analysis = self.analysis(site);
        let leaves: Vec<(Variable, bool)> = inputs.iter().map(|&v| (v, analysis.is_leaf(v))).collect();
        // The tape outside may lead to a leaf whose gradient this graph has yet to put there.
        if analysis.has_delivered() && leaves.iter().any(|(_, leaf)| !leaf) {
            return Err(Leave::Eager(Reason::SecondBackward));
        }
        if self.has_hooks(leaves.iter().map(|&(input, _)| input)) {
            return Ok(false);
        }
        self.check_outside(leaves.iter().copied())?;
        // Existing gradients become inputs first; then new variables are numbered.
        let mut found = Vec::new();
        for &(input, leaf) in &leaves {
            let existing = match self.held(input).and_then(|t| if leaf { t.grad() } else { None }) {
                Some(grad) => Some(self.number_of(&grad)?),
                None => None,
            };
            found.push((input, leaf, existing));
        }
        for &(_, shares_with) in &self.fresh.clone() {
            if let Some(reason) = self.analysis(site).input_conflict(shares_with) {
                return Err(Leave::Eager(reason));
            }
        }
        let mut next = self.variables.len() as Variable;
        let mut targets = Vec::new();
        for (input, leaf, existing) in found {
            let target = match existing {
                Some(existing) => {
                    if let Some(reason) = self.target_conflict(site, existing) {
                        return Err(Leave::Eager(reason));
                    }
                    GradTarget::Accumulate(existing)
                }
                None => {
                    next += 1;
                    GradTarget::New(next - 1)
                }
            };
            targets.push((input, target, !leaf));
        }
        let guards = self.guards()?;
        let (retain_graph, loc) = (request.retain_graph, request.loc);
        self.extend(site, Event::Backward(BackwardEvent { outputs, retain_graph, targets, guards, loc }))?;
        Ok(true)
    }
}

/// The type of one element of a list; numbers are for all.
fn element(ty: &Ty, i: usize) -> Ty {
    ty.as_list().map_or_else(|| ty.clone(), |items| Ty::Tensor(items[i].clone()))
}
