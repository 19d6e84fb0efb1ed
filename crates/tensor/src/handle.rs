//! Reference-counted handles to recycled memory: cloning is an increment, and making a new one takes a block
//! from the thread's free list instead of the global allocator. Tensors, storages and lists are such handles.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use kiln_runtime::sync::{AtomicUsize, fence, this_thread};

// [Note: Biased counts]
//
// An atomic read-modify-write costs as much as all the rest of a replayed op, and counting would need one for
// every tensor that the user drops. So the count of a tensor that a run makes is *biased* to the run's thread
// for as long as the run keeps a handle to it: that thread counts its own clones and drops in `local`, with
// plain loads and stores; every other thread counts in `shared`, atomically, as always. The sum is the number
// of handles, either part alone means nothing (a handle may be cloned here and dropped there).
//
// The run's own handle stands in `shared` as `BIAS` instead of 1. So no other thread, whatever it drops, finds
// that its handle was the last one. The bias ends when the run lets go, on the thread that has it: `local` is
// added to `shared`, and the count is an ordinary one again (`Handle::settle`). If the run's handle is the only one
// (`is_alone`) it stays so, wherever it is moved, and the slot can serve the next call without any of this.
//
// `owner` is read by all and equals a thread's mark only while that very thread has the bias, so whatever
// another thread sees there, it sees that it is not the owner.

/// What can live behind a [`Handle`].
pub(crate) trait Recycle: Default + Send + Sync + 'static {
    /// Whether counts of this type can be biased.
    const BIASED: bool = false;
    /// Drops what it holds and becomes as good as new.
    fn clear(&mut self);
    /// This thread's free list for the type; `None` while the thread is going down.
    fn free_list<R>(body: impl FnOnce(&mut FreeList<Self>) -> R) -> Option<R>;
}

/// Blocks of one type that are free to use.
pub(crate) struct FreeList<T>(Vec<NonNull<Counted<T>>>);

impl<T> FreeList<T> {
    pub(crate) const fn new() -> FreeList<T> {
        FreeList(Vec::new())
    }
}

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        for block in self.0.drain(..) {
            // SAFETY: blocks on the list came from `Box::leak` and nobody refers to them.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
    }
}

/// More than this many free blocks per thread and type go back to the allocator.
const KEEP: usize = 1 << 16;

/// What the run's handle counts for while a count is biased: more than there can be handles.
const BIAS: usize = 1 << (usize::BITS - 2);

/// A value and its count. The count and the first fields of the value share a cache line: replay touches no
/// other.
#[repr(C, align(64))]
pub(crate) struct Counted<T> {
    shared: AtomicUsize,
    /// The thread that the count is biased to, 0 for none.
    owner: AtomicUsize,
    /// Handles as counted by the owner; less than zero (wrapping) if it dropped more than it made.
    local: AtomicUsize,
    value: UnsafeCell<T>,
}

impl<T: Recycle> Counted<T> {
    #[cold]
    fn allocate() -> NonNull<Counted<T>> {
        NonNull::from(Box::leak(Box::new(Counted {
            shared: AtomicUsize::new(0),
            owner: AtomicUsize::new(0),
            local: AtomicUsize::new(0),
            value: UnsafeCell::new(T::default()),
        })))
    }

    /// Whether this thread counts in `local`.
    #[inline]
    fn is_own(&self) -> bool {
        T::BIASED && self.owner.load(Ordering::Relaxed) == this_thread()
    }

    /// Counts on the owner's thread.
    #[inline]
    fn add_local(&self, handles: usize) {
        let now = self.local.load(Ordering::Relaxed).wrapping_add(handles);
        self.local.store(now, Ordering::Relaxed);
    }

    /// Biases the count to this thread. Nobody else may know the block.
    #[inline]
    fn bias(&self, local: usize) {
        self.shared.store(BIAS, Ordering::Relaxed);
        self.owner.store(this_thread(), Ordering::Relaxed);
        self.local.store(local, Ordering::Relaxed);
    }
}

/// A shared, counted pointer to a `T` from the recycling pool.
pub(crate) struct Handle<T: Recycle>(NonNull<Counted<T>>);

// SAFETY: a handle gives `&T` (and `&mut T` only while unique); T is Send + Sync.
unsafe impl<T: Recycle> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Recycle> Sync for Handle<T> {}

impl<T: Recycle> Handle<T> {
    /// A new value, as `Recycle::clear` left it, prepared by `prepare` before anyone else can see it.
    #[inline(always)]
    pub(crate) fn new(prepare: impl FnOnce(&mut T)) -> Handle<T> {
        let block = T::free_list(|list| list.0.pop()).flatten().unwrap_or_else(Counted::allocate);
        // SAFETY: the block is valid and this is its only reference.
        let counted = unsafe { block.as_ref() };
        counted.shared.store(1, Ordering::Relaxed);
        // SAFETY: as above, so `&mut` is exclusive.
        prepare(unsafe { &mut *counted.value.get() });
        Handle(block)
    }

