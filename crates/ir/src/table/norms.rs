//! Rules of normalisation: over the last dims, over groups of channels, over everything but the channels.

use smallvec::smallvec;

use crate::formula::{Term, steps};
use crate::gradient::Cx;
use crate::samples::{Domain, Sample, SampleArg};
use crate::types::{checked, common_device, float, same_dtype};
use crate::{
    DType, Dims, EmitExt, GradCall, Op, Result, Scalar, Shape, TensorTy, Ty, Tys, Value, Values, Why,
};

type Rule = Result<Tys, Why>;
type Grads = Result<Vec<Option<Value>>>;

fn number(args: &[Ty], i: usize) -> Result<(), Why> {
    if args[i].is_scalar() { Ok(()) } else { Err(Why::Operand { argument: "eps", expected: "a number" }) }
}

/// Checks x, eps and what scales and shifts the result.
fn affine(args: &[Ty], shape: &[usize]) -> Rule {
    let x = float(args, 0, "x")?;
    number(args, 1)?;
    let device = common_device(args)?;
    for (i, argument) in (2..args.len()).zip(["weight", "bias"]) {
        let t = float(args, i, argument)?;
        same_dtype(argument, x, t)?;
        if t.shape[..] != *shape {
            return Err(Why::shape(argument, shape, t.shape.clone()));
        }
    }
    Ok(smallvec![Ty::Tensor(TensorTy { device, ..x.clone() })])
}

pub(crate) fn layer_norm_type(op: &Op, args: &[Ty]) -> Rule {
    let x = float(args, 0, "x")?;
    let (Op::LayerNorm { dims } | Op::RmsNorm { dims }) = *op else { return Ok(smallvec![args[0].clone()]) };
    let rank = x.shape.rank();
    if dims == 0 || dims > rank {
        return Err(Why::Dim { dim: dims as i64, rank });
    }
    affine(args, &x.shape[rank - dims..])
}

fn channels(args: &[Ty]) -> Result<usize, Why> {
    let x = float(args, 0, "x")?;
    match x.shape.get(1) {
        Some(&channels) => Ok(channels),
        None => Err(Why::Rank { argument: "x", expected: "2 or more", got: x.shape.rank() }),
    }
}

pub(crate) fn group_norm_type(op: &Op, args: &[Ty]) -> Rule {
    let count = channels(args)?;
    let Op::GroupNorm { groups } = *op else { return Ok(smallvec![args[0].clone()]) };
    if groups == 0 || !count.is_multiple_of(groups) {
        let (what, by) = ("the channels of x", "groups");
        return Err(Why::Divisible { what, size: count, by, parts: groups });
    }
    affine(args, &[count])
}

pub(crate) fn batch_norm_type(_: &Op, args: &[Ty]) -> Rule {
    affine(args, &[channels(args)?])
}

pub(crate) fn backward_type(op: &Op, args: &[Ty]) -> Rule {
    let (grad, x) = (float(args, 0, "grad")?, float(args, 1, "x")?);
    number(args, 2)?;
    common_device(args)?;
    same_dtype("x", grad, x)?;
    if grad.shape != x.shape {
        return Err(Why::shape("grad", x.shape.clone(), grad.shape.clone()));
    }
    match *op {
        Op::LayerNormBackward { dims } | Op::RmsNormBackward { dims }
            if dims == 0 || dims > x.shape.rank() =>
        {
            Err(Why::Dim { dim: dims as i64, rank: x.shape.rank() })
        }
        Op::BatchNormBackward {} => channels(args).map(|_| smallvec![args[0].clone()]),
        _ => Ok(smallvec![args[0].clone()]),
    }
}

pub(crate) fn batch_moments_type(_: &Op, args: &[Ty]) -> Rule {
    let x = float(args, 0, "x")?;
    checked(TensorTy { shape: Shape::from([2, channels(args)?]), ..x.clone() })
}

