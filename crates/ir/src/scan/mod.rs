//! Scans: a body that runs once for each element of a sequence and carries values from one step to the next.
//!
//! ```text
//! operands: carries before the first step, sequences, what is the same in every step
//! body:     carries, elements of the sequences, the same ──► carries, what each step gives
//! ```
//!
//! A row has one result. That of a scan is flat and of one dtype: the carries after the last step, what the steps
//! gave, stacked, and (if it `saves`) the carries before each step, stacked. A scan whose results have several dtypes is
//! several ops, each with the part of the body that it needs.

mod body;
mod gradient;

use rustc_hash::FxHashMap;

use crate::types::{Rule, checked, one};
use crate::{
    Attribute, DType, Device, Emit, EmitExt, Graph, Op, Result, ScalarKind, Shape, TensorTy, Ty, Value, Why,
};

pub use body::{Body, quoted_end};
pub(crate) use gradient::gradient;

/// In which order a scan takes its steps.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// From the first element to the last.
    #[default]
    Forward,
    /// From the last element to the first.
    Backward,
    /// Forward, as long as the first carry is true: once it is false, no step changes a thing.
    While,
}

impl Order {
    const ALL: [Order; 3] = [Order::Forward, Order::Backward, Order::While];

    const fn name(self) -> &'static str {
        match self {
            Order::Forward => "forward",
            Order::Backward => "backward",
            Order::While => "while",
        }
    }

    /// The order of the gradient's steps.
    fn turned(self) -> Order {
        match self {
            Order::Forward | Order::While => Order::Backward,
            Order::Backward => Order::Forward,
        }
    }

    /// The element that is taken in a turn, of so many.
    pub fn element(self, turn: usize, length: usize) -> usize {
        match self {
            Order::Forward | Order::While => turn,
            Order::Backward => length - 1 - turn,
        }
    }
}

impl Attribute for Order {
    fn print(&self) -> String {
        self.name().to_string()
    }
    fn parse(text: &str) -> Option<Order> {
        Order::ALL.into_iter().find(|order| order.name() == text)
    }
}

/// Something that a scan gives.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A carry after the last step.
    Last(usize),
    /// What all steps gave as this result.
    Stacked(usize),
    /// A carry before each step.
    Before(usize),
}

/// What a scan does, whatever the dtype of what is wanted of it.
#[derive(Clone, Debug)]
pub struct Steps<'a> {
    /// One step.
    pub body: &'a Graph,
    /// How many of the body's inputs are carries; its first results are what they become.
    pub carries: usize,
    /// How many inputs after those are elements of sequences.
    pub inputs: usize,
    /// How many steps.
    pub length: usize,
    /// In which order.
    pub order: Order,
}

/// A piece of a scan's flat result.
#[derive(Clone, PartialEq, Debug)]
pub struct Place {
    /// What lies there.
    pub outcome: Outcome,
    /// Its first element.
    pub start: usize,
    /// Its sizes.
    pub shape: Shape,
}

impl Place {
    /// The element behind its last one; what is too large for the address space ends at its end.
    pub fn end(&self) -> usize {
        self.start.saturating_add(self.shape.checked_numel().unwrap_or(usize::MAX))
    }
}

/// A scan as one op, and what of the whole scan it takes and gives.
pub struct Part {
    /// The op.
    pub op: Op,
    /// Which operands of the whole scan are its own.
    pub operands: Vec<usize>,
    /// Which of the outcomes that were wanted lie where in its result.
    pub places: Vec<(usize, Place)>,
}

impl<'a> Steps<'a> {
    /// What an op of the table does, if it is a scan.
    pub fn of(op: &'a Op) -> Option<Steps<'a>> {
        let Op::Scan { body, carries, inputs, length, order, .. } = op else { return None };
        let (&carries, &inputs, &length, &order) = (carries, inputs, length, order);
        Some(Steps { body, carries, inputs, length, order })
    }

    /// The type of one of the body's inputs, which is a tensor.
    pub fn input_ty(&self, input: usize) -> &'a TensorTy {
        self.body.tensor_of(self.body.inputs[input])
    }

