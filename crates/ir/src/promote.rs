//! Type promotion by PyTorch's rule: tensors with dims outrank 0-d tensors, which outrank numbers; a lower
//! rank only counts if its category (truth value, integer, float) is higher.

use crate::{DType, ScalarKind, Ty};

/// The dtype in which an op on these operands computes.
pub fn result_dtype(args: &[Ty]) -> DType {
    let (mut dims, mut zero, mut number) = (None, None, None);
    for ty in args {
        match ty {
            Ty::Tensor(t) if t.shape.rank() > 0 => dims = dims.max(Some(t.dtype)),
            Ty::Tensor(t) => zero = zero.max(Some(t.dtype)),
            Ty::Scalar(kind) => number = number.max(Some(*kind)),
            Ty::List(items) => dims = dims.max(items.iter().map(|t| t.dtype).max()),
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

    #[test]
    fn promotion_follows_pytorch() {
        let t = |d, n: usize| Ty::tensor(d, vec![2; n]);
        let float = Ty::Scalar(ScalarKind::Float);
        assert_eq!(result_dtype(&[t(DType::F32, 1), t(DType::F64, 0)]), DType::F32);
        assert_eq!(result_dtype(&[t(DType::I64, 1), t(DType::F64, 0)]), DType::F64);
        assert_eq!(result_dtype(&[t(DType::I64, 1), float.clone()]), DType::F32);
        assert_eq!(result_dtype(&[t(DType::F64, 1), float.clone()]), DType::F64);
        assert_eq!(result_dtype(&[t(DType::F32, 0), float]), DType::F32);
        assert_eq!(result_dtype(&[t(DType::Bool, 1), Ty::Scalar(ScalarKind::Int)]), DType::I64);
        assert_eq!(result_dtype(&[t(DType::F32, 1), t(DType::F64, 1)]), DType::F64);
    }
}
