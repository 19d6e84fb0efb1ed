//! Kernels as C functions, sources of several of them, and C as a target.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;

use kiln_ir::math::c::{self, Isa};
use kiln_ir::math::{Function, Width};
use kiln_plan::loops::Kernel;
use kiln_plan::{Machine, Signature};

use super::emit;
use super::helpers::helpers;
use crate::schedule;
use crate::target::{Schedule, Target};

/// A kernel as a C function.
#[derive(Clone, PartialEq, Debug)]
pub struct KernelSource {
    /// Its name, made from a hash of its text.
    pub name: String,
    /// Lanes of its vectors.
    pub lanes: usize,
    /// Its text, without prelude and mathematics.
    pub code: String,
    /// The mathematics it calls.
    pub functions: Vec<(Function, Width)>,
    /// How it is called.
    pub signature: Arc<Signature>,
}

impl KernelSource {
    /// Whether it calls the C library's mathematics.
    pub fn needs_libm(&self) -> bool {
        self.functions
            .iter()
            .any(|&(function, width)| function.has_rare() && c::calls_library(function, width))
    }

    /// Its text behind a comment that names the ops it computes.
    pub fn told(&self, ops: &[String]) -> String {
        let ops: String = ops.iter().take(40).map(|op| format!(" * {op}\n")).collect();
        format!("/*\n{ops} */\n{}", self.code)
    }

    fn shard(kernels: &[&KernelSource], isa: Isa) -> String {
        let lanes = kernels.first().map_or(4, |k| k.lanes);
        // No instruction written out works on vectors of one lane.
        let isa = if lanes == 1 { Isa::Plain } else { isa };
        let mut out = c::prelude(lanes, isa);
        out.push_str(&helpers(lanes, isa, kernels));
        let mut functions: Vec<(Function, Width)> =
            kernels.iter().flat_map(|k| k.functions.iter().copied()).collect();
        functions.sort();
        functions.dedup();
        out.push_str(&c::functions(&functions, lanes, isa));
        for kernel in kernels {
            out.push('\n');
            out.push_str(&kernel.code);
        }
        out
    }
}

pub(crate) fn name_of(code: &str) -> String {
    let mut hasher = FxHasher::default();
    code.hash(&mut hasher);
    let first = hasher.finish();
    code.len().hash(&mut hasher);
    format!("kiln_{:016x}", first.rotate_left(17) ^ hasher.finish())
}

/// C for a CPU, compiled by GCC or Clang.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct C {
    /// The machine to write for.
    pub machine: Machine,
    /// Whether long bodies are cut into stages over a block.
    pub stages: bool,
    /// How many vectors loops over independent elements take at a time.
    pub unroll: usize,
    /// Whether no size is part of the text: kernels are for graphs of other sizes, too.
    pub general: bool,
}

impl C {
    /// For a machine of which only the instructions are known, in the usual forms.
    pub const fn new(isa: Isa) -> C {
        C { machine: Machine::with(isa), stages: true, unroll: 1, general: false }
    }
}

impl Target for C {
    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn schedule(&self, kernel: Kernel) -> Schedule {
        schedule::in_parallel(kernel)
    }

    fn runs_together(&self) -> bool {
        true
    }

    fn emit(&self, kernel: &Kernel) -> KernelSource {
        emit(kernel, self)
    }

    fn source(&self, kernels: &[&KernelSource]) -> String {
        KernelSource::shard(kernels, self.machine.isa)
    }

    fn flags(&self) -> &'static [&'static str] {
        self.machine.isa.flags()
    }
}
