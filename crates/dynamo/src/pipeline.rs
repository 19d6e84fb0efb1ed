//! The whole compiler as one list of stages: from what was recorded to something that runs.

use std::sync::Arc;
use std::time::Instant;

use rustc_hash::FxHashSet;

use kiln_aot::trace::{Event as TraceEvent, TraceArg, Variable};
use kiln_aot::{Functional, GraphInput, Home, Joint, Survivor, Trace};
use kiln_inductor::{Layout as InputLayout, Options, Plan as Lowered, Step, Tuning};
use kiln_ir::{Grad, Graph, Layout, Result, Stage, Ty, Value, carries_gradient};
use kiln_prims::Rounding;
use kiln_runtime::{threads, warn};
use kiln_tensor::hook::Scope;

use crate::analysis::{self, Analysis};
use crate::autotune;
use crate::backend::{Backend, Custom, GraphContext, GraphKind, Level, OutputRole};
use crate::counters::{Count, count};
use crate::kernels::{self, Loading};
use crate::logs::{self, Log};
use crate::options::Mode;
use crate::region::Site;
use crate::report;
use crate::segment::{Backward, Code, Info, Plan, Segment, Text};
use crate::settings::Numerics;
use crate::trie::LiveSet;

/// Compiles the segment that ends at `at`; what can't be compiled is interpreted, with the reason.
/// `known` is the analysis of the recording, if it was kept; `name` tells the names of inputs that have one.
pub(crate) fn compile(
    site: &Site,
    at: u32,
    live: &LiveSet,
    known: Option<&Analysis>,
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
    let mut stages = Stages { info: Info::default(), started: Instant::now(), keep_text };
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
    let results = functional.graph.outputs.len();
    let compiled = match gradients {
        None => {
            let graph = stages.prims(site, &functional.graph)?;
            let layouts = layouts(trace, &functional.inputs);
            (stages.lower(site, &graph, &layouts, GraphKind::Whole, results)?, None)
        }
        Some(gradients) => {
            let joint = stages.run("joint", || gradients.joint(&functional))?;
            stages.text("joint", Log::Joint, Arc::new(joint.graph.clone()), Stage::Functional)?;
            let prims = Arc::unwrap_or_clone(stages.prims(site, &joint.graph)?);
            let joint = Joint { graph: prims, ..joint };
            let parts = stages.run("partition", || kiln_aot::partition(&joint))?;
            stages.info.bytes_saved = parts.report.bytes_saved;
            stages.info.bytes_recomputed = parts.report.bytes_recomputed;
            let forward = layouts(trace, &functional.inputs);
            let results = parts.forward_outputs;
            let forward = stages.lower(site, &parts.forward, &forward, GraphKind::Forward, results)?;
            let saved = gradients.backward_layouts(trace, &functional.inputs, &parts);
            let results = parts.backward.outputs.len();
            let code = stages.lower(site, &parts.backward, &saved, GraphKind::Backward, results)?;
            let partial = (gradients.outputs.len() > 1).then_some(parts.backward);
            let grads = gradients.inputs.iter().map(|&(_, v)| v).zip(parts.grads).collect();
            let backward = Backward {
                code,
                partial,
                saved: parts.saved,
                grads,
                tapes: gradients.outputs.iter().map(|&(v, _)| tape.reach(&[v]).into()).collect(),
                tangents: gradients.outputs.clone(),
                forward_outputs: parts.forward_outputs,
            };
            (forward, Some(Arc::new(backward)))
        }
    };
    let (code, backward) = compiled;
    Ok(Plan::Compiled {
        code: Box::new(code),
        inputs: functional.inputs,
        survivors: functional.survivors,
        backward,
        used_up,
    })
}

/// The stages' timings, texts and counts.
struct Stages {
    info: Info,
    started: Instant,
    keep_text: bool,
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
        let rounding = match site.options.settings.numerics {
            Numerics::Default => Rounding::Stored,
            Numerics::Strict => Rounding::Kernels(kiln_tensor::has_kernel),
        };
        let graph = Arc::new(self.run("prims", || kiln_prims::lower_rounding(graph, rounding))?);
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
        let lowering = Options {
            input_layouts: layouts.clone(),
            isa: kernels::c_isa(build.isa),
            threads: threads::count(),
            tuning: options.settings.tuning(),
        };
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
        let Loading { compiled, refused } = loaded?;
        let mut kernels = kernels::find(&lowered, build)?;
        self.info.compiled_kernels += compiled;
        // Forms are compared step by step, so all must be kernels.
        if options.mode == Mode::MaxAutotune && refused.is_empty() {
            let tuned = self.timed("autotune", || {
                Ok(autotune::tune(graph, &lowered, kernels, &options.settings, &lower))
            })?;
            self.info.compiled_kernels += tuned.compiled;
            self.info.tuned.extend(tuned.notes);
            (lowered, kernels) = (tuned.plan, tuned.kernels);
        }
        let program = self.timed("bind", || kernels::bind(graph, &lowered, &kernels, options.mode))?;
        self.info.stages.push(("total", self.started.elapsed()));
        Ok(Code::Program(program))
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

