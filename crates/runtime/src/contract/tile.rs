//! Register tiles: the loops that multiply rows by a packed panel, for each instruction set.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

use super::pack::{Run, pack_runs};
use crate::cpu::{self, Isa, prefetch};
use crate::gemm::Matrix;
use crate::lanes::Plain;
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
    /// `a · b + c`, rounded once if `FUSED`.
    fn multiply_add<const FUSED: bool>(a: Self, b: Self, c: Self) -> Self;
}

/// # Safety
/// That of [`block`](super::block): all elements of the stripe are valid.
#[inline(always)]
unsafe fn stripe<T: Real, const R: usize, const W: usize, const FUSED: bool>(stripe: &Stripe<'_, T>) {
    let count = stripe.rows.len();
    let mut i = 0;
    // SAFETY: as many rows as are left.
    unsafe {
        while i + R <= count {
            tile::<T, R, W, FUSED>(stripe, i);
            i += R;
        }
        if i + 4 <= count {
            tile::<T, 4, W, FUSED>(stripe, i);
            i += 4;
        }
        if i + 2 <= count {
            tile::<T, 2, W, FUSED>(stripe, i);
            i += 2;
        }
        if i < count {
            tile::<T, 1, W, FUSED>(stripe, i);
        }
    }
}

/// Steps of the inner dim between two times that memory is asked for.
const LINE: usize = 16;

/// # Safety
/// That of [`stripe`]; it has rows `i..i + R`.
#[inline(always)]
unsafe fn tile<T: Real, const R: usize, const W: usize, const FUSED: bool>(stripe: &Stripe<'_, T>, i: usize) {
    let mut sums = [[T::ZERO; W]; R];
    let rows: [*const T; R] = std::array::from_fn(|r| stripe.base.wrapping_offset(stripe.rows[i + r]));
    let next = match stripe.rows.get(i + R) {
        Some(next) if stripe.ahead => next - stripe.rows[i],
        _ => 0,
    };
    for (chunk, inner) in stripe.inner.chunks(LINE).enumerate() {
        if next != 0 {
            rows.iter().for_each(|row| prefetch(row.wrapping_offset(next + inner[0])));
        }
        for (p, &inner) in inner.iter().enumerate() {
            // SAFETY: a row of the panel's stretch, and an element of each row.
            unsafe {
                let line = &*stripe.panel.add((chunk * LINE + p) * W).cast::<[T; W]>();
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let factor = *row.offset(inner);
                    for (sum, &x) in sums.iter_mut().zip(line) {
                        *sum = T::multiply_add::<FUSED>(factor, x, *sum);
                    }
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: a row of the result, which is written before it is read.
        unsafe {
            let place = stripe.result.add((i + r) * stripe.pitch).cast::<[T; W]>();
            if stripe.accumulate {
                for (place, &sum) in (*place).iter_mut().zip(sums) {
                    *place = *place + sum;
                }
            } else {
                *place = *sums;
            }
        }
    }
}

macro_rules! real {
    ($ty:ty, [$avx512_lanes:ty, $avx2_lanes:ty, $plain_lanes:ty], $avx512:literal / $avx512_half:literal, $avx2:literal / $avx2_half:literal, $plain:literal) => {
        impl Real for $ty {
            const ZERO: $ty = 0.0;

            fn tile(columns: usize) -> Tile<$ty> {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512vl,fma")]
                    unsafe fn avx512<const W: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$ty, 8, W, true>(task) }
                    }
                    #[target_feature(enable = "avx2,fma")]
                    unsafe fn avx2<const W: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$ty, 4, W, true>(task) }
                    }
                    // `isa` never names more than the machine has.
                    match cpu::isa() {
                        Isa::Avx512 if columns <= $avx512_half => {
                            return Tile { rows: 8, width: $avx512_half, run: avx512::<$avx512_half> };
                        }
                        Isa::Avx512 => return Tile { rows: 8, width: $avx512, run: avx512::<$avx512> },
                        Isa::Avx2 if columns <= $avx2_half => {
                            return Tile { rows: 4, width: $avx2_half, run: avx2::<$avx2_half> };
                        }
                        Isa::Avx2 => return Tile { rows: 4, width: $avx2, run: avx2::<$avx2> },
                        Isa::Plain => {}
                    }
                }
                let _ = columns;
                Tile { rows: 4, width: $plain, run: stripe::<$ty, 4, $plain, false> }
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
                        unsafe { pack_runs::<$avx512_lanes>(b, r, runs, to, width) }
                    }
                    #[target_feature(enable = "avx2,bmi2")]
                    unsafe fn avx2(b: *const $ty, r: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { pack_runs::<$avx2_lanes>(b, r, runs, to, width) }
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
                unsafe { pack_runs::<$plain_lanes>(base, rows, runs, to, width) }
            }

            #[inline(always)]
            fn multiply_add<const FUSED: bool>(a: $ty, b: $ty, c: $ty) -> $ty {
                if FUSED { a.mul_add(b, c) } else { a * b + c }
            }
        }
    };
}

real!(f32, [__m512, __m256, Plain<f32, 4>], 32 / 16, 16 / 8, 8);
real!(f64, [__m512d, __m256d, Plain<f64, 2>], 16 / 8, 8 / 4, 4);
