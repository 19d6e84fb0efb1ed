//! Why a graph runs op by op, as data.

use std::fmt;

use kiln_aot::ChangedInput;
use kiln_ir::Loc;

/// What a stage gives, or why there is no more.
pub(crate) type Result<T> = std::result::Result<T, NotCompiled>;

/// Why a captured graph runs op by op instead of compiled. Its text says what happened, [`advice`](NotCompiled::advice)
/// what to do about it.
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum NotCompiled {
    /// The backend is `eager`: nothing is to be compiled.
    Eager,
    /// An op changes an input in place, and gradients flow through the change.
    ChangedInput { op: &'static str, loc: Loc },
    /// A value that a backward needs was changed in place.
    Overwritten,
    /// A gradient leaves with a tape of its own.
    OwnTape,
    /// Gradients would have to pass something that only eager mode can, for this reason.
    StaysInside(Reason),
    /// A view leaves with gradients, and shares its memory.
    SharedView,
    /// A leaf is changed in place, and results leave with gradients.
    ChangedLeaf,
    /// Two results are one value, with different gradients.
    SameValue,
    /// A pass failed.
    Pass { name: &'static str, error: String },
    /// The C compiler, or what it made, can't be used.
    Compiler(String),
    /// A backend that the user registered refused the graph.
    Backend { name: String, error: String },
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
            NotCompiled::Overwritten => write!(f, "{}", Reason::Overwritten),
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

/// The reasons that are always told in the same words: what is said, and what helps.
macro_rules! reasons {
    ($($variant:ident $text:literal $(, $advice:literal)?;)*) => {
        /// Why a graph ends, or a call goes on eagerly. Its text says what happened, [`advice`](Reason::advice) what to do
        /// about it.
        #[derive(Clone, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Reason {
            /// A value is needed by the host.
            Value {
                /// Who needs it: `item`.
                what: &'static str,
            },
            /// The tape of every op is needed, for gradients of gradients.
            Tape {
                /// Who needs it.
                what: &'static str,
            },
            /// The gradient of a custom function is needed outside.
            FunctionOutside {
                /// The function.
                name: String,
            },
            $(#[doc = $text] $variant,)*
        }

        impl Reason {
            /// What helps, if something does.
            pub fn advice(&self) -> Option<&'static str> {
                match self {
                    Reason::Value { what: "requires_grad_" } | Reason::FunctionOutside { .. } => Some(INSIDE),
                    Reason::Value { what: "register_hook" } => {
                        Some("put what the hook does into a custom `Function`, or hook a leaf")
                    }
                    Reason::Value { .. } => Some(
                        "read it after the compiled function, or keep it a tensor (`where_self` instead of a branch)",
                    ),
                    Reason::Tape { .. } => None,
                    $(Reason::$variant => None $(.or(Some($advice)))?,)*
                }
            }
        }

        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Reason::Value { what } => write!(f, "{what} needs the value"),
                    Reason::Tape { what } => write!(f, "{what} with create_graph needs the tape of every op"),
                    Reason::FunctionOutside { name } => {
                        write!(f, "the gradient of {name} is needed outside the compiled function")
                    }
                    $(Reason::$variant => f.write_str($text),)*
                }
            }
        }
    };
}

const INSIDE: &str = "call `backward()` inside the compiled function as well";

reasons! {
    RecompileLimit "not seen before, and the function is over its recompile limit", "pad to a few sizes, or raise the option recompile_limit";
    Recompilations "too many recompilations", "pad to a few sizes, or raise the option recompile_limit";
    RecordedOps "too many recorded ops";
    Sizes "more sizes than the size limit", "pad to a few sizes, or raise the option size_limit";
    Stance "not seen before, and the stance is eager_on_recompile", "warm up the function with such inputs first";
    Lost "the recorder lost its place (a bug in Kiln)";
    NoTarget "an in-place op without a target";
    Numbers "an op whose operands are all numbers";
    Hook "grad() reaches a leaf with a hook, which would have to run on its gradient", "use `backward()`, where hooks are captured, or remove the hook";
    GradFreed "grad through a tape whose saved tensors are already freed";
    BackwardFreed "backward through a tape whose saved tensors are already freed";
    PassFreed "a pass through a tape whose saved tensors are already freed";
    Independent "grad() of something the outputs don't depend on";
    CutOff "an in-place op cuts off a tensor's history";
    ListGradient "gradients flow through a list op", "apply the op to each tensor where gradients are recorded";
    ChangedInput "an input is changed in place and gradients flow through the change", "change a copy, or make the change under `no_grad`";
    MayFailOutside "a backward that may fail outside the compiled function also reaches leaves inside it";
    NoCapture "backward through a tape that can't be captured";
    UserCode "a backward that runs user code goes through a tape that can't be captured", "compute the tensor inside the compiled function as well";
    ComputedOutside "backward on a tensor computed outside the compiled function", "compute the tensor inside the compiled function as well";
    TapeOutside "the tape continues outside the compiled function", "compute the tensor inside the compiled function as well";
    UserCodeOutside "the tape continues outside the compiled function, and the backward runs user code", "compute the tensor inside the compiled function as well";
    SecondBackward "a second backward whose tape continues outside the compiled function", "compute the tensor inside the compiled function as well";
    Retained "a gradient is retained for a backward outside the compiled function", "call `backward()` inside the compiled function as well";
    RetainedReached "grad() may reach a tensor with a retained gradient";
    RetainedChanged "a tensor whose gradient is retained was changed in place";
    Overwritten "a tensor that a gradient needs was changed in place after it was saved";
    NotItsOwn "a custom function returns a tensor it did not create";
    FunctionChanged "an input, saved tensor or output of a custom function was changed in place";
    FunctionValue "the backward of a custom function needs a value", "keep it a tensor (`where_self` instead of a branch)";
    Thread "another thread needed a value", "hand tensors to other threads only after the compiled function has returned";
    SharedViews "memory that views share is changed in place, and gradients flow through the change";
    SharedElements "two elements of a list that is changed in place share their memory", "clone the elements (`clone_tensor`)";
    ListOverlap "a list op reads in one element what it writes in another";
    SharedInputs "two inputs share storage and one of them is changed in place", "clone one of the inputs (`clone_tensor`)";
    InputOverlap "an input whose elements share memory is changed in place";
    TapedGradient "a gradient that is on the tape is changed in place";
    ListElement "an element of a computed list is changed in place";
    SharesChanged "an input shares the storage of one that was changed in place", "clone one of the inputs (`clone_tensor`)";
    LeavesFunction "a result leaves the compiled function whose gradient flows through a custom function";
    LeavesWatched "a result leaves the compiled function whose gradient is looked at on its way";
    LeavesTold "a result leaves the compiled function whose gradient reaches a leaf told so inside";
}
