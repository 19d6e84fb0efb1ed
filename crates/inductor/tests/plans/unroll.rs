//! Loops that take several vectors at a time give the bits of those that take one.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_inductor::{C, Lowered, Options, lower};
use kiln_ir::Graph;
use kiln_ir::math::c::Isa;
use kiln_testkit::{Argument, Array, Data};
use support::{Random, best_isa, bits, check_run};

/// Some graphs of an odd number of columns: pointwise in one loop and in stages, rows with sums of dear values, columns,
/// loads by index, masks, narrow types and what is written back.
fn graphs(n: usize) -> Vec<String> {
    vec![
        format!(
            "graph(%0: f32[3, {n}], %1: f32[{n}]) {{
  %2 = expand(%1) {{shape: [3, {n}]}} : f32[3, {n}]
  %3 = add(%0, %2) : f32[3, {n}]
  %4 = tanh(%3) : f32[3, {n}]
  write %0 <- %4
  return %4
}}"
        ),
        format!(
            "graph(%0: f32[{n}], %1: f32[{n}]) {{
  %2 = tanh(%0) : f32[{n}]
  %3 = erf(%2) : f32[{n}]
  %4 = mul(%3, %1) : f32[{n}]
  %5 = exp(%4) : f32[{n}]
  %6 = gt(%5, %0) : bool[{n}]
  %7 = sin(%5) : f32[{n}]
  %8 = where(%6, %7, %1) : f32[{n}]
  return %8, %6
}}"
        ),
        format!(
            "graph(%0: f32[5, {n}]) {{
  %1 = amax(%0) {{dims: [1], keepdim: false}} : f32[5]
  %2 = reshape(%1) {{shape: [5, 1]}} : f32[5, 1]
  %3 = expand(%2) {{shape: [5, {n}]}} : f32[5, {n}]
  %4 = sub(%0, %3) : f32[5, {n}]
  %5 = exp(%4) : f32[5, {n}]
  %6 = sum(%5) {{dims: [1], keepdim: false}} : f32[5]
  %7 = reshape(%6) {{shape: [5, 1]}} : f32[5, 1]
  %8 = expand(%7) {{shape: [5, {n}]}} : f32[5, {n}]
  %9 = div(%5, %8) : f32[5, {n}]
  return %9
}}"
        ),
        format!(
            "graph(%0: f64[7, {n}]) {{
  %1 = sum(%0) {{dims: [0], keepdim: false}} : f64[{n}]
  %2 = expand(%1) {{shape: [7, {n}]}} : f64[7, {n}]
  %3 = sub(%0, %2) : f64[7, {n}]
  %4 = exp(%3) : f64[7, {n}]
  return %4
}}"
        ),
        format!(
            "graph(%0: f16[4, {n}], %1: i64[4, {n}]) {{
  %2 = gather(%0, %1) {{dim: 0}} : f16[4, {n}]
  %3 = to(%2) {{dtype: f32}} : f32[4, {n}]
  %4 = exp(%3) : f32[4, {n}]
  %5 = to(%4) {{dtype: bf16}} : bf16[4, {n}]
  return %5
}}"
        ),
    ]
}

#[test]
fn several_vectors_give_the_bits_of_one() {
    let isas = [best_isa(), best_isa().max(Isa::Avx2), Isa::Plain];
    for (i, n) in [1, 31, 1091].into_iter().enumerate() {
        for (text, &isa) in graphs(n).iter().zip(isas.iter().cycle().skip(i)) {
            let graph: Graph = text.parse().unwrap();
            let mut inputs = Random(n as u64).inputs(&graph);
            for input in &mut inputs {
                if let Argument::Tensor(Array { data: Data::Int(data), .. }) = input {
                    data.iter_mut().for_each(|x| *x = x.rem_euclid(4));
                }
            }
            let one = bits(&graph, &Options::dense(&graph, C::new(isa)), &inputs);
            for vectors in [2, 4] {
                let options = Options::dense(&graph, C { unroll: vectors, ..C::new(isa) });
                let code = lower(&graph, &options).unwrap().code;
                let by = format!("_by{vectors}(j, KILN_LANES");
                assert!(code.iter().any(|kernel| kernel.code.contains(&by)), "{text}");
                assert_eq!(bits(&graph, &options, &inputs), one, "{vectors} on {isa:?}: {text}");
            }
            check_run(&graph, &Options::dense(&graph, C { unroll: 4, ..C::new(isa) }), &inputs);
        }
    }
}

/// Where lanes may meet, or go by each other's results, there is one vector at a time.
#[test]
fn ordered_loops_take_one_vector() {
    let texts = [
        "graph(%0: f32[5], %1: i64[90], %2: f32[90]) {
  %3 = index_add(%0, %1, %2) {dim: 0} : f32[5]
  return %3
}",
        "graph(%0: f32[3, 90]) {
  %1 = exp(%0) : f32[3, 90]
  %2 = cumsum(%1) {dim: 1, reverse: false} : f32[3, 90]
  return %2
}",
    ];
    for text in texts {
        let graph: Graph = text.parse().unwrap();
        let options = Options::dense(&graph, C { unroll: 4, ..C::new(best_isa()) });
        let Lowered { plan, code } = lower(&graph, &options).unwrap();
        let ordered: Vec<_> =
            plan.kernels.iter().zip(&code).filter(|(kernel, _)| kernel.is_ordered()).collect();
        assert_eq!(ordered.len(), 1, "{plan}");
        assert!(!ordered[0].1.code.contains("_by4"), "{}", ordered[0].1.code);
    }
}
