//! Graphs, run op by op on tensors.

use smallvec::SmallVec;

use kiln_ir::{Error, Graph, Loc, Node, Op, Result, Scalar, TensorTy, Ty, Value, Why, Write};

use crate::dispatch::execute;
use crate::hook::{Arg, Call, Output, Scope};
use crate::{Tensor, TensorList, no_grad};

#[track_caller]
fn lost() -> Error {
    Error::bug("a value of a graph is missing")
}

/// Runs a functional graph op by op: the interpreter for backends of your own. Outputs may share memory with
/// inputs and with each other.
pub fn run_graph(graph: &Graph, inputs: &[GraphValue]) -> Result<Vec<Tensor>> {
    run_graph_with(graph, inputs, &mut run_node)
}

/// [`run_graph`] with each op given to `run`, which may do it in a way of its own or hand it to [`run_node`].
pub fn run_graph_with(
    graph: &Graph,
    inputs: &[GraphValue],
    run: &mut dyn FnMut(&Node, &[&GraphValue]) -> Result<GraphValue>,
) -> Result<Vec<Tensor>> {
    if inputs.len() != graph.inputs.len() {
        let (expected, got) = (graph.inputs.len(), inputs.len());
        let why = Why::Count { what: "values, one per input", expected, got };
        return Err(Error::op("run_graph", why, Loc::UNKNOWN));
    }
    let _eager = Scope::suspend();
    let values = values_of(graph, inputs, run)?;
    graph.outputs.iter().map(|v| tensor_of(&values, *v)).collect()
}

/// Runs one op of a graph on its operands.
pub fn run_node(node: &Node, args: &[&GraphValue]) -> Result<GraphValue> {
    evaluate(node, args)
}

type Values = Vec<Option<GraphValue>>;

/// Every value of a graph.
fn values_of(
    graph: &Graph,
    inputs: &[GraphValue],
    run: &mut dyn FnMut(&Node, &[&GraphValue]) -> Result<GraphValue>,
) -> Result<Values> {
    let _mode = no_grad();
    let mut values: Vec<Option<GraphValue>> = vec![None; graph.value_count()];
    for (&value, input) in graph.inputs.iter().zip(inputs) {
        values[value.index()] = Some(input.clone());
    }
    for node in &graph.nodes {
        let args: SmallVec<[&GraphValue; 4]> =
            node.args.iter().map(|v| values[v.index()].as_ref().ok_or_else(lost)).collect::<Result<_>>()?;
        let result = run(node, &args)?;
        drop(args);
        values[node.outs[0].index()] = Some(result);
    }
    Ok(values)
}

fn tensor_of(values: &Values, value: Value) -> Result<Tensor> {
    match &values[value.index()] {
        Some(GraphValue::Tensor(t)) => Ok(t.clone()),
        _ => Err(lost()),
    }
}

/// Runs a functional graph op by op on tensors and writes back: the `aot_eager` backend.
pub fn run_functional(graph: &Graph, inputs: &[GraphValue]) -> Result<Vec<Tensor>> {
    run_functional_with(graph, inputs, &mut run_node)
}

/// [`run_functional`] with each op given to `run`.
pub fn run_functional_with(
    graph: &Graph,
    inputs: &[GraphValue],
    run: &mut dyn FnMut(&Node, &[&GraphValue]) -> Result<GraphValue>,
) -> Result<Vec<Tensor>> {
    let _mode = no_grad();
    let values = values_of(graph, inputs, run)?;
    let tensor = |value: Value| tensor_of(&values, value);
    // Outputs have memory of their own: a result may be a view of, or the same as, another or an input.
    let outputs = graph.outputs.iter().map(|&v| tensor(v)?.clone_tensor()).collect::<Result<Vec<_>>>()?;
    let element = |w: &Write| match (&values[w.value.index()], w.element) {
        (Some(GraphValue::List(items)), Some(i)) => items.get(i as usize),
        _ => tensor(w.value),
    };
    let written = graph.writes.iter().map(|w| Ok((tensor(w.target)?, element(w)?.clone_tensor()?)));
    for (target, value) in written.collect::<Result<Vec<_>>>()? {
        target.copy_(&value)?;
    }
    Ok(outputs)
}

