//! Loops in a recording: runs of events that do the same to what they did before.
//!
//! A run with a period is a loop if the operands repeat as well: each is the same variable in every step, was made in
//! the same step or the one before, or moves along: the next part of a tensor, or what an earlier loop made next.

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHasher};

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{Class, Op, Ty};

use crate::event::{CallEvent, Event, KeyArg, Made};

/// Fewer steps are no loop.
pub(super) const LEAST_STEPS: usize = 4;
/// So many periods are tried from one event on, at most.
const MOST_PERIODS: usize = 32;
/// So many events are compared for each event there is, at most: what repeats, but not as a loop, shall cost nothing.
const MOST_WORK: usize = 64;

/// A recording to look for loops in.
pub(super) struct Recording<'a> {
    pub(super) events: Vec<&'a Event>,
    /// By variable: the event that made it; `None` for an input.
    pub(super) makers: Vec<Option<usize>>,
    /// By event, the variable that it made.
    pub(super) made: Vec<Option<Variable>>,
    /// By event, its first number's place among the recording's.
    pub(super) holes: Vec<u32>,
    pub(super) tys: Vec<Ty>,
}

/// What an operand is to the steps of a loop.
#[derive(Copy, Clone, PartialEq, Debug)]
pub(super) enum Operand {
    /// What this event of the body made in the same step.
    Local(usize),
    /// What this event of the body made in the step before.
    Carry(usize),
    /// The same in every step.
    Outside(Variable),
    /// What this event of an earlier loop made in the step so far ahead of the own, or counted from that step down.
    Along {
        of: usize,
        event: usize,
        from: usize,
        down: bool,
    },
    Number,
}

/// Parts of a tensor, one for each step, that lie side by side.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Parts {
    pub(super) base: Variable,
    pub(super) dim: usize,
    /// Where the first part that lies in front begins.
    pub(super) start: usize,
    pub(super) length: usize,
    /// The first step has the last part.
    pub(super) down: bool,
}

/// A loop.
#[derive(Debug)]
pub(super) struct Found {
    /// Its first event.
    pub(super) start: usize,
    /// The events of a step.
    pub(super) period: usize,
    pub(super) steps: usize,
    /// By event of the body, its operands.
    pub(super) operands: Vec<Vec<Operand>>,
    /// By event of the body: it takes parts of a tensor.
    pub(super) parts: Vec<Option<Parts>>,
    /// What is carried, by the event of the body that makes it, and what it is before the first step.
    pub(super) init: Vec<(usize, Variable)>,
}

impl Found {
    pub(super) fn end(&self) -> usize {
        self.start + self.period * self.steps
    }

    /// The step and the event of the body that an event is.
    pub(super) fn place(&self, event: usize) -> Option<(usize, usize)> {
        let inside = (self.start..self.end()).contains(&event);
        inside.then(|| ((event - self.start) / self.period, (event - self.start) % self.period))
    }
}

impl<'a> Recording<'a> {
    /// `None` if there are events that no loop gets along with.
    pub(super) fn of(events: Vec<&'a Event>) -> Option<Recording<'a>> {
        let mut own = Recording {
            makers: Vec::new(),
            made: Vec::with_capacity(events.len()),
            holes: Vec::with_capacity(events.len()),
            tys: Vec::new(),
            events,
        };
        let mut hole = 0;
        for (index, event) in own.events.iter().enumerate() {
            own.makers.extend(event.guards().iter().map(|_| None));
            own.tys.extend(event.guards().iter().map(|guard| guard.info.ty.clone()));
            own.holes.push(hole);
            let mut made = None;
            match event {
                Event::Call(call) => {
                    hole += call.args.iter().filter(|arg| matches!(arg, KeyArg::Number(..))).count() as u32;
                    if let Made::Variable { ty, .. } = &call.made {
                        made = Some(own.tys.len() as Variable);
                        own.tys.push(ty.clone());
                        own.makers.push(Some(index));
                    }
                }
                Event::Backward(backward) => {
                    for (input, target, _) in &backward.targets {
                        if let GradTarget::New(_) = target {
                            own.tys.push(own.tys[*input as usize].clone());
                            own.makers.push(Some(index));
                        }
                    }
                }
                Event::Start | Event::Break | Event::Grad(_) | Event::Mark(_) | Event::Apply(_) => {
                    return None;
                }
            }
            own.made.push(made);
        }
        Some(own)
    }

    pub(super) fn call(&self, event: usize) -> Option<&'a CallEvent> {
        match self.events[event] {
            Event::Call(call) => Some(call),
            _ => None,
        }
    }

