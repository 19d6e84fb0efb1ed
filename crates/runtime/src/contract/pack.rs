//! Packing the smaller operand into panels as wide as a register tile.

use super::tile::Real;
use super::{Lattice, STRETCH};
use crate::lanes::Lanes;
use crate::threads::{GRAIN, Shared, parallel_for};

/// Packs a matrix into panels of `width` columns, each row of a panel contiguous, the last panel filled up
/// with zeros.
///
/// # Safety
/// The elements are valid, and `panels` has room for all of them.
pub(super) unsafe fn pack<T: Real>(rhs: Lattice<'_, T>, panels: *mut T, width: usize) {
    let depth = rhs.rows.len();
    let count = rhs.columns.len().div_ceil(width);
    let chunks = depth.div_ceil(STRETCH);
    let shared = Shared((rhs, panels));
    let grain = GRAIN.div_ceil(STRETCH * width);
    parallel_for(count * chunks, grain, |begin, end| {
        let (rhs, panels) = shared.get();
        for item in begin..end {
            let (panel, from) = (item / chunks, item % chunks * STRETCH);
            let columns = &rhs.columns[panel * width..((panel + 1) * width).min(rhs.columns.len())];
            let rows = &rhs.rows[from..(from + STRETCH).min(depth)];
            // SAFETY: this stretch of this panel, which no other item writes.
            unsafe {
                let to = panels.add((panel * depth + from) * width);
                match runs(columns) {
                    Some((runs, count)) => T::pack_runs(rhs.base, rows, &runs[..count], to, width),
                    None => pack_turned(rhs.base, rows, columns, to, width),
                }
            }
        }
    });
}

/// Runs of a panel up to which they are copied one by one.
const MOST_RUNS: usize = 8;

/// Consecutive columns.
#[derive(Copy, Clone, Default, Debug)]
pub struct Run {
    /// Place in the panel.
    at: usize,
    /// Offset of the first.
    column: isize,
    length: usize,
}

/// The columns as few runs, if they lie so, and how many of them.
fn runs(columns: &[isize]) -> Option<([Run; MOST_RUNS], usize)> {
    let (mut runs, mut count) = ([Run::default(); MOST_RUNS], 0);
    for (at, &column) in columns.iter().enumerate() {
        match runs[..count].last_mut() {
            Some(run) if column == run.column + run.length as isize => run.length += 1,
            _ if count == MOST_RUNS => return None,
            _ => {
                runs[count] = Run { at, column, length: 1 };
                count += 1;
            }
        }
    }
    Some((runs, count))
}

/// Every row copied run by run.
///
/// # Safety
/// That of [`pack`]; the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn pack_runs<V: Lanes>(
    base: *const V::Element,
    rows: &[isize],
    runs: &[Run],
    to: *mut V::Element,
    width: usize,
) {
    let end = runs.last().map_or(0, |run| run.at + run.length);
    for (p, &row) in rows.iter().enumerate() {
        // SAFETY: a row of the panel; the caller's promise.
        unsafe {
            let line = to.add(p * width);
            for run in runs {
                let from = base.offset(row + run.column);
                let mut i = 0;
                while i + V::LANES <= run.length {
                    V::load(from.add(i)).store(line.add(run.at + i));
                    i += V::LANES;
                }
                if i < run.length {
                    V::load_part(from.add(i), run.length - i)
                        .store_part(line.add(run.at + i), run.length - i);
                }
            }
            let mut at = end;
            while at < width {
                let count = (width - at).min(V::LANES);
                V::splat(V::Element::default()).store_part(line.add(at), count);
                at += count;
            }
        }
    }
}

/// Columns that lie apart: where rows are consecutive the columns are turned round, else every element is
/// fetched by itself.
///
/// # Safety
/// That of [`pack`].
unsafe fn pack_turned<T: Real>(base: *const T, rows: &[isize], columns: &[isize], to: *mut T, width: usize) {
    let filled = columns.len();
    let step = if filled > 1 { columns[1] - columns[0] } else { 0 };
    let is_even = step > 0 && columns.windows(2).all(|pair| pair[1] - pair[0] == step);
    let mut p = 0;
    while p < rows.len() {
        let length = 1 + rows[p..].windows(2).take_while(|pair| pair[1] == pair[0] + 1).count();
        // SAFETY: rows of the panel; the caller's promise.
        unsafe {
            let to = to.add(p * width);
            if is_even && length > 1 {
                let from = base.offset(rows[p] + columns[0]);
                T::turn(from, step as usize, to, width, [length, filled]);
            } else {
                for i in 0..length {
                    let from = base.offset(rows[p] + i as isize);
                    let line = std::slice::from_raw_parts_mut(to.add(i * width), filled);
                    for (place, &column) in line.iter_mut().zip(columns) {
                        *place = *from.offset(column);
                    }
                }
            }
            for i in 0..if filled < width { length } else { 0 } {
                std::slice::from_raw_parts_mut(to.add(i * width + filled), width - filled).fill(T::ZERO);
            }
        }
        p += length;
    }
}
