//! Products of matrices whose elements lie anywhere a row offset and a column offset add up to.
//!
//! A convolution is such a product: the pixel under a tap lies at *offset of the output pixel* + *offset of
//! the tap* in the padded image, so no matrix of columns is ever written. The smaller operand is packed into
//! panels as wide as a register tile, the other is read where it lies.
//!
//! ```text
//! for each block of rows and group of panels (on one thread)
//!   for each stretch of the inner dim               the panel's stretch stays in the first-level cache
//!     for each panel, for each tile of rows         accumulators in registers
//! ```

mod pack;
mod panels;
mod tile;

use std::ops::Range;

use parking_lot::Mutex;

use crate::cpu::machine;
use crate::pool::{AllocError, Buffer};
use crate::scratch;
use crate::threads::{self, Shared, parallel_for};
use pack::pack;

pub use pack::Run;
pub use panels::Panels;
pub use tile::{Real, Stripe, Tile};

/// A matrix in memory: element `(i, j)` is at `base + rows[i] + columns[j]`, counted in elements.
#[derive(Debug, Clone, Copy)]
pub struct Lattice<'a, T> {
    /// What offsets count from.
    pub base: *mut T,
    /// Offsets of the rows.
    pub rows: &'a [isize],
    /// Offsets of the columns.
    pub columns: &'a [isize],
}

impl<T> Lattice<'_, T> {
    fn transposed(self) -> Self {
        Lattice { base: self.base, rows: self.columns, columns: self.rows }
    }
}

/// Steps of the inner dim between two visits of the result: fixed, since no bit depends on the machine's caches. A
/// panel's stretch is 32 KiB.
const STRETCH: usize = 256;
/// Panels of a group: so often a block's rows are read again while they are in the second-level cache.
const GROUP: usize = 4;
/// What packing an element costs, in multiply-adds.
const PACKING: usize = 64;
/// Items for each thread, so that a slower core gets fewer.
const BALANCE: usize = 4;

/// One product with its packed operand.
#[derive(Clone, Copy)]
struct Task<'a, T> {
    dst: Lattice<'a, T>,
    lhs: Lattice<'a, T>,
    panels: *const T,
    tile: Tile<T>,
}

/// What is told that these rows and columns of a result are finished, on the thread that computed them.
pub type OnTile<'a> = &'a (dyn Fn(Range<usize>, Range<usize>) + Sync);

/// `dst = lhs · rhs`. Every element is told of once to `then`.
///
/// # Safety
/// `lhs` has as many rows as `dst`, `rhs` as many columns, and `lhs` as many columns as `rhs` rows. All
/// elements are valid: those of `dst` to write, of the others to read. No two elements of `dst` share
/// memory, and none with an operand.
pub unsafe fn contract<T: Real>(
    dst: Lattice<'_, T>,
    lhs: Lattice<'_, T>,
    rhs: Lattice<'_, T>,
    then: Option<OnTile<'_>>,
) -> Result<(), AllocError> {
    // SAFETY: the caller's promise is passed on.
    unsafe { contract_in(machine().l2, dst, lhs, rhs, then) }
}

