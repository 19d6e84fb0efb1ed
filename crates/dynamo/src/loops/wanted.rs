//! What the rest of a recording wants of its loops.

use kiln_aot::trace::{GradTarget, Variable};
use kiln_ir::{Class, Op, Ty};

use super::find::{Found, Operand, Recording};
use crate::event::{Event, KeyArg};

/// What loops give to the rest of a recording.
#[derive(Default)]
pub(super) struct Wanted {
    /// What these events of the body made in the last step.
    pub(super) last: Vec<usize>,
    /// What they made in all steps.
    pub(super) stacked: Vec<usize>,
}

impl Wanted {
    fn last(&mut self, event: usize) {
        if !self.last.contains(&event) {
            self.last.push(event);
        }
    }

    fn stacked(&mut self, event: usize) {
        if !self.stacked.contains(&event) {
            self.stacked.push(event);
        }
    }
}

/// Operands of a `cat` in a row.
pub(super) enum Joined {
    One(Variable),
    /// What an event of a loop made in these steps.
    Steps {
        of: usize,
        event: usize,
        from: usize,
        to: usize,
    },
}

/// What is wanted of each loop; `None` if it is something else.
pub(super) fn wanted(recording: &Recording<'_>, loops: &[Found], live: &[Variable]) -> Option<Vec<Wanted>> {
    let mut wanted: Vec<Wanted> = loops.iter().map(|_| Wanted::default()).collect();
    let use_one = |wanted: &mut Vec<Wanted>, variable: Variable, inside: Option<usize>| {
        let place = place(recording, loops, variable);
        match place {
            Some((of, _, _)) if Some(of) == inside => Some(()),
            Some((of, step, event)) if step + 1 == loops[of].steps => {
                wanted[of].last(event);
                Some(())
            }
            Some(_) => None,
            None => Some(()),
        }
    };
    for (index, event) in recording.events.iter().enumerate() {
        if loops.iter().any(|found| found.place(index).is_some()) {
            continue;
        }
        match event {
            Event::Call(call) if matches!(call.op, Op::Cat { .. }) => {
                for joined in joined(recording, loops, &call.args)? {
                    match joined {
                        Joined::One(variable) => use_one(&mut wanted, variable, None)?,
                        Joined::Steps { of, event, .. } => wanted[of].stacked(event),
                    }
                }
            }
            Event::Call(call) => {
                for arg in &call.args {
                    if let KeyArg::Variable(variable) = arg {
                        use_one(&mut wanted, *variable, None)?;
                    }
                }
            }
            Event::Backward(backward) => {
                for (output, weight) in &backward.outputs {
                    use_one(&mut wanted, *output, None)?;
                    if let Some(weight) = weight {
                        use_one(&mut wanted, *weight, None)?;
                    }
                }
                for (variable, target, _) in &backward.targets {
                    use_one(&mut wanted, *variable, None)?;
                    if let GradTarget::Accumulate(variable) = target {
                        use_one(&mut wanted, *variable, None)?;
                    }
                }
            }
            _ => {}
        }
    }
    for (own, found) in loops.iter().enumerate() {
        for operand in found.operands.iter().flatten() {
            match *operand {
                Operand::Outside(variable) => use_one(&mut wanted, variable, Some(own))?,
                Operand::Along { of, event, .. } => wanted[of].stacked(event),
                Operand::Local(_) | Operand::Carry(_) | Operand::Number => {}
            }
        }
        for &(_, init) in &found.init {
            use_one(&mut wanted, init, Some(own))?;
        }
    }
    for &variable in live {
        if !matches!(recording.tys.get(variable as usize), Some(Ty::Tensor(_))) {
            return None;
        }
        use_one(&mut wanted, variable, None)?;
    }
    Some(wanted)
}

/// The loop, step and event of its body that made a variable.
fn place(recording: &Recording<'_>, loops: &[Found], variable: Variable) -> Option<(usize, usize, usize)> {
    let maker = recording.makers[variable as usize]?;
    loops.iter().enumerate().find_map(|(of, found)| {
        let (step, event) = found.place(maker)?;
        Some((of, step, event))
    })
}

/// The operands of a `cat`: what one event of a loop made in one step after the other is one.
pub(super) fn joined(recording: &Recording<'_>, loops: &[Found], args: &[KeyArg]) -> Option<Vec<Joined>> {
    let mut all: Vec<Joined> = Vec::new();
    for arg in args {
        let &KeyArg::Variable(variable) = arg else { return None };
        let Some((own, step, made_by)) = place(recording, loops, variable) else {
            all.push(Joined::One(variable));
            continue;
        };
        match all.last_mut() {
            Some(Joined::Steps { of, event, to, .. }) if (*of, *event, *to) == (own, made_by, step) => {
                *to += 1
            }
            _ => all.push(Joined::Steps { of: own, event: made_by, from: step, to: step + 1 }),
        }
    }
    Some(all)
}

/// Whether something that a loop gives is a view of what others see, and somebody may change either.
pub(super) fn aliases_change(
    recording: &Recording<'_>,
    loops: &[Found],
    wanted: &[Wanted],
    live: &[Variable],
) -> bool {
    let changes = recording.events.iter().any(|event| matches!(event, Event::Call(call) if call.in_place));
    let is_view = |found: &Found, event: usize| {
        recording.call(found.start + event).is_some_and(|call| call.op.row().class == Class::View)
    };
    let views = |(found, wanted): (&Found, &Wanted)| wanted.last.iter().any(|&event| is_view(found, event));
    let lives = |&variable: &Variable| {
        place(recording, loops, variable).is_some_and(|(of, _, event)| is_view(&loops[of], event))
    };
    (changes && loops.iter().zip(wanted).any(views)) || live.iter().any(lives)
}
