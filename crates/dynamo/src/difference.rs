//! How a call differs from those before it, as data: why a function was compiled again, and what it must not do.

use std::fmt;

use kiln_ir::{DType, Device, Error, Line, Loc, ScalarKind, Shape, Strides};

use crate::event::{CallEvent, Event, KeyArg};
use crate::guard::Guard;
use crate::why::Reason;

/// A recording that went another way than before. Its text: `recompile #1 at model.rs:42: input 0 was [1], now [48]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recompile {
    /// Which one it was, from 1.
    pub number: usize,
    /// The line of the op at which the ways part.
    pub loc: Loc,
    /// What is new.
    pub reason: Difference,
}

impl fmt::Display for Recompile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "recompile #{} at {}: {}", self.number, place(self.loc), self.reason)
    }
}

fn place(loc: Loc) -> String {
    if loc.is_known() { loc.to_string() } else { "the end of the graph".into() }
}

/// Two states of an input or operand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change<T> {
    /// When it was recorded.
    pub before: T,
    /// In this call.
    pub now: T,
}

impl<T: Clone> Change<T> {
    fn of(before: &T, now: &T) -> Change<T> {
        Change { before: before.clone(), now: now.clone() }
    }
}

impl<T: fmt::Display> fmt::Display for Change<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "was {}, now {}", self.before, self.now)
    }
}

