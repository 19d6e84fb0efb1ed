//! The whole compiler as one list of stages: from what was recorded to something that runs.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_aot::trace::{Event as TraceEvent, TraceArg, Variable};
use kiln_aot::{Functional, GraphInput, Home, Joint, Partition, Report, Survivor, Trace};
use kiln_inductor::{Bands, Layout as InputLayout, Options, Plan as Lowered, Step, Tuning};
use kiln_ir::{Grad, Graph, Layout, Loc, Op, Result, Stage, Ty, Value, carries_gradient};
use kiln_prims::Rounding;
use kiln_runtime::{threads, warn};
use kiln_tensor::hook::Scope;

use crate::analysis::{self, Analysis, Far, OVERWRITTEN, TapeCall};
use crate::autotune;
use crate::backend::{Backend, Custom, GraphContext, GraphKind, Level, OutputRole};
use crate::counters::{Count, count};
use crate::explain::StepInfo;
use crate::graph_cache::{Around, Entry, Key, Made, Outline, PartFacts, Planned};
use crate::kernels::{self, Loading};
use crate::logs::{self, Log};
use crate::options::Mode;
use crate::region::Site;
use crate::report;
use crate::segment::{Backward, Code, Info, Plan, Segment, Tape, Text};
use crate::settings::{Numerics, Settings};
use crate::trie::LiveSet;

/// Compiles the segment that ends at `at`; what can't be compiled is interpreted, with the reason.
/// `known` is the analysis of the recording, if it was kept; `general`: the graph came in other sizes before, so that
/// kernels are written for any; `name` tells the names of inputs that have one.
pub(crate) fn compile(
    site: &Site,
    at: u32,
    live: &LiveSet,
    known: Option<&Analysis>,
    general: bool,
    name: &dyn Fn(Variable) -> Option<String>,
) -> Segment {
    count(Count::Graph);
    // Measuring, and backends that users wrote, run ops of their own.
    let _eager = Scope::suspend();
    let trace = analysis::trace(&site.trie, at);
    let made;
    let tape = match known {
        Some(known) => known,
        None => {
            made = Analysis::of(&site.trie, at);
            &made
        }
    };
    let keep_text = site.options.settings.keep_text;
    let (keep_plans, planned) = (false, Vec::new());
    let mut stages =
        Stages { info: Info::default(), started: Instant::now(), keep_text, keep_plans, planned, general };
    stages.info.nodes = trace.events.len();
    if let Some(known) = known {
        stages.info.stages.push(("capture", known.started.elapsed()));
    }
    let inputs = (0..).zip(&trace.variables).filter(|(_, variable)| variable.input.is_some());
    stages.info.names = inputs.filter_map(|(v, _)| Some((v, name(v)?))).collect();
    let in_steps =
        site.trie.path(at).into_iter().any(|index| site.trie.node(index).event.delivers_in_steps());
    stages.info.without_gradient = without_gradient(&trace, in_steps);
    let plan = match plan(site, &trace, tape, live, &mut stages) {
        Ok(plan) => plan,
        Err(reason) => Plan::Interpreted(reason),
    };
    if let Plan::Interpreted(reason) = &plan {
        let reason = reason.clone();
        logs::write(Log::Graph, "interpreted", &|| reason.clone());
    }
    logs::write(Log::Timing, "timing", &|| {
        stages.info.stages.iter().map(|(n, t)| format!("{n:<16}{t:>12.3?}\n")).collect()
    });
    Segment { plan, info: stages.info }
}

