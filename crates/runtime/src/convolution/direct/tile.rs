//! Register tiles of direct convolutions, for each instruction set.
//!
//! A tile of results is some rows of one vector each. Every element of the source is loaded once for all taps of a
//! column: rows slide through the registers.
//!
//! ```text
//! for each source plane, for each column of taps, for each tap of it
//!   rows[0..R] = rows[1..R], the next row           one load
//!   sums[0..R] += rows[0..R] · tap                  R multiply-adds
//! ```
//!
//! Of the kernels' gradient the sums belong to taps, and the rows of the result's gradient come by.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

use super::axis::Run;
use super::pixel::{Pixels, pixels};
use crate::contract::Real;
use crate::cpu::{self, Isa};
use crate::lanes::{Lanes, Plain, Sums};

/// Taps below each other.
#[derive(Debug, Clone, Copy)]
pub struct Chain {
    /// Offset of the first one's elements in the source.
    pub source: usize,
    /// Offset of the first one's weight.
    pub weight: isize,
    /// Distance of their weights.
    pub step: isize,
    pub count: usize,
}

/// Taps side by side.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Offset of their elements in the source.
    pub source: usize,
    /// Offset of their weights.
    pub weight: usize,
}

/// A tile of results: so many rows as the function that fills it is made for.
#[derive(Debug, Clone, Copy)]
pub struct Strip<'a, T> {
    /// What the first result of the first row meets.
    pub source: *const T,
    /// Distance of the rows.
    pub row: usize,
    /// Distance of what consecutive taps of a chain meet; sliding tiles take it to be `row`.
    pub tap: usize,
    /// How many source planes are summed up, and their distance, in the source and in the weights.
    pub planes: usize,
    pub plane: [usize; 2],
    pub chains: &'a [Chain],
    pub columns: &'a [Column],
    pub weight: *const T,
    pub out: *mut T,
    /// Distances of the weights and of the results of two planes of results.
    pub filter: [usize; 2],
    /// Distance of the rows of results.
    pub out_row: usize,
    /// Results of each row, at most a vector.
    pub count: usize,
}

/// Rows without the first, and one more.
#[inline(always)]
fn next<V: Copy, const R: usize>(rows: [V; R], last: V) -> [V; R] {
    std::array::from_fn(|i| if i + 1 < R { rows[i + 1] } else { last })
}

/// # Safety
/// The instruction set of `V`; whole vectors can be loaded wherever a tap meets a row, and results be stored.
#[inline(always)]
unsafe fn tile<V: Sums, const R: usize, const F: usize, const SLIDING: bool>(strip: &Strip<'_, V::Element>) {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = V::splat(V::Element::default());
        let mut sums = [[zero; R]; F];
        for plane in 0..strip.planes {
            let source = strip.source.add(plane * strip.plane[0]);
            let weight = strip.weight.add(plane * strip.plane[1]);
            for column in strip.columns {
                for chain in strip.chains {
                    let mut from = source.add(chain.source + column.source);
                    let mut factor = weight.offset(chain.weight).add(column.weight);
                    let mut rows = [zero; R];
                    if SLIDING {
                        for row in &mut rows[1..] {
                            *row = V::load(from);
                            from = from.wrapping_add(strip.row);
                        }
                    }
                    for _ in 0..chain.count {
                        if SLIDING {
                            rows = next(rows, V::load(from));
                            from = from.wrapping_add(strip.row);
                        } else {
                            for (i, row) in rows.iter_mut().enumerate() {
                                *row = V::load(from.add(i * strip.row));
                            }
                            from = from.wrapping_add(strip.tap);
                        }
                        for (f, sums) in sums.iter_mut().enumerate() {
                            let tap = V::splat(*factor.add(f * strip.filter[0]));
                            for (sum, row) in sums.iter_mut().zip(rows) {
                                *sum = sum.add_product(row, tap);
                            }
                        }
                        factor = factor.wrapping_offset(chain.step);
                    }
                }
            }
        }
        for (f, sums) in sums.into_iter().enumerate() {
            for (i, sum) in sums.into_iter().enumerate() {
                let to = strip.out.add(f * strip.filter[1] + i * strip.out_row);
                if strip.count == V::LANES { sum.store(to) } else { sum.store_part(to, strip.count) }
            }
        }
    }
}

/// The part of a plane that a block needs.
#[derive(Debug, Clone, Copy)]
pub struct Copied<'a, T> {
    pub from: *const T,
    pub to: *mut T,
    /// Distances of rows: there, here.
    pub pitches: [usize; 2],
    pub rows: &'a [Run],
    pub columns: &'a [Run],
}