    /// The type of what each step gives as a result.
    pub fn given_ty(&self, given: usize) -> &'a TensorTy {
        self.body.tensor_of(self.body.outputs[self.carries + given])
    }

    /// How many results each step gives besides the carries.
    pub fn given(&self) -> usize {
        self.body.outputs.len() - self.carries
    }

    /// The type of an element of what comes out.
    fn ty(&self, outcome: Outcome) -> &'a TensorTy {
        match outcome {
            Outcome::Last(carry) | Outcome::Before(carry) => self.input_ty(carry),
            Outcome::Stacked(given) => self.given_ty(given),
        }
    }

    /// The sizes of what comes out.
    fn shape(&self, outcome: Outcome) -> Shape {
        let shape = &self.ty(outcome).shape;
        match outcome {
            Outcome::Last(_) => shape.clone(),
            Outcome::Stacked(_) | Outcome::Before(_) => stacked(shape, self.length),
        }
    }

    /// Where everything of a dtype lies in the flat result.
    pub fn places(&self, dtype: DType, saves: bool) -> Vec<Place> {
        let last = (0..self.carries).map(Outcome::Last);
        let given = (0..self.given()).map(Outcome::Stacked);
        let before = (0..self.carries).filter(|_| saves).map(Outcome::Before);
        let mut start = 0;
        let place = |outcome| {
            let place = Place { outcome, start, shape: self.shape(outcome) };
            start = place.end();
            place
        };
        last.chain(given)
            .chain(before)
            .filter(|&outcome| self.ty(outcome).dtype == dtype)
            .map(place)
            .collect()
    }

    /// The ops that give what is wanted, one for each dtype.
    pub fn parts(&self, wanted: &[Outcome], saves: bool) -> Vec<Part> {
        let mut dtypes: Vec<DType> = Vec::new();
        for dtype in wanted.iter().map(|&outcome| self.ty(outcome).dtype) {
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        dtypes.into_iter().map(|dtype| self.part(dtype, wanted, saves)).collect()
    }

    /// The op that gives everything of a dtype that is wanted.
    fn part(&self, dtype: DType, wanted: &[Outcome], saves: bool) -> Part {
        let own = |outcome: &Outcome| self.ty(*outcome).dtype == dtype;
        let saves = saves || wanted.iter().filter(|o| own(o)).any(|o| matches!(o, Outcome::Before(_)));
        let mut given: Vec<usize> = Vec::new();
        let mut kept = vec![false; self.carries];
        for outcome in wanted.iter().filter(|outcome| own(outcome)) {
            match *outcome {
                Outcome::Last(carry) | Outcome::Before(carry) => kept[carry] = true,
                Outcome::Stacked(one) if given.contains(&one) => {}
                Outcome::Stacked(one) => given.push(one),
            }
        }
        // A carry that another one is computed from is carried, too.
        let reached = loop {
            let carries = (0..self.carries).filter(|&carry| kept[carry]);
            let results: Vec<usize> = carries.chain(given.iter().map(|one| self.carries + one)).collect();
            let reached = reached(self.body, results.iter().map(|&result| self.body.outputs[result]));
            let more = (0..self.carries).filter(|&carry| reached[carry] && !kept[carry]).collect::<Vec<_>>();
            if more.is_empty() {
                break reached;
            }
            more.into_iter().for_each(|carry| kept[carry] = true);
        };
        let operands: Vec<usize> = (0..self.body.inputs.len())
            .filter(|&input| if input < self.carries { kept[input] } else { reached[input] })
            .collect();
        let carries: Vec<usize> = (0..self.carries).filter(|&carry| kept[carry]).collect();
        let outputs = carries.iter().copied().chain(given.iter().map(|one| self.carries + one));
        let outputs: Vec<Value> = outputs.map(|result| self.body.outputs[result]).collect();
        let of_sequences = self.carries..self.carries + self.inputs;
        let body = Body::new(cone(self.body, &operands, &outputs));
        // Without what says when to stop it goes on, which changes nothing.
        let order = match self.order {
            Order::While if kept.first() != Some(&true) => Order::Forward,
            order => order,
        };
        let inputs = operands.iter().filter(|input| of_sequences.contains(input)).count();
        let length = self.length;
        let op = Op::Scan { body, carries: carries.len(), inputs, length, dtype, order, saves };
        let mut places = Vec::new();
        for place in Steps::of(&op).into_iter().flat_map(|scan| scan.places(dtype, saves)) {
            let outcome = match place.outcome {
                Outcome::Last(carry) => Outcome::Last(carries[carry]),
                Outcome::Stacked(one) => Outcome::Stacked(given[one]),
                Outcome::Before(carry) => Outcome::Before(carries[carry]),
            };
            let asked = wanted.iter().enumerate().filter(|(_, wanted)| **wanted == outcome);
            places.extend(asked.map(|(number, _)| (number, place.clone())));
        }
        Part { op, operands, places }
    }
}

