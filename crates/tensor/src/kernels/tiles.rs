//! Inputs of a walk that are contiguous along another dim than the output, such as transposed ones: they are turned
//! tile by tile, so that each line of memory is read once.

use super::drive::{Block, Dim, MAX_INPUTS, OPERANDS, Walk};
use super::isa::vectorised;
use smallvec::SmallVec;
use std::mem::MaybeUninit;

/// Rows of a tile, along which such an input is contiguous: a line of f32.
pub(super) const TILE_ROWS: usize = 16;
/// Columns of a tile: its buffers stay in the first-level cache.
pub(super) const TILE_COLUMNS: usize = 128;

/// Moves the dim along which inputs are contiguous that are not so along the last beside it, and says which these are.
pub(super) fn turn(
    dims: &mut SmallVec<[Dim; 6]>,
    sizes: &[usize; OPERANDS],
    count: usize,
) -> [bool; OPERANDS] {
    let none = [false; OPERANDS];
    let Some((inner, outer)) = dims.split_last() else { return none };
    let dense = |dim: &Dim, o: usize| dim.strides[o] == sizes[o] as isize;
    let apart = |o: usize| inner.strides[o] != 0 && !dense(inner, o);
    let is_worth = |dim: &Dim| dim.size >= TILE_ROWS / 2 && inner.size >= TILE_ROWS / 2;
    let along = |dim: &Dim| (1..count).any(|o| apart(o) && dense(dim, o));
    let Some(row) = outer.iter().rposition(|dim| is_worth(dim) && along(dim)) else { return none };
    let turned = std::array::from_fn(|o| (1..count).contains(&o) && apart(o) && dense(&outer[row], o));
    let dim = dims.remove(row);
    dims.insert(dims.len() - 1, dim);
    turned
}

/// A tile of an input, its elements as they are in memory.
#[repr(align(64))]
struct Tile(#[allow(dead_code)] [MaybeUninit<u8>; TILE_ROWS * TILE_COLUMNS * 8]);

/// `to[r][c] = from[c][r]` for elements of `size` bytes: rows of `to` and columns of `from` are contiguous, the distances
/// between them are in bytes.
///
/// # Safety
/// `rows` elements of each column can be read and `columns` of each row be written; at most [`TILE_ROWS`] rows.
pub(super) unsafe fn transpose(
    to: (*mut u8, isize),
    from: (*const u8, isize),
    rows: usize,
    columns: usize,
    size: usize,
) {
    // SAFETY: passed on.
    unsafe {
        match size {
            1 => typed::<u8>(to, from, rows, columns),
            2 => typed::<u16>(to, from, rows, columns),
            4 => typed::<u32>(to, from, rows, columns),
            _ => typed::<u64>(to, from, rows, columns),
        }
    }
}

vectorised! {
    /// # Safety
    /// That of [`transpose`].
    fn typed [T: Copy] [T] (to: (*mut u8, isize), from: (*const u8, isize), rows: usize, columns: usize) {
        const GROUP: usize = 8;
        let whole = if rows == TILE_ROWS { columns / GROUP * GROUP } else { 0 };
        // SAFETY: the caller's promise.
        unsafe {
            for c in (0..whole).step_by(GROUP) {
                let group: [[T; TILE_ROWS]; GROUP] = std::array::from_fn(|i| {
                    from.0.offset((c + i) as isize * from.1).cast::<[T; TILE_ROWS]>().read_unaligned()
                });
                #[allow(clippy::needless_range_loop, reason = "of every column, element r")]
                for r in 0..TILE_ROWS {
                    let line: [T; GROUP] = std::array::from_fn(|i| group[i][r]);
                    let row = to.0.offset(r as isize * to.1).cast::<T>();
                    row.add(c).cast::<[T; GROUP]>().write_unaligned(line);
                }
            }
            for c in whole..columns {
                let column = from.0.offset(c as isize * from.1).cast::<T>();
                for r in 0..rows {
                    to.0.offset(r as isize * to.1).cast::<T>().add(c).write(column.add(r).read());
                }
            }
        }
    }
}

impl Walk {
    /// How many tiles there are: an input is turned in them.
    pub fn tiles(&self) -> usize {
        let [outer @ .., rows, inner] = &self.dims[..] else { return 0 };
        let blocks: usize = outer.iter().map(|dim| dim.size).product();
        blocks * rows.size.div_ceil(TILE_ROWS) * inner.size.div_ceil(TILE_COLUMNS)
    }

    /// The tiles `begin..end`: inputs that are contiguous along the tiles' columns are turned in a buffer, so that
    /// each line of memory is read once.
    ///
    /// # Safety
    /// The contract of [`drive`](super::drive::drive), for these tiles.
    pub unsafe fn tile_range(&self, base: [*mut u8; OPERANDS], begin: usize, end: usize) {
        let [outer @ .., rows, inner] = &self.dims[..] else { return };
        let mut blocks = [Block::NEW; OPERANDS + 1];
        let mut filled = [std::ptr::null_mut(); OPERANDS];
        let mut buffers = [const { Tile([MaybeUninit::uninit(); TILE_ROWS * TILE_COLUMNS * 8]) }; MAX_INPUTS];
        let mut strides = inner.strides;
        for o in (0..self.count).filter(|&o| self.turned[o]) {
            strides[o] = self.sizes[o] as isize;
        }
        let across = inner.size.div_ceil(TILE_COLUMNS);
        let down = rows.size.div_ceil(TILE_ROWS);
        for tile in begin..end {
            let (row, column) = (tile / across % down * TILE_ROWS, tile % across * TILE_COLUMNS);
            let mut rest = tile / across / down;
            let mut corner = base;
            let mut advance = |dim: &Dim, by: usize| {
                for (pointer, stride) in corner.iter_mut().zip(&dim.strides) {
                    *pointer = pointer.wrapping_offset(by as isize * stride);
                }
            };
            for dim in outer.iter().rev() {
                advance(dim, rest % dim.size);
                rest /= dim.size;
            }
            advance(rows, row);
            advance(inner, column);
            let (height, width) = (TILE_ROWS.min(rows.size - row), TILE_COLUMNS.min(inner.size - column));
            let mut steps = rows.strides;
            for o in (1..self.count).filter(|&o| self.turned[o]) {
                let buffer: *mut u8 = (&raw mut buffers[o - 1]).cast();
                steps[o] = (TILE_COLUMNS * self.sizes[o]) as isize;
                // SAFETY: the tile lies inside the operand, by the caller's contract.
                unsafe {
                    transpose(
                        (buffer, steps[o]),
                        (corner[o], inner.strides[o]),
                        height,
                        width,
                        self.sizes[o],
                    );
                }
                corner[o] = buffer;
            }
            for _ in 0..height {
                // SAFETY: a row of the tile; the buffers' rows are as long.
                unsafe { self.row(corner, &strides, width, &mut blocks, &mut filled) };
                for (pointer, step) in corner.iter_mut().zip(&steps) {
                    *pointer = pointer.wrapping_offset(*step);
                }
            }
        }
    }
}