/// # Safety
/// The instruction set of `V`; the elements named are there.
#[inline(always)]
unsafe fn copy<V: Sums>(plane: &Copied<'_, V::Element>) {
    // SAFETY: elements of a row of the plane, and of one of the copy.
    unsafe {
        if let [a, b] = plane.columns
            && a.step == 2
        {
            // Both remainders by two: what is read is read once.
            let (a, b) = if a.from < b.from { (a, b) } else { (b, a) };
            if b.from == a.from + 1 && (b.count..b.count + 2).contains(&a.count) {
                for (from, to) in plane.rows(a) {
                    let odd = to.wrapping_add(b.to).wrapping_sub(a.to);
                    part::<V>(from, to, odd, a.count + b.count);
                }
                return;
            }
        }
        for run in plane.columns {
            if run.step == 1 {
                for (from, to) in plane.rows(run) {
                    copy_row::<V>(from, to, run.count);
                }
            } else {
                for (from, to) in plane.rows(run) {
                    (0..run.count).for_each(|k| *to.add(k) = *from.add(run.step * k));
                }
            }
        }
    }
}

impl<'a, T> Copied<'a, T> {
    /// The first element of a run in each row: there, here.
    #[inline(always)]
    fn rows(&self, columns: &Run) -> impl Iterator<Item = (*const T, *mut T)> + use<'a, T> {
        let Copied { from, to, pitches, .. } = *self;
        let (from, to) = (from.wrapping_add(columns.from), to.wrapping_add(columns.to));
        self.rows.iter().flat_map(move |rows| {
            let from = from.wrapping_add(rows.from * pitches[0]);
            let to = to.wrapping_add(rows.to * pitches[1]);
            (0..rows.count).map(move |i| {
                (from.wrapping_add(i * rows.step * pitches[0]), to.wrapping_add(i * pitches[1]))
            })
        })
    }
}

/// Every other of `count` elements to the one, the others to the other.
///
/// # Safety
/// That of [`copy`].
#[inline(always)]
unsafe fn part<V: Sums>(from: *const V::Element, even: *mut V::Element, odd: *mut V::Element, count: usize) {
    for at in (0..count).step_by(2 * V::LANES) {
        let left = (count - at).min(2 * V::LANES);
        // SAFETY: the elements named.
        unsafe {
            let low = V::load_part(from.add(at), left.min(V::LANES));
            let high = V::load_part(from.wrapping_add(at + V::LANES), left.saturating_sub(V::LANES));
            let (evens, odds) = V::split(low, high);
            evens.store_part(even.add(at / 2), left.div_ceil(2));
            odds.store_part(odd.add(at / 2), left / 2);
        }
    }
}

/// # Safety
/// That of [`copy`].
#[inline(always)]
unsafe fn copy_row<V: Sums>(from: *const V::Element, to: *mut V::Element, count: usize) {
    let mut at = 0;
    // SAFETY: the elements named.
    unsafe {
        while at + V::LANES <= count {
            V::load(from.add(at)).store(to.add(at));
            at += V::LANES;
        }
        if at < count {
            V::load_part(from.add(at), count - at).store_part(to.add(at), count - at);
        }
    }
}

/// Two rows in turn: `count` elements in all.
///
/// # Safety
/// The instruction set of `V`; the elements named are there.
#[inline(always)]
unsafe fn join<V: Sums>([even, odd]: [*const V::Element; 2], to: *mut V::Element, count: usize) {
    for at in (0..count).step_by(2 * V::LANES) {
        let left = (count - at).min(2 * V::LANES);
        // SAFETY: the elements named.
        unsafe {
            let even = V::load_part(even.add(at / 2), left.div_ceil(2));
            let odd = V::load_part(odd.add(at / 2), left / 2);
            let (low, high) = V::join(even, odd);
            low.store_part(to.add(at), left.min(V::LANES));
            high.store_part(to.wrapping_add(at + V::LANES), left.saturating_sub(V::LANES));
        }
    }
}

/// Adds a number to `count` elements.
///
/// # Safety
/// The instruction set of `V`; the elements are there.
#[inline(always)]
unsafe fn add<V: Sums>(to: *mut V::Element, number: V::Element, count: usize) {
    // SAFETY: the elements named.
    unsafe {
        let number = V::splat(number);
        for at in (0..count).step_by(V::LANES) {
            let left = (count - at).min(V::LANES);
            let to = to.add(at);
            if left == V::LANES {
                V::load(to).plus(number).store(to);
            } else {
                V::load_part(to, left).plus(number).store_part(to, left);
            }
        }
    }
}

