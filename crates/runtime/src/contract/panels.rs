//! A matrix packed once, for many products with a few rows each.

use std::ops::Range;

use super::pack::pack;
use super::tile::{Real, Tile};
use super::{Lattice, multiply};
use crate::pool::{AllocError, Buffer};

/// Panels of a matrix, each of so many columns that lie side by side row by row.
#[derive(Debug)]
pub struct Panels<T> {
    memory: Buffer,
    tile: Tile<T>,
    count: usize,
}

impl<T: Real> Panels<T> {
    /// Columns of a panel for a matrix of so many columns, or for parts of a matrix that have so many.
    pub fn width(columns: usize) -> usize {
        T::tile(columns).width
    }

    /// Packs a matrix into panels of [`Panels::width`] of `columns`.
    ///
    /// # Safety
    /// The elements of the matrix are readable.
    pub unsafe fn pack(matrix: Lattice<'_, T>, columns: usize) -> Result<Panels<T>, AllocError> {
        let tile = T::tile(columns);
        let count = matrix.columns.len().div_ceil(tile.width);
        let memory = Buffer::alloc((count * tile.width * matrix.rows.len() * size_of::<T>()).max(1))?;
        // SAFETY: the caller's promise; there is room for every panel.
        unsafe { pack(matrix, memory.as_ptr().cast(), tile.width) };
        Ok(Panels { memory, tile, count })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// `result = lhs · panels`, on the calling thread. The rows of the result lie `pitch` elements apart. A sum's order
    /// does not depend on what is computed beside it.
    ///
    /// # Safety
    /// `lhs` has as many columns as the matrix has rows, and its elements are readable; `result` has room for its rows
    /// of as many elements as these panels have columns.
    pub unsafe fn multiply(&self, lhs: Lattice<'_, T>, panels: Range<usize>, result: *mut T, pitch: usize) {
        debug_assert!(panels.end <= self.count);
        // SAFETY: the caller's promise; the panels were packed for this tile.
        unsafe { multiply(lhs, self.memory.as_ptr().cast(), panels, self.tile, result, pitch) }
    }
}

// SAFETY: the memory is this value's own and is not written after it was made.
unsafe impl<T: Real> Sync for Panels<T> {}
