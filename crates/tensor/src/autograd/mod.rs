//! Reverse-mode differentiation of eager programs: ops leave nodes on a tape, `backward` walks it.
//!
//! The rules are the op table's; the engine runs them through [`Emit`](kiln_ir::Emit) on real tensors.

mod anomaly;
mod emit;
mod engine;
mod mode;
mod node;
mod partial;
mod watch;

use std::sync::atomic::Ordering;

use kiln_ir::{Error, Loc, Result, Why, carries_gradient};

pub use anomaly::{AnomalyMode, detect_anomaly};
pub use emit::EagerEmit;
pub use mode::{GradMode, enable_grad, grad_enabled, no_grad};
pub use node::{Function, attach};
pub(crate) use node::{GradNode, as_before, begin, finish, overwritten};
pub use partial::{GradOptions, backward_all, goes_on, grad, run_grad};
pub use watch::HookHandle;

use crate::Tensor;
use crate::dynamic::DynamicDim;
use crate::handle::Handle;
use crate::hook::{self, Access};

/// What autograd knows of a tensor. In this order: replay looks at the first field, which shares a cache line
/// with the count.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Record {
    /// The rest, which few tensors have.
    pub(crate) meta: Option<Box<Meta>>,
    /// How the tensor was computed.
    pub(crate) history: Option<(Handle<GradNode>, usize)>,
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
    /// What `set_data` gave a leaf, the last one counts.
    pub(crate) data: Vec<std::sync::Arc<crate::Ready>>,
}

impl Tensor {
    pub(crate) fn with_meta<R>(&self, body: impl FnOnce(&mut Meta) -> R) -> R {
        body(self.slot.record.lock().meta.get_or_insert_default())
    }

    pub(crate) fn history(&self) -> Option<(Handle<GradNode>, usize)> {
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
            return !self.requires_grad(); // a run makes its tensors by ops
        }
        !self.slot.on_tape.load(Ordering::Acquire)
    }

    /// Asks for a gradient (or no longer does).
    #[track_caller]
    pub fn requires_grad_(&self, on: bool) -> Result<&Tensor> {
        let loc = Loc::caller();
        hook::host_access(self, Access::State, "requires_grad_", loc)?;
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
            let why =
                Why::Other("only leaves can be told whether they require a gradient; use detach()".into());
            return Err(Error::op("requires_grad_", why, loc));
        }
        self.mark_requires_grad(on);
        Ok(self)
    }

    /// The gradient that `backward` left, if any.
    pub fn grad(&self) -> Option<Tensor> {
        self.slot.record.lock().meta.as_ref().and_then(|meta| match &meta.retained {
            Some(cell) => cell.lock().clone(),
            None => meta.grad.clone(),
        })
    }

    /// Puts or takes away the gradient.
    pub fn set_grad(&self, grad: Option<Tensor>) {
        match grad {
            Some(_) => self.with_meta(|meta| drop(std::mem::replace(&mut meta.grad, grad))),
            None => {
                let old = self.slot.record.lock().meta.as_mut().and_then(|meta| meta.grad.take());
                drop(old);
            }
        }
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
        backward(self, None, false, Loc::caller())
    }

    /// `backward` for any shape, from a given gradient; keeps the tape for another pass if told to.
    #[track_caller]
    pub fn backward_with(&self, gradient: Option<&Tensor>, retain_graph: bool) -> Result<()> {
        backward(self, gradient, retain_graph, Loc::caller())
    }

    /// Becomes what `other` is: its memory, its place on the tape. Only for a lazy tensor whose run was
    /// executed op by op.
    pub fn adopt(&self, other: &Tensor) -> Result<()> {
        self.publish(other.ready()?.clone());
        self.mark_requires_grad(other.requires_grad());
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

fn backward(root: &Tensor, gradient: Option<&Tensor>, retain_graph: bool, loc: Loc) -> Result<()> {
    let recorded =
        hook::with_current(|recorder| recorder.map(|r| r.backward(root, gradient, retain_graph, loc)));
    match recorded {
        Some(result) => result,
        None => run_backward(root, gradient, retain_graph, loc),
    }
}

/// Goes on with a backward pass that a run began: each tensor with the gradient that reached it.
pub fn backward_from(seeds: &[(Tensor, Tensor)], retain_graph: bool, loc: Loc) -> Result<()> {
    let _eager = hook::Scope::suspend();
    let _mode = no_grad();
    engine::run(seeds, engine::Pass::new(retain_graph, false), loc).map(drop)
}

/// Why a backward pass from these tensors on would fail, if it would: part of the tape was used up, or a saved
/// tensor was overwritten.
pub fn check_tape(tensors: &[Tensor]) -> Result<()> {
    engine::check(tensors)
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
        Some(g) if g.ty() != ty => fail(Why::InPlace { result: g.ty().to_string(), target: ty.to_string() }),
        _ => Ok(()),
    }
}

/// `backward` by the eager engine, whatever recorder is set.
pub fn run_backward(root: &Tensor, gradient: Option<&Tensor>, retain_graph: bool, loc: Loc) -> Result<()> {
    check_backward(root, gradient, loc)?;
    let _eager = hook::Scope::suspend();
    let _mode = no_grad();
    let ty = root.ty();
    let seed = match gradient {
        Some(g) => g.clone(),
        None => Tensor::full_in(ty.shape, 1.0, ty.dtype, ty.device, loc)?,
    };
    engine::run(&[(root.clone(), seed)], engine::Pass::new(retain_graph, false), loc).map(drop)
}
