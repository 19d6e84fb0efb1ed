//! [`Kept`]: a run's own handle to a tensor that it will make ready. As long as the run keeps it, the thread
//! of the run counts the tensor's other handles without atomic steps (see Note: Biased counts).

use std::mem::ManuallyDrop;
use std::ops::Deref;

use crate::Tensor;
use crate::hook::Tag;

/// See the [module](self). To be let go of on the thread that made it, by [`release`](Kept::release) or by
/// dropping it; dropped on another thread, it stays in memory for ever.
pub struct Kept(ManuallyDrop<Tensor>);

/// A tensor that died before it was computed: nobody but this value has a handle to it, it is lazy and nothing
/// was attached to it. It serves again, on any thread.
pub struct Spare(ManuallyDrop<Tensor>);

impl Kept {
    /// A tensor that the run named in the tag will make ready: the user's handle and the run's.
    pub fn lazy(tag: Tag, requires_grad: bool) -> (Tensor, Kept) {
        Kept::second(ManuallyDrop::new(Tensor::lazy(tag, requires_grad)))
    }

    /// The user's handle to a tensor that has no other handle than this.
    #[inline]
    fn second(tensor: ManuallyDrop<Tensor>) -> (Tensor, Kept) {
        // SAFETY: it is the only handle, and `Kept` drops it only after the bias has ended.
        let slot = unsafe { tensor.slot.second() };
        (Tensor { slot }, Kept(tensor))
    }

    /// Whether someone besides the run may have the tensor.
    #[inline]
    pub fn is_shared(&self) -> bool {
        !self.0.slot.is_alone() && self.references() > 1
    }

    /// Lets go of the tensor. If it died lazy, it is returned, to be used again. On a thread other than the one
    /// that made it nothing can be said and the handle comes back.
    #[inline]
    pub fn release(self) -> Result<Option<Spare>, Kept> {
        // SAFETY: there is no other handle.
        if self.0.slot.is_alone() && unsafe { self.0.is_bare() } {
            // SAFETY: a `Kept` that is not dropped is a handle like any other.
            return Ok(Some(Spare(unsafe { std::ptr::read(&ManuallyDrop::new(self).0) })));
        }
        self.settle()
    }

    fn settle(self) -> Result<Option<Spare>, Kept> {
        if self.0.slot.settle() {
            // SAFETY: as above; the count is an ordinary one now.
            drop(unsafe { ManuallyDrop::take(&mut ManuallyDrop::new(self).0) });
            Ok(None)
        } else {
            Err(self)
        }
    }
}

impl Spare {
    /// Makes it the tensor of this tag: the user's handle and the run's.
    #[inline]
    pub fn renew(self, tag: Tag, requires_grad: bool) -> (Tensor, Kept) {
        // SAFETY: `self` is not dropped, so its handle moves on.
        let tensor = unsafe { std::ptr::read(&ManuallyDrop::new(self).0) };
        tensor.set_tag(tag);
        tensor.mark_requires_grad(requires_grad);
        Kept::second(tensor)
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // SAFETY: it is the only handle; nobody uses it after its drop.
        unsafe {
            self.0.slot.settle_alone();
            ManuallyDrop::drop(&mut self.0);
        }
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
    use crate::Device;

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
        // The handle went where the owner did not count it: the slot does not serve again, that is all.
        assert!(kept.release().is_ok());
    }

    #[test]
    fn the_dead_serve_again_on_any_thread() {
        let (user, kept) = pair();
        drop(user);
        let spare = kept.release().ok().flatten().expect("alone and bare");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (user, kept) = spare.renew(Tag::new(2, 7), true);
                assert_eq!((user.tag(), user.requires_grad()), (Tag::new(2, 7), true));
                assert_eq!(user.references(), 2);
                drop(kept);
                assert_eq!(user.references(), 1);
            });
        });
        let (user, kept) = pair();
        drop(user);
        drop(kept.release());
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
    fn what_is_ready_does_not_serve_again() -> crate::Result<()> {
        let (user, kept) = pair();
        kept.publish(Tensor::zeros([1], &Device::Cpu)?.ready()?.clone());
        drop(user);
        assert!(!kept.is_shared());
        assert!(kept.release().is_ok_and(|dead| dead.is_none()));
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
