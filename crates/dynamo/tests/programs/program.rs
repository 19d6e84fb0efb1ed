//! Programs as data, and as Rust-like text.

use std::fmt;

use kiln_tensor::DType;

pub const CALLS: usize = 3;

/// A size that may differ from call to call.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Size {
    Fixed(usize),
    Changing,
}

#[derive(Clone, Debug)]
pub enum Input {
    /// A leaf that requires a gradient; lives through all calls.
    Leaf(DType, Vec<usize>),
    /// Computed from a leaf before every call: its tape lies outside.
    Computed(usize),
    /// Data that lives through all calls.
    Kept(DType, Vec<usize>),
    /// New data in every call.
    Fresh(DType, Vec<Size>),
    /// Class numbers 0 and 1.
    Labels(Size),
    /// Another look at the memory of an earlier input.
    View(usize, View),
}

#[derive(Clone, Debug)]
pub enum View {
    Transpose,
    Flatten,
    Slice { dim: i64, start: i64, end: i64, step: usize },
    Select { dim: i64, index: i64 },
    Unsqueeze(i64),
    Expand(i64),
    Permute,
    Detach,
    Contiguous,
}

pub type Id = usize;

/// What stands beside an operator.
#[derive(Copy, Clone, Debug)]
pub enum Beside {
    Tensor(Id),
    /// A number that changes from call to call: the base value is turned a bit.
    Float(f64),
    Int(i64),
}

