//! [`DataLoader`]: batches of a data set, epoch by epoch, made by workers ahead of their turn.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kiln_ir::{Loc, Why};
use kiln_tensor::{Error, Result};

use super::workers::{Crew, Make};
use super::{Collate, Dataset, ListDataset, Random, RandomSampler, Sampler, SequentialSampler};
use crate::Fault;

/// How a [`DataLoader`] makes batches, with PyTorch's names and defaults.
pub struct DataLoaderOptions {
    batch_size: usize,
    shuffle: bool,
    drop_last: bool,
    workers: usize,
    prefetch_factor: usize,
    seed: u64,
    sampler: Option<Box<dyn Sampler>>,
}

impl DataLoaderOptions {
    /// Samples of a batch: 1 if nothing is said.
    pub fn batch_size(mut self, batch_size: usize) -> DataLoaderOptions {
        self.batch_size = batch_size;
        self
    }

    /// Another order in each epoch; the [`seed`](DataLoaderOptions::seed) decides which.
    pub fn shuffle(mut self, shuffle: bool) -> DataLoaderOptions {
        self.shuffle = shuffle;
        self
    }

    /// Leaves a last batch out that would be smaller than the others.
    pub fn drop_last(mut self, drop_last: bool) -> DataLoaderOptions {
        self.drop_last = drop_last;
        self
    }

    /// Threads that make batches while the program computes. With none the program makes each when it asks for it.
    /// The batches are the same ones.
    pub fn workers(mut self, workers: usize) -> DataLoaderOptions {
        self.workers = workers;
        self
    }

    /// How many batches for each worker are made ahead: 2 if nothing is said.
    pub fn prefetch_factor(mut self, prefetch_factor: usize) -> DataLoaderOptions {
        self.prefetch_factor = prefetch_factor;
        self
    }

    /// Decides about the orders of all epochs and about [`Random::of_sample`]; 0 if nothing is said.
    pub fn seed(mut self, seed: u64) -> DataLoaderOptions {
        self.seed = seed;
        self
    }

    /// Says itself which samples make up an epoch; not together with `shuffle`.
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> DataLoaderOptions {
        self.sampler = Some(Box::new(sampler));
        self
    }

    /// A loader whose samples collate by themselves.
    #[track_caller]
    pub fn build<D>(self, dataset: D) -> Result<DataLoader<D, <D::Sample as Collate>::Batch>>
    where
        D: Dataset + 'static,
        D::Sample: Collate,
    {
        // A closure, so that the caller of `collate` is a line of this crate, and not of the standard library.
        self.build_with(dataset, |samples| D::Sample::collate(samples))
    }

    /// A loader whose batches a function makes of the samples.
    #[track_caller]
    pub fn build_with<D: Dataset + 'static, B: Send + 'static>(
        self,
        dataset: D,
        collate: impl Fn(Vec<D::Sample>) -> Result<B> + Send + Sync + 'static,
    ) -> Result<DataLoader<D, B>> {
        let loc = Loc::caller();
        let refuse = |why| Err(Error::op("DataLoader", why, loc));
        if self.batch_size == 0 {
            return refuse(Why::none("batch_size"));
        }
        if self.prefetch_factor == 0 {
            return refuse(Why::none("prefetch_factor"));
        }
        let sampler: Box<dyn Sampler> = match (self.sampler, self.shuffle) {
            (Some(_), true) => return refuse(Why::Either { one: "a sampler", other: "shuffle" }),
            (Some(sampler), false) => sampler,
            (None, true) => Box::new(RandomSampler { seed: self.seed }),
            (None, false) => Box::new(SequentialSampler),
        };
        let plan = Plan {
            dataset,
            collate: Box::new(collate),
            sampler,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            seed: self.seed,
            loc,
        };
        Ok(DataLoader {
            plan: Arc::new(plan),
            workers: self.workers,
            window: self.workers.saturating_mul(self.prefetch_factor),
            epoch: AtomicU64::new(0),
        })
    }
}

/// Batches of a data set. Each [`DataLoader::iter`] is an epoch; see the [module](super) for examples.
///
/// If a sample fails (an error, a panic), its batch is an error, and the following batches still come. Dropping an
/// epoch early waits only for the samples that are being made.
pub struct DataLoader<D: Dataset, B> {
    plan: Arc<Plan<D, B>>,
    workers: usize,
    window: usize,
    epoch: AtomicU64,
}

