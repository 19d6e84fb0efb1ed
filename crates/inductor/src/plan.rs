//! What comes out: kernels as C text, buffers, steps in order. Plain data; running it needs no allocation.

use std::ops::Range;
use std::sync::Arc;

use kiln_ir::math::c::{self, CIsa};
use kiln_ir::math::{Function, Width};
use kiln_ir::{DType, Graph, Loc, Op, Scalar, Shape, Strides};

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

/// An op on numbers, run on the host before the steps ([`Plan::eval_scalars`]).
#[derive(Clone, PartialEq, Debug)]
pub struct ScalarOp {
    /// The op.
    pub op: Op,
    /// Its operands.
    pub args: Vec<ScalarRef>,
    /// The kind of its result.
    pub kind: kiln_ir::ScalarKind,
}

/// A buffer and the element at which an access begins.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct BufferRef {
    /// The buffer.
    pub buffer: BufferId,
    /// Offset in elements.
    pub offset: i64,
}

/// A strided matrix.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct MatrixRef {
    /// Where element (0, 0) is.
    pub at: BufferRef,
    /// Elements from one row to the next.
    pub row: i64,
    /// Elements from one column to the next.
    pub column: i64,
}

/// A batch of strided matrices.
#[derive(Clone, PartialEq, Debug)]
pub struct BatchRef {
    /// The first of them.
    pub matrix: MatrixRef,
    /// Sizes of the dims that count the matrices, outermost first.
    pub sizes: Shape,
    /// Elements from one to the next in each of these dims; 0 where it is the same matrix.
    pub strides: Strides,
}

/// A strided tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct ViewRef {
    /// Where its first element is.
    pub at: BufferRef,
    /// Sizes.
    pub shape: Shape,
    /// Strides in elements.
    pub strides: Strides,
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

/// Distribution of a random fill.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Distribution {
    /// Uniform in [0, 1).
    Uniform,
    /// Standard normal.
    Normal,
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
    /// Which of its integers is the length of the loop.
    pub length: usize,
    /// Which is the part of it that an item has.
    pub width: usize,
    /// Which is how many items that makes.
    pub blocks: usize,
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

