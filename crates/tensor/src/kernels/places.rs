//! Elements at several index tensors: rows of a tensor at computed offsets, read or changed one after the other.

use super::operand::Shared;
use super::slices::line;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::{self, GRAIN};

/// Offsets, in elements.
#[derive(Clone, Debug)]
pub enum Offsets {
    /// So many, this far apart.
    Even(usize, isize),
    /// As they are.
    Table(Vec<isize>),
}

impl Offsets {
    /// Of all elements of dims (size, stride) in row-major order.
    pub fn of(dims: &[(usize, isize)]) -> Offsets {
        let mut even = Some((1, 1));
        for &(size, stride) in dims.iter().rev().filter(|(size, _)| *size != 1) {
            even = match even {
                Some((1, _)) => Some((size, stride)),
                Some((n, step)) if stride == n as isize * step => Some((n * size, step)),
                _ => None,
            };
        }
        if let Some((n, step)) = even {
            return Offsets::Even(n, step);
        }
        let mut all = vec![0];
        for &(size, stride) in dims {
            all = all.iter().flat_map(|at| (0..size as isize).map(move |i| at + i * stride)).collect();
        }
        Offsets::Table(all)
    }

    fn len(&self) -> usize {
        match self {
            Offsets::Even(n, _) => *n,
            Offsets::Table(offsets) => offsets.len(),
        }
    }

    #[inline(always)]
    fn at(&self, i: usize) -> isize {
        match self {
            Offsets::Even(_, step) => i as isize * step,
            Offsets::Table(offsets) => offsets[i],
        }
    }
}

/// Where the elements of a result lie in a tensor: the sum of an offset for the dims before the picks, one for the pick,
/// and one for the dims behind.
#[derive(Clone, Debug)]
pub struct Places {
    /// Of the dims before the picks.
    pub before: Offsets,
    /// Of the picks.
    pub picks: Offsets,
    /// Of the dims behind.
    pub behind: Offsets,
}

impl Places {
    /// The same elements one after the other.
    pub fn lined_up(&self) -> Places {
        let (picks, n) = (self.picks.len(), self.behind.len());
        Places {
            before: Offsets::Even(self.before.len(), (picks * n) as isize),
            picks: Offsets::Even(picks, n as isize),
            behind: Offsets::Even(n, 1),
        }
    }
}

/// Makes of each element of `to` what `change` makes of it and of the one of `from`, one pick after the other; threads share
/// them out, but unless places are `apart`, those of one pick are one thread's.
///
/// # Safety
/// `at` are places in `to`, `of` as many in `from`, which don't overlap.
pub unsafe fn transfer<T: Copy, S: Copy>(
    (to, at): (*mut T, &Places),
    (from, of): (*const S, &Places),
    apart: bool,
    change: impl Fn(T, S) -> T + Sync,
) {
    let (count, n) = (at.picks.len(), at.behind.len());
    let rows = at.before.len() * count;
    if rows * n == 0 {
        return;
    }
    let memory = Shared::new((to, from));
    let row = |(block, pick): (usize, usize), begin: usize, end: usize| {
        let (to, from) = memory.get();
        let to = to.wrapping_offset(at.before.at(block) + at.picks.at(pick));
        let from = from.wrapping_offset(of.before.at(block) + of.picks.at(pick));
        // SAFETY: the places lie in their tensors; those between `begin` and `end` of this row are this thread's.
        unsafe {
            if let (Offsets::Even(_, 1), Offsets::Even(_, 1)) = (&at.behind, &of.behind) {
                if n == 1 {
                    *to = change(*to, from.read());
                } else {
                    line(to.add(begin), from.add(begin), end - begin, &change);
                }
                return;
            }
            for i in begin..end {
                let to = to.offset(at.behind.at(i));
                *to = change(*to, from.offset(of.behind.at(i)).read());
            }
        }
    };
    // Rows by number, without a division for each.
    let rows_of = |first: usize, last: usize, begin: usize, end: usize| {
        let (mut block, mut pick) = (first / count, first % count);
        for _ in first..last {
            row((block, pick), begin, end);
            pick += 1;
            if pick == count {
                (block, pick) = (block + 1, 0);
            }
        }
    };
    if apart {
        parallel_for(rows, (GRAIN / 2).div_ceil(n), |first, last| rows_of(first, last, 0, n));
    } else if at.before.len() >= threads::count() || n < 32 {
        let grain = (GRAIN / 2).div_ceil(count * n);
        parallel_for(at.before.len(), grain, |first, last| rows_of(first * count, last * count, 0, n));
    } else {
        let grain = (GRAIN / 2).div_ceil(rows).max(16);
        parallel_for(n, grain, |begin, end| rows_of(0, rows, begin, end));
    }
}
