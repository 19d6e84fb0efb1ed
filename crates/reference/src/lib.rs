//! What graphs, loops and plans mean, by definition: a naive evaluator of graphs, and interpreters of loops and plans.
//! Nothing here is fast or clever, and nothing depends on the code it judges: only `ir` and the data of `plan` are known.

mod array;
mod eval;
pub mod loops;
mod philox;
pub mod plan;
mod scan;
mod structural;

pub use array::{Argument, Array, Data, Precision, difference, round, tolerance};
pub use eval::{Composites, Evaluator, Outcome, evaluate};
pub use philox::{normal, philox, uniform};
