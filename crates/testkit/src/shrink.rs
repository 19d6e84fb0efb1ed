//! Properties over random programs: when one fails, the program is made smaller while it still fails.

use std::ops::Range;

use kiln_ir::{Def, Graph, Value};

use crate::{Evaluator, Program, generate};

/// Checks a property on one random program per seed, of `nodes` nodes each. The error names the seed and
/// shows the smallest program found that still fails.
pub fn check(
    seeds: Range<u64>,
    nodes: usize,
    property: impl Fn(&Program) -> Result<(), String>,
) -> Result<(), String> {
    for seed in seeds {
        let program = generate(seed, nodes);
        if property(&program).is_err() {
            let small = shrink(program, &property);
            let why = property(&small).err().unwrap_or_default();
            return Err(format!("seed {seed}: {why}\n{}{:?}", small.graph, small.inputs));
        }
    }
    Ok(())
}

/// The smallest program found by dropping or replacing results and nodes for which the property still fails.
pub fn shrink(program: Program, property: &impl Fn(&Program) -> Result<(), String>) -> Program {
    let mut best = program;
    'again: loop {
        let outputs = best.graph.outputs.len();
        let writes = best.graph.writes.len();
        let drop_result = (0..outputs + writes).map(|skip| {
            let mut graph = best.graph.clone();
            if skip < outputs {
                graph.outputs.remove(skip);
            } else {
                graph.writes.remove(skip - outputs);
            }
            cut(&Program { graph, inputs: best.inputs.clone() }, usize::MAX)
        });
        let only_result = (0..best.graph.nodes.len()).map(|i| {
            let mut graph = best.graph.clone();
            graph.outputs = vec![graph.nodes[i].outs[0]];
            graph.writes.clear();
            cut(&Program { graph, inputs: best.inputs.clone() }, usize::MAX)
        });
        // What a result was computed from, in its place.
        let earlier = (0..outputs).flat_map(|k| {
            let producer = best.graph.producer(best.graph.outputs[k]);
            let args = producer.map(|node| node.args.to_vec()).unwrap_or_default();
            args.into_iter().map(move |arg| (k, arg))
        });
        let earlier = earlier.map(|(k, arg)| {
            let mut graph = best.graph.clone();
            graph.outputs[k] = arg;
            cut(&Program { graph, inputs: best.inputs.clone() }, usize::MAX)
        });
        let drop_node = (0..best.graph.nodes.len()).map(|i| cut(&best, i));
        for candidate in drop_result.chain(drop_node).chain(earlier).chain(only_result).flatten() {
            if size(&candidate) < size(&best) && property(&candidate).is_err() {
                best = candidate;
                continue 'again;
            }
        }
        return best;
    }
}

fn size(program: &Program) -> (usize, usize, usize) {
    let graph = &program.graph;
    (graph.nodes.len(), graph.outputs.len() + graph.writes.len(), graph.inputs.len())
}

/// The program without node `cut`, whose result becomes an input of the same value, and without whatever
/// is then not needed.
fn cut(program: &Program, cut: usize) -> Option<Program> {
    let old = &program.graph;
    let values = Evaluator::default().values(old, &program.inputs).ok()?;
    let mut needed = vec![false; old.value_count()];
    let mark = |needed: &mut Vec<bool>, v: &Value| needed[v.index()] = true;
    old.outputs.iter().for_each(|v| mark(&mut needed, v));
    old.writes.iter().for_each(|w| [w.value, w.target].iter().for_each(|v| mark(&mut needed, v)));
    for (i, node) in old.nodes.iter().enumerate().rev() {
        if i != cut && node.outs.iter().any(|v| needed[v.index()]) {
            node.args.iter().for_each(|v| mark(&mut needed, v));
        }
    }
    let mut graph = Graph::new();
    let mut inputs = Vec::new();
    let mut map = vec![Value(u32::MAX); old.value_count()];
    for v in (0..old.value_count() as u32).map(Value).filter(|v| needed[v.index()]) {
        let becomes_input = match old.def(v) {
            Def::Input(_) => true,
            Def::Node { node, .. } => node as usize == cut,
        };
        if becomes_input {
            map[v.index()] = graph.input(old.ty(v).clone());
            inputs.push(values[v.index()].clone());
        }
    }
    for (i, node) in old.nodes.iter().enumerate() {
        if i != cut && node.outs.iter().any(|v| needed[v.index()]) {
            let args: Vec<Value> = node.args.iter().map(|v| map[v.index()]).collect();
            let tys: Vec<_> = node.outs.iter().map(|&v| old.ty(v).clone()).collect();
            let outs = graph.push(node.op.clone(), &args, tys, false, node.loc);
            node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
        }
    }
    graph.outputs = old.outputs.iter().map(|v| map[v.index()]).collect();
    graph.writes = old.writes.iter().map(|w| w.renumbered(&map)).collect();
    Some(Program { graph, inputs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_ir::Op;

    #[test]
    fn failures_shrink_to_the_culprit() {
        let has_product = |p: &Program| {
            if p.graph.nodes.iter().any(|n| matches!(n.op, Op::Mm {})) {
                Err("a product".to_string())
            } else {
                Ok(())
            }
        };
        let program = (0..).map(|seed| generate(seed, 20)).find(|p| has_product(p).is_err()).unwrap();
        let small = shrink(program, &has_product);
        assert_eq!(small.graph.nodes.len(), 1, "{}", small.graph);
        assert!(matches!(small.graph.nodes[0].op, Op::Mm {}));
    }
}
