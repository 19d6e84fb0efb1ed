//! The innermost loops of a product of f32 matrices: a tile of the result that fits the registers.
//!
//! ```text
//! sums[R][2 vectors] += lhs[R][depth] · rhs[depth][2 vectors]
//! ```
//!
//! A step of the inner dim is a row of `rhs`, contiguous, and an element of each row of `lhs`, broadcast. Every
//! height up to the tallest has code of its own, so that a block is cut into tiles of even height and none is
//! mostly empty.

use std::arch::x86_64::{__m256, __m512};

use crate::cpu::prefetch;
use crate::lanes::Numbers;

/// The most steps of the inner dim a block of `lhs` has: fixed, since no bit depends on the machine's caches.
pub(crate) const DEPTH: usize = 256;
/// Elements from one row of `lhs` to the next: not a power of two, or rows would compete for the same places in the
/// cache.
pub(crate) const PITCH: usize = DEPTH + 16;

/// The operands of one tile.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    /// Steps of the inner dim, at most [`DEPTH`].
    pub depth: usize,
    /// Element `(i, p)` is at `i · PITCH + p`.
    pub lhs: *const f32,
    /// Element `(p, j)` is at `p · pitch + j`.
    pub rhs: *const f32,
    /// Element `(i, j)` is at `i · pitch + j`.
    pub dst: *mut f32,
    /// Elements from one row of `rhs`, and of `dst`, to the next.
    pub pitch: usize,
    /// Whether to add to what is there.
    pub accumulate: bool,
}

/// The tiles of one instruction set, by height minus one.
pub(crate) type Tiles = [unsafe fn(&Operands)];

/// # Safety
/// The instruction set of `V`; operands as described, for `R` rows and two vectors of columns.
#[inline(always)]
unsafe fn tile<V: Numbers, const R: usize>(operands: &Operands) {
    let Operands { depth, lhs, mut rhs, dst, pitch, accumulate } = *operands;
    // SAFETY: all elements are within the operands.
    unsafe {
        let zero = V::splat(0.0);
        let mut sums = [[zero; 2]; R];
        for i in 0..R {
            (0..2).for_each(|c| prefetch(dst.add(i * pitch + c * V::LANES)));
        }
        for p in 0..depth {
            let line = [V::load(rhs), V::load(rhs.add(V::LANES))];
            rhs = rhs.add(pitch);
            for (i, sums) in sums.iter_mut().enumerate() {
                let factor = V::splat(*lhs.add(i * PITCH + p));
                for (sum, line) in sums.iter_mut().zip(line) {
                    *sum = sum.add_product(factor, line);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                let at = dst.add(i * pitch + c * V::LANES);
                if accumulate { V::load(at).plus(sum).store(at) } else { sum.store(at) }
            }
        }
    }
}

macro_rules! tiles {
    ($name:ident, $vector:ty, $feature:literal, [$($height:literal)*]) => {
        /// Its tiles.
        pub(crate) static $name: &Tiles = {
            #[target_feature(enable = $feature)]
            unsafe fn run<const R: usize>(operands: &Operands) {
                // SAFETY: the caller's promise is passed on; the set is there where its tiles are used.
                unsafe { tile::<$vector, R>(operands) }
            }
            &[$(run::<$height>),*]
        };
    };
}

tiles!(AVX512, __m512, "avx512f,avx512vl,fma,bmi2", [1 2 3 4 5 6 7 8 9 10 11 12 13 14]);
tiles!(AVX2, __m256, "avx2,fma,bmi2", [1 2 3 4 5 6]);

/// Where part `number` of `count` even parts of `size` begins.
pub(crate) fn even(size: usize, count: usize, number: usize) -> usize {
    size / count * number + (size % count).min(number)
}
