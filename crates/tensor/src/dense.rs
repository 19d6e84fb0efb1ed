//! The commonest calls, without type inference: a scalar function of numbers and of tensors on the CPU that are
//! ready, dense, and of one float dtype and one shape. The result has that dtype and shape.

use std::sync::atomic::{AtomicU8, Ordering};

use smallvec::{SmallVec, smallvec};

use kiln_ir::math::Function;
use kiln_ir::{DType, Device, Loc, Op, Result, Scalar, ScalarKind, TensorTy, Ty};

use crate::create::allocate_like;
use crate::dispatch::arg_tys;
use crate::eager::{Input, function, lock, number_dtype, overlaps, power};
use crate::hook::Arg;
use crate::kernels::{self, Dense, MAX_INPUTS, Row, Step};
use crate::storage::{Guard, Use, independent};
use crate::tensor::Ready;

/// A call with its operands in hand, to run later.
pub(crate) struct HeldCall {
    function: Function,
    out: Ready,
    in_place: bool,
    inputs: SmallVec<[HeldInput; MAX_INPUTS]>,
}

enum HeldInput {
    Tensor(Ready),
    Number(Scalar),
}

/// Such a call.
pub(crate) struct DenseCall<'a> {
    function: Function,
    first: &'a Ready,
    inputs: [Input<'a>; MAX_INPUTS],
}

/// By row and number of operands, what [`takes_anything`] knows: 0 for nothing yet, then 1 for no, 2 for yes.
static KNOWN: [[AtomicU8; MAX_INPUTS]; Op::ROWS.len()] =
    [const { [const { AtomicU8::new(0) }; MAX_INPUTS] }; Op::ROWS.len()];

/// Whether a row takes tensors and numbers of any kind beside a tensor of floats: its rule is asked once.
#[inline]
fn takes_anything(op: &Op, operands: usize) -> bool {
    operands == 1
        || match KNOWN[op.index()][operands - 1].load(Ordering::Relaxed) {
            0 => ask(op, operands),
            known => known == 2,
        }
}

#[cold]
fn ask(op: &Op, operands: usize) -> bool {
    let takes = [Ty::tensor(DType::F32, ()), Ty::Scalar(ScalarKind::Bool)].into_iter().all(|other| {
        let mut tys: SmallVec<[Ty; 4]> = smallvec![other; operands];
        tys[0] = Ty::tensor(DType::F32, ());
        op.infer(&tys).is_ok()
    });
    KNOWN[op.index()][operands - 1].store(1 + u8::from(takes), Ordering::Relaxed);
    takes
}