fn plan(
    site: &Site,
    trace: &Trace,
    tape: &Analysis,
    live: &LiveSet,
    stages: &mut Stages,
) -> Result<Plan, String> {
    let live = variables(live);
    if site.options.backend.is(Backend::Eager) {
        return Err("backend eager".into());
    }
    compilable(trace)?;
    let functional = stages.run("functionalise", || kiln_aot::functionalise(trace, &live))?;
    stages.text("graph", Log::Graph, functional.graph.clone(), Stage::Functional)?;
    let (used_up, gradients) = leaving(site, trace, tape, &functional)?;
    let key = key(site, trace, &functional, gradients.as_ref(), stages.general);
    let found = key.as_ref().and_then(|key| stages.timed("graph cache", || key.find()));
    let found = found.filter(|entry| {
        let general = stages.general;
        let fits = || entry_fits(site, trace, &functional, gradients.as_ref(), entry, general);
        let checked = stages.timed("graph cache", fits);
        checked
            .inspect_err(|reason| {
                logs::write(Log::Recompiles, "graph cache", &|| format!("not used: {reason}"))
            })
            .is_ok()
    });
    let found = found.and_then(|entry| stages.run_entry(site, entry));
    let made = match found {
        Some(made) => {
            stages.texts_again(site, &functional, gradients.as_ref());
            made
        }
        None => {
            stages.keep_plans = key.is_some();
            let made = make(site, trace, &functional, gradients.as_ref(), stages)?;
            if let Some(key) = key {
                let plans = std::mem::take(&mut stages.planned);
                stages.timed("graph cache", || key.keep(&made, &plans));
                if cfg!(debug_assertions)
                    && let Some(entry) = key.find()
                {
                    let general = stages.general;
                    entry_fits(site, trace, &functional, gradients.as_ref(), &entry, general)?;
                }
            }
            made
        }
    };
    let Made { code, forward_outputs, parts, .. } = made;
    let backward = gradients.map(|gradients| connect(tape, &gradients, forward_outputs, parts));
    Ok(Plan::Compiled {
        code: Box::new(code),
        inputs: functional.inputs,
        survivors: functional.survivors,
        backward: backward.unwrap_or_default(),
        used_up,
    })
}

/// Takes a functional graph through the passes.
fn make(
    site: &Site,
    trace: &Trace,
    functional: &Functional,
    gradients: Option<&Gradients>,
    stages: &mut Stages,
) -> Result<Made, String> {
    let forward = layouts(trace, &functional.inputs);
    let Some(gradients) = gradients else {
        let graph = stages.prims(site, &functional.graph)?;
        let results = functional.graph.outputs.len();
        let code = stages.lower(site, &graph, &forward, GraphKind::Whole, results)?;
        return Ok(Made { code, forward_outputs: results, parts: Vec::new(), report: Report::default() });
    };
    let joint = stages.run("joint", || gradients.joint(functional))?;
    stages.text("joint", Log::Joint, Arc::new(joint.graph.clone()), Stage::Functional)?;
    let prims = Arc::unwrap_or_clone(stages.prims(site, &joint.graph)?);
    let joint = Joint { graph: prims, ..joint };
    let partition = stages.run("partition", || kiln_aot::partition(&joint))?;
    let Partition { forward: graph, forward_outputs, backward, report } = partition;
    stages.saved(report);
    let code = stages.lower(site, &graph, &forward, GraphKind::Forward, forward_outputs)?;
    let mut parts = Vec::with_capacity(backward.len());
    for (outputs, part) in gradients.outputs.iter().zip(backward) {
        let layouts = backward_layouts(&forward, &part);
        let results = part.graph.outputs.len();
        let code = stages.lower(site, &part.graph, &layouts, GraphKind::Backward, results)?;
        let saved = part.saved.iter().map(|saved| saved.what).zip(lines(&part.graph)).collect();
        let partial = (outputs.len() > 1).then_some(part.graph);
        parts.push((PartFacts { saved, grads: part.grads, partial }, code));
    }
    Ok(Made { code, forward_outputs, parts, report })
}

/// Whether an entry of the graph cache can be what its graph would be compiled to.
fn entry_fits(
    site: &Site,
    trace: &Trace,
    functional: &Functional,
    gradients: Option<&Gradients>,
    entry: &Entry,
    general: bool,
) -> Result<(), String> {
    let tangents = gradients.map_or(&[][..], |gradients| &gradients.outputs);
    let options = lowering(site, &layouts(trace, &functional.inputs), false, general);
    entry.check(&Around {
        graph: &functional.graph,
        options: &options,
        tangents: tangents.iter().map(|part| part.iter().map(|&(_, output)| output).collect()).collect(),
        targets: gradients.map_or_else(Vec::new, |of| of.inputs.iter().map(|&(input, _)| input).collect()),
    })
}

