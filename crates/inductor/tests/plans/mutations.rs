//! Plans that were changed after they were written: each is refused, or runs inside of its memory.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

use crate::support;

use kiln_inductor::{Lowered, Options, lower};
use kiln_ir::{DType, Graph, Scalar};
use kiln_plan::codec::{Code, Reader, Writer};
use kiln_plan::{Plan, Step, Surroundings};
use kiln_testkit::{Argument, Array, Data, Rng};
use support::{Random, Run, best_isa, compile};

fn bytes(plan: &Plan) -> Vec<u8> {
    let mut writer = Writer::new(&[]);
    plan.put(&mut writer);
    writer.into_bytes()
}

fn read(bytes: &[u8]) -> Option<Plan> {
    let mut reader = Reader::new(bytes, &[]);
    let plan = Plan::take(&mut reader)?;
    reader.is_done().then_some(plan)
}

/// What a run leaves behind, as bits; or what it refused, as other indices may be out of range.
fn results(
    lowered: &Lowered,
    graph: &Graph,
    options: &Options,
    inputs: &[Argument],
    compiled: &support::Compiled,
) -> Result<Vec<u64>, String> {
    let mut run = Run::new(lowered, graph, options, inputs);
    run.run(compiled)?;
    let mut out = Vec::new();
    for (memory, &value) in run.outputs.iter().zip(&graph.outputs) {
        let ty = graph.ty(value).as_tensor().unwrap();
        out.extend((0..ty.shape.numel()).map(|at| match memory.read(at, ty.dtype) {
            Scalar::Float(x) => x.to_bits(),
            Scalar::Int(x) => x as u64,
            Scalar::Bool(x) => u64::from(x),
        }));
    }
    Ok(out)
}

/// The part of a plan that is run.
fn core(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.report = Default::default();
    plan
}

#[test]
fn changed_plans_are_refused_or_stay_inside() {
    let many: u64 = std::env::var("KILN_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    let (mut refused, mut same, mut other, mut slowest) = (0, 0, Vec::new(), std::time::Duration::ZERO);
    // Those of the fusions: single ops have plans too small to go wrong in many ways.
    let fusions = support::golden::all(best_isa()).into_iter();
    for (file, graph, options) in fusions.filter(|(file, ..)| file.path.parent().unwrap().ends_with("fusion"))
    {
        let size: usize =
            graph.inputs.iter().filter_map(|&v| graph.ty(v).as_tensor()).map(|t| t.shape.numel()).sum();
        let lowered = lower(&graph, &options).unwrap();
        let plan = &lowered.plan;
        let is_run = |step: &Step| step.product().is_some() || !matches!(step, Step::Call(_));
        if size > 20_000 || !plan.steps.iter().all(is_run) || !graph.writes.is_empty() {
            continue;
        }
        let Some(compiled) = compile(&lowered.code, &*options.target) else { return };
        let mut inputs = Random(5).inputs(&graph);
        for input in &mut inputs {
            if let Argument::Tensor(Array { dtype: DType::I64, data: Data::Int(data), .. }) = input {
                data.iter_mut().for_each(|x| *x = x.rem_euclid(3));
            }
        }
        let expected = results(&lowered, &graph, &options, &inputs, &compiled);
        assert!(expected.is_ok(), "{}: {expected:?}", file.name());
        let surroundings =
            Surroundings::of(&graph, options.input_layouts.iter().map(|layout| &layout.strides));
        let start = std::time::Instant::now();
        plan.check(&surroundings).unwrap();
        slowest = slowest.max(start.elapsed());
        let original = bytes(plan);
        let mut rng = Rng::new(original.len() as u64);
        for _ in 0..many {
            let mut changed = original.clone();
            // Half of them among the numbers, of which there are few beside the texts.
            for _ in 0..1 + rng.below(2) {
                let from = if rng.one_in(2) { 0 } else { changed.len() * 2 / 3 };
                let at = from + rng.below(changed.len() - from);
                match rng.below(3) {
                    0 => changed[at] ^= 1 << rng.below(8),
                    1 => changed[at] = rng.below(256) as u8,
                    _ => changed[at] = changed[at].wrapping_add(1),
                }
            }
            // A kernel that was changed itself has another text, which is compiled then; what it computes is its own.
            let fits = |changed: &Plan| {
                let code = lowered.code.iter().map(|source| &*source.signature);
                changed.check(&surroundings).is_ok()
                    && changed.kernels == plan.kernels
                    && changed.check_signatures(code).is_ok()
            };
            let Some(changed) = read(&changed).filter(fits) else {
                refused += 1;
                continue;
            };
            let again = Lowered { plan: changed.clone(), code: lowered.code.clone() };
            if core(&changed) == core(plan)
                || results(&again, &graph, &options, &inputs, &compiled) == expected
            {
                same += 1;
            } else {
                let (a, b) = (format!("{:#?}", core(plan)), format!("{:#?}", core(&changed)));
                let lines = a.lines().zip(b.lines()).filter(|(a, b)| a != b);
                let what: Vec<String> =
                    lines.take(3).map(|(a, b)| format!("{} -> {}", a.trim(), b.trim())).collect();
                other.push(format!("{}: {}", file.name(), what.join("; ")));
            }
        }
    }
    let others = other.join("\n");
    eprintln!(
        "{refused} refused, {same} the same, {} others; a check takes {slowest:?}\n{others}",
        other.len()
    );
    // What is left are constants, extents and strides that lead to other elements of the same buffers: the seal is for
    // those.
    assert!(20 * other.len() < refused, "{others}");
    // Names of ops and lines make up the rest.
    assert!(refused > same);
}
