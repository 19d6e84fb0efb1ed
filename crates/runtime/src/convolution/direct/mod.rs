//! Convolutions whose groups have few channels, without a matrix: planes of the source are copied with zeros around
//! them, so that what consecutive results meet with a tap is consecutive, and tiles of results sum up all taps in
//! registers.
//!
//! ```text
//! for each image, group and block of positions (on one thread)
//!   copy what the block needs of the group's source planes        axis.rs
//!   for each plane of results, for each tile                      tile.rs
//! ```
//!
//! The gradient of the input is the same with other taps; with a stride, results of each phase of the stride are
//! computed side by side and joined. No bit depends on how positions are cut into blocks and tiles.

mod axis;
mod channels;
mod memory;
mod moments;
mod pixel;
mod stored;
mod tile;

use parking_lot::Mutex;

use super::{Finished, Geometry, OnFinished};
use crate::pool::AllocError;
use crate::scratch;
use crate::threads::{GRAIN, Shared, parallel_for};
use crate::tile::even;
use axis::{Axis, Phase};
use memory::Memory;
use stored::{Copier, Stored};
use tile::{Chain, Column, Loops, Strip, Vectors};

pub(super) use memory::{Either, Halves, narrow, widen};
pub(super) use moments::weight_gradient;
pub use tile::Direct;

/// Rows below which multiply-adds would wait for each other.
const FEW: usize = 4;

/// Sums of a group's source planes under the taps: a convolution, or the gradient of its input.
struct Task<'a, T: 'static> {
    axes: [Axis; 2],
    stored: Stored,
    loops: &'static Loops<T>,
    images: usize,
    groups: usize,
    /// Planes of a group: of the source, of results.
    planes: [usize; 2],
    /// Sizes of these planes.
    size: [[usize; 2]; 2],
    /// Distances of the weights of consecutive planes: of the source, of results.
    weights: [usize; 2],
    /// Taps of a row, and all of them.
    taps: usize,
    kernel: usize,
    /// Results of the phases of a block, before they are joined.
    side: usize,
    then: Option<OnFinished<'a>>,
}

/// # Safety
/// That of the outer function of this name.
pub(super) unsafe fn forward<M: Memory>(
    g: &Geometry,
    out: M,
    x: M,
    weight: *const M::Number,
    then: Option<OnFinished<'_>>,
) -> Result<(), AllocError> {
    let axes = [0, 1].map(|d| Axis::forward(g, d));
    if let Some(task) = channels::Task::new(g, &axes, [g.input, g.output]) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { task.run(out, x, weight, then) };
    }
    let planes = [g.channels / g.groups, g.filters / g.groups];
    let task = Task {
        then,
        weights: [g.taps(), planes[0] * g.taps()],
        size: [g.input, g.output],
        ..Task::new(g, axes, planes)
    };
    // SAFETY: the caller's promise is passed on.
    unsafe { task.run(out, x, weight) }
}

/// # Safety
/// That of the outer function of this name.
pub(super) unsafe fn input_gradient<M: Memory>(
    g: &Geometry,
    out: M,
    grad: M,
    weight: *const M::Number,
) -> Result<(), AllocError> {
    let axes = [0, 1].map(|d| Axis::backward(g, d));
    if let Some(task) = channels::Task::new(g, &axes, [g.output, g.input]) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { task.run(out, grad, weight, None) };
    }
    let planes = [g.filters / g.groups, g.channels / g.groups];
    let task = Task {
        weights: [planes[1] * g.taps(), g.taps()],
        size: [g.output, g.input],
        ..Task::new(g, axes, planes)
    };
    // SAFETY: the caller's promise is passed on.
    unsafe { task.run(out, grad, weight) }
}

/// The taps of one phase in both dims.
struct Taps {
    chains: Vec<Chain>,
    columns: Vec<Column>,
    /// Rows of results from one row of a tile to the next.
    distance: usize,
}

