//! The layers' mathematics as plain functions, under PyTorch's names.

use kiln_ir::{Error, Loc, Op, Why};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{
    Approximate, Attention, BatchNorm, ConvTranspose, CrossEntropy, Interpolation, IntoSizes, Padding, Pool,
    Reduction, Resize, Result, Tensor, run_op,
};

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

/// Cross-correlation of `[n, c, length]` with filters `[o, c / groups, size]`.
#[track_caller]
pub fn conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: impl IntoSizes<1>,
    padding: impl Into<Padding<1>>,
    dilation: impl IntoSizes<1>,
    groups: usize,
) -> Result<Tensor> {
    x.conv1d(weight, bias, stride, padding, dilation, groups)
}

/// Cross-correlation of `[n, c, height, width]` with filters `[o, c / groups, height, width]`.
#[track_caller]
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: impl IntoSizes<2>,
    padding: impl Into<Padding<2>>,
    dilation: impl IntoSizes<2>,
    groups: usize,
) -> Result<Tensor> {
    x.conv2d(weight, bias, stride, padding, dilation, groups)
}

/// Transposed convolution of `[n, c, length]` with filters `[c, o / groups, size]`.
#[track_caller]
pub fn conv_transpose1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvTranspose<1>,
) -> Result<Tensor> {
    x.conv_transpose1d(weight, bias, options)
}

/// Transposed convolution of `[n, c, height, width]` with filters `[c, o / groups, height, width]`.
#[track_caller]
pub fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvTranspose<2>,
) -> Result<Tensor> {
    x.conv_transpose2d(weight, bias, options)
}

/// The largest element of each window.
#[track_caller]
pub fn max_pool2d(x: &Tensor, pool: Pool<2>) -> Result<Tensor> {
    x.max_pool2d(pool)
}

/// The largest element of each window of `[n, c, length]`.
#[track_caller]
pub fn max_pool1d(x: &Tensor, pool: Pool<1>) -> Result<Tensor> {
    x.max_pool1d(pool)
}

/// The mean of each window.
#[track_caller]
pub fn avg_pool2d(x: &Tensor, pool: Pool<2>) -> Result<Tensor> {
    x.avg_pool2d(pool)
}

/// The mean of each window of `[n, c, length]`.
#[track_caller]
pub fn avg_pool1d(x: &Tensor, pool: Pool<1>) -> Result<Tensor> {
    x.avg_pool1d(pool)
}

/// The means of as many windows as give a result of this size.
#[track_caller]
pub fn adaptive_avg_pool2d(x: &Tensor, output: impl IntoSizes<2>) -> Result<Tensor> {
    x.adaptive_avg_pool2d(output)
}

/// Resized to another height and width, or by a factor.
#[track_caller]
pub fn interpolate(x: &Tensor, to: impl Into<Resize>, mode: Interpolation) -> Result<Tensor> {
    x.interpolate(to, mode)
}

/// (x − mean) / √(variance + eps) over the last dims, of this shape, times weight plus bias.
#[track_caller]
pub fn layer_norm(
    x: &Tensor,
    shape: &[usize],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    x.layer_norm(shape, weight, bias, eps)
}

/// x / √(mean of x² + eps) over the last dims, of this shape, times weight.
#[track_caller]
pub fn rms_norm(x: &Tensor, shape: &[usize], weight: Option<&Tensor>, eps: Option<f64>) -> Result<Tensor> {
    x.rms_norm(shape, weight, eps)
}

/// (x − mean) / √(variance + eps) over groups of channels of each sample, times weight plus bias.
#[track_caller]
pub fn group_norm(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    x.group_norm(groups, weight, bias, eps)
}

/// Normalises each channel by the batch's statistics in training, by the running ones otherwise.
#[track_caller]
pub fn batch_norm(x: &Tensor, options: BatchNorm<'_>) -> Result<Tensor> {
    x.batch_norm(options)
}

/// Each element zero with probability `p`, the others scaled up; as it is when not training.
#[track_caller]
pub fn dropout(x: &Tensor, p: f64, training: bool) -> Result<Tensor> {
    x.dropout(p, training)
}

/// softmax(q · kᵀ · scale + mask) · v.
#[track_caller]
pub fn scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: Attention<'_>,
) -> Result<Tensor> {
    query.scaled_dot_product_attention(key, value, options)
}

/// The first half along a dim, gated by the sigmoid of the second.
#[track_caller]
pub fn glu(x: &Tensor, dim: i64) -> Result<Tensor> {
    x.glu(dim)
}

/// x · y / (max(|x|, eps) · max(|y|, eps)) along a dim.
#[track_caller]
pub fn cosine_similarity(x: &Tensor, y: &Tensor, dim: i64, eps: f64) -> Result<Tensor> {
    x.cosine_similarity(y, dim, eps)
}

/// Cross-entropy with class weights, label smoothing and probability targets.
#[track_caller]
pub fn cross_entropy_of(input: &Tensor, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
    input.cross_entropy_of(target, options)
}

/// [`nll_loss`] with class weights, over inputs of any rank.
#[track_caller]
pub fn nll_loss_of(input: &Tensor, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
    input.nll_loss_with(target, options)
}

/// (input − target)²
#[track_caller]
pub fn mse_loss(input: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    input.mse_loss(target, reduction)
}

/// |input − target|
#[track_caller]
pub fn l1_loss(input: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    input.l1_loss(target, reduction)
}

/// The absolute difference, bent to a square below beta.
#[track_caller]
pub fn smooth_l1_loss(input: &Tensor, target: &Tensor, beta: f64, reduction: Reduction) -> Result<Tensor> {
    input.smooth_l1_loss(target, beta, reduction)
}

/// Half the square of the difference, straight beyond delta.
#[track_caller]
pub fn huber_loss(input: &Tensor, target: &Tensor, delta: f64, reduction: Reduction) -> Result<Tensor> {
    input.huber_loss(target, delta, reduction)
}

/// Binary cross-entropy of probabilities.
#[track_caller]
pub fn binary_cross_entropy(
    input: &Tensor,
    target: &Tensor,
    weight: Option<&Tensor>,
    reduction: Reduction,
) -> Result<Tensor> {
    input.binary_cross_entropy(target, weight, reduction)
}

/// Binary cross-entropy of scores.
#[track_caller]
pub fn binary_cross_entropy_with_logits(
    input: &Tensor,
    target: &Tensor,
    weight: Option<&Tensor>,
    pos_weight: Option<&Tensor>,
    reduction: Reduction,
) -> Result<Tensor> {
    input.binary_cross_entropy_with_logits(target, weight, pos_weight, reduction)
}

/// target · (log target − input) for log-probabilities.
#[track_caller]
pub fn kl_div(input: &Tensor, target: &Tensor, log_target: bool, reduction: Reduction) -> Result<Tensor> {
    input.kl_div(target, log_target, reduction)
}
