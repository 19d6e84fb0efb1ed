//! `kiln selftest`: small programs, compiled and eager, must give the same results, and must have been compiled.

use kiln::prelude::*;
use kiln::{Result, counters};
use kiln_runtime::Compiler;

use crate::cases::{Case, OptimizerKind, Workload, mlp_train};
use crate::failure::{Done, Failure};
use crate::measure::Difference;
use crate::output::{self, count, error};
use crate::{DeviceKind, measure};

const STEPS: usize = 5;

/// Runs them all; the first difference is the failure.
pub fn run(device: DeviceKind) -> Done {
    let device = device.find()?;
    let step = |kind| move |device: &Device| Case::Optimizer { kind, layers: 3, size: 64 }.build(device);
    check("adam step", step(OptimizerKind::Adam), &device)?;
    check("adamw step", step(OptimizerKind::Adamw), &device)?;
    check("sgd step", step(OptimizerKind::Sgd), &device)?;
    check("mlp training step", small_mlp, &device)?;
    Ok(())
}

fn small_mlp(device: &Device) -> Result<Workload> {
    manual_seed(0);
    mlp_train(32, 16, device)
}

fn check(name: &str, build: impl Fn(&Device) -> Result<Workload>, device: &Device) -> Done {
    let (eager, compiled) = (build(device)?, build(device)?);
    let region = Compile::new().region();
    let before = counters();
    let (mut expected, mut found) = (None, None);
    for _ in 0..STEPS {
        expected = eager.step()?;
        found = region.run(|| compiled.step())?;
    }
    let difference = Difference::between(&eager.results(expected)?, &compiled.results(found)?);
    difference.check(name, measure::TOLERANCE)?;
    let explanation = region.explain();
    let refusal = measure::refusal(&explanation, counters() - before);
    if let Some(reason) = refusal {
        // Without a compiler this is what can be tested; one that fails is a failure.
        return match Compiler::find() {
            Ok(_) => Err(Failure::Refused { what: name.into(), reason }),
            Err(_) => Ok(output::print(&format!("eager {name:18} {reason}"))?),
        };
    }
    let kernels: usize = explanation.graphs.iter().map(|graph| graph.kernels).sum();
    let shape = format!("{}, {}", count(explanation.graphs.len(), "graph"), count(kernels, "kernel"));
    output::print(&format!(
        "ok    {name:18} {shape}; relative error {} after {STEPS} steps",
        error(difference.relative)
    ))?;
    Ok(())
}
