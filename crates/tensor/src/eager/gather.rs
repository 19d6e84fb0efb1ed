//! `gather` and its gradient: one element for every index along a dim.

use smallvec::SmallVec;

use kiln_ir::{DType, Result, Shape, Why};
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;

use super::{Input, Job, elements, operand};
use crate::kernels::{self, Shared};
use crate::tensor::Ready;

impl Job<'_> {
    /// Positions along `dim` of every element of `index`, checked, and the flat offsets of their rows.
    pub(super) fn positions(&self, index: &Ready, size: usize) -> Result<(Ready, usize)> {
        let index = self.dense(index)?;
        let n = index.layout.shape.numel();
        // SAFETY: `index` is dense i64, locked for reading or fresh.
        let all = unsafe { elements::<i64>(&index, n) };
        match all.iter().find(|&&i| i < 0 || i >= size as i64) {
            Some(&bad) => Err(self.op.error(self.tys, Why::Index { index: bad, size }, self.loc)),
            None => Ok((index, n)),
        }
    }

    pub(super) fn gather(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let (x, index) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let (index, n) = self.positions(index, x.layout.shape[dim])?;
        // SAFETY: as in `positions`.
        let picks = unsafe { elements::<i64>(&index, n) };
        let size = x.dtype.size();
        let mut at = Coordinates::new(&index.layout.shape);
        for (i, &pick) in picks.iter().enumerate() {
            let offset = at.offset(&x.layout.strides, dim) + pick as isize * x.layout.strides[dim];
            // SAFETY: coordinates lie inside `index`, whose other sizes are at most x's, and `pick` inside
            // x's dim; `out` is fresh, dense and has `n` elements.
            unsafe {
                let from = x.pointer().offset(offset * size as isize);
                std::ptr::copy_nonoverlapping(from, out.pointer().add(i * size), size);
            }
            at.step();
        }
        Ok(())
    }

    pub(super) fn gather_backward(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let (src, index) = (self.tensor(inputs, 0)?, self.tensor(inputs, 1)?);
        let (index, n) = self.positions(index, out.layout.shape[dim])?;
        let src = self.dense(src)?;
        // SAFETY: `out` is fresh.
        unsafe { kernels::fill(&operand(out), 0) };
        let (shape, taken) = (&out.layout.shape, &index.layout.shape);
        // Along the last dim lines don't meet.
        let has_lines = dim + 1 == shape.rank() && shape[..dim] == taken[..dim];
        let mut at = Coordinates::new(taken);
        macro_rules! scatter {
            ($ty:ty, $add:expr) => {{
                // SAFETY: both are dense with `n` elements, locked for reading or fresh.
                let (picks, values) = unsafe { (elements::<i64>(&index, n), elements::<$ty>(&src, n)) };
                let add: fn($ty, $ty) -> $ty = $add;
                if has_lines && n > 0 {
                    let (wide, narrow) = (shape[dim], taken[dim]);
                    let to = Shared::new(out.pointer());
                    parallel_for(n / narrow, (GRAIN / 2).div_ceil(narrow), |begin, end| {
                        for line in begin..end {
                            // SAFETY: `out` is dense and fresh; the line belongs to this item.
                            let to = unsafe {
                                std::slice::from_raw_parts_mut(to.get().cast::<$ty>().add(line * wide), wide)
                            };
                            let part = line * narrow..(line + 1) * narrow;
                            for (&pick, &value) in picks[part.clone()].iter().zip(&values[part]) {
                                to[pick as usize] = add(to[pick as usize], value);
                            }
                        }
                    });
                    return Ok(());
                }
                for (&pick, &value) in picks.iter().zip(values) {
                    let offset = at.offset(&out.layout.strides, dim) + pick as isize * out.layout.strides[dim];
                    // SAFETY: coordinates lie inside `index`, whose other sizes are out's; `pick` was checked.
                    unsafe {
                        let place = out.pointer().cast::<$ty>().offset(offset);
                        *place = add(*place, value);
                    }
                    at.step();
                }
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

/// Walks the indices of a shape in row-major order.
pub(super) struct Coordinates<'a> {
    shape: &'a Shape,
    at: SmallVec<[usize; 6]>,
}

impl<'a> Coordinates<'a> {
    pub(super) fn new(shape: &'a Shape) -> Coordinates<'a> {
        Coordinates { shape, at: SmallVec::from_elem(0, shape.rank()) }
    }

    /// The offset of these coordinates without dim `skip`.
    pub(super) fn offset(&self, strides: &[isize], skip: usize) -> isize {
        (0..self.at.len()).filter(|&d| d != skip).map(|d| self.at[d] as isize * strides[d]).sum()
    }

    pub(super) fn step(&mut self) {
        for d in (0..self.at.len()).rev() {
            self.at[d] += 1;
            if self.at[d] < self.shape[d] {
                return;
            }
            self.at[d] = 0;
        }
    }
}
