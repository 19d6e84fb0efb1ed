//! Whole models with every step checked against eager: a check that finds nothing must not raise an alarm.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln::models::{Gpt2, Gpt2Config, ViT, ViTConfig, resnet18};
use kiln::prelude::*;
use kiln::repro::{Case, rust_program};
use kiln::{Every, Result};

/// What `kiln minify` writes, compiled with this test.
#[path = "fixtures/repro.rs"]
#[allow(dead_code, clippy::print_stdout, reason = "a program of its own")]
mod program;

#[test]
fn cases_are_rust_programs() {
    let text = "%0: f32[2]\n%1 = argsort(%0) {dim: 0, descending: false}\nlive %1\ndata %0 1.0 0.0\n";
    let case = Case::from_text(text, &[]).unwrap();
    assert_eq!(case.to_text().unwrap().0, text);
    assert_eq!(rust_program(&case, text), include_str!("fixtures/repro.rs"));
}

/// Trains a model for two steps, each checked, from several seeds.
fn check<M: Module>(
    build: impl Fn() -> Result<M>,
    loss: impl Fn(&M) -> Result<Tensor>,
    optimizer: impl Fn(Vec<Tensor>) -> Result<Box<dyn Optimizer>>,
) {
    for seed in [1, 2, 3] {
        manual_seed(seed);
        let model = build().unwrap();
        let optimizer = optimizer(model.parameters()).unwrap();
        let region = Compile::new().verify(Every(1)).region();
        for _ in 0..2 {
            let step = || {
                optimizer.zero_grad();
                let loss = loss(&model)?;
                loss.backward()?;
                optimizer.step()?;
                Ok(loss)
            };
            region.run(step).unwrap();
        }
        let explanation = region.explain();
        assert!(explanation.calls > 0 && explanation.breaks.is_empty(), "{explanation}");
    }
}

fn adam(parameters: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(optim::AdamW::new(parameters, 1e-3)?))
}

#[test]
fn gpt2() {
    let config = Gpt2Config {
        n_embd: 24,
        n_layer: 2,
        n_head: 2,
        vocab_size: 60,
        n_positions: 20,
        ..Gpt2Config::small()
    };
    let tokens = Tensor::randint(0, 60, [3, 12], &Device::Cpu).unwrap();
    let loss = |model: &Gpt2| {
        let logits = model.forward(&tokens)?;
        logits.reshape([-1, 60])?.cross_entropy(&tokens.reshape([-1])?)
    };
    check(|| Gpt2::new(config.clone()), loss, adam);
}

#[test]
fn vit() {
    let config = ViTConfig {
        image_size: 16,
        patch_size: 8,
        hidden_dim: 16,
        mlp_dim: 24,
        num_layers: 2,
        num_heads: 2,
        num_classes: 5,
        ..ViTConfig::b_16()
    };
    let images = Tensor::randn([4, 3, 16, 16], &Device::Cpu).unwrap();
    let labels = Tensor::randint(0, 5, [4], &Device::Cpu).unwrap();
    let loss = |model: &ViT| model.forward(&images)?.cross_entropy(&labels);
    check(|| ViT::new(config.clone()), loss, adam);
}

#[test]
#[ignore = "eleven million parameters, a minute a step"]
fn resnet() {
    let images = Tensor::randn([4, 3, 32, 32], &Device::Cpu).unwrap();
    let labels = Tensor::randint(0, 10, [4], &Device::Cpu).unwrap();
    let sgd = |parameters| -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(optim::SGD::options().lr(0.01).momentum(0.9).build(parameters)?))
    };
    check(|| resnet18(10), |model| model.forward(&images)?.cross_entropy(&labels), sgd);
}
