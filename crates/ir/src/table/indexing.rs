//! Rows: picking and placing elements by several index tensors, by classes and by masks.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_indexing {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_creation! { $callback [
            $($rows)*

            /// Indices of a dim of this size, negative ones counted from the end
            [index checked_index _none] "checked_index" CheckedIndex (index) () { size: usize }
                { ty: indexing::checked_index_type, grad: Grad::Zero,
                  decompose: Some(indexing::checked_index), eval: Eval::Structural,
                  kernel: true, sizes: &["size"], samples: indexing::checked_index_samples };
            /// The elements of the first operand at the others, one index tensor for each of dims, broadcast together
            [index index _none] "index" Index (tensors) () { dims: Dims }
                { ty: indexing::index_type, grad: Grad::Fn(indexing::index_grad), variadic: true, decompose: Some(indexing::index), eval: Eval::Structural,
                  kernel: true, samples: indexing::index_samples };
            /// The first operand with the second put (or added) at the others, one index tensor for each of dims
            [index index_put _none] "index_put" IndexPut (tensors) () { dims: Dims, accumulate: bool }
                { ty: indexing::index_put_type, grad: Grad::Fn(indexing::index_put_grad), variadic: true, decompose: Some(indexing::index_put), eval: Eval::Structural,
                  kernel: true, samples: indexing::index_put_samples };
            /// The rows of weight at index; the row padding_idx gets no gradient
            [index embedding _none] "embedding" Embedding (weight, index) () { padding_idx: i64 }
                { ty: indexing::embedding_type, grad: Grad::Fn(indexing::embedding_grad), decompose: Some(indexing::embedding), eval: Eval::Structural,
                  samples: indexing::embedding_samples };
            /// 1 at each class number, 0 at the other classes, in a new last dim
            [index one_hot _none] "one_hot" OneHot (index) () { classes: usize }
                { ty: indexing::one_hot_type, grad: Grad::Zero,
                  decompose: Some(indexing::one_hot), eval: Eval::Structural,
                  kernel: true, samples: indexing::one_hot_samples };
            /// x with the elements of src, one after the other, where the mask holds
            [index masked_scatter _none] "masked_scatter" MaskedScatter (x, mask, src) () {}
                { ty: indexing::masked_scatter_type, grad: Grad::Fn(indexing::masked_scatter_grad),
                  eval: Eval::Structural, samples: indexing::masked_scatter_samples };
            /// The elements of x where the mask holds, one after the other, then zeros
            [index masked_scatter_backward _none] "masked_scatter_backward" MaskedScatterBackward (x, mask) () { shape: Shape }
                { ty: indexing::masked_scatter_backward_type, grad: Grad::Fn(indexing::masked_scatter_backward_grad), eval: Eval::Structural,
                  sizes: &["shape"], samples: indexing::masked_scatter_backward_samples };
        ]}
    };
}

use smallvec::smallvec;

use super::shapes::{iota, zero_of};
use crate::decompose::one as decomposed;
use crate::gradient::{Cx, Grads, g, zeros_like};
use crate::samples::{ALL, FLOATS, calls, t, with_op};
use crate::types::{Rule, check_dims, checked, common_device, one, same_kind_of, tensor};
use crate::{
    DType, Dims, Domain, EmitExt, GradCall, Op, Result, Sample, SampleArg, Scalar, Shape, TensorTy, Ty,
    Value, Values, Why, broadcast,
};

pub(super) fn check_index_dtype(index: &TensorTy) -> Result<(), Why> {
    match index.dtype {
        DType::I64 => Ok(()),
        got => Err(Why::DType { argument: "index", expected: "i64", got }),
    }
}

// ---- several index tensors -----------------------------------------------------------------------------

pub(crate) fn checked_index_type(_: &Op, args: &[Ty]) -> Rule {
    let index = tensor(args, 0, "index")?;
    check_index_dtype(index)?;
    one(index.clone())
}

/// A gather from 0, 1, … is the index itself, checked.
pub(crate) fn checked_index(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::CheckedIndex { size } = *op else { return Ok(smallvec![args[0]]) };
    let ty = cx.tensor_ty(args[0]);
    let (zero, whole) = (cx.number(Scalar::Int(0))?, cx.number(Scalar::Int(size as i64))?);
    let negative = cx.lt(args[0], zero)?;
    let wrapped = cx.add(args[0], whole)?;
    let position = cx.where_(negative, wrapped, args[0])?;
    let line = cx.reshape(position, Shape::from(ty.shape.numel()))?;
    let all = iota(cx, (0, 1), size, (0, 1), ty.device)?;
    let line = cx.gather(all, line, 0)?;
    decomposed(cx.reshape(line, ty.shape))
}

