//! The gather of nll_loss: one entry per row, chosen by a target, with bounds checked before any read.

use super::element::Element;
use super::operand::Operand;
use kiln_ir::{DType, bf16, f16};

/// A target that is no class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("target {target} of row {row} is out of range for {classes} classes")]
pub struct IndexOutOfRange {
    pub row: usize,
    pub target: i64,
    /// How many classes there are.
    pub classes: usize,
}

/// `losses[i] = -(weight[t] * input[i, t])` and `weights[i] = weight[t]` with t = target[i]; both 0 where t is
/// `ignore_index`. Without `weight` every class weighs 1. On error nothing has been written.
///
/// # Safety
/// The contract of [`Operand`]; `input` is [N, C] of a float dtype, `losses`, `weights` [N] and `weight` [C] of
/// the one it is computed in, `target` [N] of i64; outputs overlap nothing.
pub unsafe fn nll_forward(
    losses: &Operand,
    weights: &Operand,
    input: &Operand,
    target: &Operand,
    weight: Option<&Operand>,
    ignore_index: i64,
) -> Result<(), IndexOutOfRange> {
    // SAFETY: the caller's contract.
    unsafe {
        check(target, input.shape[1], ignore_index)?;
        match input.dtype {
            DType::F64 => forward(losses, weights, input, target, weight, ignore_index, |x: f64| x),
            DType::F16 => forward(losses, weights, input, target, weight, ignore_index, f16::to_f32),
            DType::BF16 => forward(losses, weights, input, target, weight, ignore_index, bf16::to_f32),
            _ => forward(losses, weights, input, target, weight, ignore_index, |x: f32| x),
        }
    }
    Ok(())
}

/// # Safety
/// The operand has elements of T and `index` lies inside.
unsafe fn at<T>(operand: &Operand, index: &[usize]) -> *mut T {
    let offset: isize = index.iter().zip(operand.strides).map(|(&i, &s)| i as isize * s).sum();
    // SAFETY: the caller's promise.
    unsafe { operand.ptr.cast::<T>().offset(offset) }
}

/// # Safety
/// `target` is a one-dimensional operand of i64.
unsafe fn check(target: &Operand, classes: usize, ignore_index: i64) -> Result<(), IndexOutOfRange> {
    for row in 0..target.shape[0] {
        // SAFETY: a row of the target.
        let target = unsafe { at::<i64>(target, &[row]).read() };
        if target != ignore_index && !usize::try_from(target).is_ok_and(|t| t < classes) {
            return Err(IndexOutOfRange { row, target, classes });
        }
    }
    Ok(())
}

/// # Safety
/// That of [`nll_forward`]; targets are checked.
unsafe fn forward<I: Copy, T: Element + std::ops::Mul<Output = T> + std::ops::Neg<Output = T>>(
    losses: &Operand,
    weights: &Operand,
    input: &Operand,
    target: &Operand,
    weight: Option<&Operand>,
    ignore_index: i64,
    widen: impl Fn(I) -> T,
) {
    for row in 0..target.shape[0] {
        // SAFETY: rows of all operands, and a class that was checked.
        unsafe {
            let class = at::<i64>(target, &[row]).read();
            let (loss, w) = if class == ignore_index {
                (T::from_bool(0), T::from_bool(0))
            } else {
                let w = weight.map_or(T::from_bool(1), |w| at::<T>(w, &[class as usize]).read());
                (-(w * widen(at::<I>(input, &[row, class as usize]).read())), w)
            };
            at::<T>(losses, &[row]).write(loss);
            at::<T>(weights, &[row]).write(w);
        }
    }
}
