//! Rows: views, indexing, joining.

#[doc(hidden)]
#[macro_export]
macro_rules! rows_shapes {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_padding! { $callback [
            $($rows)*

            /// The same elements in another shape
            [view reshape _none] "reshape" Reshape (x) () { shape: Shape }
                { ty: types::reshape, grad: Grad::Fn(gradient::reshape), eval: Eval::Structural,
                  sizes: &["shape"], samples: samples::reshape };
            /// Dims in another order
            [view permute _none] "permute" Permute (x) () { dims: Dims }
                { ty: types::permute, grad: Grad::Fn(gradient::permute), eval: Eval::Structural, samples: samples::permute };
            /// Two dims swapped
            [view transpose _none] "transpose" Transpose (x) () { dim0: usize, dim1: usize }
                { ty: types::transpose, grad: Grad::Fn(gradient::transpose),
                  decompose: Some(decompose::transpose), eval: Eval::Structural,
                  kernel: true, samples: samples::transpose };
            /// Dims of size 1 repeated, new leading dims added
            [view expand _none] "expand" Expand (x) () { shape: Shape }
                { ty: types::expand, grad: Grad::Fn(gradient::expand), eval: Eval::Structural,
                  sizes: &["shape"], samples: samples::expand };
            /// Elements start, start + step, … before end of one dim
            [view slice _none] "slice" Slice (x) () { dim: usize, start: usize, end: usize, step: usize }
                { ty: types::slice, grad: Grad::Fn(gradient::slice), eval: Eval::Structural,
                  places: &["start", "end"], samples: samples::slice };
            /// The elements at offset + Σ index · stride, counted in row-major order
            [view as_strided _none] "as_strided" AsStrided (x) () { view: Pairs, offset: usize }
                { ty: shapes::as_strided_type, grad: Grad::Fn(shapes::as_strided_grad),
                  decompose: Some(shapes::as_strided), eval: Eval::Structural,
                  kernel: true, places: &["view", "offset"], samples: shapes::as_strided_samples };
            /// x with the elements of an as_strided view replaced by src
            [index as_strided_scatter _none] "as_strided_scatter" AsStridedScatter (x, src) () { view: Pairs, offset: usize }
                { ty: shapes::as_strided_scatter_type, grad: Grad::Fn(shapes::as_strided_scatter_grad),
                  decompose: Some(shapes::as_strided_scatter), eval: Eval::Structural,
                  kernel: true, places: &["view", "offset"], samples: shapes::as_strided_scatter_samples };
            /// The elements where index dim2 − index dim1 = offset, as a new last dim
            [view diagonal _none] "diagonal" Diagonal (x) () { offset: i64, dim1: usize, dim2: usize }
                { ty: shapes::diagonal_type, grad: Grad::Fn(shapes::diagonal_grad), eval: Eval::Structural,
                  places: &["offset"], samples: shapes::diagonal_samples };
            /// x with the elements of a diagonal replaced by src
            [index diagonal_scatter _none] "diagonal_scatter" DiagonalScatter (x, src) () { offset: i64, dim1: usize, dim2: usize }
                { ty: shapes::diagonal_scatter_type, grad: Grad::Fn(shapes::diagonal_scatter_grad),
                  decompose: Some(shapes::diagonal_scatter), eval: Eval::Structural,
                  kernel: true, places: &["offset"], samples: shapes::diagonal_scatter_samples };
            /// Zeros with the last dim of x as a diagonal of two new dims
            [index diag_embed _none] "diag_embed" DiagEmbed (x) () { offset: i64, dim1: usize, dim2: usize }
                { ty: shapes::diag_embed_type, grad: Grad::Fn(shapes::diag_embed_grad),
                  decompose: Some(shapes::diag_embed), eval: Eval::Structural,
                  kernel: true, places: &["offset"], samples: shapes::diag_embed_samples };
            /// Windows of a dim, step apart, as a new last dim
            [view unfold _none] "unfold" Unfold (x) () { dim: usize, size: usize, step: usize }
                { ty: shapes::unfold_type, grad: Grad::Fn(shapes::unfold_grad), eval: Eval::Structural,
                  sizes: &["size"], samples: shapes::unfold_samples };
            /// Dims in reverse order of their elements
            [index flip _none] "flip" Flip (x) () { dims: Dims }
                { ty: shapes::flip_type, grad: Grad::Fn(shapes::flip_grad), eval: Eval::Structural, samples: shapes::flip_samples };
            /// Matrices with zeros above a diagonal
            [index tril _none] "tril" Tril (x) () { diagonal: i64 }
                { ty: shapes::triangle_type, grad: Grad::Fn(shapes::triangle_grad),
                  decompose: Some(shapes::triangle), eval: Eval::Structural, kernel: true, samples: shapes::tril_samples };
            /// Matrices with zeros below a diagonal
            [index triu _none] "triu" Triu (x) () { diagonal: i64 }
                { ty: shapes::triangle_type, grad: Grad::Fn(shapes::triangle_grad),
                  decompose: Some(shapes::triangle), eval: Eval::Structural, kernel: true, samples: shapes::triu_samples };
            /// The same elements, cut off from the gradient
            [view detach _none] "detach" Detach (x) () {}
                { ty: types::same, grad: Grad::Zero, decompose: Some(decompose::identity),
                  eval: Eval::Structural, kernel: true, samples: samples::unary };
            /// x with the elements of a slice replaced by src
            [index slice_scatter _none] "slice_scatter" SliceScatter (x, src) () { dim: usize, start: usize, end: usize, step: usize }
                { ty: types::slice_scatter, grad: Grad::Fn(gradient::slice_scatter), eval: Eval::Structural,
                  places: &["start", "end"], samples: samples::slice_scatter };
            /// x with src added to the elements of a slice
            [index slice_add _none] "slice_add" SliceAdd (x, src) () { dim: usize, start: usize, end: usize, step: usize }
                { ty: types::slice_scatter, grad: Grad::Fn(gradient::slice_add), eval: Eval::Structural,
                  refuses: Refuses::Nothing, places: &["start", "end"], samples: samples::slice_add };
            /// Tensors joined along one dim
            [index cat _none] "cat" Cat (tensors) () { dim: usize }
                { ty: types::cat, grad: Grad::Fn(gradient::cat), variadic: true, eval: Eval::Structural, samples: samples::cat };
            /// The elements of x at index along one dim
            [index gather _none] "gather" Gather (x, index) () { dim: usize }
                { ty: types::gather, grad: Grad::Fn(gradient::gather), eval: Eval::Structural,
                  samples: samples::gather };
            /// zeros of a shape, with src added at index along one dim
            [index gather_backward _none] "gather_backward" GatherBackward (src, index) () { dim: usize, size: usize }
                { ty: types::gather_backward, grad: Grad::Fn(gradient::gather_backward),
                  eval: Eval::Structural,
                  refuses: Refuses::Nothing, sizes: &["size"], samples: samples::gather_backward };
        ]}
    };
}

