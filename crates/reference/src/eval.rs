//! The naive reference evaluator: what a functional graph computes, by the rows' own definitions, plain
//! loops and double-precision accumulation. It shares no code with the eager kernels or the compiler.

use kiln_ir::{Class, DType, Def, Error, Eval, Graph, Loc, Op, Result, Scalar, Shape, Ty, Why, result_dtype};

use crate::array::round;
use crate::{Argument, Array, Data, Precision};

/// How ops that have a decomposition are evaluated.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Composites {
    /// By their own definition.
    #[default]
    Direct,
    /// By their decomposition, op by op: then a lowered graph must give the same bits.
    Decomposed,
}

/// Evaluates graphs.
///
/// ```
/// use kiln_ir::{DType, Graph};
/// use kiln_reference::{Array, evaluate};
/// # fn main() -> kiln_ir::Result<()> {
/// let graph: Graph = "graph(%0: f32[3]) { %1 = exp(%0) : f32[3] return %1 }".parse()?;
/// let outcome = evaluate(&graph, &[Array::floats(DType::F32, [3], |_| 0.0).into()])?;
/// assert_eq!(outcome.outputs, [Array::floats(DType::F32, [3], |_| 1.0).into()]);
/// # Ok(()) }
/// ```
#[derive(Copy, Clone, Debug, Default)]
pub struct Evaluator {
    /// Whether results are rounded to their dtype.
    pub precision: Precision,
    /// How composites are evaluated.
    pub composites: Composites,
}

/// What a run leaves.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The graph's results.
    pub outputs: Vec<Argument>,
    /// The inputs after the graph's write-backs.
    pub inputs: Vec<Argument>,
}

impl Outcome {
    /// The first difference from another outcome, in words. See [`difference`](crate::difference).
    pub fn difference(&self, other: &Outcome, tolerance: f64) -> Option<String> {
        let sides = [("output", &self.outputs, &other.outputs), ("input", &self.inputs, &other.inputs)];
        for (what, left, right) in sides {
            if left.len() != right.len() {
                return Some(format!("{} and {} {what}s", left.len(), right.len()));
            }
            for (i, (a, b)) in left.iter().zip(right).enumerate() {
                if let Some(difference) = crate::difference(a, b, tolerance) {
                    return Some(format!("{what} {i}: {difference}"));
                }
            }
        }
        None
    }
}

/// Evaluates a functional graph, rounding every result to its dtype.
pub fn evaluate(graph: &Graph, inputs: &[Argument]) -> Result<Outcome> {
    Evaluator::default().run(graph, inputs)
}

impl Evaluator {
    /// An evaluator that never rounds: "true" values.
    pub fn exact() -> Evaluator {
        Evaluator { precision: Precision::Exact, ..Evaluator::default() }
    }

    /// The same, with composites evaluated by their decompositions.
    pub fn decomposed(self) -> Evaluator {
        Evaluator { composites: Composites::Decomposed, ..self }
    }

    /// Evaluates a functional graph.
    pub fn run(&self, graph: &Graph, inputs: &[Argument]) -> Result<Outcome> {
        let values = self.values(graph, inputs)?;
        let mut after = inputs.to_vec();
        for write in &graph.writes {
            if let Def::Input(i) = graph.def(write.target) {
                after[i as usize] = match (write.element, &values[write.value.index()]) {
                    (None, value) => value.clone(),
                    (Some(element), Argument::List(items)) => items[element as usize].clone().into(),
                    (Some(_), _) => return Err(bad("evaluate", "write-back of an element")),
                };
            }
        }
        let outputs = graph.outputs.iter().map(|v| values[v.index()].clone()).collect();
        Ok(Outcome { outputs, inputs: after })
    }

