//! Shapes, dims and strides.

use std::fmt;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

/// The sizes of a tensor, outermost first. Up to six dims are stored inline.
#[derive(PartialEq, Eq, Hash, Default)]
pub struct Shape(SmallVec<[usize; 6]>);

/// Tensors have at most so many dims, as PyTorch's.
pub const MOST_DIMS: usize = 64;

/// Strides in elements, outermost first.
pub type Strides = SmallVec<[isize; 6]>;

/// A list of dims of one tensor, each in `0..rank`.
#[derive(PartialEq, Eq, Hash, Default)]
pub struct Dims(SmallVec<[usize; 6]>);

impl Shape {
    /// The shape of a 0-d tensor.
    pub fn scalar() -> Shape {
        Shape::default()
    }

    /// Number of elements; `None` if it doesn't fit the address space.
    pub fn checked_numel(&self) -> Option<usize> {
        // An empty dim makes the tensor empty however absurd the others are, but only if their product fits.
        let limit = isize::MAX as usize;
        let nonzero = self.0.iter().filter(|&&d| d != 0).try_fold(1usize, |n, &d| n.checked_mul(d))?;
        if nonzero > limit {
            return None;
        }
        Some(if self.0.contains(&0) { 0 } else { nonzero })
    }

    /// Number of elements. Shapes that reach a `TensorTy` were checked to fit.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Row-major strides for this shape.
    pub fn contiguous_strides(&self) -> Strides {
        let mut strides: Strides = SmallVec::from_elem(1, self.rank());
        let mut step = 1isize;
        for (stride, &size) in strides.iter_mut().zip(&self.0).rev() {
            *stride = step;
            step = step.wrapping_mul(size.max(1) as isize);
        }
        strides
    }

    /// This shape without (or with size 1 at) the given dims: what a reduction leaves.
    pub fn reduced(&self, dims: &Dims, keepdim: bool) -> Shape {
        (0..self.rank())
            .filter(|d| keepdim || !dims.contains(d))
            .map(|d| if dims.contains(&d) { 1 } else { self[d] })
            .collect()
    }
}

/// The shape that both shapes broadcast to, by PyTorch's rule; `None` if they don't fit.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Shape> {
    let rank = a.len().max(b.len());
    let mut out = Shape(SmallVec::from_elem(1, rank));
    for i in 0..rank {
        let x = if i + a.len() >= rank { a[i + a.len() - rank] } else { 1 };
        let y = if i + b.len() >= rank { b[i + b.len() - rank] } else { 1 };
        out.0[i] = match (x, y) {
            (x, y) if x == y => x,
            (1, y) => y,
            (x, 1) => x,
            _ => return None,
        };
    }
    Some(out)
}

impl Dims {
    /// All dims of a tensor of this rank.
    pub fn all(rank: usize) -> Dims {
        (0..rank).collect()
    }
}

macro_rules! list_type {
    ($name:ident) => {
        // Types are copied all the time: one copy of memory, where the derived one goes number by number.
        impl Clone for $name {
            #[inline]
            fn clone(&self) -> $name {
                $name(SmallVec::from_slice(&self.0))
            }
        }
        impl Deref for $name {
            type Target = [usize];
            #[inline]
            fn deref(&self) -> &[usize] {
                &self.0
            }
        }
        impl DerefMut for $name {
            #[inline]
            fn deref_mut(&mut self) -> &mut [usize] {
                &mut self.0
            }
        }
        impl FromIterator<usize> for $name {
            fn from_iter<I: IntoIterator<Item = usize>>(iter: I) -> $name {
                $name(iter.into_iter().collect())
            }
        }
        impl From<&[usize]> for $name {
            fn from(sizes: &[usize]) -> $name {
                $name(SmallVec::from_slice(sizes))
            }
        }
        impl From<&Vec<usize>> for $name {
            fn from(sizes: &Vec<usize>) -> $name {
                $name(SmallVec::from_slice(sizes))
            }
        }
        impl From<Vec<usize>> for $name {
            fn from(sizes: Vec<usize>) -> $name {
                $name(SmallVec::from_vec(sizes))
            }
        }
        impl<const N: usize> From<[usize; N]> for $name {
            fn from(sizes: [usize; N]) -> $name {
                $name(SmallVec::from_slice(&sizes))
            }
        }
        impl<const N: usize> From<&[usize; N]> for $name {
            fn from(sizes: &[usize; N]) -> $name {
                $name(SmallVec::from_slice(sizes))
            }
        }
        impl From<&$name> for $name {
            fn from(sizes: &$name) -> $name {
                sizes.clone()
            }
        }
        impl From<()> for $name {
            fn from((): ()) -> $name {
                $name::default()
            }
        }
        impl From<usize> for $name {
            fn from(size: usize) -> $name {
                $name(SmallVec::from_slice(&[size]))
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[")?;
                for (i, d) in self.0.iter().enumerate() {
                    write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str("]")
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
        impl $name {
            /// Appends a size.
            pub fn push(&mut self, size: usize) {
                self.0.push(size);
            }
            /// Inserts a size before position `at`.
            pub fn insert(&mut self, at: usize, size: usize) {
                self.0.insert(at, size);
            }
            /// Removes and returns the size at `at`.
            pub fn remove(&mut self, at: usize) -> usize {
                self.0.remove(at)
            }
        }
    };
}
list_type!(Shape);
list_type!(Dims);

macro_rules! shape_of_tuple {
    ($($($name:ident)*;)*) => { $(
        impl From<($(shape_of_tuple!(@size $name)),*)> for Shape {
            fn from(($($name),*): ($(shape_of_tuple!(@size $name)),*)) -> Shape {
                Shape::from([$($name),*])
            }
        }
    )* };
    (@size $name:ident) => { usize };
}
shape_of_tuple! {
    a b;
    a b c;
    a b c d;
    a b c d e;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_pytorch() {
        let check = |a: &[usize], b: &[usize], want: Option<&[usize]>| {
            assert_eq!(broadcast(a, b), want.map(Shape::from), "{a:?} with {b:?}");
            assert_eq!(broadcast(b, a), want.map(Shape::from), "{b:?} with {a:?}");
        };
        check(&[4, 3], &[3], Some(&[4, 3]));
        check(&[4, 1], &[3], Some(&[4, 3]));
        check(&[], &[2, 2], Some(&[2, 2]));
        check(&[0, 3], &[1, 3], Some(&[0, 3]));
        check(&[0], &[2], None);
        check(&[2], &[3], None);
    }

    #[test]
    fn numel_is_checked() {
        assert_eq!(Shape::from([3, 0, 5]).checked_numel(), Some(0));
        assert_eq!(Shape::from([usize::MAX, 2]).checked_numel(), None);
        assert_eq!(Shape::from([usize::MAX, 2, 0]).checked_numel(), None);
        assert_eq!(Shape::scalar().checked_numel(), Some(1));
    }
}
