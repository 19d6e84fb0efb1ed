//! A run: one call of a compiled function. It takes the ops the function asks for, follows (or extends) the
//! trie of recordings, and runs segments where values are needed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use kiln_ir::{Error, Fault, Layout, Line, Loc, Op, Result, TensorTy, planted};
use kiln_runtime::owner::{OwnerGuard, OwnerLock};
use kiln_tensor::autograd::Application;
use kiln_tensor::hook::{self, Access, Arg, Call, GradRequest, Output, Recorder, Scope};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Tensor, autograd, execute};

use crate::counters::{Count, count};
use crate::difference::Forbidden;
use crate::event::{Event, Mark};
use crate::general::{Came, Resized};
use crate::gradients::Found;
use crate::loops::Verdict;
use crate::region::Site;
use crate::segment::Segment;
use crate::sizes::Sight;
use crate::state::{ACTIVE, Held, Leave, MEETINGS, NEXT_RUN, State};
use crate::trie::ROOT;
use crate::why::Reason;
use crate::{caller, compiling, interpret};

/// See the [module](self).
pub(crate) struct Run {
    state: OwnerLock<State>,
    /// The state's id, readable without its lock.
    id: AtomicU32,
    site: Arc<Site>,
    itself: Weak<Run>,
}

/// Takes a call off the list when it ends, be it by a panic in a user's backend.
struct Ended {
    id: u32,
}

