//! Modules, losses, initialisers and optimizers, by PyTorch's names and with PyTorch's numbers.
//!
//! ```
//! use kiln_nn::{Forward, Gelu, Linear, Module, optim::{AdamW, Optimizer}, seq};
//! use kiln_tensor::{Device, Tensor};
//!
//! # fn main() -> kiln_tensor::Result<()> {
//! let model = seq![Linear::new(8, 16)?, Gelu, Linear::new(16, 3)?];
//! let optimizer = AdamW::new(model.parameters(), 1e-3)?;
//! let x = Tensor::randn([4, 8], &Device::Cpu)?;
//! let target = Tensor::from_slice(&[0i64, 2, 1, 1])?;
//!
//! optimizer.zero_grad();
//! let loss = model.forward(&x)?.cross_entropy(&target)?;
//! loss.backward()?;
//! optimizer.step()?;
//! # Ok(()) }
//! ```
//!
//! A model is a struct of layers with `#[derive(Module)]`, which finds parameters, buffers and children by the
//! fields' types, and an impl of [`Forward`]:
//!
//! ```
//! use kiln_nn::{Forward, Gelu, Linear, Module};
//! use kiln_tensor::{Result, Tensor};
//!
//! #[derive(Module)]
//! struct Mlp {
//!     fc1: Linear,
//!     act: Gelu,
//!     fc2: Linear,
//! }
//!
//! impl Forward for Mlp {
//!     type Output = Tensor;
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         let hidden = self.act.forward(&self.fc1.forward(x)?)?;
//!         self.fc2.forward(&hidden)
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let model = Mlp { fc1: Linear::new(4, 8)?, act: Gelu, fc2: Linear::new(8, 2)? };
//! let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
//! assert_eq!(names, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
//! # Ok(()) }
//! ```
//!
//! This crate knows nothing of the compiler: what is written here is captured like any user's program.

/// The folder of this crate's sources, as locations name it.
pub(crate) fn folder() -> &'static str {
    file!().strip_suffix("lib.rs").unwrap_or(file!())
}

// Derived code names this crate by its name, here too.
extern crate self as kiln_nn;

mod activation;
mod display;
mod field;
mod forward;
pub mod functional;
pub mod init;
mod linear;
mod loss;
mod module;
pub mod optim;
mod parameter;
mod sequential;

pub use activation::{Gelu, Identity, LogSoftmax, Relu, Sigmoid, Softmax, Tanh};
pub use display::fmt_module;
pub use field::Field;
pub use forward::{Forward, Layer};
pub use kiln_nn_derive::Module;
pub use kiln_tensor::{Approximate, Reduction};
pub use linear::{Linear, LinearOptions};
pub use loss::{CrossEntropyLoss, NllLoss};
pub use module::{Module, Visitor};
pub use parameter::{Buffer, Parameter, Training};
pub use sequential::{IntoLayer, Sequential};
