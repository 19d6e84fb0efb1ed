//! The options of `compile()`, under `torch.compile`'s names.

use std::fmt;
use std::str::FromStr;

use kiln_ir::{Device, Error, Result};
use kiln_tensor::device::is_available;

use crate::backend::{Backend, ChosenBackend};
use crate::rung::Rung;
use crate::settings::{Numerics, Settings};
use crate::verify::Every;

/// What compilation optimises for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// A good balance.
    #[default]
    Default,
    /// The least host time per call: a compiled graph keeps its temporary memory and its pointer table from
    /// one call to the next, at the price of memory that nothing else can use in the meantime.
    ReduceOverhead,
    /// Measured choices, at the price of longer compilation: each kernel is compiled in several forms and
    /// timed; the fastest is kept, and remembered next to the kernel cache.
    MaxAutotune,
    /// The same as `Default`, under a name that says what the function is for.
    Training,
    /// For inference: the function runs under `no_grad`, so nothing is saved for a backward pass.
    Evaluation,
}

/// How hard to optimise, as a level: shorthand for other options.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum OptimizationLevel {
    /// No code generation: backend `aot_eager`.
    O0,
    /// The default.
    #[default]
    O1,
    /// Larger kernels: fewer passes over memory, longer compilation.
    O2,
    /// Mode `max-autotune`.
    O3,
}

macro_rules! named {
    ($ty:ident, $option:literal, $($variant:ident = $name:literal $(| $alias:literal)*),*) => {
        impl $ty {
            /// Every value.
            pub const ALL: &'static [$ty] = &[$($ty::$variant),*];

            /// The name used in options.
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name),* }
            }
        }

        impl std::fmt::Display for $ty {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $ty {
            type Err = kiln_ir::Error;
            fn from_str(text: &str) -> kiln_ir::Result<$ty> {
                match text {
                    $($name $(| $alias)* => Ok($ty::$variant),)*
                    _ => Err(kiln_ir::Error::Option {
                        option: $option,
                        value: text.to_string(),
                        valid: [$($name),*].join(", "),
                    }),
                }
            }
        }
    };
}
pub(crate) use named;

named!(
    Mode,
    "mode",
    Default = "default",
    ReduceOverhead = "reduce-overhead",
    MaxAutotune = "max-autotune" | "max-autotune-no-cudagraphs",
    Training = "training",
    Evaluation = "evaluation"
);
named!(
    OptimizationLevel,
    "optimization_level",
    O0 = "O0" | "0",
    O1 = "O1" | "1",
    O2 = "O2" | "2",
    O3 = "O3" | "3"
);

/// How to compile: a builder that ends in a [`Region`](crate::Region) or a compiled function.
///
/// ```
/// use kiln_dynamo::{Backend, Compile, Mode};
/// # fn main() -> kiln_tensor::Result<()> {
/// let options = Compile::new()
///     .mode(Mode::ReduceOverhead)
///     .backend(Backend::Inductor)
///     .fullgraph(true)
///     .option("max_fusion_size", 64)?;
/// // The same from text, as a command line or a configuration file has it.
/// let same: Compile = "mode=reduce-overhead, fullgraph=true, options.max_fusion_size=64".parse()?;
/// assert_eq!(options.to_string(), "mode reduce-overhead, backend inductor, fullgraph, max_fusion_size 64");
/// assert_eq!(options.to_string(), same.to_string());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Compile {
    pub(crate) mode: Mode,
    pub(crate) dynamic: Option<bool>,
    pub(crate) backend: ChosenBackend,
    pub(crate) fullgraph: bool,
    pub(crate) settings: Settings,
    pub(crate) disable: bool,
    pub(crate) name: Option<String>,
    /// How far to compile, for whoever looks for a mistake; what is left runs by definition.
    pub(crate) rung: Option<Rung>,
    /// A rewrite rule to do without.
    pub(crate) without_rule: &'static str,
    pub(crate) verify: Every,
    /// Whether programs are compiled, and then run op by op all the same.
    pub(crate) only_built: bool,
}

