//! Golden files: a graph, then what it is lowered to. `BLESS=1` renews them.
//!
//! The first line says what is shown: `; test loops`, `; test loops c`, `; test loops c unroll 2`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

mod support;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_inductor::codec::{Code, Reader, Writer};
use kiln_inductor::loops::Kernel;
use kiln_inductor::{Bands, Epilogue, KernelSource, Options, Plan, ScalarRef, Step, lower};
use kiln_ir::math::c::{CIsa, FLAGS};
use kiln_ir::{Graph, Stage};

const RULE: &str = "\n; ----\n";

/// Plans as bytes are the same plans, and cut short they are none.
fn check_bytes(plan: &Plan) {
    let mut writer = Writer::new(&[]);
    plan.put(&mut writer);
    let bytes = writer.into_bytes();
    let mut reader = Reader::new(&bytes, &[]);
    let mut again = Plan::take(&mut reader).unwrap();
    assert!(reader.is_done());
    let texts = |plan: &Plan| plan.report.why_not.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(texts(&again), texts(plan));
    again.report.why_not.clone_from(&plan.report.why_not);
    assert_eq!(again, *plan);
    for length in (0..bytes.len()).step_by(97) {
        let mut reader = Reader::new(&bytes[..length], &[]);
        assert!(Plan::take(&mut reader).is_none());
    }
}

fn show(plan: &Plan, with_c: bool) -> String {
    let mut out = String::new();
    for (s, step) in plan.steps.iter().enumerate() {
        if let Some(bands) = plan.bands.iter().find(|bands| bands.first == s) {
            let Bands { steps, rows, count, bytes, .. } = bands;
            writeln!(out, "{steps} steps in {count} bands of {rows} rows, {bytes} bytes:").unwrap();
        }
        match step {
            Step::Kernel { kernel, bufs, scalars, items, .. } => {
                let at = |b: &kiln_inductor::BufferRef| {
                    let place = format!("{:?}", plan.buffers[b.buffer.index()].place);
                    let place = place
                        .replace(" { offset: ", "(")
                        .replace(" { output: ", "(")
                        .replace(", offset: ", "+");
                    let place = place.replace(", row_bytes: ", " by ").replace(" }", ")");
                    if b.offset == 0 { place } else { format!("{place}+{}", b.offset) }
                };
                let bufs: Vec<String> = bufs.iter().map(at).collect();
                let scalars: Vec<String> = scalars
                    .iter()
                    .map(|s| match s {
                        ScalarRef::Input(i) => format!("input {i}"),
                        ScalarRef::Constant(c) => c.to_string(),
                        ScalarRef::Computed(i) => format!("computed {i}"),
                    })
                    .collect();
                writeln!(out, "kernel {kernel} over {items}: {} [{}]", bufs.join(", "), scalars.join(", "))
                    .unwrap();
            }
            Step::Gemm { m, n, k, lhs, rhs, accumulate, epilogue, .. } => {
                let sign = if *accumulate { "+=" } else { "=" };
                writeln!(
                    out,
                    "gemm {m} x {n} {sign} {k}: lhs strides {} {}, rhs strides {} {}{}",
                    lhs.row,
                    lhs.column,
                    rhs.row,
                    rhs.column,
                    epilogue.map_or(String::new(), |Epilogue { rows, items }| {
                        format!("; the next step on every {rows} rows: {items} items")
                    })
                )
                .unwrap();
            }
            Step::Bmm { batch, m, n, k, lhs, rhs, .. } => {
                let show = |b: &kiln_inductor::BatchRef| {
                    format!("{:?} by {:?}, strides {} {}", b.sizes, b.strides, b.matrix.row, b.matrix.column)
                };
                writeln!(out, "bmm {batch} of {m} x {n} = {k}: lhs {}, rhs {}", show(lhs), show(rhs))
                    .unwrap();
            }
            Step::Random { distribution, .. } => writeln!(out, "random {distribution:?}").unwrap(),
            Step::Copy { .. } => writeln!(out, "copy").unwrap(),
            Step::Convolution { x, weight, constant, epilogue, .. } => {
                let constant = if *constant { ", constant kernels" } else { "" };
                let then = epilogue.as_ref().map_or(String::new(), |on| {
                    let loops = if on.is_one_loop { "in one loop" } else { "plane by plane" };
                    format!(
                        "; the next step on planes of {} pixels, {loops}, steps {:?}",
                        on.pixels, on.steps
                    )
                });
                writeln!(out, "convolution {:?} by {:?}{constant}{then}", x.shape, weight.shape).unwrap();
            }
            Step::Fallback { op, .. } => writeln!(out, "library {}", op.name()).unwrap(),
            Step::Eager { .. } => writeln!(out, "eager").unwrap(),
        }
    }
    writeln!(out, "arena {} bytes, {} bytes moved", plan.arena_bytes, plan.report.bytes()).unwrap();
    for why in &plan.report.why_not {
        writeln!(out, "not fused: {why}").unwrap();
    }
    for kernel in &plan.kernels {
        writeln!(out, "\n{}", kernel.loops.trim_end()).unwrap();
        let parsed: Kernel = kernel.loops.parse().unwrap();
        assert_eq!(parsed.to_string(), kernel.loops);
        if with_c {
            writeln!(out, "\n{}", kernel.code.trim_end()).unwrap();
        }
    }
    out
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    files
}

