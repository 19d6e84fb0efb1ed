//! Forward and backward together compute what the joint graph computes, on networks and random programs.

use kiln_aot::{BackwardPart, Joint, Partition, SavedFrom, joint, partition};
use kiln_ir::{Graph, Op};
use kiln_testkit::{Argument, Evaluator, Program, Rng, check, random_argument};

fn joint_of(graph: &Graph) -> kiln_ir::Result<Joint> {
    let carries = |v: &kiln_ir::Value| kiln_ir::carries_gradient(graph.ty(*v));
    let outputs: Vec<usize> = (0..graph.outputs.len()).filter(|&i| carries(&graph.outputs[i])).collect();
    let inputs: Vec<usize> = (0..graph.inputs.len()).filter(|&i| carries(&graph.inputs[i])).collect();
    joint(graph, &[&outputs], &inputs, &|_| true)
}

/// What a part of a backward takes over from the forward.
fn saved<'a>(
    part: &'a BackwardPart,
    parts: &'a Partition,
    inputs: &'a [Argument],
    forward: &'a [Argument],
) -> impl Iterator<Item = Argument> + 'a {
    part.saved.iter().map(|saved| match saved.what {
        SavedFrom::Input(i) => inputs[i].clone(),
        SavedFrom::Output(i) => forward[i].clone(),
        SavedFrom::Fresh(k) => forward[parts.forward_outputs + k].clone(),
    })
}

/// Runs the joint graph at once and in two parts, and compares every bit.
fn same(joint: &Joint, parts: &Partition, inputs: &[Argument]) -> Result<(), String> {
    let text = |e: kiln_ir::Error| e.to_string();
    let mut rng = Rng::new(5);
    let tangents: Vec<Argument> =
        joint.tangents().iter().map(|&v| random_argument(&mut rng, joint.graph.ty(v))).collect();
    let evaluator = Evaluator::default();
    let all: Vec<Argument> = inputs.iter().chain(&tangents).cloned().collect();
    let want = evaluator.run(&joint.graph, &all).map_err(text)?;
    let forward = evaluator.run(&parts.forward, inputs).map_err(text)?;
    let mut outputs = forward.outputs[..parts.forward_outputs].to_vec();
    for (part, joint) in parts.backward.iter().zip(&joint.parts) {
        let saved = saved(part, parts, inputs, &forward.outputs);
        let given: Vec<Argument> = saved.chain(tangents[joint.tangents.clone()].iter().cloned()).collect();
        outputs.extend(evaluator.run(&part.graph, &given).map_err(text)?.outputs);
    }
    for (i, (a, b)) in want.outputs.iter().zip(&outputs).enumerate() {
        if let Some(difference) = kiln_testkit::difference(a, b, 0.0) {
            return Err(format!("result {i}: {difference}"));
        }
    }
    for (i, (a, b)) in want.inputs.iter().zip(&forward.inputs).enumerate() {
        if let Some(difference) = kiln_testkit::difference(a, b, 0.0) {
            return Err(format!("input {i} after the run: {difference}"));
        }
    }
    Ok(())
}

#[test]
fn parts_compute_what_the_whole_computes() {
    let differentiable = std::cell::Cell::new(0);
    let property = |program: &Program| -> Result<(), String> {
        // Programs with lists are not differentiable; that is tested elsewhere.
        let Ok(joint) = joint_of(&program.graph) else { return Ok(()) };
        differentiable
            .set(differentiable.get() + usize::from(joint.parts[0].grads.iter().any(Option::is_some)));
        for lowered in [false, true] {
            let joint = if lowered {
                joint.clone().map(kiln_prims::lower).map_err(|e| e.to_string())?
            } else {
                joint.clone()
            };
            let parts = partition(&joint).map_err(|e| e.to_string())?;
            same(&joint, &parts, &program.inputs)
                .map_err(|e| format!("{e}\nforward {}backward {}", parts.forward, parts.backward[0].graph))?;
        }
        Ok(())
    };
    check(0..400, 12, property).unwrap_or_else(|e| panic!("{e}"));
    assert!(differentiable.get() > 200, "only {} programs have a gradient", differentiable.get());
}

/// Adds a gradient to one that may be there.
fn add(sum: &mut Option<Argument>, more: &Argument) -> Result<(), String> {
    let Some(before) = sum.take() else {
        *sum = Some(more.clone());
        return Ok(());
    };
    let mut graph = Graph::new();
    let [a, b] = [&before, more].map(|argument| graph.input(argument.ty()));
    let result = kiln_ir::EmitExt::add(&mut graph, a, b).map_err(|e| e.to_string())?;
    graph.outputs.push(result);
    let outcome = Evaluator::exact().run(&graph, &[before, more.clone()]).map_err(|e| e.to_string())?;
    *sum = outcome.outputs.into_iter().next();
    Ok(())
}

