//! Reference-counted handles to recycled memory: cloning is an increment, and making a new one takes a block
//! from the thread's free list instead of the global allocator. Tensors, storages and lists are such handles.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// What can live behind a [`Handle`].
pub(crate) trait Recycle: Default + Send + Sync + 'static {
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

/// On cache lines of its own: looking at one of many scattered values waits for as few lines as can be.
#[repr(align(64))]
pub(crate) struct Counted<T> {
    references: AtomicUsize,
    value: UnsafeCell<T>,
}

/// A shared, counted pointer to a `T` from the recycling pool.
pub(crate) struct Handle<T: Recycle>(NonNull<Counted<T>>);

// SAFETY: a handle gives `&T` (and `&mut T` only while unique); T is Send + Sync.
unsafe impl<T: Recycle> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Recycle> Sync for Handle<T> {}

impl<T: Recycle> Handle<T> {
    /// A new value, as `Recycle::clear` left it, prepared by `prepare` before anyone else can see it.
    #[inline]
    pub(crate) fn new(prepare: impl FnOnce(&mut T)) -> Handle<T> {
        Handle::counted_from(1, prepare)
    }

    /// Two handles to a new value, for the price of one.
    #[inline]
    pub(crate) fn pair(prepare: impl FnOnce(&mut T)) -> (Handle<T>, Handle<T>) {
        let handle = Handle::counted_from(2, prepare);
        let other = Handle(handle.0);
        (handle, other)
    }

    /// A handle to a new value whose count says `references`; the caller makes the others.
    #[inline]
    fn counted_from(references: usize, prepare: impl FnOnce(&mut T)) -> Handle<T> {
        let block = T::free_list(|list| list.0.pop()).flatten().unwrap_or_else(|| {
            let counted = Counted { references: AtomicUsize::new(0), value: UnsafeCell::new(T::default()) };
            NonNull::from(Box::leak(Box::new(counted)))
        });
        // SAFETY: the block is valid and this is its only reference.
        let counted = unsafe { block.as_ref() };
        counted.references.store(references, Ordering::Relaxed);
        // SAFETY: as above, so `&mut` is exclusive.
        prepare(unsafe { &mut *counted.value.get() });
        Handle(block)
    }

    /// Another handle to a value that has only this one, without an atomic step; `None` if there are more.
    #[inline]
    pub(crate) fn second(&self) -> Option<Handle<T>> {
        let references = &self.counted().references;
        // Alone, nobody else can make or drop a handle meanwhile.
        (references.load(Ordering::Acquire) == 1).then(|| {
            references.store(2, Ordering::Relaxed);
            Handle(self.0)
        })
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

    /// How many handles there are.
    #[inline]
    pub(crate) fn references(&self) -> usize {
        self.counted().references.load(Ordering::Acquire)
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
        self.counted().references.fetch_add(1, Ordering::Relaxed);
        Handle(self.0)
    }
}

impl<T: Recycle> Drop for Handle<T> {
    #[inline]
    fn drop(&mut self) {
        // Alone, nobody else can make another handle meanwhile: a load is enough and much cheaper.
        let references = &self.counted().references;
        if references.load(Ordering::Acquire) != 1 {
            if references.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
        }
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
