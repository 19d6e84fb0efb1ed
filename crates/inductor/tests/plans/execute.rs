//! Plans are compiled, run, and compared with the naive evaluator.

use kiln_inductor::{C, KernelSource, Options, lower};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Graph};
use kiln_plan::{Launch, Step};
use kiln_testkit::{Argument, Array, Data};

use crate::support::{self, Random, best_isa, check_lowered, check_run, check_strided, check_text};

#[test]
fn pointwise() {
    let plan = check_text(
        "graph(%0: f32[5, 7], %1: f32[5, 7], %2: float) {
  %3 = mul(%0, %2) : f32[5, 7]
  %4 = add(%3, %1) : f32[5, 7]
  %5 = tanh(%4) : f32[5, 7]
  return %5
}",
    );
    assert_eq!(plan.steps.len(), 1);
}

#[test]
fn softmax() {
    for (rows, n) in [(3, 5), (7, 16), (4, 33), (2, 4099)] {
        let plan = check_text(&format!(
            "graph(%0: f32[{rows}, {n}]) {{
  %1 = amax(%0) {{dims: [1], keepdim: false}} : f32[{rows}]
  %2 = reshape(%1) {{shape: [{rows}, 1]}} : f32[{rows}, 1]
  %3 = expand(%2) {{shape: [{rows}, {n}]}} : f32[{rows}, {n}]
  %4 = sub(%0, %3) : f32[{rows}, {n}]
  %5 = exp(%4) : f32[{rows}, {n}]
  %6 = sum(%5) {{dims: [1], keepdim: false}} : f32[{rows}]
  %7 = reshape(%6) {{shape: [{rows}, 1]}} : f32[{rows}, 1]
  %8 = expand(%7) {{shape: [{rows}, {n}]}} : f32[{rows}, {n}]
  %9 = div(%5, %8) : f32[{rows}, {n}]
  return %9
}}"
        ));
        assert_eq!(plan.steps.len(), 1);
    }
}

/// Reductions that are just long enough to go in chunks, or just not.
#[test]
fn long_reductions() {
    for n in [32767, 32768, 40000, 65535, 65536, 65537, 200_000] {
        check_text(&format!(
            "graph(%0: f32[{n}]) {{
  %1 = mul(%0, %0) : f32[{n}]
  %2 = sum(%1) {{dims: [0], keepdim: false}} : f32[]
  %3 = sqrt(%2) : f32[]
  return %3
}}"
        ));
    }
}

/// Comparisons of positions, as in a mask: in single precision where that is exact.
#[test]
fn positions() {
    let mask = |rows: usize, columns: usize, start: i64, step: i64| {
        format!(
            "graph(%0: f32[{rows}, {columns}]) {{
  %1 = constant() {{value: {start}}} : int
  %2 = constant() {{value: {step}}} : int
  %3 = arange(%1, %2) {{len: {rows}, dtype: i64, device: cpu}} : i64[{rows}]
  %4 = constant() {{value: 0}} : int
  %5 = constant() {{value: 1}} : int
  %6 = arange(%4, %5) {{len: {columns}, dtype: i64, device: cpu}} : i64[{columns}]
  %7 = reshape(%3) {{shape: [{rows}, 1]}} : i64[{rows}, 1]
  %8 = expand(%7) {{shape: [{rows}, {columns}]}} : i64[{rows}, {columns}]
  %9 = expand(%6) {{shape: [{rows}, {columns}]}} : i64[{rows}, {columns}]
  %10 = ge(%8, %9) : bool[{rows}, {columns}]
  %11 = constant() {{value: -inf}} : float
  %12 = where(%10, %0, %11) : f32[{rows}, {columns}]
  %13 = exp(%12) : f32[{rows}, {columns}]
  return %13
}}"
        )
    };
    for (start, step) in [(0, 1), (5, 1), (0, 3), (-4, 2), (1 << 40, 1), (-(1 << 40), 1)] {
        check_text(&mask(7, 37, start, step));
        check_text(&mask(40, 5, start, step));
    }
}

#[test]
fn strided_inputs() {
    check_strided(
        "graph(%0: f32[5, 7], %1: f32[5, 7]) {
  %2 = add(%0, %1) : f32[5, 7]
  return %2
}",
        &[(0, &[1, 5]), (1, &[0, 2])],
    );
}

