//! Scatters that no compiler wants are library steps again; what a product makes is what surrounds one.
#![allow(clippy::unwrap_used, reason = "a test")]

use kiln_inductor::{C, Options, lower, lower_without};
use kiln_ir::math::c::Isa;
use kiln_ir::{Graph, Op};
use kiln_plan::{Plan, Step};

fn library(plan: &Plan) -> Vec<&'static str> {
    let name = |step: &Step| match step {
        Step::Call(call) if call.product().is_none() => Some(call.op.name()),
        _ => None,
    };
    plan.steps.iter().filter_map(name).collect()
}

#[test]
fn a_refused_kernel_that_scatters_is_a_library_step() {
    let graph: Graph = "graph(%0: f32[30, 8], %1: f32[8, 80], %2: i64[50], %3: f32[50, 80]) {
  %4 = mm(%0, %1) : f32[30, 80]
  %5 = exp(%3) : f32[50, 80]
  %6 = index_add(%4, %2, %5) {dim: 0} : f32[30, 80]
  %7 = tanh(%6) : f32[30, 80]
  return %7
}"
    .parse()
    .unwrap();
    let options = Options::dense(&graph, C::new(Isa::Avx2));
    let lowered = lower(&graph, &options).unwrap();
    let plan = &lowered.plan;
    assert_eq!(library(plan), Vec::<&str>::new());
    // The product goes where the scatter adds to it: a product, a scatter, what comes after.
    assert_eq!(plan.steps.len(), 3);
    let scatters =
        plan.kernels.iter().position(|kernel| kernel.stores.iter().any(|store| store.adds)).unwrap();
    let scatters = &lowered.code[scatters];
    let without = lower_without(&graph, &options, std::slice::from_ref(&scatters.name)).unwrap();
    assert_eq!(library(&without.plan), [Op::IndexAdd { dim: 0 }.name()]);
    assert!(without.code.iter().all(|kernel| kernel.name != scatters.name));
}

#[test]
fn many_elements_in_few_columns_stay_with_the_library() {
    let graph: Graph = "graph(%0: f32[1000], %1: i64[40000], %2: f32[40000]) {
  %3 = index_add(%0, %1, %2) {dim: 0} : f32[1000]
  return %3
}"
    .parse()
    .unwrap();
    let plan = lower(&graph, &Options::dense(&graph, C::new(Isa::Avx2))).unwrap().plan;
    assert_eq!(library(&plan), ["index_add"]);
    let why: Vec<String> = plan.report.why_not.iter().map(ToString::to_string).collect();
    assert!(why.iter().any(|why| why.contains("too few for threads to share")), "{why:?}");
}
