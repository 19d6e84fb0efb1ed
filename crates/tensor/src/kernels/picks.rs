//! Elements at the indices of a tensor along a dim: the walk that gathers and scatters share.

use super::isa::vectorised;
use kiln_runtime::parallel_for;
use kiln_runtime::threads::{self, GRAIN};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first index that is not below `size`, or negative.
pub fn outside(index: &[i64], size: usize) -> Option<i64> {
    let size = size as u64;
    let found = AtomicBool::new(false);
    parallel_for(index.len(), GRAIN, |begin, end| {
        // SAFETY: nothing is asked.
        if index[begin..end].chunks(4096).any(|block| unsafe { is_outside(block, size) }) {
            found.store(true, Ordering::Relaxed);
        }
    });
    // Which one is the first is only worth a second look.
    found.into_inner().then(|| index.iter().copied().find(|&i| i as u64 >= size)).flatten()
}

vectorised! {
    /// # Safety
    /// None.
    fn is_outside [] [] (block: &[i64], size: u64) -> bool {
        block.iter().fold(false, |any, &i| any | (i as u64 >= size))
    }
}

/// The elements of a tensor that a dense index tensor picks along `dim`.
#[derive(Clone, Copy, Debug)]
pub struct Picks<'a> {
    /// Checked: from 0 to below the tensor's size of `dim`.
    pub index: &'a [i64],
    /// The index tensor's sizes; of the other dims at most the tensor's.
    pub shape: &'a [usize],
    /// The tensor's strides in elements.
    pub strides: &'a [isize],
    /// Where the indices lead along.
    pub dim: usize,
}

impl Picks<'_> {
    /// Calls `each(place, i)` for the `i`-th index in row-major order and the place, in elements, that it picks. Threads
    /// share out the calls, but if picks `meet`, those of one place are one thread's, in order.
    pub fn each(&self, meet: bool, each: impl Fn(isize, usize) + Sync) {
        if self.index.is_empty() {
            return;
        }
        // Dims as (size, the tensor's stride), 0 along the indexed one; neighbours with equal steps are one.
        let mut dims: SmallVec<[(usize, isize); 6]> = SmallVec::new();
        let mut blocks = 1;
        for (d, &size) in self.shape.iter().enumerate() {
            if size == 1 {
                continue;
            }
            let stride = if d == self.dim { 0 } else { self.strides[d] };
            if d < self.dim {
                blocks *= size;
            }
            match dims.last_mut() {
                Some(last) if stride != 0 && last.1 == stride * size as isize => {
                    *last = (last.0 * size, stride)
                }
                _ => dims.push((size, stride)),
            }
        }
        let (length, step) = dims.pop().unwrap_or((1, 0));
        let lines = self.index.len() / length;
        let along = self.strides.get(self.dim).copied().unwrap_or(0);
        let run = |begin: usize, end: usize, from: usize, to: usize| {
            for line in begin..end {
                let (mut rest, mut base) = (line, 0);
                for &(size, stride) in dims.iter().rev() {
                    base += (rest % size) as isize * stride;
                    rest /= size;
                }
                let start = line * length;
                for (c, &pick) in (from..to).zip(&self.index[start + from..start + to]) {
                    each(base + c as isize * step + pick as isize * along, start + c);
                }
            }
        };
        // Lines of different blocks, which differ in dims before the indexed one, never meet, nor do columns unless
        // the indices lead along them.
        let groups = if meet { blocks.min(lines) } else { lines };
        let per_group = lines / groups;
        if groups >= threads::count() {
            let grain = (GRAIN / 2).div_ceil(per_group * length);
            parallel_for(groups, grain, |begin, end| run(begin * per_group, end * per_group, 0, length));
        } else if !meet || step != 0 {
            let grain = (GRAIN / 2).div_ceil(lines).max(16);
            parallel_for(length, grain, |from, to| run(0, lines, from, to));
        } else {
            run(0, lines, 0, length);
        }
    }
}