#[derive(Clone, Debug)]
pub enum Do {
    Unary(&'static str, Id),
    Binary(&'static str, Id, Beside),
    Reversed(&'static str, f64, Id),
    InPlaceUnary(&'static str, Id),
    InPlace(&'static str, Id, Beside),
    Addcmul {
        x: Id,
        a: Id,
        b: Id,
        value: f64,
        divide: bool,
        in_place: bool,
    },
    Lerp {
        x: Id,
        end: Id,
        weight: f64,
    },
    Where {
        condition: Id,
        x: Id,
        y: Beside,
    },
    View(Id, View),
    Reduce {
        op: &'static str,
        x: Id,
        dim: Option<i64>,
        keepdim: bool,
    },
    Softmax {
        x: Id,
        dim: i64,
        log: bool,
    },
    Mm(Id, Id),
    Linear(Id, Id, Option<Id>),
    Cat(Vec<Id>, i64),
    Stack(Vec<Id>),
    To(Id, DType),
    Gather {
        x: Id,
        dim: i64,
    },
    SliceScatter {
        x: Id,
        dim: i64,
    },
    Loss {
        scores: Id,
        labels: Id,
    },
    Foreach {
        op: &'static str,
        list: Vec<Id>,
        number: f64,
        other: Option<Vec<Id>>,
        in_place: bool,
    },
    Random(&'static str, Vec<Size>),
    Full(Vec<Size>, f64),
    Arange(Size),
    /// A branch on a value.
    Branch {
        x: Id,
        limit: f64,
    },
    Read(Id),
    HostWrite(Id, f64),
    Drop(Id),
    Backward {
        x: Id,
        retain: bool,
    },
    BackwardAll {
        x: Id,
        y: Id,
        retain: bool,
    },
    /// A custom function of two tensors of one type.
    Custom {
        x: Id,
        y: Id,
        kind: Kind,
    },
    RequiresGrad(Id, bool),
    RetainGrad(Id),
    /// A hook that halves the gradient, for ever.
    Hook(Id),
    ZeroGrad(Id),
    UseGrad(Id),
}

/// Custom functions.
#[derive(Copy, Clone, Debug)]
pub enum Kind {
    /// Hands the first input back, and turns its gradient round.
    Reverse,
    /// The product, by what was saved of the inputs.
    Product,
    /// The hyperbolic tangent of the sum, by what was saved of the output.
    TanhOfSum,
}

#[derive(Clone, Debug)]
pub struct Step {
    /// The variables it makes have the numbers from here on.
    pub out: Id,
    pub no_grad: bool,
    pub what: Do,
}

#[derive(Clone, Debug)]
pub struct Program {
    pub inputs: Vec<Input>,
    pub steps: Vec<Step>,
    /// Differentiated after every call.
    pub outside: Option<Id>,
    pub sizes: Vec<usize>,
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Beside::Tensor(id) => write!(f, "&v{id}"),
            Beside::Float(x) => write!(f, "hole({x:?})"),
            Beside::Int(x) => write!(f, "hole({x})"),
        }
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            View::Transpose => write!(f, "t()?"),
            View::Flatten => write!(f, "flatten()?"),
            View::Slice { dim, start, end, step } => write!(f, "slice({dim}, {start}, {end}, {step})?"),
            View::Select { dim, index } => write!(f, "select({dim}, {index})?"),
            View::Unsqueeze(dim) => write!(f, "unsqueeze({dim})?"),
            View::Expand(n) => write!(f, "expand([{n}, -1, ..])?"),
            View::Permute => write!(f, "permute([-1, 0, ..])?"),
            View::Detach => write!(f, "detach()?"),
            View::Contiguous => write!(f, "contiguous()?"),
        }
    }
}

impl fmt::Display for Do {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |ids: &[Id]| ids.iter().map(|id| format!("&v{id}")).collect::<Vec<_>>().join(", ");
        match self {
            Do::Unary(op, x) => write!(f, "v{x}.{op}()?"),
            Do::Binary(op, x, y) => write!(f, "v{x}.{op}({y})?"),
            Do::Reversed(op, k, x) => write!(f, "({k:?} {op} &v{x}).ok()?"),
            Do::InPlaceUnary(op, x) => write!(f, "v{x}.{op}_()?"),
            Do::InPlace(op, x, y) => write!(f, "v{x}.{op}_({y})?"),
            Do::Addcmul { x, a, b, value, divide, in_place } => {
                let name = if *divide { "addcdiv" } else { "addcmul" };
                write!(f, "v{x}.{name}{}(&v{a}, &v{b}, hole({value:?}))?", if *in_place { "_" } else { "" })
            }
            Do::Lerp { x, end, weight } => write!(f, "v{x}.lerp(&v{end}, hole({weight:?}))?"),
            Do::Where { condition, x, y } => write!(f, "v{condition}.where_self(&v{x}, {y})?"),
            Do::View(x, view) => write!(f, "v{x}.{view}"),
            Do::Reduce { op, x, dim: None, .. } => write!(f, "v{x}.{op}()?"),
            Do::Reduce { op, x, dim: Some(dim), keepdim } => write!(f, "v{x}.{op}_dim({dim}, {keepdim})?"),
            Do::Softmax { x, dim, log } => {
                write!(f, "v{x}.{}({dim})?", if *log { "log_softmax" } else { "softmax" })
            }
            Do::Mm(x, y) => write!(f, "v{x}.mm(&v{y})?"),
            Do::Linear(x, w, None) => write!(f, "v{x}.linear(&v{w}, None)?"),
            Do::Linear(x, w, Some(b)) => write!(f, "v{x}.linear(&v{w}, Some(&v{b}))?"),
            Do::Cat(ids, dim) => write!(f, "Tensor::cat([{}], {dim})?", list(ids)),
            Do::Stack(ids) => write!(f, "Tensor::stack([{}], 0)?", list(ids)),
            Do::To(x, dtype) => write!(f, "v{x}.to_dtype({dtype})?"),
            Do::Gather { x, dim } => write!(f, "v{x}.gather({dim}, &v{x}.gt(0)?.to_dtype(i64)?)?"),
            Do::SliceScatter { x, dim } => {
                write!(f, "v{x}.slice_scatter(&v{x}.narrow({dim}, 0, 1)?.neg()?, {dim}, 1, 2, 1)?")
            }
            Do::Loss { scores, labels } => write!(f, "v{scores}.cross_entropy(&v{labels})?"),
            Do::Foreach { op, list: ids, number, other, in_place } => {
                let other =
                    other.as_ref().map_or_else(|| format!("hole({number:?})"), |o| format!("[{}]", list(o)));
                write!(f, "foreach::{op}{}([{}], {other})?", if *in_place { "_" } else { "" }, list(ids))
            }
            Do::Random(op, shape) => write!(f, "Tensor::{op}({shape:?})?"),
            Do::Full(shape, x) => write!(f, "Tensor::full({shape:?}, hole({x:?}))?"),
            Do::Arange(size) => write!(f, "Tensor::arange(0, {size:?})?"),
            Do::Branch { x, limit } => {
                write!(
                    f,
                    "if v{x}.sum()?.item()? > hole({limit:?}) {{ v{x}.neg()? }} else {{ v{x}.mul(2.0)? }}"
                )
            }
            Do::Read(x) => write!(f, "v{x}.to_vec()?"),
            Do::HostWrite(x, k) => write!(f, "v{x}.write_slice(hole({k:?}), …)?"),
            Do::Drop(x) => write!(f, "drop(v{x})"),
            Do::Backward { x, retain } => write!(f, "v{x}.sum()?.backward_with(None, {retain})?"),
            Do::BackwardAll { x, y, retain } => {
                write!(f, "backward_all([v{x}.sum()?, v{y}.mean()?], retain_graph: {retain})?")
            }
            Do::Custom { x, y, kind } => write!(f, "{kind:?}.apply(&[&v{x}, &v{y}])?"),
            Do::RequiresGrad(x, on) => write!(f, "v{x}.requires_grad_({on})?"),
            Do::RetainGrad(x) => write!(f, "v{x}.retain_grad()?"),
            Do::Hook(x) => write!(f, "v{x}.register_hook(|grad| grad.mul(0.5).map(Some))?"),
            Do::ZeroGrad(x) => write!(f, "v{x}.set_grad(None)"),
            Do::UseGrad(x) => write!(f, "v{x}.grad().unwrap().mul(2.0)?"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "sizes {:?}", self.sizes)?;
        for (id, input) in self.inputs.iter().enumerate() {
            writeln!(f, "let v{id} = {input:?};")?;
        }
        writeln!(f, "region.run(|| {{")?;
        for Step { out, no_grad, what } in &self.steps {
            writeln!(f, "    {}let v{out} = {what};", if *no_grad { "/* no_grad */ " } else { "" })?;
        }
        writeln!(f, "}})?;")?;
        if let Some(id) = self.outside {
            writeln!(f, "v{id}.sum()?.backward()?;")?;
        }
        Ok(())
    }
}
