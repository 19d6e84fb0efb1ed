//! Random numbers: Philox 4x32-10, a pure function from (counter, key) to four words.
//!
//! [Note: which word belongs to which element]
//! A fill with a given seed (the key) and offset (the first counter) gives element `i` a value that
//! depends on nothing but seed, offset and `i`: not on the length, the vector width or the thread count.
//!
//! | type | counter        | words                    |
//! |------|----------------|--------------------------|
//! | f32  | `offset + i/4` | `i % 4`                  |
//! | f64  | `offset + i/2` | `2·(i % 2)`, and the next |
//!
//! Uniform f32 is `lo + (hi − lo)·u` with `u = (word >> 8)·2⁻²⁴`; uniform f64 takes the 53 bits
//! `u = ((first << 32 | second) >> 11)·2⁻⁵³`. A result that rounds up to `hi` is replaced by the next
//! number below it, so that the interval is half open.
//!
//! Normal numbers come in pairs by Box and Muller's method: elements `2p` and `2p+1` share the uniforms of
//! both, `a` (of element `2p`) and `b` (of `2p+1`), and are `r·cos 2πb` and `r·sin 2πb` with
//! `r = √(−2 ln a′)`, where `a′ = a + 2⁻²⁴` (f32) or `a + 2⁻⁵³` (f64), in (0, 1]. For f32, logarithm, sine
//! and cosine are the polynomials below in plain single-precision operations without fma, so that any
//! backend can reproduce every bit; f64 uses the system's functions.

use crate::cpu::{self, Isa};
use crate::threads::{GRAIN, Shared, parallel_for};

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Counters computed side by side, so that the rounds become vector instructions.
const LANES: usize = 64;

/// Four random words for a counter and a key.
///
/// ```
/// assert_eq!(kiln_runtime::random::philox(0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
pub fn philox(counter: u64, key: u64) -> [u32; 4] {
    rounds([counter as u32, (counter >> 32) as u32, 0, 0].map(|word| [word]), key).map(|[word]| word)
}

