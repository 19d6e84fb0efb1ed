//! Type rules: the types of an op's results from the types of its operands, or why there are none.

use smallvec::{SmallVec, smallvec};

use crate::{
    DType, Device, Dims, ListTy, ListTyBuilder, Op, Reduction, Scalar, ScalarKind, Shape, TensorTy, Ty, Tys,
    Why, broadcast, result_dtype,
};

pub(crate) type Rule = Result<Tys, Why>;

pub(crate) fn one(ty: impl Into<Ty>) -> Rule {
    Ok(smallvec![ty.into()])
}

pub(crate) fn tensor<'a>(args: &'a [Ty], i: usize, argument: &'static str) -> Result<&'a TensorTy, Why> {
    args[i].as_tensor().ok_or(Why::Operand { argument, expected: "a tensor" })
}

/// An operand that must be a tensor of floats.
pub(crate) fn float<'a>(args: &'a [Ty], i: usize, argument: &'static str) -> Result<&'a TensorTy, Why> {
    match tensor(args, i, argument)? {
        x if x.dtype.is_float() => Ok(x),
        x => Err(Why::DType { argument, expected: "floating point", got: x.dtype }),
    }
}

pub(crate) fn checked(ty: TensorTy) -> Rule {
    match ty.shape.checked_numel().and_then(|n| n.checked_mul(ty.dtype.size())) {
        Some(bytes) if bytes <= isize::MAX as usize => one(ty),
        _ => Err(Why::TooLarge { shape: ty.shape }),
    }
}

pub(crate) fn common_device(args: &[Ty]) -> Result<Device, Why> {
    let mut device = None;
    for t in args.iter().filter_map(Ty::as_tensor) {
        match device {
            None => device = Some(t.device),
            Some(left) if left != t.device => return Err(Why::Devices { left, right: t.device }),
            Some(_) => {}
        }
    }
    Ok(device.unwrap_or_default())
}

/// The broadcast shape of all tensor operands, computed in `dtype`. Numbers alone give a number.
pub(crate) fn broadcast_all(args: &[Ty], dtype: DType) -> Rule {
    let device = common_device(args)?;
    let mut shape: Option<Shape> = None;
    for t in args.iter().filter_map(Ty::as_tensor) {
        shape = Some(match shape {
            None => t.shape.clone(),
            Some(left) => match broadcast(&left, &t.shape) {
                Some(both) => both,
                None => return Err(Why::Broadcast { left, right: t.shape.clone() }),
            },
        });
    }
    match shape {
        Some(shape) => checked(TensorTy { dtype, device, shape }),
        None => one(Ty::Scalar(dtype.kind())),
    }
}

/// A pointwise op over lists: the rule for each run of equal elements; numbers and single tensors serve every
/// element.
pub(crate) fn over_lists(op: &Op, args: &[Ty]) -> Rule {
    let lists: SmallVec<[&ListTy; 4]> = args.iter().filter_map(Ty::as_list).collect();
    let len = lists.first().map_or(0, |list| list.len());
    if let Some(other) = lists.iter().find(|list| list.len() != len) {
        return Err(Why::sizes("the lengths of the lists", len, other.len()));
    }
    let mut results = ListTyBuilder::default();
    for run in ListTy::common_runs(&lists) {
        let element: SmallVec<[Ty; 4]> = args
            .iter()
            .map(|ty| ty.as_list().map_or_else(|| ty.clone(), |items| Ty::Tensor(items[run.start].clone())))
            .collect();
        match (op.row().ty)(op, &element)?.remove(0) {
            Ty::Tensor(t) => results.push(&t, run.len()),
            _ => return Err(Why::Operand { argument: "the lists", expected: "lists of tensors" }),
        }
    }
    let results = results.finish();
    // Mostly the type of an operand: one in memory serves both.
    let like = lists.iter().find(|list| ***list == results);
    one(Ty::List(like.map_or(results.clone(), |&list| list.clone())))
}

pub(crate) fn arithmetic(_: &Op, args: &[Ty]) -> Rule {
    broadcast_all(args, result_dtype(args))
}

pub(crate) fn arithmetic_not_bool(_: &Op, args: &[Ty]) -> Rule {
    match result_dtype(args) {
        DType::Bool => Err(Why::DType { argument: "operands", expected: "numeric", got: DType::Bool }),
        dtype => broadcast_all(args, dtype),
    }
}