impl<'a> DenseCall<'a> {
    /// The call as such a one, if it is.
    pub(crate) fn of(op: &Op, args: &[Arg<'a>], in_place: bool) -> Option<DenseCall<'a>> {
        let mut function = function(op, args.len())?;
        if function == Function::Pow
            && let [_, Arg::Number(exponent)] = args
        {
            // The powers 0 and 1 are no function.
            if matches!(exponent.as_f64(), 0.0 | 1.0) {
                return None;
            }
            function = power(*exponent).unwrap_or(function);
        }
        let Some(Arg::Tensor(first)) = args.first() else { return None };
        let first = first.try_kept()?;
        if !first.dtype.is_float() || first.device != Device::Cpu || !first.layout.is_contiguous() {
            return None;
        }
        let mut inputs = [Input::Number(Scalar::Int(0)); MAX_INPUTS];
        for (input, arg) in inputs.iter_mut().zip(args) {
            *input = match arg {
                Arg::Tensor(t) => {
                    let t = t.try_kept()?;
                    let fits = || {
                        t.dtype == first.dtype
                            && t.device == first.device
                            && t.layout.shape[..] == first.layout.shape[..]
                            && t.layout.is_contiguous()
                    };
                    if !std::ptr::eq(t, first) && !fits() {
                        return None;
                    }
                    if in_place && overlaps(t, first) {
                        return None;
                    }
                    Input::Tensor(t)
                }
                Arg::Number(x) => Input::Number(*x),
                Arg::List(_) => return None,
            };
        }
        let is_right =
            takes_anything(op, args.len()) || arg_tys(args).is_ok_and(|tys| op.infer(&tys).is_ok());
        is_right.then_some(DenseCall { function, first, inputs })
    }

    /// The inputs that there are.
    #[inline]
    fn inputs(&self) -> &[Input<'a>] {
        &self.inputs[..self.function.arity()]
    }

    /// The result's type.
    pub(crate) fn ty(&self) -> TensorTy {
        self.first.ty()
    }

    /// Runs the call into fresh memory.
    pub(crate) fn compute(&self, op: &Op, loc: Loc) -> Result<Ready> {
        let out = allocate_like(self.first, op.name(), loc)?;
        let _lock = lock(self.inputs(), None);
        // SAFETY: `out` is fresh; the rest is as `row` says, and locked.
        unsafe { kernels::pointwise_rows(self.function, &[self.row(&out)]) };
        Ok(out)
    }

    /// Runs the call into its first operand.
    pub(crate) fn compute_in_place(&self) {
        let _lock = lock(self.inputs(), Some(self.first));
        // SAFETY: the target is locked for writing; the rest is as `row` says, and locked.
        unsafe { kernels::pointwise_rows(self.function, &[self.row(self.first)]) };
        self.first.storage.bump_version();
    }

    /// Runs several calls of one op into fresh memory, all at once.
    pub(crate) fn compute_all(calls: &[DenseCall<'_>], op: &Op, loc: Loc) -> Result<Vec<Ready>> {
        let mut outs = Vec::with_capacity(calls.len());
        for call in calls {
            outs.push(allocate_like(call.first, op.name(), loc)?);
        }
        let rows: Vec<Row> = calls.iter().zip(&outs).map(|(call, out)| call.row(out)).collect();
        // Nothing that is read is written, so the calls are independent.
        if let (Some(call), Some(_lock)) = (calls.first(), DenseCall::lock_all(calls, false)) {
            // SAFETY: as in `compute`, and the outputs are different memory.
            unsafe { kernels::pointwise_rows(call.function, &rows) };
        }
        Ok(outs)
    }

    /// Runs several calls of one op into their first operands, all at once. Does nothing and returns false if
    /// one of them writes memory that another uses, so that their order matters.
    pub(crate) fn compute_all_in_place(calls: &[DenseCall<'_>]) -> bool {
        let Some(_lock) = DenseCall::lock_all(calls, true) else { return false };
        let rows: Vec<Row> = calls.iter().map(|call| call.row(call.first)).collect();
        if let Some(call) = calls.first() {
            // SAFETY: as in `compute_in_place`, and no call uses what another writes.
            unsafe { kernels::pointwise_rows(call.function, &rows) };
        }
        for call in calls {
            call.first.storage.bump_version();
        }
        true
    }

    /// Takes several calls of one op in hand, their results in fresh memory if they are not in place.
    pub(crate) fn hold_all(
        calls: &[DenseCall<'_>],
        op: &Op,
        in_place: bool,
        loc: Loc,
    ) -> Result<Vec<HeldCall>> {
        let held = |call: &DenseCall<'_>| {
            let out = if in_place { call.first.clone() } else { allocate_like(call.first, op.name(), loc)? };
            let inputs = call.inputs().iter().map(|input| match input {
                Input::Tensor(t) => HeldInput::Tensor((*t).clone()),
                Input::Number(x) => HeldInput::Number(*x),
            });
            Ok(HeldCall { function: call.function, out, in_place, inputs: inputs.collect() })
        };
        calls.iter().map(held).collect()
    }

    fn lock_all<'b>(calls: &[DenseCall<'b>], in_place: bool) -> Option<Guard<'b>> {
        Guard::lock_rows(&mut DenseCall::uses(calls, in_place))
    }

    /// Whether no call in place writes what another one uses.
    pub(crate) fn independent(calls: &[DenseCall<'_>]) -> bool {
        independent(&mut DenseCall::uses(calls, true))
    }

    fn uses<'b>(calls: &[DenseCall<'b>], in_place: bool) -> Vec<Use<'b>> {
        let mut uses = Vec::with_capacity(calls.len() * MAX_INPUTS);
        for (row, call) in calls.iter().enumerate() {
            for (i, input) in call.inputs().iter().enumerate() {
                if let Input::Tensor(t) = input {
                    uses.push(Use { storage: &t.storage, row, write: in_place && i == 0 });
                }
            }
        }
        uses
    }

    /// As a kernel takes it: the inputs and `out`, which has the result's type, are dense and of one dtype and
    /// shape; none overlaps an in-place target but as the same elements.
    fn row(&self, out: &Ready) -> Row {
        row(out, self.inputs().iter().copied())
    }
}

