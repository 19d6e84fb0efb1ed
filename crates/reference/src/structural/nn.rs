//! Evaluation of the rows of neural networks: products in batches, convolution, pooling, resizing,
//! normalisation, each as its definition in plain loops.

use kiln_ir::{DType, Op, Shape, Sizes, broadcast};

use crate::Array;
use crate::structural::{coordinates, expand, position};

/// What an op of this theme computes, before it is rounded; `None` for other ops.
pub(crate) fn evaluate(op: &Op, args: &[Array], shape: &Shape, dtype: DType) -> Option<Array> {
    Some(match op {
        Op::Bmm {} => products(&args[0], &args[1], None, dtype),
        Op::Baddbmm {} => products(&args[1], &args[2], Some(&expand(&args[0], shape)), dtype),
        Op::Matmul {} => matmul(&args[0], &args[1], shape, dtype),
        Op::Convolution { stride, padding, dilation, groups } => {
            let (x, weight) = (&args[0], &args[1]);
            let window = Window { stride, padding, dilation, groups: *groups };
            let mut out = vec![0.0; shape.numel()];
            window.each(shape, &x.shape, &weight.shape, |o, i, w| out[o] += x.float(i) * weight.float(w));
            if let Some(bias) = args.get(2) {
                let pixels: usize = shape[2..].iter().product();
                (0..out.len()).for_each(|i| out[i] += bias.float(i / pixels % shape[1]));
            }
            Array::floats(DType::F64, shape, |i| out[i])
        }
        Op::ConvolutionInputGradient { stride, padding, dilation, groups, .. } => {
            let (grad, weight) = (&args[0], &args[1]);
            let window = Window { stride, padding, dilation, groups: *groups };
            let mut out = vec![0.0; shape.numel()];
            window.each(&grad.shape, shape, &weight.shape, |o, i, w| {
                out[i] += grad.float(o) * weight.float(w);
            });
            Array::floats(DType::F64, shape, |i| out[i])
        }
        Op::ConvolutionWeightGradient { stride, padding, dilation, groups, .. } => {
            let (x, grad) = (&args[0], &args[1]);
            let window = Window { stride, padding, dilation, groups: *groups };
            let mut out = vec![0.0; shape.numel()];
            window.each(&grad.shape, &x.shape, shape, |o, i, w| out[w] += grad.float(o) * x.float(i));
            Array::floats(DType::F64, shape, |i| out[i])
        }
        Op::MaxPool2dIndices { kernel, stride, padding, dilation, .. } => {
            max_pool(&args[0], shape, kernel, stride, padding, dilation)
        }
        Op::AvgPool2d { .. }
        | Op::AdaptiveAvgPool2d { .. }
        | Op::UpsampleNearest2d { .. }
        | Op::UpsampleBilinear2d { .. } => {
            let mut out = vec![0.0; shape.numel()];
            resample(op, &args[0].shape, shape, |i, o, weight| out[o] += weight * args[0].float(i));
            Array::floats(DType::F64, shape, |i| out[i])
        }
        Op::AvgPool2dBackward { .. }
        | Op::AdaptiveAvgPool2dBackward { .. }
        | Op::UpsampleNearest2dBackward { .. }
        | Op::UpsampleBilinear2dBackward { .. } => {
            let mut out = vec![0.0; shape.numel()];
            resample(op, shape, &args[0].shape, |i, o, weight| out[i] += weight * args[0].float(o));
            Array::floats(DType::F64, shape, |i| out[i])
        }
        Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::GroupNorm { .. } | Op::BatchNorm {} => {
            let y = normalised(op, &args[0], args[1].float(0)).0;
            let column = |i: usize| match op {
                Op::LayerNorm { .. } | Op::RmsNorm { .. } => i % args[2].numel(),
                _ => i / shape[2..].iter().product::<usize>() % shape[1],
            };
            Array::floats(DType::F64, shape, |i| {
                let scaled = args.get(2).map_or(y[i], |weight| y[i] * weight.float(column(i)));
                args.get(3).map_or(scaled, |bias| scaled + bias.float(column(i)))
            })
        }
        Op::LayerNormBackward { .. } | Op::RmsNormBackward { .. } | Op::BatchNormBackward {} => {
            norm_backward(op, &args[0], &args[1], args[2].float(0))
        }
        Op::BatchMoments {} => {
            let x = &args[0];
            let groups = groups(op, &x.shape);
            let count = |c: usize| groups.iter().filter(|&&g| g == c).count() as f64;
            let mean = |c: usize| sum_of(&groups, c, |i| x.float(i)) / count(c);
            let variance = |c: usize| {
                let mean = mean(c);
                sum_of(&groups, c, |i| (x.float(i) - mean).powi(2)) / count(c)
            };
            let channels = shape[1];
            Array::floats(DType::F64, shape, |i| if i < channels { mean(i) } else { variance(i - channels) })
        }
        Op::BinaryCrossEntropyWithLogits {} => {
            let [x, target, weight] = [0, 1, 2].map(|k| expand(&args[k], shape));
            Array::floats(DType::F64, shape, |i| {
                let (x, t, w) = (x.float(i), target.float(i), weight.float(i));
                // log σ(x) = −log(1 + e⁻ˣ)
                let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
                w * t * softplus(-x) + (1.0 - t) * softplus(x)
            })
        }
        Op::BinaryCrossEntropy {} => {
            let [x, target] = [0, 1].map(|k| expand(&args[k], shape));
            let log = |x: f64| x.ln().max(-100.0);
            Array::floats(DType::F64, shape, |i| {
                -(target.float(i) * log(x.float(i)) + (1.0 - target.float(i)) * log(1.0 - x.float(i)))
            })
        }
        _ => return None,
    })
}

