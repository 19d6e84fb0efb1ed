//! The backward pass: nodes in the reverse order of their making, gradients summed where paths meet.

use std::collections::BinaryHeap;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use kiln_ir::{Emit, EmitExt, Error, Grad, GradCall, Lifetimes, Loc, Op, Result, Ty, Why, Window};

use super::emit::EagerEmit;
use super::node::{Edge, GradNode, Rule, Saved, Values};
use super::sum::{Arrival, Sum, add};
use super::{anomaly, watch};
use crate::Tensor;
use crate::dispatch::{dispatch_tensor, execute_tensor};
use crate::handle::Handle;
use crate::hook::Arg;

/// A node waiting for its turn.
struct Waiting(Handle<GradNode>);

impl PartialEq for Waiting {
    fn eq(&self, other: &Waiting) -> bool {
        self.0.order == other.0.order
    }
}
impl Eq for Waiting {}
impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Waiting) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Waiting {
    fn cmp(&self, other: &Waiting) -> std::cmp::Ordering {
        self.0.order.cmp(&other.0.order)
    }
}

/// A pass over the tape.
#[derive(Default)]
pub(super) struct Pass {
    queue: BinaryHeap<Waiting>,
    /// Gradients of the results of waiting nodes, by the node's order.
    pending: FxHashMap<u64, SmallVec<[Option<Sum>; 1]>>,
    /// Gradients of leaves, in the order they were met.
    leaves: Vec<(Tensor, Option<Sum>)>,
    leaf_index: FxHashMap<usize, usize>,
    retain_graph: bool,
    /// Whether the pass goes on the tape itself.
    create_graph: bool,
    /// What `grad` was asked for; without it gradients go to the leaves.
    wanted: Option<Wanted>,
    /// See [`GradRequest::quiet`](crate::hook::GradRequest).
    quiet: bool,
    /// Nodes that are not gone through.
    closed: FxHashSet<u64>,
}

/// The tensors whose gradients a pass is for, by where their gradients arrive.
struct Wanted {
    leaves: FxHashMap<usize, SmallVec<[usize; 1]>>,
    results: FxHashMap<(u64, usize), SmallVec<[usize; 1]>>,
    found: Vec<Option<Tensor>>,
}

impl Pass {
    /// A pass that adds to the leaves' gradients.
    pub(super) fn new(retain_graph: bool, create_graph: bool) -> Pass {
        Pass { retain_graph, create_graph, ..Pass::default() }
    }

    /// A pass that returns the gradients of some tensors.
    pub(super) fn wanting(inputs: &[&Tensor], retain_graph: bool, create_graph: bool) -> Pass {
        let (mut leaves, mut results) = (FxHashMap::default(), FxHashMap::default());
        for (i, input) in inputs.iter().enumerate() {
            let places: &mut SmallVec<[usize; 1]> = match input.history() {
                Some((node, output)) => results.entry((node.order, output)).or_default(),
                None => leaves.entry(input.address()).or_default(),
            };
            places.push(i);
        }
        let wanted = Some(Wanted { leaves, results, found: vec![None; inputs.len()] });
        Pass { wanted, ..Pass::new(retain_graph, create_graph) }
    }

    /// The same pass, of which nobody else is to take note.
    pub(super) fn quiet(self) -> Pass {
        Pass { quiet: true, ..self }
    }

    /// The same pass, which does not go through what made these tensors.
    pub(super) fn closed(self, tensors: &[&Tensor]) -> Pass {
        let closed = tensors.iter().filter_map(|tensor| Some(tensor.history()?.0.order)).collect();
        Pass { closed, ..self }
    }

