//! Devices other than the CPU: a target that kernels are made for, paired with the engine that runs them.
//!
//! Compiled graphs whose tensors are there go through the same stages. Eager ops there are graphs of one op, made once
//! for each op, types and strides.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use kiln_inductor::{KernelSource, Layout, Lowered, Options, Target, Tuning};
use kiln_ir::{Device, Emit as _, Error, Graph, Loc, Op, Result, Strides, Ty, Value, Write};
use kiln_prims::{How, Rounding};
use kiln_runtime::engine::{self, Code, Engine};
use kiln_tensor::device::{DeviceBackend, Done};
use kiln_tensor::graph::GraphValue;
use kiln_tensor::internal::TensorState as _;
use kiln_tensor::program::{Executable, Failure};

use crate::graph_cache::Outline;
use crate::segment::LoadedGraph;

const MOST: usize = 16;
static TARGETS: [OnceLock<Arc<dyn Target>>; MOST] = [const { OnceLock::new() }; MOST];

fn place(device: Device) -> Option<&'static OnceLock<Arc<dyn Target>>> {
    match device {
        Device::Cpu => None,
        Device::Cuda(number) => TARGETS.get(usize::from(number)),
    }
}

/// Makes a device known: kernels for it are made for `target`, and `engine` runs them. A device that is known already is
/// an error.
pub fn register_device(device: Device, target: Arc<dyn Target>, engine: Box<dyn Engine>) -> Result<()> {
    let known = || Error::State(format!("{device} is already registered"));
    place(device).ok_or_else(known)?.set(target.clone()).map_err(|_| known())?;
    let backend = OneOp { device, target, made: Mutex::default() };
    let is_new = engine::register(device, engine) && kiln_tensor::device::register(device, Box::new(backend));
    if is_new { Ok(()) } else { Err(known()) }
}

/// The one device that the tensors of a graph are on.
pub(crate) fn of(graph: &Graph) -> std::result::Result<Device, String> {
    let values = (0..graph.value_count() as u32).map(Value);
    let mut devices = values.filter_map(|value| graph.ty(value).as_tensor()).map(|ty| ty.device);
    let first = devices.next().unwrap_or_default();
    match devices.find(|device| *device != first) {
        Some(other) => Err(format!("tensors are on {first} and on {other}")),
        None => Ok(first),
    }
}

/// Whether every op of a graph can be a step of a plan there: kernels that users wrote are the host's.
pub(crate) fn check(graph: &Graph, device: Device) -> std::result::Result<(), String> {
    match graph.nodes.iter().find(|node| matches!(node.op, Op::Custom { .. } | Op::Scan { .. })) {
        Some(node) => Err(format!("{} has no kernel for {device}", node.op.name())),
        None => Ok(()),
    }
}

/// How a graph with inputs like these is lowered for a device.
pub(crate) fn lowering(
    device: Device,
    tuning: Tuning,
    input_layouts: &Arc<[Layout]>,
) -> std::result::Result<Options, String> {
    let target = place(device).and_then(OnceLock::get).ok_or_else(|| format!("{device} is not available"))?;
    let (target, input_layouts) = (target.clone(), input_layouts.clone());
    Ok(Options { input_layouts, target, tuning, constants: false, general: false })
}

/// Makes a plan run on a device.
pub(crate) fn bind(
    device: Device,
    outline: &Outline,
    lowered: &Lowered,
) -> std::result::Result<LoadedGraph, String> {
    let sources = lowered.code.iter();
    let code = sources.map(|KernelSource { name, code: text, signature, .. }| Code { name, text, signature });
    let code: Vec<Code<'_>> = code.collect();
    let Outline { outputs, writes } = outline.clone();
    let kinds = outputs.iter().map(|t| (t.dtype, t.device)).collect();
    // SAFETY: the plan was made for this graph, and the text is its kernels'; who runs it checks the inputs' layouts.
    let executable = unsafe { Executable::on(device, &lowered.plan, &code, outputs, writes) }?;
    Ok(LoadedGraph { executable, outputs: kinds })
}

