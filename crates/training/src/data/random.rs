//! [`Random`]: a small generator for orders and samples, which has nothing to do with the stream of tensors.

use std::cell::Cell;

/// Numbers by chance from a seed (SplitMix64): for shuffling, and for data sets that draw or change their samples.
///
/// It is no part of the stream that `Tensor::rand` draws from: that one is shared by all threads, and workers would
/// take from it in no order.
#[derive(Clone, Debug)]
pub struct Random(u64);

thread_local! {
    /// The seed of the sample that this thread is making.
    static SAMPLE: Cell<Option<u64>> = const { Cell::new(None) };
}

impl Random {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Random {
        Random(mix(seed))
    }

    /// The generator of the sample that is being made: inside [`Dataset::get`](super::Dataset::get), when a loader
    /// calls it, its numbers depend on the loader's seed, the epoch and the sample's index, and on nothing else, so
    /// they are the same whatever the workers. Elsewhere it is the generator of the index alone.
    ///
    /// ```
    /// use kiln_training::data::{DataLoader, Dataset, Random};
    /// use kiln_tensor::Result;
    ///
    /// struct Noise;
    /// impl Dataset for Noise {
    ///     type Sample = f32;
    ///     fn len(&self) -> usize {
    ///         8
    ///     }
    ///     fn get(&self, index: usize) -> Result<f32> {
    ///         Ok(Random::of_sample(index).uniform())
    ///     }
    /// }
    ///
    /// # fn main() -> Result<()> {
    /// let noise = |workers| -> Result<Vec<f32>> {
    ///     let loader = DataLoader::options().batch_size(8).workers(workers).seed(3).build(Noise)?;
    ///     loader.iter().map(|batch| batch?.to_vec()).next().expect("a batch")
    /// };
    /// assert_eq!(noise(0)?, noise(3)?);
    /// # Ok(()) }
    /// ```
    pub fn of_sample(index: usize) -> Random {
        let seed = SAMPLE.get().unwrap_or(0);
        Random(mix(seed ^ mix(index as u64 + 1)))
    }

    /// Sets what [`Random::of_sample`] counts from on this thread, until the guard is dropped.
    pub(super) fn for_samples(seed: u64, epoch: u64) -> SampleSeed {
        SampleSeed(SAMPLE.replace(Some(mix(seed ^ mix(epoch.wrapping_add(0x5eed))))))
    }

    /// Any number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to 1, without 1.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// From 0 to 1, without 1, in double precision.
    pub fn uniform_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From `low` to `high`.
    pub fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.uniform()
    }

    /// A normal number of mean 0 and deviation 1.
    pub fn normal(&mut self) -> f32 {
        // Box and Muller's; 1 − u is never 0.
        let (radius, angle) = (1.0 - self.uniform_f64(), self.uniform_f64());
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    }

    /// An integer below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        // The high half of the product is as even as it gets without a loop: off by end / 2⁶⁴.
        ((u128::from(self.next_u64()) * end as u128) >> 64) as usize
    }

    /// Puts the elements into any order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Puts the seed of samples back that was there before.
pub(super) struct SampleSeed(Option<u64>);

impl Drop for SampleSeed {
    fn drop(&mut self) {
        SAMPLE.set(self.0);
    }
}

/// Each bit of the result depends on all of the number's.
pub(super) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_even_enough() {
        let mut random = Random::new(7);
        let mut counts = [0; 10];
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..20_000 {
            counts[random.below(10)] += 1;
            let (uniform, normal) = (random.uniform(), f64::from(random.normal()));
            assert!((0.0..1.0).contains(&uniform));
            sum += normal;
            squares += normal * normal;
        }
        assert!(counts.iter().all(|count| (1800..2200).contains(count)), "{counts:?}");
        assert!((sum / 20_000.0).abs() < 0.03 && (squares / 20_000.0 - 1.0).abs() < 0.05);
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_the_seed_decides() {
        let shuffled = |seed| {
            let mut items: Vec<usize> = (0..50).collect();
            Random::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = shuffled(1);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(shuffled(1), shuffled(1));
        assert_ne!(shuffled(1), shuffled(2));
    }

    #[test]
    fn the_seed_of_samples_ends_with_its_guard() {
        let outside = Random::of_sample(3).next_u64();
        let inside = {
            let _seed = Random::for_samples(1, 2);
            Random::of_sample(3).next_u64()
        };
        assert_ne!(outside, inside);
        assert_eq!(outside, Random::of_sample(3).next_u64());
    }
}
