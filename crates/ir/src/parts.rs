//! Gradients of parts of one tensor: put together where they lie beside each other, added up from where they meet.
//!
//! ```text
//! x: [5, 2]       y = slice(x) {0..2}       z = slice(x) {3..5}
//!
//! gradient of x = cat(gradient of y, 0, gradient of z)
//! ```
//!
//! Whoever sums gradients asks [`Parts::take`] whether the next part lies beside all earlier ones, in the order of the
//! tape: eager and compiled code so come to the same sums.

use std::collections::BTreeMap;

use crate::{Emit, EmitExt, Op, Result, Shape, TensorTy, Value};

/// The elements start, start + step, … before end of one dim.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Window {
    dim: usize,
    start: usize,
    end: usize,
    step: usize,
}

impl Window {
    /// The window of a slice; `None` for another op.
    pub fn of(op: &Op) -> Option<Window> {
        match *op {
            Op::Slice { dim, start, end, step } => Some(Window { dim, start, end, step }),
            _ => None,
        }
    }

    /// The op that looks at it.
    pub fn slice(self) -> Op {
        let Window { dim, start, end, step } = self;
        Op::Slice { dim, start, end, step }
    }

    /// The op that adds to it.
    pub fn add(self) -> Op {
        let Window { dim, start, end, step } = self;
        Op::SliceAdd { dim, start, end, step }
    }

    /// How many elements of the dim are in it.
    fn len(self) -> usize {
        self.end.saturating_sub(self.start).div_ceil(self.step.max(1))
    }

    /// The place behind its last element.
    fn last(self) -> usize {
        self.start + self.len().saturating_sub(1) * self.step + usize::from(self.len() > 0)
    }
}

/// Parts of a tensor, in windows of one dim of which none meets another.
#[derive(Clone, Debug)]
pub struct Parts<T> {
    ty: TensorTy,
    dim: usize,
    /// By the place of their first element.
    parts: BTreeMap<usize, (Window, T)>,
}

impl<T> Parts<T> {
    /// The first part of a tensor of this type.
    pub fn new(ty: TensorTy, window: Window, part: T) -> Parts<T> {
        let parts = BTreeMap::from([(window.start, (window, part))]);
        Parts { ty, dim: window.dim, parts }
    }

    /// Takes another part, or gives it back: its window meets an earlier one, or is one of another dim.
    pub fn take(&mut self, window: Window, part: T) -> Option<T> {
        let before = self.parts.range(..=window.start).next_back();
        let after = self.parts.range(window.start..).next();
        let is_free = before.is_none_or(|(_, (other, _))| other.last() <= window.start)
            && after.is_none_or(|(&start, _)| window.last() <= start && start > window.start);
        if window.dim != self.dim || window.len() == 0 || !is_free {
            return Some(part);
        }
        self.parts.insert(window.start, (window, part));
        None
    }

    /// The same windows of other parts.
    pub fn map<U>(self, mut part: impl FnMut(T) -> U) -> Parts<U> {
        let Parts { ty, dim, parts } = self;
        let parts = parts.into_iter().map(|(start, (window, old))| (start, (window, part(old)))).collect();
        Parts { ty, dim, parts }
    }
}

impl Parts<Value> {
    /// Emits the tensor that has these parts, and zeros elsewhere.
    pub fn joined(self, cx: &mut dyn Emit) -> Result<Value> {
        let Parts { ty, dim, parts } = self;
        let size = ty.shape[dim];
        let of_size = |size: usize| {
            let mut shape = ty.shape.clone();
            shape[dim] = size;
            shape
        };
        let zeros = |cx: &mut dyn Emit, shape: Shape| {
            let zero = cx.number(0.0)?;
            cx.full(zero, shape, ty.dtype, ty.device)
        };
        if parts.len() == 1
            && let Some((Window { start, end, step, .. }, part)) = parts.values().next()
        {
            let around = zeros(cx, ty.shape.clone())?;
            return cx.slice_scatter(around, *part, dim, *start, *end, *step);
        }
        let mut nothing = None;
        let mut gap = |cx: &mut dyn Emit, pieces: &mut Vec<Value>, size: usize| -> Result<()> {
            if size > 0 {
                let one = match nothing {
                    Some(one) => one,
                    None => *nothing.insert(zeros(cx, ty.shape.iter().map(|_| 1).collect())?),
                };
                pieces.push(cx.expand(one, of_size(size))?);
            }
            Ok(())
        };
        let (mut pieces, mut at) = (Vec::with_capacity(parts.len()), 0);
        for (window, part) in parts.into_values() {
            gap(cx, &mut pieces, window.start - at)?;
            at = window.last();
            pieces.push(if window.step == 1 || window.len() == 1 {
                part
            } else {
                let size = at - window.start;
                let around = zeros(cx, of_size(size))?;
                cx.slice_scatter(around, part, dim, 0, size, window.step)?
            });
        }
        gap(cx, &mut pieces, size - at)?;
        match pieces[..] {
            [whole] => Ok(whole),
            _ => cx.cat(&pieces, dim),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Graph};

    fn window(dim: usize, start: usize, end: usize, step: usize) -> Window {
        Window { dim, start, end, step }
    }

    #[test]
    fn windows_that_meet_are_given_back() {
        let ty = TensorTy::new(DType::F32, Shape::from([20, 3]));
        let mut parts = Parts::new(ty, window(0, 5, 10, 1), 0);
        assert_eq!(parts.take(window(0, 10, 12, 1), 1), None);
        assert_eq!(parts.take(window(0, 4, 5, 1), 2), None);
        for (n, meets) in
            [(5, 6, 1), (9, 11, 1), (0, 20, 1), (5, 10, 1), (3, 9, 5), (10, 10, 1)].into_iter().enumerate()
        {
            let (start, end, step) = meets;
            assert_eq!(parts.take(window(0, start, end, step), n + 10), Some(n + 10), "{meets:?}");
        }
        assert_eq!(parts.take(window(1, 0, 1, 1), 3), Some(3), "another dim");
        // Elements 12, 14, 16: what is behind the last one is free.
        assert_eq!(parts.take(window(0, 12, 18, 2), 4), None);
        assert_eq!(parts.take(window(0, 17, 20, 1), 5), None);
    }

    #[test]
    fn what_no_window_holds_is_zero() -> Result<()> {
        let mut graph = Graph::new();
        let ty = |size: usize| TensorTy::new(DType::F32, Shape::from([size]));
        let (a, b) = (graph.input(ty(2).into()), graph.input(ty(3).into()));
        let mut parts = Parts::new(ty(10), window(0, 5, 10, 2), b);
        assert_eq!(parts.take(window(0, 1, 3, 1), a), None);
        let whole = parts.joined(&mut graph)?;
        graph.outputs.push(whole);
        assert_eq!(graph.ty(whole), &ty(10).into());
        let pieces = graph.producer(whole).map(|node| node.args.len());
        assert_eq!(pieces, Some(4), "{graph}");
        Ok(())
    }
}
