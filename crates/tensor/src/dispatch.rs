//! Dispatch: an op goes to the recorder if there is one, else it is executed and put on the tape.

use smallvec::SmallVec;

use kiln_ir::{Class, Custom, Device, Error, Grad, Loc, Op, Result, TensorTy, Ty, Why, carries_gradient};

use crate::autograd::{self, EagerEmit, grad_enabled};
use crate::dense::{DenseCall, HeldCall};
use crate::hook::{self, Arg, Call, Output};
use crate::tensor::Ready;
use crate::{Tensor, TensorList, custom, device, eager};

/// An op on the user's behalf: recorded or executed.
pub(crate) fn dispatch(op: &Op, args: &[Arg<'_>], in_place: bool, loc: Loc) -> Result<Output> {
    dispatch_call(&Call { op, args, in_place, grad_enabled: grad_enabled(), loc })
}

fn dispatch_call(call: &Call<'_>) -> Result<Output> {
    hook::with_current(|recorder| match recorder {
        Some(recorder) => recorder.call(call),
        None => {
            hook::settle(call.args)?;
            execute(call)
        }
    })
}

/// [`dispatch`] of an op that gives a tensor.
pub(crate) fn dispatch_tensor(op: &Op, args: &[Arg<'_>], in_place: bool, loc: Loc) -> Result<Tensor> {
    let call = Call { op, args, in_place, grad_enabled: grad_enabled(), loc };
    // The usual answer of a recorder fits a register.
    match hook::with_current(|recorder| recorder.and_then(|recorder| recorder.replay(&call))) {
        Some(tensor) => Ok(tensor),
        None => tensor(dispatch_call(&call)?, op, loc),
    }
}

/// [`dispatch`] of an op that changes its first operand, which the caller has: no handle to it is made.
pub(crate) fn dispatch_in_place(op: &Op, args: &[Arg<'_>], loc: Loc) -> Result<()> {
    let call = Call { op, args, in_place: true, grad_enabled: grad_enabled(), loc };
    if hook::with_current(|recorder| recorder.is_some_and(|recorder| recorder.replay_in_place(&call))) {
        Ok(())
    } else {
        dispatch_call(&call).map(drop)
    }
}

/// [`execute`] of an op that gives a tensor, off the tape.
pub(crate) fn execute_tensor(op: &Op, args: &[Arg<'_>], loc: Loc) -> Result<Tensor> {
    let call = Call { op, args, in_place: false, grad_enabled: false, loc };
    tensor(execute(&call)?, op, loc)
}

fn tensor(output: Output, op: &Op, loc: Loc) -> Result<Tensor> {
    match output {
        Output::Tensor(t) => Ok(t),
        Output::List(_) => Err(Error::op(
            op.name(),
            Why::Operand { argument: "operands", expected: "tensors or numbers" },
            loc,
        )),
    }
}

/// Runs an op of the table by its operands, recorded if a recorder is set: what the named methods do.
#[track_caller]
pub fn run_op(op: &Op, args: &[Arg<'_>]) -> Result<Output> {
    dispatch(op, args, false, Loc::caller())
}

/// [`run_op`] into the first operand: what the named methods that end in `_` do.
#[track_caller]
pub fn run_op_in_place(op: &Op, args: &[Arg<'_>]) -> Result<()> {
    dispatch(op, args, true, Loc::caller()).map(drop)
}

/// Runs an op on the user's behalf, recorded if a recorder is set, as if it stood at this line: for programs that are
/// not Rust's.
pub fn run_op_at(op: &Op, args: &[Arg<'_>], in_place: bool, loc: Loc) -> Result<Output> {
    dispatch(op, args, in_place, loc)
}

/// The types of operands.
pub(crate) fn arg_tys(args: &[Arg<'_>]) -> Result<SmallVec<[Ty; 4]>> {
    let mut tys = SmallVec::new();
    for arg in args {
        tys.push(match arg {
            Arg::Tensor(t) => Ty::Tensor(t.ty()),
            Arg::Number(x) => Ty::Scalar(x.kind()),
            Arg::List(l) => Ty::List(l.items()?.iter().map(Tensor::ty).collect()),
        });
    }
    Ok(tys)
}

/// Adds to an op's error the module whose parameter took part.
pub fn with_module(mut error: Error, args: &[Arg<'_>]) -> Error {
    let label = args.iter().find_map(|arg| match arg {
        Arg::Tensor(t) => t.label(),
        _ => None,
    });
    if let (Error::Op(e), Some(label)) = (&mut error, label)
        && e.module.is_none()
    {
        // `layers.3.fc.weight` is the weight of the module `layers.3.fc`.
        e.module = Some(label.rsplit_once('.').map_or(label.clone(), |(module, _)| module.to_string()));
    }
    error
}

/// Executes an op now and puts it on the tape, whatever recorder is set.
pub fn execute(call: &Call<'_>) -> Result<Output> {
    let list = call.args.iter().any(|arg| matches!(arg, Arg::List(_)));
    match call.op {
        Op::List {} => return pack(call),
        Op::ListGet { index } => return unpack(call, *index),
        _ if list => return execute_list(call),
        _ => {}
    }
    execute_one(call).map(Output::Tensor).map_err(|error| with_module(error, call.args))
}

fn pack(call: &Call<'_>) -> Result<Output> {
    let tensors = call.args.iter().map(|arg| match arg {
        Arg::Tensor(t) => Ok((*t).clone()),
        _ => Err(Error::op("list", Why::Operand { argument: "operands", expected: "tensors" }, call.loc)),
    });
    Ok(Output::List(TensorList::new(tensors.collect::<Result<_>>()?)))
}

fn unpack(call: &Call<'_>, index: usize) -> Result<Output> {
    let [Arg::List(list)] = call.args else {
        return Err(Error::op("list_get", Why::Operand { argument: "list", expected: "a list" }, call.loc));
    };
    let items = list.items()?;
    let missing =
        || Error::op("TensorList::get", Why::Index { index: index as i64, size: items.len() }, call.loc);
    Ok(Output::Tensor(items.get(index).cloned().ok_or_else(missing)?))
}

/// An operand of a list op.
enum Column<'a> {
    /// One tensor for each element.
    List(&'a [Tensor]),
    /// The same for every element.
    Same(Arg<'a>),
}

/// The operands of a list op.
struct Columns<'a>(SmallVec<[Column<'a>; 4]>);

impl<'a> Columns<'a> {
    fn of(call: &Call<'a>) -> Result<Columns<'a>> {
        let mut columns = SmallVec::new();
        for arg in call.args {
            columns.push(match arg {
                Arg::List(l) => Column::List(l.items()?),
                other => Column::Same(*other),
            });
        }
        Ok(Columns(columns))
    }

    fn lengths(&self) -> impl Iterator<Item = usize> {
        self.0.iter().filter_map(|column| if let Column::List(l) = column { Some(l.len()) } else { None })
    }

    /// How many elements the lists have, if they fit together.
    fn len(&self) -> usize {
        self.lengths().next().unwrap_or(0)
    }

    /// The operands at one place.
    fn element(&self, i: usize) -> SmallVec<[Arg<'a>; 4]> {
        let mut args = SmallVec::new();
        for column in &self.0 {
            args.push(match column {
                Column::List(l) => Arg::Tensor(&l[i]),
                Column::Same(arg) => *arg,
            });
        }
        args
    }

    /// The calls at all places, if all are dense ones.
    fn dense(&self, call: &Call<'_>) -> Result<Option<Vec<DenseCall<'a>>>> {
        let n = self.len();
        if self.lengths().any(|length| length != n) {
            return Ok(None);
        }
        let dense = |i| DenseCall::of(call.op, &self.element(i), call.in_place);
        let dense: Option<Vec<_>> = (0..n).map(dense).collect();
        debug_assert!(dense.is_none() || call.op.infer(&arg_tys(call.args)?).is_ok());
        Ok(dense)
    }
}

/// The list that a call changes.
fn target<'a>(call: &Call<'a>) -> Option<&'a TensorList> {
    match call.args.first() {
        Some(Arg::List(target)) if call.in_place => Some(target),
        _ => None,
    }
}

/// A list op off the tape whose elements are independent dense calls: taken in hand to run later, with what it
/// is going to give.
pub(crate) fn hold(call: &Call<'_>) -> Result<Option<(Vec<HeldCall>, Output)>> {
    if !call.args.iter().any(|arg| matches!(arg, Arg::List(_))) || matches!(call.op, Op::ListGet { .. }) {
        return Ok(None);
    }
    let columns = Columns::of(call)?;
    let Some(calls) = columns.dense(call)? else { return Ok(None) };
    let target = target(call);
    if recording(call, &columns)
        || target.is_none() && call.in_place
        || call.in_place && !DenseCall::independent(&calls)
    {
        return Ok(None);
    }
    let held = DenseCall::hold_all(&calls, call.op, call.in_place, call.loc)?;
    let output = match target {
        Some(target) => target.clone(),
        None => held.iter().map(|call| Tensor::from_ready(call.output().clone())).collect(),
    };
    Ok(Some((held, Output::List(output))))
}

/// A pointwise op over lists, element by element. All elements are checked before any is changed.
fn execute_list(call: &Call<'_>) -> Result<Output> {
    let columns = Columns::of(call)?;
    let (n, target) = (columns.len(), target(call));
    match columns.dense(call)? {
        // Off the tape, nothing but the types can forbid a dense call.
        Some(calls) if !recording(call, &columns) => match target {
            None if !call.in_place => {
                let items = DenseCall::compute_all(&calls, call.op, call.loc)?;
                return Ok(Output::List(items.into_iter().map(Tensor::from_ready).collect()));
            }
            Some(target) if DenseCall::compute_all_in_place(&calls) => {
                return Ok(Output::List(target.clone()));
            }
            _ => {}
        },
        Some(_) => {}
        None => {
            let tys = arg_tys(call.args)?;
            call.op.infer(&tys).map_err(|why| call.op.error(&tys, why, call.loc))?;
        }
    }
    if call.in_place {
        for i in 0..n {
            check(&Call { args: &columns.element(i), ..*call })?;
        }
    }
    let mut items = Vec::with_capacity(if call.in_place { 0 } else { n });
    for i in 0..n {
        let item = execute_one(&Call { args: &columns.element(i), ..*call })?;
        if !call.in_place {
            items.push(item);
        }
    }
    match target {
        Some(target) => Ok(Output::List(target.clone())),
        None => Ok(Output::List(TensorList::new(items))),
    }
}

/// Whether gradients are recorded and some tensor wants one.
fn recording(call: &Call<'_>, columns: &Columns<'_>) -> bool {
    call.grad_enabled
        && columns.0.iter().any(|column| match column {
            Column::List(tensors) => tensors.iter().any(Tensor::requires_grad),
            Column::Same(arg) => matches!(arg, Arg::Tensor(t) if t.requires_grad()),
        })
}

/// Whether the op goes on the tape, given a result that can.
fn differentiated(call: &Call<'_>) -> bool {
    let wants = |arg: &Arg<'_>| matches!(arg, Arg::Tensor(t) if t.requires_grad());
    call.grad_enabled
        && if cuts(call) {
            call.in_place && call.args.first().is_some_and(wants)
        } else {
            call.args.iter().any(wants)
        }
}

/// Whether the op lets no gradient through. In place (`x.eq_(0)`) it still belongs on the tape: what was
/// computed before no longer counts.
fn cuts(call: &Call<'_>) -> bool {
    matches!(call.op.row().grad, Grad::Zero)
}

/// What of a call's operands forbids to run it, other than their types, which fit.
fn check_dense(call: &Call<'_>, dense: &DenseCall<'_>) -> Result<()> {
    debug_assert_eq!(
        call.op.infer(&arg_tys(call.args)?).ok().as_deref(),
        Some(&[Ty::Tensor(dense.ty())][..])
    );
    match call.args.first() {
        Some(Arg::Tensor(target)) if call.in_place => check_target(call, call.args, target)
            .or_else(|why| Err(in_place_error(call, &arg_tys(call.args)?, why))),
        _ => Ok(()),
    }
}

/// The types of a call's operands and of its result, if it may run.
fn check_typed(call: &Call<'_>) -> Result<(SmallVec<[Ty; 4]>, Ty)> {
    let tys = arg_tys(call.args)?;
    let result = call.op.infer(&tys).map_err(|why| call.op.error(&tys, why, call.loc))?.remove(0);
    if call.in_place {
        check_in_place_result(call, &tys, &result)?;
        if let Some(Arg::Tensor(target)) = call.args.first() {
            check_in_place_target(call, call.args, &tys, target)?;
        }
    }
    Ok((tys, result))
}

/// Whether a call may run.
fn check(call: &Call<'_>) -> Result<()> {
    match DenseCall::of(call.op, call.args, call.in_place) {
        Some(dense) => check_dense(call, &dense),
        None => check_typed(call).map(drop),
    }
}

fn execute_one(call: &Call<'_>) -> Result<Tensor> {
    let target = match call.args.first() {
        Some(Arg::Tensor(target)) if call.in_place => Some(*target),
        _ => None,
    };
    if let Some(dense) = DenseCall::of(call.op, call.args, call.in_place) {
        check_dense(call, &dense)?;
        let run = |_: &[Ty]| match target {
            Some(target) => {
                dense.compute_in_place();
                Ok(target.clone())
            }
            None => Ok(Tensor::from_ready(dense.compute(call.op, call.loc)?)),
        };
        return if differentiated(call) { on_tape(call, None, run) } else { run(&[]) };
    }
    let (tys, result) = check_typed(call)?;
    let Ty::Tensor(result_ty) = &result else { return numbers_alone(call, &tys) };
    let run = |tys: &[Ty]| match target {
        _ if let Op::Custom { op } = *call.op => put(call, own_kernel(call, op, tys, result_ty)?, target),
        _ if result_ty.device != Device::Cpu => elsewhere(call, tys, result_ty, target),
        _ if !eager::has_kernel(call.op, call.args.len()) => {
            put(call, fresh(call, decomposed(call, tys, false)?)?, target)
        }
        Some(target) => {
            eager::compute_in_place(call.op, call.args, tys, result_ty, target, call.loc)?;
            Ok(target.clone())
        }
        None => match view(call, tys)? {
            Some(view) => Ok(view),
            None => Ok(Tensor::from_ready(eager::compute(call.op, call.args, tys, result_ty, call.loc)?)),
        },
    };
    if differentiated(call) && (carries_gradient(&result) || cuts(call)) {
        on_tape(call, Some(tys), run)
    } else {
        run(&tys)
    }
}

/// Runs a call on a device other than the CPU.
#[cold]
fn elsewhere(call: &Call<'_>, tys: &[Ty], result: &TensorTy, target: Option<&Tensor>) -> Result<Tensor> {
    if let (None, Some(view)) = (target, view(call, tys)?) {
        return Ok(view);
    }
    let job = device::Job { op: call.op, args: call.args, tys, result, loc: call.loc };
    if let Some(target) = target
        && job.compute_in_place()?
    {
        return Ok(target.clone());
    }
    match job.compute()? {
        Some(result) => put(call, Tensor::from_ready(result), target),
        None => put(call, fresh(call, decomposed(call, tys, false)?)?, target),
    }
}

/// Runs an op by the kernel that a user gave it, wherever its operands are.
#[cold]
fn own_kernel(call: &Call<'_>, op: Custom, tys: &[Ty], result: &TensorTy) -> Result<Tensor> {
    let tensor = |(arg, ty): (&Arg<'_>, &Ty)| match arg {
        Arg::Tensor(t) => Ok(Tensor::from_ready(t.ready_as(Some(ty), call.op, call.loc)?.clone())),
        Arg::Number(_) | Arg::List(_) => Err(Error::bug(format!("an operand of {op:?} is no tensor"))),
    };
    let args = call.args.iter().zip(tys).map(tensor).collect::<Result<Vec<_>>>()?;
    custom::run(op, &args, tys, result, call.loc).map(Tensor::from_ready)
}

/// A result where it is to be.
fn put(call: &Call<'_>, result: Tensor, target: Option<&Tensor>) -> Result<Tensor> {
    match target {
        Some(target) => overwrite(target, &result, call.loc),
        None => Ok(result),
    }
}

/// Runs a call and puts it on the tape. Without `tys` every tensor among the operands is of the result's type.
fn on_tape(
    call: &Call<'_>,
    tys: Option<SmallVec<[Ty; 4]>>,
    run: impl FnOnce(&[Ty]) -> Result<Tensor>,
) -> Result<Tensor> {
    if matches!(call.op.row().grad, Grad::Decompose) {
        let tys = tys.map_or_else(|| arg_tys(call.args), Ok)?;
        return if call.in_place {
            decomposed_in_place(call, &tys)
        } else {
            fresh(call, decomposed(call, &tys, true)?)
        };
    }
    // Before the op runs: an in-place op replaces its target's history.
    let started = autograd::begin(call, tys.is_none())?;
    if call.in_place {
        let kept = autograd::copies_in(call, false, |i| started.reads.operand(i))?;
        let mut tensor = run(tys.as_deref().unwrap_or_default())?;
        started.finish(&autograd::as_before(call.args, &kept), tys, &mut tensor)?;
        tensor.changed_through(call.loc)?;
        return Ok(tensor);
    }
    let mut tensor = run(tys.as_deref().unwrap_or_default())?;
    started.finish(call.args, tys, &mut tensor)?;
    Ok(tensor)
}

/// Puts the parts of a composite on the tape and their result into its first operand, which gets its history.
fn decomposed_in_place(call: &Call<'_>, tys: &[Ty]) -> Result<Tensor> {
    let [Arg::Tensor(target), ..] = call.args else { return decomposed(call, tys, true) };
    // The parts keep what they read, and must not see the change that is to come.
    let kept = autograd::copies_in(call, true, |_| true)?;
    let args = autograd::as_before(call.args, &kept);
    let parts = Call { args: &args, in_place: false, ..*call };
    let mut result = fresh(&parts, decomposed(&parts, tys, true)?)?;
    if result.dtype() != target.dtype() {
        let op = Op::To { dtype: target.dtype() };
        let args = [Arg::Tensor(&result)];
        result = execute_one(&Call { op: &op, args: &args, in_place: false, ..*call })?;
    }
    let Some((node, output)) = result.history() else {
        // No gradient passes; what was computed before no longer counts.
        let args = [Arg::Tensor(target), Arg::Tensor(&result)];
        return execute_one(&Call { op: &Op::Copy {}, args: &args, ..*call });
    };
    overwrite(target, &result, call.loc)?;
    target.mark_requires_grad(true);
    target.set_history(node, output);
    target.changed_through(call.loc)?;
    Ok((*target).clone())
}

/// Numbers only: the user gets a 0-d tensor.
fn numbers_alone(call: &Call<'_>, tys: &[Ty]) -> Result<Tensor> {
    let numbers: Vec<_> =
        call.args.iter().filter_map(|arg| if let Arg::Number(x) = arg { Some(*x) } else { None }).collect();
    match call.op.fold(&numbers) {
        Some(x) => Tensor::scalar(x, call.loc),
        None => {
            let why = Why::Operand { argument: "at least one operand", expected: "a tensor" };
            Err(call.op.error(tys, why, call.loc))
        }
    }
}

/// A view shares its base's memory.
fn view(call: &Call<'_>, tys: &[Ty]) -> Result<Option<Tensor>> {
    if call.op.row().class != Class::View {
        return Ok(None);
    }
    let [Arg::Tensor(base)] = call.args else { return Ok(None) };
    let ready = base.ready_as(tys.first(), call.op, call.loc)?;
    let Some(layout) = ready.layout.view(call.op) else { return Ok(None) };
    // What is cut off from the tape is on its own.
    let detached = matches!(call.op, Op::Detach {});
    let view_version = (!detached).then(|| ready.storage.version());
    let view = Tensor::from_ready(Ready { layout, view_version, ..ready.clone() });
    // Of what is a view of something unknown it can't be said what a change would be a change of.
    let known = ready.view_version.is_none() || base.base().is_some();
    if call.grad_enabled && !detached && known && view.dtype().is_float() {
        view.become_view_of(base);
    }
    Ok(Some(view))
}

/// What an in-place op may do to its target; the same for eager and captured programs.
pub fn check_in_place(call: &Call<'_>, args: &[Arg<'_>], tys: &[Ty]) -> Result<()> {
    check_in_place_types(call, tys)?;
    match args.first() {
        Some(Arg::Tensor(target)) => check_in_place_target(call, args, tys, target),
        _ => Ok(()),
    }
}

/// The part of [`check_in_place`] that looks at types alone.
pub fn check_in_place_types(call: &Call<'_>, tys: &[Ty]) -> Result<()> {
    let result = call.op.infer(tys).map_err(|why| call.op.error(tys, why, call.loc))?;
    check_in_place_result(call, tys, &result[0])
}

/// The part of [`check_in_place`] that looks at the target itself.
pub fn check_in_place_target(call: &Call<'_>, args: &[Arg<'_>], tys: &[Ty], target: &Tensor) -> Result<()> {
    check_target(call, args, target).map_err(|why| in_place_error(call, tys, why))
}

fn in_place_error(call: &Call<'_>, tys: &[Ty], why: Why) -> Error {
    call.op.error(tys, why, call.loc).named(&format!("{}_", call.op.name()))
}

fn check_in_place_result(call: &Call<'_>, tys: &[Ty], result: &Ty) -> Result<()> {
    let (Some(Ty::Tensor(target)), Ty::Tensor(result)) = (tys.first(), result) else {
        let why = Why::Operand { argument: "the target", expected: "a tensor" };
        return Err(in_place_error(call, tys, why));
    };
    // Comparisons write truth values into any dtype; otherwise the category must not drop.
    if result.shape != target.shape || result.dtype.kind() > target.dtype.kind() {
        let why = Why::InPlace { result: result.to_string(), target: target.to_string() };
        Err(in_place_error(call, tys, why))
    } else {
        Ok(())
    }
}

/// What of the target, other than its type, forbids to change it in place.
fn check_target(call: &Call<'_>, args: &[Arg<'_>], target: &Tensor) -> Result<(), Why> {
    let wants = |arg: &Arg<'_>| matches!(arg, Arg::Tensor(t) if t.requires_grad());
    if call.grad_enabled && args.iter().any(wants) {
        if target.requires_grad() && target.is_leaf() {
            return Err(Why::Leaf);
        }
        match target.base() {
            Some(base) if base.requires_grad() && base.is_leaf() => return Err(Why::Leaf),
            Some(base) if !target.can_change(&base) => return Err(Why::ViewInPlace),
            None if target.try_ready().is_some_and(|ready| ready.view_version.is_some()) => {
                return Err(Why::ViewInPlace);
            }
            _ => {}
        }
    }
    match target.try_ready() {
        Some(ready) if !ready.layout.is_contiguous() && ready.layout.overlaps_itself() => Err(Why::Overlap),
        _ => Ok(()),
    }
}

/// A result that is nobody's view: a decomposition may hand back an operand, or a view of it, which is copied, as is what
/// has several elements in one place, or a view of what it made itself, which nobody else will ever see.
fn fresh(call: &Call<'_>, result: Tensor) -> Result<Tensor> {
    let ready = result.ready()?;
    let is_of = |arg: &Arg<'_>| matches!(arg, Arg::Tensor(t) if t.try_ready().is_some_and(|t| t.storage.address() == ready.storage.address()));
    let is_repeated = !ready.layout.is_contiguous() && ready.layout.overlaps_itself();
    if is_repeated || call.args.iter().any(is_of) {
        return clone_of(&result, call.grad_enabled, call.loc);
    }
    if ready.view_version.is_none() {
        return Ok(result);
    }
    let own = Tensor::from_ready(Ready { view_version: None, ..ready.clone() });
    if let Some((node, output)) = result.history() {
        own.mark_requires_grad(true);
        own.set_history(node, output);
    }
    Ok(own)
}

/// A copy in memory of its own.
pub(crate) fn clone_of(tensor: &Tensor, grad_enabled: bool, loc: Loc) -> Result<Tensor> {
    let args = [Arg::Tensor(tensor)];
    execute_one(&Call { op: &Op::Clone {}, args: &args, in_place: false, grad_enabled, loc })
}

/// Writes a result over a tensor, off the tape.
fn overwrite(target: &Tensor, result: &Tensor, loc: Loc) -> Result<Tensor> {
    let args = [Arg::Tensor(target), Arg::Tensor(result)];
    execute(&Call { op: &Op::Copy {}, args: &args, in_place: true, grad_enabled: false, loc })?;
    Ok(target.clone())
}

/// An op by its decomposition; with gradients the parts go on the tape.
fn decomposed(call: &Call<'_>, tys: &[Ty], grad_enabled: bool) -> Result<Tensor> {
    let mut cx = EagerEmit::new(grad_enabled, call.loc);
    let args: SmallVec<[_; 4]> = call.args.iter().zip(tys).map(|(arg, ty)| cx.arg(arg, ty)).collect();
    cx.begin();
    // The user knows the op that was called, not what it is made of.
    match call.op.decompose(&mut cx, &args).map_err(|error| error.named(call.op.name()))? {
        Some(values) => cx.take(values[0]).map_err(|error| error.named(call.op.name())),
        None => {
            let why = Why::NotDifferentiable { reason: "it has neither a gradient rule nor a decomposition" };
            Err(call.op.error(tys, why, call.loc))
        }
    }
}
