//! Products of a few rows: the other operand is read once, where it lies, and nothing of it is packed. Such products wait
//! for memory.
//!
//! Sums are those of the tiles (`tile.rs`), to the last bit: one chain of fused additions along the inner dim, of two
//! neighbours the second one first. All numbers count in them, subnormal ones too.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::Half;
use crate::cpu::{prefetch, prefetch_near};
use crate::gemm::Matrix;
use crate::lanes::{Plain, Sums};

/// The most rows.
pub(super) const FEW: usize = 4;
/// Panels that are computed together where columns lie side by side: so much of a row of memory is read at once.
pub(super) const ABREAST: usize = 16;
/// Halves of a cache line.
const LINE: usize = 32;
/// Steps between two visits of the sums there.
const STEPS: usize = 8;

/// A few rows times some columns.
pub(super) struct Task {
    /// Numbers of the rows: `p` of row `r` is at `r · pitch + p`.
    pub(super) rows: *const f32,
    pub(super) pitch: usize,
    /// The columns, from the first.
    pub(super) from: Matrix<u16>,
    pub(super) columns: usize,
    /// The inner dim.
    pub(super) length: usize,
    /// Whether a last number without a neighbour has zeros for one, as in tiles of pairs.
    pub(super) is_paired: bool,
    /// As many rows of a panel's width for each panel.
    pub(super) sums: *mut f32,
}

/// Loops for one to [`FEW`] rows.
pub(super) type Loops = [unsafe fn(&Task); FEW];

/// Loops over columns whose elements lie one after the other, of one panel, and over columns that lie side by side.
#[derive(Clone, Copy)]
pub(super) struct Few {
    pub(super) along: &'static Loops,
    pub(super) across: &'static Loops,
}

/// Vectors that are made of halves.
///
/// # Safety
/// That of [`Sums`].
trait Pairs: Sums<Element = f32> {
    /// Two neighbours from each of `LANES` lines, as often: vector `w` has neighbours `2 · w` behind `at`, in place of
    /// an f32.
    unsafe fn turned(lines: &[*const u16], at: usize) -> [Self; MOST];
    /// The first ones and the second ones of neighbours.
    unsafe fn widened<const F16: bool>(self) -> [Self; 2];
    /// Neighbours of one line.
    unsafe fn line<const F16: bool>(from: *const u16) -> Self;
}

/// Elements of the widest vector.
const MOST: usize = 16;

