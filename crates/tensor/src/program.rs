//! Running compiled programs on tensors: locks the storages, allocates the results, calls the runtime.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;

use kiln_ir::{
    DType, Device, Error, Fault, Graph, Layout, Loc, Op, Refuses, Result, Scalar, ScalarKind, TensorTy, Ty,
    Why, planted,
};
use kiln_plan::{Numbers, Plan, ScalarRef, Step, ViewRef};
use kiln_runtime::engine::{self, Code, Engine, Loaded};
use kiln_runtime::kept::Contents;
use kiln_runtime::pool::{self, Buffer};
use kiln_runtime::program::{Program, Stopped, Workspace};
use kiln_runtime::{Callable, threads};

use crate::create::allocate;
use crate::eager::compute_into;
use crate::graph::{GraphValue, run_functional};
use crate::hook::{Scope, replaced_meanwhile};
use crate::kernels::{self, Operand};
use crate::storage::{Room, Storage};
use crate::tensor::{Held, Ready, Tensor};

/// A tensor in a buffer of the program.
struct View {
    buffer: usize,
    dtype: DType,
    layout: Layout,
}

impl View {
    fn of(view: &ViewRef) -> View {
        let ViewRef { at, ty, strides } = view;
        let layout = Layout { shape: ty.shape.clone(), strides: strides.clone(), offset: at.offset as usize };
        View { buffer: at.buffer.index(), dtype: ty.dtype, layout }
    }

    fn operand(&self, pointers: &[*mut u8]) -> Operand<'_> {
        Operand {
            ptr: pointers[self.buffer].wrapping_add(self.layout.offset * self.dtype.size()),
            dtype: self.dtype,
            shape: &self.layout.shape,
            strides: &self.layout.strides,
        }
    }

    /// As a tensor.
    ///
    /// # Safety
    /// The buffer is one of a running program, and the tensor is gone when that ends.
    unsafe fn borrow(&self, pointers: &[*mut u8]) -> Ready {
        Ready {
            // SAFETY: the caller's promise is passed on.
            storage: Storage::new(unsafe { Buffer::borrowed(pointers[self.buffer]) }),
            layout: self.layout.clone(),
            dtype: self.dtype,
            device: Device::Cpu,
            view_version: None,
        }
    }
}

/// A step that runs eagerly inside the program.
enum HostStep {
    Op {
        op: Op,
        args: Vec<View>,
        tys: Vec<Ty>,
        out: View,
        /// Bytes of the arena in which it may work.
        free: Range<usize>,
        loc: Loc,
    },
    /// A copy between layouts.
    Copy { src: View, dst: View },
    /// The ops of a graph, one by one.
    OneByOne {
        graph: Arc<Graph>,
        args: Vec<View>,
        /// Which of the run's numbers it gets, and as what.
        numbers: Vec<(usize, ScalarKind)>,
        /// Which of its results go where.
        outs: Vec<(usize, View)>,
    },
}

impl HostStep {
    fn of(step: &Step, numbers: &mut Numbers) -> std::result::Result<HostStep, String> {
        let views = |views: &[ViewRef]| views.iter().map(View::of).collect::<Vec<View>>();
        match step {
            Step::Call(call) => {
                let [out] = &call.outs[..] else { return Err("a library call without one result".into()) };
                let (mut args, dst) = (views(&call.args), View::of(out));
                if let (Op::Clone {}, 1) = (&call.op, args.len()) {
                    return Ok(HostStep::Copy { src: args.remove(0), dst });
                }
                if !out.is_dense() || !call.scalars.is_empty() {
                    return Err(format!("a call of {} that nobody knows", call.op.name()));
                }
                let tys = call.args.iter().map(|arg| Ty::Tensor(arg.ty.clone())).collect();
                let (mut op, free, loc) = (call.op.clone(), call.free.clone(), call.loc);
                if let Op::Argsort { descending, .. } = &mut op {
                    *descending ^= planted(Fault::SortedBackwards);
                }
                Ok(HostStep::Op { op, args, tys, out: dst, free, loc })
            }
            Step::OneByOne(ops) => {
                let kinds = ops.graph.inputs.iter().skip(ops.args.len()).map(|&input| ops.graph.ty(input));
                let number = |(&number, ty): (&ScalarRef, &Ty)| match ty {
                    Ty::Scalar(kind) => Ok((numbers.position(number), *kind)),
                    Ty::Tensor(_) | Ty::List(_) => Err("a number that is none".to_string()),
                };
                Ok(HostStep::OneByOne {
                    graph: ops.graph.clone(),
                    args: views(&ops.args),
                    numbers: ops
                        .scalars
                        .iter()
                        .zip(kinds)
                        .map(number)
                        .collect::<std::result::Result<_, _>>()?,
                    outs: ops.outs.iter().map(|(result, out)| (*result, View::of(out))).collect(),
                })
            }
            Step::Launch(_) => Err("a kernel that nobody launches".into()),
        }
    }
}