fn row<'a>(out: &Ready, inputs: impl Iterator<Item = Input<'a>>) -> Row {
    let mut dense = [Dense::Scalar(0); MAX_INPUTS];
    for (dense, input) in dense.iter_mut().zip(inputs) {
        *dense = match input {
            Input::Tensor(t) => Dense::Elements(t.pointer()),
            Input::Number(x) => Dense::Scalar(x.to_element(number_dtype(out.dtype))),
        };
    }
    Row { numel: out.layout.shape.numel(), dtype: out.dtype, out: out.pointer(), inputs: dense }
}

impl HeldCall {
    /// The result.
    pub(crate) fn output(&self) -> &Ready {
        &self.out
    }

    fn inputs(&self) -> impl Iterator<Item = Input<'_>> {
        self.inputs.iter().map(|input| match input {
            HeldInput::Tensor(t) => Input::Tensor(t),
            HeldInput::Number(x) => Input::Number(*x),
        })
    }

    /// Runs calls, each step's as one list op, the steps in their order: block by block where no element can tell.
    pub(crate) fn run_all(steps: &[Vec<HeldCall>]) {
        let mut uses = Vec::new();
        for call in steps.iter().flatten() {
            uses.push(Use { storage: &call.out.storage, row: 0, write: true });
            for input in &call.inputs {
                if let HeldInput::Tensor(t) = input {
                    uses.push(Use { storage: &t.storage, row: 0, write: false });
                }
            }
        }
        let Some(_lock) = Guard::lock_rows(&mut uses) else { return };
        let rows = |calls: &[HeldCall]| calls.iter().map(|call| row(&call.out, call.inputs())).collect();
        let function = |calls: &[HeldCall]| calls.first().map(|call| call.function);
        let kernels: Vec<Step> = steps
            .iter()
            .filter_map(|calls| Some(Step { function: function(calls)?, rows: rows(calls) }))
            .collect();
        // SAFETY: each step was a list op that runs at once, with operands as `row` says; all is locked. Blocks have
        // what they ask for besides.
        unsafe {
            if in_blocks(&kernels) {
                kernels::pointwise_blocks(&kernels)
            } else {
                kernels.iter().for_each(|step| kernels::pointwise_rows(step.function, &step.rows))
            }
        }
        for call in steps.iter().flatten().filter(|call| call.in_place) {
            call.out.storage.bump_version();
        }
    }
}

/// Whether steps can run block by block: at one place of the lists all have equally many elements of one dtype,
/// and what is written is used at that place only, and as the same elements.
fn in_blocks(steps: &[Step]) -> bool {
    let Some(first) = steps.first() else { return false };
    let mut uses = Vec::new();
    for step in steps {
        if step.rows.len() != first.rows.len() {
            return false;
        }
        for (place, (row, like)) in step.rows.iter().zip(&first.rows).enumerate() {
            if row.numel != like.numel || row.dtype != like.dtype {
                return false;
            }
            let bytes = row.numel * row.dtype.size();
            let mut used = |start: usize, write: bool| uses.push((start, start + bytes, place, write));
            used(row.out.addr(), true);
            for input in &row.inputs[..step.function.arity()] {
                if let Dense::Elements(elements) = input {
                    used(elements.addr(), false);
                }
            }
        }
    }
    uses.retain(|(start, end, ..)| start < end);
    uses.sort_unstable();
    // The stretch of memory that the uses so far overlap, and whether it is written.
    let (mut stretch, mut written, mut alike) = ((0, 0, 0), false, true);
    for (start, end, place, write) in uses {
        if start >= stretch.1 {
            (stretch, written, alike) = ((start, end, place), write, true);
            continue;
        }
        written |= write;
        alike &= (start, end, place) == stretch;
        stretch.1 = stretch.1.max(end);
        if written && !alike {
            return false;
        }
    }
    true
}
