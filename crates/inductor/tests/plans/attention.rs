//! Batched products, and chains of products and kernels that run in bands of rows.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_ir::{DType, Op};
use kiln_plan::{Call, Place, Plan, Step, ViewRef};
use support::{check_strided, check_text};

/// The operands of a plan's batched products.
fn operands(plan: &Plan) -> Vec<ViewRef> {
    let of = |step: &'_ Step| match step {
        Step::Call(call) if is_batched(step) => call.args.clone(),
        _ => vec![],
    };
    plan.steps.iter().flat_map(of).collect()
}

fn is_batched(step: &Step) -> bool {
    matches!(step, Step::Call(Call { op: Op::Bmm {}, .. }))
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
            assert!(plan.steps.len() == 1 && is_batched(&plan.steps[0]), "{:?}", plan.steps);
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

/// A product in f32 of halves reads the halves, however they are turned on the way.
#[test]
fn products_read_halves() {
    for half in ["f16", "bf16"] {
        let plan = check_text(&format!(
            "graph(%0: {half}[3, 5, 8], %1: {half}[9, 8], %2: {half}[9], %3: {half}[2, 8, 9]) {{
  %4 = to(%0) {{dtype: f32}} : f32[3, 5, 8]
  %5 = reshape(%4) {{shape: [15, 8]}} : f32[15, 8]
  %6 = to(%1) {{dtype: f32}} : f32[9, 8]
  %7 = permute(%6) {{dims: [1, 0]}} : f32[8, 9]
  %8 = mm(%5, %7) : f32[15, 9]
  %9 = to(%2) {{dtype: f32}} : f32[9]
  %10 = expand(%9) {{shape: [15, 9]}} : f32[15, 9]
  %11 = add(%8, %10) : f32[15, 9]
  %12 = to(%11) {{dtype: {half}}} : {half}[15, 9]
  %13 = reshape(%12) {{shape: [1, 15, 9]}} : {half}[1, 15, 9]
  %14 = expand(%13) {{shape: [2, 15, 9]}} : {half}[2, 15, 9]
  %15 = permute(%3) {{dims: [0, 2, 1]}} : {half}[2, 9, 8]
  %16 = bmm(%14, %15) : {half}[2, 15, 8]
  %17 = to(%14) {{dtype: f32}} : f32[2, 15, 9]
  %18 = to(%3) {{dtype: f32}} : f32[2, 8, 9]
  %19 = permute(%18) {{dims: [0, 2, 1]}} : f32[2, 9, 8]
  %20 = bmm(%17, %19) : f32[2, 15, 8]
  %21 = exp(%17) : f32[2, 15, 9]
  %22 = bmm(%21, %19) : f32[2, 15, 8]
  return %12, %16, %20, %22
}}"
        ));
        let calls = plan.steps.iter().filter_map(|step| match step {
            Step::Call(call) => Some((call.op.name(), call.args[0].ty.dtype, call.args[1].ty.dtype)),
            _ => None,
        });
        let dtype = if half == "f16" { DType::F16 } else { DType::BF16 };
        // One may be f32 in a batched product.
        let expected = [("bmm", DType::F32), ("bmm", dtype), ("bmm", dtype), ("mm", dtype)];
        let mut calls: Vec<_> = calls.collect();
        calls.sort_by_key(|&(name, lhs, _)| (name, lhs != DType::F32));
        assert_eq!(calls, expected.map(|(name, lhs)| (name, lhs, dtype)));
    }
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
    assert!(
        plan.steps.len() == 2 && !is_batched(&plan.steps[0]) && is_batched(&plan.steps[1]),
        "{:?}",
        plan.steps
    );
    let [queries, keys] = &operands(&plan)[..] else { panic!("{:?}", plan.steps) };
    assert_eq!((&queries.ty.shape[..2], &queries.strides[..]), (&[2, 4][..], &[264, 4, 24, 1][..]));
    assert_eq!((&keys.ty.shape[..3], &keys.strides[..]), (&[2, 2, 2][..], &[264, 4, 0, 1, 24][..]));
    assert_eq!(keys.at.offset, 16);
    // Neither rows nor columns of neighbours: a copy is better.
    let text = "graph(%0: f32[2, 3, 6, 5], %1: f32[6, 5, 4]) {
  %2 = reshape(%0) {shape: [6, 6, 5]} : f32[6, 6, 5]
  %3 = permute(%2) {dims: [0, 2, 1]} : f32[6, 5, 6]
  %4 = bmm(%3, %2) : f32[6, 5, 5]
  %5 = bmm(%2, %1) : f32[6, 6, 4]
  return %4, %5
}";
    let steps = |plan: Plan| plan.steps.iter().map(is_batched).collect::<Vec<_>>();
    assert_eq!(steps(check_text(text)), [true, true]);
    // Permuted batches are two dims; elements that lie far apart are brought together.
    assert_eq!(steps(check_strided(text, &[(0, &[30, 60, 5, 1])])), [true, true]);
    assert_eq!(steps(check_strided(text, &[(0, &[1, 60, 10, 2])])), [false, true, true]);
    assert_eq!(steps(check_strided(text, &[(0, &[0, 30, 1, 6]), (1, &[0, 0, 1])])), [true, true]);
}