/// The names that [`Compile::set`] knows.
const NAMES: [&str; 8] =
    ["mode", "dynamic", "fullgraph", "backend", "disable", "name", "optimization_level", "device"];

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

    /// How the same ops on tensors of other sizes are treated. With `None`, the default, a graph becomes dynamic
    /// once it has been seen in three sizes; until then a new size runs op by op the first time and gets a plan
    /// of its own the second time. With `true` it becomes dynamic at the second size. Neither counts as a
    /// recompilation. With `false` other sizes are another graph, which is compiled at once and counted. Results
    /// never depend on this.
    ///
    /// ```
    /// use kiln_dynamo::Compile;
    /// use kiln_tensor::{Device, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// let region = Compile::new().dynamic(true).region();
    /// for batch in 2..22 {
    ///     let x = Tensor::ones([batch, 3], &Device::Cpu)?;
    ///     region.run(|| x.exp()?.sum())?;
    /// }
    /// let explanation = region.explain();
    /// assert_eq!((explanation.sizes, explanation.recompiles.len()), (19, 0));
    /// let compiled: usize = explanation.graphs.iter().map(|graph| graph.compiled_kernels).sum();
    /// assert!(compiled <= 2);
    /// # Ok(()) }
    /// ```
    pub fn dynamic(mut self, dynamic: impl Into<Option<bool>>) -> Compile {
        self.dynamic = dynamic.into();
        self
    }

    /// What runs captured graphs: a [`Backend`], your own [`CustomBackend`](crate::CustomBackend), or a
    /// [`ChosenBackend`] parsed from a name.
    pub fn backend(mut self, backend: impl Into<ChosenBackend>) -> Compile {
        self.backend = backend.into();
        self
    }

    /// Makes a graph break an error that names the line.
    pub fn fullgraph(mut self, fullgraph: bool) -> Compile {
        self.fullgraph = fullgraph;
        self
    }

    /// Turns compilation off: everything runs eagerly.
    pub fn disable(mut self, disable: bool) -> Compile {
        self.disable = disable;
        self
    }

    /// Checks every n-th call, from the first, against eager: its results, the inputs that it changes, and gradients.
    /// Where they differ by more than rounding explains, the call fails: the error names the op and the compiler's
    /// stage, and a file that shows it again (`kiln repro FILE`). `Every(0)`, the default, is never, and costs
    /// nothing; `KILN_VERIFY=n` asks for it from outside.
    ///
    /// ```
    /// use kiln_dynamo::{Compile, Every};
    /// use kiln_tensor::{Result, Tensor};
    /// # fn main() -> Result<()> {
    /// let region = Compile::new().verify(Every(10)).region();
    /// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
    /// assert_eq!(region.run(|| x.mul(2.0))?.to_vec::<f32>()?, [2.0, 4.0]);
    /// # Ok(()) }
    /// ```
    pub fn verify(mut self, every: Every) -> Compile {
        self.verify = every;
        self
    }

    /// The options as text that parses back.
    pub fn to_text(&self) -> String {
        let mut text = format!("mode={}, backend={}", self.mode, self.backend);
        if let Some(dynamic) = self.dynamic {
            text += &format!(", dynamic={dynamic}");
        }
        for (name, value) in self.settings.changed() {
            text += &format!(", options.{name}={value}");
        }
        text
    }

    /// A name for logs and explanations.
    pub fn name(mut self, name: impl Into<String>) -> Compile {
        self.name = Some(name.into());
        self
    }

    /// The name that was given.
    pub fn name_of(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// One of the named options of inductor ([`list_options`](crate::list_options)).
    pub fn option(mut self, name: &str, value: impl ToString) -> Result<Compile> {
        self.settings.set(name, &value.to_string())?;
        Ok(self)
    }

    /// How close results are to eager's: the named option `numerics`.
    ///
    /// ```
    /// use kiln_dynamo::{Compile, Numerics};
    /// use kiln_tensor::{DType, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// let x = Tensor::from_slice(&[0.1f32, 1.7, -3.3])?.to_dtype(DType::BF16)?;
    /// let chain = || x.mul(1.1)?.exp()?.add(&x)?.tanh();
    /// let compiled = Compile::new().numerics(Numerics::Strict).region().run(chain)?;
    /// assert_eq!(compiled.to_vec_cast::<f32>()?, chain()?.to_vec_cast::<f32>()?);
    /// # Ok(()) }
    /// ```
    pub fn numerics(mut self, numerics: Numerics) -> Compile {
        self.settings.numerics = numerics;
        self
    }

    /// Several named options: a map from names to values.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// let map = HashMap::from([("opt_level", "3"), ("recompile_limit", "64")]);
    /// let compile = kiln_dynamo::Compile::new().options(map)?;
    /// assert_eq!(compile.settings().recompile_limit, 64);
    /// # Ok::<(), kiln_tensor::Error>(())
    /// ```
    pub fn options<N: AsRef<str>, V: ToString>(
        mut self,
        options: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Compile> {
        for (name, value) in options {
            self = self.option(name.as_ref(), value)?;
        }
        Ok(self)
    }

    /// The named options as they are.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How hard to optimise: `O0` is backend `aot_eager`, `O1` the default, `O2` larger kernels, `O3` mode
    /// `max-autotune`. Options set afterwards win.
    pub fn optimization_level(mut self, level: OptimizationLevel) -> Compile {
        match level {
            OptimizationLevel::O0 => self.backend = Backend::AotEager.into(),
            OptimizationLevel::O1 => {}
            OptimizationLevel::O2 => self.settings.widen(),
            OptimizationLevel::O3 => self.mode = Mode::MaxAutotune,
        }
        self
    }

    /// Says where the function runs. It runs where its tensors are, so this only checks that Kiln can compile
    /// for that device.
    pub fn device(self, device: &Device) -> Result<Compile> {
        if is_available(*device) { Ok(self) } else { Err(unknown_device(&device.to_string())) }
    }

    /// Sets any option by its name, from text or a value: `set("mode", "max-autotune")?`,
    /// `set("fullgraph", true)?`. Named options of inductor are `options.NAME`.
    pub fn set(mut self, name: &str, value: impl ToString) -> Result<Compile> {
        let value = value.to_string();
        if let Some(option) = name.strip_prefix("options.") {
            return self.option(option, value);
        }
        match name {
            "mode" => self.mode = value.parse()?,
            "dynamic" => self.dynamic = dynamic(&value)?,
            "fullgraph" => self.fullgraph = flag("fullgraph", &value)?,
            "backend" => self.backend = value.parse()?,
            "disable" => self.disable = flag("disable", &value)?,
            "name" => self.name = Some(value),
            "optimization_level" => self = self.optimization_level(value.parse()?),
            "device" if value.parse().is_ok_and(is_available) => {}
            "device" => return Err(unknown_device(&value)),
            _ => {
                let valid = format!("{}, options.NAME", NAMES.join(", "));
                return Err(Error::Option { option: "compile", value: name.to_string(), valid });
            }
        }
        Ok(self)
    }
}

fn unknown_device(value: &str) -> Error {
    let known =
        [Device::Cpu].into_iter().chain((0..16).map(Device::Cuda)).filter(|known| is_available(*known));
    let valid = known.map(|known| known.to_string()).collect::<Vec<_>>().join(", ");
    Error::Option { option: "device", value: value.to_string(), valid }
}

fn flag(option: &'static str, value: &str) -> Result<bool> {
    let unknown = |_| Error::Option { option, value: value.to_string(), valid: "true, false".into() };
    value.parse().map_err(unknown)
}

fn dynamic(value: &str) -> Result<Option<bool>> {
    match value {
        "none" | "None" => Ok(None),
        "true" => Ok(Some(true)),
        "false" => Ok(Some(false)),
        _ => Err(Error::Option {
            option: "dynamic",
            value: value.to_string(),
            valid: "none, true, false".into(),
        }),
    }
}

/// `mode=reduce-overhead, fullgraph=true`: see [`Compile::set`].
impl FromStr for Compile {
    type Err = Error;
    fn from_str(text: &str) -> Result<Compile> {
        let mut compile = Compile::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| Error::Option {
                option: "compile",
                value: part.to_string(),
                valid: "name=value, name=value, …".into(),
            })?;
            compile = compile.set(name.trim(), value.trim())?;
        }
        Ok(compile)
    }
}