    /// The nodes through which a wanted gradient flows; `None` if all count.
    fn useful(&self, seeds: &[(Tensor, Tensor)]) -> Option<FxHashSet<u64>> {
        let wanted = self.wanted.as_ref()?;
        let mut nodes: Vec<Handle<GradNode>> = Vec::new();
        let mut seen = FxHashSet::default();
        let mut stack: Vec<Edge> = seeds.iter().map(|(tensor, _)| Edge::to(tensor)).collect();
        while let Some(edge) = stack.pop() {
            if let Edge::Node(node, _) = edge
                && seen.insert(node.order)
            {
                stack.extend(node.edges.iter().cloned());
                nodes.push(node);
            }
        }
        // Operands were made before their results, so one look at each node in order is enough.
        nodes.sort_by_key(|node| node.order);
        let mut useful = FxHashSet::default();
        for node in nodes {
            let leads = node.edges.iter().any(|edge| match edge {
                Edge::None => false,
                Edge::Leaf(leaf) => wanted.leaves.contains_key(&leaf.address()),
                Edge::Node(below, output) => {
                    useful.contains(&below.order) || wanted.results.contains_key(&(below.order, *output))
                }
            });
            let closed = self.quiet && matches!(node.rule, Rule::Custom(_));
            if leads && !closed {
                useful.insert(node.order);
            }
        }
        Some(useful)
    }

    /// Whether anything is to be done behind tensors that gradients arrive at.
    pub(super) fn goes_on(&self, tensors: &[Tensor]) -> bool {
        let watched = |tensor: &Tensor| {
            tensor.has_hooks() || tensor.history().is_some_and(|(node, _)| node.watchers.get().is_some())
        };
        let ends: Vec<(Tensor, Tensor)> = tensors.iter().map(|t| (t.clone(), t.clone())).collect();
        tensors.iter().any(watched) || self.useful(&ends).is_none_or(|useful| !useful.is_empty())
    }

    fn deliver(&mut self, edge: &Edge, grad: Arrival) -> Result<()> {
        let place = match edge {
            Edge::None => return Ok(()),
            Edge::Leaf(leaf) => {
                let next = self.leaves.len();
                let at = *self.leaf_index.entry(leaf.address()).or_insert(next);
                if at == next {
                    self.leaves.push((leaf.clone(), None));
                }
                &mut self.leaves[at].1
            }
            Edge::Node(node, output) => {
                let slots = self.pending.entry(node.order).or_insert_with(|| {
                    self.queue.push(Waiting(node.clone()));
                    std::iter::repeat_with(|| None).take(node.outputs).collect()
                });
                &mut slots[*output]
            }
        };
        *place = Some(match place.take() {
            Some(before) => before.add(grad, self.create_graph)?,
            None => Sum::new(grad),
        });
        Ok(())
    }
}

/// Runs a pass. Gradients are added to the leaves or, if some were asked for, returned. On an error no leaf
/// is touched.
pub(super) fn run(seeds: &[(Tensor, Tensor)], mut pass: Pass, loc: Loc) -> Result<Vec<Option<Tensor>>> {
    let useful = pass.useful(seeds);
    for (tensor, grad) in seeds {
        pass.deliver(&Edge::to(tensor), Arrival::Whole(grad.clone()))?;
    }
    while let Some(Waiting(node)) = pass.queue.pop() {
        let sums = pass
            .pending
            .remove(&node.order)
            .ok_or_else(|| Error::bug(format!("no gradient is pending for {}", node.name())))?;
        let mut grads: SmallVec<[Option<Tensor>; 1]> = SmallVec::with_capacity(sums.len());
        for sum in sums {
            grads.push(sum.map(|sum| sum.whole(pass.create_graph)).transpose()?);
        }
        if let Some(watchers) = node.watchers.get().filter(|_| !pass.quiet) {
            for (output, slot) in grads.iter_mut().enumerate() {
                if let Some(grad) = slot.take() {
                    *slot = Some(watch::pass_through(watchers, output, grad)?);
                }
            }
        }
        if let Some(wanted) = &mut pass.wanted {
            for (output, grad) in grads.iter().enumerate() {
                for &place in wanted.results.get(&(node.order, output)).into_iter().flatten() {
                    wanted.found[place].clone_from(grad);
                }
            }
        }
        let leads = useful.as_ref().is_none_or(|useful| useful.contains(&node.order));
        if !leads || pass.closed.contains(&node.order) {
            continue;
        }
        let results = differentiate(&node, grads, pass.retain_graph, pass.create_graph)?;
        for (edge, grad) in node.edges.iter().zip(results) {
            if let Some(grad) = grad {
                pass.deliver(edge, grad)?;
            }
        }
    }
    let mut leaves = Vec::with_capacity(pass.leaves.len());
    for (leaf, sum) in pass.leaves {
        let Some(sum) = sum else { continue };
        let grad = sum.whole(pass.create_graph)?;
        let grad = if pass.quiet { grad } else { watch::through_hooks(&leaf, grad)? };
        leaves.push((leaf, grad));
    }
    match pass.wanted {
        Some(mut wanted) => {
            for (leaf, grad) in leaves {
                for &place in wanted.leaves.get(&leaf.address()).into_iter().flatten() {
                    wanted.found[place] = Some(grad.clone());
                }
            }
            Ok(wanted.found)
        }
        None => {
            for (leaf, grad) in leaves {
                if pass.create_graph {
                    accumulate_on_tape(&leaf, grad)?
                } else {
                    accumulate(&leaf, grad, loc)?
                }
            }
            Ok(Vec::new())
        }
    }
}

