//! A loader's batches in a compiled step, and going on from a checkpoint in the middle of an epoch.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::Path;

use kiln::Result;
use kiln::data::Random;
use kiln::nn::{BatchNorm1d, Dropout, Linear, ReLU, Sequential, seq};
use kiln::optim::lr_scheduler::{OneCycleLR, Schedule};
use kiln::prelude::*;
use kiln::training::{Checkpoint, Position};

/// Points around three centres, each epoch with other noise; 50 of them, so that batches of 8 leave 2.
struct Points;

impl Dataset for Points {
    type Sample = (Tensor, i64);
    fn len(&self) -> usize {
        50
    }
    fn get(&self, index: usize) -> Result<(Tensor, i64)> {
        let mut random = Random::of_sample(index);
        let point: Vec<f32> = (0..6).map(|_| 0.5 * random.normal() + (index % 3) as f32).collect();
        Ok((Tensor::from_slice(&point)?, (index % 3) as i64))
    }
}

fn model() -> Result<Sequential> {
    Ok(seq![Linear::new(6, 24)?, BatchNorm1d::new(24)?, ReLU, Dropout::new(0.2)?, Linear::new(24, 3)?])
}

/// Trains with new objects from a checkpoint (or from the start) until so many steps are done; the losses' bits.
fn train(from: Option<&Path>, steps: u64, to: Option<&Path>, compiled: bool) -> Result<Vec<u32>> {
    manual_seed(if from.is_some() { 77 } else { 5 });
    let model = model()?;
    let opt = optim::AdamW::new(model.parameters(), 0.01)?;
    let scheduler = OneCycleLR::new(0.02, 30).on(&opt)?;
    let checkpoint = Checkpoint::of(&model).optimizer(&opt).scheduler(&scheduler);
    let mut position = from.map(|path| checkpoint.load(path)).transpose()?.unwrap_or_default();
    let loader = DataLoader::options().batch_size(8).shuffle(true).seed(1).workers(2).build(Points)?;
    // Sizes are compiled at once: otherwise the first of a size runs op by op, with sums in another order, and which
    // batch that is depends on where the program began.
    let step = Compile::new().dynamic(true).disable(!compiled).function(|x: &Tensor, y: &Tensor| {
        opt.zero_grad();
        let loss = model.forward(x)?.cross_entropy(y)?;
        loss.backward()?;
        opt.step()?;
        loss.detach()
    });
    let mut losses = Vec::new();
    let mut batches = loader.epoch_from(position.epoch, position.batch as usize);
    while position.step < steps {
        let Some(batch) = batches.next() else {
            position = Position { epoch: position.epoch + 1, batch: 0, ..position };
            batches = loader.iter();
            continue;
        };
        let (x, y) = batch?;
        losses.push(step(&x, &y)?.item::<f32>()?.to_bits());
        scheduler.step()?;
        position.batch += 1;
        position.step += 1;
    }
    let explanation = step.explain();
    if compiled {
        // The last batch of an epoch is smaller: the same graph with other sizes.
        assert_eq!((explanation.breaks.len(), explanation.recompiles.len()), (0, 0), "{explanation}");
        assert!(
            explanation.graphs.iter().filter(|graph| graph.resizes.is_none()).count() == 1,
            "{explanation}"
        );
    }
    to.map_or(Ok(()), |path| checkpoint.save(path, &position))?;
    Ok(losses)
}

/// The only test of its process: the random stream is one, and nothing else may draw from it meanwhile.
#[test]
fn twenty_steps_are_ten_and_ten_compiled_and_eager() -> Result<()> {
    for compiled in [true, false] {
        let path =
            std::env::temp_dir().join(format!("kiln-resume-{compiled}-{}.safetensors", std::process::id()));
        let straight = train(None, 20, None, compiled)?;
        let mut parts = train(None, 10, Some(&path), compiled)?;
        parts.extend(train(Some(&path), 20, None, compiled)?);
        assert_eq!(parts, straight, "compiled: {compiled}");
        std::fs::remove_file(&path).unwrap();
    }
    Ok(())
}