/// The dims an op normalises over.
fn over(op: &Op, rank: usize) -> Dims {
    match *op {
        Op::LayerNorm { dims }
        | Op::LayerNormBackward { dims }
        | Op::RmsNorm { dims }
        | Op::RmsNormBackward { dims } => (rank.saturating_sub(dims)..rank).collect(),
        _ => (0..rank).filter(|&d| d != 1).collect(),
    }
}

fn is_centred(op: &Op) -> bool {
    !matches!(op, Op::RmsNorm { .. } | Op::RmsNormBackward { .. })
}

/// x − mean over dims and its mean square, where a mean is taken off at all.
///
/// A sum of many elements is rounded many times, at the magnitude of x, and its mean may be off by several last
/// places. The mean of the differences from it says by how much; it is found together with the mean square and put
/// right in both. The differences of equal elements are then zero, as they should be.
fn centred<'p>(x: Term<'p>, dims: &Dims) -> (Term<'p>, Term<'p>) {
    let mean_of = |x: Term<'p>| x.mean(dims.clone(), true);
    let mean = mean_of(x);
    let rough = x - mean;
    let (off, square) = (mean_of(rough), mean_of(rough * rough));
    (x - (mean + off), (square - off * off).maximum(0.0))
}

/// x without its mean, if that is taken off, and its mean square + eps.
fn parts<'p>(op: &Op, x: Term<'p>, eps: Term<'p>) -> (Term<'p>, Term<'p>) {
    let dims = over(op, x.shape().rank());
    let (x, square) = if is_centred(op) { centred(x, &dims) } else { (x, (x * x).mean(dims, true)) };
    (x, square + eps)
}

/// The normalised x.
fn normalised<'p>(op: &Op, x: Term<'p>, eps: Term<'p>) -> Term<'p> {
    let (x, square) = parts(op, x, eps);
    x * square.rsqrt()
}

/// y · weight + bias, for those that are there.
fn scaled<'p>(y: Term<'p>, affine: impl Iterator<Item = Term<'p>>, shape: Option<&Shape>) -> Term<'p> {
    affine.enumerate().fold(y, |y, (i, operand)| {
        let operand = shape.map_or(operand, |shape| operand.reshape(shape.clone()));
        if i == 0 { y * operand } else { y + operand }
    })
}

pub(crate) fn layer_norm(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    steps!(cx, args, |x, eps; affine| scaled(normalised(op, x, eps), affine, None))
}

/// The shape in which a vector of channels broadcasts against x.
fn by_channel(x: &Shape) -> Shape {
    (1..x.rank()).map(|d| if d == 1 { x[1] } else { 1 }).collect()
}

pub(crate) fn batch_norm(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    steps!(cx, args, |x, eps; affine| scaled(normalised(op, x, eps), affine, Some(&by_channel(&x.shape()))))
}

/// Rows that hold one group of one sample each.
fn by_group(groups: usize, x: &Shape) -> Shape {
    let length = x[1..].iter().product::<usize>() / groups;
    Shape::from([x[0].saturating_mul(groups), length])
}

/// layer_norm over [such rows](by_group).
pub(crate) fn group_norm(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::GroupNorm { groups } = *op else { return Ok(smallvec![args[0]]) };
    let shape = cx.tensor_ty(args[0]).shape;
    let rows = by_group(groups, &shape);
    steps!(cx, args, |x, eps; affine| {
        let y = x.reshape(rows).layer_norm(eps, 1).reshape(shape.clone());
        scaled(y, affine, Some(&by_channel(&shape)))
    })
}

/// (g − mean g − x · mean(g · x) / s) / √s, where x is without its mean and s its mean square + eps; without
/// centring, mean g is left out. By s and not by its root, whose rounding would count twice where g and x are alike.
pub(crate) fn backward(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let dims = over(op, cx.tensor_ty(args[1]).shape.rank());
    steps!(cx, args, |g, x, eps| {
        let (x, square) = parts(op, x, eps);
        let along = x * ((g * x).mean(dims.clone(), true) / square);
        let rest = if is_centred(op) { g - g.mean(dims, true) } else { g };
        (rest - along) * square.rsqrt()
    })
}