use crate::decompose::one as decomposed;
use crate::gradient::{Cx, Grads, g, one as gradient_of, zeros_like};
use crate::samples::{ALL, t, with_op};
use crate::types::{Rule, check_dims, common_device, one, same_kind_of, tensor};
use crate::{
    DType, Device, Dims, Domain, EmitExt, GradCall, Op, Pairs, Result, Sample, SampleArg, Scalar, ScalarKind,
    Shape, TensorTy, Ty, Value, Values, Why,
};

/// A row of the wrong op was given to a rule: the table names the rules, so this is a bug of ours.
fn misplaced() -> Why {
    Why::Bug { what: "the type rule of another op was used" }
}

/// Zero as a number that leaves a dtype as it is.
pub(crate) fn zero_of(cx: Cx<'_>, dtype: DType) -> Result<Value> {
    cx.number(match dtype.kind() {
        ScalarKind::Bool => Scalar::Bool(false),
        ScalarKind::Int => Scalar::Int(0),
        ScalarKind::Float => Scalar::Float(0.0),
    })
}

/// The integers start, start + step, … along dim `dim` of `rank`, the other sizes 1.
pub(crate) fn iota(
    cx: Cx<'_>,
    (start, step): (i64, i64),
    len: usize,
    (dim, rank): (usize, usize),
    device: Device,
) -> Result<Value> {
    let (start, step) = (cx.number(Scalar::Int(start))?, cx.number(Scalar::Int(step))?);
    let line = cx.arange(start, step, len, DType::I64, device)?;
    let mut shape: Shape = (0..rank).map(|_| 1).collect();
    match rank {
        1 => Ok(line),
        _ => {
            shape[dim] = len;
            cx.reshape(line, shape)
        }
    }
}

