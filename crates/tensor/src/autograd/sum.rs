//! What arrives at one tensor in a backward pass: gradients of all of it, or of parts.
//!
//! Parts cost what they hold: they are kept until they are needed or meet, then put together once; later ones are added
//! to the whole in place ([`Parts`] says why that is what compiled code computes).

use kiln_ir::{Loc, Op, Parts, Result, TensorTy, Window};

use super::emit::EagerEmit;
use crate::Tensor;
use crate::dispatch::{dispatch_tensor, execute, execute_tensor};
use crate::hook::{Arg, Call};

/// A gradient on its way to an operand.
pub(super) enum Arrival {
    /// Of the whole operand.
    Whole(Tensor),
    /// Of a window of the operand, which has this type.
    Part(TensorTy, Window, Tensor),
}

/// The sum of what has arrived so far.
pub(super) enum Sum {
    Whole {
        grad: Tensor,
        /// Nobody else has its memory.
        is_own: bool,
    },
    Parts(Parts<Tensor>),
}

impl Sum {
    pub(super) fn new(first: Arrival) -> Sum {
        match first {
            Arrival::Whole(grad) => Sum::Whole { grad, is_own: false },
            Arrival::Part(ty, window, part) => Sum::Parts(Parts::new(ty, window, part)),
        }
    }

    /// With another gradient; on the tape if `create_graph`.
    pub(super) fn add(self, next: Arrival, create_graph: bool) -> Result<Sum> {
        match (self, next) {
            (Sum::Parts(mut parts), Arrival::Part(_, window, part)) => match parts.take(window, part) {
                None => Ok(Sum::Parts(parts)),
                Some(part) => add_part(join(parts, create_graph)?, true, window, part, create_graph),
            },
            (Sum::Whole { grad, is_own }, Arrival::Part(_, window, part)) => {
                add_part(grad, is_own, window, part, create_graph)
            }
            (sum, Arrival::Whole(next)) => {
                let before = sum.whole(create_graph)?;
                Ok(Sum::Whole { grad: add(create_graph, &before, &next)?, is_own: !create_graph })
            }
        }
    }

    /// The gradient of the whole tensor.
    pub(super) fn whole(self, create_graph: bool) -> Result<Tensor> {
        match self {
            Sum::Whole { grad, .. } => Ok(grad),
            Sum::Parts(parts) => join(parts, create_graph),
        }
    }
}

fn join(parts: Parts<Tensor>, create_graph: bool) -> Result<Tensor> {
    let mut cx = EagerEmit::new(create_graph, Loc::UNKNOWN);
    let whole = parts.map(|part| cx.tensor(&part)).joined(&mut cx)?;
    cx.take(whole)
}

fn add_part(grad: Tensor, is_own: bool, window: Window, part: Tensor, create_graph: bool) -> Result<Sum> {
    if create_graph {
        let args = [Arg::Tensor(&grad), Arg::Tensor(&part)];
        let grad = dispatch_tensor(&window.add(), &args, false, Loc::UNKNOWN)?;
        return Ok(Sum::Whole { grad, is_own: false });
    }
    let grad =
        if is_own { grad } else { execute_tensor(&Op::Clone {}, &[Arg::Tensor(&grad)], Loc::UNKNOWN)? };
    let view = execute_tensor(&window.slice(), &[Arg::Tensor(&grad)], Loc::UNKNOWN)?;
    let args = [Arg::Tensor(&view), Arg::Tensor(&part)];
    execute(&Call { op: &Op::Add {}, args: &args, in_place: true, grad_enabled: false, loc: Loc::UNKNOWN })?;
    Ok(Sum::Whole { grad, is_own: true })
}

pub(super) fn add(create_graph: bool, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let args = [Arg::Tensor(a), Arg::Tensor(b)];
    if create_graph {
        dispatch_tensor(&Op::Add {}, &args, false, Loc::UNKNOWN)
    } else {
        execute_tensor(&Op::Add {}, &args, Loc::UNKNOWN)
    }
}
