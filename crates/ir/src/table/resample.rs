//! Rules of pooling and resizing. Averages, nearest neighbours and linear interpolation are all one thing:
//! along each of the two dims, an element of the result is a weighted sum of a few neighbours ([`Axis`]). The
//! gradient takes the same weights the other way, so forward and backward rows are each other's gradients.

use smallvec::{SmallVec, smallvec};

use crate::gradient::Cx;
use crate::samples::{Domain, Sample, SampleArg};
use crate::types::{checked, float, tensor};
use crate::{DType, EmitExt, GradCall, Op, Result, Scalar, Shape, Sizes, TensorTy, Ty, Tys, Value, Why};

type Rule = Result<Tys, Why>;

/// What the elements of a result read along one dim. Neither the first nor the last neighbour of an element comes before
/// that of the element before it.
#[derive(Clone, PartialEq, Debug)]
pub struct Axis {
    /// For each element of the result, the position of its first neighbour and where the neighbours' weights end.
    pub spans: Vec<(usize, usize)>,
    /// The weights of all neighbours, element by element.
    pub weights: Vec<f64>,
    /// Size of the input.
    pub input: usize,
}

/// How a row looks along both dims.
enum Kind<'a> {
    Average {
        kernel: &'a Sizes,
        stride: &'a Sizes,
        padding: &'a Sizes,
        ceil_mode: bool,
        count_include_pad: bool,
    },
    Adaptive,
    Nearest {
        ratio: [Scalar; 2],
    },
    Bilinear {
        align_corners: bool,
        ratio: [Scalar; 2],
    },
}

fn kind(op: &Op) -> Option<Kind<'_>> {
    Some(match op {
        Op::AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad }
        | Op::AvgPool2dBackward { kernel, stride, padding, ceil_mode, count_include_pad, .. } => {
            Kind::Average {
                kernel,
                stride,
                padding,
                ceil_mode: *ceil_mode,
                count_include_pad: *count_include_pad,
            }
        }
        Op::AdaptiveAvgPool2d { .. } | Op::AdaptiveAvgPool2dBackward { .. } => Kind::Adaptive,
        Op::UpsampleNearest2d { height_ratio, width_ratio, .. }
        | Op::UpsampleNearest2dBackward { height_ratio, width_ratio, .. } => {
            Kind::Nearest { ratio: [*height_ratio, *width_ratio] }
        }
        Op::UpsampleBilinear2d { align_corners, height_ratio, width_ratio, .. }
        | Op::UpsampleBilinear2dBackward { align_corners, height_ratio, width_ratio, .. } => {
            Kind::Bilinear { align_corners: *align_corners, ratio: [*height_ratio, *width_ratio] }
        }
        _ => return None,
    })
}

/// Both dims of a pooling or resizing row, forward or backward, between planes of these sizes.
pub fn axes(op: &Op, input: [usize; 2], output: [usize; 2]) -> Option<[Axis; 2]> {
    let kind = kind(op)?;
    Some([0, 1].map(|d| {
        let (size, count) = (input[d], output[d]);
        let tap = |i: usize| -> (usize, SmallVec<[f64; 4]>) {
            match &kind {
                Kind::Average { kernel, stride, padding, count_include_pad, .. } => {
                    let (begin, pad) = (i * stride[d], padding[d]);
                    // Positions are counted from the first zero of the padding.
                    let end = (begin + kernel[d]).min(size + 2 * pad);
                    let (first, last) = (begin.max(pad) - pad, end.min(size + pad).max(pad) - pad);
                    let reach = last.saturating_sub(first);
                    let count = if *count_include_pad { end.saturating_sub(begin) } else { reach };
                    (first.min(size), smallvec![1.0 / count as f64; reach])
                }
                Kind::Adaptive => {
                    let (first, last) = (i * size / count, ((i + 1) * size).div_ceil(count));
                    (first, smallvec![1.0 / (last - first) as f64; last - first])
                }
                Kind::Nearest { ratio: given } => {
                    // In single precision, like PyTorch, so that the same neighbours are picked.
                    let at = (i as f32 * step(given[d], size, count, false) as f32).floor() as usize;
                    (at.min(size.saturating_sub(1)), smallvec![1.0])
                }
                Kind::Bilinear { align_corners, ratio: given } => {
                    let ratio = step(given[d], size, count, *align_corners);
                    let at = if *align_corners {
                        i as f64 * ratio
                    } else {
                        ((i as f64 + 0.5) * ratio - 0.5).max(0.0)
                    };
                    let first = (at.floor() as usize).min(size.saturating_sub(1));
                    let share = (at - first as f64).clamp(0.0, 1.0);
                    if first + 1 < size {
                        (first, smallvec![1.0 - share, share])
                    } else {
                        (first, smallvec![1.0])
                    }
                }
            }
        };
        let mut axis =
            Axis { spans: Vec::with_capacity(count), weights: Vec::with_capacity(count), input: size };
        for i in 0..count {
            let (first, weights) = tap(i);
            axis.weights.extend(weights);
            axis.spans.push((first, axis.weights.len()));
        }
        axis
    }))
}

