//! Compiling a segment: the stages with timings, texts and the graph cache around them.

use std::sync::Arc;
use std::time::Instant;

use kiln_aot::trace::Variable;
use kiln_aot::{Joint, Partition};
use kiln_inductor::{C, KernelSource, Lowered, Options, Target};
use kiln_ir::{Device, Graph, Op, Stage, Ty, Value};
use kiln_prims::{How, Rounding};
use kiln_runtime::{Callable, Machine, machine, warn};
use kiln_tensor::hook::Scope;

use crate::analysis::{self, Analysis};
use crate::autotune;
use crate::backend::{Backend, Custom, GraphContext, GraphKind, Level, OutputRole};
use crate::counters::{Count, count};
use crate::device;
use crate::graph_cache::{Around, Entry, Key, Made, Outline, Planned};
use crate::kernels::{self, Loading};
use crate::logs::{self, Log};
use crate::options::Mode;
use crate::pipeline::{self, Driver, Front, Part};
use crate::region::Site;
use crate::rung::{Rung, take_apart};
use crate::segment::{Code, Execution, Info, Segment, Text};
use crate::settings::{Numerics, Settings};
use crate::trie::LiveSet;
use crate::why::{NotCompiled, Result};

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
    let mut compiling = Compiling { site, info: Info::default(), started: Instant::now(), general };
    compiling.info.graph.nodes = trace.events.len();
    if let Some(known) = known {
        compiling.info.graph.stages.push(("capture", known.started.elapsed()));
    }
    let inputs = (0..).zip(&trace.variables).filter(|(_, variable)| variable.input.is_some());
    compiling.info.names = inputs.filter_map(|(v, _)| Some((v, name(v)?))).collect();
    let in_steps =
        site.trie.path(at).into_iter().any(|index| site.trie.node(index).event.delivers_in_steps());
    compiling.info.without_gradient = trace.without_gradient(in_steps);
    let execution = if site.options.backend.is(Backend::Eager) {
        Err(NotCompiled::Eager)
    } else {
        pipeline::front(site, (&trace, tape, &variables(live)), &mut compiling)
            .and_then(|front| Ok(Execution::compiled(tape, compiling.made(&front)?, front.into())))
    };
    let execution = execution.unwrap_or_else(Execution::Interpreted);
    if let Execution::Interpreted(reason) = &execution {
        logs::write(Log::Graph, "interpreted", &|| reason.to_string());
    }
    logs::write(Log::Timing, "timing", &|| {
        compiling.info.graph.stages.iter().map(|(n, t)| format!("{n:<16}{t:>12.3?}\n")).collect()
    });
    Segment { execution, info: compiling.info, alike: Vec::new() }
}

pub(crate) fn variables(live: &LiveSet) -> Vec<Variable> {
    let bit = |i: u32| live[i as usize / 64] >> (i % 64) & 1 == 1;
    (0..live.len() as u32 * 64).filter(|&i| bit(i)).collect()
}

/// Whom kernels are made for.
pub(crate) fn target(settings: &Settings, general: bool) -> C {
    let machine = Machine { isa: settings.build().isa, ..*machine() };
    C { machine, stages: settings.stages, unroll: settings.unroll, general }
}

/// How a graph with inputs like these is lowered.
pub(crate) fn lowering(
    settings: &Settings,
    layouts: &Arc<[kiln_inductor::Layout]>,
    constants: bool,
    general: bool,
) -> Options {
    Options {
        input_layouts: layouts.clone(),
        target: Arc::new(target(settings, general)),
        tuning: settings.tuning(),
        constants,
        general,
    }
}

/// How prims are made.
pub(crate) fn prims(site: &Site) -> How {
    let rounding = match site.options.settings.numerics {
        Numerics::Default => Rounding::Stored,
        Numerics::Strict => Rounding::Ops,
    };
    let last = site.options.rung.map_or("", Rung::last_of_prims);
    How { rounding, last, without: site.options.without_rule }
}

/// The driver that compiles; what it does is told in `info`.
struct Compiling<'a> {
    site: &'a Site,
    info: Info,
    started: Instant,
    /// Whether kernels are written for any sizes.
    general: bool,
}