/// x + value · a · b: the value is a factor in the tensors' dtype, whatever its own kind.
pub(crate) fn addcmul(op: &Op, args: &[Ty]) -> Rule {
    match (&args[3], result_dtype(&args[..3])) {
        (Ty::Scalar(_), dtype) if dtype.kind() == ScalarKind::Int => broadcast_all(args, dtype),
        _ => arithmetic_not_bool(op, args),
    }
}

/// Integers are computed as f32, like PyTorch's default dtype.
pub(crate) fn float_arithmetic(_: &Op, args: &[Ty]) -> Rule {
    let dtype = result_dtype(args);
    let alone = args.iter().all(Ty::is_scalar);
    broadcast_all(
        args,
        if dtype.is_float() {
            dtype
        } else if alone {
            DType::F64
        } else {
            DType::F32
        },
    )
}

pub(crate) fn float_only(_: &Op, args: &[Ty]) -> Rule {
    match result_dtype(args) {
        dtype if dtype.is_float() => broadcast_all(args, dtype),
        got => Err(Why::DType { argument: "operands", expected: "floating point", got }),
    }
}

pub(crate) fn power(op: &Op, args: &[Ty]) -> Rule {
    arithmetic_not_bool(op, args)
}

pub(crate) fn compare(_: &Op, args: &[Ty]) -> Rule {
    broadcast_all(args, DType::Bool)
}

pub(crate) fn choose(_: &Op, args: &[Ty]) -> Rule {
    match &args[0] {
        Ty::Tensor(t) if t.dtype != DType::Bool => {
            return Err(Why::DType { argument: "condition", expected: "bool", got: t.dtype });
        }
        Ty::Scalar(kind) if *kind != ScalarKind::Bool => {
            return Err(Why::DType { argument: "condition", expected: "bool", got: kind.dtype() });
        }
        _ => {}
    }
    let dtype = match result_dtype(&args[1..]) {
        // Two numbers make a tensor of the default dtype.
        DType::F64 if args[0].as_tensor().is_some() && args[1..].iter().all(Ty::is_scalar) => DType::F32,
        dtype => dtype,
    };
    broadcast_all(args, dtype)
}

pub(crate) fn convert(op: &Op, args: &[Ty]) -> Rule {
    let Op::To { dtype } = op else { return arithmetic(op, args) };
    match &args[0] {
        Ty::Tensor(t) => one(TensorTy { dtype: *dtype, ..t.clone() }),
        Ty::Scalar(_) => one(Ty::Scalar(dtype.kind())),
        Ty::List(_) => Err(Why::Operand { argument: "x", expected: "a tensor or a number" }),
    }
}

pub(crate) fn same(_: &Op, args: &[Ty]) -> Rule {
    one(args[0].clone())
}

pub(crate) fn copy(_: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    if let Some(src) = args[1].as_tensor() {
        common_device(args)?;
        if broadcast(&x.shape, &src.shape).as_ref() != Some(&x.shape) {
            return Err(Why::Broadcast { left: x.shape.clone(), right: src.shape.clone() });
        }
    }
    one(x.clone())
}

pub(crate) fn check_dims(dims: &Dims, rank: usize) -> Result<(), Why> {
    for (i, &dim) in dims.iter().enumerate() {
        if dim >= rank {
            return Err(Why::Dim { dim: dim as i64, rank });
        }
        if dims[..i].contains(&dim) {
            return Err(Why::DimTwice { dim });
        }
    }
    Ok(())
}

fn reduce(op: &Op, x: &TensorTy, dtype: DType) -> Rule {
    let (Op::Sum { dims, keepdim } | Op::Mean { dims, keepdim } | Op::Amax { dims, keepdim }) = op else {
        return one(x.clone());
    };
    check_dims(dims, x.shape.rank())?;
    one(TensorTy { dtype, device: x.device, shape: x.shape.reduced(dims, *keepdim) })
}

pub(crate) fn sum(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    reduce(op, x, if x.dtype.is_float() { x.dtype } else { DType::I64 })
}

pub(crate) fn mean(op: &Op, args: &[Ty]) -> Rule {
    let x = float(args, 0, "x")?;
    reduce(op, x, x.dtype)
}

pub(crate) fn amax(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    if let Op::Amax { dims, .. } = op {
        check_dims(dims, x.shape.rank())?;
        if let Some(&dim) = dims.iter().find(|&&d| x.shape[d] == 0) {
            return Err(Why::Empty { dim });
        }
    }
    reduce(op, x, x.dtype)
}