/// How far apart in the input neighbours of the output lie: as given, or if that is zero as the sizes say. A ratio of
/// sizes is no attribute, so that graphs for other sizes are the same.
pub fn step(given: Scalar, input: usize, output: usize, align_corners: bool) -> f64 {
    match given.as_f64() {
        0.0 => ratio(input, output, align_corners).as_f64(),
        given => given,
    }
}

/// The number of windows along a dim.
fn windows(
    size: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
    ceil: bool,
) -> Result<usize, Why> {
    let fail = || Why::Window { kernel, size };
    if kernel == 0 || stride == 0 || dilation == 0 {
        return Err(Why::none("kernel, stride and dilation"));
    }
    if padding > kernel / 2 {
        let (most, limit) = (kernel / 2, "half the window");
        return Err(Why::Limit { argument: "padding", most, limit, dim: None, got: padding });
    }
    let reach = (kernel - 1).checked_mul(dilation).and_then(|reach| reach.checked_add(1)).ok_or_else(fail)?;
    let padded = padding.checked_mul(2).and_then(|both| both.checked_add(size)).ok_or_else(fail)?;
    let room = padded.checked_sub(reach).ok_or_else(fail)?;
    let count = (if ceil { room.div_ceil(stride) } else { room / stride }) + 1;
    // The last window must begin inside the input or the padding before it.
    Ok(if ceil && (count - 1).saturating_mul(stride) >= size + padding { count - 1 } else { count })
}

fn images<'a>(args: &'a [Ty], argument: &'static str) -> Result<&'a TensorTy, Why> {
    let x = tensor(args, 0, argument)?;
    match x.shape.rank() {
        4 => Ok(x),
        got => Err(Why::Rank { argument, expected: "4", got }),
    }
}

fn float_images<'a>(args: &'a [Ty], argument: &'static str) -> Result<&'a TensorTy, Why> {
    images(args, argument)?;
    float(args, 0, argument)
}

