//! A case: a recording, and the values that it began with.

use std::collections::BTreeMap;
use std::sync::Arc;

use kiln_aot::trace::{Event, TraceArg, Variable};
use kiln_aot::{Recording, Trace};
use kiln_ir::{Error, Graph, Layout, Op, Result, Scalar, Ty};
use kiln_tensor::Tensor;

/// What a variable held when the program began.
#[derive(Clone)]
pub struct Input {
    /// Its elements, dense.
    pub values: Tensor,
    /// An input before it that has the same memory.
    pub shares: Option<Variable>,
}

/// See the [module](self).
#[derive(Clone, Default)]
pub struct Case {
    /// What the program did, and what outlived it.
    pub recording: Recording,
    /// By variable, what it began with.
    pub inputs: BTreeMap<Variable, Input>,
    /// The numbers, by hole.
    pub numbers: Vec<Scalar>,
    /// The options it was compiled with, as `Compile` reads them.
    pub options: String,
    /// What went wrong, a line each.
    pub notes: Vec<String>,
}

impl Case {
    /// A case that does what a functional graph says, with these inputs.
    pub fn of_graph(graph: &Graph, values: &[Value]) -> Result<Case> {
        let mut trace = Trace::default();
        let mut case = Case::default();
        let mut names: BTreeMap<u32, TraceArg> = BTreeMap::new();
        for (&input, value) in graph.inputs.iter().zip(values) {
            let arg = match (graph.ty(input), value) {
                (Ty::Scalar(kind), Value::Number(x)) => {
                    trace.numbers.push(*kind);
                    case.numbers.push(*x);
                    TraceArg::Number(trace.numbers.len() as u32 - 1)
                }
                (ty @ Ty::Tensor(tensor), Value::Tensor(values)) => {
                    let layout = Arc::new(Layout::contiguous(tensor.shape.clone()));
                    let input = kiln_aot::trace::InputVariable { layout, requires_grad: false, leaf: true };
                    let variable = trace.define(ty.clone(), Some(input));
                    case.inputs.insert(variable, Input { values: values.clone(), shares: None });
                    TraceArg::Variable(variable)
                }
                (ty, _) => {
                    return Err(Error::State(format!("an input of a graph is {ty}, its value is not")));
                }
            };
            names.insert(input.0, arg);
        }
        let lost = || Error::bug("a value of a graph is missing");
        for node in &graph.nodes {
            let out = node.outs[0];
            if let Op::Constant { value } = node.op {
                names.insert(out.0, TraceArg::Constant(value));
                continue;
            }
            let args = node.args.iter().map(|v| names.get(&v.0).copied().ok_or_else(lost));
            let args = args.collect::<Result<Vec<_>>>()?;
            if let Ty::Scalar(_) = graph.ty(out) {
                let numbers: Option<Vec<Scalar>> = args.iter().map(|arg| case.number(arg)).collect();
                let folded = numbers.and_then(|numbers| node.op.fold(&numbers)).ok_or_else(lost)?;
                names.insert(out.0, TraceArg::Constant(folded));
                continue;
            }
            let made = trace.define(graph.ty(out).clone(), None);
            names.insert(out.0, TraceArg::Variable(made));
            trace.events.push(Event::off_tape(node.op.clone(), args, Some(made), node.loc));
        }
        for write in &graph.writes {
            let args = [write.target, write.value].map(|v| names.get(&v.0).copied());
            let [Some(target), Some(value)] = args else { return Err(lost()) };
            let loc = kiln_ir::Loc::UNKNOWN;
            let mut value = value;
            if let Some(index) = write.element {
                let TraceArg::Variable(target) = target else { return Err(lost()) };
                let made = trace.define(trace.variables[target as usize].ty.clone(), None);
                let op = Op::ListGet { index: index as usize };
                trace.events.push(Event::off_tape(op, vec![value], Some(made), loc));
                value = TraceArg::Variable(made);
            }
            trace.events.push(Event::off_tape(Op::Copy {}, vec![target, value], None, loc));
        }
        let live = graph.outputs.iter().filter_map(|v| match names.get(&v.0) {
            Some(TraceArg::Variable(variable)) => Some(*variable),
            _ => None,
        });
        case.recording = Recording { live: live.collect(), trace };
        Ok(case)
    }

    /// The value of an operand that is a number.
    pub fn number(&self, arg: &TraceArg) -> Option<Scalar> {
        match arg {
            TraceArg::Variable(_) => None,
            TraceArg::Number(number) => self.numbers.get(*number as usize).copied(),
            TraceArg::Constant(value) => Some(*value),
        }
    }

    /// Bytes of all values that there ever are.
    pub fn bytes(&self) -> usize {
        let bytes = |ty: &Ty| match ty {
            Ty::Tensor(tensor) => tensor.bytes(),
            Ty::List(items) => items.iter().map(|item| item.bytes()).sum(),
            Ty::Scalar(_) => 0,
        };
        self.recording.trace.variables.iter().map(|info| bytes(&info.ty)).sum()
    }

    /// How many ops and other events there are.
    pub fn len(&self) -> usize {
        self.recording.trace.events.len()
    }

    /// Whether nothing is done at all.
    pub fn is_empty(&self) -> bool {
        self.recording.trace.events.is_empty()
    }
}

/// What goes into a graph.
#[derive(Clone)]
pub enum Value {
    /// A tensor.
    Tensor(Tensor),
    /// A number.
    Number(Scalar),
}
