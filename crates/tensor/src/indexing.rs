//! Indexing as in `x[1:3, :, 2]`: ranges, integers, new dims, index tensors and masks, in tuples.
//!
//! ```
//! use kiln_tensor::{Device, Ellipsis, IndexOp, NewAxis, Tensor};
//! # fn main() -> kiln_tensor::Result<()> {
//! let x = Tensor::arange(0, 24, &Device::Cpu)?.reshape([2, 3, 4])?;
//! assert_eq!(x.i((0, 1..3, ..))?.shape().to_vec(), [2, 4]);
//! assert_eq!(x.i((Ellipsis, -1))?.to_vec::<i64>()?, [3, 7, 11, 15, 19, 23]);
//! assert_eq!(x.i((.., NewAxis, 0))?.shape().to_vec(), [2, 1, 4]);
//!
//! // Index tensors pick, masks select; both work on the left side too.
//! let rows = Tensor::from_slice(&[2i64, 0])?;
//! assert_eq!(x.i((0, &rows, 1))?.to_vec::<i64>()?, [9, 1]);
//! x.set_i((1, .., 0), -1)?;
//! x.set_i(&x.lt(2)?, 100)?;
//! assert_eq!(x.i((.., .., 0))?.to_vec::<i64>()?, [100, 4, 8, 100, 100, 100]);
//! # Ok(()) }
//! ```

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use kiln_ir::{DType, Dims, Loc, Op, Result, ScalarKind, Shape, Why};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::hook::Arg;
use crate::methods::Operand;

/// As many full dims as are left over: `x.i((Ellipsis, 0))`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Ellipsis;

/// A new dim of size 1: `x.i((.., NewAxis))`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct NewAxis;

/// What stands in one place of an index.
#[derive(Clone, Debug)]
pub enum Indexer {
    /// One element of a dim, which goes away; negative ones count from the end.
    Select(i64),
    /// A part of a dim, as a view. Negative ends count from the end of the dim, what lies outside is cut off.
    Range {
        /// First element; the dim's first if left out.
        start: Option<i64>,
        /// One past the last element; the dim's end if left out.
        end: Option<i64>,
        /// Steps between elements.
        step: usize,
    },
    /// A new dim of size 1.
    NewAxis,
    /// As many full dims as are left over.
    Ellipsis,
    /// Elements by index (integers), or those where it holds (truth values, over as many dims as it has).
    Tensor(Tensor),
}

impl Indexer {
    /// Elements `start..end`, for ends that count from the end of the dim: clippy takes the literal `1..-1` for a
    /// mistake.
    pub fn range(start: i64, end: i64) -> Indexer {
        Indexer::from(start..end)
    }

    /// Every `step`-th element of a range: `Indexer::from(..).by(2)`. Other indexers stay as they are.
    pub fn by(self, step: usize) -> Indexer {
        match self {
            Indexer::Range { start, end, .. } => Indexer::Range { start, end, step },
            other => other,
        }
    }
}

macro_rules! integers {
    ($($ty:ty),*) => {
        $(
            impl From<$ty> for Indexer {
                fn from(index: $ty) -> Indexer {
                    Indexer::Select(index as i64)
                }
            }
            integers!(@range Range<$ty>, |r: Range<$ty>| (Some(r.start as i64), Some(r.end as i64)));
            integers!(@range RangeFrom<$ty>, |r: RangeFrom<$ty>| (Some(r.start as i64), None));
            integers!(@range RangeTo<$ty>, |r: RangeTo<$ty>| (None, Some(r.end as i64)));
            integers!(@range RangeInclusive<$ty>, |r: RangeInclusive<$ty>| (Some(*r.start() as i64), after(*r.end() as i64)));
            integers!(@range RangeToInclusive<$ty>, |r: RangeToInclusive<$ty>| (None, after(r.end as i64)));
        )*
    };
    (@range $range:ty, $ends:expr) => {
        impl From<$range> for Indexer {
            fn from(range: $range) -> Indexer {
                let ends: fn($range) -> (Option<i64>, Option<i64>) = $ends;
                let (start, end) = ends(range);
                Indexer::Range { start, end, step: 1 }
            }
        }
    };
}
// Bare literals that fit several types become i32.
integers!(i32, i64, usize);

/// One past a last element; past −1 is the end of the dim.
fn after(last: i64) -> Option<i64> {
    match last {
        -1 => None,
        last => Some(last.saturating_add(1)),
    }
}

