//! Eager: ops that move elements: operands put into windows of the result, joined, padded.

use kiln_ir::{Layout, Op, Result, Shape};

use super::{Input, Job, operand};
use crate::kernels::{self, Filling, Offsets, Places, transfer};
use crate::tensor::Ready;

/// Whether an op that picks or places elements only moves them, whatever their dtype, or widens them by itself.
pub(super) fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Cat { .. }
            | Op::Flip { .. }
            | Op::Tril { .. }
            | Op::Triu { .. }
            | Op::ConstantPadNd { .. }
            | Op::ReflectionPad { .. }
            | Op::ReplicationPad { .. }
            | Op::SliceScatter { .. }
            | Op::SliceAdd { .. }
            | Op::AsStridedScatter { .. }
            | Op::DiagonalScatter { .. }
            | Op::DiagEmbed { .. }
            | Op::Gather { .. }
            | Op::IndexSelect { .. }
            | Op::IndexAdd { .. }
            | Op::IndexCopy { .. }
            | Op::Index { .. }
            | Op::IndexPut { accumulate: false, .. }
            | Op::Scatter { .. }
            | Op::MaskedScatter {}
            | Op::MaskedScatterBackward { .. }
    )
}

/// The view of its result that an op puts its last operand into.
fn window(op: &Op) -> Option<Op> {
    Some(match *op {
        Op::SliceScatter { dim, start, end, step } | Op::SliceAdd { dim, start, end, step } => {
            Op::Slice { dim, start, end, step }
        }
        Op::AsStridedScatter { ref view, offset } => Op::AsStrided { view: view.clone(), offset },
        Op::DiagonalScatter { offset, dim1, dim2 } | Op::DiagEmbed { offset, dim1, dim2 } => {
            Op::Diagonal { offset, dim1, dim2 }
        }
        _ => return None,
    })
}

impl Job<'_> {
    /// The first operand, or zeros if there is one only, with the last one put into a window or added there. `out` is dense.
    pub(super) fn put_in_window(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let Some(window) = window(self.op) else { return Ok(()) };
        if inputs.len() > 1 {
            self.copy_into(out, inputs, 0)?;
        } else {
            // SAFETY: `out` is fresh.
            unsafe { kernels::fill(&operand(out), 0) };
        }
        let last = inputs.len() - 1;
        match self.op {
            Op::SliceAdd { .. } => self.add_to_window(out, &window, inputs[last]),
            _ => self.copy_to_window(out, &window, self.tensor(inputs, last)?),
        }
    }

    fn copy_to_window(&self, out: &Ready, window: &Op, src: &Ready) -> Result<()> {
        let Some(layout) = out.layout.view(window) else { return Ok(()) };
        if matches!(window, Op::AsStrided { .. }) && layout.overlaps_itself() {
            return self.copy_in_order(out, &layout, src);
        }
        let part = Ready { layout, ..out.clone() };
        // SAFETY: `out` is fresh; the window lies inside it, has `src`'s shape and its elements are apart.
        unsafe { kernels::convert(&operand(&part), &operand(src)) };
        Ok(())
    }

    /// Into a window whose elements may meet: the last one stays.
    fn copy_in_order(&self, out: &Ready, window: &Layout, src: &Ready) -> Result<()> {
        let src = self.dense(src)?;
        let dims: Vec<(usize, isize)> =
            window.shape.iter().copied().zip(window.strides.iter().copied()).collect();
        let one = || Offsets::Even(1, 1);
        let places = Places { before: one(), picks: Offsets::of(&dims), behind: one() };
        let (to, from) = (out.pointer(), src.pointer().cast_const());
        macro_rules! put {
            ($ty:ty) => {{
                let to = to.cast::<$ty>().wrapping_add(window.offset - out.layout.offset);
                // SAFETY: the window lies inside `out`, which is fresh; `src` is dense and has as many elements.
                unsafe { transfer((to, &places), (from.cast(), &places.lined_up()), false, |_, x: $ty| x) }
            }};
        }
        match out.dtype.size() {
            1 => put!(u8),
            2 => put!(u16),
            4 => put!(u32),
            _ => put!(u64),
        }
        Ok(())
    }

    fn add_to_window(&self, out: &Ready, window: &Op, src: Input) -> Result<()> {
        let Some(layout) = out.layout.view(window) else { return Ok(()) };
        let part = Ready { layout, ..out.clone() };
        let tys = [part.ty().into(), part.ty().into()];
        Job { op: &Op::Add {}, tys: &tys, loc: self.loc }.run(&part, &[Input::Tensor(&part), src])
    }

    pub(super) fn cat(&self, out: &Ready, inputs: &[Input], dim: usize) -> Result<()> {
        let mut start = 0;
        for i in 0..inputs.len() {
            let t = self.tensor(inputs, i)?;
            let end = start + t.layout.shape[dim];
            self.copy_to_window(out, &Op::Slice { dim, start, end, step: 1 }, t)?;
            start = end;
        }
        Ok(())
    }

    /// x with numbers, or with its own elements, around it.
    pub(super) fn pad(&self, out: &Ready, inputs: &[Input], before: &Shape) -> Result<()> {
        let x = self.dense(self.tensor(inputs, 0)?)?;
        let filling = match self.op {
            Op::ReflectionPad { .. } => Filling::Mirrored,
            Op::ReplicationPad { .. } => Filling::Repeated,
            _ => Filling::Element(self.number(inputs, 1)?.to_element(out.dtype)),
        };
        // SAFETY: `out` is fresh and dense, `x` dense and locked or fresh; the type rule added the widths, and refused
        // those that repeat more than there is.
        unsafe { kernels::pad(&operand(out), &operand(&x), before, filling) };
        Ok(())
    }
}