/// Emits the ops that give what is wanted of a scan whose operands are these values. A number among them becomes one
/// tensor, however many of the ops take it.
pub fn emit_parts_of(cx: &mut dyn Emit, parts: &[Part], operands: &[Value]) -> Result<Vec<(usize, Value)>> {
    let mut numbers: FxHashMap<usize, Value> = FxHashMap::default();
    emit_parts(cx, parts, &mut |cx, operand| {
        let value = operands[operand];
        let Ty::Scalar(kind) = *cx.ty(value) else { return Ok(value) };
        if let Some(&known) = numbers.get(&operand) {
            return Ok(known);
        }
        let tensor = cx.full(value, Shape::scalar(), number_dtype(kind), Device::Cpu)?;
        numbers.insert(operand, tensor);
        Ok(tensor)
    })
}

/// Emits the ops that give what is wanted of a scan. `operand` is asked for each operand of theirs.
fn emit_parts(
    cx: &mut dyn Emit,
    parts: &[Part],
    operand: &mut dyn FnMut(&mut dyn Emit, usize) -> Result<Value>,
) -> Result<Vec<(usize, Value)>> {
    let mut found = Vec::new();
    for part in parts {
        let mut operands = Vec::with_capacity(part.operands.len());
        for &number in &part.operands {
            operands.push(operand(cx, number)?);
        }
        let flat = cx.emit_one(part.op.clone(), &operands)?;
        for (number, place) in &part.places {
            found.push((*number, piece(cx, flat, place)?));
        }
    }
    Ok(found)
}

/// A piece of a scan's flat result.
fn piece(cx: &mut dyn Emit, flat: Value, place: &Place) -> Result<Value> {
    let piece = cx.slice(flat, 0, place.start, place.end(), 1)?;
    cx.reshape(piece, place.shape.clone())
}

/// The sizes of as many tensors as there are steps.
fn stacked(shape: &Shape, length: usize) -> Shape {
    std::iter::once(length).chain(shape.iter().copied()).collect()
}

/// Which inputs of a graph values are computed from.
fn reached(graph: &Graph, values: impl Iterator<Item = Value>) -> Vec<bool> {
    let mut inputs = vec![false; graph.inputs.len()];
    let mut needed = needed(graph, values);
    needed.truncate(graph.value_count());
    for (input, value) in inputs.iter_mut().zip(&graph.inputs) {
        *input = needed[value.index()];
    }
    inputs
}

/// Which values of a graph others are computed from, those themselves included.
fn needed(graph: &Graph, values: impl Iterator<Item = Value>) -> Vec<bool> {
    let mut needed = vec![false; graph.value_count()];
    values.for_each(|value| needed[value.index()] = true);
    for node in graph.nodes.iter().rev() {
        if node.outs.iter().any(|out| needed[out.index()]) {
            node.args.iter().for_each(|arg| needed[arg.index()] = true);
        }
    }
    needed
}

