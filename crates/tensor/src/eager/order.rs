//! Eager: positions, orders and scans along one dim.

use kiln_ir::{Op, Result};

use super::{Input, Job};
use crate::kernels::{self, Lines, Position, Scan};
use crate::tensor::Ready;

impl Job<'_> {
    /// Ops that work along one dim; `None` for others.
    pub(super) fn along(&self, out: &Ready, inputs: &[Input]) -> Option<Result<()>> {
        Some(match *self.op {
            Op::Argmax { dim, .. } => self.line_positions(Position::Largest, out, inputs, dim),
            Op::Argmin { dim, .. } => self.line_positions(Position::Smallest, out, inputs, dim),
            Op::MedianIndex { dim, .. } => self.line_positions(Position::Median, out, inputs, dim),
            Op::Argsort { dim, descending } => {
                self.line_positions(Position::Sorted { descending }, out, inputs, dim)
            }
            Op::CummaxIndex { dim } => self.line_positions(Position::LargestSoFar, out, inputs, dim),
            Op::CumminIndex { dim } => self.line_positions(Position::SmallestSoFar, out, inputs, dim),
            Op::TopkIndex { k, dim, largest } => {
                // A single number is its own first, even where none is asked for: so it is in PyTorch.
                let count = if out.layout.shape.is_empty() { 1 } else { k };
                self.line_positions(Position::Top { count, largest }, out, inputs, dim)
            }
            Op::Cumsum { dim, reverse } => self.scan(Scan::Sum, out, inputs, dim, reverse),
            Op::Cumprod { dim } => self.scan(Scan::Prod, out, inputs, dim, false),
            Op::Logcumsumexp { dim, reverse } => self.scan(Scan::LogSumExp, out, inputs, dim, reverse),
            _ => return None,
        })
    }

    fn line_positions(&self, position: Position, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let lines = Lines::of(&x.layout.shape, dim);
        let (from, to) = (x.pointer(), out.pointer().cast::<i64>());
        if out.layout.shape.numel() == 0 {
            return Ok(());
        }
        // SAFETY: `x` is dense and locked or fresh; `out` is fresh, dense i64 of the type rule's shape.
        unsafe { kernels::positions(position, x.dtype, lines, from, to) };
        Ok(())
    }

    fn scan(&self, scan: Scan, out: &Ready, inputs: &[Input], dim: usize, reverse: bool) -> Result<()> {
        let x = self.tensor(inputs, 0)?;
        let x = if x.dtype == out.dtype { self.dense(x)? } else { self.convert(x, out.dtype)? };
        if out.layout.shape.numel() == 0 {
            return Ok(());
        }
        let lines = Lines::of(&x.layout.shape, dim);
        // SAFETY: `x` is dense, of out's dtype, locked or fresh; `out` is fresh, dense and of x's shape.
        unsafe { kernels::scan(scan, out.dtype, lines, reverse, x.pointer(), out.pointer()) };
        Ok(())
    }
}