/// Runs eager ops of a device: see the [module](self).
struct OneOp {
    device: Device,
    target: Arc<dyn Target>,
    /// By the graph's text and the inputs' strides; `None`: there is no plan.
    made: Mutex<FxHashMap<(String, Vec<Strides>), Option<Arc<LoadedGraph>>>>,
}

impl OneOp {
    fn make(&self, graph: &Graph, strides: &[Strides]) -> std::result::Result<LoadedGraph, String> {
        let how = How { rounding: Rounding::Ops, ..How::default() };
        let graph = kiln_prims::lower_how(graph, how).map_err(|error| error.to_string())?;
        let input_layouts = strides.iter().map(|strides| Layout { strides: strides.clone() }).collect();
        let (target, tuning) = (self.target.clone(), Tuning::DEFAULT);
        let options = Options { input_layouts, target, tuning, constants: false, general: false };
        let lowered = kiln_inductor::lower(&graph, &options).map_err(|error| error.to_string())?;
        bind(self.device, &Outline::of(&graph)?, &lowered)
    }
}

/// The graph of one op; in place, its result goes back to the first operand.
fn graph_of(op: &Op, args: &[GraphValue], in_place: bool, loc: Loc) -> Result<Graph> {
    let mut graph = Graph::new();
    graph.loc = loc;
    let ty = |arg: &GraphValue| match arg {
        GraphValue::Tensor(t) => Ok(Ty::Tensor(t.ty())),
        GraphValue::Number(x) => Ok(Ty::Scalar(x.kind())),
        GraphValue::List(_) => Err(Error::bug(format!("a list is an operand of {}", op.name()))),
    };
    let inputs = args.iter().map(|arg| Ok(graph.input(ty(arg)?))).collect::<Result<Vec<Value>>>()?;
    let mut result = graph.emit(op.clone(), &inputs)?[0];
    match args.first() {
        Some(GraphValue::Tensor(target)) if in_place => {
            if graph.ty(result).as_tensor().is_some_and(|ty| ty.dtype != target.dtype()) {
                result = graph.emit(Op::To { dtype: target.dtype() }, &[result])?[0];
            }
            graph.writes.push(Write { target: inputs[0], value: result, element: None });
        }
        _ => graph.outputs.push(result),
    }
    Ok(graph)
}

impl DeviceBackend for OneOp {
    fn run(&self, op: &Op, args: &[GraphValue], in_place: bool, loc: Loc) -> Result<Option<Done>> {
        let mut strides = Vec::with_capacity(args.len());
        let mut memory = Vec::with_capacity(args.len());
        for arg in args {
            strides.push(match arg {
                GraphValue::Tensor(t) => {
                    let ready = t.ready()?;
                    memory.push(ready.storage().address());
                    ready.layout().strides.clone()
                }
                GraphValue::Number(_) | GraphValue::List(_) => Strides::new(),
            });
        }
        // A plan takes its inputs to be apart where it writes.
        if in_place && memory[1..].contains(&memory[0]) {
            return Ok(None);
        }
        let graph = graph_of(op, args, in_place, loc)?;
        let key = (graph.to_string(), strides);
        let known = self.made.lock().get(&key).cloned();
        let program = match known {
            Some(program) => program,
            None => {
                let made = self.make(&graph, &key.1).ok().map(Arc::new);
                self.made.lock().insert(key, made.clone());
                made
            }
        };
        let Some(program) = program else { return Ok(None) };
        let number = |i: usize| args[i].number();
        let mut scalars = Vec::new();
        program.executable.numbers().fill(&number, &mut scalars)?;
        let mut results = Vec::with_capacity(1);
        match program.executable.run(args.iter().map(GraphValue::tensor), &scalars, &mut results) {
            Ok(()) => Ok(Some(results.pop().map_or(Done::InPlace, Done::Result))),
            Err(Failure::Error(error)) => Err(error),
            Err(Failure::Refused(_)) => Ok(Some(Done::Refused)),
            Err(Failure::Status { .. }) => Ok(Some(Done::Refused)),
        }
    }
}
