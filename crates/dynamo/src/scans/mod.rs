//! `scan`: a loop whose body is recorded once, whatever the number of steps. See docs/decisions/scan.md.

mod compile;
mod tracer;
mod tree;

use smallvec::smallvec;

use kiln_aot::{Functional, GraphInput, functionalise};
use kiln_ir::{
    Class, Def, Device, Emit, Error, Graph, Loc, Op, Order, Outcome, Result, Scalar, Steps, TensorTy, Ty,
    Value, Values, Why, emit_parts_of,
};
use kiln_tensor::hook::{Arg, Output, Scope};
use kiln_tensor::{DType, Tensor, compile_bodies_by, grad_enabled, run_op_at};

use tracer::{Traced, Tracer};
pub use tree::Tree;
use tree::leaves;

/// How to scan; [`scan`] does it with the defaults.
///
/// ```
/// use kiln_dynamo::Scan;
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// let one = Tensor::from_slice(&[1.0f64])?;
/// let (last, powers) = Scan::new().length(5).run(&one, &(), |x, ()| Ok((x.mul(2.0)?, x)))?;
/// assert_eq!(powers.to_vec::<f64>()?, [1.0, 2.0, 4.0, 8.0, 16.0]);
/// assert_eq!(last.to_vec::<f64>()?, [32.0]);
/// # Ok(()) }
/// ```
#[derive(Copy, Clone, Debug, Default)]
pub struct Scan {
    order: Order,
    length: Option<usize>,
}

/// Runs `body` for each element of `xs` along dim 0, from the first to the last. It is given what it returned in the
/// step before (at first `init`) and the element; it returns what it carries on, of the same types, and what the step
/// gives. The result is what is carried after the last step, and what the steps gave, stacked along a new dim 0.
///
/// The closure runs once, on tensors that have types but no values, and what it does is done for every element: the
/// number of steps is a size, not a structure. It may use any other tensor and number. Gradients flow to `init`, to
/// `xs`, and to the tensors that it uses.
///
/// ```
/// use kiln_dynamo::scan;
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// let xs = Tensor::from_slice(&[1.0f64, 2.0, 3.0])?;
/// let zero = Tensor::from_slice(&[0.0f64])?.select(0, 0)?;
/// let (sum, sums) = scan(&zero, &xs, |sum, x| {
///     let sum = sum.mul(0.5)?.add(&x)?;
///     Ok((sum.clone(), sum))
/// })?;
/// assert_eq!(sums.to_vec::<f64>()?, [1.0, 2.5, 4.25]);
/// assert_eq!(sum.item::<f64>()?, 4.25);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn scan<C: Tree, X: Tree, Y: Tree>(
    init: &C,
    xs: &X,
    body: impl FnOnce(C, X) -> Result<(C, Y)>,
) -> Result<(C, Y)> {
    Scan::new().run(init, xs, body)
}

/// Applies `next` to what is carried as long as `condition`, a truth value, holds of it, but at most `limit` times.
///
/// As in a [`scan`], both closures run once. `next` is differentiated for all `limit` steps, and may be computed on the
/// carries with which the loop stopped: it should be finite there.
///
/// ```
/// use kiln_dynamo::while_loop;
/// use kiln_tensor::{Result, Tensor};
/// # fn main() -> Result<()> {
/// let x = Tensor::from_slice(&[3.0f64])?;
/// let x = while_loop(&x, 100, |x| x.sum()?.lt(100.0), |x| x.mul(2.0))?;
/// assert_eq!(x.to_vec::<f64>()?, [192.0]);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn while_loop<C: Tree>(
    init: &C,
    limit: usize,
    condition: impl FnOnce(C) -> Result<Tensor>,
    next: impl FnOnce(C) -> Result<C>,
) -> Result<C> {
    let loc = Loc::caller();
    let mut carries = vec![Tensor::full((), true, (DType::Bool, Device::Cpu))?];
    init.flatten(&mut carries);
    let step = |before: Vec<Tensor>, _| {
        let own = || again(init, &before[1..]);
        let goes_on = condition(own()?)?;
        if goes_on.ty() != TensorTy::new(DType::Bool, ()) {
            let why = Why::ty("the condition", None, TensorTy::new(DType::Bool, ()), goes_on.ty());
            return Err(Error::op("while_loop", why, loc));
        }
        let goes_on = before[0].logical_and(&goes_on)?;
        let after = leaves(&next(own()?)?);
        check_carries(&before[1..], &after, "while_loop", loc)?;
        let kept = before[1..].iter().zip(&after).map(|(before, after)| goes_on.where_self(after, before));
        let carries: Result<Vec<Tensor>> = std::iter::once(Ok(goes_on.clone())).chain(kept).collect();
        Ok((carries?, Vec::new()))
    };
    let call = Loop { name: "while_loop", loc, length: limit, order: Order::While };
    let (last, _) = call.run(&carries, &[], step)?;
    again(init, &last[1..])
}

