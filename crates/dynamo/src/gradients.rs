//! `grad()` in a compiled function: one event, as `backward()` is. Where it goes and what it finds is worked out
//! when it is recorded, by translating what was captured so far; replay compares one key.

use smallvec::SmallVec;

use kiln_aot::trace::Variable;
use kiln_ir::{Loc, Result};
use kiln_tensor::hook::GradRequest;
use kiln_tensor::{Tensor, autograd};

use crate::analysis;
use crate::event::{Event, GradEvent, GradKey};
use crate::region::Site;
use crate::state::{Leave, State, recordings};
use crate::why::Reason;

/// What came of a request.
pub(crate) enum Found {
    Gradients(Vec<Option<Tensor>>),
    /// User code takes part in the pass, which is gone in steps.
    InSteps,
    /// It can't be captured, and nothing happened.
    Nothing,
}

impl State {
    /// The gradients asked for, as new variables, if the request can be captured at once.
    pub(crate) fn grad(&mut self, site: &Site, request: &GradRequest<'_>) -> Result<Found, Leave> {
        self.fresh.clear();
        let key = self.grad_key(request)?;
        let known = self.trie(site).find(self.at, |event| match event {
            Event::Grad(event) => event.key == key && self.guards_hold(&event.guards),
            _ => false,
        });
        match known {
            Some(child) => {
                let aside = self.aside.clone();
                let event = &recordings(&aside, site).node(child).event;
                if let Event::Grad(event) = &**event
                    && !self.ends_inside(event, request)?
                {
                    return Ok(Found::Nothing);
                }
                if let Some(analysis) = &mut self.analysis {
                    analysis.add(event);
                }
                self.at = child;
                self.fresh.clear();
            }
            None => {
                if self.find_step(site, &key.outputs, Some(&key.inputs), request).is_some()
                    || self.takes_steps(site, &key)?
                {
                    return Ok(Found::InSteps);
                }
                match self.record_grad(site, key, request.loc)? {
                    Some(event) if self.ends_inside(&event, request)? => {
                        self.extend(site, Event::Grad(event))?;
                    }
                    _ => return Ok(Found::Nothing),
                }
            }
        }
        self.make_found(site).map(Found::Gradients)
    }

    /// The gradients of the pass that was just recorded or met again.
    pub(crate) fn make_found(&mut self, site: &Site) -> Result<Vec<Option<Tensor>>, Leave> {
        let aside = self.aside.clone();
        let Event::Grad(event) = &*recordings(&aside, site).node(self.at).event else {
            return Err(Leave::Eager(Reason::Lost));
        };
        Ok(event.found.iter().map(|found| found.map(|on_tape| self.make(on_tape))).collect())
    }

    /// Whether the pass has nothing to do outside: no hook waits, and no tape there leads to what is asked for.
    fn ends_inside(&self, event: &GradEvent, request: &GradRequest<'_>) -> Result<bool, Leave> {
        if self.has_hooks(event.reached.iter().map(|&(input, _)| input)) {
            return Err(Leave::Eager(Reason::Hook));
        }
        let outside = event.reached.iter().filter(|(_, leaf)| !leaf);
        let outside: Vec<Tensor> = outside.filter_map(|&(v, _)| self.held(v).cloned()).collect();
        Ok(outside.is_empty() || !autograd::goes_on(&outside, request.inputs))
    }

    fn grad_key(&mut self, request: &GradRequest<'_>) -> Result<GradKey> {
        let outputs = self.output_numbers(request)?;
        let inputs = request.inputs.iter().map(|input| self.number_of(input)).collect::<Result<_>>()?;
        let GradRequest { retain_graph, create_graph, allow_unused, .. } = *request;
        Ok(GradKey { outputs, inputs, retain_graph, create_graph, allow_unused, step: None })
    }

    /// What is to be recorded; `None` where the pass can't be captured.
    pub(crate) fn record_grad(
        &mut self,
        site: &Site,
        key: GradKey,
        loc: Loc,
    ) -> Result<Option<GradEvent>, Leave> {
        let fresh = self.fresh.clone();
        let guards = self.guards()?;
        let analysis = self.analysis(site);
        if let Some(reason) = fresh.iter().find_map(|&(_, shares_with)| analysis.input_conflict(shares_with))
        {
            return Err(Leave::Eager(reason));
        }
        // A tensor that arrives now was made outside, and nothing that was captured is on its tape.
        let is_known = |v: &Variable| *v < analysis.next();
        let outputs: SmallVec<[_; 1]> = key.outputs.iter().copied().filter(|(v, _)| is_known(v)).collect();
        if analysis.is_used_up(&outputs, &key.inputs) {
            return Err(Leave::Eager(Reason::GradFreed));
        }
        let mut trace = analysis::trace(self.trie(site), self.at);
        analysis::add_inputs(&mut trace, &guards);
        let made = key.step.as_ref().is_some_and(|step| step.function.is_some());
        let wanted = (key.inputs.as_slice(), made);
        let Ok(survey) = kiln_aot::survey_grad(&trace, &key.outputs, wanted, key.create_graph) else {
            return Ok(None);
        };
        if survey.used_up {
            return Err(Leave::Eager(Reason::GradFreed));
        }
        // What was made inside is a leaf.
        let leaf = |v: Variable| trace.variables[v as usize].input.as_ref().is_none_or(|input| input.leaf);
        let reached: Vec<(Variable, bool)> = survey.inputs.iter().map(|&v| (v, leaf(v))).collect();
        if !key.allow_unused && survey.found.contains(&None) {
            return if reached.iter().all(|(_, leaf)| *leaf) {
                Err(Leave::Eager(Reason::Independent))
            } else {
                // the tape outside may lead there
                Ok(None)
            };
        }
        let found = survey.found.into_iter().collect();
        Ok(Some(GradEvent { key, found, reached, guards, loc }))
    }
}