/// The same for a second-level cache of so many bytes.
///
/// # Safety
/// That of [`contract`].
unsafe fn contract_in<T: Real>(
    l2: usize,
    dst: Lattice<'_, T>,
    lhs: Lattice<'_, T>,
    rhs: Lattice<'_, T>,
    then: Option<OnTile<'_>>,
) -> Result<(), AllocError> {
    debug_assert_eq!((dst.rows.len(), dst.columns.len()), (lhs.rows.len(), rhs.columns.len()));
    debug_assert_eq!(lhs.columns.len(), rhs.rows.len());
    if dst.rows.is_empty() || dst.columns.is_empty() {
        return Ok(());
    }
    // What a product costs: all its tiles, full or not, and the packing. A narrow result would waste most of
    // a panel, so then the longer side may be packed.
    let cost = |rows: usize, columns: usize| {
        rows.div_ceil(2) * 2 * columns.next_multiple_of(T::tile(columns).width) + PACKING * columns
    };
    let (m, n) = (dst.rows.len(), dst.columns.len());
    let is_turned = cost(n, m) < cost(m, n);
    let (dst, lhs, rhs) =
        if is_turned { (dst.transposed(), rhs.transposed(), lhs.transposed()) } else { (dst, lhs, rhs) };
    let tile = T::tile(dst.columns.len());
    // As many columns at a time as stay in the caches of a few cores until they are used.
    let most = (3 * l2 / (lhs.columns.len() * size_of::<T>()).max(1)).max(GROUP * tile.width);
    let chunk = most.next_multiple_of(GROUP * tile.width).min(dst.columns.len());
    let panels = chunk.div_ceil(tile.width);
    let packed = Buffer::alloc((panels * lhs.columns.len() * tile.width * size_of::<T>()).max(1))?;
    // Rows of a block: its part of the operand that is read in place is a quarter of the cache, of f32.
    let height = 1 << (l2 / (4 * STRETCH * size_of::<f32>())).max(1).ilog2();
    for (number, (columns, wide)) in dst.columns.chunks(chunk).zip(rhs.columns.chunks(chunk)).enumerate() {
        let (dst, rhs) = (Lattice { columns, ..dst }, Lattice { columns: wide, ..rhs });
        let first = number * chunk;
        let told = |rows: Range<usize>, columns: Range<usize>| {
            let columns = first + columns.start..first + columns.end;
            match then {
                Some(then) if is_turned => then(columns, rows),
                Some(then) => then(rows, columns),
                None => {}
            }
        };
        // SAFETY: a part of the product; the buffer has room for every panel.
        unsafe { contract_packed(dst, lhs, rhs, packed.as_ptr().cast(), (tile, height), &told)? };
    }
    Ok(())
}

