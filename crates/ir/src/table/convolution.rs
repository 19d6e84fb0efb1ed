//! Rules of convolution and its two gradients. Each is linear in both operands, and each is a gradient of the
//! others, so they can be differentiated any number of times.

use smallvec::smallvec;

use crate::gradient::Cx;
use crate::samples::{Domain, Sample, SampleArg};
use crate::types::{checked, common_device, float, same_dtype};
use crate::{
    DType, Dims, EmitExt, GradCall, Op, Result, Shape, Sizes, TensorTy, Ty, Tys, Value, Values, Why,
};

type Rule = Result<Tys, Why>;
type Grads = Result<Vec<Option<Value>>>;
/// What the three rows have in common.
#[derive(Clone)]
struct Window {
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: usize,
}

impl Window {
    fn of(op: &Op) -> Option<Window> {
        match op {
            Op::Convolution { stride, padding, dilation, groups }
            | Op::ConvolutionInputGradient { stride, padding, dilation, groups, .. }
            | Op::ConvolutionWeightGradient { stride, padding, dilation, groups, .. } => Some(Window {
                stride: stride.clone(),
                padding: padding.clone(),
                dilation: dilation.clone(),
                groups: *groups,
            }),
            _ => None,
        }
    }

    fn forward(self) -> Op {
        let Window { stride, padding, dilation, groups } = self;
        Op::Convolution { stride, padding, dilation, groups }
    }

    fn input_gradient(self, input: Shape) -> Op {
        let input = Sizes::from(&input);
        let Window { stride, padding, dilation, groups } = self;
        Op::ConvolutionInputGradient { input, stride, padding, dilation, groups }
    }

    fn weight_gradient(self, weight: Shape) -> Op {
        let weight = Sizes::from(&weight);
        let Window { stride, padding, dilation, groups } = self;
        Op::ConvolutionWeightGradient { weight, stride, padding, dilation, groups }
    }

    /// The shape of the result for an input and filters.
    fn output(&self, x: &Shape, weight: &Shape) -> Result<Shape, Why> {
        let dims = x.rank().saturating_sub(2);
        if !(1..=2).contains(&dims) {
            return Err(Why::Rank { argument: "x", expected: "3 or 4", got: x.rank() });
        }
        if weight.rank() != x.rank() {
            return Err(Why::sizes("the ranks of weight and x", weight.rank(), x.rank()));
        }
        for (what, list) in [
            ("entries of stride, one per spatial dim", &self.stride),
            ("entries of padding, one per spatial dim", &self.padding),
            ("entries of dilation, one per spatial dim", &self.dilation),
        ] {
            if list.len() != dims {
                return Err(Why::Count { what, expected: dims, got: list.len() });
            }
        }
        for (argument, list) in [("stride", &self.stride), ("dilation", &self.dilation)] {
            if list.contains(&0) {
                return Err(Why::none(argument));
            }
        }
        let (by, parts) = ("groups", self.groups);
        if parts == 0 {
            return Err(Why::none(by));
        }
        for (what, size) in [("the channels of x", x[1]), ("the channels of the result", weight[0])] {
            if !size.is_multiple_of(parts) {
                return Err(Why::Divisible { what, size, by, parts });
            }
        }
        if x[1] / self.groups != weight[1] {
            return Err(Why::sizes("the channels per group of x and weight", x[1] / self.groups, weight[1]));
        }
        let mut shape = Shape::from([x[0], weight[0]]);
        for d in 0..dims {
            let (size, kernel) = (x[d + 2], weight[d + 2]);
            let fail = || Why::Window { kernel, size };
            if kernel == 0 {
                return Err(fail());
            }
            let reach = (kernel - 1).checked_mul(self.dilation[d]).and_then(|reach| reach.checked_add(1));
            let padded = self.padding[d].checked_mul(2).and_then(|p| p.checked_add(size)).ok_or_else(fail)?;
            shape.push(padded.checked_sub(reach.ok_or_else(fail)?).ok_or_else(fail)? / self.stride[d] + 1);
        }
        Ok(shape)
    }
}

fn same(what: &'static str, want: &Shape, got: &Shape) -> Result<(), Why> {
    if want == got { Ok(()) } else { Err(Why::shape(what, want.clone(), got.clone())) }
}

pub(crate) fn forward_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, weight) = (float(args, 0, "x")?, float(args, 1, "weight")?);
    let device = common_device(args)?;
    same_dtype("weight", x, weight)?;
    let Some(window) = Window::of(op) else { return Ok(smallvec![args[0].clone()]) };
    let shape = window.output(&x.shape, &weight.shape)?;
    if args.len() > 2 {
        let bias = float(args, 2, "bias")?;
        same_dtype("bias", x, bias)?;
        same("bias", &Shape::from([weight.shape[0]]), &bias.shape)?;
    }
    checked(TensorTy { dtype: x.dtype, device, shape })
}

pub(crate) fn input_type(op: &Op, args: &[Ty]) -> Rule {
    let (grad, weight) = (float(args, 0, "grad")?, float(args, 1, "weight")?);
    let device = common_device(args)?;
    same_dtype("weight", grad, weight)?;
    let (Op::ConvolutionInputGradient { input, .. }, Some(window)) = (op, Window::of(op)) else {
        return Ok(smallvec![args[0].clone()]);
    };
    let shape = Shape::from(input);
    same("grad", &window.output(&shape, &weight.shape)?, &grad.shape)?;
    checked(TensorTy { dtype: grad.dtype, device, shape })
}