    /// Every value of a functional graph, by value number.
    pub fn values(&self, graph: &Graph, inputs: &[Argument]) -> Result<Vec<Argument>> {
        let hole = Argument::Scalar(Scalar::Bool(false));
        let mut values = vec![hole; graph.value_count()];
        if inputs.len() != graph.inputs.len() {
            return Err(bad("evaluate", "number of inputs"));
        }
        for (&value, input) in graph.inputs.iter().zip(inputs) {
            if *graph.ty(value) != input.ty() {
                return Err(bad("evaluate", "type of an input"));
            }
            values[value.index()] = input.clone();
        }
        for node in &graph.nodes {
            if node.in_place {
                return Err(bad(node.op.name(), "in-place op"));
            }
            let args: Vec<&Argument> = node.args.iter().map(|v| &values[v.index()]).collect();
            let out = self.node(&node.op, &args, graph.ty(node.outs[0]), node.loc)?;
            values[node.outs[0].index()] = out;
        }
        Ok(values)
    }

    fn node(&self, op: &Op, args: &[&Argument], out: &Ty, loc: Loc) -> Result<Argument> {
        match (op, out) {
            (Op::List {}, _) => {
                Ok(Argument::List(args.iter().filter_map(|a| a.as_tensor()).cloned().collect()))
            }
            (Op::ListGet { index }, _) => match args[0] {
                Argument::List(items) => Ok(items[*index].clone().into()),
                _ => Err(bad("list_get", "operand")),
            },
            (Op::Scan { .. }, _) => self.scan(op, args),
            (_, Ty::List(items)) => {
                // A pointwise op over lists: element by element; numbers and single tensors serve all.
                let mut results = Vec::new();
                for (i, item) in items.iter().enumerate() {
                    let element: Vec<Argument> = args
                        .iter()
                        .map(|arg| match arg {
                            Argument::List(list) => list[i].clone().into(),
                            other => (*other).clone(),
                        })
                        .collect();
                    let element: Vec<&Argument> = element.iter().collect();
                    match self.element(op, &element, &Ty::Tensor(item.clone()), loc)? {
                        Argument::Tensor(array) => results.push(array),
                        _ => return Err(bad(op.name(), "element of a list")),
                    }
                }
                Ok(Argument::List(results))
            }
            _ => self.element(op, args, out, loc),
        }
    }

    fn element(&self, op: &Op, args: &[&Argument], out: &Ty, loc: Loc) -> Result<Argument> {
        if self.composites == Composites::Decomposed
            && op.row().decompose.is_some()
            && !op.is_prim(&args.iter().map(|a| a.ty()).collect::<Vec<Ty>>())
        {
            // Promotion looks at all operands at once, the steps of a decomposition at two at a time.
            let promote = op.row().class == Class::Pointwise;
            let tys: Vec<Ty> = args.iter().map(|a| a.ty()).collect();
            let compares = matches!(op.row().eval, Eval::Compare { .. });
            let args: Vec<Argument> = args
                .iter()
                .map(|arg| match (arg, out) {
                    (Argument::Tensor(a), Ty::Tensor(t)) if promote => {
                        let dtype = if compares { result_dtype(&tys) } else { t.dtype };
                        a.convert(dtype, self.precision).into()
                    }
                    _ => (*arg).clone(),
                })
                .collect();
            let mut graph = Graph::new();
            graph.loc = loc;
            let inputs: Vec<_> = args.iter().map(|a| graph.input(a.ty())).collect();
            graph.outputs = op.decompose(&mut graph, &inputs)?.unwrap_or_default().to_vec();
            let result = self.run(&graph, &args)?.outputs.swap_remove(0);
            // The steps of numbers alone know less about the result's kind than the op.
            return Ok(match (result, out) {
                (Argument::Scalar(x), Ty::Scalar(kind)) => Argument::Scalar(x.to_kind(*kind)),
                (result, _) => result,
            });
        }
        let arrays: Vec<Array> = args
            .iter()
            .map(|arg| match arg {
                Argument::Tensor(array) => Ok(array.clone()),
                Argument::Scalar(number) => Ok(Array::from(*number)),
                Argument::List(_) => Err(bad(op.name(), "list")),
            })
            .collect::<Result<_>>()?;
        let tys: Vec<Ty> = args.iter().map(|a| a.ty()).collect();
        let (dtype, shape) = match out {
            Ty::Tensor(t) => (t.dtype, t.shape.clone()),
            Ty::Scalar(kind) => (kind.dtype(), Shape::scalar()),
            Ty::List(_) => return Err(bad(op.name(), "list")),
        };
        let result = match op.row().eval {
            Eval::Pointwise { float, int } => {
                let operands = self.operands(op, args, &arrays, dtype, &shape);
                match int {
                    Some(int) if !dtype.is_float() => {
                        map_int(dtype, &shape, &operands, |a| dtype.wrap(int(a)))
                    }
                    _ => map_float(dtype, &shape, &operands, |a| round(float(a), dtype, self.precision)),
                }
            }
            Eval::Attributes(float) => {
                let operands = self.operands(op, args, &arrays, dtype, &shape);
                map_float(dtype, &shape, &operands, |a| round(float(op, a), dtype, self.precision))
            }
            Eval::Compare { float, int } => {
                let common = result_dtype(&tys);
                let operands = self.operands(op, args, &arrays, common, &shape);
                if common.is_float() {
                    compare_float(&shape, &operands, float)
                } else {
                    map_int(DType::Bool, &shape, &operands, |a| i64::from(int(a)))
                }
            }
            Eval::Convert => match (op, out) {
                // A number converted keeps its kind, but is rounded, whatever the precision.
                (Op::To { dtype }, Ty::Scalar(_)) => arrays[0].convert(*dtype, Precision::Rounded),
                _ => arrays[0].convert(dtype, self.precision),
            },
            Eval::Reduce | Eval::Structural => {
                crate::structural::evaluate(op, &arrays, &shape, dtype, self.precision)
                    .map_err(|why| op.error(&tys, why, loc))?
            }
        };
        Ok(match (out, &result.data) {
            (Ty::Scalar(_), Data::Float(x)) => Argument::Scalar(Scalar::Float(x[0])),
            (Ty::Scalar(_), Data::Int(x)) if dtype == DType::Bool => {
                Argument::Scalar(Scalar::Bool(x[0] != 0))
            }
            (Ty::Scalar(_), Data::Int(x)) => Argument::Scalar(Scalar::Int(x[0])),
            (Ty::Tensor(t), _) => Array { device: t.device, ..result }.into(),
            (Ty::List(_), _) => return Err(bad(op.name(), "list")),
        })
    }

