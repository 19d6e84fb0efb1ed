//! C text for the scalar functions, in GCC/Clang vector extensions.
//!
//! A source begins with [`prelude`], then holds each needed [`function`] once. Nothing is included:
//! system headers cost more compile time than a kernel.
//!
//! **Flags.** [`FLAGS`] are required: without them the compiler may contract or reorder operations.
//!
//! **Types.** For a lane count L the prelude defines `f32v`, `f64v`, `i32v`, `i64v`, `u32v`, `u64v` and
//! `u8v`, vectors of L elements. Helpers exist for the formats whose vectors fit a register: with 64-byte
//! registers L = 16 serves `f32` only, L = 8 serves both formats. L is 4, 8 or 16.
//!
//! **Masks.** A comparison of `f32v` is an `i32v`, of `f64v` an `i64v`, with lanes 0 or −1.
//! `kiln_widen_mask` and `kiln_narrow_mask` convert between them; `kiln_mask_f32_from_bool` (a `u8v` of
//! 0/1 to `i32v`) and `kiln_bool_from_mask_f32` convert from and to memory, likewise `_f64`.

mod prelude;
#[cfg(test)]
mod tests;
mod text;

use prelude::doubles;
pub use prelude::prelude;
pub use text::CText;
use text::PARAMETERS;

use super::function::Function;
use super::lane::{Lane, Width};

/// Compiler flags under which the text means what [`Lane`] says, beside the optimisation level and the
/// [`Isa::flags`].
pub const FLAGS: &[&str] =
    &["-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"];

/// The instruction sets Kiln writes code for, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// x86-64 with AVX-512 F, VL, DQ and BW, and all of AVX2: 64-byte registers.
    Avx512,
    /// x86-64 with AVX2, FMA, F16C and BMI2: 32-byte registers.
    Avx2,
    /// What every CPU of the architecture has, and portable C: per-lane builtins.
    Plain,
}

impl Isa {
    /// All of them.
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Plain];

    /// The best set that this CPU has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            match (avx512, avx2) {
                (true, true) => Isa::Avx512,
                (false, true) => Isa::Avx2,
                (_, false) => Isa::Plain,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Plain
    }

    /// The name that options and `KILN_ISA` take.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Plain => "plain",
        }
    }

    /// The set of this name.
    pub fn named(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(name.trim()))
    }

    /// Flags that let GCC and Clang use the set.
    ///
    /// Named features rather than `-march=native`: the flags are part of a kernel's identity, so they
    /// must say what they mean on every machine that shares a cache directory.
    pub const fn flags(self) -> &'static [&'static str] {
        match self {
            Isa::Avx512 => &[
                "-mavx512f",
                "-mavx512vl",
                "-mavx512dq",
                "-mavx512bw",
                "-mavx2",
                "-mfma",
                "-mf16c",
                "-mbmi2",
                "-mprefer-vector-width=512",
            ],
            Isa::Avx2 => &["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
            Isa::Plain => &[],
        }
    }

    /// Size of a vector register in bytes; plain C has vectors of 4 floats.
    pub const fn register_bytes(self) -> usize {
        match self {
            Isa::Avx512 => 64,
            Isa::Avx2 => 32,
            Isa::Plain => 16,
        }
    }

    /// The lane count for a kernel whose widest element has this many bytes.
    pub const fn lanes(self, widest_bytes: usize) -> usize {
        match self {
            Isa::Avx512 if widest_bytes <= 4 => 16,
            Isa::Avx512 => 8,
            Isa::Avx2 if widest_bytes <= 4 => 8,
            Isa::Avx2 | Isa::Plain => 4,
        }
    }

    /// Whether the prelude for this lane count has helpers for the format.
    pub const fn has_helpers(self, lanes: usize, width: Width) -> bool {
        match self {
            Isa::Plain => true,
            Isa::Avx512 | Isa::Avx2 => lanes * width.bytes() <= self.register_bytes(),
        }
    }
}

/// The C names that belong to a format.
#[derive(Clone, Copy, Debug)]
struct Names {
    /// Vector of numbers.
    vector: &'static str,
    /// Vector of integers, and of comparison results.
    int: &'static str,
    /// Ending of function names.
    suffix: &'static str,
}

const fn names(width: Width) -> Names {
    match width {
        Width::F32 => Names { vector: "f32v", int: "i32v", suffix: "f32" },
        Width::F64 => Names { vector: "f64v", int: "i64v", suffix: "f64" },
    }
}

/// The vectors of doubles in which functions of floats are computed: as many lanes as a kernel has, or half as many
/// where that is what a register holds.
const DOUBLES: Names = Names { vector: "f64h", int: "i64h", suffix: "f64h" };

/// The name of a function in C: `kiln_exp_f32`.
pub fn function_name(function: Function, width: Width) -> String {
    format!("kiln_{}_{}", function.name(), names(width).suffix)
}

/// The definition of one function: `KILN_INLINE f32v kiln_exp_f32(f32v x) { … }`, behind what it calls.
pub fn function(function: Function, width: Width) -> String {
    match width {
        Width::F32 => write_function(function, CText::<32>::new()),
        Width::F64 => write_function(function, CText::<64>::new()),
    }
}

/// The definitions of functions, behind what they need beside the [`prelude`].
pub fn functions(functions: &[(Function, Width)], lanes: usize, isa: Isa) -> String {
    let mut out: String = functions.iter().map(|&(f, width)| function(f, width)).collect();
    if out.contains(DOUBLES.suffix) {
        out.insert_str(0, &doubles(lanes, isa));
    }
    out
}

/// Whether a function calls the C library, if only for rare arguments.
pub fn calls_library(function: Function, width: Width) -> bool {
    self::function(function, width).contains("KILN_EACH")
}

fn write_function<const BITS: usize>(function: Function, mut cx: CText<BITS>) -> String
where
    CText<BITS>: Lane<F = text::Node>,
{
    let width = <CText<BITS> as Lane>::WIDTH;
    let parameters = PARAMETERS[function.arity()];
    let args: Vec<text::Node> = parameters.iter().map(|p| cx.parameter(p)).collect();
    let result = function.apply(&mut cx, &args);
    cx.definition("KILN_INLINE", &function_name(function, width), parameters, result)
}