impl Scan {
    /// From the first element to the last.
    pub fn new() -> Scan {
        Scan::default()
    }

    /// From the last element to the first; what the steps give is in the order of the elements.
    #[must_use]
    pub fn reverse(self) -> Scan {
        Scan { order: Order::Backward, ..self }
    }

    /// The number of steps, where there are no elements to tell it.
    #[must_use]
    pub fn length(self, length: usize) -> Scan {
        Scan { length: Some(length), ..self }
    }

    /// See [`scan`].
    #[track_caller]
    pub fn run<C: Tree, X: Tree, Y: Tree>(
        self,
        init: &C,
        xs: &X,
        body: impl FnOnce(C, X) -> Result<(C, Y)>,
    ) -> Result<(C, Y)> {
        let loc = Loc::caller();
        let (carries, sequences) = (leaves(init), leaves(xs));
        let length = self.length_of(&sequences, loc)?;
        let call = Loop { name: "scan", loc, length, order: self.order };
        let mut given = None;
        let (last, stacked) = call.run(&carries, &sequences, |carries, elements| {
            let (next, gives) = body(again(init, &carries)?, again(xs, &elements)?)?;
            let (next, leaves) = (leaves(&next), leaves(&gives));
            given = Some(gives);
            Ok((next, leaves))
        })?;
        let Some(given) = given else { return Err(Error::bug("a scan without a body")) };
        Ok((again(init, &last)?, again(&given, &stacked)?))
    }

    fn length_of(self, sequences: &[Tensor], loc: Loc) -> Result<usize> {
        let mut length = self.length;
        for sequence in sequences {
            let shape = sequence.shape();
            let Some(&own) = shape.first() else {
                let why = Why::Rank { argument: "what is scanned", expected: "1 or more", got: 0 };
                return Err(Error::op("scan", why, loc));
            };
            if *length.get_or_insert(own) != own {
                let why = Why::sizes("numbers of steps", length.unwrap_or(own), own);
                return Err(Error::op("scan", why, loc));
            }
        }
        let why = "without sequences it needs a length: Scan::new().length(…)";
        length.ok_or_else(|| Error::op("scan", Why::Other(why.into()), loc))
    }
}

/// A structure with other tensors.
fn again<T: Tree>(tree: &T, tensors: &[Tensor]) -> Result<T> {
    let mut tensors = tensors.iter().cloned();
    tree.rebuild(&mut tensors).ok_or_else(|| Error::bug("a structure lacks tensors"))
}

fn check_carries(before: &[Tensor], after: &[Tensor], name: &str, loc: Loc) -> Result<()> {
    if before.len() != after.len() {
        let why = Why::Count { what: "tensors to carry on", expected: before.len(), got: after.len() };
        return Err(Error::op(name, why, loc));
    }
    for (number, (before, after)) in before.iter().zip(after).enumerate() {
        if before.ty() != after.ty() {
            let why = format!(
                "what is carried must stay of one type: tensor {number} is {} before a step and {} after it",
                before.ty(),
                after.ty()
            );
            return Err(Error::op(name, Why::Other(why), loc));
        }
    }
    Ok(())
}

/// A loop as the program called it.
struct Loop {
    name: &'static str,
    loc: Loc,
    length: usize,
    order: Order,
}