    /// Another handle, for the user; this one becomes the run's, and the count is biased to this thread.
    ///
    /// # Safety
    /// This must be the only handle, and it must not be dropped before the bias has ended (by `settle` or
    /// `settle_alone`).
    #[inline]
    pub(crate) unsafe fn second(&self) -> Handle<T> {
        debug_assert!(T::BIASED);
        self.counted().bias(1);
        Handle(self.0)
    }

    /// Whether the run's handle is the only one. Only the thread that has the bias knows; others are told no.
    #[inline]
    pub(crate) fn is_alone(&self) -> bool {
        let counted = self.counted();
        counted.is_own()
            && counted.local.load(Ordering::Relaxed) == 0
            && counted.shared.load(Ordering::Acquire) == BIAS
    }

    /// Ends the bias: afterwards the count is an ordinary one. Refuses (false) on a thread that does not have
    /// the bias, since the handles that the owner counted are not known there.
    pub(crate) fn settle(&self) -> bool {
        let counted = self.counted();
        if !counted.is_own() {
            return false;
        }
        let local = counted.local.load(Ordering::Relaxed);
        counted.owner.store(0, Ordering::Relaxed);
        counted.shared.fetch_add(local.wrapping_add(1).wrapping_sub(BIAS), Ordering::AcqRel);
        true
    }

    /// Ends the bias of a value that nobody else has a handle to, on any thread.
    ///
    /// # Safety
    /// The run's handle must be the only one.
    pub(crate) unsafe fn settle_alone(&self) {
        let counted = self.counted();
        counted.owner.store(0, Ordering::Relaxed);
        counted.shared.store(1, Ordering::Relaxed);
    }

    #[inline]
    fn counted(&self) -> &Counted<T> {
        // SAFETY: the block lives as long as any handle to it.
        unsafe { self.0.as_ref() }
    }

    /// Asks for the value's cache lines, so that they are there when it is looked at a little later. Long lists
    /// are never in the caches when their turn comes, and an atomic step waits for its line alone.
    #[inline]
    pub(crate) fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..size_of::<Counted<T>>()).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing the program can see, and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.0.as_ptr().cast::<i8>().wrapping_add(line)) };
        }
    }

    /// The value, if this is the only handle to it.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        let counted = self.counted();
        // A biased count is never 1.
        match counted.shared.load(Ordering::Acquire) {
            // SAFETY: nobody else has a handle, and none can be made while this one is borrowed.
            1 => Some(unsafe { &mut *counted.value.get() }),
            _ => None,
        }
    }

    /// How many handles there are; `usize::MAX` for "more than one" where only another thread knows.
    #[inline]
    pub(crate) fn references(&self) -> usize {
        let counted = self.counted();
        let shared = counted.shared.load(Ordering::Acquire);
        if shared < BIAS / 2 {
            shared
        } else if counted.is_own() {
            shared.wrapping_sub(BIAS).wrapping_add(counted.local.load(Ordering::Relaxed)).wrapping_add(1)
        } else {
            usize::MAX
        }
    }

    /// The block's address: equal for handles to the same value.
    #[inline]
    pub(crate) fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

impl<T: Recycle> Deref for Handle<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `&mut` exists only before the first handle is returned or after the last is dropped.
        unsafe { &*self.counted().value.get() }
    }
}

impl<T: Recycle> Clone for Handle<T> {
    #[inline]
    fn clone(&self) -> Handle<T> {
        let counted = self.counted();
        if counted.is_own() {
            counted.add_local(1)
        } else {
            counted.shared.fetch_add(1, Ordering::Relaxed);
        }
        Handle(self.0)
    }
}

impl<T: Recycle> Drop for Handle<T> {
    #[inline]
    fn drop(&mut self) {
        let counted = self.counted();
        if counted.is_own() {
            // The run has a handle, so this was not the last one.
            counted.add_local(1usize.wrapping_neg());
            return;
        }
        // Alone, nobody else can make another handle meanwhile: a load is enough and much cheaper.
        if counted.shared.load(Ordering::Acquire) != 1 {
            if counted.shared.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
        }
        self.recycle();
    }
}