    /// The loops, in order.
    pub(super) fn loops(&self) -> Vec<Found> {
        let keys: Vec<Option<u64>> = (0..self.events.len()).map(|event| self.key(event)).collect();
        let mut next = vec![usize::MAX; keys.len()];
        let mut latest: FxHashMap<u64, usize> = FxHashMap::default();
        for (event, key) in keys.iter().enumerate().rev() {
            if let Some(key) = key {
                next[event] = latest.insert(*key, event).unwrap_or(usize::MAX);
            }
        }
        let mut work = MOST_WORK * keys.len();
        let mut loops: Vec<Found> = Vec::new();
        let mut at = 0;
        while at < keys.len() && work > 0 {
            let found = self.loop_at(at, &keys, &next, &loops, &mut work);
            at = found.as_ref().map_or(at + 1, Found::end);
            loops.extend(found);
        }
        loops
    }

    /// What an event that is part of a loop has in common with that of the next step.
    fn key(&self, event: usize) -> Option<u64> {
        let call = self.call(event)?;
        let Made::Variable { ty: Ty::Tensor(ty), requires_grad } = &call.made else { return None };
        // A copy of a list has as many operands as there are steps.
        if call.in_place || matches!(call.op.row().class, Class::Random | Class::Custom) {
            return None;
        }
        let mut hash = FxHasher::default();
        (call.op.index(), call.grad_enabled, requires_grad, ty.dtype, ty.device, &ty.shape).hash(&mut hash);
        for (name, value) in call.op.attributes() {
            let moves = matches!(call.op, Op::Slice { step: 1, .. }) && call.op.row().places.contains(&name);
            if !moves {
                value.hash(&mut hash);
            }
        }
        for arg in &call.args {
            match arg {
                KeyArg::Variable(_) => u16::MAX.hash(&mut hash),
                KeyArg::Number(kind, class) => (*kind as u8, *class).hash(&mut hash),
            }
        }
        Some(hash.finish())
    }

    fn loop_at(
        &self,
        start: usize,
        keys: &[Option<u64>],
        next: &[usize],
        before: &[Found],
        work: &mut usize,
    ) -> Option<Found> {
        let mut other = start;
        for _ in 0..MOST_PERIODS {
            other = *next.get(other)?;
            let period = other - start;
            if period > keys.len() / LEAST_STEPS || start + period * LEAST_STEPS > keys.len() {
                return None;
            }
            // Inputs arrive in the first step.
            let repeats = |event: usize| {
                let later = event + period;
                later < keys.len()
                    && keys[event].is_some()
                    && keys[event] == keys[later]
                    && self.events[later].guards().is_empty()
            };
            let run = (start..).take_while(|&event| repeats(event)).count();
            *work = work.saturating_sub(run + 1);
            let steps = run / period + 1;
            if steps < LEAST_STEPS {
                continue;
            }
            let found = self.relate(start, period, steps, before, work);
            if found.is_some() || *work == 0 {
                return found;
            }
        }
        None
    }

    /// The loop of these events, if their operands repeat.
    fn relate(
        &self,
        start: usize,
        period: usize,
        steps: usize,
        before: &[Found],
        work: &mut usize,
    ) -> Option<Found> {
        *work = work.saturating_sub(period * 2);
        let mut found = Found {
            start,
            period,
            steps,
            operands: Vec::with_capacity(period),
            parts: Vec::with_capacity(period),
            init: Vec::new(),
        };
        for event in 0..period {
            let call = self.call(start + event)?;
            let mut operands = Vec::with_capacity(call.args.len());
            for place in 0..call.args.len() {
                operands.push(self.operand(&found, event, place, before)?);
            }
            found.parts.push(self.parts(&found, event, &operands)?);
            found.operands.push(operands);
        }
        for event in 0..period {
            for place in 0..found.operands[event].len() {
                self.begins(&mut found, event, place, before)?;
            }
        }
        // All steps from the second on are alike; the first two were compared above.
        for step in 2..steps {
            *work = work.saturating_sub(period);
            for event in 0..period {
                let call = self.call(start + step * period + event)?;
                for (arg, operand) in call.args.iter().zip(&found.operands[event]) {
                    if self.operand_in(&found, step, *arg, *operand, before) != Some(()) {
                        return None;
                    }
                }
            }
        }
        let uniform = |event: usize| self.call(event).map(|call| call.grad_enabled);
        (0..period).all(|event| uniform(start + event) == uniform(start)).then_some(found)
    }

