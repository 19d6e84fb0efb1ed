//! Rows: normalisation, pooling, resizing, losses.

use smallvec::smallvec;

use crate::samples::{Domain, Sample, SampleArg};
use crate::{DType, Emit, EmitExt, GradCall, Op, Result, Scalar, Shape, Value, Values};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_nn {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_lists! { $callback [
            $($rows)*

            // ---- normalisation ---------------------------------------------------------------------------------

            /// (x − mean) / √(variance + eps) over the last dims, times weight plus bias
            [composite layer_norm _none] "layer_norm" LayerNorm (x, eps) (weight, bias) { dims: usize }
                { ty: norms::layer_norm_type, grad: Grad::Fn(norms::layer_norm_gradient),
                  level: Level::Composite, decompose: Some(norms::layer_norm), eval: Eval::Structural,
                  samples: norms::layer_norm_samples };
            /// The gradient of layer_norm's x, without weight
            [composite layer_norm_backward _none] "layer_norm_backward" LayerNormBackward (grad, x, eps) () { dims: usize }
                { ty: norms::backward_type, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(norms::backward), eval: Eval::Structural, samples: norms::layer_norm_backward_samples };
            /// x / √(mean of x² + eps) over the last dims, times weight
            [composite rms_norm _none] "rms_norm" RmsNorm (x, eps) (weight) { dims: usize }
                { ty: norms::layer_norm_type, grad: Grad::Fn(norms::rms_norm_gradient),
                  level: Level::Composite, decompose: Some(norms::layer_norm), eval: Eval::Structural,
                  samples: norms::rms_norm_samples };
            /// The gradient of rms_norm's x, without weight
            [composite rms_norm_backward _none] "rms_norm_backward" RmsNormBackward (grad, x, eps) () { dims: usize }
                { ty: norms::backward_type, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(norms::backward), eval: Eval::Structural, samples: norms::rms_norm_backward_samples };
            /// (x − mean) / √(variance + eps) over groups of channels of each sample, times weight plus bias
            [composite group_norm _none] "group_norm" GroupNorm (x, eps) (weight, bias) { groups: usize }
                { ty: norms::group_norm_type, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(norms::group_norm), eval: Eval::Structural, samples: norms::group_norm_samples };
            /// (x − mean) / √(variance + eps) over everything but the channels, dim 1, times weight plus bias
            [composite batch_norm _none] "batch_norm" BatchNorm (x, eps) (weight, bias) {}
                { ty: norms::batch_norm_type, grad: Grad::Fn(norms::batch_norm_gradient),
                  level: Level::Composite, decompose: Some(norms::batch_norm), eval: Eval::Structural,
                  samples: norms::batch_norm_samples };
            /// The gradient of batch_norm's x, without weight
            [composite batch_norm_backward _none] "batch_norm_backward" BatchNormBackward (grad, x, eps) () {}
                { ty: norms::backward_type, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(norms::backward), eval: Eval::Structural, samples: norms::batch_norm_backward_samples };
            /// Mean and variance (not corrected) of each channel, dim 1, as two rows
            [composite batch_moments _none] "batch_moments" BatchMoments (x) () {}
                { ty: norms::batch_moments_type, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(norms::batch_moments), eval: Eval::Structural, samples: norms::batch_moments_samples };

            // ---- pooling and resizing of [n, c, height, width] -------------------------------------------------

            /// Where in its plane the largest element of each window lies; the last NaN if there is one
            [composite max_pool2d_indices _none] "max_pool2d_indices" MaxPool2dIndices (x) ()
                { kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool }
                { ty: resample::max_pool_type, grad: Grad::Zero, eval: Eval::Structural, samples: resample::max_pool_samples };
            /// The mean of each window
            [composite avg_pool2d _none] "avg_pool2d" AvgPool2d (x) ()
                { kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, count_include_pad: bool }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  samples: resample::avg_pool_samples };
            /// The gradient of avg_pool2d's x
            [composite avg_pool2d_backward _none] "avg_pool2d_backward" AvgPool2dBackward (grad) ()
                { input: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, count_include_pad: bool }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  samples: resample::avg_pool_backward_samples };
            /// The means of as many windows as the output has elements
            [composite adaptive_avg_pool2d _none] "adaptive_avg_pool2d" AdaptiveAvgPool2d (x) () { output: Sizes }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  samples: resample::adaptive_samples };
            /// The gradient of adaptive_avg_pool2d's x
            [composite adaptive_avg_pool2d_backward _none] "adaptive_avg_pool2d_backward" AdaptiveAvgPool2dBackward (grad) ()
                { input: Sizes }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  samples: resample::adaptive_backward_samples };
            /// Resized by the element at ⌊position · ratio⌋; a ratio of 0 is that of the sizes
            [composite upsample_nearest2d _none] "upsample_nearest2d" UpsampleNearest2d (x) ()
                { output: Sizes, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  samples: resample::nearest_samples };
            /// The gradient of upsample_nearest2d's x
            [composite upsample_nearest2d_backward _none] "upsample_nearest2d_backward" UpsampleNearest2dBackward (grad) ()
                { input: Sizes, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  samples: resample::nearest_backward_samples };
            /// Resized by linear interpolation in both directions; a ratio of 0 is that of the sizes
            [composite upsample_bilinear2d _none] "upsample_bilinear2d" UpsampleBilinear2d (x) ()
                { output: Sizes, align_corners: bool, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::forward_type, grad: Grad::Fn(resample::forward_gradient), eval: Eval::Structural,
                  samples: resample::bilinear_samples };
            /// The gradient of upsample_bilinear2d's x
            [composite upsample_bilinear2d_backward _none] "upsample_bilinear2d_backward" UpsampleBilinear2dBackward (grad) ()
                { input: Sizes, align_corners: bool, height_ratio: Scalar, width_ratio: Scalar }
                { ty: resample::backward_type, grad: Grad::Fn(resample::backward_gradient), eval: Eval::Structural,
                  samples: resample::bilinear_backward_samples };

            // ---- losses ----------------------------------------------------------------------------------------

            /// −input[i, target[i]], reduced over the samples whose target is not ignore_index
            [composite nll_loss _none] "nll_loss" NllLoss (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Fn(gradient::nll_loss), level: Level::Composite,
                  decompose: Some(decompose::nll_loss), eval: Eval::Structural, samples: samples::nll_loss };
            /// nll_loss of log_softmax
            [composite cross_entropy _none] "cross_entropy" CrossEntropy (input, target) () { reduction: Reduction, ignore_index: i64 }
                { ty: types::nll_loss, grad: Grad::Decompose, level: Level::Composite,
                  decompose: Some(decompose::cross_entropy), eval: Eval::Structural, samples: samples::cross_entropy };
            /// −(target · log input + (1 − target) · log(1 − input)), element by element; logarithms stop at −100
            [composite binary_cross_entropy _none] "binary_cross_entropy" BinaryCrossEntropy (input, target) () {}
                { ty: types::float_only, grad: Grad::Fn(nn::probability_loss_gradient), level: Level::Composite,
                  decompose: Some(nn::probability_loss), eval: Eval::Structural, samples: nn::probability_loss_samples };
            /// −(pos_weight · target · log σ(input) + (1 − target) · log(1 − σ(input))), element by element
            [composite binary_cross_entropy_with_logits _none] "binary_cross_entropy_with_logits" BinaryCrossEntropyWithLogits
                (input, target, pos_weight) () {}
                { ty: types::float_only, grad: Grad::Fn(nn::logits_loss_gradient), level: Level::Composite,
                  decompose: Some(nn::logits_loss), eval: Eval::Structural, samples: nn::logits_loss_samples };
        ]}
    };
}

