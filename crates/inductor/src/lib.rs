//! Prims to fused loops to C.
//!
//! [`lower`] turns a graph of prims into a [`Plan`]: kernels as loops, library calls, and where everything
//! lies in memory; and writes the kernels as C. In order:
//!
//! 1. `lists`: lists whose tensors don't lie alike are taken apart (`elements`: which elements are written back;
//!    `windows`: what is put into windows is set apart, or goes straight into an input; `products`: small matrix
//!    products as sums; `extremes`: argmax as two reductions; `pooling/adaptive`: adaptive averages as plain ones;
//!    `scatters`: what goes where an index says; all by `rewrite`);
//! 2. `fuse`: what is stored (`shared`: or computed again), what is computed together (`lower`: values to
//!    expressions, `views`, `positions`, `pooling`, `scans`; `table`: lists; `reach`: what waits for what);
//! 3. `order`: write-backs, and the order of steps (`sequence`);
//! 4. `assemble`: per kernel `schedule` (loops) and `c` (text); buffers, `epilogue` and `bands` (what
//!    runs together), `temporaries` (`memory`), `scalars`; `eager`: ops of
//!    kernels that no compiler wants.
//!
//! A plan for graphs that differ in sizes alone is a [`General`].
//!
//! Nothing here knows how text is built or launched.
//!
//! ```
//! use kiln_inductor::{Options, lower};
//! use kiln_ir::{Graph, math::c::CIsa};
//! let graph: Graph = "graph(%0: f32[4, 3]) {
//!   %1 = exp(%0) : f32[4, 3]
//!   %2 = sum(%1) {dims: [1], keepdim: false} : f32[4]
//!   return %2
//! }".parse()?;
//! let lowered = lower(&graph, &Options::dense(&graph, CIsa::Avx2)).expect("prims");
//! assert_eq!(lowered.plan.steps.len(), 1);
//! # Ok::<(), kiln_ir::Error>(())
//! ```

mod assemble;
mod bands;
mod c;
mod eager;
mod elements;
mod epilogue;
mod extremes;
mod folds;
mod fuse;
mod general;
mod lists;
mod lower;
mod memory;
mod options;
mod order;
mod pooling;
mod positions;
mod products;
mod reach;
mod rewrite;
mod scalars;
mod scans;
mod scatters;
mod schedule;
mod sequence;
mod shared;
mod table;
mod temporaries;
mod views;
mod why_not;
mod windows;

use kiln_ir::{Graph, Ty};
use kiln_plan::{Plan, Surroundings};
use rustc_hash::FxHashMap;

use fuse::Fusion;

pub use c::{KernelSource, emit};
pub use general::{Form, General, Numbers, Wipe};
pub use options::{Layout, Options, Tuning};
pub use why_not::WhyNot;

/// Why a graph can't be lowered.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    /// A node that is not a prim in the verifier's sense.
    #[error("%{value} = {op}: {message}")]
    NotPrim {
        /// The node's result.
        value: u32,
        /// Its op.
        op: &'static str,
        /// What is wrong.
        message: String,
    },
    /// A graph input of a type that has no memory layout.
    #[error("input {input} is a list; lists are packed inside the graph")]
    ListInput {
        /// Number of the input.
        input: usize,
    },
    /// Fewer or more layouts than inputs, or of another rank.
    #[error("input {input} has no layout of its rank")]
    Layout {
        /// Number of the input.
        input: usize,
    },
    /// A result that is not a tensor.
    #[error("result {output} is not a tensor")]
    Output {
        /// Number of the result.
        output: usize,
    },
}

/// A graph as a plan, and the text of the plan's kernels.
#[derive(Clone, PartialEq, Debug)]
pub struct Lowered {
    /// The plan.
    pub plan: Plan,
    /// By kernel of the plan, its text.
    pub code: Vec<KernelSource>,
}

impl Lowered {
    /// A plan that was made before with such options: its kernels' text is written again.
    pub fn again(plan: Plan, options: &Options) -> Lowered {
        let code = plan.kernels.iter().map(|kernel| emit(kernel, options)).collect();
        Lowered { plan, code }
    }
}

