//! The gradient rule of every differentiable row, on all of its samples, against finite differences.

use kiln_aot::joint;
use kiln_ir::{Class, DType, Domain, Grad, Op, Row, TensorTy, Ty};
use kiln_testkit::{
    Argument, Array, Evaluator, Program, Rng, difference, numeric_gradient, random_array, sample_program,
};

/// Differentiates all float inputs of a program with random tangents and compares.
fn check(program: &Program, rng: &mut Rng) -> Result<usize, String> {
    let graph = &program.graph;
    let carries = |v: &kiln_ir::Value| kiln_ir::carries_gradient(graph.ty(*v));
    let outputs: Vec<usize> = (0..graph.outputs.len()).filter(|&i| carries(&graph.outputs[i])).collect();
    let inputs: Vec<usize> = (0..graph.inputs.len()).filter(|&i| carries(&graph.inputs[i])).collect();
    let joint = joint(graph, &[&outputs], &inputs, &|_| true).map_err(|e| e.to_string())?;
    let mut weights: Vec<Option<Array>> = vec![None; graph.outputs.len()];
    let mut arguments = program.inputs.clone();
    for &i in &outputs {
        let Ty::Tensor(ty) = graph.ty(graph.outputs[i]).clone() else { continue };
        let tangent = random_array(rng, &ty, Domain::Any);
        arguments.push(tangent.clone().into());
        weights[i] = Some(tangent);
    }
    let outcome = Evaluator::exact().run(&joint.graph, &arguments).map_err(|e| e.to_string())?;
    for (&i, &grad) in inputs.iter().zip(&joint.parts[0].grads) {
        let numeric = numeric_gradient(graph, &program.inputs, &weights, i).map_err(|e| e.to_string())?;
        let ty: TensorTy = numeric.ty();
        let zero = Argument::Tensor(Array::floats(DType::F64, &ty.shape, |_| 0.0));
        let got = grad.map_or(&zero, |output| &outcome.outputs[output]);
        if let Some(difference) = difference(&numeric.into(), got, 1e-5) {
            return Err(format!("gradient of input {i}: {difference} (finite differences, then the rule)"));
        }
    }
    Ok(inputs.len())
}

#[test]
fn rules_of_even_rows_agree_with_finite_differences() {
    rules_agree_with_finite_differences(0);
}

#[test]
fn rules_of_odd_rows_agree_with_finite_differences() {
    rules_agree_with_finite_differences(1);
}

/// Every second row, from this one on: two tests share the work between two threads.
fn rules_agree_with_finite_differences(from: usize) {
    let mut failures = Vec::new();
    let rows = Op::ROWS.iter().skip(from).step_by(2);
    let has_rule = |row: &&Row| matches!(row.grad, Grad::Fn(_) | Grad::Decompose);
    for row in rows.filter(has_rule).filter(|row| row.class != Class::Custom) {
        let mut checked = 0;
        for (i, sample) in row.sample_calls().iter().enumerate() {
            if !sample.dtypes.contains(&DType::F64) {
                continue;
            }
            let mut rng = Rng::new(i as u64);
            let program = match sample_program(&mut rng, sample, DType::F64) {
                Ok(program) => program,
                Err(why) => {
                    failures.push(format!("{} sample {i}: {why}", row.name));
                    continue;
                }
            };
            match check(&program, &mut rng) {
                Ok(count) => checked += count,
                Err(why) => failures.push(format!("{} sample {i}: {why}\n{}", row.name, program.graph)),
            }
        }
        if checked == 0 {
            failures.push(format!("{}: no sample checks its gradient", row.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn gradients_of_chains_accumulate_and_stop() {
    let program = |text: &str| {
        let graph: kiln_ir::Graph = text.parse().unwrap();
        let mut rng = Rng::new(7);
        let inputs =
            graph.inputs.iter().map(|&v| kiln_testkit::random_argument(&mut rng, graph.ty(v))).collect();
        Program { graph, inputs }
    };
    // x is used three times, y through broadcasting.
    let many = program(
        "graph(%0: f64[3, 4], %1: f64[4]) {
          %2 = mul(%0, %1) : f64[3, 4]
          %3 = tanh(%2) : f64[3, 4]
          %4 = add(%3, %0) : f64[3, 4]
          %5 = mul(%4, %0) : f64[3, 4]
          %6 = softmax(%5) {dim: 1} : f64[3, 4]
          return %6, %5 }",
    );
    assert_eq!(check(&many, &mut Rng::new(1)), Ok(2));
}

#[test]
fn detached_and_unrecorded_nodes_stop_the_gradient() {
    let graph: kiln_ir::Graph = "graph(%0: f32[3], %1: f32[3]) {
      %2 = exp(%0) : f32[3]
      %3 = detach(%2) : f32[3]
      %4 = mul(%3, %1) : f32[3]
      return %4 }"
        .parse()
        .unwrap();
    assert_eq!(joint(&graph, &[&[0]], &[0, 1], &|_| true).unwrap().parts[0].grads, [None, Some(1)]);
    assert_eq!(joint(&graph, &[&[0]], &[0, 1], &|node| node != 2).unwrap().parts[0].grads, [None, None]);
}

#[test]
fn a_missing_rule_is_an_error_only_where_the_gradient_must_pass() {
    let graph: kiln_ir::Graph = "graph(%0: f32[3], %1: f32[3]) {
      %2 = list(%0) : list(1 x f32[3])
      %3 = foreach_exp(%2) : list(1 x f32[3])
      %4 = list_get(%3) {index: 0} : f32[3]
      %5 = mul(%4, %1) : f32[3]
      return %5 }"
        .parse()
        .unwrap();
    assert_eq!(joint(&graph, &[&[0]], &[1], &|_| true).unwrap().parts[0].grads, [Some(1)]);
    let error = joint(&graph, &[&[0]], &[0], &|_| true).unwrap_err().to_string();
    assert!(error.contains("not differentiable: lists of tensors"), "{error}");
}
