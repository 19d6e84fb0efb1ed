//! A training step with two mistakes in it, and what `explain()` says about them.
//!
//! `cargo run --example explain -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::nn::Linear;
use kiln::prelude::*;

#[derive(Module)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Forward for Mlp {
    type Output = Tensor;
    fn forward(&self, x: &Tensor) -> kiln::Result<Tensor> {
        let hidden = self.first.forward(x)?.gelu()?.detach()?; // cut off: the first layer learns nothing
        self.second.forward(&hidden)
    }
}

/// The example.
pub fn main() -> kiln::Result<()> {
    let model = Mlp { first: Linear::new(64, 128)?, second: Linear::new(128, 10)? };
    let opt = optim::SGD::new(model.parameters(), 0.1)?;
    let (x, y) = (Tensor::ones([32, 64], &Device::Cpu)?, Tensor::zeros([32, 10], &Device::Cpu)?);
    let step = Compile::new().name("step").function(|| {
        opt.zero_grad();
        let loss = model.forward(&x)?.mse_loss(&y, Reduction::Mean)?;
        loss.backward()?;
        if loss.item::<f32>()?.is_nan() {
            // the value is needed here: the graph breaks
            return Err(kiln::Error::State("the loss is not a number".into()));
        }
        opt.step()
    });
    step()?;
    step()?;
    let explanation = step.explain();
    assert_eq!(explanation.without_gradient(), ["first.bias", "first.weight"]);
    assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (2, 1));
    print!("{explanation}");
    Ok(())
}
