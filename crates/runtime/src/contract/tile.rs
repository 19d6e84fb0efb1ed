//! Register tiles: the loops that multiply rows by a packed panel, for each instruction set.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

use super::pack::{Run, pack_runs};
use crate::cpu::{self, Isa, prefetch};
use crate::gemm::Matrix;
use crate::lanes::{Lanes, Plain, Sums};
use crate::panel::Float;

/// Rows of the operand that is read in place, times a stretch of one panel.
#[derive(Debug)]
pub struct Stripe<'a, T> {
    pub(super) base: *const T,
    pub(super) rows: &'a [isize],
    pub(super) inner: &'a [isize],
    pub(super) panel: *const T,
    pub(super) result: *mut T,
    /// Distance between rows of the result.
    pub(super) pitch: usize,
    pub(super) accumulate: bool,
    /// Whether rows come from memory: they are asked for while those before them are worked on.
    pub(super) ahead: bool,
}

/// A register tile: its size, and the loop that fills it for all rows of a stripe.
#[derive(Debug, Clone, Copy)]
pub struct Tile<T> {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) run: unsafe fn(&Stripe<'_, T>),
}

/// A float type with register tiles.
pub trait Real: Copy + Send + Sync + PartialOrd + std::ops::Add<Output = Self> + 'static {
    /// A zero.
    const ZERO: Self;
    /// The machine's tile for a result of so many columns: one as wide as it likes, or half of that.
    fn tile(columns: usize) -> Tile<Self>;
    /// Copies `columns` columns of `rows` elements that lie `from_pitch` apart to `rows` rows that lie `to_pitch`
    /// apart: element `(i, j)` is at `from + j · from_pitch + i`, then at `to + i · to_pitch + j`.
    ///
    /// # Safety
    /// All elements are valid, those of `from` to read, those of `to` to write.
    unsafe fn turn(from: *const Self, from_pitch: usize, to: *mut Self, to_pitch: usize, size: [usize; 2]);
    /// Copies runs of columns into the rows of a panel, zeros behind them.
    ///
    /// # Safety
    /// The elements `base + row + column` are readable, and `to` has room for rows of `width`.
    unsafe fn pack_runs(base: *const Self, rows: &[isize], runs: &[Run], to: *mut Self, width: usize);
}

/// # Safety
/// That of [`block`](super::block), and the instruction set of `V`: all elements of the stripe are valid.
#[inline(always)]
unsafe fn stripe<V: Sums, const R: usize, const N: usize>(stripe: &Stripe<'_, V::Element>) {
    let count = stripe.rows.len();
    let mut i = 0;
    // SAFETY: as many rows as are left.
    unsafe {
        while i + R <= count {
            tile::<V, R, N>(stripe, i);
            i += R;
        }
        if i + 4 <= count {
            tile::<V, 4, N>(stripe, i);
            i += 4;
        }
        if i + 2 <= count {
            tile::<V, 2, N>(stripe, i);
            i += 2;
        }
        if i < count {
            tile::<V, 1, N>(stripe, i);
        }
    }
}

/// Steps of the inner dim between two times that memory is asked for.
const LINE: usize = 16;

/// Rows `i..i + R` times `N` vectors of the panel.
///
/// # Safety
/// That of [`stripe`]; it has these rows.
#[inline(always)]
unsafe fn tile<V: Sums, const R: usize, const N: usize>(stripe: &Stripe<'_, V::Element>, i: usize) {
    let rows: [*const V::Element; R] =
        std::array::from_fn(|r| stripe.base.wrapping_offset(stripe.rows[i + r]));
    let next = match stripe.rows.get(i + R) {
        Some(next) if stripe.ahead => next - stripe.rows[i],
        _ => 0,
    };
    // SAFETY: the instruction set; a row of the panel's stretch, and an element of each row; a row of the result,
    // which is written before it is read.
    unsafe {
        let mut sums = [[V::splat(V::Element::default()); N]; R];
        let mut panel = stripe.panel;
        for inner in stripe.inner.chunks(LINE) {
            if next != 0 {
                rows.iter().for_each(|row| prefetch(row.wrapping_offset(next + inner[0])));
            }
            for &inner in inner {
                let mut line = [V::splat(V::Element::default()); N];
                for (n, line) in line.iter_mut().enumerate() {
                    *line = V::load(panel.add(n * V::LANES));
                }
                panel = panel.wrapping_add(N * V::LANES);
                for r in 0..R {
                    let factor = V::splat(*rows[r].offset(inner));
                    for n in 0..N {
                        sums[r][n] = sums[r][n].add_product(factor, line[n]);
                    }
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                let place = stripe.result.add((i + r) * stripe.pitch + n * V::LANES);
                let sum = if stripe.accumulate { V::load(place).plus(sum) } else { sum };
                sum.store(place);
            }
        }
    }
}

macro_rules! real {
    ($ty:ty, $avx512:ty, $avx2:ty, $plain:ty) => {
        impl Real for $ty {
            const ZERO: $ty = 0.0;

            fn tile(columns: usize) -> Tile<$ty> {
                // A result that one vector holds has no use for two.
                macro_rules! tiles {
                    ($vector:ty, $rows:literal, $run:ident) => {{
                        let lanes = <$vector as Lanes>::LANES;
                        if columns <= lanes {
                            Tile { rows: $rows, width: lanes, run: $run::<1> }
                        } else {
                            Tile { rows: $rows, width: 2 * lanes, run: $run::<2> }
                        }
                    }};
                }
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512vl,fma")]
                    unsafe fn avx512<const N: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$avx512, 8, N>(task) }
                    }
                    #[target_feature(enable = "avx2,fma")]
                    unsafe fn avx2<const N: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$avx2, 4, N>(task) }
                    }
                    // `isa` never names more than the machine has.
                    match cpu::isa() {
                        Isa::Avx512 => return tiles!($avx512, 8, avx512),
                        Isa::Avx2 => return tiles!($avx2, 4, avx2),
                        Isa::Plain => {}
                    }
                }
                let _ = columns;
                Tile { rows: 4, width: 2 * <$plain as Lanes>::LANES, run: stripe::<$plain, 4, 2> }
            }

            unsafe fn turn(
                from: *const $ty,
                from_pitch: usize,
                to: *mut $ty,
                to_pitch: usize,
                [rows, columns]: [usize; 2],
            ) {
                let from = Matrix::new(from.cast_mut(), 1, from_pitch as isize);
                // SAFETY: the caller's promise is passed on.
                unsafe { <$ty as Float>::straighten(from, to, to_pitch, rows, columns) }
            }

            unsafe fn pack_runs(base: *const $ty, rows: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512vl,bmi2")]
                    unsafe fn avx512(b: *const $ty, r: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { pack_runs::<$avx512>(b, r, runs, to, width) }
                    }
                    #[target_feature(enable = "avx2,bmi2")]
                    unsafe fn avx2(b: *const $ty, r: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { pack_runs::<$avx2>(b, r, runs, to, width) }
                    }
                    match cpu::isa() {
                        // SAFETY: `isa` never names more than the machine has.
                        Isa::Avx512 => return unsafe { avx512(base, rows, runs, to, width) },
                        // SAFETY: as above.
                        Isa::Avx2 => return unsafe { avx2(base, rows, runs, to, width) },
                        Isa::Plain => {}
                    }
                }
                // SAFETY: the caller's promise is passed on.
                unsafe { pack_runs::<$plain>(base, rows, runs, to, width) }
            }
        }
    };
}

real!(f32, __m512, __m256, Plain<f32, 4>);
real!(f64, __m512d, __m256d, Plain<f64, 2>);
