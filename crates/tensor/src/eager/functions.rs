//! Eager: scalar functions.

use kiln_ir::math::Function;
use kiln_ir::{Approximate, Op, Result, Scalar, Why};

use super::{Input, Job, number_dtype, operand};
use crate::kernels;
use crate::tensor::Ready;

/// The scalar function that a pointwise op with this many operands computes, for ops that are one.
pub(crate) fn function(op: &Op, operands: usize) -> Option<Function> {
    let function = match op {
        Op::Add {} if operands == 3 => Function::AddAlpha,
        Op::Sub {} if operands == 3 => Function::SubAlpha,
        Op::Gelu { approximate: Approximate::Tanh } => Function::GeluTanh,
        _ => op.row().function?,
    };
    (function.arity() == operands).then_some(function)
}

/// The function that the power with this exponent is on floats, where it is one that is quicker.
pub(crate) fn power(exponent: Scalar) -> Option<Function> {
    match exponent.as_f64() {
        2.0 => Some(Function::Square),
        3.0 => Some(Function::Cube),
        _ => None,
    }
}

/// Whether an op with this many operands has a kernel of its own; the others run by their decomposition, each
/// step of which rounds to the dtype of its result.
pub(crate) fn has_kernel(op: &Op, operands: usize) -> bool {
    op.row().decompose.is_none() || function(op, operands).is_some() || op.row().kernel
}

impl Job<'_> {
    pub(super) fn function(&self, function: Function, out: &Ready, inputs: &[Input]) -> Result<()> {
        // SAFETY: inputs are locked for reading, `out` is fresh or locked for writing; all are broadcast to
        // its shape and of one dtype; `compute_in_place` let no partial overlap through.
        let done = self.pointwise(out.dtype, number_dtype(out.dtype), out, inputs, |out, inputs| unsafe {
            kernels::pointwise(function, out, inputs)
        });
        done?.map_err(|unsupported| {
            self.op.error(self.tys, Why::Unsupported { dtype: unsupported.dtype }, self.loc)
        })
    }

    /// A power of floats with one exponent for all, where that is something quicker.
    pub(super) fn power(&self, out: &Ready, inputs: &[Input]) -> Option<Result<()>> {
        let (Op::Pow {}, &[x @ Input::Tensor(_), Input::Number(exponent)]) = (self.op, inputs) else {
            return None;
        };
        if !out.dtype.is_float() {
            return None;
        }
        match exponent.as_f64() {
            // SAFETY: `out` is fresh or locked for writing.
            0.0 => unsafe {
                kernels::fill(&operand(out), Scalar::Int(1).to_element(out.dtype));
                return Some(Ok(()));
            },
            1.0 => return Some(self.copy_into(out, inputs, 0)),
            _ => {}
        }
        power(exponent).map(|function| self.function(function, out, &[x]))
    }
}
