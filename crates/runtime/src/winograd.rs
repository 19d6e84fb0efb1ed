//! Convolutions with kernels of 3 × 3 by Winograd's minimal filtering, F(2×2, 3×3): 16 multiplications for 2 × 2
//! results where the definition takes 36.
//!
//! ```text
//! U = G g Gᵀ     of every kernel                                      16 matrices, filters × channels
//! V = Bᵀ d B     of every patch of 4 × 4 pixels, two apart            16 matrices, channels × patches
//! M = U · V      for each of the 16 places                            16 matrices, filters × patches
//! y = Aᵀ m A     2 × 2 results of every patch
//! ```
//!
//! The transforms only add and halve, so a result is about as exact as the direct sum: what cancels in them are
//! a few neighbours. Patches go in blocks: a block's V and M stay in the second-level cache. U depends on the kernels
//! alone, and can be kept where they stay the same.
//!
//! Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.

#![allow(clippy::needless_range_loop, reason = "elements of small matrices go by their numbers")]

use std::arch::x86_64::{__m256, __m512};

use parking_lot::Mutex;

use crate::convolution::{Finished, OnFinished};
use crate::cpu::{self, Isa};
use crate::lanes::{Lanes, Numbers};
use crate::pool::{AllocError, Buffer};
use crate::scratch;
use crate::threads::{self, GRAIN, Shared, parallel_for};
use crate::tile::{self, DEPTH, Operands, PITCH, Tiles, even};

/// Places of a transformed patch.
const PLACES: usize = 16;

// Which convolutions go this way decides their bits: these are fixed, since no bit depends on the machine's caches.

/// The fewest positions of the output for which transforming kernels pays.
const FEW_POSITIONS: usize = 512;
/// The fewest positions where that was done before.
const FEW_POSITIONS_KEPT: usize = 128;
/// The fewest channels and filters: with less the transforms cost more than the products.
const FEW_CHANNELS: usize = 24;

/// A convolution of 3 × 3 with stride 1.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    pub batch: usize,
    pub channels: usize,
    pub filters: usize,
    pub input: [usize; 2],
    pub output: [usize; 2],
    /// Zeros before the input.
    pub padding: [usize; 2],
    pub kernels: Kernels,
}

/// Which element of the weights kernel `(filter, channel)` has at `(r, s)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kernels {
    /// `weight[filter, channel, r, s]`.
    Straight,
    /// `weight[channel, filter, 2 − r, 2 − s]`, as the gradient of the input wants it.
    Turned,
}

impl Task {
    /// Whether this is the quicker way; `kept` if U is mostly there.
    pub fn pays(&self, kept: bool) -> bool {
        let positions = self.batch * self.output[0] * self.output[1];
        let narrow = self.channels.min(self.filters);
        cpu::isa() != Isa::Plain
            && narrow >= FEW_CHANNELS
            && positions >= if kept { FEW_POSITIONS_KEPT } else { FEW_POSITIONS }
            && self.output.iter().all(|size| *size >= 4)
    }

    /// U of these weights.
    ///
    /// # Safety
    /// The weights are dense and of the task's sizes.
    pub unsafe fn transformed(&self, weight: *const f32) -> Result<Buffer, AllocError> {
        // SAFETY: `best` never names more than the machine has; the caller's promise is passed on.
        unsafe { self.transformed_way(&Way::best(), weight) }
    }

    /// # Safety
    /// That of [`Task::transformed`]; the machine has the way's instruction set.
    unsafe fn transformed_way(&self, way: &Way, weight: *const f32) -> Result<Buffer, AllocError> {
        let elements = self.stretches() * PLACES * self.filters * PITCH;
        let kernels = Buffer::alloc(elements * size_of::<f32>())?;
        let shared = Shared((weight.cast_mut(), kernels.as_ptr().cast::<f32>()));
        parallel_for(self.filters, (GRAIN / 2).div_ceil(self.channels * 9), |begin, end| {
            let (weight, kernels) = shared.get();
            // SAFETY: room for all kernels; these filters are no other item's.
            unsafe { (way.transform)(self, weight, kernels, [begin, end]) };
        });
        Ok(kernels)
    }

