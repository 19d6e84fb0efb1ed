//! Eager: random numbers.

use kiln_ir::math::Function;
use kiln_ir::{DType, Result, Scalar};
use kiln_runtime::random;

use super::{Input, Job, elements_mut};
use crate::tensor::Ready;

impl Job<'_> {
    pub(super) fn random(&self, out: &Ready, inputs: &[Input], first: usize) -> Result<()> {
        let (seed, offset) =
            (self.number(inputs, first)?.as_i64() as u64, self.number(inputs, first + 1)?.as_i64() as u64);
        let n = out.layout.shape.numel();
        // SAFETY: `out` is fresh, dense and has `n` elements of the dtype.
        unsafe {
            match out.dtype {
                DType::F64 => random::fill_uniform_f64(elements_mut(out, n), seed, offset, 0.0, 1.0),
                _ => random::fill_uniform_f32(elements_mut(out, n), seed, offset, 0.0, 1.0),
            }
        }
        Ok(())
    }

    pub(super) fn normal(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let (seed, offset) =
            (self.number(inputs, 0)?.as_i64() as u64, self.number(inputs, 1)?.as_i64() as u64);
        let n = out.layout.shape.numel();
        // SAFETY: as in `random`.
        unsafe {
            match out.dtype {
                DType::F64 => random::fill_normal_f64(elements_mut(out, n), seed, offset, 0.0, 1.0),
                _ => random::fill_normal_f32(elements_mut(out, n), seed, offset, 0.0, 1.0),
            }
        }
        Ok(())
    }

    /// low + (high − low)·x, in the order of `uniform`'s decomposition.
    pub(super) fn scale(&self, out: &Ready, low: f64, high: f64) -> Result<()> {
        let number = |x| Input::Number(Scalar::Float(x));
        self.function(Function::Mul, out, &[Input::Tensor(out), number(high - low)])?;
        self.function(Function::Add, out, &[Input::Tensor(out), number(low)])
    }
}
