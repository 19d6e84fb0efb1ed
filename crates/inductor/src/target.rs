//! Whom kernels are made for.
//!
//! Lowering and fusion decide what a kernel computes, the memory plan where everything lies. How its loops run is the
//! target's: as they are or cut, in which order, in which language.

use std::fmt::Debug;
use std::sync::Arc;

use kiln_ir::DType;
use kiln_ir::math::c::Isa;
use kiln_plan::loops::Kernel;
use kiln_plan::{Machine, Signature};

use crate::c::{KernelSource, name_of};
use crate::schedule::{self, Scheduled};

/// The kernels that a lowered kernel becomes, to run one after the other.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// The kernels.
    pub kernels: Vec<Scheduled>,
    /// Dtypes and sizes of what the first leaves to the next: buffers that are numbered after the kernel's own.
    pub between: Vec<(DType, i64)>,
}

/// See the [module](self).
pub trait Target: Debug + Send + Sync {
    /// The machine it is for.
    fn machine(&self) -> &Machine;

    /// How a kernel's loops run.
    fn schedule(&self, kernel: Kernel) -> Schedule;

    /// Whether kernels run on what a library call has finished while that goes on with the rest.
    fn runs_together(&self) -> bool;

    /// A kernel in the target's language.
    fn emit(&self, kernel: &Kernel) -> KernelSource;

    /// A complete source with these kernels, which must have equal lanes.
    fn source(&self, kernels: &[&KernelSource]) -> String;

    /// What its compiler has to be told about the machine.
    fn flags(&self) -> &'static [&'static str];
}

/// An interpreter of loops: kernels stay as they are, and their text is their own.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Interpreter;

impl Target for Interpreter {
    fn machine(&self) -> &Machine {
        const { &Machine::with(Isa::Plain) }
    }

    fn schedule(&self, kernel: Kernel) -> Schedule {
        schedule::whole(kernel)
    }

    fn runs_together(&self) -> bool {
        false
    }

    fn emit(&self, kernel: &Kernel) -> KernelSource {
        let code = kernel.to_string();
        let signature = Signature { list: Vec::new(), pieces: Vec::new(), twins: Vec::new(), lanes: 1 };
        let (name, functions) = (name_of(&code), Vec::new());
        KernelSource { name, lanes: 1, code, functions, signature: Arc::new(signature) }
    }

    fn source(&self, kernels: &[&KernelSource]) -> String {
        kernels.iter().map(|kernel| kernel.code.as_str()).collect()
    }

    fn flags(&self) -> &'static [&'static str] {
        &[]
    }
}
