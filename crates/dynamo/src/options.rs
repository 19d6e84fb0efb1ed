//! The options of `compile()`, under `torch.compile`'s names.

use std::fmt;
use std::str::FromStr;

use kiln_ir::{Error, Result};

/// What compilation aims for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// A good balance.
    #[default]
    Default,
    /// Least host time per call.
    ReduceOverhead,
    /// Measured choices, at the price of longer compilation.
    MaxAutotune,
}

/// Who runs captured graphs.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Backend {
    /// Fused loops, compiled.
    #[default]
    Inductor,
    /// The graphs after ahead-of-time autograd, op by op.
    AotEager,
    /// What was captured, op by op.
    Eager,
}

macro_rules! named {
    ($ty:ident, $option:literal, $($variant:ident = $name:literal),*) => {
        impl $ty {
            /// Every value.
            pub const ALL: &'static [$ty] = &[$($ty::$variant),*];

            /// The name used in options.
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name),* }
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $ty {
            type Err = Error;
            fn from_str(text: &str) -> Result<$ty> {
                $ty::ALL.iter().copied().find(|v| v.name() == text).ok_or_else(|| Error::Option {
                    option: $option,
                    value: text.to_string(),
                    valid: [$($name),*].join(", "),
                })
            }
        }
    };
}
named!(Mode, "mode", Default = "default", ReduceOverhead = "reduce-overhead", MaxAutotune = "max-autotune");
named!(Backend, "backend", Inductor = "inductor", AotEager = "aot_eager", Eager = "eager");

/// How to compile: a builder that ends in a [`Region`](crate::Region) or a compiled function.
///
/// ```
/// use kiln_dynamo::{Compile, Mode};
/// let region = Compile::new().mode(Mode::ReduceOverhead).fullgraph(true).region();
/// # let _ = region;
/// ```
#[derive(Clone, Debug, Default)]
pub struct Compile {
    pub(crate) mode: Mode,
    pub(crate) backend: Backend,
    pub(crate) fullgraph: bool,
    pub(crate) disable: bool,
    pub(crate) name: Option<String>,
}

impl Compile {
    /// The defaults.
    pub fn new() -> Compile {
        Compile::default()
    }

    /// What compilation aims for.
    pub fn mode(mut self, mode: Mode) -> Compile {
        self.mode = mode;
        self
    }

    /// Who runs captured graphs.
    pub fn backend(mut self, backend: Backend) -> Compile {
        self.backend = backend;
        self
    }

    /// Makes a graph break an error that names the line.
    pub fn fullgraph(mut self, fullgraph: bool) -> Compile {
        self.fullgraph = fullgraph;
        self
    }

    /// Switches compilation off: everything runs eagerly.
    pub fn disable(mut self, disable: bool) -> Compile {
        self.disable = disable;
        self
    }

    /// A name for logs and explanations.
    pub fn name(mut self, name: impl Into<String>) -> Compile {
        self.name = Some(name.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_refused_with_the_valid_ones() {
        assert_eq!("reduce-overhead".parse::<Mode>().unwrap(), Mode::ReduceOverhead);
        let error = "fast".parse::<Mode>().unwrap_err().to_string();
        assert_eq!(error, "mode: unknown value \"fast\"; valid are default, reduce-overhead, max-autotune");
        assert!("nvfuser".parse::<Backend>().unwrap_err().to_string().contains("aot_eager"));
    }
}