type Cx<'a> = &'a mut dyn Emit;

/// (target − 1) · log(1 − x) − target · log x
pub(crate) fn probability_loss(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = crate::table::functions::promoted(cx, op, args)?;
    let (x, target, unit, least) = (args[0], args[1], cx.number(1.0)?, cx.number(-100.0)?);
    let log = |cx: Cx<'_>, x: Value| {
        let log = cx.log(x)?;
        cx.maximum(log, least)
    };
    let rest = cx.sub(unit, x)?;
    let (yes, no) = (log(cx, x)?, log(cx, rest)?);
    let other = cx.sub(target, unit)?;
    let (no, yes) = (cx.mul(other, no)?, cx.mul(target, yes)?);
    Ok(smallvec![cx.sub(no, yes)?])
}

pub(crate) fn probability_loss_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Result<Vec<Option<Value>>> {
    let Some(g) = call.grads[0] else { return Ok(vec![None; call.inputs.len()]) };
    let inputs = crate::table::functions::promoted(cx, call.op, call.inputs)?;
    let (x, target, unit) = (inputs[0], inputs[1], cx.number(1.0)?);
    // (x − target) / (x · (1 − x)), whose divisor does not come too near to zero
    let gx = call.wanted(cx, 0, |cx| {
        let rest = cx.sub(unit, x)?;
        let (product, least) = (cx.mul(rest, x)?, cx.number(1e-12)?);
        let divisor = cx.maximum(product, least)?;
        let difference = cx.sub(x, target)?;
        let slope = cx.div(difference, divisor)?;
        cx.mul(g, slope)
    })?;
    let gtarget = call.wanted(cx, 1, |cx| {
        let rest = cx.sub(unit, x)?;
        let (no, yes) = (cx.log(rest)?, cx.log(x)?);
        let slope = cx.sub(no, yes)?;
        cx.mul(g, slope)
    })?;
    Ok(vec![gx, gtarget])
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

/// log(1 + e⁻ˣ), accurate where e⁻ˣ is small or large: with y = e^−|x|, log(1 + y) + max(−x, 0).
fn softplus_of_negative(cx: Cx<'_>, x: Value) -> Result<Value> {
    let (zero, unit) = (cx.number(0.0)?, cx.number(1.0)?);
    let size = cx.abs(x)?;
    let down = cx.neg(size)?;
    let y = cx.exp(down)?;
    let sum = cx.add(y, unit)?;
    // What of y the sum holds; log(sum) belongs to that, and is in proportion to it.
    let held = cx.sub(sum, unit)?;
    let lost = cx.eq(held, zero)?;
    let divisor = cx.where_(lost, unit, held)?;
    let log = cx.log(sum)?;
    let share = cx.div(y, divisor)?;
    let scaled = cx.mul(log, share)?;
    let log1p = cx.where_(lost, y, scaled)?;
    let negative = cx.neg(x)?;
    let linear = cx.maximum(negative, zero)?;
    cx.add(log1p, linear)
}

/// 1 + (pos_weight − 1) · target
fn logits_weight(cx: Cx<'_>, target: Value, pos_weight: Value) -> Result<Value> {
    let unit = cx.number(1.0)?;
    let excess = cx.sub(pos_weight, unit)?;
    let scaled = cx.mul(target, excess)?;
    cx.add(scaled, unit)
}

/// (1 − target) · x + (1 + (pos_weight − 1) · target) · log(1 + e⁻ˣ)
pub(crate) fn logits_loss(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let args = crate::table::functions::promoted(cx, op, args)?;
    let (x, target) = (args[0], args[1]);
    let unit = cx.number(1.0)?;
    let rest = cx.sub(unit, target)?;
    let linear = cx.mul(rest, x)?;
    let weight = logits_weight(cx, target, args[2])?;
    let bent = softplus_of_negative(cx, x)?;
    let scaled = cx.mul(weight, bent)?;
    Ok(smallvec![cx.add(linear, scaled)?])
}

pub(crate) fn logits_loss_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Result<Vec<Option<Value>>> {
    let Some(g) = call.grads[0] else { return Ok(vec![None; call.inputs.len()]) };
    let inputs = crate::table::functions::promoted(cx, call.op, call.inputs)?;
    let (x, target, pos_weight) = (inputs[0], inputs[1], inputs[2]);
    let unit = cx.number(1.0)?;
    let gx = match call.wants(0) {
        // (1 − target) − weight · σ(−x)
        true => {
            let rest = cx.sub(unit, target)?;
            let weight = logits_weight(cx, target, pos_weight)?;
            let negative = cx.neg(x)?;
            let slope = cx.sigmoid(negative)?;
            let pull = cx.mul(weight, slope)?;
            let slope = cx.sub(rest, pull)?;
            Some(cx.mul(g, slope)?)
        }
        false => None,
    };
    let bent = if call.wants(1) || call.wants(2) { Some(softplus_of_negative(cx, x)?) } else { None };
    let gtarget = match bent {
        Some(bent) if call.wants(1) => {
            let excess = cx.sub(pos_weight, unit)?;
            let scaled = cx.mul(bent, excess)?;
            let slope = cx.sub(scaled, x)?;
            Some(cx.mul(g, slope)?)
        }
        _ => None,
    };
    let gweight = match bent {
        Some(bent) if call.wants(2) => {
            let slope = cx.mul(target, bent)?;
            Some(cx.mul(g, slope)?)
        }
        _ => None,
    };
    Ok(vec![gx, gtarget, gweight])
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
