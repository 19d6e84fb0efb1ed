//! A plan's kernels, compiled and loaded, and the plan bound to them: a program that runs.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use kiln_inductor::{KernelSource, Place, Plan as Lowered, Step};
use kiln_ir::math::c::{self, CIsa};
use kiln_ir::{Graph, Layout, Result, Scalar, ScalarKind, TensorTy, Ty, Value};
use kiln_runtime::bands::Bands;
use kiln_runtime::convolve::{self, Convolution, OnPlanes};
use kiln_runtime::kept::Kept;
use kiln_runtime::program::{self, BatchAt, Element, MatrixAt};
use kiln_runtime::{Isa, Kernel, KernelCache, Origin, Sanitize, Source, WeakKernel, gemm, threads, warn};
use kiln_tensor::Tensor;
use kiln_tensor::internal::TensorState;
use kiln_tensor::program::{Executable, HostFunction, HostStep, View, geometry};

use crate::counters::{self, Count};
use crate::graph_cache::Outline;
use crate::interpret::{self, GraphValue};
use crate::options::Mode;
use crate::progress;
use crate::segment::{Numbers, Program};
use crate::settings::OptLevel;

/// The instruction set as C text knows it.
pub(crate) fn c_isa(isa: Isa) -> CIsa {
    match isa {
        Isa::Avx512 => CIsa::Avx512,
        Isa::Avx2 => CIsa::Avx2,
        Isa::Plain => CIsa::Plain,
    }
}

/// How kernels are built from their text.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Build {
    /// The instructions they may use.
    pub isa: Isa,
    /// How hard the C compiler works.
    pub level: OptLevel,
    /// What it checks.
    pub sanitize: Sanitize,
}

/// Kernels that are loaded in this process, by name and how they were built. Programs keep them loaded, and the kernel
/// cache does so for a while.
type Loaded = FxHashMap<(String, Build), WeakKernel>;

fn loaded() -> &'static Mutex<Loaded> {
    static LOADED: OnceLock<Mutex<Loaded>> = OnceLock::new();
    LOADED.get_or_init(Mutex::default)
}

/// Forgets the kernels loaded so far, and unloads those that are not in use.
pub(crate) fn forget() {
    loaded().lock().clear();
    KernelCache::global().release();
}

/// Adds a kernel, and drops what was unloaded whenever the table would grow.
fn insert(loaded: &mut Loaded, key: (String, Build), kernel: &Kernel) {
    if loaded.len() == loaded.capacity() {
        loaded.retain(|_, kernel| kernel.is_loaded());
    }
    loaded.insert(key, kernel.downgrade());
}

/// What came of loading a plan's kernels.
pub(crate) struct Loading {
    /// How many had to be compiled.
    pub compiled: usize,
    /// Names of kernels that the C compiler fails on, and what it says.
    pub refused: Vec<(String, String)>,
    /// The kernels, by name.
    kernels: FxHashMap<String, Kernel>,
}

impl Loading {
    /// The kernels of the plan that was loaded, or of another that has none beside them.
    pub(crate) fn find(&self, lowered: &Lowered) -> Result<Vec<Kernel>, String> {
        let kernels = lowered.kernels.iter().map(|kernel| self.kernels.get(&kernel.name).cloned());
        kernels.collect::<Option<_>>().ok_or_else(|| "a kernel was lost".into())
    }
}

/// What progress is called.
const COMPILING: &str = "compiling kernels";

/// Of the kernels that are tried alone, so many may fail in a row before the others are given up, too.
const MOST_FAILURES: usize = 3;

