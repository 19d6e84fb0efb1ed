//! Building the expressions of a kernel: conversions, numbers, and pointwise ops.

use kiln_ir::{DType, Loc, Op, ScalarKind, Ty, Value};
use kiln_plan::index::ExprId;
use kiln_plan::loops::{Expr, ExprKind, Operation};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::ops::{may_leave, operation};

/// Builds expressions, each once. Their dtypes are those that elements are computed in.
#[derive(Default)]
pub(crate) struct Builder {
    pub exprs: Vec<Expr>,
    known: FxHashMap<Expr, ExprId>,
    pub scalars: Vec<(Value, ScalarKind)>,
    /// The line on whose behalf expressions are built now.
    pub loc: Loc,
}

impl Builder {
    pub fn push(&mut self, dtype: DType, kind: ExprKind) -> ExprId {
        let expr = Expr { dtype, kind, loc: self.loc };
        if let Some(&id) = self.known.get(&expr) {
            return id;
        }
        let id = self.exprs.len();
        self.exprs.push(expr.clone());
        self.known.insert(expr, id);
        id
    }

    pub fn scalar(&mut self, value: Value, dtype: DType) -> ExprId {
        let key = (value, dtype.kind());
        let at = self.scalars.iter().position(|s| *s == key).unwrap_or_else(|| {
            self.scalars.push(key);
            self.scalars.len() - 1
        });
        let number = self.push(dtype.computing(), ExprKind::Scalar(at));
        if dtype.is_float() { number } else { self.narrow(number, dtype) }
    }

    /// In the type in which a dtype is computed, not yet rounded or wrapped to it.
    pub fn convert(&mut self, expr: ExprId, dtype: DType) -> ExprId {
        let dtype = dtype.computing();
        if self.exprs[expr].dtype == dtype {
            return expr;
        }
        self.push(dtype, ExprKind::Apply(Operation::Convert, smallvec![expr]))
    }

    /// An integer brought into a range.
    fn limited(&mut self, expr: ExprId, (least, most): (i64, i64)) -> ExprId {
        let (least, most) =
            (self.push(DType::I64, ExprKind::Literal(least)), self.push(DType::I64, ExprKind::Literal(most)));
        let raised = self.push(DType::I64, ExprKind::Apply(Operation::Maximum, smallvec![expr, least]));
        self.push(DType::I64, ExprKind::Apply(Operation::Minimum, smallvec![raised, most]))
    }

    /// Rounded or wrapped to a dtype.
    pub fn narrow(&mut self, expr: ExprId, dtype: DType) -> ExprId {
        if dtype.is_narrow() { self.push(dtype.computing(), ExprKind::Narrow(dtype, expr)) } else { expr }
    }

    /// A pointwise op. `operand` gives the expression of operand i as it is, or as a number of a dtype.
    pub fn pointwise<E>(
        &mut self,
        op: &Op,
        args: &[Value],
        operand_dtype: Option<DType>,
        result: DType,
        operand: &mut dyn FnMut(&mut Builder, Value, DType) -> Result<ExprId, E>,
    ) -> Result<Option<ExprId>, E> {
        let Some((operation, dtype)) = operation(op, operand_dtype, result) else { return Ok(None) };
        let mut exprs: SmallVec<[ExprId; 3]> = SmallVec::new();
        for (i, &arg) in args.iter().enumerate() {
            let wanted = if operation == Operation::Where && i == 0 { DType::Bool } else { dtype };
            // A limit is brought into the dtype's range before it is taken for an element.
            let range = wanted.narrow_range().filter(|_| op.takes_limits());
            let expr = operand(self, arg, if range.is_some() { wanted.computing() } else { wanted })?;
            let expr = self.convert(expr, wanted);
            exprs.push(match (range, &self.exprs[expr].kind) {
                (Some(range), ExprKind::Scalar(_)) => self.limited(expr, range),
                _ => expr,
            });
        }
        if operation == Operation::Convert {
            let fits = operand_dtype.is_some_and(|from| dtype.holds(from));
            return Ok(Some(if fits { exprs[0] } else { self.narrow(exprs[0], dtype) }));
        }
        let value = self.push(result.computing(), ExprKind::Apply(operation, exprs));
        Ok(Some(if may_leave(operation, result) { self.narrow(value, result) } else { value }))
    }
}

/// The dtype of the tensors a pointwise op reads (conditions don't count).
pub(crate) fn operand_dtype<'a>(op: &Op, tys: impl Iterator<Item = &'a Ty>, row: usize) -> Option<DType> {
    let skip = usize::from(matches!(op, Op::Where {}));
    tys.skip(skip).find_map(|ty| match ty {
        Ty::Tensor(t) => Some(t.dtype),
        Ty::List(items) => items.get(row).map(|t| t.dtype),
        Ty::Scalar(_) => None,
    })
}
