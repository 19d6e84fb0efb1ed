//! Operands that lie the wrong way for the kernels, copied the right way round: block by block for one product, or
//! whole where a copy is kept for several.

use super::{FEW, Matrix, Product, Shape};
use crate::cpu::machine;
use crate::panel::{Float, STRETCH};
use crate::pool::{AllocError, Buffer};
use crate::scratch;

/// The most of the inner dim that a copied block has, and of the rows of `lhs` (a last row alone is summed up in another
/// order): fixed, since no bit depends on the machine's caches.
const BLOCK: usize = STRETCH;

/// The most columns of a copied block: of f32 it fills the core's own cache.
fn most_columns() -> usize {
    machine().l2 / (BLOCK * size_of::<f32>())
}

/// A product whose `rhs` lies the wrong way: block by block it is copied the right way round.
pub(super) unsafe fn straight_rhs<T: Float>(product: Product<T>) {
    let Product { shape: Shape { m, n, k }, accumulate, lhs, rhs, straight, .. } = product;
    if let Some(rhs) = straight {
        // The inner dim is cut as below, so that no bit is another.
        for p in (0..k).step_by(BLOCK) {
            let shape = Shape { m, n, k: BLOCK.min(k - p) };
            let (lhs, rhs) = (lhs.at(0, p), rhs.at(p, 0));
            // SAFETY: the block is within the shape.
            unsafe { T::panel(Product { shape, accumulate: accumulate || p > 0, lhs, rhs, ..product }) };
        }
        return;
    }
    let (width, depth) = (n.min(most_columns()), k.min(BLOCK));
    let copied = scratch::with(depth * width.max(2) * size_of::<T>(), |copy| {
        let copy = copy.cast::<T>();
        for p in (0..k).step_by(depth) {
            for j in (0..n).step_by(width) {
                let shape = Shape { m, n: width.min(n - j), k: depth.min(k - p) };
                // A single column whose elements lie side by side would be summed up in another order.
                let pitch = shape.n.max(2);
                let block = Product {
                    accumulate: accumulate || p > 0,
                    lhs: lhs.at(0, p),
                    rhs: Matrix::new(copy, pitch as isize, 1),
                    ..product.part(0, j, shape)
                };
                // SAFETY: the block is within the shape, and its copy within the scratch.
                unsafe {
                    T::straighten(rhs.at(p, j), copy, pitch, shape.k, shape.n);
                    T::panel(block);
                }
            }
        }
    });
    if copied.is_err() {
        // No memory for the copy: the kernels can do without.
        // SAFETY: the caller's promise is passed on.
        unsafe { T::panel(product) }
    }
}

/// The same for a `lhs` that lies the wrong way.
pub(super) unsafe fn straight_lhs<T: Float>(product: Product<T>) {
    let Product { shape: Shape { m, n, k }, accumulate, lhs, rhs, .. } = product;
    let (height, depth) = (m.min(BLOCK), k.min(BLOCK));
    let copied = scratch::with(height * depth * size_of::<T>(), |copy| {
        let copy = copy.cast::<T>();
        for p in (0..k).step_by(depth) {
            for i in (0..m).step_by(height) {
                let shape = Shape { m: height.min(m - i), n, k: depth.min(k - p) };
                let block = Product {
                    accumulate: accumulate || p > 0,
                    lhs: Matrix::new(copy, shape.k as isize, 1),
                    rhs: rhs.at(p, 0),
                    ..product.part(i, 0, shape)
                };
                // SAFETY: the block is within the shape, and its copy within the scratch.
                unsafe {
                    T::straighten(lhs.at(i, p), copy, shape.k, shape.m, shape.k);
                    T::panel(block);
                }
            }
        }
    });
    if copied.is_err() {
        // SAFETY: the caller's promise is passed on.
        unsafe { T::panel(product) }
    }
}

/// Rows from which turning `rhs` round is too little of a product to keep a copy.
const MANY: usize = 96;

