//! Why two things were not fused. Each refusal is one of these, and explain shows it.

use kiln_ir::Value;

/// The reason a fusion was refused.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum WhyNot {
    /// A value that leaves the graph, or that a library step reads, is stored in any case.
    #[error("{} is stored: {reason}", name(.value))]
    Stored {
        /// The value.
        value: Value,
        /// Who needs it in memory.
        reason: &'static str,
    },
    /// A reduction over other loops than its consumer's.
    #[error("{} reduces other dims than its consumer iterates, so it is stored first", name(.value))]
    OtherLoops {
        /// The reduction.
        value: Value,
    },
    /// A reduction to few elements over many: inside its consumer it would run on one core.
    #[error("{} has only {rows} rows of {length} elements: reduced in parallel first", name(.value))]
    FewRows {
        /// The reduction.
        value: Value,
        /// Kept elements.
        rows: i64,
        /// Reduced elements.
        length: i64,
    },
    /// A value needed by several kernels, dearer to compute again than to store.
    #[error("{} is used by {kernels} kernels; storing moves {stored} bytes, computing it again would cost {again}", name(.value))]
    ComputedOnce {
        /// The value.
        value: Value,
        /// How many kernels use it.
        kernels: usize,
        /// Bytes that storing moves.
        stored: i64,
        /// Bytes (and operations counted as bytes) that computing it again costs.
        again: i64,
    },
    /// Kernels that iterate different spaces.
    #[error("{} and {} iterate different spaces", name(.left), name(.right))]
    Spaces {
        /// A result of one kernel.
        left: Value,
        /// A result of the other.
        right: Value,
    },
    /// One would have to run both before and after something else.
    #[error("{} and {} can't share a kernel: another step lies between them", name(.left), name(.right))]
    Between {
        /// A result of one kernel.
        left: Value,
        /// A result of the other.
        right: Value,
    },
    /// Elements of the other's result are read at other places than the one being computed.
    #[error("{} is read at other places than it is computed", name(.value))]
    OtherPlace {
        /// The value.
        value: Value,
    },
    /// The kernel would get too large to compile quickly.
    #[error("{} would make a kernel of more than {limit} operations", name(.value))]
    TooLarge {
        /// The value.
        value: Value,
        /// The limit.
        limit: usize,
    },
    /// A write-back whose target's old contents are still needed: it goes through a temporary.
    #[error("the new contents of input {input} wait in a temporary: its old contents are still read")]
    StillRead {
        /// Number of the graph input.
        input: usize,
    },
    /// A write-back that would come before a step that can fail: it goes through a temporary.
    #[error("the new contents of input {input} wait in a temporary: a step that comes later may fail")]
    MayFail {
        /// Number of the graph input.
        input: usize,
    },
    /// Elements that are put where an index says by a library step.
    #[error("{} is made by a library step: {reason}", name(.value))]
    Scatter {
        /// The result.
        value: Value,
        /// What is in the way of loops.
        reason: &'static str,
    },
    /// A row of a list whose tensors lie differently in memory.
    #[error("element {row} of a list: its tensors have different layouts, so it has kernels of its own")]
    Layouts {
        /// Element of the list.
        row: usize,
    },
    /// A kernel that reads a product and yet runs after it.
    #[error("a kernel runs after the product that it reads, not on its parts as they are finished: {reason}")]
    Epilogue {
        /// What is in the way.
        reason: &'static str,
    },
    /// Products and kernels that run one after the other.
    #[error("a batched product and what follows don't run together in bands of rows: {reason}")]
    Bands {
        /// What is in the way.
        reason: &'static str,
    },
    /// What was said when the plan was made, which now comes from a cache.
    #[error("{text}")]
    Told {
        /// In words.
        text: String,
    },
}

fn name(value: &Value) -> String {
    format!("%{}", value.0)
}
