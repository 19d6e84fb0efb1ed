//! Reverse-mode differentiation of eager programs: ops leave nodes on a tape, `backward` walks it.
//!
//! The rules are the op table's; the engine runs them through [`Emit`](kiln_ir::Emit) on real tensors.

mod anomaly;
mod deferred;
mod emit;
mod engine;
mod function;
mod mode;
mod node;
mod partial;
mod reads;
mod sum;
mod views;
mod watch;

use std::sync::atomic::Ordering;

use kiln_ir::{Error, Loc, Result, Why, carries_gradient};

pub use anomaly::{AnomalyMode, detect_anomaly};
pub use emit::EagerEmit;
pub use engine::deliver;
pub use function::{Application, Context, Function, gradients_of};
pub use mode::{GradMode, enable_grad, grad_enabled, no_grad};
pub(crate) use node::{GradNode, as_before, begin, copies_in};
pub use node::{TapeFunction, attach};
pub use partial::{GradOptions, backward_all, check_outputs, goes_on, grad, run_backward, run_grad};
pub use watch::{HookHandle, through_hooks};

pub(crate) use views::Base;

use crate::Tensor;
use crate::dynamic::DynamicDim;
use crate::handle::Handle;
use crate::hook::{self, Access, GradRequest};

/// What autograd knows of a tensor. In this order: replay looks at the first field, which shares a cache line
/// with the count.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Record {
    /// The rest, which few tensors have.
    pub(crate) meta: Option<Box<Meta>>,
    /// How the tensor was computed.
    pub(crate) history: Option<(Handle<GradNode>, usize)>,
    /// What it is a view of.
    pub(crate) base: Option<Base>,
}

/// What a user asked of autograd for a tensor, or got.
#[derive(Default)]
pub(crate) struct Meta {
    /// The accumulated gradient of a leaf.
    pub(crate) grad: Option<Tensor>,
    /// The parameter's name in its model.
    pub(crate) label: Option<String>,
    /// Dims whose sizes will change.
    pub(crate) dynamic: Vec<DynamicDim>,
    /// What users asked to see of a leaf's gradient.
    pub(crate) watchers: parking_lot::Mutex<watch::Watchers>,
    /// The gradient of a tensor that is not a leaf, where it was asked for.
    pub(crate) retained: Option<watch::Retained>,
    /// A leaf that a run is yet to make: the program told it to require a gradient.
    pub(crate) lazy_leaf: bool,
    /// What `set_data` gave a leaf.
    pub(crate) data: Option<std::sync::Arc<crate::tensor::Replaced>>,
}

impl Tensor {
    pub(crate) fn with_meta<R>(&self, body: impl FnOnce(&mut Meta) -> R) -> R {
        body(self.slot.record.lock().meta.get_or_insert_default())
    }

    pub(crate) fn history(&self) -> Option<(Handle<GradNode>, usize)> {
        if self.slot.is_view.load(Ordering::Relaxed) {
            self.renew();
        }
        if !self.slot.on_tape.load(Ordering::Acquire) {
            return None;
        }
        self.slot.record.lock().history.clone()
    }

    /// From now on the tensor is the result with this number of a node.
    pub(crate) fn set_history(&self, node: Handle<GradNode>, output: usize) {
        let before = self.slot.record.lock().history.replace((node, output));
        self.slot.on_tape.store(true, Ordering::Release);
        drop(before);
    }

    /// From now on the tensor is the result of a node, and wants a gradient.
    pub(crate) fn become_result(&mut self, node: Handle<GradNode>) {
        match self.slot.get_mut() {
            // New: nobody else can see it yet.
            Some(slot) => slot.become_result(node),
            None => {
                self.mark_requires_grad(true);
                self.set_history(node, 0);
            }
        }
    }

    /// The op that made it, if gradients flow through that.
    pub(crate) fn gradient_source(&self) -> Option<String> {
        self.history().map(|(node, _)| node.name().to_string())
    }

    /// Whether it was made by the user rather than by a differentiated op.
    pub fn is_leaf(&self) -> bool {
        if self.is_lazy() {
            // A run makes its tensors by ops.
            let told = || self.slot.record.lock().meta.as_ref().is_some_and(|meta| meta.lazy_leaf);
            return !self.requires_grad() || told();
        }
        if self.slot.is_view.load(Ordering::Relaxed) {
            self.renew();
        }
        !self.slot.on_tape.load(Ordering::Acquire)
    }

    /// Asks for a gradient (or no longer does).
    #[track_caller]
    pub fn requires_grad_(&self, on: bool) -> Result<&Tensor> {
        let loc = Loc::caller();
        let ty = self.ty();
        if on && !carries_gradient(&ty.clone().into()) {
            let why = Why::DType {
                argument: "a tensor that requires a gradient",
                expected: "floating point",
                got: ty.dtype,
            };
            return Err(Error::op("requires_grad_", why, loc));
        }
        if !self.is_leaf() {
            let why = Why::NotLeaf { what: "the tensor".into() };
            return Err(Error::op("requires_grad_", why, loc));
        }
        if self.requires_grad() != on {
            hook::with_current(|recorder| match recorder {
                Some(recorder) => recorder.requires_grad(self, on, loc),
                None => hook::host_access(self, Access::State, "requires_grad_", loc),
            })?;
            self.mark_leaf(on);
        }
        Ok(self)
    }

