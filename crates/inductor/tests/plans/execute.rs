//! Plans are compiled, run, and compared with the naive evaluator.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_inductor::{C, KernelSource, Options, lower};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Graph, Op, Scalar};
use kiln_plan::{BufferId, BufferRef, Call, Epilogue, Launch, Place, Step, Then};
use kiln_testkit::{Argument, Array, Data};
use support::{Random, Run, best_isa, check_lowered, check_run, check_strided, check_text, compile};

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
fn integers_and_truth_values() {
    check_text(
        "graph(%0: i64[37], %1: i64[37], %2: bool[37], %3: int) {
  %4 = mul(%0, %3) : i64[37]
  %5 = add(%4, %1) : i64[37]
  %6 = abs(%5) : i64[37]
  %7 = pow(%0, %6) : i64[37]
  %8 = gt(%0, %1) : bool[37]
  %9 = logical_and(%8, %2) : bool[37]
  %10 = where(%9, %5, %7) : i64[37]
  %11 = to(%10) {dtype: f32} : f32[37]
  %12 = to(%9) {dtype: i64} : i64[37]
  %13 = sum(%12) {dims: [0], keepdim: false} : i64[]
  %14 = amax(%10) {dims: [0], keepdim: false} : i64[]
  %15 = add(%2, %8) : bool[37]
  %16 = amax(%15) {dims: [0], keepdim: false} : bool[]
  return %9, %10, %11, %13, %14, %15, %16
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

/// One graph of each kind of loop, in every narrow dtype.
#[test]
fn narrow_dtypes() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_narrow()) {
        check_text(&format!(
            "graph(%0: {dtype}[5, 37], %1: {dtype}[5, 37], %2: int) {{
  %3 = mul(%0, %2) : {dtype}[5, 37]
  %4 = mul(%3, %1) : {dtype}[5, 37]
  %5 = neg(%4) : {dtype}[5, 37]
  %6 = maximum(%5, %0) : {dtype}[5, 37]
  %7 = lt(%6, %1) : bool[5, 37]
  %8 = where(%7, %6, %0) : {dtype}[5, 37]
  return %8, %7
}}"
        ));
        let text = format!(
            "graph(%0: {dtype}[133], %1: {dtype}[133]) {{ %2 = mul(%0, %1) : {dtype}[133] return %2 }}"
        );
        let graph: Graph = text.parse().unwrap();
        for isa in [Isa::Plain, Isa::Avx2] {
            if isa == Isa::Plain || best_isa() != Isa::Plain {
                check_run(&graph, &Options::dense(&graph, C::new(isa)), &Random(5).inputs(&graph));
            }
        }
        for (dims, left) in [("[1]", "[40]"), ("[0]", "[70]"), ("[0, 1]", "[]")] {
            // Integers are summed as i64.
            let (summed, sum) = match dtype.is_float() {
                true => (String::new(), dtype),
                false => ("%3 = to(%2) {dtype: i64} : i64[40, 70]".to_string(), DType::I64),
            };
            let (from, total) = if dtype.is_float() { ("%2", "%3") } else { ("%3", "%4") };
            check_strided(
                &format!(
                    "graph(%0: {dtype}[40, 70]) {{
  %1 = amax(%0) {{dims: {dims}, keepdim: false}} : {dtype}{left}
  %2 = abs(%0) : {dtype}[40, 70]
  {summed}
  {total} = sum({from}) {{dims: {dims}, keepdim: false}} : {sum}{left}
  return %1, {total}
}}"
                ),
                &[(0, &[1, 40])],
            );
        }
        // Part of a row: the kernel's pointer starts inside the buffer.
        check_text(&format!(
            "graph(%0: {dtype}[9, 20]) {{
  %1 = slice(%0) {{dim: 1, start: 3, end: 17, step: 2}} : {dtype}[9, 7]
  %2 = add(%1, %1) : {dtype}[9, 7]
  %3 = slice(%2) {{dim: 0, start: 2, end: 7, step: 1}} : {dtype}[5, 7]
  return %2, %3
}}"
        ));
        // A row and a column repeated, and a transposed operand.
        check_strided(
            &format!(
                "graph(%0: {dtype}[9], %1: {dtype}[6, 1], %2: {dtype}[6, 9]) {{
  %3 = expand(%0) {{shape: [6, 9]}} : {dtype}[6, 9]
  %4 = expand(%1) {{shape: [6, 9]}} : {dtype}[6, 9]
  %5 = add(%3, %4) : {dtype}[6, 9]
  %6 = sub(%5, %2) : {dtype}[6, 9]
  %7 = permute(%6) {{dims: [1, 0]}} : {dtype}[9, 6]
  return %7
}}"
            ),
            &[(2, &[1, 6])],
        );
        check_text(&format!(
            "graph(%0: {dtype}[4], %1: {dtype}[300], %2: {dtype}[4], %3: {dtype}[300]) {{
  %4 = list(%0, %1) : list(1 x {dtype}[4], 1 x {dtype}[300])
  %5 = list(%2, %3) : list(1 x {dtype}[4], 1 x {dtype}[300])
  %6 = foreach_add(%4, %5) : list(1 x {dtype}[4], 1 x {dtype}[300])
  %7 = list_get(%6) {{index: 0}} : {dtype}[4]
  %8 = list_get(%6) {{index: 1}} : {dtype}[300]
  return %7, %8
}}"
        ));
    }
}

