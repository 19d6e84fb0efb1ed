//! A recording with its loops as scans: as long for any number of steps.

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{
    Dims, Emit, EmitExt as _, Error, Grad, Loc, Op, Result, ScalarKind, Shape, Ty, Value, Values,
    carries_gradient,
};

use super::find::{Found, Operand, Recording};
use super::wanted::{Joined, Wanted, aliases_change, joined, wanted};
use crate::event::{CallEvent, Event, KeyArg, Made};
use crate::guard::Guard;
use crate::trie::{LiveSet, ROOT, Trie};

/// See the [module](self).
pub(crate) struct Rolled {
    pub(crate) trie: Trie,
    pub(crate) at: u32,
    pub(crate) live: LiveSet,
    /// By variable of the rolled recording, which variable of the recording it is, if any.
    pub(crate) variables: Vec<Option<Variable>>,
    /// The same of its numbers.
    pub(crate) holes: Vec<u32>,
    /// Numbers of the recording that are the same in every step, as those of the first say.
    pub(crate) alike: Vec<(u32, u32)>,
    /// Events that loops began and ended at.
    pub(crate) spans: Vec<(usize, usize)>,
}

/// The recording that ends at a node, rolled; `None` if there is no loop in it, or one of which more is wanted than
/// a scan gives.
pub(crate) fn roll(trie: &Trie, at: u32, live: &LiveSet) -> Option<Rolled> {
    let events: Vec<&Event> = trie.path(at).into_iter().map(|index| &*trie.node(index).event).collect();
    let recording = Recording::of(events)?;
    let loops = recording.loops();
    if loops.is_empty() {
        return None;
    }
    let live: Vec<Variable> = crate::compiling::variables(live);
    let wanted = wanted(&recording, &loops, &live)?;
    if aliases_change(&recording, &loops, &wanted, &live) {
        return None;
    }
    let mut roller = Roller {
        recording: &recording,
        loops: &loops,
        rolled: Rolled {
            trie: Trie::new(),
            at: ROOT,
            live: LiveSet::new(),
            variables: Vec::new(),
            holes: Vec::new(),
            alike: Vec::new(),
            spans: loops.iter().map(|found| (found.start, found.end())).collect(),
        },
        tys: Vec::new(),
        requires: Vec::new(),
        now: FxHashMap::default(),
        stacked: FxHashMap::default(),
        arrived: Vec::new(),
        items: Vec::new(),
        loc: Loc::UNKNOWN,
        grad_enabled: true,
    };
    roller.roll(&wanted)?;
    let mut rolled = roller.rolled_live(&live)?;
    rolled.alike = alike(&recording, &loops);
    Some(rolled)
}

/// The numbers that must be the same in every step.
fn alike(recording: &Recording<'_>, loops: &[Found]) -> Vec<(u32, u32)> {
    let mut alike = Vec::new();
    for found in loops {
        for event in 0..found.period {
            let numbers = found.operands[event].iter().filter(|operand| **operand == Operand::Number).count();
            for step in 1..found.steps {
                let hole = |step: usize| recording.holes[found.start + step * found.period + event];
                alike.extend((0..numbers as u32).map(|i| (hole(0) + i, hole(step) + i)));
            }
        }
    }
    alike
}

pub(super) enum Item {
    Variable(Variable),
    /// A number of the recording, by its place there.
    Number(ScalarKind, u8, u32),
}

pub(super) struct Roller<'a> {
    pub(super) recording: &'a Recording<'a>,
    pub(super) loops: &'a [Found],
    pub(super) rolled: Rolled,
    /// By variable of the rolled recording, its type, and whether gradients flow through it.
    pub(super) tys: Vec<Ty>,
    pub(super) requires: Vec<bool>,
    /// What the recording's variables are in the rolled one.
    pub(super) now: FxHashMap<Variable, Variable>,
    /// What an event of a loop made in all steps.
    pub(super) stacked: FxHashMap<(usize, usize), Variable>,
    /// Inputs that come with the next event.
    pub(super) arrived: Vec<Guard>,
    pub(super) items: Vec<(Item, Ty)>,
    pub(super) loc: Loc,
    pub(super) grad_enabled: bool,
}

