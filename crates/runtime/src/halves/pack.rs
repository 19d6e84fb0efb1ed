//! Packing an operand into panels of words, as the register tiles read them.

use super::Half;
#[cfg(target_arch = "x86_64")]
use super::few::{TURNED, turn_lines};
use crate::gemm::Matrix;

/// Words of one line that are packed at a time.
const STRETCH: usize = 64;

/// Lines that are packed side by side: rows of the left operand, or columns of the right one.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// Element `p` of line `j` is at `(p, j)`.
    pub(super) from: Matrix<u16>,
    pub(super) half: Half,
    /// How many of them.
    pub(super) count: usize,
    /// Elements of each.
    pub(super) length: usize,
}

/// The number of words that so many elements of a line make.
pub(super) fn words(length: usize, is_paired: bool) -> usize {
    if is_paired { length.div_ceil(2) } else { length }
}

/// The word an element is in where a word is an f32: the second of two neighbours comes first, as in a pair.
fn place(p: usize, length: usize) -> usize {
    if p ^ 1 < length { p ^ 1 } else { p }
}

/// Packs lines: word `w` of line `j` goes to `to + w · width + j`, zeros behind the lines.
///
/// # Safety
/// The elements are readable, and `to` has room for all words; there are at most `width` lines. `FAST` needs AVX2 and F16C.
#[inline(always)]
pub(super) unsafe fn pack<const FAST: bool>(lines: Lines, is_paired: bool, to: *mut u32, width: usize) {
    let Lines { from, count, length, .. } = lines;
    // SAFETY: the caller's promise is passed on.
    unsafe {
        if from.column == 1 && (from.row != 1 || length == 1) && count > 1 {
            return if is_paired {
                side_by_side(lines, to, width)
            } else {
                widened::<FAST>(lines, to, width)
            };
        }
        let total = words(length, is_paired);
        let mut room = [[0; STRETCH]; 4];
        for w in (0..total).step_by(STRETCH) {
            let part = STRETCH.min(total - w);
            // Pairs are there only on machines that turn so many of them in registers.
            #[cfg(target_arch = "x86_64")]
            let turned =
                match is_paired && from.row == 1 && 2 * (w + part) <= length && part.is_multiple_of(TURNED) {
                    true => count / TURNED * TURNED,
                    false => 0,
                };
            #[cfg(not(target_arch = "x86_64"))]
            let turned = 0;
            #[cfg(target_arch = "x86_64")]
            for j in (0..turned).step_by(TURNED) {
                let mut sources = [std::ptr::null(); TURNED];
                for (line, source) in sources.iter_mut().enumerate() {
                    *source = from.at(2 * w, j + line).pointer.cast_const();
                }
                turn_lines(&sources, part, to.add(w * width + j), width);
            }
            for j in (turned..width).step_by(4) {
                let mut sources = [std::ptr::null(); 4];
                for (line, (room, source)) in room.iter_mut().zip(&mut sources).enumerate() {
                    let whole = 2 * (w + part) <= length;
                    if j + line >= count {
                        room.fill(0);
                    } else if is_paired && from.row == 1 && whole {
                        *source = from.at(2 * w, j + line).pointer.cast::<u32>().cast_const();
                        continue;
                    } else {
                        gather::<FAST>(lines, is_paired, j + line, w, &mut room[..part]);
                    }
                    *source = room.as_ptr();
                }
                turn(sources, part, to.add(w * width + j), width, (width - j).min(4));
            }
        }
    }
}

/// Words of one line from `w` on.
///
/// # Safety
/// That of [`pack`].
#[inline(always)]
unsafe fn gather<const FAST: bool>(lines: Lines, is_paired: bool, j: usize, w: usize, to: &mut [u32]) {
    let Lines { from, half, length, .. } = lines;
    if from.row == 1 && !is_paired {
        // SAFETY: elements of the line, which are neighbours; words are as large as floats.
        unsafe { half.widen_all::<FAST>(from.at(w, j).pointer, to) };
        // Stretches begin at even places.
        return to.as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair.swap(0, 1));
    }
    // SAFETY: an element of the line.
    let element = |p: usize| unsafe { *from.at(p, j).pointer };
    for (i, word) in to.iter_mut().enumerate() {
        let w = w + i;
        *word = if is_paired {
            let second = if 2 * w + 1 < length { element(2 * w + 1) } else { 0 };
            u32::from(element(2 * w)) | u32::from(second) << 16
        } else {
            half.widen(element(place(w, length)))
        };
    }
}

