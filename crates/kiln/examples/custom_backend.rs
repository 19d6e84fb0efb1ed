//! A backend of one's own: prints every graph it is given, runs it op by op, and counts the ops.
//!
//! `cargo run --example custom_backend -p kiln`
#![allow(clippy::print_stdout, reason = "an example")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kiln::nn::{Gelu, Linear, seq};
use kiln::prelude::*;
use kiln::{CompiledGraph, CustomBackend, Graph, GraphContext, run_graph_with, run_node};

/// Counts the ops that compiled graphs run.
#[derive(Default)]
struct Counting {
    counts: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl CustomBackend for Counting {
    fn name(&self) -> &str {
        "counting"
    }

    fn compile(&self, graph: &Graph, context: &GraphContext<'_>) -> kiln::Result<CompiledGraph> {
        println!("{} graph of {}, outputs {:?}:\n{graph}", text(context), context.name, context.outputs);
        let (graph, counts) = (graph.clone(), self.counts.clone());
        Ok(Box::new(move |inputs| {
            run_graph_with(&graph, inputs, &mut |node, args| {
                if let Ok(mut counts) = counts.lock() {
                    *counts.entry(node.op.name()).or_default() += 1;
                }
                run_node(node, args)
            })
        }))
    }
}

fn text(context: &GraphContext<'_>) -> String {
    format!("{:?}", context.kind).to_lowercase()
}

/// The example.
pub fn main() -> kiln::Result<()> {
    let backend = Counting::default();
    let counts = backend.counts.clone();

    // A training step: forward, backward and optimizer are one graph; weights are written back.
    let model = seq![Linear::new(4, 3)?, Gelu, Linear::new(3, 1)?];
    let opt = optim::SGD::new(model.parameters(), 0.1)?;
    let x = Tensor::ones([2, 4], &Device::Cpu)?;
    let step = Compile::new().backend(backend).name("step").function(|| {
        opt.zero_grad();
        let loss = model.forward(&x)?.square()?.mean()?;
        loss.backward()?;
        opt.step()?;
        Ok::<_, kiln::Error>(loss)
    });
    let mut last = f32::INFINITY;
    for _ in 0..5 {
        let loss = step()?.item::<f32>()?;
        assert!(loss < last, "the loss must fall: {loss} after {last}");
        last = loss;
    }
    println!("ops run in 5 steps:");
    for (op, count) in counts.lock().iter().flat_map(|counts| counts.iter()) {
        println!("  {op:<28}{count:>4}");
    }
    print!("{}", step.explain());
    Ok(())
}
