//! Loops over vectors that are one pixel of several channels, for each instruction set.

use crate::lanes::Sums;

/// The most results of a tile.
pub(super) const RESULTS: usize = 14;
/// The most taps whose sums are made together.
pub(super) const SUMS: usize = 9;
/// The most lanes of a vector.
const LANES: usize = 16;

/// Planes that follow each other, and the pixels that are made of them: a vector at each of the places.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a, T> {
    pub planes: *mut T,
    /// Their number, at most the lanes of a vector.
    pub count: usize,
    pub pixels: *mut T,
    /// Where the planes' pixels are, one after the other.
    pub places: &'a [usize],
}

/// Results that meet the same taps: so many as the function is made for.
#[derive(Debug, Clone, Copy)]
pub struct Tile<'a, T> {
    pub source: *const T,
    pub weights: *const T,
    /// Of each tap: what the first result meets, its weights.
    pub taps: &'a [[usize; 2]],
    /// Of each result: how far what it meets is from what the first one meets, its place.
    pub results: &'a [[usize; 2]],
    pub out: *mut T,
}

/// Sums of products of what taps meet with the result's gradient: for so many taps as the function is made for.
#[derive(Debug, Clone, Copy)]
pub struct Products<'a, T> {
    pub source: *const T,
    pub grad: *const T,
    /// Of each tap: what the first result meets, its sum.
    pub taps: &'a [[usize; 2]],
    /// Of each result: how far what it meets is from what the first one meets, its gradient.
    pub results: &'a [[usize; 2]],
    /// What the products are added to.
    pub sums: *mut T,
}