impl Drop for Ended {
    fn drop(&mut self) {
        hook::unregister(self.id);
        ACTIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Run {
    pub(crate) fn new(site: Arc<Site>) -> Arc<Run> {
        Arc::new_cyclic(|itself| Run {
            state: OwnerLock::default(),
            id: AtomicU32::new(0),
            site,
            itself: itself.clone(),
        })
    }

    /// Begins a call.
    pub(crate) fn begin(&self) {
        let own = self.state.own();
        debug_assert!(own, "a run between calls has no owner");
        let mut state = self.state.lock();
        state.at = ROOT;
        state.alone = ACTIVE.fetch_add(1, Ordering::Relaxed) == 0;
        if !state.alone {
            MEETINGS.fetch_add(1, Ordering::Relaxed);
        }
        state.meetings = MEETINGS.load(Ordering::Relaxed);
        state.eager = false;
        state.parted = None;
        state.aside = None;
        self.begin_segment(&mut state);
    }

    fn begin_segment(&self, state: &mut State) {
        hook::unregister(state.id);
        state.id = NEXT_RUN.fetch_add(1, Ordering::Relaxed).max(1);
        self.id.store(state.id, Ordering::Relaxed);
        state.start = state.at;
        state.functions.clear();
        state.forget_variables();
        state.makers.clear();
        if !planted(Fault::NumbersKept) {
            state.numbers.clear();
        }
        state.writes = false;
        state.analysis = None;
        let itself: Weak<dyn Recorder> = self.itself.clone();
        hook::register(state.id, itself);
    }

    /// Ends a call: runs what is pending, compiled if `normal`, op by op otherwise.
    pub(crate) fn end(&self, normal: bool) -> Result<()> {
        let mut state = self.state.lock();
        let _ended = Ended { id: state.id };
        let result = if normal { self.flush(&mut state) } else { self.flush_by_interpreter(&mut state) };
        state.functions.clear();
        state.forget_variables();
        state.results.clear();
        state.aside = None;
        state.id = 0;
        self.id.store(0, Ordering::Relaxed);
        let failed = state.failed.take();
        let result = result.and_then(|()| failed.map_or(Ok(()), Err));
        drop(state);
        // The next call may come from another thread.
        self.state.disown();
        result
    }

    /// Runs the pending segment and publishes its results.
    fn flush(&self, state: &mut State) -> Result<()> {
        if state.at == state.start {
            return Ok(());
        }
        state.live.clear();
        state.live.resize(state.variables.len().div_ceil(64), 0);
        for (i, held) in state.variables.iter().enumerate() {
            let live = match held {
                Held::Input(_) | Held::Item(_) => false,
                Held::Made(kept) => kept.is_shared(),
                Held::List(list) => list.try_items().is_none() && list.references() > 1,
            };
            if live {
                state.live[i / 64] |= 1 << (i % 64);
            }
        }
        if let Some(done) = self.flush_aside(state) {
            return done;
        }
        let segment = match self.site.trie.segment(state.at, &state.live) {
            Some(segment) => segment.clone(),
            None => {
                let again = match self.site.verdict(state) {
                    Verdict::Unknown => false,
                    Verdict::Segment(segment, _) => {
                        let segment = self.site.trie.add_segment(state.at, state.live.clone(), segment);
                        return self.run_segment(&segment, state);
                    }
                    Verdict::Once => return self.flush_by_interpreter(state),
                    Verdict::Again => true,
                };
                if again {
                    state.parted = None;
                } else {
                    self.site.note_loops(state);
                }
                let sight = self.site.sight(state.at, &state.live, &mut state.parted);
                let general = matches!(sight, Ok(Sight::Known { .. }));
                let refusal = match sight {
                    Ok(Sight::New) => self.site.may_compile().err(),
                    Ok(Sight::Known { first, again, at_once }) => {
                        if let Some(segment) = self.site.general(state.at, first, &state.live, at_once) {
                            let segment = self.site.trie.add_segment(state.at, state.live.clone(), segment);
                            return self.run_segment(&segment, state);
                        }
                        if again || at_once { None } else { Some(None) }
                    }
                    Err(Leave::Error(error)) => Some(Some(error)),
                    Err(Leave::Eager(_)) => Some(None),
                };
                if let Some(refusal) = refusal {
                    self.flush_by_interpreter(state)?;
                    return refusal.map_or(Ok(()), Err);
                }
                let name = |variable| state.input(variable).and_then(Tensor::label);
                let known = state.analysis.as_ref();
                let segment = compiling::compile(&self.site, state.at, &state.live, known, general, &name);
                let segment = Arc::new(segment);
                self.site.trie.add_segment(state.at, state.live.clone(), segment)
            }
        };
        self.run_segment(&segment, state)
    }

    fn run_segment(&self, segment: &Segment, state: &mut State) -> Result<()> {
        let _eager = Scope::suspend();
        segment.run(&self.site, state)
    }

    /// Runs a segment that was recorded aside, if there is a template for it. If not it goes into the region's trie
    /// after all, as long as there is room; `None` then.
    fn flush_aside(&self, state: &mut State) -> Option<Result<()>> {
        let trie = state.aside.as_ref()?.trie.clone();
        let parting = state.parted.map_or(ROOT, |parted| self.site.trie.node(parted.like).parent);
        let is_full = self.site.is_full(parting);
        let resized = match self.site.verdict(state) {
            Verdict::Segment(segment, came) => Some(Resized { segment, came }),
            Verdict::Once => return Some(self.flush_by_interpreter(state)),
            Verdict::Again | Verdict::Unknown => self.site.general_aside(&trie, state.at, &state.live),
        };
        if let Some(Resized { segment, came }) = resized {
            // Sizes that come again are worth a recording, which is followed much quicker than it is made.
            if came == Came::Again && !is_full {
                state.come_back(&self.site);
                self.site.trie.add_segment(state.at, state.live.clone(), segment.clone());
            }
            return Some(self.run_segment(&segment, state));
        }
        if !is_full {
            state.come_back(&self.site);
            return None;
        }
        let loc = Line::After(self.last_line(state));
        self.site.note_fallback(loc, Reason::Sizes, || state.module());
        Some(self.flush_by_interpreter(state))
    }

    pub(crate) fn flush_by_interpreter(&self, state: &mut State) -> Result<()> {
        if state.at == state.start {
            return Ok(());
        }
        let _eager = Scope::suspend();
        interpret::run(&self.site, state)
    }

    /// Runs what is pending because a value is needed, and begins a new segment.
    fn break_graph(&self, state: &mut State, reason: Reason, loc: Loc) -> Result<()> {
        self.break_graph_by(Run::flush, state, reason, loc)
    }

    fn break_graph_by(
        &self,
        flush: impl FnOnce(&Run, &mut State) -> Result<()>,
        state: &mut State,
        reason: Reason,
        loc: Loc,
    ) -> Result<()> {
        if state.at == state.start {
            return Ok(());
        }
        let known = state.trie(&self.site).find(state.at, |event| *event == Event::Break);
        // The call stack is read once for each break.
        let line = || {
            if loc.is_known() {
                loc.into()
            } else {
                caller::line().unwrap_or_else(|| Line::After(self.last_line(state)))
            }
        };
        if self.site.options.fullgraph {
            return Err(Forbidden::GraphBreak { loc: line(), reason }.into());
        }
        count(Count::Break);
        if loc.is_known() || known.is_none() {
            self.site.note_break(line(), reason, || state.module());
        }
        let outcome = flush(self, state);
        let trie = state.trie(&self.site);
        let next = match trie.find(state.at, |event| *event == Event::Break) {
            Some(next) => next,
            None => trie.insert(state.at, Event::Break),
        };
        state.at = next;
        self.begin_segment(state);
        outcome
    }

    /// The line of the op that was recorded last.
    fn last_line(&self, state: &State) -> Loc {
        state.trie(&self.site).node(state.at).event.loc()
    }

    /// Runs what is pending op by op; the rest of the call is eager.
    fn leave(&self, state: &mut State, reason: Reason, loc: Loc) -> Result<()> {
        let loc = if loc.is_known() { loc.into() } else { Line::After(self.last_line(state)) };
        self.site.note_fallback(loc, reason, || state.module());
        let outcome = self.flush_by_interpreter(state);
        state.at = state.start;
        state.functions.clear();
        state.forget_variables();
        state.eager = true;
        outcome
    }

    /// The rest of the call runs eagerly, if it does not yet.
    pub(crate) fn leave_for(&self, reason: Reason, loc: Loc) -> Result<()> {
        let mut state = self.state.lock();
        if state.eager { Ok(()) } else { self.leave(&mut state, reason, loc) }
    }

    pub(crate) fn lock(&self) -> OwnerGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn site(&self) -> &Site {
        &self.site
    }

    /// The number of the segment.
    pub(crate) fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }
}

impl Run {
    /// Tensors of other runs are finished while this run's lock is not held: two runs must never wait for each
    /// other.
    fn finish_others(&self, request: &GradRequest<'_>) -> Result<()> {
        let id = self.id.load(Ordering::Relaxed);
        let weights = request.weights.iter().copied().flatten();
        for tensor in request.outputs.iter().chain(request.inputs).copied().chain(weights) {
            if tensor.is_lazy() && tensor.tag().run() != id {
                tensor.ready()?;
            }
        }
        Ok(())
    }
}

impl Recorder for Run {
    fn replay(&self, call: &Call<'_>) -> Option<Tensor> {
        self.state.lock_own()?.replay(&self.site, call)
    }

