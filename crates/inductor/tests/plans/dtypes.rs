//! Kernels over every dtype: integers, truth values, halves, and what one becomes as another.

use kiln_inductor::{C, Options, lower};
use kiln_ir::math::c::Isa;
use kiln_ir::{DType, Graph, Scalar};
use kiln_testkit::{Argument, Array};

use crate::support::{Random, Run, best_isa, check_run, check_strided, check_text, compile};

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
            let (summed, sum) = if dtype.is_float() {
                (String::new(), dtype)
            } else {
                ("%3 = to(%2) {dtype: i64} : i64[40, 70]".to_string(), DType::I64)
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
        let data: Vec<Scalar> = if from.is_float() {
            floats.iter().map(|&x| Scalar::Float(x).to_dtype(from)).collect()
        } else {
            ints.iter().map(|&x| Scalar::Int(x).to_dtype(from)).collect()
        };
        let n = data.len();
        let input: Argument = if from.is_float() {
            Array::floats(from, [n], |i| data[i].as_f64()).into()
        } else {
            Array::ints(from, [n], |i| data[i].as_i64()).into()
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
