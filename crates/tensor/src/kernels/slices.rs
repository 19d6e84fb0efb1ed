//! Writing by index and by mask: slices of a dense array at the places that an index names along one dim, and elements
//! where a mask holds.

use super::isa::vectorised;
use super::operand::Shared;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::{self, GRAIN};

/// Slices of `inner` elements in `outer` blocks of `size`, of which an index picks some in every block.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a> {
    /// Checked: from 0 to below `size`.
    pub picks: &'a [i64],
    /// Blocks.
    pub outer: usize,
    /// Slices of a block.
    pub size: usize,
    /// Elements of a slice.
    pub inner: usize,
}

impl Slices<'_> {
    /// Makes of each picked element what `change` makes of it and the source's, one pick after the other.
    ///
    /// # Safety
    /// `to` has the blocks' elements, `from` as many blocks of a slice for each pick; they don't overlap.
    pub unsafe fn write<T: Copy, S: Copy>(
        self,
        to: *mut T,
        from: *const S,
        change: impl Fn(T, S) -> T + Sync,
    ) {
        let Slices { picks, outer, size, inner } = self;
        let n = picks.len();
        let memory = Shared::new((to, from));
        let block = |block: usize, begin: usize, end: usize| {
            let (to, from) = memory.get();
            let (to, from) = (to.wrapping_add(block * size * inner), from.wrapping_add(block * n * inner));
            // SAFETY: picks are below `size`, so all elements lie in their arrays; those between `begin` and `end` of each
            // slice of this block are this thread's.
            unsafe {
                if inner == 1 {
                    for (i, &pick) in picks.iter().enumerate() {
                        let to = to.add(pick as usize);
                        *to = change(*to, from.add(i).read());
                    }
                } else {
                    for (i, &pick) in picks.iter().enumerate() {
                        let (to, from) = (to.add(pick as usize * inner), from.add(i * inner));
                        line(to.add(begin), from.add(begin), end - begin, &change);
                    }
                }
            }
        };
        if outer >= threads::count() || inner == 1 {
            let grain = (GRAIN / 2).div_ceil((n * inner).max(1));
            parallel_for(outer, grain, |begin, end| (begin..end).for_each(|i| block(i, 0, inner)));
        } else {
            // Threads share out the columns: each goes through all picks in their order.
            let columns = (GRAIN / 2).div_ceil(n.max(1)).max(16);
            (0..outer).for_each(|i| parallel_for(inner, columns, |begin, end| block(i, begin, end)));
        }
    }
}

vectorised! {
    /// # Safety
    /// Both lines have n elements.
    pub(super) fn line [T: Copy, S: Copy, F: Fn(T, S) -> T] [T, S, F] (
        to: *mut T, from: *const S, n: usize, change: &F
    ) {
        // SAFETY: the caller's promise, and `Slices::write`'s that they don't overlap.
        let (to, from) =
            unsafe { (std::slice::from_raw_parts_mut(to, n), std::slice::from_raw_parts(from, n)) };
        for (to, &from) in to.iter_mut().zip(from) {
            *to = change(*to, from);
        }
    }
}

vectorised! {
    /// How many bytes are 1; the others are 0.
    ///
    /// # Safety
    /// None.
    fn ones [] [] (mask: &[u8]) -> usize {
        let block = |bytes: &[u8]| usize::from(bytes.iter().sum::<u8>());
        mask.chunks(255).map(block).sum()
    }
}

/// In how many places a mask of truth values holds.
pub fn count(mask: &[u8]) -> usize {
    // SAFETY: nothing is asked.
    unsafe { ones(mask) }
}

/// Puts elements of `from`, one after the other, where the mask holds.
///
/// # Safety
/// `to` has as many elements as the mask, `from` has `have`: one at least, and for each place one; they don't overlap.
pub unsafe fn spread<T: Copy>(mask: &[u8], to: *mut T, from: *const T, have: usize) {
    let mut next = 0;
    for (i, &flag) in mask.iter().enumerate() {
        // Without a branch, which no processor could foresee: what is not put is read all the same.
        // SAFETY: the caller's promise; behind the last element nothing is put.
        unsafe {
            let (to, new) = (to.add(i), from.add(next.min(have - 1)).read());
            to.write(if flag != 0 { new } else { to.read() });
        }
        next += usize::from(flag);
    }
}

/// Puts the elements of `from` where the mask holds one after the other, at most `room`: how many they are.
///
/// # Safety
/// `from` has as many elements as the mask, `to` has room for `room`; they don't overlap.
pub unsafe fn collect<T: Copy>(mask: &[u8], to: *mut T, from: *const T, room: usize) -> usize {
    let mut found = 0;
    for (i, &flag) in mask.iter().enumerate() {
        if found == room {
            break;
        }
        // Without a branch: what is not wanted is overwritten by what is.
        // SAFETY: the caller's promise.
        unsafe { to.add(found).write(from.add(i).read()) };
        found += usize::from(flag);
    }
    found
}
