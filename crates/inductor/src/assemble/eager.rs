//! Kernels that no compiler wants: the ops behind them as a small graph, run one by one.

use std::sync::Arc;

use kiln_ir::{Def, Emit, Graph, Op, Result, ScalarKind, Ty, Value};
use kiln_plan::{BufferRef, OneByOne, Step, ViewRef};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Assembler;
use crate::fuse::Fusion;
use crate::lower::is_inlined;

/// The ops between what a kernel loads and its roots. The small graph's inputs are `tensors`, then `numbers`; its
/// outputs are the roots.
pub(crate) struct Cone {
    pub graph: Arc<Graph>,
    /// The inputs and stored values that are loaded.
    pub tensors: Vec<Value>,
    pub numbers: Vec<(Value, ScalarKind)>,
}

/// Whose ops they are.
#[derive(Copy, Clone)]
pub(crate) enum Of {
    /// A kernel's.
    Kernel,
    /// A table's, for this row: where its graph has lists, this one has their elements.
    Row(usize),
}

struct Builder<'f, 'g> {
    fusion: &'f Fusion<'g>,
    of: Of,
    roots: FxHashSet<Value>,
    sources: Vec<Value>,
    numbers: Vec<(Value, ScalarKind)>,
    /// By value of the large graph: the small one's, where it is known already.
    known: FxHashMap<Value, Option<Value>>,
}

impl Cone {
    /// The ops behind these roots.
    pub fn new(fusion: &Fusion<'_>, roots: &[Value], of: Of) -> Result<Cone> {
        let mut this = Builder {
            fusion,
            of,
            roots: roots.iter().copied().collect(),
            sources: Vec::new(),
            numbers: Vec::new(),
            known: FxHashMap::default(),
        };
        roots.iter().for_each(|&root| this.find(root));
        let mut graph = Graph::new();
        for (value, ty) in this.inputs() {
            let input = graph.input(ty);
            this.known.insert(value, Some(input));
        }
        for &root in roots {
            let output = this.emit(root, &mut graph)?;
            graph.outputs.push(output);
        }
        Ok(Cone { graph: Arc::new(graph), tensors: this.sources, numbers: this.numbers })
    }
}

impl Builder<'_, '_> {
    /// What stands for a value: of a packed list, the row's element.
    fn behind(&self, value: Value) -> Value {
        match (self.of, self.fusion.graph.producer(value)) {
            (Of::Row(row), Some(node)) if matches!(node.op, Op::List {}) => node.args[row],
            _ => value,
        }
    }

    /// Whether a value is loaded.
    fn is_source(&self, value: Value) -> bool {
        let fusion = self.fusion;
        match (self.of, fusion.graph.ty(value), fusion.graph.def(value)) {
            (_, Ty::Scalar(_), _) => false,
            (_, _, Def::Input(_)) | (Of::Row(_), Ty::Tensor(_), _) => true,
            (Of::Row(_), Ty::List(_), _) => false,
            (Of::Kernel, _, Def::Node { node, .. }) => {
                let inlined = is_inlined(fusion.graph, &fusion.graph.nodes[node as usize]);
                !inlined || fusion.stored.contains(&value) && !self.roots.contains(&value)
            }
        }
    }

    /// Finds what the ops behind a value load.
    fn find(&mut self, value: Value) {
        let value = self.behind(value);
        if self.known.contains_key(&value) {
            return;
        }
        self.known.insert(value, None);
        let graph = self.fusion.graph;
        if let Ty::Scalar(kind) = graph.ty(value) {
            self.numbers.push((value, *kind));
        } else if self.is_source(value) {
            self.sources.push(value);
        } else if let Some(node) = graph.producer(value) {
            node.args.iter().for_each(|&arg| self.find(arg));
        }
    }

    /// The small graph's inputs.
    fn inputs(&self) -> Vec<(Value, Ty)> {
        let numbers = self.numbers.iter().map(|&(value, kind)| (value, Ty::Scalar(kind)));
        let tensors = self.sources.iter().map(|&value| (value, self.fusion.graph.ty(value).clone()));
        tensors.chain(numbers).collect()
    }

    fn emit(&mut self, value: Value, into: &mut Graph) -> Result<Value> {
        let value = self.behind(value);
        if let Some(Some(known)) = self.known.get(&value) {
            return Ok(*known);
        }
        let Some(node) = self.fusion.graph.producer(value) else {
            // Inputs are all known: numbers and tensors were found before.
            return Err(kiln_ir::Error::bug(format!("%{} of a compiled program is lost", value.0)));
        };
        let mut args = Vec::with_capacity(node.args.len());
        for &arg in &node.args {
            args.push(self.emit(arg, into)?);
        }
        into.loc = node.loc;
        let made = into.emit(node.op.clone(), &args)?[0];
        self.known.insert(value, Some(made));
        Ok(made)
    }
}

impl Assembler<'_, '_> {
    /// A step that runs the ops behind these roots one by one. False if there is no such step.
    pub(super) fn eager(
        &mut self,
        roots: &[Value],
        of: Of,
        outs: Vec<(usize, ViewRef)>,
        ops: Vec<String>,
        (read, written): (usize, usize),
    ) -> bool {
        let Ok(cone) = Cone::new(self.fusion, roots, of) else { return false };
        let args = cone.tensors.iter().map(|&value| self.operand(value, of)).collect();
        let scalars = cone.numbers.iter().map(|&number| self.scalar(number)).collect();
        let ops_alone = OneByOne { graph: cone.graph, args, scalars, outs };
        self.step(Step::OneByOne(ops_alone), "eager", ops, read, written);
        true
    }

    /// What a kernel, or a table, loads.
    pub(super) fn operand(&mut self, value: Value, of: Of) -> ViewRef {
        let ty = self.tensor(value);
        let (at, strides) = match (of, self.fusion.graph.def(value)) {
            (_, Def::Input(number)) => {
                let at = BufferRef { buffer: self.home(value), offset: 0 };
                (at, self.fusion.layouts[number as usize].strides.clone())
            }
            (Of::Kernel, _) => {
                (BufferRef { buffer: self.home(value), offset: 0 }, ty.shape.contiguous_strides())
            }
            (Of::Row(_), _) => (self.packed(value), self.fusion.element(value).strides),
        };
        ViewRef { at, ty, strides }
    }
}
