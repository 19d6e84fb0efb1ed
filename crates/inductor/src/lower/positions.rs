//! Positions: numbers that count elements, as masks compare them.

use kiln_ir::{DType, Op, Scalar, Value};
use smallvec::SmallVec;

use crate::lower::Lowering;
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{ExprKind, Operation};

/// Whole numbers up to this are exact in single precision.
const EXACT: i64 = 1 << 24;

impl Lowering<'_> {
    /// The number of the program's text that a value is, if it is a whole one.
    pub(crate) fn whole(&self, value: Value) -> Option<i64> {
        match self.cx.graph.producer(value)?.op {
            Op::Constant { value: Scalar::Int(number) } => Some(number),
            _ => None,
        }
    }

    /// Whether a position is exact in single precision.
    pub(crate) fn is_exact(&self, index: &Index) -> bool {
        index.constant > -EXACT && index.largest(&self.extents).is_some_and(|most| most < EXACT)
    }

    /// A comparison of positions, or whether an index is one, in single precision if that is exact: vectors then are
    /// as wide as those of the numbers that the mask is for.
    pub(crate) fn compared_positions(&mut self, op: &Op, exprs: &[ExprId]) -> Option<ExprId> {
        let operation = match op {
            Op::Eq {} => Operation::Eq,
            Op::Ne {} => Operation::Ne,
            Op::Lt {} => Operation::Lt,
            Op::Le {} => Operation::Le,
            Op::Gt {} => Operation::Gt,
            Op::Ge {} => Operation::Ge,
            _ => return None,
        };
        let is_position = |&expr: &ExprId| {
            matches!(self.builder.exprs.get(expr).map(|expr| &expr.kind), Some(ExprKind::Position(_)))
        };
        let is_equality = matches!(operation, Operation::Eq | Operation::Ne);
        let fits = exprs.iter().all(is_position) || is_equality && exprs.iter().any(is_position);
        if !fits {
            return None;
        }
        let mut positions: SmallVec<[ExprId; 3]> = SmallVec::new();
        for &expr in exprs {
            let ExprKind::Position(index) = &self.builder.exprs.get(expr)?.kind else {
                // Whatever is not exact is no position: those are all below.
                if self.builder.exprs[expr].dtype != DType::I64 {
                    return None;
                }
                positions.push(self.builder.convert(expr, DType::F32));
                continue;
            };
            let index = index.clone();
            self.is_exact(&index).then_some(())?;
            positions.push(self.builder.push(DType::F32, ExprKind::Position(index)));
        }
        Some(self.builder.push(DType::Bool, ExprKind::Apply(operation, positions)))
    }
}
