//! What is made from an operand once and holds for as long as the operand stays as it is: kernels of a convolution, or
//! a matrix, in another form.
//!
//! Nothing is kept when contents are seen for the first time: weights that are being trained are new in every call,
//! and what is made from them would be kept for nothing. What one program keeps, others use: a form of an operand is
//! in memory once, however many programs there are for different sizes of other operands.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

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

/// What is made of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Kernels of 3 × 3 for minimal filtering.
    Filtering {
        /// Filters.
        filters: usize,
        /// Channels.
        channels: usize,
    },
    /// A matrix whose rows are contiguous, from one whose columns are.
    Straight {
        /// Rows and columns.
        size: [usize; 2],
        /// Elements from column to column of what it is made from.
        column: isize,
        /// Bytes of an element.
        bytes: usize,
    },
}

/// An operand, and what is made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// Its memory.
    pub contents: Contents,
    /// Where it begins: others may lie in the same memory.
    pub address: usize,
    /// What is made of it.
    pub form: Form,
}

/// All that is kept by anybody.
static SHARED: Mutex<Vec<(Operand, Weak<Made>)>> = Mutex::new(Vec::new());

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
    /// The operand as it was last.
    seen: Option<Operand>,
    made: Option<Arc<Made>>,
}

impl Kept {
    /// What is made of an operand, if it was seen before and anything is.
    pub fn get(
        &self,
        operand: Operand,
        make: impl FnOnce() -> Result<Option<Buffer>, AllocError>,
    ) -> Result<Option<Arc<Made>>, AllocError> {
        let mut state = self.0.lock();
        if state.seen != Some(operand) {
            *state = State { seen: Some(operand), made: None };
            return Ok(None);
        }
        if state.made.is_none() {
            state.made = match find(&operand) {
                Some(made) => Some(made),
                None => make()?.map(|buffer| share(operand, buffer)),
            };
        }
        Ok(state.made.clone())
    }
}

/// What somebody else keeps of an operand.
fn find(operand: &Operand) -> Option<Arc<Made>> {
    let shared = SHARED.lock();
    shared.iter().filter(|(other, _)| other == operand).find_map(|(_, made)| made.upgrade())
}

/// Lets others use what was made of an operand; and forgets what nobody keeps any more.
fn share(operand: Operand, buffer: Buffer) -> Arc<Made> {
    let made = Arc::new(Made::new(buffer));
    let mut shared = SHARED.lock();
    shared.retain(|(_, made)| made.strong_count() > 0);
    shared.push((operand, Arc::downgrade(&made)));
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that no tensor has.
    fn operand(memory: u64, version: u64, address: usize) -> Operand {
        let contents = Contents { memory: u64::MAX - memory, version };
        Operand { contents, address, form: Form::Filtering { filters: 1, channels: 1 } }
    }

    #[test]
    fn kept_from_the_second_time_on_until_something_changes() {
        let (kept, mut made) = (Kept::default(), 0);
        let mut get_at = |memory, version, address| {
            let before = made;
            let there = kept.get(operand(memory, version, address), || {
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

    #[test]
    fn one_form_of_an_operand_is_made_once() {
        let (one, two, other) = (operand(9, 1, 64), operand(9, 1, 64), operand(9, 2, 64));
        let straight = Form::Straight { size: [3, 4], column: 3, bytes: 4 };
        let mut made = 0;
        let mut get = |kept: &Kept, operand| {
            let make = || {
                made += 1;
                Buffer::alloc(8).map(Some)
            };
            kept.get(operand, make).unwrap().map(|buffer| buffer.as_ptr().addr())
        };
        let (first, second) = (Kept::default(), Kept::default());
        assert_eq!([get(&first, one), get(&second, two)], [None, None]);
        let (a, b) = (get(&first, one), get(&second, two));
        assert!(a.is_some() && a == b);
        // Another form, and other contents, are others; and who keeps none gets what is there.
        let third = Kept::default();
        let turned = Operand { form: straight, ..one };
        assert_eq!([get(&third, turned), get(&first, other)], [None, None]);
        assert_ne!(get(&third, turned), a);
        assert_eq!([get(&first, one), get(&first, one)], [None, a]);
        // Nobody keeps it any more.
        drop((first, second));
        let fourth = Kept::default();
        assert_eq!(get(&fourth, one), None);
        assert!(get(&fourth, one).is_some());
        assert_eq!(made, 3);
    }
}
