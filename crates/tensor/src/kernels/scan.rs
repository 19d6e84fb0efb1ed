//! Scans along one dim: what is carried from element to element. Threads share lines.

use super::element::Element;
use super::isa::vectorised;
use super::operand::Shared;
use super::order::Lines;
use kiln_ir::DType;
use kiln_runtime::{parallel_for, threads::GRAIN};

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

/// Lines that are gone through at once where their elements lie side by side.
const COLUMNS: usize = 64;
/// Lines that are gone through at once where each has its elements side by side: a step waits for the one before it, but
/// not for other lines.
const ROWS: usize = 4;

/// `out = scan of x along each line`, from the end if `reverse`.
///
/// # Safety
/// `x` and `out` have the lines' elements of S's type and don't overlap.
unsafe fn scan_lines<S: Scanner>(lines: Lines, reverse: bool, x: *const u8, out: *mut u8) {
    let shared = Shared::new((x.cast::<S::Item>(), out.cast::<S::Item>()));
    let Lines { outer, size, inner } = lines;
    let (across, together) = (inner.div_ceil(COLUMNS), if inner == 1 { ROWS } else { 1 });
    // Groups of lines: columns of a block, or several blocks of one line each.
    let groups = outer.div_ceil(together) * across;
    let work = |begin: usize, end: usize| {
        let (x, out) = shared.get();
        for group in begin..end {
            let (block, column) = (group / across * together, group % across * COLUMNS);
            let start = block * size * inner + column;
            let (x, out) = (x.wrapping_add(start), out.wrapping_add(start));
            // SAFETY: elements of these lines; groups have their own.
            unsafe {
                if inner > 1 {
                    columns::<S>(x, out, (size, inner), COLUMNS.min(inner - column), reverse);
                } else if block + ROWS <= outer {
                    rows::<S, ROWS>(x, out, size, reverse);
                } else {
                    for line in 0..outer - block {
                        rows::<S, 1>(x.add(line * size), out.add(line * size), size, reverse);
                    }
                }
            }
        }
    };
    let per_group = size * if inner > 1 { COLUMNS.min(inner) } else { together };
    parallel_for(groups, (GRAIN / 2).div_ceil(per_group.max(1)), work);
}

/// Scans `N` lines of `size` elements, one behind the other.
///
/// # Safety
/// The elements can be read and written.
unsafe fn rows<S: Scanner, const N: usize>(x: *const S::Item, out: *mut S::Item, size: usize, reverse: bool) {
    let mut states = [S::START; N];
    for i in 0..size {
        let at = if reverse { size - 1 - i } else { i };
        for (line, state) in states.iter_mut().enumerate() {
            let at = line * size + at;
            // SAFETY: the caller's promise.
            unsafe {
                *state = S::step(*state, x.add(at).read());
                out.add(at).write(S::result(*state));
            }
        }
    }
}

vectorised! {
    /// Scans `width` lines of so many elements, which are so far apart.
    ///
    /// # Safety
    /// The elements can be read and written; there are at most [`COLUMNS`] lines.
    fn columns [S: Scanner] [S] (
        x: *const S::Item, out: *mut S::Item, lines: (usize, usize), width: usize, reverse: bool
    ) {
        let (size, step) = lines;
        let mut states = [S::START; COLUMNS];
        for i in 0..size {
            let at = if reverse { size - 1 - i } else { i } * step;
            for (column, state) in states[..width].iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    *state = S::step(*state, x.add(at + column).read());
                    out.add(at + column).write(S::result(*state));
                }
            }
        }
    }
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