// ---- as_strided ----------------------------------------------------------------------------------------

struct Strided {
    shape: Shape,
    strides: Shape,
    offset: usize,
}

fn strided(op: &Op) -> Result<Strided, Why> {
    match op {
        Op::AsStrided { view, offset } | Op::AsStridedScatter { view, offset } => {
            Ok(Strided { shape: view.firsts(), strides: view.seconds(), offset: *offset })
        }
        _ => Err(misplaced()),
    }
}

/// The type of the view, if it lies inside `x`.
fn strided_window(op: &Op, x: &TensorTy) -> Result<TensorTy, Why> {
    let Strided { shape, strides, offset } = strided(op)?;
    let Some(numel) = shape.checked_numel() else { return Err(Why::TooLarge { shape }) };
    let reach = shape.iter().zip(strides.iter()).try_fold(offset, |reach, (&size, &stride)| {
        reach.checked_add(size.saturating_sub(1).checked_mul(stride)?)
    });
    match reach {
        _ if numel == 0 => {}
        Some(last) if last < x.shape.numel() => {}
        last => {
            let index = last.and_then(|last| i64::try_from(last).ok()).unwrap_or(i64::MAX);
            return Err(Why::Index { index, size: x.shape.numel() });
        }
    }
    Ok(TensorTy { shape, ..x.clone() })
}

pub(crate) fn as_strided_type(op: &Op, args: &[Ty]) -> Rule {
    one(strided_window(op, tensor(args, 0, "x")?)?)
}

pub(crate) fn as_strided_scatter_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, src) = (tensor(args, 0, "x")?, tensor(args, 1, "src")?);
    let window = strided_window(op, x)?;
    window_fits(args, x, src, &window)
}

/// A scatter of `src` into a window of `x`.
fn window_fits(args: &[Ty], x: &TensorTy, src: &TensorTy, window: &TensorTy) -> Rule {
    common_device(args)?;
    same_kind_of(x, src)?;
    if window.shape == src.shape {
        one(x.clone())
    } else {
        Err(Why::shape("src", window.shape.clone(), src.shape.clone()))
    }
}

/// The row-major positions of an as_strided view's elements, in one dim.
fn strided_positions(cx: Cx<'_>, view: &Strided, device: Device) -> Result<Value> {
    let rank = view.shape.rank();
    let first = cx.number(Scalar::Int(view.offset as i64))?;
    let mut total = cx.full(first, Shape::from(vec![1; rank]), DType::I64, device)?;
    for (d, (&len, &stride)) in view.shape.iter().zip(view.strides.iter()).enumerate() {
        let steps = iota(cx, (0, stride as i64), len, (d, rank), device)?;
        total = cx.add(total, steps)?;
    }
    cx.reshape(total, Shape::from(view.shape.numel()))
}

pub(crate) fn as_strided(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Ok(view) = strided(op) else { return Ok(smallvec::smallvec![args[0]]) };
    let x = cx.tensor_ty(args[0]);
    let positions = strided_positions(cx, &view, x.device)?;
    let flat = cx.reshape(args[0], Shape::from(x.shape.numel()))?;
    let picked = cx.gather(flat, positions, 0)?;
    decomposed(cx.reshape(picked, view.shape.clone()))
}

pub(crate) fn as_strided_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Ok(view)) = (g!(call), strided(call.op)) else { return Ok(vec![None]) };
    let x = cx.tensor_ty(call.inputs[0]);
    let positions = strided_positions(cx, &view, x.device)?;
    let flat = cx.reshape(g, Shape::from(view.shape.numel()))?;
    let sum = cx.gather_backward(flat, positions, 0, x.shape.numel())?;
    gradient_of(cx.reshape(sum, x.shape))
}

