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

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};
use std::ops::Range;

use parking_lot::Mutex;

use crate::cpu::{Isa, prefetch};
use crate::gemm::Matrix;
use crate::lanes::{Lanes, Plain};
use crate::panel::Float;
use crate::pool::{AllocError, Buffer};
use crate::scratch;
use crate::threads::{self, Shared, parallel_for};

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

/// Steps of the inner dim between two visits of the result: a panel's stretch is 32 KiB.
const STRETCH: usize = 256;
/// Rows of a block: its part of the operand that is read in place stays in the second-level cache.
const BLOCK: usize = 256;
/// Panels of a group.
const GROUP: usize = 4;
/// What packing an element costs, in multiply-adds.
const PACKING: usize = 64;
/// Bytes of panels packed at a time: they stay in the second-level caches until they are used.
const MOST_PACKED: usize = 3 << 20;
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
pub type Then<'a> = &'a (dyn Fn(Range<usize>, Range<usize>) + Sync);

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
    then: Option<Then<'_>>,
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
    // As many columns at a time as fit a packed buffer of modest size.
    let most = (MOST_PACKED / (lhs.columns.len() * size_of::<T>()).max(1)).max(GROUP * tile.width);
    let chunk = most.next_multiple_of(GROUP * tile.width).min(dst.columns.len());
    let panels = chunk.div_ceil(tile.width);
    let packed = Buffer::alloc((panels * lhs.columns.len() * tile.width * size_of::<T>()).max(1))?;
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
        unsafe { contract_packed(dst, lhs, rhs, packed.as_ptr().cast(), tile, &told)? };
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
    tile: Tile<T>,
    then: Then<'_>,
) -> Result<(), AllocError> {
    let count = dst.columns.len().div_ceil(tile.width);
    // SAFETY: the buffer has room for every panel, and the operand's elements are valid.
    unsafe { pack(rhs, panels, tile.width) };

    let (height, group) = blocks(dst.rows.len(), count, tile.rows);
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
fn blocks(rows: usize, panels: usize, tile: usize) -> (usize, usize) {
    let wanted = if threads::count() == 1 { 1 } else { BALANCE * threads::count() };
    let (mut height, mut group) = (BLOCK, GROUP.min(panels));
    while rows.div_ceil(height) * panels.div_ceil(group) < wanted && (height > 4 * tile || group > 1) {
        if group > 1 { group /= 2 } else { height /= 2 }
    }
    (height.min(rows.next_multiple_of(tile)), group)
}

/// Packs a matrix into panels of `width` columns, each row of a panel contiguous, the last panel filled up
/// with zeros.
///
/// # Safety
/// The elements are valid, and `panels` has room for all of them.
unsafe fn pack<T: Real>(rhs: Lattice<'_, T>, panels: *mut T, width: usize) {
    let depth = rhs.rows.len();
    let count = rhs.columns.len().div_ceil(width);
    let chunks = depth.div_ceil(STRETCH);
    let shared = Shared((rhs, panels));
    let grain = (1usize << 14).div_ceil(STRETCH * width);
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
unsafe fn pack_runs<V: Lanes>(
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

/// Computes one block of the result in `result` and puts it where it belongs.
///
/// # Safety
/// That of [`contract`]; `result` has room for the block.
unsafe fn block<T: Real>(task: &Task<'_, T>, rows: Range<usize>, panels: Range<usize>, result: *mut T) {
    let Task { dst, lhs, tile, .. } = *task;
    let depth = lhs.columns.len();
    let pitch = panels.len() * tile.width;
    if depth == 0 {
        // SAFETY: the scratch has room for the block.
        unsafe { std::slice::from_raw_parts_mut(result, rows.len() * pitch).fill(T::ZERO) };
    }
    for from in (0..depth).step_by(STRETCH) {
        let inner = &lhs.columns[from..(from + STRETCH).min(depth)];
        for (at, panel) in panels.clone().enumerate() {
            let stripe = Stripe {
                base: lhs.base,
                rows: &lhs.rows[rows.clone()],
                inner,
                panel: task.panels.wrapping_add((panel * depth + from) * tile.width),
                result: result.wrapping_add(at * tile.width),
                pitch,
                accumulate: from > 0,
                ahead: at == 0,
            };
            // SAFETY: rows and inner offsets of the operand, a packed stretch, and a part of the scratch.
            unsafe { (tile.run)(&stripe) };
        }
    }
    let rows = &dst.rows[rows];
    let first = panels.start * tile.width;
    let columns = &dst.columns[first..(panels.end * tile.width).min(dst.columns.len())];
    // SAFETY: the elements of the block.
    unsafe { put(Lattice { base: dst.base, rows, columns }, result, pitch) };
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

/// Rows of the operand that is read in place, times a stretch of one panel.
#[derive(Debug)]
pub struct Stripe<'a, T> {
    base: *const T,
    rows: &'a [isize],
    inner: &'a [isize],
    panel: *const T,
    result: *mut T,
    /// Distance between rows of the result.
    pitch: usize,
    accumulate: bool,
    /// Whether rows come from memory: they are asked for while those before them are worked on.
    ahead: bool,
}

/// A register tile: its size, and the loop that fills it for all rows of a stripe.
#[derive(Debug, Clone, Copy)]
pub struct Tile<T> {
    rows: usize,
    width: usize,
    run: unsafe fn(&Stripe<'_, T>),
}

/// A float type with register tiles.
pub trait Real: Copy + Send + Sync + PartialOrd + std::ops::Add<Output = Self> + 'static {
    /// A zero.
    const ZERO: Self;
    /// The machine's tile for a result of so many columns: one as wide as it likes, or half of that.
    fn tile(columns: usize) -> Tile<Self>;
    /// Copies `columns` columns of `rows` elements that lie `from_pitch` apart to `rows` rows that lie `to_pitch`
    /// apart: element `(i, j)` is at `from + j · from_pitch + i`, then at `to + i · to_pitch + j`.
    ///
    /// # Safety
    /// All elements are valid, those of `from` to read, those of `to` to write.
    unsafe fn turn(from: *const Self, from_pitch: usize, to: *mut Self, to_pitch: usize, size: [usize; 2]);
    /// Copies runs of columns into the rows of a panel, zeros behind them.
    ///
    /// # Safety
    /// The elements `base + row + column` are readable, and `to` has room for rows of `width`.
    unsafe fn pack_runs(base: *const Self, rows: &[isize], runs: &[Run], to: *mut Self, width: usize);
    /// `a · b + c`, rounded once if `FUSED`.
    fn multiply_add<const FUSED: bool>(a: Self, b: Self, c: Self) -> Self;
}

/// # Safety
/// That of [`block`]: all elements of the stripe are valid.
#[inline(always)]
unsafe fn stripe<T: Real, const R: usize, const W: usize, const FUSED: bool>(stripe: &Stripe<'_, T>) {
    let count = stripe.rows.len();
    let mut i = 0;
    // SAFETY: as many rows as are left.
    unsafe {
        while i + R <= count {
            tile::<T, R, W, FUSED>(stripe, i);
            i += R;
        }
        if i + 4 <= count {
            tile::<T, 4, W, FUSED>(stripe, i);
            i += 4;
        }
        if i + 2 <= count {
            tile::<T, 2, W, FUSED>(stripe, i);
            i += 2;
        }
        if i < count {
            tile::<T, 1, W, FUSED>(stripe, i);
        }
    }
}

/// Steps of the inner dim between two times that memory is asked for.
const LINE: usize = 16;

/// # Safety
/// That of [`stripe`]; it has rows `i..i + R`.
#[inline(always)]
unsafe fn tile<T: Real, const R: usize, const W: usize, const FUSED: bool>(stripe: &Stripe<'_, T>, i: usize) {
    let mut sums = [[T::ZERO; W]; R];
    let rows: [*const T; R] = std::array::from_fn(|r| stripe.base.wrapping_offset(stripe.rows[i + r]));
    let next = match stripe.rows.get(i + R) {
        Some(next) if stripe.ahead => next - stripe.rows[i],
        _ => 0,
    };
    for (chunk, inner) in stripe.inner.chunks(LINE).enumerate() {
        if next != 0 {
            rows.iter().for_each(|row| prefetch(row.wrapping_offset(next + inner[0])));
        }
        for (p, &inner) in inner.iter().enumerate() {
            // SAFETY: a row of the panel's stretch, and an element of each row.
            unsafe {
                let line = &*stripe.panel.add((chunk * LINE + p) * W).cast::<[T; W]>();
                for (sums, row) in sums.iter_mut().zip(rows) {
                    let factor = *row.offset(inner);
                    for (sum, &x) in sums.iter_mut().zip(line) {
                        *sum = T::multiply_add::<FUSED>(factor, x, *sum);
                    }
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: a row of the result, which is written before it is read.
        unsafe {
            let place = stripe.result.add((i + r) * stripe.pitch).cast::<[T; W]>();
            if stripe.accumulate {
                for (place, &sum) in (*place).iter_mut().zip(sums) {
                    *place = *place + sum;
                }
            } else {
                *place = *sums;
            }
        }
    }
}

macro_rules! real {
    ($ty:ty, [$avx512_lanes:ty, $avx2_lanes:ty, $plain_lanes:ty], $avx512:literal / $avx512_half:literal, $avx2:literal / $avx2_half:literal, $plain:literal) => {
        impl Real for $ty {
            const ZERO: $ty = 0.0;

            fn tile(columns: usize) -> Tile<$ty> {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512vl,fma")]
                    unsafe fn avx512<const W: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$ty, 8, W, true>(task) }
                    }
                    #[target_feature(enable = "avx2,fma")]
                    unsafe fn avx2<const W: usize>(task: &Stripe<'_, $ty>) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { stripe::<$ty, 4, W, true>(task) }
                    }
                    // `best` never names more than the machine has.
                    match Isa::best() {
                        Isa::Avx512 if columns <= $avx512_half => {
                            return Tile { rows: 8, width: $avx512_half, run: avx512::<$avx512_half> };
                        }
                        Isa::Avx512 => return Tile { rows: 8, width: $avx512, run: avx512::<$avx512> },
                        Isa::Avx2 if columns <= $avx2_half => {
                            return Tile { rows: 4, width: $avx2_half, run: avx2::<$avx2_half> };
                        }
                        Isa::Avx2 => return Tile { rows: 4, width: $avx2, run: avx2::<$avx2> },
                        Isa::Plain => {}
                    }
                }
                let _ = columns;
                Tile { rows: 4, width: $plain, run: stripe::<$ty, 4, $plain, false> }
            }

            unsafe fn turn(
                from: *const $ty,
                from_pitch: usize,
                to: *mut $ty,
                to_pitch: usize,
                [rows, columns]: [usize; 2],
            ) {
                let from = Matrix::new(from.cast_mut(), 1, from_pitch as isize);
                // SAFETY: the caller's promise is passed on.
                unsafe { <$ty as Float>::straighten(from, to, to_pitch, rows, columns) }
            }

            unsafe fn pack_runs(base: *const $ty, rows: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx512f,avx512vl,bmi2")]
                    unsafe fn avx512(b: *const $ty, r: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { pack_runs::<$avx512_lanes>(b, r, runs, to, width) }
                    }
                    #[target_feature(enable = "avx2,bmi2")]
                    unsafe fn avx2(b: *const $ty, r: &[isize], runs: &[Run], to: *mut $ty, width: usize) {
                        // SAFETY: the caller's promise is passed on.
                        unsafe { pack_runs::<$avx2_lanes>(b, r, runs, to, width) }
                    }
                    match Isa::best() {
                        // SAFETY: `best` never names more than the machine has.
                        Isa::Avx512 => return unsafe { avx512(base, rows, runs, to, width) },
                        // SAFETY: as above.
                        Isa::Avx2 => return unsafe { avx2(base, rows, runs, to, width) },
                        Isa::Plain => {}
                    }
                }
                // SAFETY: the caller's promise is passed on.
                unsafe { pack_runs::<$plain_lanes>(base, rows, runs, to, width) }
            }

            #[inline(always)]
            fn multiply_add<const FUSED: bool>(a: $ty, b: $ty, c: $ty) -> $ty {
                if FUSED { a.mul_add(b, c) } else { a * b + c }
            }
        }
    };
}

real!(f32, [__m512, __m256, Plain<f32, 4>], 32 / 16, 16 / 8, 8);
real!(f64, [__m512d, __m256d, Plain<f64, 2>], 16 / 8, 8 / 4, 4);

#[cfg(test)]
mod tests {
    use super::*;

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