/// A graph that runs, and its plan where other processes may have it.
struct Built {
    code: Code,
    planned: Option<Planned>,
}

impl Driver for Compiling<'_> {
    type Code = Built;

    fn pass<T>(&mut self, name: &'static str, pass: impl FnOnce() -> kiln_ir::Result<T>) -> Result<T> {
        self.timed(name, pass).map_err(|error| NotCompiled::pass(name, error))
    }

    fn look(&mut self, name: &'static str, graph: &Arc<Graph>, stage: Stage) -> Result<()> {
        if cfg!(debug_assertions) {
            graph.verify(stage, name).map_err(|error| NotCompiled::pass(name, error))?;
        }
        let log = match name {
            "graph" => Log::Graph,
            "joint" => Log::Joint,
            _ => Log::Prims,
        };
        logs::write(log, name, &|| graph.to_string());
        if self.site.options.settings.keep_text {
            self.info.texts.push((name, Text::Graph(graph.clone())));
        }
        Ok(())
    }

    fn prims(&self) -> Option<How> {
        let backend = &self.site.options.backend;
        let wants_aten = backend.custom().is_some_and(|custom| custom.level() == Level::Aten);
        let is_whole = wants_aten || backend.is(Backend::AotEager);
        (!is_whole).then(|| prims(self.site))
    }

    fn cut(&mut self, joint: &Joint) -> Result<Partition> {
        let plain = self.site.options.rung == Some(Rung::Joint);
        let cut = if plain { kiln_aot::partition_again } else { kiln_aot::partition };
        self.pass("partition", || cut(joint))
    }

    fn lower(&mut self, part: &Part<'_>) -> Result<Built> {
        let backend = &self.site.options.backend;
        if backend.is(Backend::AotEager) {
            return Ok(Built { code: Code::Graph(part.graph.clone()), planned: None });
        }
        if let Some(code) =
            self.site.options.rung.and_then(|rung| rung.code(part, &self.site.options.settings))
        {
            let code = code?;
            if let (Code::Plan(plan), Some(Rung::Memory)) = (&code, self.site.options.rung) {
                self.info.graph.arena_bytes += plan.arena_bytes();
            }
            return Ok(Built { code, planned: None });
        }
        match backend.custom() {
            Some(_) => Ok(Built { code: self.custom(part)?, planned: None }),
            None if self.site.options.only_built => {
                self.program(part)?;
                Ok(Built { code: Code::Graph(part.graph.clone()), planned: None })
            }
            None => self.program(part),
        }
    }
}

