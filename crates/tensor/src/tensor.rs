//! [`Tensor`]: one pointer to a counted slot that is *Ready* (storage and layout) or *Lazy* (a number in a
//! run that will make it ready).

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;

use kiln_ir::{DType, Device, Error, Layout, Loc, Op, Result, Shape, Strides, TensorTy, Ty, Why};

use crate::autograd::{GradNode, Record};
use crate::handle::{Handle, Recycle, free_list};
use crate::hook;
use crate::storage::Storage;

const LAZY: u8 = 0;
/// Somebody is about to make it ready.
const CLAIMED: u8 = 1;
const READY: u8 = 2;
/// Ready, with other data than it had first.
const REPLACED: u8 = 3;
/// Ready, with data that was replaced more than once.
const SWAPPED: u8 = 4;

/// What a ready tensor is: memory and how its elements lie there.
///
/// Kernels trust it: every element that the layout names lies inside the storage and is of the dtype. So only this
/// crate makes one from its parts; others ask for another layout by [`Ready::with_layout`], which looks.
#[derive(Clone)]
pub struct Ready {
    pub(crate) storage: Storage,
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// For a view: the storage's version when the view was made.
    pub(crate) view_version: Option<u64>,
}

impl Ready {
    /// The memory.
    #[inline]
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Sizes, strides, offset.
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the memory is.
    #[inline]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same memory and element type, its elements lying in another way. A layout that leaves the memory is a
    /// bug of the caller's.
    #[inline]
    pub fn with_layout(&self, layout: Layout) -> Result<Ready> {
        let elements = self.storage.bytes() / self.dtype.size();
        if layout.stays_inside(elements) {
            Ok(Ready { layout, storage: self.storage.clone(), ..*self })
        } else {
            Err(outside(&layout, elements))
        }
    }

    /// As a view of its storage's contents now, or as a tensor of its own.
    #[inline]
    pub fn as_view(self, is_view: bool) -> Ready {
        Ready { view_version: is_view.then(|| self.storage.version()), ..self }
    }

    /// The first element.
    pub fn pointer(&self) -> *mut u8 {
        self.storage.pointer().wrapping_add(self.layout.offset * self.dtype.size())
    }

    /// The tensor's type.
    pub fn ty(&self) -> TensorTy {
        TensorTy { dtype: self.dtype, device: self.device, shape: self.layout.shape.clone() }
    }
}

#[cold]
fn outside(layout: &Layout, elements: usize) -> Error {
    Error::bug(format!("{layout:?} in a memory of {elements} elements"))
}

/// A ready tensor as it was when somebody looked: data may be replaced at any time.
pub enum Seen<'a> {
    /// Data that stays as long as the tensor.
    Kept(&'a Ready),
    /// Data that may be replaced and freed: this keeps it.
    Held(Arc<Ready>),
}

impl Deref for Seen<'_> {
    type Target = Ready;
    #[inline]
    fn deref(&self) -> &Ready {
        match self {
            Seen::Kept(ready) => ready,
            Seen::Held(ready) => ready,
        }
    }
}

/// The data of a tensor since `set_data`.
///
/// [Note: data that was replaced] Whoever looks at a tensor borrows its data, without counting, so nobody knows when
/// the last one has looked away. That is why the first data stays as long as the tensor, and so does what came in
/// its place: `Module::to` replaces once, and looking costs as little as before. Data that is replaced again and
/// again is counted from then on, and freed with the last one who looks at it: of a thousand `set_data` three are
/// in memory.
pub(crate) struct Replaced {
    first: Ready,
    /// Where it was replaced again.
    now: Mutex<Option<Arc<Ready>>>,
}

/// The data of operands that could be replaced and freed while they are used. Mostly there is none.
pub(crate) struct Held(Vec<(usize, Arc<Ready>)>);

/// Whether any tensor's data was ever replaced more than once: where it was not, nobody needs to look.
static ANY_SWAPPED: AtomicBool = AtomicBool::new(false);

