//! Pointer-table kernels: ops over lists as one kernel that runs over a table of pointers, one row per tensor.

use std::ops::Range;

use kiln_ir::{DType, Def, Graph, ListTy, Op, ScalarKind, Ty, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::fuse::Fusion;
use crate::lower::{Builder, operand_dtype};
use kiln_plan::index::{ExprId, Index};
use kiln_plan::loops::{Axis, ExprKind, Kernel, Mode, Store};

/// List values over equal shapes that are computed together.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub roots: Vec<Value>,
    /// The rows, whose shapes all roots have.
    rows: ListTy,
}

/// The kernel for the rows of one combination of dtypes.
pub(crate) struct TableKernel {
    /// Buffers are the columns: packed lists first, then the roots.
    pub kernel: Kernel,
    /// The packed lists (`list` nodes' results) behind the first columns.
    pub packs: Vec<Value>,
    pub scalars: Vec<(Value, ScalarKind)>,
    /// Which rows it runs over.
    pub rows: Vec<usize>,
    pub nodes: Vec<u32>,
}

fn items(graph: &Graph, list: Value) -> ListTy {
    graph.list_of(list).clone()
}

fn dtype(graph: &Graph, list: Value, row: usize) -> DType {
    graph.ty(list).as_list().and_then(|items| items.get(row)).map_or(DType::F32, |ty| ty.dtype)
}

impl Table {
    /// One table per list value whose elements somebody needs.
    pub fn find(graph: &Graph, live: &[bool]) -> Vec<Table> {
        let mut seen = FxHashSet::default();
        let mut out = Vec::new();
        let taken = graph.nodes.iter().zip(live).filter_map(|(node, live)| match node.op {
            Op::ListGet { .. } if *live => Some(node.args[0]),
            _ => None,
        });
        let written = graph.writes.iter().filter_map(|w| w.element.map(|_| w.value));
        for root in taken.chain(written) {
            if seen.insert(root) && !matches!(graph.producer(root).map(|n| &n.op), Some(Op::List {})) {
                out.push(Table { roots: vec![root], rows: items(graph, root) });
            }
        }
        out
    }

    /// How many elements a row has.
    pub fn count(&self, row: usize) -> usize {
        self.rows[row].shape.numel()
    }

    /// Whether two tables have rows of equal shapes.
    pub fn fits(&self, other: &Table) -> bool {
        let alike = |run: Range<usize>| self.rows[run.start].shape == other.rows[run.start].shape;
        self.rows.len() == other.rows.len()
            && ListTy::common_runs(&[&self.rows, &other.rows]).into_iter().all(alike)
    }

    /// The `list_get` nodes' results that it makes.
    pub fn results(&self, graph: &Graph) -> Vec<Value> {
        let roots: FxHashSet<Value> = self.roots.iter().copied().collect();
        graph
            .nodes
            .iter()
            .filter(|n| matches!(n.op, Op::ListGet { .. }) && roots.contains(&n.args[0]))
            .map(|n| n.outs[0])
            .collect()
    }

    /// The packed lists that its roots are computed from.
    pub fn packs(&self, graph: &Graph) -> Vec<Value> {
        let (mut out, mut seen) = (Vec::new(), FxHashSet::default());
        let mut todo = self.roots.clone();
        while let Some(v) = todo.pop() {
            if !seen.insert(v) || graph.ty(v).is_scalar() {
                continue;
            }
            let Some(node) = graph.producer(v) else { continue };
            match node.op {
                Op::List {} => out.push(v),
                _ => todo.extend(node.args.iter().copied()),
            }
        }
        out.sort_unstable();
        out
    }

    /// The stored values and inputs that it reads, with the row in which it does.
    pub fn for_each_read(&self, fusion: &Fusion<'_>, mut read: impl FnMut(usize, Value)) {
        let graph = fusion.graph;
        for pack in self.packs(graph).iter().filter_map(|&p| graph.producer(p)) {
            for (row, &element) in pack.args.iter().enumerate() {
                read(row, fusion.element_base(element));
            }
        }
    }

    /// The kernels, one per combination of dtypes.
    pub fn lower(&self, graph: &Graph) -> Vec<TableKernel> {
        let lists = self.lists(graph);
        let mut classes: Vec<(Vec<DType>, Vec<usize>)> = Vec::new();
        let mut known: FxHashMap<Vec<DType>, usize> = FxHashMap::default();
        let types: Vec<ListTy> = lists.iter().map(|&l| items(graph, l)).collect();
        for run in ListTy::common_runs(&types.iter().collect::<Vec<_>>()) {
            if self.rows[run.start].shape.numel() == 0 {
                continue;
            }
            let key: Vec<DType> = types.iter().map(|ty| ty[run.start].dtype).collect();
            let at = *known.entry(key.clone()).or_insert_with(|| {
                classes.push((key, Vec::new()));
                classes.len() - 1
            });
            classes[at].1.extend(run);
        }
        classes.into_iter().map(|(_, rows)| self.lower_rows(graph, rows)).collect()
    }

    fn lists(&self, graph: &Graph) -> Vec<Value> {
        let (mut out, mut seen) = (Vec::new(), FxHashSet::default());
        let mut todo = self.roots.clone();
        while let Some(v) = todo.pop() {
            if seen.insert(v) && matches!(graph.ty(v), Ty::List(_)) {
                out.push(v);
                if let Some(node) = graph.producer(v)
                    && !matches!(node.op, Op::List {})
                {
                    todo.extend(node.args.iter().copied());
                }
            }
        }
        out.sort_unstable();
        out
    }

    fn lower_rows(&self, graph: &Graph, rows: Vec<usize>) -> TableKernel {
        let row = rows[0];
        let packs = self.packs(graph);
        let mut builder = Builder::default();
        let mut exprs: FxHashMap<Value, ExprId> = FxHashMap::default();
        let mut nodes = Vec::new();
        for list in self.lists(graph) {
            let Def::Node { node: number, .. } = graph.def(list) else { continue };
            let node = &graph.nodes[number as usize];
            let element = dtype(graph, list, row);
            builder.loc = node.loc;
            if let Op::List {} = node.op {
                let buffer = packs.iter().position(|&p| p == list).unwrap_or(0);
                let load = ExprKind::Load { buffer, index: Index::axis(0) };
                exprs.insert(list, builder.push(element.computing(), load));
                continue;
            }
            nodes.push(number);
            let operands = operand_dtype(&node.op, node.args.iter().map(|&v| graph.ty(v)), row);
            let made = builder.pointwise::<std::convert::Infallible>(
                &node.op,
                &node.args,
                operands,
                element,
                &mut |b, v, wanted| Ok(exprs.get(&v).copied().unwrap_or_else(|| b.scalar(v, wanted))),
            );
            if let Ok(Some(expr)) = made {
                exprs.insert(list, expr);
            }
        }
        let mut kernel = Kernel::empty(Mode::Table);
        kernel.axes = vec![Axis { extent: 0, inner: false }];
        kernel.buffers = packs.iter().chain(&self.roots).map(|&l| dtype(graph, l, row)).collect();
        kernel.scalars = builder.scalars.iter().map(|(_, kind)| *kind).collect();
        kernel.exprs = builder.exprs;
        for (r, root) in self.roots.iter().enumerate() {
            kernel.stores.push(Store {
                buffer: packs.len() + r,
                index: Index::axis(0),
                value: exprs[root],
                adds: false,
            });
        }
        TableKernel { kernel, packs, scalars: builder.scalars, rows, nodes }
    }
}
