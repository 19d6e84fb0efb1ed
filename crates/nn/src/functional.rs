//! The layers' mathematics as plain functions, under PyTorch's names.

use kiln_ir::{Error, Loc, Op, Why};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{Approximate, Reduction, Result, Tensor, run_op};

/// The class whose samples don't count, unless told otherwise.
pub const IGNORE_INDEX: i64 = -100;

/// x · weightᵀ + bias, over the last dim.
#[track_caller]
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    x.linear(weight, bias)
}

/// max(x, 0)
#[track_caller]
pub fn relu(x: &Tensor) -> Result<Tensor> {
    x.relu()
}

/// x · Φ(x), by the error function or by tanh.
#[track_caller]
pub fn gelu(x: &Tensor, approximate: Approximate) -> Result<Tensor> {
    match approximate {
        Approximate::None => x.gelu(),
        Approximate::Tanh => x.gelu_tanh(),
    }
}

/// Hyperbolic tangent.
#[track_caller]
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    x.tanh()
}

/// 1 / (1 + e⁻ˣ)
#[track_caller]
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    x.sigmoid()
}

/// exp(x) / Σ exp(x) along a dim.
#[track_caller]
pub fn softmax(x: &Tensor, dim: i64) -> Result<Tensor> {
    x.softmax(dim)
}

/// x − log Σ exp(x) along a dim.
#[track_caller]
pub fn log_softmax(x: &Tensor, dim: i64) -> Result<Tensor> {
    x.log_softmax(dim)
}

/// The mean cross-entropy of scores `[samples, classes]` and class numbers `[samples]`.
#[track_caller]
pub fn cross_entropy(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    input.cross_entropy(target)
}

/// Cross-entropy with all options.
#[track_caller]
pub fn cross_entropy_with(
    input: &Tensor,
    target: &Tensor,
    reduction: Reduction,
    ignore_index: i64,
) -> Result<Tensor> {
    input.cross_entropy_with(target, reduction, ignore_index)
}

/// The mean of `−input[i, target[i]]` for log-probabilities `[samples, classes]` and class numbers `[samples]`.
#[track_caller]
pub fn nll_loss(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    input.nll_loss(target, Reduction::Mean)
}

/// [`nll_loss`] with all options.
#[track_caller]
pub fn nll_loss_with(
    input: &Tensor,
    target: &Tensor,
    reduction: Reduction,
    ignore_index: i64,
) -> Result<Tensor> {
    let op = Op::NllLoss { reduction, ignore_index };
    match run_op(&op, &[Arg::Tensor(input), Arg::Tensor(target)])? {
        Output::Tensor(loss) => Ok(loss),
        Output::List(_) => {
            let why = Why::Operand { argument: "every operand", expected: "a tensor" };
            Err(Error::op(op.name(), why, Loc::caller()))
        }
    }
}
