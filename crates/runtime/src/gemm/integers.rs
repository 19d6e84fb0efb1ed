//! Products of 64-bit integers. They wrap, so sums may be taken in any order: a tile of results is kept in registers
//! while the inner dim goes by.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm512_add_epi64, _mm512_loadu_epi64, _mm512_mullo_epi64, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_epi64,
};

use super::{Matrix, Shape, TASK};
use crate::cpu::{Isa, isa};
use crate::scratch;
use crate::threads::{Shared, parallel_for};

/// Rows and columns of a tile: two vectors of columns for each row fill half of the widest registers.
const ROWS: usize = 8;
const COLUMNS: usize = 16;

type Panel = [i64; COLUMNS];
type Sums = [Panel; ROWS];

/// `dst = lhs · rhs` in i64, or `dst += lhs · rhs` with `accumulate`; wraps on overflow.
///
/// # Safety
/// As for [`gemm_f32()`](super::gemm_f32()).
pub unsafe fn gemm_i64(shape: Shape, dst: Matrix<i64>, accumulate: bool, lhs: Matrix<i64>, rhs: Matrix<i64>) {
    let Shape { m, n, k } = shape;
    let panels = n.div_ceil(COLUMNS);
    // Columns of `rhs` lie side by side in panels, so that a tile reads them front to back.
    let packed = scratch::with(panels * k * size_of::<Panel>(), |memory| {
        let memory = Shared(memory.cast::<Panel>());
        let (dst, lhs, rhs) = (Shared(dst), Shared(lhs), Shared(rhs));
        parallel_for(panels, TASK.div_ceil((k * COLUMNS).max(1)), |begin, end| {
            for panel in begin..end {
                for p in 0..k {
                    let line: Panel = std::array::from_fn(|c| {
                        let j = (panel * COLUMNS + c).min(n - 1);
                        // SAFETY: within the shape.
                        unsafe { *rhs.get().at(p, j).pointer }
                    });
                    // SAFETY: the memory has room for `k` lines of each panel, and each panel is one thread's.
                    unsafe { memory.get().add(panel * k + p).write(line) };
                }
            }
        });
        let tiles = m.div_ceil(ROWS);
        let work = ROWS.saturating_mul(n).saturating_mul(k);
        parallel_for(tiles, TASK.div_ceil(work.max(1)), |begin, end| {
            for (tile, panel) in (begin..end).flat_map(|tile| (0..panels).map(move |panel| (tile, panel))) {
                let i = tile * ROWS;
                let rows: [*const i64; ROWS] =
                    std::array::from_fn(|r| lhs.get().at((i + r).min(m - 1), 0).pointer.cast_const());
                // SAFETY: the panel was written above; rows are within the shape.
                let sums = unsafe {
                    let panel = match k {
                        0 => &[],
                        _ => std::slice::from_raw_parts(memory.get().add(panel * k), k),
                    };
                    sums_of(rows, lhs.get().column, panel)
                };
                for (r, c) in (0..ROWS.min(m - i)).flat_map(|r| (0..COLUMNS).map(move |c| (r, c))) {
                    let j = panel * COLUMNS + c;
                    if j < n {
                        // SAFETY: within the shape; tiles of one thread are of rows of its own.
                        unsafe {
                            let place = dst.get().at(i + r, j).pointer;
                            let before = if accumulate { *place } else { 0 };
                            *place = before.wrapping_add(sums[r][c]);
                        }
                    }
                }
            }
        });
    });
    if packed.is_err() {
        // SAFETY: the caller's promise is passed on.
        unsafe { plainly(shape, dst, accumulate, lhs, rhs) }
    }
}

/// Element by element, where there is no memory to pack anything.
unsafe fn plainly(shape: Shape, dst: Matrix<i64>, accumulate: bool, lhs: Matrix<i64>, rhs: Matrix<i64>) {
    for (i, j) in (0..shape.m).flat_map(|i| (0..shape.n).map(move |j| (i, j))) {
        // SAFETY: within the shape.
        unsafe {
            let place = dst.at(i, j).pointer;
            let term = |p: usize| (*lhs.at(i, p).pointer).wrapping_mul(*rhs.at(p, j).pointer);
            let before = if accumulate { *place } else { 0 };
            *place = (0..shape.k).map(term).fold(before, i64::wrapping_add);
        }
    }
}

/// The sums of a tile, by the best instructions there are.
///
/// # Safety
/// Each row has an element every `step` for each line of the panel.
unsafe fn sums_of(rows: [*const i64; ROWS], step: isize, panel: &[Panel]) -> Sums {
    // SAFETY: the instructions are there; the caller's promise is passed on.
    unsafe {
        match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512(rows, step, panel),
            _ => plain(rows, step, panel),
        }
    }
}

/// Only this set multiplies vectors of such integers.
///
/// # Safety
/// That of [`sums_of`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn avx512(rows: [*const i64; ROWS], step: isize, panel: &[Panel]) -> Sums {
    const LANES: usize = 8;
    let mut sums = [[_mm512_setzero_si512(); COLUMNS / LANES]; ROWS];
    let mut result = [[0; COLUMNS]; ROWS];
    // SAFETY: the caller's promise; lines and results are whole vectors.
    unsafe {
        for (p, line) in panel.iter().enumerate() {
            let line: [_; COLUMNS / LANES] =
                std::array::from_fn(|c| _mm512_loadu_epi64(line.as_ptr().add(c * LANES)));
            for (sums, row) in sums.iter_mut().zip(rows) {
                let factor = _mm512_set1_epi64(*row.wrapping_offset(p as isize * step));
                for (sum, line) in sums.iter_mut().zip(line) {
                    *sum = _mm512_add_epi64(*sum, _mm512_mullo_epi64(factor, line));
                }
            }
        }
        for (result, sums) in result.iter_mut().zip(sums) {
            for (c, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_epi64(result.as_mut_ptr().add(c * LANES), sum);
            }
        }
    }
    result
}

/// # Safety
/// That of [`sums_of`].
unsafe fn plain(rows: [*const i64; ROWS], step: isize, panel: &[Panel]) -> Sums {
    let mut sums = [[0i64; COLUMNS]; ROWS];
    for (sums, row) in sums.iter_mut().zip(rows) {
        for (p, line) in panel.iter().enumerate() {
            // SAFETY: the caller's promise.
            let factor = unsafe { *row.wrapping_offset(p as isize * step) };
            for (sum, &element) in sums.iter_mut().zip(line) {
                *sum = sum.wrapping_add(factor.wrapping_mul(element));
            }
        }
    }
    sums
}
