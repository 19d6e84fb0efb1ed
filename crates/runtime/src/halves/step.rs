//! Products with operands that are halves, as steps of a program.

use super::format::{Format, floats};
use super::{Product, Results, products_of};
use crate::gemm::{Matrix, Shape};
use crate::pool::AllocError;
use crate::program::{BatchAt, MatrixAt};
use crate::threads::Shared;

/// Products of halves, or of f32 and halves.
#[derive(Debug)]
pub(crate) struct HalvesAt {
    pub formats: [Format; 2],
    /// How many.
    pub batch: usize,
    /// Sizes of each.
    pub shape: Shape,
    /// Results, dense; in f32 if they are not rounded.
    pub dst: BatchAt,
    pub is_rounded: bool,
    /// Left operands.
    pub lhs: BatchAt,
    /// Right operands.
    pub rhs: BatchAt,
}

impl HalvesAt {
    /// The product with this number, from a row on, with buffers at these places.
    pub(crate) fn product(&self, number: usize, row: usize, buffer: &dyn Fn(usize) -> *mut u8) -> Product {
        let HalvesAt { formats: [left, right], dst, is_rounded, lhs, rhs, .. } = self;
        fn matrix<T>(at: MatrixAt, buffer: &dyn Fn(usize) -> *mut u8) -> Matrix<T> {
            Matrix::new(buffer(at.buffer).cast::<T>().wrapping_offset(at.offset), at.row, at.column)
        }
        let operand = |format: Format, at: MatrixAt| match format {
            Format::Half(_) => matrix::<u16>(at, buffer),
            Format::F32 => floats(matrix(at, buffer)),
        };
        let dst = dst.at(number);
        let results = match is_rounded {
            true => Results::Rounded(matrix(dst, buffer).at(row, 0)),
            false => Results::Sums(matrix(dst, buffer).at(row, 0)),
        };
        let (lhs, rhs) = (operand(*left, lhs.at(number)).at(row, 0), operand(*right, rhs.at(number)));
        Product { results, start: None, lhs, rhs }
    }

    /// # Safety
    /// The buffers hold the matrices, and no result shares memory with an operand.
    pub(crate) unsafe fn run(&self, pointers: &[*mut u8]) -> Result<(), AllocError> {
        let pointers = Shared(pointers);
        let product = |number: usize| self.product(number, 0, &|buffer| pointers.get()[buffer]);
        // SAFETY: the caller's promise is passed on.
        unsafe { products_of(self.formats, self.batch, self.shape, &product) }
    }
}
