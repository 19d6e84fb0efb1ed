//! Normalisation of groups whose segments are short and lie side by side, as the channels of `[batch, channels]` do: row by
//! row, with a lane for each element of some neighbouring groups. Group by group, each element would be a line of memory.

use super::isa::vectorised;
use super::norm::{Affine, Groups, Normalisation, Real};
use super::operand::Shared;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Elements of a row that are taken at a time, and rows that their sums take before they are added in f64: fixed, since no
/// bit depends on the machine.
const LANES: usize = 64;
const STRETCH: usize = 256;
/// Segments of so many elements fill vectors by themselves.
const SHORT: usize = 16;

/// A number for each lane.
type Lanes<T> = [T; LANES];

/// Neighbouring groups, and how their rows lie.
#[derive(Clone, Copy)]
struct Block {
    /// The first group.
    first: usize,
    /// How many.
    groups: usize,
    /// Elements of a segment.
    length: usize,
    /// Segments of a group, which are the rows.
    rows: usize,
    /// Elements from one row to the next.
    pitch: usize,
}

/// Whether groups are better taken side by side.
pub(super) fn are_narrow(groups: &Groups) -> bool {
    (1..SHORT).contains(&groups.length) && groups.group == groups.length && groups.segments > 1
}

/// Calls `body` for blocks of all groups.
fn each(groups: &Groups, body: impl Fn(Block) + Sync) {
    let Groups { count, segments: rows, segment: pitch, length, .. } = *groups;
    let together = LANES / length;
    let grain = (GRAIN / 2).div_ceil((rows * LANES).max(1));
    parallel_for(count.div_ceil(together), grain, |begin, end| {
        for first in (begin..end).map(|block| block * together) {
            body(Block { first, groups: together.min(count - first), length, rows, pitch });
        }
    });
}

vectorised! {
    /// Adds a term of each element, the one of `b` at its place and a lane's number.
    ///
    /// # Safety
    /// Both have `rows` rows of `width` elements, at most as many as there are lanes.
    fn totals [T: Real, F: Fn(T, T, T) -> T] [T, F] (
        sums: &mut Lanes<f64>, a: *const T, b: *const T, rows: usize, pitch: usize, width: usize, number: &Lanes<T>, term: F,
    ) {
        for from in (0..rows).step_by(STRETCH) {
            let mut lanes = [T::ZERO; LANES];
            for row in from..(from + STRETCH).min(rows) {
                // SAFETY: the caller's promise.
                let (a, b) = unsafe {
                    (from_raw_parts(a.add(row * pitch), width), from_raw_parts(b.add(row * pitch), width))
                };
                for (((lane, &a), &b), &number) in lanes.iter_mut().zip(a).zip(b).zip(number) {
                    *lane = *lane + term(a, b, number);
                }
            }
            for (sum, lane) in sums.iter_mut().zip(lanes) {
                *sum += lane.to_f64();
            }
        }
    }
}

vectorised! {
    /// Makes every element of `out` of those of `a` and `b` at its place, and its lane.
    ///
    /// # Safety
    /// As for `totals`; `out` has the same rows and overlaps neither.
    fn map [T: Real, F: Fn(T, T, usize) -> T] [T, F] (
        out: *mut T, a: *const T, b: *const T, rows: usize, pitch: usize, width: usize, value: F,
    ) {
        for row in 0..rows {
            // SAFETY: the caller's promise.
            let (out, a, b) = unsafe {
                let at = row * pitch;
                (
                    from_raw_parts_mut(out.add(at), width),
                    from_raw_parts(a.add(at), width),
                    from_raw_parts(b.add(at), width),
                )
            };
            for (lane, ((out, &a), &b)) in out.iter_mut().zip(a).zip(b).enumerate().take(LANES) {
                *out = value(a, b, lane);
            }
        }
    }
}

impl Block {
    /// Elements of a row.
    fn width(&self) -> usize {
        self.groups * self.length
    }

    /// Elements of a group.
    fn numel(&self) -> f64 {
        (self.rows * self.length) as f64
    }

    /// The first element.
    fn at(&self) -> usize {
        self.first * self.length
    }

    /// A number of each group for all of its lanes.
    fn spread<T: Real>(&self, number: impl Fn(usize) -> T) -> Lanes<T> {
        std::array::from_fn(|lane| {
            let group = lane / self.length;
            if group < self.groups { number(group) } else { T::ZERO }
        })
    }

