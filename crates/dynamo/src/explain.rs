//! What happened to a compiled function, as data. [`report`](crate::report) makes text of it.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use kiln_ir::{Line, Result, Shape, Strides};
use kiln_plan::Refusal;
use kiln_tensor::{DType, Tensor};

use crate::difference::Recompile;
use crate::event::Event;
use crate::general::Generals;
use crate::guard::Guard;
use crate::loops::Loops;
use crate::options::Compile;
use crate::segment::{Execution, Segment};
use crate::trie::{LiveSet, Trie};
use crate::why::{NotCompiled, Reason};

/// A line at which a graph ends or is not compiled, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Break {
    /// The user's line.
    pub loc: Line,
    /// The module that the program was in last, by the parameters it used: `layers.3.fc`.
    pub module: Option<String>,
    /// Why.
    pub reason: Reason,
}

/// What is checked of an input on every call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GuardInfo {
    /// The input's number in its graph.
    pub input: usize,
    /// Its name in a model, if it has one: `fc1.weight`.
    pub name: Option<String>,
    /// Its element type.
    pub dtype: DType,
    /// Its sizes.
    pub shape: Shape,
    /// Its strides.
    pub strides: Strides,
    /// Whether it asks for a gradient.
    pub requires_grad: bool,
    /// Whether it is a leaf, as parameters are.
    pub leaf: bool,
    /// The earlier input whose memory it shares.
    pub shares_with: Option<usize>,
}

/// The sizes a graph is compiled for, besides those it was first seen in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SizesInfo {
    /// What changes freely: `s0 = dim 0 of input 1`.
    pub symbols: Vec<String>,
    /// What follows from that: `dim 0 of input 2 = s0`, `shape[0] of reshape at model.rs:12 = 8·s0`.
    pub rules: Vec<String>,
    /// Sizes that have a plan: `13 ≤ s0 ≤ 61`.
    pub ranges: Vec<String>,
    /// How many sizes came so far that ran with such a plan.
    pub made: usize,
    /// Why other sizes have plans of their own or run op by op.
    pub refused: Vec<String>,
}

/// A kernel or library call of a compiled graph.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StepInfo {
    /// The kernel's name, or the library call.
    pub name: String,
    /// The ops it implements, each with its line: `sum at model.rs:12`.
    pub ops: Vec<String>,
    /// Bytes read from memory (each buffer once).
    pub bytes_read: usize,
    /// Bytes written.
    pub bytes_written: usize,
    /// How it runs with the step before, if it does: `in bands of 64 rows with the previous step`.
    pub joined: Option<String>,
}

