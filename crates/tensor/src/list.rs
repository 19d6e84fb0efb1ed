//! [`TensorList`]: several tensors operated on as one, by the functions of [`crate::foreach`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_ir::{Error, Loc, Op, Result, Why};

use crate::Tensor;
use crate::dispatch::dispatch_tensor;
use crate::handle::{Handle, Recycle, free_list};
use crate::hook::{self, Arg, Tag};

/// How many elements ahead of its turn one is asked for.
const AHEAD: usize = 16;

#[derive(Default)]
pub(crate) struct ListInner {
    items: OnceLock<Vec<Tensor>>,
    tag: AtomicU64,
}

impl Recycle for ListInner {
    fn clear(&mut self) {
        let mut items = self.items.take().unwrap_or_default().into_iter();
        while !items.as_slice().is_empty() {
            items.as_slice().iter().take(AHEAD).for_each(Tensor::prefetch);
            items.by_ref().take(AHEAD).for_each(drop);
        }
        *self.tag.get_mut() = 0;
    }
    free_list!(LISTS, ListInner);
}

/// A list of tensors. The tensors stay themselves: an in-place op over the list changes each of them.
///
/// ```
/// use kiln_tensor::{Tensor, TensorList, foreach};
/// # fn main() -> kiln_tensor::Result<()> {
/// let a = Tensor::from_slice(&[1.0f32, 2.0])?;
/// let b = Tensor::from_slice(&[10.0f32])?;
/// foreach::mul_(&TensorList::new(vec![a.clone(), b.clone()]), 2.0)?;
/// assert_eq!(a.to_vec::<f32>()?, [2.0, 4.0]);
/// assert_eq!(b.to_vec::<f32>()?, [20.0]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct TensorList {
    inner: Handle<ListInner>,
}

impl TensorList {
    /// A list of these tensors.
    pub fn new(tensors: Vec<Tensor>) -> TensorList {
        TensorList { inner: Handle::new(|inner: &mut ListInner| inner.items = OnceLock::from(tensors)) }
    }

    /// A list that a run will make.
    pub(crate) fn lazy(tag: Tag) -> TensorList {
        TensorList { inner: Handle::new(|inner: &mut ListInner| *inner.tag.get_mut() = tag.0) }
    }

    /// Gives a lazy list its tensors.
    pub(crate) fn publish(&self, tensors: Vec<Tensor>) {
        // A list that has its tensors keeps them.
        let _ = self.inner.items.set(tensors);
    }

    /// The tensors, unless the list is still lazy.
    #[inline]
    pub(crate) fn try_items(&self) -> Option<&[Tensor]> {
        self.inner.items.get().map(Vec::as_slice)
    }

    /// The tensors in order, each asked for from memory a little before its turn: the elements of a long list
    /// are scattered, and going from one to the next would wait for every one of them. Empty while lazy.
    pub(crate) fn walk(&self) -> impl Iterator<Item = &Tensor> {
        let items = self.try_items().unwrap_or_default();
        items.iter().take(AHEAD).for_each(Tensor::prefetch);
        items.iter().enumerate().map(move |(i, item)| {
            if let Some(later) = items.get(i + AHEAD) {
                later.prefetch();
            }
            if let Some(ready) = items.get(i + AHEAD / 2).and_then(Tensor::try_ready) {
                ready.storage.prefetch();
            }
            item
        })
    }

    /// The tensors; makes the list's run finish first if need be.
    pub fn items(&self) -> Result<&[Tensor]> {
        if self.inner.items.get().is_none() {
            hook::force(self.tag())?;
        }
        self.try_items().ok_or_else(|| Error::op("list", Why::Lost, Loc::UNKNOWN))
    }

    /// The tensor at `index`.
    #[track_caller]
    pub fn get(&self, index: usize) -> Result<Tensor> {
        match self.try_items() {
            Some(items) => items.get(index).cloned().ok_or_else(|| {
                Error::op(
                    "TensorList::get",
                    Why::Index { index: index as i64, size: items.len() },
                    Loc::caller(),
                )
            }),
            None => dispatch_tensor(&Op::ListGet { index }, &[Arg::List(self)], false, Loc::caller()),
        }
    }

    /// The run that knows this list.
    #[inline]
    pub(crate) fn tag(&self) -> Tag {
        Tag(self.inner.tag.load(Ordering::Relaxed))
    }

    /// Sets the tag.
    #[inline]
    pub(crate) fn set_tag(&self, tag: Tag) {
        self.inner.tag.store(tag.0, Ordering::Relaxed);
    }

    /// How many handles to this list there are.
    pub(crate) fn references(&self) -> usize {
        self.inner.references()
    }

    /// Equal for handles to the same list.
    pub fn address(&self) -> usize {
        self.inner.address()
    }
}

impl FromIterator<Tensor> for TensorList {
    fn from_iter<I: IntoIterator<Item = Tensor>>(iter: I) -> TensorList {
        TensorList::new(iter.into_iter().collect())
    }
}
