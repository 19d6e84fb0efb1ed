//! Copies between layouts of one dtype: row by row along the output's innermost dim.

use super::drive::{Dim, OPERANDS, coalesce};
use super::isa::vectorised;
use super::operand::{Operand, Shared};
use super::tiles::turn;
use kiln_runtime::threads::GRAIN;
use kiln_runtime::{machine, parallel_for};
use smallvec::SmallVec;

/// Copies element by element; false, with nothing done, where the input is better turned tile by tile.
///
/// # Safety
/// That of [`convert`](super::convert::convert), for equal dtypes.
pub(super) unsafe fn copy(out: &Operand, input: &Operand) -> bool {
    let (numel, size) = (out.numel(), out.dtype.size());
    if numel == 0 {
        return true;
    }
    let mut sizes = [0; OPERANDS];
    (sizes[0], sizes[1]) = (size, size);
    let mut dims = coalesce(out, &[input], &sizes);
    let is_same = |dim: &Dim| dim.strides[0] == dim.strides[1];
    if out.ptr == input.ptr && dims.iter().all(is_same) {
        return true;
    }
    // What stays in the first-level cache may be read in any order.
    if numel * size > machine().l1 && turn(&mut dims, &sizes, 2).contains(&true) {
        return false;
    }
    while dims.len() < 2 {
        dims.insert(0, Dim { size: 1, strides: [0; OPERANDS] });
    }
    let pointers = Shared::new((out.ptr, input.ptr.cast_const()));
    let part = |begin: usize, end: usize| {
        // SAFETY: ranges are disjoint, so threads write different elements, all of them the caller's.
        unsafe { range(&dims, size, pointers.get(), begin, end) }
    };
    if numel < 2 * GRAIN {
        part(0, numel)
    } else {
        parallel_for(numel, GRAIN, part)
    }
    true
}

/// The elements `begin..end` in the order of the dims, of which there are two at least.
///
/// # Safety
/// That of [`copy`], for these elements.
unsafe fn range(
    dims: &SmallVec<[Dim; 6]>,
    size: usize,
    (to, from): (*mut u8, *const u8),
    begin: usize,
    end: usize,
) {
    let [outer @ .., rows, inner] = &dims[..] else { return };
    let n = inner.size;
    let mut at = begin;
    while at < end {
        let (row, column) = (at / n, at % n);
        let mut places = [0, 1].map(|o| column as isize * inner.strides[o]);
        let mut rest = row;
        for dim in std::iter::once(rows).chain(outer.iter().rev()) {
            for (place, stride) in places.iter_mut().zip(&dim.strides) {
                *place += (rest % dim.size) as isize * stride;
            }
            rest /= dim.size;
        }
        // As many whole rows as there are side by side, or a piece of one.
        let block = if column > 0 || end - at < n {
            (1, (n - column).min(end - at))
        } else {
            ((rows.size - row % rows.size).min((end - at) / n), n)
        };
        let (to, from) = (to.wrapping_offset(places[0]), from.wrapping_offset(places[1]));
        let (steps, strides) = ([rows.strides[0], rows.strides[1]], [inner.strides[0], inner.strides[1]]);
        // SAFETY: passed on.
        unsafe {
            match size {
                1 => copy_block::<u8>(to, from, block, steps, strides),
                2 => copy_block::<u16>(to, from, block, steps, strides),
                4 => copy_block::<u32>(to, from, block, steps, strides),
                _ => copy_block::<u64>(to, from, block, steps, strides),
            }
        }
        at += block.0 * block.1;
    }
}

/// Rows shorter than this are copied element by element: a call for each takes longer.
const SHORT: usize = 16;

vectorised! {
    /// Copies rows, `steps` bytes apart, of elements that are `strides` bytes apart.
    ///
    /// # Safety
    /// The elements can be written and read, and are apart.
    #[allow(clippy::neg_multiply, reason = "one of several distances")]
    fn copy_block [T: Copy] [T] (
        to: *mut u8, from: *const u8, block: (usize, usize), steps: [isize; 2], strides: [isize; 2]
    ) {
        let (rows, n) = block;
        let size = size_of::<T>() as isize;
        let row = |r: usize| {
            let r = r as isize;
            (to.wrapping_offset(r * steps[0]).cast::<T>(), from.wrapping_offset(r * steps[1]).cast::<T>())
        };
        /// Element by element; distances that the compiler knows are vectorised.
        macro_rules! each {
            ($out:expr, $in:expr) => {
                for r in 0..rows {
                    let (to, from) = row(r);
                    for i in 0..n as isize {
                        // SAFETY: the caller's promise.
                        unsafe { to.offset(i * $out).write(from.offset(i * $in).read()) };
                    }
                }
            };
        }
        /// Several lines, element by element: what is one behind the other in each becomes a row.
        macro_rules! interleave {
            ($n:literal) => {{
                let lines: [*const T; $n] =
                    std::array::from_fn(|i| from.wrapping_offset(i as isize * strides[1]).cast());
                let to: *mut [T; $n] = to.cast();
                for r in 0..rows {
                    // SAFETY: the caller's promise.
                    unsafe { to.add(r).write_unaligned(lines.map(|line| line.add(r).read())) };
                }
            }};
        }
        let in_lines = steps[1] == size && steps[0] == n as isize * size;
        match strides.map(|stride| stride / size) {
            [1, _] if in_lines && n == 2 => interleave!(2),
            [1, _] if in_lines && n == 3 => interleave!(3),
            [1, _] if in_lines && n == 4 => interleave!(4),
            [1, 1] if n >= SHORT => {
                for r in 0..rows {
                    let (to, from) = row(r);
                    // SAFETY: the caller's promise.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
                }
            }
            [1, 1] => each!(1, 1),
            [1, 0] => {
                for r in 0..rows {
                    let (to, from) = row(r);
                    // SAFETY: the caller's promise.
                    let value = unsafe { from.read() };
                    for i in 0..n {
                        // SAFETY: the caller's promise.
                        unsafe { to.add(i).write(value) };
                    }
                }
            }
            [1, -1] => each!(1, -1),
            [1, 2] => each!(1, 2),
            [1, 3] => each!(1, 3),
            [1, 4] => each!(1, 4),
            [2, 1] => each!(2, 1),
            [out, step] => each!(out, step),
        }
    }
}