pub(crate) fn softmax(op: &Op, args: &[Ty]) -> Rule {
    let x = float(args, 0, "x")?;
    if let Op::Softmax { dim } | Op::LogSoftmax { dim } = op
        && *dim >= x.shape.rank().max(1)
    {
        return Err(Why::Dim { dim: *dim as i64, rank: x.shape.rank() });
    }
    one(x.clone())
}

fn matrix<'a>(args: &'a [Ty], i: usize, argument: &'static str) -> Result<&'a TensorTy, Why> {
    let t = tensor(args, i, argument)?;
    if t.shape.rank() != 2 {
        return Err(Why::Rank { argument, expected: "2", got: t.shape.rank() });
    }
    Ok(t)
}

pub(crate) fn same_dtype(argument: &'static str, x: &TensorTy, y: &TensorTy) -> Result<(), Why> {
    if x.dtype != y.dtype {
        return Err(Why::DType { argument, expected: x.dtype.name(), got: y.dtype });
    }
    if x.dtype == DType::Bool {
        return Err(Why::DType { argument, expected: "numeric", got: DType::Bool });
    }
    Ok(())
}

pub(crate) fn mm(_: &Op, args: &[Ty]) -> Rule {
    let (x, y) = (matrix(args, 0, "x")?, matrix(args, 1, "y")?);
    let device = common_device(args)?;
    same_dtype("y", x, y)?;
    if x.shape[1] != y.shape[0] {
        return Err(Why::InnerSizes { left: x.shape[1], right: y.shape[0] });
    }
    checked(TensorTy { dtype: x.dtype, device, shape: Shape::from([x.shape[0], y.shape[1]]) })
}

pub(crate) fn addmm(op: &Op, args: &[Ty]) -> Rule {
    added(args, mm(op, &args[1..])?)
}

/// A product of the operands behind the first, which is broadcast to it and added.
pub(crate) fn added(args: &[Ty], product: Tys) -> Rule {
    let input = tensor(args, 0, "input")?;
    common_device(args)?;
    if let Ty::Tensor(t) = &product[0] {
        same_dtype("input", t, input)?;
        if broadcast(&t.shape, &input.shape).as_ref() != Some(&t.shape) {
            return Err(Why::Broadcast { left: t.shape.clone(), right: input.shape.clone() });
        }
    }
    Ok(product)
}

pub(crate) fn linear(_: &Op, args: &[Ty]) -> Rule {
    let (x, weight) = (tensor(args, 0, "x")?, matrix(args, 1, "weight")?);
    let device = common_device(args)?;
    same_dtype("weight", x, weight)?;
    let Some(&inner) = x.shape.last() else {
        return Err(Why::Rank { argument: "x", expected: "1 or more", got: 0 });
    };
    if inner != weight.shape[1] {
        return Err(Why::InnerSizes { left: inner, right: weight.shape[1] });
    }
    let mut shape = x.shape.clone();
    let last = shape.rank() - 1;
    shape[last] = weight.shape[0];
    if args.len() > 2 {
        let bias = tensor(args, 2, "bias")?;
        same_dtype("bias", x, bias)?;
        if *bias.shape != [weight.shape[0]] {
            return Err(Why::shape("bias", [weight.shape[0]], bias.shape.clone()));
        }
    }
    checked(TensorTy { dtype: x.dtype, device, shape })
}

pub(crate) fn reshape(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Reshape { shape } = op else { return one(x.clone()) };
    match shape.checked_numel() {
        None => Err(Why::TooLarge { shape: shape.clone() }),
        Some(n) if n != x.shape.numel() => Err(Why::Numel { from: x.shape.clone(), to: shape.clone() }),
        Some(_) => one(TensorTy { shape: shape.clone(), ..x.clone() }),
    }
}

pub(crate) fn permute(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Permute { dims } = op else { return one(x.clone()) };
    if dims.len() != x.shape.rank() {
        return Err(Why::sizes("the number of dims given and the tensor's", dims.len(), x.shape.rank()));
    }
    check_dims(dims, x.shape.rank())?;
    one(TensorTy { shape: dims.iter().map(|&d| x.shape[d]).collect(), ..x.clone() })
}

pub(crate) fn transpose(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Transpose { dim0, dim1 } = op else { return one(x.clone()) };
    for &dim in [dim0, dim1] {
        if dim >= x.shape.rank() {
            return Err(Why::Dim { dim: dim as i64, rank: x.shape.rank() });
        }
    }
    let mut shape = x.shape.clone();
    shape.swap(*dim0, *dim1);
    one(TensorTy { shape, ..x.clone() })
}

