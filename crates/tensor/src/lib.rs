//! Kiln's eager tensors: views, kernels, dispatch with the recorder hook, autograd and random numbers.
//!
//! Every public entry passes [`hook`] first; while a recorder is set on the thread, ops are handed to it.
//! This crate knows nothing of what a recorder does with them.

pub mod autograd;
mod create;
mod dense;
mod dispatch;
mod eager;
mod expr;
pub mod foreach;
mod handle;
pub mod hook;
mod host;
mod indexing;
mod kernels;
mod list;
mod methods;
mod nested;
mod picking;
mod print;
pub mod program;
pub mod random;
mod shaping;
pub mod storage;
mod tensor;

pub use autograd::{enable_grad, grad_enabled, no_grad};
pub use dispatch::{check_in_place, execute, run_op, with_module};
pub use expr::Expr;
pub use host::Element;
pub use indexing::{Ellipsis, IndexOp, Indexer, NewAxis};
pub use kiln_ir::{Approximate, DType, Device, Error, Reduction, Result, Scalar, ScatterReduce, Shape};
pub use list::TensorList;
pub use methods::{IntoDims, IntoShape, Operand};
pub use nested::Nested;
pub use random::manual_seed;
pub use tensor::{Ready, Tensor};
