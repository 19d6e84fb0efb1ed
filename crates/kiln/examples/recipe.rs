//! An optimizer's step, compiled: the recipe "(beta) Compiling the optimizer with torch.compile".
//!
//! `cargo run --release --example recipe -p kiln -- adamw`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::prelude::*;

fn optimizer(name: &str, parameters: Vec<Tensor>) -> kiln::Result<Box<dyn Optimizer>> {
    Ok(match name {
        "sgd" => Box::new(optim::SGD::options().lr(0.01).momentum(0.9).build(parameters)?),
        "adam" => Box::new(optim::Adam::new(parameters, 0.01)?),
        "adamw" => Box::new(optim::AdamW::new(parameters, 0.01)?),
        "nadam" => Box::new(optim::NAdam::new(parameters, 0.01)?),
        "radam" => Box::new(optim::RAdam::new(parameters, 0.01)?),
        "adamax" => Box::new(optim::Adamax::new(parameters, 0.01)?),
        "adagrad" => Box::new(optim::Adagrad::new(parameters, 0.01)?),
        "adadelta" => Box::new(optim::Adadelta::new(parameters, 0.01)?),
        "rmsprop" => Box::new(optim::RMSprop::new(parameters, 0.01)?),
        other => return Err(kiln::Error::State(format!("no optimizer `{other}`"))),
    })
}

/// The example.
pub fn main() -> kiln::Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "adam".into());
    let device = Device::best();
    let linear = nn::Linear::options().bias(false).device(&device);
    let model = nn::Sequential::from_iter((0..10).map(|_| linear.build(256, 256)))?;
    model.forward(&Tensor::rand([256], &device)?)?.sum()?.backward()?;

    let opt = optimizer(&name, model.parameters())?;
    let step = kiln::compile(|| opt.step());
    for _ in 0..3 {
        step()?; // the first call compiles
    }

    let explanation = step.explain();
    let graphs = explanation.graphs.len();
    println!(
        "{name}: {} parameters, {graphs} graph, {} kernel",
        model.parameters().len(),
        explanation.kernels()
    );
    assert_eq!((graphs, explanation.breaks.len()), (1, 0), "{explanation}");
    Ok(())
}