fn products(x: &Array, y: &Array, plus: Option<&Array>, dtype: DType) -> Array {
    let (b, m, k, n) = (x.shape[0], x.shape[1], x.shape[2], y.shape[2]);
    let shape = Shape::from([b, m, n]);
    let (mut float, mut int) = (vec![0.0; b * m * n], vec![0i64; b * m * n]);
    coordinates(&shape, |at| {
        let out = position(&shape, at);
        for p in 0..k {
            let (i, j) = ((at[0] * m + at[1]) * k + p, (at[0] * k + p) * n + at[2]);
            float[out] += x.float(i) * y.float(j);
            int[out] = int[out].wrapping_add(x.int(i).wrapping_mul(y.int(j)));
        }
        if let Some(plus) = plus {
            float[out] += plus.float(out);
            int[out] = int[out].wrapping_add(plus.int(out));
        }
    });
    if dtype.is_float() {
        Array::floats(dtype, &shape, |i| float[i])
    } else {
        Array::ints(dtype, &shape, |i| int[i])
    }
}

fn matmul(x: &Array, y: &Array, shape: &Shape, dtype: DType) -> Array {
    let pad = |s: &Shape, last: bool| match (s.rank(), last) {
        (1, false) => Shape::from([1, s[0]]),
        (1, true) => Shape::from([s[0], 1]),
        _ => s.clone(),
    };
    let (left, right) = (pad(&x.shape, false), pad(&y.shape, true));
    let lead = |s: &Shape| Shape::from(&s[..s.rank() - 2]);
    let batch = broadcast(&lead(&left), &lead(&right)).unwrap_or_default();
    let stack = |a: &Array, s: &Shape| {
        let mut wide = batch.clone();
        wide.push(s[s.rank() - 2]);
        wide.push(s[s.rank() - 1]);
        let flat = Shape::from([batch.numel(), s[s.rank() - 2], s[s.rank() - 1]]);
        let spread = expand(&a.take(s.clone(), 0..a.numel()), &wide);
        spread.take(flat, 0..spread.numel())
    };
    let result = products(&stack(x, &left), &stack(y, &right), None, dtype);
    result.take(shape.clone(), 0..shape.numel())
}