pub(crate) fn as_strided_scatter(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Ok(view) = strided(op) else { return Ok(smallvec::smallvec![args[0]]) };
    let x = cx.tensor_ty(args[0]);
    let positions = strided_positions(cx, &view, x.device)?;
    let flat = cx.reshape(args[0], Shape::from(x.shape.numel()))?;
    let src = cx.reshape(args[1], Shape::from(view.shape.numel()))?;
    let joined = cx.index_copy(flat, positions, src, 0)?;
    decomposed(cx.reshape(joined, x.shape))
}

pub(crate) fn as_strided_scatter_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::AsStridedScatter { view, offset }) = (g!(call), call.op) else {
        return Ok(vec![None, None]);
    };
    let gx = call.wanted(cx, 0, |cx| {
        let zeros = zeros_like(cx, call.inputs[1])?;
        cx.as_strided_scatter(g, zeros, view.clone(), *offset)
    })?;
    let gsrc = call.wanted(cx, 1, |cx| cx.as_strided(g, view.clone(), *offset))?;
    Ok(vec![gx, gsrc])
}

/// Base shape, then sizes, strides and offset of the view.
type StridedCase = (&'static [usize], &'static [usize], &'static [usize], usize);

/// Without overlap, then with.
const STRIDED: &[StridedCase] = &[
    (&[12], &[3, 2], &[4, 1], 1),
    (&[4, 5], &[5, 4], &[1, 5], 0),
    (&[2, 3, 4], &[], &[], 7),
    (&[3], &[0, 2], &[1, 1], 9),
];
const OVERLAPPING: &[StridedCase] = &[(&[9], &[4, 3], &[2, 1], 0), (&[5], &[3, 5], &[0, 1], 0)];

pub(crate) fn as_strided_samples() -> Vec<Sample> {
    let case = |&(base, shape, strides, offset): &StridedCase| {
        with_op(Op::AsStrided { view: Pairs::new(shape, strides), offset }, ALL, vec![t(base, Domain::Any)])
    };
    STRIDED.iter().chain(OVERLAPPING).map(case).collect()
}

pub(crate) fn as_strided_scatter_samples() -> Vec<Sample> {
    let case = |&(base, shape, strides, offset): &StridedCase| {
        let args = vec![t(base, Domain::Any), t(shape, Domain::Any)];
        with_op(Op::AsStridedScatter { view: Pairs::new(shape, strides), offset }, ALL, args)
    };
    STRIDED.iter().map(case).collect()
}

// ---- diagonals -----------------------------------------------------------------------------------------

struct Diagonal {
    offset: i64,
    dim1: usize,
    dim2: usize,
}

fn diagonal_of(op: &Op) -> Result<Diagonal, Why> {
    match *op {
        Op::Diagonal { offset, dim1, dim2 }
        | Op::DiagonalScatter { offset, dim1, dim2 }
        | Op::DiagEmbed { offset, dim1, dim2 } => Ok(Diagonal { offset, dim1, dim2 }),
        _ => Err(misplaced()),
    }
}

/// Where a diagonal starts in its two dims, and how long it is.
pub(crate) fn diagonal_extent(rows: usize, columns: usize, offset: i64) -> (usize, usize, usize) {
    let (row, column) = (offset.min(0).unsigned_abs() as usize, offset.max(0) as usize);
    (row, column, rows.saturating_sub(row).min(columns.saturating_sub(column)))
}

fn diagonal_window(op: &Op, x: &TensorTy) -> Result<TensorTy, Why> {
    let Diagonal { offset, dim1, dim2 } = diagonal_of(op)?;
    check_dims(&Dims::from([dim1, dim2]), x.shape.rank())?;
    let (_, _, len) = diagonal_extent(x.shape[dim1], x.shape[dim2], offset);
    let rest = (0..x.shape.rank()).filter(|&d| d != dim1 && d != dim2).map(|d| x.shape[d]);
    Ok(TensorTy { shape: rest.chain([len]).collect(), ..x.clone() })
}

pub(crate) fn diagonal_type(op: &Op, args: &[Ty]) -> Rule {
    one(diagonal_window(op, tensor(args, 0, "x")?)?)
}

pub(crate) fn diagonal_scatter_type(op: &Op, args: &[Ty]) -> Rule {
    let (x, src) = (tensor(args, 0, "x")?, tensor(args, 1, "src")?);
    window_fits(args, x, src, &diagonal_window(op, x)?)
}

pub(crate) fn diag_embed_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Diagonal { offset, dim1, dim2 } = diagonal_of(op)?;
    let Some((&len, rest)) = x.shape.split_last() else {
        return Err(Why::Rank { argument: "x", expected: "1 or more", got: 0 });
    };
    check_dims(&Dims::from([dim1, dim2]), x.shape.rank() + 1)?;
    let size = len.saturating_add(offset.unsigned_abs() as usize);
    let mut rest = rest.iter().copied();
    let shape: Shape = (0..x.shape.rank() + 1)
        .map(|d| if d == dim1 || d == dim2 { size } else { rest.next().unwrap_or(1) })
        .collect();
    crate::types::checked(TensorTy { shape, ..x.clone() })
}

