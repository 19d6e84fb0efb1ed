//! Nodes of the tape.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_ir::{DType, Device, Error, Grad, Loc, Op, Reads, Result, Scalar, Shape, TensorTy, Ty, Why};

use super::function::Custom;
use super::reads::{reads, reads_of_one_type};
use super::watch::Watchers;
use crate::Tensor;
use crate::dispatch::{arg_tys, clone_of};
use crate::handle::{Handle, Recycle, free_list};
use crate::hook::{Arg, Call};

/// Where a gradient goes.
#[derive(Clone)]
pub(crate) enum Edge {
    /// Nowhere.
    None,
    /// Into a leaf's `grad`.
    Leaf(Tensor),
    /// On to the node that computed the operand, as the gradient of its result with this number.
    Node(Handle<GradNode>, usize),
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
    /// Only its type was kept, which is the result's.
    LikeResult,
    /// Only its type was kept. Boxed: most are like the result, and nodes stay small.
    Type(Box<Ty>),
    Number(Scalar),
    /// A tensor, cut off from the tape, and its storage's version when it was saved.
    Tensor(Tensor, u64),
}

impl Saved {
    fn tensor(tensor: &Tensor) -> Result<Saved> {
        let ready = tensor.ready()?.clone();
        let version = ready.storage.version();
        Ok(Saved::Tensor(Tensor::from_ready(ready), version))
    }

    fn ty(ty: Ty, result: &TensorTy) -> Saved {
        match &ty {
            Ty::Tensor(ty) if ty == result => Saved::LikeResult,
            _ => Saved::Type(Box::new(ty)),
        }
    }
}

/// What a rule may read of a call.
#[derive(Clone)]
pub(crate) struct Values {
    pub(crate) inputs: SmallVec<[Saved; 3]>,
    pub(crate) output: Saved,
    /// The result's type.
    pub(crate) ty: TensorTy,
}

impl Default for Values {
    fn default() -> Values {
        let ty = TensorTy { dtype: DType::F32, device: Device::Cpu, shape: Shape::default() };
        Values { inputs: SmallVec::new(), output: Saved::LikeResult, ty }
    }
}

/// A compiled function on the tape.
pub trait TapeFunction: Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &str;
    /// From the gradients of the outputs (`None`: zero), those of the inputs.
    fn backward(&self, grads: &[Option<Tensor>], retain_graph: bool) -> Result<Vec<Option<Tensor>>>;
    /// Whether `backward` is sure to succeed, whichever gradients arrive.
    fn goes_through(&self) -> bool;
}

/// What is differentiated.
pub(crate) enum Rule {
    /// An op, by its row, from what was saved.
    Op(Op),
    /// A compiled function.
    Function(Arc<dyn TapeFunction>),
    /// A function that a user wrote.
    Custom(Box<Custom>),
}

/// A computation that gradients flow back through. Nodes are used again, and filled where they are: the parts of
/// an op are not moved.
pub(crate) struct GradNode {
    /// Counts nodes: a node's operands were made before it.
    pub(crate) order: u64,
    pub(crate) outputs: usize,
    pub(crate) loc: Loc,
    pub(crate) rule: Rule,
    pub(crate) edges: SmallVec<[Edge; 3]>,
    /// What users asked to see of the gradients that arrive here; most nodes have none.
    pub(crate) watchers: OnceLock<Arc<Mutex<Watchers>>>,
    saved: Mutex<Store>,
}

/// What a node saved.
#[derive(Default)]
struct Store {
    /// Whether it is still there.
    kept: bool,
    values: Values,
}

impl Default for GradNode {
    fn default() -> GradNode {
        GradNode {
            order: 0,
            outputs: 1,
            loc: Loc::UNKNOWN,
            rule: Rule::Op(Op::Detach {}),
            edges: SmallVec::new(),
            watchers: OnceLock::new(),
            saved: Mutex::default(),
        }
    }
}