struct Window<'a> {
    stride: &'a Sizes,
    padding: &'a Sizes,
    dilation: &'a Sizes,
    groups: usize,
}

impl Window<'_> {
    /// Calls `f` with the places in output, input and filters of every product of the convolution.
    fn each(&self, output: &Shape, input: &Shape, weight: &Shape, mut f: impl FnMut(usize, usize, usize)) {
        let filters = output[1] / self.groups;
        coordinates(output, |at| {
            let mut taps = Shape::from(&weight[1..]);
            taps[0] = input[1] / self.groups;
            coordinates(&taps, |tap| {
                let mut from = vec![at[0], at[1] / filters * taps[0] + tap[0]];
                for d in 0..taps.rank() - 1 {
                    let place = (at[d + 2] * self.stride[d] + tap[d + 1] * self.dilation[d])
                        .checked_sub(self.padding[d]);
                    match place {
                        Some(place) if place < input[d + 2] => from.push(place),
                        _ => return,
                    }
                }
                let filter: Vec<usize> = [&[at[1]], tap].concat();
                f(position(output, at), position(input, &from), position(weight, &filter));
            });
        });
    }
}

fn max_pool(
    x: &Array,
    shape: &Shape,
    kernel: &Sizes,
    stride: &Sizes,
    padding: &Sizes,
    dilation: &Sizes,
) -> Array {
    let (height, width) = (x.shape[2], x.shape[3]);
    let mut best = Vec::with_capacity(shape.numel());
    coordinates(shape, |at| {
        let mut found: Option<(usize, usize)> = None;
        coordinates(kernel, |tap| {
            let place = |d: usize| (at[d + 2] * stride[d] + tap[d] * dilation[d]).checked_sub(padding[d]);
            let (Some(row), Some(column)) = (place(0), place(1)) else { return };
            if row >= height || column >= width {
                return;
            }
            let (flat, index) = (position(&x.shape, &[at[0], at[1], row, column]), row * width + column);
            let wins = match found {
                None => true,
                Some((old, _)) if x.dtype.is_float() => {
                    let (old, new) = (x.float(old), x.float(flat));
                    new > old || new.is_nan()
                }
                Some((old, _)) => x.int(flat) > x.int(old),
            };
            if wins {
                found = Some((flat, index));
            }
        });
        best.push(found.map_or(0, |(_, index)| index as i64));
    });
    Array::ints(DType::I64, shape, |i| best[i])
}

/// Calls `f` with the place in the input, the place in the output and the weight of every pair that a pooling
/// or resizing row joins.
fn resample(op: &Op, input: &Shape, output: &Shape, mut f: impl FnMut(usize, usize, f64)) {
    coordinates(output, |at| {
        coordinates(&input[2..], |from| {
            let weight = (0..2).map(|d| along(op, d, input[d + 2], output[d + 2], from[d], at[d + 2]));
            let weight: f64 = weight.product();
            if weight != 0.0 {
                f(position(input, &[at[0], at[1], from[0], from[1]]), position(output, at), weight);
            }
        });
    });
}

