//! Differentiation of a functional graph by the rows' gradient rules.
//!
//! ```text
//! graph(%0: f32[3]) {                      graph(%0: f32[3], %1: f32[3]) {
//!   %1 = exp(%0) : f32[3]         ──►        %2 = exp(%0) : f32[3]
//!   return %1                                %3 = mul(%1, %2) : f32[3]
//! }                                          return %2, %3
//!                                          }
//! ```
//!
//! The gradient flows backwards over the nodes, once each, and only where it is wanted: from the seeds to
//! values that depend on something whose gradient is asked for. A node under `no_grad` and a row with
//! gradient `Zero` stop it; a row without a gradient is an error if the gradient really has to pass it.

use smallvec::SmallVec;

use crate::{
    Emit, EmitExt, Error, Grad, GradCall, Graph, Op, Parts, Result, Ty, Value, Values, Why, Window,
    carries_gradient,
};

/// Why gradients don't flow through the `foreach_…` forms.
const LISTS: &str = "lists of tensors are for optimizers, which run without gradients";

/// Extends `graph` by the gradients of `wanted`, given gradients of some values as `seeds`.
///
/// `recorded` says of each node of the graph whether it was recorded for differentiation (false under
/// `no_grad`). Returns one gradient per wanted value; `None` where none arrives. What is emitted carries the
/// line of the node it differentiates.
pub fn differentiate(
    graph: &mut Graph,
    seeds: &[(Value, Value)],
    wanted: &[Value],
    recorded: &dyn Fn(usize) -> bool,
) -> Result<Vec<Option<Value>>> {
    let mut needs = vec![false; graph.value_count()];
    wanted.iter().for_each(|v| needs[v.index()] = true);
    let nodes = graph.nodes.len();
    let mut backward = Backward { grads: vec![None; graph.value_count()], needs, graph };
    for node in (0..nodes).filter(|&node| recorded(node)) {
        backward.propagate_needs(node);
    }
    for &(value, grad) in seeds {
        backward.accumulate(value, grad)?;
    }
    for node in (0..nodes).rev().filter(|&node| recorded(node)) {
        backward.through(node)?;
    }
    let grads = wanted.iter().map(|v| backward.whole(*v)).collect::<Result<_>>()?;
    graph.loc = Default::default();
    Ok(grads)
}

struct Backward<'g> {
    graph: &'g mut Graph,
    /// The gradient of each value, so far.
    grads: Vec<Option<Sum>>,
    /// Which values depend on something wanted.
    needs: Vec<bool>,
}

/// What arrived at a value: gradients of all of it, or of parts.
#[derive(Clone)]
enum Sum {
    Whole(Value),
    Parts(Box<Parts<Value>>),
}