/// How a graph with inputs like these is lowered.
fn lowering(site: &Site, layouts: &Arc<[InputLayout]>, constants: bool, general: bool) -> Options {
    Options {
        input_layouts: layouts.clone(),
        isa: kernels::c_isa(site.options.settings.build().isa),
        threads: threads::count(),
        tuning: site.options.settings.tuning(),
        constants,
        general,
    }
}

/// The key of a graph whose plan may be kept, or may have been.
fn key<'a>(
    site: &Site,
    trace: &Trace,
    functional: &'a Functional,
    gradients: Option<&Gradients>,
    general: bool,
) -> Option<Key<'a>> {
    let options = &site.options;
    let usual = options.backend.is(Backend::Inductor) && options.mode != Mode::MaxAutotune;
    // Who wants to see the stages wants them to be gone through.
    let shown = [Log::Joint, Log::Prims].into_iter().any(logs::enabled);
    if !usual || shown || !options.settings.graph_cache {
        return None;
    }
    let recorded = gradients.map(|_| &functional.recorded);
    let build = options.settings.build();
    let layouts = layouts(trace, &functional.inputs);
    Some(Key::new(
        &functional.graph,
        &[
            &options.settings,
            &options.mode,
            &build,
            &threads::count(),
            &layouts,
            &gradients,
            &recorded,
            &general,
        ],
    ))
}

/// Parts of a backward, each with what it takes and gives.
pub(crate) fn connect(
    tape: &Analysis,
    gradients: &Gradients,
    forward_outputs: usize,
    codes: Vec<(PartFacts, Code)>,
) -> Vec<Arc<Backward>> {
    // Gradients are for inputs, and for the results of parts that come before.
    let mut targets: Vec<Variable> = gradients.inputs.iter().map(|&(_, v)| v).collect();
    let mut ends: FxHashMap<usize, Variable> = FxHashMap::default();
    let mut parts = Vec::with_capacity(codes.len());
    for (outputs, (facts, code)) in gradients.outputs.iter().zip(codes) {
        let tape_of = |v: Variable| Tape::new(tape, tape.reach_as_far(&[v], Far::Makers(&ends)));
        let given = targets.iter().zip(facts.grads).filter_map(|(&v, result)| Some((v, result?)));
        parts.push(Arc::new(Backward {
            code,
            saved: facts.saved,
            partial: facts.partial,
            grads: given.collect(),
            tapes: outputs.iter().map(|&(v, _)| tape_of(v)).collect(),
            tangents: outputs.clone(),
            forward_outputs,
        }));
        for &(variable, _) in outputs {
            targets.push(variable);
            ends.extend(tape.maker(variable).map(|maker| (maker, variable)));
        }
    }
    parts
}

/// The stages' timings, texts and counts.
struct Stages {
    info: Info,
    started: Instant,
    keep_text: bool,
    /// Whether plans are kept for other processes, and those made so far.
    keep_plans: bool,
    planned: Vec<Planned>,
    /// Whether kernels are written for any sizes.
    general: bool,
}

