//! The tape of a segment so far: what gradients flow through, what a pass used up, where user code takes part.

use std::borrow::Cow;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_aot::trace::Variable;
use kiln_ir::{Grad, Loc, Op, Reads, Ty};

use super::{Analysis, Done};
use crate::event::{GradEvent, KeyArg};
use crate::why::Reason;

impl Analysis {
    /// Takes note of what a pass uses up. A function on its way is, only if a gradient reached it; what is behind
    /// it is, if its backward gave gradients: they are outputs then, from which the last step goes on.
    pub(super) fn free(&mut self, event: &GradEvent) {
        let function = event.key.step.as_ref().and_then(|step| step.function);
        if function.is_some() && event.found.iter().any(Option::is_some) {
            self.reached.extend(function);
        }
        if function.is_none() {
            let reached = std::mem::take(&mut self.reached);
            if !event.key.retain_graph {
                let roots = event.key.outputs.iter().map(|(output, _)| *output).collect::<Vec<_>>();
                let mut calls = self.reach_as_far(&roots, Far::Functions).calls;
                let leads = self.leads(&event.key.inputs);
                calls.retain(|call| leads.contains(call) && !self.functions.iter().any(|f| f.call == *call));
                self.freed.extend(calls);
                self.freed.extend(reached.into_iter().map(|k| self.functions[k as usize].call));
            }
        }
    }

    /// The calls that lead to some variables.
    fn leads(&self, inputs: &[Variable]) -> FxHashSet<usize> {
        let mut leads = FxHashSet::default();
        for (index, call) in self.calls.iter().enumerate() {
            let useful = call.args.iter().any(|arg| match arg {
                KeyArg::Variable(v) => {
                    inputs.contains(v)
                        || self.history[*v as usize].iter().any(|b| *b < index && leads.contains(b))
                }
                KeyArg::Number(..) => false,
            });
            if useful {
                leads.insert(index);
            }
        }
        leads
    }

    /// The calls that `grad` differentiates: those between what it differentiates and what it is asked for.
    fn visited(&self, outputs: &[(Variable, Option<Variable>)], inputs: &[Variable]) -> Vec<usize> {
        let leads = self.leads(inputs);
        let roots: Vec<Variable> = outputs.iter().map(|(output, _)| *output).collect();
        self.reach(&roots).calls.into_iter().filter(|call| leads.contains(call)).collect()
    }

    /// Whether `grad` would meet tape that was used up or overwritten, as far as it is known here.
    pub(crate) fn is_used_up(&self, outputs: &[(Variable, Option<Variable>)], inputs: &[Variable]) -> bool {
        let visited: FxHashSet<usize> = self.visited(outputs, inputs).into_iter().collect();
        visited.iter().any(|call| self.freed.contains(call)) || self.is_overwritten(&visited)
    }

    /// The calls and inputs that gradients of some variables flow through.
    pub(crate) fn reach(&self, roots: &[Variable]) -> Reach {
        self.reach_as_far(roots, Far::All)
    }

    /// The call that made a variable what it is now.
    pub(crate) fn maker(&self, variable: Variable) -> Option<usize> {
        self.history[variable as usize].last().copied()
    }

    /// The base of a view that is to get its history from there: the memory was changed since the view was made,
    /// and the change is not in its history.
    fn renewed_from(&self, variable: Variable, end: usize) -> Option<Variable> {
        let known = &self.variables[variable as usize];
        let maker = self.history[variable as usize].iter().rev().find(|index| **index < end)?;
        let mut writes = self.variables[known.base as usize].writes.iter();
        let renewed = known.base != variable && known.tracked && writes.any(|at| maker < at && *at < end);
        renewed.then_some(known.base)
    }

    /// The calls and inputs that gradients of some variables flow through, to a certain point.
    pub(crate) fn reach_as_far(&self, roots: &[Variable], far: Far<'_>) -> Reach {
        let mut reach = Reach::default();
        // What a call read has the history that it had then: a later change in place is not on its way.
        let mut seen: FxHashMap<Variable, usize> = FxHashMap::default();
        let mut stack: Vec<_> = roots.iter().map(|&root| (root, self.calls.len())).collect();
        while let Some((variable, end)) = stack.pop() {
            let before = seen.get(&variable).copied();
            if before.is_some_and(|before| before >= end) {
                continue;
            }
            seen.insert(variable, end);
            if before.is_none() && self.is_source(variable, end) {
                reach.inputs.push(variable);
            }
            if let Some(base) = self.renewed_from(variable, end) {
                stack.push((base, end));
                continue;
            }
            for &index in self.history[variable as usize].iter().filter(|&&index| index < end) {
                if let Far::Makers(makers) = far
                    && let Some(&made) = makers.get(&index)
                    && !roots.contains(&made)
                {
                    reach.inputs.push(made);
                    continue;
                }
                reach.calls.insert(index);
                if matches!(far, Far::Functions) && self.functions.iter().any(|f| f.call == index) {
                    continue;
                }
                let call = &self.calls[index];
                if let Some(op) = &call.op
                    && let Grad::NotDifferentiable(reason) = op.row().grad
                {
                    reach.blocked = Some((op.clone(), reason));
                }
                for arg in &call.args {
                    if let KeyArg::Variable(v) = arg
                        && self.required(*v, index)
                    {
                        stack.push((*v, index));
                    }
                }
            }
        }
        reach.inputs.sort_unstable();
        reach.inputs.dedup();
        reach.freed = reach.calls.iter().any(|call| self.freed.contains(call));
        reach.overwritten = self.is_overwritten(&reach.calls);
        reach
    }

