//! Backends run captured graphs: Kiln's own, and those that users write.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::RwLock;

use kiln_ir::{Error, Graph, Loc, Result, Strides, TensorTy, Why};
use kiln_tensor::graph::GraphValue;
use kiln_tensor::hook::Scope;
use kiln_tensor::internal::TensorState;
use kiln_tensor::{Ready, Tensor, no_grad};

use crate::options::{Mode, named};
use crate::settings::Settings;

/// Kiln's own backends.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Backend {
    /// Fused loops, compiled.
    #[default]
    Inductor,
    /// The graphs after ahead-of-time autograd, op by op.
    AotEager,
    /// What was captured, op by op.
    Eager,
}
named!(Backend, "backend", Inductor = "inductor" | "graph", AotEager = "aot_eager", Eager = "eager");

/// A compiled graph: takes tensors and numbers in the order of the graph's inputs, returns one tensor for each
/// of the graph's outputs.
pub type CompiledGraph = Box<dyn Fn(&[GraphValue]) -> Result<Vec<Tensor>> + Send + Sync>;

/// A custom backend: takes a graph, returns something that runs it.
///
/// The graph is what the program did between two points where values were needed, after ahead-of-time
/// autograd: no in-place changes, no views that share memory, `backward()` expanded into ops. Where results
/// leave with gradients there are the forward and the backward (several, one after the other, where results
/// that leave were computed from each other). Inputs are tensors and numbers;
/// a learning rate is a number, so that it may change from call to call. Lists of tensors are packed inside
/// the graph by the op `list`.
///
/// [`run_graph`](crate::run_graph) runs a graph op by op; [`run_graph_with`](crate::run_graph_with) lets you
/// take over some of the ops.
///
/// What is returned is checked (how many, which types) and copied where it shares memory with something else,
/// so a backend can't break a program's aliasing. If `compile` fails, the graph runs op by op; a warning and
/// `explain()` say why. If a compiled graph fails, the program also runs op by op, and fails as eager does; if
/// it doesn't fail there, the call returns the compiled graph's error.
///
/// A function of a graph and its context is also a backend:
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use kiln_dynamo::{Compile, GraphContext, run_graph};
/// use kiln_ir::Graph;
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// static OPS: AtomicUsize = AtomicUsize::new(0);
/// let count = |graph: &Graph, _: &GraphContext<'_>| {
///     OPS.fetch_add(graph.nodes.len(), Ordering::Relaxed);
///     let graph = graph.clone();
///     Ok(Box::new(move |inputs: &[_]| run_graph(&graph, inputs)) as _)
/// };
/// let region = Compile::new().backend(count).region();
/// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
/// for _ in 0..3 {
///     let y = region.run(|| x.add(1.0)?.mul(&x))?;
///     assert_eq!(y.to_vec::<f32>()?, [2.0, 6.0]);
/// }
/// assert_eq!(OPS.load(Ordering::Relaxed), 2); // compiled once
/// # Ok(()) }
/// ```
pub trait CustomBackend: Send + Sync {
    /// Its name in explanations.
    fn name(&self) -> &str {
        "custom"
    }

    /// In which ops it wants graphs.
    fn level(&self) -> Level {
        Level::Aten
    }

    /// Makes a graph callable.
    fn compile(&self, graph: &Graph, context: &GraphContext<'_>) -> Result<CompiledGraph>;
}

impl<F> CustomBackend for F
where
    F: Fn(&Graph, &GraphContext<'_>) -> Result<CompiledGraph> + Send + Sync,
{
    fn compile(&self, graph: &Graph, context: &GraphContext<'_>) -> Result<CompiledGraph> {
        self(graph, context)
    }
}

/// The vocabulary of a graph.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Level {
    /// The ops that programs call.
    #[default]
    Aten,
    /// The few that those are made of, after clean-up: what inductor lowers.
    Prims,
}

/// Which part of a program a graph is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum GraphKind {
    /// All of it: its results leave without gradients (a backward pass inside is part of it).
    Whole,
    /// The forward part of a function whose results leave with gradients.
    Forward,
    /// The backward part: saved values, then the gradients that arrive.
    Backward,
}

/// What an output of a graph is for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum OutputRole {
    /// A result of the function (of a backward graph: a gradient).
    Result,
    /// Kept for the backward graph.
    Saved,
    /// The input with this number holds it afterwards. Kiln writes it back: a backend changes nothing.
    WriteBack(usize),
}

/// What a backend is told besides the graph.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GraphContext<'a> {
    /// The compiled function's name.
    pub name: &'a str,
    /// Which part of the program it is.
    pub kind: GraphKind,
    /// Mode of the compiled function.
    pub mode: Mode,
    /// Whether sizes are expected to differ from call to call.
    pub dynamic: Option<bool>,
    /// Named options of the compiled function.
    pub settings: &'a Settings,
    /// The strides that each tensor input has on every call (none for numbers). Another layout is another graph.
    pub strides: Vec<Option<Strides>>,
    /// What each output is for.
    pub outputs: Vec<OutputRole>,
}

/// A backend as an option: one of Kiln's or a user's. Parsed from a name that [`list_backends`] knows.
#[derive(Clone)]
pub struct ChosenBackend(Choice);

#[derive(Clone)]
enum Choice {
    Own(Backend),
    Custom(Arc<str>, Arc<dyn CustomBackend>),
}

impl Default for ChosenBackend {
    fn default() -> ChosenBackend {
        Backend::default().into()
    }
}

impl ChosenBackend {
    /// Its name.
    pub fn name(&self) -> &str {
        match &self.0 {
            Choice::Own(backend) => backend.name(),
            Choice::Custom(name, _) => name,
        }
    }

