//! `gather` and its gradient: one element for every index along a dim.

use kiln_ir::{DType, Result, Why};

use super::{Input, Job, elements, operand};
use crate::kernels::{self, Picks, Shared};
use crate::tensor::Ready;

impl Job<'_> {
    /// Positions along a dim of this size, checked and dense, and how many they are.
    pub(super) fn positions(&self, index: &Ready, size: usize) -> Result<(Ready, usize)> {
        let index = self.dense(index)?;
        let n = index.layout.shape.numel();
        // SAFETY: `index` is dense i64, locked for reading or fresh.
        let all = unsafe { elements::<i64>(&index, n) };
        match kernels::outside(all, size) {
            Some(bad) => Err(self.op.error(self.tys, Why::Index { index: bad, size }, self.loc)),
            None => Ok((index, n)),
        }
    }

    pub(super) fn gather(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let (x, index) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let (index, n) = self.positions(index, x.layout.shape[dim])?;
        // SAFETY: as in `positions`.
        let picked = unsafe { elements::<i64>(&index, n) };
        let picks = Picks { index: picked, shape: &index.layout.shape, strides: &x.layout.strides, dim };
        let memory = Shared::new((x.pointer(), out.pointer()));
        macro_rules! pick {
            ($ty:ty) => {
                // SAFETY: coordinates lie inside `index`, whose other sizes are at most x's, and picks inside x's
                // dim; `out` is fresh, dense and has `n` elements.
                picks.each(false, |place, i| unsafe {
                    let (from, to) = memory.get();
                    to.cast::<$ty>().add(i).write(from.cast::<$ty>().offset(place).read());
                })
            };
        }
        match x.dtype.size() {
            1 => pick!(u8),
            2 => pick!(u16),
            4 => pick!(u32),
            _ => pick!(u64),
        }
        Ok(())
    }

    pub(super) fn gather_backward(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let (src, index) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let (index, n) = self.positions(index, out.layout.shape[dim])?;
        let src = self.dense(src)?;
        // SAFETY: `out` is fresh.
        unsafe { kernels::fill(&operand(out), 0) };
        // SAFETY: as in `positions`.
        let picked = unsafe { elements::<i64>(&index, n) };
        let picks = Picks { index: picked, shape: &index.layout.shape, strides: &out.layout.strides, dim };
        let memory = Shared::new((src.pointer(), out.pointer()));
        macro_rules! scatter {
            ($ty:ty, $add:expr) => {{
                let add: fn($ty, $ty) -> $ty = $add;
                // SAFETY: coordinates lie inside `index`, whose other sizes are out's; picks were checked; a place is one
                // thread's; `src` is dense with `n` elements.
                picks.each(true, |place, i| unsafe {
                    let (from, to) = memory.get();
                    let place = to.cast::<$ty>().offset(place);
                    *place = add(*place, from.cast::<$ty>().add(i).read());
                })
            }};
        }
        match out.dtype {
            DType::F32 => scatter!(f32, |a, b| a + b),
            DType::F64 => scatter!(f64, |a, b| a + b),
            DType::Bool => scatter!(u8, |a, b| a | b),
            _ => scatter!(i64, i64::wrapping_add),
        }
        Ok(())
    }
}