impl Roller<'_> {
    fn roll(&mut self, wanted: &[Wanted]) -> Option<()> {
        let mut at = 0;
        let mut loops = self.loops.iter().zip(wanted).enumerate().peekable();
        while at < self.recording.events.len() {
            match loops.next_if(|(_, (found, _))| found.start == at) {
                Some((of, (found, wanted))) => {
                    (at..found.end()).for_each(|event| self.arrive(self.recording.events[event].guards()));
                    let call = self.recording.call(at)?;
                    (self.loc, self.grad_enabled) = (call.loc, call.grad_enabled);
                    self.scan(of, found, wanted).ok()?;
                    at = found.end();
                }
                None => {
                    self.event(at)?;
                    at += 1;
                }
            }
        }
        Some(())
    }

    fn rolled_live(mut self, live: &[Variable]) -> Option<Rolled> {
        self.rolled.live.resize(self.tys.len().div_ceil(64), 0);
        for variable in live {
            let variable = *self.now.get(variable)? as usize;
            self.rolled.live[variable / 64] |= 1 << (variable % 64);
        }
        Some(self.rolled)
    }

    /// A new variable of the rolled recording.
    fn define(&mut self, ty: Ty, requires_grad: bool, was: Option<Variable>) -> Variable {
        let variable = self.tys.len() as Variable;
        self.tys.push(ty);
        self.requires.push(requires_grad);
        self.rolled.variables.push(was);
        if let Some(was) = was {
            self.now.insert(was, variable);
        }
        variable
    }

    fn arrive(&mut self, guards: &[Guard]) {
        for guard in guards {
            let variable = self.define(guard.info.ty.clone(), guard.requires_grad, Some(guard.variable));
            let shares_with = guard.shares_with.and_then(|other| self.now.get(&other).copied());
            self.arrived.push(guard.renamed(variable, shares_with));
        }
    }

    fn record(&mut self, event: Event) {
        self.rolled.at = self.rolled.trie.insert(self.rolled.at, event);
    }

    /// An event outside of loops.
    fn event(&mut self, index: usize) -> Option<()> {
        let event = self.recording.events[index];
        self.arrive(event.guards());
        match event {
            Event::Call(call) => {
                (self.loc, self.grad_enabled) = (call.loc, call.grad_enabled);
                let args = match call.op {
                    Op::Cat { dim } => self.joined(dim, &call.args)?,
                    _ => self.args(index, call)?,
                };
                let made = match &call.made {
                    Made::Changed { requires_grad, alike } => {
                        let alike = alike.iter().map(|other| self.now.get(other).copied());
                        Made::Changed { requires_grad: *requires_grad, alike: alike.collect::<Option<_>>()? }
                    }
                    made @ Made::Variable { .. } => made.clone(),
                };
                let guards = std::mem::take(&mut self.arrived).into();
                if let Made::Variable { ty, requires_grad } = &made {
                    self.define(ty.clone(), *requires_grad, self.recording.made[index]);
                }
                self.record(Event::Call(CallEvent { args, guards, made, ..call.clone() }));
            }
            Event::Backward(backward) => {
                let mut event = backward.clone();
                event.guards = std::mem::take(&mut self.arrived).into();
                for (output, weight) in &mut event.outputs {
                    *output = *self.now.get(output)?;
                    if let Some(weight) = weight {
                        *weight = *self.now.get(weight)?;
                    }
                }
                for (variable, target, _) in &mut event.targets {
                    *variable = *self.now.get(variable)?;
                    *target = match *target {
                        GradTarget::Accumulate(to) => GradTarget::Accumulate(*self.now.get(&to)?),
                        GradTarget::New(new) => {
                            let ty = self.tys[*variable as usize].clone();
                            GradTarget::New(self.define(ty, false, Some(new)))
                        }
                    };
                }
                self.record(Event::Backward(event));
            }
            _ => return None,
        }
        Some(())
    }

    fn args(&mut self, index: usize, call: &CallEvent) -> Option<SmallVec<[KeyArg; 4]>> {
        let mut args = SmallVec::with_capacity(call.args.len());
        let mut hole = self.recording.holes[index];
        for arg in &call.args {
            args.push(match arg {
                KeyArg::Variable(variable) => KeyArg::Variable(*self.now.get(variable)?),
                KeyArg::Number(kind, class) => {
                    self.rolled.holes.push(hole);
                    hole += 1;
                    KeyArg::Number(*kind, *class)
                }
            });
        }
        Some(args)
    }

    /// What is to be joined along a dim: steps lie behind each other along it.
    fn joined(&mut self, dim: usize, args: &[KeyArg]) -> Option<SmallVec<[KeyArg; 4]>> {
        // What arrives does so with the next event, and that is none of these.
        let mut all = SmallVec::new();
        for joined in joined(self.recording, self.loops, args)? {
            let variable = match joined {
                Joined::One(variable) => *self.now.get(&variable)?,
                Joined::Steps { of, event, from, to } => {
                    let stacked = self.steps(of, event, from, to).ok()?;
                    self.along(stacked, dim).ok()?
                }
            };
            all.push(KeyArg::Variable(variable));
        }
        Some(all)
    }

    /// What an event of a loop made in these steps, stacked.
    pub(super) fn steps(&mut self, of: usize, event: usize, from: usize, to: usize) -> Result<Variable> {
        let stacked = self.stacked.get(&(of, event)).copied();
        let stacked = stacked.ok_or_else(|| Error::bug("what a loop made is lost"))?;
        if (from, to) == (0, self.loops[of].steps) {
            return Ok(stacked);
        }
        let value = self.value(stacked);
        let part = self.slice(value, 0, from, to, 1)?;
        self.variable(part)
    }

    /// A stack of tensors as these behind each other along a dim.
    fn along(&mut self, stacked: Variable, dim: usize) -> Result<Variable> {
        let value = self.value(stacked);
        let stack = self.tensor_ty(value).shape;
        let mut order: Dims = (1..stack.rank()).collect();
        order.insert(dim, 0);
        let turned = self.permute(value, order)?;
        let mut shape: Shape = stack[1..].into();
        shape[dim] *= stack[0];
        let joined = self.reshape(turned, shape)?;
        self.variable(joined)
    }

    pub(super) fn value(&mut self, variable: Variable) -> Value {
        let ty = self.tys[variable as usize].clone();
        self.items.push((Item::Variable(variable), ty));
        Value(self.items.len() as u32 - 1)
    }

    pub(super) fn variable(&self, value: Value) -> Result<Variable> {
        match self.items[value.index()].0 {
            Item::Variable(variable) => Ok(variable),
            Item::Number(..) => Err(Error::bug("a number where a tensor is wanted")),
        }
    }

    pub(super) fn known(&mut self, variable: Variable) -> Result<Value> {
        let now = self.now.get(&variable).copied();
        Ok(self.value(now.ok_or_else(|| Error::bug("a variable of a loop is lost"))?))
    }
}

