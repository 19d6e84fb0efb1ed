//! Other sizes: one graph serves them; kernels are not compiled again.
//!
//! `cargo run --example dynamic_shapes -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::nn::{Gelu, Linear, seq};
use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    manual_seed(0);
    let model = seq![Linear::new(16, 32)?, Gelu, Linear::new(32, 4)?];
    for (name, dynamic) in
        [("by default", None), ("dynamic(true)", Some(true)), ("dynamic(false)", Some(false))]
    {
        let compiled = (&model).compile_with(Compile::new().dynamic(dynamic));
        for batch in [8, 12, 20, 9, 31, 25] {
            let x = Tensor::ones([batch, 16], &Device::Cpu)?;
            assert_eq!(compiled.forward(&x)?.shape().to_vec(), [batch, 4]);
        }
        let explanation = compiled.explain();
        let graphs = explanation.graphs.iter().filter(|graph| graph.resizes.is_none()).count();
        println!("{name}: graphs {graphs}, recompiles {}", explanation.recompiles.len());
        if let Some(sizes) = &explanation.graphs[0].sizes {
            println!("  {}: {}, {} sizes", sizes.symbols[0], sizes.ranges.join("; "), sizes.made);
        }
    }
    Ok(())
}
