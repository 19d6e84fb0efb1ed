//! A scan is one step of a plan, wherever its operands lie, and its gradient is another.

use kiln_ir::{Graph, Op, Value, differentiate};
use kiln_plan::Step;

use crate::support::{Random, check_run, check_strided, check_text};
use kiln_inductor::{C, Options};

const BODY: &str = "graph(%0: f32[3], %1: i64[], %2: f32[3], %3: f32[3, 3], %4: float) { \
    %5 = linear(%0, %3) : f32[3] %6 = add(%5, %2) : f32[3] %7 = tanh(%6) : f32[3] %8 = mul(%7, %4) : f32[3] \
    %9 = constant() {value: 1} : int %10 = add(%1, %9) : i64[] %11 = mul(%8, %1) : f32[3] return %7, %10, %8, %11, %10 }";

fn text(length: usize, dtype: &str, order: &str, saves: bool) -> String {
    let elements = match dtype {
        "i64" => 1 + length + if saves { length } else { 0 },
        _ => 3 + 6 * length + if saves { 3 * length } else { 0 },
    };
    let steps = format!(
        "{{body: \"{BODY}\", carries: 2, inputs: 1, length: {length}, dtype: {dtype}, order: {order}, saves: {saves}}}"
    );
    format!(
        "graph(%0: f32[3], %1: i64[], %2: f32[{length}, 3], %3: f32[3, 3], %4: f64[]) {{
  %5 = constant() {{value: 2}} : int
  %6 = maximum(%5, %1) : i64[]
  %7 = scan(%0, %6, %2, %3, %4) {steps} : {dtype}[{elements}]
  %8 = neg(%7) : {dtype}[{elements}]
  return %8
}}"
    )
}

#[test]
fn a_scan_is_a_step() {
    for length in [1, 2, 5] {
        for (dtype, order, saves) in [
            ("f32", "forward", false),
            ("f32", "backward", true),
            ("i64", "backward", false),
            ("i64", "forward", true),
        ] {
            let plan = check_text(&text(length, dtype, order, saves));
            let scans =
                plan.steps.iter().filter(|s| matches!(s, Step::Call(c) if matches!(c.op, Op::Scan { .. })));
            assert_eq!(scans.count(), 1, "{plan}");
        }
    }
}

#[test]
fn operands_of_a_scan_lie_as_they_like() {
    check_strided(&text(4, "f32", "forward", true), &[(2, &[1, 4]), (3, &[1, 3])]);
    check_strided(&text(4, "f32", "backward", false), &[(2, &[0, 2]), (0, &[2])]);
}

/// A gradient, and that of the gradient, by definition and compiled.
#[test]
fn gradients_of_a_scan_are_scans() {
    for (order, saves) in [("forward", false), ("backward", true)] {
        let mut graph: Graph = text(4, "f32", order, saves).parse().unwrap();
        let scan = graph.nodes.iter().find(|node| matches!(node.op, Op::Scan { .. })).unwrap().outs[0];
        let wanted = [0, 2, 3].map(|input| graph.inputs[input]);
        let seed = graph.input(graph.ty(scan).clone());
        let first = differentiate(&mut graph, &[(scan, seed)], &wanted, &|_| true).unwrap();
        let first: Vec<Value> = first.into_iter().flatten().collect();
        let seeds: Vec<(Value, Value)> = first
            .iter()
            .map(|&gradient| {
                let ty = graph.ty(gradient).clone();
                (gradient, graph.input(ty))
            })
            .collect();
        let second =
            differentiate(&mut graph, &seeds, &[wanted.as_slice(), &[seed]].concat(), &|_| true).unwrap();
        assert!(second.iter().all(Option::is_some));
        graph.outputs = first.into_iter().chain(second.into_iter().flatten()).collect();
        let graph = kiln_prims::lower(&graph).unwrap();
        let options = Options::dense(&graph, C::new(crate::support::best_isa()));
        let inputs = Random(7).inputs(&graph);
        check_run(&graph, &options, &inputs);
    }
}
