//! Matrix products over arbitrary strides: `dst = lhs · rhs`, or `dst += lhs · rhs`.
//!
//! The single-threaded kernels are in `panel.rs`; this file cuts a product into tiles for the
//! thread pool, and `straight.rs` brings the operands into the orientation those kernels like:
//!
//! - `dst` is contiguous along its rows, else the transposed product is computed: twice as fast.
//! - So are the operands. In the common `x · wᵀ` and `xᵀ · y` one of them is not: with few rows or columns of
//!   `w` the results are dot products, else `w` or `x` is transposed first, block by block, which costs less
//!   than the kernels' own packing of such a matrix.

mod batched;
mod integers;
mod straight;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::panel::Float;
use crate::threads::{self, Shared, parallel_for};
pub(crate) use batched::batched;
pub use batched::{batched_f32, batched_f64, batched_i64};
pub use integers::gemm_i64;
use straight::{straight_lhs, straight_rhs};

pub use straight::is_kept;
pub(crate) use straight::{straightened, turn, turned_once};

/// A strided matrix in memory: element `(i, j)` is at `pointer + i·row + j·column`, counted in elements.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<T> {
    /// Element (0, 0).
    pub pointer: *mut T,
    /// Distance between rows.
    pub row: isize,
    /// Distance between columns.
    pub column: isize,
}

impl<T> Matrix<T> {
    /// A matrix from its first element and strides.
    pub fn new(pointer: *mut T, row: isize, column: isize) -> Matrix<T> {
        Matrix { pointer, row, column }
    }

    pub(crate) fn transposed(self) -> Matrix<T> {
        Matrix { pointer: self.pointer, row: self.column, column: self.row }
    }

    /// The matrix that begins at `(i, j)`.
    #[inline(always)]
    pub(crate) fn at(self, i: usize, j: usize) -> Matrix<T> {
        let pointer = self.pointer.wrapping_offset(i as isize * self.row + j as isize * self.column);
        Matrix { pointer, ..self }
    }

    /// Contiguous along its columns only.
    pub(crate) fn is_turned(&self) -> bool {
        self.row == 1 && self.column != 1
    }
}

/// `m × n` results, each a sum of `k` products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of `lhs` and `dst`.
    pub m: usize,
    /// Columns of `rhs` and `dst`.
    pub n: usize,
    /// Columns of `lhs`, rows of `rhs`.
    pub k: usize,
}

/// One product: the operands every step passes on.
#[derive(Clone, Copy)]
pub(crate) struct Product<T> {
    pub(crate) shape: Shape,
    pub(crate) dst: Matrix<T>,
    pub(crate) accumulate: bool,
    pub(crate) lhs: Matrix<T>,
    pub(crate) rhs: Matrix<T>,
    /// A `rhs` that lies the wrong way, copied the right way round, if such a copy is kept.
    pub(crate) straight: Option<Matrix<T>>,
}

impl<T: Copy> Product<T> {
    /// The part that computes `shape` results from `(i, j)` on.
    fn part(&self, i: usize, j: usize, shape: Shape) -> Product<T> {
        let straight = self.straight.map(|straight| straight.at(0, j));
        let (lhs, rhs) = (self.lhs.at(i, 0), self.rhs.at(0, j));
        Product { shape, dst: self.dst.at(i, j), lhs, rhs, straight, ..*self }
    }

    fn transposed(&self) -> Product<T> {
        let Shape { m, n, k } = self.shape;
        let (lhs, rhs) = (self.rhs.transposed(), self.lhs.transposed());
        Product {
            shape: Shape { m: n, n: m, k },
            dst: self.dst.transposed(),
            lhs,
            rhs,
            straight: None,
            ..*self
        }
    }
}

/// What goes on with rows of a product that are finished.
#[derive(Clone, Copy)]
pub struct Then<'a> {
    /// Rows are handed on in multiples of so many, but for the last ones.
    pub rows: usize,
    /// Called with the first of the rows and the one after the last, on the thread that finished them.
    pub run: &'a (dyn Fn(usize, usize) + Sync),
}

impl std::fmt::Debug for Then<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Then").field("rows", &self.rows).finish_non_exhaustive()
    }
}