    fn replay_in_place(&self, call: &Call<'_>) -> bool {
        self.state.lock_own().is_some_and(|mut state| state.replay_in_place(&self.site, call))
    }

    fn call(&self, call: &Call<'_>) -> Result<Output> {
        let id = self.id.load(Ordering::Relaxed);
        // Tensors of other runs are finished while this run's lock is not held: two runs must never wait for
        // each other.
        for arg in call.args {
            if let Arg::Tensor(t) = arg
                && t.is_lazy()
                && t.tag().run() != id
            {
                t.ready()?;
            }
        }
        let mut state = self.state.lock();
        if state.eager {
            drop(state);
            let _eager = Scope::suspend();
            return execute(call);
        }
        if planted(Fault::BreakAtCumsum) && matches!(call.op, Op::Cumsum { .. }) {
            self.break_graph(&mut state, Reason::Value { what: "cumsum" }, call.loc)?;
        }
        match state.call(&self.site, call) {
            Ok(output) => Ok(output),
            Err(Leave::Error(error)) => {
                state.forget_fresh();
                Err(error)
            }
            Err(Leave::Eager(reason)) => {
                self.leave(&mut state, reason, call.loc)?;
                drop(state);
                let _eager = Scope::suspend();
                execute(call)
            }
        }
    }

