//! What a lowering is told from outside: the inputs' memory layouts and the target.

use std::sync::Arc;

use kiln_ir::{Graph, Strides};

use crate::target::Target;

/// How a graph input lies in memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Strides in elements, outermost first; 0 where a dim is repeated. Unused for numbers.
    pub strides: Strides,
}

/// How large kernels may grow. What is computed does not depend on it.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Tuning {
    /// Kernels are merged up to this many expressions.
    pub fusion_size: usize,
    /// Kernels are merged up to this many buffers.
    pub fusion_buffers: usize,
    /// A value computed from more nodes than this is stored.
    pub inlined: usize,
    /// Matrix products none of whose sizes is larger are written as loops.
    pub products: usize,
}

impl Tuning {
    /// Kernels that compilers like.
    pub const DEFAULT: Tuning = Tuning { fusion_size: 240, fusion_buffers: 28, inlined: 160, products: 0 };
    /// Kernels as large as they can be made: fewer passes over memory, longer compilation.
    pub const WIDE: Tuning = Tuning { fusion_size: 600, fusion_buffers: 64, inlined: 400, products: 0 };
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning::DEFAULT
    }
}

/// Options of [`lower`](crate::lower).
#[derive(Clone, Debug)]
pub struct Options {
    /// One layout per graph input.
    pub input_layouts: Arc<[Layout]>,
    /// Whom kernels are made for.
    pub target: Arc<dyn Target>,
    /// Sizes of kernels.
    pub tuning: Tuning,
    /// Whether inputs that the graph does not change are likely to be the same in the next call: it is not one step
    /// of a training.
    pub constants: bool,
    /// Whether the kernels are for graphs of other sizes, too: then no size is part of their text.
    pub general: bool,
}

impl Options {
    /// Options for a graph whose inputs are all dense.
    pub fn dense(graph: &Graph, target: impl Target + 'static) -> Options {
        let strides = |&v| graph.ty(v).as_tensor().map(|t| t.shape.contiguous_strides()).unwrap_or_default();
        let input_layouts = graph.inputs.iter().map(|v| Layout { strides: strides(v) }).collect();
        let target = Arc::new(target);
        Options { input_layouts, target, tuning: Tuning::DEFAULT, constants: false, general: false }
    }
}
