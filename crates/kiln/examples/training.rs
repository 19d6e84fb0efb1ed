//! A training loop as people write it: a data loader with workers, a compiled step, a checkpoint, and going on from it.
//!
//! `cargo run --example training -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::data::{Random, random_split};
use kiln::nn::{Linear, ReLU, Sequential, seq};
use kiln::prelude::*;
use kiln::training::{Checkpoint, History, Plot, Position};

/// Points on two spirals, which no line can separate.
struct Spirals;

impl Dataset for Spirals {
    type Sample = (Tensor, i64);

    fn len(&self) -> usize {
        600
    }

    fn get(&self, index: usize) -> kiln::Result<(Tensor, i64)> {
        let mut random = Random::new(index as u64);
        let (arm, along) = (index % 2, random.between(0.1, 1.0));
        let angle = 6.0 * along + std::f32::consts::PI * arm as f32;
        let point = [along * angle.cos(), along * angle.sin()].map(|x| x + 0.02 * random.normal());
        Ok((Tensor::from_slice(&point)?, arm as i64))
    }
}

fn new_model() -> kiln::Result<Sequential> {
    Ok(seq![Linear::new(2, 64)?, ReLU, Linear::new(64, 64)?, ReLU, Linear::new(64, 2)?])
}

/// The example.
pub fn main() -> kiln::Result<()> {
    let folder = std::env::temp_dir().join(format!("kiln-example-training-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| kiln::Error::State(error.to_string()))?;

    manual_seed(0);
    let [train, test] = random_split(Spirals, [500, 100], 0)?;
    let train = DataLoader::options().batch_size(50).shuffle(true).workers(2).build(train)?;
    let test = DataLoader::options().batch_size(100).build(test)?;

    let model = new_model()?;
    let opt = optim::AdamW::new(model.parameters(), 0.01)?;
    let step = kiln::compile(|x: &Tensor, y: &Tensor| {
        opt.zero_grad();
        let loss = model.forward(x)?.cross_entropy(y)?;
        loss.backward()?;
        opt.step()?;
        loss.detach()
    });
    let accuracy = |model: &Sequential| -> kiln::Result<f64> {
        let _off = no_grad();
        let mut right = 0;
        for batch in &test {
            let (x, y) = batch?;
            right += model.forward(&x)?.argmax_dim(-1, false)?.eq(&y)?.sum()?.item::<i64>()?;
        }
        Ok(right as f64 / 100.0)
    };

    let mut history = History::new(["epoch", "loss", "accuracy"]);
    for epoch in 1..=30 {
        let mut loss = 0.0;
        for batch in &train {
            let (x, y) = batch?;
            loss += step(&x, &y)?.item::<f64>()? / train.len() as f64;
        }
        history.push([Some(f64::from(epoch)), Some(loss), Some(accuracy(&model)?)]);
    }
    let reached = history.last("accuracy").unwrap_or(0.0);
    println!("better than 95 % of points it has not seen: {}", reached > 0.95);

    // Everything in one file; a new program goes on from it as if nothing had happened.
    let position = Position { epoch: 30, step: 300, ..Position::default() };
    Checkpoint::of(&model).optimizer(&opt).save(folder.join("checkpoint.safetensors"), &position)?;
    history.save_csv(folder.join("metrics.csv"))?;
    let plot = Plot::new("Two spirals").labels("epoch", "").line("loss", history.curve("loss"));
    plot.line("accuracy", history.curve("accuracy")).save(folder.join("spirals.svg"))?;

    let other = new_model()?;
    let opt = optim::AdamW::new(other.parameters(), 0.01)?;
    let position = Checkpoint::of(&other).optimizer(&opt).load(folder.join("checkpoint.safetensors"))?;
    println!("at epoch {}, the same accuracy: {}", position.epoch, accuracy(&other)? == reached);
    let explanation = step.explain();
    println!("{} graph, {} recompiles", explanation.graphs.len(), explanation.recompiles.len());
    std::fs::remove_dir_all(&folder).map_err(|error| kiln::Error::State(error.to_string()))
}
