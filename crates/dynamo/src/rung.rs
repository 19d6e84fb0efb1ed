//! How far a program is compiled while somebody looks for a mistake: what is left is run by its definition, so the first
//! rung that is wrong is where the mistake is.

use std::sync::Arc;

use kiln_inductor::{Interpreter, Layout, Options, Tuning};
use kiln_ir::{DType, Error, Graph, Result, Strides};
use kiln_plan::{Place, Plan};
use kiln_reference::{Argument, Array, Data};
use kiln_tensor::graph::GraphValue;
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
    Rewrite = "rewrite",
    Lower = "lower",
    Fuse = "fuse",
    Schedule = "schedule",
    Memory = "memory",
    Call = "call",
    C = "c",
    Threads = "threads",
    Codec = "codec",
    General = "general"
);

impl Rung {
    /// The last pass on the way to prims, by its name there.
    pub(crate) fn last_of_prims(self) -> &'static str {
        match self {
            Rung::Decompose => "decompose",
            Rung::Simplify => "simplify",
            _ => "",
        }
    }

    /// What runs a graph of prims that goes no further than here.
    pub(crate) fn code(self, part: &Part<'_>, settings: &Settings) -> Option<why::Result<Code>> {
        let c = compiling::lowering(settings, &part.layouts, false, false);
        let plain = Options { target: Arc::new(Interpreter), ..c.clone() };
        let single = Tuning { fusion_size: 0, inlined: 0, ..plain.tuning };
        Some(match self {
            Rung::Decompose | Rung::Simplify | Rung::Accumulate => Ok(Code::Graph(part.graph.clone())),
            Rung::Rewrite => Ok(Code::Graph(kiln_inductor::rewrite(part.graph, &c))),
            Rung::Lower => Defined::code(part.graph, &Options { tuning: single, ..plain }, true),
            Rung::Fuse => Defined::code(part.graph, &plain, true),
            Rung::Schedule => Defined::code(part.graph, &c, true),
            Rung::Memory => Defined::code(part.graph, &c, false),
            _ => return None,
        })
    }
}

/// A plan that is run by its definition.
pub(crate) struct Defined {
    graph: Graph,
    plan: Plan,
    layouts: Arc<[Layout]>,
}

impl Defined {
    /// Makes a plan; `apart`: temporaries have memory of their own.
    fn code(graph: &Graph, options: &Options, apart: bool) -> why::Result<Code> {
        let lowered = kiln_inductor::lower(graph, options);
        let mut plan = lowered.map_err(|error| NotCompiled::pass("inductor", error))?.plan;
        if apart {
            take_apart(&mut plan);
        }
        Ok(Code::Plan(Box::new(Defined {
            graph: graph.clone(),
            plan,
            layouts: options.input_layouts.clone(),
        })))
    }

    pub(crate) fn run(&self, values: &[GraphValue]) -> Result<Vec<Tensor>> {
        let _mode = no_grad();
        let inputs = values.iter().map(argument).collect::<Result<Vec<_>>>()?;
        let strides: Vec<Strides> = self.layouts.iter().map(|layout| layout.strides.clone()).collect();
        let outcome = kiln_reference::plan::interpret(&self.plan, &self.graph, &strides, &inputs)
            .map_err(|op| Error::State(format!("{op}: refused by the interpreted plan")))?;
        for write in &self.graph.writes {
            let number = self.graph.inputs.iter().position(|input| *input == write.target);
            let number = number.ok_or_else(|| Error::bug("a write-back without a target"))?;
            if let (Some(GraphValue::Tensor(target)), Some(Argument::Tensor(array))) =
                (values.get(number), outcome.inputs.get(number))
            {
                target.copy_(&tensor(array)?)?;
            }
        }
        let result = |output: &Argument| match output {
            Argument::Tensor(array) => tensor(array),
            Argument::Scalar(_) | Argument::List(_) => {
                Err(Error::bug("a result of a plan that is no tensor"))
            }
        };
        outcome.outputs.iter().map(result).collect()
    }
}

/// Gives every temporary memory of its own.
fn take_apart(plan: &mut Plan) {
    let mut end = 0;
    for buffer in &mut plan.buffers {
        if let Place::Arena { .. } | Place::BeforeOutput { .. } = buffer.place {
            buffer.place = Place::Arena { offset: end };
            end += buffer.ty.bytes.next_multiple_of(64);
        }
    }
    plan.arena_bytes = plan.arena_bytes.max(end);
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
