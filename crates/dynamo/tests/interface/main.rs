//! What `compile()` can be told, and what it tells: options, backends, stances, counters, explanations.

#![allow(clippy::unwrap_used)] // a test may panic

mod backends;
mod convolutions;
mod custom_ops;
mod explanations;
mod modes;
mod products;
mod stances;

use kiln_tensor::Tensor;

fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).unwrap()
}

fn leaf(data: &[f32]) -> Tensor {
    let x = t(data);
    x.requires_grad_(true).unwrap();
    x
}