/// Where the result's dims come from: the index tensors' common shape stands where the first indexed dim was if
/// the indexed dims are neighbours, else in front.
struct Plan {
    dims: Dims,
    /// Broadcast shape of the index tensors.
    common: Shape,
    /// How many of x's dims stand before it.
    lead: usize,
    /// Dims that are not indexed.
    rest: Dims,
    result: Shape,
}

fn plan(dims: &Dims, x: &TensorTy, indices: &[Ty]) -> Result<Plan, Why> {
    check_dims(dims, x.shape.rank())?;
    if dims.is_empty() || dims.len() != indices.len() || dims.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(Why::sizes("the number of indexed dims and of index tensors", dims.len(), indices.len()));
    }
    let mut common = Shape::scalar();
    for index in indices {
        let index = index.as_tensor().ok_or(Why::Operand { argument: "indices", expected: "tensors" })?;
        check_index_dtype(index)?;
        common = broadcast(&common, &index.shape)
            .ok_or_else(|| Why::Broadcast { left: common.clone(), right: index.shape.clone() })?;
    }
    let neighbours = dims.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    let lead = if neighbours { dims[0] } else { 0 };
    let rest: Dims = (0..x.shape.rank()).filter(|d| !dims.contains(d)).collect();
    let sizes: Vec<usize> = rest.iter().map(|&d| x.shape[d]).collect();
    let result = sizes[..lead].iter().chain(common.iter()).chain(&sizes[lead..]).copied().collect();
    Ok(Plan { dims: dims.clone(), common, lead, rest, result })
}

/// How many operands come before the index tensors, and the indexed dims.
fn indexed(op: &Op) -> (usize, Dims) {
    match op {
        Op::Index { dims } => (1, dims.clone()),
        Op::IndexPut { dims, .. } => (2, dims.clone()),
        _ => (0, Dims::default()),
    }
}

pub(crate) fn index_type(op: &Op, args: &[Ty]) -> Rule {
    let (skip, dims) = indexed(op);
    if args.len() <= skip {
        return Err(Why::Arity { expected: format!("{} or more", skip + 1), got: args.len() });
    }
    let x = tensor(args, 0, "x")?;
    common_device(args)?;
    checked(TensorTy { shape: plan(&dims, x, &args[skip..])?.result, ..x.clone() })
}

pub(crate) fn index_put_type(op: &Op, args: &[Ty]) -> Rule {
    let window = index_type(op, args)?;
    let (x, values) = (tensor(args, 0, "x")?, tensor(args, 1, "values")?);
    let window = window[0].as_tensor().map(|t| t.shape.clone()).unwrap_or_default();
    same_kind_of(x, values)?;
    if broadcast(&window, &values.shape) == Some(window.clone()) {
        one(x.clone())
    } else {
        Err(Why::Broadcast { left: window, right: values.shape.clone() })
    }
}

/// The indexed dims as one, which comes first (or stays, if it is alone); and the positions along it, in one dim.
struct Flat {
    value: Value,
    positions: Value,
    dim: usize,
    plan: Plan,
    /// The order of dims that brought the indexed ones to the front.
    order: Option<Dims>,
}

