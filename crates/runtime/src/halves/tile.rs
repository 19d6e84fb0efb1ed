//! Register tiles of products of halves, for each instruction set.
//!
//! Both operands come packed in words: two bf16 that are neighbours along the inner dim where the machine multiplies
//! those, else an f32. Whatever the words are, a sum is one chain of additions in the same order, each rounded once:
//! no bit depends on the instruction set that has fused additions, on tiles, or on threads. (AMX has another order.)

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

use crate::cpu::{self, Isa, Pairs};
use crate::lanes::{Lanes, Plain, Sums};

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::few::{self, Few};
use super::format::{Format, Half};
use super::pack::words;

/// A few rows times a panel: a stretch of both, and the sums so far.
pub(super) struct Task {
    /// Words of the rows, those of one step side by side; of tiles, a row's side by side.
    pub(super) rows: *const u32,
    /// Words of the panel's columns, those of one step side by side.
    pub(super) panel: *const u32,
    /// Steps: words along the inner dim.
    pub(super) depth: usize,
    /// As many rows of the panel's width.
    pub(super) sums: *mut f32,
}

/// Loops for tiles of so many rows.
pub(super) type Loops = &'static [(usize, unsafe fn(&Task))];

/// Rows of the highest tile of vectors.
pub(super) const MOST_ROWS: usize = 12;
/// Columns of the widest panel.
pub(super) const WIDEST: usize = 32;

/// What a machine has for a dtype.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// Columns of a panel.
    pub(super) width: usize,
    /// Whether a word is two bf16; else it is an f32.
    pub(super) is_paired: bool,
    /// Words along the inner dim that are multiplied together; several of them are tiles.
    pub(super) step: usize,
    /// From the lowest tile to the highest.
    loops: Loops,
    /// The same for numbers so small that the machine's own instruction takes them for zeros.
    exact: Loops,
    /// Loops for a few rows of halves of one format, in panels of the same width.
    pub(super) few: &'static Few,
}

/// Instructions that products are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Set {
    pub(super) isa: Isa,
    pub(super) pairs: Pairs,
}

impl Set {
    /// The machine's.
    pub(super) fn of_machine() -> Set {
        Set { isa: cpu::isa(), pairs: cpu::pairs() }
    }

    /// All that the machine has, and tiles or their model.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Set> {
        let best = Set::of_machine();
        let isas = Isa::ALL.into_iter().filter(|isa| *isa >= best.isa);
        let mut all: Vec<Set> = isas.map(|isa| Set { isa, pairs: Pairs::Apart }).collect();
        if best.pairs != Pairs::Apart {
            all.push(Set { pairs: Pairs::Vectors, ..best });
        }
        if best.isa == Isa::Avx512 {
            all.push(Set { pairs: Pairs::Tiles, ..best });
        }
        all
    }
}

impl Kernel {
    /// The best of a set for operands like these.
    pub(super) fn of(formats: [Format; 2], set: Set) -> Kernel {
        let is_bf16 = formats == [Format::Half(Half::Bf16); 2];
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = if is_bf16 { &few::AVX512_BF16 } else { &few::AVX512_F16 };
            let avx2 = if is_bf16 { &few::AVX2_BF16 } else { &few::AVX2_F16 };
            let floats = |width: usize, loops: Loops, few: &'static Few| Kernel {
                width,
                is_paired: false,
                step: 1,
                loops,
                exact: loops,
                few,
            };
            match set.isa {
                Isa::Avx512 if !is_bf16 || set.pairs == Pairs::Apart => {
                    return floats(WIDEST, AVX512, avx512);
                }
                Isa::Avx512 => {
                    let (step, loops, exact) = match set.pairs {
                        Pairs::Tiles if cpu::has_tiles() => (amx::SIDE, amx::TILES, amx::MODEL),
                        Pairs::Tiles => (amx::SIDE, amx::MODEL, amx::MODEL),
                        _ => (1, DOTS, SPLIT),
                    };
                    return Kernel { width: WIDEST, is_paired: true, step, loops, exact, few: avx512 };
                }
                Isa::Avx2 => return floats(16, AVX2, avx2),
                Isa::Plain => {}
            }
        }
        let _ = set;
        let few = if is_bf16 { &few::PLAIN_BF16 } else { &few::PLAIN_F16 };
        Kernel { width: 8, is_paired: false, step: 1, loops: PLAIN, exact: PLAIN, few }
    }

    /// Words along the inner dim, with those that fill the last step.
    pub(super) fn depth(&self, k: usize) -> usize {
        words(k, self.is_paired).next_multiple_of(self.step)
    }

    /// Rows of the highest tile.
    pub(super) fn rows(&self) -> usize {
        self.loops.last().map_or(1, |(rows, _)| *rows)
    }

    /// The lowest tile for so many rows, or the highest.
    pub(super) fn height(&self, rows: usize) -> usize {
        self.loops.iter().map(|(height, _)| *height).find(|height| *height >= rows).unwrap_or(self.rows())
    }

    /// Adds the products to the sums.
    ///
    /// # Safety
    /// The task has words and sums of `height` rows, a height that [`height`](Self::height) returned.
    pub(super) unsafe fn run(&self, height: usize, is_exact: bool, task: &Task) {
        let loops = if is_exact { self.exact } else { self.loops };
        if let Some((_, run)) = loops.iter().find(|(rows, _)| *rows == height) {
            // SAFETY: the caller's promise is passed on; `of` chose what the machine has.
            unsafe { run(task) }
        }
    }
}

