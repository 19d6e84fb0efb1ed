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

/// The examples in every other dtype: a rule may then leave them alone, but not change what they compute.
#[test]
fn rules_hold_in_narrow_dtypes() {
    let mut fired_at_all = 0;
    for theme in rules::ALL {
        for (i, rule) in theme.iter().enumerate() {
            for (example, (wide, narrow)) in rule.examples.iter().flat_map(|e| NARROW.map(|pair| (e, pair))) {
                let Ok(graph) = example.replace(wide, narrow).parse::<Graph>() else { continue };
                if graph.verify(Stage::Functional, rule.name).is_err() {
                    continue;
                }
                let (simple, fired) = simplify_by(&graph, &[&theme[i..=i]]).unwrap();
                fired_at_all += usize::from(!fired.is_empty());
                for seed in 0..20 {
                    let mut rng = Rng::new(seed);
                    let inputs: Vec<_> =
                        graph.inputs.iter().map(|&v| special_argument(&mut rng, graph.ty(v))).collect();
                    let evaluator = Evaluator::default();
                    let want = evaluator.run(&graph, &inputs).unwrap();
                    let difference = want.difference(&evaluator.run(&simple, &inputs).unwrap(), 0.0);
                    assert_eq!(difference, None, "{}: {}\n{graph}{inputs:?}", rule.name, rule.law);
                }
            }
        }
    }
    assert!(fired_at_all > 50, "rules fired {fired_at_all} times");
}

const NARROW: [(&str, &str); 8] = [
    ("f32", "f16"),
    ("f32", "bf16"),
    ("f32", "u8"),
    ("f32", "i8"),
    ("i64", "u8"),
    ("i64", "i8"),
    ("i64", "i16"),
    ("i64", "i32"),
];
