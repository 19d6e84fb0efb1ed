//! Plans for machines with other caches: they differ, and give the same bits.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

use crate::attention::{Mask, Sizes, attention};
use crate::folds::softmax;
use crate::support::{Random, best_isa, bits};

use kiln_inductor::{C, Lowered, Options, lower};
use kiln_ir::{DType, Graph};
use kiln_plan::Machine;

/// A small machine and a large one.
fn machines() -> [Machine; 2] {
    let usual = Machine::with(best_isa());
    [
        Machine { l1: 16 << 10, l2: 128 << 10, l3: 512 << 10, ..usual },
        Machine { l1: 192 << 10, l2: 16 << 20, l3: 128 << 20, cores: 64, ..usual },
    ]
}

/// A convolution, then functions in several stages.
const CONVOLUTION: &str = "graph(%0: f32[2, 3, 40, 50], %1: f32[5, 3, 3, 3]) {
  %2 = convolution(%0, %1) {stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1} : f32[2, 5, 40, 50]
  %3 = tanh(%2) : f32[2, 5, 40, 50]
  %4 = exp(%3) : f32[2, 5, 40, 50]
  %5 = sin(%4) : f32[2, 5, 40, 50]
  %6 = tanh(%5) : f32[2, 5, 40, 50]
  %7 = exp(%6) : f32[2, 5, 40, 50]
  return %7
}";

#[test]
fn no_bit_depends_on_the_caches() {
    let bands = Sizes { b: 2, t: 333, s: 601, d: 5, v: 7 };
    // By graph, whether its plan or its text is another on both machines.
    let graphs = [
        (CONVOLUTION.to_string(), true),
        (attention("f32", bands, Mask::Causal, "", "%90"), true),
        (attention("f64", bands, Mask::None, "", "%90"), true),
        // Folds, rows that later passes find in scratch or compute again; sums in chunks, which are the same everywhere.
        (softmax(1400, 513, DType::F32), true),
        (softmax(130, 9000, DType::F32), true),
        (softmax(8400, 140, DType::F16), true),
        (softmax(3, 40_000, DType::F64), false),
    ];
    for (text, differs) in graphs {
        let graph: Graph = text.parse().unwrap();
        let inputs = Random(11).inputs(&graph);
        let options = |machine: Machine| Options::dense(&graph, C { machine, ..C::new(machine.isa) });
        let usual = options(Machine::with(best_isa()));
        let Lowered { plan, code } = lower(&graph, &usual).unwrap();
        let texts = |code: &[kiln_inductor::KernelSource]| -> Vec<String> {
            code.iter().map(|kernel| kernel.name.clone()).collect()
        };
        let wanted = bits(&graph, &usual, &inputs);
        for machine in machines() {
            let other = lower(&graph, &options(machine)).unwrap();
            let same = other.plan == plan && texts(&other.code) == texts(&code);
            assert_eq!(!same, differs, "{machine:?}\n{text}");
            assert!(bits(&graph, &options(machine), &inputs) == wanted, "{machine:?}\n{text}");
        }
    }
}

#[test]
fn bands_are_as_large_as_the_cache_likes() {
    let text = attention("f32", Sizes { b: 2, t: 333, s: 601, d: 5, v: 7 }, Mask::None, "", "%90");
    let graph: Graph = text.parse().unwrap();
    let rows = |machine: Machine| -> Vec<usize> {
        let options = Options::dense(&graph, C { machine, ..C::new(machine.isa) });
        lower(&graph, &options).unwrap().plan.bands.iter().map(|bands| bands.rows).collect()
    };
    let [small, large] = machines();
    // What lies between the products fits the large machine's cache.
    assert_eq!([rows(small), rows(Machine::with(best_isa())), rows(large)], [vec![32], vec![32], vec![]]);
    // Where they could be larger but for every core's share: one matrix of many rows.
    let text = attention("f32", Sizes { b: 1, t: 8000, s: 1500, d: 5, v: 7 }, Mask::None, "", "%90");
    let graph: Graph = text.parse().unwrap();
    let rows = |l2: usize| -> usize {
        let machine = Machine { l2, ..Machine::with(best_isa()) };
        let options = Options::dense(&graph, C { machine, ..C::new(machine.isa) });
        lower(&graph, &options).unwrap().plan.bands[0].rows
    };
    assert_eq!([256 << 10, 512 << 10, 1 << 20, 4 << 20].map(rows), [32, 32, 80, 128]);
}
