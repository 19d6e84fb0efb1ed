//! What programs write into their inputs: whole tensors, elements of lists, windows, rows.

use kiln_inductor::{C, Options, lower};
use kiln_ir::{Graph, Op};
use kiln_plan::{BufferId, BufferRef, Call, Place, Step};
use kiln_testkit::{Argument, Array, Data};

use crate::support::{Random, best_isa, check_run, check_strided, check_text};

#[test]
fn write_backs_in_place_and_not() {
    // Same place: in the kernel itself.
    let plan = check_text(
        "graph(%0: f32[6, 6], %1: f32[6, 6]) {
  %2 = add(%0, %1) : f32[6, 6]
  write %0 <- %2
  return
}",
    );
    assert_eq!((plan.steps.len(), plan.arena_bytes), (1, 0));
    // Another place: through a temporary.
    let plan = check_text(
        "graph(%0: f32[6, 6]) {
  %1 = permute(%0) {dims: [1, 0]} : f32[6, 6]
  %2 = exp(%1) : f32[6, 6]
  write %0 <- %2
  return %1
}",
    );
    assert!(matches!(plan.steps.last(), Some(Step::Call(Call { op: Op::Clone {}, .. }))));
    // Read by a product as well: the product comes first.
    let plan = check_text(
        "graph(%0: f32[6, 6], %1: f32[6, 6]) {
  %2 = sub(%0, %1) : f32[6, 6]
  %3 = mm(%0, %1) : f32[6, 6]
  write %0 <- %2
  return %3
}",
    );
    assert!(matches!(plan.steps[..], [Step::Call(Call { op: Op::Mm {}, .. }), Step::Launch(_)]));
    // A normalised row that overwrites its input.
    check_text(
        "graph(%0: f32[6, 40]) {
  %1 = sum(%0) {dims: [1], keepdim: false} : f32[6]
  %2 = reshape(%1) {shape: [6, 1]} : f32[6, 1]
  %3 = expand(%2) {shape: [6, 40]} : f32[6, 40]
  %4 = sub(%0, %3) : f32[6, 40]
  %5 = exp(%0) : f32[6, 40]
  %6 = add(%5, %3) : f32[6, 40]
  write %0 <- %4
  return %6
}",
    );
}

#[test]
fn lists() {
    let text = |a: &str| {
        format!(
            "graph(%0: f32[4, 6], %1: f64[7], %2: f32[4, 6], %3: f64[7], %4: float) {{
  %5 = list(%0, %1) : list(1 x f32[4, 6], 1 x f64[7])
  %6 = list(%2, %3) : list(1 x f32[4, 6], 1 x f64[7])
  %7 = foreach_mul(%6, %4) : list(1 x f32[4, 6], 1 x f64[7])
  %8 = foreach_{a}(%5, %7) : list(1 x f32[4, 6], 1 x f64[7])
  %9 = list_get(%8) {{index: 0}} : f32[4, 6]
  %10 = list_get(%8) {{index: 1}} : f64[7]
  write %0 <- %9
  write %1 <- %10
  return
}}"
        )
    };
    // Two dtypes: two kernels, everything in place.
    let plan = check_text(&text("add"));
    assert_eq!((plan.kernels.len(), plan.arena_bytes), (2, 0));
    assert!(plan.buffers.iter().all(|b| matches!(b.place, Place::Input(_))));
    // Equally permuted rows are dense, too; unequal ones get a kernel of their own.
    let plan = check_strided(&text("sub"), &[(0, &[1, 4]), (2, &[1, 4])]);
    assert_eq!(plan.kernels.len(), 2);
    check_strided(&text("maximum"), &[(0, &[1, 4])]);
}

/// Elements that are written back name their list; what else happens to them decides where they go.
#[test]
fn elements_of_lists_are_written_back() {
    let text = |rest: &str| {
        format!(
            "graph(%0: f32[4, 6], %1: f32[4, 6], %2: f32[4, 6]) {{
  %3 = list(%0, %1) : list(2 x f32[4, 6])
  %4 = list(%1, %2) : list(2 x f32[4, 6])
  %5 = foreach_sub(%3, %4) : list(2 x f32[4, 6])
{rest}
}}"
        )
    };
    // %0 is read where it is written, %1 in another row as well: it waits in a temporary.
    let plan = check_text(&text("  write %0 <- %5[0]\n  write %1 <- %5[1]\n  return"));
    assert_eq!((plan.kernels.len(), plan.steps.len()), (1, 2));
    assert_eq!(plan.arena_bytes, (4 * 4 * 6_usize).next_multiple_of(64));
    // The temporary lies as what it is copied to.
    let turned: &[(usize, &[isize])] = &[(0, &[1, 4]), (1, &[1, 4]), (2, &[1, 4])];
    let plan = check_strided(&text("  write %0 <- %5[0]\n  write %1 <- %5[1]\n  return"), turned);
    assert_eq!((plan.kernels.len(), plan.steps.len()), (1, 2));
    check_strided(
        &text("  %6 = list_get(%5) {index: 1} : f32[4, 6]\n  write %0 <- %5[0]\n  write %1 <- %6\n  return"),
        turned,
    );
    // Lying differently, a row has a kernel of its own, and the places of the others move up.
    for strides in [(0, &[1, 4][..]), (1, &[1, 4]), (2, &[1, 4])] {
        check_strided(&text("  write %0 <- %5[0]\n  write %1 <- %5[1]\n  return"), &[strides]);
        check_strided(&text("  write %2 <- %5[1]\n  return"), &[strides]);
    }
    // Written twice, or read besides: such an element is a value of its own.
    for strides in [&[][..], turned] {
        check_strided(&text("  write %0 <- %5[1]\n  write %1 <- %5[1]\n  return"), strides);
        check_strided(
            &text(
                "  %6 = list_get(%5) {index: 1} : f32[4, 6]\n  %7 = exp(%6) : f32[4, 6]\n  write %2 <- %5[1]\n  return %7",
            ),
            strides,
        );
        // An element of a list that was only packed is the tensor itself.
        check_strided(&text("  write %0 <- %3[1]\n  write %1 <- %3[0]\n  return"), strides);
    }
}

