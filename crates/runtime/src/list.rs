//! Lists in the pool's memory, for what a call needs for a moment: steady state asks the system for nothing.

use std::ops::Deref;

use crate::pool::{AllocError, Buffer};

/// A list that has room for as many elements as it was made for.
pub(crate) struct List<T: Copy> {
    buffer: Buffer,
    length: usize,
    room: usize,
    _elements: std::marker::PhantomData<T>,
}

impl<T: Copy> List<T> {
    /// An empty list with room for so many elements. Their alignment is at most that of the pool's blocks.
    pub fn with_room(room: usize) -> Result<List<T>, AllocError> {
        const { assert!(align_of::<T>() <= crate::pool::ALIGNMENT) };
        let buffer = Buffer::alloc(room.saturating_mul(size_of::<T>()))?;
        Ok(List { buffer, length: 0, room, _elements: std::marker::PhantomData })
    }

    /// A list of what an iterator gives, at most `room` elements.
    pub fn of(room: usize, elements: impl IntoIterator<Item = T>) -> Result<List<T>, AllocError> {
        let mut list = List::with_room(room)?;
        elements.into_iter().for_each(|element| list.push(element));
        Ok(list)
    }

    /// Adds an element, for which there must be room.
    #[inline]
    pub fn push(&mut self, element: T) {
        assert!(self.length < self.room, "a list of {} is full", self.room);
        // SAFETY: there is room for it, the block is aligned for the type and this list's alone.
        unsafe { self.buffer.as_ptr().cast::<T>().add(self.length).write(element) };
        self.length += 1;
    }
}

impl<T: Copy> Deref for List<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: so many elements were written; a block without bytes is aligned, too.
        unsafe { std::slice::from_raw_parts(self.buffer.as_ptr().cast::<T>(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_come_back() {
        let list = List::of(5, (0..4).map(|i| (i, -i))).unwrap();
        assert_eq!(*list, [(0, 0), (1, -1), (2, -2), (3, -3)]);
        assert!(List::<u64>::with_room(0).unwrap().is_empty());
    }

    #[test]
    #[should_panic(expected = "full")]
    fn there_is_no_more_than_the_room() {
        let _ = List::of(2, 0..3);
    }
}