impl From<RangeFull> for Indexer {
    fn from(_: RangeFull) -> Indexer {
        Indexer::Range { start: None, end: None, step: 1 }
    }
}
impl From<NewAxis> for Indexer {
    fn from(_: NewAxis) -> Indexer {
        Indexer::NewAxis
    }
}
impl From<Ellipsis> for Indexer {
    fn from(_: Ellipsis) -> Indexer {
        Indexer::Ellipsis
    }
}
impl From<&Tensor> for Indexer {
    fn from(index: &Tensor) -> Indexer {
        Indexer::Tensor(index.clone())
    }
}
impl From<Tensor> for Indexer {
    fn from(index: Tensor) -> Indexer {
        Indexer::Tensor(index)
    }
}

/// Tensors that are indexed by `T`: one [`Indexer`], or a tuple or slice of them.
pub trait IndexOp<T> {
    /// The elements at an index: a view, unless tensors are among the indexers.
    ///
    /// A mask makes the size depend on values: in compiled code that is a graph break.
    #[track_caller]
    fn i(&self, index: T) -> Result<Tensor>;

    /// Puts a value (converted and broadcast) at an index, in place.
    ///
    /// ```
    /// use kiln_tensor::{Device, IndexOp, Tensor};
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::zeros([2, 3], &Device::Cpu)?;
    /// x.set_i((.., 1..), 5.0)?;
    /// x.set_i((0, 0), &Tensor::ones((), &Device::Cpu)?)?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 5.0, 5.0, 0.0, 5.0, 5.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    fn set_i<'a>(&self, index: T, value: impl Into<Operand<'a>>) -> Result<()>;
}

impl<A: Into<Indexer>> IndexOp<A> for Tensor {
    #[track_caller]
    fn i(&self, index: A) -> Result<Tensor> {
        get(self, &[index.into()], Loc::caller())
    }
    #[track_caller]
    fn set_i<'a>(&self, index: A, value: impl Into<Operand<'a>>) -> Result<()> {
        set(self, &[index.into()], &value.into(), Loc::caller())
    }
}

impl IndexOp<&[Indexer]> for Tensor {
    #[track_caller]
    fn i(&self, index: &[Indexer]) -> Result<Tensor> {
        get(self, index, Loc::caller())
    }
    #[track_caller]
    fn set_i<'a>(&self, index: &[Indexer], value: impl Into<Operand<'a>>) -> Result<()> {
        set(self, index, &value.into(), Loc::caller())
    }
}

macro_rules! tuples {
    ($(($($name:ident),+))*) => {
        $(
            #[allow(non_snake_case, reason = "the type's name serves its value")]
            impl<$($name: Into<Indexer>),+> IndexOp<($($name,)+)> for Tensor {
                #[track_caller]
                fn i(&self, index: ($($name,)+)) -> Result<Tensor> {
                    let ($($name,)+) = index;
                    get(self, &[$($name.into()),+], Loc::caller())
                }
                #[track_caller]
                fn set_i<'a>(&self, index: ($($name,)+), value: impl Into<Operand<'a>>) -> Result<()> {
                    let ($($name,)+) = index;
                    set(self, &[$($name.into()),+], &value.into(), Loc::caller())
                }
            }
        )*
    };
}
tuples!((A)(A, B)(A, B, C)(A, B, C, D)(A, B, C, D, E)(A, B, C, D, E, F));

/// The part of an index that views can say, and the tensors that are left, each with its dim of the view.
pub(crate) struct Place {
    view: Tensor,
    pub(crate) tensors: Vec<(usize, Tensor)>,
}

