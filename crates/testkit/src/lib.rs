//! What Kiln's tests share: a naive reference evaluator, finite differences, golden files and random
//! programs. Nothing here is fast or clever, and nothing depends on the code it judges: only `ir` and the data of `plan` are known.

mod array;
mod eval;
mod finite;
pub mod golden;
pub mod loops;
#[cfg(test)]
mod op_docs;
mod philox;
pub mod plan;
mod programs;
mod rng;
mod shrink;
mod structural;
mod values;

pub use array::{Argument, Array, Data, Precision, difference, tolerance};
pub use eval::{Composites, Evaluator, Outcome, evaluate};
pub use finite::numeric_gradient;
pub use philox::{normal, philox, uniform};
pub use programs::{Program, generate};
pub use rng::Rng;
pub use shrink::{check, shrink};
pub use values::{random_argument, random_array, sample_program, special_argument};