#[cfg(target_arch = "x86_64")]
impl Pairs for __m512 {
    #[inline(always)]
    unsafe fn turned(lines: &[*const u16], at: usize) -> [__m512; MOST] {
        // SAFETY: the instruction set is there, and so are the elements; so below.
        unsafe {
            let mut out = [_mm512_setzero_ps(); MOST];
            for c in 0..4 {
                // Four words of every fourth line: what crosses quarters of a register is left to the loads.
                let mut x = [_mm512_setzero_ps(); 4];
                for (i, x) in x.iter_mut().enumerate() {
                    let quarter = |l: usize| lines[l].add(at + 8 * c).cast::<f32>();
                    *x = _mm512_castps128_ps512(_mm_loadu_ps(quarter(i)));
                    *x = _mm512_insertf32x4::<1>(*x, _mm_loadu_ps(quarter(4 + i)));
                    *x = _mm512_insertf32x4::<2>(*x, _mm_loadu_ps(quarter(8 + i)));
                    *x = _mm512_insertf32x4::<3>(*x, _mm_loadu_ps(quarter(12 + i)));
                }
                let low = |a, b| _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let high = |a, b| _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let (a, b) = (low(x[0], x[1]), low(x[2], x[3]));
                out[4 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                out[4 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
                let (a, b) = (high(x[0], x[1]), high(x[2], x[3]));
                out[4 * c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                out[4 * c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn widened<const F16: bool>(self) -> [__m512; 2] {
        // SAFETY: as above.
        unsafe {
            let x = _mm512_castps_si512(self);
            if F16 {
                return [x, _mm512_srli_epi32::<16>(x)].map(|x| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)));
            }
            let upper = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(upper)]
        }
    }
    #[inline(always)]
    unsafe fn line<const F16: bool>(from: *const u16) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let x = _mm256_loadu_si256(from.cast());
            if F16 {
                return _mm512_cvtph_ps(x);
            }
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Pairs for __m256 {
    #[inline(always)]
    unsafe fn turned(lines: &[*const u16], at: usize) -> [__m256; MOST] {
        // SAFETY: the instruction set is there, and so are the elements; so below.
        unsafe {
            let mut x = [_mm256_setzero_ps(); 8];
            for (x, line) in x.iter_mut().zip(lines) {
                *x = _mm256_loadu_ps(line.add(at).cast());
            }
            let mut pairs = x;
            for i in (0..8).step_by(2) {
                pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
                pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
            }
            let mut fours = x;
            for i in (0..8).step_by(4) {
                fours[i] = _mm256_shuffle_ps::<0x44>(pairs[i], pairs[i + 2]);
                fours[i + 1] = _mm256_shuffle_ps::<0xee>(pairs[i], pairs[i + 2]);
                fours[i + 2] = _mm256_shuffle_ps::<0x44>(pairs[i + 1], pairs[i + 3]);
                fours[i + 3] = _mm256_shuffle_ps::<0xee>(pairs[i + 1], pairs[i + 3]);
            }
            let mut out = [_mm256_setzero_ps(); MOST];
            for c in 0..4 {
                out[c] = _mm256_permute2f128_ps::<0x20>(fours[c], fours[4 + c]);
                out[4 + c] = _mm256_permute2f128_ps::<0x31>(fours[c], fours[4 + c]);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn widened<const F16: bool>(self) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            let x = _mm256_castps_si256(self);
            if F16 {
                let lower = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
                return [lower, _mm256_srli_epi32::<16>(x)].map(|x| {
                    let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(x, x));
                    _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
                });
            }
            let upper = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(upper)]
        }
    }
    #[inline(always)]
    unsafe fn line<const F16: bool>(from: *const u16) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let x = _mm_loadu_si128(from.cast());
            if F16 {
                return _mm256_cvtph_ps(x);
            }
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
        }
    }
}

/// Vectors for any processor.
type Any = Plain<f32, 4>;

/// Of halves whose bits these are.
fn any(bits: [u16; 4], is_f16: bool) -> Any {
    let half = if is_f16 { Half::F16 } else { Half::Bf16 };
    let numbers = bits.map(|bits| f32::from_bits(half.widen(bits)));
    // SAFETY: four numbers.
    unsafe { crate::lanes::Lanes::load(numbers.as_ptr()) }
}

impl Pairs for Any {
    #[inline(always)]
    unsafe fn turned(lines: &[*const u16], at: usize) -> [Any; MOST] {
        // SAFETY: the caller's elements.
        let word = |w: usize, l: usize| unsafe { lines[l].add(at + 2 * w).cast::<f32>().read_unaligned() };
        std::array::from_fn(|w| {
            let words: [f32; 4] = std::array::from_fn(|l| if w < 4 { word(w, l) } else { 0.0 });
            // SAFETY: four numbers.
            unsafe { crate::lanes::Lanes::load(words.as_ptr()) }
        })
    }
    #[inline(always)]
    unsafe fn widened<const F16: bool>(self) -> [Any; 2] {
        let mut words = [0_u32; 4];
        // SAFETY: four words, as large as floats.
        unsafe { crate::lanes::Lanes::store(self, words.as_mut_ptr().cast()) };
        [any(words.map(|word| word as u16), F16), any(words.map(|word| (word >> 16) as u16), F16)]
    }
    #[inline(always)]
    unsafe fn line<const F16: bool>(from: *const u16) -> Any {
        // SAFETY: four halves.
        any(unsafe { from.cast::<[u16; 4]>().read_unaligned() }, F16)
    }
}

/// Lines that [`turn_lines`] takes, and a divisor of the pairs of each.
pub(super) const TURNED: usize = MOST;

/// Pairs of neighbours of lines, turned: those of one step come side by side, in rows `width` apart. The first of
/// `[there, wanted]` says how many lines there are, the second how many of each row are written: zeros behind the lines.
///
/// # Safety
/// Each of [`TURNED`] lines has so many pairs, a multiple of as many, and `to` has room for what is written; the machine
/// has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma,f16c")]
pub(super) unsafe fn turn_lines(
    lines: &[*const u16; TURNED],
    [there, wanted]: [usize; 2],
    pairs: usize,
    to: *mut u32,
    width: usize,
) {
    let [there, wanted] = [there, wanted].map(|count| ((1_u32 << count) - 1) as __mmask16);
    for at in (0..pairs).step_by(TURNED) {
        // SAFETY: the caller's promise.
        unsafe {
            let words = __m512::turned(lines, 2 * at);
            for (w, &words) in words.iter().enumerate() {
                let words = _mm512_maskz_mov_ps(there, words);
                _mm512_mask_storeu_ps(to.add((at + w) * width).cast(), wanted, words);
            }
        }
    }
}

/// One panel of columns whose elements lie one after the other: they are turned in registers.
///
/// # Safety
/// The task has `R` rows, and columns of a panel; the machine has the vector's instructions.
#[inline(always)]
unsafe fn along<V: Pairs, const F16: bool, const R: usize>(task: &Task) {
    let &Task { rows, pitch, from, columns, length, is_paired, sums: to } = task;
    let step = 2 * V::LANES;
    // SAFETY: elements of the task; lines that are none are a real one again, of whose sums nothing is used.
    unsafe {
        let mut lines = [std::ptr::null::<u16>(); 2 * MOST];
        for (j, line) in lines.iter_mut().enumerate() {
            *line = from.at(0, j.min(columns - 1)).pointer;
        }
        let mut sums = [[V::splat(0.0); 2]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(to.add((2 * r + v) * V::LANES));
            }
        }
        let whole = length / step * step;
        // More lines are read side by side than the processor foresees: the next panel's are asked for in order. (If they
        // lie apart, what is between them is asked for.)
        let next = from.at(0, 2 * V::LANES).pointer;
        for p in (0..whole).step_by(step) {
            for place in (p * step..(p + step) * step).step_by(LINE) {
                prefetch_near(next.wrapping_add(place));
            }
            for v in 0..2 {
                let words = V::turned(&lines[v * V::LANES..][..V::LANES], p);
                for (w, word) in words.into_iter().enumerate().take(V::LANES) {
                    let [first, second] = word.widened::<F16>();
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let row = rows.add(r * pitch + p + 2 * w);
                        sums[v] = sums[v].add_product(V::splat(*row.add(1)), second);
                        sums[v] = sums[v].add_product(V::splat(*row), first);
                    }
                }
            }
        }
        let rest = length - whole;
        for v in 0..if rest > 0 { 2 } else { 0 } {
            let mut room = [[0_u16; 2 * MOST]; MOST];
            let mut short = [std::ptr::null(); MOST];
            for ((line, room), short) in lines[v * V::LANES..].iter().zip(&mut room).zip(&mut short) {
                std::ptr::copy_nonoverlapping(line.add(whole), room.as_mut_ptr(), rest);
                *short = room.as_ptr();
            }
            let words = V::turned(&short[..V::LANES], 0);
            for (w, word) in words.into_iter().enumerate().take(rest.div_ceil(2)) {
                let [first, second] = word.widened::<F16>();
                for (r, sums) in sums.iter_mut().enumerate() {
                    let row = rows.add(r * pitch + whole + 2 * w);
                    if is_paired || 2 * w + 1 < rest {
                        sums[v] = sums[v].add_product(V::splat(*row.add(1)), second);
                    }
                    sums[v] = sums[v].add_product(V::splat(*row), first);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                sum.store(to.add((2 * r + v) * V::LANES));
            }
        }
    }
}

/// Panels of columns that lie side by side: a few steps of all of them, then the next ones.
///
/// # Safety
/// The task has `R` rows; the machine has the vector's instructions.
#[inline(always)]
unsafe fn across<V: Pairs, const F16: bool, const R: usize>(task: &Task) {
    let &Task { rows, pitch, from, columns, length, is_paired, sums: to } = task;
    for p in (0..length).step_by(STEPS) {
        let steps = STEPS.min(length - p);
        for j in (0..columns).step_by(V::LANES) {
            let (panel, vector) = (j / (2 * V::LANES), j / V::LANES % 2);
            let sum_at = |r: usize| to.wrapping_add(((panel * R + r) * 2 + vector) * V::LANES);
            let count = V::LANES.min(columns - j);
            // SAFETY: elements of the task.
            unsafe {
                let mut sums = [V::splat(0.0); R];
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(sum_at(r));
                }
                let mut add = |i: usize, line: V| {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        *sum = sum.add_product(V::splat(*rows.add(r * pitch + p + i)), line);
                    }
                };
                let at = |i: usize| from.at(p + i, j).pointer.cast_const();
                if steps == STEPS && count == V::LANES {
                    for i in (0..STEPS).map(|i| i ^ 1) {
                        prefetch(at(i + STEPS));
                        add(i, V::line::<F16>(at(i)));
                    }
                } else {
                    for i in (0..steps.next_multiple_of(2)).map(|i| i ^ 1) {
                        let mut room = [0_u16; MOST];
                        if i < steps {
                            std::ptr::copy_nonoverlapping(at(i), room.as_mut_ptr(), count);
                        } else if !is_paired {
                            continue;
                        }
                        add(i, V::line::<F16>(room.as_ptr()));
                    }
                }
                for (r, sum) in sums.into_iter().enumerate() {
                    sum.store(sum_at(r));
                }
            }
        }
    }
}