impl Backward<'_> {
    fn propagate_needs(&mut self, node: usize) {
        let node = &self.graph.nodes[node];
        let stops = matches!(node.op.row().grad, Grad::Zero);
        let needed = !stops && node.args.iter().any(|v| self.needs[v.index()]);
        for out in &node.outs {
            self.needs[out.index()] |= needed && may_carry(self.graph.ty(*out));
        }
    }

    fn accumulate(&mut self, value: Value, grad: Value) -> Result<()> {
        let sum = match self.whole(value)? {
            Some(earlier) => self.graph.add(earlier, grad)?,
            None => grad,
        };
        self.grads[value.index()] = Some(Sum::Whole(sum));
        Ok(())
    }

    fn accumulate_part(&mut self, value: Value, window: Window, part: Value) -> Result<()> {
        let sum = match self.grads[value.index()].take() {
            None => Sum::Parts(Box::new(Parts::new(self.graph.tensor_ty(value), window, part))),
            Some(Sum::Parts(mut parts)) => match parts.take(window, part) {
                None => Sum::Parts(parts),
                Some(part) => {
                    let whole = parts.joined(self.graph)?;
                    Sum::Whole(self.graph.emit_one(window.add(), &[whole, part])?)
                }
            },
            Some(Sum::Whole(whole)) => Sum::Whole(self.graph.emit_one(window.add(), &[whole, part])?),
        };
        self.grads[value.index()] = Some(sum);
        Ok(())
    }

    /// The gradient of a value, so far. Parts that it consists of are joined.
    fn whole(&mut self, value: Value) -> Result<Option<Value>> {
        let whole = match self.grads[value.index()].take() {
            None => return Ok(None),
            Some(Sum::Whole(whole)) => whole,
            Some(Sum::Parts(parts)) => parts.joined(self.graph)?,
        };
        self.grads[value.index()] = Some(Sum::Whole(whole));
        Ok(Some(whole))
    }

    /// Passes the gradients of a node's results on to its operands.
    fn through(&mut self, index: usize) -> Result<()> {
        let node = self.graph.nodes[index].clone();
        let needs: SmallVec<[bool; 4]> = node.args.iter().map(|v| self.needs[v.index()]).collect();
        if node.outs.iter().all(|v| self.grads[v.index()].is_none()) || !needs.contains(&true) {
            return Ok(());
        }
        self.graph.loc = node.loc;
        let grads: SmallVec<[Option<Value>; 2]> =
            node.outs.iter().map(|&v| self.whole(v)).collect::<Result<_>>()?;
        if let (Some(window), [Some(grad)]) = (Window::of(&node.op), &grads[..]) {
            self.accumulate_part(node.args[0], window, *grad)?;
            self.grow();
            return Ok(());
        }
        let refuse = |graph: &Graph, reason| {
            let tys: Vec<Ty> = node.args.iter().map(|&v| graph.ty(v).clone()).collect();
            Err(node.op.error(&tys, Why::NotDifferentiable { reason }, node.loc))
        };
        let is_list = |v: &Value| matches!(self.graph.ty(*v), Ty::List(_));
        match node.op.row().grad {
            Grad::Zero => Ok(()),
            Grad::NotDifferentiable(reason) => refuse(self.graph, reason),
            Grad::Fn(_) if node.args.iter().any(is_list) => refuse(self.graph, LISTS),
            Grad::Fn(rule) => {
                let call = GradCall {
                    op: &node.op,
                    inputs: &node.args,
                    outputs: &node.outs,
                    grads: &grads,
                    needs: &needs,
                };
                let operand_grads = call.run(self.graph, rule)?;
                self.grow();
                for (&arg, grad) in node.args.iter().zip(operand_grads) {
                    if let Some(grad) = grad {
                        self.accumulate(arg, grad)?;
                        self.grow();
                    }
                }
                Ok(())
            }
            Grad::Decompose => {
                // The decomposition is emitted here and differentiated in turn; where it repeats what the
                // forward computes, common subexpressions find it.
                let first = self.graph.nodes.len();
                let outs = decomposition(self.graph, &node.op, &node.args)?;
                let last = self.graph.nodes.len();
                self.grow();
                (first..last).for_each(|node| self.propagate_needs(node));
                for (out, grad) in outs.into_iter().zip(grads) {
                    if let Some(grad) = grad {
                        self.accumulate(out, grad)?;
                        self.grow();
                    }
                }
                (first..last).rev().try_for_each(|node| self.through(node))
            }
        }
    }

    /// Makes room for values that were emitted.
    fn grow(&mut self) {
        self.grads.resize(self.graph.value_count(), None);
        self.needs.resize(self.graph.value_count(), false);
    }
}

/// Whether a gradient might have to flow through values of this type. Lists count, so that a gradient that
/// ends in one is an error and not silently lost.
fn may_carry(ty: &Ty) -> bool {
    match ty {
        Ty::List(items) => items.kinds().any(|t| t.dtype.is_float()),
        other => carries_gradient(other),
    }
}

/// An op by its decomposition, which its gradient is that of.
pub fn decomposition(cx: &mut dyn Emit, op: &Op, args: &[Value]) -> Result<Values> {
    match op.decompose(cx, args)? {
        Some(values) => Ok(values),
        None => Err(Error::op(
            op.name(),
            Why::NotDifferentiable { reason: "it has no decomposition" },
            Default::default(),
        )),
    }
}
