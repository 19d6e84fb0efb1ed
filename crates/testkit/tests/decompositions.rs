//! Every decomposition of the op table computes what its row says, on all of the row's samples.

use kiln_ir::Op;
use kiln_testkit::{Evaluator, Rng, evaluate, sample_program, tolerance};

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
