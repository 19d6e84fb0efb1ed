//! Errors, in three families: the user's (an op that can't be), ours (a pass that broke a graph) and the
//! environment's (no memory, no compiler).

use std::fmt;

use crate::{DType, Loc, Shape, TensorTy, VerifyError};

/// Kiln's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Anything that can go wrong in Kiln.
///
/// `Debug` is the text for people, too, since that is what `fn main() -> kiln::Result<()>` and `unwrap` print.
///
/// ```
/// use kiln_ir::Error;
/// use std::error::Error as _;
///
/// fn read() -> kiln_ir::Result<String> {
///     Ok(std::fs::read_to_string("no such file")?)
/// }
/// let error = read().unwrap_err();
/// assert_eq!(format!("{error:?}"), error.to_string());
/// let source = error.source().and_then(|e| e.downcast_ref::<std::io::Error>());
/// assert_eq!(source.map(|e| e.kind()), Some(std::io::ErrorKind::NotFound));
/// ```
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked for something an op can't do.
    #[error("{0}")]
    Op(Box<OpError>),
    /// Text that is not a graph.
    #[error("line {line}: {message}")]
    Parse { line: usize, message: String },
    /// A pass of Kiln left a graph that breaks the rules: a bug of ours.
    #[error("{0}")]
    Verify(Box<VerifyError>),
    /// Something that can't be, by Kiln's own rules: a bug of ours.
    #[error("{what}, at {at}; this is a bug in Kiln")]
    Bug {
        what: String,
        /// The line of Kiln's that found it.
        at: Loc,
    },
    /// The machine can't do it: memory, compiler, device.
    #[error("{0}")]
    Environment(String),
    /// An option that does not exist, with those that do.
    #[error("{option}: unknown value {value:?}, expected one of {valid}")]
    Option { option: &'static str, value: String, valid: String },
    /// State that does not fit a module.
    #[error("{0}")]
    State(String),
    /// An error of a crate that builds on this one, by [`Error::other`].
    #[error("{0}")]
    Other(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Reading or writing failed, in the user's code (Kiln's own errors name the file).
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An op that can't be done, with everything needed to find and mend it.
#[derive(Debug)]
pub struct OpError {
    /// The op, as the user called it.
    pub op: String,
    /// The operands: `f32[32, 10]`, `2.0`.
    pub operands: Vec<String>,
    /// What is wrong.
    pub why: Why,
    /// The module in which it was called: `layers.3.fc`.
    pub module: Option<String>,
    /// The user's line.
    pub loc: Loc,
}

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.op)?;
        if !self.operands.is_empty() {
            write!(f, "{}: ", self.operands.join(" × "))?;
        }
        write!(f, "{}", self.why)?;
        if let Some(module) = &self.module {
            write!(f, ", at {module}")?;
        }
        if self.loc.is_known() {
            write!(f, ", {}{}", if self.module.is_none() { "at " } else { "" }, self.loc)?;
        }
        Ok(())
    }
}

impl std::error::Error for OpError {}

