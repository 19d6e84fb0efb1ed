//! Graphs: typed values, a list of op nodes in order, results and write-backs.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::{Emit, Loc, Op, Result, TensorTy, Ty, Value, Values};

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

/// The type of the list that was made last. Lists of one program are mostly alike, and equal types that are
/// one in memory are compared and mapped at once, however long they are.
#[derive(Clone, Debug, Default)]
struct Recent(Option<Arc<[TensorTy]>>);

impl Recent {
    fn shared(&mut self, items: Arc<[TensorTy]>) -> Arc<[TensorTy]> {
        match &self.0 {
            Some(recent) if *recent == items => recent.clone(),
            _ => self.0.insert(items).clone(),
        }
    }
}

// What was made last is no part of what a graph says.
impl PartialEq for Recent {
    fn eq(&self, _: &Recent) -> bool {
        true
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
    types: Vec<Ty>,
    defs: Vec<Def>,
    recent: Recent,
    /// The line given to nodes that are emitted from now on.
    pub loc: Loc,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// An empty graph with room for what this one holds: passes that build a graph anew ask for memory once.
    pub fn with_room_of(other: &Graph) -> Graph {
        Graph {
            inputs: Vec::with_capacity(other.inputs.len()),
            nodes: Vec::with_capacity(other.nodes.len()),
            types: Vec::with_capacity(other.types.len()),
            defs: Vec::with_capacity(other.defs.len()),
            ..Graph::default()
        }
    }

    /// Adds an input.
    pub fn input(&mut self, ty: Ty) -> Value {
        let value = self.value(ty, Def::Input(self.inputs.len() as u32));
        self.inputs.push(value);
        value
    }

    fn value(&mut self, ty: Ty, def: Def) -> Value {
        self.types.push(match ty {
            Ty::List(items) => Ty::List(self.recent.shared(items)),
            other => other,
        });
        self.defs.push(def);
        Value(self.types.len() as u32 - 1)
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
        &self.types[value.index()]
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
        self.types.len()
    }

    /// The same graph with its values numbered in the order of their text: inputs first, then results.
    pub fn canonical(&self) -> Graph {
        let mut graph = Graph::with_room_of(self);
        let mut map = vec![Value(u32::MAX); self.value_count()];
        for &input in &self.inputs {
            map[input.index()] = graph.input(self.ty(input).clone());
        }
        for node in &self.nodes {
            let args: SmallVec<[Value; 4]> = node.args.iter().map(|v| map[v.index()]).collect();
            let tys = node.outs.iter().map(|&v| self.ty(v).clone());
            let outs = graph.push(node.op.clone(), &args, tys, node.in_place, node.loc);
            for (old, new) in node.outs.iter().zip(outs) {
                map[old.index()] = new;
            }
        }
        graph.outputs = self.outputs.iter().map(|v| map[v.index()]).collect();
        graph.writes = self.writes.iter().map(|w| w.renumbered(&map)).collect();
        graph
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
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&v| self.ty(v).clone()).collect();
        let outs = op.infer(&tys).map_err(|why| op.error(&tys, why, self.loc))?;
        let loc = self.loc;
        Ok(self.push(op, args, outs, false, loc))
    }

    fn ty(&self, value: Value) -> &Ty {
        Graph::ty(self, value)
    }
}
