//! Golden files of decomposition and simplification.

use kiln_ir::{Graph, Result, Stage};

#[test]
fn golden() {
    let stage = |name: &str, text: &str| -> Result<String> {
        let graph: Graph = text.parse()?;
        graph.verify(Stage::Functional, "the file")?;
        let result = match name {
            "decompose" => kiln_prims::decompose(&graph)?,
            "simplify" => kiln_prims::simplify(&graph)?,
            _ => kiln_prims::lower(&graph)?,
        };
        Ok(result.to_string())
    };
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    kiln_testkit::golden::run(dir, stage).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn every_pass_is_shown_and_lines_survive() {
    let mut graph = Graph::new();
    let x = graph.input(kiln_ir::Ty::tensor(kiln_ir::DType::F32, [3]));
    graph.loc = kiln_ir::Loc::caller();
    let loc = graph.loc;
    let y = kiln_ir::EmitExt::softmax(&mut graph, x, 0).unwrap();
    graph.outputs.push(y);
    let mut passes = Vec::new();
    let lowered = kiln_prims::lower_with(&graph, &mut |pass, _| passes.push(pass.to_string())).unwrap();
    assert_eq!(passes, ["decompose", "simplify", "accumulate"]);
    assert!(lowered.nodes.iter().all(|node| node.loc == loc));
}
