//! Random programs compute the same, bit for bit, after every pass.

use kiln_ir::{DType, Emit, Graph, Op, Stage, Ty, Value};
use kiln_prims::{decompose, simplify};
use kiln_testkit::{Argument, Array, Evaluator, Program, Rng, check};

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
        // As text, in which one NaN is as good as another.
        if once.to_string() == twice.to_string() { Ok(()) } else { Err(format!("{once}\nthen\n{twice}")) }
    })
    .unwrap_or_else(|e| panic!("{e}"));
}

/// Sums of products and of columns, over whole numbers that are exact in any order.
#[test]
fn joined_products_have_the_same_sum() {
    let (mut rng, mut joined) = (Rng::new(7), 0);
    for round in 0..200 {
        let (m, n) = (1 + rng.below(9), 1 + rng.below(9));
        let mut graph = Graph::new();
        let mut inputs: Vec<Argument> = Vec::new();
        let mut input = |graph: &mut Graph, rng: &mut Rng, shape: [usize; 2]| {
            let array = Array::floats(DType::F32, shape, |_| rng.below(9) as f64 - 4.0);
            let value = graph.input(Ty::Tensor(array.ty()));
            inputs.push(array.into());
            value
        };
        let turn = || Op::Permute { dims: [1, 0].into_iter().collect() };
        let (all_turned, terms) = (round % 2 == 0, 2 + rng.below(9));
        let (mut sum, mut bias): (Option<Value>, Option<Value>) = (None, None);
        for _ in 0..terms {
            let k = 1 + rng.below(3);
            let side = input(&mut graph, &mut rng, if all_turned { [k, m] } else { [m, k] });
            let lhs = if all_turned { graph.emit(turn(), &[side]).unwrap()[0] } else { side };
            let rhs = input(&mut graph, &mut rng, [k, n]);
            let term = match rng.below(6) {
                0 => input(&mut graph, &mut rng, [m, n]),
                _ => graph.emit(Op::Mm {}, &[lhs, rhs]).unwrap()[0],
            };
            sum = Some(sum.map_or(term, |sum| graph.emit(Op::Add {}, &[sum, term]).unwrap()[0]));
            if rng.below(20) == 0 {
                let sum = sum.unwrap();
                graph.outputs.push(sum);
            }
            if all_turned {
                let op = Op::Sum { dims: [0].into_iter().collect(), keepdim: false };
                let columns = graph.emit(op, &[side]).unwrap()[0];
                bias = Some(bias.map_or(columns, |sum| graph.emit(Op::Add {}, &[columns, sum]).unwrap()[0]));
            }
        }
        graph.outputs.extend(sum.into_iter().chain(bias));
        let lowered = kiln_prims::lower(&graph).unwrap();
        lowered.verify(Stage::Prims, "lower").unwrap();
        let products = |graph: &Graph| graph.nodes.iter().filter(|node| matches!(node.op, Op::Mm {})).count();
        joined += usize::from(products(&lowered) < products(&graph));
        let evaluator = Evaluator::default().decomposed();
        let (want, got) =
            (evaluator.run(&graph, &inputs).unwrap(), evaluator.run(&lowered, &inputs).unwrap());
        assert_eq!(want.difference(&got, 0.0), None, "{graph}\nafter the passes:\n{lowered}");
    }
    assert!(joined > 40, "only {joined} sums were joined");
}