#[test]
fn a_backward_in_many_parts_gives_the_gradients_of_one() {
    let several = std::cell::Cell::new(0);
    let property = |program: &Program| -> Result<(), String> {
        let text = |e: kiln_ir::Error| e.to_string();
        let graph = &program.graph;
        let Ok(whole) = joint_of(graph) else { return Ok(()) };
        let carries = |v: &kiln_ir::Value| kiln_ir::carries_gradient(graph.ty(*v));
        let inputs: Vec<usize> = (0..graph.inputs.len()).filter(|&i| carries(&graph.inputs[i])).collect();
        let outputs: Vec<usize> = (0..graph.outputs.len()).filter(|&i| carries(&graph.outputs[i])).collect();
        // Each result is a part of its own; what a value is computed from has smaller numbers.
        let mut order: Vec<usize> = (0..outputs.len()).collect();
        order.sort_by_key(|&k| graph.outputs[outputs[k]]);
        order.dedup_by_key(|k| graph.outputs[outputs[*k]]);
        let singles: Vec<[usize; 1]> = order.iter().map(|&k| [outputs[k]]).collect();
        let singles: Vec<&[usize]> = singles.iter().map(|part| part.as_slice()).collect();
        if order.len() < outputs.len() {
            return Ok(());
        }
        several.set(several.get() + usize::from(order.len() > 1));
        // A result that no input's gradient needs may be one that an op can't be differentiated for.
        let Ok(joint) = joint(graph, &singles, &inputs, &|_| true) else { return Ok(()) };
        let parts = partition(&joint).map_err(text)?;
        let mut rng = Rng::new(9);
        let mut draw = |v: &kiln_ir::Value| random_argument(&mut rng, whole.graph.ty(*v));
        let tangents: Vec<Argument> = whole.tangents().iter().map(&mut draw).collect();
        let evaluator = Evaluator::exact();
        let given: Vec<Argument> = program.inputs.iter().chain(&tangents).cloned().collect();
        let want = evaluator.run(&whole.graph, &given).map_err(text)?;
        let forward = evaluator.run(&parts.forward, &program.inputs).map_err(text)?;
        let mut arrived: Vec<Option<Argument>> = order.iter().map(|&k| Some(tangents[k].clone())).collect();
        let mut found: Vec<Option<Argument>> = vec![None; inputs.len()];
        for (p, part) in parts.backward.iter().enumerate().rev() {
            let tangent = arrived[p].take().ok_or("no gradient arrived")?;
            let given: Vec<Argument> =
                saved(part, &parts, &program.inputs, &forward.outputs).chain([tangent]).collect();
            let outcome = evaluator.run(&part.graph, &given).map_err(text)?;
            for (target, grad) in part.grads.iter().enumerate() {
                let Some(grad) = grad.map(|i| &outcome.outputs[i]) else { continue };
                match target.checked_sub(inputs.len()) {
                    None => add(&mut found[target], grad)?,
                    Some(result) => add(&mut arrived[result], grad)?,
                }
            }
        }
        for (i, (grad, got)) in whole.parts[0].grads.iter().zip(&found).enumerate() {
            match (grad.map(|grad| &want.outputs[grad]), got) {
                (Some(want), Some(got)) => {
                    if let Some(difference) = kiln_testkit::difference(want, got, 1e-5) {
                        return Err(format!("gradient of input {i}: {difference}"));
                    }
                }
                (None, None) => {}
                (want, got) => return Err(format!("input {i}: {} and {}", want.is_some(), got.is_some())),
            }
        }
        Ok(())
    };
    check(0..400, 12, property).unwrap_or_else(|e| panic!("{e}"));
    assert!(several.get() > 50, "only {} programs have several results", several.get());
}

fn parts(text: &str) -> Partition {
    let run = || -> Result<Partition, String> {
        let error = |e: kiln_ir::Error| e.to_string();
        let graph: Graph = text.parse().map_err(error)?;
        let joint = joint_of(&graph).and_then(|joint| joint.map(kiln_prims::lower)).map_err(error)?;
        let parts = partition(&joint).map_err(error)?;
        let mut rng = Rng::new(3);
        let inputs: Vec<_> = graph.inputs.iter().map(|&v| random_argument(&mut rng, graph.ty(v))).collect();
        same(&joint, &parts, &inputs)?;
        Ok(parts)
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn pointwise_chains_run_again_from_inputs() {
    let parts = parts(
        "graph(%0: f32[64]) {
          %1 = tanh(%0) : f32[64]
          %2 = mul(%1, %0) : f32[64]
          %3 = sum(%2) {dims: [0], keepdim: false} : f32[]
          return %3 }",
    );
    assert_eq!(parts.backward[0].saved.iter().map(|s| s.what).collect::<Vec<_>>(), [SavedFrom::Input(0)]);
    assert_eq!((parts.report.bytes_saved, parts.report.nodes_recomputed), (0, 1));
}

#[test]
fn an_input_that_is_overwritten_is_saved_as_it_was() {
    let parts = parts(
        "graph(%0: f32[8], %1: f32[8]) {
          %2 = mul(%0, %1) : f32[8]
          write %1 <- %2
          return %2 }",
    );
    let whats: Vec<SavedFrom> = parts.backward[0].saved.iter().map(|s| s.what).collect();
    assert_eq!(whats, [SavedFrom::Input(0), SavedFrom::Fresh(0)]);
    assert_eq!(parts.forward.outputs[1], parts.forward.inputs[1]);
}

#[test]
fn random_numbers_and_products_never_run_twice() {
    let parts = parts(
        "graph(%0: f32[8, 8], %1: f32[8, 8], %2: int) {
          %3 = rand(%2, %2) {shape: [8, 8], dtype: f32, device: cpu} : f32[8, 8]
          %4 = mm(%0, %1) : f32[8, 8]
          %5 = mul(%4, %3) : f32[8, 8]
          %6 = relu(%5) : f32[8, 8]
          %7 = mm(%6, %1) : f32[8, 8]
          return %7 }",
    );
    let random = |g: &Graph| g.nodes.iter().filter(|n| matches!(n.op, Op::Rand { .. })).count();
    let products = |g: &Graph| g.nodes.iter().filter(|n| matches!(n.op, Op::Mm {})).count();
    assert_eq!((random(&parts.forward), random(&parts.backward[0].graph)), (1, 0));
    assert_eq!((products(&parts.forward), products(&parts.backward[0].graph)), (2, 4));
}