/// A program bound to tensor types.
pub struct Executable {
    place: Runs,
    outputs: Vec<TensorTy>,
    writes: Vec<bool>,
    numbers: Numbers,
    keep: bool,
    timed: bool,
    free: Mutex<Vec<Kept>>,
}

/// Where a program runs.
enum Runs {
    Here {
        program: Program,
        /// By step, those that run eagerly.
        host: Vec<Option<HostStep>>,
    },
    There {
        engine: &'static dyn Engine,
        loaded: Box<dyn Loaded>,
        steps: usize,
        /// Whether what it finds in its operands may stop it: then it is waited for.
        may_fail: bool,
    },
}

/// Whether what a step finds in its operands may stop it.
fn may_fail(step: &Step) -> bool {
    match step {
        Step::Launch(launch) => !launch.checks.is_empty(),
        Step::Call(call) => !matches!(call.op.row().refuses, Refuses::Nothing),
        Step::OneByOne(_) => true,
    }
}

/// Whether an op works in memory of its own that is worth lending to it: images with zeros around them, packed
/// operands. All of it is gone when the op is done.
fn works_apart(op: &Op) -> bool {
    matches!(
        op,
        Op::Convolution { .. } | Op::ConvolutionInputGradient { .. } | Op::ConvolutionWeightGradient { .. }
    )
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
    /// Prepares a plan to run: `kernels` are its kernels, `outputs` the types of its results, `writes` says which inputs
    /// it changes.
    ///
    /// # Safety
    /// The plan is what the compiler made, or was checked, for inputs of certain layouts, and every run gets inputs of
    /// exactly these; the kernels are the plan's own. It changes no input that `writes` does not name.
    pub unsafe fn new(
        plan: &Plan,
        kernels: &[Callable],
        outputs: Vec<TensorTy>,
        writes: Vec<bool>,
    ) -> std::result::Result<Executable, String> {
        let (program, mut numbers) = Program::new(plan, kernels, threads::count())?;
        let mut host = Vec::with_capacity(plan.steps.len());
        for (number, step) in plan.steps.iter().enumerate() {
            let is_host = program.is_host(number);
            host.push(is_host.then(|| HostStep::of(step, &mut numbers)).transpose()?);
        }
        Ok(Executable::of(Runs::Here { program, host }, outputs, writes, numbers))
    }

    /// Prepares a plan to run on another device: `code` are its kernels as that device's compiler takes them.
    ///
    /// # Safety
    /// As for [`Executable::new`]; and the inputs are on the device.
    pub unsafe fn on(
        device: Device,
        plan: &Plan,
        code: &[Code<'_>],
        outputs: Vec<TensorTy>,
        writes: Vec<bool>,
    ) -> std::result::Result<Executable, String> {
        let engine = engine::of(device).ok_or_else(|| format!("{device} is not available"))?;
        let (loaded, numbers) = engine.load(plan, code)?;
        let (steps, may_fail) = (plan.steps.len(), plan.steps.iter().any(may_fail));
        Ok(Executable::of(Runs::There { engine, loaded, steps, may_fail }, outputs, writes, numbers))
    }

    fn of(place: Runs, outputs: Vec<TensorTy>, writes: Vec<bool>, numbers: Numbers) -> Executable {
        let free = Mutex::new(Vec::new());
        Executable { place, outputs, writes, numbers, keep: false, timed: false, free }
    }

    /// The numbers that a run needs.
    pub fn numbers(&self) -> &Numbers {
        &self.numbers
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
        match &self.place {
            Runs::Here { program, .. } => program.steps(),
            Runs::There { steps, .. } => *steps,
        }
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
        let constants = match &self.place {
            Runs::Here { program, .. } => program.constants(),
            Runs::There { .. } => &[],
        };
        for (i, input) in inputs.enumerate() {
            match input.and_then(|input| held.get(input)) {
                Some(ready) => {
                    let write = self.writes.get(i).copied().unwrap_or(false);
                    kept.inputs.push(ready.pointer());
                    if constants.get(kept.watched.len()) == Some(&i) {
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
            return Err(Failure::Refused(Error::op("compiled program", Why::Replaced, Loc::UNKNOWN)));
        }
        let locked = kept.locks.lock(uses, &kept.watched, &mut kept.contents);
        let outcome = match &self.place {
            // SAFETY: inputs are locked for what the program does with them and have the layouts it was made for
            // (capture checks them); outputs are fresh and of the sizes it was made for.
            Runs::Here { program, host } => unsafe {
                program.run(
                    &kept.inputs,
                    &kept.outputs,
                    scalars,
                    &kept.contents,
                    &mut kept.workspace,
                    &mut |step, pointers, arena| run_here(host[step].as_ref(), pointers, arena, scalars),
                )
            },
            Runs::There { engine, loaded, may_fail, .. } => {
                // SAFETY: as above. The engine takes work in order: what anybody does with this memory comes later,
                // and so does giving it back.
                let given = unsafe { loaded.run(&kept.inputs, &kept.outputs, scalars) };
                given.and_then(|ticket| {
                    locked.written().for_each(|storage| storage.complete_at(ticket));
                    results[first..].iter().for_each(|result| result.storage.complete_at(ticket));
                    if *may_fail { engine.wait(ticket) } else { Ok(()) }
                })
            }
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
                    let bytes = match &self.place {
                        Runs::Here { program, .. } => program.arena_bytes(),
                        Runs::There { .. } => 0,
                    };
                    let why = Why::Memory { bytes, reason: error.to_string() };
                    Failure::Error(Error::op("compiled program", why, Loc::UNKNOWN))
                }
            }
        })
    }
}

/// Runs a step eagerly, in memory of the program.
fn run_here(step: Option<&HostStep>, pointers: &[*mut u8], arena: *mut u8, scalars: &[u64]) -> Result<()> {
    // SAFETY: a buffer of the running program, which outlives the op.
    let borrow = |view: &View| unsafe { view.borrow(pointers) };
    match step {
        None => {}
        Some(HostStep::OneByOne { graph, args, numbers, outs }) => {
            let _eager = Scope::suspend();
            let tensors = args.iter().map(|view| GraphValue::Tensor(Tensor::from_ready(borrow(view))));
            let number = |&(number, kind): &(usize, ScalarKind)| Scalar::from_bits(scalars[number], kind);
            let inputs = tensors.chain(numbers.iter().map(number).map(GraphValue::Number));
            let results = run_functional(graph, &inputs.collect::<Vec<_>>())?;
            for (result, out) in outs {
                let result = results[*result].ready()?;
                // SAFETY: a buffer of the running program with this layout, of the result's shape; the
                // result has memory of its own.
                unsafe { kernels::convert(&out.operand(pointers), &whole(&result)) };
            }
        }
        Some(HostStep::Copy { src, dst }) => {
            // SAFETY: both are buffers of the running program with these layouts, of one shape.
            unsafe { kernels::convert(&dst.operand(pointers), &src.operand(pointers)) };
        }
        Some(HostStep::Op { op, args, tys, out, free, loc }) => {
            let _eager = Scope::suspend();
            let mut inputs: SmallVec<[Ready; 4]> = args.iter().map(borrow).collect();
            let is_out = |view: &View| pointers[view.buffer] == pointers[out.buffer];
            let shared = args.iter().any(is_out);
            // Rows that go into the operand itself, which is dense then.
            let is_in_place = matches!(op, Op::IndexCopy { .. })
                && args.iter().map(is_out).eq([true, false, false])
                && args[0].layout.offset == 0
                && args[0].layout.is_contiguous();
            let out = borrow(out);
            match shared {
                true if is_in_place => {
                    inputs[0] = out.clone();
                    compute_into(op, &inputs, tys, &out, *loc)?;
                }
                false if works_apart(op) => {
                    let compute = || compute_into(op, &inputs, tys, &out, *loc);
                    // SAFETY: nothing lies there while this step runs; what the op makes for itself is gone
                    // when it is done, and its result is there already.
                    unsafe { pool::lend(arena.wrapping_add(free.start), free.len(), compute)? };
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