impl Compiling<'_> {
    /// Takes a functional graph through the other stages, or finds what they made of it before.
    fn made(&mut self, front: &Front) -> Result<Made<Code>> {
        if self.site.options.rung == Some(Rung::Functionalise) {
            let front = Front { gradients: None, ..front.clone() };
            return pipeline::back(&front, self)?.map(|built| Ok(built.code));
        }
        let key = self.key(front);
        let found = key.as_ref().and_then(|key| self.timed("graph cache", || key.find()));
        let found = found.filter(|entry| {
            let (site, general) = (self.site, self.general);
            let checked = self.timed("graph cache", || fits(site, front, entry, general));
            let tell = |reason: &String| {
                logs::write(Log::Recompiles, "graph cache", &|| format!("not used: {reason}"));
            };
            checked.inspect_err(tell).is_ok()
        });
        if let Some(made) = found.and_then(|entry| self.run_entry(front, entry)) {
            self.texts_again(front);
            return Ok(made);
        }
        let made = pipeline::back(front, self)?;
        self.saved(&made);
        let mut plans = Vec::new();
        let code = made.map(|Built { code, planned }| {
            plans.extend(planned);
            Ok::<Code, NotCompiled>(code)
        })?;
        // A compiler that fails now may not fail in another process: where a kernel is lacking nothing is kept.
        let mut plans = Some(plans).filter(|plans| plans.len() == code.codes().count()).into_iter().flatten();
        if let (Some(key), Some(forward)) = (key, plans.next()) {
            let entry = Made {
                code: forward,
                parts: code.parts.iter().map(|(facts, _)| facts.clone()).zip(plans).collect(),
                forward_outputs: code.forward_outputs,
                report: code.report,
            };
            self.timed("graph cache", || key.keep(&entry));
            if cfg!(debug_assertions)
                && let Some(entry) = key.find()
            {
                fits(self.site, front, &entry, self.general)
                    .map_err(|error| NotCompiled::pass("graph cache", error))?;
            }
        }
        Ok(code)
    }

    /// The key of a graph whose plan may be kept, or may have been.
    fn key<'f>(&self, front: &'f Front) -> Option<Key<'f>> {
        let options = &self.site.options;
        let usual = options.backend.is(Backend::Inductor) && options.mode != Mode::MaxAutotune;
        // Who wants to see the stages wants them to be gone through.
        let shown = [Log::Joint, Log::Prims].into_iter().any(logs::enabled);
        // A plan says nothing about the device that it is for.
        let is_here = device::of(&front.functional.graph) == Ok(Device::Cpu);
        if !usual || shown || !is_here || !options.settings.graph_cache || options.rung.is_some() {
            return None;
        }
        let Front { functional, gradients, layouts, .. } = front;
        let recorded = gradients.as_ref().map(|_| &functional.recorded);
        Some(Key::new(
            &functional.graph,
            target(&options.settings, self.general),
            &[
                &options.settings,
                &options.mode,
                &options.settings.build(),
                layouts,
                &gradients.as_ref(),
                &recorded,
            ],
        ))
    }

    /// Makes a graph run on a device other than the CPU.
    fn program_on(&mut self, device: Device, part: &Part<'_>) -> Result<Built> {
        let failed = |error: String| NotCompiled::pass("inductor", error);
        device::check(part.graph, device).map_err(failed)?;
        let tuning = self.site.options.settings.tuning();
        let lowering = device::lowering(device, tuning, &part.layouts).map_err(failed)?;
        let lowered = self.timed("inductor", || kiln_inductor::lower(part.graph, &lowering));
        let lowered = lowered.map_err(|error| failed(error.to_string()))?;
        self.describe(&lowered, &[], &*lowering.target);
        let outline = Outline::of(part.graph).map_err(|error| NotCompiled::pass("bind", error))?;
        let program = self.timed("compile", || device::bind(device, &outline, &lowered));
        let code = Code::Program(program.map_err(NotCompiled::Compiler)?);
        self.info.graph.stages.push(("total", self.started.elapsed()));
        Ok(Built { code, planned: None })
    }

    /// Makes a graph run by inductor's plan and the C compiler.
    fn program(&mut self, part: &Part<'_>) -> Result<Built> {
        let (options, graph) = (&self.site.options, part.graph);
        match device::of(graph).map_err(|error| NotCompiled::pass("inductor", error))? {
            Device::Cpu => {}
            device => return self.program_on(device, part),
        }
        let build = options.settings.build();
        let constants =
            options.settings.keep_weights && part.kind == GraphKind::Whole && !trains_kernels(graph);
        let general = self.general;
        let lower_without = |settings: &Settings, refused: &[String]| {
            let lowering = lowering(settings, &part.layouts, constants, general);
            kiln_inductor::lower_without(graph, &lowering, refused)
                .map_err(|error| NotCompiled::pass("inductor", error))
        };
        let lower = |settings: &Settings| lower_without(settings, &[]).map_err(|error| error.to_string());
        let mut lowered = self.timed("inductor", || lower_without(&options.settings, &[]))?;
        if options.rung == Some(Rung::Call) {
            let names: Vec<String> = lowered.code.iter().map(|source| source.name.clone()).collect();
            lowered = lower_without(&options.settings, &names)?;
            take_apart(&mut lowered.plan);
        }
        let loaded = self.timed("compile", || kernels::load(&lowered.code, build));
        let refused = loaded.as_ref().map_or(&[][..], |loaded| &loaded.refused);
        if !refused.is_empty() {
            let names: Vec<String> = refused.iter().map(|(name, _)| name.clone()).collect();
            lowered = self.timed("inductor", || lower_without(&options.settings, &names))?;
        }
        self.describe(&lowered, refused, &target(&options.settings, general));
        let loading = loaded.map_err(NotCompiled::Compiler)?;
        let mut kernels = loading.find(&lowered.code).map_err(NotCompiled::Compiler)?;
        let Loading { compiled, refused, .. } = loading;
        self.info.graph.compiled_kernels += compiled;
        // Forms are compared step by step, so all must be kernels.
        if options.mode == Mode::MaxAutotune && refused.is_empty() {
            let choose = || autotune::choose_products(graph, lowered, &options.settings, &lower);
            let chosen = self.timed("autotune", choose);
            self.info.graph.compiled_kernels += chosen.compiled;
            self.info.graph.tuned.extend(chosen.note);
            lowered = chosen.lowered;
            let loading = kernels::load(&lowered.code, build).map_err(NotCompiled::Compiler)?;
            kernels = loading.find(&lowered.code).map_err(NotCompiled::Compiler)?;
            // Forms replace each other step by step, so they are those of the plan that was chosen.
            let settings = Settings { max_inline_product: chosen.products, ..options.settings.clone() };
            let tuned =
                self.timed("autotune", || autotune::tune(graph, &lowered, kernels, &settings, &lower));
            self.info.graph.compiled_kernels += tuned.compiled;
            self.info.graph.tuned.extend(tuned.notes);
            (lowered.plan, kernels) = (tuned.plan, tuned.kernels);
        }
        let outline = Outline::of(graph).map_err(|error| NotCompiled::pass("bind", error))?;
        let program = self.timed("bind", || kernels::bind(&outline, &lowered.plan, &kernels, options.mode));
        let code = Code::Program(program.map_err(|error| NotCompiled::pass("bind", error))?);
        self.info.graph.stages.push(("total", self.started.elapsed()));
        Ok(Built { code, planned: refused.is_empty().then_some(Planned { outline, plan: lowered.plan }) })
    }

    /// Makes an entry of the graph cache run; `None` if it does not: what it says of kernels may no longer hold.
    fn run_entry(&mut self, front: &Front, entry: Entry) -> Option<Made<Code>> {
        let options = lowering(&self.site.options.settings, &front.layouts, false, self.general);
        let build = self.site.options.settings.build();
        let load = |planned: Planned| {
            let Planned { outline, plan } = planned;
            let lowered = self.timed("inductor", || Lowered::again(plan, &options));
            lowered.plan.check_signatures(lowered.code.iter().map(|source| &*source.signature))?;
            let loading = self.timed("compile", || kernels::load(&lowered.code, build))?;
            match loading.refused.first() {
                Some((_, reason)) => Err(reason.clone()),
                None => Ok((loading.find(&lowered.code)?, loading.compiled, outline, lowered)),
            }
        };
        let loaded = entry.map(load).ok()?;
        let bind = |(kernels, compiled, outline, lowered): (Vec<Callable>, usize, Outline, Lowered)| {
            self.info.graph.compiled_kernels += compiled;
            self.describe(&lowered, &[], &*options.target);
            let mode = self.site.options.mode;
            self.timed("bind", || kernels::bind(&outline, &lowered.plan, &kernels, mode)).map(Code::Program)
        };
        let made = loaded.map(bind).ok()?;
        self.saved(&made);
        self.info.graph.stages.push(("total", self.started.elapsed()));
        Some(made)
    }

    fn saved<C>(&mut self, made: &Made<C>) {
        self.info.graph.bytes_saved = made.report.bytes_saved;
        self.info.graph.bytes_recomputed = made.report.bytes_recomputed;
    }

    /// The texts of stages that were not gone through, made when somebody reads them.
    fn texts_again(&mut self, front: &Front) {
        if !self.site.options.settings.keep_text {
            return;
        }
        let (front, prims) = (front.clone(), self.prims());
        let names: &[&'static str] = if front.gradients.is_some() { &["joint", "prims"] } else { &["prims"] };
        let front = Arc::new(front);
        let later = names.iter().map(|&name| {
            let front = front.clone();
            let text = move || {
                let mut reader = Reader { name, prims, text: None };
                // Where a stage fails, the text says so.
                let failed = pipeline::back(&front, &mut reader).err();
                reader.text.or(failed.map(|error| error.to_string())).unwrap_or_default()
            };
            (name, Text::later(text))
        });
        // In the order of the stages: behind the graph.
        self.info.texts.splice(1..1, later);
    }

    /// Has the user's backend make a graph run.
    fn custom(&mut self, part: &Part<'_>) -> Result<Code> {
        let (options, graph, name) = (&self.site.options, part.graph, self.site.options.backend.name());
        let refused = |error: String| NotCompiled::Backend { name: name.to_string(), error };
        let Some(backend) = options.backend.custom() else { return Err(refused("there is none".into())) };
        let is_tensor = |v: &Value| matches!(graph.ty(*v), Ty::Tensor(_));
        let strides = graph.inputs.iter().zip(part.layouts.iter());
        let strides = strides.map(|(v, layout)| is_tensor(v).then(|| layout.strides.clone())).collect();
        let mut outputs = vec![OutputRole::Result; part.results];
        outputs.resize(graph.outputs.len(), OutputRole::Saved);
        let context = GraphContext {
            name: self.site.name(),
            kind: part.kind,
            mode: options.mode,
            dynamic: options.dynamic,
            settings: &options.settings,
            strides,
            outputs,
        };
        let made = self.timed("backend", || Custom::compile(backend, name, graph, context));
        made.map(Code::Custom).map_err(|error| {
            let reason = refused(error.to_string());
            warn::once(&reason.to_string(), || format!("{reason}; it runs op by op"));
            reason
        })
    }

    fn timed<T>(&mut self, name: &'static str, body: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = body();
        self.info.graph.stages.push((name, begin.elapsed()));
        result
    }

    /// Tells what a plan does; `refused` are the kernels that it does without, and why.
    fn describe(&mut self, lowered: &Lowered, refused: &[(String, String)], target: &dyn Target) {
        for (number, (kernel, source)) in lowered.plan.kernels.iter().zip(&lowered.code).enumerate() {
            logs::write(Log::Loops, &source.name, &|| kernel.to_string());
            logs::write(Log::Code, &source.name, &|| {
                let told = KernelSource { code: source.told(lowered.plan.ops_of(number)), ..source.clone() };
                target.source(&[&told])
            });
        }
        logs::write(Log::Fusion, "fusion", &|| lowered.plan.report.to_string());
        self.info.describe(lowered, refused, self.site.options.settings.keep_text);
    }
}