/// The reason an op can't be done.
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// A matrix product whose inner sizes differ.
    #[error("inner sizes {left} and {right} differ")]
    InnerSizes { left: usize, right: usize },
    /// Shapes that do not broadcast.
    #[error("shapes {left} and {right} don't broadcast together")]
    Broadcast { left: Shape, right: Shape },
    /// A dim outside the tensor's rank.
    #[error("dim {dim} is out of range for a tensor with {rank} dims")]
    Dim { dim: i64, rank: usize },
    /// A dim named twice.
    #[error("dim {dim} appears twice")]
    DimTwice { dim: usize },
    /// An operand of the wrong rank.
    #[error("{argument} must have {expected} dims, got {got}")]
    Rank {
        argument: &'static str,
        /// The ranks that are allowed, in words.
        expected: &'static str,
        got: usize,
    },
    /// An operand of the wrong shape.
    #[error("{argument} must have shape {}, got {}", .shapes[0], .shapes[1])]
    Shape {
        argument: &'static str,
        /// The shape that is needed and the one given.
        shapes: Box<[Shape; 2]>,
    },
    /// A reduction that has no value over no elements.
    #[error("can't reduce an empty dimension: dim {dim} has size 0")]
    Empty { dim: usize },
    /// An operand of a dtype the op is not defined for.
    #[error("{argument} must be {expected}, got {got}")]
    DType { argument: &'static str, expected: &'static str, got: DType },
    /// A dtype the op has no kernel for.
    #[error("not implemented for {dtype}")]
    Unsupported {
        /// The dtype the op would compute in.
        dtype: DType,
    },
    /// Elements asked for as another type than theirs.
    #[error("the tensor holds {own}, not {wanted} (convert with {converts})")]
    ElementType { own: DType, wanted: DType, converts: &'static str },
    /// An integer that a type has no place for.
    #[error("{value} does not fit in {dtype}")]
    Unfit { value: i64, dtype: DType },
    /// Operands on different devices.
    #[error("operands are on different devices: {left} and {right}")]
    Devices { left: crate::Device, right: crate::Device },
    /// A reshape that would change the number of elements.
    #[error("{from} has {} elements, but {to} needs {}", .from.numel(), .to.numel())]
    Numel { from: Shape, to: Shape },
    /// Sizes that must be equal and are not.
    #[error("{what} differ: {left} vs {right}")]
    Sizes { what: &'static str, left: usize, right: usize },
    /// A shape whose number of elements does not fit the address space.
    #[error("shape {shape} has too many elements")]
    TooLarge { shape: Shape },
    /// More dims than tensors can have.
    #[error("a tensor can have at most {} dims, got {rank}", crate::MOST_DIMS)]
    TooManyDims { rank: usize },
    /// Tensors that can't be joined along a dim.
    #[error("tensor {number} has shape {}, which can't be joined to {} along dim {dim}: {} differ",
        .shapes[1], .shapes[0], if .shapes[0].rank() == .shapes[1].rank() { "the other sizes" } else { "the ranks" })]
    Joined {
        /// Which of the tensors, from 0.
        number: usize,
        /// The first tensor's shape and this one's.
        shapes: Box<[Shape; 2]>,
        dim: usize,
    },
    /// A tensor larger than the machine's memory.
    #[error("can't allocate {bytes} bytes: {reason}")]
    Memory { bytes: usize, reason: String },
    /// An index outside its dim.
    #[error("index {index} is out of range for size {size}")]
    Index { index: i64, size: usize },
    /// A number the op is not defined for.
    #[error("{argument} must be {expected}, got {got}")]
    Number { argument: &'static str, expected: &'static str, got: f64 },
    /// An integer divided by zero, or the one quotient that has no place among the integers.
    #[error("integer {}: {x} / {y}", if *.y == 0 { "division by zero" } else { "overflow" })]
    Division { x: i64, y: i64 },
    /// Too few or too many operands.
    #[error("takes {expected} operands, got {got}")]
    Arity {
        /// How many it takes, in words.
        expected: String,
        got: usize,
    },
    /// A scalar or a list where a tensor is needed, or the like.
    #[error("{argument} must be {expected}")]
    Operand { argument: &'static str, expected: &'static str },
    /// An in-place op whose result does not fit its target.
    #[error("the result is {result} and can't be written into {target} in place")]
    InPlace { result: String, target: String },
    /// An in-place op on a leaf that needs a gradient.
    #[error("a leaf that requires a gradient can't be changed in place (use no_grad)")]
    Leaf,
    /// An in-place op, on the tape, on a view whose base is not known.
    #[error(
        "a view made under no_grad can't be changed in place while gradients are recorded (change a copy, or use slice_scatter)"
    )]
    ViewInPlace,
    /// An in-place op on a tensor several of whose elements share memory.
    #[error("the target is an expanded tensor: several of its elements share memory (write to a copy)")]
    Overlap,
    /// A tensor that backward needs was overwritten.
    #[error("a tensor saved for backward was changed in place (saved at version {saved}, now {now})")]
    Version { saved: u64, now: u64 },
    /// `backward()` a second time without `retain_graph`.
    #[error("the saved tensors are already freed: backward has run before (pass retain_graph to keep them)")]
    Freed,
    /// `backward()` on something that has no gradient.
    #[error("the tensor does not require a gradient")]
    NoGradient,
    /// `backward()` without a gradient on a tensor that is not a single number.
    #[error(
        "backward needs a gradient for a tensor of shape {shape}: only a single element has an implicit one"
    )]
    ImplicitGradient { shape: Shape },
    /// An op without a gradient.
    #[error("not differentiable: {reason}")]
    NotDifferentiable { reason: &'static str },
    /// A device that is not there.
    #[error("{device} is not available")]
    Device { device: crate::Device },
    /// A size that can't be split into equal parts.
    #[error("{what} ({size}) must be divisible by {by} ({parts})")]
    Divisible { what: &'static str, size: usize, by: &'static str, parts: usize },
    /// A size beyond what something else allows.
    #[error("{argument} must be at most {most} ({limit}{}), got {got}", numbered(*.dim))]
    Limit {
        argument: &'static str,
        most: usize,
        /// Why no more: `the size of dim`.
        limit: &'static str,
        /// The dim that the limit speaks of.
        dim: Option<usize>,
        got: usize,
    },
    /// Too few or too many of something.
    #[error("expected {expected} {what}, got {got}")]
    Count { what: &'static str, expected: usize, got: usize },
    /// A tensor of another type than the one that is needed.
    #[error("{argument}{} must be {}, got {}", numbered(*.number), .types[0], .types[1])]
    Type {
        /// The tensor's name: `the gradient of input`.
        argument: &'static str,
        /// Its number, if there are several of this name.
        number: Option<usize>,
        /// The type that is needed and the one given.
        types: Box<[TensorTy; 2]>,
    },
    /// A window that fits nowhere.
    #[error("a kernel of size {kernel} is larger than the padded input (input size {size})")]
    Window { kernel: usize, size: usize },
    /// A slice that ends outside its dim, or before it starts.
    #[error("the slice {start}..{end} is out of range for dim {dim} of size {size}")]
    Slice { start: usize, end: usize, dim: usize, size: usize },
    /// A size outside the range that it was said to stay in.
    #[error("size {size} of dim {dim} is outside the declared range {least}..{}",
        .most.map(|most| format!("={most}")).unwrap_or_default())]
    Range {
        dim: usize,
        size: usize,
        least: usize,
        /// The largest, if there is one.
        most: Option<usize>,
    },
    /// A tensor with a history, where only one without can be.
    #[error("{what} must be a leaf (detach() gives one)")]
    NotLeaf {
        /// Which: `the parameter f32[2]`.
        what: String,
    },
    /// Something that may be there once.
    #[error("{what} appears twice")]
    Twice {
        /// What it is: `the parameter f32[2]`.
        what: String,
    },
    /// Two options of which one excludes the other.
    #[error("pass either {one} or {other}, not both")]
    Either { one: &'static str, other: &'static str },
    /// Bytes that could not be read.
    #[error("cannot read {bytes} bytes: {reason}")]
    Read { bytes: usize, reason: String },
    /// Elements that lie so that no view has the shape asked for.
    #[error("the strides don't allow this shape without a copy (use reshape)")]
    NoView,
    /// A lazy tensor or list whose program failed before it was made.
    #[error("the computation that should have produced it failed")]
    Lost,
    /// `set_data` by another thread while an op ran.
    #[error("an operand was given other data by another thread (set_data) while the op started")]
    Replaced,
    /// `grad()` of something that the outputs don't depend on.
    #[error("the outputs don't depend on input {input} (pass allow_unused to get None for it)")]
    Independent { input: usize },
    /// A gradient with NaN, under `detect_anomaly`.
    #[error("it produced a gradient with NaN")]
    NanGradient,
    /// A captured program that can't be expressed as one graph.
    #[error("{reason}")]
    NotCaptured { reason: &'static str },
    /// A bug of ours, found where only a reason can be returned.
    #[error("{what}: this is a bug in Kiln")]
    Bug { what: &'static str },
    /// Anything else, in words.
    #[error("{0}")]
    Other(String),
}

fn numbered(number: Option<usize>) -> String {
    number.map(|number| format!(" {number}")).unwrap_or_default()
}

impl Why {
    /// An operand whose shape is not the one that is needed.
    pub fn shape(argument: &'static str, expected: impl Into<Shape>, got: impl Into<Shape>) -> Why {
        Why::Shape { argument, shapes: Box::new([expected.into(), got.into()]) }
    }

    /// A tensor whose type is not the one that is needed.
    pub fn ty(argument: &'static str, number: Option<usize>, expected: TensorTy, got: TensorTy) -> Why {
        Why::Type { argument, number, types: Box::new([expected, got]) }
    }

    /// A number of things below one.
    pub fn none(argument: &'static str) -> Why {
        Why::Number { argument, expected: "1 or more", got: 0.0 }
    }

    /// A stride that padding 'same' has no meaning for.
    pub fn stride_with_same(stride: usize) -> Why {
        Why::Number { argument: "stride", expected: "1 with padding 'same'", got: stride as f64 }
    }

    /// Two sizes that must be the same: `what` names them in this order.
    pub fn sizes(what: &'static str, left: usize, right: usize) -> Why {
        Why::Sizes { what, left, right }
    }
}

impl Error {
    /// An op error without operands.
    pub fn op(op: &str, why: Why, loc: Loc) -> Error {
        Error::Op(Box::new(OpError { op: op.to_string(), operands: Vec::new(), why, module: None, loc }))
    }

    /// Something that can't be, found by the line that calls this.
    #[cold]
    #[track_caller]
    pub fn bug(what: impl Into<String>) -> Error {
        Error::Bug { what: what.into(), at: Loc::here() }
    }

    /// Another crate's error: whoever knows its type finds it by `downcast_ref` of [`source`](std::error::Error::source).
    pub fn other(error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Other(Box::new(error))
    }

    /// The same error under another op name (an op that the user knows by that name).
    pub fn named(mut self, name: &str) -> Error {
        if let Error::Op(e) = &mut self {
            e.op = name.to_string();
        }
        self
    }

    /// The same error with the user's line, where it has none.
    pub fn at(mut self, loc: Loc) -> Error {
        if let Error::Op(e) = &mut self
            && !e.loc.is_known()
        {
            e.loc = loc;
        }
        self
    }

    /// The reason, if this is the user's error about an op.
    pub fn why(&self) -> Option<&Why> {
        match self {
            Error::Op(e) => Some(&e.why),
            _ => None,
        }
    }
}
