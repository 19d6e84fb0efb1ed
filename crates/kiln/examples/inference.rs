//! Serving a model: evaluation mode, no gradients, compiled before the first request, latencies.
//!
//! `cargo run --release --example inference -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use std::time::{Duration, Instant};

use kiln::models::{ViT, ViTConfig};
use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let config = ViTConfig {
        image_size: 64,
        num_layers: 4,
        num_heads: 4,
        hidden_dim: 64,
        mlp_dim: 128,
        ..ViTConfig::b_16()
    };
    let model = ViT::new(config)?;
    model.eval();
    let model = model.compile_with(Compile::new().mode(Mode::ReduceOverhead));

    let _off = no_grad();
    let image = Tensor::rand([1, 3, 64, 64], &Device::best())?;
    model.warm_up(&image)?; // compiles
    let mut latencies = Vec::new();
    for _ in 0..200 {
        let start = Instant::now();
        model.forward(&image)?;
        latencies.push(start.elapsed());
    }
    latencies.sort();
    let percentile = |p: usize| latencies.get(latencies.len() * p / 100).copied().unwrap_or(Duration::ZERO);
    println!("p50 {:.2?}, p99 {:.2?}", percentile(50), percentile(99));
    let explanation = model.explain();
    println!("{} graph, {} recompiles", explanation.graphs.len(), explanation.recompiles.len());
    Ok(())
}
