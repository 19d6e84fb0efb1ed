//! Rows: normalisation, pooling, resizing, losses.

use crate::formula::rule;
use crate::gradient::{Cx, Grads};
use crate::samples::{Domain, Sample, SampleArg};
use crate::table::activations::log_one_plus_exp;
use crate::table::functions::promoted;
use crate::{DType, GradCall, Op, Scalar, Shape, Value};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_nn {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_recurrent! { $callback [
            $($rows)*

            // ---- normalisation ---------------------------------------------------------------------------------

            /// (x − mean) / √(variance + eps) over the last dims, times weight plus bias
            [composite layer_norm _none] "layer_norm" LayerNorm (x, eps) (weight, bias) { dims: usize }
                { ty: norms::layer_norm_type, grad: Grad::Fn(norms::layer_norm_gradient), decompose: Some(norms::layer_norm), eval: Eval::Structural,
                  kernel: true, samples: norms::layer_norm_samples };
            /// The gradient of layer_norm's x, without weight
            [composite layer_norm_backward _none] "layer_norm_backward" LayerNormBackward (grad, x, eps) () { dims: usize }
                { ty: norms::backward_type, grad: Grad::Decompose,
                  decompose: Some(norms::backward), eval: Eval::Structural,
                  kernel: true, samples: norms::layer_norm_backward_samples };
            /// x / √(mean of x² + eps) over the last dims, times weight
            [composite rms_norm _none] "rms_norm" RmsNorm (x, eps) (weight) { dims: usize }
                { ty: norms::layer_norm_type, grad: Grad::Fn(norms::rms_norm_gradient), decompose: Some(norms::layer_norm), eval: Eval::Structural,
                  kernel: true, samples: norms::rms_norm_samples };
            /// The gradient of rms_norm's x, without weight
            [composite rms_norm_backward _none] "rms_norm_backward" RmsNormBackward (grad, x, eps) () { dims: usize }
                { ty: norms::backward_type, grad: Grad::Decompose,
                  decompose: Some(norms::backward), eval: Eval::Structural,
                  kernel: true, samples: norms::rms_norm_backward_samples };
            /// (x − mean) / √(variance + eps) over groups of channels of each sample, times weight plus bias
            [composite group_norm _none] "group_norm" GroupNorm (x, eps) (weight, bias) { groups: usize }
                { ty: norms::group_norm_type, grad: Grad::Fn(norms::group_norm_gradient), decompose: Some(norms::group_norm), eval: Eval::Structural,
                  kernel: true, samples: norms::group_norm_samples };
            /// (x − mean) / √(variance + eps) over everything but the channels, dim 1, times weight plus bias
            [composite batch_norm _none] "batch_norm" BatchNorm (x, eps) (weight, bias) {}
                { ty: norms::batch_norm_type, grad: Grad::Fn(norms::batch_norm_gradient), decompose: Some(norms::batch_norm), eval: Eval::Structural,
                  kernel: true, samples: norms::batch_norm_samples };
            /// The gradient of batch_norm's x, without weight
            [composite batch_norm_backward _none] "batch_norm_backward" BatchNormBackward (grad, x, eps) () {}
                { ty: norms::backward_type, grad: Grad::Decompose,
                  decompose: Some(norms::backward), eval: Eval::Structural,
                  kernel: true, samples: norms::batch_norm_backward_samples };
            /// Mean and variance (not corrected) of each channel, dim 1, as two rows
            [composite batch_moments _none] "batch_moments" BatchMoments (x) () {}
                { ty: norms::batch_moments_type, grad: Grad::Decompose,
                  decompose: Some(norms::batch_moments), eval: Eval::Structural,
                  kernel: true, samples: norms::batch_moments_samples };

            // ---- pooling and resizing of [n, c, height, width] -------------------------------------------------

            /// Where in its plane the largest element of each window lies; the last NaN if there is one
            [composite max_pool2d_indices _none] "max_pool2d_indices" MaxPool2dIndices (x) ()
                { kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool }
                { ty: resample::max_pool_type, grad: Grad::Zero, eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: resample::max_pool_samples };
            /// The mean of each window
            [composite avg_pool2d _none] "avg_pool2d" AvgPool2d (x) ()
                { kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, count_include_pad: bool }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, samples: resample::avg_pool_samples };
            /// The gradient of avg_pool2d's x
            [composite avg_pool2d_backward _none] "avg_pool2d_backward" AvgPool2dBackward (grad) ()
                { input: Sizes,
                  kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, count_include_pad: bool }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["input"], samples: resample::avg_pool_backward_samples };
            /// The means of as many windows as the output has elements
            [composite adaptive_avg_pool2d _none] "adaptive_avg_pool2d" AdaptiveAvgPool2d (x) () { output: Sizes }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["output"], samples: resample::adaptive_samples };
            /// The gradient of adaptive_avg_pool2d's x
            [composite adaptive_avg_pool2d_backward _none] "adaptive_avg_pool2d_backward" AdaptiveAvgPool2dBackward (grad) ()
                { input: Sizes }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["input"], samples: resample::adaptive_backward_samples };
            /// Resized by the element at ⌊position · ratio⌋; a ratio of 0 is that of the sizes
            [composite upsample_nearest2d _none] "upsample_nearest2d" UpsampleNearest2d (x) ()
                { output: Sizes, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["output"], samples: resample::nearest_samples };
            /// The gradient of upsample_nearest2d's x
            [composite upsample_nearest2d_backward _none] "upsample_nearest2d_backward" UpsampleNearest2dBackward (grad) ()
                { input: Sizes, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["input"], samples: resample::nearest_backward_samples };
            /// Resized by linear interpolation in both directions; a ratio of 0 is that of the sizes
            [composite upsample_bilinear2d _none] "upsample_bilinear2d" UpsampleBilinear2d (x) ()
                { output: Sizes, align_corners: bool, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["output"], samples: resample::bilinear_samples };
            /// The gradient of upsample_bilinear2d's x
            [composite upsample_bilinear2d_backward _none] "upsample_bilinear2d_backward" UpsampleBilinear2dBackward (grad) ()
                { input: Sizes, align_corners: bool, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  refuses: Refuses::NotFloats, places: &["input"], samples: resample::bilinear_backward_samples };

            // ---- losses ----------------------------------------------------------------------------------------

            /// −input[i, target[i]], reduced over the samples whose target is not ignore_index
            [composite nll_loss _none] "nll_loss" NllLoss (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Fn(gradient::nll_loss),
                  decompose: Some(decompose::nll_loss), eval: Eval::Structural,
                  kernel: true, samples: samples::nll_loss };
            /// nll_loss of log_softmax
            [composite cross_entropy _none] "cross_entropy" CrossEntropy (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Decompose,
                  decompose: Some(decompose::cross_entropy), eval: Eval::Structural,
                  kernel: true, samples: samples::cross_entropy };
            /// −(target · log input + (1 − target) · log(1 − input)), element by element; logarithms stop at −100
            [composite binary_cross_entropy _none] "binary_cross_entropy" BinaryCrossEntropy (input, target) () {}
                { ty: types::float_only, grad: Grad::Fn(nn::probability_loss_gradient),
                  decompose: steps!(promoted |x, target| {
                      let (no, yes) = ((1.0 - x).log().maximum(-100.0), x.log().maximum(-100.0));
                      (target - 1.0) * no - target * yes
                  }), eval: Eval::Structural, samples: nn::probability_loss_samples };
            /// −(pos_weight · target · log σ(input) + (1 − target) · log(1 − σ(input))), element by element
            [composite binary_cross_entropy_with_logits _none] "binary_cross_entropy_with_logits" BinaryCrossEntropyWithLogits
                (input, target, pos_weight) () {}
                { ty: types::float_only, grad: Grad::Fn(nn::logits_loss_gradient),
                  decompose: steps!(promoted |x, target, pos_weight| {
                      let weight = target * (pos_weight - 1.0) + 1.0;
                      (1.0 - target) * x + weight * activations::log_one_plus_exp(-x)
                  }), eval: Eval::Structural, samples: nn::logits_loss_samples };
        ]}
    };
}

