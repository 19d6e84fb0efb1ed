//! Loaders: order, workers, errors in their place, early ends.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kiln_tensor::{DType, Device, Error, Result, Tensor};
use kiln_training::data::{
    DataLoader, DataLoaderOptions, Dataset, ListDataset, Random, TensorDataset, WeightedRandomSampler,
};

/// Samples that are their indices, with noise; slow here and there, so that workers overtake each other.
struct Numbers {
    len: usize,
    /// Where `get` fails, and where it panics.
    fails: Option<usize>,
    panics: Option<usize>,
    asked: Arc<AtomicUsize>,
}

impl Numbers {
    fn new(len: usize) -> Numbers {
        Numbers { len, fails: None, panics: None, asked: Arc::default() }
    }
}

impl Dataset for Numbers {
    type Sample = (i64, f32);
    fn len(&self) -> usize {
        self.len
    }
    fn get(&self, index: usize) -> Result<(i64, f32)> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if index.is_multiple_of(7) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(self.panics != Some(index), "no sample {index} today");
        match self.fails {
            Some(fails) if fails == index => Err(Error::Environment("a file is missing".into())),
            _ => Ok((index as i64, Random::of_sample(index).normal())),
        }
    }
}

fn batches(options: DataLoaderOptions, epochs: usize) -> Vec<(Vec<i64>, Vec<f32>)> {
    let loader = options.build(Numbers::new(50)).unwrap();
    let epoch = |_| loader.iter().map(|batch| batch.unwrap()).collect::<Vec<_>>();
    let all = (0..epochs).flat_map(epoch);
    all.map(|(indices, noise)| (indices.to_vec().unwrap(), noise.to_vec().unwrap())).collect()
}

#[test]
fn batches_are_the_same_whatever_the_workers() {
    let options = || DataLoader::options().batch_size(8).shuffle(true).seed(5);
    let alone = batches(options(), 3);
    assert_eq!(alone.len(), 21);
    for workers in [1, 2, 4, 9] {
        assert_eq!(batches(options().workers(workers), 3), alone, "{workers} workers");
        assert_eq!(batches(options().workers(workers).prefetch_factor(1), 3), alone, "{workers} workers");
    }
    assert_ne!(batches(options().seed(6), 1), alone[..7]);
    // Each epoch has every sample once, in an order of its own, with noise of its own.
    let epoch = |n: usize| &alone[7 * n..7 * (n + 1)];
    assert_ne!(epoch(0), epoch(1));
    let sample = |n: usize| {
        let mut found = epoch(n).iter().flat_map(|(indices, noise)| indices.iter().zip(noise));
        found.find(|(index, _)| **index == 3).map(|(_, noise)| *noise).unwrap()
    };
    assert_ne!(sample(0), sample(1));
    let mut all: Vec<i64> = epoch(2).iter().flat_map(|(indices, _)| indices.clone()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..50).collect::<Vec<_>>());
}

#[test]
fn the_last_batch_is_smaller_or_left_out() {
    let sizes = |options: DataLoaderOptions| {
        let found: Vec<usize> = batches(options.batch_size(20), 1).iter().map(|(i, _)| i.len()).collect();
        found
    };
    assert_eq!(sizes(DataLoader::options()), [20, 20, 10]);
    assert_eq!(sizes(DataLoader::options().drop_last(true).workers(2)), [20, 20]);
    let loader = DataLoader::options().batch_size(60).drop_last(true).build(Numbers::new(50)).unwrap();
    assert!(loader.is_empty() && loader.iter().next().is_none());
    let nothing = DataLoader::options().workers(3).build(Numbers::new(0)).unwrap();
    assert!(nothing.is_empty() && nothing.iter().next().is_none());
}

#[test]
fn errors_and_panics_arrive_at_their_batch() {
    for workers in [0, 1, 3] {
        let dataset = Numbers { fails: Some(13), panics: Some(37), ..Numbers::new(50) };
        let loader = DataLoader::options().batch_size(10).workers(workers).build(dataset).unwrap();
        let found: Vec<String> = loader
            .iter()
            .map(|batch| batch.map_or_else(|error| error.to_string(), |(x, _)| x.numel().to_string()))
            .collect();
        assert_eq!(
            found,
            [
                "10",
                "batch 1, sample 13: a file is missing",
                "10",
                "batch 3, sample 37: panicked: no sample 37 today",
                "10"
            ],
            "{workers} workers"
        );
    }
    let options = || DataLoader::options().batch_size(4);
    let ragged = vec![Tensor::from_slice(&[1.0f32]).unwrap(), Tensor::from_slice(&[1.0f32, 2.0]).unwrap()];
    // The sample in the data set, and the line that built the loader.
    for workers in [0, 2] {
        let built = (options().workers(workers).build(ListDataset(ragged.clone())).unwrap(), line!());
        let error = built.0.iter().next().unwrap().unwrap_err().to_string();
        let want = "batch 0, sample 1: collate: every tensor of the batch must have shape [1], got [2]";
        assert_eq!(error, format!("{want}, at data.rs:{}", built.1), "{workers} workers");
    }
    let (pairs, line) =
        (options().build(ListDataset(vec![(vec![1i64], 1i64), (vec![1, 2], 1)])).unwrap(), line!());
    let error = pairs.iter().next().unwrap().unwrap_err().to_string();
    assert_eq!(
        error,
        format!("batch 0, sample 1: collate: the lengths of the samples differ: 1 vs 2, at data.rs:{line}")
    );
    // An op of the user's own code has its own line.
    struct Own;
    impl Dataset for Own {
        type Sample = Tensor;
        fn len(&self) -> usize {
            1
        }
        fn get(&self, _: usize) -> Result<Tensor> {
            Tensor::from_slice(&[1.0f32])?.reshape([2, 2]) // the user's line
        }
    }
    let error = options().build(Own).unwrap().iter().next().unwrap().unwrap_err().to_string();
    let own =
        include_str!("data.rs").lines().position(|line| line.ends_with("// the user's line")).unwrap() + 1;
    assert!(error.contains("sample 0: ") && error.ends_with(&format!("at data.rs:{own}")), "{error}");
    // Options that are refused, and a sampler that names a sample which is not there.
    let (refused, line) = (DataLoader::options().batch_size(0).build(ListDataset(vec![1i64])), line!());
    assert!(refused.err().unwrap().to_string().ends_with(&format!("at data.rs:{line}")));
    let sampler = WeightedRandomSampler::new(&[0.0, 0.0, 1.0], 1, 0).unwrap();
    let (beyond, line) = (options().sampler(sampler).build(ListDataset(vec![1i64])).unwrap(), line!());
    let error = beyond.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.ends_with(&format!("at data.rs:{line}")), "{error}");
    let wrong = options()
        .workers(1)
        .build_with(ListDataset(vec![1, 2]), |_| -> Result<()> { panic!("can't collate") });
    let error = wrong.unwrap().iter().next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "batch 0: panicked: can't collate");
}