impl Held {
    /// Of these operands.
    #[inline]
    pub(crate) fn of<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Held {
        Held(if ANY_SWAPPED.load(Ordering::Relaxed) { Held::list(tensors) } else { Vec::new() })
    }

    /// Of an op's arguments.
    #[inline]
    pub(crate) fn of_args(args: &[hook::Arg<'_>]) -> Held {
        Held::of(args.iter().filter_map(|arg| match arg {
            hook::Arg::Tensor(tensor) => Some(*tensor),
            _ => None,
        }))
    }

    #[cold]
    fn list<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Vec<(usize, Arc<Ready>)> {
        tensors
            .filter_map(|tensor| match tensor.try_ready() {
                Some(Seen::Held(ready)) => Some((tensor.address(), ready)),
                _ => None,
            })
            .collect()
    }

    /// An operand of the op, made ready, of the type that it was checked with.
    #[inline]
    pub(crate) fn operand<'a>(
        &'a self,
        tensor: &'a Tensor,
        ty: Option<&Ty>,
        op: &Op,
        loc: Loc,
    ) -> Result<&'a Ready> {
        let ready = match self.get(tensor) {
            Some(ready) => ready,
            None => {
                // Lazy: its run makes it ready.
                tensor.ready()?;
                self.get(tensor).ok_or_else(|| Error::op(op.name(), Why::Lost, loc))?
            }
        };
        tensor.check_as(ready, ty, op, loc)?;
        Ok(ready)
    }

    /// One of the tensors, if it is ready.
    #[inline]
    pub(crate) fn get<'a>(&'a self, tensor: &'a Tensor) -> Option<&'a Ready> {
        tensor.try_kept().or_else(|| self.find(tensor))
    }

    #[cold]
    fn find<'a>(&'a self, tensor: &'a Tensor) -> Option<&'a Ready> {
        let own = self.0.iter().find(|(address, _)| *address == tensor.address()).map(|(_, ready)| &**ready);
        // Replaced again since this list was made: what it had before stays, too.
        own.or_else(|| tensor.is_swapped().then(|| &tensor.replaced().first))
    }
}

/// In this order: what replay touches is in the count's cache line.
#[repr(C)]
pub(crate) struct Slot {
    tag: AtomicU64,
    status: AtomicU8,
    requires_grad: AtomicBool,
    /// Whether `record` has a history: most tensors are asked, few have one.
    pub(crate) on_tape: AtomicBool,
    /// Whether `record` has a base.
    pub(crate) is_view: AtomicBool,
    pub(crate) record: Mutex<Record>,
    /// Written once, by who claimed it, before `status` becomes READY; read only after.
    ready: UnsafeCell<Option<Ready>>,
    /// The data since `set_data`, owned by `record`; read only when `status` is REPLACED or SWAPPED.
    replaced: AtomicPtr<Replaced>,
}

// SAFETY: `ready` is written by the one thread that claimed it, before READY is published with release ordering,
// and never after.
unsafe impl Sync for Slot {}

impl Default for Slot {
    fn default() -> Slot {
        Slot {
            status: AtomicU8::new(LAZY),
            ready: UnsafeCell::new(None),
            tag: AtomicU64::new(0),
            requires_grad: AtomicBool::new(false),
            on_tape: AtomicBool::new(false),
            is_view: AtomicBool::new(false),
            record: Mutex::default(),
            replaced: AtomicPtr::default(),
        }
    }
}

impl Recycle for Slot {
    const BIASED: bool = true;

    fn clear(&mut self) {
        *self.status.get_mut() = LAZY;
        *self.ready.get_mut() = None;
        *self.tag.get_mut() = 0;
        *self.requires_grad.get_mut() = false;
        *self.on_tape.get_mut() = false;
        *self.is_view.get_mut() = false;
        // Dropped after the slot is clean: a long tape frees itself through here.
        let record = self.record.get_mut();
        let (meta, history, base) = (record.meta.take(), record.history.take(), record.base.take());
        drop((meta, history, base));
    }
    free_list!(SLOTS, Slot);
}