    /// Whether something that one of these calls saved for its gradient was changed in place since: eager mode
    /// refuses the pass.
    fn is_overwritten(&self, calls: &FxHashSet<usize>) -> bool {
        let written = |v: Variable, since: usize| {
            let base = self.variables[v as usize].base;
            self.variables[base as usize].writes.iter().any(|at| *at > since)
        };
        calls.iter().any(|&index| {
            let Done { op: Some(op), args, out, .. } = &self.calls[index] else { return false };
            let target = match (out, args.first()) {
                (None, Some(KeyArg::Variable(target))) => Some(*target),
                _ => None,
            };
            let result = out.or(target);
            let variable = |arg: &KeyArg| if let KeyArg::Variable(v) = arg { Some(*v) } else { None };
            let suspicious = args.iter().filter_map(variable).chain(result).any(|v| written(v, index));
            if !suspicious {
                return false;
            }
            let ty = |arg: &KeyArg| match arg {
                KeyArg::Variable(v) => self.variables[*v as usize].info.ty.clone(),
                KeyArg::Number(kind, ..) => Ty::Scalar(*kind),
            };
            let tys: Vec<Ty> = args.iter().map(ty).collect();
            let needs: Vec<bool> =
                args.iter().map(|arg| variable(arg).is_some_and(|v| self.required(v, index))).collect();
            let Ok(outs) = op.infer(&tys) else { return false };
            let reads = Reads::of(op, &tys, &outs[0], &needs).unwrap_or(Reads::ALL);
            // An op that changes its target keeps copies of what lies there.
            let base = |v: Variable| self.variables[v as usize].base;
            let copied = |v: Variable| target.is_some_and(|target| base(target) == base(v));
            let operands = args.iter().enumerate().filter_map(|(i, arg)| Some((i, variable(arg)?)));
            operands.into_iter().any(|(i, v)| reads.operand(i) && !copied(v) && written(v, index))
                || reads.result && result.is_some_and(|v| written(v, index))
        })
    }

    /// What a pass that comes from a variable meets first of the tape that was used up.
    pub(crate) fn first_used_up(&self, variable: Variable) -> Option<TapeCall> {
        let calls = self.reach_as_far(&[variable], Far::Functions).calls;
        let call = calls.into_iter().filter(|call| self.freed.contains(call)).max()?;
        Some(self.tape_call(call))
    }

    /// A call, as errors name it.
    pub(crate) fn tape_call(&self, call: usize) -> TapeCall {
        let Done { op, loc, .. } = &self.calls[call];
        let function = || self.functions.iter().find(|function| function.call == call);
        let op = match op {
            Some(op) => Some(Cow::Borrowed(op.name())),
            None => function().map(|function| Cow::Owned(function.name.to_string())),
        };
        TapeCall { op, loc: *loc }
    }

    /// Whether a `backward` before put gradients into leaves.
    pub(crate) fn has_delivered(&self) -> bool {
        self.delivered
    }

    pub(crate) fn is_leaf(&self, variable: Variable) -> bool {
        match &self.variables[variable as usize].info.input {
            Some(input) => input.leaf,
            // What was changed by an op on the tape has a history, whatever it was told before.
            None => self.told.contains_key(&variable) && self.history[variable as usize].is_empty(),
        }
    }

    /// The leaves that a pass reaches, in the order in which eager's gradients arrive there.
    pub(crate) fn in_order_of_arrival(&self, roots: &[Variable], reach: &Reach) -> Vec<Variable> {
        let mut calls: Vec<usize> = reach.calls.iter().copied().collect();
        calls.sort_unstable_by(|a, b| b.cmp(a));
        let read = |call: usize| {
            self.calls[call].args.iter().filter_map(move |arg| match arg {
                KeyArg::Variable(v) if self.required(*v, call) => Some(*v),
                _ => None,
            })
        };
        let mut seen = FxHashSet::default();
        let met = roots.iter().copied().chain(calls.into_iter().flat_map(read));
        // A view that is renewed leads to its base, and no call read that.
        let met = met.chain(reach.inputs.iter().copied());
        met.filter(|v| reach.inputs.contains(v) && seen.insert(*v)).collect()
    }