/// Sizes of an attention: matrices, queries, keys, and the length of each and of values.
#[derive(Copy, Clone, Debug)]
pub struct Sizes {
    pub b: usize,
    pub t: usize,
    pub s: usize,
    pub d: usize,
    pub v: usize,
}

/// Which keys a query sees.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Mask {
    None,
    Causal,
    Given,
    Added,
}

/// softmax(mask(q · kᵀ / 2)) · v in prims. Lines that come before the second product are `between`.
pub fn attention(
    dtype: &str,
    Sizes { b, t, s, d, v }: Sizes,
    mask: Mask,
    between: &str,
    results: &str,
) -> String {
    let scores = format!("{dtype}[{b}, {t}, {s}]");
    let masked = match mask {
        Mask::None => String::new(),
        Mask::Causal => format!(
            "  %58 = constant() {{value: 0}} : int
  %59 = constant() {{value: 1}} : int
  %60 = arange(%58, %59) {{len: {t}, dtype: i64, device: cpu}} : i64[{t}]
  %61 = arange(%58, %59) {{len: {s}, dtype: i64, device: cpu}} : i64[{s}]
  %62 = reshape(%60) {{shape: [{t}, 1]}} : i64[{t}, 1]
  %63 = expand(%62) {{shape: [{t}, {s}]}} : i64[{t}, {s}]
  %64 = expand(%61) {{shape: [{t}, {s}]}} : i64[{t}, {s}]
  %65 = ge(%63, %64) : bool[{t}, {s}]
  %66 = expand(%65) {{shape: [{b}, {t}, {s}]}} : bool[{b}, {t}, {s}]
  %70 = where(%66, %11, %6) : {scores}
"
        ),
        Mask::Given => format!(
            "  %66 = expand(%3) {{shape: [{b}, {t}, {s}]}} : bool[{b}, {t}, {s}]
  %70 = where(%66, %11, %6) : {scores}
"
        ),
        Mask::Added => format!(
            "  %66 = expand(%4) {{shape: [{b}, {t}, {s}]}} : {dtype}[{b}, {t}, {s}]
  %70 = add(%11, %66) : {scores}
"
        ),
    };
    let x = if mask == Mask::None { 11 } else { 70 };
    format!(
        "graph(%0: {dtype}[{b}, {t}, {d}], %1: {dtype}[{b}, {s}, {d}], %2: {dtype}[{b}, {s}, {v}], \
         %3: bool[{t}, {s}], %4: {dtype}[{t}, {s}]) {{
  %9 = permute(%1) {{dims: [0, 2, 1]}} : {dtype}[{b}, {d}, {s}]
  %10 = bmm(%0, %9) : {scores}
  %5 = constant() {{value: 0.5}} : float
  %6 = constant() {{value: -1000000000.0}} : float
  %11 = mul(%10, %5) : {scores}
{masked}  %71 = amax(%{x}) {{dims: [2], keepdim: false}} : {dtype}[{b}, {t}]
  %72 = reshape(%71) {{shape: [{b}, {t}, 1]}} : {dtype}[{b}, {t}, 1]
  %73 = expand(%72) {{shape: [{b}, {t}, {s}]}} : {scores}
  %74 = sub(%{x}, %73) : {scores}
  %75 = exp(%74) : {scores}
  %76 = sum(%75) {{dims: [2], keepdim: false}} : {dtype}[{b}, {t}]
  %77 = reshape(%76) {{shape: [{b}, {t}, 1]}} : {dtype}[{b}, {t}, 1]
  %78 = expand(%77) {{shape: [{b}, {t}, {s}]}} : {scores}
  %79 = div(%75, %78) : {scores}
{between}  %90 = bmm(%79, %2) : {dtype}[{b}, {t}, {v}]
  return {results}
}}"
    )
}

