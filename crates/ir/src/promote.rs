//! Type promotion by PyTorch's rule: tensors with dims outrank 0-d tensors, which outrank numbers; a lower
//! rank only counts if its category (truth value, integer, float) is higher.

use crate::{DType, ScalarKind, Ty};

/// The smallest dtype for values of both: u8 with a signed integer of its width gives the next wider one, the
/// two halves give f32, and a float takes any integer whatever their widths.
pub fn promote(a: DType, b: DType) -> DType {
    match (a.min(b), a.max(b)) {
        (DType::U8, DType::I8) => DType::I16,
        (DType::F16, DType::BF16) => DType::F32,
        (_, wider) => wider,
    }
}

fn join(known: &mut Option<DType>, dtype: DType) {
    *known = Some(known.map_or(dtype, |known| promote(known, dtype)));
}

/// The dtype in which an op on these operands computes.
pub fn result_dtype(args: &[Ty]) -> DType {
    let (mut dims, mut zero, mut number) = (None, None, None);
    for ty in args {
        match ty {
            Ty::Tensor(t) if t.shape.rank() > 0 => join(&mut dims, t.dtype),
            Ty::Tensor(t) => join(&mut zero, t.dtype),
            Ty::Scalar(kind) => number = number.max(Some(*kind)),
            Ty::List(items) => items.kinds().for_each(|t| join(&mut dims, t.dtype)),
        }
    }
    let mut result = dims;
    if let Some(dtype) = zero
        && result.is_none_or(|r: DType| dtype.kind() > r.kind())
    {
        result = Some(dtype);
    }
    if let Some(kind) = number
        && result.is_none_or(|r| kind > r.kind())
    {
        // A bare number takes the default dtype of its category; alone among numbers, its own.
        let alone = dims.is_none() && zero.is_none();
        result = Some(if kind == ScalarKind::Float && !alone { DType::F32 } else { kind.dtype() });
    }
    result.unwrap_or(DType::F32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};

    /// PyTorch's `promote_types`, rows and columns in the order of [`DType::ALL`].
    const TENSORS: [[DType; 10]; 10] = [
        [Bool, U8, I8, I16, I32, I64, F16, BF16, F32, F64],
        [U8, U8, I16, I16, I32, I64, F16, BF16, F32, F64],
        [I8, I16, I8, I16, I32, I64, F16, BF16, F32, F64],
        [I16, I16, I16, I16, I32, I64, F16, BF16, F32, F64],
        [I32, I32, I32, I32, I32, I64, F16, BF16, F32, F64],
        [I64, I64, I64, I64, I64, I64, F16, BF16, F32, F64],
        [F16, F16, F16, F16, F16, F16, F16, F32, F32, F64],
        [BF16, BF16, BF16, BF16, BF16, BF16, F32, BF16, F32, F64],
        [F32, F32, F32, F32, F32, F32, F32, F32, F32, F64],
        [F64, F64, F64, F64, F64, F64, F64, F64, F64, F64],
    ];

    /// PyTorch's `result_type` of a tensor and a truth value, an integer, a float.
    const NUMBERS: [[DType; 3]; 10] = [
        [Bool, I64, F32],
        [U8, U8, F32],
        [I8, I8, F32],
        [I16, I16, F32],
        [I32, I32, F32],
        [I64, I64, F32],
        [F16, F16, F16],
        [BF16, BF16, BF16],
        [F32, F32, F32],
        [F64, F64, F64],
    ];

    #[test]
    fn promotion_is_pytorchs_table() {
        for (a, row) in DType::ALL.into_iter().zip(TENSORS) {
            for (b, want) in DType::ALL.into_iter().zip(row) {
                for rank in [0, 1] {
                    let t = |d| Ty::tensor(d, vec![2; rank]);
                    assert_eq!(result_dtype(&[t(a), t(b)]), want, "{a} and {b}");
                }
                // A 0-d tensor counts only where its category is higher.
                let mixed = result_dtype(&[Ty::tensor(a, [2]), Ty::tensor(b, ())]);
                assert_eq!(mixed, if b.kind() > a.kind() { b } else { a }, "{a}[2] and {b}[]");
            }
        }
        for (a, row) in DType::ALL.into_iter().zip(NUMBERS) {
            for (kind, want) in [ScalarKind::Bool, ScalarKind::Int, ScalarKind::Float].into_iter().zip(row) {
                for rank in [0, 1] {
                    let tys = [Ty::tensor(a, vec![2; rank]), Ty::Scalar(kind)];
                    assert_eq!(result_dtype(&tys), want, "{a} and {}", kind.name());
                }
            }
        }
    }

    #[test]
    fn numbers_alone_keep_their_own_dtype() {
        assert_eq!(result_dtype(&[Ty::Scalar(ScalarKind::Float), Ty::Scalar(ScalarKind::Int)]), F64);
        assert_eq!(result_dtype(&[Ty::Scalar(ScalarKind::Bool)]), Bool);
    }
}
