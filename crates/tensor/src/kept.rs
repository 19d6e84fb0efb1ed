//! [`Kept`]: a run's own handle to a tensor that it will make ready. As long as the run keeps it, the thread
//! of the run counts the tensor's other handles without atomic steps (see Note: Biased counts).

use std::mem::ManuallyDrop;
use std::ops::Deref;

use crate::Tensor;
use crate::hook::Tag;

/// See the [module](self). To be let go of on the thread that made it, by [`release`](Kept::release) or by
/// dropping it; dropped on another thread, it stays in memory for ever.
pub struct Kept(ManuallyDrop<Tensor>);

impl Kept {
    /// A tensor that the run named in the tag will make ready: the user's handle and the run's.
    #[inline]
    pub fn lazy(tag: Tag, requires_grad: bool) -> (Tensor, Kept) {
        match Kept::renew(Tensor::lazy(tag, requires_grad), tag, requires_grad) {
            Some(pair) => pair,
            None => unreachable!("a new tensor has one handle"),
        }
    }

    /// The same with a tensor that [`release`](Kept::release) gave; `None` if it can't serve again.
    #[inline]
    pub fn renew(mut tensor: Tensor, tag: Tag, requires_grad: bool) -> Option<(Tensor, Kept)> {
        if tensor.references() != 1 || !tensor.is_bare() {
            return None;
        }
        tensor.set_tag(tag);
        tensor.mark_requires_grad(requires_grad);
        let kept = ManuallyDrop::new(tensor);
        // SAFETY: `Kept` gives the handle up only after `settle` returned true.
        match unsafe { kept.slot.second() } {
            Some(slot) => Some((Tensor { slot }, Kept(kept))),
            None => {
                drop(ManuallyDrop::into_inner(kept));
                None
            }
        }
    }

    /// Whether someone besides the run has the tensor.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.references() > 1
    }

    /// Lets go of the tensor. If it died lazy, it is returned, to be used again. On a thread other than the one
    /// that made it nothing can be said and the handle comes back.
    #[inline]
    pub fn release(self) -> Result<Option<Tensor>, Kept> {
        if !self.0.slot.settle() {
            return Err(self);
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and nobody uses it afterwards.
        let tensor = unsafe { ManuallyDrop::take(&mut this.0) };
        Ok((tensor.is_lazy() && tensor.references() == 1).then_some(tensor))
    }
}

impl Deref for Kept {
    type Target = Tensor;
    #[inline]
    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.0.slot.settle() {
            // SAFETY: nobody uses it after its drop.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    fn pair() -> (Tensor, Kept) {
        Kept::lazy(Tag::new(1, 0), false)
    }

    #[test]
    fn handles_are_counted_wherever_they_are_made_and_dropped() {
        let (user, kept) = pair();
        assert_eq!(kept.references(), 2);
        let clone = user.clone();
        assert_eq!(user.references(), 3);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(user.references(), usize::MAX, "only the owner knows");
                let theirs = user.clone();
                drop(clone);
                drop(theirs);
            });
        });
        assert_eq!(kept.references(), 2);
        let theirs = std::thread::scope(|scope| scope.spawn(|| user.clone()).join().expect("no panic"));
        assert_eq!(kept.references(), 3);
        drop(theirs);
        drop(user);
        assert!(!kept.is_shared());
        assert!(kept.release().is_ok_and(|dead| dead.is_some()));
    }

    #[test]
    fn a_tensor_outlives_its_run() {
        let (user, kept) = pair();
        let moved = user.clone();
        assert!(kept.release().is_ok_and(|dead| dead.is_none()));
        assert_eq!(user.references(), 2);
        std::thread::scope(|scope| {
            scope.spawn(move || assert_eq!(moved.references(), 2));
        });
        assert_eq!(user.references(), 1);
    }

    #[test]
    fn a_handle_dropped_elsewhere_leaves_the_run_alone() {
        let (user, kept) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(user));
        });
        assert_eq!(kept.references(), 1);
        let dead = kept.release().ok().flatten().expect("nobody else has it");
        let (user, kept) = Kept::renew(dead, Tag::new(2, 7), true).expect("alone and bare");
        assert_eq!((user.tag(), user.requires_grad()), (Tag::new(2, 7), true));
        drop(kept);
        assert_eq!(user.references(), 1);
    }

    #[test]
    fn another_thread_can_not_let_go() {
        let (user, kept) = pair();
        let kept = std::thread::scope(|scope| {
            scope.spawn(move || kept.release().err().expect("not its own")).join().expect("no panic")
        });
        assert_eq!(user.references(), 2);
        assert!(kept.release().is_ok());
        assert_eq!(user.references(), 1);
    }

    #[test]
    fn what_is_known_or_shared_does_not_serve_again() -> crate::Result<()> {
        let ready = Tensor::zeros([1], DType::F32, &Device::Cpu)?;
        assert!(Kept::renew(ready, Tag::new(1, 0), false).is_none());
        let (user, kept) = pair();
        drop(kept);
        let other = user.clone();
        assert!(Kept::renew(user, Tag::new(1, 0), false).is_none());
        assert_eq!(other.references(), 1);
        Ok(())
    }

    #[test]
    fn counts_survive_many_threads() {
        for _ in 0..200 {
            let (user, kept) = pair();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    let mine = user.clone();
                    scope.spawn(move || (0..50).for_each(|_| drop(mine.clone())));
                }
                (0..200).for_each(|_| drop(user.clone()));
                assert!(kept.release().is_ok());
                (0..50).for_each(|_| drop(user.clone()));
            });
            assert_eq!(user.references(), 1);
        }
    }
}