/// All conversions between dtypes, of ordinary and of special numbers.
#[test]
fn conversions() {
    let ints = [0, 1, -1, 127, 128, 255, 256, -129, 32767, 32768, 65535, 1 << 31, (1 << 31) - 1, 1 << 40];
    let floats = [0.0, -0.0, 0.1, -2.75, 255.9, -129.0, 65504.0, 65519.9, 65520.0, 1e-7, 6e-8, 2.9e-8, 3e-5];
    let floats = floats.into_iter().chain([1.000976, 1.0004883, 1.0014648, 3.3e38, 1e-40, 1e30, -7e20]);
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let floats: Vec<f64> = floats.chain(special).collect();
    for from in DType::ALL {
        let data: Vec<Scalar> = match from.is_float() {
            true => floats.iter().map(|&x| Scalar::Float(x).to_dtype(from)).collect(),
            false => ints.iter().map(|&x| Scalar::Int(x).to_dtype(from)).collect(),
        };
        let n = data.len();
        let input: Argument = match from.is_float() {
            true => Array::floats(from, [n], |i| data[i].as_f64()).into(),
            false => Array::ints(from, [n], |i| data[i].as_i64()).into(),
        };
        let others: Vec<DType> = DType::ALL.into_iter().filter(|&to| to != from).collect();
        let (mut nodes, mut results) = (String::new(), Vec::new());
        for (i, to) in others.iter().enumerate() {
            nodes += &format!("%{} = to(%0) {{dtype: {to}}} : {to}[{n}]\n", i + 1);
            results.push(format!("%{}", i + 1));
        }
        let text = format!("graph(%0: {from}[{n}]) {{\n{nodes}return {}\n}}", results.join(", "));
        let graph: Graph = text.parse().unwrap();
        // Halves are converted by instructions or by arithmetic on bits.
        for isa in [best_isa(), Isa::Avx2, Isa::Plain] {
            if isa == Isa::Avx2 && best_isa() == Isa::Plain {
                continue;
            }
            let options = Options::dense(&graph, C::new(isa));
            let lowered = lower(&graph, &options).unwrap();
            let Some(compiled) = compile(&lowered.code, &*options.target) else { return };
            let mut run = Run::new(&lowered, &graph, &options, std::slice::from_ref(&input));
            run.run(&compiled).unwrap();
            for (k, &to) in others.iter().enumerate() {
                for (i, &x) in data.iter().enumerate() {
                    let (got, want) = (run.outputs[k].read(i, to), x.to_dtype(to));
                    let same = match (got, want) {
                        (Scalar::Float(a), Scalar::Float(b)) => {
                            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
                        }
                        (a, b) => a == b,
                    };
                    assert!(same, "{from} {x} to {to} ({isa:?}): {got}, not {want}");
                }
            }
        }
    }
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

/// The epilogue of a graph's only product.
fn epilogue(text: &str) -> (Option<Epilogue>, String) {
    let plan = check_text(text);
    let epilogues: Vec<_> = plan
        .steps
        .iter()
        .filter(|step| step.product().is_some())
        .map(|step| if let Some(Then::Rows(epilogue)) = step.then() { Some(*epilogue) } else { None })
        .collect();
    assert_eq!(epilogues.len(), 1);
    (epilogues[0], plan.report.why_not.iter().map(|why| format!("{why}\n")).collect())
}

#[test]
fn kernels_go_on_with_rows_of_products() {
    let rows = |text: &str| epilogue(text).0.map(|Epilogue { rows, items }| (rows, items));
    let bias = "graph(%0: f32[37, 5], %1: f32[5, 70], %2: f32[70]) {
  %3 = mm(%0, %1) : f32[37, 70]
  %4 = expand(%2) {shape: [37, 70]} : f32[37, 70]
  %5 = add(%3, %4) : f32[37, 70]
  %6 = tanh(%5) : f32[37, 70]
  return %6
}";
    assert_eq!(rows(bias), Some((1, 1)));
    // The product is needed itself, and there is nothing to add up.
    assert_eq!(rows(&bias.replace("return %6", "return %6, %3")), Some((1, 1)));
    assert_eq!(rows(&bias.replace("37, 5]", "37, 0]").replace("[5, 70]", "[0, 70]")), Some((1, 1)));
    assert_eq!(rows(&bias.replace("f32", "f64")), Some((1, 1)));
    // One loop over all elements, cut every 16384 of them.
    let residual = "graph(%0: f32[64, 3], %1: f32[3, 512], %2: f32[64, 512]) {
  %3 = mm(%0, %1) : f32[64, 512]
  %4 = add(%3, %2) : f32[64, 512]
  return %4
}";
    assert_eq!(rows(residual), Some((32, 1)));
    let (none, why) = epilogue(&residual.replace("512", "520"));
    assert!(none.is_none() && why.contains("its items end inside of rows"), "{why}");
    // A row at a time.
    let softmax = "graph(%0: f32[40, 6], %1: f32[6, 50]) {
  %2 = mm(%0, %1) : f32[40, 50]
  %3 = exp(%2) : f32[40, 50]
  %4 = sum(%3) {dims: [1], keepdim: false} : f32[40]
  %5 = reshape(%4) {shape: [40, 1]} : f32[40, 1]
  %6 = expand(%5) {shape: [40, 50]} : f32[40, 50]
  %7 = div(%3, %6) : f32[40, 50]
  return %7
}";
    assert_eq!(rows(softmax), Some((1, 1)));
    // Heads of a row: several items.
    let heads = "graph(%0: f32[40, 6], %1: f32[6, 60], %2: f32[20]) {
  %3 = mm(%0, %1) : f32[40, 60]
  %4 = reshape(%3) {shape: [40, 3, 20]} : f32[40, 3, 20]
  %5 = expand(%2) {shape: [40, 3, 20]} : f32[40, 3, 20]
  %6 = mul(%4, %5) : f32[40, 3, 20]
  return %6
}";
    assert_eq!(rows(heads), Some((1, 3)));
}

