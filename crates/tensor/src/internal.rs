//! What runs do with tensors and lists: mark them, make them ready, put them on the tape. For the crates of the
//! compiler; `kiln` does not hand it on, so that a user's program can't take a tensor out from under its run.

use kiln_ir::Result;

use crate::hook::Tag;
use crate::tensor::{Ready, Seen};
use crate::{Tensor, TensorList};

/// The state of a tensor: ready or lazy, whose it is, what it is to autograd.
pub trait TensorState: Sized {
    /// A tensor that is ready.
    fn from_ready(ready: Ready) -> Self;
    /// A tensor that the run named in the tag will make ready.
    fn lazy(tag: Tag, requires_grad: bool) -> Self;
    /// Makes a lazy tensor ready; one that is stays as it is. For the run that made it.
    fn publish(&self, ready: Ready);
    /// The ready state, if it is ready.
    fn try_ready(&self) -> Option<Seen<'_>>;
    /// The ready state; makes the tensor's run finish first if need be.
    fn ready(&self) -> Result<Seen<'_>>;
    /// The run that knows this tensor, and its number there.
    fn tag(&self) -> Tag;
    /// Sets the tag.
    fn set_tag(&self, tag: Tag);
    /// How many handles to this tensor there are; `usize::MAX` for "more than one" where only the thread of a run in
    /// progress knows.
    fn references(&self) -> usize;
    /// Asks for the tensor's own state to be near when its turn comes.
    fn prefetch(&self);
    /// Sets whether gradients are wanted, without any check: for runs, which know.
    fn mark_requires_grad(&self, on: bool);
    /// What `requires_grad_` does to a leaf, without any check: for runs, which know.
    fn mark_leaf(&self, on: bool);
    /// Sets the flag of a leaf that a run is yet to make: for that run.
    fn mark_lazy_leaf(&self, on: bool);
    /// Becomes what `other` is: its memory, its place on the tape. Only for a lazy tensor whose run was executed op by
    /// op.
    fn adopt(&self, other: &Self) -> Result<()>;
    /// From now on the tensor is a view of another, or of what that one is a view of, and its history is true.
    fn become_view_of(&self, other: &Self);
    /// Has the tape keep the gradient that `retain_grad` asked for: for a run that executed a recording op by op.
    fn watch_for_retained(&self);
    /// Whether a hook waits for this leaf's gradient.
    fn has_hooks(&self) -> bool;
}

impl TensorState for Tensor {
    #[inline]
    fn from_ready(ready: Ready) -> Tensor {
        Tensor::from_ready(ready)
    }
    #[inline]
    fn lazy(tag: Tag, requires_grad: bool) -> Tensor {
        Tensor::lazy(tag, requires_grad)
    }
    #[inline]
    fn publish(&self, ready: Ready) {
        self.publish(ready);
    }
    #[inline]
    fn try_ready(&self) -> Option<Seen<'_>> {
        self.try_ready()
    }
    #[inline]
    fn ready(&self) -> Result<Seen<'_>> {
        self.ready()
    }
    #[inline]
    fn tag(&self) -> Tag {
        self.tag()
    }
    #[inline]
    fn set_tag(&self, tag: Tag) {
        self.set_tag(tag);
    }
    #[inline]
    fn references(&self) -> usize {
        self.references()
    }
    #[inline]
    fn prefetch(&self) {
        self.prefetch();
    }
    #[inline]
    fn mark_requires_grad(&self, on: bool) {
        self.mark_requires_grad(on);
    }
    fn mark_leaf(&self, on: bool) {
        self.mark_leaf(on);
    }
    fn mark_lazy_leaf(&self, on: bool) {
        self.mark_lazy_leaf(on);
    }
    fn adopt(&self, other: &Tensor) -> Result<()> {
        self.adopt(other)
    }
    fn become_view_of(&self, other: &Tensor) {
        self.become_view_of(other);
    }
    fn watch_for_retained(&self) {
        self.watch_for_retained();
    }
    fn has_hooks(&self) -> bool {
        self.has_hooks()
    }
}

/// The state of a list of tensors.
pub trait ListState: Sized {
    /// A list that a run will make.
    fn lazy(tag: Tag) -> Self;
    /// Gives a lazy list its tensors.
    fn publish(&self, tensors: Vec<Tensor>);
    /// The tensors, unless the list is still lazy.
    fn try_items(&self) -> Option<&[Tensor]>;
    /// The tensors in order, each asked for from memory a little before its turn: the elements of a long list are
    /// scattered, and going from one to the next would wait for every one of them. Empty while lazy.
    fn walk(&self) -> impl Iterator<Item = &Tensor>;
    /// The run that knows this list.
    fn tag(&self) -> Tag;
    /// Sets the tag.
    fn set_tag(&self, tag: Tag);
    /// How many handles to this list there are.
    fn references(&self) -> usize;
}

impl ListState for TensorList {
    fn lazy(tag: Tag) -> TensorList {
        TensorList::lazy(tag)
    }
    fn publish(&self, tensors: Vec<Tensor>) {
        self.publish(tensors);
    }
    #[inline]
    fn try_items(&self) -> Option<&[Tensor]> {
        self.try_items()
    }
    #[inline]
    fn walk(&self) -> impl Iterator<Item = &Tensor> {
        self.walk()
    }
    #[inline]
    fn tag(&self) -> Tag {
        self.tag()
    }
    #[inline]
    fn set_tag(&self, tag: Tag) {
        self.set_tag(tag);
    }
    #[inline]
    fn references(&self) -> usize {
        self.references()
    }
}
