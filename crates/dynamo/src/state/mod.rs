//! The state of a run: where it is in the trie, what it holds, and how it goes on from op to op.

mod replay;
mod types;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use smallvec::SmallVec;

use kiln_aot::trace::Variable;
use kiln_ir::{Error, ListTy, Loc, Op, Result, Scalar, Ty};
use kiln_tensor::hook::{Access, Arg, Call, Output, Tag};
use kiln_tensor::internal::{ListState, TensorState};
use kiln_tensor::{Kept, Ready, Spare, Tensor, TensorList, autograd};

use crate::analysis::Analysis;
use crate::counters;
use crate::event::{CallEvent, Event, KeyArg, Made};
use crate::guard::Guard;
use crate::region::Site;
use crate::sizes::Parted;
use crate::steps::Applied;
use crate::trie::{LiveSet, ROOT, Trie};
use crate::why::Reason;

/// A variable of the run, kept alive until its segment has run.
pub(crate) enum Held {
    Input(Tensor),
    /// An input that arrived as an element of a list, which is a variable, too, and keeps it.
    Item(ListItem),
    Made(Kept),
    List(TensorList),
}

/// An element of a list, in one word: with two, a [`Held`] would travel through memory instead of registers,
/// and replay would wait for it.
#[derive(Copy, Clone)]
pub(crate) struct ListItem(u64);

impl ListItem {
    fn new(list: Variable, index: u32) -> ListItem {
        ListItem(u64::from(list) << 32 | u64::from(index))
    }

    fn list(self) -> usize {
        (self.0 >> 32) as usize
    }

    fn index(self) -> usize {
        self.0 as u32 as usize
    }
}

/// Dead tensors kept for the next call, at most.
const MOST_SPARE: usize = 1 << 14;

/// Runs in progress in this process, and a count that moves when one begins while another is there: then
/// tags can't be trusted, since two runs may take turns in marking one tensor.
pub(crate) static ACTIVE: AtomicUsize = AtomicUsize::new(0);
pub(crate) static MEETINGS: AtomicU64 = AtomicU64::new(0);
pub(crate) static NEXT_RUN: AtomicU32 = AtomicU32::new(1);

#[derive(Default)]
pub(crate) struct State {
    /// The segment's number, which marks its tensors. Never 0 while the run is in progress.
    pub(crate) id: u32,
    /// Where in the trie.
    pub(crate) at: u32,
    /// Set if sizes are new and may never come again: they are recorded here, and leave no trace in the region's
    /// trie.
    pub(crate) aside: Option<Aside>,
    /// The node that is expected next, 0 if unknown: the first child of `next_of`. It is known before the op
    /// comes, so that replay does not wait for the node it comes from.
    next: u32,
    next_of: u32,
    /// The node before the segment's first.
    pub(crate) start: u32,
    pub(crate) variables: Vec<Held>,
    /// The node that made each variable.
    pub(crate) makers: Vec<u32>,
    pub(crate) numbers: Vec<Scalar>,
    /// Something was changed in place.
    pub(crate) writes: bool,
    /// The rest of the call runs eagerly.
    pub(crate) eager: bool,
    pub(crate) alone: bool,
    pub(crate) meetings: u64,
    /// Set while the call goes where none went before.
    pub(crate) analysis: Option<Analysis>,
    pub(crate) live: LiveSet,
    /// Dead lazy tensors, to be used again.
    spare: Vec<Spare>,
    /// What another thread, finishing the run, could not let go of.
    retired: Vec<Kept>,
    /// Inputs registered by the op in hand: number, storage shared with.
    pub(crate) fresh: SmallVec<[(Variable, Option<Variable>); 4]>,
    pub(crate) args: SmallVec<[KeyArg; 8]>,
    pub(crate) results: Vec<Ready>,
    pub(crate) scalars: Vec<u64>,
    /// Where the call parted from a recording by its sizes alone.
    pub(crate) parted: Option<Parted>,
    /// The custom functions that the segment applied, in order.
    pub(crate) functions: Vec<Applied>,
    /// The interpreter ran a backward pass through the tape outside, too.
    pub(crate) walked: bool,
    /// What went wrong where the caller could not be told.
    pub(crate) failed: Option<Error>,
}

/// A recording beside the region's trie.
#[derive(Clone)]
pub(crate) struct Aside {
    pub(crate) trie: Arc<Trie>,
    /// The node of the region's trie that it begins behind.
    from: u32,
}

/// Where a call is recorded.
pub(crate) fn recordings<'a>(aside: &'a Option<Aside>, site: &'a Site) -> &'a Trie {
    aside.as_ref().map_or(&site.trie, |aside| &aside.trie)
}

/// Why the call leaves the trie and goes on eagerly.
pub(crate) enum Leave {
    Error(Error),
    Eager(Reason),
}

