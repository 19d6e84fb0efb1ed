//! Random programs compute the same, bit for bit, after every pass.

use kiln_ir::{Graph, Stage};
use kiln_prims::{decompose, simplify};
use kiln_testkit::{Evaluator, Program, check};

fn same(program: &Program, pass: fn(&Graph) -> kiln_ir::Result<Graph>, stage: Stage) -> Result<(), String> {
    let graph = pass(&program.graph).map_err(|e| e.to_string())?;
    graph.verify(stage, "the pass").map_err(|e| e.to_string())?;
    for evaluator in [Evaluator::default().decomposed(), Evaluator::exact().decomposed()] {
        let want = evaluator.run(&program.graph, &program.inputs).map_err(|e| e.to_string())?;
        let got = evaluator.run(&graph, &program.inputs).map_err(|e| e.to_string())?;
        if let Some(difference) = want.difference(&got, 0.0) {
            return Err(format!("{difference}\nafter the pass:\n{graph}\nbefore it:"));
        }
    }
    Ok(())
}

#[test]
fn decompose_preserves_programs() {
    check(0..600, 14, |p| same(p, decompose, Stage::Prims)).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn simplify_preserves_functional_programs() {
    check(1000..1600, 14, |p| same(p, simplify, Stage::Functional)).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn lower_preserves_programs() {
    check(2000..2600, 14, |p| same(p, kiln_prims::lower, Stage::Prims)).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn lowering_twice_changes_nothing() {
    check(3000..3200, 14, |p| {
        let once = kiln_prims::lower(&p.graph).map_err(|e| e.to_string())?;
        let twice = kiln_prims::lower(&once).map_err(|e| e.to_string())?;
        // As text: a constant NaN is not equal to itself.
        if once.to_string() == twice.to_string() { Ok(()) } else { Err(format!("{once}\nthen\n{twice}")) }
    })
    .unwrap_or_else(|e| panic!("{e}"));
}
