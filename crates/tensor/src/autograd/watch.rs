//! Looking at gradients on their way: hooks, and gradients of tensors that are not leaves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Result, Why};

use crate::Tensor;
use crate::hook::{self, Access};

/// What a hook does with a gradient: nothing (`None`), or put another in its place.
pub(crate) type Hook = Arc<dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync>;

/// A place for the gradient of a tensor that is not a leaf. Node and tensor share it, so that neither keeps
/// the other alive.
pub(crate) type Retained = Arc<Mutex<Option<Tensor>>>;

/// Hooks, in the order they were set, and the places for retained gradients, each with the number of the
/// result it belongs to.
#[derive(Default)]
pub(crate) struct Watchers {
    hooks: Vec<(usize, u64, Hook)>,
    retained: Vec<(usize, Retained)>,
}

impl Watchers {
    pub(crate) fn is_empty(&self) -> bool {
        self.hooks.is_empty() && self.retained.is_empty()
    }

    fn of(&self, output: usize) -> (Vec<Hook>, Vec<Retained>) {
        let hooks = self.hooks.iter().filter(|(at, ..)| *at == output).map(|(.., hook)| hook.clone());
        let retained = self.retained.iter().filter(|(at, _)| *at == output).map(|(_, cell)| cell.clone());
        (hooks.collect(), retained.collect())
    }
}

/// Runs the hooks of one result over its gradient and keeps a copy where one is wanted. User code runs
/// without any lock held.
pub(crate) fn pass_through(watchers: &Mutex<Watchers>, output: usize, grad: Tensor) -> Result<Tensor> {
    let (hooks, retained) = {
        let watchers = watchers.lock();
        if watchers.is_empty() {
            return Ok(grad);
        }
        watchers.of(output)
    };
    let mut grad = grad;
    for hook in hooks {
        if let Some(other) = hook(&grad)? {
            if other.ty() != grad.ty() {
                let why = Why::ty("the gradient returned", None, grad.ty(), other.ty());
                return Err(Error::op("a gradient hook", why, Loc::UNKNOWN));
            }
            grad = other;
        }
    }
    for cell in retained {
        // As in PyTorch a second pass adds to what the first one left.
        let before = cell.lock().take();
        let sum = match before {
            Some(before) => before.add(&grad)?,
            None => grad.clone(),
        };
        *cell.lock() = Some(sum);
    }
    Ok(grad)
}

/// Runs the hooks of a leaf, which holds them itself, over its gradient.
pub fn through_hooks(leaf: &Tensor, grad: Tensor) -> Result<Tensor> {
    if !leaf.has_hooks() {
        return Ok(grad);
    }
    let watchers = leaf.with_meta(|meta| {
        let now = meta.watchers.lock();
        Watchers { hooks: now.hooks.clone(), retained: Vec::new() }
    });
    pass_through(&Mutex::new(watchers), 0, grad)
}

/// Takes a hook away again, when asked to or not at all.
pub struct HookHandle {
    place: Place,
    id: u64,
}

enum Place {
    Leaf(Tensor),
    Node(Weak<Mutex<Watchers>>),
}

impl HookHandle {
    /// The hook is not called any more.
    pub fn remove(self) {
        let take = |watchers: &mut Watchers| watchers.hooks.retain(|(_, id, _)| *id != self.id);
        match &self.place {
            Place::Leaf(leaf) => leaf.with_meta(|meta| take(&mut meta.watchers.lock())),
            Place::Node(node) => {
                if let Some(watchers) = node.upgrade() {
                    take(&mut watchers.lock());
                }
            }
        }
    }
}

impl Tensor {
    /// Calls `hook` with this tensor's gradient whenever a backward pass computes it; what it returns, if
    /// anything, takes the gradient's place.
    ///
    /// ```
    /// use kiln_tensor::Tensor;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::from_slice(&[1.0f32, 2.0])?;
    /// x.requires_grad_(true)?;
    /// let handle = x.register_hook(|grad| grad.mul(10.0).map(Some))?;
    /// x.mul(3.0)?.sum()?.backward()?;
    /// assert_eq!(x.grad().map(|g| g.to_vec::<f32>()).transpose()?, Some(vec![30.0, 30.0]));
    /// handle.remove();
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn register_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let loc = Loc::caller();
        hook::host_access(self, Access::State, "register_hook", loc)?;
        if !self.requires_grad() {
            return Err(Error::op("register_hook", Why::NoGradient, loc));
        }
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let place = match self.history() {
            Some((node, output)) => {
                let watchers = node.watchers.get_or_init(Arc::default);
                watchers.lock().hooks.push((output, id, Arc::new(hook)));
                Place::Node(Arc::downgrade(watchers))
            }
            None => {
                self.with_meta(|meta| meta.watchers.lock().hooks.push((0, id, Arc::new(hook))));
                Place::Leaf(self.clone())
            }
        };
        Ok(HookHandle { place, id })
    }

    /// Whether a hook waits for this leaf's gradient.
    pub(crate) fn has_hooks(&self) -> bool {
        self.slot.record.lock().meta.as_ref().is_some_and(|meta| !meta.watchers.lock().is_empty())
    }

    /// Keeps the gradient of a tensor that is not a leaf, for `grad()` to show.
    #[track_caller]
    pub fn retain_grad(&self) -> Result<()> {
        let loc = Loc::caller();
        if !self.requires_grad() {
            return Err(Error::op("retain_grad", Why::NoGradient, loc));
        }
        if self.is_leaf() || self.retains_grad() {
            return Ok(());
        }
        let taken = hook::with_current(|recorder| match recorder {
            Some(recorder) => recorder.retain_grad(self, loc),
            None => hook::host_access(self, Access::State, "retain_grad", loc).map(|()| false),
        })?;
        self.with_meta(|meta| meta.retained.get_or_insert_default().clone());
        if !taken {
            self.ready()?;
            self.watch_for_retained();
        }
        Ok(())
    }

    /// Whether `retain_grad` was asked of it.
    pub fn retains_grad(&self) -> bool {
        self.slot.record.lock().meta.as_ref().is_some_and(|meta| meta.retained.is_some())
    }

    /// Has the tape keep the gradient that `retain_grad` asked for: for a run that executed a recording op by op.
    pub(crate) fn watch_for_retained(&self) {
        let cell = self.slot.record.lock().meta.as_ref().and_then(|meta| meta.retained.clone());
        if let (Some(cell), Some((node, output))) = (cell, self.history()) {
            let mut watchers = node.watchers.get_or_init(Arc::default).lock();
            if !watchers.retained.iter().any(|(_, other)| Arc::ptr_eq(other, &cell)) {
                watchers.retained.push((output, cell));
            }
        }
    }
}
