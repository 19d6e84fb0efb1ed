//! Matrix products in batches: side by side if there are many of them, else each on all threads.

use super::operand::{Operand, Shared};
use kiln_ir::DType;
use kiln_runtime::gemm::{self, Matrix, Shape, gemm_f32, gemm_f64, gemm_i64};

/// `out[b] = x[b] · y[b]`; `None` if the dtype has no products.
///
/// # Safety
/// The contract of [`Operand`]: `out` is [b, m, n], `x` [b, m, k], `y` [b, k, n], of one dtype; the output's
/// elements are distinct and overlap no input.
pub unsafe fn bmm(out: &Operand, x: &Operand, y: &Operand) -> Option<()> {
    // SAFETY: the caller's contract; elements are of the type named.
    unsafe {
        match out.dtype {
            DType::F32 => each(out, x, y, |s, c: Matrix<f32>, a, b| gemm_f32(s, c, false, a, b)),
            DType::F64 => each(out, x, y, |s, c: Matrix<f64>, a, b| gemm_f64(s, c, false, a, b)),
            DType::I64 => each(out, x, y, |s, c: Matrix<i64>, a, b| gemm_i64(s, c, false, a, b)),
            _ => return None,
        }
    }
    Some(())
}

/// # Safety
/// That of [`bmm`]; elements are of type T.
unsafe fn each<T>(
    out: &Operand,
    x: &Operand,
    y: &Operand,
    product: impl Fn(Shape, Matrix<T>, Matrix<T>, Matrix<T>) + Sync,
) {
    let count = out.shape[0];
    let shape = Shape { m: out.shape[1], n: out.shape[2], k: x.shape[2] };
    let operands = Shared::new([(out.ptr, out.strides), (x.ptr, x.strides), (y.ptr, y.strides)]);
    let run = |begin: usize, end: usize| {
        for b in begin..end {
            let [out, x, y] = operands.get().map(|(ptr, strides)| {
                let at = ptr.cast::<T>().wrapping_offset(b as isize * strides[0]);
                Matrix::new(at, strides[1], strides[2])
            });
            product(shape, out, x, y);
        }
    };
    gemm::each(count, shape, run);
}
