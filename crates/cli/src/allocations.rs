//! Counts calls of the global allocator, so that "no allocation in steady state" is a number.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator; counts on request, on all threads.
pub struct Counted;

impl Counted {
    #[inline]
    fn note() {
        // Off outside a measurement, where eager code must not pay for a shared counter.
        if COUNTING.load(Ordering::Relaxed) {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Counted::note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Counted::note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Counted::note();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// How often `body` asks for memory, on this thread or any other.
pub fn during<T>(body: impl FnOnce() -> T) -> (T, usize) {
    COUNT.store(0, Ordering::SeqCst);
    COUNTING.store(true, Ordering::SeqCst);
    let result = body();
    COUNTING.store(false, Ordering::SeqCst);
    (result, COUNT.load(Ordering::SeqCst))
}

#[cfg(test)]
mod tests {
    #[test]
    fn allocations_are_seen() {
        // Other tests may allocate meanwhile, so only the lower bound is certain.
        let (_, count) = super::during(|| std::hint::black_box(vec![1u8; 100]));
        assert!(count >= 1);
    }
}