    /// What an operand is, from the second and third step.
    fn operand(&self, found: &Found, event: usize, place: usize, before: &[Found]) -> Option<Operand> {
        let arg = |step: usize| {
            let call = self.call(found.start + step * found.period + event)?;
            call.args.get(place).copied()
        };
        let (KeyArg::Variable(second), KeyArg::Variable(third)) = (arg(1)?, arg(2)?) else {
            return Some(Operand::Number);
        };
        let maker = |variable: Variable| self.makers[variable as usize];
        if let Some((step, made_by)) = maker(second).and_then(|maker| found.place(maker)) {
            return match step {
                1 => Some(Operand::Local(made_by)),
                0 => Some(Operand::Carry(made_by)),
                _ => None,
            };
        }
        if second == third {
            return Some(Operand::Outside(second));
        }
        let in_loop = |variable: Variable| {
            let maker = maker(variable)?;
            before.iter().enumerate().find_map(|(of, found)| found.place(maker).map(|place| (of, place)))
        };
        let ((of, (a, event)), (other, (b, same))) = (in_loop(second)?, in_loop(third)?);
        if of != other || event != same {
            return None;
        }
        match (b as i64 - a as i64, a) {
            (1, 1..) => Some(Operand::Along { of, event, from: a - 1, down: false }),
            (-1, _) => Some(Operand::Along { of, event, from: a + 1, down: true }),
            _ => None,
        }
    }

    /// Whether an operand is in a step what it should be.
    fn operand_in(
        &self,
        found: &Found,
        step: usize,
        arg: KeyArg,
        operand: Operand,
        before: &[Found],
    ) -> Option<()> {
        let KeyArg::Variable(variable) = arg else {
            return matches!(operand, Operand::Number).then_some(());
        };
        let at = |step: usize, event: usize| Some(found.start + step * found.period + event);
        let maker = self.makers[variable as usize];
        let holds = match operand {
            Operand::Local(event) => maker == at(step, event),
            Operand::Carry(event) => maker == at(step.checked_sub(1)?, event),
            Operand::Outside(other) => other == variable,
            Operand::Along { of, event, from, down } => {
                let along = if down { from.checked_sub(step)? } else { from + step };
                before[of].place(maker?) == Some((along, event))
            }
            Operand::Number => false,
        };
        holds.then_some(())
    }

    /// Looks at an operand in the first step, where what is carried comes from outside.
    fn begins(&self, found: &mut Found, event: usize, place: usize, before: &[Found]) -> Option<()> {
        let arg = *self.call(found.start + event)?.args.get(place)?;
        let operand = found.operands[event][place];
        let (Operand::Carry(carried), KeyArg::Variable(init)) = (operand, arg) else {
            return self.operand_in(found, 0, arg, operand, before);
        };
        if self.makers[init as usize].is_some_and(|maker| maker >= found.start) {
            return None;
        }
        let ty = self.made[found.start + carried].map(|made| &self.tys[made as usize]);
        if ty != Some(&self.tys[init as usize]) {
            return None;
        }
        match found.init.iter().find(|(event, _)| *event == carried) {
            Some((_, known)) => (*known == init).then_some(()),
            None => {
                found.init.push((carried, init));
                Some(())
            }
        }
    }

    /// The parts that an event takes, if it takes another one in each step; an outer `None` if that is no loop.
    fn parts(&self, found: &Found, event: usize, operands: &[Operand]) -> Option<Option<Parts>> {
        let range = |step: usize| match self.call(found.start + step * found.period + event)?.op {
            Op::Slice { dim, start, end, step: 1 } => Some((dim, start, end)),
            _ => None,
        };
        let Some((dim, first, end)) = range(0) else { return Some(None) };
        let (length, moves) = (end - first, range(1)?.1 as i64 - first as i64);
        let mut steps = 1..found.steps;
        let follows = |step: usize| {
            range(step).is_some_and(|(_, start, end)| {
                start as i64 == first as i64 + moves * step as i64 && end - start == length
            })
        };
        if !steps.all(follows) {
            return None;
        }
        if moves == 0 {
            return Some(None);
        }
        let &[Operand::Outside(base)] = operands else { return None };
        if length == 0 || moves.unsigned_abs() as usize != length {
            return None;
        }
        let down = moves < 0;
        let start = if down { first - (found.steps - 1) * length } else { first };
        Some(Some(Parts { base, dim, start, length, down }))
    }
}
