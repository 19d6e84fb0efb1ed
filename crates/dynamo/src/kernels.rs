//! A plan's kernels, compiled and loaded.

use std::sync::OnceLock;

use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use kiln_inductor::{C, KernelSource, Target as _};
use kiln_ir::math::c;
use kiln_plan::Plan;
use kiln_runtime::{Callable, Isa, Kernel, KernelCache, Origin, Sanitize, Source, WeakKernel, threads, warn};
use kiln_tensor::program::Executable;

use crate::counters::{self, Count};
use crate::graph_cache::Outline;
use crate::options::Mode;
use crate::progress;
use crate::segment::LoadedGraph;
use crate::settings::OptLevel;

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
    pub(crate) fn find(&self, code: &[KernelSource]) -> Result<Vec<Callable>, String> {
        let kernel = |source: &KernelSource| {
            let function = self.kernels.get(&source.name)?.clone();
            Some(Callable { function, signature: source.signature.clone() })
        };
        code.iter().map(kernel).collect::<Option<_>>().ok_or_else(|| "a kernel was lost".into())
    }
}

/// What progress is called.
const COMPILING: &str = "compiling kernels";

/// Of the kernels that are tried alone, so many may fail in a row before the others are given up, too.
const MOST_FAILURES: usize = 3;

/// The plan's kernels, compiled where they are not there yet. Kernels are compiled together in a few sources of
/// about equal length, at most one per core: most of a small kernel's compile time is the compiler's start. Where
/// the compiler fails on a source, its kernels are tried one by one.
pub(crate) fn load(code: &[KernelSource], build: Build) -> Result<Loading, String> {
    let key = |kernel: &KernelSource| (kernel.name.clone(), build);
    let mut found: FxHashMap<String, Kernel> = {
        let loaded = loaded().lock();
        let there = |kernel: &KernelSource| Some((kernel.name.clone(), loaded.get(&key(kernel))?.upgrade()?));
        code.iter().filter_map(there).collect()
    };
    let mut seen = FxHashSet::default();
    // Kernels of one text may be several of a plan's.
    let missing = code.iter().filter(|k| !found.contains_key(&k.name));
    let missing: Vec<&KernelSource> = missing.filter(|k| seen.insert(k.name.clone())).collect();
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
    let sources: Vec<Source> = shards.iter().map(|kernels| source(kernels, build)).collect();
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
                        match KernelCache::global().load(&source(&[*kernel], build)) {
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
        if found.is_empty() {
            return Err(text);
        }
    }
    counters::add(Count::CacheMiss, compiled);
    counters::add(Count::CacheHit, found.len() - compiled);
    Ok(Loading { compiled, refused, kernels: found })
}

fn warn_once(reason: &str) -> String {
    warn::once("compile", || format!("kernels can't be compiled, running eagerly instead: {reason}"));
    reason.to_string()
}

/// The source of these kernels and how it is built.
fn source(kernels: &[&KernelSource], build: Build) -> Source {
    let mut flags = vec![build.level.flag(), "-fno-strict-aliasing"];
    flags.extend(c::FLAGS.iter().chain(build.sanitize.flags()));
    if kernels.iter().any(|k| k.needs_libm()) {
        flags.push("-lm");
    }
    let source = Source { isa: build.isa, ..Source::new(C::new(build.isa).source(kernels), &flags) };
    source.with_symbols(kernels.iter().map(|kernel| kernel.name.clone()))
}

/// Makes a plan run.
pub(crate) fn bind(
    outline: &Outline,
    plan: &Plan,
    kernels: &[Callable],
    mode: Mode,
) -> Result<LoadedGraph, String> {
    let Outline { outputs, writes } = outline.clone();
    let kinds = outputs.iter().map(|t| (t.dtype, t.device)).collect();
    // SAFETY: the plan was made for this graph, or checked against it, and the kernels are its own; capture checks that
    // inputs have the layouts it is for.
    let executable = unsafe { Executable::new(plan, kernels, outputs, writes) }?;
    let executable = executable.keep_bound(mode == Mode::ReduceOverhead);
    Ok(LoadedGraph { executable, outputs: kinds })
}
