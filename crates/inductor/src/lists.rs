//! Lists made ready for tables: packing and unpacking that undo each other vanish, and rows whose tensors lie
//! differently in memory become ops on single tensors.
//!
//! ```text
//! %4 = list(%0, %1)                              %4 = exp(%0)      ; %0 lies transposed, %1 does not,
//! %5 = foreach_exp(%4)                     →     %5 = list(%1)     ; and the results are dense
//! %6 = list_get(%5) {index: 0}                   %6 = foreach_exp(%5)
//! %7 = list_get(%5) {index: 1}                   %7 = list_get(%6) {index: 0}
//! ```

use std::borrow::Cow;
use std::sync::Arc;

use kiln_ir::{Class, Def, Graph, Op, Shape, Strides, TensorTy, Ty, Value, Write};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::WhyNot;
use crate::views::{is_dense, view_of};

/// Write-backs of elements of lists become write-backs of tensors: here an element is a `list_get`.
pub(crate) fn elements_written(graph: &Graph) -> Cow<'_, Graph> {
    if graph.writes.iter().all(|w| w.element.is_none()) {
        return Cow::Borrowed(graph);
    }
    let mut graph = graph.clone();
    graph.take_out_written();
    Cow::Owned(graph)
}

/// Rewrites a graph so that every row of every list can be a row of a table.
pub(crate) fn take_apart<'g>(graph: &'g Graph, layouts: &[Strides]) -> (Cow<'g, Graph>, Vec<WhyNot>) {
    if !graph.nodes.iter().any(|n| matches!(n.op, Op::ListGet { .. } | Op::List {})) {
        return (Cow::Borrowed(graph), Vec::new());
    }
    let odd = odd_rows(graph, layouts);
    if odd.is_empty() && is_ready(graph) {
        return (Cow::Borrowed(graph), Vec::new());
    }
    let mut this = Rewrite {
        from: graph,
        to: Graph::with_room_of(graph),
        values: vec![None; graph.value_count()],
        lists: FxHashMap::default(),
        gets: FxHashMap::default(),
        odd: &odd,
    };
    for &input in &graph.inputs {
        let value = this.to.input(graph.ty(input).clone());
        this.values[input.index()] = Some(value);
    }
    for node in &graph.nodes {
        this.node(node);
    }
    let value = |v: Value| this.values[v.index()].unwrap_or(v);
    this.to.outputs = graph.outputs.iter().map(|&v| value(v)).collect();
    this.to.writes =
        graph.writes.iter().map(|w| Write { target: value(w.target), value: value(w.value), ..*w }).collect();
    let mut rows: Vec<usize> = odd.values().flatten().copied().collect();
    rows.sort_unstable();
    rows.dedup();
    (Cow::Owned(this.to), rows.into_iter().map(|row| WhyNot::Layouts { row }).collect())
}

/// Whether no packing undoes an unpacking, or the other way round, and no element is taken out twice.
fn is_ready(graph: &Graph) -> bool {
    let mut seen = FxHashSet::default();
    graph.nodes.iter().all(|node| {
        let first = node.args.first().and_then(|&arg| graph.producer(arg)).map(|producer| &producer.op);
        match &node.op {
            Op::List {} => !matches!(first, Some(Op::ListGet { .. })),
            Op::ListGet { index } => {
                !matches!(first, Some(Op::List {})) && seen.insert((node.args[0], *index))
            }
            _ => true,
        }
    })
}

/// A list in the new graph: the rows that stayed in it, and single tensors for the others.
struct NewList {
    list: Option<Value>,
    /// For every old row: its place in the list, or the tensor.
    rows: Vec<Result<usize, Value>>,
}

struct Rewrite<'g> {
    from: &'g Graph,
    to: Graph,
    values: Vec<Option<Value>>,
    lists: FxHashMap<Value, NewList>,
    gets: FxHashMap<(Value, usize), Value>,
    odd: &'g FxHashMap<Value, FxHashSet<usize>>,
}

fn items(graph: &Graph, list: Value) -> Arc<[TensorTy]> {
    graph.ty(list).as_list().cloned().unwrap_or_else(|| Arc::from([]))
}

