//! Memory lent to a thread, which its buffers come from for a while.

use std::cell::Cell;
use std::ptr::NonNull;

use super::ALIGNMENT;
use super::class::{Class, SMALL_CLASSES};

/// Memory that a thread's larger buffers come from for a while, instead of the pool's blocks.
#[derive(Clone, Copy)]
pub(super) struct Loan {
    start: usize,
    /// Where the next buffer begins.
    next: usize,
    end: usize,
    /// Buffers that have not been given back.
    out: usize,
}

thread_local! {
    static LOAN: Cell<Loan> = const { Cell::new(Loan::NONE) };
}

impl Loan {
    const NONE: Loan = Loan { start: 0, next: 0, end: 0, out: 0 };

    /// Calls `body`, in which nothing is lent to this thread.
    pub(super) fn without<R>(body: impl FnOnce() -> R) -> R {
        let loan = LOAN.replace(Loan::NONE);
        let result = body();
        LOAN.set(loan);
        result
    }

    /// Memory for a buffer, if it is not a small one and there is room.
    #[inline]
    pub(super) fn take(class: Class, bytes: usize) -> Option<NonNull<u8>> {
        let mut loan = LOAN.get();
        let size = bytes.next_multiple_of(ALIGNMENT);
        if class.index < SMALL_CLASSES || loan.end - loan.next < size {
            return None;
        }
        let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut(loan.next))?;
        loan.next += size;
        loan.out += 1;
        LOAN.set(loan);
        Some(pointer)
    }

    /// Takes a buffer's memory back, if it was lent.
    #[inline]
    pub(super) fn give_back(pointer: NonNull<u8>, bytes: usize) -> bool {
        let mut loan = LOAN.get();
        let start = pointer.addr().get();
        if !(loan.start..loan.end).contains(&start) {
            return false;
        }
        // The last one's memory can be used again at once, all of it when none is left.
        if start + bytes.next_multiple_of(ALIGNMENT) == loan.next {
            loan.next = start;
        }
        loan.out -= 1;
        if loan.out == 0 {
            loan.next = loan.start;
        }
        LOAN.set(loan);
        true
    }
}

/// Calls `body`, in which this thread's buffers come from the given memory as far as it reaches.
///
/// # Panics
/// If a buffer that was made in `body` is still there when it ends.
///
/// # Safety
/// The memory begins at a multiple of 64, and nobody else uses it until `body` ends. Every buffer that `body`
/// makes on this thread is dropped on this thread before it ends.
pub unsafe fn lend<R>(memory: *mut u8, bytes: usize, body: impl FnOnce() -> R) -> R {
    struct Ends(Loan);
    impl Drop for Ends {
        fn drop(&mut self) {
            let loan = LOAN.replace(self.0);
            if loan.out != 0 && !std::thread::panicking() {
                panic!("{} buffers outlive the memory that was lent for them", loan.out);
            }
        }
    }
    let start = memory.expose_provenance();
    let _ends = Ends(LOAN.replace(Loan { start, next: start, end: start + bytes, out: 0 }));
    body()
}

#[cfg(test)]
mod tests {
    use crate::pool::tests::TURN;
    use crate::pool::{Buffer, lend, stats};

    #[test]
    fn lent_memory_is_used_first_and_given_back() {
        let _turn = TURN.lock();
        let arena = Buffer::alloc(1 << 20).unwrap();
        let range = arena.as_ptr() as usize..arena.as_ptr() as usize + (1 << 20);
        let inside = |buffer: &Buffer| range.contains(&(buffer.as_ptr() as usize));
        // SAFETY: the arena is ours, and all buffers but those made to be kept are dropped inside.
        let kept = unsafe {
            lend(arena.as_ptr(), 1 << 20, || {
                let before = stats().live_bytes;
                let (first, second) = (Buffer::alloc(100_000).unwrap(), Buffer::alloc(800_000).unwrap());
                assert!(inside(&first) && inside(&second));
                assert!(second.as_ptr() as usize >= first.as_ptr() as usize + 100_000);
                assert_eq!(stats().live_bytes, before);
                let (too_large, small) = (Buffer::alloc(200_000).unwrap(), Buffer::alloc(100).unwrap());
                assert!(!inside(&too_large) && !inside(&small));
                drop(first);
                drop(second);
                assert!(inside(&Buffer::alloc(1 << 20).unwrap()), "all of it is free again");
                Buffer::alloc_to_keep(5000).unwrap()
            })
        };
        assert!(!inside(&kept) && !inside(&Buffer::alloc(5000).unwrap()));
    }
}