/// Compilers take selections between vectors wider than their registers apart.
#[test]
fn singles_among_doubles() {
    for op in ["minimum(%2, %1)", "maximum(%2, %1)", "where(%5, %2, %1)"] {
        let text = format!(
            "graph(%0: f32[37], %1: f64[37]) {{
  %2 = to(%0) {{dtype: f64}} : f64[37]
  %5 = lt(%2, %1) : bool[37]
  %3 = {op} : f64[37]
  %4 = to(%3) {{dtype: f32}} : f32[37]
  return %4
}}"
        );
        let graph: Graph = text.parse().unwrap();
        for isa in [best_isa(), best_isa().max(Isa::Avx2), Isa::Plain] {
            check_run(&graph, &Options::dense(&graph, C::new(isa)), &Random(4).inputs(&graph));
        }
    }
}

/// Every golden graph that is not too large for the naive evaluator, each on one of the instruction sets.
#[test]
fn golden_graphs() {
    let best = best_isa();
    let isas = [best, best.max(Isa::Avx2), Isa::Plain];
    for (number, isa) in isas.into_iter().enumerate() {
        let size = |graph: &Graph| -> usize {
            graph.inputs.iter().filter_map(|&v| graph.ty(v).as_tensor()).map(|t| t.shape.numel()).sum()
        };
        let files = support::golden::all(isa).into_iter().skip(number).step_by(isas.len());
        let plans: Vec<_> = files
            .filter(|(_, graph, _)| size(graph) <= 300_000)
            .map(|(_, graph, options)| (lower(&graph, &options).unwrap(), graph, options))
            .collect();
        let code: Vec<&[KernelSource]> = plans.iter().map(|(lowered, ..)| &lowered.code[..]).collect();
        let compiled = support::compile_all(&code, &C::new(isa));
        for (n, (lowered, graph, options)) in plans.iter().enumerate() {
            let mut inputs = Random(5).inputs(graph);
            for input in &mut inputs {
                // Integers are class numbers there.
                if let Argument::Tensor(Array { dtype: DType::I64, data: Data::Int(data), .. }) = input {
                    data.iter_mut().for_each(|x| *x = x.abs());
                }
            }
            check_lowered(lowered, graph, options, &inputs, compiled.as_ref().map(|compiled| &compiled[n]));
        }
    }
}

#[test]
fn zero_dims_and_no_elements() {
    check_text(
        "graph(%0: f32[], %1: f32[0, 3], %2: f64[2, 0]) {
  %3 = exp(%0) : f32[]
  %4 = neg(%1) : f32[0, 3]
  %5 = sum(%1) {dims: [0], keepdim: false} : f32[3]
  %6 = sum(%2) {dims: [0, 1], keepdim: false} : f64[]
  %7 = expand(%0) {shape: [2, 3]} : f32[2, 3]
  %8 = cat(%1, %7) {dim: 0} : f32[2, 3]
  write %0 <- %3
  return %3, %4, %5, %6, %8
}",
    );
}

#[test]
fn an_index_out_of_range_is_an_error_and_touches_nothing() {
    // Numbers are in -3..4, so some are out of range.
    let plan = check_text(
        "graph(%0: f32[5, 3], %1: i64[50, 3]) {
  %2 = gather(%0, %1) {dim: 0} : f32[50, 3]
  return %2
}"
        .replace("[50, 3]", "[5, 3]")
        .as_str(),
    );
    assert!(
        matches!(&plan.steps[0], Step::Launch(Launch { checks, .. }) if checks[0].op == "gather" && checks[0].size == 5)
    );
    check_text(
        "graph(%0: f32[0, 3], %1: i64[2, 3]) {
  %2 = constant() {value: 0} : int
  %3 = maximum(%1, %2) : i64[2, 3]
  %4 = reshape(%0) {shape: [3, 0]} : f32[3, 0]
  %5 = reshape(%3) {shape: [3, 2]} : i64[3, 2]
  %6 = gather(%4, %5) {dim: 1} : f32[3, 2]
  return %6
}",
    );
}

#[test]
fn tall_reductions() {
    for (shape, dims, kept) in
        [("[70001]", "[0]", "[]"), ("[40001, 5]", "[0]", "[5]"), ("[3, 40000]", "[1]", "[3]")]
    {
        let plan = check_text(&format!(
            "graph(%0: f64{shape}) {{
  %1 = tanh(%0) : f64{shape}
  %2 = sum(%1) {{dims: {dims}, keepdim: false}} : f64{kept}
  %3 = amax(%0) {{dims: {dims}, keepdim: false}} : f64{kept}
  %4 = add(%2, %3) : f64{kept}
  return %1, %4
}}"
        ));
        assert_eq!(plan.steps.len(), 2, "{shape}");
    }
}