impl Rewrite<'_> {
    fn renamed(&self, value: Value) -> Value {
        self.values[value.index()].unwrap_or(value)
    }

    fn push(&mut self, op: Op, args: &[Value], ty: Ty, loc: kiln_ir::Loc) -> Value {
        self.to.push(op, args, [ty], false, loc)[0]
    }

    fn node(&mut self, node: &kiln_ir::Node) {
        let out = node.outs[0];
        let from = self.from;
        let empty = FxHashSet::default();
        match &node.op {
            Op::List {} => {
                let odd = self.odd.get(&out).unwrap_or(&empty);
                let (mut kept, mut rows) = (Vec::new(), Vec::new());
                for (r, &arg) in node.args.iter().enumerate() {
                    rows.push(match odd.contains(&r) {
                        true => Err(self.renamed(arg)),
                        false => {
                            kept.push((r, self.renamed(arg)));
                            Ok(kept.len() - 1)
                        }
                    });
                }
                let types = items(from, out);
                let ty: Arc<[TensorTy]> = kept.iter().map(|(r, _)| types[*r].clone()).collect();
                let args: Vec<Value> = kept.iter().map(|(_, v)| *v).collect();
                // Packing what was just unpacked, whole and in order, is the list itself.
                let same = self.unpacked(&args);
                let list = match (args.is_empty(), same) {
                    (true, _) => None,
                    (_, Some(list)) => Some(list),
                    _ => Some(self.push(Op::List {}, &args, Ty::List(ty), node.loc)),
                };
                self.lists.insert(out, NewList { list, rows });
            }
            Op::ListGet { index } => {
                let Some(list) = self.lists.get(&node.args[0]) else { return };
                let value = match (&list.rows[*index], list.list) {
                    (Err(value), _) => *value,
                    (Ok(place), Some(new)) => {
                        let packed = self.to.producer(new).filter(|n| matches!(n.op, Op::List {}));
                        match (packed.map(|n| n.args[*place]), self.gets.get(&(new, *place))) {
                            (Some(element), _) => element,
                            (None, Some(&known)) => known,
                            (None, None) => {
                                let place = *place;
                                let ty = from.ty(out).clone();
                                let made = self.push(Op::ListGet { index: place }, &[new], ty, node.loc);
                                self.gets.insert((new, place), made);
                                made
                            }
                        }
                    }
                    (Ok(_), None) => return,
                };
                self.values[out.index()] = Some(value);
            }
            op if matches!(from.ty(out), Ty::List(_)) => self.over_lists(op, node),
            op => {
                let args: Vec<Value> = node.args.iter().map(|&a| self.renamed(a)).collect();
                let tys: Vec<Ty> = node.outs.iter().map(|&o| from.ty(o).clone()).collect();
                let outs = self.to.push(op.clone(), &args, tys, node.in_place, node.loc);
                for (&old, new) in node.outs.iter().zip(outs) {
                    self.values[old.index()] = Some(new);
                }
            }
        }
    }

    fn over_lists(&mut self, op: &Op, node: &kiln_ir::Node) {
        let out = node.outs[0];
        let types = items(self.from, out);
        let odd = self.odd.get(&out).cloned().unwrap_or_default();
        let (mut rows, mut kept) = (Vec::new(), Vec::new());
        for (r, ty) in types.iter().enumerate() {
            if !odd.contains(&r) {
                rows.push(Ok(kept.len()));
                kept.push(ty.clone());
                continue;
            }
            let args: Vec<Value> = node
                .args
                .iter()
                .map(|&a| match self.lists.get(&a).map(|l| &l.rows[r]) {
                    Some(Err(value)) => *value,
                    // All lists of a component agree on their odd rows.
                    Some(Ok(_)) | None => self.renamed(a),
                })
                .collect();
            rows.push(Err(self.push(op.clone(), &args, Ty::Tensor(ty.clone()), node.loc)));
        }
        let list = match kept.is_empty() {
            true => None,
            false => {
                let args: Vec<Value> = node
                    .args
                    .iter()
                    .map(|&a| self.lists.get(&a).and_then(|l| l.list).unwrap_or_else(|| self.renamed(a)))
                    .collect();
                Some(self.push(op.clone(), &args, Ty::List(kept.into()), node.loc))
            }
        };
        self.lists.insert(out, NewList { list, rows });
    }

    fn unpacked(&self, args: &[Value]) -> Option<Value> {
        let first = self.to.producer(*args.first()?)?;
        let (Op::ListGet { .. }, list) = (&first.op, first.args.first().copied()?) else { return None };
        let whole = items(&self.to, list).len() == args.len();
        let in_order = args.iter().enumerate().all(|(i, &a)| {
            self.to.producer(a).is_some_and(|n| n.op == Op::ListGet { index: i } && n.args[0] == list)
        });
        (whole && in_order).then_some(list)
    }
}