impl From<Error> for Leave {
    fn from(error: Error) -> Leave {
        Leave::Error(error)
    }
}

impl State {
    /// Where the call is recorded.
    pub(crate) fn trie<'a>(&'a self, site: &'a Site) -> &'a Trie {
        recordings(&self.aside, site)
    }

    /// From here on the call is recorded aside.
    fn go_aside(&mut self, site: &Site) {
        let trie = Trie::behind(&site.trie, self.start);
        let path = site.trie.path(self.at);
        let mut end = ROOT;
        let mut places = Vec::with_capacity(path.len());
        for index in path {
            end = trie.insert(end, (*site.trie.node(index).event).clone());
            places.push((index, end));
        }
        self.aside = Some(Aside { trie: Arc::new(trie), from: self.start });
        self.moved(end, ROOT, &places);
    }

    /// Puts what was recorded aside into the region's trie after all.
    pub(crate) fn come_back(&mut self, site: &Site) {
        let Some(Aside { trie, from }) = self.aside.take() else { return };
        let (end, places) = site.trie.graft(from, &trie, self.at);
        let start = places.iter().find(|(old, _)| *old == self.start).map_or(from, |(_, new)| *new);
        self.moved(end, start, &places);
        let to = self.parted.map(|parted| places.iter().find(|(old, _)| *old == parted.to));
        if let (Some(parted), Some(Some((_, to)))) = (&mut self.parted, to) {
            parted.to = *to;
        }
    }

    /// The recording lies elsewhere now.
    fn moved(&mut self, at: u32, start: u32, places: &[(u32, u32)]) {
        (self.at, self.start, self.next) = (at, start, 0);
        let mut places = places.to_vec();
        places.sort_unstable();
        for maker in &mut self.makers {
            if let Ok(i) = places.binary_search_by_key(maker, |(old, _)| *old) {
                *maker = places[i].1;
            }
        }
    }

    /// Whether no other run can have marked what this one uses.
    pub(crate) fn trusts_tags(&self) -> bool {
        self.alone && MEETINGS.load(Ordering::Relaxed) == self.meetings
    }

    /// The first input that brought a storage.
    pub(crate) fn owner_of(&self, ready: &Ready) -> Option<Variable> {
        let address = ready.storage().address();
        let brings = |&v: &Variable| {
            let ready = self.input(v).and_then(Tensor::try_ready);
            ready.is_some_and(|r| r.storage().address() == address)
        };
        (0..self.variables.len() as Variable).find(brings)
    }

    /// Whether the segment has yet to do something that an access to a tensor must find done.
    pub(crate) fn is_pending(&self, tensor: &Tensor, access: Access) -> bool {
        match tensor.try_ready() {
            None => tensor.tag().run() == self.id,
            Some(ready) => {
                let used = Tag(ready.storage().tag()).run() == self.id
                    || (!self.trusts_tags() && self.owner_of(&ready).is_some());
                used && (!matches!(access, Access::Read | Access::Print) || self.writes)
            }
        }
    }

    /// The number of a tensor in this segment; a tensor seen for the first time becomes an input.
    #[inline]
    pub(crate) fn number_of(&mut self, tensor: &Tensor) -> Result<Variable> {
        let tag = tensor.tag();
        if tag.run() == self.id {
            return Ok(tag.variable());
        }
        let ready = tensor.ready()?;
        if !self.trusts_tags() {
            let same = |&v: &Variable| self.input(v).is_some_and(|t| t.same(tensor));
            if let Some(known) = (0..self.variables.len() as Variable).find(same) {
                return Ok(known);
            }
        }
        let variable = self.variables.len() as Variable;
        let storage_tag = Tag(ready.storage().tag());
        let shares_with = if storage_tag.run() == self.id {
            Some(storage_tag.variable())
        } else {
            ready.storage().set_tag(Tag::new(self.id, variable).0);
            if self.trusts_tags() { None } else { self.owner_of(&ready) }
        };
        tensor.set_tag(Tag::new(self.id, variable));
        self.variables.push(Held::Input(tensor.clone()));
        self.makers.push(u32::MAX);
        self.fresh.push((variable, shares_with));
        Ok(variable)
    }

    /// An op failed: the inputs it brought were never here.
    pub(crate) fn forget_fresh(&mut self) {
        for (variable, _) in std::mem::take(&mut self.fresh).into_iter().rev() {
            let own = Tag::new(self.id, variable);
            self.makers.pop();
            if let Some(Held::Input(tensor)) = self.variables.pop() {
                if tensor.tag() == own {
                    tensor.set_tag(Tag::default());
                }
                if let Some(ready) = tensor.try_ready().filter(|ready| ready.storage().tag() == own.0) {
                    ready.storage().set_tag(0);
                }
            }
        }
    }