/// `dst = lhs · rhs` in f32, or `dst += lhs · rhs` with `accumulate`.
///
/// # Safety
/// All elements the shape and strides reach must be valid: `lhs` and `rhs` to read, `dst` to write (and
/// read with `accumulate`). No two elements of `dst` share memory, and none with an operand.
pub unsafe fn gemm_f32(shape: Shape, dst: Matrix<f32>, accumulate: bool, lhs: Matrix<f32>, rhs: Matrix<f32>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { gemm(Product { shape, dst, accumulate, lhs, rhs, straight: None }, None) };
}

/// `dst = lhs · rhs` in f64, or `dst += lhs · rhs` with `accumulate`.
///
/// # Safety
/// As for [`gemm_f32()`].
pub unsafe fn gemm_f64(shape: Shape, dst: Matrix<f64>, accumulate: bool, lhs: Matrix<f64>, rhs: Matrix<f64>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { gemm(Product { shape, dst, accumulate, lhs, rhs, straight: None }, None) };
}

/// Work below which a second thread costs more than it brings, in multiply-adds.
const TASK: usize = 1 << 16;
/// Work for each thread from which it is cut into several tiles, so that a slower core gets fewer.
const BALANCED: usize = 1 << 26;
const BALANCE: usize = 4;
/// Tiles are cut at multiples of the widest vector's elements.
const STEP: usize = 16;
/// What reading a turned operand costs, against one that lies right.
const TURNED_COST: usize = 4;
/// Up to so many rows or columns, a product of contiguous rows is best taken as dot products, which are summed up in
/// another order: fixed, since no bit depends on the machine's caches.
const FEW: usize = 16;
/// The most results the library computes as dot products in one call.
const DOTS: usize = 256;

/// The product. `then` is called for all rows, once each; false if it was not called at all: the product has too few
/// bands of rows for that.
///
/// # Safety
/// As for [`gemm_f32()`], and so for all functions below; what `then` does to rows of `dst` is right when all their
/// elements are there, and it changes no operand.
pub(crate) unsafe fn gemm<T: Float>(product: Product<T>, then: Option<Then<'_>>) -> bool {
    let Product { shape: Shape { m, n, k }, dst, accumulate, .. } = product;
    if m == 0 || n == 0 {
        return false;
    }
    if k == 0 {
        for i in 0..if accumulate { 0 } else { m } {
            // SAFETY: within the shape.
            (0..n).for_each(|j| unsafe { *dst.at(i, j).pointer = T::ZERO });
        }
        return false;
    }
    // A single column is a single row of the transposed product.
    let turn = if m == 1 || n == 1 { m > 1 } else { dst.is_turned() };
    let (product, then) = if turn { (product.transposed(), None) } else { (product, then) };
    // SAFETY: the same elements, if under other names.
    unsafe { tiles(product, then, threads::count()) }
}

/// The most bands of rows that are counted.
const MOST_BANDS: usize = 64;

/// Cuts `dst` into a grid of tiles for so many threads and computes them on the pool; whether bands of rows were handed on.
unsafe fn tiles<T: Float>(product: Product<T>, then: Option<Then<'_>>, threads: usize) -> bool {
    let Shape { m, n, k } = product.shape;
    // Also where a copy is kept: other tiles might be other kernels', with other bits.
    let costs = [product.lhs, product.rhs].map(|operand| if operand.is_turned() { TURNED_COST } else { 1 });
    let (rows, columns) = grid(product.shape, threads, costs);
    // A row or column left over alone would be another kernel's.
    let cut = |size: usize, parts: usize| {
        let least = size.div_ceil(parts).next_multiple_of(STEP);
        (least..size).step_by(STEP).find(|part| size % part != 1).unwrap_or(size)
    };
    let (height, width) = (cut(m, rows), cut(n, columns));
    let (rows, columns) = (m.div_ceil(height), n.div_ceil(width));
    let (product, way) = (Shared(product), Way::of(&product));
    // With fewer bands than threads some of them would have nothing to go on with.
    let then = then.filter(|then| {
        rows > 1 && (threads..=MOST_BANDS).contains(&rows) && height.is_multiple_of(then.rows)
    });
    // By band, its tiles that are done.
    let done: [AtomicUsize; MOST_BANDS] = [const { AtomicUsize::new(0) }; MOST_BANDS];
    parallel_for(rows * columns, 1, |begin, end| {
        for index in begin..end {
            let (row, column) = match then {
                // Neighbours in a thread's share use the same columns of `rhs`.
                None => (index % rows, index / rows),
                // Or are of one band, which is done the sooner.
                Some(_) => (index / columns, index % columns),
            };
            let (i, j) = (row * height, column * width);
            let shape = Shape { m: height.min(m - i), n: width.min(n - j), k };
            // SAFETY: tiles lie within the shape and are disjoint in `dst`.
            unsafe { tile(product.get().part(i, j, shape), way) }
            if let Some(then) = then
                && done[row].fetch_add(1, Ordering::AcqRel) + 1 == columns
            {
                (then.run)(i, i + shape.m);
            }
        }
    });
    then.is_some()
}