/// How much element `i` of an input of `size` counts in element `o` of an output of `count`, along dim `d`.
fn along(op: &Op, d: usize, size: usize, count: usize, i: usize, o: usize) -> f64 {
    match op {
        Op::AvgPool2d { kernel, stride, padding, count_include_pad, .. }
        | Op::AvgPool2dBackward { kernel, stride, padding, count_include_pad, .. } => {
            let (size, pad) = (size as i64, padding[d] as i64);
            let begin = (o * stride[d]) as i64 - pad;
            let end = (begin + kernel[d] as i64).min(size + pad);
            let (first, last) = (begin.max(0), end.min(size));
            let count = if *count_include_pad { end - begin } else { last - first };
            if (first..last).contains(&(i as i64)) { 1.0 / count as f64 } else { 0.0 }
        }
        Op::AdaptiveAvgPool2d { .. } | Op::AdaptiveAvgPool2dBackward { .. } => {
            let first = (o as f64 * size as f64 / count as f64).floor() as usize;
            let last = ((o + 1) as f64 * size as f64 / count as f64).ceil() as usize;
            if (first..last).contains(&i) { 1.0 / (last - first) as f64 } else { 0.0 }
        }
        Op::UpsampleNearest2d { .. } | Op::UpsampleNearest2dBackward { .. } => {
            f64::from(i == (o * size / count).min(size - 1))
        }
        Op::UpsampleBilinear2d { align_corners, .. }
        | Op::UpsampleBilinear2dBackward { align_corners, .. } => {
            let at = if !align_corners {
                (o as f64 + 0.5) * size as f64 / count as f64 - 0.5
            } else if count > 1 {
                o as f64 * (size - 1) as f64 / (count - 1) as f64
            } else {
                0.0
            };
            // A hat of width one around the position, which is kept inside.
            (1.0 - (at.clamp(0.0, (size - 1) as f64) - i as f64).abs()).max(0.0)
        }
        _ => 0.0,
    }
}

/// For each element, the number of the group it is normalised with.
fn groups(op: &Op, shape: &Shape) -> Vec<usize> {
    let rank = shape.rank();
    let length = |dims: usize| shape[rank - dims..].iter().product::<usize>().max(1);
    let group = |i: usize| match op {
        Op::LayerNorm { dims }
        | Op::LayerNormBackward { dims }
        | Op::RmsNorm { dims }
        | Op::RmsNormBackward { dims } => i / length(*dims),
        Op::GroupNorm { groups } => i / (length(rank - 1) / groups),
        _ => i / length(rank - 2) % shape[1],
    };
    (0..shape.numel()).map(group).collect()
}

fn sum_of(groups: &[usize], group: usize, f: impl Fn(usize) -> f64) -> f64 {
    (0..groups.len()).filter(|&i| groups[i] == group).map(f).sum()
}

/// The normalised elements, and for each the factor 1 / √(mean square + eps).
fn normalised(op: &Op, x: &Array, eps: f64) -> (Vec<f64>, Vec<f64>) {
    let groups = groups(op, &x.shape);
    let centred = !matches!(op, Op::RmsNorm { .. } | Op::RmsNormBackward { .. });
    let moments: Vec<(f64, f64)> = (0..groups.iter().max().map_or(0, |g| g + 1))
        .map(|group| {
            let count = groups.iter().filter(|&&g| g == group).count() as f64;
            let mean = if centred { sum_of(&groups, group, |i| x.float(i)) / count } else { 0.0 };
            let square = sum_of(&groups, group, |i| (x.float(i) - mean).powi(2)) / count;
            (mean, 1.0 / (square + eps).sqrt())
        })
        .collect();
    let scale: Vec<f64> = groups.iter().map(|&g| moments[g].1).collect();
    ((0..x.numel()).map(|i| (x.float(i) - moments[groups[i]].0) * scale[i]).collect(), scale)
}

fn norm_backward(op: &Op, grad: &Array, x: &Array, eps: f64) -> Array {
    let groups = groups(op, &x.shape);
    let centred = !matches!(op, Op::RmsNormBackward { .. });
    let (y, scale) = normalised(op, x, eps);
    let means: Vec<(f64, f64)> = (0..groups.iter().max().map_or(0, |g| g + 1))
        .map(|group| {
            let count = groups.iter().filter(|&&g| g == group).count() as f64;
            let mean = if centred { sum_of(&groups, group, |i| grad.float(i)) / count } else { 0.0 };
            (mean, sum_of(&groups, group, |i| grad.float(i) * y[i]) / count)
        })
        .collect();
    Array::floats(DType::F64, &x.shape, |i| {
        let (mean, slope) = means[groups[i]];
        scale[i] * (grad.float(i) - mean - y[i] * slope)
    })
}
