//! A model, compiled: the first call compiles it, later ones run it.
//!
//! `cargo run --example simple_model -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let model = nn::Linear::new(10, 1)?;
    let compiled = (&model).compile();

    let x = Tensor::randn([5, 10], &Device::Cpu)?;
    let y = compiled.forward(&x)?;
    println!("{y}");
    assert_eq!(y.to_vec::<f32>()?, model.forward(&x)?.to_vec::<f32>()?);
    Ok(())
}
