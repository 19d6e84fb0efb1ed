//! The options of `compile()`: backend, mode, dynamic shapes, one graph or an error, and those of the code.
//!
//! `cargo run --example compile_options -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    println!("backends: {}", kiln::list_backends().join(", "));
    let isa = kiln::list_options().iter().find(|option| option.name == "isa");
    println!("isa: {}", isa.map(|option| option.values).unwrap_or_default());

    let x = Tensor::linspace(-1.0, 1.0, 8, &Device::Cpu)?;
    let wave = |x: &Tensor| x.sin()?.mul(2.0)?.tanh();
    let expected = wave(&x)?.to_vec::<f32>()?;
    let ways = [
        ("default", Compile::new()),
        ("eager backend", Compile::new().backend(Backend::Eager)),
        ("reduce-overhead", Compile::new().mode(Mode::ReduceOverhead)),
        ("max-autotune", Compile::new().mode(Mode::MaxAutotune)),
        ("dynamic", Compile::new().dynamic(true)),
        ("plain code", Compile::new().option("isa", "plain")?),
    ];
    for (name, options) in ways {
        let region = options.region();
        let y = region.run(|| wave(&x))?;
        assert_eq!(y.to_vec::<f32>()?, expected, "{name}");
        println!("{name}: the same results, {} graph", region.explain().graphs.len());
    }

    // With `fullgraph` a graph break is an error that says where and why.
    let whole = Compile::new().fullgraph(true).region();
    let error = whole.run(|| {
        let y = x.exp()?;
        if y.sum()?.item::<f32>()? > 0.0 { y.log() } else { Ok(y) }
    });
    let error = error.err().map(|error| error.to_string()).unwrap_or_default();
    println!("{}", error.lines().next().unwrap_or("no error"));
    Ok(())
}
