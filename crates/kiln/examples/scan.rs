//! A recurrent network whose loop over time is one op: sequences of any length, one graph.
//!
//! `cargo run --example scan -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::nn::Linear;
use kiln::prelude::*;

/// A gated cell, written by hand.
#[derive(Module)]
struct Cell {
    gates: Linear,
    candidate: Linear,
    head: Linear,
}

impl Cell {
    fn new(inputs: usize, hidden: usize, classes: usize) -> kiln::Result<Cell> {
        let joined = inputs + hidden;
        Ok(Cell {
            gates: Linear::new(joined, 2 * hidden)?,
            candidate: Linear::new(joined, hidden)?,
            head: Linear::new(hidden, classes)?,
        })
    }

    fn step(&self, h: &Tensor, x: &Tensor) -> kiln::Result<Tensor> {
        let gates = self.gates.forward(&Tensor::cat([h, x], -1)?)?.sigmoid()?.chunk(2, -1)?;
        let reset = h.mul(&gates[0])?;
        let candidate = self.candidate.forward(&Tensor::cat([&reset, x], -1)?)?.tanh()?;
        h.lerp(&candidate, &gates[1])
    }

    /// What comes after sequences `[time, batch, inputs]`.
    fn forward(&self, xs: &Tensor) -> kiln::Result<Tensor> {
        let h = Tensor::zeros([xs.size(1)?, 32], &Device::Cpu)?;
        let (last, ()) = kiln::scan(&h, xs, |h, x| Ok((self.step(&h, &x)?, ())))?;
        self.head.forward(&last)
    }
}

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let model = Cell::new(3, 32, 3)?;
    let opt = optim::Adam::new(model.parameters(), 0.01)?;
    let step = kiln::compile(|xs: &Tensor, target: &Tensor| {
        opt.zero_grad();
        let loss = model.forward(xs)?.cross_entropy(target)?;
        loss.backward()?;
        opt.step()?;
        loss.detach()
    });
    let mut first = None;
    for i in 0..120 {
        // Which of three signals is the strongest over all? Another length in every call.
        let xs = Tensor::randn([5 + i % 20, 64, 3], &Device::Cpu)?;
        let target = xs.sum_dim(0, false)?.argmax_dim(-1, false)?;
        let loss = step(&xs, &target)?.item::<f32>()?;
        if i % 40 == 39 {
            println!("step {}: loss {loss:.1}", i + 1);
        }
        assert!(i < 119 || loss < 0.5 * *first.get_or_insert(loss));
        first.get_or_insert(loss);
    }
    let explanation = step.explain();
    println!("{} recompilations, {} breaks", explanation.recompiles.len(), explanation.breaks.len());
    Ok(())
}
