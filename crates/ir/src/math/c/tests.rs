//! The C text and the scalar instantiation agree bit for bit, on every instruction set at hand.

use super::*;
use std::fmt::Write;
use std::io::{Read, Write as _};
use std::process::{Command, Stdio};

/// Bit patterns of every kind, plus numbers of ordinary size.
fn samples(width: Width) -> Vec<f64> {
    let mut out =
        vec![0.0, -0.0, 1.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.5, -0.5, 2.0, -3.0];
    let mut state = 0x9e3779b97f4a7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for i in 0..3000 {
        out.push(match (width, i % 2) {
            (Width::F32, 0) => f64::from(f32::from_bits(next() as u32)),
            (Width::F64, 0) => f64::from_bits(next()),
            (Width::F32, _) => f64::from(((next() % 4_000_000) as f64 / 1e5 - 20.0) as f32),
            (Width::F64, _) => (next() % 4_000_000) as f64 / 1e5 - 20.0,
        });
    }
    out
}

fn encode(values: &[f64], width: Width) -> Vec<u8> {
    match width {
        Width::F32 => values.iter().flat_map(|&v| (v as f32).to_le_bytes()).collect(),
        Width::F64 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn decode(bytes: &[u8], width: Width) -> Vec<f64> {
    match width {
        Width::F32 => {
            bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
        }
        Width::F64 => bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

/// A program that applies every function to arrays of arguments from its input.
fn program(isa: Isa, lanes: usize, width: Width) -> String {
    let Names { suffix, .. } = names(width);
    let scalar = if width == Width::F32 { "float" } else { "double" };
    let mut text = prelude(lanes, isa);
    let mut calls = String::new();
    let all: Vec<(Function, Width)> = Function::ALL.iter().map(|&function| (function, width)).collect();
    text.push_str(&functions(&all, lanes, isa));
    for &function in Function::ALL {
        let name = function_name(function, width);
        let vectors: Vec<String> =
            (0..function.arity()).map(|a| format!("kiln_load_{suffix}(in + {a} * n + i)")).collect();
        let _ = write!(
            calls,
            "    for (long i = 0; i < n; i += KILN_LANES) kiln_store_{suffix}(out + i, {name}({}));
    fwrite(out, sizeof({scalar}), n, stdout);\n",
            vectors.join(", ")
        );
    }
    format!(
        "#include <stdio.h>\n#include <stdlib.h>\n{text}\nint main(void) {{
    long n;
    if (fread(&n, 8, 1, stdin) != 1) return 1;
    {scalar} *in = malloc(sizeof({scalar}) * n * 4), *out = malloc(sizeof({scalar}) * n);
    if (fread(in, sizeof({scalar}), n * 4, stdin) != (size_t)n * 4) return 2;
{calls}    return 0;
}}\n"
    )
}

/// The C compilers of this machine: the usual one, and a clang if there is one, by whatever name.
fn compilers() -> Vec<String> {
    let numbered = (14..30).rev().map(|version| format!("clang-{version}"));
    let is_there = |name: &String| Command::new(name).arg("--version").output().is_ok();
    let clang = std::iter::once("clang".to_string()).chain(numbered).find(is_there);
    Some("cc".to_string()).into_iter().filter(is_there).chain(clang).collect()
}

fn check(isa: Isa, lanes: usize, width: Width, level: &str) {
    if isa < Isa::detect() {
        return;
    }
    let compilers = compilers();
    if compilers.is_empty() {
        eprintln!("no C compiler: the text is not checked");
    }
    compilers.iter().for_each(|compiler| check_by(compiler, isa, lanes, width, level));
}

fn check_by(compiler: &str, isa: Isa, lanes: usize, width: Width, level: &str) {
    let name = format!("kiln-math-{}-{compiler}{isa:?}{lanes}{width:?}{level}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    let stem = directory.join("check");
    let source = stem.with_extension("c");
    std::fs::write(&source, program(isa, lanes, width)).unwrap();
    let compiled = Command::new(compiler)
        .args(FLAGS)
        .args(isa.flags())
        .args(["-std=gnu11", "-Wall", "-Wno-unused", level, "-o"])
        .arg(&stem)
        .arg(&source)
        .arg("-lm")
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    assert!(compiled.stderr.is_empty(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let base = samples(width);
    let n = base.len() / 16 * 16;
    // Four columns of arguments: the samples, rotated by different amounts.
    let columns: Vec<Vec<f64>> =
        (0..4).map(|c| (0..n).map(|i| base[(i * (2 * c + 1) + 7 * c) % base.len()]).collect()).collect();
    let mut input = (n as i64).to_le_bytes().to_vec();
    for column in &columns {
        input.extend(encode(column, width));
    }
    let mut child = Command::new(&stem).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
    let mut bytes = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success());
    std::fs::remove_dir_all(&directory).ok();

    let results = decode(&bytes, width);
    for (f, &function) in Function::ALL.iter().enumerate() {
        for i in 0..n {
            let args: Vec<f64> = columns[..function.arity()].iter().map(|c| c[i]).collect();
            let expected = function.eval(width, &args);
            let got = results[f * n + i];
            assert!(
                got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                "{compiler} {isa:?} {lanes} {level} {function:?}{args:?}: C {got:e}, Rust {expected:e}"
            );
        }
    }
}

#[test]
fn avx512_f32() {
    check(Isa::Avx512, 16, Width::F32, "-O2");
    check(Isa::Avx512, 8, Width::F32, "-O1");
}

#[test]
fn avx512_f64() {
    check(Isa::Avx512, 8, Width::F64, "-O1");
}

#[test]
fn avx2_f32() {
    check(Isa::Avx2, 8, Width::F32, "-O2");
    check(Isa::Avx2, 4, Width::F32, "-O1");
}

#[test]
fn avx2_f64() {
    check(Isa::Avx2, 4, Width::F64, "-O1");
}

#[test]
fn plain_f32() {
    check(Isa::Plain, 4, Width::F32, "-O1");
}

#[test]
fn plain_f64() {
    check(Isa::Plain, 4, Width::F64, "-O1");
}

#[test]
fn rows_say_which_functions_have_rare_parts() {
    for &function in Function::ALL {
        let has =
            [Width::F32, Width::F64].iter().any(|&w| super::function(function, w).contains("KILN_RARELY"));
        assert_eq!(has, function.has_rare(), "{function:?}");
    }
}

#[test]
fn relu_reads_well() {
    expect(
        Function::Relu,
        "KILN_INLINE f32v kiln_relu_f32(f32v x) {\n    return kiln_max_f32(kiln_splat_f32(0.0f), x);\n}\n",
    );
}

fn expect(function: Function, text: &str) {
    assert_eq!(super::function(function, Width::F32), text);
}
