//! Golden files: a graph, then the plan it is lowered to. `BLESS=1` renews them. What headers may say is in
//! `support/golden.rs`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

mod support;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use kiln_inductor::{KernelSource, LowerError, Lowered, lower};
use kiln_ir::Op;
use kiln_ir::math::c::{CIsa, FLAGS};
use kiln_plan::Plan;
use kiln_plan::codec::{Code, Reader, Writer};
use kiln_testkit::golden::{self, assert_all_shown};
use support::golden::{FOLDER, all, parse};

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

#[test]
fn golden() {
    let stage = |header: &str, input: &str| -> Result<String, LowerError> {
        let (graph, options) = parse(header, input, CIsa::Avx512);
        let lowered = lower(&graph, &options)?;
        check_bytes(&lowered.plan);
        Ok(show(&lowered, header.split(' ').any(|word| word == "c")))
    };
    golden::run(FOLDER, stage).unwrap_or_else(|e| panic!("{e}"));
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
        for (_, graph, options) in all(isa) {
            for kernel in lower(&graph, &options).unwrap().code {
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

/// A new prim needs a golden file: whoever adds one sees the loops or the call that it becomes.
#[test]
fn every_prim_is_shown() {
    let mut shown = vec![false; Op::ROWS.len()];
    for (_, graph, _) in all(CIsa::Avx512) {
        graph.nodes.iter().for_each(|node| shown[node.op.index()] = true);
    }
    let prims = Op::ROWS.iter().filter(|row| row.decompose.is_none() || row.prim.is_some());
    let row = |name: &str| Op::ROWS.iter().position(|row| row.name == name).unwrap();
    assert_all_shown("these prims", prims.map(|row| row.name), |name| shown[row(name)]);
}
