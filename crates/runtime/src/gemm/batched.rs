//! Many products of one shape.

use std::ops::Range;

use super::{Matrix, Product, Shape, TASK, gemm, gemm_i64, serial};
use crate::panel::Float;
use crate::threads::{self, parallel_for};

/// Work of one product of a batch from which each uses all threads, in multiply-adds.
const LARGE: usize = 1 << 22;

/// As [`batched_f32`], for either.
///
/// # Safety
/// As for [`batched_f32`].
pub(crate) unsafe fn batched<T: Float>(
    count: usize,
    shape: Shape,
    operands: &(dyn Fn(usize) -> [Matrix<T>; 3] + Sync),
) {
    // SAFETY: the caller's promise is passed on.
    let product = |[dst, lhs, rhs]: [Matrix<T>; 3], alone: bool| unsafe {
        let product = Product { shape, dst, accumulate: false, lhs, rhs, straight: None };
        // Tiles of what is computed on one thread would only turn an operand again and again.
        if alone { serial(product, shape.m) } else { _ = gemm(product, None) }
    };
    each(count, shape, |range, alone| range.for_each(|number| product(operands(number), alone)));
}

/// Many products of one shape: `operands` are the result, the left and the right operand of each.
///
/// # Safety
/// As for [`gemm_f32()`](super::gemm_f32()), for each of them; no two results share memory, and none with an operand of
/// another.
pub unsafe fn batched_f32(count: usize, shape: Shape, operands: &(dyn Fn(usize) -> [Matrix<f32>; 3] + Sync)) {
    // SAFETY: the caller's promise is passed on.
    unsafe { batched(count, shape, operands) }
}

/// As [`batched_f32`], in double precision.
///
/// # Safety
/// As for [`gemm_f32()`](super::gemm_f32()), for each of them; no two results share memory, and none with an operand of
/// another.
pub unsafe fn batched_f64(count: usize, shape: Shape, operands: &(dyn Fn(usize) -> [Matrix<f64>; 3] + Sync)) {
    // SAFETY: the caller's promise is passed on.
    unsafe { batched(count, shape, operands) }
}

/// As [`batched_f32`], for 64-bit integers.
///
/// # Safety
/// As for [`batched_f32`].
pub unsafe fn batched_i64(count: usize, shape: Shape, operands: &(dyn Fn(usize) -> [Matrix<i64>; 3] + Sync)) {
    each(count, shape, |range, _| {
        for [dst, lhs, rhs] in range.map(operands) {
            // SAFETY: the caller's promise is passed on.
            unsafe { gemm_i64(shape, dst, false, lhs, rhs) };
        }
    });
}

/// Has `run` compute `count` products of one shape: side by side if there are many of them, each alone on a thread, else
/// each on all threads.
fn each(count: usize, shape: Shape, run: impl Fn(Range<usize>, bool) + Sync) {
    let work = shape.m.saturating_mul(shape.n).saturating_mul(shape.k);
    let alone = count >= 2 * threads::count();
    if alone || work < LARGE {
        parallel_for(count, TASK.div_ceil(work.max(1)), |begin, end| run(begin..end, alone));
    } else {
        run(0..count, false);
    }
}
