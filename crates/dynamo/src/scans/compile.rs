//! Bodies of scans as programs: prims, loops, kernels; the steps are run by the scan's eager kernel.

use std::sync::Arc;

use kiln_inductor::Layout;
use kiln_ir::{Device, Graph, Strides};
use kiln_prims::{How, Rounding};
use kiln_tensor::program::Executable;

use crate::compiling::lowering;
use crate::graph_cache::Outline;
use crate::options::Mode;
use crate::settings::Settings;
use crate::{device, kernels};

/// See [`kiln_tensor::CompileBody`].
pub(super) fn compile(graph: &Graph, strides: &[Strides]) -> Option<Executable> {
    made(graph, strides).ok()
}

fn made(graph: &Graph, strides: &[Strides]) -> Result<Executable, String> {
    if device::of(graph)? != Device::Cpu {
        return Err("a body that is not the CPU's".into());
    }
    let text = |error: kiln_ir::Error| error.to_string();
    let settings = Settings::default();
    // Eager's bits.
    let how = How { rounding: Rounding::Ops, ..How::default() };
    let graph = kiln_prims::lower_how(graph, how).map_err(text)?;
    let layouts: Arc<[Layout]> = strides.iter().map(|strides| Layout { strides: strides.clone() }).collect();
    // What is the same in every step may be packed once for all of them.
    let options = lowering(&settings, &layouts, true, false);
    let mut lowered = kiln_inductor::lower(&graph, &options).map_err(|error| error.to_string())?;
    let loading = kernels::load(&lowered.code, settings.build())?;
    if !loading.refused.is_empty() {
        let names: Vec<String> = loading.refused.iter().map(|(name, _)| name.clone()).collect();
        lowered =
            kiln_inductor::lower_without(&graph, &options, &names).map_err(|error| error.to_string())?;
    }
    let outline = Outline::of(&graph)?;
    kernels::bind(&outline, &lowered.plan, &loading.find(&lowered.code)?, Mode::ReduceOverhead)
        .map(|loaded| loaded.executable)
}
