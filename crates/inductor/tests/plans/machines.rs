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

fn options(graph: &Graph, machine: Machine) -> Options {
    Options::dense(graph, C { machine, ..C::new(machine.isa) })
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
        let usual = options(&graph, Machine::with(best_isa()));
        let Lowered { plan, code } = lower(&graph, &usual).unwrap();
        let texts = |code: &[kiln_inductor::KernelSource]| -> Vec<String> {
            code.iter().map(|kernel| kernel.name.clone()).collect()
        };
        let wanted = bits(&graph, &usual, &inputs);
        for machine in machines() {
            let other = lower(&graph, &options(&graph, machine)).unwrap();
            let same = other.plan == plan && texts(&other.code) == texts(&code);
            assert_eq!(!same, differs, "{machine:?}\n{text}");
            assert!(bits(&graph, &options(&graph, machine), &inputs) == wanted, "{machine:?}\n{text}");
        }
    }
}

#[test]
fn bands_are_as_large_as_the_cache_likes() {
    let rows = |t: usize, s: usize, machine: Machine| -> Vec<usize> {
        let sizes = Sizes { b: 1, t, s, d: 5, v: 7 };
        let graph: Graph = attention("f32", sizes, Mask::None, "", "%90").parse().unwrap();
        let plan = lower(&graph, &options(&graph, machine)).unwrap().plan;
        plan.bands.iter().map(|bands| bands.rows).collect()
    };
    let usual = Machine::with(best_isa());
    let of = |l2: usize| rows(8000, 1500, Machine { l2, ..usual });
    assert_eq!([512 << 10, 1 << 20, 4 << 20].map(of), [[32], [80], [128]]);
    // What lies between the products fits the large machine's cache.
    let [small, large] = machines();
    assert_eq!([small, usual, large].map(|machine| rows(666, 601, machine).len()), [1, 1, 0]);
}