impl Stages {
    fn run<T>(&mut self, name: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T, String> {
        let begin = Instant::now();
        let result = body().map_err(|error| format!("{name}: {error}"));
        self.info.stages.push((name, begin.elapsed()));
        result
    }

    fn text(&mut self, name: &'static str, log: Log, graph: Arc<Graph>, stage: Stage) -> Result<(), String> {
        if cfg!(debug_assertions) {
            graph.verify(stage, name).map_err(|error| error.to_string())?;
        }
        logs::write(log, name, &|| graph.to_string());
        if self.keep_text {
            self.info.texts.push((name, Text::Graph(graph)));
        }
        Ok(())
    }

    fn prims(&mut self, site: &Site, graph: &Graph) -> Result<Arc<Graph>, String> {
        let backend = &site.options.backend;
        let wants_aten = backend.custom().is_some_and(|custom| custom.level() == Level::Aten);
        if wants_aten || backend.is(Backend::AotEager) {
            return Ok(Arc::new(graph.clone()));
        }
        let graph = Arc::new(self.run("prims", || kiln_prims::lower_rounding(graph, rounding(site)))?);
        self.text("prims", Log::Prims, graph.clone(), Stage::Prims)?;
        Ok(graph)
    }

    /// Makes a graph run; its first `results` outputs are what it is for, others are saved for a backward.
    fn lower(
        &mut self,
        site: &Site,
        graph: &Graph,
        layouts: &Arc<[InputLayout]>,
        kind: GraphKind,
        results: usize,
    ) -> Result<Code, String> {
        let options = &site.options;
        if options.backend.is(Backend::AotEager) {
            return Ok(Code::Graph(graph.clone()));
        }
        if options.backend.custom().is_some() {
            return self.custom(site, graph, layouts, kind, results);
        }
        let build = options.settings.build();
        let constants = options.settings.keep_weights && kind == GraphKind::Whole && !has_gradients(graph);
        let lowering = lowering(site, layouts, constants, self.general);
        let lower_without = |tuning: Tuning, refused: &[String]| {
            let lowering = Options { tuning, ..lowering.clone() };
            let lowered = kiln_inductor::lower_without(graph, &lowering, refused);
            lowered.map_err(|error| format!("inductor: {error}"))
        };
        let lower = |tuning: Tuning| lower_without(tuning, &[]);
        let mut lowered = self.timed("inductor", || lower(lowering.tuning))?;
        let loaded = self.timed("compile", || kernels::load(&lowered, build));
        let refused = loaded.as_ref().map_or(&[][..], |loaded| &loaded.refused);
        if !refused.is_empty() {
            let names: Vec<String> = refused.iter().map(|(name, _)| name.clone()).collect();
            lowered = self.timed("inductor", || lower_without(lowering.tuning, &names))?;
        }
        self.describe(&lowered, refused);
        let loading = loaded?;
        let mut kernels = loading.find(&lowered)?;
        let Loading { compiled, refused, .. } = loading;
        self.info.compiled_kernels += compiled;
        // Forms are compared step by step, so all must be kernels.
        if options.mode == Mode::MaxAutotune && refused.is_empty() {
            let choose = || autotune::choose_products(graph, lowered, &options.settings, &lower);
            let chosen = self.timed("autotune", choose);
            self.info.compiled_kernels += chosen.compiled;
            self.info.tuned.extend(chosen.note);
            lowered = chosen.plan;
            kernels = kernels::load(&lowered, build)?.find(&lowered)?;
            // Forms replace each other step by step, so they are those of the plan that was chosen.
            let settings = Settings { max_inline_product: chosen.products, ..options.settings.clone() };
            let tuned =
                self.timed("autotune", || autotune::tune(graph, &lowered, kernels, &settings, &lower));
            self.info.compiled_kernels += tuned.compiled;
            self.info.tuned.extend(tuned.notes);
            (lowered, kernels) = (tuned.plan, tuned.kernels);
        }
        let outline = Outline::of(graph)?;
        let program = self.timed("bind", || kernels::bind(&outline, &lowered, &kernels, options.mode))?;
        // A compiler that fails now may not fail in another process.
        if self.keep_plans && refused.is_empty() {
            self.planned.push(Planned { outline, plan: lowered });
        }
        self.info.stages.push(("total", self.started.elapsed()));
        Ok(Code::Program(program))
    }

    /// Makes an entry of the graph cache run; `None` if it does not: what it says of kernels may no longer hold.
    fn run_entry(&mut self, site: &Site, entry: Entry) -> Option<Made> {
        let build = site.options.settings.build();
        let plans = entry.parts.iter().map(|(_, part)| part);
        let mut loaded = Vec::with_capacity(1 + entry.parts.len());
        for planned in [&entry.forward].into_iter().chain(plans) {
            let loading = self.timed("compile", || kernels::load(&planned.plan, build)).ok()?;
            let kernels = loading.find(&planned.plan).ok().filter(|_| loading.refused.is_empty())?;
            loaded.push((kernels, loading.compiled));
        }
        let mut loaded = loaded.into_iter();
        let mut code = |planned: &Planned| {
            let (kernels, compiled) = loaded.next()?;
            self.info.compiled_kernels += compiled;
            self.describe(&planned.plan, &[]);
            let mode = site.options.mode;
            let bound = self.timed("bind", || kernels::bind(&planned.outline, &planned.plan, &kernels, mode));
            bound.ok().map(Code::Program)
        };
        let forward = code(&entry.forward)?;
        let mut parts = Vec::with_capacity(entry.parts.len());
        for (facts, planned) in entry.parts {
            parts.push((facts, code(&planned)?));
        }
        self.saved(entry.report);
        self.info.stages.push(("total", self.started.elapsed()));
        Some(Made { code: forward, forward_outputs: entry.forward_outputs, parts, report: entry.report })
    }

    fn saved(&mut self, report: Report) {
        self.info.bytes_saved = report.bytes_saved;
        self.info.bytes_recomputed = report.bytes_recomputed;
    }

    /// The texts of stages that were not gone through, made when somebody reads them.
    fn texts_again(&mut self, site: &Site, functional: &Functional, gradients: Option<&Gradients>) {
        if !self.keep_text {
            return;
        }
        let leave = gradients.is_some();
        let (functional, gradients, rounding) = (functional.clone(), gradients.cloned(), rounding(site));
        let whole = move || match &gradients {
            Some(gradients) => gradients.joint(&functional).map(|joint| joint.graph),
            None => Ok((*functional.graph).clone()),
        };
        let whole = Arc::new(whole);
        let text = |graph: Result<Graph>| graph.map_or_else(|error| error.to_string(), |g| g.to_string());
        let joint = whole.clone();
        let joint = Text::later(move || text(joint()));
        let prims =
            Text::later(move || text(whole().and_then(|graph| kiln_prims::lower_rounding(&graph, rounding))));
        // In the order of the stages: behind the graph.
        let joint = leave.then_some(("joint", joint));
        self.info.texts.splice(1..1, joint.into_iter().chain([("prims", prims)]));
    }

    /// Has the user's backend make a graph run.
    fn custom(
        &mut self,
        site: &Site,
        graph: &Graph,
        layouts: &[InputLayout],
        kind: GraphKind,
        results: usize,
    ) -> Result<Code, String> {
        let options = &site.options;
        let Some(backend) = options.backend.custom() else { return Err("no backend".into()) };
        let is_tensor = |v: &Value| matches!(graph.ty(*v), Ty::Tensor(_));
        let strides = graph.inputs.iter().zip(layouts);
        let strides = strides.map(|(v, layout)| is_tensor(v).then(|| layout.strides.clone())).collect();
        let mut outputs = vec![OutputRole::Result; results];
        outputs.resize(graph.outputs.len(), OutputRole::Saved);
        let context = GraphContext {
            name: site.name(),
            kind,
            mode: options.mode,
            dynamic: options.dynamic,
            settings: &options.settings,
            strides,
            outputs,
        };
        let name = options.backend.name();
        let made = self.timed("backend", || {
            Custom::compile(backend, name, graph, context).map_err(|error| error.to_string())
        });
        made.map(Code::Custom).map_err(|error| {
            let text = format!("backend {name} can't compile a graph: {error}");
            warn::once(&text, || format!("{text}; it runs op by op"));
            text
        })
    }

    fn timed<T>(&mut self, name: &'static str, body: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = body();
        self.info.stages.push((name, begin.elapsed()));
        result
    }

    /// Tells what a plan does; `refused` are the kernels that it does without, and why.
    fn describe(&mut self, lowered: &Lowered, refused: &[(String, String)]) {
        for kernel in &lowered.kernels {
            logs::write(Log::Loops, &kernel.name, &|| kernel.loops.clone());
            logs::write(Log::Code, &kernel.name, &|| kernel.source(lowered.isa));
            if self.keep_text {
                self.info.texts.push(("loops", Text::Source(kernel.loops.clone())));
                self.info.texts.push(("code", Text::Source(kernel.code.clone())));
            }
        }
        logs::write(Log::Fusion, "fusion", &|| lowered.report.to_string());
        let info = &mut self.info;
        info.arena_bytes += lowered.arena_bytes;
        for (index, (step, report)) in lowered.steps.iter().zip(&lowered.report.steps).enumerate() {
            match step {
                Step::Kernel { .. } => info.kernels += 1,
                Step::Fallback { op, loc, .. } => info.fallbacks.push(format!("{} at {loc}", op.name())),
                Step::Eager { .. } => {
                    let reason = refused.first().map_or("", |(_, reason)| reason);
                    let reason = reason.lines().next().unwrap_or_default();
                    info.fallbacks.push(format!("{}: {reason}", report::by_line(&report.ops)));
                }
                Step::Gemm { .. }
                | Step::Bmm { .. }
                | Step::Convolution { .. }
                | Step::Random { .. }
                | Step::Copy { .. } => info.library_calls += 1,
            }
            info.bytes_read += report.bytes_read;
            info.bytes_written += report.bytes_written;
            let follows = |bands: &&Bands| (bands.first + 1..bands.first + bands.steps).contains(&index);
            let is_epilogue = index > 0 && lowered.steps[index - 1].has_epilogue();
            let joined = match lowered.bands.iter().find(follows) {
                Some(bands) => Some(format!("on {} rows at a time with the step before", bands.rows)),
                None => is_epilogue.then(|| "together with the step before".into()),
            };
            info.steps.push(StepInfo {
                name: report.name.clone(),
                ops: report.ops.clone(),
                bytes_read: report.bytes_read,
                bytes_written: report.bytes_written,
                joined,
            });
        }
        info.why_not.extend(lowered.report.why_not.iter().cloned());
    }
}

/// Whether a graph computes gradients of convolutions' kernels: then these are about to change.
fn has_gradients(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| matches!(node.op, Op::ConvolutionWeightGradient { .. }))
}