/// The loops of an instruction set.
#[derive(Debug)]
pub struct Pixels<T: 'static> {
    pub lanes: usize,
    /// Planes to pixels, zeros in lanes that there are no planes for.
    pub read: unsafe fn(&Turn<'_, T>),
    /// Pixels to planes.
    pub write: unsafe fn(&Turn<'_, T>),
    /// By the number of results minus one.
    pub tiles: [unsafe fn(&Tile<'_, T>); RESULTS],
    /// By the number of taps minus one.
    pub products: [unsafe fn(&Products<'_, T>); SUMS],
}

/// As many vectors as have lanes, turned round: each step brings every element's index one bit further round.
///
/// # Safety
/// The instruction set of `V`.
#[inline(always)]
unsafe fn turned<V: Sums>(mut rows: [V; LANES]) -> [V; LANES] {
    let half = V::LANES / 2;
    for _ in 0..V::LANES.ilog2() {
        let before = rows;
        for i in 0..half {
            // SAFETY: the instruction set.
            (rows[2 * i], rows[2 * i + 1]) = unsafe { V::join(before[i], before[i + half]) };
        }
    }
    rows
}

/// # Safety
/// The instruction set of `V`; the planes, and a vector at each place.
#[inline(always)]
pub(super) unsafe fn read<V: Sums>(turn: &Turn<'_, V::Element>) {
    let Turn { planes, count, pixels, places } = *turn;
    for (at, some) in places.chunks(V::LANES).enumerate() {
        let from = planes.wrapping_add(at * V::LANES).cast_const();
        // SAFETY: the caller's elements.
        unsafe {
            let mut rows = [V::splat(V::Element::default()); LANES];
            for (i, row) in rows.iter_mut().enumerate().take(V::LANES) {
                if i < count {
                    let from = from.wrapping_add(i * places.len());
                    *row =
                        if some.len() == V::LANES { V::load(from) } else { V::load_part(from, some.len()) };
                }
            }
            let rows = turned(rows);
            if let Ok(some) = <&[usize; LANES]>::try_from(some) {
                (0..LANES.min(V::LANES)).for_each(|i| rows[i].store(pixels.wrapping_add(some[i])));
            } else {
                for (row, place) in rows.iter().zip(some) {
                    row.store(pixels.wrapping_add(*place));
                }
            }
        }
    }
}

/// # Safety
/// That of [`read`].
#[inline(always)]
pub(super) unsafe fn write<V: Sums>(turn: &Turn<'_, V::Element>) {
    let Turn { planes, count, pixels, places } = *turn;
    for (at, some) in places.chunks(V::LANES).enumerate() {
        let to = planes.wrapping_add(at * V::LANES);
        // SAFETY: the caller's elements.
        unsafe {
            let mut rows = [V::splat(V::Element::default()); LANES];
            for (row, place) in rows.iter_mut().zip(some) {
                *row = V::load(pixels.wrapping_add(*place));
            }
            let rows = turned(rows);
            for (i, row) in rows.into_iter().enumerate().take(V::LANES) {
                if i < count {
                    let to = to.wrapping_add(i * places.len());
                    if some.len() == V::LANES { row.store(to) } else { row.store_part(to, some.len()) }
                }
            }
        }
    }
}

/// # Safety
/// The instruction set of `V`; the elements are there, `N` results.
#[inline(always)]
pub(super) unsafe fn tile<V: Sums, const N: usize>(tile: &Tile<'_, V::Element>) {
    let from: [_; N] = std::array::from_fn(|i| tile.source.wrapping_add(tile.results[i][0]));
    // SAFETY: the caller's elements.
    unsafe {
        let mut sums = [V::splat(V::Element::default()); N];
        for &[source, weight] in tile.taps {
            let weight = V::load(tile.weights.add(weight));
            for i in 0..N {
                sums[i] = sums[i].add_product(V::load(from[i].wrapping_add(source)), weight);
            }
        }
        for (sum, [_, to]) in sums.into_iter().zip(tile.results) {
            sum.store(tile.out.add(*to));
        }
    }
}

/// # Safety
/// The instruction set of `V`; the elements are there, `N` taps.
#[inline(always)]
pub(super) unsafe fn products<V: Sums, const N: usize>(task: &Products<'_, V::Element>) {
    let taps: [usize; N] = std::array::from_fn(|i| task.taps[i][0]);
    // SAFETY: the caller's elements.
    unsafe {
        let mut sums = [V::splat(V::Element::default()); N];
        for &[source, grad] in task.results {
            let (from, grad) = (task.source.wrapping_add(source), V::load(task.grad.add(grad)));
            for i in 0..N {
                sums[i] = sums[i].add_product(V::load(from.wrapping_add(taps[i])), grad);
            }
        }
        for (sum, [_, to]) in sums.into_iter().zip(task.taps) {
            let to = task.sums.add(*to);
            V::load(to).plus(sum).store(to);
        }
    }
}

macro_rules! pixels {
    ($element:ty, $vector:ty $(, $feature:literal)?) => {{
        use $crate::convolution::direct::pixel;
        $(#[target_feature(enable = $feature)])?
        unsafe fn read(turn: &pixel::Turn<'_, $element>) {
            // SAFETY: the caller's promise is passed on; the set is there where its loops are used.
            unsafe { pixel::read::<$vector>(turn) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn write(turn: &pixel::Turn<'_, $element>) {
            // SAFETY: as above.
            unsafe { pixel::write::<$vector>(turn) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn tile<const N: usize>(tile: &pixel::Tile<'_, $element>) {
            // SAFETY: as above.
            unsafe { pixel::tile::<$vector, N>(tile) }
        }
        $(#[target_feature(enable = $feature)])?
        unsafe fn products<const N: usize>(task: &pixel::Products<'_, $element>) {
            // SAFETY: as above.
            unsafe { pixel::products::<$vector, N>(task) }
        }
        pixel::Pixels {
            lanes: <$vector as $crate::lanes::Lanes>::LANES,
            read,
            write,
            tiles: [
                tile::<1>, tile::<2>, tile::<3>, tile::<4>, tile::<5>, tile::<6>, tile::<7>, tile::<8>, tile::<9>, tile::<10>, tile::<11>, tile::<12>, tile::<13>, tile::<14>,
            ],
            products: [
                products::<1>, products::<2>, products::<3>, products::<4>, products::<5>, products::<6>,
                products::<7>, products::<8>, products::<9>,
            ],
        }
    }};
}
pub(super) use pixels;