/// How a word of a row and words of a panel are added to sums.
trait Step {
    type Vector: Lanes<Element = f32>;
    /// # Safety
    /// The machine has the instructions.
    unsafe fn add(sums: Self::Vector, row: Self::Vector, panel: Self::Vector) -> Self::Vector;
}

/// Words are f32.
struct Floats<V>(PhantomData<V>);

impl<V: Sums<Element = f32>> Step for Floats<V> {
    type Vector = V;
    #[inline(always)]
    unsafe fn add(sums: V, row: V, panel: V) -> V {
        // SAFETY: the caller's promise is passed on.
        unsafe { sums.add_product(row, panel) }
    }
}

/// Words are two bf16: the upper one is added first, then the lower one, each rounded to nearest even. What is below
/// the normal numbers counts as zero.
#[cfg(target_arch = "x86_64")]
struct Dots;

#[cfg(target_arch = "x86_64")]
impl Step for Dots {
    type Vector = __m512;
    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, panel: __m512) -> __m512 {
        // SAFETY: the caller's promise is passed on; the vectors are bits.
        unsafe {
            let [row, panel] = std::mem::transmute::<[__m512; 2], [__m512bh; 2]>([row, panel]);
            _mm512_dpbf16_ps(sums, row, panel)
        }
    }
}

/// The same in two additions, in which all numbers count.
#[cfg(target_arch = "x86_64")]
struct Split;

#[cfg(target_arch = "x86_64")]
impl Step for Split {
    type Vector = __m512;
    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, panel: __m512) -> __m512 {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let [row, panel] = [_mm512_castps_si512(row), _mm512_castps_si512(panel)];
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let first = [_mm512_and_si512(row, upper), _mm512_and_si512(panel, upper)];
            let second = [_mm512_slli_epi32::<16>(row), _mm512_slli_epi32::<16>(panel)];
            let sums = _mm512_fmadd_ps(_mm512_castsi512_ps(first[0]), _mm512_castsi512_ps(first[1]), sums);
            _mm512_fmadd_ps(_mm512_castsi512_ps(second[0]), _mm512_castsi512_ps(second[1]), sums)
        }
    }
}

/// # Safety
/// The task has `R` rows; the machine has the step's instructions.
#[inline(always)]
unsafe fn tile<S: Step, const R: usize, const N: usize>(task: &Task) {
    let lanes = S::Vector::LANES;
    // SAFETY: all places are within the task's words and sums.
    unsafe {
        let mut sums = [[S::Vector::splat(0.0); N]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = S::Vector::load(task.sums.add((r * N + v) * lanes));
            }
        }
        let (mut rows, mut panel) = (task.rows.cast::<f32>(), task.panel.cast::<f32>());
        for _ in 0..task.depth {
            let mut columns = [S::Vector::splat(0.0); N];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = S::Vector::load(panel.add(v * lanes));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = S::Vector::splat(*rows.add(r));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = S::add(*sum, row, column);
                }
            }
            rows = rows.add(R);
            panel = panel.add(N * lanes);
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                sum.store(task.sums.add((r * N + v) * lanes));
            }
        }
    }
}

macro_rules! loops {
    ($name:ident, $step:ty, [$($rows:literal)*] $(, $feature:literal)?) => {
        static $name: Loops = {
            $(#[target_feature(enable = $feature)])?
            unsafe fn run<const R: usize>(task: &Task) {
                // SAFETY: the caller's promise is passed on.
                unsafe { tile::<$step, R, 2>(task) }
            }
            &[$(($rows, run::<$rows>)),*]
        };
    };
}

#[cfg(target_arch = "x86_64")]
loops!(DOTS, Dots, [1 2 4 8 12], "avx512f,avx512bw,avx512vl,avx512bf16,bmi2");
#[cfg(target_arch = "x86_64")]
loops!(SPLIT, Split, [1 2 4 8 12], "avx512f,avx512bw,avx512vl,bmi2");
#[cfg(target_arch = "x86_64")]
loops!(AVX512, Floats<__m512>, [1 2 4 8 12], "avx512f,avx512bw,avx512vl,bmi2");
#[cfg(target_arch = "x86_64")]
loops!(AVX2, Floats<__m256>, [1 2 4 6], "avx2,fma,bmi2");
loops!(PLAIN, Floats<Plain<f32, 4>>, [1 2 4]);