/// Whether a pass from these tensors is sure to go through: none of the tape was used up, nothing that was saved
/// was overwritten, and no user code, which may fail, takes part.
pub(super) fn goes_through(tensors: &[Tensor]) -> bool {
    let mut seen = FxHashSet::default();
    let mut stack: Vec<Edge> = tensors.iter().map(Edge::to).collect();
    while let Some(edge) = stack.pop() {
        let node = match edge {
            Edge::None => continue,
            Edge::Leaf(leaf) if leaf.has_hooks() => return false,
            Edge::Leaf(_) => continue,
            Edge::Node(node, _) => node,
        };
        if !seen.insert(node.order) {
            continue;
        }
        let sure = match &node.rule {
            Rule::Op(_) => node.saved(true).is_ok(),
            Rule::Function(function) => function.goes_through(),
            Rule::Custom(_) => false,
        };
        if !sure || node.watchers.get().is_some() {
            return false;
        }
        stack.extend(node.edges.iter().cloned());
    }
    true
}

/// Gradients with so many elements are worth a look at when what they are computed from can go; tests look at all.
const LARGE: usize = if cfg!(debug_assertions) { 1 } else { 1 << 17 };

fn differentiate(
    node: &Handle<GradNode>,
    mut grads: SmallVec<[Option<Tensor>; 1]>,
    retain_graph: bool,
    create_graph: bool,
) -> Result<Vec<Option<Arrival>>> {
    let wholes =
        |grads: Vec<Option<Tensor>>| grads.into_iter().map(|grad| grad.map(Arrival::Whole)).collect();
    let op = match &node.rule {
        Rule::Function(function) if create_graph => {
            let why = Why::NotDifferentiable {
                reason: "a compiled function's backward can't be differentiated again; run it eagerly",
            };
            return Err(Error::op(function.name(), why, node.loc));
        }
        Rule::Function(function) => return function.backward(&grads, retain_graph).map(wholes),
        Rule::Custom(custom) => {
            let results = custom.differentiate(node, &grads, retain_graph, create_graph)?;
            anomaly::check(custom.name(), &results, node.loc)?;
            return Ok(wholes(results));
        }
        Rule::Op(op) => op,
    };
    let Values { inputs: saved, output, ty } = node.saved(retain_graph)?;
    let mut cx = EagerEmit::new(create_graph, node.loc);
    // To be differentiated again, what was saved gets its place on the tape back.
    let on_tape = |value: Saved, edge: &Edge| match value {
        Saved::Tensor(tensor, version) if create_graph => {
            edge.give_history(&tensor).map(|tensor| Saved::Tensor(tensor, version))
        }
        other => Ok(other),
    };
    let mut inputs = Vec::with_capacity(saved.len());
    for (value, edge) in saved.into_iter().zip(&node.edges) {
        inputs.push(cx.saved(on_tape(value, edge)?, &ty));
    }
    if let (Some(window), Some(_)) = (Window::of(op), &grads[0]) {
        anomaly::check(op.name(), &grads, node.loc)?;
        let of = cx.tensor_ty(inputs[0]);
        return Ok(vec![grads[0].take().map(|grad| Arrival::Part(of, window, grad))]);
    }
    let outputs = [cx.saved(on_tape(output, &Edge::Node(node.clone(), 0))?, &ty)];
    let needs: Vec<bool> = node.edges.iter().map(|e| !matches!(e, Edge::None)).collect();
    let large = grads[0].as_ref().is_some_and(|g| g.numel() >= LARGE);
    let grads = [grads[0].take().map(|g| cx.tensor(&g))];
    cx.begin();
    if large && cx.is_immediate() && matches!(op.row().grad, Grad::Fn(_)) {
        let tys: Vec<Ty> = inputs.iter().map(|&v| cx.ty(v).clone()).collect();
        // Otherwise all is let go of at the end.
        if let Ok(lifetimes) = Lifetimes::of(op, &tys, &Ty::Tensor(ty), &needs) {
            cx.end_values(lifetimes);
        }
    }
    let call = GradCall { op, inputs: &inputs, outputs: &outputs, grads: &grads, needs: &needs };
    let values = match op.row().grad {
        Grad::Fn(rule) => call.run(&mut cx, rule).map_err(|error| error.at(node.loc))?,
        // Only an op that changed its first operand in place: the gradient ends here, and is zero beyond.
        Grad::Zero => {
            let ty = cx.tensor_ty(inputs[0]);
            let zero = cx.number(0.0)?;
            let zeros = cx.full(zero, ty.shape, ty.dtype, ty.device)?;
            std::iter::once(Some(zeros)).chain(inputs.iter().skip(1).map(|_| None)).collect()
        }
        Grad::Decompose => vec![None; inputs.len()],
        Grad::NotDifferentiable(reason) => {
            return Err(Error::op(op.name(), Why::NotDifferentiable { reason }, node.loc));
        }
    };
    debug_assert!(values.iter().flatten().all(|v| cx.tensor_ty(*v).dtype.is_float()));
    let results = cx.results(values)?;
    anomaly::check(op.name(), &results, node.loc)?;
    Ok(wholes(results))
}

