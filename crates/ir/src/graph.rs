//! Graphs: typed values, a list of op nodes in order, results and write-backs.

use smallvec::{SmallVec, smallvec};

use crate::{Emit, ListTy, ListTyBuilder, Loc, Op, Result, TensorTy, Ty, Tys, Value, Values};

/// Where a value comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Def {
    /// The graph's input with this number.
    Input(u32),
    /// Result `result` of node `node`.
    Node {
        /// Index into [`Graph::nodes`].
        node: u32,
        /// Which of its results.
        result: u32,
    },
}

/// One op of a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// The op with its attributes.
    pub op: Op,
    /// Its operands.
    pub args: SmallVec<[Value; 4]>,
    /// Its results.
    pub outs: Values,
    /// Whether the first operand is changed in place (only in captured graphs; the result is that operand).
    pub in_place: bool,
    /// The user's line.
    pub loc: Loc,
}

/// A write-back: when the graph has run, the input `target` holds `value`, or an element of it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Write {
    /// An input of the graph.
    pub target: Value,
    /// What it holds afterwards.
    pub value: Value,
    /// Which element, where `value` is a list: an optimizer that changes a thousand parameters needs no
    /// thousand nodes to take its results apart.
    pub element: Option<u32>,
}

impl Write {
    /// A write-back of a whole value.
    pub fn whole(target: Value, value: Value) -> Write {
        Write { target, value, element: None }
    }

    /// The same write-back in a graph whose values have other numbers; `map` is indexed by the old ones.
    pub fn renumbered(self, map: &[Value]) -> Write {
        Write { target: map[self.target.index()], value: map[self.value.index()], ..self }
    }
}

/// The types of values. Neighbours are mostly of one type, as parameters are: it is kept once for all of them.
#[derive(Clone, Debug, Default)]
struct Types {
    kinds: Vec<Ty>,
    /// Per value: which of them.
    numbers: Vec<u32>,
}

impl Types {
    fn push(&mut self, ty: Ty) {
        let last = self.numbers.last().copied();
        let number = match last.filter(|&number| self.kinds[number as usize] == ty) {
            Some(number) => number,
            None => {
                self.kinds.push(ty);
                self.kinds.len() as u32 - 1
            }
        };
        self.numbers.push(number);
    }

    fn of(&self, value: Value) -> &Ty {
        &self.kinds[self.numbers[value.index()] as usize]
    }
}

// How types are kept is no part of what a graph says.
impl PartialEq for Types {
    fn eq(&self, other: &Types) -> bool {
        let values = || (0..self.numbers.len() as u32).map(Value);
        self.numbers.len() == other.numbers.len() && values().all(|value| self.of(value) == other.of(value))
    }
}

