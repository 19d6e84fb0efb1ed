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
use std::collections::BTreeSet;

use kiln_ir::{Class, Def, Fault, Graph, ListTy, Op, Shape, Strides, TensorTy, Ty, Value, Write, planted};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::lower::views::{is_dense, view_of};
use crate::lower::{operand_dtype, operation};
use crate::rewrite::elements::Elements;
use crate::{Layout, WhyNot};

/// Rewrites a graph so that every row of every list can be a row of a table.
pub(crate) fn take_apart<'g>(graph: &'g Graph, layouts: &[Layout]) -> (Cow<'g, Graph>, Vec<WhyNot>) {
    if !graph.nodes.iter().any(|n| matches!(n.op, Op::ListGet { .. } | Op::List {})) {
        return (Cow::Borrowed(graph), Vec::new());
    }
    let (odd, lying) = odd_rows(graph, layouts);
    if odd.is_empty() && is_ready(graph) {
        return (Cow::Borrowed(graph), Vec::new());
    }
    let (to, inputs) = Graph::with_inputs_of(graph);
    let mut values = vec![None; graph.value_count()];
    for &input in &graph.inputs {
        values[input.index()] = Some(inputs[input.index()]);
    }
    let (lists, gets) = (FxHashMap::default(), FxHashMap::default());
    let mut this = Rewrite { from: graph, to, values, lists, gets, odd: &odd };
    for node in &graph.nodes {
        this.node(node);
    }
    this.to.outputs = graph.outputs.iter().map(|&v| this.renamed(v)).collect();
    this.to.writes = graph.writes.iter().map(|w| this.write(w)).collect();
    (Cow::Owned(this.to), lying.into_iter().map(|row| WhyNot::Layouts { row }).collect())
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

fn items(graph: &Graph, list: Value) -> ListTy {
    graph.list_of(list).clone()
}

impl Rewrite<'_> {
    fn renamed(&self, value: Value) -> Value {
        self.values[value.index()].unwrap_or(value)
    }

    /// A write-back, of the element that has become of the one it names.
    fn write(&self, write: &Write) -> Write {
        let target = self.renamed(write.target);
        let row = write.element.map(|row| row as usize);
        let list = self.lists.get(&write.value);
        match row.and_then(|row| list.map(|list| (&list.rows[row], list.list))) {
            Some((Err(value), _)) => Write::whole(target, *value),
            Some((Ok(place), Some(list))) => Write { target, value: list, element: Some(*place as u32) },
            Some((Ok(_), None)) | None => Write { target, value: self.renamed(write.value), ..*write },
        }
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
                    rows.push(if odd.contains(&r) {
                        Err(self.renamed(arg))
                    } else {
                        kept.push((r, self.renamed(arg)));
                        Ok(kept.len() - 1)
                    });
                }
                let types = items(from, out);
                let ty: ListTy = kept.iter().map(|(r, _)| types[*r].clone()).collect();
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
        let list = if kept.is_empty() {
            None
        } else {
            let args: Vec<Value> = node
                .args
                .iter()
                .map(|&a| self.lists.get(&a).and_then(|l| l.list).unwrap_or_else(|| self.renamed(a)))
                .collect();
            Some(self.push(op.clone(), &args, Ty::List(kept.into_iter().collect()), node.loc))
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

/// The ways in which tensors lie, each known by a number: mostly there are few.
#[derive(Default)]
struct Kinds {
    kinds: Vec<(Shape, Strides)>,
    is_dense: Vec<bool>,
    numbers: FxHashMap<(Shape, Strides), u32>,
    last: usize,
}

impl Kinds {
    fn number(&mut self, shape: &Shape, strides: &Strides) -> u32 {
        if self.kinds.get(self.last).is_some_and(|(s, t)| s == shape && t == strides) {
            return self.last as u32;
        }
        let kind = (shape.clone(), strides.clone());
        let number = *self.numbers.entry(kind.clone()).or_insert_with(|| {
            self.is_dense.push(is_dense(shape, strides));
            self.kinds.push(kind);
            self.kinds.len() as u32 - 1
        });
        self.last = number as usize;
        number
    }

    /// Whether tensors of two kinds can be walked side by side.
    fn are_alike(&self, a: u32, b: u32) -> bool {
        let ((shape, strides), (other, others)) = (&self.kinds[a as usize], &self.kinds[b as usize]);
        let same_order = (0..shape.rank()).all(|d| shape[d] == 1 || strides[d] == others[d]);
        shape == other && (same_order || planted(Fault::TransposedRow))
    }
}

/// The kinds that meet in the rows of a component of lists.
#[derive(Default)]
struct Meeting {
    /// Per row, the kind that came first.
    first: Vec<Option<u32>>,
    odd: FxHashSet<usize>,
    /// How many rows there are, if an op over them is no loop: then all are odd.
    library: usize,
}

impl Meeting {
    fn meet(&mut self, row: usize, kind: u32, kinds: &Kinds) {
        if self.first.len() <= row {
            self.first.resize(row + 1, None);
        }
        let first = *self.first[row].get_or_insert(kind);
        if !kinds.is_dense[kind as usize] || (first != kind && !kinds.are_alike(first, kind)) {
            self.odd.insert(row);
        }
    }
}

/// For every list, the rows that can't be in a table; and those that can't because of how they lie. Lists that meet in an
/// op agree.
fn odd_rows(graph: &Graph, layouts: &[Layout]) -> (FxHashMap<Value, FxHashSet<usize>>, BTreeSet<usize>) {
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
    let mut meetings: Vec<Meeting> = parents.iter().map(|_| Meeting::default()).collect();
    let component: FxHashMap<Value, usize> =
        component.into_iter().map(|(list, c)| (list, find(&parents, c))).collect();
    let mut kinds = Kinds::default();
    let none = FxHashSet::default();
    let scalar = Shape::scalar();
    let shape_of = |v: Value| graph.ty(v).as_tensor().map_or(&scalar, |t| &t.shape);
    let input_of = |v: Value| match graph.def(v) {
        Def::Input(number) => Some(&layouts[number as usize].strides),
        Def::Node { .. } => None,
    };
    let mut whole: FxHashMap<Value, SmallVec<[Value; 2]>> = FxHashMap::default();
    for write in graph.writes.iter().filter(|w| w.element.is_none()) {
        if matches!(graph.producer(write.value).map(|n| &n.op), Some(Op::ListGet { .. })) {
            whole.entry(write.value).or_default().push(write.target);
        }
    }
    let elements = Elements::of(graph);
    let uses = graph.use_counts();
    for node in &graph.nodes {
        match &node.op {
            Op::List {} => {
                let Some(&c) = component.get(&node.outs[0]) else { continue };
                for (row, &element) in node.args.iter().enumerate() {
                    let shape = shape_of(element);
                    let kind = match input_of(element) {
                        Some(strides) => kinds.number(shape, strides),
                        None => kinds.number(shape, &view_of(graph, layouts, &none, element).strides),
                    };
                    meetings[c].meet(row, kind, &kinds);
                }
            }
            Op::ListGet { index } => {
                let Some(&c) = component.get(&node.args[0]) else { continue };
                let out = node.outs[0];
                let shape = shape_of(out);
                let targets = whole.get(&out).map_or(&[][..], |t| t);
                for strides in targets.iter().filter_map(|&target| input_of(target)) {
                    let kind = kinds.number(shape, strides);
                    meetings[c].meet(*index, kind, &kinds);
                }
                // Whoever else reads it expects it dense.
                if uses[out.index()] as usize > targets.len() || targets.len() > 1 {
                    let kind = kinds.number(shape, &shape.contiguous_strides());
                    meetings[c].meet(*index, kind, &kinds);
                }
            }
            op => {
                let out = node.outs[0];
                let Some(&c) = component.get(&out) else { continue };
                let types = graph.list_of(out);
                let is_loop = |row: usize| {
                    let operands = operand_dtype(op, node.args.iter().map(|&v| graph.ty(v)), row);
                    operation(op, operands, types[row].dtype).is_some()
                };
                // Rows are mostly of one dtype.
                let mut last = None;
                let is_new = |(_, ty): &(usize, &TensorTy)| last.replace(ty.dtype) != Some(ty.dtype);
                if !types.iter().enumerate().filter(is_new).all(|(row, _)| is_loop(row)) {
                    meetings[c].library = types.len();
                }
            }
        }
    }
    for write in &graph.writes {
        let (Some(row), Some(&c)) = (write.element, component.get(&write.value)) else { continue };
        let (row, shape) = (row as usize, shape_of(write.target));
        if let Some(strides) = input_of(write.target) {
            let kind = kinds.number(shape, strides);
            meetings[c].meet(row, kind, &kinds);
        }
        if elements.is_shared(write.value, row) {
            let kind = kinds.number(shape, &shape.contiguous_strides());
            meetings[c].meet(row, kind, &kinds);
        }
    }
    let lying = meetings.iter().flat_map(|meeting| meeting.odd.iter().copied()).collect();
    for meeting in &mut meetings {
        meeting.odd.extend(0..meeting.library);
    }
    let odd = component.into_iter().filter(|(_, c)| !meetings[*c].odd.is_empty());
    (odd.map(|(list, c)| (list, meetings[c].odd.clone())).collect(), lying)
}
