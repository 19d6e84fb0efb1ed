//! Golden files: a graph, then what it is lowered to. `BLESS=1` renews them.
//!
//! The first line says what is shown: `; test loops`, `; test loops c`, `; test loops c unroll 2`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

mod support;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_inductor::{C, KernelSource, Lowered, Options, Target as _, lower};
use kiln_ir::math::c::{CIsa, FLAGS};
use kiln_ir::{Graph, Stage};
use kiln_plan::Plan;
use kiln_plan::codec::{Code, Reader, Writer};

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

fn show(Lowered { plan, code }: &Lowered, with_c: bool) -> String {
    let mut out = plan.to_string();
    let mut again: Plan = out.parse().unwrap();
    again.report = plan.report.clone();
    assert_eq!(again.to_string(), out);
    writeln!(out, "{} bytes moved", plan.report.bytes()).unwrap();
    for why in &plan.report.why_not {
        writeln!(out, "not fused: {why}").unwrap();
    }
    for (number, source) in code.iter().enumerate().filter(|_| with_c) {
        writeln!(out, "\n{}", source.told(plan.ops_of(number)).trim_end()).unwrap();
    }
    out
}

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    files
}

/// A golden file's graph, lowered.
fn lowered(input: &str, isa: CIsa) -> Lowered {
    let header = input.lines().next().unwrap();
    assert!(header.starts_with("; test"), "no header: {header}");
    let graph: Graph = input.lines().skip(1).collect::<Vec<_>>().join("\n").parse().unwrap();
    graph.verify(Stage::Prims, "the golden file").unwrap();
    let mut target = C::new(isa);
    if let Some((_, vectors)) = header.split_once(" unroll ") {
        target.unroll = vectors.parse().unwrap();
    }
    lower(&graph, &Options::dense(&graph, target)).unwrap()
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
            for kernel in lowered(text.split_once(RULE).unwrap().0, isa).code {
                by_lanes.entry(kernel.lanes).or_default().insert(kernel.name.clone(), kernel);
            }
        }
        for (lanes, kernels) in by_lanes {
            let source = folder.join(format!("{isa:?}-{lanes}.c"));
            let kernels: Vec<&KernelSource> = kernels.values().collect();
            std::fs::write(&source, C::new(isa).source(&kernels)).unwrap();
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
        let lowered = lowered(input, CIsa::Avx512);
        check_bytes(&lowered.plan);
        let got = show(&lowered, header.contains(" c"));
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
