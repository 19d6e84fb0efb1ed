//! Reductions over dims, and softmax along one.

use kiln_ir::math::Function;
use kiln_ir::{Dims, Layout, Result, Scalar, TensorTy};

use super::{Input, Job, operand};
use crate::create::allocate;
use crate::kernels;
use crate::tensor::Ready;

impl Job<'_> {
    pub(super) fn reduce(
        &self,
        reduction: kernels::Reduction,
        out: &Ready,
        inputs: &[Input],
        dims: &Dims,
    ) -> Result<()> {
        let x = self.tensor(inputs, 0)?;
        // The kernel drops the dims; dense memory is the same with them kept as 1.
        let dropped =
            Ready { layout: Layout::contiguous(x.layout.shape.reduced(dims, false)), ..out.clone() };
        if dims.is_empty() {
            // SAFETY: `out` is fresh, `x` locked for reading; nothing is reduced, so shapes agree.
            unsafe { kernels::convert(&operand(&dropped), &operand(x)) }
        } else {
            // SAFETY: `out` is fresh and dense, of the shape that is left; dims were checked by the type rule.
            unsafe { kernels::reduce(reduction, &operand(&dropped), &operand(x), dims) }
        }
        Ok(())
    }

    pub(super) fn mean(&self, out: &Ready, inputs: &[Input], dims: &Dims) -> Result<()> {
        if out.dtype.is_narrow() {
            // A sum of halves could overflow where the mean does not.
            let ty = TensorTy { dtype: out.dtype.computing(), ..out.ty() };
            let wide = allocate(&ty, self.op.name(), self.loc)?;
            self.mean(&wide, inputs, dims)?;
            // SAFETY: both are fresh and of one shape.
            unsafe { kernels::convert(&operand(out), &operand(&wide)) };
            return Ok(());
        }
        self.reduce(kernels::Reduction::Sum, out, inputs, dims)?;
        let shape = &self.tensor(inputs, 0)?.layout.shape;
        let count: usize = dims.iter().map(|&d| shape[d]).product();
        self.function(Function::Div, out, &[Input::Tensor(out), Input::Number(Scalar::Float(count as f64))])
    }

    pub(super) fn softmax(&self, logarithm: bool, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let x = self.tensor(inputs, 0)?;
        if x.layout.shape.numel() > 0 {
            // SAFETY: `out` is fresh and has `x`'s shape and dtype; `x` is locked for reading.
            unsafe { kernels::softmax(logarithm, &operand(out), &operand(x), dim) };
        }
        Ok(())
    }
}