/// Walks the indexers from left to right, cutting the view as it goes.
pub(crate) fn place(x: &Tensor, index: &[Indexer], loc: Loc) -> Result<Place> {
    let shape = x.shape();
    let fail = |why| Err(x.refusal("index", why, loc));
    let taken: usize = index
        .iter()
        .map(|indexer| match indexer {
            Indexer::Select(_) | Indexer::Range { .. } => 1,
            Indexer::Tensor(t) if t.dtype() == DType::Bool => t.rank(),
            Indexer::Tensor(_) => 1,
            Indexer::NewAxis | Indexer::Ellipsis => 0,
        })
        .sum();
    if taken > shape.rank() {
        return fail(Why::Dim { dim: taken as i64 - 1, rank: shape.rank() });
    }
    if index.iter().filter(|indexer| matches!(indexer, Indexer::Ellipsis)).count() > 1 {
        return fail(Why::Twice { what: "an ellipsis".into() });
    }
    let (mut view, mut tensors, mut dim) = (x.clone(), Vec::new(), 0);
    for indexer in index {
        match indexer {
            Indexer::Select(at) => view = view.select_at(dim, *at, loc)?,
            Indexer::Range { start, end, step } => {
                let size = view.shape()[dim] as i64;
                let clamp = |i: i64| (if i < 0 { i.saturating_add(size) } else { i }).clamp(0, size) as usize;
                let (start, end) = (start.map_or(0, clamp), end.map_or(size as usize, clamp));
                if (start, end, *step) != (0, size as usize, 1) {
                    let op = Op::Slice { dim, start, end: end.max(start), step: *step };
                    view = view.unary(op, loc).map_err(|e| e.named("index"))?;
                }
                dim += 1;
            }
            Indexer::NewAxis => {
                let mut shape = view.shape();
                shape.insert(dim, 1);
                view = view.unary(Op::Reshape { shape }, loc)?;
                dim += 1;
            }
            Indexer::Ellipsis => dim += shape.rank() - taken,
            Indexer::Tensor(t) if t.dtype() == DType::Bool => {
                let (mask, have) = (t.shape(), view.shape());
                if mask.is_empty() {
                    return fail(Why::Rank { argument: "a mask", expected: "1 or more", got: 0 });
                }
                if mask[..] != have[dim..dim + mask.rank()] {
                    return fail(Why::Broadcast { left: have[dim..dim + mask.rank()].into(), right: mask });
                }
                for _ in 0..mask.rank() {
                    tensors.push((dim, t.clone()));
                    dim += 1;
                }
            }
            Indexer::Tensor(t) => {
                let index = match t.dtype().kind() {
                    ScalarKind::Int => t.to_dtype(DType::I64)?,
                    _ => t.clone(),
                };
                tensors.push((dim, index));
                dim += 1;
            }
        }
    }
    Ok(Place { view, tensors })
}

/// Masks as the index tensors of their true elements. A mask stands once for each of its dims.
pub(crate) fn by_index(tensors: &[(usize, Tensor)], loc: Loc) -> Result<(Dims, Vec<Tensor>)> {
    let (mut dims, mut all) = (Dims::default(), Vec::new());
    let mut rest = tensors;
    while let Some((dim, t)) = rest.first() {
        let count = if t.dtype() == DType::Bool { t.rank() } else { 1 };
        match t.dtype() {
            DType::Bool => {
                for (k, column) in t.nonzero_columns("a mask as an index", loc)?.iter().enumerate() {
                    dims.push(dim + k);
                    all.push(Tensor::from_slice(column)?);
                }
            }
            _ => {
                dims.push(*dim);
                all.push(t.clone());
            }
        }
        rest = &rest[count..];
    }
    Ok((dims, all))
}

fn get(x: &Tensor, index: &[Indexer], loc: Loc) -> Result<Tensor> {
    let Place { view, tensors } = place(x, index, loc)?;
    if tensors.is_empty() {
        return Ok(view);
    }
    let (dims, tensors) = by_index(&tensors, loc)?;
    let args: Vec<Arg<'_>> = [&view].into_iter().chain(&tensors).map(Arg::Tensor).collect();
    dispatch_tensor(&Op::Index { dims }, &args, false, loc)
}

fn set(x: &Tensor, index: &[Indexer], value: &Operand<'_>, loc: Loc) -> Result<()> {
    let Place { view, tensors } = place(x, index, loc)?;
    let one = match value {
        Operand::Number(_) => true,
        Operand::Tensor(t) => t.numel() == 1 && t.rank() == 0,
    };
    let mask_alone =
        tensors.first().is_some_and(|(_, t)| t.dtype() == DType::Bool && t.rank() == tensors.len());
    if tensors.is_empty() {
        dispatch_tensor(&Op::Copy {}, &[Arg::Tensor(&view), value.arg()], true, loc)?;
    } else if let (true, true, [(dim, mask), ..]) = (one, mask_alone, &tensors[..]) {
        // One value for all: a choice of fixed size, which compiled code can keep.
        let shape = view.shape();
        let around = shape.rank() - dim - mask.rank();
        let wide: Shape = mask.shape().iter().copied().chain(vec![1; around]).collect();
        let mask = mask.unary(Op::Reshape { shape: wide }, loc)?;
        let args = [Arg::Tensor(&mask), value.arg(), Arg::Tensor(&view)];
        let chosen = dispatch_tensor(&Op::Where {}, &args, false, loc)?;
        dispatch_tensor(&Op::Copy {}, &[Arg::Tensor(&view), Arg::Tensor(&chosen)], true, loc)?;
    } else {
        let (dims, tensors) = by_index(&tensors, loc)?;
        let converted;
        let value = match value {
            Operand::Tensor(t) => {
                converted = t.to_dtype(view.dtype())?;
                Operand::Tensor(&converted)
            }
            Operand::Number(x) => Operand::Number(*x),
        };
        view.put(dims, &tensors, &value, false, true, loc)?;
    }
    Ok(())
}