fn pairs(lists: &[(&'static str, &Sizes)]) -> Result<(), Why> {
    match lists.iter().find(|(_, list)| list.len() != 2) {
        Some(&(what, list)) => Err(Why::Count { what, expected: 2, got: list.len() }),
        None => Ok(()),
    }
}

pub(crate) fn max_pool_type(op: &Op, args: &[Ty]) -> Rule {
    let x = images(args, "x")?;
    let Op::MaxPool2dIndices { kernel, stride, padding, dilation, ceil_mode } = op else {
        return Ok(smallvec![args[0].clone()]);
    };
    if x.dtype == DType::Bool {
        return Err(Why::DType { argument: "x", expected: "numeric", got: x.dtype });
    }
    pairs(&[
        ("entries of kernel", kernel),
        ("entries of stride", stride),
        ("entries of padding", padding),
        ("entries of dilation", dilation),
    ])?;
    let mut shape = Shape::from(&x.shape[..2]);
    for d in 0..2 {
        shape.push(windows(x.shape[d + 2], kernel[d], stride[d], padding[d], dilation[d], *ceil_mode)?);
    }
    checked(TensorTy { dtype: DType::I64, device: x.device, shape })
}

/// The size of the result for an input of this size. Only adaptive pooling and resizing take it from `output`.
fn output_size(op: &Op, input: &Shape, output: &[usize]) -> Result<[usize; 2], Why> {
    let mut sizes = [0; 2];
    for d in 0..2 {
        let size = input[d + 2];
        sizes[d] = match kind(op) {
            Some(Kind::Average { kernel, stride, padding, ceil_mode, .. }) => {
                pairs(&[
                    ("entries of kernel", kernel),
                    ("entries of stride", stride),
                    ("entries of padding", padding),
                ])?;
                windows(size, kernel[d], stride[d], padding[d], 1, ceil_mode)?
            }
            Some(Kind::Nearest { ratio } | Kind::Bilinear { ratio, .. })
                if !(ratio[d].as_f64().is_finite() && ratio[d].as_f64() >= 0.0) =>
            {
                let got = ratio[d].as_f64();
                return Err(Why::Number { argument: "ratio", expected: "0 or more", got });
            }
            _ => output[d],
        };
        if size == 0 && sizes[d] > 0 {
            return Err(Why::none("the height and width of x"));
        }
    }
    Ok(sizes)
}

pub(crate) fn forward_type(op: &Op, args: &[Ty]) -> Rule {
    let x = float_images(args, "x")?;
    let output: &[usize] = match op {
        Op::AdaptiveAvgPool2d { output }
        | Op::UpsampleNearest2d { output, .. }
        | Op::UpsampleBilinear2d { output, .. } => {
            pairs(&[("entries of output", output)])?;
            output
        }
        _ => &[0, 0],
    };
    let [height, width] = output_size(op, &x.shape, output)?;
    checked(TensorTy { shape: Shape::from([x.shape[0], x.shape[1], height, width]), ..x.clone() })
}

pub(crate) fn backward_type(op: &Op, args: &[Ty]) -> Rule {
    let grad = float_images(args, "grad")?;
    let (Op::AvgPool2dBackward { input, .. }
    | Op::AdaptiveAvgPool2dBackward { input }
    | Op::UpsampleNearest2dBackward { input, .. }
    | Op::UpsampleBilinear2dBackward { input, .. }) = op
    else {
        return Ok(smallvec![args[0].clone()]);
    };
    let input = Shape::from(input);
    if input.rank() != 4 {
        return Err(Why::Rank { argument: "input", expected: "4", got: input.rank() });
    }
    let [height, width] = output_size(op, &input, &grad.shape[2..])?;
    let want = Shape::from([input[0], input[1], height, width]);
    if want != grad.shape {
        return Err(Why::shape("grad", want, grad.shape.clone()));
    }
    checked(TensorTy { shape: input, ..grad.clone() })
}

/// The row that goes the other way: from a forward row with the shape of its input, or from a backward row
/// with the size of its gradient.
fn reversed(op: &Op, input: &Shape, output: Sizes) -> Option<Op> {
    let input = Sizes::from(input);
    Some(match op.clone() {
        Op::AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad } => {
            Op::AvgPool2dBackward { input, kernel, stride, padding, ceil_mode, count_include_pad }
        }
        Op::AvgPool2dBackward { kernel, stride, padding, ceil_mode, count_include_pad, .. } => {
            Op::AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad }
        }
        Op::AdaptiveAvgPool2d { .. } => Op::AdaptiveAvgPool2dBackward { input },
        Op::AdaptiveAvgPool2dBackward { .. } => Op::AdaptiveAvgPool2d { output },
        Op::UpsampleNearest2d { height_ratio, width_ratio, .. } => {
            Op::UpsampleNearest2dBackward { input, height_ratio, width_ratio }
        }
        Op::UpsampleNearest2dBackward { height_ratio, width_ratio, .. } => {
            Op::UpsampleNearest2d { output, height_ratio, width_ratio }
        }
        Op::UpsampleBilinear2d { align_corners, height_ratio, width_ratio, .. } => {
            Op::UpsampleBilinear2dBackward { input, align_corners, height_ratio, width_ratio }
        }
        Op::UpsampleBilinear2dBackward { align_corners, height_ratio, width_ratio, .. } => {
            Op::UpsampleBilinear2d { output, align_corners, height_ratio, width_ratio }
        }
        _ => return None,
    })
}

pub(crate) fn forward_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Result<Vec<Option<Value>>> {
    let input = cx.tensor_ty(call.inputs[0]).shape;
    match (call.grads[0], reversed(call.op, &input, Sizes::default())) {
        (Some(g), Some(op)) => Ok(vec![Some(cx.emit_one(op, &[g])?)]),
        _ => Ok(vec![None]),
    }
}

pub(crate) fn backward_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Result<Vec<Option<Value>>> {
    let shape = cx.tensor_ty(call.inputs[0]).shape;
    match (call.grads[0], reversed(call.op, &shape, Sizes::from(&shape[2..]))) {
        (Some(g), Some(op)) => Ok(vec![Some(cx.emit_one(op, &[g])?)]),
        _ => Ok(vec![None]),
    }
}

fn one(op: Op, dtypes: &'static [DType], shape: &Shape) -> Sample {
    Sample { op, args: vec![SampleArg::Tensor(shape.clone(), Domain::Any)], dtypes }
}

const FLOATS: &[DType] = &[DType::F32, DType::F64];

pub(crate) fn max_pool_samples() -> Vec<Sample> {
    let op = |k: [usize; 2], s: [usize; 2], p: [usize; 2], d: [usize; 2], ceil_mode| Op::MaxPool2dIndices {
        kernel: k.into(),
        stride: s.into(),
        padding: p.into(),
        dilation: d.into(),
        ceil_mode,
    };
    let numbers: &[DType] = &[DType::I64, DType::F32, DType::F64];
    [
        (op([2, 2], [2, 2], [0, 0], [1, 1], false), [2, 3, 6, 7]),
        (op([3, 3], [2, 2], [1, 1], [1, 1], false), [1, 2, 7, 5]),
        (op([3, 2], [2, 3], [1, 0], [1, 2], true), [2, 1, 6, 9]),
        (op([2, 2], [3, 3], [1, 1], [1, 1], true), [1, 1, 4, 4]),
        (op([1, 1], [1, 1], [0, 0], [1, 1], false), [0, 2, 3, 3]),
    ]
    .into_iter()
    .map(|(op, shape)| one(op, numbers, &Shape::from(shape)))
    .collect()
}

