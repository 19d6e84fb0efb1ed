//! Kiln is `torch.compile`, built in Rust: write ordinary eager tensor code, wrap it in one call, and get the
//! same results, faster.
//!
//! ```
//! use kiln::prelude::*;
//!
//! # fn main() -> kiln::Result<()> {
//! let dev = Device::best();
//! let linear = nn::Linear::options().bias(false).device(&dev);
//! let model = nn::Sequential::from_iter((0..3).map(|_| linear.build(16, 16)))?;
//! model.forward(&Tensor::rand([16], &dev)?)?.sum()?.backward()?;
//!
//! let opt = optim::Adam::new(model.parameters(), 0.01)?;
//! let step = kiln::compile(|| opt.step());
//! step()?; // captured, compiled and run
//! step()?; // checked and run
//! println!("{}", step.explain());
//! # Ok(()) }
//! ```

pub mod benchmark;

pub use kiln_dynamo::{
    Backend, Break, Compilable, Compile, Compiled, Explanation, GraphInfo, Mode, Recompile, Region, compile,
    reset,
};
pub use kiln_ir as ir;
pub use kiln_nn as nn;
pub use kiln_nn::optim;
pub use kiln_runtime as runtime;
pub use kiln_tensor as tensor;
pub use kiln_tensor::{
    DType, Device, Ellipsis, Error, Expr, IndexOp, Indexer, NewAxis, Reduction, Result, Scalar,
    ScatterReduce, Shape, Tensor, TensorList, bf16, enable_grad, f16, foreach, manual_seed, no_grad,
};

/// Everything a program usually needs.
pub mod prelude {
    pub use crate::nn::{self, Forward, Module};
    pub use crate::optim::{self, Optimizer};
    pub use crate::{
        Compile, DType, Device, Ellipsis, IndexOp, Mode, NewAxis, Reduction, Shape, Tensor, TensorList,
        compile, foreach, manual_seed, no_grad,
    };
}

/// The programs of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