/// Adds a gradient that is itself on the tape: out of place, so that both stay differentiable.
fn accumulate_on_tape(leaf: &Tensor, grad: Tensor) -> Result<()> {
    let sum = match leaf.grad() {
        Some(existing) => add(true, &existing, &grad)?,
        None => grad,
    };
    leaf.set_grad(Some(sum));
    Ok(())
}

/// Adds a gradient to a leaf: in place if it has one already, as PyTorch does.
pub(crate) fn accumulate(leaf: &Tensor, grad: Tensor, loc: Loc) -> Result<()> {
    match leaf.grad() {
        Some(existing) => {
            dispatch_tensor(&Op::Add {}, &[Arg::Tensor(&existing), Arg::Tensor(&grad)], true, loc)?;
        }
        None => {
            leaf.set_grad(Some(owned(grad, loc)?));
        }
    }
    Ok(())
}

/// Gives a tensor a gradient as a backward pass does: to a leaf's it is added, for another it is retained. What
/// this takes is recorded, if a recorder is set; for a run that goes through the tape itself.
pub fn deliver(tensor: &Tensor, grad: Tensor, create_graph: bool, loc: Loc) -> Result<()> {
    if create_graph || tensor.retains_grad() {
        return accumulate_on_tape(tensor, grad);
    }
    // The run's own handle of a tensor that it is yet to make, and this one.
    let shared = grad.references() > 1 + usize::from(grad.is_lazy());
    match tensor.grad() {
        None if grad.is_lazy() && shared => {
            let grad = dispatch_tensor(&Op::Clone {}, &[Arg::Tensor(&grad)], false, loc)?;
            tensor.set_grad(Some(grad));
            Ok(())
        }
        None if grad.is_lazy() => {
            tensor.set_grad(Some(grad));
            Ok(())
        }
        _ => accumulate(tensor, grad, loc),
    }
}

/// A gradient that somebody gets for his own: it must not share memory with anything else.
pub(super) fn owned(grad: Tensor, loc: Loc) -> Result<Tensor> {
    let ready = grad.ready()?;
    let own = grad.references() == 1 && ready.storage.references() == 1 && ready.layout.is_contiguous();
    if own { Ok(grad) } else { execute_tensor(&Op::Clone {}, &[Arg::Tensor(&grad)], loc) }
}