/// What is new in a call, where it parts from what was recorded. Its text says what, [`advice`](Difference::advice) what
/// to do about it. Inputs have the numbers that they have in [`GuardInfo`](crate::GuardInfo).
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Difference {
    /// An input of other sizes.
    Shape(usize, Change<Shape>),
    /// An input of another dtype.
    DType(usize, Change<DType>),
    /// An input on another device.
    Device(usize, Change<Device>),
    /// An input whose elements lie differently in memory.
    Strides(usize, Change<Strides>),
    /// An input that requires a gradient now, or no longer does.
    RequiresGrad(usize, Change<bool>),
    /// An input that is a leaf now, or no longer is.
    Leaf(usize, Change<bool>),
    /// An input some of whose dims were marked as dynamic on one of the two calls.
    Marked(usize),
    /// An input that shares its storage with another one than before.
    Storage(usize),
    /// Something else came next: another op, a graph break.
    Next(Change<String>),
    /// An attribute of an op.
    Attribute {
        op: &'static str,
        name: &'static str,
        value: Change<String>,
        /// Whether it changes with sizes, as the length of an `arange` does.
        is_size: bool,
    },
    /// A number of another kind: `2.0` instead of `2`.
    NumberKind { op: &'static str, operand: usize, kind: Change<ScalarKind> },
    /// A number for which there is other code: the square among powers.
    NumberClass { op: &'static str, operand: usize },
    /// An op, or a pass, on other operands.
    Operands(String),
    /// Whether gradients are recorded.
    GradMode(Change<bool>),
    /// `backward()` meets leaves that have gradients already, or no longer have any.
    Accumulated,
    /// `grad()` is asked for other gradients.
    GradAsked,
    /// `grad()` reaches other inputs.
    GradFound,
    /// Sizes alone, but then other ops followed.
    Branch(Box<Difference>),
}

const SIZES: &str = "without `dynamic(false)`, one graph serves many sizes";

impl Difference {
    /// How two events differ. So many inputs have arrived before.
    pub(crate) fn between(before: &Event, now: &Event, inputs: usize) -> Difference {
        let was = Change { before: what(before), now: what(now) };
        if was.before != was.now {
            return Difference::Next(was);
        }
        if let (Event::Call(before), Event::Call(now)) = (before, now)
            && let Some(attribute) = attributes(before, now)
        {
            return attribute;
        }
        let guards = (inputs..).zip(before.guards().iter().zip(now.guards()));
        if let Some(found) = guards.into_iter().find_map(|(number, (a, b))| input(a, b, number)) {
            return found;
        }
        match (before, now) {
            (Event::Call(a), Event::Call(b)) if a.grad_enabled != b.grad_enabled => {
                Difference::GradMode(Change::of(&a.grad_enabled, &b.grad_enabled))
            }
            (Event::Call(a), Event::Call(b)) => numbers(a, b).unwrap_or(Difference::Operands(was.now)),
            (Event::Backward(a), Event::Backward(b)) if a.outputs == b.outputs => Difference::Accumulated,
            (Event::Grad(a), Event::Grad(b)) if a.key != b.key => Difference::GradAsked,
            (Event::Grad(_), Event::Grad(_)) => Difference::GradFound,
            _ => Difference::Operands(was.now),
        }
    }

    /// What helps, if the user can do something.
    pub fn advice(&self) -> Option<&'static str> {
        Some(match self {
            Difference::Shape(_, Change { before, now }) if before.rank() == now.rank() => {
                let mut sizes = before.iter().zip(now.iter()).filter(|(before, now)| before != now);
                if sizes.any(|(before, now)| before.min(now) < &2) {
                    "sizes 0 and 1 have graphs of their own: pad to 2 or more, or warm up with them"
                } else {
                    SIZES
                }
            }
            Difference::Attribute { is_size: true, .. } => SIZES,
            Difference::DType(..) => "convert it before the compiled function (`to_dtype`)",
            Difference::Strides(..) => "call `contiguous()` on it before the compiled function",
            Difference::Marked(_) => "call `mark_dynamic` on the input of every call",
            Difference::Storage(_) => "clone one of the inputs (`clone_tensor`)",
            Difference::Attribute { .. } => {
                "attributes are compiled in: if it keeps changing, use an op that takes a tensor (`index_select`)"
            }
            Difference::NumberKind { .. } => "write the number the same way in every call: `2.0`, not `2`",
            Difference::NumberClass { op: "pow", .. } => {
                "powers like 2 and 0.5 have code of their own: an exponent that is a tensor has one graph"
            }
            Difference::Accumulated => "call `zero_grad()` before every pass, or before none",
            Difference::Branch(_) => {
                "the ops depend on the sizes: each way is compiled once, so warm up with sizes of each kind"
            }
            Difference::Shape(..)
            | Difference::Device(..)
            | Difference::RequiresGrad(..)
            | Difference::Leaf(..)
            | Difference::Next(_)
            | Difference::NumberClass { .. }
            | Difference::Operands(_)
            | Difference::GradMode(_)
            | Difference::GradAsked
            | Difference::GradFound => return None,
        })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not = |on: bool| if on { "" } else { "not " };
        match self {
            Difference::Shape(input, shape) => write!(f, "input {input} {shape}"),
            Difference::DType(input, dtype) => write!(f, "input {input} {dtype}"),
            Difference::Device(input, device) => {
                write!(f, "input {input} was on {}, now on {}", device.before, device.now)
            }
            Difference::Strides(input, Change { before, now }) => {
                write!(f, "input {input} had strides {:?}, now {:?}", before.as_slice(), now.as_slice())
            }
            Difference::RequiresGrad(input, Change { before, now }) => {
                write!(f, "input {input} had requires_grad {before}, now {now}")
            }
            Difference::Leaf(input, Change { before, now }) => {
                write!(
                    f,
                    "input {input} was {}a leaf, now it is {}",
                    not(*before),
                    if *now { "one" } else { "none" }
                )
            }
            Difference::Marked(input) => write!(f, "input {input} has different dims marked as dynamic"),
            Difference::Storage(input) => write!(f, "input {input} shares its storage differently"),
            Difference::Next(Change { before, now }) => write!(f, "next came {before}, now {now}"),
            Difference::Attribute { op, name, value, .. } => write!(f, "{name} of {op} {value}"),
            Difference::NumberKind { op, operand, kind: Change { before, now } } => {
                write!(f, "operand {operand} of {op} was {}, now {}", before.name(), now.name())
            }
            Difference::NumberClass { op, operand } => {
                write!(f, "operand {operand} of {op} is a number that needs different code")
            }
            Difference::Operands(op) => write!(f, "{op} has different operands"),
            Difference::GradMode(Change { before, now }) => {
                write!(f, "gradients were {}recorded, now they are {}recorded", not(*before), not(*now))
            }
            Difference::Accumulated => {
                f.write_str("backward finds a different set of gradients already accumulated")
            }
            Difference::GradAsked => f.write_str("grad() is asked for different gradients"),
            Difference::GradFound => f.write_str("grad() finds different gradients"),
            Difference::Branch(sizes) => write!(f, "{sizes}, and other ops followed"),
        }
    }
}

/// An event by its name.
fn what(event: &Event) -> String {
    match event {
        Event::Call(call) if call.in_place => format!("{}_", call.op.name()),
        Event::Apply(event) => format!("custom function {}", event.name),
        event => event.name().into(),
    }
}

fn attributes(before: &CallEvent, now: &CallEvent) -> Option<Difference> {
    let mut pairs = before.op.attributes().into_iter().zip(now.op.attributes());
    let ((name, before_value), (_, now_value)) = pairs.find(|((_, before), (_, now))| before != now)?;
    Some(Difference::Attribute {
        op: before.op.name(),
        name,
        value: Change { before: before_value, now: now_value },
        is_size: now.op.goes_with_sizes(name),
    })
}

fn numbers(before: &CallEvent, now: &CallEvent) -> Option<Difference> {
    let op = now.op.name();
    before.args.iter().zip(&now.args).enumerate().find_map(|(operand, pair)| match pair {
        (KeyArg::Number(before, _), KeyArg::Number(now, _)) if before != now => {
            Some(Difference::NumberKind { op, operand, kind: Change::of(before, now) })
        }
        (KeyArg::Number(_, before), KeyArg::Number(_, now)) if before != now => {
            Some(Difference::NumberClass { op, operand })
        }
        _ => None,
    })
}

/// How two guards of one input differ. Sizes come late: they
/// seldom are the reason where something else is new, too.
fn input(before: &Guard, now: &Guard, number: usize) -> Option<Difference> {
    let dense = |guard: &Guard| guard.strides == guard.shape.contiguous_strides();
    let relaid = before.shape.rank() == now.shape.rank() && dense(before) != dense(now);
    Some(if before.dtype != now.dtype {
        Difference::DType(number, Change::of(&before.dtype, &now.dtype))
    } else if before.device != now.device {
        Difference::Device(number, Change::of(&before.device, &now.device))
    } else if before.requires_grad != now.requires_grad {
        Difference::RequiresGrad(number, Change::of(&before.requires_grad, &now.requires_grad))
    } else if before.dynamic != now.dynamic {
        Difference::Marked(number)
    } else if before.shape != now.shape && !relaid {
        Difference::Shape(number, Change::of(&before.shape, &now.shape))
    } else if before.strides != now.strides {
        Difference::Strides(number, Change::of(&before.strides, &now.strides))
    } else if before.shares_with != now.shares_with || before.variable != now.variable {
        Difference::Storage(number)
    } else if before.leaf != now.leaf {
        Difference::Leaf(number, Change::of(&before.leaf, &now.leaf))
    } else {
        return None;
    })
}

/// Something that a compiled function was told not to do, by the option `fullgraph` or by the stance. Calls return
/// Kiln's error, of which this is the source:
///
/// ```
/// use kiln_dynamo::{Compile, Forbidden, Reason};
/// use kiln_tensor::Tensor;
/// use std::error::Error as _;
///
/// let region = Compile::new().fullgraph(true).region();
/// let error = region.run(|| Tensor::from_slice(&[1.0f32])?.exp()?.item::<f32>()).unwrap_err();
/// let Some(Forbidden::GraphBreak { reason, .. }) = error.source().and_then(|e| e.downcast_ref()) else { panic!() };
/// assert_eq!(*reason, Reason::Value { what: "item" });
/// ```
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Forbidden {
    /// A graph break where `fullgraph` forbids one.
    #[error("fullgraph: the graph breaks at {loc}: {reason}")]
    GraphBreak {
        /// The line that needs a value.
        loc: Line,
        reason: Reason,
    },
    /// A call that went another way than before, under stance `fail_on_recompile`, as all that follow.
    #[error("stance fail_on_recompile: {0}")]
    Recompile(Box<Recompile>),
    /// A function that was never called before.
    #[error("stance fail_on_recompile: {function} was not compiled yet")]
    NotYet { function: String },
    /// An op behind what was recorded.
    #[error("stance fail_on_recompile: {what} at {} was never seen here", place(*.loc))]
    Longer {
        /// The op, or what it is.
        what: String,
        loc: Loc,
    },
    /// The ops of a known graph, of which other results are kept.
    #[error("stance fail_on_recompile: {function} keeps a different set of results")]
    Results { function: String },
}

impl Forbidden {
    /// A call that leaves what was recorded at its end.
    pub(crate) fn longer(event: &Event) -> Forbidden {
        Forbidden::Longer { what: what(event), loc: event.loc() }
    }
}

impl From<Forbidden> for Error {
    fn from(forbidden: Forbidden) -> Error {
        Error::other(forbidden)
    }
}
