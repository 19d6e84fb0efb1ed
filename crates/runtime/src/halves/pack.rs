//! Packing an operand into panels of words, as the register tiles read them.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::few::TURNED;
#[cfg(target_arch = "x86_64")]
use super::few::turn_lines;
use super::format::Format;
use super::tile::{Kernel, MOST_ROWS};
use crate::gemm::Matrix;

/// Words of one line that are packed at a time.
const STRETCH: usize = 64;

/// Lines that are packed side by side: rows of the left operand, or columns of the right one.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    /// Element `p` of line `j` is at `(p, j)`.
    pub(super) from: Matrix<u16>,
    pub(super) format: Format,
    /// How many of them.
    pub(super) count: usize,
    /// Elements of each.
    pub(super) length: usize,
}

impl Lines {
    fn are_side_by_side(&self) -> bool {
        let unit = self.format.unit();
        self.from.column == unit && (self.from.row != unit || self.length == 1) && self.count > 1
    }

    /// Word `w` of lines that lie side by side.
    ///
    /// # Safety
    /// The elements are readable. `FAST` needs AVX2 and F16C.
    #[inline(always)]
    unsafe fn step<const FAST: bool>(&self, is_paired: bool, w: usize, to: &mut [u32]) {
        let Lines { from, format, length, .. } = *self;
        // SAFETY: the elements of one step or two.
        unsafe {
            if !is_paired {
                return format.widen_all::<FAST>(from.at(place(w, length), 0).pointer, to);
            }
            let first = std::slice::from_raw_parts(from.at(2 * w, 0).pointer, to.len());
            if 2 * w + 1 < length {
                let second = std::slice::from_raw_parts(from.at(2 * w + 1, 0).pointer, to.len());
                for ((word, &first), &second) in to.iter_mut().zip(first).zip(second) {
                    *word = u32::from(first) | u32::from(second) << 16;
                }
            } else {
                to.iter_mut().zip(first).for_each(|(word, &first)| *word = u32::from(first));
            }
        }
    }
}

/// The number of words that so many elements of a line make.
pub(super) fn words(length: usize, is_paired: bool) -> usize {
    if is_paired { length.div_ceil(2) } else { length }
}

/// The word an element is in where a word is an f32: the second of two neighbours comes first, as in a pair.
fn place(p: usize, length: usize) -> usize {
    if p ^ 1 < length { p ^ 1 } else { p }
}

/// Steps, and lines at most (a multiple of every tile's), that are read together where lines lie side by side: so wide
/// that all of a cache line is used when it is there.
const STEPS: usize = 8;
const TOGETHER: usize = 240;

