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
//!
//! | feature, on by default | what it is |
//! |---|---|
//! | `models` | `kiln::models`: models everybody knows |
//! | `data` | `kiln::data` and `kiln::training`: data loaders, checkpoints, histories, plots |
//! | `torch-files` | `kiln::nn::torch_file`: files of `torch.save` |

pub mod benchmark;
mod module;

pub use kiln_dynamo::{
    Backend, Break, Call, Callable, Change, ChosenBackend, Compilable, Compile, Compiled, CompiledGraph,
    Counters, CustomBackend, Difference, Every, Explanation, Forbidden, GraphContext, GraphInfo, GraphKind,
    GraphValue, GuardInfo, Level, Mode, NotCompiled, Numerics, OptLevel, OptimizationLevel, OptionInfo,
    OutputRole, Progress, Reason, Recompile, Refusal, Region, Scan, Settings, SizesInfo, Stance, StanceGuard,
    StepInfo, Tree, compile, counters, explain, is_compiling, list_backends, list_options, on_progress,
    register_backend, reset, run_graph, run_graph_with, run_node, scan, set_process_stance, set_stance,
    stance, while_loop,
};
pub use kiln_ir::{Graph, NoDevice};
#[cfg(feature = "models")]
pub use kiln_models as models;
pub use kiln_nn as nn;
pub use kiln_nn::optim;
pub use kiln_tensor::{
    Attention, BatchNorm, Context, ConvTranspose, CrossEntropy, CustomOp, DType, Device, Ellipsis, Error,
    Expr, Function, GradOptions, IndexOp, Indexer, Interpolation, NewAxis, Padding, Pool, Reduction, Resize,
    Result, RngState, Rows, Scalar, ScatterReduce, Shape, Tensor, TensorList, TensorOptions, backward_all,
    bf16, detect_anomaly, enable_grad, f16, foreach, get_rng_state, grad, manual_seed, no_grad,
    set_rng_state,
};
#[cfg(feature = "data")]
pub use kiln_training as training;
#[cfg(feature = "data")]
pub use kiln_training::data;

pub use module::{CompileModule, CompiledModule};

/// Graphs and the ops they are made of: for backends, and for who reads what was captured.
pub mod ir {
    pub use kiln_ir::{
        Approximate, Attribute, Body, Class, Custom, DType, Def, Device, Dims, Division, Domain, Emit,
        EmitExt, Error, Grad, GradCall, Graph, Layout, Line, ListTy, Loc, Node, Op, OpError, Order, Pairs,
        Reduction, Refuses, Result, Row, Sample, SampleArg, Scalar, ScalarKind, ScatterReduce, Shape, Sizes,
        Stage, Strides, TensorTy, Ty, Tys, Value, Values, VerifyError, Why, Write, bf16, f16,
    };
}

/// Tensors, and all that their methods take and give.
pub mod tensor {
    pub use kiln_tensor::autograd::GradMode;
    pub use kiln_tensor::foreach::ListOperand;
    pub use kiln_tensor::hook::{Arg, Output};
    pub use kiln_tensor::{
        AnomalyMode, Approximate, Attention, BatchNorm, Context, ConvTranspose, CrossEntropy, CustomOp,
        CustomOpBuilder, DType, Device, DynamicDim, Element, Ellipsis, Error, Expr, ExprEndsWithOk, Function,
        GradOptions, HookHandle, IndexOp, Indexer, Integer, Interpolation, IntoDims, IntoShape, IntoSizes,
        Nested, NewAxis, Operand, Padding, Pool, Reduction, Resize, Result, RngState, Rows, Scalar,
        ScatterReduce, Shape, Tensor, TensorList, TensorOptions, Unique, backward_all, bf16, detect_anomaly,
        enable_grad, f16, foreach, get_rng_state, grad, grad_enabled, manual_seed, no_grad, run_op,
        run_op_in_place, set_rng_state,
    };
}

/// The machine that Kiln runs on: its instructions, C compiler, threads and memory.
pub mod runtime {
    pub use kiln_runtime::{CcError, Compiler, Isa, Machine, Sanitize, machine};

    /// The memory behind tensors: blocks that are kept and handed out again.
    pub mod pool {
        pub use kiln_runtime::pool::{Stats, clear, machine_bytes, reset_peak, stats};
    }

    /// The one thread pool.
    pub mod threads {
        pub use kiln_runtime::threads::{count, set_count};
    }
}

/// Programs that fail, saved as text: run again, made smaller, and the compiler's stage named that is wrong.
///
/// ```
/// use kiln::repro::{Case, reproduce};
/// let case = Case::from_text("x: f32[3]\ny = exp(x)\nlive y\ndata x 0.0 1.0 2.0", &[])?;
/// assert_eq!(reproduce(&case)?, None); // compiled as eager
/// # Ok::<(), kiln::Error>(())
/// ```
pub mod repro {
    pub use kiln_dynamo::{Failure, Found, Rung, bisect, investigate, reproduce, reproduce_apart};
    pub use kiln_repro::{Case, Input, Progress, Value, rust_program};
}

/// Everything a program usually needs.
pub mod prelude {
    #[cfg(feature = "data")]
    pub use crate::data::{self, DataLoader, Dataset, TensorDataset};
    pub use crate::nn::{self, Forward, Module};
    pub use crate::optim::{self, Optimizer};
    pub use crate::{
        Backend, Compile, CompileModule, DType, Device, Ellipsis, IndexOp, Mode, NewAxis, Reduction, Shape,
        Tensor, TensorList, compile, foreach, manual_seed, no_grad,
    };
}

/// The programs in the README are tests.
#[cfg(all(doctest, feature = "models", feature = "data", feature = "torch-files"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So are those in the guide to `compile()`,
#[cfg(all(doctest, feature = "models", feature = "data", feature = "torch-files"))]
#[doc = include_str!("../../../docs/compile.md")]
struct Guide;

/// in the training guide,
#[cfg(all(doctest, feature = "models", feature = "data", feature = "torch-files"))]
#[doc = include_str!("../../../docs/training.md")]
struct TrainingGuide;

/// on the page about wrong results,
#[cfg(all(doctest, feature = "models", feature = "data", feature = "torch-files"))]
#[doc = include_str!("../../../docs/debugging.md")]
struct DebuggingPage;

/// and on the numerics page.
#[cfg(all(doctest, feature = "models", feature = "data", feature = "torch-files"))]
#[doc = include_str!("../../../docs/numerics.md")]
struct NumericsPage;
