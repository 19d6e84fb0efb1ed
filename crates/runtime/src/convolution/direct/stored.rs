//! Copies of planes, so that what consecutive results meet with a tap is consecutive, with zeros around them.

use smallvec::SmallVec;

use super::axis::{Axis, Run};
use super::tile::{Copied, Direct};
use crate::cpu::prefetch;

/// Bytes of the source that a block keeps at hand. The order of sums follows it, so it is the same everywhere.
const BLOCK: usize = 64 << 10;
/// Columns of a block.
const WIDEST: usize = 2048;
/// Rows below which a block is not cut: rows are copied again for every block that needs them.
const LOWEST: usize = 16;
/// The most lanes of a vector: rows have room for whole ones.
const LANES: usize = 16;
/// Bytes of a line of the cache.
const LINE: usize = 64;

/// How a block's source lies in memory: rows of slots, which follow each other without gaps in both dims.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    /// Results of a block, of each phase: rows, columns.
    pub size: [usize; 2],
    /// Elements of a slot.
    pub extent: [usize; 2],
    /// Distance of rows.
    pub pitch: usize,
    /// Elements of a plane.
    pub plane: usize,
}

impl Stored {
    /// Blocks of results over `planes` planes at a time.
    pub fn new<T>(axes: &[Axis; 2], planes: usize) -> Stored {
        let [rows, columns] = [axes[0].results(), axes[1].results()];
        let width = split(columns, WIDEST);
        let wide = width.next_multiple_of(LANES) + axes[1].reach;
        // Rows begin with cache lines, and not all of them at the same place of the cache.
        let pitch = axes[1].stored(wide).next_multiple_of(LANES);
        let pitch = if (pitch / LANES).is_multiple_of(2) { pitch + LANES } else { pitch };
        let each = axes[0].stored(1).saturating_mul(pitch).saturating_mul(planes * size_of::<T>());
        let most = (BLOCK / each.max(1)).saturating_sub(axes[0].reach);
        let height = split(rows, most.max(LOWEST));
        let tall = height + axes[0].reach;
        let plane = axes[0].stored(tall).saturating_mul(pitch);
        Stored { size: [height, width], extent: [tall, wide], pitch, plane }
    }

    /// Elements of a row of results, with room for whole vectors.
    pub fn lane(&self) -> usize {
        self.size[1].next_multiple_of(LANES)
    }

    /// How many blocks there are of so many results.
    pub fn blocks(&self, axes: &[Axis; 2]) -> [usize; 2] {
        [0, 1].map(|d| axes[d].results().div_ceil(self.size[d].max(1)))
    }
}

/// Copies what blocks need of planes. What is no copy is zero, and stays so as long as blocks begin with the same result.
pub(super) struct Copier<T> {
    pub room: *mut T,
    planes: usize,
    first: Option<[usize; 2]>,
    runs: [SmallVec<[Run; 4]>; 2],
    copy: unsafe fn(&Copied<'_, T>),
}

impl<T: Direct> Copier<T> {
    /// With room for so many planes.
    pub fn new(room: *mut T, planes: usize) -> Copier<T> {
        Copier { room, planes, first: None, runs: Default::default(), copy: T::loops().wide.copy }
    }

    /// Copies the block from result `first` on of planes in rows of `size`, which follow each other.
    ///
    /// # Safety
    /// The planes are there, and the room for them as stored.
    pub unsafe fn copy(
        &mut self,
        axes: &[Axis; 2],
        stored: &Stored,
        from: *const T,
        size: [usize; 2],
        first: [usize; 2],
    ) {
        if self.first != Some(first) {
            // SAFETY: the room.
            unsafe { std::slice::from_raw_parts_mut(self.room, self.planes * stored.plane).fill(T::ZERO) };
            self.first = Some(first);
            self.runs = [0, 1].map(|d| axes[d].runs(first[d], stored.extent[d]).collect());
            let width = self.runs[1].iter().map(|run| run.count).max();
            self.copy = T::loops().vectors(width.unwrap_or(0)).copy;
        }
        let [rows, columns] = &self.runs;
        for plane in 0..self.planes {
            let from = from.wrapping_add(plane * size[0] * size[1]);
            let to = self.room.wrapping_add(plane * stored.plane);
            let pitches = [size[1], stored.pitch];
            let plane = Copied { from, to, pitches, rows, columns };
            // SAFETY: a plane of the source, and its place.
            unsafe { (self.copy)(&plane) };
        }
    }

    /// What follows the copied part of planes `from` in memory, which is likely to be copied next, to be asked for in so
    /// many times.
    pub fn following(&self, from: *const T, size: [usize; 2], times: usize) -> Asked<T> {
        let rows = || self.runs[0].iter().filter(|run| run.count > 0);
        let end = rows().map(|run| run.from + (run.count - 1) * run.step + 1).max().unwrap_or(0);
        let begin = rows().map(|run| run.from).min().unwrap_or(0);
        let next = from.wrapping_add(((self.planes - 1) * size[0] + end) * size[1]);
        Asked::new(next, self.planes * (end - begin) * size[1], times)
    }
}

/// Memory that is asked for a little at a time, while something else is computed.
pub(super) struct Asked<T> {
    next: *const T,
    /// Lines of the cache: in all, at a time.
    left: usize,
    each: usize,
}

impl<T> Asked<T> {
    /// Elements behind what was copied last, as many as those, in so many times.
    fn new(next: *const T, elements: usize, times: usize) -> Asked<T> {
        let left = (elements * size_of::<T>()).div_ceil(LINE);
        Asked { next, left, each: left.div_ceil(times.max(1)) }
    }

    /// Asks for a part of it.
    #[inline(always)]
    pub fn go_on(&mut self) {
        for _ in 0..self.each.min(self.left) {
            prefetch(self.next);
            self.next = self.next.wrapping_byte_add(LINE);
        }
        self.left -= self.each.min(self.left);
    }
}

/// The size of even parts of `count`, each at most `most`.
fn split(count: usize, most: usize) -> usize {
    count.div_ceil(count.div_ceil(most).max(1))
}
