//! Why two things were not fused. Each refusal is one of these, and explain shows it.

use kiln_ir::{Graph, Ty, Value};
use kiln_plan::Refusal;

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
    /// A reduction that several kernels use.
    #[error("{} is a reduction that {kernels} kernels use: computed once, and stored", name(.value))]
    SharedReduction {
        /// The reduction.
        value: Value,
        /// How many kernels use it.
        kernels: usize,
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
    /// The kernel would touch too many buffers at once.
    #[error("{} would make a kernel of more than {limit} buffers", name(.value))]
    Buffers {
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
}

impl WhyNot {
    /// What refusals of this kind have in common.
    fn reason(&self) -> String {
        match self {
            WhyNot::Stored { reason, .. } => format!("stored: {reason}"),
            WhyNot::OtherLoops { .. } => "reduces other dims than its consumer iterates".into(),
            WhyNot::FewRows { .. } => "few long rows, reduced in parallel first".into(),
            WhyNot::ComputedOnce { .. } | WhyNot::SharedReduction { .. } => {
                "used by several kernels: cheaper to store than to compute again".into()
            }
            WhyNot::Spaces { .. } => "kernels iterate different spaces".into(),
            WhyNot::Between { .. } => "another step lies between two kernels".into(),
            WhyNot::OtherPlace { .. } => "read at other places than it is computed".into(),
            WhyNot::TooLarge { limit, .. } => format!("a kernel of more than {limit} operations"),
            WhyNot::Buffers { limit, .. } => format!("a kernel of more than {limit} buffers"),
            WhyNot::StillRead { .. } => {
                "new contents wait in a temporary: the old ones are still read".into()
            }
            WhyNot::MayFail { .. } => {
                "new contents wait in a temporary: a step that comes later may fail".into()
            }
            WhyNot::Scatter { reason, .. } => format!("made by a library step: {reason}"),
            WhyNot::Layouts { .. } => "tensors of a list have different layouts".into(),
            WhyNot::Epilogue { reason } => format!("runs after the product that it reads: {reason}"),
            WhyNot::Bands { reason } => format!("does not run in bands of rows: {reason}"),
        }
    }

    fn values(&self) -> Vec<Value> {
        match self {
            WhyNot::Stored { value, .. }
            | WhyNot::OtherLoops { value }
            | WhyNot::FewRows { value, .. }
            | WhyNot::ComputedOnce { value, .. }
            | WhyNot::SharedReduction { value, .. }
            | WhyNot::OtherPlace { value }
            | WhyNot::TooLarge { value, .. }
            | WhyNot::Buffers { value, .. }
            | WhyNot::Scatter { value, .. } => vec![*value],
            WhyNot::Spaces { left, right } | WhyNot::Between { left, right } => vec![*left, *right],
            WhyNot::StillRead { .. }
            | WhyNot::MayFail { .. }
            | WhyNot::Layouts { .. }
            | WhyNot::Epilogue { .. }
            | WhyNot::Bands { .. } => Vec::new(),
        }
    }

    /// The refusal as it is told; `made_by` names the op that makes a value.
    pub(crate) fn told(&self, graph: &Graph, made_by: impl Fn(Value) -> Option<String>) -> Refusal {
        let bytes = |value: &Value| match graph.ty(*value) {
            Ty::Tensor(ty) => ty.bytes(),
            _ => 0,
        };
        let values = self.values();
        Refusal {
            reason: self.reason(),
            text: self.to_string(),
            ops: values.iter().copied().filter_map(made_by).collect(),
            bytes: values.iter().map(bytes).sum(),
        }
    }
}

fn name(value: &Value) -> String {
    format!("%{}", value.0)
}