/// `src` spread over `shape` along its diagonal (anything elsewhere), and where the diagonal is.
fn spread(cx: Cx<'_>, op: &Op, src: Value, shape: &Shape) -> Result<Option<(Value, Value)>> {
    let Ok(Diagonal { offset, dim1, dim2 }) = diagonal_of(op) else { return Ok(None) };
    let (rank, ty) = (shape.rank(), cx.tensor_ty(src));
    let (rows, columns) = (shape[dim1], shape[dim2]);
    let (row, _, len) = diagonal_extent(rows, columns, offset);
    if len == 0 {
        return Ok(None);
    }
    // The diagonal as a column of its rows, repeated over the columns.
    let mut padded = src;
    if len != rows {
        let none: Vec<usize> = vec![0; rank - 2];
        let (before, after) = ([&none[..], &[row]].concat(), [&none[..], &[rows - row - len]].concat());
        let zero = zero_of(cx, ty.dtype)?;
        padded = cx.constant_pad_nd(src, zero, Pairs::new(&before, &after))?;
    }
    let lead = ty.shape[..rank - 2].iter().copied();
    let column = cx.reshape(padded, lead.clone().chain([rows, 1]).collect())?;
    let wide = cx.expand(column, lead.chain([rows, columns]).collect())?;
    let mut rest = 0..rank - 2;
    let dims: Dims = (0..rank)
        .map(|d| match d {
            d if d == dim1 => rank - 2,
            d if d == dim2 => rank - 1,
            _ => rest.next().unwrap_or(0),
        })
        .collect();
    let spread = cx.permute(wide, dims)?;
    let row = iota(cx, (offset, 1), rows, (dim1, rank), ty.device)?;
    let column = iota(cx, (0, 1), columns, (dim2, rank), ty.device)?;
    Ok(Some((spread, cx.eq(row, column)?)))
}

pub(crate) fn diag_embed(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let x = cx.tensor_ty(args[0]);
    let zero = zero_of(cx, x.dtype)?;
    let shape = match op.infer(&[x.clone().into()]) {
        Ok(tys) => tys[0].as_tensor().map(|t| t.shape.clone()).unwrap_or_default(),
        Err(why) => return Err(op.error(&[x.into()], why, crate::Loc::UNKNOWN)),
    };
    decomposed(match spread(cx, op, args[0], &shape)? {
        Some((spread, there)) => cx.where_(there, spread, zero),
        None => cx.full(zero, shape, x.dtype, x.device),
    })
}

pub(crate) fn diagonal_scatter(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let shape = cx.tensor_ty(args[0]).shape;
    match spread(cx, op, args[1], &shape)? {
        Some((spread, there)) => decomposed(cx.where_(there, spread, args[0])),
        None => Ok(smallvec::smallvec![args[0]]),
    }
}

pub(crate) fn diagonal_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Ok(Diagonal { offset, dim1, dim2 })) = (g!(call), diagonal_of(call.op)) else {
        return Ok(vec![None]);
    };
    let zeros = zeros_like(cx, call.inputs[0])?;
    gradient_of(cx.diagonal_scatter(zeros, g, offset, dim1, dim2))
}

