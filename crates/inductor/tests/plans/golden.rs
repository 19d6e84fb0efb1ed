//! Golden files: a graph, then the plan it is lowered to. `BLESS=1` renews them. What headers may say is in
//! `support/golden.rs`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

use crate::support;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;

use kiln_inductor::{C, KernelSource, LowerError, Lowered, Target as _, WhyNot, lower};
use kiln_ir::math::c::{FLAGS, Isa};
use kiln_ir::{Class, Op, Row};
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
        let (graph, options) = parse(header, input, Isa::Avx512);
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
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Plain] {
        let mut by_lanes: BTreeMap<usize, BTreeMap<String, KernelSource>> = BTreeMap::new();
        for (_, graph, options) in all(isa) {
            for kernel in lower(&graph, &options).unwrap().code {
                by_lanes.entry(kernel.lanes).or_default().insert(kernel.name.clone(), kernel);
            }
        }
        for (lanes, kernels) in by_lanes {
            let source = folder.join(format!("{isa:?}-{lanes}.c"));
            let kernels: Vec<&KernelSource> = kernels.values().collect();
            std::fs::write(&source, C::new(isa).source(&kernels)).unwrap();
            let mut command = Command::new(&clang);
            command.args(FLAGS).args(isa.flags()).args(["-O0", "-c", "-o"]);
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
    for (_, graph, _) in all(Isa::Avx512) {
        graph.nodes.iter().for_each(|node| shown[node.op.index()] = true);
    }
    let is_prim = |row: &&Row| row.class != Class::Custom && (row.decompose.is_none() || row.prim.is_some());
    let prims = Op::ROWS.iter().filter(is_prim);
    let row = |name: &str| Op::ROWS.iter().position(|row| row.name == name).unwrap();
    assert_all_shown("these prims", prims.map(|row| row.name), |name| shown[row(name)]);
}

/// The kinds of refusals, each with a piece of text that tells it from the others. The match sees to it that no kind
/// is left out.
macro_rules! kinds {
    ($($kind:pat => $text:literal,)*) => {
        const KINDS: &[&str] = &[$($text),*];
        const _: fn(&WhyNot) = |why| match why { $($kind => (),)* };
    };
}

kinds! {
    WhyNot::Stored { .. } => " is stored: ",
    WhyNot::OtherLoops { .. } => " reduces other dims than its consumer iterates",
    WhyNot::FewRows { .. } => ": reduced in parallel first",
    WhyNot::ComputedOnce { .. } => "computing it again would cost",
    WhyNot::SharedReduction { .. } => " is a reduction that ",
    WhyNot::Spaces { .. } => " iterate different spaces",
    WhyNot::Between { .. } => " another step lies between them",
    WhyNot::OtherPlace { .. } => " is read at other places than it is computed",
    WhyNot::TooLarge { .. } => " operations",
    WhyNot::Buffers { .. } => " buffers",
    WhyNot::StillRead { .. } => "its old contents are still read",
    WhyNot::MayFail { .. } => "a step that comes later may fail",
    WhyNot::Scatter { .. } => " is made by a library step: ",
    WhyNot::Layouts { .. } => "its tensors have different layouts",
    WhyNot::Epilogue { .. } => "a kernel runs after the product that it reads",
    WhyNot::Bands { .. } => "don't run together in bands of rows: ",
}

/// Reasons that no graph leads to, and why.
const UNREACHED: [(&str, &str); 3] = [
    ("it has no loop form", "whatever is computed in loops has one for every dtype that its row allows"),
    ("a product writes what another step reads", "products write memory of their own"),
    (
        "a kernel reads what another leaves for later",
        "the steps before it are a group, which is judged instead",
    ),
];

/// The reasons that refusals give, as the sources have them.
fn reasons() -> BTreeSet<String> {
    let sources = [
        include_str!("../../src/fuse/merge.rs"),
        include_str!("../../src/fuse/mod.rs"),
        include_str!("../../src/fuse/shared.rs"),
        include_str!("../../src/lower/mod.rs"),
        include_str!("../../src/rewrite/scatters.rs"),
        include_str!("../../src/schedule/bands.rs"),
        include_str!("../../src/schedule/epilogue.rs"),
    ];
    let before = ["reason: ", "reason = ", "refusal(", "Joined::No(", "end = Some(", "unwrap_or(", "Err("];
    let mut found = BTreeSet::new();
    for source in sources {
        let mut pieces = source.split('"');
        // What stands before a literal, and the literal.
        while let (Some(code), Some(literal)) = (pieces.next(), pieces.next()) {
            if before.iter().any(|marker| code.ends_with(marker)) {
                found.insert(literal.to_string());
            }
        }
    }
    found
}

/// Nothing is refused for a reason that no golden file shows.
#[test]
fn every_refusal_is_shown() {
    let files = golden::files(FOLDER).unwrap_or_else(|e| panic!("{e}"));
    let lines = files.iter().flat_map(|file| file.expected().lines());
    let told: Vec<&str> = lines.filter_map(|line| line.strip_prefix("not fused: ")).collect();
    let is_told = |text: &str| told.iter().any(|line| line.contains(text));
    assert_all_shown("these refusals", KINDS.iter().copied(), is_told);
    let reasons = reasons();
    assert!(reasons.len() > 30, "only {} reasons were found in the sources: {reasons:?}", reasons.len());
    for (reason, why) in UNREACHED {
        assert!(reasons.contains(reason), "no refusal is for the reason that {reason}");
        assert!(!is_told(reason), "a file shows {reason}, but it can't be, for {why}");
    }
    let reached = reasons.iter().map(String::as_str).filter(|r| UNREACHED.iter().all(|(not, _)| r != not));
    assert_all_shown("refusals for these reasons", reached, is_told);
}
