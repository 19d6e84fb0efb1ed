//! The named options of the `inductor` backend: what `options` of `compile()` takes, each with its type and
//! meaning.

use std::fmt;

use kiln_inductor::Tuning;
use kiln_ir::{Error, Result};
use kiln_runtime::{Isa, Sanitize, machine};

use crate::kernels::Build;

/// How hard the C compiler works on a kernel.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum OptLevel {
    /// Not at all: `-O0`, for a debugger.
    O0,
    /// A little: `-O1`; half the compile time, and enough for many kernels, whose vectors are written out.
    O1,
    /// `-O2`.
    #[default]
    O2,
    /// `-O3`.
    O3,
}

impl OptLevel {
    /// Every level.
    pub const ALL: [OptLevel; 4] = [OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3];

    /// The flag of the C compiler.
    pub const fn flag(self) -> &'static str {
        match self {
            OptLevel::O0 => "-O0",
            OptLevel::O1 => "-O1",
            OptLevel::O2 => "-O2",
            OptLevel::O3 => "-O3",
        }
    }
}

/// How near compiled results are to eager ones.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Numerics {
    /// Pointwise ops on f32, f64, integers and truth values give eager's bits. Chains of half precision are
    /// rounded where they are stored, not after every op, so they are more exact than eager; sums are added
    /// up in another order.
    #[default]
    Default,
    /// Pointwise graphs of every dtype give eager's bits: halves are rounded after every op that eager runs
    /// as one kernel. Sums are as in `Default`.
    Strict,
}

impl Numerics {
    /// Both.
    pub const ALL: [Numerics; 2] = [Numerics::Default, Numerics::Strict];

    /// The name used in options.
    pub const fn name(self) -> &'static str {
        match self {
            Numerics::Default => "default",
            Numerics::Strict => "strict",
        }
    }
}

/// The options of the `inductor` backend and of capture, under the names that [`Compile::option`] takes.
/// [`list_options`] tells them all.
///
/// [`Compile::option`]: crate::Compile::option
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Kernels are merged up to this many expressions; 0 keeps them apart.
    pub max_fusion_size: usize,
    /// Kernels are merged up to this many buffers.
    pub max_fusion_buffers: usize,
    /// A value that is computed from more ops than this is stored.
    pub max_inlined_ops: usize,
    /// Long bodies are cut into loops over a block that stays in the first-level cache.
    pub stages: bool,
    /// How many vectors loops over independent elements take at a time: 1, 2 or 4.
    pub unroll: usize,
    /// Matrix products none of whose sizes is larger are part of kernels; 0 leaves all to the library.
    pub max_inline_product: usize,
    /// Weights that stay the same are kept in the form that is computed with.
    pub keep_weights: bool,
    /// How hard the C compiler works.
    pub opt_level: OptLevel,
    /// The vector instructions to generate; `None` is the machine's best.
    pub isa: Option<Isa>,
    /// How close results are to eager's.
    pub numerics: Numerics,
    /// Checks that the C compiler puts into kernels; `Off` leaves it to `KILN_SANITIZE`.
    pub sanitize: Sanitize,
    /// After this many recompilations of a function, anything new runs eagerly.
    pub recompile_limit: usize,
    /// Plans are kept for this many sizes of one graph; other sizes run eagerly.
    pub size_limit: usize,
    /// How long `max-autotune` may measure for each graph.
    pub autotune_ms: usize,
    /// Keeps every stage's text for `explain()`.
    pub keep_text: bool,
    /// Caches compiled plans on disk next to the kernels, for other processes.
    pub graph_cache: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        let tuning = Tuning::DEFAULT;
        Settings {
            max_fusion_size: tuning.fusion_size,
            max_fusion_buffers: tuning.fusion_buffers,
            max_inlined_ops: tuning.inlined,
            stages: true,
            unroll: 1,
            max_inline_product: tuning.products,
            keep_weights: true,
            opt_level: OptLevel::default(),
            isa: None,
            numerics: Numerics::Default,
            sanitize: Sanitize::Off,
            recompile_limit: 16,
            size_limit: 64,
            autotune_ms: 500,
            keep_text: true,
            graph_cache: true,
        }
    }
}