impl Recycle for GradNode {
    /// Frees long tapes in a loop instead of by recursion.
    fn clear(&mut self) {
        self.rule = Rule::Op(Op::Detach {});
        self.watchers.take();
        let Store { kept, values } = self.saved.get_mut();
        *kept = false;
        empty(&mut values.inputs);
        values.output = Saved::LikeResult;
        let below = |edges: &[Edge]| edges.iter().any(|edge| matches!(edge, Edge::Node(..)));
        if !below(&self.edges) {
            return empty(&mut self.edges);
        }
        let mut stack = std::mem::take(&mut self.edges);
        while let Some(edge) = stack.pop() {
            if let Edge::Node(mut node, _) = edge
                && let Some(node) = node.get_mut()
                && below(&node.edges)
            {
                stack.append(&mut node.edges);
            }
        }
    }
    free_list!(NODES, GradNode);
}

/// Drops the items, and memory beyond the usual.
fn empty<T>(list: &mut SmallVec<[T; 3]>) {
    if list.spilled() { *list = SmallVec::new() } else { list.clear() }
}

/// The number of a new node: no other has it, and it is larger than those of the nodes its operands come from.
/// Threads take the numbers in blocks, so that counting needs no atomic step.
fn next_order(edges: &[Edge]) -> u64 {
    const BLOCK: u64 = 1 << 10;
    static BLOCKS: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        /// What is left of this thread's block.
        static LEFT: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    }
    let (mut next, mut end) = LEFT.get();
    let later = |edge: &Edge| matches!(edge, Edge::Node(node, _) if node.order >= next);
    if next == end || edges.iter().any(later) {
        // Larger than all numbers given out so far, on whichever thread.
        next = BLOCKS.fetch_add(BLOCK, Ordering::Relaxed);
        end = next + BLOCK;
    }
    LEFT.set((next + 1, end));
    next
}

/// Copies of operands that lie in the memory which an in-place op is about to change, where `wanted` of them.
pub(crate) fn copies_in(
    call: &Call<'_>,
    grad_enabled: bool,
    wanted: impl Fn(usize) -> bool,
) -> Result<SmallVec<[Option<Tensor>; 4]>> {
    let mut kept = SmallVec::new();
    let Some(Arg::Tensor(target)) = call.args.first() else { return Ok(kept) };
    let memory = target.ready()?.storage.address();
    for (i, arg) in call.args.iter().enumerate() {
        kept.push(match arg {
            Arg::Tensor(t) if wanted(i) && t.ready()?.storage.address() == memory => {
                Some(clone_of(t, grad_enabled, call.loc)?)
            }
            _ => None,
        });
    }
    Ok(kept)
}

/// The operands as they were before the op, given [`copies_in`].
pub(crate) fn as_before<'a>(args: &[Arg<'a>], kept: &'a [Option<Tensor>]) -> SmallVec<[Arg<'a>; 4]> {
    let kept = kept.iter().map(Option::as_ref).chain(std::iter::repeat(None));
    args.iter().zip(kept).map(|(arg, kept)| kept.map_or(*arg, Arg::Tensor)).collect()
}

/// A node of an op that is about to run, with the edges to its operands, and what its rule will read.
pub(crate) struct Started {
    node: Handle<GradNode>,
    pub(crate) reads: Reads,
}

/// Puts an op that is about to run on the tape. `of_one_type`: every tensor among its operands is of the result's type.
pub(crate) fn begin(call: &Call<'_>, of_one_type: bool) -> Result<Started> {
    if let Grad::NotDifferentiable(reason) = call.op.row().grad {
        let why = Why::NotDifferentiable { reason };
        return Err(call.op.error(&arg_tys(call.args)?, why, call.loc));
    }
    let mut checked = Ok(());
    let node = Handle::new(|node: &mut GradNode| {
        for arg in call.args {
            let Arg::Tensor(t) = arg else {
                node.edges.push(Edge::None);
                continue;
            };
            let edge = Edge::to(t);
            if matches!(edge, Edge::Node(..)) {
                checked = std::mem::replace(&mut checked, Ok(())).and_then(|()| check_view(t, call));
            }
            node.edges.push(edge);
        }
        node.order = next_order(&node.edges);
        node.outputs = 1;
        node.rule = Rule::Op(call.op.clone());
        node.loc = call.loc;
    });
    checked?;
    let reads = if of_one_type { reads_of_one_type(call, &node.edges) } else { reads(call, &node.edges) }?;
    Ok(Started { node, reads })
}

