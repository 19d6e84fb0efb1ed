//! Reductions over dims, and softmax along one.

use kiln_ir::math::Function;
use kiln_ir::{DType, Dims, Layout, Result, Scalar, TensorTy};

use super::{Input, Job, elements, operand};
use crate::create::allocate;
use crate::kernels::{self, Comparison};
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

    pub(super) fn nansum(&self, out: &Ready, inputs: &[Input], dims: &Dims) -> Result<()> {
        // In the order of a sum of what its decomposition chooses, which is dense.
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let dropped =
            Ready { layout: Layout::contiguous(x.layout.shape.reduced(dims, false)), ..out.clone() };
        // SAFETY: as in `reduce`.
        unsafe { kernels::reduce(kernels::Reduction::Nansum, &operand(&dropped), &operand(&x), dims) };
        Ok(())
    }

    /// The gradient of a product, as its decomposition has it; without zeros it is the product over each factor.
    pub(super) fn prod_backward(&self, out: &Ready, inputs: &[Input], dims: &Dims) -> Result<()> {
        let (g, x) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let (ty, small) = (x.ty(), g.ty());
        let of = |ty: &TensorTy, dtype| allocate(&TensorTy { dtype, ..ty.clone() }, self.op.name(), self.loc);
        let number = |x: f64| Input::Number(Scalar::Float(x));
        let compare = |x: &Ready, y: f64, ty: &TensorTy| {
            let hit = of(ty, DType::Bool)?;
            self.compare(Comparison::Eq, &hit, &[Input::Tensor(x), number(y)]).map(|()| hit)
        };
        let product = |factors: &Ready| {
            let product = of(&small, x.dtype)?;
            self.reduce(kernels::Reduction::Prod, &product, &[Input::Tensor(factors)], dims)?;
            let args = [Input::Tensor(g), Input::Tensor(&product)];
            self.function(Function::Mul, &product, &args).map(|()| product)
        };
        let nothing = compare(x, 0.0, &ty)?;
        // SAFETY: fresh and dense, as many truth values.
        if kernels::count(unsafe { elements(&nothing, ty.shape.numel()) }) == 0 {
            return self.function(Function::Div, out, &[Input::Tensor(&product(x)?), Input::Tensor(x)]);
        }
        let (others, marks, zeros) = (of(&ty, x.dtype)?, of(&ty, x.dtype)?, of(&small, x.dtype)?);
        self.choose(&others, &[Input::Tensor(&nothing), number(1.0), Input::Tensor(x)])?;
        // SAFETY: both are fresh and of one shape.
        unsafe { kernels::convert(&operand(&marks), &operand(&nothing)) };
        self.reduce(kernels::Reduction::Sum, &zeros, &[Input::Tensor(&marks)], dims)?;
        let (none, single) = (compare(&zeros, 0.0, &small)?, compare(&zeros, 1.0, &small)?);
        let quotient = marks;
        self.function(
            Function::Div,
            &quotient,
            &[Input::Tensor(&product(&others)?), Input::Tensor(&others)],
        )?;
        // What is not zero counts where nothing is, a zero where it is the only one.
        let (rest, lone) = (others, of(&ty, x.dtype)?);
        self.choose(&rest, &[Input::Tensor(&none), Input::Tensor(&quotient), number(0.0)])?;
        self.choose(&lone, &[Input::Tensor(&single), Input::Tensor(&quotient), number(0.0)])?;
        self.choose(out, &[Input::Tensor(&nothing), Input::Tensor(&lone), Input::Tensor(&rest)])
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