/// The plan's kernels, compiled where they are not there yet. Kernels are compiled together in a few sources of
/// about equal length, at most one per core: most of a small kernel's compile time is the compiler's start. Where
/// the compiler fails on a source, its kernels are tried one by one.
pub(crate) fn load(lowered: &Lowered, build: Build) -> Result<Loading, String> {
    let key = |kernel: &KernelSource| (kernel.name.clone(), build);
    let mut found: FxHashMap<String, Kernel> = {
        let loaded = loaded().lock();
        let there = |kernel: &KernelSource| Some((kernel.name.clone(), loaded.get(&key(kernel))?.upgrade()?));
        lowered.kernels.iter().filter_map(there).collect()
    };
    let missing: Vec<&KernelSource> =
        lowered.kernels.iter().filter(|k| !found.contains_key(&k.name)).collect();
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
    let (new, mut there) = (shards.iter().map(Vec::len).sum(), 0);
    if new > 0 {
        progress::tell(COMPILING, 0, new);
    }
    let sources: Vec<Source> = shards.iter().map(|kernels| source(kernels, lowered.isa, build)).collect();
    let mut compiled = 0;
    let mut keep = |kernels: &[&KernelSource], library: kiln_runtime::Loaded| -> Result<(), String> {
        if matches!(library.origin, Origin::Compiler) {
            compiled += kernels.len();
        }
        let mut loaded = loaded().lock();
        for kernel in kernels {
            let function = Kernel::new(library.library.clone(), &kernel.name)
                .ok_or_else(|| format!("{} is not in its library", kernel.name))?;
            insert(&mut loaded, key(kernel), &function);
            found.insert(kernel.name.clone(), function);
        }
        Ok(())
    };
    let mut refused: Vec<(String, String)> = Vec::new();
    for (kernels, outcome) in shards.iter().zip(KernelCache::global().load_many(&sources)) {
        there += kernels.len();
        progress::tell(COMPILING, there, new);
        match outcome {
            Ok(library) => keep(kernels, library)?,
            // Without a compiler there is nothing to try.
            Err(error) if error.is_for_all() => return Err(warn_once(&error.to_string())),
            Err(error) if kernels.len() == 1 => refused.push((kernels[0].name.clone(), error.to_string())),
            Err(_) => {
                let (mut failures, mut last) = (0, String::new());
                for kernel in kernels {
                    if failures < MOST_FAILURES {
                        match KernelCache::global().load(&source(&[*kernel], lowered.isa, build)) {
                            Ok(library) => {
                                failures = 0;
                                keep(&[*kernel], library)?;
                                continue;
                            }
                            Err(error) => last = error.to_string(),
                        }
                    }
                    failures += 1;
                    refused.push((kernel.name.clone(), last.clone()));
                }
            }
        }
    }
    counters::add(Count::RefusedKernel, refused.len());
    if let Some((_, reason)) = refused.first() {
        let text = warn_once(reason);
        if refused.len() == lowered.kernels.len() {
            return Err(text);
        }
    }
    counters::add(Count::CacheMiss, compiled);
    counters::add(Count::CacheHit, lowered.kernels.len() - refused.len() - compiled);
    Ok(Loading { compiled, refused, kernels: found })
}

fn warn_once(reason: &str) -> String {
    warn::once("compile", || format!("kernels can't be compiled, running eagerly instead: {reason}"));
    reason.to_string()
}

/// The source of these kernels and how it is built.
fn source(kernels: &[&KernelSource], isa: CIsa, build: Build) -> Source {
    let mut flags = vec![build.level.flag(), "-fno-strict-aliasing"];
    flags.extend(c::FLAGS.iter().chain(build.sanitize.flags()));
    if kernels.iter().any(|k| k.needs_libm) {
        flags.push("-lm");
    }
    let source = Source { isa: build.isa, ..Source::new(KernelSource::shard(kernels, isa), &flags) };
    source.with_symbols(kernels.iter().map(|kernel| kernel.name.clone()))
}

fn element(dtype: kiln_ir::DType) -> Element {
    // Prims that are library calls are on computing types only.
    match dtype.computing() {
        kiln_ir::DType::F64 => Element::F64,
        kiln_ir::DType::F32 => Element::F32,
        _ => Element::I64,
    }
}

/// The ops of a graph, whose inputs are tensors first and then numbers, run one by one.
fn one_by_one(graph: &Arc<Graph>) -> HostFunction {
    let graph = graph.clone();
    HostFunction(Arc::new(move |tensors, numbers| {
        let kind = |value: &Value| match graph.ty(*value) {
            Ty::Scalar(kind) => Some(*kind),
            Ty::Tensor(_) | Ty::List(_) => None,
        };
        let numbers = graph.inputs.iter().filter_map(kind).zip(numbers).map(|(kind, &bits)| match kind {
            ScalarKind::Float => Scalar::Float(f64::from_bits(bits)),
            ScalarKind::Int => Scalar::Int(bits as i64),
            ScalarKind::Bool => Scalar::Bool(bits != 0),
        });
        let tensors = tensors.into_iter().map(|ready| GraphValue::Tensor(Tensor::from_ready(ready)));
        let inputs: Vec<GraphValue> = tensors.chain(numbers.map(GraphValue::Number)).collect();
        interpret::graph(&graph, &inputs)?.iter().map(|result| Ok(result.ready()?.clone())).collect()
    }))
}

