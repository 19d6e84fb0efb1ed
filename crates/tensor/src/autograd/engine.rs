//! The backward pass: nodes in the reverse order of their making, gradients summed where paths meet.

use std::collections::BinaryHeap;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use kiln_ir::{EmitExt, Error, Grad, GradCall, Loc, Op, Result, Why};

use super::emit::EagerEmit;
use super::node::{Edge, GradNode, Rule};
use crate::Tensor;
use crate::dispatch::{dispatch_tensor, execute_tensor};
use crate::hook::Arg;

/// A node waiting for its turn.
struct Waiting(Arc<GradNode>);

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

#[derive(Default)]
struct Pass {
    queue: BinaryHeap<Waiting>,
    /// Gradients of the results of waiting nodes, by the node's order.
    pending: FxHashMap<u64, SmallVec<[Option<Tensor>; 1]>>,
    /// Gradients of leaves, in the order they were met.
    leaves: Vec<(Tensor, Tensor)>,
    leaf_index: FxHashMap<usize, usize>,
}

impl Pass {
    fn deliver(&mut self, edge: &Edge, grad: Tensor) -> Result<()> {
        match edge {
            Edge::None => Ok(()),
            Edge::Leaf(leaf) => match self.leaf_index.get(&leaf.address()) {
                Some(&i) => {
                    self.leaves[i].1 = sum(&self.leaves[i].1, &grad)?;
                    Ok(())
                }
                None => {
                    self.leaf_index.insert(leaf.address(), self.leaves.len());
                    self.leaves.push((leaf.clone(), grad));
                    Ok(())
                }
            },
            Edge::Node(node, output) => {
                let slots = self.pending.entry(node.order).or_insert_with(|| {
                    self.queue.push(Waiting(node.clone()));
                    SmallVec::from_elem(None, node.outputs)
                });
                slots[*output] = Some(match slots[*output].take() {
                    Some(before) => sum(&before, &grad)?,
                    None => grad,
                });
                Ok(())
            }
        }
    }
}

fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    execute_tensor(&Op::Add {}, &[Arg::Tensor(a), Arg::Tensor(b)], Loc::UNKNOWN)
}

/// Runs the pass and adds the gradients to the leaves. On an error no leaf is touched.
pub(super) fn run(seeds: &[(Tensor, Tensor)], retain_graph: bool, loc: Loc) -> Result<()> {
    let mut pass = Pass::default();
    for (tensor, grad) in seeds {
        pass.deliver(&Edge::to(tensor), grad.clone())?;
    }
    while let Some(Waiting(node)) = pass.queue.pop() {
        let grads = pass.pending.remove(&node.order).unwrap_or_default();
        let results = differentiate(&node, &grads, retain_graph)?;
        drop(grads);
        for (edge, grad) in node.edges.iter().zip(results) {
            if let Some(grad) = grad {
                pass.deliver(edge, grad)?;
            }
        }
    }
    for (leaf, grad) in pass.leaves {
        accumulate(&leaf, grad, loc)?;
    }
    Ok(())
}

/// Looks for what would make a pass from these tensors fail, in the order in which the pass would meet it, as
/// far as the next function (which alone knows where its gradients go).
pub(super) fn check(tensors: &[Tensor]) -> Result<()> {
    let mut queue = BinaryHeap::new();
    let mut seen = FxHashSet::default();
    let visit = |edge: &Edge, queue: &mut BinaryHeap<Waiting>, seen: &mut FxHashSet<u64>| {
        if let Edge::Node(node, _) = edge
            && seen.insert(node.order)
        {
            queue.push(Waiting(node.clone()));
        }
    };
    tensors.iter().for_each(|tensor| visit(&Edge::to(tensor), &mut queue, &mut seen));
    while let Some(Waiting(node)) = queue.pop() {
        if let Rule::Op { .. } = node.rule {
            node.saved(true)?;
            node.edges.iter().for_each(|edge| visit(edge, &mut queue, &mut seen));
        }
    }
    Ok(())
}

fn differentiate(
    node: &GradNode,
    grads: &[Option<Tensor>],
    retain_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    let op = match &node.rule {
        Rule::Function(function) => return function.backward(grads, retain_graph),
        Rule::Op { op, .. } => op,
    };
    let (saved, output) = node.saved(retain_graph)?;
    let mut cx = EagerEmit::new(false, node.loc);
    let inputs: Vec<_> = saved.into_iter().map(|value| cx.saved(value)).collect();
    let outputs = [cx.saved(output)];
    let grads = [grads[0].as_ref().map(|g| cx.tensor(g))];
    let needs: Vec<bool> = node.edges.iter().map(|e| !matches!(e, Edge::None)).collect();
    let call = GradCall { op, inputs: &inputs, outputs: &outputs, grads: &grads, needs: &needs };
    let values = match op.row().grad {
        Grad::Fn(rule) => call.run(&mut cx, rule)?,
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
    values.into_iter().map(|value| value.map(|v| cx.take(v)).transpose()).collect()
}

/// Adds a gradient to a leaf: in place if it has one already, as PyTorch does.
pub(crate) fn accumulate(leaf: &Tensor, grad: Tensor, loc: Loc) -> Result<()> {
    match leaf.grad() {
        Some(existing) => {
            dispatch_tensor(&Op::Add {}, &[Arg::Tensor(&existing), Arg::Tensor(&grad)], true, loc)?;
        }
        None => {
            // The gradient becomes the leaf's own, so it must not share memory with anything else.
            let ready = grad.ready()?;
            let own =
                grad.references() == 1 && ready.storage.references() == 1 && ready.layout.is_contiguous();
            let grad = if own { grad } else { execute_tensor(&Op::Clone {}, &[Arg::Tensor(&grad)], loc)? };
            leaf.set_grad(Some(grad));
        }
    }
    Ok(())
}
