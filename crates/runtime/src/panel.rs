//! The single-threaded kernels under a matrix product, for f32 and f64.
//!
//! The product itself is the `gemm` family's. Beside it stand a product of a single row, and the copy that
//! turns a matrix round.

use std::ops::{Add, Mul, Range};

use gemm_common::Parallelism;

use crate::cpu::{self, Isa, prefetch};
use crate::gemm::{Matrix, Product, Shape};

/// A type with kernels.
pub(crate) trait Float:
    Copy + Send + Sync + Add<Output = Self> + Mul<Output = Self> + 'static
{
    const ZERO: Self;

    /// Any product; best when the rows of `dst` and `rhs` are contiguous.
    ///
    /// # Safety
    /// As for [`gemm_f32()`](crate::gemm::gemm_f32()).
    unsafe fn panel(product: Product<Self>);

    /// A product of one row; the rows of `dst` and `rhs` are contiguous.
    ///
    /// # Safety
    /// As for [`gemm_f32()`](crate::gemm::gemm_f32()).
    unsafe fn row(product: Product<Self>);

    /// Copies the `rows × columns` matrix `src`, whose columns are contiguous, to `dst`, with contiguous rows
    /// that lie `pitch` elements apart.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for `rows` rows of `columns` elements.
    unsafe fn straighten(src: Matrix<Self>, dst: *mut Self, pitch: usize, rows: usize, columns: usize);

    /// `a · b + c`, rounded once; fast only where there are instructions for it.
    fn fused(a: Self, b: Self, c: Self) -> Self;
}

/// The most steps of the inner dim between two visits of the result, as the library has it: fixed, since no bit depends
/// on the machine's caches.
pub(crate) const STRETCH: usize = 512;

/// How much of the inner dim the library is given at once. It cuts that into even stretches, but where the result is
/// small the last one is what is left. Such products (but single rows and dot products, which are other kernels') are
/// given to it in even stretches, so that a row has the same bits in a band of any height.
fn stretch<T: Copy>(product: &Product<T>) -> usize {
    let Product { shape: Shape { m, n, k }, rhs, .. } = *product;
    let is_small = m.max(n) <= 64 && m.min(n) > 1 && rhs.row != 1;
    if is_small && k > STRETCH { k.div_ceil(k.div_ceil(STRETCH)) } else { k.max(1) }
}

#[rustfmt::skip]
macro_rules! kernels {
    ($type:ty, $library:path) => {
        const ZERO: Self = 0.0;

        unsafe fn panel(product: Product<Self>) {
            let Product { shape: Shape { m, n, k }, dst, accumulate, lhs, rhs, .. } = product;
            let (dst_at, stretch, no) = (dst.pointer, stretch(&product), false);
            for p in (0..k).step_by(stretch) {
                let (lhs_at, rhs_at) = (lhs.at(0, p).pointer, rhs.at(p, 0).pointer);
                let (k, add) = (stretch.min(k - p), accumulate || p > 0);
                // The library's kernels are column-major: they are given the transposed product.
                // SAFETY: the caller's promise is passed on.
                unsafe {
                    $library()(
                        n, m, k, dst_at, dst.row, dst.column, add, rhs_at, rhs.row, rhs.column,
                        lhs_at, lhs.row, lhs.column, 1.0, 1.0, no, no, no, Parallelism::None,
                    )
                }
            }
        }

        unsafe fn row(product: Product<Self>) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,fma")]
                unsafe fn avx512(product: Product<$type>) {
                    // SAFETY: the caller's promise is passed on.
                    unsafe { row::<$type, true>(product) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2(product: Product<$type>) {
                    // SAFETY: the caller's promise is passed on.
                    unsafe { row::<$type, true>(product) }
                }
                match cpu::isa() {
                    // SAFETY: `isa` never names more than the machine has.
                    Isa::Avx512 => return unsafe { avx512(product) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2(product) },
                    Isa::Plain => {}
                }
            }
            // SAFETY: the caller's promise is passed on.
            unsafe { row::<$type, false>(product) }
        }

        #[inline(always)]
        fn fused(a: Self, b: Self, c: Self) -> Self {
            a.mul_add(b, c)
        }
    };
}

impl Float for f32 {
    kernels!(f32, gemm_f32::gemm::f32::get_gemm_fn);

    unsafe fn straighten(src: Matrix<f32>, dst: *mut f32, pitch: usize, rows: usize, columns: usize) {
        #[cfg(target_arch = "x86_64")]
        if cpu::isa() != Isa::Plain {
            // SAFETY: AVX2 is there; the caller's promise is passed on.
            return unsafe { straighten_avx2(src, dst, pitch, rows, columns) };
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { straighten_blocks(src, dst, pitch, [0..rows, 0..columns]) }
    }
}

impl Float for f64 {
    kernels!(f64, gemm_f64::gemm::f64::get_gemm_fn);