pub(crate) fn variables(live: &LiveSet) -> Vec<Variable> {
    let bit = |i: u32| live[i as usize / 64] >> (i % 64) & 1 == 1;
    (0..live.len() as u32 * 64).filter(|&i| bit(i)).collect()
}

/// Leaves that were used where gradients are recorded and that no `backward` reached, if there was one.
fn without_gradient(trace: &Trace, in_steps: bool) -> Vec<Variable> {
    let mut used = FxHashSet::default();
    let mut reached = FxHashSet::default();
    let mut walked = in_steps;
    for event in &trace.events {
        match event {
            TraceEvent::Call { op, args, grad_enabled: true, .. } if !matches!(op.row().grad, Grad::Zero) => {
                used.extend(args.iter().filter_map(|arg| match arg {
                    TraceArg::Variable(v) => Some(*v),
                    TraceArg::Number(_) | TraceArg::Constant(_) => None,
                }));
            }
            TraceEvent::Call { .. } => {}
            TraceEvent::Backward { targets, .. } => {
                walked = true;
                reached.extend(targets.iter().map(|(leaf, _)| *leaf));
            }
            TraceEvent::Grad { inputs, .. } => reached.extend(inputs),
            TraceEvent::RequiresGrad { .. } | TraceEvent::Retain { .. } | TraceEvent::Apply { .. } => {}
        }
    }
    let waits = |v: &Variable| {
        let input = trace.variables[*v as usize].input.as_ref();
        used.contains(v) && !reached.contains(v) && input.is_some_and(|i| i.requires_grad && i.leaf)
    };
    if walked { (0..trace.variables.len() as Variable).filter(waits).collect() } else { Vec::new() }
}

