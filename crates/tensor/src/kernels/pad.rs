//! Padding: rows of an array with something before and behind them.

use super::convert::{convert, fill};
use super::operand::{Operand, Shared};
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use std::ops::Range;

/// `body` with an unsigned type of so many bytes.
macro_rules! with_size {
    ($size:expr, $ty:ident => $body:expr) => {
        match $size {
            1 => {
                type $ty = u8;
                $body
            }
            2 => {
                type $ty = u16;
                $body
            }
            4 => {
                type $ty = u32;
                $body
            }
            _ => {
                type $ty = u64;
                $body
            }
        }
    };
}
/// What stands around the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filling {
    /// One element, its bytes (little end first) in the low bytes.
    Element(u64),
    /// The elements mirrored at the first and at the last one.
    Mirrored,
    /// The first and the last element.
    Repeated,
}

impl Filling {
    /// Where, along a dim of `size`, the element `i` places behind the first one comes from.
    fn origin(self, i: isize, size: usize) -> Option<usize> {
        let last = size as isize - 1;
        let at = match self {
            _ if (0..=last).contains(&i) => i,
            Filling::Element(_) => return None,
            Filling::Mirrored => last - (last - i.abs()).abs(),
            Filling::Repeated => i.clamp(0, last),
        };
        Some(at as usize)
    }
}

/// `out` = `x` from `before` on along each dim, and the filling around it.
///
/// # Safety
/// The contract of [`Operand`]; both are contiguous and of one dtype, and don't overlap. Each of out's sizes is at least
/// x's with what is before it; mirrored elements are less than x's size away from x, and there is one to repeat.
pub unsafe fn pad(out: &Operand, x: &Operand, before: &[usize], filling: Filling) {
    let Some(last) = (0..out.shape.len()).rposition(|d| out.shape[d] != x.shape[d]) else {
        // SAFETY: the caller's contract; nothing is added.
        return unsafe { convert(out, x) };
    };
    if out.numel() == 0 {
        return;
    }
    if let (Filling::Element(value), 0) = (filling, x.numel()) {
        // SAFETY: the caller's contract.
        return unsafe { fill(out, value) };
    }
    // Rows run along the last padded dim and what is behind it.
    let inner: usize = out.shape[last + 1..].iter().product();
    let row = Row { slices: out.shape[last], before: before[last], size: x.shape[last], inner, filling };
    let count = out.shape[..last].iter().product();
    let length = out.shape[last] * inner;
    if count == 1 && length >= 2 * GRAIN {
        // Threads share a single row.
        let (at, shape, strides) = (row.before * inner, [row.size * inner], [1]);
        let middle = |operand: &Operand, at: usize| Operand {
            ptr: operand.ptr.wrapping_add(at * operand.dtype.size()),
            dtype: operand.dtype,
            shape: &shape,
            strides: &strides,
        };
        // SAFETY: the only row of both, as each dim before has one element; its middle and the rest.
        return unsafe {
            convert(&middle(out, at), &middle(x, 0));
            with_size!(out.dtype.size(), T => row.surround::<T>(out.ptr.cast(), x.ptr.cast_const().cast()));
        };
    }
    let pointers = Shared::new((out.ptr, x.ptr.cast_const()));
    let size = out.dtype.size();
    parallel_for(count, GRAIN.div_ceil(length), |begin, end| {
        let (to, from) = pointers.get();
        for index in begin..end {
            // The row of x, if there is one: its place is put together from the last dim on.
            let (mut rest, mut at, mut step) = (index, Some(0), 1);
            for d in (0..last).rev() {
                let place = (rest % out.shape[d]) as isize - before[d] as isize;
                at = at.zip(filling.origin(place, x.shape[d])).map(|(at, origin)| at + origin * step);
                (rest, step) = (rest / out.shape[d], step * x.shape[d]);
            }
            let to = to.wrapping_add(index * length * size);
            let from = at.map(|at| from.wrapping_add(at * row.size * inner * size));
            // SAFETY: the rows lie in their operands; that of the output is this item's.
            unsafe { with_size!(size, T => row.write::<T>(to.cast(), from.map(<*const u8>::cast))) };
        }
    });
}

/// An element as bits.
trait Bits: Copy {
    fn of(element: u64) -> Self;
}

macro_rules! bits {
    ($($ty:ty)*) => {
        $(impl Bits for $ty {
            fn of(element: u64) -> $ty {
                element as $ty
            }
        })*
    };
}
bits!(u8 u16 u32 u64);

/// How rows are padded.
struct Row {
    /// Slices of a padded row.
    slices: usize,
    before: usize,
    /// Slices of a row of x.
    size: usize,
    /// Elements of a slice.
    inner: usize,
    filling: Filling,
}

impl Row {
    /// # Safety
    /// The padded row can be written, the row of x can be read.
    unsafe fn write<T: Bits>(&self, to: *mut T, from: Option<*const T>) {
        // SAFETY: the caller's promise.
        unsafe {
            match from {
                None => self.fill(to, 0..self.slices),
                Some(from) => {
                    self.surround(to, from);
                    let Row { before, size, inner, .. } = *self;
                    std::ptr::copy_nonoverlapping(from, to.add(before * inner), size * inner);
                }
            }
        }
    }

    /// What is before and behind the row of x.
    ///
    /// # Safety
    /// That of [`write`](Row::write).
    unsafe fn surround<T: Bits>(&self, to: *mut T, from: *const T) {
        let (inner, behind) = (self.inner, self.before + self.size);
        // SAFETY: the caller's promise; origins are below `size`.
        unsafe {
            if let Filling::Element(_) = self.filling {
                self.fill(to, 0..self.before);
                return self.fill(to, behind..self.slices);
            }
            for at in (0..self.before).chain(behind..self.slices) {
                if let Some(origin) = self.filling.origin(at as isize - self.before as isize, self.size) {
                    std::ptr::copy_nonoverlapping(from.add(origin * inner), to.add(at * inner), inner);
                }
            }
        }
    }

    /// # Safety
    /// These slices of the padded row can be written.
    unsafe fn fill<T: Bits>(&self, to: *mut T, slices: Range<usize>) {
        let Filling::Element(value) = self.filling else { return };
        for i in slices.start * self.inner..slices.end * self.inner {
            // SAFETY: the caller's promise.
            unsafe { to.add(i).write(T::of(value)) };
        }
    }
}
