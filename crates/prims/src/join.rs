//! Sums of many products: one product, whose inner dim is all of theirs.
//!
//! ```text
//! %4 = mm(%0, %1) : f32[64, 32]          %4 = cat(%0, %2) {dim: 1} : f32[64, 16]
//! %5 = mm(%2, %3) : f32[64, 32]     →    %5 = cat(%1, %3) {dim: 0} : f32[16, 32]
//! %6 = add(%4, %5) : f32[64, 32]         %6 = mm(%4, %5) : f32[64, 32]
//! ```
//!
//! The gradient of a weight that a loop uses in every step is such a sum. Each product by itself is of the weight's size,
//! goes to memory and comes back to be added, and has an inner dim too short to be worth a product; their number also made
//! each sum a kernel of its own. Sums over a dim of the very tensors that are put together (the gradient of a bias) are one
//! sum over all of them.
//!
//! Summands are added in another order than eager's, so with strict numerics it is not done.

use kiln_ir::{Emit, Graph, Node, Op, Result, TensorTy, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::remove_dead;

/// Fewer products than this are added up as they are.
const MANY: usize = 4;

/// Tensors that are put together along a dim, and turned round afterwards if they were before.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Together {
    parts: Vec<Value>,
    dim: usize,
    permuted: bool,
}

/// What some terms of a sum become.
enum Joined {
    Product([Together; 2]),
    Sum(Op, Together),
}

/// A sum: what its terms become, and those that stay.
struct Sum {
    joined: Vec<Joined>,
    rest: Vec<Value>,
}

/// Joins the products of every sum that has many of them.
pub(crate) fn join(graph: &Graph) -> Result<Graph> {
    let sums = sums(graph);
    let mut found: FxHashMap<Value, Sum> = FxHashMap::default();
    let mut there: FxHashSet<Together> = FxHashSet::default();
    for (&root, terms) in &sums {
        let products = products(graph, graph.tensor_of(root), terms);
        let Some((sides, rest)) = products else { continue };
        there.extend(sides.iter().map(|side| Together { permuted: false, ..side.clone() }));
        found.insert(root, Sum { joined: vec![Joined::Product(sides)], rest });
    }
    if found.is_empty() {
        return Ok(graph.clone());
    }
    for (root, terms) in sums {
        let terms = found.remove(&root).unwrap_or(Sum { joined: Vec::new(), rest: terms });
        let sum = with_sums(graph, terms, &there);
        if !sum.joined.is_empty() {
            found.insert(root, sum);
        }
    }
    let (mut result, mut map) = Graph::with_inputs_of(graph);
    let mut made = FxHashMap::default();
    for node in &graph.nodes {
        if let Some(sum) = found.get(&node.outs[0]) {
            result.loc = node.loc;
            map[node.outs[0].index()] = emit(&mut result, sum, &map, &mut made)?;
            continue;
        }
        let args: SmallVec<[Value; 4]> = node.args.iter().map(|value| map[value.index()]).collect();
        let tys = node.outs.iter().map(|&out| graph.ty(out).clone());
        let outs = result.push(node.op.clone(), &args, tys, node.in_place, node.loc);
        node.outs.iter().zip(outs).for_each(|(from, to)| map[from.index()] = to);
    }
    result.outputs = graph.outputs.iter().map(|value| map[value.index()]).collect();
    result.writes = graph.writes.iter().map(|write| write.renumbered(&map)).collect();
    Ok(remove_dead(&result))
}

/// The terms of every sum, by its last addition: what is added up and used for nothing else, in order.
fn sums(graph: &Graph) -> FxHashMap<Value, Vec<Value>> {
    let uses = graph.use_counts();
    let is_sum = |node: &Node| matches!(node.op, Op::Add {}) && graph.ty(node.outs[0]).as_tensor().is_some();
    let addition = |term: Value, ty: &TensorTy| {
        let node = graph.producer(term).filter(|node| uses[term.index()] == 1 && is_sum(node))?;
        (graph.tensor_of(term) == ty).then_some(node)
    };
    let additions = || graph.nodes.iter().filter(|node| is_sum(node));
    let inner: FxHashSet<Value> = additions()
        .flat_map(|node| node.args.iter().map(|&arg| (arg, graph.tensor_of(node.outs[0]))))
        .filter(|&(arg, ty)| addition(arg, ty).is_some())
        .map(|(arg, _)| arg)
        .collect();
    let terms = |node: &Node| {
        let ty = graph.tensor_of(node.outs[0]);
        let (mut terms, mut open) = (Vec::new(), vec![node.args[1], node.args[0]]);
        while let Some(term) = open.pop() {
            match addition(term, ty) {
                Some(node) => open.extend([node.args[1], node.args[0]]),
                None => terms.push(term),
            }
        }
        (node.outs[0], terms)
    };
    additions().filter(|node| !inner.contains(&node.outs[0])).map(terms).collect()
}