    /// Patches of an image.
    fn patches(&self) -> [usize; 2] {
        self.output.map(|size| size.div_ceil(2))
    }

    /// Stretches of the channels.
    fn stretches(&self) -> usize {
        self.channels.div_ceil(DEPTH)
    }

    /// Where row `filter` of a place's U begins.
    fn row(&self, stretch: usize, place: usize, filter: usize) -> usize {
        ((stretch * PLACES + place) * self.filters + filter) * PITCH
    }
}

/// Computes `out` of a task that [pays](Task::pays) from the input and U, and tells `then` which parts are finished.
///
/// # Safety
/// `out` `[batch, filters, output]` and `x` `[batch, channels, input]` are dense; `out` overlaps nothing; `kernels`
/// were [transformed](Task::transformed) for a task of the same channels and filters. The sizes fit together.
pub(crate) unsafe fn run(
    task: &Task,
    out: *mut f32,
    x: *const f32,
    kernels: &Buffer,
    then: Option<OnFinished<'_>>,
) -> Result<(), AllocError> {
    // SAFETY: `best` never names more than the machine has; the caller's promise is passed on.
    unsafe { run_way(task, (&Way::best(), cpu::machine().l2), out, x, kernels, then) }
}

/// # Safety
/// That of [`run`]; the machine has the way's instruction set (and about so much of a second-level cache).
unsafe fn run_way(
    task: &Task,
    (&Way { block, width, .. }, l2): (&Way, usize),
    out: *mut f32,
    x: *const f32,
    kernels: &Buffer,
    then: Option<OnFinished<'_>>,
) -> Result<(), AllocError> {
    let [down, across] = task.patches();
    let size = [2 * down + 2, 2 * across + 2];
    // Vectors may read beyond a row, and the last one's beyond the image.
    let pixels = task.batch * task.channels * size[0] * size[1] + 2 * width;
    let padded = Buffer::alloc(pixels * size_of::<f32>())?;
    let all = Memory { out, padded: padded.as_ptr().cast(), size, kernels: kernels.as_ptr().cast() };
    // SAFETY: room for all planes.
    unsafe { pad(task, x, &all) };
    let rows = task.batch * down;
    let together = rows_together(task, width, l2);
    let pitch = (together * across).next_multiple_of(width) + 16;
    let elements = PLACES * (distance(task.channels, pitch) + distance(task.filters, pitch));
    let bytes = elements * size_of::<f32>();
    let failure = Mutex::new(None);
    let shared = Shared(all);
    parallel_for(rows.div_ceil(together), 1, |begin, end| {
        let kept = scratch::with(bytes, |memory| {
            for item in begin..end {
                let rows = [item * together, ((item + 1) * together).min(rows)];
                // SAFETY: rows of patches that no other item computes; the scratch has room for their V and M.
                unsafe { block(task, &shared.get(), rows, memory.cast(), pitch) };
                if let Some(then) = then {
                    task.finished(rows).for_each(then);
                }
            }
        });
        if let Err(error) = kept {
            *failure.lock() = Some(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

impl Task {
    /// What is finished when these rows of patches are, counted over all images.
    fn finished(&self, [begin, end]: [usize; 2]) -> impl Iterator<Item = Finished> {
        let ([down, _], [height, width], filters) = (self.patches(), self.output, self.filters);
        (begin / down..end.div_ceil(down)).map(move |image| {
            let line = |row: usize| (2 * row.saturating_sub(image * down)).min(height);
            Finished {
                planes: image * filters..(image + 1) * filters,
                pixels: line(begin) * width..line(end) * width,
            }
        })
    }
}

/// How many rows of patches a block has: its V and M are one and a half of the second-level cache at most, little of its
/// last tile is empty, and no thread is without a block.
fn rows_together(task: &Task, width: usize, l2: usize) -> usize {
    let [down, across] = task.patches();
    let rows = task.batch * down;
    let column = (task.channels + task.filters) * PLACES * size_of::<f32>();
    let columns = (l2 / 2 * 3 / column).max(2 * width);
    let cost = |together: usize| {
        let blocks = rows.div_ceil(together).div_ceil(threads::count());
        blocks * ((together * across).next_multiple_of(width) + width / 4)
    };
    (1..=(columns / across).clamp(1, rows)).min_by_key(|rows| (cost(*rows), usize::MAX - rows)).unwrap_or(1)
}

/// Elements from one place's matrix to the next: a line more than the matrix, or all of them would compete for the
/// same places in the cache.
fn distance(rows: usize, pitch: usize) -> usize {
    rows * pitch + 16
}

/// The code for one instruction set.
#[derive(Clone, Copy)]
struct Way {
    transform: unsafe fn(&Task, *const f32, *mut f32, [usize; 2]),
    block: unsafe fn(&Task, &Memory, [usize; 2], *mut f32, usize),
    /// Columns of a tile.
    width: usize,
}

impl Way {
    fn best() -> Way {
        match cpu::isa() {
            Isa::Avx512 => AVX512,
            Isa::Avx2 | Isa::Plain => AVX2,
        }
    }
}

macro_rules! way {
    ($name:ident, $vector:ty, $feature:literal, $tiles:path) => {
        const $name: Way = {
            #[target_feature(enable = $feature)]
            unsafe fn transform(task: &Task, weight: *const f32, to: *mut f32, filters: [usize; 2]) {
                // SAFETY: the caller's promise is passed on.
                unsafe { transform_kernels::<$vector>(task, weight, to, filters) }
            }
            #[target_feature(enable = $feature)]
            unsafe fn one(task: &Task, all: &Memory, rows: [usize; 2], scratch: *mut f32, pitch: usize) {
                // SAFETY: the caller's promise is passed on.
                unsafe { block::<$vector>(task, all, rows, scratch, pitch, $tiles) }
            }
            Way { transform, block: one, width: 2 * <$vector as Lanes>::LANES }
        };
    };
}

way!(AVX512, __m512, "avx512f,avx512vl,fma,bmi2", tile::AVX512);
way!(AVX2, __m256, "avx2,fma,bmi2", tile::AVX2);

/// What all blocks share.
#[derive(Clone, Copy)]
struct Memory {
    out: *mut f32,
    /// The input's planes with zeros around them.
    padded: *mut f32,
    /// Size of such a plane.
    size: [usize; 2],
    /// U.
    kernels: *mut f32,
}

/// # Safety
/// `x` is the task's input, and there is room for all planes.
unsafe fn pad(task: &Task, x: *const f32, all: &Memory) {
    let (size, [height, width], area) = (all.size, task.input, all.size[0] * all.size[1]);
    let shared = Shared((x.cast_mut(), all.padded));
    parallel_for(task.batch * task.channels, GRAIN.div_ceil(area), |begin, end| {
        let (x, padded) = shared.get();
        for plane in begin..end {
            // SAFETY: a plane of each, which no other thread touches.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(x.add(plane * height * width), height * width),
                    std::slice::from_raw_parts_mut(padded.add(plane * area), area),
                )
            };
            for (row, line) in to.chunks_exact_mut(size[1]).enumerate() {
                let row = row.checked_sub(task.padding[0]).filter(|row| *row < height);
                let Some(row) = row else {
                    line.fill(0.0);
                    continue;
                };
                let (before, rest) = line.split_at_mut(task.padding[1]);
                let (middle, after) = rest.split_at_mut(width.min(rest.len()));
                before.fill(0.0);
                middle.copy_from_slice(&from[row * width..][..middle.len()]);
                after.fill(0.0);
            }
        }
    });
}

/// The U of some filters.
///
/// # Safety
/// The instruction set of `V`; `weight` holds the task's kernels, and there is room for U.
#[inline(always)]
unsafe fn transform_kernels<V: Numbers>(
    task: &Task,
    weight: *const f32,
    to: *mut f32,
    [begin, end]: [usize; 2],
) {
    let (channels, filters) = (task.channels, task.filters);
    for stretch in 0..task.stretches() {
        let first = even(channels, task.stretches(), stretch);
        let last = even(channels, task.stretches(), stretch + 1);
        for c in (first..last).step_by(V::LANES) {
            let count = V::LANES.min(last - c);
            for filter in begin..end {
                // A vector of channels for each tap.
                let mut taps = [[0f32; MOST_LANES]; 9];
                for lane in 0..count {
                    let kernel = match task.kernels {
                        Kernels::Straight => filter * channels + c + lane,
                        Kernels::Turned => (c + lane) * filters + filter,
                    };
                    // SAFETY: a kernel of the weights.
                    let kernel = unsafe { &*weight.add(kernel * 9).cast::<[f32; 9]>() };
                    for tap in 0..9 {
                        let is_turned = task.kernels == Kernels::Turned;
                        taps[tap][lane] = kernel[if is_turned { 8 - tap } else { tap }];
                    }
                }
                // SAFETY: vectors of the taps; parts of this filter's rows, which no other item writes.
                unsafe {
                    // Down the columns, then along the rows.
                    let mut half = [[V::splat(0.0); 3]; 4];
                    for s in 0..3 {
                        let [a, b, c] = [s, 3 + s, 6 + s];
                        let g =
                            [V::load(taps[a].as_ptr()), V::load(taps[b].as_ptr()), V::load(taps[c].as_ptr())];
                        let values = spread(g);
                        (half[0][s], half[1][s]) = (values[0], values[1]);
                        (half[2][s], half[3][s]) = (values[2], values[3]);
                    }
                    for (r, half) in half.into_iter().enumerate() {
                        for (s, value) in spread(half).into_iter().enumerate() {
                            let at = task.row(stretch, 4 * r + s, filter) + (c - first);
                            value.store_part(to.add(at), count);
                        }
                    }
                }
            }
        }
    }
}

/// The most elements of a vector.
const MOST_LANES: usize = 16;

/// `G · g` of three elements.
///
/// # Safety
/// The instruction set of `V`.
#[inline(always)]
unsafe fn spread<V: Numbers>([a, b, c]: [V; 3]) -> [V; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (zero, half) = (V::splat(0.0), V::splat(0.5));
        let ends = zero.add_product(half, a.plus(c));
        let middle = zero.add_product(half, b);
        [a, ends.plus(middle), ends.minus(middle), c]
    }
}

/// The results of some rows of patches, counted over all images.
///
/// # Safety
/// That of [`run`]; the instruction set of `V`; `scratch` has room for V and M with rows `pitch` apart.
#[inline(always)]
unsafe fn block<V: Numbers>(
    task: &Task,
    all: &Memory,
    [begin, end]: [usize; 2],
    scratch: *mut f32,
    pitch: usize,
    tiles: &Tiles,
) {
    let (channels, filters, [down, across]) = (task.channels, task.filters, task.patches());
    let count = (end - begin) * across;
    let patches = scratch;
    let (patch_distance, result_distance) = (distance(channels, pitch), distance(filters, pitch));
    let results = scratch.wrapping_add(PLACES * patch_distance);
    // SAFETY: everything is within the task's memory and the scratch.
    unsafe {
        for channel in 0..channels {
            let to = patches.add(channel * pitch);
            for row in begin..end {
                let plane = row / down * channels + channel;
                let from = (plane * all.size[0] + row % down * 2) * all.size[1];
                let to = to.add((row - begin) * across);
                transform_row::<V>(all.padded.add(from), all.size[1], to, patch_distance, across);
            }
            // Columns that fill up the last tile are computed, too.
            for place in 0..PLACES {
                let mut column = count;
                while column % (2 * V::LANES) != 0 {
                    let rest = V::LANES - column % V::LANES;
                    V::splat(0.0).store_part(to.add(place * patch_distance + column), rest);
                    column += rest;
                }
            }
        }
        let heights = filters.div_ceil(tiles.len());
        for place in 0..PLACES {
            for stretch in 0..task.stretches() {
                let first = even(channels, task.stretches(), stretch);
                let depth = even(channels, task.stretches(), stretch + 1) - first;
                for column in (0..count).step_by(2 * V::LANES) {
                    for number in 0..heights {
                        let filter = even(filters, heights, number);
                        let height = even(filters, heights, number + 1) - filter;
                        tiles[height - 1](&Operands {
                            depth,
                            lhs: all.kernels.add(task.row(stretch, place, filter)),
                            rhs: patches.add(place * patch_distance + first * pitch + column),
                            dst: results.add(place * result_distance + filter * pitch + column),
                            pitch,
                            accumulate: stretch > 0,
                        });
                    }
                }
            }
        }
        let area = task.output[0] * task.output[1];
        for filter in 0..filters {
            for row in begin..end {
                let from = results.add(filter * pitch + (row - begin) * across);
                let (image, y) = (row / down, row % down * 2);
                let to = all.out.add((image * filters + filter) * area + y * task.output[1]);
                let rows = (task.output[0] - y).min(2);
                put_row::<V>(from, result_distance, to, [rows, task.output[1]]);
            }
        }
    }
}

/// A row of patches transformed: 16 places, which lie `distance` apart.
///
/// # Safety
/// The instruction set of `V`; there are four rows of pixels from `from` on, with two vectors behind their end.
#[inline(always)]
unsafe fn transform_row<V: Numbers>(
    from: *const f32,
    width: usize,
    to: *mut f32,
    distance: usize,
    across: usize,
) {
    for x in (0..across).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut d = [[V::splat(0.0); 4]; 4];
            for (i, d) in d.iter_mut().enumerate() {
                let at = from.add(i * width + 2 * x);
                let (a, b) = V::split(V::load(at), V::load(at.add(V::LANES)));
                let (c, e) = V::split(V::load(at.add(2)), V::load(at.add(2 + V::LANES)));
                *d = [a, b, c, e];
            }
            let mut t = d;
            for j in 0..4 {
                t[0][j] = d[0][j].minus(d[2][j]);
                t[1][j] = d[1][j].plus(d[2][j]);
                t[2][j] = d[2][j].minus(d[1][j]);
                t[3][j] = d[1][j].minus(d[3][j]);
            }
            let count = V::LANES.min(across - x);
            for (i, t) in t.iter().enumerate() {
                let values = [t[0].minus(t[2]), t[1].plus(t[2]), t[2].minus(t[1]), t[1].minus(t[3])];
                for (j, value) in values.into_iter().enumerate() {
                    value.store_part(to.add((4 * i + j) * distance + x), count);
                }
            }
        }
    }
}