#[test]
fn equal_layers_share_a_kernel() {
    let plan = check_text(
        "graph(%0: f32[8, 16], %1: f32[16, 16], %2: f32[16, 24]) {
  %3 = mm(%0, %1) : f32[8, 16]
  %4 = tanh(%3) : f32[8, 16]
  %5 = mm(%4, %2) : f32[8, 24]
  %6 = tanh(%5) : f32[8, 24]
  return %6
}",
    );
    assert_eq!((plan.kernels.len(), plan.steps.len()), (1, 4));
}

#[test]
fn numbers_are_computed_once() {
    let plan = check_text(
        "graph(%0: f64[9], %1: float, %2: int) {
  %3 = pow(%1, %2) : float
  %4 = constant() {value: 1.0} : float
  %5 = sub(%4, %3) : float
  %6 = sqrt(%4) : float
  %7 = lt(%5, %6) : boolean
  %8 = where(%7, %5, %6) : float
  %9 = mul(%0, %8) : f64[9]
  return %9
}",
    );
    assert!(plan.scalars.len() >= 5);
}

/// Products up to a size are part of the kernels around them, and there is no step of the library's.
#[test]
fn small_products_are_loops() {
    let texts = [
        "graph(%0: f32[3, 5], %1: f32[5, 7], %2: f32[7]) {
  %3 = exp(%0) : f32[3, 5]
  %4 = mm(%3, %1) : f32[3, 7]
  %5 = reshape(%2) {shape: [1, 7]} : f32[1, 7]
  %6 = expand(%5) {shape: [3, 7]} : f32[3, 7]
  %7 = add(%4, %6) : f32[3, 7]
  %8 = tanh(%7) : f32[3, 7]
  return %8
}",
        "graph(%0: f64[2, 1, 4], %1: f64[2, 4, 9]) {
  %2 = bmm(%0, %1) : f64[2, 1, 9]
  return %2
}",
        "graph(%0: f32[64, 64], %1: f32[64, 64]) {
  %2 = mm(%0, %1) : f32[64, 64]
  %3 = mul(%2, %0) : f32[64, 64]
  return %3
}",
    ];
    for text in texts {
        let graph: Graph = text.parse().unwrap();
        for (products, is_loops) in [(0, false), (2, false), (64, true)] {
            let mut options = Options::dense(&graph, C::new(best_isa()));
            options.tuning.products = products;
            let plan = check_run(&graph, &options, &Random(3).inputs(&graph));
            assert_eq!(plan.steps.iter().all(|step| matches!(step, Step::Launch(_))), is_loops, "{text}");
        }
    }
    // Of no rows, and of integers, which wrap.
    for text in [
        "graph(%0: f32[0, 2], %1: f32[2, 2]) {\n  %2 = mm(%0, %1) : f32[0, 2]\n  return %2\n}",
        "graph(%0: i64[2, 2], %1: i64[2, 2]) {\n  %2 = mm(%0, %1) : i64[2, 2]\n  return %2\n}",
    ] {
        check_text(text);
    }
}

/// The first of several extremes, NaN before all, along rows and columns; with what comes before and after in one
/// kernel.
#[test]
fn places_of_extremes() {
    for (dtype, op, dim, shape, kept) in [
        ("f32", "argmax", 1, "7, 37", "7"),
        ("f32", "argmin", 1, "5, 300", "5"),
        ("f64", "argmin", 0, "37, 20", "20"),
        ("f32", "argmax", 0, "300, 33", "33"),
        ("i64", "argmax", 1, "4, 41", "4"),
        ("u8", "argmax", 0, "19, 17", "17"),
    ] {
        let text = format!(
            "graph(%0: {dtype}[{shape}]) {{
  %1 = mul(%0, %0) : {dtype}[{shape}]
  %2 = {op}(%1) {{dim: {dim}, keepdim: false}} : i64[{kept}]
  %3 = add(%2, %2) : i64[{kept}]
  return %3
}}"
        );
        assert_eq!(check_text(&text).steps.len(), 1, "{text}");
        let graph: Graph = text.parse().unwrap();
        let mut inputs = Random(5).inputs(&graph);
        if let Argument::Tensor(x) = &mut inputs[0] {
            *x = if x.dtype.is_float() {
                Array::floats(x.dtype, x.shape.clone(), |n| match n % 11 {
                    7 if n % 3 == 0 => f64::NAN,
                    5 => f64::NEG_INFINITY,
                    n => (n % 4) as f64,
                })
            } else {
                Array::ints(x.dtype, x.shape.clone(), |n| (n % 11 % 4) as i64)
            };
        }
        for isa in [best_isa(), best_isa().max(Isa::Avx2), Isa::Plain] {
            check_run(&graph, &Options::dense(&graph, C::new(isa)), &inputs);
        }
    }
}