impl<T: Recycle> Handle<T> {
    /// Gives the block back. This must be the last handle.
    fn recycle(&mut self) {
        // SAFETY: this was the last handle, so the access is exclusive.
        unsafe { (*self.counted().value.get()).clear() };
        let block = self.0;
        let kept = T::free_list(|list| {
            let room = list.0.len() < KEEP;
            if room {
                list.0.push(block);
            }
            room
        });
        if kept != Some(true) {
            // SAFETY: the block came from `Box::leak`, nobody refers to it and it is on no list.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
    }
}

/// Gives a type its thread-local free list.
macro_rules! free_list {
    ($name:ident, $ty:ty) => {
        // Every tensor that is made or dropped comes here.
        #[inline(always)]
        fn free_list<R>(body: impl FnOnce(&mut $crate::handle::FreeList<$ty>) -> R) -> Option<R> {
            thread_local! {
                static LIST: std::cell::RefCell<$crate::handle::FreeList<$ty>> =
                    const { std::cell::RefCell::new($crate::handle::FreeList::new()) };
            }
            LIST.try_with(|list| list.try_borrow_mut().ok().map(|mut list| body(&mut list))).ok().flatten()
        }
    };
}
pub(crate) use free_list;

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize as Tally;

    /// A value that tells on a reader or writer beside another, and counts how often it was cleared.
    #[derive(Default)]
    struct Probe {
        cell: loom::cell::UnsafeCell<u32>,
        cleared: Option<Arc<Tally>>,
    }

    // SAFETY: the model watches over the cell.
    unsafe impl Sync for Probe {}

    impl Probe {
        fn read(&self) {
            // SAFETY: the model says so if it is not.
            self.cell.with(|value| assert_eq!(unsafe { *value }, 7));
        }
        fn write(&self, to: u32) {
            // SAFETY: as above.
            self.cell.with_mut(|value| unsafe { *value = to });
        }
    }

    impl Recycle for Probe {
        const BIASED: bool = true;
        fn clear(&mut self) {
            self.write(0);
            if let Some(cleared) = self.cleared.take() {
                cleared.fetch_add(1, Ordering::Relaxed);
            }
        }
        fn free_list<R>(_: impl FnOnce(&mut FreeList<Probe>) -> R) -> Option<R> {
            None
        }
    }

    /// Runs a program on a new handle in every order; the value must be cleared once.
    fn check(program: impl Fn(Handle<Probe>) + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let cleared = Arc::new(Tally::new(0));
            let theirs = cleared.clone();
            program(Handle::new(move |probe: &mut Probe| {
                probe.write(7);
                probe.cleared = Some(theirs);
            }));
            assert_eq!(cleared.load(Ordering::Relaxed), 1, "cleared once");
        });
    }

    /// Ends the bias and lets go.
    fn release(run: Handle<Probe>) {
        assert!(run.settle());
        drop(run);
    }

    #[test]
    fn ordinary_counts() {
        check(|handle| {
            let theirs = handle.clone();
            let other = thread::spawn(move || {
                theirs.read();
                drop(theirs.clone());
            });
            handle.read();
            drop(handle);
            other.join().expect("no panic");
        });
    }

    #[test]
    fn another_thread_clones_and_drops_while_the_run_lets_go() {
        check(|run| {
            // SAFETY: the only handle; `release` ends the bias before it goes.
            let user = unsafe { run.second() };
            let theirs = user.clone();
            let other = thread::spawn(move || {
                theirs.read();
                let second = theirs.clone();
                drop(theirs);
                second.read();
            });
            user.read();
            drop(user);
            release(run);
            other.join().expect("no panic");
        });
    }

    #[test]
    fn two_other_threads_outlive_the_run() {
        let program = |run: Handle<Probe>| {
            // SAFETY: as above.
            let user = unsafe { run.second() };
            let first = user.clone();
            let others = [
                thread::spawn(move || first.read()),
                thread::spawn(move || {
                    let clone = user.clone();
                    drop(user);
                    clone.read();
                }),
            ];
            release(run);
            others.map(|other| other.join().expect("no panic"));
        };
        check(program);
    }

    #[test]
    fn who_is_alone_may_write() {
        check(|run| {
            // SAFETY: as above.
            let user = unsafe { run.second() };
            let borrowed = user.clone();
            let other = thread::spawn(move || {
                let clone = borrowed.clone();
                drop(borrowed);
                clone.read();
            });
            // One of the owner's two handles goes there and is dropped there: the parts of the count alone mean
            // nothing.
            drop(user);
            let alone = run.is_alone();
            if alone {
                run.write(7);
            }
            // Cloned here, dropped there: the owner sees that it is alone once it is told.
            other.join().expect("no panic");
            run.write(7);
            release(run);
        });
    }

    #[test]
    fn a_borrowed_handle_that_comes_and_goes_elsewhere() {
        check(|run| {
            // SAFETY: as above.
            let user = unsafe { run.second() };
            let user = loom::sync::Arc::new(user);
            let theirs = user.clone();
            let other = thread::spawn(move || {
                let clone = Handle::clone(&theirs);
                drop(theirs);
                clone.read();
            });
            drop(user);
            if run.is_alone() {
                run.write(7);
            }
            other.join().expect("no panic");
            // The last of the user's handles may have been dropped by either.
            release(run);
        });
    }
}