/// Two rows of results, or one, from the 16 places of a row of patches.
///
/// # Safety
/// The instruction set of `V`; `to` has `rows` rows of `width` elements.
#[inline(always)]
unsafe fn put_row<V: Numbers>(from: *const f32, distance: usize, to: *mut f32, [rows, width]: [usize; 2]) {
    for x in (0..width).step_by(2 * V::LANES) {
        // SAFETY: the caller's promise; places have columns behind the last patch.
        unsafe {
            let mut s = [[V::splat(0.0); 4]; 2];
            for j in 0..4 {
                let mut m = [V::splat(0.0); 4];
                for (i, m) in m.iter_mut().enumerate() {
                    *m = V::load(from.add((4 * i + j) * distance + x / 2));
                }
                s[0][j] = m[0].plus(m[1]).plus(m[2]);
                s[1][j] = m[1].minus(m[2]).minus(m[3]);
            }
            for (i, s) in s.iter().enumerate().take(rows) {
                let even = s[0].plus(s[1]).plus(s[2]);
                let odd = s[1].minus(s[2]).minus(s[3]);
                let (low, high) = V::join(even, odd);
                let to = to.add(i * width + x);
                let count = (width - x).min(2 * V::LANES);
                low.store_part(to, count.min(V::LANES));
                high.store_part(to.wrapping_add(V::LANES), count.saturating_sub(V::LANES));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convolution::{self, Geometry};

    fn random(count: usize, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; count];
        crate::random::fill_uniform_f32(&mut values, seed, 0, -1.0, 1.0);
        values
    }

    /// Both directions, in both instruction sets, beside the direct sum in double precision.
    #[test]
    fn as_exact_as_the_direct_sum() {
        let sizes = [
            (2, 24, 40, [20, 31], 1),
            (1, 300, 27, [12, 17], 0),
            (3, 33, 65, [9, 40], 2),
            (4, 32, 32, [4, 5], 1),
        ];
        for (batch, channels, filters, input, zeros) in sizes {
            let output = input.map(|size: usize| size + 2 * zeros - 2);
            let g = Geometry {
                batch,
                channels,
                filters,
                input,
                output,
                kernel: [3; 2],
                stride: [1; 2],
                padding: [zeros; 2],
                dilation: [1; 2],
                groups: 1,
            };
            let area = |size: [usize; 2]| size[0] * size[1];
            let weight = random(filters * channels * 9, 1);
            for kernels in [Kernels::Straight, Kernels::Turned] {
                let (from, to) = match kernels {
                    Kernels::Straight => (batch * channels * area(input), batch * filters * area(output)),
                    Kernels::Turned => (batch * filters * area(output), batch * channels * area(input)),
                };
                // A pixel that is none makes the very results none that see it.
                let mut x = random(from, 2);
                x[from / 3] = f32::NAN;
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
                let (wide_x, wide_weight, mut exact) = (wide(&x), wide(&weight), vec![f64::NAN; to]);
                let (x_at, weight_at) = (wide_x.as_ptr(), wide_weight.as_ptr());
                // SAFETY: dense tensors of the geometry's sizes.
                let done = unsafe {
                    match kernels {
                        Kernels::Straight => convolution::forward(&g, exact.as_mut_ptr(), x_at, weight_at),
                        Kernels::Turned => {
                            convolution::input_gradient(&g, exact.as_mut_ptr(), x_at, weight_at)
                        }
                    }
                };
                done.unwrap();
                let squares = exact.iter().filter(|x| !x.is_nan()).map(|x| x * x);
                let norm = (squares.sum::<f64>() / to as f64).sqrt();
                assert!(exact.iter().any(|x| x.is_nan()));
                let ways = [(Isa::Avx512, AVX512), (Isa::Avx2, AVX2)];
                for (isa, way) in ways.into_iter().filter(|(isa, _)| *isa >= Isa::detect()) {
                    let task = convolution::minimal_task(&g, kernels).unwrap();
                    let (done, area) = (Mutex::new(vec![0; to]), area(task.output));
                    let count = |part: Finished| {
                        for plane in part.planes {
                            let places = plane * area + part.pixels.start..plane * area + part.pixels.end;
                            done.lock()[places].iter_mut().for_each(|times| *times += 1);
                        }
                    };
                    let run = |l2: usize| {
                        let (mut out, way) = (vec![f32::NAN; to], (&way, l2));
                        // SAFETY: dense tensors of the task's sizes; the set is there.
                        unsafe {
                            let kernels = task.transformed_way(way.0, weight.as_ptr()).unwrap();
                            run_way(&task, way, out.as_mut_ptr(), x.as_ptr(), &kernels, Some(&count))
                                .unwrap();
                        }
                        out
                    };
                    let (out, small) = (run(1 << 20), run(64 << 10));
                    let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits(&out) == bits(&small), "{g:?}: no bit depends on the cache");
                    assert!(done.into_inner().iter().all(|times| *times == 2), "{g:?}: finished once a run");
                    for (i, (got, exact)) in out.iter().zip(&exact).enumerate() {
                        let error = (f64::from(*got) - exact).abs() / norm;
                        let is_right = error < 1e-5 || (got.is_nan() && exact.is_nan());
                        assert!(is_right, "{g:?} {isa:?} at {i}: {got}, not {exact}");
                    }
                }
            }
        }
    }
}