    /// The operands in the dtype in which the op computes, each repeated to the result's shape. Floats that
    /// are numbers take part in full computing precision.
    fn operands(
        &self,
        op: &Op,
        args: &[&Argument],
        arrays: &[Array],
        dtype: DType,
        shape: &Shape,
    ) -> Vec<Array> {
        arrays
            .iter()
            .enumerate()
            .map(|(i, array)| {
                let is_condition = matches!(op, Op::Where {}) && i == 0;
                let is_number = dtype.is_float() && matches!(args[i], Argument::Scalar(_));
                let dtype = if is_number { dtype.computing() } else { dtype };
                let array = if is_condition { array.clone() } else { array.convert(dtype, self.precision) };
                crate::structural::expand(&array, shape)
            })
            .collect()
    }
}

fn map_float(dtype: DType, shape: &Shape, operands: &[Array], f: impl Fn(&[f64]) -> f64) -> Array {
    let mut args = vec![0.0; operands.len()];
    Array::floats(dtype, shape, |i| {
        args.iter_mut().zip(operands).for_each(|(slot, operand)| *slot = operand.float(i));
        f(&args)
    })
}

fn compare_float(shape: &Shape, operands: &[Array], f: fn(&[f64]) -> bool) -> Array {
    let hits = map_float(DType::F64, shape, operands, |a| f64::from(u8::from(f(a))));
    hits.convert(DType::Bool, Precision::Exact)
}

fn map_int(dtype: DType, shape: &Shape, operands: &[Array], f: impl Fn(&[i64]) -> i64) -> Array {
    let mut args = vec![0; operands.len()];
    Array::ints(dtype, shape, |i| {
        args.iter_mut().zip(operands).for_each(|(slot, operand)| *slot = operand.int(i));
        f(&args)
    })
}

/// An evaluation that its caller should not have asked for.
fn bad(op: &str, what: &'static str) -> Error {
    Error::op(op, Why::Other(format!("the evaluator can't take this {what}")), Loc::UNKNOWN)
}