/// Lowers a graph of prims.
pub fn lower(graph: &Graph, options: &Options) -> Result<Lowered, LowerError> {
    lower_without(graph, options, &[])
}

/// Lowers a graph of prims; instead of the kernels with these names there are steps that run their ops one by
/// one ([`kiln_plan::OneByOne`]).
pub fn lower_without(graph: &Graph, options: &Options, refused: &[String]) -> Result<Lowered, LowerError> {
    let assemble::Assembled { plan, code, .. } = assembled(graph, options, refused)?;
    if cfg!(debug_assertions) && refused.is_empty() {
        let strides = options.input_layouts.iter().map(|layout| &layout.strides);
        let checked = plan.check(&Surroundings::of(graph, strides));
        let checked = checked.and_then(|()| plan.check_signatures(code.iter().map(|code| &*code.signature)));
        assert!(checked.is_ok(), "{checked:?}\n{graph}\n{plan:#?}");
    }
    Ok(Lowered { plan, code })
}

fn assembled(
    graph: &Graph,
    options: &Options,
    refused: &[String],
) -> Result<assemble::Assembled, LowerError> {
    check(graph, options)?;
    let layouts = &options.input_layouts;
    let (graph, apart) = lists::take_apart(graph, layouts);
    let graph = products::inline(graph, options.tuning.products);
    let graph = if options.general { graph } else { pooling::adaptive::as_plain(graph) };
    let graph = extremes::take_apart(windows::set_apart(graph));
    let graph = scatters::take_apart(graph, layouts);
    let (graph, elements) = elements::take_out(graph);
    let windows = windows::into_inputs(&graph, layouts);
    let (found, left) = scatters::Scatters::find(&graph, &windows);
    let mut fusion = fuse::fuse(&graph, layouts, elements, windows, found, options.tuning);
    let mut order = order::order(&fusion);
    if fusion.windows.values().any(|write| order.late.contains(write)) {
        // What was to be put straight into an input would come before a step that may fail.
        let refused = std::mem::take(&mut order.why_not);
        let (elements, found) = (fusion.elements, fusion.scatters);
        fusion = fuse::fuse(&graph, layouts, elements, FxHashMap::default(), found, options.tuning);
        order = order::order(&fusion);
        order.why_not.extend(refused);
    }
    fusion.why_not.extend(apart.into_iter().chain(left));
    let assembled = assemble::assemble(&fusion, &order, options, refused);
    if !assembled.refused_scatters {
        return Ok(assembled);
    }
    // No compiler wants a kernel that scatters: they are all library steps then.
    let Fusion { elements, windows, why_not, .. } = fusion;
    let none = scatters::Scatters::default();
    let mut fusion = fuse::fuse(&graph, layouts, elements, windows, none, options.tuning);
    fusion.why_not.extend(why_not);
    Ok(assemble::assemble(&fusion, &order::order(&fusion), options, refused))
}

fn check(graph: &Graph, options: &Options) -> Result<(), LowerError> {
    for (i, &input) in graph.inputs.iter().enumerate() {
        match (graph.ty(input), options.input_layouts.get(i)) {
            (Ty::List(_), _) => return Err(LowerError::ListInput { input: i }),
            (_, None) => return Err(LowerError::Layout { input: i }),
            (Ty::Tensor(t), Some(l)) if t.shape.rank() != l.strides.len() => {
                return Err(LowerError::Layout { input: i });
            }
            _ => {}
        }
    }
    for node in &graph.nodes {
        if let Err(message) = graph.prim_form(node) {
            let value = node.outs.first().map_or(0, |v| v.0);
            return Err(LowerError::NotPrim { value, op: node.op.name(), message });
        }
    }
    for (k, &output) in graph.outputs.iter().enumerate() {
        if !matches!(graph.ty(output), Ty::Tensor(_)) {
            return Err(LowerError::Output { output: k });
        }
    }
    Ok(())
}