/// One thing to do. Steps run in order; each may use all threads.
#[derive(Clone, PartialEq, Debug)]
pub enum Step {
    /// Calls a kernel over `0..items`.
    Kernel {
        /// Index into [`Plan::kernels`].
        kernel: usize,
        /// Its buffers, by first byte: for a table kernel, `columns` per row.
        bufs: Vec<BufferRef>,
        /// Extents, strides, chunks.
        ints: Vec<i64>,
        /// Numbers.
        scalars: Vec<ScalarRef>,
        /// Items to split over threads.
        items: i64,
        /// Fewest items worth a thread.
        grain: i64,
        /// Scratch memory per thread.
        scratch_bytes: usize,
        /// What status n + 1 means.
        checks: Vec<CheckText>,
    },
    /// `dst = lhs · rhs`, or `dst += lhs · rhs`.
    Gemm {
        /// Rows of the result.
        m: usize,
        /// Columns of the result.
        n: usize,
        /// Inner size.
        k: usize,
        /// Left operand.
        lhs: MatrixRef,
        /// Right operand.
        rhs: MatrixRef,
        /// Result.
        dst: MatrixRef,
        /// Whether to add to what is there.
        accumulate: bool,
        /// Element type.
        dtype: DType,
        /// Whether the right operand is an input that is likely to be the same in the next call.
        constant: bool,
        /// How the next step, a kernel, goes on with rows that are finished.
        epilogue: Option<Epilogue>,
    },
    /// `dst = lhs · rhs`, matrix by matrix.
    Bmm {
        /// How many matrices.
        batch: usize,
        /// Rows of each result.
        m: usize,
        /// Columns of each result.
        n: usize,
        /// Inner size.
        k: usize,
        /// Left operands.
        lhs: BatchRef,
        /// Right operands.
        rhs: BatchRef,
        /// The results, dense.
        dst: BufferId,
        /// Element type: f32 or f64.
        dtype: DType,
    },
    /// A convolution of dense tensors.
    Convolution {
        /// The op.
        op: Op,
        /// The images.
        x: ViewRef,
        /// The kernels.
        weight: ViewRef,
        /// The result.
        dst: BufferId,
        /// Element type: f32 or f64.
        dtype: DType,
        /// Whether the kernels are an input that is likely to be the same in the next call.
        constant: bool,
        /// Bytes of the arena in which nothing lies while it runs: it may work there.
        free: Range<usize>,
        /// How the next step, a kernel, goes on with what is finished.
        epilogue: Option<OnPlanes>,
    },
    /// Fills a dense buffer with random numbers.
    Random {
        /// The distribution.
        distribution: Distribution,
        /// The buffer.
        buffer: BufferId,
        /// The seed, an integer.
        seed: ScalarRef,
        /// The first counter, an integer.
        offset: ScalarRef,
    },
    /// Copies a buffer to another of as many elements, in row-major order.
    Copy {
        /// From; dense, in some order of its dims.
        src: BufferId,
        /// To; of any strides.
        dst: BufferId,
    },
    /// An op without a lowering, run by a library call.
    Fallback {
        /// The op.
        op: Op,
        /// Operands.
        args: Vec<ViewRef>,
        /// Dense results.
        outs: Vec<BufferId>,
        /// Bytes of the arena in which nothing lies while it runs: the library may work there.
        free: Range<usize>,
        /// The user's line.
        loc: Loc,
    },
    /// The ops of a kernel that can't be compiled, one by one.
    Eager {
        /// The ops. Inputs are the operands, then the numbers.
        graph: Arc<Graph>,
        /// Operands.
        args: Vec<ViewRef>,
        /// Numbers.
        scalars: Vec<ScalarRef>,
        /// Where results go: number of the graph's output, and place. They are written after everything was
        /// read.
        outs: Vec<(usize, ViewRef)>,
    },
}

impl Step {
    /// Whether the next step runs together with this one.
    pub fn has_epilogue(&self) -> bool {
        matches!(self, Step::Gemm { epilogue: Some(_), .. } | Step::Convolution { epilogue: Some(_), .. })
    }
}

/// A C function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelSource {
    /// Its name, made from a hash of its text.
    pub name: String,
    /// Lanes of its vectors.
    pub lanes: usize,
    /// Its text, without prelude and mathematics.
    pub code: String,
    /// The mathematics it calls.
    pub functions: Vec<(Function, Width)>,
    /// Whether it calls the C library's mathematics.
    pub needs_libm: bool,
    /// The ops it implements, with the user's lines (of the first place it is used at).
    pub ops: Vec<String>,
    /// The loops it was written from.
    pub loops: String,
}

impl KernelSource {
    /// A complete C source with this function.
    pub fn source(&self, isa: CIsa) -> String {
        KernelSource::shard(&[self], isa)
    }

    /// One C source for several kernels, which must have equal lanes.
    pub fn shard(kernels: &[&KernelSource], isa: CIsa) -> String {
        let lanes = kernels.first().map_or(4, |k| k.lanes);
        // No instruction written out works on vectors of one lane.
        let isa = if lanes == 1 { CIsa::Plain } else { isa };
        let mut out = c::prelude(lanes, isa);
        out.push_str(&crate::c::helpers(lanes, isa, kernels));
        let mut functions: Vec<(Function, Width)> =
            kernels.iter().flat_map(|k| k.functions.iter().copied()).collect();
        functions.sort();
        functions.dedup();
        for (function, width) in functions {
            out.push_str(&c::function(function, width));
        }
        for kernel in kernels {
            out.push('\n');
            out.push_str(&kernel.code);
        }
        out
    }
}

/// A lowered graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Distinct kernels.
    pub kernels: Vec<KernelSource>,
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
    /// The instruction set of the text.
    pub isa: CIsa,
    /// What was decided and why.
    pub report: Report,
}