fn flatten(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Flat> {
    let (skip, dims) = indexed(op);
    let x = cx.tensor_ty(args[0]);
    let tys: Vec<Ty> = args[skip..].iter().map(|&v| cx.ty(v).clone()).collect();
    let plan = plan(&dims, &x, &tys).map_err(|why| op.error(&tys, why, crate::Loc::UNKNOWN))?;
    let mut linear: Option<Value> = None;
    for (&index, &dim) in args[skip..].iter().zip(plan.dims.iter()) {
        let index = cx.checked_index(index, x.shape[dim])?;
        linear = Some(match linear {
            None => index,
            Some(before) => {
                let size = cx.number(Scalar::Int(x.shape[dim] as i64))?;
                let scaled = cx.mul(before, size)?;
                cx.add(scaled, index)?
            }
        });
    }
    let linear = linear.unwrap_or(args[0]);
    let positions = cx.reshape(linear, Shape::from(plan.common.numel()))?;
    if let [dim] = plan.dims[..] {
        return Ok(Flat { value: args[0], positions, dim, plan, order: None });
    }
    let order: Dims = plan.dims.iter().chain(plan.rest.iter()).copied().collect();
    let turned = cx.permute(args[0], order.clone())?;
    let size = plan.dims.iter().map(|&d| x.shape[d]).product();
    let shape = [size].into_iter().chain(plan.rest.iter().map(|&d| x.shape[d])).collect();
    let value = cx.reshape(turned, shape)?;
    Ok(Flat { value, positions, dim: 0, plan, order: Some(order) })
}

pub(crate) fn index(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Flat { value, positions, dim, plan, order } = flatten(cx, op, args)?;
    let picked = cx.index_select(value, positions, dim)?;
    if order.is_none() || plan.lead == 0 {
        return decomposed(cx.reshape(picked, plan.result));
    }
    // The common dims go back behind those that stood before the first indexed one.
    let (count, lead) = (plan.common.rank(), plan.lead);
    let rest = plan.result[..lead].iter().chain(&plan.result[lead + count..]).copied();
    let split = cx.reshape(picked, plan.common.iter().copied().chain(rest).collect())?;
    let order = (count..count + lead).chain(0..count).chain(count + lead..plan.result.rank()).collect();
    decomposed(cx.permute(split, order))
}

pub(crate) fn index_put(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::IndexPut { accumulate, .. } = *op else { return Ok(smallvec![args[0]]) };
    let x = cx.tensor_ty(args[0]);
    let Flat { value, positions, dim, plan, order } = flatten(cx, op, args)?;
    let mut values = cx.expand(args[1], plan.result.clone())?;
    let (count, lead) = (plan.common.rank(), plan.lead);
    if order.is_some() && lead > 0 {
        let order = (lead..lead + count).chain(0..lead).chain(lead + count..plan.result.rank()).collect();
        values = cx.permute(values, order)?;
    }
    let mut slices = cx.tensor_ty(value).shape;
    slices[dim] = plan.common.numel();
    let values = cx.reshape(values, slices)?;
    let written = if accumulate {
        cx.index_add(value, positions, values, dim)?
    } else {
        cx.index_copy(value, positions, values, dim)?
    };
    let Some(order) = order else { return Ok(smallvec![written]) };
    let split = cx.reshape(written, order.iter().map(|&d| x.shape[d]).collect())?;
    let mut back = order.clone();
    for (i, &d) in order.iter().enumerate() {
        back[d] = i;
    }
    decomposed(cx.permute(split, back))
}

pub(crate) fn index_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, (_, dims)) = (g!(call), indexed(call.op));
    let mut args = vec![zeros_like(cx, call.inputs[0])?, g];
    args.extend(&call.inputs[1..]);
    let mut grads = vec![Some(cx.index_put(&args, dims, true)?)];
    grads.resize(call.inputs.len(), None);
    Ok(grads)
}

pub(crate) fn index_put_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::IndexPut { dims, accumulate }) = (g!(call), call.op) else {
        return Ok(vec![None; call.inputs.len()]);
    };
    let mut grads = vec![None; call.inputs.len()];
    if call.wants(0) {
        grads[0] = Some(if *accumulate {
            g
        } else {
            let mut args = vec![g, zeros_like(cx, call.inputs[1])?];
            args.extend(&call.inputs[2..]);
            cx.index_put(&args, dims.clone(), false)?
        });
    }
    if call.wants(1) {
        let mut args = vec![g];
        args.extend(&call.inputs[2..]);
        grads[1] = Some(cx.index(&args, dims.clone())?);
    }
    Ok(grads)
}

// ---- embedding, one_hot --------------------------------------------------------------------------------

pub(crate) fn embedding_type(_: &Op, args: &[Ty]) -> Rule {
    let (weight, index) = (tensor(args, 0, "weight")?, tensor(args, 1, "index")?);
    common_device(args)?;
    check_index_dtype(index)?;
    match weight.shape[..] {
        [_, width] => checked(TensorTy {
            shape: index.shape.iter().copied().chain([width]).collect(),
            ..weight.clone()
        }),
        _ => Err(Why::Rank { argument: "weight", expected: "2", got: weight.shape.rank() }),
    }
}

pub(crate) fn embedding(cx: Cx<'_>, _: &Op, args: &[Value]) -> Result<Values> {
    let (width, shape) = (cx.tensor_ty(args[0]).shape[1], cx.tensor_ty(args[1]).shape);
    let line = cx.reshape(args[1], Shape::from(shape.numel()))?;
    let rows = cx.index_select(args[0], line, 0)?;
    decomposed(cx.reshape(rows, shape.iter().copied().chain([width]).collect()))
}