    /// Sums over each group, by group.
    ///
    /// # Safety
    /// `a` and `b` hold the elements of the groups.
    unsafe fn sums<T: Real>(
        &self,
        [a, b]: [*const T; 2],
        number: &Lanes<T>,
        term: impl Fn(T, T, T) -> T,
    ) -> Lanes<f64> {
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let (a, b) = (a.add(self.at()), b.add(self.at()));
            totals(&mut lanes, a, b, self.rows, self.pitch, self.width(), number, term);
        }
        let of = |group: usize| lanes[group * self.length..(group + 1) * self.length].iter().sum();
        std::array::from_fn(|group| if group < self.groups { of(group) } else { 0.0 })
    }

    /// The mean of each group for its lanes, and the mean square deviation of each group.
    ///
    /// # Safety
    /// `x` holds the elements of the groups.
    unsafe fn moments<T: Real>(&self, x: *const T) -> (Lanes<T>, Lanes<f64>) {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let sums = self.sums([x, x], &[T::ZERO; LANES], |x, _, _| x);
            let means = self.spread(|group| T::from_f64(sums[group] / self.numel()));
            let squares = self.sums([x, x], &means, |x, _, mean| (x - mean) * (x - mean));
            (means, squares.map(|square| square / self.numel()))
        }
    }
}

/// [`super::norm::normalise`] of such groups.
///
/// # Safety
/// As there.
pub(super) unsafe fn normalise<T: Real>(
    what: &Normalisation,
    out: *mut T,
    x: *const T,
    weight: Affine<T>,
    bias: Affine<T>,
) {
    let eps = what.eps;
    let shared = Shared::new((out, x, weight, bias));
    each(&what.groups, |block| {
        let (out, x, weight, bias) = shared.get();
        // SAFETY: the block's own elements, and the numbers of its groups.
        unsafe {
            let (means, squares) = block.moments(x);
            let scales = block.spread(|group| T::from_f64(1.0 / (squares[group] + eps).sqrt()));
            let numbers = |affine: Affine<T>| match affine {
                Affine::Group(numbers) => Some(block.spread(|group| *numbers.add(block.first + group))),
                Affine::None | Affine::Element(_) | Affine::Channel { .. } => None,
            };
            let (out, x) = (out.add(block.at()), x.add(block.at()));
            let (rows, pitch, width) = (block.rows, block.pitch, block.width());
            match (numbers(weight), numbers(bias)) {
                (Some(weight), Some(bias)) => map(out, x, x, rows, pitch, width, |x, _, l| {
                    (x - means[l]) * scales[l] * weight[l] + bias[l]
                }),
                (Some(weight), None) => {
                    map(out, x, x, rows, pitch, width, |x, _, l| (x - means[l]) * scales[l] * weight[l]);
                }
                _ => map(out, x, x, rows, pitch, width, |x, _, l| (x - means[l]) * scales[l]),
            }
        }
    });
}

/// [`super::norm::normalise_backward`] of such groups.
///
/// # Safety
/// As there.
pub(super) unsafe fn normalise_backward<T: Real>(
    what: &Normalisation,
    out: *mut T,
    grad: *const T,
    x: *const T,
) {
    let eps = what.eps;
    let shared = Shared::new((out, grad, x));
    each(&what.groups, |block| {
        let (out, grad, x) = shared.get();
        // SAFETY: the block's own elements.
        unsafe {
            let (means, squares) = block.moments(x);
            let scale = |group: usize| 1.0 / (squares[group] + eps).sqrt();
            let shifts = block.sums([grad, grad], &means, |g, _, _| g);
            let slopes = block.sums([grad, x], &means, |g, x, mean| g * (x - mean));
            let shifts = block.spread(|group| T::from_f64(shifts[group] / block.numel()));
            let slopes = block.spread(|group| T::from_f64(slopes[group] * scale(group) / block.numel()));
            let scales = block.spread(|group| T::from_f64(scale(group)));
            let at = block.at();
            map(out.add(at), grad.add(at), x.add(at), block.rows, block.pitch, block.width(), |g, x, l| {
                (g - shifts[l] - (x - means[l]) * scales[l] * slopes[l]) * scales[l]
            });
        }
    });
}

/// [`super::norm::moments`] of such groups.
///
/// # Safety
/// As there.
pub(super) unsafe fn moments<T: Real>(groups: &Groups, out: *mut T, x: *const T) {
    let (shared, count) = (Shared::new((out, x)), groups.count);
    each(groups, |block| {
        let (out, x) = shared.get();
        // SAFETY: the block's own elements and results.
        unsafe {
            let (means, squares) = block.moments(x);
            for group in 0..block.groups {
                *out.add(block.first + group) = means[group * block.length];
                *out.add(count + block.first + group) = T::from_f64(squares[group]);
            }
        }
    });
}