/// Philox over `N` counters at once; word `w` of lane `l` is at `[w][l]`.
// Lanes are indexed in all four arrays alike: iterators would hide what runs side by side.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
fn rounds<const N: usize>(mut words: [[u32; N]; 4], key: u64) -> [[u32; N]; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    for _ in 0..ROUNDS {
        for lane in 0..N {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(words[0][lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(words[2][lane]);
            words[0][lane] = (second >> 32) as u32 ^ words[1][lane] ^ key[0];
            words[1][lane] = second as u32;
            words[2][lane] = (first >> 32) as u32 ^ words[3][lane] ^ key[1];
            words[3][lane] = first as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// The element types that can be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// 32 bits: four elements a counter.
    F32,
    /// 64 bits: two elements a counter.
    F64,
}

/// How many counters a fill of `elements` elements uses up: the next fill starts at `offset + counters`.
pub const fn counters(elements: usize, float: Float) -> u64 {
    match float {
        Float::F32 => elements.div_ceil(4) as u64,
        Float::F64 => elements.div_ceil(2) as u64,
    }
}

/// Fills with uniform numbers from `lo` (included) to `hi` (excluded).
pub fn fill_uniform_f32(dst: &mut [f32], seed: u64, offset: u64, lo: f32, hi: f32) {
    let scale = hi - lo;
    let below = if lo < hi { hi.next_down() } else { lo };
    fill(dst, seed, offset, |words, out| {
        let out = &mut out[..4 * LANES];
        for lane in 0..LANES {
            for word in 0..4 {
                let value = lo + unit_f32(words[word][lane]) * scale;
                out[4 * lane + word] = if value < hi { value } else { below };
            }
        }
    });
}

/// Fills with uniform numbers from `lo` (included) to `hi` (excluded).
pub fn fill_uniform_f64(dst: &mut [f64], seed: u64, offset: u64, lo: f64, hi: f64) {
    let scale = hi - lo;
    let below = if lo < hi { hi.next_down() } else { lo };
    fill(dst, seed, offset, |words, out| {
        let out = &mut out[..2 * LANES];
        for lane in 0..LANES {
            for half in 0..2 {
                let value = lo + unit_f64(words[2 * half][lane], words[2 * half + 1][lane]) * scale;
                out[2 * lane + half] = if value < hi { value } else { below };
            }
        }
    });
}

/// Fills with normal numbers of the given mean and standard deviation.
pub fn fill_normal_f32(dst: &mut [f32], seed: u64, offset: u64, mean: f32, std: f32) {
    fill(dst, seed, offset, |words, out| {
        let out = &mut out[..4 * LANES];
        for lane in 0..LANES {
            for pair in [0, 2] {
                let radius = (-2.0 * ln_unit(unit_f32(words[pair][lane]) + 1.0 / 16_777_216.0)).sqrt();
                let (cosine, sine) = turn(words[pair + 1][lane] >> 8);
                out[4 * lane + pair] = mean + radius * cosine * std;
                out[4 * lane + pair + 1] = mean + radius * sine * std;
            }
        }
    });
}

/// Fills with normal numbers of the given mean and standard deviation.
pub fn fill_normal_f64(dst: &mut [f64], seed: u64, offset: u64, mean: f64, std: f64) {
    fill(dst, seed, offset, |words, out| {
        let out = &mut out[..2 * LANES];
        for lane in 0..LANES {
            let unit = |half: usize| unit_f64(words[2 * half][lane], words[2 * half + 1][lane]);
            let radius = (-2.0 * (unit(0) + f64::EPSILON / 2.0).ln()).sqrt();
            let (sine, cosine) = (std::f64::consts::TAU * unit(1)).sin_cos();
            out[2 * lane] = mean + radius * cosine * std;
            out[2 * lane + 1] = mean + radius * sine * std;
        }
    });
}

/// 24 bits to [0, 1).
#[inline(always)]
fn unit_f32(word: u32) -> f32 {
    (word >> 8) as i32 as f32 * (1.0 / 16_777_216.0)
}

/// 53 bits to [0, 1).
#[inline(always)]
fn unit_f64(first: u32, second: u32) -> f64 {
    (((u64::from(first) << 32) | u64::from(second)) >> 11) as f64 * (f64::EPSILON / 2.0)
}

/// ln x for x in [2⁻²⁴, 1]: x = m·2ᵉ with m in [√½, √2), then 2·atanh((m−1)/(m+1)).
#[inline(always)]
fn ln_unit(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let bits = x.to_bits().wrapping_sub(SQRT_HALF);
    let exponent = (bits as i32 >> 23) as f32;
    let mantissa = f32::from_bits((bits & 0x007f_ffff) + SQRT_HALF);
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let z = s * s;
    let series = z * (2.0 / 3.0 + z * (2.0 / 5.0 + z * (2.0 / 7.0 + z * (2.0 / 9.0))));
    // ln 2 in two parts: the first has few enough bits that its product with the exponent is exact.
    exponent * 0.693_145_75 + (2.0 * s + (s * series + exponent * 1.428_606_8e-6))
}

/// Cosine and sine of `2π·bits/2²⁴`; the reduction to an eighth of a turn is exact in integers.
#[inline(always)]
fn turn(bits: u32) -> (f32, f32) {
    let quarter = (bits + (1 << 21)) >> 22;
    // Distance from the nearest quarter turn, in units of 2⁻²⁴ turns: −2²¹ ≤ rest < 2²¹.
    let rest = bits as i32 - (quarter << 22) as i32;
    let x = rest as f32 * (std::f32::consts::TAU / 16_777_216.0);
    let z = x * x;
    let sine = x + x * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362_880.0))));
    let cosine = 1.0 + z * (-0.5 + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40320.0))));
    let swap = quarter & 1 != 0;
    let (a, b) = if swap { (sine, cosine) } else { (cosine, sine) };
    (if (quarter + 1) & 2 != 0 { -a } else { a }, if quarter & 2 != 0 { -b } else { b })
}

/// Turns the words of `LANES` counters into elements.
trait Convert<T>: Fn(&[[u32; LANES]; 4], &mut [T]) + Sync {}
impl<T, F: Fn(&[[u32; LANES]; 4], &mut [T]) + Sync> Convert<T> for F {}

