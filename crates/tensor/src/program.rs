//! Running compiled programs on tensors: locks the storages, allocates the results, calls the runtime.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_ir::{Device, Error, Layout, Loc, Op, Result, Shape, TensorTy, Ty, Why};
use kiln_runtime::convolution::Geometry;
use kiln_runtime::kept::Contents;
use kiln_runtime::pool::{self, Buffer};
use kiln_runtime::program::{Program, Stopped, Workspace};

use crate::create::allocate;
use crate::eager::compute_into;
use crate::hook::{Scope, replaced_meanwhile};
use crate::kernels::{self, Operand};
use crate::storage::{Room, Storage};
use crate::tensor::{Held, Ready, Tensor};

/// A buffer of the program as host steps see it: its number, element type and layout.
#[derive(Clone, Debug)]
pub struct View {
    /// The buffer's number.
    pub buffer: usize,
    /// Its type.
    pub ty: TensorTy,
    /// How its elements lie.
    pub layout: Layout,
}

/// A step that runs eagerly inside the program.
#[derive(Clone, Debug)]
pub enum HostStep {
    /// An op without a lowering.
    Op {
        /// The op.
        op: Op,
        /// Its operands.
        args: Vec<View>,
        /// Its result.
        out: View,
        /// A buffer in which it may work, and how many bytes of it.
        free: (usize, usize),
        /// The user's line.
        loc: Loc,
    },
    /// A copy between layouts.
    Copy {
        /// From.
        src: View,
        /// To.
        dst: View,
    },
    /// Whatever the compiler has instead of a kernel.
    Call {
        /// What is called.
        function: HostFunction,
        /// Its operands.
        args: Vec<View>,
        /// Which of the run's numbers it gets.
        numbers: Vec<usize>,
        /// Which of its results go where.
        outs: Vec<(usize, View)>,
    },
}

/// A function of tensors and numbers (as bit patterns). Its results have memory of their own.
#[derive(Clone)]
pub struct HostFunction(pub Arc<Host>);

/// See [`HostFunction`].
type Host = dyn Fn(Vec<Ready>, &[u64]) -> Result<Vec<Ready>> + Send + Sync;

impl std::fmt::Debug for HostFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostFunction")
    }
}

/// A program bound to tensor types.
pub struct Executable {
    program: Program,
    outputs: Vec<TensorTy>,
    writes: Vec<bool>,
    host_steps: Vec<HostStep>,
    /// By host step, what is worked out once.
    known: Vec<Option<Known>>,
    keep: bool,
    timed: bool,
    free: Mutex<Vec<Kept>>,
}

/// Whether an op works in memory of its own that is worth lending to it: images with zeros around them, packed
/// operands. All of it is gone when the op is done.
fn works_apart(op: &Op) -> bool {
    matches!(
        op,
        Op::Convolution { .. } | Op::ConvolutionInputGradient { .. } | Op::ConvolutionWeightGradient { .. }
    )
}

/// The sizes of a forward convolution of tensors of these shapes.
pub fn geometry(op: &Op, x: &TensorTy, weight: &TensorTy) -> Option<Geometry> {
    let made = op.infer(&[Ty::Tensor(x.clone()), Ty::Tensor(weight.clone())]).ok()?;
    crate::eager::geometry(op, &x.shape, &weight.shape, &made.first()?.as_tensor()?.shape)
}

/// What is known of an op before it runs.
struct Known {
    /// The types of its operands.
    tys: Vec<Ty>,
    /// The shape of its result. The buffer is dense, but may have a later reshape's shape.
    shape: Shape,
}

impl Known {
    fn of(step: &HostStep) -> Option<Known> {
        let HostStep::Op { op, args, .. } = step else { return None };
        let tys: Vec<Ty> = args.iter().map(|view| Ty::Tensor(view.ty.clone())).collect();
        let shape = op.infer(&tys).ok()?.first()?.as_tensor()?.shape.clone();
        Some(Known { tys, shape })
    }
}

/// What a run needs and the next one can use again.
#[derive(Default)]
struct Kept {
    workspace: Workspace,
    inputs: Vec<*mut u8>,
    outputs: Vec<*mut u8>,
    locks: Room,
    /// Which of the uses are the program's constants, and their contents.
    watched: Vec<usize>,
    contents: Vec<Contents>,
}

// SAFETY: the pointers are scratch, filled and used within one run.
unsafe impl Send for Kept {}

