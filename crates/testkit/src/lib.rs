//! What Kiln's tests share: the naive reference evaluator of `kiln_reference`, finite differences, golden files and
//! random programs. Nothing here depends on the code it judges: only `ir` and the data of `plan` are known.

mod finite;
pub mod golden;
#[cfg(test)]
mod op_docs;
mod programs;
mod rng;
mod shrink;
mod values;

pub use finite::numeric_gradient;
pub use kiln_reference::{
    Argument, Array, Composites, Data, Evaluator, Outcome, Precision, difference, evaluate, loops, normal,
    philox, plan, tolerance, uniform,
};
pub use programs::{Program, generate};
pub use rng::Rng;
pub use shrink::{check, shrink};
pub use values::{random_argument, random_array, sample_program, special_argument};