/// Mode, backend, and whatever differs from the defaults.
impl fmt::Display for Compile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mode {}, backend {}", self.mode, self.backend)?;
        if let Some(dynamic) = self.dynamic {
            write!(f, ", dynamic {dynamic}")?;
        }
        if self.fullgraph {
            f.write_str(", fullgraph")?;
        }
        if self.disable {
            f.write_str(", disabled")?;
        }
        let settings = self.settings.to_string();
        if settings.is_empty() { Ok(()) } else { write!(f, ", {settings}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_refused_with_the_valid_ones() {
        assert_eq!("reduce-overhead".parse::<Mode>().unwrap(), Mode::ReduceOverhead);
        let check = |text: &str, want: &str| {
            assert_eq!(text.parse::<Compile>().unwrap_err().to_string(), want);
        };
        check(
            "mode=fast",
            "mode: unknown value \"fast\", expected one of default, reduce-overhead, max-autotune, training, evaluation",
        );
        check("dynamic=maybe", "dynamic: unknown value \"maybe\", expected one of none, true, false");
        check("fullgraph=yes", "fullgraph: unknown value \"yes\", expected one of true, false");
        check("device=cuda", "device: unknown value \"cuda\", expected one of cpu");
        check(
            "optimization_level=O4",
            "optimization_level: unknown value \"O4\", expected one of O0, O1, O2, O3",
        );
        check("options.opt_level=9", "opt_level: unknown value \"9\", expected one of 0, 1, 2, 3");
        check("fullgraph", "compile: unknown value \"fullgraph\", expected one of name=value, name=value, …");
        check(
            "modus=default",
            "compile: unknown value \"modus\", expected one of mode, dynamic, fullgraph, backend, disable, name, \
             optimization_level, device, options.NAME",
        );
        assert!("nvfuser".parse::<Backend>().unwrap_err().to_string().contains("aot_eager"));
    }

    #[test]
    fn every_value_parses_from_its_name() {
        for &mode in Mode::ALL {
            assert_eq!(mode.name().parse::<Mode>().unwrap(), mode);
        }
        for &level in OptimizationLevel::ALL {
            assert_eq!(level.name().parse::<OptimizationLevel>().unwrap(), level);
        }
        for &backend in Backend::ALL {
            assert_eq!(backend.name().parse::<Backend>().unwrap(), backend);
        }
        assert_eq!("graph".parse::<Backend>().unwrap(), Backend::Inductor);
    }

    #[test]
    fn optimization_levels_are_other_options() {
        let text = |level: &str| Compile::new().set("optimization_level", level).unwrap().to_string();
        assert_eq!(text("O0"), "mode default, backend aot_eager");
        assert_eq!(text("1"), Compile::new().to_string());
        assert!(text("O2").contains("max_fusion_size 600"));
        assert_eq!(text("3"), "mode max-autotune, backend inductor");
        let after = Compile::new().optimization_level(OptimizationLevel::O3).mode(Mode::Default);
        assert_eq!(after.to_string(), "mode default, backend inductor");
        assert_eq!(Compile::new().dynamic(true).to_string(), "mode default, backend inductor, dynamic true");
    }
}
