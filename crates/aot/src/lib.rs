//! Ahead-of-time autograd: functionalisation, the joint graph and its partition.

mod flow;
mod functionalise;
mod joint;
mod leaves;
mod leaving;
mod partition;
mod passes;
mod text;
pub mod trace;

pub use functionalise::{Functional, GraphInput, Home, Survivor, View, functionalise};
pub use joint::{Joint, Part, expand_decomposed, joint};
pub use leaving::{ChangedInput, Gradients};
pub use partition::{BackwardPart, Partition, Report, Saved, SavedFrom, partition, partition_again};
pub use passes::{Output, Survey, survey_backward, survey_grad};
pub use text::Recording;
pub use trace::Trace;