/// The most taps of a chain whose sums are made together.
pub(super) const TAPS: usize = 7;
/// The most columns of taps side by side.
pub(super) const ABREAST: usize = 3;
/// Elements of a sum: the most lanes there are.
pub(super) const SUM: usize = 16;

/// Sums of products of a block of the source with a block of the result's gradient.
#[derive(Debug, Clone, Copy)]
pub struct Moments<T> {
    /// What the first result meets with the first tap of each column.
    pub source: [*const T; ABREAST],
    /// Distance of stored rows.
    pub pitch: usize,
    /// Stored rows from one tap of the chain to the next.
    pub distance: usize,
    pub grad: *const T,
    /// Distance of the gradient's rows.
    pub grad_row: usize,
    /// Size of the block.
    pub size: [usize; 2],
    /// Where the columns' sums are, each of [`SUM`] elements of which the lanes are used.
    pub sums: [*mut T; ABREAST],
    /// Distance of the sums of the chain's taps.
    pub sum: usize,
}

/// # Safety
/// The instruction set of `V`; as described, for `K` taps of `S` columns.
#[inline(always)]
unsafe fn moments<V: Sums, const K: usize, const S: usize>(task: &Moments<V::Element>) {
    let [height, width] = task.size;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[V::splat(V::Element::default()); K]; S];
        for first in 0..task.distance.min(height) {
            for column in (0..width).step_by(V::LANES) {
                let count = (width - column).min(V::LANES);
                if count == V::LANES {
                    slide::<V, K, S, false>(task, [first, column], count, &mut sums);
                } else {
                    slide::<V, K, S, true>(task, [first, column], count, &mut sums);
                }
            }
        }
        for (sums, to) in sums.into_iter().zip(task.sums) {
            for (k, sum) in sums.into_iter().enumerate() {
                let to = to.add(k * task.sum);
                V::load(to).plus(sum).store(to);
            }
        }
    }
}

/// A vector, or part of one.
///
/// # Safety
/// The instruction set of `V`; the elements are there.
#[inline(always)]
unsafe fn load<V: Lanes, const PART: bool>(at: *const V::Element, count: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { if PART { V::load_part(at, count) } else { V::load(at) } }
}

/// Adds what a vector of each row makes, from the first on. Of the last vector of a row only `count` lanes are there:
/// what lies behind them may be infinite.
///
/// # Safety
/// That of [`moments`].
#[inline(always)]
unsafe fn slide<V: Sums, const K: usize, const S: usize, const PART: bool>(
    task: &Moments<V::Element>,
    [first, column]: [usize; 2],
    count: usize,
    sums: &mut [[V; K]; S],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let step = task.distance * task.pitch;
        let mut rows = [[V::splat(V::Element::default()); K]; S];
        let mut from = [std::ptr::null(); S];
        for s in 0..S {
            from[s] = task.source[s].add(first * task.pitch + column);
            for row in &mut rows[s][1..] {
                *row = load::<V, PART>(from[s], count);
                from[s] = from[s].wrapping_add(step);
            }
        }
        let mut grad = task.grad.add(first * task.grad_row + column);
        for _ in 0..(task.size[0] - first).div_ceil(task.distance) {
            let factor = load::<V, PART>(grad, count);
            grad = grad.wrapping_add(task.distance * task.grad_row);
            for s in 0..S {
                rows[s] = next(rows[s], load::<V, PART>(from[s], count));
                from[s] = from[s].wrapping_add(step);
                for k in 0..K {
                    sums[s][k] = sums[s][k].add_product(factor, rows[s][k]);
                }
            }
        }
    }
}

/// Loops of an instruction set for one kind of vector.
#[derive(Debug)]
pub struct Vectors<T: 'static> {
    pub lanes: usize,
    /// Tiles of one plane of results and of two, by height minus one: those whose rows slide, and those whose rows lie
    /// anywhere.
    pub sliding: [Tiles<T>; 2],
    pub still: [Tiles<T>; 2],
    pub copy: unsafe fn(&Copied<'_, T>),
    pub join: unsafe fn([*const T; 2], *mut T, usize),
    pub add: unsafe fn(*mut T, T, usize),
    /// By taps of a chain minus one: for one column, two, ….
    pub moments: [&'static [unsafe fn(&Moments<T>)]; TAPS],
}

/// Tiles by height minus one.
type Tiles<T> = &'static [unsafe fn(&Strip<'_, T>)];

