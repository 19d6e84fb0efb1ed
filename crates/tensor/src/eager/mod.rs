//! Eager execution: from an op and its operands to a call of a kernel. Locks storages, converts and
//! broadcasts operands, sends self-overlapping changes through a temporary.

mod functions;
mod gather;
mod index;
mod indexing;
mod integer;
mod loss;
mod nn;
mod order;
mod product;
mod random;
mod recurrent;
mod reduce;
mod scan;
mod windows;

use smallvec::SmallVec;

use kiln_ir::table::recurrent::Sequence;
use kiln_ir::{
    Class, Custom, DType, Error, Layout, Loc, Op, Result, Scalar, ScatterReduce, Shape, TensorTy, Ty, Why,
    result_dtype,
};

use crate::create::allocate;
use crate::hook::Arg;
use crate::kernels::{self, Bits, Comparison, Logical, Operand};
use crate::storage::Guard;
use crate::tensor::{Held, Ready};
use crate::{Tensor, custom};

pub(crate) use functions::{function, has_kernel, power};
pub(crate) use integer::division;
pub use scan::{CompileBody, compile_bodies_by};

/// An operand made ready: a tensor, or a number waiting for its dtype.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    Tensor(&'a Ready),
    Number(Scalar),
}

struct Job<'a> {
    op: &'a Op,
    tys: &'a [Ty],
    loc: Loc,
}

