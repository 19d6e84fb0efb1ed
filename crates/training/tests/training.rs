//! Checkpoints: a loop that goes on from one computes what it would have computed without the break.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::{Path, PathBuf};

use kiln_nn::optim::lr_scheduler::{CosineAnnealingLR, LinearLR, Schedule, Scheduler, SequentialLR};
use kiln_nn::optim::{AdamW, Optimizer, SGD};
use kiln_nn::{BatchNorm1d, Dropout, Embedding, Forward, Linear, Module, Sequential, safetensors, seq};
use kiln_tensor::{Device, Result, Tensor, get_rng_state, manual_seed};
use kiln_training::data::{DataLoader, Dataset, Random};
use kiln_training::{Checkpoint, Position};

struct Points;

impl Dataset for Points {
    type Sample = (Tensor, i64);
    fn len(&self) -> usize {
        60
    }
    fn get(&self, index: usize) -> Result<(Tensor, i64)> {
        let mut random = Random::of_sample(index);
        let point: Vec<f32> = (0..4).map(|_| random.normal() + (index % 3) as f32).collect();
        Ok((Tensor::from_slice(&point)?, (index % 3) as i64))
    }
}

/// A model with all that a checkpoint must remember: moving averages, dropout, moments, a schedule, an order.
struct Run {
    model: Sequential,
    optimizer: std::sync::Arc<AdamW>,
    scheduler: Scheduler<std::sync::Arc<AdamW>>,
}

impl Run {
    fn new() -> Result<Run> {
        let model = seq![Linear::new(4, 16)?, BatchNorm1d::new(16)?, Dropout::new(0.3)?, Linear::new(16, 3)?];
        let optimizer = std::sync::Arc::new(AdamW::new(model.parameters(), 0.02)?);
        let warm_up = LinearLR::new().start_factor(0.1).total_iters(4);
        let schedule = SequentialLR::new(warm_up).then(4, CosineAnnealingLR::new(16));
        let scheduler = schedule.on(optimizer.clone())?;
        Ok(Run { model, optimizer, scheduler })
    }

