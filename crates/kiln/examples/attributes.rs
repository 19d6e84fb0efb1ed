//! A compiled model is still that model: what is changed on one is seen by the other.
//!
//! `cargo run --example attributes -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use std::sync::atomic::{AtomicBool, Ordering};

use kiln::nn::{Conv2d, Linear};
use kiln::prelude::*;

#[derive(Module)]
struct Net {
    conv1: Conv2d,
    fc: Linear,
    #[module(skip)]
    double: AtomicBool,
}

impl Forward for Net {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> kiln::Result<Tensor> {
        let y = self.fc.forward(&self.conv1.forward(x)?.relu()?.flatten_dims(1, -1)?)?;
        if self.double.load(Ordering::Relaxed) { y.mul(2.0) } else { Ok(y) }
    }
}

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let x = Tensor::ones([1, 1, 4, 4], &Device::Cpu)?;
    let net = Net { conv1: Conv2d::new(1, 2, 3)?, fc: Linear::new(8, 1)?, double: AtomicBool::new(false) };
    let model = (&net).compile();
    let before = model.forward(&x)?.item::<f32>()?;

    // A weight changed in place on the compiled model is the original's weight.
    let guard = no_grad();
    model.conv1.weight.fill_(0.01)?;
    drop(guard);
    let after = model.forward(&x)?.item::<f32>()?;
    println!("the original's weight: {}", net.conv1.weight.max()?.item::<f32>()?);
    println!(
        "the next call sees it: {}, as the original does: {}",
        after != before,
        after == net.forward(&x)?.item::<f32>()?
    );

    // A flag is host code, which runs on every call.
    net.double.store(true, Ordering::Relaxed);
    println!("doubled: {}", model.forward(&x)?.item::<f32>()? == 2.0 * after);

    // A layer replaced: the next call is recorded with the new one.
    let mut model = net.compile();
    println!("before: {:?}", model.forward(&x)?.shape().to_vec());
    model.fc = Linear::new(8, 3)?;
    println!("after: {:?}", model.forward(&x)?.shape().to_vec());
    Ok(())
}
