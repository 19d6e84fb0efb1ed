//! The arena: buffers that are not in use at the same time share memory.

/// Bytes needed over a range of steps, both ends included.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Lifetime {
    pub bytes: usize,
    pub first: usize,
    pub last: usize,
}

/// Offsets are multiples of this: the size of a cache line and of the widest vector.
const ALIGN: usize = 64;

/// An offset for every lifetime, and the arena's size. Large ones are placed first, each at the lowest place
/// where it meets nothing that lives at the same time.
pub(crate) fn place(lifetimes: &[Lifetime]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(lifetimes[i].bytes));
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for i in order {
        let life = lifetimes[i];
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&p| lifetimes[p].first <= life.last && life.first <= lifetimes[p].last)
            .map(|&p| (offsets[p], offsets[p] + lifetimes[p].bytes))
            .collect();
        taken.sort_unstable();
        let mut at = 0;
        for (from, to) in taken {
            if at + life.bytes <= from {
                break;
            }
            at = at.max(to.next_multiple_of(ALIGN));
        }
        offsets[i] = at;
        total = total.max(at + life.bytes);
        placed.push(i);
    }
    (offsets, total.next_multiple_of(ALIGN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_that_meet_lie_apart() {
        let life = |bytes, first, last| Lifetime { bytes, first, last };
        let (offsets, total) = place(&[life(100, 0, 1), life(100, 1, 2), life(60, 2, 3), life(200, 5, 5)]);
        assert_eq!(offsets, [0, 128, 0, 0]);
        assert_eq!(total, 256);
        assert_eq!(place(&[]), (vec![], 0));
    }
}