/// One captured graph.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GraphInfo {
    /// The graph that this one is for other sizes, by its number.
    pub resizes: Option<usize>,
    /// What is known of other sizes, if it came in several.
    pub sizes: Option<SizesInfo>,
    /// Ops recorded.
    pub nodes: usize,
    /// The ops by name, with how often each occurs, in the order in which they first do.
    pub ops: Vec<(&'static str, usize)>,
    /// What is checked of each input on every call.
    pub guards: Vec<GuardInfo>,
    /// Parameters that were used, asked for a gradient, and that no `backward` in the graph reached: by name,
    /// or as `input 3` where there is none. Empty for a graph without `backward`.
    pub without_gradient: Vec<String>,
    /// Kernel launches per call.
    pub kernels: usize,
    /// Kernels that had to be compiled (the others came from a cache).
    pub compiled_kernels: usize,
    /// Library calls per call (matrix products, random numbers, copies).
    pub library_calls: usize,
    /// Ops that run as eager calls inside the program.
    pub fallbacks: Vec<String>,
    /// Kernels that the C compiler refused, and why.
    pub refused: Vec<String>,
    /// Bytes its kernels read per call.
    pub bytes_read: usize,
    /// Bytes its kernels write per call.
    pub bytes_written: usize,
    /// Bytes of temporary memory.
    pub arena_bytes: usize,
    /// Bytes kept for a later backward.
    pub bytes_saved: usize,
    /// Bytes computed again in backward instead of being kept.
    pub bytes_recomputed: usize,
    /// Whether a compiled backward belongs to it.
    pub has_backward: bool,
    /// Why it is run op by op, if it is.
    pub interpreted: Option<NotCompiled>,
    /// The steps, with the ops they implement.
    pub steps: Vec<StepInfo>,
    /// Fusions that were refused, and why.
    pub why_not: Vec<Refusal>,
    /// What mode `max-autotune` measured and chose.
    pub tuned: Vec<String>,
    /// Time per stage, as it went; [`GraphInfo::times`] sums it up.
    pub stages: Vec<(&'static str, Duration)>,
    /// The text at each stage: graph, joint, prims, loops, code.
    pub texts: Vec<(&'static str, String)>,
}

/// What happened to a compiled function: plain data, and a text for people, which is short (`{}`: what was
/// compiled, the steps that move most bytes, refusals by reason, breaks) or complete (`{:#}`).
///
/// ```
/// use kiln_dynamo::Compile;
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// let region = Compile::new().name("half").dynamic(false).region();
/// for size in [2, 3, 3] {
///     let x = Tensor::ones([size], &kiln_tensor::Device::Cpu)?;
///     region.run(|| x.mul(0.5))?;
/// }
/// let explanation = region.explain();
/// assert_eq!((explanation.calls, explanation.replays, explanation.graphs.len()), (3, 1, 2));
/// assert_eq!(explanation.graphs[0].ops, [("mul", 1)]);
/// assert_eq!(explanation.graphs[1].guards[0].to_string(), "input 0 is f32[3]");
/// assert_eq!(explanation.recompiles[0].reason.to_string(), "input 0 was [2], now [3]");
/// assert!(explanation.to_string().starts_with("half: 3 calls, 2 graphs, 0 breaks, 1 recompile"));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The function's name.
    pub name: String,
    /// Mode, backend, and what differs from the defaults.
    pub options: String,
    /// Calls so far.
    pub calls: usize,
    /// Calls that met nothing new.
    pub replays: usize,
    /// Captured graphs.
    pub graphs: Vec<GraphInfo>,
    /// Graph breaks.
    pub breaks: Vec<Break>,
    /// Calls that fell back to eager.
    pub fallbacks: Vec<Break>,
    /// Recompilations.
    pub recompiles: Vec<Recompile>,
    /// How often a known graph came with sizes that were new.
    pub sizes: usize,
    /// Whether there were so many of them that the function runs eagerly now.
    pub given_up: bool,
    /// Of a compiled module: parameters that want a gradient and that no call has used.
    pub unused: Vec<String>,
}

/// Runs a function once, compiled, and tells what happened; the result is dropped.
///
/// ```
/// use kiln_tensor::Tensor;
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
/// let explanation = kiln_dynamo::explain(|| {
///     let y = x.exp()?;
///     if y.sum()?.item::<f32>()? > 1.0 { y.neg() } else { Ok(y) }
/// })?;
/// assert_eq!((explanation.graphs.len(), explanation.breaks.len()), (2, 1));
/// assert_eq!(explanation.breaks[0].reason, kiln_dynamo::Reason::Value { what: "item" });
/// # Ok(()) }
/// ```
pub fn explain<T>(body: impl FnOnce() -> Result<T>) -> Result<Explanation> {
    Compile::new().name("explain").explain(body)
}

impl Compile {
    /// [`explain`](crate::explain()) with these options.
    pub fn explain<T>(self, body: impl FnOnce() -> Result<T>) -> Result<Explanation> {
        let region = self.region();
        region.run(body)?;
        Ok(region.explain())
    }
}

impl Explanation {
    pub(crate) fn empty(name: &str, options: &Compile) -> Explanation {
        Explanation {
            name: name.to_string(),
            options: options.to_string(),
            calls: 0,
            replays: 0,
            graphs: Vec::new(),
            breaks: Vec::new(),
            fallbacks: Vec::new(),
            recompiles: Vec::new(),
            sizes: 0,
            given_up: false,
            unused: Vec::new(),
        }
    }

    /// Takes note of the parameters that a compiled module has: those that want a gradient and that no graph
    /// uses are [`unused`](Explanation::unused). Says nothing where part of the work was done outside graphs.
    pub fn with_parameters(mut self, parameters: &[(String, Tensor)]) -> Explanation {
        if self.graphs.is_empty() || !self.fallbacks.is_empty() || self.given_up {
            return self;
        }
        let used = |label: &str| {
            let mut guards = self.graphs.iter().flat_map(|graph| &graph.guards);
            guards.any(|guard| guard.name.as_deref() == Some(label))
        };
        let waits = parameters.iter().filter(|(_, parameter)| parameter.requires_grad());
        let unused =
            waits.filter(|(name, parameter)| !used(&parameter.label().unwrap_or_else(|| name.clone())));
        self.unused = unused.map(|(name, _)| name.clone()).collect();
        self
    }

    /// Kernel launches per call, over all graphs.
    pub fn kernels(&self) -> usize {
        self.graphs.iter().map(|g| g.kernels).sum()
    }

    /// Ops recorded, over all graphs.
    pub fn ops(&self) -> usize {
        self.graphs.iter().map(|g| g.nodes).sum()
    }

    /// Parameters that no `backward` reached, over all graphs: see [`GraphInfo::without_gradient`].
    pub fn without_gradient(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.graphs.iter().flat_map(|g| &g.without_gradient).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

impl GraphInfo {
    /// Time spent in capture, aot, prims, inductor, autotune, the C compiler, the graph cache, and a user's backend.
    pub fn times(&self) -> Vec<(&'static str, Duration)> {
        let group = |stage: &str| match stage {
            "functionalise" | "joint" | "partition" => Some("aot"),
            "inductor" | "bind" => Some("inductor"),
            "compile" => Some("C compile"),
            "capture" => Some("capture"),
            "prims" => Some("prims"),
            "autotune" => Some("autotune"),
            "backend" => Some("backend"),
            "graph cache" => Some("graph cache"),
            _ => None,
        };
        let mut sums: Vec<(&'static str, Duration)> = Vec::new();
        for (stage, time) in &self.stages {
            let Some(name) = group(stage) else { continue };
            match sums.iter_mut().find(|(other, _)| *other == name) {
                Some((_, sum)) => *sum += *time,
                None => sums.push((name, *time)),
            }
        }
        sums
    }
}

/// Every graph of a trie, and of which sizes it is. `apart`: other sizes are other graphs.
pub(crate) fn graphs(trie: &Trie, generals: &Generals, loops: &Loops, apart: bool) -> Vec<GraphInfo> {
    let mut forms: FxHashMap<(u64, LiveSet), usize> = FxHashMap::default();
    let mut all = Vec::new();
    for (at, live, segment) in trie.segments() {
        let sizes = generals.describe(trie, at, &live).or_else(|| loops.describe(at, &live));
        let first = *forms.entry((trie.node(at).form, live)).or_insert(all.len());
        let resizes = (first < all.len() && !apart).then_some(first);
        all.push(GraphInfo { resizes, sizes, ..graph(trie, at, &segment) });
    }
    all
}

fn graph(trie: &Trie, at: u32, segment: &Arc<Segment>) -> GraphInfo {
    let info = &segment.info;
    let (interpreted, has_backward) = match &segment.execution {
        Execution::Interpreted(reason) => (Some(reason.clone()), false),
        Execution::Compiled { backward, .. } => (None, !backward.is_empty()),
    };
    let names: FxHashMap<u32, &String> = info.names.iter().map(|(v, name)| (*v, name)).collect();
    let mut guards: Vec<GuardInfo> = Vec::new();
    let mut ops: Vec<(&'static str, usize)> = Vec::new();
    let mut positions = FxHashMap::default();
    // Inputs are numbered among themselves: the numbers of variables mean nothing to a reader.
    let mut numbers = FxHashMap::default();
    let mut arrive = |new: &[Guard], guards: &mut Vec<GuardInfo>| {
        for guard in new {
            numbers.insert(guard.variable, guards.len());
            guards.push(GuardInfo {
                input: guards.len(),
                name: names.get(&guard.variable).map(|name| name.to_string()),
                dtype: guard.dtype,
                shape: guard.shape.clone(),
                strides: guard.strides.clone(),
                requires_grad: guard.requires_grad,
                leaf: guard.leaf,
                shares_with: guard.shares_with.and_then(|v| numbers.get(&v).copied()),
            });
        }
    };
    for index in trie.path(at) {
        let event = &trie.node(index).event;
        if matches!(**event, Event::Start | Event::Break) {
            continue;
        }
        arrive(event.guards(), &mut guards);
        let name = event.name();
        let position = *positions.entry(name).or_insert_with(|| {
            ops.push((name, 0));
            ops.len() - 1
        });
        ops[position].1 += 1;
    }
    let named = |v: &u32| match names.get(v) {
        Some(name) => name.to_string(),
        None => format!("input {}", numbers.get(v).copied().unwrap_or_default()),
    };
    GraphInfo {
        ops,
        guards,
        without_gradient: info.without_gradient.iter().map(named).collect(),
        has_backward,
        interpreted,
        texts: info.texts.iter().map(|(stage, text)| (*stage, text.to_string())).collect(),
        ..info.graph.clone()
    }
}
