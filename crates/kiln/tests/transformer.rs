//! A transformer of twelve layers, written with plain ops: its training step is one graph, right, and quickly
//! on its way through the front half of the compiler.

#![allow(clippy::unwrap_used)] // a test may panic

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln::prelude::*;
use kiln::{Attention, CompiledGraph, CustomBackend, Explanation, GraphContext, Level, Region, Result};
use kiln_inductor::{C, Options, lower};
use kiln_ir::{Graph, math::c::Isa};

const WIDTH: usize = 32;
const HEADS: usize = 4;
const WORDS: usize = 50;

struct Block {
    norm1: [Tensor; 2],
    qkv: [Tensor; 2],
    projection: [Tensor; 2],
    norm2: [Tensor; 2],
    up: [Tensor; 2],
    down: [Tensor; 2],
}

struct Transformer {
    words: Tensor,
    places: Tensor,
    blocks: Vec<Block>,
    norm: [Tensor; 2],
}

/// Weights that are the same in every model.
fn weight(shape: &[usize], salt: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let number = |i: usize| (((i + salt) * 2654435761 % 1000) as f32 / 1000.0 - 0.5) * 0.2;
    let numbers: Vec<f32> = (0..count).map(number).collect();
    let weight = Tensor::from_slice(&numbers)?.reshape(shape)?;
    weight.requires_grad_(true)?;
    Ok(weight)
}

fn layer(inputs: usize, outputs: usize, salt: usize) -> Result<[Tensor; 2]> {
    Ok([weight(&[outputs, inputs], salt)?, weight(&[outputs], salt + 1)?])
}

fn norm(salt: usize) -> Result<[Tensor; 2]> {
    Ok([weight(&[WIDTH], salt)?, weight(&[WIDTH], salt + 1)?])
}

impl Block {
    fn new(salt: usize) -> Result<Block> {
        Ok(Block {
            norm1: norm(salt)?,
            qkv: layer(WIDTH, 3 * WIDTH, salt + 2)?,
            projection: layer(WIDTH, WIDTH, salt + 4)?,
            norm2: norm(salt + 6)?,
            up: layer(WIDTH, 4 * WIDTH, salt + 8)?,
            down: layer(4 * WIDTH, WIDTH, salt + 10)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length) = (x.shape()[0], x.shape()[1]);
        let normed = x.layer_norm(&[WIDTH], Some(&self.norm1[0]), Some(&self.norm1[1]), 1e-5)?;
        let qkv = normed.linear(&self.qkv[0], Some(&self.qkv[1]))?;
        let heads = qkv.reshape([batch, length, 3, HEADS, WIDTH / HEADS])?.permute([2, 0, 3, 1, 4])?;
        let part = |i: usize| heads.select(0, i as i64);
        let options = Attention { causal: true, ..Attention::default() };
        let mixed = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, options)?;
        let mixed = mixed.permute([0, 2, 1, 3])?.reshape([batch, length, WIDTH])?;
        let x = (x + &mixed.linear(&self.projection[0], Some(&self.projection[1]))?).ok()?;
        let normed = x.layer_norm(&[WIDTH], Some(&self.norm2[0]), Some(&self.norm2[1]), 1e-5)?;
        let wide = normed.linear(&self.up[0], Some(&self.up[1]))?.gelu()?;
        (&x + &wide.linear(&self.down[0], Some(&self.down[1]))?).ok()
    }

    fn parameters(&self) -> Vec<Tensor> {
        let parts = [&self.norm1, &self.qkv, &self.projection, &self.norm2, &self.up, &self.down];
        parts.into_iter().flatten().cloned().collect()
    }
}

impl Transformer {
    fn new(layers: usize) -> Result<Transformer> {
        Ok(Transformer {
            words: weight(&[WORDS, WIDTH], 1)?,
            places: weight(&[64, WIDTH], 2)?,
            blocks: (0..layers).map(|i| Block::new(100 * i + 3)).collect::<Result<_>>()?,
            norm: norm(4)?,
        })
    }

    fn loss(&self, words: &Tensor, next: &Tensor) -> Result<Tensor> {
        let length = words.shape()[1];
        let mut x = (&self.words.embedding(words)? + &self.places.narrow(0, 0, length)?).ok()?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let x = x.layer_norm(&[WIDTH], Some(&self.norm[0]), Some(&self.norm[1]), 1e-5)?;
        x.matmul(&self.words.t()?)?.reshape([-1, WORDS as i64])?.cross_entropy(&next.reshape([-1])?)
    }