/// Why a trace can't become a graph, if it can't.
pub(crate) fn compilable(trace: &Trace) -> Result<(), String> {
    let mut requires: Vec<bool> =
        trace.variables.iter().map(|v| v.input.as_ref().is_some_and(|input| input.requires_grad)).collect();
    for event in &trace.events {
        if let TraceEvent::Grad { results, create_graph: true, .. } = event {
            results.iter().flatten().for_each(|&result| requires[result as usize] = true);
        }
        if let TraceEvent::RequiresGrad { variable, on, .. } = event {
            requires[*variable as usize] = *on;
        }
        if let TraceEvent::Apply { outputs, .. } = event {
            outputs.iter().for_each(|&output| requires[output as usize] = true);
        }
        let TraceEvent::Call { op, args, out, in_place, grad_enabled, loc } = event else { continue };
        let wants = |arg: &TraceArg| matches!(arg, TraceArg::Variable(v) if requires[*v as usize]);
        let flows = *grad_enabled && !matches!(op.row().grad, Grad::Zero) && args.iter().any(wants);
        let target = match (in_place, args.first()) {
            (true, Some(TraceArg::Variable(target))) => Some(*target),
            _ => *out,
        };
        let Some(target) = target else { continue };
        let variable = &trace.variables[target as usize];
        let flows = flows && carries_gradient(&variable.ty);
        if *in_place && flows && variable.input.is_some() {
            return Err(format!(
                "{}_ at {loc} changes an input and gradients flow through the change",
                op.name()
            ));
        }
        requires[target as usize] |= flows;
    }
    Ok(())
}

