//! In which sequence steps run: of a few that are possible, the one that needs least memory at once.

use std::collections::BTreeSet;

use smallvec::SmallVec;

/// What steps need memory for. An item is there from the first step that touches it to the last.
#[derive(Default, Debug)]
pub(crate) struct Needs {
    items: Vec<Item>,
    /// By step, the items that it reads or makes, each once.
    touched: Vec<SmallVec<[u32; 4]>>,
}

#[derive(Debug)]
struct Item {
    bytes: usize,
    /// It is still there after the last step.
    stays: bool,
}

impl Needs {
    /// Of this many steps, which need nothing yet.
    pub fn of_steps(steps: usize) -> Needs {
        Needs { items: Vec::new(), touched: vec![SmallVec::new(); steps] }
    }

    /// A new item.
    pub fn item(&mut self, bytes: usize, stays: bool) -> u32 {
        self.items.push(Item { bytes, stays });
        self.items.len() as u32 - 1
    }

    /// A step reads or makes an item.
    pub fn touch(&mut self, step: usize, item: u32) {
        if !self.touched[step].contains(&item) {
            self.touched[step].push(item);
        }
    }

    /// Steps that touch each item.
    fn readers(&self) -> Vec<u32> {
        let mut left = vec![0; self.items.len()];
        self.touched.iter().flatten().for_each(|&item| left[item as usize] += 1);
        left
    }
}

/// The items as they are while steps run.
struct Live<'n> {
    needs: &'n Needs,
    /// By item, the steps to come that touch it.
    left: Vec<u32>,
    made: Vec<bool>,
    bytes: usize,
    peak: usize,
}

