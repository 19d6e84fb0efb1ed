//! Kiln's vocabulary: dtypes, shapes, THE OP TABLE, graphs, their text form and the verifier.
//!
//! This crate says what programs *are*; it knows nothing of how they are executed. Everything else in Kiln
//! is an interpretation of what is defined here:
//!
//! - [`table`] has one row per operator: its arguments, attributes, type rule, gradient, decomposition and
//!   sample inputs. The [`Op`] enum, the parser, the printer and the `Tensor` methods are derived from it.
//! - [`Graph`] is a list of op nodes over typed values; it prints as text that parses back.
//! - [`Emit`] is the one interface against which gradients and decompositions are written; eager autograd
//!   runs what is emitted, capture and passes record it.
//! - [`math`] defines every scalar function once, for eager loops and for generated C alike.

mod attr;
mod custom;
mod decompose;
mod differentiate;
mod dtype;
mod emit;
mod error;
mod eval;
mod formula;
mod gradient;
mod graph;
mod halves;
mod layout;
mod list_ty;
mod loc;
pub mod math;
mod op;
mod parse;
mod parts;
mod planted;
mod print;
mod promote;
mod reads;
mod samples;
mod scan;
mod shape;
pub mod table;
mod ty;
mod types;
mod verify;

pub use attr::{Approximate, Attribute, Division, Pairs, Reduction, ScatterReduce, Sizes};
pub use custom::{Custom, CustomRow, CustomType};
pub use differentiate::{decomposition, differentiate};
pub use dtype::{DType, Device, NoDevice, Scalar, ScalarKind};
pub use emit::{Emit, EmitExt, Value, Values};
pub use error::{Error, OpError, Result, Why};
pub use eval::Eval;
pub use gradient::carries_gradient;
pub use graph::{Def, Graph, Node, Write};
pub use half::{bf16, f16};
pub use halves::element_by_element;
pub use layout::Layout;
pub use list_ty::{ListTy, ListTyBuilder};
pub use loc::{Behalf, Line, Loc};
pub use op::{Class, Grad, GradCall, Op, Refuses, Row};
pub use parts::{Parts, Window};
pub use planted::{Fault, Shows, planted, planted_fault};
#[cfg(feature = "planted")]
pub use planted::{Planted, plant};
pub use promote::{promote, result_dtype};
pub use reads::{Lifetimes, Reads};
pub use samples::{Domain, Sample, SampleArg};
pub use scan::{Body, Order, Outcome, Part, Place, Steps, emit_parts_of, quoted_end};
pub use shape::{Dims, MOST_DIMS, Shape, Strides, broadcast};
pub use table::shapes::refold;
pub use ty::{TensorTy, Ty, Tys};
pub use verify::{Stage, VerifyError};
