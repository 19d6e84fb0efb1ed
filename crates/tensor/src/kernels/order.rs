//! Along one dim: positions of extrema and medians, sorting orders, scans. Lines are shared between threads.
//!
//! Operands are dense; a line is the elements that differ in the dim alone.

use super::element::{Bool, Element};
use super::operand::Shared;
use kiln_ir::DType;
use kiln_runtime::{parallel_for, threads};
use std::cmp::Ordering;

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

/// The order of numbers with NaN as the largest.
#[inline(always)]
fn order<T: Element>(a: T, b: T) -> Ordering {
    #[allow(clippy::eq_op, reason = "NaN differs from itself")]
    a.partial_cmp(&b).unwrap_or_else(|| (a != a).cmp(&(b != b)))
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
unsafe fn line_positions<T: Element>(position: Position, lines: Lines, x: *const T, out: *mut i64) {
    let count = position.count(lines.size);
    let shared = Shared::new((x, out));
    let work = |begin: usize, end: usize| {
        let (x, out) = shared.get();
        let mut pairs: Vec<(T, i64)> = Vec::new();
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
                _ => {
                    pairs.clear();
                    pairs.extend(values.zip(0..));
                    arrange(position, &mut pairs);
                    let skip = if position == Position::Median { median(&pairs) } else { 0 };
                    for (i, &(_, at)) in pairs[skip..].iter().take(count).enumerate() {
                        put(i, at);
                    }
                }
            }
        }
    };
    let (total, n) = (lines.count() * lines.size, lines.count());
    if total < 2 * GRAIN { work(0, n) } else { parallel_for(n, GRAIN.div_ceil(lines.size.max(1)), work) }
}

/// Where the median of pairs in order is: the first NaN, which are last, if there is one.
fn median<T: Element>(pairs: &[(T, i64)]) -> usize {
    #[allow(clippy::eq_op, reason = "NaN differs from itself")]
    pairs.iter().position(|&(x, _)| x != x).unwrap_or((pairs.len().max(1) - 1) / 2)
}

/// Puts the pairs in the order asked for, as far as it is asked for.
fn arrange<T: Element>(position: Position, pairs: &mut [(T, i64)]) {
    let descending =
        matches!(position, Position::Sorted { descending: true } | Position::Top { largest: true, .. });
    // The index decides between equals: then no stable sort is needed.
    let compare = |a: &(T, i64), b: &(T, i64)| {
        let by_value = if descending { order(b.0, a.0) } else { order(a.0, b.0) };
        by_value.then(a.1.cmp(&b.1))
    };
    match position {
        Position::Top { count, .. } if count < pairs.len() => {
            if count > 0 {
                pairs.select_nth_unstable_by(count - 1, compare);
                pairs[..count].sort_unstable_by(compare);
            }
        }
        _ => pairs.sort_unstable_by(compare),
    }
}

/// A scan's state, one step at a time.
pub(super) trait Scanner {
    /// Elements and results.
    type Item: Element;
    /// What is carried along the line.
    type State: Copy;
    /// The state before the first element.
    const START: Self::State;
    /// One more element.
    fn step(state: Self::State, x: Self::Item) -> Self::State;
    /// The result at this element.
    fn result(state: Self::State) -> Self::Item;
}

macro_rules! scanner {
    ($name:ident: $item:ty, $state:ty, $start:expr; |$s:ident, $x:ident| $step:expr) => {
        pub(super) struct $name;
        impl Scanner for $name {
            type Item = $item;
            type State = $state;
            const START: $state = $start;
            #[inline(always)]
            fn step($s: $state, $x: $item) -> $state {
                $step
            }
            #[inline(always)]
            fn result(state: $state) -> $item {
                state as $item
            }
        }
    };
}

// f32 is carried in f64, like PyTorch's.
scanner!(SumF32: f32, f64, 0.0; |s, x| s + f64::from(x));
scanner!(SumF64: f64, f64, 0.0; |s, x| s + x);
scanner!(SumI64: i64, i64, 0; |s, x| s.wrapping_add(x));
scanner!(ProdF32: f32, f64, 1.0; |s, x| s * f64::from(x));
scanner!(ProdF64: f64, f64, 1.0; |s, x| s * x);
scanner!(ProdI64: i64, i64, 1; |s, x| s.wrapping_mul(x));
scanner!(LogSumExpF32: f32, f64, f64::NEG_INFINITY; |s, x| log_add_exp(s, f64::from(x)));
scanner!(LogSumExpF64: f64, f64, f64::NEG_INFINITY; |s, x| log_add_exp(s, x));

fn log_add_exp(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    if a == b && a.is_infinite() { a } else { a.max(b) + (-(a - b).abs()).exp().ln_1p() }
}

/// What a scan carries along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    Sum,
    /// The product.
    Prod,
    /// log Σ exp.
    LogSumExp,
}

/// `out = scan of x along each line`, from the end if `reverse`.
///
/// # Safety
/// `x` and `out` have the lines' elements of S's type and don't overlap.
pub(super) unsafe fn scan_lines<S: Scanner>(lines: Lines, reverse: bool, x: *const u8, out: *mut u8) {
    let shared = Shared::new((x.cast::<S::Item>(), out.cast::<S::Item>()));
    let work = |begin: usize, end: usize| {
        let (x, out) = shared.get();
        for line in begin..end {
            let start = lines.start(line, lines.size);
            let mut state = S::START;
            for i in 0..lines.size {
                let at = start + if reverse { lines.size - 1 - i } else { i } * lines.inner;
                // SAFETY: an element of the line; lines have their own.
                unsafe {
                    state = S::step(state, x.add(at).read());
                    out.add(at).write(S::result(state));
                }
            }
        }
    };
    let (total, n) = (lines.count() * lines.size, lines.count());
    if total < 2 * GRAIN { work(0, n) } else { parallel_for(n, GRAIN.div_ceil(lines.size.max(1)), work) }
}

/// `out = scan of x along each line` for a dtype that computes: f32, f64 or i64.
///
/// # Safety
/// `x` and `out` have the lines' elements of the dtype and don't overlap.
pub unsafe fn scan(scan: Scan, dtype: DType, lines: Lines, reverse: bool, x: *const u8, out: *mut u8) {
    use DType::{F32, F64};
    // SAFETY: the caller's contract; each scanner fits the dtype.
    unsafe {
        match (scan, dtype) {
            (Scan::Sum, F32) => scan_lines::<SumF32>(lines, reverse, x, out),
            (Scan::Sum, F64) => scan_lines::<SumF64>(lines, reverse, x, out),
            (Scan::Sum, _) => scan_lines::<SumI64>(lines, reverse, x, out),
            (Scan::Prod, F32) => scan_lines::<ProdF32>(lines, reverse, x, out),
            (Scan::Prod, F64) => scan_lines::<ProdF64>(lines, reverse, x, out),
            (Scan::Prod, _) => scan_lines::<ProdI64>(lines, reverse, x, out),
            (Scan::LogSumExp, F64) => scan_lines::<LogSumExpF64>(lines, reverse, x, out),
            (Scan::LogSumExp, _) => scan_lines::<LogSumExpF32>(lines, reverse, x, out),
        }
    }
}
