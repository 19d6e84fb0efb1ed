//! The recorder of a scan's body: ops on placeholders become a trace, and whatever else the body uses is the same in
//! every step.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use kiln_aot::trace::{Event, InputVariable, Trace, TraceArg, Variable};
use kiln_ir::{Class, Error, Grad, Layout, Loc, Op, Result, Scalar, TensorTy, Ty, Why, carries_gradient};
use kiln_tensor::Tensor;
use kiln_tensor::hook::{self, Access, Arg, Call, GradRequest, Output, Recorder, Tag};
use kiln_tensor::internal::TensorState as _;
use kiln_tensor::with_module;

use crate::state::NEXT_RUN;

pub(super) struct Tracer {
    run: u32,
    /// Whether gradients are recorded around the scan.
    grad_enabled: bool,
    traced: Mutex<Traced>,
}

/// What was recorded.
#[derive(Default)]
pub(super) struct Traced {
    pub(super) trace: Trace,
    /// Tensors of the program around the body, and their variables.
    pub(super) outside: Vec<(Tensor, Variable)>,
    /// By hole of the trace, its number.
    pub(super) numbers: Vec<Scalar>,
    /// By variable: how it would lie, and whether it is memory that the body did not make.
    variables: Vec<(Arc<Layout>, bool)>,
}

impl Traced {
    fn define(&mut self, ty: TensorTy, layout: Layout, is_given: bool) -> Variable {
        let layout = Arc::new(layout);
        self.variables.push((layout.clone(), is_given));
        let input = is_given.then_some(InputVariable { layout, requires_grad: false, leaf: false });
        self.trace.define(Ty::Tensor(ty), input)
    }

    fn ty(&self, variable: Variable) -> Option<&TensorTy> {
        self.trace.variables.get(variable as usize)?.ty.as_tensor()
    }

    fn record(&mut self, op: Op, args: Vec<TraceArg>, out: Option<Variable>, loc: Loc) {
        self.trace.events.push(Event::off_tape(op, args, out, loc));
    }
}

fn refuse(what: &str, why: &str, loc: Loc) -> Error {
    Error::op(what, Why::Other(why.to_string()), loc)
}

impl Tracer {
    pub(super) fn new(grad_enabled: bool) -> Arc<Tracer> {
        let run = NEXT_RUN.fetch_add(1, Ordering::Relaxed).max(1);
        let tracer = Arc::new(Tracer { run, grad_enabled, traced: Mutex::default() });
        let recorder: Arc<dyn Recorder> = tracer.clone();
        let recorder: Weak<dyn Recorder> = Arc::downgrade(&recorder);
        hook::register(run, recorder);
        tracer
    }

    /// A placeholder.
    pub(super) fn placeholder(&self, ty: &TensorTy) -> Tensor {
        let layout = Layout::contiguous(ty.shape.clone());
        let variable = self.traced.lock().define(ty.clone(), layout, true);
        self.lazy(variable, self.grad_enabled && carries_gradient(&ty.clone().into()))
    }

    fn lazy(&self, variable: Variable, requires_grad: bool) -> Tensor {
        Tensor::lazy(Tag::new(self.run, variable), requires_grad)
    }

    /// Records that the body returns these tensors: the variables that they are in.
    pub(super) fn results(&self, tensors: &[Tensor], loc: Loc) -> Result<Vec<Variable>> {
        let mut traced = self.traced.lock();
        let mut results = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let variable = self.variable(&mut traced, tensor)?;
            let Some(ty) = traced.ty(variable).cloned() else {
                return Err(Error::bug("a result of a scan's body without a type"));
            };
            let layout = Layout::contiguous(ty.shape.clone());
            let result = traced.define(ty, layout, false);
            traced.record(Op::Clone {}, vec![TraceArg::Variable(variable)], Some(result), loc);
            results.push(result);
        }
        Ok(results)
    }

    /// Ends the recording.
    pub(super) fn finish(&self) -> Traced {
        hook::unregister(self.run);
        std::mem::take(&mut self.traced.lock())
    }

    /// The variable that a tensor is. One that comes from outside is one from now on.
    fn variable(&self, traced: &mut Traced, tensor: &Tensor) -> Result<Variable> {
        // The lock is not held by whoever knows the type of a tensor from outside.
        if tensor.is_lazy() && tensor.tag().run() == self.run {
            return Ok(tensor.tag().variable());
        }
        if let Some((_, known)) = traced.outside.iter().find(|(outside, _)| outside.same(tensor)) {
            return Ok(*known);
        }
        let ty = match outside_ty(tensor) {
            Some(ty) => ty,
            None => tensor.ready()?.ty(),
        };
        let layout = Layout::contiguous(ty.shape.clone());
        let variable = traced.define(ty, layout, true);
        traced.outside.push((tensor.clone(), variable));
        Ok(variable)
    }
}

/// The type of a tensor that the body did not make, if it is told without computing anything.
fn outside_ty(tensor: &Tensor) -> Option<TensorTy> {
    match tensor.try_ready() {
        Some(ready) => Some(ready.ty()),
        None => hook::run_of(tensor.tag())?.ty(tensor),
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        hook::unregister(self.run);
    }
}

