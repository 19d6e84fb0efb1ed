//! Size classes, four to each power of two.

use super::ALIGNMENT;

/// From this size on blocks are mapped from the system, at multiples of this size.
pub(super) const BIG: usize = 2 << 20;
pub(super) const CLASSES: usize = 4 * usize::BITS as usize;
/// Classes up to 4 KiB.
pub(super) const SMALL_CLASSES: usize = 20;

/// A size class: its list's index and the size of its blocks.
#[derive(Clone, Copy)]
pub(super) struct Class {
    pub(super) index: usize,
    pub(super) bytes: usize,
}

impl Class {
    /// The class for a request of `bytes > 0`, unless the rounded size would not be a valid one.
    #[inline]
    pub(super) fn of(bytes: usize) -> Option<Class> {
        let last = (bytes - 1) / ALIGNMENT;
        if last < 4 {
            return Class::at(last);
        }
        let shift = last.ilog2() as usize - 2;
        Class::at(4 * shift + (last >> shift))
    }

    /// Indices 0..8 are 1..=8 units of 64 bytes; from there on each four double the step.
    #[inline]
    pub(super) fn at(index: usize) -> Option<Class> {
        let (units, shift) = if index < 4 { (index + 1, 0) } else { (index % 4 + 5, index / 4 - 1) };
        let bytes = (shift < 56).then(|| (units * ALIGNMENT).checked_mul(1 << shift)).flatten()?;
        (bytes <= isize::MAX as usize / 2).then_some(Class { index, bytes })
    }

    pub(super) fn is_big(self) -> bool {
        self.bytes >= BIG
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_tight_and_ordered() {
        let mut last = 0;
        for bytes in (1..5000).chain([1 << 20, (1 << 20) + 1, 3 << 20, (16 << 20) - 1, 16 << 20, 1 << 40]) {
            let class = Class::of(bytes).unwrap();
            assert!(class.bytes >= bytes && class.bytes <= (bytes * 5 / 4).max(bytes + 64), "{bytes}");
            assert_eq!(Class::at(class.index).unwrap().bytes, class.bytes);
            assert!(class.index >= last);
            last = class.index;
        }
        assert_eq!(Class::of(16 << 20).unwrap().bytes, 16 << 20);
        assert!(Class::of(usize::MAX).is_none());
    }
}