/// Runs `convert` over blocks of `LANES` counters, on all threads, with the widest vectors there are.
fn fill<T: Copy + Default + Send>(dst: &mut [T], seed: u64, offset: u64, convert: impl Convert<T>) {
    let base = Shared(dst.as_mut_ptr());
    // A multiple of every block.
    parallel_for(dst.len(), GRAIN, |begin, end| {
        // SAFETY: ranges of one region are disjoint and within `dst`.
        let range = unsafe { std::slice::from_raw_parts_mut(base.get().add(begin), end - begin) };
        let first = offset.wrapping_add((begin * size_of::<T>() / 16) as u64);
        #[cfg(target_arch = "x86_64")]
        match cpu::isa() {
            // SAFETY: `isa` never names more than the machine has.
            Isa::Avx512 => return unsafe { fill_avx512(range, seed, first, &convert) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { fill_avx2(range, seed, first, &convert) },
            Isa::Plain => {}
        }
        fill_range(range, seed, first, &convert);
    });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn fill_avx512<T: Copy + Default>(dst: &mut [T], key: u64, first: u64, convert: &impl Convert<T>) {
    fill_range(dst, key, first, convert);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_avx2<T: Copy + Default>(dst: &mut [T], key: u64, first: u64, convert: &impl Convert<T>) {
    fill_range(dst, key, first, convert);
}

#[inline(always)]
fn fill_range<T: Copy + Default>(dst: &mut [T], key: u64, first: u64, convert: &impl Convert<T>) {
    let block = LANES * 16 / size_of::<T>();
    for (index, out) in dst.chunks_mut(block).enumerate() {
        let counter = |lane: usize| first.wrapping_add((index * LANES + lane) as u64);
        let low = std::array::from_fn(|lane| counter(lane) as u32);
        let high = std::array::from_fn(|lane| (counter(lane) >> 32) as u32);
        let words = rounds([low, high, [0; LANES], [0; LANES]], key);
        if out.len() == block {
            convert(&words, out);
        } else {
            let mut whole = [T::default(); 4 * LANES];
            convert(&words, &mut whole[..block]);
            out.copy_from_slice(&whole[..out.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_known_answers() {
        assert_eq!(philox(0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        let ones = rounds([[u32::MAX]; 4], u64::MAX).map(|[word]| word);
        assert_eq!(ones, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344].map(|word| [word]);
        assert_eq!(
            rounds(pi, 0x299f31d0_a4093822).map(|[word]| word),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    /// Element `i` is the same in a short fill, a long one, and one that starts later.
    fn split_invariant<T: Copy + Default + PartialEq + std::fmt::Debug>(
        per_counter: usize,
        fill: impl Fn(&mut [T], u64),
    ) {
        let mut whole = vec![T::default(); 3 * GRAIN + 5];
        fill(&mut whole, 7);
        for length in [1, 2, 5, 63, 65, 1000] {
            let mut part = vec![T::default(); length];
            fill(&mut part, 7);
            assert_eq!(part, whole[..length]);
            fill(&mut part, 7 + 100);
            assert_eq!(part, whole[100 * per_counter..][..length]);
        }
    }

    #[test]
    fn elements_do_not_depend_on_length_or_split() {
        split_invariant(4, |dst, offset| fill_uniform_f32(dst, 3, offset, -1.0, 2.0));
        split_invariant(2, |dst, offset| fill_uniform_f64(dst, 3, offset, -1.0, 2.0));
        split_invariant(4, |dst, offset| fill_normal_f32(dst, 3, offset, 0.5, 2.0));
        split_invariant(2, |dst, offset| fill_normal_f64(dst, 3, offset, 0.5, 2.0));
        assert_eq!((counters(5, Float::F32), counters(5, Float::F64)), (2, 3));
    }

    #[test]
    fn words_are_where_the_note_says() {
        let mut single = [0f32; 11];
        fill_uniform_f32(&mut single, 9, 1 << 40, 0.0, 1.0);
        let mut double = [0f64; 11];
        fill_uniform_f64(&mut double, 9, 1 << 40, 0.0, 1.0);
        for i in 0..11 {
            assert_eq!(single[i], (philox((1 << 40) + i as u64 / 4, 9)[i % 4] >> 8) as f32 / 16_777_216.0);
            let words = philox((1 << 40) + i as u64 / 2, 9);
            let bits = (u64::from(words[2 * (i % 2)]) << 32 | u64::from(words[2 * (i % 2) + 1])) >> 11;
            assert_eq!(double[i], bits as f64 / (1u64 << 53) as f64);
        }
    }

    #[test]
    fn moments() {
        let n = 1 << 20;
        let mut values = vec![0f32; n];
        let moments = |values: &[f32]| {
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
            let variance =
                values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / values.len() as f64;
            (mean, variance)
        };
        fill_uniform_f32(&mut values, 1, 0, 2.0, 5.0);
        let (mean, variance) = moments(&values);
        assert!((mean - 3.5).abs() < 0.005 && (variance - 0.75).abs() < 0.005, "{mean} {variance}");
        assert!(values.iter().all(|v| (2.0..5.0).contains(v)));
        fill_normal_f32(&mut values, 1, 0, 1.0, 2.0);
        let (mean, variance) = moments(&values);
        assert!((mean - 1.0).abs() < 0.01 && (variance - 4.0).abs() < 0.03, "{mean} {variance}");
        assert!(values.iter().all(|v| v.is_finite()));
    }

    #[test]
    fn polynomials_are_accurate() {
        for bits in (0u32..1 << 24).step_by(997) {
            let x = (bits + 1) as f32 / 16_777_216.0;
            let (exact, ln) = (f64::from(x).ln(), f64::from(ln_unit(x)));
            assert!((ln - exact).abs() <= 3e-7 * exact.abs() + 1e-9, "ln {x}: {ln} {exact}");
            let angle = std::f64::consts::TAU * f64::from(bits) / 16_777_216.0;
            let (cosine, sine) = turn(bits);
            assert!((f64::from(cosine) - angle.cos()).abs() < 2e-7, "cos {bits}: {cosine}");
            assert!((f64::from(sine) - angle.sin()).abs() < 2e-7, "sin {bits}: {sine}");
        }
    }

    #[test]
    fn degenerate_interval() {
        let mut values = [9f32; 5];
        fill_uniform_f32(&mut values, 1, 0, 2.0, 2.0);
        assert_eq!(values, [2.0; 5]);
    }
}
