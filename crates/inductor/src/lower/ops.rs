//! Which ops are operations of loops, and which are calls of a library.

use kiln_ir::{Class, DType, Graph, Node, Op};
use kiln_plan::loops::Operation;

use super::pooling;

/// The operation and the dtype its operands are converted to.
pub(crate) fn operation(op: &Op, operand: Option<DType>, result: DType) -> Option<(Operation, DType)> {
    let compared = operand.unwrap_or(result);
    Some(match op {
        Op::Add {} => (Operation::Add, result),
        Op::Sub {} => (Operation::Sub, result),
        Op::Mul {} => (Operation::Mul, result),
        Op::Div {} => (Operation::Div, result),
        Op::Pow {} => (Operation::Pow, result),
        Op::Maximum {} => (Operation::Maximum, result),
        Op::Minimum {} => (Operation::Minimum, result),
        Op::Neg {} => (Operation::Neg, result),
        Op::Abs {} => (Operation::Abs, result),
        Op::Sqrt {} => (Operation::Sqrt, result),
        Op::Eq {} => (Operation::Eq, compared),
        Op::Ne {} => (Operation::Ne, compared),
        Op::Lt {} => (Operation::Lt, compared),
        Op::Le {} => (Operation::Le, compared),
        Op::Gt {} => (Operation::Gt, compared),
        Op::Ge {} => (Operation::Ge, compared),
        Op::LogicalAnd {} => (Operation::And, DType::Bool),
        Op::LogicalNot {} => (Operation::Not, DType::Bool),
        Op::BitwiseAnd {} => (Operation::BitAnd, result),
        Op::BitwiseOr {} => (Operation::BitOr, result),
        Op::BitwiseXor {} => (Operation::BitXor, result),
        Op::BitwiseLeftShift {} => (Operation::ShiftLeft, result),
        Op::BitwiseRightShift {} => (Operation::ShiftRight, result),
        Op::Where {} => (Operation::Where, result),
        Op::To { dtype } => (Operation::Convert, *dtype),
        // Integers are round.
        Op::Floor {} | Op::Ceil {} | Op::Round {} | Op::Trunc {} if !result.is_float() => {
            (Operation::Convert, result)
        }
        _ => (Operation::Call(op.row().function?), result),
    })
}

/// Whether a node is computed at its consumers' index. All other nodes' results are stored by a step.
pub(crate) fn is_inlined(graph: &Graph, node: &Node) -> bool {
    let op = &node.op;
    operation(op, None, DType::F32).is_some()
        || pooling::is_inlined(graph, node)
        || matches!(
            op,
            Op::Reshape { .. }
                | Op::Permute { .. }
                | Op::Expand { .. }
                | Op::Slice { .. }
                | Op::Diagonal { .. }
                | Op::Unfold { .. }
                | Op::Flip { .. }
                | Op::Full { .. }
                | Op::Arange { .. }
                | Op::Gather { .. }
                | Op::Sum { .. }
                | Op::Amax { .. }
                | Op::Cumsum { .. }
                | Op::Cumprod { .. }
        )
}

/// Whether a node is a step of its own: a library call, or the eager kernel of an op without a loop form.
pub(crate) fn is_library(graph: &Graph, node: &Node) -> bool {
    let op = &node.op;
    let in_parts = matches!(op, Op::Cat { .. } | Op::SliceScatter { .. });
    let list = matches!(op.row().class, Class::List | Class::Constant);
    !(is_inlined(graph, node) || in_parts || list)
}

/// Whether the result of an operation on values of a narrow integer dtype may be outside its range. Halves are
/// kept in f32 until they are stored or converted.
pub(super) fn may_leave(operation: Operation, dtype: DType) -> bool {
    let stays = matches!(operation, Operation::Maximum | Operation::Minimum | Operation::Where);
    dtype.is_narrow() && !dtype.is_float() && !stays
}
