//! Recurrent layers over whole sequences, and their slopes: see the rows in `kiln_ir::table::recurrent`.
//!
//! The recurrent weight is packed once. A step is a product of packed panels with the states before it, and loops over
//! the results while they are in the first-level cache: panels of all gates of a block of units lie side by side, so
//! that a thread that computes a block has all it needs. Threads share either the blocks of every step, and meet after
//! it, or the rows, and never meet: no bit depends on it.

mod backward;
mod cells;
mod forward;

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use kiln_ir::table::recurrent::Sequence;
use kiln_runtime::contract::{Lattice, Panels};
use kiln_runtime::{AllocError, Buffer, machine, parallel_for, threads};

pub use backward::{Gradient, backward};
pub use cells::Number;
pub use forward::{Layer, forward};

/// Multiply-adds of a step up to which threads that meet after it cost more than they bring.
const STEP: usize = 1 << 17;
/// Multiply-adds that are worth a thread's while.
const TASK: usize = 1 << 16;
/// Rows that a register tile takes at once.
const TILE: usize = 8;

/// `count` elements from `pointer + at` on.
///
/// # Safety
/// They are valid to read, and not written while the slice lives.
#[inline(always)]
unsafe fn part<'a, T>(pointer: *const T, at: usize, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { from_raw_parts(pointer.add(at), count) },
    }
}

/// # Safety
/// They are valid and nobody else's while the slice lives.
#[inline(always)]
unsafe fn part_mut<'a, T>(pointer: *mut T, at: usize, count: usize) -> &'a mut [T] {
    match count {
        0 => &mut [],
        // SAFETY: the caller's promise.
        _ => unsafe { from_raw_parts_mut(pointer.add(at), count) },
    }
}

/// Memory for so many elements, all zero.
fn zeros<T: Number>(count: usize) -> Result<Buffer, AllocError> {
    let memory = Buffer::alloc((count * size_of::<T>()).max(1))?;
    // SAFETY: fresh memory with room for them.
    unsafe { part_mut(memory.as_ptr().cast::<T>(), 0, count) }.fill(T::ZERO);
    Ok(memory)
}

/// Where consecutive elements or rows begin.
fn offsets(count: usize, pitch: usize) -> Vec<isize> {
    (0..count).map(|i| (i * pitch) as isize).collect()
}

/// Units cut into blocks as wide as a panel.
#[derive(Copy, Clone)]
struct Blocks {
    units: usize,
    width: usize,
}

impl Blocks {
    fn of<T: Number>(units: usize) -> Blocks {
        Blocks { units, width: Panels::<T>::width(units) }
    }

    fn count(&self) -> usize {
        self.units.div_ceil(self.width)
    }

    /// The first unit of a block, and how many it has.
    fn of_block(&self, block: usize) -> (usize, usize) {
        let first = block * self.width;
        (first, self.width.min(self.units - first))
    }

    /// The columns of panels in which the units of `gates` gates lie block by block, given the place of a gate's unit;
    /// what fills a block up is its last unit again.
    fn columns(&self, gates: usize, place: impl Fn(usize, usize) -> usize) -> Vec<isize> {
        let mut columns = Vec::with_capacity(self.count() * gates * self.width);
        for block in 0..self.count() {
            for gate in 0..gates {
                for unit in block * self.width..(block + 1) * self.width {
                    columns.push(place(gate, unit.min(self.units - 1)) as isize);
                }
            }
        }
        columns
    }
}

/// Whether a row has a step.
///
/// # Safety
/// There are lengths for all rows.
#[inline(always)]
unsafe fn has_step(lengths: Option<*const i64>, row: usize, step: usize) -> bool {
    // SAFETY: the caller's promise.
    lengths.is_none_or(|lengths| unsafe { *lengths.add(row) } > step as i64)
}

/// A part of every step, and how many blocks it has. All blocks of a part are done for a row before any of the next.
struct Part<'a> {
    blocks: usize,
    run: &'a (dyn Fn(usize, Range<usize>, Range<usize>) + Sync),
}

/// Runs turns `0..turns`, the parts of each in order, for all rows and blocks; `work` are the multiply-adds of a turn
/// and `bytes` what it reads for however few rows.
fn run(s: &Sequence, turns: usize, work: usize, bytes: usize, parts: &[Part<'_>]) {
    let rows_of_a_thread = s.rows.div_ceil(threads::count());
    let alone = work < STEP;
    // Every thread then reads the whole weight.
    let fits = bytes <= machine().l2 / 2 && rows_of_a_thread >= TILE;
    if alone || fits {
        let grain = (TASK * s.rows).div_ceil((work * turns).max(1)).max(1);
        let grain = if rows_of_a_thread >= TILE { grain.next_multiple_of(TILE) } else { grain };
        return parallel_for(s.rows, grain.max(rows_of_a_thread), |begin, end| {
            for turn in 0..turns {
                parts.iter().for_each(|part| (part.run)(turn, begin..end, 0..part.blocks));
            }
        });
    }
    for turn in 0..turns {
        for part in parts {
            parallel_for(part.blocks, 1, |begin, end| (part.run)(turn, 0..s.rows, begin..end));
        }
    }
}

/// Some rows of a matrix whose rows lie so, and its columns.
fn rows_of<'a, T>(base: *const T, rows: &'a [isize], columns: &'a [isize]) -> Lattice<'a, T> {
    Lattice { base: base.cast_mut(), rows, columns }
}