/// Turns a plan into a program: buffers to places, references to pointers and numbers.
pub(crate) fn bind(
    outline: &Outline,
    lowered: &Lowered,
    kernels: &[Kernel],
    mode: Mode,
) -> Result<Program, String> {
    let buffers = &lowered.buffers;
    let mut numbers = Numbers { table: Vec::new(), computed: lowered.scalars.clone() };
    let mut host_steps = Vec::new();
    let mut steps = Vec::new();
    let mut constants = Vec::new();
    let mut places: Vec<program::Place> = buffers
        .iter()
        .map(|b| match b.place {
            Place::Input(i) => program::Place::Input(i),
            Place::Output(i) => program::Place::Output { output: i, offset: 0 },
            Place::BeforeOutput { output, offset } => program::Place::Output { output, offset },
            Place::Arena { offset } => program::Place::Arena(offset),
            Place::Band { offset, row_bytes } => program::Place::Band { offset, row_bytes },
        })
        .collect();
    let view = |id: kiln_inductor::BufferId| {
        let b = &buffers[id.index()].ty;
        let layout = Layout { shape: b.shape.clone(), strides: b.strides.clone(), offset: 0 };
        View { buffer: id.index(), ty: TensorTy::new(b.dtype, b.shape.clone()), layout }
    };
    let matrix = |m: &kiln_inductor::MatrixRef| MatrixAt {
        buffer: m.at.buffer.index(),
        offset: m.at.offset as isize,
        row: m.row as isize,
        column: m.column as isize,
    };
    let batch = |b: &kiln_inductor::BatchRef| BatchAt {
        matrix: matrix(&b.matrix),
        sizes: b.sizes.to_vec(),
        strides: b.strides.to_vec(),
    };
    let operand = |v: &kiln_inductor::ViewRef| View {
        buffer: v.at.buffer.index(),
        ty: TensorTy::new(buffers[v.at.buffer.index()].ty.dtype, v.shape.clone()),
        layout: Layout { shape: v.shape.clone(), strides: v.strides.clone(), offset: v.at.offset as usize },
    };
    let watched = |constants: &mut Vec<usize>, buffer: usize, is_kept: bool| match buffers[buffer].place {
        Place::Input(input) if is_kept => {
            // Sorted below, when all are known.
            constants.push(input);
            Some((input, Kept::default()))
        }
        _ => None,
    };
    for step in &lowered.steps {
        steps.push(match step {
            Step::Kernel { kernel, bufs, ints, scalars, items, grain, scratch_bytes, checks: _ } => {
                let bytes = |b: &kiln_inductor::BufferRef| {
                    let size = buffers[b.buffer.index()].ty.dtype.size() as i64;
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
            Step::Gemm { m, n, k, lhs, rhs, dst, accumulate, dtype, constant, epilogue } => {
                let shape = gemm::Shape { m: *m, n: *n, k: *k };
                let (element, rhs) = (element(*dtype), matrix(rhs));
                let is_kept = *constant
                    && element != program::Element::I64
                    && gemm::is_kept(shape, rhs.row, rhs.column);
                program::Step::Gemm {
                    shape,
                    dst: matrix(dst),
                    lhs: matrix(lhs),
                    rhs,
                    accumulate: *accumulate,
                    element,
                    constant: watched(&mut constants, rhs.buffer, is_kept),
                    epilogue: epilogue.map(|epilogue| (epilogue.rows, epilogue.items)),
                }
            }
            Step::Bmm { batch: count, m, n, k, lhs, rhs, dst, dtype } => program::Step::Bmm {
                batch: *count,
                shape: gemm::Shape { m: *m, n: *n, k: *k },
                dst: dst.index(),
                lhs: batch(lhs),
                rhs: batch(rhs),
                element: element(*dtype),
            },
            Step::Convolution { op, x, weight, dst, dtype, constant, free, epilogue } => {
                let (x, weight) = (operand(x), operand(weight));
                let geometry = geometry(op, &x.ty, &weight.ty).ok_or("a convolution of other tensors")?;
                let element = element(*dtype);
                let is_kept = *constant && convolve::is_kept(&geometry, element);
                let constant = watched(&mut constants, weight.buffer, is_kept);
                places.push(program::Place::Arena(free.start));
                let bytes = |slot: usize, step: i64| match &lowered.steps.get(steps.len() + 1) {
                    Some(Step::Kernel { bufs, .. }) => {
                        step as isize * buffers[bufs[slot].buffer.index()].ty.dtype.size() as isize
                    }
                    _ => 0,
                };
                program::Step::Convolution(Box::new(Convolution {
                    geometry,
                    element,
                    dst: dst.index(),
                    x: (x.buffer, x.layout.offset as isize),
                    weight: (weight.buffer, weight.layout.offset as isize),
                    free: (places.len() - 1, free.len()),
                    constant,
                    epilogue: epilogue.as_ref().map(|on| OnPlanes {
                        pixels: on.pixels,
                        is_one_loop: on.is_one_loop,
                        steps: on.steps.iter().enumerate().map(|(slot, step)| bytes(slot, *step)).collect(),
                        ints: [on.length, on.width, on.blocks],
                    }),
                }))
            }
            Step::Random { distribution, buffer, seed, offset } => program::Step::Random {
                normal: matches!(distribution, kiln_inductor::Distribution::Normal),
                buffer: buffer.index(),
                count: buffers[buffer.index()].ty.shape.numel(),
                element: element(buffers[buffer.index()].ty.dtype),
                seed: numbers.position(*seed),
                offset: numbers.position(*offset),
            },
            Step::Copy { src, dst } => {
                let (src, mut dst) = (view(*src), view(*dst));
                // Behind a reshape: only dense targets get there.
                if dst.layout.shape != src.layout.shape {
                    dst.layout = Layout::contiguous(src.layout.shape.clone());
                }
                host_steps.push(HostStep::Copy { src, dst });
                program::Step::Host(host_steps.len() - 1)
            }
            Step::Fallback { op, args, outs, free, loc } => {
                let out = view(*outs.first().ok_or("a fallback without a result")?);
                let args = args.iter().map(operand).collect();
                // A further buffer, which no plan knows.
                places.push(program::Place::Arena(free.start));
                let free = (places.len() - 1, free.len());
                host_steps.push(HostStep::Op { op: op.clone(), args, out, free, loc: *loc });
                program::Step::Host(host_steps.len() - 1)
            }
            Step::Eager { graph, args, scalars, outs } => {
                host_steps.push(HostStep::Call {
                    function: one_by_one(graph),
                    args: args.iter().map(operand).collect(),
                    numbers: scalars.iter().map(|s| numbers.position(*s)).collect(),
                    outs: outs.iter().map(|(result, out)| (*result, operand(out))).collect(),
                });
                program::Step::Host(host_steps.len() - 1)
            }
        });
    }
    for (i, id) in lowered.outputs.iter().enumerate() {
        if buffers[id.index()].place != Place::Output(i) {
            return Err(format!("output {i} has no buffer of its own"));
        }
    }
    let Outline { outputs, writes } = outline.clone();
    let kinds = outputs.iter().map(|t| (t.dtype, t.device)).collect();
    let bands = lowered.bands.iter().map(|b| Bands {
        first: b.first,
        steps: b.steps,
        rows: b.rows,
        count: b.count,
        kernels: b.kernels.iter().map(|kernel| (kernel.rows, kernel.items)).collect(),
        bytes: b.bytes,
    });
    // Contents come in the order of the inputs.
    constants.sort_unstable();
    constants.dedup();
    for step in &mut steps {
        let constant = match step {
            program::Step::Convolution(step) => &mut step.constant,
            program::Step::Gemm { constant, .. } => constant,
            _ => continue,
        };
        if let Some((number, _)) = constant {
            *number = constants.partition_point(|input| *input < *number);
        }
    }
    let arena_bytes = lowered.arena_bytes;
    let program = program::Program { steps, bands: bands.collect(), places, arena_bytes, constants };
    // SAFETY: the plan is this compiler's own, and one that was read from a file was checked to stay inside its
    // memory; guards see to the layouts of inputs; `one_by_one` gives back copies.
    let executable = unsafe { Executable::new(program, outputs, writes, host_steps) };
    let executable = executable.keep_bound(mode == Mode::ReduceOverhead);
    Ok(Program { executable, numbers, outputs: kinds })
}