/// One of the [`Settings`] as a table row.
#[derive(Copy, Clone)]
pub struct OptionInfo {
    /// Its name.
    pub name: &'static str,
    /// What it can be, in words.
    pub values: &'static str,
    /// What it does.
    pub doc: &'static str,
    get: fn(&Settings) -> String,
    set: fn(&mut Settings, &str) -> bool,
}

impl OptionInfo {
    /// What it is unless told otherwise.
    pub fn default(&self) -> String {
        (self.get)(&Settings::default())
    }
}

impl fmt::Debug for OptionInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {} ({}): {}", self.name, self.default(), self.values, self.doc)
    }
}

const COUNT: &str = "whole numbers";
const FLAG: &str = "true, false";

macro_rules! plain {
    ($field:ident, $values:expr, $doc:literal) => {
        OptionInfo {
            name: stringify!($field),
            values: $values,
            doc: $doc,
            get: |settings| settings.$field.to_string(),
            set: |settings, text| text.parse().map(|value| settings.$field = value).is_ok(),
        }
    };
}

macro_rules! named {
    ($field:ident, $Type:ident, $values:expr, $doc:literal) => {
        OptionInfo {
            name: stringify!($field),
            values: $values,
            doc: $doc,
            get: |settings| settings.$field.name().to_string(),
            set: |settings, text| {
                let found = $Type::ALL.into_iter().find(|value| value.name() == text);
                found.map(|value| settings.$field = value).is_some()
            },
        }
    };
}

const OPTIONS: &[OptionInfo] = &[
    plain!(max_fusion_size, COUNT, "fuse kernels up to this many expressions; 0: no fusion"),
    plain!(max_fusion_buffers, COUNT, "fuse kernels up to this many buffers"),
    plain!(max_inlined_ops, COUNT, "store a value that takes more ops than this to compute"),
    plain!(stages, FLAG, "cut long bodies into loops over a block that stays in the first-level cache"),
    OptionInfo {
        name: "unroll",
        values: "1, 2, 4",
        doc: "vectors per iteration in loops over independent elements",
        get: |settings| settings.unroll.to_string(),
        set: |settings, text| {
            let found = [1, 2, 4].into_iter().find(|count| count.to_string() == text);
            found.map(|count| settings.unroll = count).is_some()
        },
    },
    plain!(max_inline_product, COUNT, "inline matrix products up to this size into kernels; 0: none"),
    plain!(keep_weights, FLAG, "keep a packed copy of weights that stay the same from call to call"),
    OptionInfo {
        name: "opt_level",
        values: "0, 1, 2, 3",
        doc: "how hard the C compiler works: -O0 to -O3",
        get: |settings| (settings.opt_level as usize).to_string(),
        set: |settings, text| {
            let level = OptLevel::ALL.iter().find(|level| level.flag()[2..] == *text);
            level.map(|level| settings.opt_level = *level).is_some()
        },
    },
    OptionInfo {
        name: "isa",
        values: "best, avx512, avx2, plain",
        doc: "vector instructions to generate; capped at what the machine has",
        get: |settings| settings.isa.map_or("best", Isa::name).to_string(),
        set: |settings, text| {
            let found = Isa::ALL.into_iter().find(|isa| isa.name() == text);
            settings.isa = found;
            found.is_some() || text == "best"
        },
    },
    named!(
        numerics,
        Numerics,
        "default, strict",
        "strict: half-precision pointwise graphs give eager's bits too, rounding after every op"
    ),
    named!(
        sanitize,
        Sanitize,
        "off, undefined, address",
        "C compiler checks inside kernels, for tests; `address` needs its library preloaded"
    ),
    plain!(recompile_limit, COUNT, "after this many recompilations of a function, anything new runs eagerly"),
    plain!(size_limit, COUNT, "plans kept for this many sizes of one graph; other sizes run eagerly"),
    plain!(autotune_ms, COUNT, "milliseconds that mode max-autotune may spend measuring each graph"),
    plain!(keep_text, FLAG, "keeps every stage's text for explain()"),
    plain!(graph_cache, FLAG, "cache compiled plans on disk next to the kernels, for other processes"),
];

