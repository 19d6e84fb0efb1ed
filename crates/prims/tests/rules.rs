//! Every rewrite rule keeps its law: on its examples it fires, and the result has the same bits for ordinary
//! and for special inputs.

use kiln_ir::{Graph, Stage};
use kiln_prims::{rules, simplify_by};
use kiln_testkit::{Evaluator, Rng, random_argument, special_argument};

#[test]
fn rules_keep_every_bit() {
    for theme in rules::ALL {
        for (i, rule) in theme.iter().enumerate() {
            assert!(!rule.examples.is_empty(), "{} has no example", rule.name);
            for example in rule.examples {
                let graph: Graph = example.parse().unwrap_or_else(|e| panic!("{}: {e}", rule.name));
                graph.verify(Stage::Functional, rule.name).unwrap();
                let (simple, fired) = simplify_by(&graph, &[&theme[i..=i]]).unwrap();
                assert!(fired.contains(&rule.name), "{} does not fire on\n{graph}", rule.name);
                simple.verify(Stage::Functional, rule.name).unwrap();
                assert!(simple.nodes.len() <= graph.nodes.len(), "{}: more work\n{simple}", rule.name);
                for seed in 0..40 {
                    let mut rng = Rng::new(seed);
                    let value = if seed < 10 { random_argument } else { special_argument };
                    let inputs: Vec<_> = graph.inputs.iter().map(|&v| value(&mut rng, graph.ty(v))).collect();
                    for evaluator in [Evaluator::default(), Evaluator::exact()] {
                        let want = evaluator.run(&graph, &inputs).unwrap();
                        let got = evaluator.run(&simple, &inputs).unwrap();
                        let difference = want.difference(&got, 0.0);
                        assert_eq!(difference, None, "{}: {}\n{graph}{inputs:?}", rule.name, rule.law);
                    }
                }
            }
        }
    }
}

#[test]
fn names_are_unique() {
    let mut names: Vec<&str> = rules::ALL.iter().flat_map(|t| t.iter().map(|r| r.name)).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}