/// Why a program did not run to its end.
#[derive(Debug)]
pub enum Failure {
    /// A kernel found a data-dependent error: which step, which code.
    Status {
        /// The step.
        step: usize,
        /// The code.
        code: i32,
    },
    /// An op that runs eagerly inside the program refused what it was given: an index out of range. Like
    /// kernels that check, such steps come before the first change of an input.
    Refused(Error),
    /// Anything else.
    Error(Error),
}

fn whole(ready: &Ready) -> Operand<'_> {
    let Layout { shape, strides, .. } = &ready.layout;
    Operand { ptr: ready.pointer(), dtype: ready.dtype, shape, strides }
}

impl Executable {
    /// Binds a program: `outputs` are the types of its results, `writes` says which inputs it changes.
    ///
    /// # Safety
    /// The program and its host steps are what the compiler made for inputs of certain layouts, and every run gets
    /// inputs of exactly these: whatever a step touches lies inside them, the results and the arena. It changes no
    /// input that `writes` does not name. A host function keeps nothing of what it is given.
    pub unsafe fn new(
        program: Program,
        outputs: Vec<TensorTy>,
        writes: Vec<bool>,
        host_steps: Vec<HostStep>,
    ) -> Executable {
        let known = host_steps.iter().map(Known::of).collect();
        Executable {
            program,
            outputs,
            writes,
            host_steps,
            known,
            keep: false,
            timed: false,
            free: Mutex::new(Vec::new()),
        }
    }

    /// Whether a run leaves its temporary memory and its table of pointers to the next one. Less work a call;
    /// the memory can't serve anything else meanwhile.
    pub fn keep_bound(mut self, keep: bool) -> Executable {
        self.keep = keep;
        self
    }

    /// Times every step of its runs: see [`Executable::times`].
    pub fn timed(mut self) -> Executable {
        self.timed = true;
        self
    }

    /// How long each step of the last run took, if it was told to be timed.
    pub fn times(&self) -> Vec<Duration> {
        self.free.lock().last().map(|kept| kept.workspace.times().to_vec()).unwrap_or_default()
    }

    fn workspace(&self) -> Kept {
        let workspace = match (self.timed, self.keep) {
            (true, _) => Workspace::timed(),
            (false, true) => Workspace::bound(),
            (false, false) => Workspace::default(),
        };
        Kept { workspace, ..Kept::default() }
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.program.steps.len()
    }

