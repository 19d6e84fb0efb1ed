//! Small blocks that a thread keeps for itself, so that neither locks nor shared counters are touched for them.

use std::cell::RefCell;
use std::ptr::NonNull;

use super::class::{Class, SMALL_CLASSES};
use super::{Link, POOL};
use crate::guard;

/// Blocks of one class that a thread keeps.
const MAGAZINE: usize = 64;
/// Bytes that a thread's small blocks may add up to before they show in the counters.
const UNREPORTED: isize = 64 << 10;

/// Small blocks that one thread keeps for itself.
pub(super) struct Magazine {
    heads: [Option<Link>; SMALL_CLASSES],
    counts: [usize; SMALL_CLASSES],
    /// Bytes that came to life here (or died, if negative) since the last report.
    unreported: isize,
}

thread_local! {
    static OWN: RefCell<Magazine> = const {
        RefCell::new(Magazine { heads: [None; SMALL_CLASSES], counts: [0; SMALL_CLASSES], unreported: 0 })
    };
}

impl Magazine {
    /// The thread's own magazine, for a class that it keeps; `None` while the thread is going down.
    #[inline]
    pub(super) fn with<R>(class: Class, body: impl FnOnce(&mut Magazine) -> R) -> Option<R> {
        if class.index >= SMALL_CLASSES {
            return None;
        }
        OWN.try_with(|own| body(&mut own.borrow_mut())).ok()
    }

    #[inline]
    pub(super) fn take(&mut self, class: Class) -> Option<NonNull<u8>> {
        let Link(block) = self.heads[class.index]?;
        // SAFETY: `put` wrote a link at the start of every block it kept.
        self.heads[class.index] = guard::at_link(block, || unsafe { block.cast::<Option<Link>>().read() });
        self.counts[class.index] -= 1;
        self.count(class.bytes as isize);
        Some(block)
    }

    /// Keeps a block, unless there are enough.
    #[inline]
    pub(super) fn put(&mut self, class: Class, block: NonNull<u8>) -> bool {
        if self.counts[class.index] == MAGAZINE {
            return false;
        }
        // SAFETY: the block is at least 64 bytes, aligned, and no longer used by its former owner.
        guard::at_link(block, || unsafe { block.cast::<Option<Link>>().write(self.heads[class.index]) });
        self.heads[class.index] = Some(Link(block));
        self.counts[class.index] += 1;
        self.count(-(class.bytes as isize));
        true
    }

    #[inline]
    fn count(&mut self, bytes: isize) {
        self.unreported += bytes;
        if self.unreported.abs() > UNREPORTED {
            self.report();
        }
    }

    fn report(&mut self) {
        POOL.count(std::mem::take(&mut self.unreported));
    }

    /// Makes this thread's small blocks show in the counters.
    pub(super) fn report_own() {
        // A thread that is going down has reported.
        let _ = OWN.try_with(|own| own.borrow_mut().report());
    }

    /// Gives all of this thread's blocks to the pool.
    pub(super) fn empty_own() {
        // A thread that is going down has given them back.
        let _ = OWN.try_with(|own| own.borrow_mut().empty());
    }

    fn empty(&mut self) {
        for index in 0..SMALL_CLASSES {
            let Some(class) = Class::at(index) else { return };
            while let Some(block) = self.take(class) {
                self.count(-(class.bytes as isize));
                POOL.push(class, block);
            }
        }
        self.report();
    }
}

impl Drop for Magazine {
    fn drop(&mut self) {
        self.empty();
    }
}