/// Whether a copy of `rhs` the right way round is worth its memory, where `rhs` is the same in many products.
pub fn is_kept(shape: Shape, row: isize, column: isize) -> bool {
    let Shape { m, n, k } = shape;
    // Columns that overlap, or are all the same one, would be more in a copy than they are.
    row == 1 && column >= k as isize && m.min(n) > FEW && m <= MANY && k > 1
}

/// Such a copy: its rows are contiguous.
///
/// # Safety
/// `rhs` is readable for the shape, and its columns are contiguous.
pub(crate) unsafe fn straightened<T: Float>(shape: Shape, rhs: Matrix<T>) -> Result<Buffer, AllocError> {
    let Shape { n, k, .. } = shape;
    let copy = Buffer::alloc(n.saturating_mul(k).saturating_mul(size_of::<T>()).max(1))?;
    // SAFETY: the caller's promise is passed on; the copy has room for all of it.
    unsafe { T::straighten(rhs, copy.as_ptr().cast(), n, k, n) };
    Ok(copy)
}

/// The bytes of a copy of `rhs` that serves several products of this shape and fewer rows, if they would each turn it
/// round themselves: how it lies in memory is `row` and `column`.
pub(crate) fn turned_once<T>(shape: Shape, row: isize, column: isize) -> Option<usize> {
    let Shape { m, n, k } = shape;
    let bytes = n.saturating_mul(k).saturating_mul(size_of::<T>());
    let is_turned = row == 1 && column != 1;
    // In one stretch of the inner dim, so that no bit is another; and it stays in the core's own cache.
    let fits = k <= BLOCK && bytes <= machine().l2;
    (fits && is_turned && k > 0 && m.min(n) > FEW).then_some(bytes)
}

/// Copies `rhs` the right way round.
///
/// # Safety
/// `rhs` is readable for the shape, `copy` writable; its rows are contiguous.
pub(crate) unsafe fn turn<T: Float>(shape: Shape, rhs: Matrix<T>, copy: Matrix<T>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { T::straighten(rhs, copy.pointer, shape.n, shape.k, shape.n) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::tests::{Owned, Words};
    use crate::gemm::{gemm, gemm_f32};

    #[test]
    fn kept_copies_change_no_bit() {
        let mut words = Words(4);
        let mut kept = 0;
        let shapes = [(17, 17, 2), (17, 700, 513), (64, 256, 256), (90, 90, 1200), (96, 1030, 70)];
        // The last column alone in a block.
        for (m, n, k) in shapes.into_iter().chain([(17, 513, 7), (32, 1041, 200), (40, 1025, 600)]) {
            let shape = Shape { m, n, k };
            for (layouts, accumulate) in [([0, 1, 0], false), ([4, 3, 2], true), ([1, 1, 0], true)] {
                let mut value = || words.unit() as f32;
                let mut lhs = Owned::new(m, k, layouts[0], &mut value);
                let mut rhs = Owned::new(k, n, layouts[1], &mut value);
                let mut plain = Owned::new(m, n, layouts[2], &mut value);
                let mut dst = Owned { values: plain.values.clone(), ..plain };
                kept += usize::from(is_kept(shape, rhs.row, rhs.column));
                let (lhs, rhs) = (lhs.matrix(), rhs.matrix());
                // SAFETY: matrices of these shapes in memory of their own.
                unsafe {
                    gemm_f32(shape, plain.matrix(), accumulate, lhs, rhs);
                    let copy = straightened(shape, rhs).unwrap();
                    let straight = Some(Matrix::new(copy.as_ptr().cast(), n as isize, 1));
                    gemm(Product { shape, dst: dst.matrix(), accumulate, lhs, rhs, straight }, None);
                }
                let bits = |owned: &Owned<f32>| owned.values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert!(bits(&plain) == bits(&dst), "{shape:?} {layouts:?}");
            }
        }
        assert_eq!(kept, 24);
    }
}
