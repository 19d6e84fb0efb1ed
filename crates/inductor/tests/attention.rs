//! Batched products, and chains of products and kernels that run in bands of rows.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

mod support;

use kiln_inductor::{BatchRef, Plan, Step};
use support::{check_strided, check_text};

/// The operands of a plan's batched products.
fn operands(plan: &Plan) -> Vec<BatchRef> {
    let of = |step: &'_ Step| match step {
        Step::Bmm { lhs, rhs, .. } => vec![lhs.clone(), rhs.clone()],
        _ => vec![],
    };
    plan.steps.iter().flat_map(of).collect()
}

#[test]
fn batched_products_are_steps() {
    for dtype in ["f32", "f64"] {
        for (b, m, n, k) in [(1, 1, 1, 1), (3, 5, 7, 2), (4, 33, 17, 40), (2, 3, 4, 0)] {
            let plan = check_text(&format!(
                "graph(%0: {dtype}[{b}, {m}, {k}], %1: {dtype}[{b}, {k}, {n}]) {{
  %2 = bmm(%0, %1) : {dtype}[{b}, {m}, {n}]
  return %2
}}"
            ));
            assert!(matches!(plan.steps[..], [Step::Bmm { .. }]), "{:?}", plan.steps);
        }
    }
    // Nothing to compute.
    let plan = check_text(
        "graph(%0: f32[0, 3, 2], %1: f32[0, 2, 5]) {
  %2 = bmm(%0, %1) : f32[0, 3, 5]
  return %2
}",
    );
    assert!(plan.steps.is_empty());
}

#[test]
fn heads_are_read_where_they_lie() {
    // Queries and keys are columns of one matrix, and keys are shared by pairs of heads.
    let plan = check_text(
        "graph(%0: f32[22, 10], %1: f32[10, 24]) {
  %2 = mm(%0, %1) : f32[22, 24]
  %3 = reshape(%2) {shape: [2, 11, 24]} : f32[2, 11, 24]
  %4 = slice(%3) {dim: 2, start: 0, end: 16, step: 1} : f32[2, 11, 16]
  %5 = reshape(%4) {shape: [2, 11, 4, 4]} : f32[2, 11, 4, 4]
  %6 = permute(%5) {dims: [0, 2, 1, 3]} : f32[2, 4, 11, 4]
  %7 = reshape(%6) {shape: [8, 11, 4]} : f32[8, 11, 4]
  %8 = slice(%3) {dim: 2, start: 16, end: 24, step: 1} : f32[2, 11, 8]
  %9 = reshape(%8) {shape: [2, 11, 2, 4]} : f32[2, 11, 2, 4]
  %10 = permute(%9) {dims: [0, 2, 1, 3]} : f32[2, 2, 11, 4]
  %11 = reshape(%10) {shape: [2, 2, 1, 11, 4]} : f32[2, 2, 1, 11, 4]
  %12 = expand(%11) {shape: [2, 2, 2, 11, 4]} : f32[2, 2, 2, 11, 4]
  %13 = reshape(%12) {shape: [2, 4, 11, 4]} : f32[2, 4, 11, 4]
  %14 = permute(%13) {dims: [0, 1, 3, 2]} : f32[2, 4, 4, 11]
  %15 = reshape(%14) {shape: [8, 4, 11]} : f32[8, 4, 11]
  %16 = bmm(%7, %15) : f32[8, 11, 11]
  return %16
}",
    );
    assert!(matches!(plan.steps[..], [Step::Gemm { .. }, Step::Bmm { .. }]), "{:?}", plan.steps);
    let [queries, keys] = &operands(&plan)[..] else { panic!("{:?}", plan.steps) };
    assert_eq!((&queries.sizes[..], &queries.strides[..]), (&[2, 4][..], &[264, 4][..]));
    assert_eq!((queries.matrix.row, queries.matrix.column), (24, 1));
    assert_eq!((&keys.sizes[..], &keys.strides[..]), (&[2, 2, 2][..], &[264, 4, 0][..]));
    assert_eq!((keys.matrix.row, keys.matrix.column, keys.matrix.at.offset), (1, 24, 16));
    // Neither rows nor columns of neighbours: a copy is better.
    let text = "graph(%0: f32[2, 3, 6, 5], %1: f32[6, 5, 4]) {
  %2 = reshape(%0) {shape: [6, 6, 5]} : f32[6, 6, 5]
  %3 = permute(%2) {dims: [0, 2, 1]} : f32[6, 5, 6]
  %4 = bmm(%3, %2) : f32[6, 5, 5]
  %5 = bmm(%2, %1) : f32[6, 6, 4]
  return %4, %5
}";
    let steps = |plan: Plan| plan.steps.iter().map(|s| matches!(s, Step::Bmm { .. })).collect::<Vec<_>>();
    assert_eq!(steps(check_text(text)), [true, true]);
    // Permuted batches are two dims; elements that lie far apart are brought together.
    assert_eq!(steps(check_strided(text, &[(0, &[30, 60, 5, 1])])), [true, true]);
    assert_eq!(steps(check_strided(text, &[(0, &[1, 60, 10, 2])])), [false, true, true]);
    assert_eq!(steps(check_strided(text, &[(0, &[0, 30, 1, 6]), (1, &[0, 0, 1])])), [true, true]);
}
