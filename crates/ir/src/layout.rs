//! Layouts: how a tensor's elements lie in its storage, and what a view op makes of that. Eager tensors and
//! the compiler's alias analysis use the same rules.

use smallvec::SmallVec;

use crate::table::shapes::diagonal_extent;
use crate::{Class, Op, Shape, Strides};

/// Sizes, strides and offset, in elements.
#[derive(PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Sizes.
    pub shape: Shape,
    /// Steps between neighbours, per dim.
    pub strides: Strides,
    /// Position of the first element.
    pub offset: usize,
}

// As for shapes: one copy of memory.
impl Clone for Layout {
    #[inline]
    fn clone(&self) -> Layout {
        Layout {
            shape: self.shape.clone(),
            strides: SmallVec::from_slice(&self.strides),
            offset: self.offset,
        }
    }
}

impl Layout {
    /// Row-major without gaps.
    pub fn contiguous(shape: Shape) -> Layout {
        Layout { strides: shape.contiguous_strides(), shape, offset: 0 }
    }

    /// Whether the elements lie in row-major order without gaps (dims of size 1 don't count).
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1isize;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size != 1 {
                if stride != step {
                    return false;
                }
                step *= size as isize;
            }
        }
        true
    }

    /// Whether two elements may share one place (an expanded dim).
    pub fn overlaps_itself(&self) -> bool {
        // Sorted by stride, each dim must step over everything the smaller ones span.
        let mut dims: SmallVec<[(isize, usize); 6]> = SmallVec::new();
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            match size {
                0 => return false,
                1 => {}
                _ => dims.push((stride.abs(), size)),
            }
        }
        dims.sort_unstable();
        let mut span = 0isize;
        for (stride, size) in dims {
            if stride <= span {
                return true;
            }
            span += stride * (size as isize - 1);
        }
        false
    }

    /// The smallest and one past the largest element position; empty for empty tensors.
    pub fn extent(&self) -> std::ops::Range<usize> {
        if self.shape.contains(&0) {
            return self.offset..self.offset;
        }
        let (mut low, mut high) = (self.offset as isize, self.offset as isize);
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = stride * (size as isize - 1);
            if reach < 0 { low += reach } else { high += reach }
        }
        low as usize..high as usize + 1
    }

    /// Whether all its elements lie in a memory of so many. Of any layout: nothing overflows.
    pub fn stays_inside(&self, elements: usize) -> bool {
        if self.shape.len() != self.strides.len() {
            return false;
        }
        if self.shape.contains(&0) {
            return true;
        }
        let Ok(offset) = isize::try_from(self.offset) else { return false };
        let (mut low, mut high) = (offset, offset);
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let end = if stride < 0 { &mut low } else { &mut high };
            let reach = isize::try_from(size - 1).ok().and_then(|steps| steps.checked_mul(stride));
            match reach.and_then(|reach| end.checked_add(reach)) {
                Some(position) => *end = position,
                None => return false,
            }
        }
        low >= 0 && high.cast_unsigned() < elements
    }

    /// The layout a view op gives, with the same storage. `None` if the op is not a view, or can't be one
    /// here (a reshape of elements that don't lie together copies).
    pub fn view(&self, op: &Op) -> Option<Layout> {
        match op {
            Op::Reshape { shape } => self.reshape(shape),
            Op::Permute { dims } => Some(Layout {
                shape: dims.iter().map(|&d| self.shape[d]).collect(),
                strides: dims.iter().map(|&d| self.strides[d]).collect(),
                offset: self.offset,
            }),
            Op::Transpose { dim0, dim1 } => {
                let mut layout = self.clone();
                layout.shape.swap(*dim0, *dim1);
                layout.strides.swap(*dim0, *dim1);
                Some(layout)
            }
            Op::Expand { shape } => {
                let lead = shape.rank() - self.shape.rank();
                let strides = (0..shape.rank())
                    .map(|d| match d.checked_sub(lead) {
                        Some(own) if self.shape[own] == shape[d] => self.strides[own],
                        _ => 0,
                    })
                    .collect();
                Some(Layout { shape: shape.clone(), strides, offset: self.offset })
            }
            Op::Slice { dim, start, end, step } => {
                let mut layout = self.clone();
                layout.shape[*dim] = (end - start).div_ceil(*step);
                layout.offset = (self.offset as isize + *start as isize * self.strides[*dim]) as usize;
                // A step beyond the end leaves one window, whose stride nobody uses.
                layout.strides[*dim] = self.strides[*dim].wrapping_mul(*step as isize);
                Some(layout)
            }
            Op::AsStrided { view, offset } if self.is_contiguous() => Some(Layout {
                shape: view.firsts(),
                strides: view.seconds().iter().map(|&s| s as isize).collect(),
                // An empty view may begin anywhere: it begins nowhere.
                offset: if view.firsts().contains(&0) { self.offset } else { self.offset + offset },
            }),
            // Positions are row-major ones, which other layouts don't have in one piece.
            Op::AsStrided { .. } => None,
            Op::Diagonal { offset, dim1, dim2 } => {
                let (row, column, len) = diagonal_extent(self.shape[*dim1], self.shape[*dim2], *offset);
                let rest = || (0..self.shape.rank()).filter(|d| d != dim1 && d != dim2);
                let (down, across) = (self.strides[*dim1], self.strides[*dim2]);
                // Beyond the matrix there is no first element, wherever the offset points.
                let first = match len {
                    0 => self.offset as isize,
                    _ => self.offset as isize + row as isize * down + column as isize * across,
                };
                Some(Layout {
                    shape: rest().map(|d| self.shape[d]).chain([len]).collect(),
                    strides: rest().map(|d| self.strides[d]).chain([down + across]).collect(),
                    offset: first as usize,
                })
            }
            Op::Unfold { dim, size, step } => {
                let mut layout = self.clone();
                layout.shape[*dim] = (self.shape[*dim] - size) / step + 1;
                layout.shape.push(*size);
                // A step beyond the end leaves one window, whose stride nobody uses.
                layout.strides[*dim] = self.strides[*dim].wrapping_mul(*step as isize);
                layout.strides.push(self.strides[*dim]);
                Some(layout)
            }
            Op::Detach {} => Some(self.clone()),
            other => {
                debug_assert!(
                    other.row().class != Class::View,
                    "view op {} has no layout rule",
                    other.name()
                );
                None
            }
        }
    }

    /// Splits and merges dims where the elements allow it.
    fn reshape(&self, shape: &Shape) -> Option<Layout> {
        if self.shape.contains(&0) || self.is_contiguous() {
            return Some(Layout { offset: self.offset, ..Layout::contiguous(shape.clone()) });
        }
        // Runs of old dims that lie together, as (size, innermost stride), are cut into new dims.
        let mut runs: SmallVec<[(usize, isize); 6]> = SmallVec::new();
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            match runs.last_mut() {
                _ if size == 1 => {}
                Some((run, inner)) if *inner == stride * size as isize => {
                    *run *= size;
                    *inner = stride;
                }
                _ => runs.push((size, stride)),
            }
        }
        let mut strides: Strides = SmallVec::from_elem(1, shape.rank());
        let mut runs = runs.into_iter().rev();
        let (mut left, mut step) = (1usize, 1isize);
        for d in (0..shape.rank()).rev() {
            if shape[d] == 1 {
                continue;
            }
            if left == 1 {
                (left, step) = runs.next()?;
            }
            if left % shape[d] != 0 {
                return None;
            }
            strides[d] = step;
            step *= shape[d] as isize;
            left /= shape[d];
        }
        Some(Layout { shape: shape.clone(), strides, offset: self.offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The element positions of a layout, in order.
    fn positions(layout: &Layout) -> Vec<isize> {
        let mut all = vec![layout.offset as isize];
        for (&size, &stride) in layout.shape.iter().zip(&layout.strides) {
            all = all.iter().flat_map(|p| (0..size as isize).map(move |i| p + i * stride)).collect();
        }
        all
    }

    #[test]
    fn reshape_keeps_the_order_or_refuses() {
        let t = Layout::contiguous(Shape::from([4, 6]));
        let transposed = t.view(&Op::Transpose { dim0: 0, dim1: 1 }).unwrap();
        let sliced = t.view(&Op::Slice { dim: 0, start: 1, end: 4, step: 2 }).unwrap();
        for (layout, shape, viewable) in [
            (&t, vec![2, 12], true),
            (&t, vec![1, 24, 1], true),
            (&transposed, vec![24], false),
            (&transposed, vec![2, 3, 4], true),
            (&transposed, vec![6, 2, 2], true),
            (&sliced, vec![2, 2, 3], true),
            (&sliced, vec![12], false),
        ] {
            let view = layout.view(&Op::Reshape { shape: Shape::from(&shape) });
            assert_eq!(view.is_some(), viewable, "{layout:?} as {shape:?}");
            if let Some(view) = view {
                assert_eq!(positions(&view), positions(layout));
            }
        }
    }

    #[test]
    fn what_leaves_its_memory_is_seen() {
        let layout = |shape: &[usize], strides: &[isize], offset: usize| Layout {
            shape: Shape::from(shape),
            strides: SmallVec::from_slice(strides),
            offset,
        };
        let check = |layout: Layout, inside: bool| {
            assert_eq!(layout.stays_inside(24), inside, "{layout:?}");
            if inside && layout.shape.numel() > 0 {
                assert!(positions(&layout).iter().all(|p| (0..24).contains(p)));
            }
        };
        check(Layout::contiguous(Shape::from([4, 6])), true);
        check(Layout::contiguous(Shape::from([5, 5])), false);
        check(layout(&[4, 6], &[6, 1], 1), false);
        check(layout(&[2, 2], &[-6, 1], 22), true);
        check(layout(&[2, 2], &[-6, 1], 23), false);
        check(layout(&[2, 2], &[-6, 1], 5), false);
        check(layout(&[100], &[0], 23), true);
        check(layout(&[], &[], 24), false);
        check(layout(&[3, 0], &[7, 7], 25), true);
        check(layout(&[3], &[isize::MAX], 0), false);
        check(layout(&[3], &[isize::MIN], 0), false);
        check(layout(&[usize::MAX], &[1], 0), false);
        check(layout(&[1], &[1], usize::MAX), false);
        check(layout(&[2, 3], &[1], 0), false);
    }

    #[test]
    fn expanded_layouts_overlap() {
        let t = Layout::contiguous(Shape::from([4, 1]));
        assert!(!t.overlaps_itself());
        assert!(t.view(&Op::Expand { shape: Shape::from([4, 3]) }).unwrap().overlaps_itself());
        let odd = Layout { shape: Shape::from([2, 3]), strides: SmallVec::from_slice(&[2, 1]), offset: 0 };
        assert!(odd.overlaps_itself());
    }
}
