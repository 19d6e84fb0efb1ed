//! ResNet-18 with a compiled forward and backward; loss and optimizer stay outside.
//!
//! `cargo run --release --example resnet18 -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::models::resnet18;
use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let device = Device::best();
    let model = resnet18(1000)?;
    let opt = optim::SGD::new(model.parameters(), 0.01)?;
    let compiled = model.compile();

    let x = Tensor::randn([2, 3, 64, 64], &device)?;
    for _ in 0..2 {
        opt.zero_grad();
        let y = compiled.forward(&x)?;
        y.sum()?.backward()?;
        opt.step()?;
        println!("{:?}", y.shape().to_vec());
    }
    let explanation = compiled.explain();
    println!(
        "{} graph, with a compiled backward: {}",
        explanation.graphs.len(),
        explanation.graphs[0].has_backward
    );
    Ok(())
}
