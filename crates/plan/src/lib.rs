//! Plans: what inductor makes of a graph, and what runtimes run.
//!
//! A [`Plan`] is data. Its kernels are [loops](loops) over [index expressions](index), not text of any language; every
//! other step is a named [`Call`] of an op. It says where everything lies in memory, and nothing about who will run
//! it: its text form reads back, [`codec`] writes it to bytes, [`check`] tells whether a plan of unknown origin stays inside of its memory,
//! and [`Signature`] says how the loops of a kernel become the arguments of a function.
//! Whom plans are made for is a [`Machine`].

pub mod check;
mod check_kernels;
pub mod codec;
pub mod index;
pub mod loops;
pub mod machine;
mod numbers;
pub mod parse;
mod plan;
mod print;
mod report;
pub mod signature;
mod text;

pub use check::{Given, Surroundings};
pub use machine::Machine;
pub use numbers::Numbers;
pub use plan::{
    Bands, BufferId, BufferPlan, BufferRef, BufferTy, Call, CheckText, Epilogue, Launch, OnPlanes, OneByOne,
    Place, Plan, Product, ScalarOp, ScalarRef, Step, Then, ViewRef, sums_planes,
};
pub use report::{Refusal, Report, StepReport};
pub use signature::{Arguments, Signature};