pub(crate) fn embedding_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Embedding { padding_idx }) = (g!(call), call.op) else { return Ok(vec![None, None]) };
    let (width, index) = (cx.tensor_ty(call.inputs[0]).shape[1], call.inputs[1]);
    let count = cx.tensor_ty(index).shape.numel();
    let line = cx.reshape(index, Shape::from(count))?;
    let mut rows = cx.reshape(g, Shape::from([count, width]))?;
    if *padding_idx >= 0 {
        let (padding, zero) = (cx.number(Scalar::Int(*padding_idx))?, cx.number(0.0)?);
        let counted = cx.ne(line, padding)?;
        let counted = cx.reshape(counted, Shape::from([count, 1]))?;
        rows = cx.where_(counted, rows, zero)?;
    }
    let zeros = zeros_like(cx, call.inputs[0])?;
    Ok(vec![Some(cx.index_add(zeros, line, rows, 0)?), None])
}

pub(crate) fn one_hot_type(op: &Op, args: &[Ty]) -> Rule {
    let index = tensor(args, 0, "index")?;
    check_index_dtype(index)?;
    let Op::OneHot { classes } = *op else { return one(index.clone()) };
    if classes == 0 && index.shape.numel() > 0 {
        // No loop over the result would meet an index.
        return Err(Why::Number {
            argument: "classes",
            expected: "1 or more unless index is empty",
            got: 0.0,
        });
    }
    checked(TensorTy { shape: index.shape.iter().copied().chain([classes]).collect(), ..index.clone() })
}

/// The classes compared with the index, which a gather from 0, 1, … checks.
pub(crate) fn one_hot(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Op::OneHot { classes } = *op else { return Ok(smallvec![args[0]]) };
    let ty = cx.tensor_ty(args[0]);
    let line = cx.reshape(args[0], Shape::from(ty.shape.numel()))?;
    let all = iota(cx, (0, 1), classes, (0, 1), ty.device)?;
    let picked = cx.gather(all, line, 0)?;
    let column = cx.reshape(picked, ty.shape.iter().copied().chain([1]).collect())?;
    let hit = cx.eq(column, all)?;
    decomposed(cx.to(hit, ty.dtype))
}

// ---- masks ---------------------------------------------------------------------------------------------

fn check_mask(x: &TensorTy, mask: &TensorTy) -> Result<(), Why> {
    if mask.dtype != DType::Bool {
        return Err(Why::DType { argument: "mask", expected: "bool", got: mask.dtype });
    }
    if broadcast(&x.shape, &mask.shape) == Some(x.shape.clone()) {
        Ok(())
    } else {
        Err(Why::Broadcast { left: x.shape.clone(), right: mask.shape.clone() })
    }
}

pub(crate) fn masked_scatter_type(_: &Op, args: &[Ty]) -> Rule {
    let (x, mask, src) = (tensor(args, 0, "x")?, tensor(args, 1, "mask")?, tensor(args, 2, "src")?);
    common_device(args)?;
    check_mask(x, mask)?;
    same_kind_of(x, src)?;
    one(x.clone())
}

pub(crate) fn masked_scatter_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, mask) = (g!(call), call.inputs[1]);
    let ty = cx.tensor_ty(g);
    let gx = call.wanted(cx, 0, |cx| {
        let zero = zero_of(cx, ty.dtype)?;
        cx.where_(mask, zero, g)
    })?;
    let shape = cx.tensor_ty(call.inputs[2]).shape;
    let gsrc = call.wanted(cx, 2, |cx| cx.masked_scatter_backward(g, mask, shape))?;
    Ok(vec![gx, None, gsrc])
}

pub(crate) fn masked_scatter_backward_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, mask) = (tensor(args, 0, "x")?, tensor(args, 1, "mask")?);
    let Op::MaskedScatterBackward { shape } = op else { return one(x.clone()) };
    common_device(args)?;
    check_mask(x, mask)?;
    checked(TensorTy { shape: shape.clone(), ..x.clone() })
}

pub(crate) fn masked_scatter_backward_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    let zeros = zeros_like(cx, call.inputs[0])?;
    Ok(vec![Some(cx.masked_scatter(zeros, call.inputs[1], g)?), None])
}

// ---- samples -------------------------------------------------------------------------------------------

pub(super) fn index_of(shape: &[usize], domain: Domain) -> SampleArg {
    SampleArg::Fixed(DType::I64, Shape::from(shape), domain)
}

pub(super) fn any(shape: &[usize]) -> SampleArg {
    t(shape, Domain::Any)
}

pub(crate) fn checked_index_samples() -> Vec<Sample> {
    let shapes: &[&[usize]] = &[&[], &[5], &[3, 4], &[0]];
    // Samples are not negative, so those of the dtype test pass whatever their sign.
    let case = |s: &&[usize]| {
        with_op(Op::CheckedIndex { size: 9 }, &[DType::I64], vec![index_of(s, Domain::Index(9))])
    };
    shapes.iter().map(case).collect()
}

