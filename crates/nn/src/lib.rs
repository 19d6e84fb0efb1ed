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
mod attention;
mod clip;
mod container;
mod conv;
mod display;
mod dropout;
mod embedding;
mod excitation;
mod field;
mod files;
mod forward;
pub mod functional;
mod hooks;
pub mod init;
#[doc(hidden)]
pub mod internal;
mod linear;
mod loss;
mod module;
mod norm;
pub mod optim;
mod options;
mod packed;
mod parameter;
mod pooling;
mod recurrent;
pub mod safetensors;
mod sequential;
mod shaping;
pub mod state;
#[cfg(feature = "torch-files")]
pub mod torch_file;
mod transformer;

pub use activation::{
    CELU, ELU, GLU, Gelu, Gelu as GELU, Hardshrink, Hardsigmoid, Hardswish, Hardtanh, Identity, LeakyReLU,
    LogSigmoid, LogSoftmax, Mish, PReLU, PReLUOptions, RReLU, ReLU6, Relu, Relu as ReLU, SELU, SiLU, Sigmoid,
    Softmax, Softmin, Softplus, Softshrink, Softsign, Tanh, Tanhshrink, Threshold,
};
pub use attention::{AttentionCall, MultiheadAttention, MultiheadAttentionOptions, OutProjection};
pub use clip::{ClipNorm, clip_grad_norm_, clip_grad_value_, get_total_norm};
pub use container::{ModuleDict, ModuleList};
pub use conv::{
    Conv1d, Conv2d, ConvOptions, ConvTranspose1d, ConvTranspose2d, ConvTransposeOptions, PaddingMode,
};
pub use display::fmt_module;
pub use dropout::{Dropout, Dropout1d, Dropout2d, StochasticDepth};
pub use embedding::{Embedding, EmbeddingOptions};
pub use excitation::SqueezeExcitation;
pub use field::Field;
pub use forward::{Forward, Layer};
pub use hooks::{ForwardHook, Hooked, Hooks};
pub use kiln_nn_derive::Module;
pub use kiln_tensor::{Approximate, Reduction};
pub use linear::{Linear, LinearOptions};
pub use loss::{
    BCELoss, BCEWithLogitsLoss, CosineEmbeddingLoss, CrossEntropyLoss, HingeEmbeddingLoss, HuberLoss,
    KLDivLoss, L1Loss, MSELoss, MarginRankingLoss, NllLoss, NllLoss as NLLLoss, PoissonNLLLoss, SmoothL1Loss,
    SoftMarginLoss, TripletMarginLoss,
};
pub use module::{Module, Visitor};
pub use norm::{
    BatchNorm1d, BatchNorm1dOptions, BatchNorm2d, BatchNorm2dOptions, GroupNorm, GroupNormOptions, LayerNorm,
    LayerNorm2d, LayerNorm2dOptions, LayerNormOptions, RMSNorm, RMSNormOptions,
};
pub use packed::{PackedSequence, pack_padded_sequence, pad_packed_sequence};
pub use parameter::{Buffer, Parameter, Training};
pub use pooling::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, PoolOptions,
};
pub use recurrent::{GRU, LSTM, Nonlinearity, RNN, RecurrentOptions};
pub use sequential::{IntoLayer, Sequential};
pub use shaping::{CosineSimilarity, Flatten, Permute, PixelShuffle, PixelUnshuffle, Unflatten, Upsample};
pub use state::{LoadReport, Mismatch, StateDict};
pub use transformer::{
    Masks, TransformerActivation, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer, TransformerOptions,
};