pub(crate) fn diagonal_scatter_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Ok(Diagonal { offset, dim1, dim2 })) = (g!(call), diagonal_of(call.op)) else {
        return Ok(vec![None, None]);
    };
    let gx = call.wanted(cx, 0, |cx| {
        let zeros = zeros_like(cx, call.inputs[1])?;
        cx.diagonal_scatter(g, zeros, offset, dim1, dim2)
    })?;
    let gsrc = call.wanted(cx, 1, |cx| cx.diagonal(g, offset, dim1, dim2))?;
    Ok(vec![gx, gsrc])
}

pub(crate) fn diag_embed_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Ok(Diagonal { offset, dim1, dim2 })) = (g!(call), diagonal_of(call.op)) else {
        return Ok(vec![None]);
    };
    gradient_of(cx.diagonal(g, offset, dim1, dim2))
}

/// Shape, offset, dims.
const DIAGONALS: &[(&[usize], i64, usize, usize)] = &[
    (&[5, 5], 0, 0, 1),
    (&[4, 7], 2, 0, 1),
    (&[4, 7], -3, 1, 0),
    (&[2, 3, 4], 1, 2, 0),
    (&[3, 2], 5, 0, 1),
    (&[2, 3, 1, 4], 0, 1, 3),
];

pub(crate) fn diagonal_samples() -> Vec<Sample> {
    DIAGONALS
        .iter()
        .map(|&(shape, offset, dim1, dim2)| {
            with_op(Op::Diagonal { offset, dim1, dim2 }, ALL, vec![t(shape, Domain::Any)])
        })
        .collect()
}

pub(crate) fn diagonal_scatter_samples() -> Vec<Sample> {
    DIAGONALS
        .iter()
        .map(|&(shape, offset, dim1, dim2)| {
            let (_, _, len) = diagonal_extent(shape[dim1], shape[dim2], offset);
            let rest = (0..shape.len()).filter(|&d| d != dim1 && d != dim2).map(|d| shape[d]);
            let src = SampleArg::Tensor(rest.chain([len]).collect(), Domain::Any);
            with_op(Op::DiagonalScatter { offset, dim1, dim2 }, ALL, vec![t(shape, Domain::Any), src])
        })
        .collect()
}

pub(crate) fn diag_embed_samples() -> Vec<Sample> {
    let cases: &[(&[usize], i64, usize, usize)] =
        &[(&[4], 0, 0, 1), (&[2, 3], 1, 1, 2), (&[2, 3], -2, 2, 0), (&[0], 0, 0, 1), (&[2, 1, 3], 0, 0, 3)];
    cases
        .iter()
        .map(|&(shape, offset, dim1, dim2)| {
            with_op(Op::DiagEmbed { offset, dim1, dim2 }, ALL, vec![t(shape, Domain::Any)])
        })
        .collect()
}

// ---- unfold --------------------------------------------------------------------------------------------

pub(crate) fn unfold_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Unfold { dim, size, step } = *op else { return Err(misplaced()) };
    check_dims(&Dims::from(dim), x.shape.rank())?;
    if size > x.shape[dim] {
        let (most, limit) = (x.shape[dim], "the size of dim");
        return Err(Why::Limit { argument: "size", most, limit, dim: Some(dim), got: size });
    }
    if step == 0 {
        return Err(Why::none("step"));
    }
    let mut shape = x.shape.clone();
    shape[dim] = (x.shape[dim] - size) / step + 1;
    shape.push(size);
    crate::types::checked(TensorTy { shape, ..x.clone() })
}

/// Windows put back one behind the other: `value` (of an unfold's shape) with the window beside its dim, and
/// the positions along the dim that its elements came from.
pub fn refold(cx: Cx<'_>, value: Value, dim: usize, (size, step): (usize, usize)) -> Result<(Value, Value)> {
    let ty = cx.tensor_ty(value);
    let last = ty.shape.rank() - 1;
    let windows = ty.shape[dim];
    let dims: Dims = (0..=dim).chain([last]).chain(dim + 1..last).collect();
    let beside = cx.permute(value, dims)?;
    let mut shape: Shape = ty.shape[..last].into();
    shape[dim] = windows * size;
    let lined = cx.reshape(beside, shape)?;
    let starts = iota(cx, (0, step as i64), windows, (0, 2), ty.device)?;
    let within = iota(cx, (0, 1), size, (1, 2), ty.device)?;
    let positions = cx.add(starts, within)?;
    Ok((lined, cx.reshape(positions, Shape::from(windows * size))?))
}