pub(crate) fn probability_loss_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let inputs = promoted(cx, call.op, call.inputs)?;
    let call = &GradCall { inputs: &inputs, ..*call };
    rule!(cx, call, |g, x, target| [
        // The divisor does not come too near to zero.
        g * ((x - target) / ((1.0 - x) * x).maximum(1e-12)),
        g * ((1.0 - x).log() - x.log()),
    ])
}

pub(crate) fn probability_loss_samples() -> Vec<Sample> {
    let t = |s: &[usize]| SampleArg::Tensor(Shape::from(s), Domain::Between(0.05, 0.95));
    let cases = [&[5][..], &[3, 17], &[0], &[]];
    let case = |s: &&[usize]| Sample {
        op: Op::BinaryCrossEntropy {},
        args: vec![t(s), t(s)],
        dtypes: &[DType::F32, DType::F64],
    };
    cases.iter().map(case).collect()
}

pub(crate) fn logits_loss_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let inputs = promoted(cx, call.op, call.inputs)?;
    let call = &GradCall { inputs: &inputs, ..*call };
    rule!(cx, call, |g, x, target, pos_weight| [
        g * ((1.0 - target) - (target * (pos_weight - 1.0) + 1.0) * (-x).sigmoid()),
        g * (log_one_plus_exp(-x) * (pos_weight - 1.0) - x),
        g * (target * log_one_plus_exp(-x)),
    ])
}

pub(crate) fn logits_loss_samples() -> Vec<Sample> {
    let t = |s: &[usize]| SampleArg::Tensor(Shape::from(s), Domain::Any);
    let cases = vec![
        vec![t(&[5]), t(&[5]), SampleArg::Number(Scalar::Float(1.0))],
        vec![t(&[3, 4]), t(&[3, 4]), t(&[4])],
        vec![t(&[3, 1]), t(&[17]), SampleArg::Number(Scalar::Float(2.5))],
        vec![t(&[0]), t(&[0]), SampleArg::Number(Scalar::Float(1.0))],
        vec![t(&[]), t(&[]), t(&[])],
    ];
    let op = Op::BinaryCrossEntropyWithLogits {};
    cases.into_iter().map(|args| Sample { op: op.clone(), args, dtypes: &[DType::F32, DType::F64] }).collect()
}
