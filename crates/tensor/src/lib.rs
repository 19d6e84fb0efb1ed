//! Kiln's eager tensors: views, kernels, dispatch with the recorder hook, autograd and random numbers.
//!
//! Every public entry passes [`hook`] first; while a recorder is set on the thread, ops are handed to it.
//! This crate knows nothing of what a recorder does with them.

/// The folder of this crate's sources, as locations name it.
pub(crate) fn folder() -> &'static str {
    file!().strip_suffix("lib.rs").unwrap_or(file!())
}

mod arguments;
mod attention;
pub mod autograd;
mod bytes;
mod composed;
mod conv;
mod create;
mod custom;
mod dense;
pub mod device;
mod dispatch;
mod dynamic;
mod eager;
mod einsum;
mod expr;
pub mod foreach;
pub mod graph;
mod handle;
pub mod hook;
mod host;
mod indexing;
mod integer_windows;
pub mod internal;
mod kept;
mod kernels;
mod list;
mod loss;
mod matmul;
mod methods;
mod nested;
mod norm;
mod order;
mod picking;
mod pieces;
mod pointwise;
mod pool;
mod print;
pub mod program;
pub mod random;
mod rows;
mod shaping;
pub mod storage;
#[cfg(test)]
mod stress;
mod tensor;

pub use arguments::{Integer, IntoDims, IntoShape, TensorOptions};
pub use attention::Attention;
pub use autograd::{
    AnomalyMode, Context, Function, GradOptions, HookHandle, backward_all, detect_anomaly, enable_grad, grad,
    grad_enabled, no_grad,
};
pub use conv::{ConvTranspose, IntoSizes, Padding};
pub use custom::{CustomOp, CustomOpBuilder};
pub use dispatch::{
    check_in_place, check_in_place_target, check_in_place_types, execute, run_op, run_op_at, run_op_in_place,
    with_module,
};
pub use dynamic::DynamicDim;
pub use eager::{CompileBody, compile_bodies_by};
pub use expr::ExprEndsWithOk;
pub use host::Element;
pub use indexing::{Ellipsis, IndexOp, Indexer, NewAxis};
pub use kept::{Kept, Spare};
pub use kiln_ir::{
    Approximate, DType, Device, Error, Reduction, Result, Scalar, ScatterReduce, Shape, bf16, f16,
};
pub use list::TensorList;
pub use loss::CrossEntropy;
pub use methods::Operand;
pub use nested::Nested;
pub use norm::BatchNorm;
pub use order::Unique;
pub use pool::{Interpolation, Pool, Resize};
pub use random::{RngState, get_rng_state, manual_seed, set_rng_state};
pub use rows::Rows;
pub use tensor::{Ready, Seen, Tensor};

/// What operators give: see [`ExprEndsWithOk`].
pub type Expr = ExprEndsWithOk;