    unsafe fn straighten(src: Matrix<f64>, dst: *mut f64, pitch: usize, rows: usize, columns: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { straighten_blocks(src, dst, pitch, [0..rows, 0..columns]) }
    }
}

/// A row times a matrix with contiguous rows: eight rows at a time are added to `dst`, all read in order.
#[inline(always)]
unsafe fn row<T: Float, const FMA: bool>(product: Product<T>) {
    let Product { shape: Shape { n, k, .. }, dst, accumulate, lhs, rhs, .. } = product;
    // SAFETY: `dst` has `n` contiguous elements; they are written before they are read.
    let dst = unsafe {
        if !accumulate {
            (0..n).for_each(|j| *dst.pointer.add(j) = T::ZERO);
        }
        std::slice::from_raw_parts_mut(dst.pointer, n)
    };
    // SAFETY: row `p < k` has `n` contiguous elements, none of them in `dst`.
    let line = |p: usize| unsafe { std::slice::from_raw_parts(rhs.at(p, 0).pointer, n) };
    // SAFETY: `p < k`.
    let factor = |p: usize| unsafe { *lhs.at(0, p).pointer };
    let whole = k / 8 * 8;
    for p in (0..whole).step_by(8) {
        let (rows, factors) = (std::array::from_fn(|i| line(p + i)), std::array::from_fn(|i| factor(p + i)));
        add_rows::<T, FMA, 8>(dst, rows, factors, 8 * rhs.row);
    }
    for p in whole..k {
        add_rows::<T, FMA, 1>(dst, [line(p)], [factor(p)], 0);
    }
}

/// Adds `N` rows times their factors to `dst`, a few vectors at a time in registers.
///
/// `ahead` is where the next rows lie: reading several rows at once is more than the hardware foresees.
#[inline(always)]
fn add_rows<T: Float, const FMA: bool, const N: usize>(
    dst: &mut [T],
    rows: [&[T]; N],
    factors: [T; N],
    ahead: isize,
) {
    // A cache line of f32.
    const LINE: usize = 16;
    let add = |sum: T, row: T, factor: T| if FMA { T::fused(row, factor, sum) } else { sum + row * factor };
    let (lines, rest) = dst.as_chunks_mut::<LINE>();
    let start = lines.len() * LINE;
    for (index, line) in lines.iter_mut().enumerate() {
        let mut sum = *line;
        for (row, factor) in rows.iter().zip(factors) {
            let row = &row[index * LINE..][..LINE];
            prefetch(row.as_ptr().wrapping_offset(ahead));
            for (sum, row) in sum.iter_mut().zip(row) {
                *sum = add(*sum, *row, factor);
            }
        }
        *line = sum;
    }
    for (index, place) in rest.iter_mut().enumerate() {
        for (row, factor) in rows.iter().zip(factors) {
            *place = add(*place, row[start + index], factor);
        }
    }
}

/// The portable copy of these rows and columns, block by block so that both sides stay in cache.
unsafe fn straighten_blocks<T: Copy>(
    src: Matrix<T>,
    dst: *mut T,
    pitch: usize,
    [rows, columns]: [Range<usize>; 2],
) {
    const BLOCK: usize = 16;
    for p0 in rows.clone().step_by(BLOCK) {
        for j0 in columns.clone().step_by(BLOCK) {
            for p in p0..(p0 + BLOCK).min(rows.end) {
                for j in j0..(j0 + BLOCK).min(columns.end) {
                    // SAFETY: `p` and `j` are within both matrices.
                    unsafe { *dst.add(p * pitch + j) = *src.at(p, j).pointer }
                }
            }
        }
    }
}

/// Elements between rows from which they count as far apart: a page.
#[cfg(target_arch = "x86_64")]
const FAR: usize = 1024;

/// The same four by eight in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn straighten_avx2(src: Matrix<f32>, dst: *mut f32, pitch: usize, k: usize, n: usize) {
    use std::arch::x86_64::*;
    let (whole_k, whole_n) = (k / 4 * 4, n / 16 * 16);
    // Sixteen columns at a time: every cache line of `dst` is written whole.
    let block = |p: usize, j: usize| {
        for j in [j, j + 8] {
            // SAFETY: the 4 × 8 block at (p, j) is within both matrices.
            unsafe {
                // Columns j+c and j+c+4 in the two halves of a register.
                let pair = |c: usize| {
                    let low = _mm_loadu_ps(src.at(p, j + c).pointer);
                    let high = _mm_loadu_ps(src.at(p, j + c + 4).pointer);
                    _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high)
                };
                let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let rows = [
                    _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ];
                for (r, row) in rows.into_iter().enumerate() {
                    _mm256_storeu_ps(dst.add((p + r) * pitch + j), row);
                }
            }
        }
    };
    // Rows of `dst` that lie far apart are written one after the other, else columns of `src` are read so.
    if pitch > FAR {
        (0..whole_k).step_by(4).for_each(|p| (0..whole_n).step_by(16).for_each(|j| block(p, j)));
    } else {
        (0..whole_n).step_by(16).for_each(|j| (0..whole_k).step_by(4).for_each(|p| block(p, j)));
    }
    // SAFETY: the edges left over: columns past the blocks, then rows past them.
    unsafe {
        straighten_blocks(src, dst, pitch, [0..whole_k, whole_n..n]);
        straighten_blocks(src, dst, pitch, [whole_k..k, 0..n]);
    }
}
