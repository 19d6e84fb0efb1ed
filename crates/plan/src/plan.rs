//! A plan: kernels as loops, calls, and where everything lies in memory. Plain data.

use std::ops::Range;
use std::sync::Arc;

use kiln_ir::{DType, Graph, Loc, Op, Scalar, ScalarKind, Shape, Strides, TensorTy};

use crate::loops::Kernel;
use crate::report::Report;

/// Index into [`Plan::buffers`].
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BufferId(pub u32);

impl BufferId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a buffer lives.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// The memory of this graph input.
    Input(usize),
    /// Fresh memory for this graph output.
    Output(usize),
    /// The memory for this graph output, before the output itself comes to be.
    BeforeOutput {
        /// Number of the output.
        output: usize,
        /// Byte offset, a multiple of 64.
        offset: usize,
    },
    /// The run's arena, at this byte.
    Arena {
        /// Byte offset, a multiple of 64.
        offset: usize,
    },
    /// The memory that a thread has for one band of rows, at this byte: of the buffer there are only the rows that are
    /// worked on, by the steps of one [`Bands`].
    Band {
        /// Byte offset, a multiple of 64.
        offset: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
}

/// A piece of memory that steps read and write.
#[derive(Clone, PartialEq, Debug)]
pub struct BufferPlan {
    /// Where it lives.
    pub place: Place,
    /// What it holds. Neighbours that hold the like share it: a thousand parameters mostly do.
    pub ty: Arc<BufferTy>,
}

/// What a buffer holds.
#[derive(Clone, PartialEq, Debug)]
pub struct BufferTy {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
    /// Strides in elements.
    pub strides: Strides,
    /// Bytes it occupies (of an input: of its elements).
    pub bytes: usize,
}

/// A number that a step needs.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum ScalarRef {
    /// The graph input with this number.
    Input(usize),
    /// A number of the program text.
    Constant(Scalar),
    /// Result of [`Plan::scalars`].
    Computed(usize),
}

/// An op on numbers, run on the host before the steps.
#[derive(Clone, PartialEq, Debug)]
pub struct ScalarOp {
    /// The op.
    pub op: Op,
    /// Its operands.
    pub args: Vec<ScalarRef>,
    /// The kind of its result.
    pub kind: ScalarKind,
}

/// A buffer and the element at which an access begins.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct BufferRef {
    /// The buffer.
    pub buffer: BufferId,
    /// Offset in elements.
    pub offset: i64,
}

/// A strided tensor in a buffer.
#[derive(Clone, PartialEq, Debug)]
pub struct ViewRef {
    /// Where its first element is.
    pub at: BufferRef,
    /// Its type.
    pub ty: TensorTy,
    /// Strides in elements.
    pub strides: Strides,
}

impl ViewRef {
    /// A dense tensor.
    pub fn dense(at: BufferRef, ty: TensorTy) -> ViewRef {
        let strides = ty.shape.contiguous_strides();
        ViewRef { at, ty, strides }
    }

    /// Whether its elements lie one after the other.
    pub fn is_dense(&self) -> bool {
        self.strides == self.ty.shape.contiguous_strides()
    }
}

/// Whether a convolution's groups have so few channels that planes are summed up directly. Such a step may read halves:
/// it widens a few planes at a time.
pub fn sums_planes(groups: usize, channels: usize) -> bool {
    // A matrix of fewer columns would leave half of its panel empty.
    groups > 1 && channels / groups <= 8
}

/// What a status other than 0 of a kernel means.
#[derive(Clone, PartialEq, Debug)]
pub struct CheckText {
    /// The op whose operand was out of range.
    pub op: &'static str,
    /// The size of the dim that was indexed.
    pub size: i64,
    /// The user's line.
    pub loc: Loc,
}

/// Rows of a product that belong to items of the kernel after it: the first so many rows to the first so many items,
/// and so on. The kernel reads no other rows in these items, and nothing of it touches the product's operands, so
/// it may run on rows that are finished while others are not.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Epilogue {
    /// Rows of the product.
    pub rows: usize,
    /// Items of the kernel.
    pub items: i64,
}

