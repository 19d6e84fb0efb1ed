//! The recorder hook: every public entry (an op, an in-place op, `backward`, a host read or write) passes
//! here first. While a recorder is set on the thread, ops are handed to it instead of being executed.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use kiln_ir::{Layout, Loc, Op, Result, Scalar, TensorTy};

use crate::autograd::Application;
use crate::{Tensor, TensorList};

/// Which run knows a tensor, and under which number: `run << 32 | variable`. Zero: none.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Tag(pub u64);

impl Tag {
    /// The tag of variable `variable` in run `run` (runs count from 1).
    #[inline]
    pub fn new(run: u32, variable: u32) -> Tag {
        Tag(u64::from(run) << 32 | u64::from(variable))
    }

    /// The run, 0 for none.
    #[inline]
    pub fn run(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The variable's number in the run.
    #[inline]
    pub fn variable(self) -> u32 {
        self.0 as u32
    }
}

/// An operand as the user gave it.
#[derive(Copy, Clone)]
pub enum Arg<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A number.
    Number(Scalar),
    /// A list of tensors.
    List(&'a TensorList),
}

/// An op the user asked for.
pub struct Call<'a> {
    /// The op with attributes.
    pub op: &'a Op,
    /// Its operands.
    pub args: &'a [Arg<'a>],
    /// Whether the first operand is changed in place.
    pub in_place: bool,
    /// Whether gradients are being recorded.
    pub grad_enabled: bool,
    /// The user's line.
    pub loc: Loc,
}

/// What an op gives.
pub enum Output {
    /// A tensor (for in-place ops: the target).
    Tensor(Tensor),
    /// A list.
    List(TensorList),
}

/// What `grad` was asked for, or `backward`, which has no inputs.
#[derive(Copy, Clone)]
pub struct GradRequest<'a> {
    /// What is differentiated.
    pub outputs: &'a [&'a Tensor],
    /// With respect to what.
    pub inputs: &'a [&'a Tensor],
    /// The gradients to start from: one for each output, or none at all.
    pub weights: &'a [Option<&'a Tensor>],
    /// Keep the tape for another pass.
    pub retain_graph: bool,
    /// Put the pass itself on the tape.
    pub create_graph: bool,
    /// An input that the outputs don't depend on is no error.
    pub allow_unused: bool,
    /// Nothing but what is asked for: no hook runs, no gradient is retained, and custom functions are not gone
    /// through. For a run that sees to all this itself.
    pub quiet: bool,
    /// Results of custom functions that the pass does not go through: it went on from their inputs already.
    pub closed: &'a [&'a Tensor],
    /// The user's line.
    pub loc: Loc,
}

/// A touch of a tensor's elements by the host.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// Elements are read: `item`, `to_vec`.
    Read,
    /// Elements are read for a text: the caller's line is not known, and an error does not reach the caller, so it
    /// must be the run's.
    Print,
    /// Elements are written by the host.
    Write,
    /// The tensor's autograd state is changed or read: `requires_grad_`.
    State,
    /// A pass through the tensor's tape is going to be differentiated itself: the tape must be eager's, op by op.
    Tape,
}