    /// What `requires_grad_` does to a leaf, without any check: for runs, which know.
    pub(crate) fn mark_leaf(&self, on: bool) {
        self.forget_base();
        self.mark_requires_grad(on);
    }

    /// Sets the flag of a leaf that a run is yet to make: for that run.
    pub(crate) fn mark_lazy_leaf(&self, on: bool) {
        self.with_meta(|meta| meta.lazy_leaf = on);
        self.mark_requires_grad(on);
    }

    /// The gradient that `backward` left, if any.
    pub fn grad(&self) -> Option<Tensor> {
        self.slot.record.lock().meta.as_ref().and_then(|meta| match &meta.retained {
            Some(cell) => cell.lock().clone(),
            None => meta.grad.clone(),
        })
    }

    /// Sets or clears the gradient.
    pub fn set_grad(&self, grad: Option<Tensor>) {
        let mut record = self.slot.record.lock();
        if grad.is_none() && record.meta.is_none() {
            return;
        }
        let meta = record.meta.get_or_insert_default();
        let old = match &meta.retained {
            Some(cell) => std::mem::replace(&mut *cell.lock(), grad),
            None => std::mem::replace(&mut meta.grad, grad),
        };
        // Its own memory is freed without the lock.
        drop(record);
        drop(old);
    }

    /// The parameter's name in its model, if it was given one.
    pub fn label(&self) -> Option<String> {
        self.slot.record.lock().meta.as_ref().and_then(|meta| meta.label.clone())
    }

    /// Names the tensor for error messages; of two names the longer (from further up the model) stays.
    pub fn set_label(&self, label: &str) {
        self.with_meta(|meta| {
            if meta.label.as_ref().is_none_or(|old| old.len() < label.len()) {
                meta.label = Some(label.to_string());
            }
        });
    }

    /// Computes the gradient of this single number with respect to the leaves it was computed from, and adds
    /// it to their `grad`.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        backward(&[self], &[], GradOptions::default(), Loc::caller())
    }

    /// `backward` for any shape, from a given gradient; keeps the tape for another pass if told to.
    #[track_caller]
    pub fn backward_with(&self, gradient: Option<&Tensor>, retain_graph: bool) -> Result<()> {
        let options = GradOptions { retain_graph: Some(retain_graph), ..GradOptions::default() };
        backward(&[self], &[gradient], options, Loc::caller())
    }

    /// Becomes what `other` is: its memory, its place on the tape. Only for a lazy tensor whose run was
    /// executed op by op.
    pub(crate) fn adopt(&self, other: &Tensor) -> Result<()> {
        self.publish(other.ready()?.clone());
        self.mark_requires_grad(other.requires_grad());
        self.adopt_base(other);
        if let Some(history) = other.history() {
            self.set_history(history.0, history.1);
        }
        Ok(())
    }

    /// The same elements, cut off from the tape.
    #[track_caller]
    pub fn detach(&self) -> Result<Tensor> {
        crate::dispatch::dispatch_tensor(
            &kiln_ir::Op::Detach {},
            &[hook::Arg::Tensor(self)],
            false,
            Loc::caller(),
        )
    }
}

fn backward(outputs: &[&Tensor], weights: &[Option<&Tensor>], options: GradOptions, loc: Loc) -> Result<()> {
    let request = GradRequest {
        outputs,
        inputs: &[],
        weights,
        retain_graph: options.retain_graph.unwrap_or(options.create_graph),
        create_graph: options.create_graph,
        allow_unused: true,
        quiet: false,
        closed: &[],
        loc,
    };
    match hook::with_current(|recorder| recorder.map(|recorder| recorder.backward(&request))) {
        Some(result) => result,
        None => run_backward(&request),
    }
}

/// Goes on with a backward pass that a run began: each tensor with the gradient that reached it.
pub fn backward_from(seeds: &[(Tensor, Tensor)], retain_graph: bool, loc: Loc) -> Result<()> {
    let _eager = hook::Scope::suspend();
    let _mode = no_grad();
    engine::run(seeds, engine::Pass::new(retain_graph, false), loc).map(drop)
}

/// Whether a backward pass from these tensors on is sure to succeed.
pub fn goes_through(tensors: &[Tensor]) -> bool {
    engine::goes_through(tensors)
}

/// What `backward` may be asked of; the same for eager and captured programs.
pub fn check_backward(root: &Tensor, gradient: Option<&Tensor>, loc: Loc) -> Result<()> {
    let ty = root.ty();
    let fail = |why| Err(kiln_ir::Op::Detach {}.error(&[ty.clone().into()], why, loc).named("backward"));
    if !root.requires_grad() {
        return fail(Why::NoGradient);
    }
    match gradient {
        None if ty.shape.numel() != 1 => fail(Why::ImplicitGradient { shape: ty.shape.clone() }),
        Some(g) if g.ty() != ty => fail(Why::ty("the gradient", None, ty.clone(), g.ty())),
        _ => Ok(()),
    }
}