/// The bytes of what is there for one band only, and everything that is there as a whole and has as many elements.
fn between(plan: &Plan, elements: usize) -> (usize, usize) {
    let is_band = |place| matches!(place, Place::Band { .. });
    let banded = plan.buffers.iter().filter(|b| is_band(b.place)).map(|b| b.ty.bytes).sum();
    let whole = |b: &&kiln_plan::BufferPlan| {
        matches!(b.place, Place::Arena { .. } | Place::BeforeOutput { .. }) && b.ty.shape.numel() == elements
    };
    (banded, plan.buffers.iter().filter(whole).count())
}

fn why_not(plan: &Plan) -> String {
    plan.report.why_not.iter().map(|why| format!("{why}\n")).collect()
}

#[test]
fn attention_runs_in_bands() {
    let sizes = [
        Sizes { b: 3, t: 333, s: 301, d: 5, v: 7 },
        // One matrix; a row too many for whole bands; keys of one element.
        Sizes { b: 1, t: 641, s: 640, d: 3, v: 2 },
        Sizes { b: 2, t: 520, s: 270, d: 1, v: 1 },
        // Few rows, of which each is long.
        Sizes { b: 9, t: 5, s: 6000, d: 2, v: 1 },
    ];
    for dtype in ["f32", "f64"] {
        for (i, sizes) in sizes.into_iter().enumerate() {
            for mask in [Mask::None, Mask::Causal, Mask::Given, Mask::Added] {
                if (i > 0 || dtype == "f64") && mask != Mask::Causal {
                    continue;
                }
                let plan = check_text(&attention(dtype, sizes, mask, "", "%90"));
                let Sizes { b, t, s, .. } = sizes;
                let [bands] = &plan.bands[..] else { panic!("{sizes:?} {mask:?} {}", why_not(&plan)) };
                assert_eq!(bands.steps, 3, "{:?}", plan.steps);
                let (banded, whole) = between(&plan, b * t * s);
                assert!(banded >= 2 * b * t * s * 4 && whole == 0, "{sizes:?} {mask:?}");
            }
        }
    }
}

/// Its operands are halves, and its products read them where they lie.
#[test]
fn attention_of_halves_runs_in_bands() {
    let sizes = Sizes { b: 3, t: 333, s: 301, d: 5, v: 7 };
    for half in ["f16", "bf16"] {
        let mut text = attention("f32", sizes, Mask::Causal, "", "%90");
        let mut lines = String::from("{");
        for (i, [rows, columns]) in
            [[sizes.t, sizes.d], [sizes.s, sizes.d], [sizes.s, sizes.v]].iter().enumerate()
        {
            let ty = format!("[{}, {rows}, {columns}]", sizes.b);
            text = text.replace(&format!("%{i}: f32{ty}"), &format!("%20{i}: {half}{ty}"));
            lines += &format!("\n  %{i} = to(%20{i}) {{dtype: f32}} : f32{ty}");
        }
        let plan = check_text(&text.replacen(") {", &format!(") {lines}"), 1));
        let [bands] = &plan.bands[..] else { panic!("{}", why_not(&plan)) };
        assert_eq!((bands.steps, plan.steps.len()), (3, 3), "{:?}", plan.steps);
        assert_eq!(between(&plan, sizes.b * sizes.t * sizes.s).1, 0);
    }
}

