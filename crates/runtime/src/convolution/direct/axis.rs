//! How results lie over their source along one dim: which taps meet which positions, and where these are stored.
//!
//! ```text
//! forward      result k meets tap t at t · dilation + k · stride: positions are split by their remainder, so that
//!              consecutive results meet consecutive elements
//! backward     result first + k · stride meets position at(t) + k, for the taps of its phase
//! ```
//!
//! Either way a tap is a *place*: the first element it meets, after which result `k` meets the `k`-th.

use crate::convolution::Geometry;

/// A tap and where it meets the first result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tap {
    number: usize,
    /// Position in the padded source.
    at: usize,
}

/// Results that meet the same taps: those at `first`, `first + step`, …
#[derive(Debug)]
pub(super) struct Phase {
    pub first: usize,
    pub count: usize,
    /// By position, at even distances.
    taps: Vec<Tap>,
}

/// One dim.
#[derive(Debug)]
pub(super) struct Axis {
    /// Positions of the source.
    source: usize,
    /// Zeros before it.
    before: usize,
    /// Positions from one result of a phase to the next.
    split: usize,
    /// Which remainders of positions by `split` are met.
    residues: Vec<usize>,
    /// How many elements further than the first result the last tap reaches.
    pub reach: usize,
    /// Results from one of a phase to the next.
    pub step: usize,
    pub phases: Vec<Phase>,
}

/// Taps at consecutive places: the `k`-th is `tap + k · step`, and meets result `i` where the next tap meets the
/// result `distance` before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chain {
    /// Where the first tap's elements begin, in elements of the axis.
    pub place: usize,
    pub tap: usize,
    pub step: isize,
    pub count: usize,
}

impl Axis {
    fn new(source: usize, before: usize, [split, step]: [usize; 2], mut phases: Vec<Phase>) -> Axis {
        phases.iter_mut().for_each(|phase| phase.taps.sort_unstable_by_key(|tap| tap.at));
        let places = || phases.iter().flat_map(|phase| phase.taps.iter().map(|tap| tap.at));
        let mut residues: Vec<usize> = places().map(|at| at % split).collect();
        residues.sort_unstable();
        residues.dedup();
        let reach = places().map(|at| at / split).max().unwrap_or(0);
        Axis { source, before, split, residues, reach, step, phases }
    }

    /// Dim `d` of a convolution.
    pub fn forward(g: &Geometry, d: usize) -> Axis {
        let taps = (0..g.kernel[d]).map(|number| Tap { number, at: number * g.dilation[d] }).collect();
        let phases = vec![Phase { first: 0, count: g.output[d], taps }];
        Axis::new(g.input[d], g.padding[d], [g.stride[d], 1], phases)
    }

    /// Dim `d` of the gradient of its input.
    pub fn backward(g: &Geometry, d: usize) -> Axis {
        let firsts = 0..g.stride[d].min(g.input[d]);
        let earliest = firsts.clone().flat_map(|first| g.phase(d, first)).map(|(_, at)| at).min();
        let before = earliest.map_or(0, |at| at.min(0).unsigned_abs());
        let phases = firsts.map(|first| {
            let taps = g
                .phase(d, first)
                .map(|(number, at)| Tap { number, at: at.wrapping_add_unsigned(before) as usize });
            Phase { first, count: g.phase_size(d, first), taps: taps.collect() }
        });
        Axis::new(g.output[d], before, [1, g.stride[d]], phases.collect())
    }

    /// How many positions are met, or lie before one that is.
    pub fn met(&self) -> usize {
        let last = |phase: &Phase| {
            let first = phase.taps.last().map_or(0, |tap| tap.at.saturating_add(1));
            first.saturating_add(phase.count.saturating_sub(1).saturating_mul(self.split))
        };
        self.phases.iter().map(last).max().unwrap_or(0)
    }

    /// The position of an element of the source.
    pub fn position(&self, element: usize) -> usize {
        self.before.saturating_add(element)
    }

    /// Positions from one result of a phase to the next.
    pub fn split(&self) -> usize {
        self.split
    }

    /// The positions that the first result of a phase meets, and the numbers of the taps.
    pub fn meets(&self, phase: &Phase) -> impl Iterator<Item = (usize, usize)> {
        phase.taps.iter().map(|tap| (tap.at, tap.number))
    }

    /// The most results of a phase: the first's.
    pub fn results(&self) -> usize {
        self.phases.first().map_or(0, |phase| phase.count)
    }

    /// How many elements are stored if each remainder has `extent`.
    pub fn stored(&self, extent: usize) -> usize {
        self.residues.len().saturating_mul(extent)
    }

    fn place(&self, tap: Tap, extent: usize) -> usize {
        let slot = self.residues.iter().position(|residue| *residue == tap.at % self.split);
        slot.unwrap_or_default() * extent + tap.at / self.split
    }

    /// A phase's taps one by one.
    pub fn taps(&self, phase: &Phase, extent: usize) -> impl Iterator<Item = Chain> {
        let chain =
            move |tap: &Tap| Chain { place: self.place(*tap, extent), tap: tap.number, step: 0, count: 1 };
        phase.taps.iter().map(chain)
    }

    /// A phase's taps in as few chains as there are, and their `distance`.
    pub fn chains(&self, phase: &Phase, extent: usize) -> (Vec<Chain>, usize) {
        let [first, second, ..] = phase.taps[..] else { return (self.taps(phase, extent).collect(), 1) };
        let between = second.at - first.at;
        // The positions where both taps and results come again.
        let period = between / greatest_common_divisor(between, self.split) * self.split;
        let every = period / between;
        let step = (second.number as isize - first.number as isize) * every as isize;
        let chain = |first: usize| Chain {
            place: self.place(phase.taps[first], extent),
            tap: phase.taps[first].number,
            step,
            count: (phase.taps.len() - first).div_ceil(every),
        };
        ((0..every.min(phase.taps.len())).map(chain).collect(), period / self.split)
    }

    /// What is copied to each slot, from result `first` on.
    pub fn runs(&self, first: usize, extent: usize) -> impl Iterator<Item = Run> {
        self.residues.iter().enumerate().map(move |(slot, residue)| {
            let split = self.split;
            let upto = |position: usize| {
                position.saturating_sub(*residue).div_ceil(split).saturating_sub(first).min(extent)
            };
            let zeros = upto(self.before);
            let count = upto(self.before.saturating_add(self.source)) - zeros;
            let from = ((first + zeros) * split + residue).saturating_sub(self.before);
            Run { to: slot * extent + zeros, from, step: split, count }
        })
    }
}

/// Positions of the source, `step` apart, and where they are stored one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub to: usize,
    pub from: usize,
    pub step: usize,
    pub count: usize,
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