impl Emit for Roller<'_> {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let mut keys = SmallVec::with_capacity(args.len());
        let mut requires = false;
        for arg in args {
            keys.push(match self.items[arg.index()].0 {
                Item::Variable(variable) => {
                    requires |= self.requires[variable as usize];
                    KeyArg::Variable(variable)
                }
                Item::Number(kind, class, hole) => {
                    self.rolled.holes.push(hole);
                    KeyArg::Number(kind, class)
                }
            });
        }
        let tys: Vec<Ty> = args.iter().map(|arg| self.items[arg.index()].1.clone()).collect();
        let ty = op.infer(&tys).map_err(|why| op.error(&tys, why, self.loc))?[0].clone();
        let requires_grad =
            self.grad_enabled && requires && carries_gradient(&ty) && !matches!(op.row().grad, Grad::Zero);
        let variable = self.define(ty.clone(), requires_grad, None);
        let call = CallEvent {
            op,
            args: keys,
            in_place: false,
            grad_enabled: self.grad_enabled,
            guards: std::mem::take(&mut self.arrived).into(),
            made: Made::Variable { ty, requires_grad },
            loc: self.loc,
        };
        self.record(Event::Call(call));
        Ok(smallvec![self.value(variable)])
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.items[value.index()].1
    }
}
