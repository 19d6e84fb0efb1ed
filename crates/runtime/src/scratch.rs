//! Per-thread scratch memory: one block a thread, kept between uses and grown when a larger one is needed.

use std::cell::Cell;

use crate::pool::{AllocError, Buffer};

thread_local! {
    static SCRATCH: Cell<Option<Buffer>> = const { Cell::new(None) };
}

/// Calls `body` with at least `bytes` bytes of uninitialised scratch, aligned to 64 bytes.
///
/// The block belongs to the call: a nested call gets another one.
pub fn with<R>(bytes: usize, body: impl FnOnce(*mut u8) -> R) -> Result<R, AllocError> {
    if bytes == 0 {
        return Ok(body(std::ptr::null_mut()));
    }
    let kept = SCRATCH.try_with(Cell::take).ok().flatten();
    let buffer = match kept {
        Some(buffer) if buffer.bytes() >= bytes => buffer,
        smaller => {
            drop(smaller);
            Buffer::alloc_to_keep(bytes)?
        }
    };
    let result = body(buffer.as_ptr());
    // While the thread ends there is no place to keep it: the buffer then just goes back to the pool.
    let _ = SCRATCH.try_with(|place| place.set(Some(buffer)));
    Ok(result)
}

#[cfg(test)]
mod tests {
    #[test]
    fn kept_between_calls_and_separate_when_nested() {
        let outer = super::with(1000, |pointer| pointer).unwrap();
        super::with(900, |pointer| {
            assert_eq!(pointer, outer);
            super::with(100, |inner| assert_ne!(inner, outer)).unwrap();
        })
        .unwrap();
    }
}