/// Takes ops while a compiled function runs.
pub trait Recorder: Send + Sync {
    /// An op, not in place, that gives a tensor, if it is the very one expected next. `None` says nothing: the
    /// op is to be handed to `call` then.
    fn replay(&self, _call: &Call<'_>) -> Option<Tensor> {
        None
    }
    /// The same for an op that changes a tensor in place; false says nothing.
    fn replay_in_place(&self, _call: &Call<'_>) -> bool {
        false
    }
    /// An op or in-place op.
    fn call(&self, call: &Call<'_>) -> Result<Output>;
    /// `backward()` on the request's outputs.
    fn backward(&self, request: &GradRequest<'_>) -> Result<()>;
    /// `grad()`, if the recorder takes it; `None` says nothing: it is run by the eager engine then, which asks
    /// for access to every tensor.
    fn grad(&self, _request: &GradRequest<'_>) -> Result<Option<Vec<Option<Tensor>>>> {
        Ok(None)
    }
    /// A leaf is about to be told whether it requires a gradient.
    fn requires_grad(&self, tensor: &Tensor, _on: bool, loc: Loc) -> Result<()> {
        self.access(tensor, Access::State, "requires_grad_", loc)
    }
    /// `retain_grad()`; true if the recorder will see to it.
    fn retain_grad(&self, tensor: &Tensor, loc: Loc) -> Result<bool> {
        self.access(tensor, Access::State, "retain_grad", loc).map(|()| false)
    }
    /// A custom function is about to run whose result is to be differentiated. True if the recorder takes it:
    /// then the ops of its forward come, and `apply` after them.
    fn begin_function(&self, _name: &str, _inputs: &[&Tensor], _loc: Loc) -> Result<bool> {
        Ok(false)
    }
    /// The forward of a custom function was run.
    fn apply(&self, application: Application<'_>) -> Result<()> {
        application.put_on_tape();
        Ok(())
    }
    /// The host is about to touch elements: afterwards the tensor is ready and nothing about it is pending.
    fn access(&self, tensor: &Tensor, access: Access, what: &'static str, loc: Loc) -> Result<()>;
    /// The type of a lazy tensor of this run.
    fn ty(&self, tensor: &Tensor) -> Option<TensorTy>;
    /// How the elements of a lazy tensor of this run will lie.
    fn layout(&self, tensor: &Tensor) -> Option<Layout>;
    /// Someone touches memory that this run uses: finish what is pending, unless it is the run's own thread.
    fn settle(&self) -> Result<()>;
    /// Another thread, or code outside the run, needs a tensor of this run: finish what is pending.
    fn force(&self) -> Result<()>;
}

type Current = Option<*const (dyn Recorder + 'static)>;

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(None) };
    /// How many scopes are open.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether a scope ended before one that began after it.
    static DISORDER: Cell<bool> = const { Cell::new(false) };
}

static RUNS: Mutex<Option<FxHashMap<u32, Weak<dyn Recorder>>>> = Mutex::new(None);
/// How many runs there are: with none (the usual case for eager code) nothing needs to be looked up.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Hands the recorder of this thread, if one is set, to `body`.
#[inline]
pub fn with_current<R>(body: impl FnOnce(Option<&dyn Recorder>) -> R) -> R {
    // SAFETY: the pointer is set only by `Scope`, which keeps the recorder alive on this thread until it is
    // unset again (for ever, if scopes don't end in the order they began): the recorder outlives `body`.
    body(CURRENT.get().map(|recorder| unsafe { &*recorder }))
}

/// How often any tensor's data was replaced.
static REPLACEMENTS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The count when this thread's recorder was set, if one is (switched off or not).
    static SINCE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A tensor's data is about to be replaced.
pub(crate) fn note_replacement() {
    REPLACEMENTS.fetch_add(1, Ordering::Release);
}

/// Whether any data was replaced since this thread's recorder was set: what it checked of its inputs may no longer
/// be true. To be asked after the inputs' memory was looked up.
pub(crate) fn replaced_meanwhile() -> bool {
    SINCE.get().is_some_and(|since| REPLACEMENTS.load(Ordering::Acquire) != since)
}

/// Sets a recorder on this thread for as long as the value lives; scopes nest.
pub struct Scope {
    previous: Current,
    since: Option<u64>,
    /// Keeps the recorder alive; `None` for a scope that switches recording off.
    recorder: Option<Arc<dyn Recorder>>,
    /// Which of the open scopes it is.
    depth: u32,
    /// Scopes must end on the thread and in the order they began.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Scope {
    /// Records with this recorder until dropped.
    pub fn enter(recorder: Arc<dyn Recorder>) -> Scope {
        Scope::begin(Some(recorder))
    }

    /// Records nothing until dropped: ops run eagerly.
    pub fn suspend() -> Scope {
        Scope::begin(None)
    }

    fn begin(recorder: Option<Arc<dyn Recorder>>) -> Scope {
        let previous = CURRENT.replace(recorder.as_ref().map(Arc::as_ptr));
        let since = SINCE.get();
        // A scope that records nothing checks nothing: the one around it counts on.
        if recorder.is_some() {
            SINCE.set(Some(REPLACEMENTS.load(Ordering::Acquire)));
        }
        let depth = DEPTH.get() + 1;
        DEPTH.set(depth);
        Scope { previous, since, recorder, depth, _not_send: std::marker::PhantomData }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if DEPTH.get() != self.depth {
            DISORDER.set(true);
        }
        if DISORDER.get() {
            // A scope that is still open may go back to this recorder, which must not die.
            std::mem::forget(self.recorder.take());
        }
        CURRENT.set(self.previous);
        SINCE.set(self.since);
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Makes a run known, so that whoever meets one of its lazy tensors can ask it to finish.
pub fn register(run: u32, recorder: Weak<dyn Recorder>) {
    if RUNS.lock().get_or_insert_default().insert(run, recorder).is_none() {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

/// Forgets a run.
pub fn unregister(run: u32) {
    if RUNS.lock().as_mut().and_then(|runs| runs.remove(&run)).is_some() {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The run that knows the tensors with a tag, while it goes on.
pub fn run_of(tag: Tag) -> Option<Arc<dyn Recorder>> {
    RUNS.lock().as_ref().and_then(|runs| runs.get(&tag.run()).and_then(Weak::upgrade))
}

/// Makes the run of a tag finish what is pending.
pub fn force(tag: Tag) -> Result<()> {
    run_of(tag).map_or(Ok(()), |recorder| recorder.force())
}

/// An op is about to run on a thread without a recorder: runs of other threads that have its operands' memory
/// in use finish first, so that everything happens in the order in which the program asked for it. Not inside
/// a scope: a run that waits for another while it finishes could wait for ever.
#[inline]
pub(crate) fn settle(args: &[Arg<'_>]) -> Result<()> {
    if COUNT.load(Ordering::Relaxed) == 0 || DEPTH.get() > 0 {
        return Ok(());
    }
    for arg in args {
        match arg {
            Arg::Tensor(tensor) => settle_tensor(tensor)?,
            Arg::List(list) => list.try_items().unwrap_or_default().iter().try_for_each(settle_tensor)?,
            Arg::Number(_) => {}
        }
    }
    Ok(())
}

fn settle_tensor(tensor: &Tensor) -> Result<()> {
    match tensor.try_ready() {
        Some(ready) if ready.storage.tag() != 0 => {
            run_of(Tag(ready.storage.tag())).map_or(Ok(()), |recorder| recorder.settle())
        }
        _ => Ok(()),
    }
}

/// The host is about to touch a tensor's elements: asks the recorder, then the tensor's run, to finish.
pub(crate) fn host_access(tensor: &Tensor, access: Access, what: &'static str, loc: Loc) -> Result<()> {
    with_current(|recorder| match recorder {
        Some(r) => r.access(tensor, access, what, loc),
        None => settle(&[Arg::Tensor(tensor)]),
    })?;
    if tensor.is_lazy() {
        force(tensor.tag())?;
    }
    Ok(())
}
