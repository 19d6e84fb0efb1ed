//! Golden files of the joint graph and its partition. Gradients flow from every float result to every float
//! input, except class numbers and inputs named in a `; data %n` line.

use kiln_aot::{joint, partition};
use kiln_ir::{Graph, Result};

#[test]
fn golden() {
    let stage = |name: &str, text: &str| -> Result<String> {
        let graph: Graph = text.parse()?;
        let data: Vec<usize> = text
            .lines()
            .filter_map(|line| line.strip_prefix("; data %"))
            .filter_map(|n| n.trim().parse().ok())
            .collect();
        let carries = |v: &kiln_ir::Value| kiln_ir::carries_gradient(graph.ty(*v));
        let outputs: Vec<usize> = (0..graph.outputs.len()).filter(|&i| carries(&graph.outputs[i])).collect();
        let inputs: Vec<usize> =
            (0..graph.inputs.len()).filter(|&i| carries(&graph.inputs[i]) && !data.contains(&i)).collect();
        let joint = joint(&graph, &[&outputs], &inputs, &|_| true)?;
        if name == "joint" {
            return Ok(joint.graph.to_string());
        }
        let parts = partition(&joint.map(kiln_prims::lower)?)?;
        let backward = &parts.backward[0];
        let saved: Vec<String> = backward.saved.iter().map(|s| format!("{:?}: {}", s.what, s.ty)).collect();
        Ok(format!(
            "forward {}saved {}\n{:?}\nbackward {}",
            parts.forward,
            saved.join(", "),
            parts.report,
            backward.graph
        ))
    };
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    kiln_testkit::golden::run(dir, stage).unwrap_or_else(|e| panic!("{e}"));
}