impl DataLoader<ListDataset<()>, ()> {
    /// Options, to be built into a loader.
    pub fn options() -> DataLoaderOptions {
        DataLoaderOptions {
            batch_size: 1,
            shuffle: false,
            drop_last: false,
            workers: 0,
            prefetch_factor: 2,
            seed: 0,
            sampler: None,
        }
    }
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoader<D, B> {
    /// How many batches an epoch has.
    pub fn len(&self) -> usize {
        self.plan.batches(self.plan.sampler.count(self.plan.dataset.len()))
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The data set.
    pub fn dataset(&self) -> &D {
        &self.plan.dataset
    }

    /// The number of the epoch that [`DataLoader::iter`] gives next, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// The batches of the next epoch.
    pub fn iter(&self) -> Batches<D, B> {
        self.batches(self.epoch.fetch_add(1, Ordering::Relaxed), 0)
    }

    /// The batches of an epoch, starting at a given batch: to resume where a program stopped. Earlier batches are
    /// not made. [`DataLoader::iter`] continues with the next epoch.
    pub fn epoch_from(&self, epoch: u64, batch: usize) -> Batches<D, B> {
        self.epoch.store(epoch.wrapping_add(1), Ordering::Relaxed);
        self.batches(epoch, batch)
    }

    fn batches(&self, epoch: u64, first: usize) -> Batches<D, B> {
        let indices = self.plan.sampler.indices(self.plan.dataset.len(), epoch);
        let end = self.plan.batches(indices.len());
        let range = first.min(end)..end;
        let job = Arc::new(Job { plan: self.plan.clone(), indices, epoch });
        let crew = (self.workers > 0 && !range.is_empty()).then(|| {
            let job = job.clone();
            let make: Arc<Make<Result<B>>> = Arc::new(move |batch, stop| job.make(batch, stop));
            Crew::start(self.workers, range.clone(), self.window, make)
        });
        Batches { job, range, crew: crew.flatten() }
    }
}

impl<D: Dataset + 'static, B: Send + 'static> IntoIterator for &DataLoader<D, B> {
    type Item = Result<B>;
    type IntoIter = Batches<D, B>;
    fn into_iter(self) -> Batches<D, B> {
        self.iter()
    }
}

/// What all epochs have in common.
struct Plan<D: Dataset, B> {
    dataset: D,
    collate: Box<dyn Fn(Vec<D::Sample>) -> Result<B> + Send + Sync>,
    sampler: Box<dyn Sampler>,
    batch_size: usize,
    drop_last: bool,
    seed: u64,
    /// Where it was built: what Kiln's own data sets and `collate` find wrong is put down to this line.
    loc: Loc,
}

impl<D: Dataset, B> Plan<D, B> {
    fn batches(&self, samples: usize) -> usize {
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }
}

/// One epoch.
struct Job<D: Dataset, B> {
    plan: Arc<Plan<D, B>>,
    indices: Vec<usize>,
    epoch: u64,
}

impl<D: Dataset, B> Job<D, B> {
    /// The batch of this number, unless nobody wants it any more.
    fn make(&self, batch: usize, stop: &AtomicBool) -> Result<B> {
        let Plan { dataset, collate, batch_size, seed, loc, .. } = &*self.plan;
        let _behalf = loc.on_behalf(crate::folder());
        let indices = &self.indices[batch * batch_size..];
        let indices = &indices[..indices.len().min(*batch_size)];
        let _seed = Random::for_samples(*seed, self.epoch);
        let fail = |sample, fault| crate::Error::Batch { batch, sample, fault };
        let mut samples = Vec::with_capacity(indices.len());
        for &index in indices {
            if stop.load(Ordering::Relaxed) {
                return Err(fail(None, Fault::Panic("the loader was dropped".into())).into());
            }
            samples.push(guarded(|| dataset.get(index)).map_err(|fault| fail(Some(index), fault))?);
        }
        let collated = guarded(|| collate(samples)).map_err(|fault| match unlike(fault) {
            // The place in the batch is known: then so is the sample.
            Ok((place, fault)) => fail(place.and_then(|place| indices.get(place).copied()), fault),
            Err(fault) => fail(None, fault),
        });
        Ok(collated?)
    }
}

/// What `collate` says of a sample, by its place in the batch; other faults as they are.
fn unlike(fault: Fault) -> Result<(Option<usize>, Fault), Fault> {
    let Fault::Error(error) = fault else { return Err(fault) };
    let Error::Other(other) = *error else { return Err(Fault::Error(error)) };
    match other.downcast::<crate::Error>() {
        Ok(own) => match *own {
            crate::Error::Batch { sample, fault, .. } => Ok((sample, fault)),
            own => Err(Fault::Error(Box::new(own.into()))),
        },
        Err(other) => Err(Fault::Error(Box::new(Error::Other(other)))),
    }
}

/// The user's code, whose panics are errors.
fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Result<T, Fault> {
    // Nothing of the loader's is changed inside, and the data set's state is the user's care.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Fault::Error(Box::new(error))),
        Err(payload) => Err(Fault::Panic(message(&*payload))),
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_else(|| "?".into())
}

/// The batches of an epoch, in order.
pub struct Batches<D: Dataset, B> {
    job: Arc<Job<D, B>>,
    range: Range<usize>,
    crew: Option<Crew<Result<B>>>,
}

impl<D: Dataset, B> Batches<D, B> {
    /// The number of the epoch.
    pub fn epoch(&self) -> u64 {
        self.job.epoch
    }

    /// The number in the epoch that the next batch has.
    pub fn position(&self) -> usize {
        self.range.start
    }
}

impl<D: Dataset, B: Send + 'static> Iterator for Batches<D, B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        let batch = self.range.next()?;
        Some(match &self.crew {
            None => self.job.make(batch, &AtomicBool::new(false)),
            Some(crew) => crew.take().unwrap_or_else(|| {
                let fault = Fault::Panic("the worker that was at it is gone".into());
                Err(crate::Error::Batch { batch, sample: None, fault }.into())
            }),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.range.size_hint()
    }
}

impl<D: Dataset, B: Send + 'static> ExactSizeIterator for Batches<D, B> {}