    fn backward(&self, request: &GradRequest<'_>) -> Result<()> {
        autograd::check_outputs("backward", request)?;
        self.finish_others(request)?;
        let mut state = self.state.lock();
        if state.eager {
            drop(state);
            return autograd::run_backward(request);
        }
        if request.outputs.iter().any(|output| output.tag().run() != state.id) {
            self.break_graph(&mut state, Reason::ComputedOutside, request.loc)?;
            drop(state);
            return autograd::run_backward(request);
        }
        match state.backward(&self.site, request) {
            Ok(Some(outside)) if outside.is_empty() => Ok(()),
            Ok(Some(outside)) => {
                state.walked = false;
                self.break_graph(&mut state, Reason::TapeOutside, request.loc)?;
                let walked = state.walked;
                drop(state);
                if walked {
                    Ok(())
                } else {
                    autograd::backward_from(&outside, request.retain_graph, request.loc)
                }
            }
            Ok(None) => {
                state.forget_fresh();
                drop(state);
                self.backward_in_steps(request)
            }
            Err(Leave::Error(error)) => {
                state.forget_fresh();
                Err(error)
            }
            Err(Leave::Eager(reason)) => {
                self.leave(&mut state, reason, request.loc)?;
                drop(state);
                autograd::run_backward(request)
            }
        }
    }

    fn grad(&self, request: &GradRequest<'_>) -> Result<Option<Vec<Option<Tensor>>>> {
        self.finish_others(request)?;
        let mut state = self.state.lock();
        if state.eager || request.outputs.iter().all(|output| output.tag().run() != state.id) {
            return Ok(None);
        }
        match state.grad(&self.site, request) {
            Ok(Found::Gradients(found)) => Ok(Some(found)),
            Ok(Found::InSteps) => {
                state.forget_fresh();
                drop(state);
                self.grad_in_steps(request).map(Some)
            }
            Ok(Found::Nothing) => {
                state.forget_fresh();
                Ok(None)
            }
            Err(Leave::Error(error)) => {
                state.forget_fresh();
                Err(error)
            }
            Err(Leave::Eager(reason)) => {
                self.leave(&mut state, reason, request.loc)?;
                Ok(None)
            }
        }
    }

    fn requires_grad(&self, tensor: &Tensor, on: bool, loc: Loc) -> Result<()> {
        if self.site.splits() {
            return self.access(tensor, Access::State, "requires_grad_", loc);
        }
        let mut state = self.state.lock();
        let known = if state.eager { None } else { self.known(&state, tensor) };
        match known.map(|variable| state.mark(&self.site, variable, Mark::RequiresGrad(on), loc)) {
            Some(Ok(())) => {
                if tensor.is_lazy() {
                    tensor.mark_lazy_leaf(on);
                }
                Ok(())
            }
            Some(Err(Leave::Error(error))) => Err(error),
            Some(Err(Leave::Eager(reason))) => self.leave(&mut state, reason, loc),
            // What the segment does not know yet comes as it is then.
            None => {
                drop(state);
                tensor.ready().map(drop)
            }
        }
    }

    fn retain_grad(&self, tensor: &Tensor, loc: Loc) -> Result<bool> {
        let mut state = self.state.lock();
        if state.eager || !tensor.is_lazy() || tensor.tag().run() != state.id {
            drop(state);
            return self.access(tensor, Access::State, "retain_grad", loc).map(|()| false);
        }
        match state.mark(&self.site, tensor.tag().variable(), Mark::Retain, loc) {
            Ok(()) if self.site.splits() => {
                self.break_graph(&mut state, Reason::Retained, loc)?;
                Ok(false) // its tape is there now
            }
            Ok(()) => Ok(true),
            Err(Leave::Error(error)) => Err(error),
            Err(Leave::Eager(reason)) => self.leave(&mut state, reason, loc).map(|()| false),
        }
    }