pub(crate) fn weight_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, grad) = (float(args, 0, "x")?, float(args, 1, "grad")?);
    let device = common_device(args)?;
    same_dtype("grad", x, grad)?;
    let (Op::ConvolutionWeightGradient { weight, .. }, Some(window)) = (op, Window::of(op)) else {
        return Ok(smallvec![args[0].clone()]);
    };
    let shape = Shape::from(weight);
    same("grad", &window.output(&x.shape, &shape)?, &grad.shape)?;
    checked(TensorTy { dtype: x.dtype, device, shape })
}

/// A convolution with a bias is one without, plus the bias.
pub(crate) fn forward(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let y = cx.emit_one(op.clone(), &args[..2])?;
    let Some(&bias) = args.get(2) else { return Ok(smallvec![y]) };
    let shape = cx.tensor_ty(y).shape;
    let column = (1..shape.rank()).map(|d| if d == 1 { shape[1] } else { 1 }).collect();
    let bias = cx.reshape(bias, column)?;
    Ok(smallvec![cx.add(y, bias)?])
}

/// Emits an op if its result is wanted.
fn wanted(cx: Cx<'_>, wants: bool, op: Op, args: [Value; 2]) -> Result<Option<Value>> {
    if wants { cx.emit_one(op, &args).map(Some) } else { Ok(None) }
}

pub(crate) fn forward_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (Some(g), Some(window)) = (call.grads[0], Window::of(call.op)) else {
        return Ok(vec![None; call.inputs.len()]);
    };
    let (x, weight) = (call.inputs[0], call.inputs[1]);
    let (input, filters) = (cx.tensor_ty(x).shape, cx.tensor_ty(weight).shape);
    let gx = wanted(cx, call.wants(0), window.clone().input_gradient(input.clone()), [g, weight])?;
    let gweight = wanted(cx, call.wants(1), window.weight_gradient(filters), [x, g])?;
    let mut grads = vec![gx, gweight];
    if call.inputs.len() > 2 {
        let dims: Dims = (0..input.rank()).filter(|&d| d != 1).collect();
        grads.push(call.wanted(cx, 2, |cx| cx.sum(g, dims, false))?);
    }
    Ok(grads)
}

pub(crate) fn input_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (Some(g), Some(window)) = (call.grads[0], Window::of(call.op)) else { return Ok(vec![None, None]) };
    let (grad, weight) = (call.inputs[0], call.inputs[1]);
    let filters = cx.tensor_ty(weight).shape;
    let ggrad = wanted(cx, call.wants(0), window.clone().forward(), [g, weight])?;
    let gweight = wanted(cx, call.wants(1), window.weight_gradient(filters), [g, grad])?;
    Ok(vec![ggrad, gweight])
}

pub(crate) fn weight_gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (Some(g), Some(window)) = (call.grads[0], Window::of(call.op)) else { return Ok(vec![None, None]) };
    let (x, grad) = (call.inputs[0], call.inputs[1]);
    let input = cx.tensor_ty(x).shape;
    let gx = wanted(cx, call.wants(0), window.clone().input_gradient(input), [grad, g])?;
    let ggrad = wanted(cx, call.wants(1), window.forward(), [x, g])?;
    Ok(vec![gx, ggrad])
}

const FLOATS: &[DType] = &[DType::F32, DType::F64];

/// Input, filters and window of the sample calls.
fn cases() -> Vec<(Shape, Shape, Window)> {
    let case = |x: &[usize], w: &[usize], s: &[usize], p: &[usize], d: &[usize], groups: usize| {
        let window = Window { stride: s.into(), padding: p.into(), dilation: d.into(), groups };
        (Shape::from(x), Shape::from(w), window)
    };
    vec![
        case(&[2, 3, 5, 6], &[4, 3, 3, 3], &[1, 1], &[1, 1], &[1, 1], 1),
        case(&[1, 2, 7, 6], &[3, 2, 3, 2], &[2, 3], &[1, 0], &[1, 1], 1),
        case(&[2, 4, 6, 6], &[6, 2, 2, 3], &[2, 1], &[0, 2], &[1, 2], 2),
        case(&[1, 3, 5, 5], &[6, 1, 3, 3], &[1, 2], &[1, 1], &[1, 1], 3),
        case(&[2, 3, 4, 4], &[5, 3, 1, 1], &[1, 1], &[0, 0], &[1, 1], 1),
        case(&[2, 3, 9], &[4, 3, 3], &[2], &[2], &[2], 1),
        case(&[0, 2, 4, 4], &[3, 2, 2, 2], &[1, 1], &[0, 0], &[1, 1], 1),
    ]
}

fn call(op: Op, shapes: &[Shape]) -> Sample {
    let args = shapes.iter().map(|s| SampleArg::Tensor(s.clone(), Domain::Any)).collect();
    Sample { op, args, dtypes: FLOATS }
}

pub(crate) fn forward_samples() -> Vec<Sample> {
    let mut samples: Vec<Sample> =
        cases().into_iter().map(|(x, weight, window)| call(window.forward(), &[x, weight])).collect();
    for (x, weight, window) in cases().into_iter().skip(2) {
        let bias = Shape::from([weight[0]]);
        samples.push(call(window.forward(), &[x, weight, bias]));
    }
    samples
}

pub(crate) fn input_samples() -> Vec<Sample> {
    let fits = |(x, weight, window): (Shape, Shape, Window)| {
        let grad = window.output(&x, &weight).ok()?;
        Some(call(window.input_gradient(x), &[grad, weight]))
    };
    cases().into_iter().filter_map(fits).collect()
}

pub(crate) fn weight_samples() -> Vec<Sample> {
    let fits = |(x, weight, window): (Shape, Shape, Window)| {
        let grad = window.output(&x, &weight).ok()?;
        Some(call(window.weight_gradient(weight), &[x, grad]))
    };
    cases().into_iter().filter_map(fits).collect()
}