pub(crate) fn unfold_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Unfold { dim, size, step }) = (g!(call), call.op) else { return Ok(vec![None]) };
    let (lined, positions) = refold(cx, g, *dim, (*size, *step))?;
    let zeros = zeros_like(cx, call.inputs[0])?;
    gradient_of(cx.index_add(zeros, positions, lined, *dim))
}

pub(crate) fn unfold_samples() -> Vec<Sample> {
    let cases: &[(&[usize], usize, usize, usize)] =
        &[(&[9], 0, 3, 2), (&[7], 0, 2, 3), (&[3, 8, 2], 1, 4, 1), (&[4, 6], 1, 6, 1), (&[5], 0, 0, 1)];
    cases
        .iter()
        .map(|&(shape, dim, size, step)| {
            with_op(Op::Unfold { dim, size, step }, ALL, vec![t(shape, Domain::Any)])
        })
        .collect()
}

// ---- flip, triangles -----------------------------------------------------------------------------------

pub(crate) fn flip_type(op: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    let Op::Flip { dims } = op else { return Err(misplaced()) };
    check_dims(dims, x.shape.rank())?;
    one(x.clone())
}

pub(crate) fn flip_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (g, Op::Flip { dims }) = (g!(call), call.op) else { return Ok(vec![None]) };
    gradient_of(cx.flip(g, dims.clone()))
}

pub(crate) fn flip_samples() -> Vec<Sample> {
    let cases: &[(&[usize], &[usize])] = &[
        (&[9], &[0]),
        (&[4, 37], &[1]),
        (&[4, 37], &[0]),
        (&[2, 3, 17], &[0, 2]),
        (&[], &[]),
        (&[0, 3], &[0]),
    ];
    cases
        .iter()
        .map(|(shape, dims)| with_op(Op::Flip { dims: Dims::from(*dims) }, ALL, vec![t(shape, Domain::Any)]))
        .collect()
}

pub(crate) fn triangle_type(_: &Op, args: &[Ty]) -> Rule {
    let x = tensor(args, 0, "x")?;
    match x.shape.rank() {
        got @ (0 | 1) => Err(Why::Rank { argument: "x", expected: "2 or more", got }),
        _ => one(x.clone()),
    }
}

pub(crate) fn triangle(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let x = cx.tensor_ty(args[0]);
    let (rows, columns) = (x.shape[x.shape.rank() - 2], x.shape[x.shape.rank() - 1]);
    let row = |cx: Cx<'_>, diagonal: i64| iota(cx, (diagonal, 1), rows, (0, 2), x.device);
    let column = iota(cx, (0, 1), columns, (1, 2), x.device)?;
    let kept = match *op {
        Op::Tril { diagonal } => {
            let row = row(cx, diagonal)?;
            cx.le(column, row)?
        }
        Op::Triu { diagonal } => {
            let row = row(cx, diagonal)?;
            cx.ge(column, row)?
        }
        _ => return Ok(smallvec::smallvec![args[0]]),
    };
    let zero = zero_of(cx, x.dtype)?;
    decomposed(cx.where_(kept, args[0], zero))
}

pub(crate) fn triangle_grad(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let g = g!(call);
    gradient_of(cx.emit_one(call.op.clone(), &[g]))
}

const TRIANGLES: &[(&[usize], i64)] =
    &[(&[5, 5], 0), (&[4, 7], 2), (&[7, 4], -3), (&[2, 3, 3], 1), (&[0, 2], 0), (&[3, 3], -9)];

pub(crate) fn tril_samples() -> Vec<Sample> {
    let case = |&(shape, diagonal): &(&[usize], i64)| {
        with_op(Op::Tril { diagonal }, ALL, vec![t(shape, Domain::Any)])
    };
    TRIANGLES.iter().map(case).collect()
}

pub(crate) fn triu_samples() -> Vec<Sample> {
    let case = |&(shape, diagonal): &(&[usize], i64)| {
        with_op(Op::Triu { diagonal }, ALL, vec![t(shape, Domain::Any)])
    };
    TRIANGLES.iter().map(case).collect()
}