/// Runs a backward graph, which is linear in its last inputs (the tangents), where some of these are missing:
/// what depends on nothing else is missing, too, and where it meets something that is there it counts as zero.
/// Only what is needed is read.
pub fn run_sparse(
    graph: &Graph,
    saved: usize,
    read: &dyn Fn(usize) -> Result<GraphValue>,
    tangents: &[Option<Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let _mode = no_grad();
    // What depends on a tangent that is there, what only on missing ones, and what the results need.
    let none = || vec![false; graph.value_count()];
    let (mut live, mut missing, mut needed) = (none(), none(), none());
    for (value, tangent) in graph.inputs.iter().skip(saved).zip(tangents) {
        live[value.index()] = tangent.is_some();
        missing[value.index()] = tangent.is_none();
    }
    for node in &graph.nodes {
        let any = |set: &[bool]| node.args.iter().any(|v| set[v.index()]);
        let out = node.outs[0].index();
        live[out] = any(&live);
        missing[out] = any(&missing) && !live[out];
    }
    graph.outputs.iter().for_each(|v| needed[v.index()] = live[v.index()]);
    for node in graph.nodes.iter().rev().filter(|node| !missing[node.outs[0].index()]) {
        if needed[node.outs[0].index()] {
            node.args.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    let mut values: Vec<Option<GraphValue>> = vec![None; graph.value_count()];
    for (i, value) in graph.inputs.iter().enumerate().filter(|(_, v)| needed[v.index()]) {
        values[value.index()] = match i.checked_sub(saved) {
            None => Some(read(i)?),
            Some(tangent) => tangents[tangent].clone().map(GraphValue::Tensor),
        };
    }
    for node in &graph.nodes {
        let out = node.outs[0].index();
        if missing[out] || !needed[out] {
            continue;
        }
        let mut there = node.args.iter().filter_map(|v| values[v.index()].as_ref());
        let result = match (&node.op, node.args.len(), there.next(), there.next()) {
            (Op::Add {}, 2, Some(only), None) => only.clone(),
            _ => {
                let mut args: SmallVec<[GraphValue; 4]> = SmallVec::new();
                for v in &node.args {
                    args.push(match &values[v.index()] {
                        Some(value) => value.clone(),
                        None => zeros(graph.ty(*v))?,
                    });
                }
                evaluate(node, &args.iter().collect::<SmallVec<[&GraphValue; 4]>>())?
            }
        };
        values[out] = Some(result);
    }
    let tensor = |value: &Value| match &values[value.index()] {
        Some(GraphValue::Tensor(t)) => Ok(Some(t.clone_tensor()?)),
        _ => Ok(None),
    };
    graph.outputs.iter().map(tensor).collect()
}

fn zeros(ty: &Ty) -> Result<GraphValue> {
    let zero = |t: &TensorTy| Tensor::full_of(t.shape.clone(), 0.0, t.dtype, &t.device);
    Ok(match ty {
        Ty::Tensor(t) => GraphValue::Tensor(zero(t)?),
        Ty::List(items) => GraphValue::List(TensorList::new(items.iter().map(zero).collect::<Result<_>>()?)),
        Ty::Scalar(_) => GraphValue::Number(Scalar::Float(0.0)),
    })
}

fn evaluate(node: &Node, args: &[&GraphValue]) -> Result<GraphValue> {
    if let Op::Constant { value } = node.op {
        return Ok(GraphValue::Number(value));
    }
    let numbers: Option<SmallVec<[Scalar; 4]>> =
        args.iter().map(|v| if let GraphValue::Number(x) = v { Some(*x) } else { None }).collect();
    if let Some(x) = numbers.filter(|n| !n.is_empty()).and_then(|n| node.op.fold(&n)) {
        return Ok(GraphValue::Number(x));
    }
    let args: SmallVec<[Arg<'_>; 4]> = args.iter().map(|v| v.arg()).collect();
    let call = Call { op: &node.op, args: &args, in_place: false, grad_enabled: false, loc: node.loc };
    Ok(match execute(&call)? {
        Output::Tensor(t) => GraphValue::Tensor(t),
        Output::List(l) => GraphValue::List(l),
    })
}

/// A value of a graph: what goes into a compiled graph, and what its ops give.
#[derive(Clone)]
pub enum GraphValue {
    /// A tensor.
    Tensor(Tensor),
    /// A number.
    Number(Scalar),
    /// A list of tensors; inside graphs only.
    List(TensorList),
}

impl GraphValue {
    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match self {
            GraphValue::Tensor(tensor) => Some(tensor),
            GraphValue::Number(_) | GraphValue::List(_) => None,
        }
    }

    /// The number, if it is one.
    pub fn number(&self) -> Option<Scalar> {
        match self {
            GraphValue::Number(number) => Some(*number),
            GraphValue::Tensor(_) | GraphValue::List(_) => None,
        }
    }

    pub(crate) fn arg(&self) -> Arg<'_> {
        match self {
            GraphValue::Tensor(t) => Arg::Tensor(t),
            GraphValue::Number(x) => Arg::Number(*x),
            GraphValue::List(l) => Arg::List(l),
        }
    }
}
