//! How far a program is compiled while somebody looks for a mistake: what is left is run by its definition, so the first
//! rung that is wrong is where the mistake is.

use std::sync::Arc;

use kiln_inductor::{Interpreter, Options};
use kiln_ir::{Class, DType, Emit, Error, Graph, Node, Op, Result, Strides, Ty};
use kiln_plan::{Place, Plan, Step};
use kiln_reference::{Argument, Array, Data};
use kiln_tensor::graph::{GraphValue, run_functional_with, run_node};
use kiln_tensor::{Tensor, no_grad};

use crate::compiling;
use crate::options::named;
use crate::pipeline::Part;
use crate::segment::Code;
use crate::settings::Settings;
use crate::why::{self, NotCompiled};

/// A stage of the compiler, in order.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Rung {
    /// Ops are recorded and run as they were.
    Capture,
    /// Mutation and views are resolved.
    Functionalise,
    /// Forward and backward are one graph.
    Joint,
    /// They are two again, and values are saved for the second.
    Partition,
    /// Ops are prims.
    Decompose,
    /// Rewrite rules have been applied.
    Simplify,
    /// Sums with scattered summands are accumulated.
    Accumulate,
    /// Products that are added up are one.
    Join,
    /// The graph has the form that loops like.
    Rewrite,
    /// Each op is loops, which are interpreted.
    Lower,
    /// Loops are fused.
    Fuse,
    /// Loops are cut, and steps run together.
    Schedule,
    /// Temporaries share memory.
    Memory,
    /// Library calls are the runtime's; what would be kernels runs op by op.
    Call,
    /// Kernels are C, on one thread.
    C,
    /// Kernels run on all threads.
    Threads,
    /// What was recorded for other numbers and layouts is met again.
    Replay,
    /// Plans come from the graph cache.
    Codec,
    /// Plans come from a template for many sizes.
    General,
}
named!(
    Rung,
    "stage",
    Capture = "capture",
    Functionalise = "functionalise",
    Joint = "joint",
    Partition = "partition",
    Decompose = "decompose",
    Simplify = "simplify",
    Accumulate = "accumulate",
    Join = "join",
    Rewrite = "rewrite",
    Lower = "lower",
    Fuse = "fuse",
    Schedule = "schedule",
    Memory = "memory",
    Call = "call",
    C = "c",
    Threads = "threads",
    Replay = "replay",
    Codec = "codec",
    General = "general"
);

impl Rung {
    /// The last pass on the way to prims, by its name there.
    pub(crate) fn last_of_prims(self) -> &'static str {
        match self {
            Rung::Decompose => "decompose",
            Rung::Simplify => "simplify",
            Rung::Accumulate => "accumulate",
            _ => "",
        }
    }

    /// What runs a graph of prims that goes no further than here.
    pub(crate) fn code(self, part: &Part<'_>, settings: &Settings) -> Option<why::Result<Code>> {
        let c = compiling::lowering(settings, &part.layouts, false, false);
        let plain = Options { target: Arc::new(Interpreter), ..c.clone() };
        Some(match self {
            Rung::Decompose | Rung::Simplify | Rung::Accumulate | Rung::Join => {
                Ok(Code::Graph(part.graph.clone()))
            }
            Rung::Rewrite => Ok(Code::Graph(kiln_inductor::rewrite(part.graph, &c))),
            Rung::Lower => Ok(Code::Plan(Defined::Nodes(kiln_inductor::rewrite(part.graph, &c)))),
            Rung::Fuse => Defined::code(part.graph, &plain, true),
            Rung::Schedule => Defined::code(part.graph, &c, true),
            Rung::Memory => Defined::code(part.graph, &c, false),
            _ => return None,
        })
    }
}

/// A graph that is run by the definition of its loops.
pub(crate) enum Defined {
    /// Each op by itself.
    Nodes(Graph),
    /// All of it as a plan.
    Plan(Box<DefinedPlan>),
}

/// A plan, and the graph that it is of, whose inputs have these strides.
pub(crate) struct DefinedPlan {
    graph: Graph,
    plan: Plan,
    strides: Vec<Strides>,
}

impl Defined {
    /// Makes a plan; `apart`: temporaries have memory of their own.
    fn code(graph: &Graph, options: &Options, apart: bool) -> why::Result<Code> {
        let failed = |error| NotCompiled::pass("inductor", error);
        let plan = if apart {
            let mut plan = kiln_inductor::lower_unchecked(graph, options, &[]).map_err(failed)?.plan;
            take_apart(&mut plan);
            plan
        } else {
            kiln_inductor::lower(graph, options).map_err(failed)?.plan
        };
        let strides = options.input_layouts.iter().map(|layout| layout.strides.clone()).collect();
        Ok(Code::Plan(Defined::Plan(Box::new(DefinedPlan { graph: graph.clone(), plan, strides }))))
    }

    pub(crate) fn run(&self, values: &[GraphValue]) -> Result<Vec<Tensor>> {
        let _mode = no_grad();
        match self {
            Defined::Nodes(graph) => run_functional_with(graph, values, &mut run_lowered),
            Defined::Plan(plan) => run_plan(&plan.graph, &plan.plan, &plan.strides, values),
        }
    }

