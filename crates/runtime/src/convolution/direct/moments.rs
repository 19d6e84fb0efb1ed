//! The kernels' gradient of direct convolutions: for each tap, the sum of the source's elements that results meet
//! there times the results' gradients.
//!
//! The order of a sum is that of images, blocks, rows and vectors, whoever computes it: lanes are added up at the
//! end.

use parking_lot::Mutex;

use super::memory::Memory;
use super::tile::{ABREAST, Direct, Moments, SUM, TAPS};
use super::{Axis, Copier, Geometry, Stored, within};
use crate::pool::AllocError;
use crate::scratch;
use crate::threads::{self, Shared, parallel_for};
use crate::tile::even;

/// Items for each thread, so that a slower core gets fewer.
const BALANCE: usize = 4;

/// # Safety
/// That of the outer function of this name.
pub(crate) unsafe fn weight_gradient<M: Memory>(
    g: &Geometry,
    out: *mut M::Number,
    x: M,
    grad: M,
) -> Result<(), AllocError> {
    let axes = [0, 1].map(|d| Axis::forward(g, d));
    if let Some(task) = super::channels::Task::new(g, &axes, [g.input, g.output]) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { task.weight_gradient(out, x, grad) };
    }
    let (channels, filters) = (g.channels / g.groups, g.filters / g.groups);
    let task = Task { g, stored: Stored::new::<M::Number>(&axes, channels), axes, channels };
    // Filters of a group share the copies of its channels, as long as there are enough items.
    let parts = (BALANCE * threads::count()).div_ceil(g.groups).min(filters).max(1);
    let most = filters.div_ceil(parts);
    let held = task.stored.plane.saturating_mul(channels);
    let sums = most.saturating_mul(channels).saturating_mul(g.taps()).saturating_mul(SUM);
    let wide = M::room(channels.saturating_mul(g.input[0] * g.input[1]));
    let wide_grad = M::room(most.saturating_mul(g.output[0] * g.output[1]));
    let elements = [held, sums, wide, wide_grad].into_iter().fold(0, usize::saturating_add);
    let shared = Shared((out, x, grad));
    let failure = Mutex::new(None);
    parallel_for(g.groups * parts, 1, |begin, end| {
        let (out, x, grad) = shared.get();
        let done = scratch::with(elements.saturating_mul(size_of::<M::Number>()), |room| {
            let room = room.cast::<M::Number>();
            let [sums, wide, wide_grad] =
                [held, held + sums, held + sums + wide].map(|at| room.wrapping_add(at));
            let mut copier = Copier::new(room, channels);
            for item in begin..end {
                let (group, part) = (item / parts, item % parts);
                let range = even(filters, parts, part)..even(filters, parts, part + 1);
                // SAFETY: some filters of one group; the scratch has room for copies, sums and planes.
                unsafe {
                    task.filters(group, range, (out, x, grad), &mut copier, (sums, [wide, wide_grad]));
                }
            }
        });
        if let Err(error) = done {
            *failure.lock() = Some(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

struct Task<'a> {
    g: &'a Geometry,
    axes: [Axis; 2],
    stored: Stored,
    /// Of a group.
    channels: usize,
}

impl Task<'_> {
    /// # Safety
    /// That of [`weight_gradient`], for these filters of a group; there is room for the copies and the sums.
    unsafe fn filters<T: Direct, M: Memory<Number = T>>(
        &self,
        group: usize,
        range: std::ops::Range<usize>,
        (out, x, grad): (*mut T, M, M),
        copier: &mut Copier<T>,
        (sums, wide): (*mut T, [*mut T; 2]),
    ) {
        let Task { g, axes, stored, channels } = self;
        let (area, pixels, filters) =
            (g.input[0] * g.input[1], g.output[0] * g.output[1], g.filters / g.groups);
        let all = range.len() * channels * g.taps();
        // SAFETY: the sums; so below.
        unsafe { std::slice::from_raw_parts_mut(sums, all * SUM).fill(T::ZERO) };
        let blocks = stored.blocks(axes);
        let mut script = Vec::new();
        for image in 0..g.batch {
            let plane = image * g.groups + group;
            let (first, count) = (plane * filters + range.start, range.len());
            // SAFETY: the group's planes of the input, and those of the filters.
            let (x, grad) = unsafe {
                let x = x.read(plane * channels * area, channels * area, wide[0]);
                (x, grad.read(first * pixels, count * pixels, wide[1]))
            };
            for block in 0..blocks[0] * blocks[1] {
                let first = [block / blocks[1] * stored.size[0], block % blocks[1] * stored.size[1]];
                // SAFETY: the group's planes of the input.
                unsafe { copier.copy(axes, stored, x, g.input, first) };
                if blocks != [1, 1] || script.is_empty() {
                    script = self.script(first);
                }
                let mut asked = copier.following(x, g.input, script.len() * channels * count);
                for i in 0..count {
                    let grad = grad.wrapping_add(i * pixels + first[0] * g.output[1] + first[1]);
                    for channel in 0..*channels {
                        let source = copier.room.wrapping_add(channel * stored.plane).cast_const();
                        let sums = sums.wrapping_add((i * channels + channel) * g.taps() * SUM);
                        for Part { run, source: from, grad: at, sums: to, task } in &script {
                            let moments = Moments {
                                source: from.map(|from| source.wrapping_add(from)),
                                grad: grad.wrapping_add(*at),
                                sums: to.map(|to| sums.wrapping_add(to)),
                                ..*task
                            };
                            // SAFETY: a block of two planes, and its taps' sums.
                            unsafe { run(&moments) };
                            asked.go_on();
                        }
                    }
                }
            }
        }
        let first = (group * filters + range.start) * channels * g.taps();
        for i in 0..all {
            // SAFETY: a tap and its sums.
            unsafe {
                let lanes = &*sums.add(i * SUM).cast::<[T; SUM]>();
                *out.add(first + i) = lanes.iter().fold(T::ZERO, |sum, &lane| sum + lane);
            }
        }
    }

    /// What is to be done for a block that begins with result `first`.
    fn script<T: Direct>(&self, first: [usize; 2]) -> Vec<Part<T>> {
        let Task { g, axes, stored, .. } = self;
        let loops = T::loops();
        let [rows, columns] = [0, 1].map(|d| &axes[d].phases[0]);
        let [height, width] =
            [within(rows, first[0], stored.size[0]), within(columns, first[1], stored.size[1])];
        let (chains, distance) = axes[0].chains(rows, stored.extent[0]);
        let columns: Vec<_> = axes[1].taps(columns, stored.extent[1]).collect();
        // What is left of a row may be worth a narrow vector.
        let left = width % loops.wide.lanes;
        let tail = loops.vectors(left);
        let cut = if left > 0 && tail.lanes < loops.wide.lanes { width - left } else { width };
        let mut script = Vec::new();
        for (vectors, part) in [(&loops.wide, 0..cut), (tail, cut..width)] {
            if part.is_empty() {
                continue;
            }
            for chain in &chains {
                for begin in (0..chain.count).step_by(TAPS) {
                    let count = (chain.count - begin).min(TAPS);
                    let row = (chain.place + begin * distance) * stored.pitch + part.start;
                    let tap = (chain.tap + begin * chain.step as usize) * g.kernel[1];
                    let kinds = vectors.moments[count - 1];
                    for some in columns.chunks(kinds.len()) {
                        let column = |s: usize| some[s.min(some.len() - 1)];
                        script.push(Part {
                            run: kinds[some.len() - 1],
                            source: std::array::from_fn(|s| row + column(s).place),
                            grad: part.start,
                            sums: std::array::from_fn(|s| (tap + column(s).tap) * SUM),
                            task: Moments {
                                source: [std::ptr::null(); ABREAST],
                                pitch: stored.pitch,
                                distance,
                                grad: std::ptr::null(),
                                grad_row: g.output[1],
                                size: [height, part.len()],
                                sums: [std::ptr::null_mut(); ABREAST],
                                sum: chain.step as usize * g.kernel[1] * SUM,
                            },
                        });
                    }
                }
            }
        }
        script
    }
}

/// A part of the taps of a block, with places that count from those of the block.
struct Part<T> {
    run: unsafe fn(&Moments<T>),
    source: [usize; ABREAST],
    grad: usize,
    sums: [usize; ABREAST],
    /// The rest.
    task: Moments<T>,
}