    /// Runs on these inputs and numbers (bit patterns) and appends the results.
    pub fn run<'a>(
        &self,
        inputs: impl Iterator<Item = Option<&'a Tensor>> + Clone,
        scalars: &[u64],
        results: &mut Vec<Ready>,
    ) -> std::result::Result<(), Failure> {
        let mut kept = self.free.lock().pop().unwrap_or_else(|| self.workspace());
        let first = results.len();
        for ty in &self.outputs {
            match allocate(ty, "compiled program", Loc::UNKNOWN) {
                Ok(ready) => results.push(ready),
                Err(error) => {
                    results.truncate(first);
                    return Err(Failure::Error(error));
                }
            }
        }
        kept.inputs.clear();
        kept.outputs.clear();
        kept.watched.clear();
        kept.contents.clear();
        kept.outputs.extend(results[first..].iter().map(Ready::pointer));
        let held = Held::of(inputs.clone().flatten());
        let mut uses = kept.locks.list();
        for (i, input) in inputs.enumerate() {
            match input.and_then(|input| held.get(input)) {
                Some(ready) => {
                    let write = self.writes.get(i).copied().unwrap_or(false);
                    kept.inputs.push(ready.pointer());
                    if self.program.constants.get(kept.watched.len()) == Some(&i) {
                        kept.watched.push(uses.len());
                    }
                    uses.push((&ready.storage, write));
                }
                None => kept.inputs.push(std::ptr::null_mut()),
            }
        }
        if replaced_meanwhile() {
            drop(uses);
            results.truncate(first);
            let why = Why::Other("an input was given other data meanwhile".into());
            return Err(Failure::Refused(Error::op("compiled program", why, Loc::UNKNOWN)));
        }
        let locked = kept.locks.lock(uses, &kept.watched, &mut kept.contents);
        // SAFETY: inputs are locked for what the program does with them and have the layouts it was made for
        // (capture checks them); outputs are fresh and of the sizes it was made for.
        let outcome = unsafe {
            self.program.run(
                &kept.inputs,
                &kept.outputs,
                scalars,
                &kept.contents,
                &mut kept.workspace,
                &mut |call, pointers| self.host(call, pointers, scalars),
            )
        };
        kept.locks.release(locked);
        self.free.lock().push(kept);
        outcome.map_err(|stopped| {
            results.truncate(first);
            match stopped {
                Stopped::Status { step, code } => Failure::Status { step, code },
                Stopped::Host(error) => match error.why() {
                    None | Some(Why::Memory { .. }) => Failure::Error(error),
                    Some(_) => Failure::Refused(error),
                },
                Stopped::Memory(error) => {
                    let why = Why::Memory { bytes: self.program.arena_bytes, reason: error.to_string() };
                    Failure::Error(Error::op("compiled program", why, Loc::UNKNOWN))
                }
            }
        })
    }

    fn host(&self, call: usize, pointers: &[*mut u8], scalars: &[u64]) -> Result<()> {
        fn operand<'v>(view: &'v View, pointers: &[*mut u8]) -> Operand<'v> {
            Operand {
                ptr: pointers[view.buffer].wrapping_add(view.layout.offset * view.ty.dtype.size()),
                dtype: view.ty.dtype,
                shape: &view.layout.shape,
                strides: &view.layout.strides,
            }
        }
        let borrow = |view: &View, layout: Layout| Ready {
            // SAFETY: a buffer of the running program, which outlives the op.
            storage: Storage::new(unsafe { Buffer::borrowed(pointers[view.buffer]) }),
            layout,
            dtype: view.ty.dtype,
            device: Device::Cpu,
            view_version: None,
        };
        match &self.host_steps[call] {
            HostStep::Call { function, args, numbers, outs } => {
                let _eager = Scope::suspend();
                let inputs = args.iter().map(|view| borrow(view, view.layout.clone())).collect();
                let numbers: Vec<u64> = numbers.iter().map(|&number| scalars[number]).collect();
                let results = (function.0)(inputs, &numbers)?;
                for (result, out) in outs {
                    // SAFETY: a buffer of the running program with this layout, of the result's shape; the
                    // result has memory of its own.
                    unsafe { kernels::convert(&operand(out, pointers), &whole(&results[*result])) };
                }
            }
            HostStep::Copy { src, dst } => {
                // SAFETY: both are buffers of the running program with these layouts, of one shape.
                unsafe { kernels::convert(&operand(dst, pointers), &operand(src, pointers)) };
            }
            HostStep::Op { op, args, out, free, loc } => {
                let _eager = Scope::suspend();
                let Some(Known { tys, shape }) = &self.known[call] else {
                    let tys: Vec<Ty> = args.iter().map(|view| Ty::Tensor(view.ty.clone())).collect();
                    let why = op.infer(&tys).err().unwrap_or(Why::Other("has no result".into()));
                    return Err(op.error(&tys, why, *loc));
                };
                let mut inputs: SmallVec<[Ready; 4]> =
                    args.iter().map(|view| borrow(view, view.layout.clone())).collect();
                let is_out = |view: &View| pointers[view.buffer] == pointers[out.buffer];
                let shared = args.iter().any(is_out);
                // Rows that go into the operand itself, which is dense then.
                let is_in_place = matches!(op, Op::IndexCopy { .. })
                    && args.iter().map(is_out).eq([true, false, false])
                    && args[0].layout.offset == 0
                    && args[0].layout.is_contiguous();
                let out = borrow(out, Layout::contiguous(shape.clone()));
                match shared {
                    true if is_in_place => {
                        inputs[0] = out.clone();
                        compute_into(op, &inputs, tys, &out, *loc)?;
                    }
                    false if works_apart(op) => {
                        let (buffer, bytes) = *free;
                        let compute = || compute_into(op, &inputs, tys, &out, *loc);
                        // SAFETY: nothing lies there while this step runs; what the op makes for itself is gone
                        // when it is done, and its result is there already.
                        unsafe { pool::lend(pointers[buffer], bytes, compute)? };
                    }
                    false => compute_into(op, &inputs, tys, &out, *loc)?,
                    // The result takes an operand's place: kernels want memory of its own.
                    true => {
                        let own = allocate(&out.ty(), op.name(), *loc)?;
                        compute_into(op, &inputs, tys, &own, *loc)?;
                        // SAFETY: both are dense and of one shape; nothing else uses the buffer now.
                        unsafe { kernels::convert(&whole(&out), &whole(&own)) };
                    }
                }
            }
        }
        Ok(())
    }
}