/// How many tiles to cut rows and columns into: as many as keep all threads busy, shaped to read little.
fn grid(shape: Shape, threads: usize, [lhs_cost, rhs_cost]: [usize; 2]) -> (usize, usize) {
    let Shape { m, n, k } = shape;
    let work = m.saturating_mul(n).saturating_mul(k);
    if threads == 1 || work < 2 * TASK {
        return (1, 1);
    }
    let wanted = if work >= threads * BALANCED { BALANCE * threads } else { threads.min(work / TASK) };
    let [most_rows, most_columns] = [m, n].map(|size| (size / STEP).max(1));
    // A tile costs what it reads of the operands: its two sides, and a turned one more, as it is copied.
    let exact = (1..=wanted.min(most_columns))
        .filter(|columns| wanted.is_multiple_of(*columns) && wanted / columns <= most_rows)
        .min_by_key(|columns| (lhs_cost * m / (wanted / columns) + rhs_cost * n / columns, wanted - columns))
        .map(|columns| (wanted / columns, columns));
    exact.unwrap_or_else(|| {
        let columns = wanted.min(most_columns);
        (wanted.div_ceil(columns).min(most_rows), columns)
    })
}

/// How the elements of a product are summed up. Asked of the whole product, so that how it is cut decides no bit.
#[derive(Clone, Copy)]
enum Way {
    /// One row.
    Row,
    /// As dot products.
    Dots,
    /// From a copy of `rhs` that lies right.
    StraightRhs,
    /// From a copy of `lhs` that lies right.
    StraightLhs,
    /// As the library does.
    Panel,
}

impl Way {
    fn of<T>(product: &Product<T>) -> Way {
        let Product { shape: Shape { m, n, .. }, dst, lhs, rhs, .. } = product;
        let is_narrow = (*m).min(*n) <= FEW;
        if *m == 1 {
            if dst.column == 1 && rhs.column == 1 { Way::Row } else { Way::Panel }
        } else if rhs.is_turned() {
            if is_narrow && lhs.column == 1 { Way::Dots } else { Way::StraightRhs }
        } else if lhs.is_turned() && !is_narrow {
            Way::StraightLhs
        } else {
            Way::Panel
        }
    }
}

/// One tile on the calling thread.
unsafe fn tile<T: Float>(product: Product<T>, way: Way) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match way {
            Way::Row => T::row(product),
            Way::Dots => dots(product),
            Way::StraightRhs => straight_rhs(product),
            Way::StraightLhs => straight_lhs(product),
            Way::Panel => T::panel(product),
        }
    }
}

/// Cuts the longer side so that the library chooses its dot-product kernels.
unsafe fn dots<T: Float>(product: Product<T>) {
    let Shape { m, n, k } = product.shape;
    let (height, width) = if m <= n { (m, DOTS / m) } else { (DOTS / n, n) };
    for i in (0..m).step_by(height) {
        for j in (0..n).step_by(width) {
            let shape = Shape { m: height.min(m - i), n: width.min(n - j), k };
            // SAFETY: within the shape.
            unsafe { T::panel(product.part(i, j, shape)) }
        }
    }
}