    /// The user's backend, if it is one.
    pub(crate) fn custom(&self) -> Option<&Arc<dyn CustomBackend>> {
        match &self.0 {
            Choice::Own(_) => None,
            Choice::Custom(_, backend) => Some(backend),
        }
    }

    pub(crate) fn is(&self, backend: Backend) -> bool {
        matches!(self.0, Choice::Own(own) if own == backend)
    }
}

impl From<Backend> for ChosenBackend {
    fn from(backend: Backend) -> ChosenBackend {
        ChosenBackend(Choice::Own(backend))
    }
}

impl<B: CustomBackend + 'static> From<B> for ChosenBackend {
    fn from(backend: B) -> ChosenBackend {
        Arc::new(backend).into()
    }
}

impl<B: CustomBackend + 'static> From<Arc<B>> for ChosenBackend {
    fn from(backend: Arc<B>) -> ChosenBackend {
        ChosenBackend(Choice::Custom(backend.name().into(), backend))
    }
}

impl fmt::Display for ChosenBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for ChosenBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ChosenBackend {
    type Err = Error;
    fn from_str(text: &str) -> Result<ChosenBackend> {
        if let Ok(own) = text.parse::<Backend>() {
            return Ok(own.into());
        }
        if let Some(custom) = REGISTERED.read().get(text) {
            return Ok(ChosenBackend(Choice::Custom(text.into(), custom.clone())));
        }
        Err(Error::Option { option: "backend", value: text.to_string(), valid: list_backends().join(", ") })
    }
}

static REGISTERED: RwLock<BTreeMap<String, Arc<dyn CustomBackend>>> = RwLock::new(BTreeMap::new());

/// Makes a backend known by a name, for options that come as text. A name that is taken is an error.
pub fn register_backend(name: &str, backend: impl CustomBackend + 'static) -> Result<()> {
    let mut registered = REGISTERED.write();
    if name.parse::<Backend>().is_ok() || registered.contains_key(name) {
        return Err(Error::State(format!("backend {name:?} is already registered")));
    }
    registered.insert(name.to_string(), Arc::new(backend));
    Ok(())
}

/// The names of all backends: Kiln's own, then the registered ones.
pub fn list_backends() -> Vec<String> {
    let own = Backend::ALL.iter().map(|backend| backend.name().to_string());
    own.chain(REGISTERED.read().keys().cloned()).collect()
}

/// A graph that a user's backend compiled.
pub(crate) struct Custom {
    backend: Arc<str>,
    call: CompiledGraph,
    /// The types of what comes out.
    types: Vec<TensorTy>,
    /// The inputs that hold the last outputs afterwards.
    writes: Vec<usize>,
}

impl Custom {
    /// Has a backend compile a graph. Write-backs become outputs.
    pub(crate) fn compile(
        backend: &Arc<dyn CustomBackend>,
        name: &str,
        graph: &Graph,
        mut context: GraphContext<'_>,
    ) -> Result<Custom> {
        let mut graph = graph.clone();
        graph.take_out_written();
        let mut writes = Vec::with_capacity(graph.writes.len());
        for write in std::mem::take(&mut graph.writes) {
            let target = graph.inputs.iter().position(|input| *input == write.target);
            let target = target.ok_or_else(|| Error::bug("a write-back without a target"))?;
            writes.push(target);
            context.outputs.push(OutputRole::WriteBack(target));
            graph.outputs.push(write.value);
        }
        let tensor = |v: &kiln_ir::Value| graph.ty(*v).as_tensor().cloned();
        let types: Option<Vec<TensorTy>> = graph.outputs.iter().map(tensor).collect();
        let types = types.ok_or_else(|| Error::bug("an output of a graph that is not a tensor"))?;
        let call = backend.compile(&graph, &context)?;
        Ok(Custom { backend: name.into(), call, types, writes })
    }

    /// Runs it: the results are checked, have memory of their own, and write-backs are done.
    pub(crate) fn run(&self, inputs: &[GraphValue]) -> Result<Vec<Ready>> {
        let _eager = Scope::suspend();
        let _mode = no_grad();
        let made = (self.call)(inputs)?;
        let fail = |why| Err(Error::op(&format!("backend {}", self.backend), why, Loc::UNKNOWN));
        if made.len() != self.types.len() {
            let (expected, got) = (self.types.len(), made.len());
            return fail(Why::Count { what: "tensors, one per output", expected, got });
        }
        let mut outputs = Vec::with_capacity(made.len());
        for (i, (tensor, want)) in made.into_iter().zip(&self.types).enumerate() {
            let got = tensor.ready()?.ty();
            if got != *want {
                return fail(Why::ty("output", Some(i), want.clone(), got));
            }
            outputs.push(own(tensor)?);
        }
        let results = outputs.len() - self.writes.len();
        for (&target, value) in self.writes.iter().zip(outputs.drain(results..)) {
            if let Some(GraphValue::Tensor(target)) = inputs.get(target) {
                target.copy_(&Tensor::from_ready(value))?;
            }
        }
        Ok(outputs)
    }
}

/// A tensor's memory if nobody else has it and it is dense from its beginning; else a copy.
fn own(tensor: Tensor) -> Result<Ready> {
    let ready = tensor.ready()?;
    let alone = tensor.references() == 1 && ready.storage().references() == 1;
    if alone && ready.layout().is_contiguous() && ready.layout().offset == 0 {
        return Ok(ready.clone());
    }
    Ok(tensor.clone_tensor()?.ready()?.clone())
}