pub(crate) fn batch_moments(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let x = args[0];
    let shape = cx.tensor_ty(x).shape;
    let dims = over(op, shape.rank());
    let mean = cx.mean(x, dims.clone(), true)?;
    let centred = cx.sub(x, mean)?;
    let square = cx.mul(centred, centred)?;
    let variance = cx.mean(square, dims, true)?;
    let row = Shape::from([1, shape[1]]);
    let (mean, variance) = (cx.reshape(mean, row.clone())?, cx.reshape(variance, row)?);
    Ok(smallvec![cx.cat(&[mean, variance], 0)?])
}

/// The gradients of x and of what scales and shifts, which are broadcast as `shape`; `back` gives the gradient of x for
/// that of the normalised x, for x and eps.
fn gradients(
    cx: Cx<'_>,
    call: &GradCall<'_>,
    shape: Option<Shape>,
    back: impl Fn(Cx<'_>, [Value; 3]) -> Result<Value>,
) -> Grads {
    let Some(g) = call.grads[0] else { return Ok(vec![None; call.inputs.len()]) };
    let (x, eps) = (call.inputs[0], call.inputs[1]);
    let gx = match (call.wants(0), call.inputs.get(2)) {
        (false, _) => None,
        (true, None) => Some(back(cx, [g, x, eps])?),
        (true, Some(&weight)) => {
            let weight = match &shape {
                Some(shape) => cx.reshape(weight, shape.clone())?,
                None => weight,
            };
            let scaled = cx.mul(g, weight)?;
            Some(back(cx, [scaled, x, eps])?)
        }
    };
    let mut grads = vec![gx, None];
    for (i, &operand) in call.inputs.iter().enumerate().skip(2) {
        if !call.wants(i) {
            grads.push(None);
            continue;
        }
        let mut part = g;
        if i == 2 {
            let y = cx.emit_one(call.op.clone(), &[x, eps])?;
            part = cx.mul(g, y)?;
        }
        // Over the last dims a gradient of x's shape is fitted by itself.
        grads.push(Some(match &shape {
            Some(_) => {
                let rank = cx.tensor_ty(x).shape.rank();
                let sum = cx.sum(part, (0..rank).filter(|&d| d != 1).collect(), false)?;
                let own = cx.tensor_ty(operand).shape;
                cx.reshape(sum, own)?
            }
            None => part,
        }));
    }
    Ok(grads)
}

pub(crate) fn layer_norm_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::LayerNorm { dims } = *call.op else { return Ok(vec![None; call.inputs.len()]) };
    gradients(cx, call, None, |cx, args| cx.emit_one(Op::LayerNormBackward { dims }, &args))
}

pub(crate) fn rms_norm_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::RmsNorm { dims } = *call.op else { return Ok(vec![None; call.inputs.len()]) };
    gradients(cx, call, None, |cx, args| cx.emit_one(Op::RmsNormBackward { dims }, &args))
}

pub(crate) fn batch_norm_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let shape = by_channel(&cx.tensor_ty(call.inputs[0]).shape);
    gradients(cx, call, Some(shape), |cx, args| cx.emit_one(Op::BatchNormBackward {}, &args))
}

/// By rows, as the op itself.
pub(crate) fn group_norm_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let Op::GroupNorm { groups } = *call.op else { return Ok(vec![None; call.inputs.len()]) };
    let shape = &cx.tensor_ty(call.inputs[0]).shape;
    let rows = by_group(groups, shape);
    gradients(cx, call, Some(by_channel(shape)), |cx, [g, x, eps]| {
        let (g, x) = (cx.reshape(g, rows.clone())?, cx.reshape(x, rows.clone())?);
        let own = cx.emit_one(Op::LayerNormBackward { dims: 1 }, &[g, x, eps])?;
        cx.reshape(own, shape.clone())
    })
}

