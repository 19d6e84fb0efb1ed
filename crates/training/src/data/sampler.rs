//! [`Sampler`]: in which order samples are drawn.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

use super::Random;
use super::random::mix;

/// Says which samples make up an epoch. The same epoch must be the same list whenever it is asked for.
pub trait Sampler: Send + Sync {
    /// The indices of an epoch over a data set of `len` samples, in order.
    fn indices(&self, len: usize, epoch: u64) -> Vec<usize>;

    /// How many there are, without listing them.
    fn count(&self, len: usize) -> usize {
        len
    }
}

/// One after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequentialSampler;

impl Sampler for SequentialSampler {
    fn indices(&self, len: usize, _: u64) -> Vec<usize> {
        (0..len).collect()
    }
}

/// Each sample once, in another order in each epoch.
#[derive(Clone, Copy, Debug, Default)]
pub struct RandomSampler {
    /// Decides about all orders.
    pub seed: u64,
}

impl Sampler for RandomSampler {
    fn indices(&self, len: usize, epoch: u64) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..len).collect();
        Random::new(mix(self.seed) ^ epoch).shuffle(&mut indices);
        indices
    }
}

/// Samples by chance, with replacement, each as likely as its weight says: for classes of unequal size.
///
/// ```
/// use kiln_training::data::{Sampler, WeightedRandomSampler};
/// # fn main() -> kiln_tensor::Result<()> {
/// let sampler = WeightedRandomSampler::new(&[1.0, 0.0, 3.0], 1000, 0)?;
/// let drawn = sampler.indices(3, 0);
/// assert!(!drawn.contains(&1));
/// assert!((700..800).contains(&drawn.iter().filter(|index| **index == 2).count()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct WeightedRandomSampler {
    /// Sums of the weights up to each sample.
    sums: Vec<f64>,
    count: usize,
    seed: u64,
}

impl WeightedRandomSampler {
    /// Draws `count` samples an epoch.
    #[track_caller]
    pub fn new(weights: &[f64], count: usize, seed: u64) -> Result<WeightedRandomSampler> {
        let refuse = |got| {
            let why =
                Why::Number { argument: "weights", expected: "0 or more, with at least one positive", got };
            Err(Error::op("WeightedRandomSampler", why, Loc::caller()))
        };
        let mut sum = 0.0;
        let mut sums = Vec::with_capacity(weights.len());
        for &weight in weights {
            if !(weight >= 0.0 && weight.is_finite()) {
                return refuse(weight);
            }
            sum += weight;
            sums.push(sum);
        }
        if sum <= 0.0 { refuse(sum) } else { Ok(WeightedRandomSampler { sums, count, seed }) }
    }
}

impl Sampler for WeightedRandomSampler {
    fn indices(&self, _: usize, epoch: u64) -> Vec<usize> {
        let mut random = Random::new(mix(self.seed) ^ epoch);
        let total = self.sums.last().copied().unwrap_or(0.0);
        let heaviest = self.sums.partition_point(|sum| *sum < total);
        let mut draw = || {
            let at = random.uniform_f64() * total;
            // Rounding may hit the very end, where no sample begins.
            self.sums.partition_point(|sum| *sum <= at).min(heaviest)
        };
        (0..self.count).map(|_| draw()).collect()
    }

    fn count(&self, _: usize) -> usize {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_is_another_order_and_always_the_same_one() {
        let sampler = RandomSampler { seed: 9 };
        let (first, second) = (sampler.indices(30, 0), sampler.indices(30, 1));
        assert_ne!(first, second);
        assert_eq!(first, sampler.indices(30, 0));
        assert_ne!(first, RandomSampler { seed: 8 }.indices(30, 0));
        let mut sorted = second;
        sorted.sort_unstable();
        assert_eq!(sorted, SequentialSampler.indices(30, 5));
    }

    #[test]
    fn weights_must_be_weights() {
        for weights in [&[][..], &[0.0], &[1.0, -1.0], &[f64::NAN], &[f64::INFINITY]] {
            assert!(WeightedRandomSampler::new(weights, 1, 0).is_err(), "{weights:?}");
        }
    }
}