pub(crate) fn avg_pool_samples() -> Vec<Sample> {
    let op = |k: [usize; 2], s: [usize; 2], p: [usize; 2], ceil_mode, count_include_pad| Op::AvgPool2d {
        kernel: k.into(),
        stride: s.into(),
        padding: p.into(),
        ceil_mode,
        count_include_pad,
    };
    [
        (op([2, 2], [2, 2], [0, 0], false, true), [2, 3, 6, 5]),
        (op([3, 3], [2, 2], [1, 1], false, true), [1, 2, 7, 5]),
        (op([3, 3], [2, 1], [1, 1], true, false), [1, 2, 6, 4]),
        (op([3, 2], [2, 3], [1, 1], true, true), [2, 1, 6, 9]),
        (op([2, 2], [3, 3], [1, 1], true, true), [1, 1, 4, 5]),
    ]
    .into_iter()
    .map(|(op, shape)| one(op, FLOATS, &Shape::from(shape)))
    .collect()
}

pub(crate) fn adaptive_samples() -> Vec<Sample> {
    [([2, 3, 7, 5], [3, 2]), ([1, 2, 4, 4], [1, 1]), ([1, 1, 3, 3], [5, 3]), ([0, 2, 4, 4], [2, 2])]
        .into_iter()
        .map(|(shape, output)| {
            one(Op::AdaptiveAvgPool2d { output: Sizes::from(output) }, FLOATS, &Shape::from(shape))
        })
        .collect()
}

const RESIZES: &[([usize; 4], [usize; 2])] =
    &[([1, 2, 3, 4], [6, 8]), ([2, 1, 5, 4], [3, 7]), ([1, 1, 1, 3], [4, 1]), ([0, 2, 2, 2], [3, 3])];

/// The ratio of two sizes.
fn ratio(input: usize, output: usize, align_corners: bool) -> Scalar {
    Scalar::Float(if !align_corners {
        input as f64 / output as f64
    } else if output > 1 {
        input.saturating_sub(1) as f64 / (output - 1) as f64
    } else {
        0.0
    })
}

pub(crate) fn nearest_samples() -> Vec<Sample> {
    let op = |shape: [usize; 4], output: [usize; 2]| Op::UpsampleNearest2d {
        output: Sizes::from(output),
        height_ratio: ratio(shape[2], output[0], false),
        width_ratio: ratio(shape[3], output[1], false),
    };
    RESIZES.iter().map(|&(shape, output)| one(op(shape, output), FLOATS, &Shape::from(shape))).collect()
}

pub(crate) fn bilinear_samples() -> Vec<Sample> {
    let op = |shape: [usize; 4], output: [usize; 2], align_corners| Op::UpsampleBilinear2d {
        output: Sizes::from(output),
        align_corners,
        height_ratio: ratio(shape[2], output[0], align_corners),
        width_ratio: ratio(shape[3], output[1], align_corners),
    };
    let all = [false, true].into_iter().flat_map(|corners| RESIZES.iter().map(move |case| (corners, case)));
    all.map(|(corners, &(shape, output))| one(op(shape, output, corners), FLOATS, &Shape::from(shape)))
        .collect()
}

/// The samples of a backward row from those of its forward row.
fn backwards(samples: Vec<Sample>) -> Vec<Sample> {
    let turn = |sample: Sample| {
        let SampleArg::Tensor(input, _) = &sample.args[0] else { return None };
        let ty = Ty::tensor(DType::F32, input);
        let result = sample.op.infer(&[ty]).ok()?;
        let op = reversed(&sample.op, input, Sizes::default())?;
        Some(one(op, FLOATS, &result[0].as_tensor()?.shape))
    };
    samples.into_iter().filter_map(turn).collect()
}

pub(crate) fn avg_pool_backward_samples() -> Vec<Sample> {
    backwards(avg_pool_samples())
}

pub(crate) fn adaptive_backward_samples() -> Vec<Sample> {
    backwards(adaptive_samples())
}

pub(crate) fn nearest_backward_samples() -> Vec<Sample> {
    backwards(nearest_samples())
}

pub(crate) fn bilinear_backward_samples() -> Vec<Sample> {
    backwards(bilinear_samples())
}