/// A view whose base was changed since, unseen, has a history that is no longer true.
fn check_view(tensor: &Tensor, call: &Call<'_>) -> Result<()> {
    if !tensor.is_stale() {
        return Ok(());
    }
    let ready = tensor.ready()?;
    let (now, saved) = (ready.storage.version(), ready.view_version.unwrap_or_default());
    Err(Error::op(call.op.name(), Why::Version { saved, now }, call.loc))
}

impl Started {
    /// The op has run on these operands: saves what its rule reads, and `result` remembers how it was computed.
    /// Without `tys` every tensor among the operands is of the result's type.
    pub(crate) fn finish(
        self,
        args: &[Arg<'_>],
        tys: Option<SmallVec<[Ty; 4]>>,
        result: &mut Tensor,
    ) -> Result<()> {
        let Started { mut node, reads } = self;
        if let Some(node) = node.get_mut() {
            let Store { kept, values } = node.saved.get_mut();
            let ready = result.ready()?;
            (values.ty.dtype, values.ty.device) = (ready.dtype, ready.device);
            values.ty.shape = ready.layout.shape.clone();
            let mut tys = tys.map(SmallVec::into_iter);
            for (i, arg) in args.iter().enumerate() {
                let operand = tys.as_mut().and_then(Iterator::next);
                values.inputs.push(match (arg, operand) {
                    (Arg::Number(x), _) => Saved::Number(*x),
                    (Arg::Tensor(t), _) if reads.operand(i) => Saved::tensor(t)?,
                    (_, Some(ty)) => Saved::ty(ty, &values.ty),
                    (_, None) => Saved::LikeResult,
                });
            }
            if reads.result {
                values.output = Saved::tensor(result)?;
            }
            *kept = true;
        }
        result.become_result(node);
        Ok(())
    }
}

/// Puts a function on the tape: gradients of `outputs` flow through it to `inputs`.
pub fn attach(function: Arc<dyn TapeFunction>, inputs: &[Tensor], outputs: &[Tensor], loc: Loc) {
    let edges = inputs.iter().map(Edge::to).collect();
    put_on_tape(Rule::Function(function), edges, outputs, loc);
}

/// Makes tensors the results of a node with this rule; those that can't carry a gradient stay as they are.
pub(crate) fn put_on_tape(rule: Rule, edges: SmallVec<[Edge; 3]>, outputs: &[Tensor], loc: Loc) {
    let node = Handle::new(|node: &mut GradNode| {
        node.edges = edges;
        node.order = next_order(&node.edges);
        node.outputs = outputs.len();
        node.rule = rule;
        node.loc = loc;
    });
    for (i, output) in outputs.iter().enumerate().filter(|(_, output)| output.dtype().is_float()) {
        output.mark_requires_grad(true);
        output.set_history(node.clone(), i);
    }
}

impl GradNode {
    /// The op or function that it differentiates.
    pub(crate) fn name(&self) -> &str {
        match &self.rule {
            Rule::Op(op) => op.name(),
            Rule::Function(function) => function.name(),
            Rule::Custom(custom) => custom.name(),
        }
    }

    /// What the rule may read, or why it may not. Takes it unless the tape is kept.
    pub(crate) fn saved(&self, retain_graph: bool) -> Result<Values> {
        let Rule::Op(op) = &self.rule else { return Err(self.freed("function")) };
        let values = {
            let mut saved = self.saved.lock();
            if !saved.kept {
                return Err(self.freed(op.name()));
            }
            saved.kept = retain_graph;
            if retain_graph { saved.values.clone() } else { std::mem::take(&mut saved.values) }
        };
        for value in values.inputs.iter().chain([&values.output]) {
            if let Saved::Tensor(tensor, version) = value {
                let now = tensor.ready()?.storage.version();
                if now != *version {
                    let why = Why::Version { saved: *version, now };
                    return Err(Error::op(&format!("backward of {}", op.name()), why, self.loc));
                }
            }
        }
        Ok(values)
    }

    fn freed(&self, name: &str) -> Error {
        Error::op(&format!("backward of {name}"), Why::Freed, self.loc)
    }
}