/// The two sides of the one product that some terms become, and the other terms. `None` if it would not pay.
fn products(graph: &Graph, ty: &TensorTy, terms: &[Value]) -> Option<([Together; 2], Vec<Value>)> {
    if terms.len() < MANY || !ty.dtype.is_float() {
        return None;
    }
    let product = |&term: &Value| {
        let node = graph.producer(term).filter(|node| matches!(node.op, Op::Mm {}))?;
        (graph.tensor_of(term) == ty).then_some([node.args[0], node.args[1]])
    };
    let mut found: Vec<[Value; 2]> = terms.iter().filter_map(product).collect();
    // What is put together is read and written once more; so is every product that is not added where it is made.
    let copied: usize = found.iter().flatten().map(|&side| graph.tensor_of(side).shape.numel()).sum();
    if found.len() < MANY || copied > found.len() * ty.shape.numel() {
        return None;
    }
    let rest = terms.iter().copied().filter(|term| product(term).is_none()).collect();
    // In the order of what they are made from, so that sums over the same tensors find them in the same order.
    found.sort_by_key(|&[lhs, _]| turned(graph, lhs).unwrap_or(lhs));
    let [lhs, rhs] = [0, 1].map(|side| found.iter().map(|sides| sides[side]).collect::<Vec<_>>());
    Some(([together(graph, lhs, 1), together(graph, rhs, 0)], rest))
}

/// What a transposed matrix is before.
fn turned(graph: &Graph, value: Value) -> Option<Value> {
    let node = graph.producer(value)?;
    match &node.op {
        Op::Permute { dims } if dims[..] == [1, 0] => Some(node.args[0]),
        _ => None,
    }
}

/// Matrices put together along a dim: before they are transposed, if all of them are.
fn together(graph: &Graph, parts: Vec<Value>, dim: usize) -> Together {
    match parts.iter().map(|&part| turned(graph, part)).collect() {
        Some(parts) => Together { parts, dim: 1 - dim, permuted: true },
        None => Together { parts, dim, permuted: false },
    }
}

/// Joins those of the terms that are sums over tensors that are put together anyway.
fn with_sums(graph: &Graph, mut sum: Sum, there: &FxHashSet<Together>) -> Sum {
    let over_rows = |&term: &Value| {
        let node = graph.producer(term)?;
        match &node.op {
            Op::Sum { dims, .. } if dims[..] == [0] => Some((node.op.clone(), node.args[0])),
            _ => None,
        }
    };
    let Some((op, _)) = sum.rest.iter().find_map(over_rows) else { return sum };
    let is_such = |term: &Value| over_rows(term).is_some_and(|(other, _)| other == op);
    let mut parts: Vec<Value> =
        sum.rest.iter().filter_map(over_rows).filter(|(other, _)| *other == op).map(|(_, x)| x).collect();
    parts.sort_unstable();
    let parts = Together { parts, dim: 0, permuted: false };
    if there.contains(&parts) {
        sum.rest.retain(|term| !is_such(term));
        sum.joined.push(Joined::Sum(op, parts));
    }
    sum
}

/// The sum in another graph.
fn emit(
    graph: &mut Graph,
    sum: &Sum,
    map: &[Value],
    made: &mut FxHashMap<(Vec<Value>, usize), Value>,
) -> Result<Value> {
    let mut whole = |graph: &mut Graph, together: &Together| -> Result<Value> {
        let Together { parts, dim, permuted } = together;
        let value = match made.get(&(parts.clone(), *dim)) {
            Some(&value) => value,
            None => {
                let args: Vec<Value> = parts.iter().map(|part| map[part.index()]).collect();
                let value = graph.emit(Op::Cat { dim: *dim }, &args)?[0];
                made.insert((parts.clone(), *dim), value);
                value
            }
        };
        let turn = Op::Permute { dims: [1, 0].into_iter().collect() };
        if *permuted { Ok(graph.emit(turn, &[value])?[0]) } else { Ok(value) }
    };
    let mut terms = Vec::new();
    for joined in &sum.joined {
        terms.push(match joined {
            Joined::Product([lhs, rhs]) => {
                let sides = [whole(graph, lhs)?, whole(graph, rhs)?];
                graph.emit(Op::Mm {}, &sides)?[0]
            }
            Joined::Sum(op, parts) => {
                let whole = whole(graph, parts)?;
                graph.emit(op.clone(), &[whole])?[0]
            }
        });
    }
    let mut terms = terms.into_iter().chain(sum.rest.iter().map(|term| map[term.index()]));
    let first = terms.next().ok_or_else(|| kiln_ir::Error::bug("a sum without terms"))?;
    terms.try_fold(first, |sum, term| Ok(graph.emit(Op::Add {}, &[sum, term])?[0]))
}