/// x, then index shape for each of dims.
type IndexCase = (&'static [usize], &'static [usize], &'static [&'static [usize]]);

const INDEXED: &[IndexCase] = &[
    (&[9], &[0], &[&[4]]),
    (&[4, 37], &[1], &[&[2, 3]]),
    (&[4, 5, 6], &[0, 1], &[&[3], &[2, 1]]),
    (&[2, 4, 5, 3], &[1, 2], &[&[6], &[6]]),
    (&[4, 3, 5], &[0, 2], &[&[2, 1], &[3]]),
    (&[4, 5], &[0, 1], &[&[], &[]]),
    (&[4, 5], &[0], &[&[0]]),
];

fn index_operands(&(x, dims, shapes): &IndexCase, domain: fn(usize) -> Domain) -> Vec<SampleArg> {
    dims.iter().zip(shapes).map(|(&d, shape)| index_of(shape, domain(x[d]))).collect()
}

pub(crate) fn index_samples() -> Vec<Sample> {
    INDEXED
        .iter()
        .map(|case| {
            let args = [vec![any(case.0)], index_operands(case, Domain::Index)].concat();
            with_op(Op::Index { dims: Dims::from(case.1) }, ALL, args)
        })
        .collect()
}

pub(crate) fn index_put_samples() -> Vec<Sample> {
    let mut samples = Vec::new();
    for accumulate in [false, true] {
        // Which of several values at one place stays is not a matter for gradients.
        let domain = if accumulate { Domain::Index } else { Domain::Distinct };
        for case in INDEXED.iter().filter(|case| accumulate || case.1.len() == 1 || case.2[0].len() != 1) {
            let operands = index_operands(case, domain);
            let tys: Vec<Ty> = case.2.iter().map(|shape| Ty::tensor(DType::I64, *shape)).collect();
            let dims = Dims::from(case.1);
            let Ok(plan) = plan(&dims, &TensorTy::new(DType::F32, case.0), &tys) else { continue };
            let args = [vec![any(case.0), any(&plan.result)], operands].concat();
            samples.push(with_op(Op::IndexPut { dims, accumulate }, ALL, args));
        }
        let one = vec![any(&[4, 5]), any(&[]), index_of(&[3], domain(4))];
        samples.push(with_op(Op::IndexPut { dims: Dims::from([0]), accumulate }, ALL, one));
    }
    samples
}

pub(crate) fn embedding_samples() -> Vec<Sample> {
    let case = |padding_idx, weight: &[usize], index: &[usize]| {
        let args = vec![any(weight), index_of(index, Domain::Index(weight[0]))];
        // By definition the gradient leaves the padding row out, which finite differences (in f64) don't.
        let dtypes = if padding_idx < 0 { FLOATS } else { &[DType::F32] };
        with_op(Op::Embedding { padding_idx }, dtypes, args)
    };
    vec![
        case(-1, &[10, 17], &[5]),
        case(2, &[4, 3], &[2, 9]),
        case(0, &[3, 8], &[]),
        case(-1, &[3, 8], &[0, 2]),
    ]
}

pub(crate) fn one_hot_samples() -> Vec<Sample> {
    let shapes: &[&[usize]] = &[&[], &[5], &[3, 4], &[0]];
    let case =
        |s: &&[usize]| with_op(Op::OneHot { classes: 6 }, &[DType::I64], vec![index_of(s, Domain::Index(6))]);
    shapes.iter().map(case).collect()
}

fn mask(shape: &[usize]) -> SampleArg {
    SampleArg::Fixed(DType::Bool, Shape::from(shape), Domain::Any)
}

pub(crate) fn masked_scatter_samples() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize], &[usize])] = &[
        (&[9], &[9], &[9]),
        (&[4, 7], &[4, 7], &[30]),
        (&[3, 4], &[3, 1], &[2, 6]),
        (&[], &[], &[3]),
        (&[0], &[1], &[0]),
    ];
    calls(ALL, cases.iter().map(|(x, m, src)| vec![any(x), mask(m), any(src)]).collect())
}

pub(crate) fn masked_scatter_backward_samples() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize], &[usize])] =
        &[(&[9], &[9], &[9]), (&[4, 7], &[4, 7], &[2, 15]), (&[3, 4], &[3, 1], &[13]), (&[], &[], &[2])];
    cases
        .iter()
        .map(|(x, m, shape)| {
            with_op(Op::MaskedScatterBackward { shape: Shape::from(*shape) }, FLOATS, vec![any(x), mask(m)])
        })
        .collect()
}
