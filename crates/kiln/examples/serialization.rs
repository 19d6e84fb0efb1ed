//! What to save: the state, which a compiled model and its original have in common, and never the compiled code.
//!
//! `cargo run --example serialization -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln::nn::{Linear, ReLU, safetensors, seq, torch_file};
use kiln::prelude::*;

/// The example.
pub fn main() -> kiln::Result<()> {
    let folder = std::env::temp_dir().join(format!("kiln-serialization-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| kiln::Error::State(error.to_string()))?;
    let path = |name: &str| folder.join(name);
    let read = |name: &str| std::fs::read(path(name)).unwrap_or_default();

    manual_seed(0);
    let model = seq![Linear::new(4, 8)?, ReLU, Linear::new(8, 2)?];
    let compiled = (&model).compile();
    let x = Tensor::ones([1, 4], &Device::Cpu)?;
    let y = compiled.forward(&x)?.to_vec::<f32>()?;

    // The state is the same, name by name and byte by byte.
    safetensors::save(&model.state_dict(), path("model.safetensors"))?;
    safetensors::save(&compiled.state_dict(), path("compiled.safetensors"))?;
    println!("{}", compiled.state_dict().names().collect::<Vec<_>>().join(", "));
    println!("the same file: {}", read("model.safetensors") == read("compiled.safetensors"));

    // A new model, compiled or not, loads it; so does PyTorch, from its own format.
    let other = seq![Linear::new(4, 8)?, ReLU, Linear::new(8, 2)?].compile();
    println!("{}", other.load_state_dict(&safetensors::load(path("compiled.safetensors"))?, true)?);
    println!("the same results: {}", other.forward(&x)?.to_vec::<f32>()? == y);
    torch_file::save(&compiled.state_dict(), path("model.pt"))?;
    println!("from model.pt: {}", torch_file::load(path("model.pt"))?.len());

    std::fs::remove_dir_all(&folder).map_err(|error| kiln::Error::State(error.to_string()))
}