#[test]
fn scores_are_never_there_as_a_whole() {
    let sizes = Sizes { b: 8, t: 2048, s: 2048, d: 64, v: 64 };
    for mask in [Mask::None, Mask::Causal, Mask::Given] {
        let graph: kiln_ir::Graph = attention("f32", sizes, mask, "", "%90").parse().unwrap();
        let options =
            kiln_inductor::Options::dense(&graph, kiln_inductor::C::new(kiln_ir::math::c::Isa::Avx512));
        let plan = kiln_inductor::lower(&graph, &options).unwrap().plan;
        assert!(plan.arena_bytes < sizes.t * sizes.s, "{mask:?}: {} bytes", plan.arena_bytes);
        assert!(plan.bands[0].bytes <= 512 << 10, "{} bytes", plan.bands[0].bytes);
    }
}

#[test]
fn steps_of_others_go_before() {
    // Values that are made after the weights.
    let sizes = Sizes { b: 900, t: 20, s: 20, d: 2, v: 20 };
    let text = attention("f32", sizes, Mask::None, "  %80 = exp(%2) : f32[900, 20, 20]\n", "%90");
    let plan = check_text(&text.replace("bmm(%79, %2)", "bmm(%79, %80)"));
    assert_eq!(plan.bands.len(), 1, "{}", why_not(&plan));
    // Keys and values are those of other matrices, too.
    let text = text.replace("%2: f32[900, 20, 20]", "%2: f32[20, 20]").replace(
        "%80 = exp(%2) : f32[900, 20, 20]",
        "%80 = expand(%2) {shape: [900, 20, 20]} : f32[900, 20, 20]",
    );
    let plan = check_text(&text.replace("bmm(%79, %2)", "bmm(%79, %80)"));
    assert_eq!((plan.bands.len(), plan.steps.len()), (1, 3), "{}", why_not(&plan));
}

#[test]
fn what_is_needed_afterwards_is_there() {
    let sizes = Sizes { b: 2, t: 400, s: 390, d: 2, v: 3 };
    // The weights are a result; then the scores are, too.
    let plan = check_text(&attention("f32", sizes, Mask::Causal, "", "%90, %79"));
    assert_eq!((plan.bands.len(), between(&plan, 2 * 400 * 390)), (1, (2 * 400 * 390 * 4, 0)));
    let plan = check_text(&attention("f32", sizes, Mask::Causal, "", "%90, %79, %10"));
    assert!(plan.bands.is_empty());
    assert!(why_not(&plan).contains("all that lies between is needed afterwards"), "{}", why_not(&plan));
    // The largest weight of each query, which a kernel leaves for others.
    let more = "  %81 = sum(%75) {dims: [2], keepdim: false} : f32[2, 400]\n";
    let plan = check_text(&attention("f32", sizes, Mask::Causal, more, "%90, %81"));
    assert_eq!(plan.bands.len(), 1, "{}", why_not(&plan));
}

