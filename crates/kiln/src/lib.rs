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
mod module;

pub use kiln_dynamo::{
    Backend, Break, Call, ChosenBackend, Compilable, Compile, Compiled, CompiledGraph, Counters,
    CustomBackend, Explanation, GraphContext, GraphInfo, GraphKind, GraphValue, GuardInfo, Level, Mode,
    NotCompiled, Numerics, OptLevel, OptimizationLevel, OptionInfo, OutputRole, Progress, Recompile, Refusal,
    Region, Settings, SizesInfo, Stance, StanceGuard, StepInfo, compile, counters, explain, is_compiling,
    list_backends, list_options, on_progress, register_backend, reset, run_graph, run_graph_with, run_node,
    set_process_stance, set_stance, stance,
};
pub use kiln_ir as ir;
pub use kiln_ir::Graph;
pub use kiln_models as models;
pub use kiln_nn as nn;
pub use kiln_nn::{data, optim, training};
pub use kiln_runtime as runtime;
pub use kiln_tensor as tensor;
pub use kiln_tensor::{
    Attention, BatchNorm, Context, ConvTranspose, CrossEntropy, DType, Device, Ellipsis, Error, Expr,
    Function, GradOptions, IndexOp, Indexer, Interpolation, NewAxis, Padding, Pool, Reduction, Resize,
    Result, RngState, Rows, Scalar, ScatterReduce, Shape, Tensor, TensorList, TensorOptions, backward_all,
    bf16, detect_anomaly, enable_grad, f16, foreach, get_rng_state, grad, manual_seed, no_grad,
    set_rng_state,
};

pub use module::{CompileModule, CompiledModule};

/// Everything a program usually needs.
pub mod prelude {
    pub use crate::data::{self, DataLoader, Dataset, TensorDataset};
    pub use crate::nn::{self, Forward, Module};
    pub use crate::optim::{self, Optimizer};
    pub use crate::{
        Backend, Compile, CompileModule, DType, Device, Ellipsis, IndexOp, Mode, NewAxis, Reduction, Shape,
        Tensor, TensorList, compile, foreach, manual_seed, no_grad,
    };
}

/// The programs in the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So are those in the guide to `compile()`,
#[cfg(doctest)]
#[doc = include_str!("../../../docs/compile.md")]
struct Guide;

/// in the training guide,
#[cfg(doctest)]
#[doc = include_str!("../../../docs/training.md")]
struct TrainingGuide;

/// and on the numerics page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/numerics.md")]
struct NumericsPage;