    fn begin_function(&self, name: &str, inputs: &[&Tensor], loc: Loc) -> Result<bool> {
        for input in inputs {
            if input.is_lazy() && input.tag().run() != self.id() {
                input.ready()?;
            }
        }
        let mut state = self.state.lock();
        if state.eager || !self.site.splits() {
            return Ok(!state.eager);
        }
        if inputs.iter().any(|input| state.is_pending(input, Access::Read)) {
            let reason = Reason::FunctionOutside { name: name.into() };
            self.break_graph(&mut state, reason, loc)?;
        }
        Ok(false)
    }

    fn apply(&self, application: Application<'_>) -> Result<()> {
        let mut state = self.state.lock();
        if state.eager {
            drop(state);
            application.put_on_tape();
            return Ok(());
        }
        match state.apply(&self.site, &application) {
            Ok(()) => Ok(()),
            Err(Leave::Error(error)) => {
                state.forget_fresh();
                Err(error)
            }
            Err(Leave::Eager(reason)) => {
                self.leave(&mut state, reason, application.loc)?;
                drop(state);
                application.put_on_tape();
                Ok(())
            }
        }
    }

    fn access(&self, tensor: &Tensor, access: Access, what: &'static str, loc: Loc) -> Result<()> {
        let mut state = self.state.lock();
        if state.eager {
            return Ok(());
        }
        match (state.is_pending(tensor, access), access) {
            (false, _) => Ok(()),
            (true, Access::Tape) => {
                let reason = Reason::Tape { what };
                self.break_graph_by(Run::flush_by_interpreter, &mut state, reason, loc)
            }
            (true, _) => {
                // A compiled backward is one node: what is looked at on the way through it would not be seen.
                if access == Access::State && tensor.is_lazy() && tensor.requires_grad() && !tensor.is_leaf()
                {
                    match state.mark(&self.site, tensor.tag().variable(), Mark::Watch, loc) {
                        Ok(()) => {}
                        Err(Leave::Error(error)) => return Err(error),
                        Err(Leave::Eager(reason)) => return self.leave(&mut state, reason, loc),
                    }
                }
                let broken = self.break_graph(&mut state, Reason::Value { what }, loc);
                if let (Access::Print, Err(Error::Other(error))) = (access, &broken)
                    && let Some(forbidden) = error.downcast_ref::<Forbidden>()
                {
                    state.failed.get_or_insert(forbidden.clone().into());
                }
                broken
            }
        }
    }

    fn ty(&self, tensor: &Tensor) -> Option<TensorTy> {
        let state = self.state.lock();
        if tensor.tag().run() != state.id {
            return None;
        }
        state.made_ty(&self.site, tensor.tag().variable()).and_then(|ty| ty.as_tensor().cloned())
    }

    fn layout(&self, tensor: &Tensor) -> Option<Layout> {
        let state = self.state.lock();
        if state.eager || tensor.tag().run() != state.id {
            return None;
        }
        state.layout(&self.site, tensor.tag().variable())
    }

    fn settle(&self) -> Result<()> {
        if self.state.is_own() {
            // its own ops are in order
            Ok(())
        } else {
            self.force()
        }
    }

    fn force(&self) -> Result<()> {
        // On its own thread the run is in the middle of finishing: a tensor still lazy then has failed.
        let Some(mut state) = self.state.lock_unless_inside() else { return Ok(()) };
        // Who found the run while it went on may come when it has ended: everything is ready then.
        if state.id == 0 {
            return Ok(());
        }
        self.leave(&mut state, Reason::Thread, Loc::UNKNOWN)
    }
}