macro_rules! few {
    ($name:ident, $vector:ty, $f16:literal $(, $feature:literal)?) => {
        pub(super) static $name: Few = {
            $(#[target_feature(enable = $feature)])?
            unsafe fn lines<const R: usize>(task: &Task) {
                // SAFETY: the caller's promise is passed on.
                unsafe { along::<$vector, $f16, R>(task) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn rows<const R: usize>(task: &Task) {
                // SAFETY: the caller's promise is passed on.
                unsafe { across::<$vector, $f16, R>(task) }
            }
            Few { along: &[lines::<1>, lines::<2>, lines::<3>, lines::<4>], across: &[rows::<1>, rows::<2>, rows::<3>, rows::<4>] }
        };
    };
}

#[cfg(target_arch = "x86_64")]
few!(AVX512_BF16, __m512, false, "avx512f,avx512bw,avx512vl,fma,f16c,bmi2");
#[cfg(target_arch = "x86_64")]
few!(AVX512_F16, __m512, true, "avx512f,avx512bw,avx512vl,fma,f16c,bmi2");
#[cfg(target_arch = "x86_64")]
few!(AVX2_BF16, __m256, false, "avx2,fma,f16c,bmi2");
#[cfg(target_arch = "x86_64")]
few!(AVX2_F16, __m256, true, "avx2,fma,f16c,bmi2");
few!(PLAIN_BF16, Any, false);
few!(PLAIN_F16, Any, true);
