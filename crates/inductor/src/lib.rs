//! Prims to fused loops to C.
//!
//! [`lower`] turns a graph of prims into a [`Plan`]: kernels as loops, library calls, and where everything
//! lies in memory; and writes the kernels as C. In order:
//!
//! 1. `rewrite`, and the forms of `kiln_prims`: lists are taken apart, small products are sums, what goes where an index
//!    says is a scatter;
//! 2. `fuse`: what is stored or computed again, what is computed together; `lower` turns values into expressions of
//!    loops;
//! 3. `schedule`: the order of steps, how the loops of each kernel are cut, what runs together with a library call;
//! 4. `assemble`: buffers and steps; `memory` gives temporaries their places;
//! 5. `c`: kernels as text.
//!
//! A plan for graphs that differ in sizes alone is a [`General`].
//!
//! Nothing here knows how text is built or launched.
//!
//! ```
//! use kiln_inductor::{C, Options, lower};
//! use kiln_ir::{Graph, math::c::Isa};
//! let graph: Graph = "graph(%0: f32[4, 3]) {
//!   %1 = exp(%0) : f32[4, 3]
//!   %2 = sum(%1) {dims: [1], keepdim: false} : f32[4]
//!   return %2
//! }".parse()?;
//! let lowered = lower(&graph, &Options::dense(&graph, C::new(Isa::Avx2))).expect("prims");
//! assert_eq!(lowered.plan.steps.len(), 1);
//! # Ok::<(), kiln_ir::Error>(())
//! ```

mod assemble;
mod c;
mod fuse;
mod general;
mod lower;
mod memory;
mod options;
mod rewrite;
mod schedule;
mod target;

use std::borrow::Cow;

use kiln_ir::{Graph, Shape, Ty, Value};
use kiln_plan::{Plan, Surroundings};
use kiln_prims::forms;
use rustc_hash::FxHashMap;

use rewrite::{elements, halves, lists, scatters, windows};
use schedule::order;

pub use c::{C, KernelSource};
pub use fuse::why_not::WhyNot;
pub use general::{Form, General, Numbers, Wipe};
pub use options::{Layout, Options, Tuning};
pub use schedule::Scheduled;
pub use target::{Interpreter, Schedule, Target};

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
        let code = plan.kernels.iter().map(|kernel| options.target.emit(kernel)).collect();
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
    let lowered = lower_unchecked(graph, options, refused)?;
    if cfg!(debug_assertions) && refused.is_empty() {
        let Lowered { plan, code } = &lowered;
        let strides = options.input_layouts.iter().map(|layout| &layout.strides);
        let checked = plan.check(&Surroundings::of(graph, strides));
        let checked = checked.and_then(|()| plan.check_signatures(code.iter().map(|code| &*code.signature)));
        assert!(checked.is_ok(), "{checked:?}\n{graph}\n{plan:#?}");
    }
    Ok(lowered)
}

/// [`lower_without`], without the check of plans that debug builds make: for whoever looks for what is wrong with one.
pub fn lower_unchecked(graph: &Graph, options: &Options, refused: &[String]) -> Result<Lowered, LowerError> {
    let assemble::Assembled { plan, code, .. } = assembled(graph, options, refused)?;
    Ok(Lowered { plan, code })
}

/// The stages, in order.
fn assembled(
    graph: &Graph,
    options: &Options,
    refused: &[String],
) -> Result<assemble::Assembled, LowerError> {
    check(graph, options)?;
    let (graph, why_not) = rewritten(graph, options);
    let prepared = Prepared::new(&graph, options, why_not);
    let fused = prepared.fused();
    let assembled = assemble::assemble(&fused.fusion, &fused.order, options, refused);
    if !assembled.refused_scatters {
        return Ok(assembled);
    }
    // No compiler wants a kernel that scatters: they are all library steps then.
    let prepared = prepared.without_scatters();
    let fused = prepared.fused();
    Ok(assemble::assemble(&fused.fusion, &fused.order, options, refused))
}

/// A graph of prims in the form that loops like best: the first stage of [`lower`], for whoever looks for a mistake.
pub fn rewrite(graph: &Graph, options: &Options) -> Graph {
    rewritten(graph, options).0.into_owned()
}

/// The graph in the form that loops like best.
fn rewritten<'g>(graph: &'g Graph, options: &Options) -> (Cow<'g, Graph>, Vec<WhyNot>) {
    let is_cut = |shape: &Shape, dim: usize| lower::Space::of(shape, &[dim]).is_tall();
    let (graph, why_not) = lists::take_apart(graph, &options.input_layouts);
    let graph = forms::inline(graph, options.tuning.products);
    // One size for all windows is a matter of sizes, which are others in the next plan.
    let graph = if options.general { graph } else { forms::as_plain(graph) };
    let graph = windows::set_apart(graph);
    let graph = forms::take_apart(graph, &is_cut);
    let graph = halves::widen_last(graph);
    let graph = scatters::take_apart(graph, &options.input_layouts);
    (graph, why_not)
}

/// A graph, and what is known of it before kernels are formed.
struct Prepared<'a> {
    graph: Cow<'a, Graph>,
    options: &'a Options,
    elements: elements::Elements,
    /// Write-backs that go straight into windows of inputs.
    windows: FxHashMap<Value, usize>,
    scatters: scatters::Scatters,
    why_not: Vec<WhyNot>,
}

/// Kernels and other steps, in order.
struct Fused<'a> {
    fusion: fuse::Fusion<'a>,
    order: order::Order,
}

impl<'a> Prepared<'a> {
    fn new(graph: &'a Graph, options: &'a Options, mut why_not: Vec<WhyNot>) -> Prepared<'a> {
        let layouts = &options.input_layouts;
        let (graph, elements) = elements::take_out(Cow::Borrowed(graph));
        let windows = windows::into_inputs(&graph, layouts);
        let (scatters, left) = scatters::Scatters::find(&graph, &windows);
        why_not.extend(left);
        Prepared { graph, options, elements, windows, scatters, why_not }
    }

    fn without_scatters(self) -> Prepared<'a> {
        Prepared { scatters: scatters::Scatters::default(), ..self }
    }

    fn fused(&self) -> Fused<'_> {
        let fuse = |windows: FxHashMap<Value, usize>| {
            let Prepared { graph, options, elements, scatters, .. } = self;
            let fusion = fuse::fuse(graph, options, elements.clone(), windows, scatters.clone());
            let order = order::order(&fusion);
            Fused { fusion, order }
        };
        let mut fused = fuse(self.windows.clone());
        if fused.fusion.windows.values().any(|write| fused.order.late.contains(write)) {
            // What was to be put straight into an input would come before a step that may fail.
            let refused = std::mem::take(&mut fused.order.why_not);
            fused = fuse(FxHashMap::default());
            fused.order.why_not.extend(refused);
        }
        fused.fusion.why_not.extend(self.why_not.iter().cloned());
        fused
    }
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
