//! Along one dim: positions of extrema and medians, sorting orders. Lines are shared between threads.
//!
//! Operands are dense; a line is the elements that differ in the dim alone.

use super::element::{Bool, Element};
use super::operand::Shared;
use super::sort::{Ranked, Sorter, bounds};
use kiln_ir::DType;
use kiln_runtime::{parallel_for, threads};

/// How the lines of a dense operand lie: `outer` × `size` × `inner` elements, the lines across the middle.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// Elements of the dims before.
    pub outer: usize,
    /// Elements of a line.
    pub size: usize,
    /// Elements of the dims behind, which is a line's stride.
    pub inner: usize,
}

impl Lines {
    /// The lines of a shape along a dim; a number is a line of one.
    pub fn of(shape: &[usize], dim: usize) -> Lines {
        match shape.len() {
            0 => Lines { outer: 1, size: 1, inner: 1 },
            _ => Lines {
                outer: shape[..dim].iter().product(),
                size: shape[dim],
                inner: shape[dim + 1..].iter().product(),
            },
        }
    }

    fn count(&self) -> usize {
        self.outer * self.inner
    }

    /// Where a line of `size` elements begins.
    fn start(&self, line: usize, size: usize) -> usize {
        line / self.inner * size * self.inner + line % self.inner
    }
}

/// What [`positions`] looks for in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first largest element; NaN wins.
    Largest,
    /// The first smallest element; NaN wins.
    Smallest,
    /// For every element the last largest one up to it; NaN wins.
    LargestSoFar,
    /// For every element the last smallest one up to it; NaN wins.
    SmallestSoFar,
    /// The lower median, or the first NaN.
    Median,
    /// The order that sorts the line, stable; NaN comes as the largest.
    Sorted {
        /// The largest first.
        descending: bool,
    },
    /// The first `count` of the sorted line.
    Top {
        /// How many.
        count: usize,
        /// The largest, not the smallest.
        largest: bool,
    },
}

impl Position {
    /// How many positions a line has.
    fn count(self, size: usize) -> usize {
        match self {
            Position::Largest | Position::Smallest | Position::Median => 1,
            Position::LargestSoFar | Position::SmallestSoFar | Position::Sorted { .. } => size,
            Position::Top { count, .. } => count,
        }
    }
}

/// The first element that no other beats; NaN beats all.
#[inline(always)]
fn extreme<T: Element>(line: impl Iterator<Item = T>, beats: impl Fn(T, T) -> bool) -> i64 {
    let (mut best, mut at) = (None, 0);
    for (i, x) in line.enumerate() {
        #[allow(clippy::eq_op, reason = "NaN differs from itself")]
        if x != x {
            return i as i64;
        }
        if best.is_none_or(|best| beats(x, best)) {
            (best, at) = (Some(x), i as i64);
        }
    }
    at
}

/// For every element the last one up to it that no other of these beats; NaN beats all.
#[inline(always)]
fn extremes<T: Element>(
    line: impl Iterator<Item = T>,
    beats: impl Fn(T, T) -> bool,
    mut put: impl FnMut(usize, i64),
) {
    let (mut best, mut at) = (None, 0);
    for (i, x) in line.enumerate() {
        #[allow(clippy::eq_op, reason = "NaN differs from itself")]
        if best.is_none_or(|best| x != x || (best == best && !beats(best, x))) {
            (best, at) = (Some(x), i as i64);
        }
        put(i, at);
    }
}

/// Elements of lines worth a thread's while: they are compared with branches.
const GRAIN: usize = threads::GRAIN / 2;

/// The positions in each line of x.
///
/// # Safety
/// `x` has the lines' elements of the dtype; `out` has room for each line's positions, lying as the lines do.
pub unsafe fn positions(position: Position, dtype: DType, lines: Lines, x: *const u8, out: *mut i64) {
    // SAFETY: the caller's contract.
    unsafe {
        match dtype {
            DType::F32 => line_positions::<f32>(position, lines, x.cast(), out),
            DType::F64 => line_positions::<f64>(position, lines, x.cast(), out),
            DType::Bool => line_positions::<Bool>(position, lines, x.cast(), out),
            // Narrow dtypes come converted to what they are computed in.
            _ => line_positions::<i64>(position, lines, x.cast(), out),
        }
    }
}

