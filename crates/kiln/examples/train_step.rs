//! A whole training step as one graph: forward, loss, backward and optimizer.
//!
//! `cargo run --example train_step -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::nn::{Gelu, Linear, seq};
use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let model = seq![Linear::new(8, 32)?, Gelu, Linear::new(32, 3)?];
    let opt = optim::AdamW::new(model.parameters(), 0.01)?;
    let x = Tensor::randn([64, 8], &Device::Cpu)?;
    let y = x.narrow(1, 0, 3)?.argmax_dim(-1, false)?; // which of the first three is the greatest

    let step = kiln::compile(|| {
        opt.zero_grad();
        let loss = model.forward(&x)?.cross_entropy(&y)?;
        loss.backward()?;
        opt.step()?;
        loss.detach()
    });
    let mut last = f32::INFINITY;
    for i in 0..60 {
        let loss = step()?;
        if i % 20 == 19 {
            let loss = loss.item::<f32>()?;
            assert!(loss < last);
            println!("step {}: loss {loss:.2}", i + 1);
            last = loss;
        }
    }
    let explanation = step.explain();
    println!("{} graph, {} breaks", explanation.graphs.len(), explanation.breaks.len());
    Ok(())
}
