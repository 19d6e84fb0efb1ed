//! The whole compiler as one list of stages: from what was recorded to something that runs.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use kiln_aot::trace::{Event as TraceEvent, TraceArg, Variable};
use kiln_aot::{Functional, GraphInput, Home, Joint, Survivor, Trace};
use kiln_inductor::{KernelSource, Layout as InputLayout, Options, Place, Plan as Lowered, Step};
use kiln_ir::math::c::{self, CIsa};
use kiln_ir::{Grad, Graph, Layout, Result, Stage, TensorTy, Ty, Value, carries_gradient};
use kiln_runtime::program::{self, Element, MatrixAt};
use kiln_runtime::{Isa, Kernel, KernelCache, Origin, Source, gemm, threads, warn};
use kiln_tensor::program::{Executable, HostStep, View};

use crate::analysis::{self, Analysis};
use crate::explain;
use crate::logs::{self, Log};
use crate::options::Backend;
use crate::region::Site;
use crate::segment::{Backward, Code, Info, Numbers, Plan, Program, Segment, Text};
use crate::trie::LiveSet;

/// Compiles the segment that ends at `at`; what can't be compiled is interpreted, with the reason.
/// `known` is the analysis of the recording, if it was kept.
pub(crate) fn compile(site: &Site, at: u32, live: &LiveSet, known: Option<&Analysis>) -> Segment {
    let trace = analysis::trace(&site.trie, at);
    let made;
    let tape = match known {
        Some(known) => known,
        None => {
            made = Analysis::of(&site.trie, at);
            &made
        }
    };
    let mut stages = Stages { info: Info::default(), started: Instant::now() };
    stages.info.nodes = trace.events.len();
    stages.info.guards = trace.variables.iter().filter(|v| v.input.is_some()).count();
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
    if site.options.backend == Backend::Eager {
        return Err("backend eager".into());
    }
    compilable(trace)?;
    let functional = stages.run("functionalise", || kiln_aot::functionalise(trace, &live))?;
    stages.text("graph", Log::Graph, Arc::new(functional.graph.clone()), Stage::Functional)?;
    let (used_up, gradients) = leaving(trace, tape, &functional)?;
    let compiled = match gradients {
        None => {
            let graph = stages.prims(site, &functional.graph)?;
            let code = stages.lower(site, &graph, &layouts(trace, &functional.inputs))?;
            (code, None)
        }
        Some(gradients) => {
            let joint = stages.run("joint", || gradients.joint(&functional))?;
            stages.text("joint", Log::Joint, Arc::new(joint.graph.clone()), Stage::Functional)?;
            let prims = Arc::unwrap_or_clone(stages.prims(site, &joint.graph)?);
            let joint = Joint { graph: prims, ..joint };
            let parts = stages.run("partition", || kiln_aot::partition(&joint))?;
            stages.info.bytes_saved = parts.report.bytes_saved;
            stages.info.bytes_recomputed = parts.report.bytes_recomputed;
            let forward = stages.lower(site, &parts.forward, &layouts(trace, &functional.inputs))?;
            let saved_layouts = gradients.backward_layouts(trace, &functional.inputs, &parts);
            let code = stages.lower(site, &parts.backward, &saved_layouts)?;
            let partial = (gradients.outputs.len() > 1).then_some(parts.backward);
            let grads = gradients.inputs.iter().map(|&(_, v)| v).zip(parts.grads).collect();
            let backward = Backward {
                code,
                partial,
                saved: parts.saved,
                grads,
                tapes: gradients.outputs.iter().map(|&(v, _)| tape.reach(v).into()).collect(),
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
        self.info.texts.push((name, Text::Graph(graph)));
        Ok(())
    }

    fn prims(&mut self, site: &Site, graph: &Graph) -> Result<Arc<Graph>, String> {
        if site.options.backend == Backend::AotEager {
            return Ok(Arc::new(graph.clone()));
        }
        let graph = Arc::new(self.run("prims", || kiln_prims::lower(graph))?);
        self.text("prims", Log::Prims, graph.clone(), Stage::Prims)?;
        Ok(graph)
    }

    fn lower(&mut self, site: &Site, graph: &Graph, layouts: &[InputLayout]) -> Result<Code, String> {
        if site.options.backend == Backend::AotEager {
            return Ok(Code::Graph(graph.clone()));
        }
        let isa = c_isa(Isa::best());
        let options = Options { input_layouts: layouts.to_vec(), isa, threads: threads::count() };
        let lowered = {
            let begin = Instant::now();
            let lowered =
                kiln_inductor::lower(graph, &options).map_err(|error| format!("inductor: {error}"))?;
            self.info.stages.push(("inductor", begin.elapsed()));
            lowered
        };
        self.describe(&lowered);
        let begin = Instant::now();
        let (kernels, compiled) = load(&lowered)?;
        self.info.stages.push(("compile", begin.elapsed()));
        self.info.compiled_kernels += compiled;
        let begin = Instant::now();
        let program = bind(graph, lowered, kernels);
        self.info.stages.push(("bind", begin.elapsed()));
        self.info.stages.push(("total", self.started.elapsed()));
        program.map(Code::Program)
    }

    fn describe(&mut self, lowered: &Lowered) {
        for kernel in &lowered.kernels {
            logs::write(Log::Loops, &kernel.name, &|| kernel.loops.clone());
            logs::write(Log::Code, &kernel.name, &|| kernel.source(lowered.isa));
            self.info.texts.push(("loops", Text::Source(kernel.loops.clone())));
            self.info.texts.push(("code", Text::Source(kernel.code.clone())));
        }
        logs::write(Log::Fusion, "fusion", &|| lowered.report.to_string());
        let info = &mut self.info;
        info.arena_bytes += lowered.arena_bytes;
        for (step, report) in lowered.steps.iter().zip(&lowered.report.steps) {
            match step {
                Step::Kernel { .. } => info.kernels += 1,
                Step::Fallback { op, loc, .. } => info.fallbacks.push(format!("{} at {loc}", op.name())),
                Step::Gemm { .. } | Step::Random { .. } | Step::Copy { .. } => info.library_calls += 1,
            }
            info.bytes_read += report.bytes_read;
            info.bytes_written += report.bytes_written;
            info.steps.push(format!(
                "{} ({} read, {} written): {}",
                report.name,
                explain::bytes(report.bytes_read),
                explain::bytes(report.bytes_written),
                explain::by_line(&report.ops)
            ));
        }
        info.why_not.extend(lowered.report.why_not.iter().map(|why| why.to_string()));
    }
}

fn variables(live: &LiveSet) -> Vec<Variable> {
    let bit = |i: u32| live[i as usize / 64] >> (i % 64) & 1 == 1;
    (0..live.len() as u32 * 64).filter(|&i| bit(i)).collect()
}

/// Why a trace can't become a graph, if it can't.
fn compilable(trace: &Trace) -> Result<(), String> {
    let mut requires: Vec<bool> =
        trace.variables.iter().map(|v| v.input.as_ref().is_some_and(|input| input.requires_grad)).collect();
    for event in &trace.events {
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

fn layouts(trace: &Trace, inputs: &[GraphInput]) -> Vec<InputLayout> {
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
    trace: &Trace,
    tape: &Analysis,
    functional: &Functional,
) -> Result<(Vec<Variable>, Option<Gradients>), String> {
    let mut outputs = Vec::new();
    let (used_up, leaving): (Vec<&Survivor>, Vec<&Survivor>) =
        functional.survivors.iter().filter(|s| s.requires_grad).partition(|s| tape.reach(s.variable).freed);
    let used_up = used_up.iter().map(|s| s.variable).collect();
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
    ) -> Vec<InputLayout> {
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

fn c_isa(isa: Isa) -> CIsa {
    match isa {
        Isa::Avx512 => CIsa::Avx512,
        Isa::Avx2 => CIsa::Avx2,
        Isa::Plain => CIsa::Plain,
    }
}

/// Kernels that are loaded in this process, by name and instruction set.
fn loaded() -> &'static Mutex<FxHashMap<(String, CIsa), Kernel>> {
    static LOADED: OnceLock<Mutex<FxHashMap<(String, CIsa), Kernel>>> = OnceLock::new();
    LOADED.get_or_init(Mutex::default)
}

/// Forgets the kernels loaded so far (those in use stay).
pub(crate) fn forget_kernels() {
    loaded().lock().clear();
}

/// The plan's kernels, compiled where they are not there yet, and how many had to be compiled. Kernels are
/// compiled together in a few sources of about equal length, at most one per core: most of a small
/// kernel's compile time is the compiler's start.
fn load(lowered: &Lowered) -> Result<(Vec<Kernel>, usize), String> {
    let key = |kernel: &KernelSource| (kernel.name.clone(), lowered.isa);
    let missing: Vec<&KernelSource> = {
        let loaded = loaded().lock();
        lowered.kernels.iter().filter(|k| !loaded.contains_key(&key(k))).collect()
    };
    let mut by_lanes: FxHashMap<usize, Vec<&KernelSource>> = FxHashMap::default();
    for kernel in missing {
        by_lanes.entry(kernel.lanes).or_default().push(kernel);
    }
    let mut groups: Vec<(usize, Vec<&KernelSource>)> = by_lanes.into_iter().collect();
    groups.sort_by_key(|(lanes, _)| *lanes);
    let mut shards: Vec<Vec<&KernelSource>> = Vec::new();
    for (_, mut kernels) in groups {
        kernels.sort_by_key(|k| std::cmp::Reverse(k.code.len()));
        let count = threads::count().min(kernels.len());
        let mut parts: Vec<(usize, Vec<&KernelSource>)> = vec![(0, Vec::new()); count];
        for kernel in kernels {
            if let Some(part) = parts.iter_mut().min_by_key(|(size, _)| *size) {
                part.0 += kernel.code.len();
                part.1.push(kernel);
            }
        }
        shards.extend(parts.into_iter().map(|(_, kernels)| kernels));
    }
    let sources: Vec<Source> = shards
        .iter()
        .map(|kernels| {
            let mut flags = vec!["-O2", "-fno-strict-aliasing"];
            flags.extend(c::FLAGS);
            if kernels.iter().any(|k| k.needs_libm) {
                flags.push("-lm");
            }
            Source::new(KernelSource::shard(kernels, lowered.isa), &flags)
        })
        .collect();
    let mut compiled = 0;
    for (kernels, outcome) in shards.iter().zip(KernelCache::global().load_many(&sources)) {
        let library = match outcome {
            Ok(library) => library,
            Err(error) => {
                let text = error.to_string();
                warn::once("compile", || {
                    format!("kernels can't be compiled, running eagerly instead: {text}")
                });
                return Err(format!("compile: {text}"));
            }
        };
        if matches!(library.origin, Origin::Compiler) {
            compiled += kernels.len();
        }
        let mut loaded = loaded().lock();
        for kernel in kernels {
            let found = Kernel::new(library.library.clone(), &kernel.name)
                .ok_or_else(|| format!("compile: {} is not in its library", kernel.name))?;
            loaded.insert(key(kernel), found);
        }
    }
    let loaded = loaded().lock();
    let kernels: Option<Vec<Kernel>> = lowered.kernels.iter().map(|k| loaded.get(&key(k)).cloned()).collect();
    Ok((kernels.ok_or("compile: a kernel was lost")?, compiled))
}

fn element(dtype: kiln_ir::DType) -> Element {
    // Prims that are library calls are on computing types only.
    match dtype.computing() {
        kiln_ir::DType::F64 => Element::F64,
        kiln_ir::DType::F32 => Element::F32,
        _ => Element::I64,
    }
}

/// Turns a plan into a program: buffers to places, references to pointers and numbers.
fn bind(graph: &Graph, lowered: Lowered, kernels: Vec<Kernel>) -> Result<Program, String> {
    let buffers = &lowered.buffers;
    let mut numbers = Numbers { table: Vec::new(), computed: lowered.scalars.clone() };
    let mut host_steps = Vec::new();
    let mut steps = Vec::new();
    let places = buffers
        .iter()
        .map(|b| match b.place {
            Place::Input(i) => program::Place::Input(i),
            Place::Output(i) => program::Place::Output(i),
            Place::Arena { offset } => program::Place::Arena(offset),
        })
        .collect();
    let view = |id: kiln_inductor::BufferId| {
        let b = &buffers[id.index()];
        let layout = Layout { shape: b.shape.clone(), strides: b.strides.clone(), offset: 0 };
        View { buffer: id.index(), ty: TensorTy::new(b.dtype, b.shape.clone()), layout }
    };
    let matrix = |m: &kiln_inductor::MatrixRef| MatrixAt {
        buffer: m.at.buffer.index(),
        offset: m.at.offset as isize,
        row: m.row as isize,
        column: m.column as isize,
    };
    for step in &lowered.steps {
        steps.push(match step {
            Step::Kernel { kernel, bufs, ints, scalars, items, grain, scratch_bytes, checks: _ } => {
                let bytes = |b: &kiln_inductor::BufferRef| {
                    let size = buffers[b.buffer.index()].dtype.size() as i64;
                    (b.buffer.index(), (b.offset * size) as isize)
                };
                program::Step::Kernel {
                    kernel: kernels[*kernel].clone(),
                    bufs: bufs.iter().map(bytes).collect(),
                    ints: ints.clone(),
                    scalars: scalars.iter().map(|s| numbers.position(*s)).collect(),
                    items: *items,
                    grain: *grain,
                    scratch_bytes: *scratch_bytes,
                }
            }
            Step::Gemm { m, n, k, lhs, rhs, dst, accumulate, dtype } => program::Step::Gemm {
                shape: gemm::Shape { m: *m, n: *n, k: *k },
                dst: matrix(dst),
                lhs: matrix(lhs),
                rhs: matrix(rhs),
                accumulate: *accumulate,
                element: element(*dtype),
            },
            Step::Random { distribution, buffer, seed, offset } => program::Step::Random {
                normal: matches!(distribution, kiln_inductor::Distribution::Normal),
                buffer: buffer.index(),
                count: buffers[buffer.index()].shape.numel(),
                element: element(buffers[buffer.index()].dtype),
                seed: numbers.position(*seed),
                offset: numbers.position(*offset),
            },
            Step::Copy { src, dst } => {
                host_steps.push(HostStep::Copy { src: view(*src), dst: view(*dst) });
                program::Step::Host(host_steps.len() - 1)
            }
            Step::Fallback { op, args, outs, loc } => {
                let out = view(*outs.first().ok_or("a fallback without a result")?);
                let operand = |v: &kiln_inductor::ViewRef| View {
                    buffer: v.at.buffer.index(),
                    ty: TensorTy::new(buffers[v.at.buffer.index()].dtype, v.shape.clone()),
                    layout: Layout {
                        shape: v.shape.clone(),
                        strides: v.strides.clone(),
                        offset: v.at.offset as usize,
                    },
                };
                let args = args.iter().map(operand).collect();
                host_steps.push(HostStep::Op { op: op.clone(), args, out, loc: *loc });
                program::Step::Host(host_steps.len() - 1)
            }
        });
    }
    let outputs: Vec<TensorTy> = graph
        .outputs
        .iter()
        .map(|&v| {
            graph.ty(v).as_tensor().cloned().ok_or_else(|| "an output that is not a tensor".to_string())
        })
        .collect::<Result<_, _>>()?;
    for (i, id) in lowered.outputs.iter().enumerate() {
        if buffers[id.index()].place != Place::Output(i) {
            return Err(format!("output {i} has no buffer of its own"));
        }
    }
    let targets: FxHashSet<Value> = graph.writes.iter().map(|w| w.target).collect();
    let writes: Vec<bool> = graph.inputs.iter().map(|v| targets.contains(v)).collect();
    let kinds = outputs.iter().map(|t| (t.dtype, t.device)).collect();
    let program = program::Program { steps, places, arena_bytes: lowered.arena_bytes };
    let executable = Executable::new(program, outputs, writes, host_steps);
    Ok(Program { executable, numbers, outputs: kinds })
}