/// Runs an op into fresh memory.
pub(crate) fn compute(op: &Op, args: &[Arg<'_>], tys: &[Ty], result: &TensorTy, loc: Loc) -> Result<Ready> {
    let out = allocate(result, op.name(), loc)?;
    let held = Held::of_args(args);
    let inputs = inputs(op, args, tys, &held, loc)?;
    let _lock = lock(&inputs, None);
    Job { op, tys, loc }.run(&out, &inputs)?;
    Ok(out)
}

/// Runs an op that has a kernel into dense memory of its result's type that no operand shares. The caller
/// holds whatever locks there are.
pub(crate) fn compute_into(op: &Op, inputs: &[Ready], tys: &[Ty], out: &Ready, loc: Loc) -> Result<()> {
    let inputs: SmallVec<[Input<'_>; 4]> = inputs.iter().map(Input::Tensor).collect();
    Job { op, tys, loc }.run(out, &inputs)
}

/// Runs an op, whose result has this type, into its first operand.
pub(crate) fn compute_in_place(
    op: &Op,
    args: &[Arg<'_>],
    tys: &[Ty],
    result: &TensorTy,
    target: &Tensor,
    loc: Loc,
) -> Result<()> {
    let held = Held::of_args(args);
    let target = held.operand(target, tys.first(), op, loc)?;
    let temporary;
    let mut inputs = inputs(op, args, tys, &held, loc)?;
    let job = Job { op, tys, loc };
    // `copy_` does not read its target, so only the source can overlap it.
    let first_read = if matches!(op, Op::Copy {}) { 1 } else { 0 };
    let clash = inputs[first_read..].iter().any(|input| match input {
        Input::Tensor(t) => overlaps(t, target),
        Input::Number(_) => false,
    });
    let shares =
        |input: &Input| matches!(input, Input::Tensor(t) if t.storage.address() == target.storage.address());
    let places =
        indexing::changes_places(op) && target.layout.is_contiguous() && !inputs[1..].iter().any(shares);
    let direct = (op.row().class == Class::Pointwise && !clash || places) && result.dtype == target.dtype;
    let _lock = lock(&inputs, Some(target));
    if direct {
        job.run(target, &inputs)?;
    } else {
        temporary = allocate(result, op.name(), loc)?;
        if matches!(op, Op::Copy {}) {
            inputs[0] = Input::Tensor(&temporary);
        }
        job.run(&temporary, &inputs)?;
        // SAFETY: the target is locked for writing; the temporary is fresh and has the target's shape.
        unsafe { kernels::convert(&operand(target), &operand(&temporary)) };
    }
    target.storage.bump_version();
    Ok(())
}

/// Whether writing `target` element by element could change elements of `input` that are read later.
pub(crate) fn overlaps(input: &Ready, target: &Ready) -> bool {
    if std::ptr::eq(input, target)
        || input.storage.address() != target.storage.address()
        || input.layout == target.layout
    {
        return false;
    }
    let (a, b) = (input.layout.extent(), target.layout.extent());
    a.start < b.end && b.start < a.end
}

fn inputs<'a>(
    op: &Op,
    args: &[Arg<'a>],
    tys: &[Ty],
    held: &'a Held,
    loc: Loc,
) -> Result<SmallVec<[Input<'a>; 4]>> {
    let mut inputs = SmallVec::new();
    for (i, arg) in args.iter().enumerate() {
        inputs.push(match arg {
            Arg::Tensor(t) => Input::Tensor(held.operand(t, tys.get(i), op, loc)?),
            Arg::Number(x) => Input::Number(*x),
            Arg::List(_) => return Err(no_operand(op, i, "a list")),
        });
    }
    Ok(inputs)
}

/// An operand of a kind that no kernel of the op takes there: type rules and dispatch see to that.
#[cold]
#[track_caller]
fn no_operand(op: &Op, i: usize, kind: &str) -> Error {
    Error::bug(format!("{kind} is operand {i} of a kernel of {}", op.name()))
}

/// Locks what is read and what is written. Fresh memory needs no lock: nobody else knows it.
#[inline]
pub(crate) fn lock<'a>(inputs: &[Input<'a>], target: Option<&'a Ready>) -> Guard<'a> {
    let reads = inputs.iter().filter_map(|input| match input {
        Input::Tensor(t) => Some((&t.storage, false)),
        Input::Number(_) => None,
    });
    Guard::lock(reads.chain(target.map(|target| (&target.storage, true))))
}

fn operand(ready: &Ready) -> Operand<'_> {
    Operand {
        ptr: ready.pointer(),
        dtype: ready.dtype,
        shape: &ready.layout.shape,
        strides: &ready.layout.strides,
    }
}

/// The dtype of a number that takes part in arithmetic of a dtype: floats are not rounded to a half first,
/// integers are wrapped.
pub(crate) fn number_dtype(dtype: DType) -> DType {
    if dtype.is_float() { dtype.computing() } else { dtype }
}

/// A tensor operand broadcast to a shape and converted to a dtype, or a number as an element.
enum Prepared<'a> {
    Same(&'a Ready),
    Changed(Box<Ready>),
    Number { element: u64, dtype: DType },
}

impl Prepared<'_> {
    /// As a kernel takes it. A number is spread over `shape` by `zeros`, as many as it has dims.
    fn operand<'b>(&'b self, shape: &'b Shape, zeros: &'b [isize]) -> Operand<'b> {
        match self {
            Prepared::Same(t) => operand(t),
            Prepared::Changed(t) => operand(t),
            Prepared::Number { element, dtype } => Operand {
                ptr: std::ptr::from_ref(element).cast_mut().cast(),
                dtype: *dtype,
                shape,
                strides: zeros,
            },
        }
    }
}

/// The strides of a number spread over a shape.
fn zeros(shape: &Shape) -> SmallVec<[isize; 6]> {
    SmallVec::from_elem(0, shape.rank())
}