/// A row of a cache goes straight into the input: nothing else of it is touched, and what reads it comes later.
#[test]
fn windows_of_inputs_are_filled_in_place() {
    let cache = |rest: &str, results: &str| {
        format!(
            "graph(%0: f32[3, 9, 4], %1: f32[3, 2, 4], %2: i64[3]) {{
  %3 = exp(%1) : f32[3, 2, 4]
  %4 = slice_scatter(%0, %3) {{dim: 1, start: 5, end: 9, step: 2}} : f32[3, 9, 4]
  %5 = slice(%4) {{dim: 1, start: 4, end: 9, step: 1}} : f32[3, 5, 4]
{rest}
  write %0 <- %4
  return {results}
}}"
        )
    };
    let stores = |text: &str| -> usize {
        let plan = check_text(text);
        let is_cache = |b: &BufferRef| matches!(plan.buffers[b.buffer.index()].place, Place::Input(0));
        assert_eq!(plan.arena_bytes, 0, "{text}");
        assert!(plan.report.bytes() < 2 * 3 * 9 * 4 * 4 + 3 * 2 * 4 * 4 * 2, "{text}");
        plan.steps
            .iter()
            .filter(|s| matches!(s, Step::Launch(launch) if launch.bufs.iter().any(is_cache)))
            .count()
    };
    assert_eq!(stores(&cache("  %6 = sum(%5) {dims: [2], keepdim: false} : f32[3, 5]", "%6")), 2);
    assert_eq!(stores(&cache("", "")), 1);
    // Somebody reads the old contents; the new ones leave, too; another input gets them; a step after it may fail.
    for (rest, results) in [
        ("  %6 = sum(%0) {dims: [2], keepdim: false} : f32[3, 9]\n  %7 = add(%6, %6) : f32[3, 9]", "%7"),
        ("  %6 = reshape(%4) {shape: [27, 4]} : f32[27, 4]", "%6"),
        (
            "  %6 = sum(%5) {dims: [1, 2], keepdim: false} : f32[3]\n  %7 = gather(%6, %2) {dim: 0} : f32[3]",
            "%7",
        ),
    ] {
        check_text(&cache(rest, results));
    }
    let graph: Graph = cache(
        "  %6 = sum(%5) {dims: [1, 2], keepdim: false} : f32[3]\n  %7 = gather(%6, %2) {dim: 0} : f32[3]",
        "%7",
    )
    .parse()
    .unwrap();
    let mut inputs = Random(1).inputs(&graph);
    if let Argument::Tensor(Array { data: Data::Int(at), .. }) = &mut inputs[2] {
        at[1] = 7;
    }
    check_run(&graph, &Options::dense(&graph, C::new(best_isa())), &inputs);
}

/// Rows that go into inputs by one index are written there; by two, either of which may be out of range, they wait.
#[test]
fn rows_by_an_index_go_into_inputs() {
    let rows = |second: &str| -> (usize, usize) {
        let text = format!(
            "graph(%0: f32[3, 9, 4], %1: f32[3, 9, 4], %2: i64[1], %3: i64[1], %4: f32[3, 1, 4]) {{
  %5 = index_copy(%0, %2, %4) {{dim: 1}} : f32[3, 9, 4]
  %6 = sum(%5) {{dims: [1], keepdim: false}} : f32[3, 4]
  %7 = reshape(%6) {{shape: [3, 1, 4]}} : f32[3, 1, 4]
  %8 = index_copy(%1, {second}, %7) {{dim: 1}} : f32[3, 9, 4]
  %9 = sum(%8) {{dims: [1], keepdim: false}} : f32[3, 4]
  write %0 <- %5
  write %1 <- %8
  return %9
}}"
        );
        let graph: Graph = text.parse().unwrap();
        let plan = lower(&graph, &Options::dense(&graph, C::new(best_isa()))).unwrap().plan;
        let is_input = |b: BufferId| matches!(plan.buffers[b.index()].place, Place::Input(_));
        let in_place = |s: &&Step| matches!(s, Step::Call(call) if !matches!(call.op, Op::Clone {}) && is_input(call.outs[0].at.buffer));
        (plan.steps.iter().filter(in_place).count(), plan.steps.len())
    };
    assert_eq!(rows("%2"), (2, 4));
    assert_eq!(rows("%3").0, 0);
}
