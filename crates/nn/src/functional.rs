//! The layers' mathematics as plain functions, under PyTorch's names.

use kiln_ir::{Error, Loc, Op, Why};
use kiln_tensor::hook::{Arg, Output};
use kiln_tensor::{
    Approximate, Attention, BatchNorm, ConvTranspose, CrossEntropy, Interpolation, IntoSizes, Padding, Pool,
    Reduction, Resize, Result, Tensor, run_op,
};

/// The class whose samples don't count, unless told otherwise.
pub const IGNORE_INDEX: i64 = -100;

/// Methods of their first operand, as functions.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($x:ident $(, $arg:ident: $ty:ty)*);)*) => {
        $($(#[$doc])*
        #[track_caller]
        pub fn $name($x: &Tensor $(, $arg: $ty)*) -> Result<Tensor> {
            $x.$name($($arg),*)
        })*
    };
}

functions! {
    /// x · weightᵀ + bias, over the last dim.
    fn linear(x, weight: &Tensor, bias: Option<&Tensor>);
    /// max(x, 0)
    fn relu(x);
    /// Hyperbolic tangent.
    fn tanh(x);
    /// 1 / (1 + e⁻ˣ)
    fn sigmoid(x);
    /// exp(x) / Σ exp(x) along a dim.
    fn softmax(x, dim: i64);
    /// x − log Σ exp(x) along a dim.
    fn log_softmax(x, dim: i64);
    /// The mean cross-entropy of scores `[samples, classes]` and class numbers `[samples]`.
    fn cross_entropy(input, target: &Tensor);
    /// Cross-entropy with all options.
    fn cross_entropy_with(input, target: &Tensor, reduction: Reduction, ignore_index: i64);
    /// Cross-correlation of `[n, c, length]` with filters `[o, c / groups, size]`.
    fn conv1d(
        x,
        weight: &Tensor,
        bias: Option<&Tensor>,
        stride: impl IntoSizes<1>,
        padding: impl Into<Padding<1>>,
        dilation: impl IntoSizes<1>,
        groups: usize
    );
    /// Cross-correlation of `[n, c, height, width]` with filters `[o, c / groups, height, width]`.
    fn conv2d(
        x,
        weight: &Tensor,
        bias: Option<&Tensor>,
        stride: impl IntoSizes<2>,
        padding: impl Into<Padding<2>>,
        dilation: impl IntoSizes<2>,
        groups: usize
    );
    /// Transposed convolution of `[n, c, length]` with filters `[c, o / groups, size]`.
    fn conv_transpose1d(x, weight: &Tensor, bias: Option<&Tensor>, options: ConvTranspose<1>);
    /// Transposed convolution of `[n, c, height, width]` with filters `[c, o / groups, height, width]`.
    fn conv_transpose2d(x, weight: &Tensor, bias: Option<&Tensor>, options: ConvTranspose<2>);
    /// The largest element of each window.
    fn max_pool2d(x, pool: Pool<2>);
    /// The largest element of each window of `[n, c, length]`.
    fn max_pool1d(x, pool: Pool<1>);
    /// The mean of each window.
    fn avg_pool2d(x, pool: Pool<2>);
    /// The mean of each window of `[n, c, length]`.
    fn avg_pool1d(x, pool: Pool<1>);
    /// The means of as many windows as give a result of this size.
    fn adaptive_avg_pool2d(x, output: impl IntoSizes<2>);
    /// Resized to another height and width, or by a factor.
    fn interpolate(x, to: impl Into<Resize>, mode: Interpolation);
    /// (x − mean) / √(variance + eps) over the last dims, of this shape, times weight plus bias.
    fn layer_norm(x, shape: &[usize], weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64);
    /// x / √(mean of x² + eps) over the last dims, of this shape, times weight.
    fn rms_norm(x, shape: &[usize], weight: Option<&Tensor>, eps: Option<f64>);
    /// (x − mean) / √(variance + eps) over groups of channels of each sample, times weight plus bias.
    fn group_norm(x, groups: usize, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64);
    /// Normalises each channel by the batch's statistics in training, by the running ones otherwise.
    fn batch_norm(x, options: BatchNorm<'_>);
    /// Each element zero with probability `p`, the others scaled up; as it is when not training.
    fn dropout(x, p: f64, training: bool);
    /// softmax(q · kᵀ · scale + mask) · v.
    fn scaled_dot_product_attention(query, key: &Tensor, value: &Tensor, options: Attention<'_>);
    /// The first half along a dim, gated by the sigmoid of the second.
    fn glu(x, dim: i64);
    /// x · y / (max(|x|, eps) · max(|y|, eps)) along a dim.
    fn cosine_similarity(x, y: &Tensor, dim: i64, eps: f64);
    /// Cross-entropy with class weights, label smoothing and probability targets.
    fn cross_entropy_of(input, target: &Tensor, options: CrossEntropy<'_>);
    /// (input − target)²
    fn mse_loss(input, target: &Tensor, reduction: Reduction);
    /// |input − target|
    fn l1_loss(input, target: &Tensor, reduction: Reduction);
    /// The absolute difference, bent to a square below beta.
    fn smooth_l1_loss(input, target: &Tensor, beta: f64, reduction: Reduction);
    /// Half the square of the difference, straight beyond delta.
    fn huber_loss(input, target: &Tensor, delta: f64, reduction: Reduction);
    /// Binary cross-entropy of probabilities.
    fn binary_cross_entropy(input, target: &Tensor, weight: Option<&Tensor>, reduction: Reduction);
    /// Binary cross-entropy of scores.
    fn binary_cross_entropy_with_logits(
        input,
        target: &Tensor,
        weight: Option<&Tensor>,
        pos_weight: Option<&Tensor>,
        reduction: Reduction
    );
    /// target · (log target − input) for log-probabilities.
    fn kl_div(input, target: &Tensor, log_target: bool, reduction: Reduction);
}

/// x · Φ(x), by the error function or by tanh.
#[track_caller]
pub fn gelu(x: &Tensor, approximate: Approximate) -> Result<Tensor> {
    match approximate {
        Approximate::None => x.gelu(),
        Approximate::Tanh => x.gelu_tanh(),
    }
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

/// [`nll_loss`] with class weights, over inputs of any rank.
#[track_caller]
pub fn nll_loss_of(input: &Tensor, target: &Tensor, options: CrossEntropy<'_>) -> Result<Tensor> {
    input.nll_loss_with(target, options)
}