/// How the kernel after a convolution runs on parts of planes, some pixels of them: with buffers that begin at the
/// first of these pixels, and a shorter loop. It reads and writes the convolution's result pixel by pixel in order,
/// and nothing of it touches the operands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OnPlanes {
    /// Pixels of a plane.
    pub pixels: usize,
    /// Whether one loop goes through all planes; else each plane is an item.
    pub is_one_loop: bool,
    /// By buffer of the kernel, elements from one pixel to the next.
    pub steps: Vec<i64>,
}

/// How the next step, a kernel, runs on what a call has finished while it goes on with the rest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Then {
    /// On rows of a product.
    Rows(Epilogue),
    /// On pixels of some planes of a convolution.
    Planes(OnPlanes),
}

/// Steps that run together, band by band of rows: all of them on the first rows of the first matrix, then on the next.
/// Each makes its rows from the same rows of what others of them made, and from what was there before; so bands may
/// run in any order, and on any thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bands {
    /// The first of the steps: a product, whose matrices and rows are those of all.
    pub first: usize,
    /// How many steps, one after the other.
    pub steps: usize,
    /// Rows of a band.
    pub rows: usize,
    /// Bands of a matrix; the last one has all rows that are left.
    pub count: usize,
    /// By kernel among the steps, which of its items belong to which rows, counted through all matrices.
    pub kernels: Vec<Epilogue>,
    /// What a thread needs for the buffers in [`Place::Band`].
    pub bytes: usize,
}

/// Runs a kernel.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    /// Index into [`Plan::kernels`].
    pub kernel: usize,
    /// The numbers of its loops here, in the order of [`Kernel::each_number`].
    pub numbers: Vec<i64>,
    /// Its buffers, from these elements on: for a table, all of the first row, then of the next.
    pub bufs: Vec<BufferRef>,
    /// How many elements each row of a table has.
    pub rows: Vec<i64>,
    /// The numbers it computes with.
    pub scalars: Vec<ScalarRef>,
    /// What status n + 1 means.
    pub checks: Vec<CheckText>,
    /// How many times more than usual a thread gets to do at least.
    pub coarser: i64,
}

/// Runs an op by a library of the device's, or by its eager kernel.
#[derive(Clone, PartialEq, Debug)]
pub struct Call {
    /// The op.
    pub op: Op,
    /// Its tensors. A batched product's may have several dims that count matrices.
    pub args: Vec<ViewRef>,
    /// Its numbers.
    pub scalars: Vec<ScalarRef>,
    /// Where its results go.
    pub outs: Vec<ViewRef>,
    /// Bytes of the arena in which nothing lies while it runs: it may work there.
    pub free: Range<usize>,
    /// Whether the last operand is an input that is likely to be the same in the next run.
    pub constant: bool,
    /// How the next step goes on with what is finished.
    pub then: Option<Then>,
    /// The user's line.
    pub loc: Loc,
}

/// A matrix product, or one for each matrix of a batch.
#[derive(Copy, Clone, Debug)]
pub struct Product<'a> {
    /// How many.
    pub batch: usize,
    /// Rows of each result.
    pub m: usize,
    /// Columns of each result.
    pub n: usize,
    /// The size that is summed over.
    pub k: usize,
    /// Left operands.
    pub lhs: &'a ViewRef,
    /// Right operands.
    pub rhs: &'a ViewRef,
    /// Results, dense.
    pub out: &'a ViewRef,
}

impl Call {
    /// A call without anything special.
    pub fn new(op: Op, args: Vec<ViewRef>, out: ViewRef, loc: Loc) -> Call {
        let outs = vec![out];
        Call { op, args, scalars: Vec::new(), outs, free: 0..0, constant: false, then: None, loc }
    }

