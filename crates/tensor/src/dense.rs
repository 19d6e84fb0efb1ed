//! The commonest calls, without type inference: a scalar function of numbers and of tensors on the CPU that are
//! ready, dense, and of one float dtype and one shape. The result has that dtype and shape.

use kiln_ir::math::Function;
use kiln_ir::{Device, Loc, Op, Result, Scalar, TensorTy};

use crate::create::allocate_like;
use crate::eager::{Input, function, lock, number_dtype, overlaps};
use crate::hook::Arg;
use crate::kernels::{self, Dense, MAX_INPUTS, Row};
use crate::storage::{Guard, Use};
use crate::tensor::Ready;

/// Such a call.
pub(crate) struct DenseCall<'a> {
    function: Function,
    first: &'a Ready,
    inputs: [Input<'a>; MAX_INPUTS],
}

impl<'a> DenseCall<'a> {
    /// The call as such a one, if it is.
    pub(crate) fn of(op: &Op, args: &[Arg<'a>], in_place: bool) -> Option<DenseCall<'a>> {
        let function = function(op, args.len())?;
        let Some(Arg::Tensor(first)) = args.first() else { return None };
        let first = first.try_ready()?;
        if !first.dtype.is_float() || first.device != Device::Cpu {
            return None;
        }
        let mut inputs = [Input::Number(Scalar::Int(0)); MAX_INPUTS];
        for (input, arg) in inputs.iter_mut().zip(args) {
            *input = match arg {
                Arg::Tensor(t) => {
                    let t = t.try_ready()?;
                    let same = || {
                        t.dtype == first.dtype
                            && t.device == first.device
                            && t.layout.shape[..] == first.layout.shape[..]
                    };
                    if !(std::ptr::eq(t, first) || same()) || !t.layout.is_contiguous() {
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
        Some(DenseCall { function, first, inputs })
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

    fn lock_all<'b>(calls: &[DenseCall<'b>], in_place: bool) -> Option<Guard<'b>> {
        let mut uses = Vec::with_capacity(calls.len() * MAX_INPUTS);
        for (row, call) in calls.iter().enumerate() {
            for (i, input) in call.inputs().iter().enumerate() {
                if let Input::Tensor(t) = input {
                    uses.push(Use { storage: &t.storage, row, write: in_place && i == 0 });
                }
            }
        }
        Guard::lock_rows(&mut uses)
    }

    /// As a kernel takes it: the inputs and `out`, which has the result's type, are dense and of one dtype and
    /// shape; none overlaps an in-place target but as the same elements.
    fn row(&self, out: &Ready) -> Row {
        let mut inputs = [Dense::Scalar(0); MAX_INPUTS];
        for (dense, input) in inputs.iter_mut().zip(self.inputs()) {
            *dense = match input {
                Input::Tensor(t) => Dense::Elements(t.pointer()),
                Input::Number(x) => Dense::Scalar(x.to_element(number_dtype(out.dtype))),
            };
        }
        Row { numel: out.layout.shape.numel(), dtype: out.dtype, out: out.pointer(), inputs }
    }
}