    fn checkpoint(&self) -> Checkpoint<'_> {
        Checkpoint::of(&self.model).optimizer(&self.optimizer).scheduler(&self.scheduler)
    }

    /// Trains from a position until so many steps are done.
    fn train(&self, mut position: Position, steps: u64) -> Result<(Position, Vec<u32>)> {
        let loader = DataLoader::options().batch_size(8).shuffle(true).seed(3).workers(2).build(Points)?;
        let mut losses = Vec::new();
        let mut batches = loader.epoch_from(position.epoch, position.batch as usize);
        while position.step < steps {
            let Some(batch) = batches.next() else {
                (position.epoch, position.batch) = (position.epoch + 1, 0);
                batches = loader.iter();
                continue;
            };
            let (x, y) = batch?;
            self.optimizer.zero_grad();
            let loss = self.model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            self.optimizer.step()?;
            self.scheduler.step()?;
            losses.push(loss.item::<f32>()?.to_bits());
            position.batch += 1;
            position.step += 1;
        }
        Ok((position, losses))
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kiln-training-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn bytes(model: &dyn Module) -> Vec<Vec<u8>> {
    model.state_dict().iter().map(|(_, tensor)| tensor.to_bytes().unwrap()).collect()
}

/// One test, since the random stream is one.
#[test]
fn ten_steps_and_ten_more_are_twenty() -> Result<()> {
    let folder = folder("resume");
    let path = folder.join("checkpoint.safetensors");
    manual_seed(1);
    let straight = Run::new()?;
    let (end, all) = straight.train(Position::default(), 20)?;
    assert_eq!((end.epoch, end.batch, end.step), (2, 4, 20));

    manual_seed(1);
    let first = Run::new()?;
    let (position, before) = first.train(Position::default(), 10)?;
    assert_eq!((position.epoch, position.batch), (1, 2));
    let notes = [("run".to_string(), "café, 1".to_string())].into();
    first.checkpoint().save(&path, &Position { notes, ..position })?;

    manual_seed(99);
    let second = Run::new()?;
    let position = second.checkpoint().load(&path)?;
    assert_eq!(position, Checkpoint::position(&path)?);
    assert_eq!(position.notes["run"], "café, 1");
    let (_, after) = second.train(position, 20)?;
    assert_eq!([before, after].concat(), all);
    assert!(bytes(&second.model) == bytes(&straight.model));
    assert_eq!(second.optimizer.lr(), straight.optimizer.lr());

    refusals(&folder, &path)?;
    tied(&folder)?;
    std::fs::remove_dir_all(folder).unwrap();
    Ok(())
}

/// A table and a head that are one tensor, as language models have them.
#[derive(Module)]
struct Tied {
    table: Embedding,
    head: Linear,
}

/// Tied weights go into a checkpoint and come back from it, still one tensor.
fn tied(folder: &Path) -> Result<()> {
    let table = Embedding::new(3, 2)?;
    let head = Linear::from_parts(table.weight.clone(), None);
    let model = Tied { table, head };
    let (path, want) = (folder.join("tied.safetensors"), model.table.weight.to_vec::<f32>()?);
    let checkpoint = Checkpoint::of(&model);
    checkpoint.save(&path, &Position::default())?;
    model.load_state_dict(
        &[("head.weight".to_string(), Tensor::zeros([3, 2], &Device::Cpu)?)].into_iter().collect(),
        true,
    )?;
    checkpoint.load(&path)?;
    assert_eq!(model.head.weight.to_vec::<f32>()?, want);
    assert!(model.head.weight.same(&model.table.weight), "still one tensor");
    Ok(())
}

/// What does not fit is refused, and nothing has changed.
fn refusals(folder: &Path, path: &Path) -> Result<()> {
    let told = |result: Result<Position>| result.unwrap_err().to_string();
    let run = Run::new()?;
    run.train(Position::default(), 3)?;
    // Another optimizer's step, and another model; both draw and change before anything is looked at.
    let momentum = SGD::options().lr(0.1).momentum(0.9).build(run.model.parameters())?;
    momentum.step()?;
    let wide = seq![Linear::new(4, 17)?];
    let (model, random) = (bytes(&run.model), get_rng_state());

    let other = folder.join("other.safetensors");
    safetensors::save(&run.model.state_dict(), &other)?;
    assert!(told(run.checkpoint().load(&other)).contains("not a training checkpoint"));
    assert!(told(run.checkpoint().load(folder.join("none.safetensors"))).contains("none.safetensors"));

    Checkpoint::of(&run.model).save(&other, &Position::default())?;
    assert!(told(run.checkpoint().load(&other)).contains("has no optimizer"));
    Checkpoint::of(&run.model).optimizer(&run.optimizer).save(&other, &Position::default())?;
    assert!(told(run.checkpoint().load(&other)).contains("has no scheduler"));

    // The model and the schedule fit, the optimizer's state does not.
    let both = Checkpoint::of(&run.model).optimizer(&momentum).scheduler(&run.scheduler);
    let epoch = run.scheduler.last_epoch();
    both.save(&other, &Position::default())?;
    run.scheduler.step()?;
    let lr = run.optimizer.lr();
    assert!(run.checkpoint().load(&other).is_err());
    assert_eq!(run.scheduler.last_epoch(), epoch + 1);
    assert_eq!(run.optimizer.lr(), lr);

    assert!(told(Checkpoint::of(&wide).load(path)).contains("loading the state of Sequential"));
    assert!(bytes(&run.model) == model && get_rng_state() == random);
    absurd_counts(folder, path)?;
    // A checkpoint's model loads without the rest.
    Run::new()?.model.load_state_dict(&safetensors::load(path)?.below("model."), true)?;
    Ok(())
}

/// Counts that nothing could count on from are refused, wherever they are in a file.
fn absurd_counts(folder: &Path, path: &Path) -> Result<()> {
    let run = Run::new()?;
    let (state, file) = (safetensors::load(path)?, safetensors::SafeTensorsFile::open(path)?);
    let counts = ["part.scheduler.last_epoch", "optimizer.state.0.step"];
    let other = folder.join("absurd.safetensors");
    for name in counts {
        for number in [f64::MAX, f64::INFINITY, f64::NAN, -1.0, 0.5, 2f64.powi(54)] {
            let mut changed = state.clone();
            assert!(changed.get(name).is_some(), "{name}");
            changed.insert(name, Tensor::from_vec(vec![number], [0usize; 0])?);
            safetensors::save_with(&changed, file.metadata(), &other)?;
            let error = run.checkpoint().load(&other).unwrap_err().to_string();
            assert!(error.contains("must be a count"), "{name} {number}: {error}");
        }
    }
    for name in ["epoch", "batch", "step"] {
        for text in ["18446744073709551615", "-1", "1e3", ""] {
            let mut metadata = file.metadata().clone();
            metadata.insert(name.into(), text.into());
            safetensors::save_with(&state, &metadata, &other)?;
            assert!(run.checkpoint().load(&other).unwrap_err().to_string().contains(name));
        }
    }
    Ok(())
}
