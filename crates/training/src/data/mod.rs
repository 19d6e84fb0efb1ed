//! Data sets and loaders: samples by index, drawn in some order, put together into batches, ahead of their turn.
//!
//! ```
//! use kiln_training::data::{DataLoader, TensorDataset, random_split};
//! use kiln_tensor::{Device, Tensor};
//!
//! # fn main() -> kiln_tensor::Result<()> {
//! let x = Tensor::randn([100, 8], &Device::Cpu)?;
//! let y = Tensor::randint(0, 3, [100], &Device::Cpu)?;
//! let [train, test] = random_split(TensorDataset::new((x, y))?, [80, 20], 0)?;
//!
//! let loader = DataLoader::options().batch_size(32).shuffle(true).workers(2).build(train)?;
//! assert_eq!(loader.len(), 3);
//! for epoch in 0..2 {
//!     for batch in &loader {
//!         let (x, y) = batch?; // [32, 8] and [32]; 16 in the last one
//!         assert_eq!(x.size(0)?, y.size(0)?);
//!     }
//!     assert_eq!(loader.epoch(), epoch + 1);
//! }
//! # let _ = test;
//! # Ok(()) }
//! ```
//!
//! A custom data set says how many samples there are and what each of them is. Whatever can be collated
//! ([`Collate`]: tensors, numbers, tuples, lists) becomes a batch automatically, anything else through your own
//! function:
//!
//! ```
//! use kiln_training::data::{DataLoader, Dataset};
//! use kiln_tensor::{Result, Tensor};
//!
//! struct Squares;
//!
//! impl Dataset for Squares {
//!     type Sample = (f32, f32);
//!     fn len(&self) -> usize {
//!         10
//!     }
//!     fn get(&self, index: usize) -> Result<(f32, f32)> {
//!         let x = index as f32;
//!         Ok((x, x * x))
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let batches: Vec<(Tensor, Tensor)> =
//!     DataLoader::options().batch_size(4).build(Squares)?.iter().collect::<Result<_>>()?;
//! assert_eq!(batches[1].1.to_vec::<f32>()?, [16.0, 25.0, 36.0, 49.0]);
//!
//! let sums = DataLoader::options().batch_size(5).build_with(Squares, |samples: Vec<(f32, f32)>| {
//!     Ok(samples.iter().map(|(_, square)| square).sum::<f32>())
//! })?;
//! assert_eq!(sums.iter().collect::<Result<Vec<f32>>>()?, [30.0, 255.0]);
//! # Ok(()) }
//! ```
//!
//! \[Note: what an epoch is made of\]
//! The order of an epoch is a function of the sampler (its seed) and the number of the epoch, and batches arrive in
//! that order however many workers make them. Randomness inside a data set comes from [`Random::of_sample`], which
//! depends only on the seed, the epoch and the sample. So a program that resumes from a checkpoint
//! ([`DataLoader::epoch_from`]) sees exactly the batches it would have seen.

mod collate;
mod dataset;
mod loader;
mod random;
mod sampler;
mod workers;

pub use collate::Collate;
pub use dataset::{Columns, Dataset, ListDataset, Subset, TensorDataset, random_split};
pub use loader::{Batches, DataLoader, DataLoaderOptions};
pub use random::Random;
pub use sampler::{RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler};
