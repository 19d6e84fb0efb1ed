//! Sorting a line by keys: whole numbers in the order of the elements, each in one word with its place, so that no two
//! words are equal and any sort is stable.

use super::element::{Bool, Element};
use super::isa::vectorised;

/// An element whose order is that of whole numbers.
pub(super) trait Ranked: Element {
    /// A whole number; NaN has the largest, equal elements have equal ones.
    fn key(self) -> u64;
    /// NaN's, where there is one.
    const LAST: Option<u64>;
}

impl Ranked for f32 {
    const LAST: Option<u64> = Some(u32::MAX as u64);
    #[inline(always)]
    fn key(self) -> u64 {
        // Of the two zeros the positive one; then by size, the negative ones the other way round.
        let bits = (self + 0.0).to_bits();
        let ordered = bits ^ ((bits as i32 >> 31) as u32 | 1 << 31);
        u64::from(if self.is_nan() { u32::MAX } else { ordered })
    }
}

impl Ranked for f64 {
    const LAST: Option<u64> = Some(u64::MAX);
    #[inline(always)]
    fn key(self) -> u64 {
        let bits = (self + 0.0).to_bits();
        let ordered = bits ^ ((bits as i64 >> 63) as u64 | 1 << 63);
        if self.is_nan() { u64::MAX } else { ordered }
    }
}

impl Ranked for i64 {
    const LAST: Option<u64> = None;
    #[inline(always)]
    fn key(self) -> u64 {
        self as u64 ^ 1 << 63
    }
}

impl Ranked for Bool {
    const LAST: Option<u64> = None;
    #[inline(always)]
    fn key(self) -> u64 {
        u64::from(self)
    }
}

/// Bytes of the widest key.
const MOST_DIGITS: usize = 8;

/// A key with its place.
trait Word: Copy + Ord + Default {
    /// Bytes of the key.
    const DIGITS: usize;
    fn new(key: u64, place: usize) -> Self;
    fn place(self) -> usize;
    /// A byte of the key, from the least significant one on.
    fn digit(self, number: usize) -> usize;
}

/// Keys and places of 32 bits.
impl Word for u64 {
    const DIGITS: usize = 4;
    #[inline(always)]
    fn new(key: u64, place: usize) -> u64 {
        key << 32 | place as u64
    }
    #[inline(always)]
    fn place(self) -> usize {
        (self & u64::from(u32::MAX)) as usize
    }
    #[inline(always)]
    fn digit(self, number: usize) -> usize {
        (self >> (32 + 8 * number)) as usize & 0xff
    }
}

impl Word for u128 {
    const DIGITS: usize = 8;
    #[inline(always)]
    fn new(key: u64, place: usize) -> u128 {
        u128::from(key) << 64 | place as u128
    }
    #[inline(always)]
    fn place(self) -> usize {
        self as u64 as usize
    }
    #[inline(always)]
    fn digit(self, number: usize) -> usize {
        (self >> (64 + 8 * number)) as usize & 0xff
    }
}

/// Lines shorter than this are sorted by comparison: counting bytes takes longer.
const SHORT: usize = 256;
/// So many of the first are kept in order while a line is read once; for more the line is divided.
const FEW: usize = 32;
/// Elements that are compared at once with the last of the few.
const BLOCK: usize = 32;

/// A line that is being sorted, with its memory: it serves one line after the other.
#[derive(Default)]
pub(super) struct Sorter {
    /// The line's keys.
    pub keys: Vec<u64>,
    narrow: Words<u64>,
    wide: Words<u128>,
}

#[derive(Default)]
struct Words<W> {
    words: Vec<W>,
    spare: Vec<W>,
}

/// The body with the narrowest words that hold a line's keys, as differences from the smallest one.
macro_rules! with_words {
    ($sorter:expr, $words:ident => $body:expr) => {{
        let Sorter { keys, narrow, wide } = $sorter;
        let (low, high) = bounds(keys);
        let fits = |n: u64| n <= u64::from(u32::MAX);
        let placed = keys.iter().enumerate();
        if fits(high.saturating_sub(low)) && fits(keys.len() as u64) {
            let $words = narrow;
            $words.words.clear();
            $words.words.extend(placed.map(|(i, &key)| <u64 as Word>::new(key - low, i)));
            $body
        } else {
            let $words = wide;
            $words.words.clear();
            $words.words.extend(placed.map(|(i, &key)| <u128 as Word>::new(key - low, i)));
            $body
        }
    }};
}

vectorised! {
    /// # Safety
    /// None.
    fn smallest_and_largest [] [] (keys: &[u64]) -> (u64, u64) {
        keys.iter().fold((u64::MAX, 0), |(low, high), &key| (low.min(key), high.max(key)))
    }
}