#[test]
fn kernels_that_need_other_rows_run_after_the_product() {
    let refused = |text: &str, reason: &str| {
        let (epilogue, why) = epilogue(text);
        assert!(epilogue.is_none() && why.contains(reason), "{epilogue:?} {why}");
    };
    refused(
        "graph(%0: f32[40, 6], %1: f32[6, 40], %2: f32[40, 40]) {
  %3 = mm(%0, %1) : f32[40, 40]
  %4 = permute(%3) {dims: [1, 0]} : f32[40, 40]
  %5 = add(%4, %2) : f32[40, 40]
  return %5
}",
        "another order",
    );
    refused(
        "graph(%0: f32[40, 6], %1: f32[6, 50]) {
  %2 = mm(%0, %1) : f32[40, 50]
  %3 = sum(%2) {dims: [0], keepdim: false} : f32[50]
  return %3
}",
        "don't go along",
    );
    // Its result might go where the product still reads.
    refused(
        "graph(%0: f32[40, 40], %1: f32[40, 40]) {
  %2 = mm(%0, %1) : f32[40, 40]
  %3 = add(%2, %0) : f32[40, 40]
  write %0 <- %3
  return
}",
        "an operand of the product",
    );
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
            *x = match x.dtype.is_float() {
                true => Array::floats(x.dtype, x.shape.clone(), |n| match n % 11 {
                    7 if n % 3 == 0 => f64::NAN,
                    5 => f64::NEG_INFINITY,
                    n => (n % 4) as f64,
                }),
                false => Array::ints(x.dtype, x.shape.clone(), |n| (n % 11 % 4) as i64),
            };
        }
        for isa in [best_isa(), best_isa().max(Isa::Avx2), Isa::Plain] {
            check_run(&graph, &Options::dense(&graph, C::new(isa)), &inputs);
        }
    }
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