    /// The retained variables that a pass through these calls meets. `Err`: one was changed since.
    pub(crate) fn retained_on(&self, calls: &FxHashSet<usize>) -> Result<Vec<Variable>, Reason> {
        let met = self.retained.iter().filter(|(_, maker)| calls.contains(maker));
        met.map(|&(variable, maker)| match self.history[variable as usize].last() {
            Some(last) if *last == maker => Ok(variable),
            _ => Err(Reason::RetainedChanged),
        })
        .collect()
    }

    /// The custom functions among some calls.
    pub(crate) fn functions_on(&self, calls: &FxHashSet<usize>) -> Vec<usize> {
        (0..self.functions.len()).filter(|&k| calls.contains(&self.functions[k].call)).collect()
    }

    /// The custom functions among whose results are some of these variables.
    pub(crate) fn functions_of(&self, variables: &[Variable]) -> Vec<usize> {
        let made = |k: &usize| self.functions[*k].outputs.iter().any(|output| variables.contains(output));
        (0..self.functions.len()).filter(made).collect()
    }

    /// What a custom function was applied to.
    pub(crate) fn inputs_of(&self, function: usize) -> Vec<Variable> {
        let call = &self.calls[self.functions[function].call];
        call.args
            .iter()
            .filter_map(|arg| if let KeyArg::Variable(v) = arg { Some(*v) } else { None })
            .collect()
    }

    /// The results of a custom function.
    pub(crate) fn outputs_of(&self, function: usize) -> &[Variable] {
        &self.functions[function].outputs
    }

    /// Whether one of these variables was changed, or told something, since a function was applied.
    pub(crate) fn changed_since(
        &self,
        function: usize,
        variables: impl IntoIterator<Item = Variable>,
    ) -> bool {
        let call = self.functions[function].call;
        let base = |v: Variable| self.variables[v as usize].base;
        let written = |v: Variable| self.variables[base(v) as usize].writes.iter().any(|at| *at > call);
        let told =
            |v: Variable| self.told.get(&v).is_some_and(|told| told.iter().any(|(from, _)| *from > call));
        variables.into_iter().any(|v| written(v) || told(v))
    }

    /// Whether the tape of a result meets what a compiled backward can't do: a custom function, a gradient to be
    /// retained, a leaf that was made inside or told something.
    pub(crate) fn stays_inside(&self, variable: Variable, reach: &Reach) -> Option<Reason> {
        if !self.functions_on(&reach.calls).is_empty() {
            return Some(Reason::LeavesFunction);
        }
        // Its own gradient arrives from outside, where it is looked at, unless it was changed since it was asked for.
        let arrives =
            |v: Variable, maker: usize| v == variable && self.history[v as usize].last() == Some(&maker);
        if self.retained.iter().any(|&(v, maker)| !arrives(v, maker) && reach.calls.contains(&maker)) {
            return Some(Reason::LeavesWatched);
        }
        let told = reach.inputs.iter().any(|v| self.told.contains_key(v));
        told.then_some(Reason::LeavesTold)
    }

    /// The calls that a pass of `grad` differentiates.
    pub(crate) fn on_the_way(&self, outputs: &[Variable], inputs: &[Variable]) -> FxHashSet<usize> {
        let outputs: Vec<_> = outputs.iter().map(|&output| (output, None)).collect();
        self.visited(&outputs, inputs).into_iter().collect()
    }
}

/// A call on the tape: its op or custom function (`None`: a pass) and the user's line.
#[derive(Clone, Debug)]
pub(crate) struct TapeCall {
    pub(crate) op: Option<Cow<'static, str>>,
    pub(crate) loc: Loc,
}

/// How far gradients are followed.
#[derive(Copy, Clone)]
pub(crate) enum Far<'a> {
    /// To the end.
    All,
    /// To custom functions: what flows on from them, only their own code knows.
    Functions,
    /// To the calls that made these variables, unless one of them is where it begins.
    Makers(&'a FxHashMap<usize, Variable>),
}

/// What gradients of a variable flow through.
#[derive(Default)]
pub(crate) struct Reach {
    pub(crate) calls: FxHashSet<usize>,
    pub(crate) inputs: Vec<Variable>,
    /// Some of the tape was used up by an earlier `backward`.
    pub(crate) freed: bool,
    /// Something on the way was changed in place after it was saved.
    pub(crate) overwritten: bool,
    /// An op on the way that has no gradient.
    pub(crate) blocked: Option<(Op, &'static str)>,
}