/// Every named option, with what it can be, what it is by default, and what it does.
///
/// ```
/// let names: Vec<&str> = kiln_dynamo::list_options().iter().map(|option| option.name).collect();
/// assert!(names.contains(&"max_fusion_size") && names.contains(&"opt_level"));
/// ```
pub fn list_options() -> &'static [OptionInfo] {
    OPTIONS
}

impl Settings {
    /// Sets an option by its name.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let wrong = |option, value: &str, valid| Err(Error::Option { option, value: value.into(), valid });
        match OPTIONS.iter().find(|option| option.name == name) {
            None => wrong(
                "options",
                name,
                OPTIONS.iter().map(|option| option.name).collect::<Vec<_>>().join(", "),
            ),
            Some(option) if (option.set)(self, value) => Ok(()),
            Some(option) => wrong(option.name, value, option.values.to_string()),
        }
    }

    /// The options that differ from the defaults, with their values.
    pub(crate) fn changed(&self) -> impl Iterator<Item = (&'static str, String)> {
        let changed = OPTIONS.iter().filter(|option| (option.get)(self) != option.default());
        changed.map(|option| (option.name, (option.get)(self)))
    }

    /// What is told to inductor.
    pub(crate) fn tuning(&self) -> Tuning {
        Tuning {
            fusion_size: self.max_fusion_size,
            fusion_buffers: self.max_fusion_buffers,
            inlined: self.max_inlined_ops,
            products: self.max_inline_product,
        }
    }

    /// Larger kernels: what optimization level O2 asks for.
    pub(crate) fn widen(&mut self) {
        let wide = Tuning::WIDE;
        self.max_fusion_size = wide.fusion_size;
        self.max_fusion_buffers = wide.fusion_buffers;
        self.max_inlined_ops = wide.inlined;
    }

    /// How kernels are built.
    pub(crate) fn build(&self) -> Build {
        // Of two sets the later in order is the smaller.
        let isa = self.isa.map_or(machine().isa, |wanted| wanted.max(machine().isa));
        let sanitize = if self.sanitize == Sanitize::Off { Sanitize::asked() } else { self.sanitize };
        Build { isa, level: self.opt_level, sanitize }
    }
}

/// The options that differ from the defaults: `max_fusion_size 64, isa avx2`.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.changed().map(|(name, value)| format!("{name} {value}")).collect();
        f.write_str(&texts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_takes_its_default_as_text_and_refuses_nonsense() {
        for option in OPTIONS {
            let mut settings = Settings::default();
            settings.set(option.name, &option.default()).unwrap();
            assert_eq!(settings, Settings::default(), "{option:?}");
            let error = settings.set(option.name, "perhaps").unwrap_err().to_string();
            assert_eq!(
                error,
                format!("{}: unknown value \"perhaps\", expected one of {}", option.name, option.values)
            );
        }
    }

    #[test]
    fn changed_options_are_shown() {
        let mut settings = Settings::default();
        assert_eq!(settings.to_string(), "");
        settings.set("isa", "avx2").unwrap();
        settings.set("opt_level", "3").unwrap();
        assert_eq!(settings.to_string(), "opt_level 3, isa avx2");
        let error = settings.set("max_fusion", "3").unwrap_err().to_string();
        assert!(
            error.starts_with("options: unknown value \"max_fusion\", expected one of max_fusion_size, ")
        );
    }
}
