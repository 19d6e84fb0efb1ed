//! Nodes of the tape.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_ir::{Class, Error, Grad, Loc, Op, Result, Saves, Scalar, Ty, Why};

use super::watch::Watchers;
use crate::Tensor;
use crate::dispatch::execute_tensor;
use crate::hook::{Arg, Call};

/// Where a gradient goes.
#[derive(Clone)]
pub(crate) enum Edge {
    /// Nowhere.
    None,
    /// Into a leaf's `grad`.
    Leaf(Tensor),
    /// On to the node that computed the operand, as the gradient of its result with this number.
    Node(Arc<GradNode>, usize),
}

impl Edge {
    /// A tensor that was saved off the tape, with its place on it. Not the saved handle itself: the node that
    /// keeps it would then keep itself alive.
    pub(crate) fn give_history(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Edge::None => tensor.clone(),
            Edge::Leaf(leaf) => leaf.clone(),
            Edge::Node(node, output) => {
                let again = Tensor::from_ready(tensor.ready()?.clone());
                again.mark_requires_grad(true);
                again.set_history(node.clone(), *output);
                again
            }
        })
    }

    /// The edge to a tensor.
    pub(crate) fn to(tensor: &Tensor) -> Edge {
        if !tensor.requires_grad() {
            return Edge::None;
        }
        match tensor.history() {
            Some((node, output)) => Edge::Node(node, output),
            None => Edge::Leaf(tensor.clone()),
        }
    }
}

/// A value that a rule may read.
#[derive(Clone)]
pub(crate) enum Saved {
    /// Only its type was kept.
    Type(Ty),
    /// A number.
    Number(Scalar),
    /// A tensor, cut off from the tape, and its storage's version when it was saved.
    Tensor(Tensor, u64),
}

impl Saved {
    fn of(arg: &Arg<'_>, ty: Ty, keep: bool) -> Result<Saved> {
        Ok(match arg {
            Arg::Number(x) => Saved::Number(*x),
            Arg::Tensor(t) if keep => {
                let ready = t.ready()?.clone();
                let version = ready.storage.version();
                Saved::Tensor(Tensor::from_ready(ready), version)
            }
            _ => Saved::Type(ty),
        })
    }
}

/// A user-defined or compiled function on the tape.
pub trait Function: Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &str;
    /// From the gradients of the outputs (`None`: zero), those of the inputs.
    fn backward(&self, grads: &[Option<Tensor>], retain_graph: bool) -> Result<Vec<Option<Tensor>>>;
}

/// How a node computes its operands' gradients.
#[allow(clippy::large_enum_variant, reason = "nearly every node is an op; a box would cost it an allocation")]
pub(crate) enum Rule {
    /// By the op's row, from what was saved; `None` once freed.
    Op { op: Op, inputs: Mutex<Option<SmallVec<[Saved; 3]>>>, output: Mutex<Option<Saved>> },
    /// By a function.
    Function(Arc<dyn Function>),
}

/// A computation that gradients flow back through.
pub(crate) struct GradNode {
    /// Counts nodes: a node's operands were made before it.
    pub(crate) order: u64,
    pub(crate) edges: SmallVec<[Edge; 3]>,
    pub(crate) outputs: usize,
    pub(crate) rule: Rule,
    /// What users asked to see of the gradients that arrive here; most nodes have none.
    pub(crate) watchers: Mutex<Watchers>,
    pub(crate) loc: Loc,
}

fn next_order() -> u64 {
    static ORDER: AtomicU64 = AtomicU64::new(0);
    ORDER.fetch_add(1, Ordering::Relaxed)
}

/// Copies of the operands that an in-place op is about to overwrite, where its rule will read them.
pub(crate) fn overwritten(call: &Call<'_>) -> Result<SmallVec<[Option<Tensor>; 4]>> {
    let mut kept = SmallVec::new();
    if let (true, Some(Arg::Tensor(target))) =
        (call.in_place && call.op.row().saves.inputs(), call.args.first())
    {
        let memory = target.ready()?.storage.address();
        for arg in call.args {
            kept.push(match arg {
                Arg::Tensor(t) if t.ready()?.storage.address() == memory => {
                    Some(execute_tensor(&Op::Clone {}, &[*arg], call.loc)?)
                }
                _ => None,
            });
        }
    }
    Ok(kept)
}

