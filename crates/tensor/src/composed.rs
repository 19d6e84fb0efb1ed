//! Methods that are made of several ops keep the promises of a single one: on halves they compute in f32 and round
//! their result once, and their errors name the user's line.

use kiln_ir::{DType, Loc, Result, Ty, result_dtype};
use smallvec::SmallVec;

use crate::Tensor;

/// Runs the ops of `body` on these operands, halves as f32, and gives its result the dtype that they have together.
#[track_caller]
pub(crate) fn composed<const N: usize>(
    operands: [Option<&Tensor>; N],
    body: impl FnOnce([Option<&Tensor>; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    let _behalf = Loc::caller().on_behalf(crate::folder());
    let is_half = |dtype: DType| dtype.is_float() && dtype.is_narrow();
    if !operands.iter().flatten().any(|t| is_half(t.dtype())) {
        return body(operands);
    }
    let floats = operands.iter().flatten().filter(|t| t.dtype().is_float());
    let tys: SmallVec<[Ty; 4]> = floats.map(|t| Ty::Tensor(t.ty())).collect();
    let dtype = result_dtype(&tys);
    if !is_half(dtype) {
        return body(operands);
    }
    let mut wide: [Option<Tensor>; N] = std::array::from_fn(|_| None);
    for (wide, operand) in wide.iter_mut().zip(operands) {
        *wide = match operand {
            Some(t) if t.dtype().is_float() => Some(t.to_dtype(DType::F32)?),
            other => other.cloned(),
        };
    }
    body(wide.each_ref().map(Option::as_ref))?.to_dtype(dtype)
}

/// [`composed`] of operands that are all there.
#[track_caller]
pub(crate) fn composed_of<const N: usize>(
    operands: [&Tensor; N],
    body: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<Tensor> {
    composed(operands.map(Some), |wide| {
        // Each is what `operands` had in its place.
        let mut given = operands;
        given.iter_mut().zip(wide).for_each(|(given, wide)| *given = wide.unwrap_or(given));
        body(given)
    })
}