fn call(op: Op, shapes: &[&[usize]], eps_at: Option<usize>) -> Sample {
    let mut args: Vec<SampleArg> =
        shapes.iter().map(|s| SampleArg::Tensor(Shape::from(*s), Domain::Any)).collect();
    if let Some(at) = eps_at {
        args.insert(at, SampleArg::Number(Scalar::Float(1e-3)));
    }
    Sample { op, args, dtypes: &[DType::F32, DType::F64] }
}

const ROWS: &[(&[usize], usize)] =
    &[(&[4, 37], 1), (&[2, 3, 5], 2), (&[7], 1), (&[0, 3], 1), (&[2, 3, 300], 1)];

fn over_rows(op: fn(usize) -> Op, operands: usize) -> Vec<Sample> {
    let mut samples = Vec::new();
    for &(shape, dims) in ROWS {
        let own = &shape[shape.len() - dims..];
        let all = [shape, own, own];
        for count in 1..=operands {
            samples.push(call(op(dims), &all[..count], Some(1)));
        }
    }
    samples
}

pub(crate) fn layer_norm_samples() -> Vec<Sample> {
    over_rows(|dims| Op::LayerNorm { dims }, 3)
}

pub(crate) fn rms_norm_samples() -> Vec<Sample> {
    over_rows(|dims| Op::RmsNorm { dims }, 2)
}

pub(crate) fn layer_norm_backward_samples() -> Vec<Sample> {
    ROWS.iter().map(|&(s, dims)| call(Op::LayerNormBackward { dims }, &[s, s], Some(2))).collect()
}

pub(crate) fn rms_norm_backward_samples() -> Vec<Sample> {
    ROWS.iter().map(|&(s, dims)| call(Op::RmsNormBackward { dims }, &[s, s], Some(2))).collect()
}

pub(crate) fn group_norm_samples() -> Vec<Sample> {
    vec![
        call(Op::GroupNorm { groups: 2 }, &[&[3, 4, 5]], Some(1)),
        call(Op::GroupNorm { groups: 3 }, &[&[2, 6, 3, 2], &[6]], Some(1)),
        call(Op::GroupNorm { groups: 1 }, &[&[2, 4, 2, 3], &[4], &[4]], Some(1)),
        call(Op::GroupNorm { groups: 4 }, &[&[1, 4, 7], &[4], &[4]], Some(1)),
        call(Op::GroupNorm { groups: 2 }, &[&[0, 4, 3]], Some(1)),
    ]
}

pub(crate) fn batch_norm_samples() -> Vec<Sample> {
    vec![
        call(Op::BatchNorm {}, &[&[5, 4]], Some(1)),
        call(Op::BatchNorm {}, &[&[3, 4, 7], &[4]], Some(1)),
        call(Op::BatchNorm {}, &[&[2, 3, 4, 5], &[3], &[3]], Some(1)),
        call(Op::BatchNorm {}, &[&[1, 2, 9, 1], &[2], &[2]], Some(1)),
        call(Op::BatchNorm {}, &[&[3, 0, 2]], Some(1)),
    ]
}

const CHANNELS: &[&[usize]] = &[&[5, 4], &[3, 4, 7], &[2, 3, 4, 5], &[1, 2, 9, 1], &[3, 0, 2]];

pub(crate) fn batch_norm_backward_samples() -> Vec<Sample> {
    CHANNELS.iter().map(|s| call(Op::BatchNormBackward {}, &[s, s], Some(2))).collect()
}

pub(crate) fn batch_moments_samples() -> Vec<Sample> {
    CHANNELS.iter().map(|s| call(Op::BatchMoments {}, &[s], None)).collect()
}