/// An instruction set's loops.
#[derive(Debug)]
pub struct Loops<T: 'static> {
    pub wide: Vectors<T>,
    /// For what is at most half a wide vector.
    pub narrow: Option<Vectors<T>>,
    pub pixels: Pixels<T>,
}

impl<T> Loops<T> {
    /// The vectors for what is left of a row.
    pub fn vectors(&self, left: usize) -> &Vectors<T> {
        match &self.narrow {
            Some(narrow) if left <= narrow.lanes => narrow,
            _ => &self.wide,
        }
    }
}

/// A type that direct convolutions have loops for.
pub trait Direct: Real + Default {
    /// The machine's.
    fn loops() -> &'static Loops<Self>;
}

macro_rules! vectors {
    ($element:ty, $vector:ty, [$($height:literal)*] [$($low:literal)*], [$($columns:literal)*] $(, $feature:literal)?) => {{
        $(#[target_feature(enable = $feature)])?
        unsafe fn run<const R: usize, const F: usize, const SLIDING: bool>(strip: &Strip<'_, $element>) {
            // SAFETY: the caller's promise is passed on; the set is there where its tiles are used.
            unsafe { tile::<$vector, R, F, SLIDING>(strip) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn copy_plane(plane: &Copied<'_, $element>) {
            // SAFETY: as above.
            unsafe { copy::<$vector>(plane) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn join_rows(from: [*const $element; 2], to: *mut $element, count: usize) {
            // SAFETY: as above.
            unsafe { join::<$vector>(from, to, count) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn add_number(to: *mut $element, number: $element, count: usize) {
            // SAFETY: as above.
            unsafe { add::<$vector>(to, number, count) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn sum<const K: usize, const S: usize>(task: &Moments<$element>) {
            // SAFETY: as above.
            unsafe { moments::<$vector, K, S>(task) }
        }
        Vectors {
            lanes: <$vector as Lanes>::LANES,
            sliding: [&[$(run::<$height, 1, true>),*], &[$(run::<$low, 2, true>),*]],
            still: [&[$(run::<$height, 1, false>),*], &[$(run::<$low, 2, false>),*]],
            copy: copy_plane,
            join: join_rows,
            add: add_number,
            moments: [
                &[$(sum::<1, $columns>),*],
                &[$(sum::<2, $columns>),*],
                &[$(sum::<3, $columns>),*],
                &[sum::<4, 1>],
                &[sum::<5, 1>],
                &[sum::<6, 1>],
                &[sum::<7, 1>],
            ],
        }
    }};
}

macro_rules! direct {
    ($element:ty, $avx512:ty, $avx2:ty, $plain:ty) => {
        impl Direct for $element {
            fn loops() -> &'static Loops<$element> {
                #[cfg(target_arch = "x86_64")]
                {
                    static AVX512: Loops<$element> = Loops {
                        wide: vectors!($element, $avx512, [1 2 3 4 5 6 7 8] [1 2 3 4 5 6 7 8], [1 2 3], "avx512f,avx512vl,fma,bmi2"),
                        narrow: Some(
                            vectors!($element, $avx2, [1 2 3 4 5 6 7 8] [1 2 3 4 5 6 7 8], [1 2 3], "avx512f,avx512vl,fma,bmi2")
                        ),
                        pixels: pixels!($element, $avx512, "avx512f,avx512vl,fma,bmi2"),
                    };
                    static AVX2: Loops<$element> = Loops {
                        wide: vectors!($element, $avx2, [1 2 3 4 5 6] [1 2 3 4], [1 2], "avx2,fma,bmi2"),
                        narrow: None,
                        pixels: pixels!($element, $avx2, "avx2,fma,bmi2"),
                    };
                    // `isa` never names more than the machine has.
                    match cpu::isa() {
                        Isa::Avx512 => return &AVX512,
                        Isa::Avx2 => return &AVX2,
                        Isa::Plain => {}
                    }
                }
                static PLAIN: Loops<$element> = Loops {
                    wide: vectors!($element, $plain, [1 2 3 4] [1 2], [1 2]),
                    narrow: None,
                    pixels: pixels!($element, $plain),
                };
                &PLAIN
            }
        }
    };
}

direct!(f32, __m512, __m256, Plain<f32, 4>);
direct!(f64, __m512d, __m256d, Plain<f64, 2>);