/// # Safety
/// That of [`contract`]; `panels` has room for all of `rhs`.
unsafe fn contract_packed<T: Real>(
    dst: Lattice<'_, T>,
    lhs: Lattice<'_, T>,
    rhs: Lattice<'_, T>,
    panels: *mut T,
    (tile, height): (Tile<T>, usize),
    then: OnTile<'_>,
) -> Result<(), AllocError> {
    let count = dst.columns.len().div_ceil(tile.width);
    // SAFETY: the buffer has room for every panel, and the operand's elements are valid.
    unsafe { pack(rhs, panels, tile.width) };

    let (height, group) = blocks(height, dst.rows.len(), count, tile.rows);
    let (row_blocks, groups) = (dst.rows.len().div_ceil(height), count.div_ceil(group));
    let task = Shared(Task { dst, lhs, panels, tile });
    let failure = Mutex::new(None);
    parallel_for(row_blocks * groups, 1, |begin, end| {
        let task = task.get();
        let kept = scratch::with(height * group * tile.width * size_of::<T>(), |result| {
            for item in begin..end {
                let (i, first) = (item % row_blocks * height, item / row_blocks * group);
                let rows = i..(i + height).min(task.dst.rows.len());
                // SAFETY: the block lies inside the product, blocks are disjoint, and the scratch has room
                // for one.
                unsafe { block(&task, rows.clone(), first..(first + group).min(count), result.cast()) };
                then(rows, first * tile.width..((first + group) * tile.width).min(task.dst.columns.len()));
            }
        });
        if let Err(error) = kept {
            *failure.lock() = Some(error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Rows of a block and panels of a group: as large as the caches like, but enough of them for all threads.
fn blocks(mut height: usize, rows: usize, panels: usize, tile: usize) -> (usize, usize) {
    let wanted = if threads::count() == 1 { 1 } else { BALANCE * threads::count() };
    let mut group = GROUP.min(panels);
    while rows.div_ceil(height) * panels.div_ceil(group) < wanted && (height > 4 * tile || group > 1) {
        if group > 1 { group /= 2 } else { height /= 2 }
    }
    (height.min(rows.next_multiple_of(tile)), group)
}

/// Computes one block of the result in `result` and puts it where it belongs.
///
/// # Safety
/// That of [`contract`]; `result` has room for the block.
unsafe fn block<T: Real>(task: &Task<'_, T>, rows: Range<usize>, panels: Range<usize>, result: *mut T) {
    let Task { dst, lhs, panels: packed, tile } = *task;
    let pitch = panels.len() * tile.width;
    let lhs = Lattice { rows: &lhs.rows[rows.clone()], ..lhs };
    // SAFETY: rows of the operand, and the scratch has room for the block.
    unsafe { multiply(lhs, packed, panels.clone(), tile, result, pitch) };
    let rows = &dst.rows[rows];
    let first = panels.start * tile.width;
    let columns = &dst.columns[first..(panels.end * tile.width).min(dst.columns.len())];
    // SAFETY: the elements of the block.
    unsafe { put(Lattice { base: dst.base, rows, columns }, result, pitch) };
}

/// Rows times packed panels, to a result whose rows lie `pitch` apart.
///
/// # Safety
/// The elements of `lhs` are valid, the panels are as deep as it has columns, and `result` has room for its rows of as
/// many elements as the panels have columns.
#[inline]
unsafe fn multiply<T: Real>(
    lhs: Lattice<'_, T>,
    packed: *const T,
    panels: Range<usize>,
    tile: Tile<T>,
    result: *mut T,
    pitch: usize,
) {
    let depth = lhs.columns.len();
    if depth == 0 {
        for row in 0..lhs.rows.len() {
            // SAFETY: a row of the result.
            unsafe {
                std::slice::from_raw_parts_mut(result.add(row * pitch), panels.len() * tile.width)
                    .fill(T::ZERO);
            }
        }
    }
    for from in (0..depth).step_by(STRETCH) {
        let inner = &lhs.columns[from..(from + STRETCH).min(depth)];
        for (at, panel) in panels.clone().enumerate() {
            let stripe = Stripe {
                base: lhs.base,
                rows: lhs.rows,
                inner,
                panel: packed.wrapping_add((panel * depth + from) * tile.width),
                result: result.wrapping_add(at * tile.width),
                pitch,
                accumulate: from > 0,
                ahead: at == 0,
            };
            // SAFETY: rows and inner offsets of the operand, a packed stretch, and a part of the result.
            unsafe { (tile.run)(&stripe) };
        }
    }
}

/// Puts a block of results, whose rows lie `pitch` apart, where it belongs.
///
/// # Safety
/// The elements of `dst` are valid and in nobody else's hands, and `result` holds all of them.
unsafe fn put<T: Real>(dst: Lattice<'_, T>, result: *const T, pitch: usize) {
    let Lattice { base, rows, columns } = dst;
    let at = |i: usize, j: usize| result.wrapping_add(i * pitch + j);
    if is_run(columns) && columns.len() > 1 {
        for (i, &row) in rows.iter().enumerate() {
            // SAFETY: a row of the block.
            unsafe { std::ptr::copy_nonoverlapping(at(i, 0), base.offset(row + columns[0]), columns.len()) };
        }
        return;
    }
    // Rows side by side, as pixels of a channel are: turned round, run by run.
    let step = if columns.len() > 1 { columns[1] - columns[0] } else { 0 };
    let is_even = step > 0 && columns.windows(2).all(|pair| pair[1] - pair[0] == step);
    let mut i = 0;
    while i < rows.len() {
        let length = 1 + rows[i..].windows(2).take_while(|pair| pair[1] == pair[0] + 1).count();
        if is_even && length > 1 {
            let to = base.wrapping_offset(rows[i] + columns[0]);
            // SAFETY: a run of the block's rows; columns lie `step` apart.
            unsafe { T::turn(at(i, 0), pitch, to, step as usize, [columns.len(), length]) };
        } else {
            for (r, &row) in rows[i..i + length].iter().enumerate() {
                for (j, &column) in columns.iter().enumerate() {
                    // SAFETY: an element of the block.
                    unsafe { *base.offset(row + column) = *at(i + r, j) };
                }
            }
        }
        i += length;
    }
}

/// Whether offsets are consecutive.
fn is_run(offsets: &[isize]) -> bool {
    offsets.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bit_depends_on_the_cache() {
        for (m, n, k) in [(300, 290, 600), (70, 1100, 300), (513, 40, 257)] {
            let dense = |rows: usize, columns: usize| -> [Vec<isize>; 2] {
                [(0..rows).map(|i| (i * columns) as isize).collect(), (0..columns as isize).collect()]
            };
            let random = |count: usize| -> Vec<f32> {
                (0..count as u64).map(|i| crate::random::philox(i, count as u64)[0] as f32 - 2e9).collect()
            };
            let [of_lhs, of_rhs, of_dst] = [dense(m, k), dense(k, n), dense(m, n)];
            let (mut lhs, mut rhs) = (random(m * k), random(k * n));
            let mut bits = |l2: usize| -> Vec<u32> {
                let mut dst = vec![f32::NAN; m * n];
                let dst_at = Lattice { base: dst.as_mut_ptr(), rows: &of_dst[0], columns: &of_dst[1] };
                let lhs = Lattice { base: lhs.as_mut_ptr(), rows: &of_lhs[0], columns: &of_lhs[1] };
                let rhs = Lattice { base: rhs.as_mut_ptr(), rows: &of_rhs[0], columns: &of_rhs[1] };
                // SAFETY: dense matrices of these sizes.
                unsafe { contract_in(l2, dst_at, lhs, rhs, None) }.unwrap();
                dst.iter().map(|x| x.to_bits()).collect()
            };
            let usual = bits(1 << 20);
            assert!([4 << 10, 60 << 10, 256 << 10, 9 << 20].into_iter().all(|l2| bits(l2) == usual));
        }
    }

    /// Any placement of rows and columns, small and large sizes, both orientations.
    #[test]
    fn products_of_scattered_matrices() {
        let mut words = 0u64;
        let mut next = move || {
            words += 1;
            crate::random::philox(words, 9)[0] as usize
        };
        for (m, n, k) in [(1, 1, 1), (3, 5, 0), (37, 70, 19), (300, 33, 600), (65, 290, 300), (8, 32, 256)] {
            let mut table = |len: usize, step: usize, jitter: usize| -> Vec<isize> {
                (0..len)
                    .map(|i| (i * step + if jitter == 0 { 0 } else { next() % jitter }) as isize)
                    .collect()
            };
            let (lhs_rows, lhs_columns) = (table(m, 2 * k + 3, 3), table(k, 2, 1));
            let (rhs_rows, rhs_columns) = (table(k, n + 2, 2), table(n, 1, 0));
            let (dst_rows, dst_columns) = (table(m, 1, 0), table(n, m + 1, 1));
            let mut lhs: Vec<f64> =
                (0..m * (2 * k + 3) + 2 * k + 9).map(|_| (next() % 17) as f64 - 8.0).collect();
            let mut rhs: Vec<f64> = (0..(k + 1) * (n + 2) + n).map(|_| (next() % 13) as f64 - 6.0).collect();
            let mut dst = vec![f64::NAN; (n + 1) * (m + 1)];
            // SAFETY: the vectors hold everything the tables reach, and results lie apart.
            unsafe {
                contract(
                    Lattice { base: dst.as_mut_ptr(), rows: &dst_rows, columns: &dst_columns },
                    Lattice { base: lhs.as_mut_ptr(), rows: &lhs_rows, columns: &lhs_columns },
                    Lattice { base: rhs.as_mut_ptr(), rows: &rhs_rows, columns: &rhs_columns },
                    None,
                )
                .unwrap();
            }
            for i in 0..m {
                for j in 0..n {
                    let exact: f64 = (0..k)
                        .map(|p| {
                            lhs[(lhs_rows[i] + lhs_columns[p]) as usize]
                                * rhs[(rhs_rows[p] + rhs_columns[j]) as usize]
                        })
                        .sum();
                    assert_eq!(dst[(dst_rows[i] + dst_columns[j]) as usize], exact, "{m} {n} {k} at {i} {j}");
                }
            }
        }
    }
}
