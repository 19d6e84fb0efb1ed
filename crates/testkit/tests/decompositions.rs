//! Every decomposition of the op table computes what its row says, on all of the row's samples.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_ir::{Class, Emit, Graph, Op, Value};
use kiln_testkit::{Evaluator, Rng, evaluate, sample_program, tolerance};

/// The graph with every op in its parts, also those that compiled programs leave whole.
fn in_parts(graph: &Graph) -> Graph {
    let (mut parts, mut map) = Graph::with_inputs_of(graph);
    for node in &graph.nodes {
        let args: Vec<Value> = node.args.iter().map(|v| map[v.index()]).collect();
        let outs = match node.op.decompose(&mut parts, &args).unwrap() {
            Some(outs) => outs,
            None => parts.emit(node.op.clone(), &args).unwrap(),
        };
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    parts.outputs = graph.outputs.iter().map(|v| map[v.index()]).collect();
    parts
}

#[test]
fn decompositions_agree_with_their_rows() {
    let mut failures = Vec::new();
    for row in Op::ROWS.iter().filter(|row| row.decompose.is_some()) {
        for (i, sample) in row.sample_calls().iter().enumerate() {
            for &dtype in sample.dtypes {
                let program = sample_program(&mut Rng::new(i as u64), sample, dtype).unwrap();
                let runs = [Evaluator::exact(), Evaluator::default()];
                for (evaluator, tolerance) in runs.into_iter().zip([1e-12, 2e-6_f64.max(tolerance(dtype))]) {
                    let want = evaluator.run(&program.graph, &program.inputs).unwrap();
                    let got = evaluator.decomposed().run(&program.graph, &program.inputs).unwrap();
                    if let Some(difference) = want.difference(&got, tolerance) {
                        failures.push(format!("{} sample {i} {dtype}: {difference}", row.name));
                    }
                    // Those that compiled programs leave whole.
                    if row.class == Class::Composite && row.prim.is_some() && !dtype.is_narrow() {
                        let parts = in_parts(&program.graph);
                        let got = evaluator.run(&parts, &program.inputs).unwrap();
                        if let Some(difference) = want.difference(&got, tolerance) {
                            failures.push(format!("parts of {} sample {i} {dtype}: {difference}", row.name));
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_sample_evaluates() {
    for row in Op::ROWS {
        for sample in row.sample_calls() {
            for &dtype in sample.dtypes {
                let program = sample_program(&mut Rng::new(1), &sample, dtype).unwrap();
                let outcome = evaluate(&program.graph, &program.inputs).unwrap();
                assert_eq!(
                    outcome.outputs[0].ty(),
                    *program.graph.ty(program.graph.outputs[0]),
                    "{}",
                    row.name
                );
            }
        }
    }
}