pub(crate) fn layouts(trace: &Trace, inputs: &[GraphInput]) -> Arc<[InputLayout]> {
    inputs
        .iter()
        .map(|input| match input {
            GraphInput::Number(_) => InputLayout::default(),
            GraphInput::Variable(v) => {
                let strides = trace.variables[*v as usize].input.as_ref().map(|i| i.layout.strides.clone());
                InputLayout { strides: strides.unwrap_or_default() }
            }
        })
        .collect()
}

/// Results whose tape was used up, and what of it a pass would meet first.
pub(crate) type UsedUp = Vec<(Variable, Option<TapeCall>)>;

/// Which results leave with gradients, and which inputs those reach.
#[derive(Clone, Debug)]
pub(crate) struct Gradients {
    /// Survivors, variable and output, by the part of the backward that begins at them: those that depend on
    /// others come later.
    pub(crate) outputs: Vec<Vec<(Variable, usize)>>,
    /// Graph inputs: position and variable.
    inputs: Vec<(usize, Variable)>,
}

/// The results that leave with a tape that a `backward` inside used up, and those that leave with a good one.
pub(crate) fn leaving(
    site: &Site,
    trace: &Trace,
    tape: &Analysis,
    functional: &Functional,
) -> Result<(UsedUp, Option<Gradients>), String> {
    let mut outputs = Vec::new();
    // Behind a custom function nothing is sure: a pass that comes may not get there. What is behind a pass that is
    // on the tape itself shows in the graph only.
    let is_used_up =
        |s: &&Survivor| (tape.twice && s.used_up) || tape.reach_as_far(&[s.variable], Far::Functions).freed;
    let (used_up, leaving): (Vec<&Survivor>, Vec<&Survivor>) =
        functional.survivors.iter().filter(|s| s.requires_grad).partition(is_used_up);
    let used_up = used_up.iter().map(|s| (s.variable, tape.first_used_up(s.variable))).collect();
    if leaving.iter().any(|s| tape.reach_as_far(&[s.variable], Far::Functions).overwritten) {
        return Err(OVERWRITTEN.into());
    }
    if leaving.iter().any(|s| s.twice) {
        return Err("a gradient leaves the compiled function with its own tape".into());
    }
    if let Some(reason) =
        leaving.iter().find_map(|s| tape.stays_inside(s.variable, &tape.reach(&[s.variable])))
    {
        site.split();
        return Err(format!("{reason}; from the next call on the graph ends there"));
    }
    for survivor in leaving {
        let (home, layout) = &survivor.homes[0];
        match home {
            Home::Output(i) if is_whole(functional, *i, layout) && !outputs.iter().any(|(_, o)| o == i) => {
                outputs.push((survivor.variable, *i));
            }
            _ => {
                return Err("a view leaves the compiled function with gradients and shares its memory".into());
            }
        }
    }
    if outputs.is_empty() {
        return Ok((used_up, None));
    }
    let inputs = functional.inputs.iter().enumerate().filter_map(|(i, input)| match input {
        GraphInput::Variable(v) => trace.variables[*v as usize]
            .input
            .as_ref()
            .is_some_and(|input| input.requires_grad)
            .then_some((i, *v)),
        GraphInput::Number(_) => None,
    });
    let inputs: Vec<(usize, Variable)> = inputs.collect();
    let graph = &functional.graph;
    let targets: FxHashSet<Value> = graph.writes.iter().map(|w| w.target).collect();
    if inputs.iter().any(|&(i, _)| targets.contains(&graph.inputs[i])) {
        return Err("a leaf is changed in place and results leave with gradients".into());
    }
    let outputs = in_parts(tape, functional, outputs)?;
    Ok((used_up, Some(Gradients { outputs, inputs })))
}