/// The part of a graph that computes these values, with these of its inputs.
fn cone(graph: &Graph, inputs: &[usize], outputs: &[Value]) -> Graph {
    let needed = needed(graph, outputs.iter().copied());
    let mut result = Graph::new();
    let mut map = vec![Value(u32::MAX); graph.value_count()];
    for &input in inputs {
        let value = graph.inputs[input];
        map[value.index()] = result.input(graph.ty(value).clone());
    }
    copy(graph, &mut result, &mut map, &|out| needed[out.index()]);
    result.outputs = outputs.iter().map(|value| map[value.index()]).collect();
    result
}

/// Copies the nodes of a graph that have a result which is wanted.
fn copy(graph: &Graph, to: &mut Graph, map: &mut [Value], is_wanted: &dyn Fn(Value) -> bool) {
    for node in graph.nodes.iter().filter(|node| node.outs.iter().any(|&out| is_wanted(out))) {
        let args: Vec<Value> = node.args.iter().map(|arg| map[arg.index()]).collect();
        let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
        let outs = to.push(node.op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
}

/// The dtype of the 0-d tensor in which a scan is given a number.
fn number_dtype(kind: ScalarKind) -> DType {
    match kind {
        ScalarKind::Bool => DType::Bool,
        ScalarKind::Int => DType::I64,
        ScalarKind::Float => DType::F64,
    }
}

pub(crate) fn types(op: &Op, args: &[Ty]) -> Rule {
    let (Some(scan), &Op::Scan { dtype, saves, .. }) = (Steps::of(op), op) else {
        return Err(Why::Other("no scan".into()));
    };
    check_body(&scan)?;
    let body = scan.body;
    if args.len() != body.inputs.len() {
        return Err(Why::Arity { expected: body.inputs.len().to_string(), got: args.len() });
    }
    for (number, (arg, &input)) in args.iter().zip(&body.inputs).enumerate() {
        let got = arg.as_tensor().ok_or(Why::Operand { argument: "operands", expected: "tensors" })?;
        let expected = match body.ty(input) {
            Ty::Tensor(ty) if (scan.carries..scan.carries + scan.inputs).contains(&number) => {
                TensorTy { shape: stacked(&ty.shape, scan.length), ..ty.clone() }
            }
            Ty::Tensor(ty) => ty.clone(),
            Ty::Scalar(kind) => TensorTy::new(number_dtype(*kind), ()),
            Ty::List(_) => return Err(Why::Other("the body takes a list".into())),
        };
        if *got != expected {
            return Err(Why::ty("operand", Some(number), expected, got.clone()));
        }
    }
    let elements = scan.places(dtype, saves).last().map_or(0, Place::end);
    let device = crate::types::common_device(args)?;
    let ty = TensorTy { dtype, device, shape: Shape::from([elements]) };
    if elements == 0 { one(ty) } else { checked(ty) }
}

/// Whether a graph can be the body of a scan with so many carries and sequences.
fn check_body(scan: &Steps<'_>) -> Result<(), Why> {
    let body = scan.body;
    let (inputs, outputs) = (&body.inputs, &body.outputs);
    if inputs.len() < scan.carries + scan.inputs || outputs.len() < scan.carries {
        return Err(Why::Other("the body has too few inputs or results".into()));
    }
    let is_tensor = |value: &Value| body.ty(*value).as_tensor().is_some();
    if !inputs[..scan.carries + scan.inputs].iter().all(is_tensor) || !outputs.iter().all(is_tensor) {
        return Err(Why::Other("carries, elements and results of the body are tensors".into()));
    }
    for (&before, &after) in inputs.iter().zip(&outputs[..scan.carries]) {
        if body.ty(before) != body.ty(after) {
            let (before, after) = (body.tensor_of(before).clone(), body.tensor_of(after).clone());
            return Err(Why::ty("a carry", None, before, after));
        }
    }
    let stop = TensorTy::new(DType::Bool, ());
    if scan.order == Order::While && (scan.carries == 0 || *scan.input_ty(0) != stop || scan.given() > 0) {
        return Err(Why::Other(
            "a scan that stops carries a truth value first, and gives nothing else".into(),
        ));
    }
    Ok(())
}
