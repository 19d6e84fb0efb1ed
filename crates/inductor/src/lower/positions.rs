//! Positions: numbers that count elements, as masks compare them.

use kiln_ir::{DType, Op, Scalar, Value};
use smallvec::SmallVec;

use crate::lower::Lowering;
use kiln_plan::index::{ExprId, Index, Term};
use kiln_plan::loops::{ExprKind, Operation};

/// An integer that is more work to see through is computed.
const MOST_STEPS: usize = 64;
/// The largest factor of a position: times what an index may be, it is still an integer.
const LARGEST_STEP: i64 = 1 << 22;
/// Whole numbers up to this are exact in single precision.
const EXACT: i64 = 1 << 24;

fn sum(x: &Index, y: &Index, factor: i64) -> Index {
    let mut sum = x.clone();
    sum.add_scaled(y, factor);
    sum
}

impl Lowering<'_> {
    /// The number of the program's text that a value is, if it is a whole one.
    pub(crate) fn whole(&self, value: Value) -> Option<i64> {
        match self.cx.graph.producer(value)?.op {
            Op::Constant { value: Scalar::Int(number) } => Some(number),
            _ => None,
        }
    }

    /// An integer that loops alone decide, and that is sure to be in `0..size`: a place that needs no check.
    ///
    /// ```text
    /// %1 = position [i0 + -2]
    /// %2 = abs(%1)                          →      abs(i0 + -2)
    /// %3 = bounded(%2, 37, 1)
    /// ```
    pub(crate) fn place_of(&self, expr: ExprId, size: i64) -> Option<Index> {
        let place = self.position_of(expr, &mut { MOST_STEPS })?;
        let (least, most) = place.range(&self.extents)?;
        (least >= 0 && most < size).then_some(place)
    }

    /// An integer as an index: what is computed from loop variables and numbers of the program's text.
    fn position_of(&self, expr: ExprId, left: &mut usize) -> Option<Index> {
        *left = left.checked_sub(1)?;
        // What is known of places holds of integers that don't wrap.
        let known = |index: Index| index.range(&self.extents).map(|_| index);
        let (op, args) = match &self.builder.exprs[expr].kind {
            ExprKind::Position(index) => return known(index.clone()),
            ExprKind::Literal(number) => return known(Index::constant(*number)),
            ExprKind::Scalar(scalar) => {
                return known(Index::constant(self.whole(self.builder.scalars[*scalar].0)?));
            }
            ExprKind::Apply(op, args) if self.builder.exprs[expr].dtype == DType::I64 => (*op, args),
            _ => return None,
        };
        let operands: SmallVec<[Index; 2]> =
            args.iter().map(|&arg| self.position_of(arg, left)).collect::<Option<_>>()?;
        let number = |index: &Index| index.terms.is_empty().then_some(index.constant);
        let made = match (op, &operands[..]) {
            (Operation::Add, [x, y]) => sum(x, y, 1),
            (Operation::Sub, [x, y]) => sum(x, y, -1),
            (Operation::Mul, [x, y]) => {
                let (of, factor) = number(x).map_or((x, number(y)), |factor| (y, Some(factor)));
                of.scaled(factor.filter(|factor| factor.abs() <= LARGEST_STEP)?, 0)
            }
            (Operation::Neg, [x]) => x.scaled(-1, 0),
            (Operation::Abs, [x]) => x.clone().magnitude(&self.extents)?,
            // Between 0 and a number: a position at the border of a line.
            (Operation::Minimum, [x, y]) => {
                let (Some(most), [(Term::Clamp(inner, end), 1)], 0) = (number(y), &x.terms[..], x.constant)
                else {
                    return None;
                };
                (most >= 0).then(|| (**inner).clone().clamped(most.min(*end)))?
            }
            (Operation::Maximum, [x, y]) if number(y) == Some(0) => {
                let (_, most) = x.range(&self.extents)?;
                x.clone().clamped(most.max(0))
            }
            _ => return None,
        };
        known(made)
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