/// Packs rows as tiles of them, one tile after the other; returns how many rows they have, with zeros behind the last.
///
/// # Safety
/// That of [`pack`], for all tiles.
#[inline(always)]
pub(super) unsafe fn pack_rows<const FAST: bool>(rows: Lines, kernel: &Kernel, to: *mut u32) -> usize {
    let Lines { from, count, length, .. } = rows;
    let depth = kernel.depth(length);
    let total = words(length, kernel.is_paired);
    let tiles =
        |begin: usize, end: usize| (begin..end).step_by(kernel.rows()).map(|i| (i, kernel.height(count - i)));
    let end = tiles(0, count).next_back().map_or(0, |(i, height)| i + height);
    if kernel.step > 1 || !rows.are_side_by_side() {
        for (i, height) in tiles(0, count) {
            let lines = Lines { from: from.at(0, i), count: height.min(count - i), ..rows };
            // SAFETY: the caller's promise is passed on.
            unsafe {
                match kernel.step {
                    1 => pack::<FAST>(lines, kernel.is_paired, to.add(i * depth), height),
                    #[cfg(target_arch = "x86_64")]
                    _ => amx::pack(lines, to.add(i * depth), height),
                    #[cfg(not(target_arch = "x86_64"))]
                    _ => {}
                }
            }
        }
        return end;
    }
    let mut room = [[0_u32; TOGETHER + MOST_ROWS]; STEPS];
    for begin in (0..count).step_by(TOGETHER) {
        let lines = TOGETHER.min(count - begin);
        let part = Lines { from: from.at(0, begin), count: lines, ..rows };
        room.iter_mut().for_each(|row| row[lines..].fill(0));
        for w in (0..total).step_by(STEPS) {
            let steps = STEPS.min(total - w);
            // SAFETY: the caller's promise is passed on.
            unsafe {
                for (s, row) in room[..steps].iter_mut().enumerate() {
                    part.step::<FAST>(kernel.is_paired, w + s, &mut row[..lines]);
                }
                for (i, height) in tiles(begin, begin + lines) {
                    let to = to.add(i * depth + w * height);
                    for (s, row) in room[..steps].iter().enumerate() {
                        let (from, to) = (row.as_ptr().add(i - begin), to.add(s * height));
                        match height {
                            // So many are a few instructions.
                            MOST_ROWS => *to.cast::<[u32; MOST_ROWS]>() = *from.cast::<[u32; MOST_ROWS]>(),
                            _ => std::ptr::copy_nonoverlapping(from, to, height),
                        }
                    }
                }
            }
        }
    }
    end
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
        if lines.are_side_by_side() {
            for w in 0..words(length, is_paired) {
                let to = std::slice::from_raw_parts_mut(to.add(w * width), width);
                let (to, rest) = to.split_at_mut(count);
                rest.fill(0);
                lines.step::<FAST>(is_paired, w, to);
            }
            return;
        }
        let total = words(length, is_paired);
        let mut room = [[0; STRETCH]; 4];
        for w in (0..total).step_by(STRETCH) {
            let part = STRETCH.min(total - w);
            // Pairs are there only on machines that turn so many of them in registers.
            let whole = is_paired && from.row == 1 && 2 * (w + part) <= length;
            let turned = if whole && width > 4 && part.is_multiple_of(TURNED) { width } else { 0 };
            #[cfg(target_arch = "x86_64")]
            for j in (0..turned).step_by(TURNED) {
                let mut sources = [from.at(2 * w, 0).pointer.cast_const(); TURNED];
                let there = TURNED.min(count.saturating_sub(j));
                for (line, source) in sources.iter_mut().enumerate().take(there) {
                    *source = from.at(2 * w, j + line).pointer.cast_const();
                }
                turn_lines(&sources, [there, TURNED.min(width - j)], part, to.add(w * width + j), width);
            }
            for j in (turned..width).step_by(4) {
                let mut sources = [std::ptr::null(); 4];
                for (line, (room, source)) in room.iter_mut().zip(&mut sources).enumerate() {
                    if j + line >= count {
                        room.fill(0);
                    } else if whole {
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
    let Lines { from, format, length, .. } = lines;
    if from.row == format.unit() && !is_paired {
        // SAFETY: elements of the line, which are neighbours; words are as large as floats.
        unsafe { format.widen_all::<FAST>(from.at(w, j).pointer, to) };
        // Stretches begin at even places.
        return to.as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair.swap(0, 1));
    }
    // SAFETY: an element of the line, a half.
    let element = |p: usize| unsafe { *from.at(p, j).pointer };
    for (i, word) in to.iter_mut().enumerate() {
        let w = w + i;
        *word = if is_paired {
            let second = if 2 * w + 1 < length { element(2 * w + 1) } else { 0 };
            u32::from(element(2 * w)) | u32::from(second) << 16
        } else {
            // SAFETY: an element of the line.
            unsafe { format.load(from.at(place(w, length), j).pointer) }
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

/// The exponent of the smallest bf16 in these words that is not zero, as its bits have it: 0 for a subnormal one.
#[inline(always)]
pub(super) fn least_exponent(words: &[u32]) -> u16 {
    // A zero is larger than all others.
    let size = |bits: u32| (bits as u16 & 0x7fff).wrapping_sub(1);
    #[cfg(not(target_arch = "x86_64"))]
    let (least, rest) = (u16::MAX, words);
    // SAFETY: pairs are there only on machines with AVX-512.
    #[cfg(target_arch = "x86_64")]
    let (least, rest) = unsafe { least_of_vectors(words) };
    match rest.iter().fold(least, |least, &word| least.min(size(word)).min(size(word >> 16))) {
        u16::MAX => 0xff,
        size => (size + 1) >> 7,
    }
}

/// The least size but one of halves in whole vectors, and the other words.
///
/// # Safety
/// The machine has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn least_of_vectors(words: &[u32]) -> (u16, &[u32]) {
    use std::arch::x86_64::*;
    let (digits, one) = (_mm512_set1_epi16(0x7fff), _mm512_set1_epi16(1));
    // SAFETY: sixteen words.
    let size = |words: &[u32; 16]| unsafe {
        _mm512_sub_epi16(_mm512_and_si512(_mm512_loadu_si512(words.as_ptr().cast()), digits), one)
    };
    let (vectors, rest) = words.as_chunks::<16>();
    let (fours, others) = vectors.as_chunks::<4>();
    let mut least = [_mm512_set1_epi16(-1); 4];
    for [a, b, c, d] in fours {
        least[0] = _mm512_min_epu16(least[0], size(a));
        least[1] = _mm512_min_epu16(least[1], size(b));
        least[2] = _mm512_min_epu16(least[2], size(c));
        least[3] = _mm512_min_epu16(least[3], size(d));
    }
    for vector in others {
        least[0] = _mm512_min_epu16(least[0], size(vector));
    }
    let least = least.into_iter().fold(_mm512_set1_epi16(-1), |x, y| _mm512_min_epu16(x, y));
    let mut lanes = [0_u16; 32];
    // SAFETY: as many places.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), least) };
    (lanes.into_iter().fold(u16::MAX, u16::min), rest)
}