    pub(crate) fn held(&self, variable: Variable) -> Option<&Tensor> {
        match self.variables.get(variable as usize)? {
            Held::Made(kept) => Some(kept),
            Held::Input(_) | Held::Item(_) => self.input(variable),
            Held::List(_) => None,
        }
    }

    /// A tensor that was there before the segment began.
    pub(crate) fn input(&self, variable: Variable) -> Option<&Tensor> {
        match self.variables.get(variable as usize)? {
            Held::Input(t) => Some(t),
            Held::Item(place) => match self.variables.get(place.list())? {
                Held::List(list) => list.try_items()?.get(place.index()),
                Held::Input(_) | Held::Item(_) | Held::Made(_) => None,
            },
            Held::Made(_) | Held::List(_) => None,
        }
    }

    /// The module that the program was in last, by the parameters it used.
    pub(crate) fn module(&self) -> Option<String> {
        let inputs = (0..self.variables.len() as Variable).rev().filter_map(|v| self.input(v));
        let label = inputs.filter_map(Tensor::label).next()?;
        Some(label.rsplit_once('.').map_or(label.clone(), |(module, _)| module.to_string()))
    }

    /// Whether the inputs registered by the op in hand are as the event says.
    #[inline]
    pub(crate) fn guards_hold(&self, guards: &[Guard]) -> bool {
        guards.len() == self.fresh.len()
            && guards.iter().zip(&self.fresh).all(|(guard, &(variable, shares_with))| {
                guard.variable == variable
                    && self.held(variable).is_some_and(|tensor| guard.holds(tensor, shares_with))
            })
    }

    pub(crate) fn guards(&self) -> Result<SmallVec<[Guard; 1]>> {
        let mut guards: SmallVec<[Guard; 1]> = SmallVec::with_capacity(self.fresh.len());
        for &(variable, shares_with) in &self.fresh {
            let Some(tensor) = self.held(variable) else { continue };
            let guard = Guard::new(variable, tensor, &*tensor.ready()?, shares_with, guards.last());
            guards.push(guard);
        }
        Ok(guards)
    }

    /// A new variable, made by the node in hand.
    #[inline]
    pub(crate) fn make(&mut self, requires_grad: bool) -> Tensor {
        let tag = Tag::new(self.id, self.variables.len() as Variable);
        let (tensor, kept) = match self.spare.pop() {
            Some(spare) => spare.renew(tag, requires_grad),
            None => Kept::lazy(tag, requires_grad),
        };
        self.variables.push(Held::Made(kept));
        self.makers.push(self.at);
        tensor
    }

    /// Lets go of all variables. Those that nobody else kept serve again: most of a call's tensors are dead by
    /// its end, and the next call makes as many.
    pub(crate) fn forget_variables(&mut self) {
        let retired = std::mem::take(&mut self.retired);
        let mut let_go = |kept: Kept| match kept.release() {
            Ok(Some(spare)) if self.spare.len() < MOST_SPARE => self.spare.push(spare),
            Ok(_) => {}
            Err(kept) => self.retired.push(kept),
        };
        for held in self.variables.drain(..) {
            if let Held::Made(kept) = held {
                let_go(kept);
            }
        }
        retired.into_iter().for_each(let_go);
    }

    /// The analysis of the segment so far, without the op in hand.
    pub(crate) fn analysis(&mut self, site: &Site) -> &mut Analysis {
        let at = self.at;
        let trie = recordings(&self.aside, site);
        self.analysis.get_or_insert_with(|| Analysis::of(trie, at))
    }

    pub(crate) fn key(&mut self, site: &Site, call: &Call<'_>) -> Result<(), Leave> {
        self.args.clear();
        for (i, arg) in call.args.iter().enumerate() {
            let key = match arg {
                Arg::Tensor(tensor) => KeyArg::Variable(self.number_of(tensor)?),
                Arg::Number(x) => {
                    let class = call.op.row().scalar_class.map_or(0, |class| class(i, *x));
                    KeyArg::Number(x.kind(), class)
                }
                Arg::List(list) if list.tag().run() == self.id => KeyArg::Variable(list.tag().variable()),
                Arg::List(list) => {
                    let outer = std::mem::take(&mut self.args);
                    let variable = self.pack(site, list, call.loc)?;
                    self.args = outer;
                    KeyArg::Variable(variable)
                }
            };
            self.args.push(key);
        }
        Ok(())
    }