/// One product on the calling thread, or so many of its rows: `rows` is how many the whole one has.
///
/// # Safety
/// As for [`gemm_f32()`].
pub(crate) unsafe fn serial<T: Float>(product: Product<T>, rows: usize) {
    let Product { shape: Shape { m, n, k }, dst, .. } = product;
    if m == 0 || n == 0 || k == 0 {
        // SAFETY: the caller's promise is passed on. No tiles are cut of what is empty.
        unsafe { gemm(product, None) };
        return;
    }
    let whole = Product { shape: Shape { m: rows, n, k }, ..product };
    let turn = if rows == 1 || n == 1 { rows > 1 } else { dst.is_turned() };
    let (whole, product) = if turn { (whole.transposed(), product.transposed()) } else { (whole, product) };
    // SAFETY: the same elements, if under other names.
    unsafe { tile(product, Way::of(&whole)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix of `rows × columns` in memory of its own, in one of several layouts, and its strided view.
    pub(super) struct Owned<T> {
        pub(super) values: Vec<T>,
        pub(super) offset: usize,
        pub(super) row: isize,
        pub(super) column: isize,
    }

    impl<T: Copy> Owned<T> {
        pub(super) fn new(
            rows: usize,
            columns: usize,
            layout: usize,
            mut value: impl FnMut() -> T,
        ) -> Owned<T> {
            let (row, column) = match layout {
                0 => (columns, 1),
                1 => (1, rows),
                2 => (columns + 3, 1),
                3 => (1, rows + 5),
                _ => (3 * columns + 1, 3),
            };
            let length = 1 + rows.saturating_sub(1) * row + columns.saturating_sub(1) * column;
            let values = (0..length).map(|_| value()).collect();
            // Every other layout runs its columns backwards.
            if layout >= 4 {
                let offset = columns.saturating_sub(1) * column;
                return Owned { values, offset, row: row as isize, column: -(column as isize) };
            }
            Owned { values, offset: 0, row: row as isize, column: column as isize }
        }

        pub(super) fn matrix(&mut self) -> Matrix<T> {
            Matrix::new(self.values.as_mut_ptr().wrapping_add(self.offset), self.row, self.column)
        }

        fn get(&self, i: usize, j: usize) -> T {
            self.values[(self.offset as isize + i as isize * self.row + j as isize * self.column) as usize]
        }
    }

    pub(super) struct Words(pub(super) u64);
    impl Words {
        fn next(&mut self) -> u32 {
            self.0 += 1;
            crate::random::philox(self.0, 5)[0]
        }
        fn below(&mut self, end: usize) -> usize {
            self.next() as usize % end
        }
        pub(super) fn unit(&mut self) -> f64 {
            f64::from(self.next()) / 2f64.powi(31) - 1.0
        }
    }

    fn shapes(words: &mut Words) -> Vec<Shape> {
        let mut shapes =
            vec![(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (1, 300, 70), (300, 1, 70), (64, 256, 256)];
        shapes.extend([(16, 530, 600), (20, 530, 1030), (200, 10, 300), (9, 256, 64), (1, 1, 3000)]);
        shapes.extend((0..40).map(|_| (1 + words.below(70), 1 + words.below(70), words.below(70))));
        shapes.into_iter().map(|(m, n, k)| Shape { m, n, k }).collect()
    }

    macro_rules! float_test {
        ($name:ident, $type:ty, $gemm:ident, $tolerance:expr) => {
            #[test]
            fn $name() {
                let mut words = Words(1);
                for shape in shapes(&mut words) {
                    let Shape { m, n, k } = shape;
                    for round in 0..6 {
                        let layouts: [usize; 3] = std::array::from_fn(|_| words.below(5));
                        let accumulate = round % 2 == 1;
                        let mut value = || words.unit() as $type;
                        let mut lhs = Owned::new(m, k, layouts[0], &mut value);
                        let mut rhs = Owned::new(k, n, layouts[1], &mut value);
                        let mut dst = Owned::new(m, n, layouts[2], &mut value);
                        if !accumulate {
                            dst.values.fill(<$type>::NAN);
                        }
                        let before = dst.values.clone();
                        // SAFETY: three matrices of these shapes in memory of their own.
                        unsafe { $gemm(shape, dst.matrix(), accumulate, lhs.matrix(), rhs.matrix()) };
                        let after = std::mem::replace(&mut dst.values, before);
                        let mut touched = 0;
                        for i in 0..m {
                            for j in 0..n {
                                let old = if accumulate { f64::from(dst.get(i, j)) } else { 0.0 };
                                let exact: f64 = (0..k)
                                    .map(|p| f64::from(lhs.get(i, p)) * f64::from(rhs.get(p, j)))
                                    .sum::<f64>()
                                    + old;
                                let at = dst.offset as isize + i as isize * dst.row + j as isize * dst.column;
                                let got = f64::from(after[at as usize]);
                                let error = (got - exact).abs();
                                assert!(
                                    error <= $tolerance * (k as f64 + 2.0),
                                    "{shape:?} {layouts:?} ({i}, {j}): {got} {exact}"
                                );
                                touched += 1;
                            }
                        }
                        let changed =
                            after.iter().zip(&dst.values).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                        assert!(changed <= touched, "{shape:?} {layouts:?}: wrote between the elements");
                    }
                }
            }
        };
    }

    float_test!(f32_against_naive, f32, gemm_f32, 1e-6);
    float_test!(f64_against_naive, f64, gemm_f64, 1e-15);

    #[test]
    fn i64_wraps() {
        let mut words = Words(9);
        let empty = [Shape { m: 3, n: 5, k: 0 }, Shape { m: 0, n: 5, k: 3 }, Shape { m: 3, n: 0, k: 3 }];
        for (shape, accumulate) in
            shapes(&mut words).into_iter().skip(12).chain(empty).flat_map(|s| [(s, false), (s, true)])
        {
            let Shape { m, n, k } = shape;
            let mut value = || i64::from(words.next()) << 31;
            let mut lhs = Owned::new(m, k, 0, &mut value);
            let mut rhs = Owned::new(k, n, 3, &mut value);
            let mut dst = Owned::new(m, n, 4, &mut value);
            let before: Vec<i64> =
                (0..m).flat_map(|i| (0..n).map(|j| dst.get(i, j)).collect::<Vec<_>>()).collect();
            // SAFETY: three matrices of these shapes in memory of their own.
            unsafe { gemm_i64(shape, dst.matrix(), accumulate, lhs.matrix(), rhs.matrix()) };
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let before = if accumulate { before[i * n + j] } else { 0 };
                let exact =
                    (0..k).fold(before, |sum, p| sum.wrapping_add(lhs.get(i, p).wrapping_mul(rhs.get(p, j))));
                assert_eq!(dst.get(i, j), exact);
            }
        }
    }

    #[test]
    fn grids_cover_the_threads() {
        assert_eq!(grid(Shape { m: 4, n: 4, k: 4 }, 8, [1, 1]), (1, 1));
        assert_eq!(grid(Shape { m: 64, n: 256, k: 256 }, 2, [1, 4]), (1, 2));
        let (rows, columns) = grid(Shape { m: 4096, n: 64, k: 4096 }, 16, [1, 1]);
        assert!(rows * columns >= 16);
        assert_eq!(grid(Shape { m: 4096, n: 4096, k: 4096 }, 16, [1, 4]), (4, 16));
    }

    /// Every row is handed on once, when it is finished, in bands that begin where they may; no bit is another.
    #[test]
    fn finished_rows_are_handed_on() {
        let mut words = Words(3);
        let mut handed = 0;
        let shapes = [(0, 3, 4), (64, 64, 0), (1, 300, 70), (300, 1, 70), (512, 256, 64), (509, 129, 65)];
        for (m, n, k) in shapes.into_iter().chain([(1024, 64, 1024), (96, 2048, 96), (33, 65, 700)]) {
            let shape = Shape { m, n, k };
            for (layouts, multiple) in [([0, 0], 1), ([0, 1], 16), ([1, 0], 2), ([2, 3], 7)] {
                let mut value = || words.unit() as f32;
                let mut lhs = Owned::new(m, k, layouts[0], &mut value);
                let mut rhs = Owned::new(k, n, layouts[1], &mut value);
                let mut plain = Owned::new(m, n, 0, || f32::NAN);
                let mut dst = Owned::new(m, n, 0, || f32::NAN);
                let calls: Vec<AtomicUsize> = (0..m).map(|_| AtomicUsize::new(0)).collect();
                let to = Shared(dst.matrix());
                let run = |begin: usize, end: usize| {
                    assert!(begin < end && begin.is_multiple_of(multiple), "{begin}..{end}");
                    assert!(end == m || end.is_multiple_of(multiple), "{begin}..{end}");
                    for (row, calls) in calls.iter().enumerate().take(end).skip(begin) {
                        calls.fetch_add(1, Ordering::Relaxed);
                        for column in 0..n {
                            // SAFETY: within the shape; the row is this call's.
                            unsafe { *to.get().at(row, column).pointer += 1.0 };
                        }
                    }
                };
                let then = Then { rows: multiple, run: &run };
                let (dst_at, lhs, rhs) = (to.get(), lhs.matrix(), rhs.matrix());
                // SAFETY: matrices of these shapes in memory of their own.
                let is_done = unsafe {
                    gemm_f32(shape, plain.matrix(), false, lhs, rhs);
                    let product = Product { shape, dst: dst_at, accumulate: false, lhs, rhs, straight: None };
                    gemm(product, Some(then))
                };
                handed += usize::from(is_done);
                assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == usize::from(is_done)));
                for i in 0..m {
                    for j in 0..n {
                        let wanted = if is_done { plain.get(i, j) + 1.0 } else { plain.get(i, j) };
                        assert_eq!(dst.get(i, j).to_bits(), wanted.to_bits(), "{m} {n} {k} at {i} {j}");
                    }
                }
            }
        }
        assert!(handed > 0 || threads::count() == 1);
    }

    /// Nor does the number of threads decide a bit.
    #[test]
    fn products_have_the_same_bits_on_any_number_of_threads() {
        let mut words = Words(11);
        let shapes =
            [(64, 256, 256), (65, 257, 70), (33, 129, 600), (20, 300, 1100), (300, 20, 90), (97, 17, 513)];
        for (m, n, k) in
            shapes.into_iter().chain([(16, 400, 300), (400, 16, 300), (17, 4000, 40), (513, 513, 64)])
        {
            for layouts in [[0, 0], [0, 1], [1, 0], [1, 1], [2, 3], [4, 4]] {
                let mut value = || words.unit() as f32;
                let mut lhs = Owned::new(m, k, layouts[0], &mut value);
                let mut rhs = Owned::new(k, n, layouts[1], &mut value);
                let (lhs, rhs) = (lhs.matrix(), rhs.matrix());
                let bits = |threads: usize| -> Vec<u32> {
                    let mut dst = Owned::new(m, n, 0, || f32::NAN);
                    let (shape, dst_at) = (Shape { m, n, k }, dst.matrix());
                    let product = Product { shape, dst: dst_at, accumulate: false, lhs, rhs, straight: None };
                    // SAFETY: matrices of these shapes in memory of their own.
                    unsafe { tiles(product, None, threads) };
                    dst.values.iter().map(|value| value.to_bits()).collect()
                };
                let alone = bits(1);
                for threads in [2, 3, 7, 16, 64] {
                    assert!(bits(threads) == alone, "{m} {n} {k} {layouts:?} on {threads}");
                }
            }
        }
    }

    /// How many rows a band has is decided by the machine's caches.
    #[test]
    fn rows_have_the_same_bits_in_bands_of_any_height() {
        let mut words = Words(8);
        for (n, k) in [(7, 600), (64, 1100), (64, 300), (65, 1100), (200, 513)] {
            let m = 300;
            for layouts in [[0, 0], [0, 1], [1, 0], [2, 3]] {
                let mut value = || words.unit() as f32;
                let mut lhs = Owned::new(m, k, layouts[0], &mut value);
                let mut rhs = Owned::new(k, n, layouts[1], &mut value);
                let (lhs, rhs) = (lhs.matrix(), rhs.matrix());
                let bits = |rows: usize| -> Vec<u32> {
                    let mut dst = Owned::new(m, n, 0, || f32::NAN);
                    for from in (0..m / rows).map(|band| band * rows) {
                        let height = if m - from < 2 * rows { m - from } else { rows };
                        let (dst, lhs) = (dst.matrix().at(from, 0), lhs.at(from, 0));
                        let shape = Shape { m: height, n, k };
                        // SAFETY: matrices of these shapes in memory of their own.
                        unsafe {
                            serial(Product { shape, dst, accumulate: false, lhs, rhs, straight: None }, m)
                        };
                    }
                    dst.values.iter().map(|value| value.to_bits()).collect()
                };
                let whole = bits(m);
                for rows in [8, 16, 32, 48, 64, 80, 128] {
                    assert!(bits(rows) == whole, "{rows} rows of {n} x {k}, {layouts:?}");
                }
            }
        }
    }
}