/// Results that leave with gradients, in parts: one that was computed from another comes in a later part.
fn in_parts(
    tape: &Analysis,
    functional: &Functional,
    mut outputs: Vec<(Variable, usize)>,
) -> Result<Vec<Vec<(Variable, usize)>>, String> {
    outputs.sort_by_key(|&(v, _)| tape.maker(v));
    let mut parts: Vec<Vec<(Variable, usize)>> = Vec::new();
    for &(variable, output) in &outputs {
        let calls = tape.reach(&[variable]).calls;
        let before = |&(v, _): &(Variable, usize)| {
            v != variable && tape.maker(v).is_some_and(|maker| calls.contains(&maker))
        };
        let part = parts.iter().rposition(|part| part.iter().any(before)).map_or(0, |part| part + 1);
        // Gradients flow over values of the graph: they must be met where the tape has them.
        let graph = &functional.graph;
        let met = differentiated(functional, graph.outputs[output]);
        let agrees = |(v, o): &(Variable, usize)| {
            *v == variable || before(&(*v, *o)) == met[graph.outputs[*o].index()]
        };
        if parts.iter().flatten().any(|other| !agrees(other)) {
            return Err("a result that leaves is the same value as another whose gradient is its own".into());
        }
        match parts.get_mut(part) {
            Some(part) => part.push((variable, output)),
            None => parts.push(vec![(variable, output)]),
        }
    }
    Ok(parts)
}

/// The values that gradients of a value flow to.
fn differentiated(functional: &Functional, value: Value) -> Vec<bool> {
    let graph = &functional.graph;
    let mut met = vec![false; graph.value_count()];
    met[value.index()] = true;
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        let recorded = functional.recorded.get(index).copied().unwrap_or(false);
        let flows = recorded && !matches!(node.op.row().grad, Grad::Zero);
        if flows && node.outs.iter().any(|out| met[out.index()]) {
            node.args.iter().for_each(|arg| met[arg.index()] |= carries_gradient(graph.ty(*arg)));
        }
    }
    met
}

/// For each input of a graph the user's line that it is first read for.
pub(crate) fn lines(graph: &Graph) -> Vec<Loc> {
    let mut lines = vec![Loc::UNKNOWN; graph.value_count()];
    for node in graph.nodes.iter().rev() {
        node.args.iter().for_each(|arg| lines[arg.index()] = node.loc);
    }
    graph.inputs.iter().map(|input| lines[input.index()]).collect()
}

/// Whether a layout covers an output as it is, not as a view.
fn is_whole(functional: &Functional, output: usize, layout: &Layout) -> bool {
    let value = functional.graph.outputs[output];
    let shape = functional.graph.ty(value).as_tensor().map(|t| &t.shape);
    layout.is_contiguous() && shape == Some(&layout.shape)
}

impl Gradients {
    pub(crate) fn joint(&self, functional: &Functional) -> Result<Joint> {
        let outputs: Vec<Vec<usize>> =
            self.outputs.iter().map(|part| part.iter().map(|(_, o)| *o).collect()).collect();
        let outputs: Vec<&[usize]> = outputs.iter().map(Vec::as_slice).collect();
        let inputs: Vec<usize> = self.inputs.iter().map(|(i, _)| *i).collect();
        let recorded = |node: usize| functional.recorded.get(node).copied().unwrap_or(false);
        kiln_aot::joint(&functional.graph, &outputs, &inputs, &recorded)
    }
}

/// Where halves are rounded.
pub(crate) fn rounding(site: &Site) -> Rounding {
    match site.options.settings.numerics {
        Numerics::Default => Rounding::Stored,
        Numerics::Strict => Rounding::Ops,
    }
}

/// How the inputs of a part of a backward lie: saved inputs as those of the forward, everything else dense.
pub(crate) fn backward_layouts(forward: &[InputLayout], part: &kiln_aot::BackwardPart) -> Arc<[InputLayout]> {
    let dense = |ty: &Ty| {
        let strides = ty.as_tensor().map(|t| t.shape.contiguous_strides());
        InputLayout { strides: strides.unwrap_or_default() }
    };
    part.graph
        .inputs
        .iter()
        .enumerate()
        .map(|(i, &value)| match part.saved.get(i).map(|s| s.what) {
            Some(kiln_aot::Source::Input(k)) => forward[k].clone(),
            _ => dense(part.graph.ty(value)),
        })
        .collect()
}
