//! Why a graph runs op by op, as data.

use std::fmt;

use kiln_aot::ChangedInput;
use kiln_ir::Loc;

use crate::analysis::OVERWRITTEN;

/// What a stage gives, or why there is no more.
pub(crate) type Result<T> = std::result::Result<T, NotCompiled>;

/// Why a captured graph runs op by op instead of compiled. Its text says what happened, [`advice`](NotCompiled::advice)
/// what to do about it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum NotCompiled {
    /// The backend is `eager`: nothing is to be compiled.
    Eager,
    /// An op changes an input in place, and gradients flow through the change.
    ChangedInput {
        /// The op.
        op: &'static str,
        /// The user's line.
        loc: Loc,
    },
    /// A value that a backward needs was changed in place.
    Overwritten,
    /// A gradient leaves with a tape of its own.
    OwnTape,
    /// Gradients would have to pass something that only eager mode can, for this reason.
    StaysInside(&'static str),
    /// A view leaves with gradients, and shares its memory.
    SharedView,
    /// A leaf is changed in place, and results leave with gradients.
    ChangedLeaf,
    /// Two results are one value, with different gradients.
    SameValue,
    /// A pass failed.
    Pass {
        /// Its name.
        name: &'static str,
        /// What it says.
        error: String,
    },
    /// The C compiler, or what it made, can't be used.
    Compiler(String),
    /// A backend that the user registered refused the graph.
    Backend {
        /// Its name.
        name: String,
        /// What it says.
        error: String,
    },
    /// Several results leave with gradients, where one plan should serve all sizes.
    SeveralResults,
}

impl NotCompiled {
    /// The error of a pass.
    pub(crate) fn pass(name: &'static str, error: impl fmt::Display) -> NotCompiled {
        NotCompiled::Pass { name, error: error.to_string() }
    }

    /// What helps, if the user can do something.
    pub fn advice(&self) -> Option<&'static str> {
        Some(match self {
            NotCompiled::ChangedInput { .. } => {
                "write `x.op()` instead of `x.op_()`, or change a clone of the input"
            }
            NotCompiled::Overwritten => "change a clone, or change the value after `backward()`",
            NotCompiled::OwnTape => "use the gradient inside the compiled function, or detach it",
            NotCompiled::SharedView => "return a clone of the view",
            NotCompiled::ChangedLeaf => {
                "change the leaf outside of the compiled function, or under `no_grad()` after `backward()`"
            }
            NotCompiled::SameValue => "return one of the two, or a clone",
            NotCompiled::Compiler(_) => "`kiln doctor` checks the C compiler and the kernel cache",
            NotCompiled::Eager
            | NotCompiled::StaysInside(_)
            | NotCompiled::Pass { .. }
            | NotCompiled::Backend { .. }
            | NotCompiled::SeveralResults => return None,
        })
    }
}

impl From<ChangedInput> for NotCompiled {
    fn from(ChangedInput { op, loc }: ChangedInput) -> NotCompiled {
        NotCompiled::ChangedInput { op, loc }
    }
}

impl fmt::Display for NotCompiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotCompiled::Eager => f.write_str("backend eager"),
            NotCompiled::ChangedInput { op, loc } => {
                write!(f, "{op}_ at {loc} changes an input and gradients flow through the change")
            }
            NotCompiled::Overwritten => f.write_str(OVERWRITTEN),
            NotCompiled::OwnTape => f.write_str("a gradient leaves the compiled function with its own tape"),
            NotCompiled::StaysInside(reason) => {
                write!(f, "{reason}; from the next call on the graph ends there")
            }
            NotCompiled::SharedView => {
                f.write_str("a view leaves the compiled function with gradients and shares its memory")
            }
            NotCompiled::ChangedLeaf => {
                f.write_str("a leaf is changed in place and results leave with gradients")
            }
            NotCompiled::SameValue => {
                f.write_str("two results are the same value but have separate gradients")
            }
            NotCompiled::Pass { name, error } => write!(f, "{name}: {error}"),
            NotCompiled::Compiler(reason) => write!(f, "compile: {reason}"),
            NotCompiled::Backend { name, error } => {
                write!(f, "backend {name} failed to compile a graph: {error}")
            }
            NotCompiled::SeveralResults => f.write_str("several results leave with gradients"),
        }
    }
}