impl Recorder for Tracer {
    fn call(&self, call: &Call<'_>) -> Result<Output> {
        let row = call.op.row();
        let name = call.op.name();
        if row.class == Class::Random {
            let why = "random numbers drawn in a scan's body would be the same in every step: draw them before it, for all steps, and scan over them";
            return Err(refuse(name, why, call.loc));
        }
        let mut traced = self.traced.lock();
        let mut args = Vec::with_capacity(call.args.len());
        let mut tys = Vec::with_capacity(call.args.len());
        for (i, arg) in call.args.iter().enumerate() {
            match arg {
                Arg::Tensor(tensor) => {
                    let variable = self.variable(&mut traced, tensor)?;
                    tys.extend(traced.ty(variable).cloned().map(Ty::Tensor));
                    args.push(TraceArg::Variable(variable));
                }
                // What shapes the code is part of it; other numbers may change from call to call.
                Arg::Number(x) if row.scalar_class.is_some_and(|class| class(i, *x) != 0) => {
                    tys.push(Ty::Scalar(x.kind()));
                    args.push(TraceArg::Constant(*x));
                }
                Arg::Number(x) => {
                    tys.push(Ty::Scalar(x.kind()));
                    args.push(TraceArg::Number(traced.numbers.len() as u32));
                    traced.trace.numbers.push(x.kind());
                    traced.numbers.push(*x);
                }
                Arg::List(_) => {
                    return Err(refuse(name, "a scan's body can't work on lists of tensors", call.loc));
                }
            }
        }
        let error = |why| with_module(call.op.error(&tys, why, call.loc), call.args);
        let Some(Ty::Tensor(ty)) = call.op.infer(&tys).map_err(error)?.pop() else {
            return Err(refuse(name, "a scan's body can't compute numbers from numbers alone", call.loc));
        };
        if call.in_place {
            kiln_tensor::check_in_place_types(call, &tys)?;
            let (Some(TraceArg::Variable(target)), Some(Arg::Tensor(tensor))) =
                (args.first(), call.args.first())
            else {
                return Err(Error::bug("an op in place without a target"));
            };
            if traced.variables[*target as usize].1 {
                let why = "a scan's body can't change what it is given or what it captured in place: return what it becomes";
                return Err(refuse(&format!("{name}_"), why, call.loc));
            }
            traced.record(call.op.clone(), args, None, call.loc);
            return Ok(Output::Tensor((*tensor).clone()));
        }
        let (layout, is_given) = match (row.class, args.first()) {
            (Class::View, Some(TraceArg::Variable(source))) => {
                let (layout, is_given) = &traced.variables[*source as usize];
                match layout.view(call.op) {
                    Some(layout) => (layout, *is_given),
                    None => (Layout::contiguous(ty.shape.clone()), false),
                }
            }
            _ => (Layout::contiguous(ty.shape.clone()), false),
        };
        let wants = |arg: &Arg<'_>| matches!(arg, Arg::Tensor(t) if t.requires_grad());
        let requires_grad = call.grad_enabled
            && carries_gradient(&Ty::Tensor(ty.clone()))
            && !matches!(row.grad, Grad::Zero)
            && call.args.iter().any(wants);
        let is_made = |traced: &mut Traced| {
            traced.trace.define(Ty::Tensor(ty.clone()), None);
            traced.variables.push((Arc::new(layout.clone()), is_given));
            traced.trace.variables.len() as Variable - 1
        };
        let mut out = is_made(&mut traced);
        traced.record(call.op.clone(), args, Some(out), call.loc);
        // Under no_grad inside of a scan that is differentiated.
        if self.grad_enabled && !call.grad_enabled && carries_gradient(&Ty::Tensor(ty.clone())) {
            let cut = is_made(&mut traced);
            traced.record(Op::Detach {}, vec![TraceArg::Variable(out)], Some(cut), call.loc);
            out = cut;
        }
        Ok(Output::Tensor(self.lazy(out, requires_grad)))
    }

    fn backward(&self, request: &GradRequest<'_>) -> Result<()> {
        Err(refuse(
            "backward",
            "gradients can't be computed in a scan's body: a scan is differentiated as a whole",
            request.loc,
        ))
    }

    fn grad(&self, request: &GradRequest<'_>) -> Result<Option<Vec<Option<Tensor>>>> {
        Err(refuse(
            "grad",
            "gradients can't be computed in a scan's body: a scan is differentiated as a whole",
            request.loc,
        ))
    }

    fn begin_function(&self, name: &str, _inputs: &[&Tensor], loc: Loc) -> Result<bool> {
        Err(refuse(name, "a scan's body can't apply a function with a backward of its own", loc))
    }

    fn access(&self, tensor: &Tensor, access: Access, what: &'static str, loc: Loc) -> Result<()> {
        let is_own = tensor.is_lazy() && tensor.tag().run() == self.run;
        match access {
            Access::Read | Access::Print if !is_own => Ok(()),
            Access::Read | Access::Print => {
                let why = "a scan's body is recorded once for all steps: it has no values to look at";
                Err(refuse(what, why, loc))
            }
            Access::Write | Access::State | Access::Tape => {
                Err(refuse(what, "a scan's body can't change tensors other than by ops", loc))
            }
        }
    }

    fn ty(&self, tensor: &Tensor) -> Option<TensorTy> {
        if tensor.tag().run() == self.run {
            self.traced.lock().ty(tensor.tag().variable()).cloned()
        } else {
            outside_ty(tensor)
        }
    }

    fn layout(&self, tensor: &Tensor) -> Option<Layout> {
        if tensor.tag().run() != self.run {
            return hook::run_of(tensor.tag())?.layout(tensor);
        }
        let traced = self.traced.lock();
        traced.variables.get(tensor.tag().variable() as usize).map(|(layout, _)| Layout::clone(layout))
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn force(&self) -> Result<()> {
        Err(refuse(
            "scan",
            "a scan's body is recorded once for all steps: it has no values to look at",
            Loc::UNKNOWN,
        ))
    }
}