/// For every list, the rows that can't be in a table. Lists that meet in an op agree.
fn odd_rows(graph: &Graph, layouts: &[Strides]) -> FxHashMap<Value, FxHashSet<usize>> {
    // Components of lists that are operands and results of the same ops.
    let mut component: FxHashMap<Value, usize> = FxHashMap::default();
    let mut parents: Vec<usize> = Vec::new();
    fn find(parents: &[usize], mut c: usize) -> usize {
        while parents[c] != c {
            c = parents[c];
        }
        c
    }
    for node in &graph.nodes {
        let out = node.outs[0];
        if !matches!(graph.ty(out), Ty::List(_)) {
            continue;
        }
        let own = parents.len();
        parents.push(own);
        component.insert(out, own);
        if node.op.row().class == Class::Pointwise {
            for arg in &node.args {
                if let Some(&other) = component.get(arg) {
                    let root = find(&parents, other);
                    parents[root] = find(&parents, own);
                }
            }
        }
    }
    // The layouts that meet in each row of a component.
    let mut layout: FxHashMap<usize, Vec<Option<(Shape, Strides)>>> = FxHashMap::default();
    let mut odd: FxHashMap<usize, FxHashSet<usize>> = FxHashMap::default();
    let none = FxHashSet::default();
    let mut meet = |c: usize, row: usize, shape: &Shape, strides: &Strides| {
        let rows = layout.entry(c).or_default();
        rows.resize(rows.len().max(row + 1), None);
        let (first_shape, first) = rows[row].get_or_insert_with(|| (shape.clone(), strides.clone()));
        let alike = (0..shape.rank()).all(|d| shape[d] == 1 || first.get(d) == Some(&strides[d]));
        if !is_dense(shape, strides) || !alike || first_shape != shape {
            odd.entry(c).or_default().insert(row);
        }
    };
    let mut writes: FxHashMap<Value, SmallVec<[Value; 2]>> = FxHashMap::default();
    for write in &graph.writes {
        writes.entry(write.value).or_default().push(write.target);
    }
    let uses = graph.use_counts();
    for node in &graph.nodes {
        match &node.op {
            Op::List {} => {
                let Some(&c) = component.get(&node.outs[0]) else { continue };
                let c = find(&parents, c);
                for (row, &element) in node.args.iter().enumerate() {
                    let view = view_of(graph, layouts, &none, element);
                    let shape = graph.ty(element).as_tensor().map(|t| t.shape.clone()).unwrap_or_default();
                    meet(c, row, &shape, &view.strides);
                }
            }
            Op::ListGet { index } => {
                let Some(&c) = component.get(&node.args[0]) else { continue };
                let c = find(&parents, c);
                let out = node.outs[0];
                let shape = graph.ty(out).as_tensor().map(|t| t.shape.clone()).unwrap_or_default();
                let targets = writes.get(&out).map_or(&[][..], |t| t);
                for &target in targets {
                    if let Def::Input(number) = graph.def(target) {
                        meet(c, *index, &shape, &layouts[number as usize]);
                    }
                }
                // Whoever else reads it expects it dense.
                if uses[out.index()] as usize > targets.len() || targets.len() > 1 {
                    meet(c, *index, &shape, &shape.contiguous_strides());
                }
            }
            _ => {}
        }
    }
    let mut out: FxHashMap<Value, FxHashSet<usize>> = FxHashMap::default();
    for (&list, &c) in &component {
        if let Some(rows) = odd.get(&find(&parents, c)) {
            out.insert(list, rows.clone());
        }
    }
    out
}