#[test]
fn refusals_say_why() {
    let refused = |text: &str, reason: &str| {
        let plan = check_text(text);
        assert!(plan.bands.is_empty() && why_not(&plan).contains(reason), "{}", why_not(&plan));
    };
    let small = Sizes { b: 2, t: 40, s: 39, d: 4, v: 3 };
    refused(&attention("f32", small, Mask::Causal, "", "%90"), "small enough for the caches");
    // A step that is no kernel reads the scores, or a kernel does in another order.
    let sorted = "graph(%0: f32[900, 20, 3], %1: f32[900, 3, 20]) {
  %2 = bmm(%0, %1) : f32[900, 20, 20]
  %3 = permute(%2) {dims: [0, 2, 1]} : f32[900, 20, 20]
  %4 = add(%2, %3) : f32[900, 20, 20]
  return %4
}";
    refused(sorted, "a kernel reads it in another order");
    refused(&sorted.replace("add(%2, %3)", "bmm(%3, %2)"), "as its right operand");
    refused(&sorted.replace("add(%2, %3)", "bmm(%3, %3)"), "as its right operand");
    let turned = "graph(%0: f32[900, 20, 3], %1: f32[900, 3, 20], %5: f32[900, 20, 2]) {
  %2 = bmm(%0, %1) : f32[900, 20, 20]
  %3 = permute(%2) {dims: [0, 2, 1]} : f32[900, 20, 20]
  %4 = bmm(%3, %5) : f32[900, 20, 2]
  return %4
}";
    refused(turned, "a product reads it in another order");
}

#[test]
fn bands_end_where_a_step_needs_all_rows() {
    // The weights of all queries are what one value is made of: there are no scores, but weights.
    let sizes = Sizes { b: 900, t: 20, s: 20, d: 2, v: 20 };
    let turned = "  %80 = permute(%79) {dims: [0, 2, 1]} : f32[900, 20, 20]\n";
    let text = attention("f32", sizes, Mask::None, turned, "%90");
    for product in ["bmm(%80, %2)", "bmm(%2, %79)"] {
        let plan = check_text(&text.replace("bmm(%79, %2)", product));
        assert_eq!((plan.bands.len(), plan.bands[0].steps), (1, 2), "{}", why_not(&plan));
        assert_eq!(between(&plan, 900 * 20 * 20), (900 * 20 * 20 * 4, 1));
    }
}

#[test]
fn products_of_products_run_in_bands() {
    // Without a batch, and without a kernel between.
    let plan = check_text(
        "graph(%0: f32[2000, 3], %1: f32[3, 300], %2: f32[300, 4]) {
  %3 = mm(%0, %1) : f32[2000, 300]
  %4 = mm(%3, %2) : f32[2000, 4]
  return %4
}",
    );
    assert_eq!((plan.bands.len(), plan.arena_bytes), (1, 0), "{}", why_not(&plan));
    // Two products, and a kernel that makes one of both.
    let plan = check_text(
        "graph(%0: f64[2, 500, 3], %1: f64[2, 3, 300], %2: f64[2, 300, 4], %5: f64[2, 500, 2], %6: f64[2, 2, 300]) {
  %3 = bmm(%0, %1) : f64[2, 500, 300]
  %7 = bmm(%5, %6) : f64[2, 500, 300]
  %8 = mul(%3, %7) : f64[2, 500, 300]
  %9 = sum(%8) {dims: [2], keepdim: false} : f64[2, 500]
  %10 = reshape(%9) {shape: [2, 500, 1]} : f64[2, 500, 1]
  %11 = expand(%10) {shape: [2, 500, 300]} : f64[2, 500, 300]
  %12 = sub(%3, %11) : f64[2, 500, 300]
  %13 = bmm(%12, %2) : f64[2, 500, 4]
  return %13
}",
    );
    assert_eq!((plan.bands.len(), plan.steps.len(), plan.arena_bytes), (1, 4, 0), "{}", why_not(&plan));
    // Weights too large for a core's cache are not read again for each band.
    let wide = "graph(%0: f32[300, 8], %1: f32[8, 40000], %2: f32[40000, 8]) {
  %3 = mm(%0, %1) : f32[300, 40000]
  %4 = tanh(%3) : f32[300, 40000]
  %5 = mm(%4, %2) : f32[300, 8]
  return %5
}";
    let graph: kiln_ir::Graph = wide.replace("8]", "400]").replace("[8,", "[400,").parse().unwrap();
    let options = kiln_inductor::Options::dense(&graph, kiln_inductor::C::new(kiln_ir::math::c::Isa::Avx512));
    assert!(kiln_inductor::lower(&graph, &options).unwrap().plan.bands.is_empty());
}
