//! The same case with other sizes, dtypes, layouts and values.

use std::sync::Arc;

use kiln_aot::trace::{Event, InputVariable, TraceArg, Variable, VariableInfo};
use kiln_ir::{DType, Layout, Op, Result, Scalar, Shape, Ty};
use kiln_tensor::Tensor;

use crate::case::Case;

/// The largest size of an input that is not among these.
pub(crate) fn largest(case: &Case, except: &[usize]) -> Option<usize> {
    let sizes = case.inputs.values().flat_map(|input| input.values.shape().to_vec());
    sizes.filter(|size| *size > 1 && !except.contains(size)).max()
}

/// Sizes to try in place of one, the best first: small ones, and those next to where vectors and blocks end.
pub(crate) fn smaller(size: usize) -> Vec<usize> {
    let mut tries: Vec<usize> = vec![1, 2, 3, 5, 9, 17, 33, 65, 129];
    tries.extend([
        size / 16,
        size / 4,
        size / 2,
        size.next_power_of_two() / 2 + 1,
        size.next_power_of_two() / 2,
    ]);
    tries.push(size.saturating_sub(1));
    tries.retain(|&other| other > 0 && other < size);
    tries.sort_unstable();
    tries.dedup();
    tries
}

/// The same program on smaller inputs, a few of them: what a template for many sizes is made from. Sizes of data come
/// first, those of parameters are mostly fixed.
pub fn other_sizes(case: &Case) -> Vec<Case> {
    let sizes_of = |parameters: bool| -> Vec<usize> {
        let inputs = case.recording.inputs().filter(|(_, input)| input.requires_grad == parameters);
        let mut sizes: Vec<usize> = inputs.flat_map(|(_, input)| input.layout.shape.to_vec()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes.retain(|&size| size > 3);
        sizes
    };
    let (mut sizes, fixed) = (sizes_of(false), sizes_of(true));
    sizes.sort_by_key(|size| fixed.contains(size));
    sizes.extend(fixed.iter().copied().filter(|size| !sizes_of(false).contains(size)));
    sizes.into_iter().filter_map(|size| resized(case, size, size - 1)).take(3).collect()
}

/// The same program with other numbers, and with inputs that lie differently in memory: what a recording must tell apart
/// from it, or serve as well.
pub fn other_calls(case: &Case) -> Vec<Case> {
    let mut numbers = case.clone();
    for number in &mut numbers.numbers {
        if let Scalar::Float(x) = number {
            *x = *x * 1.5 + 0.25;
        }
    }
    let mut turned = case.clone();
    for (variable, input) in case.recording.inputs() {
        let layout = &input.layout;
        if layout.shape.rank() < 2 || case.inputs.get(&variable).is_some_and(|input| input.shares.is_some()) {
            continue;
        }
        let mut other = Layout::contiguous(layout.shape.clone());
        let is_dense = layout.strides == other.strides;
        if is_dense {
            let mut stride = 1;
            for dim in 0..other.shape.rank() {
                other.strides[dim] = stride as isize;
                stride *= other.shape[dim].max(1);
            }
        }
        turned = with_input(&turned, variable, InputVariable { layout: Arc::new(other), ..input.clone() });
    }
    vec![numbers, turned]
}

/// The case with one size everywhere in place of another. `None` if that is no program.
pub(crate) fn resized(case: &Case, from: usize, to: usize) -> Option<Case> {
    let size = |size: usize| if size == from { to } else { size };
    let attribute = |op: &Op, name: &str, value: &str| {
        if !op.goes_with_sizes(name) {
            return value.to_string();
        }
        let number = |text: &str| match text.trim().parse::<usize>() {
            Ok(number) => size(number).to_string(),
            Err(_) => text.trim().to_string(),
        };
        match value.strip_prefix('[').and_then(|list| list.strip_suffix(']')) {
            Some(list) if !list.is_empty() => {
                format!("[{}]", list.split(',').map(number).collect::<Vec<_>>().join(", "))
            }
            Some(_) => value.to_string(),
            None => number(value),
        }
    };
    let input = |values: &Tensor| -> Result<Tensor> {
        let mut values = values.clone();
        for (dim, old) in values.shape().to_vec().into_iter().enumerate() {
            if size(old) != old {
                values = values.narrow(dim as i64, 0, size(old))?;
            }
        }
        values.contiguous()
    };
    rebuilt(case, &attribute, &input)
}

/// The case with one dtype everywhere in place of another. `None` if that is no program, or the same.
pub(crate) fn converted(case: &Case, from: &str, to: &str) -> Option<Case> {
    let (old, new) = (DType::from_name(from)?, DType::from_name(to)?);
    let attribute =
        |_: &Op, _: &str, value: &str| if value == from { to.to_string() } else { value.to_string() };
    let input =
        |values: &Tensor| if values.dtype() == old { values.to_dtype(new) } else { Ok(values.clone()) };
    let is_old = |info: &Arc<VariableInfo>| info.ty.as_tensor().is_some_and(|tensor| tensor.dtype == old);
    case.recording.trace.variables.iter().any(is_old).then(|| rebuilt(case, &attribute, &input))?
}

/// The case with other inputs and attributes; what the ops make follows.
fn rebuilt(
    case: &Case,
    attribute: &dyn Fn(&Op, &str, &str) -> String,
    input: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Option<Case> {
    let mut new = case.clone();
    for (&variable, given) in &mut new.inputs {
        if given.shares.is_some() {
            return None;
        }
        given.values = input(&given.values).ok()?;
        let (shape, dtype, device) = (given.values.shape(), given.values.dtype(), given.values.device());
        let info = &mut new.recording.trace.variables[variable as usize];
        let mut told = info.input.clone()?;
        told.layout = Arc::new(like(&told.layout, shape.clone()));
        let ty = Ty::Tensor(kiln_ir::TensorTy { dtype, shape, device });
        *info = Arc::new(VariableInfo { ty, input: Some(told) });
    }
    let trace = &mut new.recording.trace;
    let retyped = |trace: &mut kiln_aot::Trace, variable: Variable, ty: Ty| {
        trace.variables[variable as usize] = Arc::new(VariableInfo { ty, input: None });
    };
    for number in 0..trace.events.len() {
        let mut event = trace.events[number].clone();
        match &mut event {
            Event::Call { op, args, out, .. } => {
                let attributes = op.attributes();
                if !attributes.is_empty() {
                    *op = Op::parse(op.row().name, &mut |wanted| {
                        let (name, value) = attributes.iter().find(|(name, _)| *name == wanted)?;
                        Some(attribute(op, name, &value.to_string()))
                    })?;
                }
                let tys: Vec<Ty> = args.iter().map(|arg: &TraceArg| trace.ty(arg)).collect();
                let made = op.infer(&tys).ok()?;
                if let Some(out) = out {
                    retyped(trace, *out, made.first()?.clone());
                }
            }
            Event::Backward { targets, .. } => {
                for (leaf, target) in targets {
                    if let kiln_aot::trace::GradTarget::New(made) = target {
                        let ty = trace.variables[*leaf as usize].ty.clone();
                        retyped(trace, *made, ty);
                    }
                }
            }
            Event::Grad { inputs, results, .. } => {
                for (of, result) in inputs.iter().zip(results) {
                    if let Some(result) = result {
                        let ty = trace.variables[*of as usize].ty.clone();
                        retyped(trace, *result, ty);
                    }
                }
            }
            Event::RequiresGrad { .. } | Event::Retain { .. } | Event::Read { .. } | Event::Apply { .. } => {}
        }
        trace.events[number] = event;
    }
    Some(new)
}

/// A layout of another shape with dims in the same order in memory.
fn like(layout: &Layout, shape: Shape) -> Layout {
    let mut order: Vec<usize> = (0..shape.rank()).collect();
    order.sort_by_key(|&dim| (layout.strides[dim], std::cmp::Reverse(dim)));
    let mut new = Layout::contiguous(shape);
    let mut stride = 1;
    for dim in order {
        if layout.strides[dim] == 0 && layout.shape[dim] > 1 {
            new.strides[dim] = 0;
        } else {
            new.strides[dim] = stride as isize;
            stride *= new.shape[dim];
        }
    }
    new
}

/// The case with an input that wants no gradient.
pub(crate) fn without_gradient(case: &Case, variable: Variable) -> Option<Case> {
    let told = case.recording.trace.variables[variable as usize].input.as_ref()?;
    if !told.requires_grad {
        return None;
    }
    let info = InputVariable { requires_grad: false, leaf: true, ..told.clone() };
    Some(with_input(case, variable, info))
}

/// The case with a dense input.
pub(crate) fn dense(case: &Case, variable: Variable) -> Option<Case> {
    let told = case.recording.trace.variables[variable as usize].input.as_ref()?;
    if told.layout.is_contiguous() && told.layout.offset == 0 {
        return None;
    }
    let layout = Arc::new(Layout::contiguous(told.layout.shape.clone()));
    Some(with_input(case, variable, InputVariable { layout, ..told.clone() }))
}

fn with_input(case: &Case, variable: Variable, input: InputVariable) -> Case {
    let mut new = case.clone();
    let info = &mut new.recording.trace.variables[variable as usize];
    *info = Arc::new(VariableInfo { ty: info.ty.clone(), input: Some(input) });
    new
}

/// Values to try in place of a tensor's, the plainest first.
pub(crate) fn plain_values(tensor: &Tensor) -> impl Iterator<Item = Result<Tensor>> {
    let (shape, dtype, device) = (tensor.shape(), tensor.dtype(), tensor.device());
    let full = |value: f64| Tensor::full_of(shape.clone(), value, dtype, &device);
    let count = (0..shape.numel()).map(|i| i as f64 % 64.0).collect::<Vec<_>>();
    let count = Tensor::from_vec(count, shape.clone()).and_then(|count| count.to_dtype(dtype));
    [full(0.0), full(1.0), count].into_iter()
}