#[test]
fn an_epoch_dropped_early_ends_its_threads() {
    for taken in [0, 1, 4] {
        let dataset = Numbers::new(100_000);
        let asked = dataset.asked.clone();
        let loader = DataLoader::options().batch_size(10).workers(3).build(dataset).unwrap();
        let start = Instant::now();
        let mut epoch = loader.iter();
        for _ in 0..taken {
            epoch.next().unwrap().unwrap();
        }
        drop(epoch);
        assert!(start.elapsed() < Duration::from_secs(20));
        let then = asked.load(Ordering::SeqCst);
        // What was taken and what may be made ahead, and no more; nothing goes on behind our back.
        assert!(then <= 10 * (taken + 6), "{then} samples for {taken} batches");
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(asked.load(Ordering::SeqCst), then);
    }
    // An epoch may outlive its loader.
    let mut epoch = DataLoader::options().workers(2).build(Numbers::new(5)).unwrap().iter();
    assert_eq!(epoch.len(), 5);
    assert!(epoch.all(|batch| batch.is_ok()));
}

#[test]
fn an_epoch_can_be_gone_on_with() {
    let loader = |workers| {
        let options = DataLoader::options().batch_size(8).shuffle(true).seed(1).workers(workers);
        options.build(Numbers::new(50)).unwrap()
    };
    let read = |batch: Result<(Tensor, Tensor)>| batch.unwrap().0.to_vec::<i64>().unwrap();
    let whole = loader(0);
    drop(whole.iter());
    let second: Vec<_> = whole.iter().map(read).collect();
    let third: Vec<_> = whole.iter().map(read).collect();
    for workers in [0, 2] {
        let later = loader(workers);
        let rest = later.epoch_from(1, 4);
        assert_eq!((rest.epoch(), rest.position(), rest.len()), (1, 4, 3));
        assert_eq!(rest.map(read).collect::<Vec<_>>(), second[4..]);
        assert_eq!((later.epoch(), later.iter().map(read).collect::<Vec<_>>()), (2, third.clone()));
        assert_eq!(later.epoch_from(7, 99).count(), 0);
    }
}

#[test]
fn a_sampler_decides_by_itself() {
    let sampler = || WeightedRandomSampler::new(&[0.0, 1.0, 1.0], 40, 2).unwrap();
    let loader = DataLoader::options()
        .batch_size(16)
        .sampler(sampler())
        .build(ListDataset(vec![0i64, 10, 20]))
        .unwrap();
    assert_eq!(loader.len(), 3);
    let drawn: Vec<i64> = loader.iter().flat_map(|batch| batch.unwrap().to_vec::<i64>().unwrap()).collect();
    assert_eq!(drawn.len(), 40);
    assert!(drawn.contains(&10) && drawn.contains(&20) && !drawn.contains(&0));
    for options in [
        DataLoader::options().sampler(sampler()).shuffle(true),
        DataLoader::options().batch_size(0),
        DataLoader::options().workers(1).prefetch_factor(0),
    ] {
        assert!(options.build(ListDataset(vec![1i64])).is_err());
    }
    // A sampler for another data set is an error at the batch, not a panic.
    let loader =
        DataLoader::options().batch_size(40).sampler(sampler()).build(ListDataset(vec![0i64, 10])).unwrap();
    assert!(loader.iter().next().unwrap().unwrap_err().to_string().contains("index 2 is out of range"));
}

#[test]
fn rows_of_tensors_keep_their_dtypes() -> Result<()> {
    let x = Tensor::arange(0, 24, &Device::Cpu)?.reshape([6, 2, 2])?.to_dtype(DType::F32)?;
    let y = Tensor::from_slice(&[true, false, true, false, true, false])?;
    let loader = DataLoader::options().batch_size(4).workers(2).build(TensorDataset::new((x, y))?)?;
    let batches: Vec<(Tensor, Tensor)> = loader.iter().collect::<Result<_>>()?;
    assert_eq!(batches[0].0.shape().to_vec(), [4, 2, 2]);
    assert_eq!((batches[1].0.dtype(), batches[1].1.dtype()), (DType::F32, DType::Bool));
    assert_eq!(batches[1].0.to_vec::<f32>()?, (16..24).map(|n| n as f32).collect::<Vec<_>>());
    assert_eq!(batches[1].1.to_vec::<bool>()?, [true, false]);
    Ok(())
}
