//! Eager: bits and the divisions of integers.

use kiln_ir::{Division, Op, Result, Why};

use super::{Input, Job, number_dtype};
use crate::kernels::{self, Bits};
use crate::tensor::Ready;

/// The division of integers that an op stands for.
pub(crate) fn division(op: &Op) -> Option<Division> {
    Some(match op {
        Op::FloorDivide {} => Division::FloorDivide,
        Op::DivTrunc {} => Division::DivTrunc,
        Op::Remainder {} => Division::Remainder,
        Op::Fmod {} => Division::Fmod,
        Op::IntegerDivision { division } => *division,
        _ => return None,
    })
}

impl Job<'_> {
    pub(super) fn divide(&self, division: Division, out: &Ready, inputs: &[Input]) -> Result<()> {
        // SAFETY: as in `function`; everything has one integer dtype.
        let done = self.pointwise(out.dtype, number_dtype(out.dtype), out, inputs, |out, inputs| unsafe {
            kernels::divide(division, out, inputs[0], inputs[1])
        })?;
        done.map_err(|(x, y)| {
            self.op.error(self.tys, Why::Division { x, y }, self.loc).named(division.name())
        })
    }

    pub(super) fn bits(&self, function: Bits, out: &Ready, inputs: &[Input]) -> Result<()> {
        // SAFETY: as in `function`; the type rule lets truth values and integers through only.
        self.pointwise(out.dtype, number_dtype(out.dtype), out, inputs, |out, inputs| unsafe {
            kernels::bits(function, out, inputs[0], inputs[1]);
        })
    }
}
