//! What sums begin with, and where they go.

use super::Half;
use super::tile::WIDEST;
use crate::gemm::Matrix;

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub enum Results {
    /// The sums.
    Sums(Matrix<f32>),
    /// Rounded to the operands' format.
    Rounded(Matrix<u16>),
}

/// What a panel's sums begin with; returns the least of it that is not zero.
///
/// # Safety
/// The start is readable for so many columns of so many rows, at most those of `to`. `FAST` needs AVX2 and F16C.
#[inline(always)]
pub(super) unsafe fn begin<const FAST: bool>(
    half: Half,
    start: Option<(Matrix<u16>, usize)>,
    columns: usize,
    width: usize,
    to: &mut [f32],
) -> f32 {
    to.fill(0.0);
    let Some((start, rows)) = start else { return f32::INFINITY };
    // A zero is larger than all others.
    let mut least = u32::MAX;
    for i in 0..rows {
        let (before, row) = to.split_at_mut(i * width);
        let row = &mut row[..columns];
        if start.row == 0 && i > 0 {
            row.copy_from_slice(&before[..columns]);
            continue;
        }
        // SAFETY: floats are as large as their bits; elements of the start.
        unsafe {
            let row = std::slice::from_raw_parts_mut(row.as_mut_ptr().cast::<u32>(), columns);
            match start.column {
                1 => half.widen_all::<FAST>(start.at(i, 0).pointer, row),
                0 => row.fill(half.widen(*start.at(i, 0).pointer)),
                _ => row.iter_mut().enumerate().for_each(|(j, x)| *x = half.widen(*start.at(i, j).pointer)),
            }
            least = row.iter().fold(least, |least, bits| least.min((bits & 0x7fff_ffff).wrapping_sub(1)));
        }
    }
    f32::from_bits(least.saturating_add(1).min(f32::INFINITY.to_bits()))
}

/// Puts rows of sums where results from this place on go.
///
/// # Safety
/// The results are writable. `FAST` needs AVX2 and F16C.
#[inline(always)]
pub(super) unsafe fn finish<'a, const FAST: bool>(
    half: Half,
    rows: impl Iterator<Item = &'a [f32]>,
    columns: usize,
    results: Results,
    [first, j]: [usize; 2],
) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match results {
            Results::Sums(to) => put(rows, columns, to.at(first, j)),
            Results::Rounded(to) if to.column == 1 && columns == WIDEST => {
                for (i, row) in rows.enumerate() {
                    let Some(row) = row.first_chunk::<WIDEST>() else { continue };
                    // Not by way of a copy, which would be read in larger parts than it is written.
                    let to = to.at(first + i, j).pointer.cast::<[u16; WIDEST]>();
                    half.narrow_all::<FAST>(row, &mut *to);
                }
            }
            Results::Rounded(to) => {
                let mut rounded = [0; WIDEST];
                for (i, row) in rows.enumerate() {
                    let to = to.at(first + i, j);
                    if to.column == 1 && columns == row.len() {
                        half.narrow_all::<FAST>(row, std::slice::from_raw_parts_mut(to.pointer, columns));
                        continue;
                    }
                    half.narrow_all::<FAST>(row, &mut rounded);
                    put(std::iter::once(&rounded[..]), columns, to);
                }
            }
        }
    }
}

/// Puts the first elements of rows where they belong.
///
/// # Safety
/// `to` is writable for these rows.
#[inline(always)]
unsafe fn put<'a, T: Copy + 'a>(rows: impl Iterator<Item = &'a [T]>, columns: usize, to: Matrix<T>) {
    for (i, row) in rows.enumerate() {
        let to = to.at(i, 0);
        // SAFETY: elements of the row.
        unsafe {
            match row.first_chunk::<WIDEST>() {
                // So many are a few instructions.
                Some(row) if to.column == 1 && columns == WIDEST => {
                    to.pointer.cast::<[T; WIDEST]>().write(*row)
                }
                _ if to.column == 1 => std::ptr::copy_nonoverlapping(row.as_ptr(), to.pointer, columns),
                _ => row[..columns].iter().enumerate().for_each(|(j, x)| *to.at(0, j).pointer = *x),
            }
        }
    }
}
