//! Kernels that reduce along rows and over rows at once, compared with the naive evaluator.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_inductor::{C, Options, lower};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Graph};
use kiln_plan::Plan;
use support::{Random, best_isa, check_run};

fn check(text: &str, isa: Isa) -> Plan {
    let graph: Graph = text.parse().unwrap();
    let inputs = Random(7).inputs(&graph);
    check_run(&graph, &Options::dense(&graph, C::new(isa)), &inputs)
}

fn has_parts(plan: &Plan) -> bool {
    plan.kernels.iter().any(|kernel| kernel.parts.is_some())
}

/// A softmax of rows, and sums over rows of what goes in and of what comes out.
pub fn softmax(rows: usize, n: usize, dtype: DType) -> String {
    let (whole, each, columns) =
        (format!("{dtype}[{rows}, {n}]"), format!("{dtype}[{rows}]"), format!("{dtype}[{n}]"));
    format!(
        "graph(%0: {whole}, %1: {columns}) {{
  %2 = amax(%0) {{dims: [1], keepdim: false}} : {each}
  %3 = reshape(%2) {{shape: [{rows}, 1]}} : {dtype}[{rows}, 1]
  %4 = expand(%3) {{shape: [{rows}, {n}]}} : {whole}
  %5 = sub(%0, %4) : {whole}
  %6 = exp(%5) : {whole}
  %7 = sum(%6) {{dims: [1], keepdim: false}} : {each}
  %8 = reshape(%7) {{shape: [{rows}, 1]}} : {dtype}[{rows}, 1]
  %9 = expand(%8) {{shape: [{rows}, {n}]}} : {whole}
  %10 = div(%6, %9) : {whole}
  %11 = sum(%10) {{dims: [0], keepdim: false}} : {columns}
  %12 = mul(%11, %1) : {columns}
  %13 = amax(%0) {{dims: [0], keepdim: false}} : {columns}
  %14 = sum(%0) {{dims: [0], keepdim: false}} : {columns}
  return %10, %12, %13, %14
}}"
    )
}

#[test]
fn rows_and_columns_of_a_matrix_are_one_kernel() {
    let best = best_isa();
    for (rows, n, dtype, isa) in [
        (1400, 513, DType::F32, Isa::Plain),
        (1400, 300, DType::F64, best),
        (8400, 140, DType::F16, best),
        (8200, 131, DType::BF16, best.max(Isa::Avx2)),
    ] {
        let plan = check(&softmax(rows, n, dtype), isa);
        assert!(has_parts(&plan), "{rows} x {n}");
        assert_eq!(plan.steps.len(), 2, "{rows} x {n}");
    }
}

/// Where operands stay in the cache, rows are few or short, or lie across, kernels stay apart.
#[test]
fn small_and_narrow_matrices_are_reduced_apart() {
    for (rows, n) in [(300, 100), (100, 3000), (40_000, 15)] {
        let graph: Graph = softmax(rows, n, DType::F32).parse().unwrap();
        let options = Options::dense(&graph, C::new(best_isa()));
        assert!(!has_parts(&lower(&graph, &options).unwrap().plan), "{rows} x {n}");
    }
    let graph: Graph = softmax(2000, 400, DType::F32).parse().unwrap();
    let mut options = Options::dense(&graph, C::new(best_isa()));
    let mut layouts = options.input_layouts.to_vec();
    layouts[0].strides = [1, 2000].into_iter().collect();
    options.input_layouts = layouts.into();
    let inputs = Random(3).inputs(&graph);
    check_run(&graph, &options, &inputs);
}

/// A square matrix: sums of rows and of columns have the same shape.
#[test]
fn squares() {
    let plan = check(
        "graph(%0: f32[1056, 1056], %1: i64[736, 736]) {
  %2 = sum(%0) {dims: [1], keepdim: false} : f32[1056]
  %3 = sum(%0) {dims: [0], keepdim: false} : f32[1056]
  %4 = add(%2, %2) : f32[1056]
  %5 = amax(%1) {dims: [0], keepdim: false} : i64[736]
  %6 = sum(%1) {dims: [1], keepdim: false} : i64[736]
  return %4, %3, %5, %6
}",
        best_isa(),
    );
    assert!(has_parts(&plan));
    assert_eq!(plan.steps.len(), 4);
    // A sum over rows that is needed for the rows comes before them.
    check(
        "graph(%0: f64[736, 736]) {
  %1 = amax(%0) {dims: [0], keepdim: false} : f64[736]
  %2 = expand(%1) {shape: [736, 736]} : f64[736, 736]
  %3 = sub(%0, %2) : f64[736, 736]
  %4 = sum(%3) {dims: [1], keepdim: false} : f64[736]
  return %1, %3, %4
}",
        best_isa(),
    );
}

/// A matrix that is changed by its own gradient in place.
#[test]
fn write_backs() {
    let plan = check(
        "graph(%0: f32[2200, 500], %1: f32[500]) {
  %2 = sum(%0) {dims: [1], keepdim: false} : f32[2200]
  %3 = reshape(%2) {shape: [2200, 1]} : f32[2200, 1]
  %4 = expand(%3) {shape: [2200, 500]} : f32[2200, 500]
  %5 = sub(%0, %4) : f32[2200, 500]
  %6 = sum(%0) {dims: [0], keepdim: false} : f32[500]
  %7 = sub(%1, %6) : f32[500]
  write %0 <- %5
  write %1 <- %7
  return
}",
        best_isa(),
    );
    assert!(has_parts(&plan));
}