impl Loop {
    /// Records the body and runs the loop: what is carried in the end, and what the steps gave.
    fn run(
        &self,
        init: &[Tensor],
        xs: &[Tensor],
        body: impl FnOnce(Vec<Tensor>, Vec<Tensor>) -> Result<(Vec<Tensor>, Vec<Tensor>)>,
    ) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        compile_bodies_by(compile::compile);
        if let Some(device) = init.iter().chain(xs).map(Tensor::device).find(|device| *device != Device::Cpu)
        {
            return Err(Error::op(self.name, Why::Device { device }, self.loc));
        }
        let tracer = Tracer::new(grad_enabled());
        let carries: Vec<Tensor> = init.iter().map(|tensor| tracer.placeholder(&tensor.ty())).collect();
        let element = |tensor: &Tensor| {
            let ty = tensor.ty();
            TensorTy { shape: ty.shape[1..].into(), ..ty }
        };
        let elements: Vec<Tensor> = xs.iter().map(|tensor| tracer.placeholder(&element(tensor))).collect();
        let results = {
            let _recording = Scope::enter(tracer.clone());
            let (next, given) = body(carries.clone(), elements)?;
            check_carries(&carries, &next, self.name, self.loc)?;
            let results: Vec<Tensor> = next.into_iter().chain(given).collect();
            tracer.results(&results, self.loc)?
        };
        let traced = tracer.finish();
        let functional = functionalise(&traced.trace, &results)?;
        if !functional.graph.writes.is_empty() {
            return Err(Error::bug("a scan's body changes its inputs"));
        }
        let mut outside = Outside { items: Vec::new(), loc: self.loc };
        let recorded = Recorded::of(&functional, &traced, init, xs, &mut outside)?;
        let steps = Steps {
            body: &recorded.body,
            carries: init.len(),
            inputs: xs.len(),
            length: self.length,
            order: self.order,
        };
        let skipped = usize::from(self.order == Order::While);
        let last = (skipped..init.len()).map(Outcome::Last);
        let wanted: Vec<Outcome> = last.chain((0..steps.given()).map(Outcome::Stacked)).collect();
        let saves = grad_enabled() && recorded.operands.iter().any(|&operand| outside.requires_grad(operand));
        let found = emit_parts_of(&mut outside, &steps.parts(&wanted, saves), &recorded.operands)?;
        let mut results: Vec<Option<Tensor>> = vec![None; wanted.len()];
        for (number, value) in found {
            results[number] = outside.tensor(value).cloned();
        }
        let results: Option<Vec<Tensor>> = results.into_iter().collect();
        let mut last = results.ok_or_else(|| Error::bug("a result of a scan is missing"))?;
        // The first carry of a loop that stops is nobody's.
        last.splice(0..0, init[..skipped].iter().cloned());
        let stacked = last.split_off(init.len());
        Ok((last, stacked))
    }
}

/// A body and what the program gives it.
struct Recorded {
    body: Graph,
    /// By input of the body.
    operands: Vec<Value>,
}

impl Recorded {
    /// What depends on neither carries nor elements is done once, around the loop.
    fn of(
        functional: &Functional,
        traced: &Traced,
        init: &[Tensor],
        xs: &[Tensor],
        outside: &mut Outside,
    ) -> Result<Recorded> {
        let graph = &functional.graph;
        let is_step = invariants(graph, functional, init.len() + xs.len());
        let mut body = Graph::new();
        let mut operands = Vec::new();
        let mut around: Vec<Option<Value>> = vec![None; graph.value_count()];
        let mut within: Vec<Option<Value>> = vec![None; graph.value_count()];
        let placeholders = init.iter().chain(xs).zip(0..);
        for (tensor, variable) in placeholders {
            operands.push(outside.push(Item::Tensor(tensor.clone())));
            let input = body.input(traced.trace.variables[variable].ty.clone());
            let place = functional.inputs.iter().position(|i| *i == GraphInput::Variable(variable as u32));
            if let Some(place) = place {
                within[graph.inputs[place].index()] = Some(input);
            }
        }
        for (input, &value) in functional.inputs.iter().zip(&graph.inputs) {
            let item = match *input {
                GraphInput::Number(hole) => Item::Number(traced.numbers[hole as usize]),
                GraphInput::Variable(variable) => {
                    let found = traced.outside.iter().find(|(_, known)| *known == variable);
                    let Some((tensor, _)) = found else { continue };
                    Item::Tensor(tensor.clone())
                }
            };
            around[value.index()] = Some(outside.push(item));
        }
        for (node, _) in graph.nodes.iter().zip(&is_step).filter(|(_, is_step)| !**is_step) {
            let args: Option<Vec<Value>> = node.args.iter().map(|arg| around[arg.index()]).collect();
            let args = args.ok_or_else(|| Error::bug("what is done around a scan depends on its steps"))?;
            around[node.outs[0].index()] = Some(outside.emit(node.op.clone(), &args)?[0]);
        }
        let mut take = |value: Value, body: &mut Graph, within: &mut Vec<Option<Value>>| {
            if let Some(known) = within[value.index()] {
                return Ok(known);
            }
            let operand =
                around[value.index()].ok_or_else(|| Error::bug("a value of a scan's body is lost"))?;
            operands.push(operand);
            let input = body.input(graph.ty(value).clone());
            within[value.index()] = Some(input);
            Ok(input)
        };
        for (node, _) in graph.nodes.iter().zip(&is_step).filter(|(_, is_step)| **is_step) {
            let args: Vec<Value> =
                node.args.iter().map(|&arg| take(arg, &mut body, &mut within)).collect::<Result<_>>()?;
            let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
            let outs = body.push(node.op.clone(), &args, tys, false, node.loc);
            within[node.outs[0].index()] = Some(outs[0]);
        }
        for &output in &graph.outputs {
            // Each is a copy of what the body returned, which nobody changes any more.
            let returned = match graph.producer(output) {
                Some(node) if matches!(node.op, Op::Clone {}) => node.args[0],
                _ => output,
            };
            let output = take(returned, &mut body, &mut within)?;
            body.outputs.push(output);
        }
        Ok(Recorded { body, operands })
    }
}