/// The driver that reads one stage's text; loops and plans have their own.
struct Reader {
    name: &'static str,
    prims: Option<How>,
    text: Option<String>,
}

impl Driver for Reader {
    type Code = ();

    fn pass<T>(&mut self, name: &'static str, pass: impl FnOnce() -> kiln_ir::Result<T>) -> Result<T> {
        pass().map_err(|error| NotCompiled::pass(name, error))
    }

    fn look(&mut self, name: &'static str, graph: &Arc<Graph>, _: Stage) -> Result<()> {
        if name == self.name {
            self.text = Some(graph.to_string());
        }
        Ok(())
    }

    fn prims(&self) -> Option<How> {
        self.prims
    }

    fn lower(&mut self, _: &Part<'_>) -> Result<()> {
        Ok(())
    }
}

/// Whether an entry of the graph cache can be what its graph would be compiled to.
fn fits(site: &Site, front: &Front, entry: &Entry, general: bool) -> std::result::Result<(), String> {
    let (outputs, inputs) = match &front.gradients {
        Some(gradients) => (&gradients.outputs[..], &gradients.inputs[..]),
        None => (&[][..], &[][..]),
    };
    entry.check(&Around {
        graph: &front.functional.graph,
        options: &lowering(&site.options.settings, &front.layouts, false, general),
        tangents: outputs.iter().map(|part| part.iter().map(|&(_, output)| output).collect()).collect(),
        targets: inputs.iter().map(|&(input, _)| input).collect(),
    })
}

/// Whether a graph computes gradients of convolutions' kernels: then these are about to change.
fn trains_kernels(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| matches!(node.op, Op::ConvolutionWeightGradient { .. }))
}