    /// Bytes of temporaries, of a plan.
    pub(crate) fn arena_bytes(&self) -> usize {
        match self {
            Defined::Nodes(_) => 0,
            Defined::Plan(plan) => plan.plan.arena_bytes,
        }
    }
}

/// Runs an op by its loops. Those that place or pack elements are left to who fuses; a view is what another op reads.
fn run_lowered(node: &Node, args: &[&GraphValue]) -> Result<GraphValue> {
    let class = node.op.row().class;
    let is_placed = matches!(node.op, Op::Cat { .. } | Op::SliceScatter { .. } | Op::Clone {});
    let is_list = args.iter().any(|arg| matches!(arg, GraphValue::List(_)));
    let is_called =
        matches!(class, Class::Contraction | Class::Random | Class::List | Class::Constant | Class::Custom);
    if is_placed || is_list || is_called || !args.iter().any(|arg| arg.tensor().is_some()) {
        return run_node(node, args);
    }
    let mut graph = Graph::new();
    let mut inputs = Vec::new();
    let mut values = Vec::new();
    for &arg in args {
        let (ty, value) = match arg {
            GraphValue::Tensor(tensor) => (tensor.ty().into(), GraphValue::Tensor(tensor.contiguous()?)),
            GraphValue::Number(number) => (Ty::Scalar(number.kind()), arg.clone()),
            GraphValue::List(_) => return run_node(node, args),
        };
        inputs.push(graph.input(ty));
        values.push(value);
    }
    graph.outputs = graph.emit(node.op.clone(), &inputs)?.to_vec();
    let is_bool = graph.ty(graph.outputs[0]).as_tensor().is_some_and(|tensor| tensor.dtype == DType::Bool);
    let turn = if is_bool { Op::LogicalNot {} } else { Op::Neg {} };
    if class == Class::View {
        graph.outputs = graph.emit(turn.clone(), &graph.outputs.clone())?.to_vec();
    }
    let options = Options::dense(&graph, Interpreter);
    let Ok(lowered) = kiln_inductor::lower_unchecked(&graph, &options, &[]) else {
        return run_node(node, args);
    };
    let strides: Vec<Strides> = options.input_layouts.iter().map(|layout| layout.strides.clone()).collect();
    let mut results = run_plan(&graph, &lowered.plan, &strides, &values)?;
    let result = results.pop().ok_or_else(|| Error::bug("an op without a result"))?;
    Ok(GraphValue::Tensor(match (class, is_bool) {
        (Class::View, true) => result.logical_not()?,
        (Class::View, false) => result.neg()?,
        _ => result,
    }))
}

fn run_plan(graph: &Graph, plan: &Plan, strides: &[Strides], values: &[GraphValue]) -> Result<Vec<Tensor>> {
    let inputs = values.iter().map(argument).collect::<Result<Vec<_>>>()?;
    let outcome = kiln_reference::plan::interpret(plan, graph, strides, &inputs)
        .map_err(|op| Error::State(format!("{op}: refused by the interpreted plan")))?;
    for write in &graph.writes {
        let number = graph.inputs.iter().position(|input| *input == write.target);
        let number = number.ok_or_else(|| Error::bug("a write-back without a target"))?;
        if let (Some(GraphValue::Tensor(target)), Some(Argument::Tensor(array))) =
            (values.get(number), outcome.inputs.get(number))
        {
            target.copy_(&tensor(array)?)?;
        }
    }
    let result = |output: &Argument| match output {
        Argument::Tensor(array) => tensor(array),
        Argument::Scalar(_) | Argument::List(_) => Err(Error::bug("a result of a plan that is no tensor")),
    };
    outcome.outputs.iter().map(result).collect()
}

/// Gives every temporary memory of its own, with room between them.
pub(crate) fn take_apart(plan: &mut Plan) {
    let mut end = 256;
    for buffer in &mut plan.buffers {
        if let Place::Arena { .. } | Place::BeforeOutput { .. } = buffer.place {
            buffer.place = Place::Arena { offset: end };
            end += buffer.ty.bytes.next_multiple_of(64) + 256;
        }
    }
    plan.arena_bytes = plan.arena_bytes.max(end);
    for step in &mut plan.steps {
        if let Step::Call(call) = step {
            call.free = 0..0;
        }
    }
}

fn argument(value: &GraphValue) -> Result<Argument> {
    let tensor = match value {
        GraphValue::Number(number) => return Ok(Argument::Scalar(*number)),
        GraphValue::List(_) => return Err(Error::bug("a list goes into a plan")),
        GraphValue::Tensor(tensor) => tensor.detach()?,
    };
    let (dtype, shape, device) = (tensor.dtype(), tensor.shape(), tensor.device());
    let array = if dtype.is_float() {
        let elements = tensor.to_dtype(DType::F64)?.to_vec::<f64>()?;
        Array { dtype, shape, device, data: Data::Float(elements) }
    } else {
        Array { dtype, shape, device, data: Data::Int(tensor.to_dtype(DType::I64)?.to_vec::<i64>()?) }
    };
    Ok(Argument::Tensor(array))
}

fn tensor(array: &Array) -> Result<Tensor> {
    let wide = match &array.data {
        Data::Float(elements) => Tensor::from_vec(elements.clone(), array.shape.clone())?,
        Data::Int(elements) => Tensor::from_vec(elements.clone(), array.shape.clone())?,
    };
    wide.to_dtype(array.dtype)
}