impl Job<'_> {
    fn prepare<'b>(&self, input: Input<'b>, dtype: DType, shape: &Shape) -> Result<Prepared<'b>> {
        let t = match input {
            Input::Number(x) => {
                return Ok(Prepared::Number { element: self.op.number(x, dtype).to_element(dtype), dtype });
            }
            Input::Tensor(t) => t,
        };
        let broadcast = t.layout.shape[..] != shape[..];
        if t.dtype == dtype && !broadcast {
            return Ok(Prepared::Same(t));
        }
        let mut t = if t.dtype == dtype { t.clone() } else { self.convert(t, dtype)? };
        if broadcast && let Some(layout) = t.layout.view(&Op::Expand { shape: shape.clone() }) {
            t.layout = layout;
        }
        Ok(Prepared::Changed(Box::new(t)))
    }

    fn convert(&self, t: &Ready, dtype: DType) -> Result<Ready> {
        let out = allocate(&TensorTy { dtype, ..t.ty() }, self.op.name(), self.loc)?;
        // SAFETY: `t` is locked; `out` is fresh and has its shape.
        unsafe { kernels::convert(&operand(&out), &operand(t)) };
        Ok(out)
    }

    fn dense(&self, t: &Ready) -> Result<Ready> {
        if t.layout.is_contiguous() { Ok(t.clone()) } else { self.convert(t, t.dtype) }
    }

    fn tensor<'b>(&self, inputs: &[Input<'b>], i: usize) -> Result<&'b Ready> {
        match inputs[i] {
            Input::Tensor(t) => Ok(t),
            Input::Number(_) => Err(self.op.error(
                self.tys,
                Why::Operand { argument: "operands", expected: "tensors" },
                self.loc,
            )),
        }
    }

    fn number(&self, inputs: &[Input], i: usize) -> Result<Scalar> {
        match inputs[i] {
            Input::Number(x) => Ok(x),
            Input::Tensor(_) => Err(no_operand(self.op, i, "a tensor")),
        }
    }

    /// Prepares every input, tensors in one dtype and numbers in another, and hands the operands to a kernel.
    fn pointwise<R>(
        &self,
        dtype: DType,
        numbers: DType,
        out: &Ready,
        inputs: &[Input],
        kernel: impl FnOnce(&Operand<'_>, &[&Operand<'_>]) -> R,
    ) -> Result<R> {
        let shape = &out.layout.shape;
        let zeros = zeros(shape);
        let mut prepared: SmallVec<[Prepared<'_>; 4]> = SmallVec::new();
        for &input in inputs {
            let dtype = if matches!(input, Input::Number(_)) { numbers } else { dtype };
            prepared.push(self.prepare(input, dtype, shape)?);
        }
        let mut operands: SmallVec<[Operand<'_>; 4]> = SmallVec::new();
        for input in &prepared {
            operands.push(input.operand(shape, &zeros));
        }
        let mut references: SmallVec<[&Operand<'_>; 4]> = SmallVec::new();
        for operand in &operands {
            references.push(operand);
        }
        Ok(kernel(&operand(out), &references))
    }

    fn compare(&self, comparison: Comparison, out: &Ready, inputs: &[Input]) -> Result<()> {
        let dtype = result_dtype(self.tys);
        // SAFETY: as in `function`; the output is bool.
        self.pointwise(dtype, number_dtype(dtype), out, inputs, |out, inputs| unsafe {
            kernels::compare(comparison, out, inputs[0], inputs[1]);
        })
    }

    fn logical(&self, connective: Logical, out: &Ready, inputs: &[Input]) -> Result<()> {
        // SAFETY: as in `function`; everything is bool.
        self.pointwise(DType::Bool, DType::Bool, out, inputs, |out, inputs| unsafe {
            kernels::logical(connective, out, inputs)
        })
    }

    /// A kernel of the user's, on operands that may outlive this call: it gets copies.
    fn custom(&self, op: Custom, out: &Ready, inputs: &[Input]) -> Result<()> {
        let mut args = Vec::with_capacity(inputs.len());
        for i in 0..inputs.len() {
            let t = self.tensor(inputs, i)?;
            args.push(Tensor::from_ready(self.convert(t, t.dtype)?));
        }
        let result = custom::run(op, &args, self.tys, &out.ty(), self.loc)?;
        // SAFETY: the result is fresh and has `out`'s shape.
        unsafe { kernels::convert(&operand(out), &operand(&result)) };
        Ok(())
    }

    fn run(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        if let Some(division) = division(self.op)
            && !out.dtype.is_float()
        {
            return self.divide(division, out, inputs);
        }
        if let Some(done) = self.power(out, inputs) {
            return done;
        }
        if let Some(function) = function(self.op, inputs.len()) {
            return self.function(function, out, inputs);
        }
        if let Some(done) = self.halves(out, inputs) {
            return done;
        }
        if let Op::NllLoss { .. } = self.op
            && out.dtype.is_narrow()
        {
            return self.nll_loss_of_halves(out, inputs);
        }
        if self.is_widened(out, inputs) {
            return self.run_widened(out, inputs);
        }
        match self.op {
            Op::Eq {} => self.compare(Comparison::Eq, out, inputs),
            Op::Ne {} => self.compare(Comparison::Ne, out, inputs),
            Op::Lt {} => self.compare(Comparison::Lt, out, inputs),
            Op::Le {} => self.compare(Comparison::Le, out, inputs),
            Op::Gt {} => self.compare(Comparison::Gt, out, inputs),
            Op::Ge {} => self.compare(Comparison::Ge, out, inputs),
            Op::LogicalAnd {} => self.logical(Logical::And, out, inputs),
            Op::LogicalNot {} => self.logical(Logical::Not, out, inputs),
            Op::Where {} => self.choose(out, inputs),
            Op::BitwiseAnd {} => self.bits(Bits::And, out, inputs),
            Op::BitwiseOr {} => self.bits(Bits::Or, out, inputs),
            Op::BitwiseXor {} => self.bits(Bits::Xor, out, inputs),
            Op::BitwiseLeftShift {} => self.bits(Bits::Left, out, inputs),
            Op::BitwiseRightShift {} => self.bits(Bits::Right, out, inputs),
            Op::To { .. } | Op::Clone {} | Op::Reshape { .. } => self.copy_into(out, inputs, 0),
            Op::Copy {} => self.copy_into(out, inputs, 1),
            // Other views never get here: they share their base's memory.
            Op::Permute { .. }
            | Op::Transpose { .. }
            | Op::Expand { .. }
            | Op::Slice { .. }
            | Op::Diagonal { .. }
            | Op::Unfold { .. }
            | Op::Detach {} => self.copy_into(out, inputs, 0),
            Op::AsStrided { .. } => self.as_strided(out, self.tensor(inputs, 0)?),
            Op::Flip { dims } => self.flip(out, self.tensor(inputs, 0)?, dims),
            Op::Tril { diagonal } => self.triangle(out, self.tensor(inputs, 0)?, *diagonal, true),
            Op::Triu { diagonal } => self.triangle(out, self.tensor(inputs, 0)?, *diagonal, false),
            Op::ConstantPadNd { widths } | Op::ReflectionPad { widths } | Op::ReplicationPad { widths } => {
                self.pad(out, inputs, &widths.firsts())
            }
            Op::Custom { op } => self.custom(*op, out, inputs),
            Op::Scan { .. } => self.steps(out, inputs),
            Op::CheckedIndex { size } => self.checked_index(out, self.tensor(inputs, 0)?, *size),
            Op::OneHot { classes } => self.one_hot(out, self.tensor(inputs, 0)?, *classes),
            Op::Index { dims } => self.index(out, inputs, dims),
            Op::IndexPut { dims, accumulate } => self.index_put(out, inputs, dims, *accumulate),
            Op::IndexSelect { dim } => self.index_select(out, inputs, *dim),
            Op::IndexAdd { dim } => self.index_write(out, inputs, *dim, true),
            Op::IndexCopy { dim } => self.index_write(out, inputs, *dim, false),
            Op::Scatter { dim } => self.scatter(out, inputs, *dim, None),
            Op::ScatterAdd { dim } => self.scatter(out, inputs, *dim, Some((ScatterReduce::Sum, true))),
            Op::ScatterReduce { dim, reduce, include_self } => {
                self.scatter(out, inputs, *dim, Some((*reduce, *include_self)))
            }
            Op::MaskedScatter {} => self.masked_scatter(out, inputs),
            Op::MaskedScatterBackward { .. } => self.masked_scatter_backward(out, inputs),
            Op::Sum { dims, .. } => self.reduce(kernels::Reduction::Sum, out, inputs, dims),
            Op::Nansum { dims, .. } => self.nansum(out, inputs, dims),
            Op::Amax { dims, .. } => self.reduce(kernels::Reduction::Amax, out, inputs, dims),
            Op::Amin { dims, .. } => self.reduce(kernels::Reduction::Amin, out, inputs, dims),
            Op::Prod { dims, .. } => self.reduce(kernels::Reduction::Prod, out, inputs, dims),
            Op::ProdBackward { dims } => self.prod_backward(out, inputs, dims),
            Op::Mean { dims, .. } => self.mean(out, inputs, dims),
            Op::Softmax { dim } => self.softmax(false, out, inputs, *dim),
            Op::LogSoftmax { dim } => self.softmax(true, out, inputs, *dim),
            Op::Mm {} => self.mm(out, self.tensor(inputs, 0)?, self.tensor(inputs, 1)?, false),
            Op::Addmm {} => {
                self.copy_into(out, inputs, 0)?;
                self.mm(out, self.tensor(inputs, 1)?, self.tensor(inputs, 2)?, true)
            }
            Op::Linear {} => self.linear(out, inputs),
            Op::Bmm {} => self.bmm(out, inputs),
            Op::Convolution { .. }
            | Op::ConvolutionInputGradient { .. }
            | Op::ConvolutionWeightGradient { .. } => self.convolution(out, inputs),
            Op::MaxPool2dIndices { .. } => self.max_pool(out, inputs),
            Op::AvgPool2d { .. }
            | Op::AdaptiveAvgPool2d { .. }
            | Op::UpsampleNearest2d { .. }
            | Op::UpsampleBilinear2d { .. } => self.resample(out, inputs, false),
            Op::AvgPool2dBackward { .. }
            | Op::AdaptiveAvgPool2dBackward { .. }
            | Op::UpsampleNearest2dBackward { .. }
            | Op::UpsampleBilinear2dBackward { .. } => self.resample(out, inputs, true),
            Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::GroupNorm { .. } | Op::BatchNorm {} => {
                self.normalise(out, inputs)
            }
            Op::LayerNormBackward { .. } | Op::RmsNormBackward { .. } | Op::BatchNormBackward {} => {
                self.normalise_backward(out, inputs)
            }
            Op::BatchMoments {} => self.batch_moments(out, inputs),
            op if Sequence::is_recurrent(op) => self.recurrent(out, inputs),
            Op::SliceScatter { .. }
            | Op::SliceAdd { .. }
            | Op::AsStridedScatter { .. }
            | Op::DiagonalScatter { .. }
            | Op::DiagEmbed { .. } => self.put_in_window(out, inputs),
            Op::Cat { dim } => self.cat(out, inputs, *dim),
            Op::Gather { dim } => self.gather(out, inputs, *dim),
            Op::GatherBackward { dim, .. } => self.gather_backward(out, inputs, *dim),
            Op::Full { .. } => {
                // SAFETY: `out` is fresh.
                unsafe { kernels::fill(&operand(out), self.number(inputs, 0)?.to_element(out.dtype)) };
                Ok(())
            }
            Op::Arange { .. } => {
                let (start, step) = (self.number(inputs, 0)?, self.number(inputs, 1)?);
                // SAFETY: `out` is fresh and one-dimensional.
                unsafe { kernels::arange(&operand(out), start.as_f64(), step.as_f64()) };
                Ok(())
            }
            Op::Rand { .. } => self.random(out, inputs, 0),
            Op::Randn { .. } => self.normal(out, inputs),
            Op::Uniform { .. } => {
                self.random(out, inputs, 2)?;
                self.scale(out, self.number(inputs, 0)?.as_f64(), self.number(inputs, 1)?.as_f64())
            }
            Op::NllLoss { .. } => self.nll_loss(out, self.tensor(inputs, 0)?, self.tensor(inputs, 1)?),
            Op::CrossEntropy { .. } => self.cross_entropy(out, inputs),
            // Scalar functions ran above, and what has a decomposition doesn't get here: `has_kernel`.
            _ => self.along(out, inputs).unwrap_or_else(|| {
                Err(Error::bug(format!("{} ({}) has no eager kernel", self.op.name(), self.loc)))
            }),
        }
    }

    /// Whether a kernel knows computing types only and an operand is of a narrow dtype. Kernels that work
    /// element by element and the commonest reductions widen on the way, those that move elements never look
    /// at them.
    fn is_widened(&self, out: &Ready, inputs: &[Input]) -> bool {
        let computes = match self.op.row().class {
            Class::Reduction => {
                !matches!(self.op, Op::Sum { .. } | Op::Nansum { .. } | Op::Amax { .. } | Op::Mean { .. })
            }
            Class::Composite => !matches!(self.op, Op::Softmax { .. } | Op::LogSoftmax { .. }),
            Class::Random | Class::Contraction => true,
            Class::Index => !windows::moves(self.op),
            Class::Pointwise
            | Class::View
            | Class::Create
            | Class::Constant
            | Class::List
            | Class::Custom => false,
        };
        let is_narrow = |input: &Input| matches!(input, Input::Tensor(t) if t.dtype.is_narrow());
        computes && (out.dtype.is_narrow() || inputs.iter().any(is_narrow))
    }

    /// Runs on operands converted to the types they are computed in, and converts the result: sums of halves
    /// are rounded once.
    fn run_widened(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let mut converted: SmallVec<[Option<Ready>; 4]> = SmallVec::new();
        for input in inputs {
            converted.push(match input {
                Input::Tensor(t) if t.dtype.is_narrow() => Some(self.convert(t, t.dtype.computing())?),
                _ => None,
            });
        }
        let wide: SmallVec<[Input; 4]> = inputs
            .iter()
            .zip(&converted)
            .map(|(&input, converted)| converted.as_ref().map_or(input, Input::Tensor))
            .collect();
        if !out.dtype.is_narrow() {
            return self.run(out, &wide);
        }
        let ty = TensorTy { dtype: out.dtype.computing(), ..out.ty() };
        let result = allocate(&ty, self.op.name(), self.loc)?;
        self.run(&result, &wide)?;
        // SAFETY: `out` is fresh, the result too and of its shape.
        unsafe { kernels::convert(&operand(out), &operand(&result)) };
        Ok(())
    }

    fn choose(&self, out: &Ready, inputs: &[Input]) -> Result<()> {
        let shape = &out.layout.shape;
        let zeros = zeros(shape);
        let condition = self.prepare(inputs[0], DType::Bool, shape)?;
        let condition = condition.operand(shape, &zeros);
        // SAFETY: as in `function`; the condition is bool.
        self.pointwise(out.dtype, out.dtype, out, &inputs[1..], |out, inputs| unsafe {
            kernels::select(out, &condition, inputs[0], inputs[1]);
        })
    }

    /// out = operand `i`, converted and broadcast (a reshape reads in row-major order).
    fn copy_into(&self, out: &Ready, inputs: &[Input], i: usize) -> Result<()> {
        let Input::Tensor(t) = inputs[i] else {
            // SAFETY: `out` is fresh or locked for writing.
            unsafe { kernels::fill(&operand(out), self.number(inputs, i)?.to_element(out.dtype)) };
            return Ok(());
        };
        if let Op::Reshape { .. } = self.op {
            // Fresh memory is dense: it can take the operand's shape instead.
            let layout = Layout::contiguous(t.layout.shape.clone());
            let out = Operand { shape: &layout.shape, strides: &layout.strides, ..operand(out) };
            // SAFETY: `out` is fresh; `t` is locked for reading and has as many elements.
            unsafe { kernels::convert(&out, &operand(t)) };
            return Ok(());
        }
        let t = self.prepare(inputs[i], t.dtype, &out.layout.shape)?;
        // SAFETY: `out` is fresh or locked for writing; `t` is locked for reading and has `out`'s shape.
        unsafe { kernels::convert(&operand(out), &t.operand(&out.layout.shape, &[])) };
        Ok(())
    }

    fn as_shape(&self, t: &Ready, shape: Shape) -> Result<Ready> {
        match t.layout.view(&Op::Reshape { shape: shape.clone() }) {
            Some(layout) => Ok(Ready { layout, ..t.clone() }),
            None => {
                let dense = self.dense(t)?;
                Ok(Ready {
                    layout: Layout { offset: dense.layout.offset, ..Layout::contiguous(shape) },
                    ..dense
                })
            }
        }
    }
}

/// The elements of a dense tensor.
///
/// # Safety
/// `t` must be dense with `n` elements of type `T`, and not be written while the slice lives.
unsafe fn elements<T>(t: &Ready, n: usize) -> &[T] {
    match n {
        0 => &[],
        // SAFETY: the caller's contract; storages are aligned for every dtype.
        _ => unsafe { std::slice::from_raw_parts(t.pointer().cast(), n) },
    }
}

/// The elements of a fresh dense tensor.
///
/// # Safety
/// `t` must be dense with `n` elements of type `T` and known to nobody else.
#[allow(clippy::mut_from_ref)]
unsafe fn elements_mut<T>(t: &Ready, n: usize) -> &mut [T] {
    match n {
        0 => &mut [],
        // SAFETY: the caller's contract.
        _ => unsafe { std::slice::from_raw_parts_mut(t.pointer().cast(), n) },
    }
}