/// The smallest and the largest key.
pub(super) fn bounds(keys: &[u64]) -> (u64, u64) {
    // SAFETY: nothing is asked.
    unsafe { smallest_and_largest(keys) }
}

vectorised! {
    /// How many keys, a multiple of [`BLOCK`] or all, come before the block that has the first one below `last`.
    ///
    /// # Safety
    /// None.
    fn before_less [] [] (keys: &[u64], last: u64) -> usize {
        let mut blocks = keys.chunks(BLOCK);
        let block = blocks.position(|block| block.iter().fold(false, |any, &key| any | (key < last)));
        block.map_or(keys.len(), |block| block * BLOCK)
    }
}

impl Sorter {
    /// Takes a line in, the smallest element first.
    #[inline(always)]
    pub(super) fn rank<T: Ranked>(&mut self, line: impl Iterator<Item = T>) {
        self.keys.clear();
        self.keys.extend(line.map(T::key));
    }

    /// Takes a line in, the smallest or the largest element first.
    #[inline(always)]
    pub(super) fn rank_from<T: Ranked>(&mut self, line: impl Iterator<Item = T>, largest: bool) {
        if largest {
            self.keys.clear();
            self.keys.extend(line.map(|x| !x.key()));
        } else {
            self.rank(line);
        }
    }

    /// The places of all elements in order: number and place.
    pub(super) fn sort(&mut self, mut put: impl FnMut(usize, i64)) {
        with_words!(self, words => {
            words.sort();
            words.words.iter().enumerate().for_each(|(i, word)| put(i, word.place() as i64));
        });
    }

    /// The place of the element that comes after `n` others.
    pub(super) fn nth(&mut self, n: usize) -> i64 {
        if self.keys.is_empty() {
            return 0;
        }
        with_words!(self, words => words.words.select_nth_unstable(n).1.place() as i64)
    }

    /// The places of the first `count` elements in order.
    pub(super) fn top(&mut self, count: usize, mut put: impl FnMut(usize, i64)) {
        let n = self.keys.len();
        if count >= n {
            return self.sort(put);
        }
        if count <= FEW && n >= 4 * count {
            return self.few(count, put);
        }
        with_words!(self, words => {
            words.words.select_nth_unstable(count - 1);
            words.words[..count].sort_unstable();
            words.words[..count].iter().enumerate().for_each(|(i, word)| put(i, word.place() as i64));
        });
    }

    /// [`top`](Sorter::top) for a few of many.
    fn few(&mut self, count: usize, mut put: impl FnMut(usize, i64)) {
        if count == 0 {
            return;
        }
        let n = self.keys.len();
        let mut best = [(u64::MAX, 0); FEW];
        let best = &mut best[..count];
        for (place, &key) in self.keys[..count].iter().enumerate() {
            best[place] = (key, place);
        }
        best.sort_unstable();
        let mut next = count;
        loop {
            // SAFETY: nothing is asked.
            next += unsafe { before_less(&self.keys[next..], best[count - 1].0) };
            let end = n.min(next + BLOCK);
            for (place, &key) in (next..end).zip(&self.keys[next..end]) {
                // Of equals the first ones stay.
                if key < best[count - 1].0 {
                    let at = best.partition_point(|&(other, _)| other <= key);
                    best.copy_within(at..count - 1, at + 1);
                    best[at] = (key, place);
                }
            }
            if end == n {
                break;
            }
            next = end;
        }
        best.iter().enumerate().for_each(|(i, &(_, place))| put(i, place as i64));
    }
}

impl<W: Word> Words<W> {
    /// Sorts words whose places are in order.
    fn sort(&mut self) {
        let n = self.words.len();
        if n < SHORT {
            return self.words.sort_unstable();
        }
        // Byte by byte of the keys, from the least significant one on; each pass keeps the order of the one before.
        let mut counts = [[0usize; 256]; MOST_DIGITS];
        let counts = &mut counts[..W::DIGITS];
        for &word in &self.words {
            for (number, counts) in counts.iter_mut().enumerate() {
                counts[word.digit(number)] += 1;
            }
        }
        self.spare.clear();
        self.spare.resize(n, W::default());
        for (number, counts) in counts.iter_mut().enumerate() {
            if counts.contains(&n) {
                continue;
            }
            let mut place = 0;
            for count in counts.iter_mut() {
                place += std::mem::replace(count, place);
            }
            for &word in &self.words {
                let place = &mut counts[word.digit(number)];
                self.spare[*place] = word;
                *place += 1;
            }
            std::mem::swap(&mut self.words, &mut self.spare);
        }
    }
}