/// The plan of a golden file's graph.
fn plan(input: &str, isa: CIsa) -> Plan {
    let header = input.lines().next().unwrap();
    assert!(header.starts_with("; test"), "no header: {header}");
    let graph: Graph = input.lines().skip(1).collect::<Vec<_>>().join("\n").parse().unwrap();
    graph.verify(Stage::Prims, "the golden file").unwrap();
    let mut options = Options::dense(&graph, isa, 2);
    if let Some((_, vectors)) = header.split_once(" unroll ") {
        options.tuning.unroll = vectors.parse().unwrap();
    }
    lower(&graph, &options).unwrap()
}

/// What Kiln writes is C for GCC and for Clang, without a warning that says otherwise.
#[test]
fn clang_compiles_every_text() {
    let Some(clang) = support::clang() else {
        eprintln!("no clang: the texts are not compiled by it");
        return;
    };
    let folder = std::env::temp_dir().join(format!("kiln-clang-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for isa in [CIsa::Avx512, CIsa::Avx2, CIsa::Plain] {
        let mut by_lanes: BTreeMap<usize, BTreeMap<String, KernelSource>> = BTreeMap::new();
        for file in files() {
            let text = std::fs::read_to_string(&file).unwrap();
            for kernel in plan(text.split_once(RULE).unwrap().0, isa).kernels {
                by_lanes.entry(kernel.lanes).or_default().insert(kernel.name.clone(), kernel);
            }
        }
        for (lanes, kernels) in by_lanes {
            let source = folder.join(format!("{isa:?}-{lanes}.c"));
            let kernels: Vec<&KernelSource> = kernels.values().collect();
            std::fs::write(&source, KernelSource::shard(&kernels, isa)).unwrap();
            let mut command = Command::new(&clang);
            command.args(FLAGS).args(isa.flags()).args(["-mf16c", "-O1", "-c", "-o"]);
            let output = command.arg(source.with_extension("o")).arg(&source).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{clang} {isa:?}, {lanes} lanes\n{text}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn golden_files() {
    let mut failed = Vec::new();
    for file in files() {
        let text = std::fs::read_to_string(&file).unwrap();
        let (input, expected) = text.split_once(RULE).unwrap_or((&text, ""));
        let header = input.lines().next().unwrap();
        let plan = plan(input, CIsa::Avx512);
        check_bytes(&plan);
        let got = show(&plan, header.contains(" c"));
        if got != expected {
            if std::env::var("BLESS").is_ok() {
                std::fs::write(&file, format!("{}{RULE}{got}", input.trim_end())).unwrap();
            } else {
                failed.push(format!("{}\n{got}", file.display()));
            }
        }
    }
    assert!(failed.is_empty(), "renew with BLESS=1:\n{}", failed.join("\n"));
}