    /// The product that it is.
    pub fn product(&self) -> Option<Product<'_>> {
        let ([lhs, rhs], [out]) = (&self.args[..], &self.outs[..]) else { return None };
        let [.., m, k] = lhs.ty.shape[..] else { return None };
        let [.., n] = rhs.ty.shape[..] else { return None };
        let batch = match self.op {
            Op::Mm {} => 1,
            Op::Bmm {} => lhs.ty.shape[..lhs.ty.shape.rank() - 2].iter().product(),
            _ => return None,
        };
        Some(Product { batch, m, n, k, lhs, rhs, out })
    }

    /// Whether operands that are halves count as f32: sums of f32 go on before they are rounded.
    pub fn widens(&self) -> bool {
        let is_f32 = |view: &ViewRef| view.ty.dtype == DType::F32;
        matches!(self.op, Op::Mm {} | Op::Bmm {} | Op::Convolution { .. }) && self.outs.iter().all(is_f32)
    }

    /// The types of its tensors, as the op counts their dims.
    pub fn types(&self) -> Vec<TensorTy> {
        let join = matches!(self.op, Op::Bmm {});
        let ty = |view: &ViewRef| match view.ty.shape.rank() {
            rank if join && rank > 3 => {
                let (batch, matrix) = view.ty.shape.split_at(rank - 2);
                let shape = [batch.iter().product(), matrix[0], matrix[1]];
                TensorTy { shape: Shape::from(shape), ..view.ty.clone() }
            }
            _ => view.ty.clone(),
        };
        self.args.iter().map(ty).collect()
    }
}

/// Runs the ops of a kernel that can't be compiled, one by one.
#[derive(Clone, PartialEq, Debug)]
pub struct OneByOne {
    /// The ops. Inputs are the tensors, then the numbers.
    pub graph: Arc<Graph>,
    /// The tensors.
    pub args: Vec<ViewRef>,
    /// The numbers.
    pub scalars: Vec<ScalarRef>,
    /// Where results go: number of the graph's output, and place. They are written after everything was read.
    pub outs: Vec<(usize, ViewRef)>,
}

/// One thing to do. Steps run in order; each may use all of the device.
#[derive(Clone, PartialEq, Debug)]
pub enum Step {
    /// Runs a kernel.
    Launch(Launch),
    /// Calls a library.
    Call(Call),
    /// Runs ops one by one.
    OneByOne(OneByOne),
}

impl Step {
    /// How the next step runs together with this one.
    pub fn then(&self) -> Option<&Then> {
        match self {
            Step::Call(call) => call.then.as_ref(),
            Step::Launch(_) | Step::OneByOne(_) => None,
        }
    }

    /// Whether the next step runs together with this one.
    pub fn has_epilogue(&self) -> bool {
        self.then().is_some()
    }

    /// The product that it is.
    pub fn product(&self) -> Option<Product<'_>> {
        match self {
            Step::Call(call) => call.product(),
            Step::Launch(_) | Step::OneByOne(_) => None,
        }
    }

    /// Calls for every buffer that it touches, once or several times.
    pub fn touched(&self, touch: &mut dyn FnMut(BufferId)) {
        match self {
            Step::Launch(launch) => launch.bufs.iter().for_each(|at| touch(at.buffer)),
            Step::Call(call) => call.args.iter().chain(&call.outs).for_each(|view| touch(view.at.buffer)),
            Step::OneByOne(ops) => {
                let outs = ops.outs.iter().map(|(_, out)| out);
                ops.args.iter().chain(outs).for_each(|view| touch(view.at.buffer));
            }
        }
    }
}

/// A lowered graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Kernels that differ in more than the numbers of their loops; each with those of its first use.
    pub kernels: Vec<Kernel>,
    /// Memory.
    pub buffers: Vec<BufferPlan>,
    /// Ops on numbers, in order, run before the steps.
    pub scalars: Vec<ScalarOp>,
    /// What to do, in order.
    pub steps: Vec<Step>,
    /// Steps that run together, in order.
    pub bands: Vec<Bands>,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// The buffer of every graph output.
    pub outputs: Vec<BufferId>,
    /// What was decided and why.
    pub report: Report,
}

impl Plan {
    /// The ops of a kernel, where it is first used.
    pub fn ops_of(&self, kernel: usize) -> &[String] {
        let uses = |step: &Step| matches!(step, Step::Launch(launch) if launch.kernel == kernel);
        let first = self.steps.iter().position(uses).and_then(|step| self.report.steps.get(step));
        first.map_or(&[], |step| &step.ops)
    }

    /// A launch's kernel, with the numbers it has there.
    pub fn kernel(&self, launch: &Launch) -> Kernel {
        let mut kernel = self.kernels[launch.kernel].clone();
        let mut numbers = launch.numbers.iter();
        kernel.change_numbers(&mut |number| *number = numbers.next().copied().unwrap_or(*number));
        kernel
    }
}