/// Four lines, turned: their words of one step come side by side.
///
/// # Safety
/// Each source has `count` words; `to` has room for as many rows of `wanted` words, at most 4, `width` apart.
#[inline(always)]
unsafe fn turn(sources: [*const u32; 4], count: usize, to: *mut u32, width: usize, wanted: usize) {
    let mut w = 0;
    #[cfg(target_arch = "x86_64")]
    while wanted == 4 && w + 4 <= count {
        use std::arch::x86_64::*;
        // SAFETY: four words of each line, and four rows; every such machine has the instructions.
        unsafe {
            let mut lines = [_mm_setzero_ps(); 4];
            for (line, source) in lines.iter_mut().zip(sources) {
                *line = _mm_loadu_ps(source.add(w).cast());
            }
            let [mut a, mut b, mut c, mut d] = lines;
            _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
            for (i, row) in [a, b, c, d].into_iter().enumerate() {
                _mm_storeu_ps(to.add((w + i) * width).cast(), row);
            }
        }
        w += 4;
    }
    for w in w..count {
        for (line, source) in sources.iter().enumerate().take(wanted) {
            // SAFETY: a word of the line, which need not lie as words do, and its place.
            unsafe { *to.add(w * width + line) = source.add(w).read_unaligned() }
        }
    }
}

/// Pairs of lines that lie side by side in memory.
///
/// # Safety
/// That of [`pack`]; elements of neighbouring lines are neighbours.
#[inline(always)]
unsafe fn side_by_side(lines: Lines, to: *mut u32, width: usize) {
    let Lines { from, count, length, .. } = lines;
    for p in (0..length).step_by(2) {
        // SAFETY: the elements of two steps, and the row that is made of them.
        unsafe {
            let to = std::slice::from_raw_parts_mut(to.add(p / 2 * width), width);
            let first = std::slice::from_raw_parts(from.at(p, 0).pointer, count);
            let (to, rest) = to.split_at_mut(count);
            rest.fill(0);
            if p + 1 < length {
                let second = std::slice::from_raw_parts(from.at(p + 1, 0).pointer, count);
                for ((word, &first), &second) in to.iter_mut().zip(first).zip(second) {
                    *word = u32::from(first) | u32::from(second) << 16;
                }
            } else {
                to.iter_mut().zip(first).for_each(|(word, &first)| *word = u32::from(first));
            }
        }
    }
}

/// Numbers of lines that lie side by side in memory, as f32.
///
/// # Safety
/// That of [`side_by_side`].
#[inline(always)]
unsafe fn widened<const FAST: bool>(lines: Lines, to: *mut u32, width: usize) {
    let Lines { from, half, count, length } = lines;
    for p in 0..length {
        // SAFETY: the elements of a step, and the row that is made of them.
        unsafe {
            let to = std::slice::from_raw_parts_mut(to.add(place(p, length) * width), width);
            let (to, rest) = to.split_at_mut(count);
            rest.fill(0);
            half.widen_all::<FAST>(from.at(p, 0).pointer, to);
        }
    }
}

/// The exponent of the smallest bf16 in these words that is not zero, as its bits have it: 0 for a subnormal one.
#[inline(always)]
pub(super) fn least_exponent(words: &[u32]) -> u16 {
    const LANES: usize = 64;
    // SAFETY: each word is two halves.
    let halves = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u16>(), 2 * words.len()) };
    // A zero is larger than all others.
    let size = |bits: u16| (bits & 0x7fff).wrapping_sub(1);
    let (lines, rest) = halves.as_chunks::<LANES>();
    let mut least = [u16::MAX; LANES];
    for line in lines {
        for (least, &bits) in least.iter_mut().zip(line) {
            *least = size(bits).min(*least);
        }
    }
    let rest = rest.iter().map(|&bits| size(bits));
    match least.into_iter().chain(rest).fold(u16::MAX, u16::min) {
        u16::MAX => 0xff,
        size => (size + 1) >> 7,
    }
}
