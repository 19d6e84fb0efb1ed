//! What a lowering is told from outside: the inputs' memory layouts and the machine.

use kiln_ir::math::c::CIsa;
use kiln_ir::{Graph, Strides};

/// How a graph input lies in memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Strides in elements, outermost first; 0 where a dim is repeated. Unused for numbers.
    pub strides: Strides,
}

/// Options of [`lower`](crate::lower).
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// One layout per graph input.
    pub input_layouts: Vec<Layout>,
    /// The instruction set to write for.
    pub isa: CIsa,
    /// Threads that will run the plan. Results never depend on it.
    pub threads: usize,
}

impl Options {
    /// Options for a graph whose inputs are all dense.
    pub fn dense(graph: &Graph, isa: CIsa, threads: usize) -> Options {
        let strides = |&v| graph.ty(v).as_tensor().map(|t| t.shape.contiguous_strides()).unwrap_or_default();
        let input_layouts = graph.inputs.iter().map(|v| Layout { strides: strides(v) }).collect();
        Options { input_layouts, isa, threads }
    }
}
