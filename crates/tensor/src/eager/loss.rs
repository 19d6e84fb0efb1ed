//! Eager: the losses that have kernels.

use kiln_ir::math::Function;
use kiln_ir::{Op, Result, Shape, TensorTy, Why};

use super::{Input, Job, operand};
use crate::create::allocate;
use crate::kernels;
use crate::tensor::Ready;

impl Job<'_> {
    /// Of a matrix of halves only what is picked is widened; the loss is rounded once.
    pub(super) fn nll_loss_of_halves(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let wide =
            allocate(&TensorTy { dtype: out.dtype.computing(), ..out.ty() }, self.op.name(), self.loc)?;
        self.nll_loss(&wide, self.tensor(inputs, 0)?, self.tensor(inputs, 1)?)?;
        // SAFETY: both are fresh and of one shape.
        unsafe { kernels::convert(&operand(out), &operand(&wide)) };
        Ok(())
    }

    /// Into an `out` of the dtype that the input is computed in.
    pub(super) fn nll_loss(&self, out: &Ready, input: &Ready, target: &Ready) -> Result<()> {
        let (Op::NllLoss { reduction, ignore_index } | Op::CrossEntropy { reduction, ignore_index }) =
            self.op
        else {
            return Ok(());
        };
        let shape = &input.layout.shape;
        let rows = if shape.rank() == 2 { shape[0] } else { 1 };
        let classes = shape[shape.rank() - 1];
        let matrix = self.as_shape(input, Shape::from([rows, classes]))?;
        let target = self.as_shape(target, Shape::from([rows]))?;
        let ty = TensorTy::new(out.dtype, [rows]);
        let losses = match reduction {
            kiln_ir::Reduction::None => self.as_shape(out, Shape::from([rows]))?,
            _ => allocate(&ty, self.op.name(), self.loc)?,
        };
        let weights = allocate(&ty, self.op.name(), self.loc)?;
        let (losses_operand, weights_operand) = (operand(&losses), operand(&weights));
        // SAFETY: outputs are fresh and [rows]; `matrix` is [rows, classes] and `target` [rows] of i64.
        let checked = unsafe {
            kernels::nll_forward(
                &losses_operand,
                &weights_operand,
                &operand(&matrix),
                &operand(&target),
                None,
                *ignore_index,
            )
        };
        checked.map_err(|e| {
            self.op.error(self.tys, Why::Index { index: e.target, size: e.classes }, self.loc)
        })?;
        let sum = |from: &Ready, to: &Ready| {
            // SAFETY: `to` is fresh and 0-d; `from` is fresh and [rows].
            unsafe { kernels::reduce(kernels::Reduction::Sum, &operand(to), &operand(from), &[0]) };
        };
        match reduction {
            kiln_ir::Reduction::None => Ok(()),
            kiln_ir::Reduction::Sum => {
                sum(&losses, out);
                Ok(())
            }
            kiln_ir::Reduction::Mean => {
                let count = allocate(&TensorTy::new(out.dtype, ()), self.op.name(), self.loc)?;
                sum(&losses, out);
                sum(&weights, &count);
                self.function(Function::Div, out, &[Input::Tensor(out), Input::Tensor(&count)])
            }
        }
    }

    pub(super) fn cross_entropy(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (x, target) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let scores = allocate(&x.ty(), self.op.name(), self.loc)?;
        let dim = x.layout.shape.rank() - 1;
        self.softmax(true, &scores, inputs, dim)?;
        self.nll_loss(out, &scores, target)
    }
}
