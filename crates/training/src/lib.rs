//! What a training loop needs besides the loop: batches of data ([`data`]), checkpoints, metric histories, plots, and a
//! meter.
//!
//! ```
//! use kiln_training::{Checkpoint, History, Meter, Plot, Position};
//! use kiln_nn::{Forward, Linear, Module, optim::{AdamW, Optimizer}};
//! use kiln_tensor::{Device, Tensor};
//!
//! # fn main() -> kiln_tensor::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kiln-training-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).expect("a folder");
//! let model = Linear::new(4, 1)?;
//! let optimizer = AdamW::new(model.parameters(), 0.1)?;
//! let x = Tensor::randn([16, 4], &Device::Cpu)?;
//!
//! let mut history = History::new(["step", "loss"]);
//! let mut meter = Meter::new("samples").steps(20);
//! for step in 1..=20 {
//!     optimizer.zero_grad();
//!     let loss = model.forward(&x)?.pow(2.0)?.mean()?;
//!     loss.backward()?;
//!     optimizer.step()?;
//!     history.push([Some(f64::from(step)), Some(loss.item()?)]);
//!     meter.step(16); // shown as `20/20, 41.3 k samples/s`
//! }
//! let checkpoint = Checkpoint::of(&model).optimizer(&optimizer);
//! checkpoint.save(folder.join("checkpoint.safetensors"), &Position { step: 20, ..Position::default() })?;
//! history.save_csv(folder.join("metrics.csv"))?;
//! Plot::new("A small model").labels("step", "loss").line("training", history.curve("loss")).save(folder.join("loss.svg"))?;
//! # std::fs::remove_dir_all(&folder).expect("the folder");
//! # Ok(()) }
//! ```

/// The folder of this crate's sources, as locations name it.
pub(crate) fn folder() -> &'static str {
    file!().strip_suffix("lib.rs").unwrap_or(file!())
}

mod checkpoint;
pub mod data;
mod error;
mod history;
mod meter;
mod plot;

pub use checkpoint::{Checkpoint, Position, Stateful};
pub use error::{Error, Fault};
pub use history::History;
pub use meter::Meter;
pub use plot::Plot;