impl<'n> Live<'n> {
    fn new(needs: &'n Needs) -> Live<'n> {
        let made = vec![false; needs.items.len()];
        Live { needs, left: needs.readers(), made, bytes: 0, peak: 0 }
    }

    /// Bytes that come and that go with a step.
    fn change(&self, step: usize) -> (usize, usize) {
        let (mut come, mut go) = (0, 0);
        for &i in &self.needs.touched[step] {
            let item = &self.needs.items[i as usize];
            if !self.made[i as usize] {
                come += item.bytes;
            }
            if self.left[i as usize] == 1 && !item.stays {
                go += item.bytes;
            }
        }
        (come, go)
    }

    fn run(&mut self, step: usize) {
        let (come, go) = self.change(step);
        self.peak = self.peak.max(self.bytes + come);
        self.bytes = self.bytes + come - go;
        for &i in &self.needs.touched[step] {
            self.made[i as usize] = true;
            self.left[i as usize] -= 1;
        }
    }
}

/// The most bytes that items need at once when steps run in this sequence.
fn peak(needs: &Needs, sequence: &[usize]) -> usize {
    let mut live = Live::new(needs);
    sequence.iter().for_each(|&step| live.run(step));
    live.peak
}

/// A sequence in which each step comes after those it waits for.
pub(crate) fn sequence(deps: &[Vec<usize>], needs: &Needs) -> Vec<usize> {
    let plain = depth_first(deps);
    if needs.items.is_empty() {
        return plain;
    }
    let others = [Choice::FreesFirst, Choice::LeastFirst].map(|choice| chosen(deps, needs, &plain, choice));
    let mut best = (peak(needs, &plain), plain);
    for other in others {
        let need = peak(needs, &other);
        if need < best.0 {
            best = (need, other);
        }
    }
    best.1
}

/// Steps so that each comes after what it waits for, otherwise in the order of their numbers: what a step makes
/// is used soon.
fn depth_first(deps: &[Vec<usize>]) -> Vec<usize> {
    let mut state = vec![0u8; deps.len()];
    let mut out = Vec::with_capacity(deps.len());
    for start in 0..deps.len() {
        let mut stack = vec![(start, 0)];
        while let Some((unit, next)) = stack.pop() {
            if next == 0 {
                if state[unit] != 0 {
                    continue;
                }
                state[unit] = 1;
            }
            match deps[unit].get(next) {
                Some(&d) => {
                    stack.push((unit, next + 1));
                    if state[d] == 0 {
                        stack.push((d, 0));
                    }
                }
                None => {
                    state[unit] = 2;
                    out.push(unit);
                }
            }
        }
    }
    out
}

/// Which of the steps that could run comes next.
#[derive(Copy, Clone, PartialEq)]
enum Choice {
    /// One that leaves no more memory in use than there was; else the next of the plain sequence.
    FreesFirst,
    /// The one that leaves least.
    LeastFirst,
}

fn chosen(deps: &[Vec<usize>], needs: &Needs, plain: &[usize], choice: Choice) -> Vec<usize> {
    let mut place = vec![0; deps.len()];
    plain.iter().enumerate().for_each(|(at, &step)| place[step] = at);
    let mut waits: Vec<usize> = deps.iter().map(Vec::len).collect();
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); deps.len()];
    for (step, before) in deps.iter().enumerate() {
        before.iter().for_each(|&d| followers[d].push(step));
    }
    // By item, who touches it: what a step changes is looked up when an item is made, or one reader is left.
    let mut readers: Vec<SmallVec<[u32; 2]>> = vec![SmallVec::new(); needs.items.len()];
    for (step, touched) in needs.touched.iter().enumerate() {
        touched.iter().for_each(|&item| readers[item as usize].push(step as u32));
    }
    let mut live = Live::new(needs);
    let key = |live: &Live<'_>, step: usize| {
        let (come, go) = live.change(step);
        let growth = come as i64 - go as i64;
        let growth = if choice == Choice::FreesFirst { growth.clamp(0, 1) } else { growth };
        (growth, place[step], step)
    };
    let mut keys: Vec<Option<(i64, usize, usize)>> = vec![None; deps.len()];
    let mut ready = BTreeSet::new();
    for step in (0..deps.len()).filter(|&step| waits[step] == 0) {
        ready.insert(*keys[step].insert(key(&live, step)));
    }
    let mut out = Vec::with_capacity(deps.len());
    while let Some((_, _, step)) = ready.pop_first() {
        keys[step] = None;
        let new: SmallVec<[u32; 4]> =
            needs.touched[step].iter().copied().filter(|&item| !live.made[item as usize]).collect();
        live.run(step);
        out.push(step);
        for &item in
            needs.touched[step].iter().filter(|&&item| live.left[item as usize] == 1 || new.contains(&item))
        {
            for &other in &readers[item as usize] {
                if let Some(known) = &mut keys[other as usize] {
                    ready.remove(known);
                    *known = key(&live, other as usize);
                    ready.insert(*known);
                }
            }
        }
        for &follower in &followers[step] {
            waits[follower] -= 1;
            if waits[follower] == 0 {
                ready.insert(*keys[follower].insert(key(&live, follower)));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of forward steps, and for each a gradient that only its own sum reads.
    fn gradients(layers: usize) -> (Vec<Vec<usize>>, Needs) {
        // Steps 0..layers make gradients, the others add them up, all in place.
        let deps = (0..2 * layers).map(|s| if s < layers { vec![] } else { vec![s - layers] }).collect();
        let mut needs = Needs::of_steps(2 * layers);
        for layer in 0..layers {
            let gradient = needs.item(100, false);
            needs.touch(layer, gradient);
            needs.touch(layers + layer, gradient);
        }
        (deps, needs)
    }

    #[test]
    fn gradients_are_used_up_as_they_come() {
        let (deps, needs) = gradients(5);
        assert_eq!(peak(&needs, &depth_first(&deps)), 500);
        let best = sequence(&deps, &needs);
        assert_eq!(peak(&needs, &best), 100, "{best:?}");
    }

    #[test]
    fn every_choice_is_a_sequence_and_the_best_is_taken() {
        let mut state = 9u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for _ in 0..300 {
            let steps = 1 + random(12);
            // Numbers are no order: a step may wait for one with a higher number.
            let mut names: Vec<usize> = (0..steps).collect();
            (1..steps).rev().for_each(|i| names.swap(i, random(i + 1)));
            let mut deps = vec![Vec::new(); steps];
            let mut needs = Needs::of_steps(steps);
            let made: Vec<u32> = (0..steps).map(|_| needs.item(random(50), random(5) == 0)).collect();
            for (s, &step) in names.iter().enumerate() {
                needs.touch(step, made[s]);
                for _ in 0..random(3).min(s) {
                    let before = random(s);
                    deps[step].push(names[before]);
                    needs.touch(step, made[before]);
                }
                deps[step].sort_unstable();
                deps[step].dedup();
            }
            let plain = depth_first(&deps);
            let mut all = vec![plain.clone(), sequence(&deps, &needs)];
            all.extend([Choice::FreesFirst, Choice::LeastFirst].map(|c| chosen(&deps, &needs, &plain, c)));
            for order in &all {
                let mut at = vec![usize::MAX; steps];
                order.iter().enumerate().for_each(|(i, &step)| at[step] = i);
                assert!(!at.contains(&usize::MAX) && order.len() == steps, "{order:?}");
                assert!((0..steps).all(|s| deps[s].iter().all(|&d| at[d] < at[s])), "{order:?} {deps:?}");
                assert!(peak(&needs, &all[1]) <= peak(&needs, order));
            }
        }
    }
}