/// [`positions`] for one element type.
///
/// # Safety
/// That of [`positions`].
unsafe fn line_positions<T: Ranked>(position: Position, lines: Lines, x: *const T, out: *mut i64) {
    let count = position.count(lines.size);
    let shared = Shared::new((x, out));
    let work = |begin: usize, end: usize| {
        let (x, out) = shared.get();
        let mut sorter = Sorter::default();
        for line in begin..end {
            let from = x.wrapping_add(lines.start(line, lines.size));
            let to = out.wrapping_add(lines.start(line, count));
            // SAFETY: element i of the line.
            let element = |i: usize| unsafe { from.add(i * lines.inner).read() };
            // SAFETY: result i of the line; lines have their own.
            let put = |i: usize, at: i64| unsafe { to.add(i * lines.inner).write(at) };
            let values = (0..lines.size).map(element);
            match position {
                Position::Largest => put(0, extreme(values, |a, b| a > b)),
                Position::Smallest => put(0, extreme(values, |a, b| a < b)),
                Position::LargestSoFar => extremes(values, |a, b| a > b, put),
                Position::SmallestSoFar => extremes(values, |a, b| a < b, put),
                Position::Median => {
                    sorter.rank(values);
                    match T::LAST.and_then(|last| sorter.keys.iter().position(|&key| key == last)) {
                        Some(first) => put(0, first as i64),
                        None => put(0, sorter.nth((lines.size.max(1) - 1) / 2)),
                    }
                }
                Position::Sorted { descending } => {
                    sorter.rank_from(values, descending);
                    sorter.sort(put);
                }
                Position::Top { count, largest } => {
                    sorter.rank_from(values, largest);
                    sorter.top(count, put);
                }
            }
        }
    };
    let (total, n) = (lines.count() * lines.size, lines.count());
    if total < 2 * GRAIN { work(0, n) } else { parallel_for(n, GRAIN.div_ceil(lines.size.max(1)), work) }
}

/// The distinct elements of an array in order.
#[derive(Clone, Debug, Default)]
pub struct Distinct {
    /// Where each occurs first.
    pub firsts: Vec<usize>,
    /// How often each occurs.
    pub counts: Vec<i64>,
    /// For each element of the array, which of them it is.
    pub inverse: Vec<i64>,
}

/// The distinct elements among `n`. NaN come last, each for itself, as they equal nothing.
///
/// # Safety
/// `x` has n elements of a dtype that computes, or truth values.
pub unsafe fn distinct(dtype: DType, x: *const u8, n: usize) -> Distinct {
    /// # Safety
    /// There are n elements.
    unsafe fn typed<T: Ranked>(x: *const T, n: usize) -> Distinct {
        let mut found = Distinct { inverse: vec![0; n], ..Distinct::default() };
        let mut sorter = Sorter::default();
        // SAFETY: the caller's promise.
        sorter.rank((0..n).map(|i| unsafe { x.add(i).read() }));
        let (low, high) = bounds(&sorter.keys);
        if T::LAST.is_none() && high.saturating_sub(low) < n as u64 / 4 {
            return counted(&sorter.keys, low, (high - low) as usize + 1);
        }
        let mut order = vec![0; n];
        sorter.sort(|i, at| order[i] = at as usize);
        let keys = &sorter.keys;
        let mut before = None;
        for at in order {
            let key = keys[at];
            if before != Some(key) || T::LAST == Some(key) {
                found.firsts.push(at);
                found.counts.push(0);
                before = Some(key);
            }
            let last = found.counts.len() - 1;
            found.counts[last] += 1;
            found.inverse[at] = last as i64;
        }
        found
    }
    /// Of keys in a range that is not much larger than their number.
    fn counted(keys: &[u64], low: u64, range: usize) -> Distinct {
        let mut all = vec![(0, 0); range];
        for (at, &key) in keys.iter().enumerate() {
            let (count, first) = &mut all[(key - low) as usize];
            if *count == 0 {
                *first = at;
            }
            *count += 1;
        }
        let mut found = Distinct::default();
        for (count, first) in all.iter_mut().filter(|(count, _)| *count > 0) {
            found.counts.push(*count);
            found.firsts.push(*first);
            *count = found.counts.len() as i64 - 1;
        }
        found.inverse = keys.iter().map(|&key| all[(key - low) as usize].0).collect();
        found
    }
    // SAFETY: the caller's contract.
    unsafe {
        match dtype {
            DType::F32 => typed::<f32>(x.cast(), n),
            DType::F64 => typed::<f64>(x.cast(), n),
            DType::Bool => typed::<Bool>(x.cast(), n),
            _ => typed::<i64>(x.cast(), n),
        }
    }
}
