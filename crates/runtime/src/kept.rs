//! What is made from an operand once and holds for as long as the operand stays as it is: kernels of a convolution
//! in another form.
//!
//! Nothing is kept when contents are seen for the first time: weights that are being trained are new in every call,
//! and what is made from them would be kept for nothing.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::pool::{AllocError, Buffer};

/// Which memory, and which of its contents: two numbers that are equal if and only if nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contents {
    /// The memory: no other has or had this number.
    pub memory: u64,
    /// Counts its changes.
    pub version: u64,
}

/// Bytes of everything that is kept.
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of everything that is kept now, by all programs.
pub fn bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// Memory that counts among what is kept.
#[derive(Debug)]
pub struct Made(Buffer);

impl Made {
    fn new(buffer: Buffer) -> Made {
        BYTES.fetch_add(buffer.bytes(), Ordering::Relaxed);
        Made(buffer)
    }
}

impl Deref for Made {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.0
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0.bytes(), Ordering::Relaxed);
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Kept(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Of the operand, as it was seen last, and where it began: others may lie in the same memory.
    seen: Option<(Contents, usize)>,
    made: Option<Arc<Made>>,
}

impl Kept {
    /// What is made from these contents from an address on, if they were seen before and anything is.
    pub fn get(
        &self,
        contents: Contents,
        address: usize,
        make: impl FnOnce() -> Result<Option<Buffer>, AllocError>,
    ) -> Result<Option<Arc<Made>>, AllocError> {
        let mut state = self.0.lock();
        if state.seen != Some((contents, address)) {
            *state = State { seen: Some((contents, address)), made: None };
            return Ok(None);
        }
        if state.made.is_none() {
            state.made = make()?.map(|buffer| Arc::new(Made::new(buffer)));
        }
        Ok(state.made.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_from_the_second_time_on_until_something_changes() {
        let (kept, mut made) = (Kept::default(), 0);
        let mut get_at = |memory, version, address| {
            let before = made;
            let there = kept.get(Contents { memory, version }, address, || {
                made += 1;
                Buffer::alloc(8).map(Some)
            });
            (there.unwrap().is_some(), made - before)
        };
        let mut get = |memory, version| get_at(memory, version, 64);
        assert_eq!([get(1, 1), get(1, 1), get(1, 1)], [(false, 0), (true, 1), (true, 0)]);
        assert_eq!([get(1, 2), get(1, 3), get(1, 3)], [(false, 0), (false, 0), (true, 1)]);
        assert_eq!([get(2, 3), get(1, 3), get(1, 3)], [(false, 0), (false, 0), (true, 1)]);
        // Another part of the same memory.
        assert_eq!([get_at(1, 3, 128), get_at(1, 3, 128)], [(false, 0), (true, 1)]);
    }
}
