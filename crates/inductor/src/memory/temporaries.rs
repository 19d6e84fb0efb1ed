//! Where a plan's temporaries lie: how long each is needed, and what may take whose place.

use kiln_ir::{Fault, planted};
use rustc_hash::FxHashSet;

use crate::WhyNot;
use crate::memory::{Lifetime, Room, Spot, place, widest_gap};
use crate::schedule::epilogue;
use kiln_plan::{Bands, BufferId, BufferPlan, Place, Step};

/// A step whose result may lie where this operand does, if that is not needed any more.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct InPlace {
    pub step: usize,
    pub from: BufferId,
    pub to: BufferId,
}

/// By buffer, the steps that use it first and last.
fn lives(buffers: usize, steps: &[Step]) -> Vec<Option<(usize, usize)>> {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; buffers];
    for (s, step) in steps.iter().enumerate() {
        step.touched(&mut |id| lives[id.index()].get_or_insert((s, s)).1 = s);
    }
    lives
}

/// Gives every temporary its place; the arena's size. Epilogues that would cost memory are taken back, with the
/// reasons.
pub(crate) fn place_temporaries(
    buffers: &mut [BufferPlan],
    steps: &mut [Step],
    bands: &[Bands],
    outputs: usize,
    in_place: &[InPlace],
) -> (usize, Vec<WhyNot>) {
    for buffer in buffers.iter_mut() {
        if let Place::BeforeOutput { .. } = buffer.place {
            buffer.place = Place::Arena { offset: 0 };
        }
    }
    let mut lives = lives(buffers.len(), steps);
    let taken_back = epilogue::keep_memory(steps, &lives, in_place, buffers);
    // An epilogue's buffers are in use while the product runs.
    for (s, pair) in steps.windows(2).enumerate() {
        if let [product, Step::Launch(launch)] = pair
            && product.has_epilogue()
        {
            for slot in &launch.bufs {
                if let Some(life) = &mut lives[slot.buffer.index()] {
                    life.0 = life.0.min(s);
                }
            }
        }
    }
    // Steps that run together need everything from the first to the last of them.
    for Bands { first, steps: count, .. } in bands {
        let last = first + count - 1;
        for step in &steps[*first..=last] {
            step.touched(&mut |buffer| {
                if let Some(life) = &mut lives[buffer.index()] {
                    *life = (life.0.min(*first), life.1.max(last));
                }
            });
        }
    }
    // By output, its room.
    let mut rooms: Vec<Room> = vec![Room { bytes: 0, until: 0 }; outputs];
    let mut lifetimes: Vec<Lifetime> = Vec::new();
    let mut at: Vec<Option<usize>> = vec![None; buffers.len()];
    for (i, (buffer, life)) in buffers.iter().zip(&lives).enumerate() {
        let Some((first, last)) = *life else { continue };
        match buffer.place {
            Place::Output(k) => rooms[k] = Room { bytes: buffer.ty.bytes, until: first },
            Place::Arena { .. } => {
                at[i] = Some(lifetimes.len());
                let bytes = buffer.ty.bytes * if planted(Fault::TemporariesTooLarge) { 1000 } else { 1 };
                let last = last - usize::from(planted(Fault::LivesTooShort) && last > first);
                lifetimes.push(Lifetime { bytes, first, last, becomes: None });
            }
            Place::Input(_) | Place::BeforeOutput { .. } | Place::Band { .. } => {}
        }
    }
    // A result takes the place of an operand that dies with the step that makes it: they are one lifetime.
    let (mut givers, mut takers) = (FxHashSet::default(), FxHashSet::default());
    for &InPlace { step, from, to } in in_place {
        let Some(source) = at[from.index()] else { continue };
        if givers.contains(&from) || takers.contains(&to) {
            continue;
        }
        let dies = lifetimes[source].last == step && lifetimes[source].becomes.is_none();
        let is_epilogue = step > 0 && steps[step - 1].has_epilogue();
        let begins = step - usize::from(is_epilogue);
        match (buffers[to.index()].place, at[to.index()]) {
            (Place::Output(k), _) if dies && rooms[k].until == begins => lifetimes[source].becomes = Some(k),
            (_, Some(result)) if dies && lifetimes[result].first == begins => {
                // The result's own lifetime is empty from now on.
                lifetimes[source].last = lifetimes[result].last;
                lifetimes[result].bytes = 0;
                at[to.index()] = Some(source);
            }
            _ => continue,
        }
        givers.insert(from);
        takers.insert(to);
    }
    let (spots, arena_bytes) = place(&lifetimes, &rooms);
    for (buffer, at) in buffers.iter_mut().zip(&at) {
        let Some(at) = *at else { continue };
        buffer.place = match spots[at] {
            Spot::Arena(offset) => Place::Arena { offset },
            Spot::Room { room, offset } => Place::BeforeOutput { output: room, offset },
        };
    }
    // Library steps may use what is free of the arena while they run.
    for (s, step) in steps.iter_mut().enumerate() {
        if let Step::Call(call) = step
            && call.product().is_none()
        {
            let taken = buffers.iter().zip(&lives).filter_map(|(buffer, life)| {
                let (first, last) = (*life)?;
                let Place::Arena { offset } = buffer.place else { return None };
                (first <= s && s <= last).then_some((offset, offset + buffer.ty.bytes))
            });
            call.free = widest_gap(taken.collect(), arena_bytes);
        }
    }
    (arena_bytes, taken_back)
}