/// A program: inputs, nodes in an order in which they can run, results, write-backs.
///
/// ```
/// use kiln_ir::{DType, EmitExt, Graph, Ty};
/// # fn main() -> kiln_ir::Result<()> {
/// let mut g = Graph::new();
/// let x = g.input(Ty::tensor(DType::F32, [4, 3]));
/// let y = g.exp(x)?;
/// g.outputs.push(y);
/// assert_eq!(g.to_string(), "\
/// graph(%0: f32[4, 3]) {
///   %1 = exp(%0) : f32[4, 3]
///   return %1
/// }
/// ");
/// assert_eq!(g.to_string().parse::<Graph>()?, g);
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Graph {
    /// The inputs' values, in order.
    pub inputs: Vec<Value>,
    /// The nodes, in order.
    pub nodes: Vec<Node>,
    /// The results.
    pub outputs: Vec<Value>,
    /// Inputs that hold something else afterwards.
    pub writes: Vec<Write>,
    types: Types,
    defs: Vec<Def>,
    /// The line given to nodes that are emitted from now on.
    pub loc: Loc,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// A graph with the inputs of another and nothing else yet, but room for as much; and, by the other's
    /// values, which values they are here (of no use for what is no input).
    pub fn with_inputs_of(other: &Graph) -> (Graph, Vec<Value>) {
        let (count, values) = (other.inputs.len() as u32, other.value_count());
        let mut types = Types { kinds: other.types.kinds.clone(), numbers: Vec::with_capacity(values) };
        types.numbers.extend(other.inputs.iter().map(|input| other.types.numbers[input.index()]));
        let mut defs = Vec::with_capacity(values);
        defs.extend((0..count).map(Def::Input));
        let mut map = vec![Value(u32::MAX); values];
        for (number, input) in (0..count).zip(&other.inputs) {
            map[input.index()] = Value(number);
        }
        let graph = Graph {
            inputs: (0..count).map(Value).collect(),
            nodes: Vec::with_capacity(other.nodes.len()),
            types,
            defs,
            ..Graph::default()
        };
        (graph, map)
    }

    /// Adds an input.
    pub fn input(&mut self, ty: Ty) -> Value {
        let value = self.value(ty, Def::Input(self.inputs.len() as u32));
        self.inputs.push(value);
        value
    }

    fn value(&mut self, ty: Ty, def: Def) -> Value {
        self.types.push(ty);
        self.defs.push(def);
        Value(self.defs.len() as u32 - 1)
    }

    /// Adds a node whose result types are already known. `in_place` nodes still get a result value: the
    /// changed first operand.
    pub fn push(
        &mut self,
        op: Op,
        args: &[Value],
        outs: impl IntoIterator<Item = Ty>,
        in_place: bool,
        loc: Loc,
    ) -> Values {
        let node = self.nodes.len() as u32;
        let outs: Values = outs
            .into_iter()
            .enumerate()
            .map(|(i, ty)| self.value(ty, Def::Node { node, result: i as u32 }))
            .collect();
        self.nodes.push(Node { op, args: args.into(), outs: outs.clone(), in_place, loc });
        outs
    }

    /// Makes write-backs of elements of lists write-backs of tensors, each taken out by a node of its own.
    pub fn take_out_written(&mut self) {
        for i in 0..self.writes.len() {
            let write = self.writes[i];
            if let Some(index) = write.element {
                let op = Op::ListGet { index: index as usize };
                let ty = self.ty(write.target).clone();
                let element = self.push(op, &[write.value], [ty], false, Loc::UNKNOWN)[0];
                self.writes[i] = Write::whole(write.target, element);
            }
        }
    }

    /// The type of a value.
    pub fn ty(&self, value: Value) -> &Ty {
        self.types.of(value)
    }

    /// The type of a value that is a tensor. That another is asked for is a bug.
    #[track_caller]
    pub fn tensor_of(&self, value: Value) -> &TensorTy {
        match self.ty(value) {
            Ty::Tensor(ty) => ty,
            other => unreachable!("%{} is {other} and not a tensor: a bug of Kiln's", value.0),
        }
    }

    /// The types of a list's elements. That another value is asked for is a bug.
    #[track_caller]
    pub fn list_of(&self, value: Value) -> &ListTy {
        match self.ty(value) {
            Ty::List(items) => items,
            other => unreachable!("%{} is {other} and not a list: a bug of Kiln's", value.0),
        }
    }

    /// Where a value comes from.
    pub fn def(&self, value: Value) -> Def {
        self.defs[value.index()]
    }

    /// The node that makes a value, if it isn't an input.
    pub fn producer(&self, value: Value) -> Option<&Node> {
        match self.def(value) {
            Def::Input(_) => None,
            Def::Node { node, .. } => Some(&self.nodes[node as usize]),
        }
    }

    /// Number of values (inputs and results of nodes).
    pub fn value_count(&self) -> usize {
        self.defs.len()
    }

    /// The same graph with its values numbered in the order of their text: inputs first, then results.
    pub fn into_canonical(mut self) -> Graph {
        let results = self.nodes.iter().flat_map(|node| node.outs.iter());
        let order: Vec<Value> = self.inputs.iter().chain(results).copied().collect();
        let mut map = vec![Value(u32::MAX); self.value_count()];
        for (number, old) in (0..).zip(&order) {
            map[old.index()] = Value(number);
        }
        self.types.numbers = order.iter().map(|old| self.types.numbers[old.index()]).collect();
        self.defs = order.iter().map(|old| self.defs[old.index()]).collect();
        let rename = |value: &mut Value| *value = map[value.index()];
        for node in &mut self.nodes {
            node.args.iter_mut().chain(&mut node.outs).for_each(rename);
        }
        self.inputs.iter_mut().chain(&mut self.outputs).for_each(rename);
        self.writes.iter_mut().for_each(|write| *write = write.renumbered(&map));
        self.loc = Loc::UNKNOWN;
        self
    }

    /// The types of an op's results on these operands.
    pub fn infer(&self, op: &Op, args: &[Value]) -> Result<Tys> {
        // A long list is told by its elements' types, without a copy of each.
        if let Op::List {} = op
            && let Some(ty) = self.list_ty(args)
        {
            return Ok(smallvec![Ty::List(ty)]);
        }
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&v| self.ty(v).clone()).collect();
        op.infer(&tys).map_err(|why| op.error(&tys, why, self.loc))
    }

    fn list_ty(&self, items: &[Value]) -> Option<ListTy> {
        let (mut list, mut before) = (ListTyBuilder::default(), None);
        for item in items {
            let number = self.types.numbers[item.index()];
            if before == Some(number) {
                list.again()
            } else {
                list.push(self.types.kinds[number as usize].as_tensor()?, 1)
            }
            before = Some(number);
        }
        Some(list.finish())
    }

    /// How often each value is used, by nodes, results and write-backs.
    pub fn use_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.value_count()];
        let args = self.nodes.iter().flat_map(|n| n.args.iter());
        for value in args.chain(&self.outputs).chain(self.writes.iter().map(|w| &w.value)) {
            counts[value.index()] += 1;
        }
        counts
    }
}

impl Emit for Graph {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let outs = self.infer(&op, args)?;
        let loc = self.loc;
        Ok(self.push(op, args, outs, false, loc))
    }

    fn ty(&self, value: Value) -> &Ty {
        Graph::ty(self, value)
    }
}
