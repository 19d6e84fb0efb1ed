//! Views on the tape: a change in place through one of them is a change of its base, and views that were made
//! before see it.
//!
//! A view that was made while gradients are recorded remembers its base, the tensor that has the memory, and the
//! version of the memory that its own history is true for. A change through a view puts two nodes on the tape: the
//! op that changed the window, and a scatter of the window into the base. Any other view finds, when it is asked
//! for its history next, that the version is another one, and reads its window from the base again.

use std::sync::atomic::Ordering;

use kiln_ir::{Layout, Loc, Op, Pairs, Result, Ty};

use super::node::begin;
use crate::Tensor;
use crate::hook::{Arg, Call};

/// What a view is a view of.
#[derive(Clone)]
pub(crate) struct Base {
    /// The tensor that has the memory; never a view with a base of its own.
    tensor: Tensor,
    /// The version of the memory that the view's history is true for.
    version: u64,
    /// Whether it was a leaf that requires a gradient when the view was made. One that is told so later is another
    /// leaf to the tape: what was made before has the history that it had.
    of_leaf: bool,
}

impl Tensor {
    /// The tensor that a view is a view of, where gradients are kept track of.
    pub(crate) fn base(&self) -> Option<Tensor> {
        if self.slot.is_view.load(Ordering::Relaxed) {
            self.slot.record.lock().base.as_ref().map(|base| base.tensor.clone())
        } else {
            None
        }
    }

    /// From now on the tensor is a view of another, or of what that one is a view of, and its history is true.
    pub(crate) fn become_view_of(&self, other: &Tensor) {
        let Some(version) = self.try_ready().map(|ready| ready.storage.version()) else { return };
        // A view of a view goes where that one goes.
        let known = other.slot.record.lock().base.clone();
        let base = match known {
            Some(base) => Base { version, ..base },
            None => {
                let of_leaf = other.requires_grad() && other.is_leaf();
                Base { tensor: other.clone(), version, of_leaf }
            }
        };
        self.slot.record.lock().base = Some(base);
        self.slot.is_view.store(true, Ordering::Relaxed);
    }

    /// Becomes a view of what `other` is a view of, if it is one.
    pub(super) fn adopt_base(&self, other: &Tensor) {
        if other.slot.is_view.load(Ordering::Relaxed) {
            let base = other.slot.record.lock().base.clone();
            self.slot.record.lock().base = base;
            self.slot.is_view.store(true, Ordering::Relaxed);
        }
    }

    /// A leaf is on its own, wherever its memory is.
    pub(super) fn forget_base(&self) {
        if self.slot.is_view.swap(false, Ordering::Relaxed) {
            let base = self.slot.record.lock().base.take();
            drop(base);
        }
    }

    /// The base, if it was changed since the view's history was true, and has a history for it.
    fn changed_base(&self) -> Option<Tensor> {
        let now = self.try_ready()?.storage.version();
        let base = self.slot.record.lock().base.clone().filter(|base| base.version != now)?;
        let follows = base.tensor.requires_grad() && (base.of_leaf || !base.tensor.is_leaf());
        follows.then_some(base.tensor)
    }

    /// Whether a view is to get a history from its base.
    #[cold]
    pub(crate) fn base_requires_grad(&self) -> bool {
        self.changed_base().is_some()
    }

    /// Whether the history of a view is not true and can't be renewed.
    pub(super) fn is_stale(&self) -> bool {
        match (self.slot.is_view.load(Ordering::Relaxed), self.try_ready()) {
            (true, _) => self.base_requires_grad(),
            (false, Some(ready)) => {
                ready.view_version.is_some_and(|version| version != ready.storage.version())
            }
            (false, None) => false,
        }
    }

    /// Renews the history of a view whose base was changed.
    #[cold]
    pub(super) fn renew(&self) {
        let Some(base) = self.changed_base() else { return };
        let Some((view, offset)) = self.window_of(&base) else { return };
        let loc = base.history().map_or(Loc::UNKNOWN, |(node, _)| node.loc);
        // Nothing of it can fail: the window was one when the view was made.
        if put_on_tape(&Op::AsStrided { view, offset }, &[&base], self, loc).is_ok() {
            self.is_renewed();
        }
    }

    /// The history is that of the memory as it is now.
    fn is_renewed(&self) {
        let Some(now) = self.try_ready().map(|ready| ready.storage.version()) else { return };
        if let Some(base) = &mut self.slot.record.lock().base {
            base.version = now;
        }
    }

    /// The sizes, strides and offset of the view in its base, if the base lies in order.
    fn window_of(&self, base: &Tensor) -> Option<(Pairs, usize)> {
        let (own, whole) = (self.try_ready()?, base.try_ready()?);
        window(&own.layout, &whole.layout)
    }

    /// Whether a change in place through the view can go on the tape.
    pub(crate) fn can_change(&self, base: &Tensor) -> bool {
        self.window_of(base).is_some()
    }

    /// An op on the tape changed the memory through the view: its base has another history.
    pub(crate) fn changed_through(&self, loc: Loc) -> Result<()> {
        let Some(base) = self.base() else { return Ok(()) };
        self.is_renewed();
        match self.window_of(&base) {
            Some((view, offset)) => {
                put_on_tape(&Op::AsStridedScatter { view, offset }, &[&base, self], &base, loc)
            }
            None => Ok(()),
        }
    }
}

fn window(own: &Layout, whole: &Layout) -> Option<(Pairs, usize)> {
    let strides: Option<Vec<usize>> =
        own.strides.iter().map(|&stride| usize::try_from(stride).ok()).collect();
    let offset = own.offset.checked_sub(whole.offset)?;
    whole.is_contiguous().then(|| Some((Pairs::new(&own.shape, &strides?), offset))).flatten()
}

/// Makes a tensor the result of an op that nobody has to run: the memory is as it should be.
fn put_on_tape(op: &Op, args: &[&Tensor], result: &Tensor, loc: Loc) -> Result<()> {
    let tys = args.iter().map(|arg| Ty::Tensor(arg.ty())).collect();
    let args: Vec<Arg<'_>> = args.iter().map(|arg| Arg::Tensor(arg)).collect();
    let started = begin(&Call { op, args: &args, in_place: false, grad_enabled: true, loc }, false)?;
    started.finish(&args, Some(tys), &mut result.clone())
}
