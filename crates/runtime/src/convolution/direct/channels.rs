//! Depthwise convolutions of small planes: a vector is one pixel of as many channels as it has lanes, since rows fill
//! none.
//!
//! ```text
//! for each block of channels, for each image (on one thread)
//!   turn the block's planes to pixels, zeros around them          pixel.rs
//!   for each eight results, for each tap: a multiply-add each
//!   turn the results to planes
//! ```
//!
//! Of the kernels' gradient, nine taps have their sums in registers while the results go by; sums of images are added
//! up in order.

use parking_lot::Mutex;

use super::axis::Axis;
use super::memory::Memory;
use super::pixel::{Pixels, Products, SUMS, Tile, Turn};
use super::tile::Direct;
use crate::convolution::{Finished, Geometry, OnFinished};
use crate::pool::{AllocError, Buffer};
use crate::scratch;
use crate::threads::{GRAIN, Shared, parallel_for};
use crate::tile::even;

/// The most pixels of a padded plane: those of a block stay in the first-level cache. The order of sums follows it, so
/// it is the same everywhere.
const PIXELS: usize = 400;
/// The most results of a row; longer ones fill vectors of their own.
const ROW: usize = 16;
/// Channels below which most lanes would be empty.
const FEW: usize = 8;
/// Items that sums of a kernels' gradient are made of, where there are so many images: the same for all threads.
const ITEMS: usize = 32;

/// Results that meet the same taps.
struct Part {
    /// What the first result meets, and the tap's number, in elements of pixels.
    taps: Vec<[usize; 2]>,
    /// How far what a result meets is from what the first one meets, and the result.
    results: Vec<[usize; 2]>,
}

/// A convolution, or its input's gradient, whose vectors are pixels.
pub(super) struct Task<T: 'static> {
    loops: &'static Pixels<T>,
    images: usize,
    channels: usize,
    taps: usize,
    /// Where the source's pixels are.
    places: Vec<usize>,
    /// Where results are, and weights of taps: one after the other.
    dense: Vec<usize>,
    /// Elements of the padded source; what no result meets is put behind it.
    room: usize,
    /// How many results there are.
    results: usize,
    parts: Vec<Part>,
}

impl<T: Direct> Task<T> {
    /// The task, where that is quicker: `size` is that of the source, of the results.
    pub fn new(g: &Geometry, axes: &[Axis; 2], size: [[usize; 2]; 2]) -> Option<Task<T>> {
        let is_depthwise = g.groups == g.channels && g.channels == g.filters && g.channels >= FEW;
        let [height, width] = [0, 1].map(|d| axes[d].met());
        if !is_depthwise || g.output[1] > ROW || height.saturating_mul(width) > PIXELS {
            return None;
        }
        let loops = &T::loops().pixels;
        let lanes = loops.lanes;
        let room = height * width * lanes;
        let mut places = Vec::with_capacity(size[0][0] * size[0][1]);
        for row in 0..size[0][0] {
            for column in 0..size[0][1] {
                let (row, column) = (axes[0].position(row), axes[1].position(column));
                let is_met = row < height && column < width;
                places.push(if is_met { (row * width + column) * lanes } else { room });
            }
        }
        let mut parts = Vec::new();
        for rows in &axes[0].phases {
            for columns in &axes[1].phases {
                let mut part = Part { taps: Vec::new(), results: Vec::new() };
                for (row, r) in axes[0].meets(rows) {
                    for (column, s) in axes[1].meets(columns) {
                        part.taps.push([(row * width + column) * lanes, (r * g.kernel[1] + s) * lanes]);
                    }
                }
                for i in 0..rows.count {
                    for j in 0..columns.count {
                        let from = i * axes[0].split() * width + j * axes[1].split();
                        let [row, column] = [rows.first + i * axes[0].step, columns.first + j * axes[1].step];
                        part.results.push([from * lanes, (row * size[1][1] + column) * lanes]);
                    }
                }
                parts.push(part);
            }
        }
        let results = size[1][0] * size[1][1];
        let dense = (0..results.max(g.taps())).map(|i| i * lanes).collect();
        let (images, channels, taps) = (g.batch, g.channels, g.taps());
        Some(Task { loops, images, channels, taps, places, dense, room, results, parts })
    }

    fn blocks(&self) -> usize {
        self.channels.div_ceil(self.loops.lanes)
    }

    /// How many channels there are in block `number`.
    fn lanes(&self, number: usize) -> usize {
        (self.channels - number * self.loops.lanes).min(self.loops.lanes)
    }