pub(crate) fn expand(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Expand { shape } = op else { return one(x.clone()) };
    if broadcast(&x.shape, shape).as_ref() != Some(shape) {
        return Err(Why::Broadcast { left: x.shape.clone(), right: shape.clone() });
    }
    checked(TensorTy { shape: shape.clone(), ..x.clone() })
}

fn sliced(x: &TensorTy, dim: usize, start: usize, end: usize, step: usize) -> Result<Shape, Why> {
    if dim >= x.shape.rank() {
        return Err(Why::Dim { dim: dim as i64, rank: x.shape.rank() });
    }
    if start > end || end > x.shape[dim] {
        return Err(Why::Slice { start, end, dim, size: x.shape[dim] });
    }
    if step == 0 {
        return Err(Why::none("step"));
    }
    let mut shape = x.shape.clone();
    shape[dim] = (end - start).div_ceil(step);
    Ok(shape)
}

pub(crate) fn slice(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Slice { dim, start, end, step } = *op else { return one(x.clone()) };
    one(TensorTy { shape: sliced(x, dim, start, end, step)?, ..x.clone() })
}

pub(crate) fn slice_scatter(op: &Op, args: &[Ty]) -> Rule {
    let (x, src) = (tensor(args, 0, "x")?, tensor(args, 1, "src")?);
    let (Op::SliceScatter { dim, start, end, step } | Op::SliceAdd { dim, start, end, step }) = *op else {
        return one(x.clone());
    };
    let window = sliced(x, dim, start, end, step)?;
    common_device(args)?;
    same_kind_of(x, src)?;
    if window != src.shape {
        return Err(Why::shape("src", window, src.shape.clone()));
    }
    one(x.clone())
}

pub(crate) fn same_kind_of(x: &TensorTy, src: &TensorTy) -> Result<(), Why> {
    if x.dtype == src.dtype {
        Ok(())
    } else {
        Err(Why::DType { argument: "src", expected: x.dtype.name(), got: src.dtype })
    }
}

pub(crate) fn cat(op: &Op, args: &[Ty]) -> Rule {
    let Op::Cat { dim } = *op else { return Err(Why::Arity { expected: "1 or more".into(), got: 0 }) };
    if args.is_empty() {
        return Err(Why::Arity { expected: "1 or more".into(), got: 0 });
    }
    let first = tensor(args, 0, "every operand")?;
    let device = common_device(args)?;
    if dim >= first.shape.rank() {
        return Err(Why::Dim { dim: dim as i64, rank: first.shape.rank() });
    }
    let mut shape = first.shape.clone();
    for i in 1..args.len() {
        let t = tensor(args, i, "every operand")?;
        let fits = t.shape.rank() == shape.rank()
            && (0..shape.rank()).all(|d| d == dim || t.shape[d] == first.shape[d]);
        if !fits {
            let shapes = Box::new([first.shape.clone(), t.shape.clone()]);
            return Err(Why::Joined { number: i, shapes, dim });
        }
        shape[dim] = shape[dim].saturating_add(t.shape[dim]);
    }
    checked(TensorTy { dtype: result_dtype(args), device, shape })
}

pub(crate) fn gather(op: &Op, args: &[Ty]) -> Rule {
    let (x, index) = (tensor(args, 0, "x")?, tensor(args, 1, "index")?);
    let Op::Gather { dim } = *op else { return one(x.clone()) };
    common_device(args)?;
    check_index(x.shape.rank(), index, dim)?;
    for d in 0..x.shape.rank() {
        if d != dim && index.shape[d] > x.shape[d] {
            return Err(index_too_long(d, index, x));
        }
    }
    one(TensorTy { shape: index.shape.clone(), ..x.clone() })
}

/// Outside the indexed dim an index may be shorter than what it picks from, and not longer.
pub(crate) fn index_too_long(dim: usize, index: &TensorTy, x: &TensorTy) -> Why {
    let (most, limit) = (x.shape[dim], "the size of x in dim");
    Why::Limit { argument: "the size of index", most, limit, dim: Some(dim), got: index.shape[dim] }
}

pub(crate) fn check_index(rank: usize, index: &TensorTy, dim: usize) -> Result<(), Why> {
    if index.dtype != DType::I64 {
        return Err(Why::DType { argument: "index", expected: "i64", got: index.dtype });
    }
    if index.shape.rank() != rank {
        return Err(Why::sizes("the ranks of index and x", index.shape.rank(), rank));
    }
    if dim >= rank {
        return Err(Why::Dim { dim: dim as i64, rank });
    }
    Ok(())
}