/// By node, whether it is part of a step: it depends on what differs between steps, or is not worth a tensor of its own.
fn invariants(graph: &Graph, functional: &Functional, placeholders: usize) -> Vec<bool> {
    let is_placeholder = |value: Value| match graph.def(value) {
        Def::Input(input) => {
            matches!(functional.inputs[input as usize], GraphInput::Variable(v) if (v as usize) < placeholders)
        }
        Def::Node { .. } => false,
    };
    let mut differs: Vec<bool> = (0..graph.value_count() as u32).map(|v| is_placeholder(Value(v))).collect();
    let mut is_step = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let is_number = graph.ty(node.outs[0]).is_scalar();
        let of_numbers = node.args.iter().all(|&arg| graph.ty(arg).is_scalar());
        let own = is_number || of_numbers || node.args.iter().any(|arg| differs[arg.index()]);
        differs[node.outs[0].index()] = own;
        is_step.push(own);
    }
    // A view that steps look at is a part of them: what it is a view of may be much smaller. So are copies of results.
    let mut looked_at = vec![false; graph.value_count()];
    graph.outputs.iter().for_each(|output| looked_at[output.index()] = true);
    for (node, is_step) in graph.nodes.iter().zip(&mut is_step).rev() {
        let is_light = matches!(node.op.row().class, Class::View) || matches!(node.op, Op::Clone {});
        *is_step |= is_light && looked_at[node.outs[0].index()];
        if *is_step {
            node.args.iter().for_each(|arg| looked_at[arg.index()] = true);
        }
    }
    is_step
}

enum Item {
    Tensor(Tensor),
    Number(Scalar),
}

/// The program around a scan, as an emitter: ops are run, or recorded by whoever records there.
struct Outside {
    items: Vec<(Item, Ty)>,
    loc: Loc,
}

impl Outside {
    fn push(&mut self, item: Item) -> Value {
        let ty = match &item {
            Item::Tensor(tensor) => Ty::Tensor(tensor.ty()),
            Item::Number(number) => Ty::Scalar(number.kind()),
        };
        self.items.push((item, ty));
        Value(self.items.len() as u32 - 1)
    }

    fn tensor(&self, value: Value) -> Option<&Tensor> {
        match &self.items[value.index()].0 {
            Item::Tensor(tensor) => Some(tensor),
            Item::Number(_) => None,
        }
    }

    fn requires_grad(&self, value: Value) -> bool {
        self.tensor(value).is_some_and(Tensor::requires_grad)
    }
}

impl Emit for Outside {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        if let Op::Constant { value } = op {
            return Ok(smallvec![self.push(Item::Number(value))]);
        }
        let arg = |value: &Value| match &self.items[value.index()].0 {
            Item::Tensor(tensor) => Arg::Tensor(tensor),
            Item::Number(number) => Arg::Number(*number),
        };
        let operands: Vec<Arg<'_>> = args.iter().map(arg).collect();
        match run_op_at(&op, &operands, false, self.loc)? {
            Output::Tensor(tensor) => Ok(smallvec![self.push(Item::Tensor(tensor))]),
            Output::List(_) => Err(Error::bug("an op around a scan gives a list")),
        }
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.items[value.index()].1
    }
}