    fn parameters(&self) -> Vec<Tensor> {
        let mut all = vec![self.words.clone(), self.places.clone()];
        all.extend(self.blocks.iter().flat_map(Block::parameters));
        all.extend(self.norm.iter().cloned());
        all
    }
}

fn text(batch: usize, length: usize, salt: usize) -> Result<Tensor> {
    let words: Vec<i64> = (0..batch * length).map(|i| ((i * 7 + salt) * 31 % WORDS) as i64).collect();
    Tensor::from_slice(&words)?.reshape([batch, length])
}

/// Trains for a few steps and tells the losses and the last parameters.
fn train(
    layers: usize,
    region: Option<&Region>,
    shapes: &[(usize, usize)],
) -> Result<(Vec<f32>, Vec<Tensor>)> {
    let model = Transformer::new(layers)?;
    let optimizer = optim::AdamW::new(model.parameters(), 0.01)?;
    let mut losses = Vec::new();
    for (i, &(batch, length)) in shapes.iter().enumerate() {
        let (words, next) = (text(batch, length, i)?, text(batch, length, i + 1)?);
        let step = || -> Result<Tensor> {
            optimizer.zero_grad();
            let loss = model.loss(&words, &next)?;
            loss.backward()?;
            optimizer.step()?;
            loss.detach()
        };
        let loss = match region {
            Some(region) => region.run(step)?,
            None => step()?,
        };
        losses.push(loss.item::<f32>()?);
    }
    Ok((losses, model.parameters()))
}

fn check(layers: usize, region: &Region, shapes: &[(usize, usize)]) -> Result<Explanation> {
    let (want, wanted) = train(layers, None, shapes)?;
    let (got, gotten) = train(layers, Some(region), shapes)?;
    for (want, got) in want.iter().zip(&got) {
        assert!((want - got).abs() < 1e-3 * want.abs(), "loss {got} instead of {want}");
    }
    for (want, got) in wanted.iter().zip(&gotten) {
        let difference = (want - got).ok()?.abs()?.max()?.item::<f32>()?;
        assert!(difference < 2e-3, "a parameter differs by {difference}");
    }
    Ok(region.explain())
}

#[test]
fn a_training_step_of_twelve_layers_is_one_graph() -> Result<()> {
    let region = Compile::new().region();
    let explanation = check(12, &region, &[(2, 16), (2, 16), (2, 16)])?;
    assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (1, 0), "{explanation}");
    assert!(explanation.recompiles.is_empty() && explanation.without_gradient().is_empty());
    let graph = &explanation.graphs[0];
    assert_eq!(graph.interpreted, None);
    let front: Duration = graph
        .times()
        .iter()
        .filter(|(stage, _)| ["capture", "aot", "prims"].contains(stage))
        .map(|(_, time)| *time)
        .sum();
    println!("capture, aot and prims: {front:?}");
    Ok(())
}

/// A backend that only plans, and notes the names of the kernels: hashes of their texts.
#[derive(Clone, Default)]
struct Planner(Arc<Mutex<Vec<String>>>);

impl CustomBackend for Planner {
    fn level(&self) -> Level {
        Level::Prims
    }

    fn compile(&self, graph: &Graph, _: &GraphContext<'_>) -> Result<CompiledGraph> {
        let lowered = lower(graph, &Options::dense(graph, C::new(Isa::Avx2))).expect("prims");
        let mut names: Vec<String> = lowered.code.iter().map(|kernel| kernel.name.clone()).collect();
        names.sort();
        *self.0.lock().unwrap() = names;
        Err(kiln::Error::State("planned, not built".into()))
    }
}

#[test]
fn layers_share_their_kernels() -> Result<()> {
    let kernels = |layers: usize| -> Result<Vec<String>> {
        let planner = Planner::default();
        train(layers, Some(&Compile::new().backend(planner.clone()).region()), &[(2, 10)])?;
        let names = planner.0.lock().unwrap().clone();
        Ok(names)
    };
    let few = kernels(2)?;
    assert!(!few.is_empty());
    assert_eq!(kernels(6)?, few);
    assert_eq!(kernels(24)?, few);
    Ok(())
}

#[test]
fn lengths_and_batches_may_differ() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    let explanation = check(3, &region, &[(2, 16), (3, 16), (3, 9), (2, 16), (4, 5), (3, 9)])?;
    assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 3), "{explanation}");
    Ok(())
}