impl Slot {
    /// Makes it the result of a node.
    #[inline]
    pub(crate) fn become_result(&mut self, node: Handle<GradNode>) {
        *self.requires_grad.get_mut() = true;
        *self.on_tape.get_mut() = true;
        self.record.get_mut().history = Some((node, 0));
    }
}

/// A multi-dimensional array. Cheap to clone (clones are the same tensor), borrowed by ops, `Send + Sync`.
///
/// ```
/// use kiln_tensor::{Device, Tensor};
/// # fn main() -> kiln_tensor::Result<()> {
/// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0])?;
/// let y = ((&x * 2.0 + 1.0).tanh() * &x).ok()?;
/// assert_eq!(y.shape().to_vec(), [3]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Tensor {
    pub(crate) slot: Handle<Slot>,
}

impl AsRef<Tensor> for Tensor {
    fn as_ref(&self) -> &Tensor {
        self
    }
}

impl Tensor {
    /// A copy with row-major memory of its own, on the tape: PyTorch's `clone()`. (A clone, in Rust's sense, is another
    /// handle to the same tensor.)
    ///
    /// ```
    /// # use kiln_tensor::Tensor;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let x = Tensor::from(vec![1.0f32, 2.0]);
    /// let (same, copy) = (x.clone(), x.deep_clone()?);
    /// x.zero_()?;
    /// assert_eq!(same.to_vec::<f32>()?, [0.0, 0.0]);
    /// assert_eq!(copy.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn deep_clone(&self) -> Result<Tensor> {
        self.unary(Op::Clone {}, Loc::caller())
    }

    /// A tensor that is ready.
    pub(crate) fn from_ready(ready: Ready) -> Tensor {
        Tensor {
            slot: Handle::new(|slot: &mut Slot| {
                *slot.ready.get_mut() = Some(ready);
                *slot.status.get_mut() = READY;
            }),
        }
    }

    /// A tensor that the run named in the tag will make ready.
    #[inline]
    pub(crate) fn lazy(tag: hook::Tag, requires_grad: bool) -> Tensor {
        Tensor {
            slot: Handle::new(|slot: &mut Slot| {
                *slot.tag.get_mut() = tag.0;
                *slot.requires_grad.get_mut() = requires_grad;
            }),
        }
    }

    /// Whether it is lazy and has nothing but a tag to it.
    ///
    /// # Safety
    /// There must be no other handle.
    #[inline]
    pub(crate) unsafe fn is_bare(&self) -> bool {
        // SAFETY: with only this handle nobody else can reach the state behind the lock.
        self.is_lazy()
            && !self.slot.on_tape.load(Ordering::Relaxed)
            && unsafe { (*self.slot.record.data_ptr()).meta.is_none() }
    }

    /// Makes a lazy tensor ready; one that is stays as it is. For the run that made it.
    pub(crate) fn publish(&self, ready: Ready) {
        let status = &self.slot.status;
        if status.compare_exchange(LAZY, CLAIMED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        // SAFETY: this thread alone claimed it, and nobody reads `ready` before READY.
        unsafe { *self.slot.ready.get() = Some(ready) };
        status.store(READY, Ordering::Release);
    }

    /// Asks for the tensor's own state to be near when its turn comes.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.slot.prefetch();
    }

    /// Whether the tensor waits for a run.
    #[inline]
    pub fn is_lazy(&self) -> bool {
        self.slot.status.load(Ordering::Acquire) < READY
    }

    /// The ready state, if it is ready.
    #[inline]
    pub(crate) fn try_ready(&self) -> Option<Seen<'_>> {
        match self.slot.status.load(Ordering::Acquire) {
            // SAFETY: READY was published after the write, and nothing writes again while a handle lives.
            READY => unsafe { (*self.slot.ready.get()).as_ref() }.map(Seen::Kept),
            status @ (REPLACED | SWAPPED) => Some(self.replacement(status)),
            _ => None,
        }
    }

    #[cold]
    fn replacement(&self, status: u8) -> Seen<'_> {
        let now = if status == SWAPPED { self.replaced().now.lock().clone() } else { None };
        now.map_or(Seen::Kept(&self.replaced().first), Seen::Held)
    }

    /// The ready state, if it is ready and stays as long as the tensor.
    #[inline]
    pub(crate) fn try_kept(&self) -> Option<&Ready> {
        match self.slot.status.load(Ordering::Acquire) {
            // SAFETY: READY was published after the write, and nothing writes again while a handle lives.
            READY => unsafe { (*self.slot.ready.get()).as_ref() },
            REPLACED => Some(&self.replaced().first),
            _ => None,
        }
    }

    #[cold]
    fn replaced(&self) -> &Replaced {
        // SAFETY: asked for when REPLACED or SWAPPED was seen, which is published after the pointer; the slot's
        // record owns what it points to until the last handle is gone.
        unsafe { &*self.slot.replaced.load(Ordering::Acquire) }
    }

    fn is_swapped(&self) -> bool {
        self.slot.status.load(Ordering::Acquire) == SWAPPED
    }

    /// The ready state, for an op that was checked with the tensor being of this type: data may be replaced at any
    /// time, and kernels trust the types.
    #[inline]
    pub(crate) fn ready_as(&self, ty: Option<&Ty>, op: &Op, loc: Loc) -> Result<Seen<'_>> {
        let ready = self.ready()?;
        self.check_as(&ready, ty, op, loc)?;
        Ok(ready)
    }

    #[inline]
    fn check_as(&self, ready: &Ready, ty: Option<&Ty>, op: &Op, loc: Loc) -> Result<()> {
        if self.slot.status.load(Ordering::Acquire) >= REPLACED && ty != Some(&Ty::Tensor(ready.ty())) {
            return Err(Error::op(op.name(), Why::Replaced, loc));
        }
        Ok(())
    }

    /// The tensor gets other memory, and with it another dtype, shape or layout, and stays the same tensor for
    /// everybody who has it: PyTorch's `x.data = data`. Both share their memory from now on. Only for leaves,
    /// on the device they are on. Memory it had before is given back with the tensor: others may be reading it.
    #[track_caller]
    pub fn set_data(&self, data: &Tensor) -> Result<()> {
        let loc = Loc::caller();
        hook::host_access(self, hook::Access::Write, "set_data", loc)?;
        hook::host_access(data, hook::Access::Read, "set_data", loc)?;
        let fail = |why| Err(Error::op("set_data", why, loc));
        let (own, other) = (self.ready()?.ty(), data.ready()?.ty());
        if !self.is_leaf() {
            return fail(Why::NotLeaf { what: "the tensor".into() });
        }
        if own.device != other.device {
            return fail(Why::Devices { left: own.device, right: other.device });
        }
        if self.requires_grad() && !other.dtype.is_float() {
            let why = Why::DType {
                argument: "data of a tensor that requires a gradient",
                expected: "floating point",
                got: other.dtype,
            };
            return fail(why);
        }
        let data = Ready { view_version: None, ..data.ready()?.clone() };
        // Under the record's lock: of two that come at once the later one counts.
        let before = self.with_meta(|meta| {
            // First: who sees the new data sees that some was replaced.
            hook::note_replacement();
            match &meta.data {
                None => {
                    let replaced = Arc::new(Replaced { first: data, now: Mutex::new(None) });
                    self.slot.replaced.store(Arc::as_ptr(&replaced).cast_mut(), Ordering::Release);
                    self.slot.status.store(REPLACED, Ordering::Release);
                    meta.data = Some(replaced);
                    None
                }
                Some(replaced) => {
                    ANY_SWAPPED.store(true, Ordering::Relaxed);
                    let before = replaced.now.lock().replace(Arc::new(data));
                    self.slot.status.store(SWAPPED, Ordering::Release);
                    before
                }
            }
        });
        // Its memory is freed without the lock.
        drop(before);
        Ok(())
    }

    /// The ready state; makes the tensor's run finish first if need be.
    #[inline]
    pub(crate) fn ready(&self) -> Result<Seen<'_>> {
        match self.try_ready() {
            Some(ready) => Ok(ready),
            None => self.forced(),
        }
    }

    #[cold]
    fn forced(&self) -> Result<Seen<'_>> {
        hook::force(self.tag())?;
        self.try_ready().ok_or_else(|| Error::op("tensor", Why::Lost, Loc::UNKNOWN))
    }

    /// The run that knows this tensor, and its number there.
    #[inline]
    pub(crate) fn tag(&self) -> hook::Tag {
        hook::Tag(self.slot.tag.load(Ordering::Relaxed))
    }

    /// Sets the tag.
    #[inline]
    pub(crate) fn set_tag(&self, tag: hook::Tag) {
        self.slot.tag.store(tag.0, Ordering::Relaxed);
    }

    /// How many handles to this tensor there are; `usize::MAX` for "more than one" where only the thread of a
    /// run in progress knows.
    #[inline]
    pub(crate) fn references(&self) -> usize {
        self.slot.references()
    }

    /// Equal for handles to the same tensor.
    #[inline]
    pub fn address(&self) -> usize {
        self.slot.address()
    }

    /// Whether both are the same tensor (not: equal elements).
    pub fn same(&self, other: &Tensor) -> bool {
        self.address() == other.address()
    }

    /// Element type, device and sizes. Of a lazy tensor too: no run is finished for this.
    pub fn ty(&self) -> TensorTy {
        if let Some(ready) = self.try_ready() {
            return ready.ty();
        }
        if let Some(ty) = hook::with_current(|recorder| recorder.and_then(|r| r.ty(self))) {
            return ty;
        }
        match self.ready() {
            Ok(ready) => ready.ty(),
            Err(_) => TensorTy::new(DType::F32, [0]),
        }
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.ty().shape
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.shape().rank()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape().numel()
    }

    /// The size of one dim; negative dims count from the end.
    #[track_caller]
    pub fn size(&self, dim: i64) -> Result<usize> {
        let (shape, loc) = (self.shape(), Loc::caller());
        let at = crate::methods::normalise_dim("size", dim, shape.rank(), loc)?;
        shape.get(at).copied().ok_or_else(|| Error::op("size", Why::Dim { dim, rank: 0 }, loc))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.ty().dtype
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.ty().device
    }

    /// How the elements lie. Of a lazy tensor too: no run is finished for this.
    pub(crate) fn layout(&self) -> Result<Layout> {
        let lazy = |r: &dyn hook::Recorder| if self.is_lazy() { r.layout(self) } else { None };
        match hook::with_current(|recorder| recorder.and_then(lazy)) {
            Some(layout) => Ok(layout),
            None => Ok(self.ready()?.layout.clone()),
        }
    }

    /// Steps between neighbours, per dim, in elements.
    pub fn strides(&self) -> Result<Strides> {
        Ok(self.layout()?.strides)
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> Result<bool> {
        Ok(self.layout()?.is_contiguous())
    }

    /// Whether gradients are wanted for it, or flow through it.
    #[inline]
    pub fn requires_grad(&self) -> bool {
        self.slot.requires_grad.load(Ordering::Relaxed)
            || (self.slot.is_view.load(Ordering::Relaxed) && self.base_requires_grad())
    }

    /// Sets the flag without any check: for runs, which know.
    #[inline]
    pub(crate) fn mark_requires_grad(&self, on: bool) {
        self.slot.requires_grad.store(on, Ordering::Relaxed);
    }
}
