//! Matrix products in batches: side by side if there are many of them, else each on all threads.

use super::operand::{Operand, Shared};
use kiln_ir::DType;
use kiln_runtime::gemm::{self, Matrix, Shape};

/// `out[b] = x[b] · y[b]`; `None` if the dtype has no products.
///
/// # Safety
/// The contract of [`Operand`]: `out` is [b, m, n], `x` [b, m, k], `y` [b, k, n], of one dtype; the output's
/// elements are distinct and overlap no input.
pub unsafe fn bmm(out: &Operand, x: &Operand, y: &Operand) -> Option<()> {
    let count = out.shape[0];
    let shape = Shape { m: out.shape[1], n: out.shape[2], k: x.shape[2] };
    let operands = Shared::new([(out.ptr, out.strides), (x.ptr, x.strides), (y.ptr, y.strides)]);
    macro_rules! products {
        ($batched:path, $ty:ty) => {{
            let matrices = |b: usize| {
                operands.get().map(|(ptr, strides)| {
                    let at = ptr.cast::<$ty>().wrapping_offset(b as isize * strides[0]);
                    Matrix::new(at, strides[1], strides[2])
                })
            };
            // SAFETY: the caller's contract; elements are of the type named.
            unsafe { $batched(count, shape, &matrices) }
        }};
    }
    match out.dtype {
        DType::F32 => products!(gemm::batched_f32, f32),
        DType::F64 => products!(gemm::batched_f64, f64),
        DType::I64 => products!(gemm::batched_i64, i64),
        _ => return None,
    }
    Some(())
}