/// A tile of results, as a [`Strip`] whose places count from those of a block.
struct Tile<'p, T> {
    run: unsafe fn(&Strip<'_, T>),
    taps: &'p Taps,
    source: usize,
    out: usize,
    row: usize,
    tap: usize,
    out_row: usize,
    count: usize,
}

/// What makes the results of a block: the same for all that begin with the same result.
struct Script<'p, T> {
    first: [usize; 2],
    /// For one plane, and for two.
    tiles: [Vec<Tile<'p, T>>; 2],
    /// Rows of which the phases are joined: where they are, and where they go.
    joins: Vec<(usize, usize)>,
}

impl<T: Direct> Task<'_, T> {
    /// Of these dims, with so many planes of a group: of the source, of results.
    fn new(g: &Geometry, axes: [Axis; 2], planes: [usize; 2]) -> Self {
        let stored = Stored::new::<T>(&axes, planes[0]);
        // Only what is joined has a place of its own.
        let phases = if axes[1].step > 1 { axes[0].phases.len() * axes[1].phases.len() } else { 0 };
        let side = phases * stored.size[0] * stored.lane();
        Task {
            axes,
            stored,
            loops: T::loops(),
            images: g.batch,
            groups: g.groups,
            planes,
            size: [[0; 2]; 2],
            weights: [0; 2],
            taps: g.kernel[1],
            kernel: g.taps(),
            side,
            then: None,
        }
    }

    /// # Safety
    /// The operands are those of the convolution that the task was made for.
    unsafe fn run<M: Memory<Number = T>>(
        &self,
        out: M,
        source: M,
        weight: *const T,
    ) -> Result<(), AllocError> {
        let Task { axes, stored, taps, .. } = self;
        let mut phases = Vec::new();
        for rows in &axes[0].phases {
            for columns in &axes[1].phases {
                let (chains, distance) = axes[0].chains(rows, stored.extent[0]);
                let chain = |chain: axis::Chain| Chain {
                    source: chain.place * stored.pitch,
                    weight: (chain.tap * taps) as isize,
                    step: chain.step * *taps as isize,
                    count: chain.count,
                };
                let columns = axes[1].taps(columns, stored.extent[1]);
                phases.push(Taps {
                    chains: chains.into_iter().map(chain).collect(),
                    columns: columns
                        .map(|column| Column { source: column.place, weight: column.tap })
                        .collect(),
                    distance,
                });
            }
        }
        let blocks = stored.blocks(axes);
        let each = blocks[0] * blocks[1];
        let held = stored.plane.saturating_mul(self.planes[0]).saturating_add(self.side.saturating_mul(2));
        let work =
            self.planes[0] * self.planes[1] * stored.size[0] * stored.size[1] * axes[0].step * axes[1].step;
        let grain = GRAIN.div_ceil((work * phases.first().map_or(1, |taps| taps.columns.len())).max(1));
        let area = self.size.map(|[height, width]| height.saturating_mul(width));
        let [before, after] = [0, 1].map(|i| self.planes[i].saturating_mul(area[i]));
        let (wide, wide_out) = (M::room(before), M::room(after));
        let elements = held.saturating_add(wide).saturating_add(wide_out);
        // What takes memory of its own is whole planes.
        let (parts, inner) = if elements > held { (1, each) } else { (each, 1) };
        let shared = Shared((out, source, weight.cast_mut()));
        let failure = Mutex::new(None);
        parallel_for(self.images * self.groups * parts, grain, |begin, end| {
            let (out, source, weight) = shared.get();
            let done = scratch::with(elements.saturating_mul(size_of::<T>()), |room| {
                let room = room.cast::<T>();
                let [wide, wide_out] = [held, held + wide].map(|at| room.wrapping_add(at));
                let mut copier = Copier::new(room, self.planes[0]);
                let mut script = self.script(&phases, [0, 0]);
                for item in begin..end {
                    let (group, part) = if parts == 1 { (item, 0) } else { (item / parts, item % parts) };
                    // SAFETY: blocks of one group of one image; the scratch has room for them.
                    unsafe {
                        let source = source.read(group * before, before, wide);
                        let results = out.place(group * after, wide_out);
                        for block in part..part + inner {
                            if each > 1 {
                                let [row, column] = [block / blocks[1], block % blocks[1]];
                                script =
                                    self.script(&phases, [row * stored.size[0], column * stored.size[1]]);
                            }
                            self.block(&script, (results, source, weight), group, &mut copier);
                        }
                        out.write(group * after, after, wide_out);
                    }
                }
            });
            if let Err(error) = done {
                *failure.lock() = Some(error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// What is to be done for each block that begins with result `first`.
    fn script<'p>(&self, phases: &'p [Taps], first: [usize; 2]) -> Script<'p, T> {
        let Task { axes, stored, size: [_, [_, width]], .. } = self;
        let mut script = Script { first, tiles: Default::default(), joins: Vec::new() };
        let lane = self.stored.lane();
        let across = lane * axes[1].phases.len();
        for (i, rows) in axes[0].phases.iter().enumerate() {
            let height = within(rows, first[0], stored.size[0]);
            let distance = axes[0].step * width;
            let top = (rows.first + first[0] * axes[0].step) * width + first[1] * axes[1].step;
            for (j, columns) in axes[1].phases.iter().enumerate() {
                let count = [height, within(columns, first[1], stored.size[1])];
                let taps = &phases[i * axes[1].phases.len() + j];
                let side = i * stored.size[0] * across + j * lane;
                let place = if self.is_joined() { (side, across) } else { (top, distance) };
                for (planes, tiles) in script.tiles.iter_mut().enumerate() {
                    self.tiles(taps, place, count, planes, tiles);
                }
            }
            if self.is_joined() {
                let rows = (0..height).map(|row| {
                    let side = (i * stored.size[0] + row) * across;
                    (side, top + row * distance)
                });
                script.joins.extend(rows);
            }
        }
        script
    }

    /// Whether results of several phases alternate in a row.
    fn is_joined(&self) -> bool {
        self.axes[1].step > 1
    }

    /// The tiles of one phase: of `rows` times `width` results, in rows that lie `across` apart, of one plane and so many
    /// more.
    fn tiles<'p>(
        &self,
        taps: &'p Taps,
        (out, across): (usize, usize),
        [rows, width]: [usize; 2],
        more: usize,
        tiles: &mut Vec<Tile<'p, T>>,
    ) {
        let Vectors { lanes, sliding, still, .. } = &self.loops.wide;
        let (lanes, sliding, still) = (*lanes, sliding[more], still[more]);
        let distance = taps.distance;
        let (row, out_row) = (distance * self.stored.pitch, distance * across);
        for first in 0..rows.min(distance) {
            let height = (rows - first).div_ceil(distance);
            let mut tile = |run, [row_at, column]: [usize; 2], [step, out_step]: [usize; 2], count| {
                tiles.push(Tile {
                    run,
                    taps,
                    source: first * self.stored.pitch + row_at * row + column,
                    out: out + first * across + row_at * out_row + column,
                    row: step,
                    tap: row,
                    out_row: out_step,
                    count,
                });
            };
            // Few rows keep few sums at work: a tile is better made of parts of one row.
            let is_flat = height < FEW && width >= 2 * lanes;
            let whole = width / lanes;
            let (cut, tallest) = if is_flat { (whole, still.len()) } else { (height, sliding.len()) };
            let parts = cut.div_ceil(tallest);
            for part in 0..parts {
                let (begin, end) = (even(cut, parts, part), even(cut, parts, part + 1));
                if is_flat {
                    for at in 0..height {
                        tile(still[end - begin - 1], [at, begin * lanes], [lanes, lanes], lanes);
                    }
                } else {
                    for column in (0..width).step_by(lanes) {
                        let count = (width - column).min(lanes);
                        let run = self.loops.vectors(count).sliding[more][end - begin - 1];
                        tile(run, [begin, column], [row, out_row], count);
                    }
                }
            }
            if is_flat && whole * lanes < width {
                let left = width - whole * lanes;
                let run = self.loops.vectors(left).still[more][0];
                (0..height).for_each(|at| tile(run, [at, whole * lanes], [lanes, lanes], left));
            }
        }
    }

    /// # Safety
    /// That of [`Task::run`], for the planes of group `group` of all images; behind the copies is room for results of
    /// phases.
    unsafe fn block(
        &self,
        script: &Script<'_, T>,
        (out, source, weight): (*mut T, *const T, *const T),
        group: usize,
        copier: &mut Copier<T>,
    ) {
        let Task { axes, stored, planes, size: [from, to], weights, .. } = self;
        let first = script.first;
        let kernels = group % self.groups;
        let weight = weight.wrapping_add(kernels * planes[0] * planes[1] * self.kernel);
        // SAFETY: the group's planes of the source.
        unsafe { copier.copy(axes, stored, source, *from, first) };
        let times = script.tiles[0].len() * planes[1].div_ceil(2);
        let mut asked = copier.following(source, *from, times);
        let side = copier.room.wrapping_add(planes[0] * stored.plane);
        let mut next = 0;
        while next < planes[1] {
            let count = (planes[1] - next).min(2);
            let out = out.wrapping_add(next * to[0] * to[1]);
            let (results, apart) = if self.is_joined() { (side, self.side) } else { (out, to[0] * to[1]) };
            for tile in &script.tiles[count - 1] {
                let strip = Strip {
                    source: copier.room.wrapping_add(tile.source),
                    row: tile.row,
                    tap: tile.tap,
                    planes: planes[0],
                    plane: [stored.plane, weights[0]],
                    chains: &tile.taps.chains,
                    columns: &tile.taps.columns,
                    weight: weight.wrapping_add(next * weights[1]),
                    out: results.wrapping_add(tile.out),
                    filter: [weights[1], apart],
                    out_row: tile.out_row,
                    count: tile.count,
                };
                // SAFETY: a part of the block; the copy has what its taps meet.
                unsafe { (tile.run)(&strip) };
                asked.go_on();
            }
            for plane in 0..count {
                for &(from, at) in &script.joins {
                    let (from, at) = (plane * apart + from, plane * to[0] * to[1] + at);
                    // SAFETY: all phases of this row are there.
                    unsafe { self.join(side.wrapping_add(from), out.wrapping_add(at), first[1]) };
                }
                self.tell(group * planes[1] + next + plane, first);
            }
            next += count;
        }
    }

    /// Tells that a block of a plane is finished.
    fn tell(&self, plane: usize, first: [usize; 2]) {
        let Some(then) = self.then else { return };
        // Whole rows follow each other; parts of rows don't.
        let width = self.size[1][1];
        let [rows, columns] = [0, 1].map(|d| within(&self.axes[d].phases[0], first[d], self.stored.size[d]));
        let (parts, rows) = if columns == width { (1, rows) } else { (rows, 1) };
        for part in 0..parts {
            let begin = (first[0] + part) * width + first[1];
            let pixels = begin..begin + (rows - 1) * width + columns;
            then(Finished { planes: plane..plane + 1, pixels });
        }
    }

    /// Joins the phases of a row, from result `first` of each on.
    ///
    /// # Safety
    /// `from` has the results of all phases, `to` is where the first of them goes.
    unsafe fn join(&self, from: *const T, to: *mut T, first: usize) {
        let axis = &self.axes[1];
        let counts = || axis.phases.iter().map(|phase| within(phase, first, self.stored.size[1]));
        // SAFETY: the elements named.
        unsafe {
            if axis.step == 2 && axis.phases.len() == 2 {
                return (self.loops.wide.join)([from, from.add(self.stored.lane())], to, counts().sum());
            }
            for (number, (phase, count)) in axis.phases.iter().zip(counts()).enumerate() {
                for k in 0..count {
                    *to.add(k * axis.step + phase.first) = *from.add(number * self.stored.lane() + k);
                }
            }
        }
    }
}

/// How many results of a phase there are from `first` on, at most `most`.
fn within(phase: &Phase, first: usize, most: usize) -> usize {
    phase.count.saturating_sub(first).min(most)
}