    /// # Safety
    /// The operands are those of the convolution that the task was made for.
    pub unsafe fn run<M: Memory<Number = T>>(
        &self,
        out: M,
        source: M,
        weight: *const T,
        then: Option<OnFinished<'_>>,
    ) -> Result<(), AllocError> {
        let lanes = self.loops.lanes;
        let (room, weights) = (self.room + lanes, self.taps * lanes);
        let held = room + weights + self.results * lanes;
        let wide = M::room(lanes * self.results.max(self.places.len()));
        let shared = Shared((out, source, weight.cast_mut()));
        // An item takes about as many steps as the taps of its results.
        let grain = GRAIN.div_ceil((self.results * self.taps * lanes).max(1));
        self.each(self.blocks() * self.images, grain, held + wide, |begin, end, at| {
            let (out, source, weight) = shared.get();
            let (kernels, results) = (at.wrapping_add(room), at.wrapping_add(room + weights));
            let wide = at.wrapping_add(held);
            let mut last = None;
            for item in begin..end {
                let (block, image) = (item / self.images, item % self.images);
                let (first, count) = (block * lanes, self.lanes(block));
                let plane = image * self.channels + first;
                // SAFETY: a block of an image's planes, its kernels, and room for their pixels.
                unsafe {
                    if last != Some(block) {
                        let planes = weight.wrapping_add(first * self.taps);
                        let places = &self.dense[..self.taps];
                        (self.loops.read)(&Turn { planes, count, pixels: kernels, places });
                        last = Some(block);
                    }
                    let area = self.places.len();
                    let planes = source.read(plane * area, count * area, wide).cast_mut();
                    (self.loops.read)(&Turn { planes, count, pixels: at, places: &self.places });
                    for part in &self.parts {
                        for some in part.results.chunks(self.loops.tiles.len()) {
                            let (taps, out) = (&part.taps, results);
                            let tile = Tile { source: at, weights: kernels, taps, results: some, out };
                            (self.loops.tiles[some.len() - 1])(&tile);
                        }
                    }
                    let planes = out.place(plane * self.results, wide);
                    let places = &self.dense[..self.results];
                    (self.loops.write)(&Turn { planes, count, pixels: results, places });
                    out.write(plane * self.results, count * self.results, wide);
                }
                if let Some(then) = then {
                    then(Finished { planes: plane..plane + count, pixels: 0..self.results });
                }
            }
        })
    }

    /// The kernels' gradient of a convolution that the task was made for.
    ///
    /// # Safety
    /// The operands are those of the convolution.
    pub unsafe fn weight_gradient<M: Memory<Number = T>>(
        &self,
        out: *mut T,
        x: M,
        grad: M,
    ) -> Result<(), AllocError> {
        let (lanes, blocks) = (self.loops.lanes, self.blocks());
        let (room, sum) = (self.room + lanes, self.taps * lanes);
        let parts = ITEMS.div_ceil(blocks.max(1)).min(self.images).max(1);
        let sums = Buffer::alloc((blocks * parts * sum * size_of::<T>()).max(1))?;
        let held = room + self.results * lanes;
        let wide = M::room(lanes * self.results.max(self.places.len()));
        let shared = Shared((sums.as_ptr().cast::<T>(), x, grad));
        self.each(blocks * parts, 1, held + wide, |begin, end, at| {
            let (sums, x, grad) = shared.get();
            let (grads, wide) = (at.wrapping_add(room), at.wrapping_add(held));
            for item in begin..end {
                let (block, part) = (item / parts, item % parts);
                let (first, count) = (block * lanes, self.lanes(block));
                let sums = sums.wrapping_add(item * sum);
                // SAFETY: the item's sums; a block of planes of some images, and room for their pixels.
                unsafe {
                    std::slice::from_raw_parts_mut(sums, sum).fill(T::ZERO);
                    for image in even(self.images, parts, part)..even(self.images, parts, part + 1) {
                        let plane = image * self.channels + first;
                        let area = self.places.len();
                        let planes = x.read(plane * area, count * area, wide).cast_mut();
                        (self.loops.read)(&Turn { planes, count, pixels: at, places: &self.places });
                        let area = self.results;
                        let planes = grad.read(plane * area, count * area, wide).cast_mut();
                        let places = &self.dense[..self.results];
                        (self.loops.read)(&Turn { planes, count, pixels: grads, places });
                        for Part { taps, results } in &self.parts {
                            let groups = taps.len().div_ceil(SUMS);
                            for group in 0..groups {
                                let taps = &taps
                                    [even(taps.len(), groups, group)..even(taps.len(), groups, group + 1)];
                                let task = Products { source: at, grad: grads, taps, results, sums };
                                (self.loops.products[taps.len() - 1])(&task);
                            }
                        }
                    }
                }
            }
        })?;
        for block in 0..blocks {
            let at = shared.get().0.wrapping_add(block * parts * sum);
            // SAFETY: the block's sums, and the gradients of its kernels.
            unsafe {
                for part in 1..parts {
                    for i in 0..sum {
                        *at.add(i) = *at.add(i) + *at.add(part * sum + i);
                    }
                }
                let planes = out.wrapping_add(block * lanes * self.taps);
                let (count, places) = (self.lanes(block), &self.dense[..self.taps]);
                (self.loops.write)(&Turn { planes, count, pixels: at, places });
            }
        }
        Ok(())
    }

    /// Calls `body` for ranges of items with room for so many elements, of which the padded source's are zero.
    fn each(
        &self,
        items: usize,
        grain: usize,
        elements: usize,
        body: impl Fn(usize, usize, *mut T) + Sync,
    ) -> Result<(), AllocError> {
        let failure = Mutex::new(None);
        parallel_for(items, grain, |begin, end| {
            let done = scratch::with(elements * size_of::<T>(), |at| {
                let at = at.cast::<T>();
                // SAFETY: the scratch.
                unsafe { std::slice::from_raw_parts_mut(at, self.room).fill(T::ZERO) };
                body(begin, end, at);
            });
            if let Err(error) = done {
                *failure.lock() = Some(error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}