    /// A list of tensors met for the first time: recorded as an op of its own.
    pub(crate) fn pack(&mut self, site: &Site, list: &TensorList, loc: Loc) -> Result<Variable, Leave> {
        let items = list.items()?;
        if let Some(variable) = self.pack_again(site, list, items) {
            return Ok(variable);
        }
        for item in items {
            let variable = self.number_of(item)?;
            self.args.push(KeyArg::Variable(variable));
        }
        let grad_enabled = autograd::grad_enabled();
        let op = Op::List {};
        self.step(site, &op, false, grad_enabled, loc, |state, site| {
            let tys = items.iter().map(|item| state.tensor_ty(site, item)).collect::<Result<ListTy>>()?;
            Ok(Made::Variable { ty: Ty::List(tys), requires_grad: false })
        })?;
        let variable = self.variables.len() as Variable;
        list.set_tag(Tag::new(self.id, variable));
        self.variables.push(Held::List(list.clone()));
        self.makers.push(self.at);
        Ok(variable)
    }

    /// Follows the trie along an op whose operands are in `args`, extending it if need be. Inputs that the
    /// op brought are guarded.
    #[inline]
    pub(crate) fn step(
        &mut self,
        site: &Site,
        op: &Op,
        in_place: bool,
        grad_enabled: bool,
        loc: Loc,
        made: impl FnOnce(&mut State, &Site) -> Result<Made, Leave>,
    ) -> Result<(), Leave> {
        let fits = |event: &Event| match event {
            Event::Call(recorded) => {
                recorded.in_place == in_place
                    && recorded.grad_enabled == grad_enabled
                    && recorded.args.as_slice() == self.args.as_slice()
                    && recorded.op == *op
                    && self.guards_hold(&recorded.guards)
            }
            _ => false,
        };
        if let Some(next) = self.trie(site).find(self.at, fits) {
            if let Some(analysis) = &mut self.analysis {
                analysis.add(&recordings(&self.aside, site).node(next).event);
            }
            self.at = next;
            self.fresh.clear();
            return Ok(());
        }
        let conflict = {
            let fresh = self.fresh.clone();
            let analysis = self.analysis(site);
            fresh.iter().find_map(|&(_, shares_with)| analysis.input_conflict(shares_with))
        };
        if let Some(reason) = conflict {
            return Err(Leave::Eager(reason));
        }
        let made = made(self, site)?;
        let event = Event::Call(CallEvent {
            op: op.clone(),
            args: SmallVec::from_slice(&self.args),
            in_place,
            grad_enabled,
            guards: self.guards()?,
            made,
            loc,
        });
        self.extend(site, event)
    }

    /// Adds an event to the trie and goes there.
    pub(crate) fn extend(&mut self, site: &Site, event: Event) -> Result<(), Leave> {
        let like = match &self.aside {
            Some(_) => {
                counters::note_new();
                None
            }
            None => site.check_growth(self.at, &event, self.parted.as_ref())?,
        };
        if like.is_some() && site.records_aside(self.at) {
            self.go_aside(site);
        }
        self.analysis(site).add(&event);
        self.at = self.trie(site).insert(self.at, event);
        if let (Some(like), None) = (like, self.parted) {
            self.parted = Some(Parted { like, to: self.at });
        }
        self.fresh.clear();
        Ok(())
    }
    /// Remembers the numbers among an op's operands, for the holes of the segment.
    #[inline]
    fn keep_numbers(&mut self, call: &Call<'_>) {
        for arg in call.args {
            if let Arg::Number(x) = arg {
                self.numbers.push(*x);
            }
        }
    }

    pub(crate) fn call(&mut self, site: &Site, call: &Call<'_>) -> Result<Output, Leave> {
        self.fresh.clear();
        self.key(site, call)?;
        self.step(site, call.op, call.in_place, call.grad_enabled, call.loc, |state, site| {
            state.infer(site, call)
        })?;
        self.keep_numbers(call);
        let aside = self.aside.clone();
        let Event::Call(event) = &*recordings(&aside, site).node(self.at).event else {
            return Err(Leave::Eager(Reason::Lost));
        };
        match (&event.made, call.args.first()) {
            (Made::Variable { ty: Ty::List(_), .. }, _) => {
                let list = TensorList::lazy(Tag::new(self.id, self.variables.len() as Variable));
                self.variables.push(Held::List(list.clone()));
                self.makers.push(self.at);
                Ok(Output::List(list))
            }
            (Made::Variable { requires_grad, .. }, _) => Ok(Output::Tensor(self.make(*requires_grad))),
            (Made::Changed { requires_grad, alike }, Some(Arg::Tensor(target))) => {
                self.writes = true;
                if *requires_grad {
                    target.mark_requires_grad(true);
                }
                for other in alike.iter().filter_map(|&other| self.held(other)) {
                    other.mark_requires_grad(true);
                }
                Ok(Output::Tensor((*target).clone()))
            }
            (Made::Changed { .. }, Some(Arg::List(target))) => {
                self.writes = true;
                Ok(Output::List((*target).clone()))
            }
            (Made::Changed { .. }, _) => Err(Leave::Eager(Reason::NoTarget)),
        }
    }
}
