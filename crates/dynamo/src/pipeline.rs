//! The whole compiler as one list of stages: capture → functional → joint → prims → partition → loops → plan.
//!
//! The list is here and nowhere else. Who goes through it is a [`Driver`]: one [compiles](crate::compiling), one
//! [drafts](crate::general) plans for many sizes, one writes the texts of stages that a cache had skipped.

use std::sync::Arc;

use kiln_aot::trace::Variable;
use kiln_aot::{Functional, Gradients, Joint, Partition, Report, Trace};
use kiln_inductor::Layout as InputLayout;
use kiln_ir::{Graph, Stage};
use kiln_prims::How;

use crate::analysis::Analysis;
use crate::backend::GraphKind;
use crate::graph_cache::{Made, PartFacts};
use crate::leaving::{self, UsedUp};
use crate::region::Site;
use crate::why::Result;

/// Who goes through the stages.
pub(crate) trait Driver {
    /// What becomes of a graph.
    type Code;
    /// Runs a pass.
    fn pass<T>(&mut self, name: &'static str, pass: impl FnOnce() -> kiln_ir::Result<T>) -> Result<T>;
    /// Looks at the graph that a pass has made.
    fn look(&mut self, name: &'static str, graph: &Arc<Graph>, stage: Stage) -> Result<()>;
    /// How prims are made; `None`: graphs are wanted at the level of the user's ops.
    fn prims(&self) -> Option<How>;
    /// Splits a joint graph in two.
    fn cut(&mut self, joint: &Joint) -> Result<Partition> {
        self.pass("partition", || kiln_aot::partition(joint))
    }
    /// Makes loops of a graph, and a plan of those.
    fn lower(&mut self, part: &Part<'_>) -> Result<Self::Code>;
}

/// A graph on its way to loops. Its first `results` outputs are what it is for, others are saved for a backward.
pub(crate) struct Part<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) layouts: Arc<[InputLayout]>,
    pub(crate) kind: GraphKind,
    pub(crate) results: usize,
}

/// A recording as a functional graph, with what its inputs and results are to the program.
#[derive(Clone)]
pub(crate) struct Front {
    pub(crate) functional: Functional,
    pub(crate) gradients: Option<Gradients>,
    pub(crate) used_up: UsedUp,
    pub(crate) layouts: Arc<[InputLayout]>,
}

/// Capture → functional.
pub(crate) fn front<D: Driver>(
    site: &Site,
    (trace, tape, live): (&Trace, &Analysis, &[Variable]),
    driver: &mut D,
) -> Result<Front> {
    trace.check()?;
    let functional = driver.pass("functionalise", || kiln_aot::functionalise(trace, live))?;
    driver.look("graph", &functional.graph, Stage::Functional)?;
    let (used_up, gradients) = leaving::leaving(site, trace, tape, &functional)?;
    let layouts = leaving::layouts(trace, &functional.inputs)?;
    Ok(Front { functional, gradients, used_up, layouts })
}

/// Functional → joint → prims → partition → loops → plan.
pub(crate) fn back<D: Driver>(front: &Front, driver: &mut D) -> Result<Made<D::Code>> {
    let Some(gradients) = &front.gradients else {
        let graph = prims(&front.functional.graph, driver)?;
        let (layouts, results) = (front.layouts.clone(), graph.outputs.len());
        let code = driver.lower(&Part { graph: &graph, layouts, kind: GraphKind::Whole, results })?;
        return Ok(Made { code, forward_outputs: results, parts: Vec::new(), report: Report::default() });
    };
    let mut joint = driver.pass("joint", || gradients.joint(&front.functional))?;
    let whole = Arc::new(std::mem::take(&mut joint.graph));
    driver.look("joint", &whole, Stage::Functional)?;
    joint.graph = Arc::unwrap_or_clone(prims(&whole, driver)?);
    let Partition { forward, forward_outputs, backward, report } = driver.cut(&joint)?;
    let (layouts, results) = (front.layouts.clone(), forward_outputs);
    let code = driver.lower(&Part { graph: &forward, layouts, kind: GraphKind::Forward, results })?;
    let mut parts = Vec::with_capacity(backward.len());
    for (outputs, part) in gradients.outputs.iter().zip(backward) {
        let (graph, results) = (&part.graph, part.graph.outputs.len());
        let layouts = leaving::backward_layouts(&front.layouts, &part)?;
        let code = driver.lower(&Part { graph, layouts, kind: GraphKind::Backward, results })?;
        parts.push((PartFacts::of(part, outputs.len() > 1), code));
    }
    Ok(Made { code, forward_outputs, parts, report })
}

fn prims<D: Driver>(graph: &Arc<Graph>, driver: &mut D) -> Result<Arc<Graph>> {
    let Some(how) = driver.prims() else { return Ok(graph.clone()) };
    let graph = Arc::new(driver.pass("prims", || kiln_prims::lower_how(graph, how))?);
    driver.look("prims", &graph, Stage::Prims)?;
    Ok(graph)
}