    fn timed<T>(
        &mut self,
        name: &'static str,
        body: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
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
        for (step, report) in lowered.steps.iter().zip(&lowered.report.steps) {
            match step {
                Step::Kernel { .. } => info.kernels += 1,
                Step::Fallback { op, loc, .. } => info.fallbacks.push(format!("{} at {loc}", op.name())),
                Step::Eager { .. } => {
                    let reason = refused.first().map_or("", |(_, reason)| reason);
                    let reason = reason.lines().next().unwrap_or_default();
                    info.fallbacks.push(format!("{}: {reason}", report::by_line(&report.ops)));
                }
                Step::Gemm { .. } | Step::Random { .. } | Step::Copy { .. } => info.library_calls += 1,
            }
            info.bytes_read += report.bytes_read;
            info.bytes_written += report.bytes_written;
            info.steps.push(format!(
                "{} ({} read, {} written): {}",
                report.name,
                report::bytes(report.bytes_read),
                report::bytes(report.bytes_written),
                report::by_line(&report.ops)
            ));
        }
        info.why_not.extend(lowered.report.why_not.iter().map(|why| why.to_string()));
    }
}

fn variables(live: &LiveSet) -> Vec<Variable> {
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
                    TraceArg::Number(_) => None,
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
fn compilable(trace: &Trace) -> Result<(), String> {
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

fn layouts(trace: &Trace, inputs: &[GraphInput]) -> Arc<[InputLayout]> {
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

/// Which results leave with gradients, and which inputs those reach.
struct Gradients {
    /// Survivors: variable and output.
    outputs: Vec<(Variable, usize)>,
    /// Graph inputs: position and variable.
    inputs: Vec<(usize, Variable)>,
}

/// The results that leave with a tape that a `backward` inside used up, and those that leave with a good one.
fn leaving(
    site: &Site,
    trace: &Trace,
    tape: &Analysis,
    functional: &Functional,
) -> Result<(Vec<Variable>, Option<Gradients>), String> {
    let mut outputs = Vec::new();
    let is_used_up = |s: &&Survivor| s.used_up || tape.reach(&[s.variable]).freed;
    let (used_up, leaving): (Vec<&Survivor>, Vec<&Survivor>) =
        functional.survivors.iter().filter(|s| s.requires_grad).partition(is_used_up);
    let used_up = used_up.iter().map(|s| s.variable).collect();
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
    Ok((used_up, Some(Gradients { outputs, inputs })))
}

/// Whether a layout covers an output as it is, not as a view.
fn is_whole(functional: &Functional, output: usize, layout: &Layout) -> bool {
    let value = functional.graph.outputs[output];
    let shape = functional.graph.ty(value).as_tensor().map(|t| &t.shape);
    layout.is_contiguous() && shape == Some(&layout.shape)
}

impl Gradients {
    fn joint(&self, functional: &Functional) -> Result<Joint> {
        let outputs: Vec<usize> = self.outputs.iter().map(|(_, o)| *o).collect();
        let inputs: Vec<usize> = self.inputs.iter().map(|(i, _)| *i).collect();
        let recorded = |node: usize| functional.recorded.get(node).copied().unwrap_or(false);
        kiln_aot::joint(&functional.graph, &outputs, &inputs, &recorded)
    }

    /// How backward's inputs lie: saved inputs as they came, everything else dense.
    fn backward_layouts(
        &self,
        trace: &Trace,
        inputs: &[GraphInput],
        parts: &kiln_aot::Partition,
    ) -> Arc<[InputLayout]> {
        let forward = layouts(trace, inputs);
        let dense = |ty: &Ty| {
            let strides = ty.as_tensor().map(|t| t.shape.contiguous_strides());
            InputLayout { strides: strides.unwrap_or_default() }
        };
        parts
            .backward
            .inputs
            .iter()
            .enumerate()
            .map(|(i, &value)| match parts.saved.get(i).map(|s| s.what) {
                Some(kiln_aot::Source::Input(k)) => forward[k].clone(),
                _ => dense(parts.backward.ty(value)),
            })
            .collect()
    }
}