/// The operands as they were before the op, given [`overwritten`].
pub(crate) fn as_before<'a>(args: &[Arg<'a>], kept: &'a [Option<Tensor>]) -> SmallVec<[Arg<'a>; 4]> {
    let kept = kept.iter().map(Option::as_ref).chain(std::iter::repeat(None));
    args.iter().zip(kept).map(|(arg, kept)| kept.map_or(*arg, Arg::Tensor)).collect()
}

/// Puts an executed op on the tape: `result` remembers how it was computed.
pub(crate) fn record(
    op: &Op,
    args: &[Arg<'_>],
    tys: SmallVec<[Ty; 4]>,
    edges: SmallVec<[Edge; 3]>,
    result: &Tensor,
    loc: Loc,
) -> Result<()> {
    let row = op.row();
    if let Grad::NotDifferentiable(reason) = row.grad {
        return Err(op.error(&tys, Why::NotDifferentiable { reason }, loc));
    }
    let saves: Saves = row.saves;
    let mut inputs = SmallVec::new();
    for (arg, ty) in args.iter().zip(tys) {
        let kept = saves.input(&ty);
        inputs.push(Saved::of(arg, ty, kept)?);
    }
    let ready = result.ready()?;
    let output = match saves.outputs() {
        true => Saved::Tensor(Tensor::from_ready(ready.clone()), ready.storage.version()),
        false => Saved::Type(ready.ty().into()),
    };
    let rule =
        Rule::Op { op: op.clone(), inputs: Mutex::new(Some(inputs)), output: Mutex::new(Some(output)) };
    let node = GradNode { order: next_order(), edges, outputs: 1, rule, watchers: Mutex::default(), loc };
    result.mark_requires_grad(true);
    result.set_history(Arc::new(node), 0);
    Ok(())
}

/// Puts a function on the tape: gradients of `outputs` flow through it to `inputs`.
pub fn attach(function: Arc<dyn Function>, inputs: &[Tensor], outputs: &[Tensor], loc: Loc) {
    let edges = inputs.iter().map(Edge::to).collect();
    let rule = Rule::Function(function);
    let node = Arc::new(GradNode {
        order: next_order(),
        edges,
        outputs: outputs.len(),
        rule,
        watchers: Mutex::default(),
        loc,
    });
    for (i, output) in outputs.iter().enumerate() {
        output.mark_requires_grad(true);
        output.set_history(node.clone(), i);
    }
}

impl GradNode {
    /// The op or function that it differentiates.
    pub(crate) fn name(&self) -> &str {
        match &self.rule {
            Rule::Op { op, .. } => op.name(),
            Rule::Function(function) => function.name(),
        }
    }

    /// What the rule may read, or why it may not. Takes it unless the tape is kept.
    pub(crate) fn saved(&self, retain_graph: bool) -> Result<(SmallVec<[Saved; 3]>, Saved)> {
        let Rule::Op { op, inputs, output } = &self.rule else { return Err(self.freed("function")) };
        let (mut inputs, mut output) = (inputs.lock(), output.lock());
        let values = match retain_graph {
            true => inputs.clone().zip(output.clone()),
            false => inputs.take().zip(output.take()),
        };
        let Some((saved, result)) = values else { return Err(self.freed(op.name())) };
        // A view shares its base's version but reads none of it.
        if op.row().class != Class::View {
            for value in saved.iter().chain([&result]) {
                if let Saved::Tensor(tensor, version) = value {
                    let now = tensor.ready()?.storage.version();
                    if now != *version {
                        let why = Why::Version { saved: *version, now };
                        return Err(Error::op(&format!("backward of {}", op.name()), why, self.loc));
                    }
                }
            }
        }
        Ok((saved, result))
    }

    fn freed(&self, name: &str) -> Error {
        Error::op(&format!("backward of {name}"), Why::Freed, self.loc)
    }
}

impl Drop for GradNode {
    /// Frees long tapes in a loop instead of by recursion.
    fn drop(&mut self) {
        if !self.edges.iter().any(|edge| matches!(edge, Edge::Node(..))) {
            return;
        }
        let mut stack = std::mem::take(&mut self.edges);
        while let Some(edge) = stack.pop() {
            if let Edge::Node(node, _) = edge
                && let Some(mut node) = Arc::into_inner(node)
            {
                stack.extend(std::mem::take(&mut node.edges));
            }
        }
    }
}