pub(crate) fn gather_backward(op: &Op, args: &[Ty]) -> Rule {
    let (src, index) = (tensor(args, 0, "src")?, tensor(args, 1, "index")?);
    let Op::GatherBackward { dim, size } = *op else { return one(src.clone()) };
    common_device(args)?;
    check_index(src.shape.rank(), index, dim)?;
    if src.shape != index.shape {
        return Err(Why::shape("index", src.shape.clone(), index.shape.clone()));
    }
    let mut shape = src.shape.clone();
    shape[dim] = size;
    checked(TensorTy { shape, ..src.clone() })
}

pub(crate) fn constant(op: &Op, _: &[Ty]) -> Rule {
    let kind = match op {
        Op::Constant { value } => Scalar::kind(*value),
        _ => ScalarKind::Float,
    };
    one(Ty::Scalar(kind))
}

fn numbers(args: &[Ty]) -> Result<(), Why> {
    if args.iter().all(Ty::is_scalar) {
        Ok(())
    } else {
        Err(Why::Operand { argument: "operands", expected: "numbers" })
    }
}

pub(crate) fn full(op: &Op, args: &[Ty]) -> Rule {
    numbers(args)?;
    let Op::Full { shape, dtype, device } = op else { return numbers(args).and(one(args[0].clone())) };
    checked(TensorTy { dtype: *dtype, device: *device, shape: shape.clone() })
}

pub(crate) fn arange(op: &Op, args: &[Ty]) -> Rule {
    numbers(args)?;
    let Op::Arange { len, dtype, device } = op else { return one(args[0].clone()) };
    if *dtype == DType::Bool {
        return Err(Why::DType { argument: "dtype", expected: "numeric", got: DType::Bool });
    }
    checked(TensorTy { dtype: *dtype, device: *device, shape: Shape::from([*len]) })
}

fn random_ty(shape: &Shape, dtype: DType, device: Device) -> Rule {
    if !dtype.is_float() {
        return Err(Why::DType { argument: "dtype", expected: "floating point", got: dtype });
    }
    checked(TensorTy { dtype, device, shape: shape.clone() })
}

pub(crate) fn random(op: &Op, args: &[Ty]) -> Rule {
    numbers(args)?;
    match op {
        Op::Rand { shape, dtype, device } | Op::Randn { shape, dtype, device } => {
            random_ty(shape, *dtype, *device)
        }
        _ => one(args[0].clone()),
    }
}

pub(crate) fn uniform(op: &Op, args: &[Ty]) -> Rule {
    numbers(args)?;
    match op {
        Op::Uniform { shape, dtype, device } => random_ty(shape, *dtype, *device),
        _ => one(args[0].clone()),
    }
}

pub(crate) fn nll_loss(op: &Op, args: &[Ty]) -> Rule {
    let (input, target) = (tensor(args, 0, "input")?, tensor(args, 1, "target")?);
    let (Op::NllLoss { reduction, .. } | Op::CrossEntropy { reduction, .. }) = op else {
        return one(input.clone());
    };
    let device = common_device(args)?;
    float(args, 0, "input")?;
    if target.dtype != DType::I64 {
        return Err(Why::DType { argument: "target", expected: "i64 class indices", got: target.dtype });
    }
    let samples: Shape = match input.shape.rank() {
        1 => Shape::scalar(),
        2 => Shape::from([input.shape[0]]),
        got => return Err(Why::Rank { argument: "input", expected: "1 or 2", got }),
    };
    if target.shape != samples {
        return Err(Why::shape("target", samples, target.shape.clone()));
    }
    let shape = if *reduction == Reduction::None { samples } else { Shape::scalar() };
    one(TensorTy { dtype: input.dtype, device, shape })
}

pub(crate) fn list(_: &Op, args: &[Ty]) -> Rule {
    let mut items = ListTyBuilder::default();
    for ty in args {
        let ty = ty.as_tensor().ok_or(Why::Operand { argument: "operands", expected: "tensors" })?;
        items.push(ty, 1);
    }
    one(Ty::List(items.finish()))
}

pub(crate) fn list_get(op: &Op, args: &[Ty]) -> Rule {
    let (Op::ListGet { index }, Ty::List(items)) = (op, &args[0]) else {
        return Err(Why::Operand { argument: "list", expected: "a list" });
    };
    match items.get(*index) {
        Some(t) => one(t.clone()),
        None => Err(Why::Index { index: *index as i64, size: items.len() }),
    }
}
