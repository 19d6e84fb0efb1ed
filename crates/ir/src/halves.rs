//! Half precision: an op, whatever it is made of, computes in f32 and rounds its result once.
//!
//! Steps of a decomposition or of a gradient rule that were rounded one by one would lose digits (the mean of a
//! layer norm), overflow (the squares of a norm) or underflow (a variance). So operands are widened on their way
//! in and results are rounded on their way out, here and nowhere else.

use smallvec::{SmallVec, smallvec};

use crate::op::GradFn;
use crate::{Class, DType, Emit, EmitExt, GradCall, Op, Result, TensorTy, Ty, Value, Values};

/// The half that a value is made of: a tensor's dtype, or that of all elements of a list.
fn half_of(ty: &Ty) -> Option<DType> {
    let half = |dtype: DType| (dtype.is_float() && dtype.is_narrow()).then_some(dtype);
    match ty {
        Ty::Tensor(t) => half(t.dtype),
        Ty::List(items) => {
            let mut kinds = items.kinds().map(|t| t.dtype);
            let first = kinds.next()?;
            if kinds.all(|dtype| dtype == first) { half(first) } else { None }
        }
        Ty::Scalar(_) => None,
    }
}

/// Whether a tensor, or some element of a list, is a half.
fn holds_half(ty: &Ty) -> bool {
    match ty {
        Ty::List(items) => items.kinds().any(|t| t.dtype.is_float() && t.dtype.is_narrow()),
        other => half_of(other).is_some(),
    }
}

/// Whether a list has several of truth values, integers and floats, or integers of several widths.
fn is_mixed(ty: &Ty) -> bool {
    let Ty::List(items) = ty else { return false };
    let kind = |dtype: DType| (dtype.kind(), (!dtype.is_float()).then_some(dtype));
    let mut kinds = items.kinds().map(|t| kind(t.dtype));
    let first = kinds.next();
    kinds.any(|kind| Some(kind) != first)
}

/// An op over lists as ops over their elements.
pub fn element_by_element(cx: &mut dyn Emit, op: &Op, args: &[Value]) -> Result<Values> {
    let len = args.iter().find_map(|&v| cx.ty(v).as_list().map(|items| items.len())).unwrap_or(0);
    let mut results = Vec::with_capacity(len);
    for n in 0..len {
        let mut element: SmallVec<[Value; 4]> = SmallVec::new();
        for &arg in args {
            element.push(if cx.ty(arg).as_list().is_some() { cx.list_get(arg, n)? } else { arg });
        }
        results.push(cx.emit_one(op.clone(), &element)?);
    }
    Ok(smallvec![cx.list(&results)?])
}

impl Op {
    /// Whether an op computes new numbers from its operands; others only move, choose or convert them.
    pub fn computes(&self) -> bool {
        match self.row().class {
            Class::Pointwise => !matches!(self, Op::To { .. } | Op::Clone {} | Op::Copy {} | Op::Detach {}),
            Class::Reduction | Class::Composite | Class::Contraction => true,
            Class::View
            | Class::Index
            | Class::Create
            | Class::Random
            | Class::Constant
            | Class::List
            | Class::Custom => false,
        }
    }

    /// Whether the steps are views and a product, which rounds its result once by itself, and so are the gradient's: dims
    /// that are broadcast would be summed up after rounding.
    fn is_one_product<'a>(&self, ty: &dyn Fn(usize) -> &'a Ty) -> bool {
        let Op::Matmul {} = self else { return false };
        let (Ty::Tensor(x), Ty::Tensor(y)) = (ty(0), ty(1)) else { return false };
        let lead = |t: &TensorTy| t.shape[..t.shape.rank().saturating_sub(2)].to_vec();
        y.shape.rank() <= 2 || lead(x) == lead(y)
    }

    /// Emits the simpler ops that an op is made of; `None` if it is made of none.
    ///
    /// layer_norm(x, eps) : f16 → to(layer_norm's steps of to(x, f32) and eps, f16)
    pub fn decompose(&self, cx: &mut dyn Emit, args: &[Value]) -> Result<Option<Values>> {
        let Some(steps) = self.row().decompose else { return Ok(None) };
        let any = |what: fn(&Ty) -> bool| self.computes() && args.iter().any(|&v| what(cx.ty(v)));
        if self.is_one_product(&|i| cx.ty(args[i])) {
            return steps(cx, self, args).map(Some);
        }
        // Steps look at one dtype: integers and floats, or several integers, of one list are taken one by one.
        if any(is_mixed) {
            return element_by_element(cx, self, args).map(Some);
        }
        if !any(holds_half) {
            return steps(cx, self, args).map(Some);
        }
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&v| cx.ty(v).clone()).collect();
        let result = self.infer(&tys).ok().map(|outs| outs[0].clone());
        let half = match &result {
            Some(ty) => match half_of(ty) {
                None if holds_half(ty) => return element_by_element(cx, self, args).map(Some),
                half => half,
            },
            None => None,
        };
        let Some(half) = half else { return steps(cx, self, args).map(Some) };
        let mut wide: SmallVec<[Value; 4]> = SmallVec::new();
        for (&arg, ty) in args.iter().zip(&tys) {
            // Promotion comes first: an integer beside a half is rounded to one.
            let promoted = match ty {
                Ty::Tensor(t) if self.row().class == Class::Pointwise && t.dtype != half => {
                    cx.to(arg, half)?
                }
                _ => arg,
            };
            wide.push(if half_of(cx.ty(promoted)).is_some() { cx.to(promoted, DType::F32)? } else { arg });
        }
        let values = steps(cx, self, &wide)?;
        if half_of(cx.ty(values[0])) == Some(half) {
            return Ok(Some(values));
        }
        Ok(Some(smallvec![cx.to(values[0], half)?]))
    }
}

impl GradCall<'_> {
    /// Whether the rule of a call that computes meets halves.
    pub(crate) fn is_half(&self, cx: &dyn Emit) -> bool {
        // The rule of a contraction is made of contractions, which widen by themselves.
        self.op.computes()
            && self.op.row().class != Class::Contraction
            && self.grads.iter().flatten().any(|&g| half_of(cx.ty(g)).is_some())
    }

    /// Runs a rule in f32. What it returns is rounded by whoever fits it to the operand.
    pub(crate) fn widened(&self, cx: &mut dyn Emit, rule: GradFn) -> Result<Vec<Option<Value>>> {
        let values = self.inputs.iter().chain(self.outputs).chain(self.grads.iter().flatten());
        let mut wide: SmallVec<[Widened; 6]> = SmallVec::new();
        for &value in values {
            if let Ty::Tensor(ty) = cx.ty(value)
                && half_of(cx.ty(value)).is_some()
                && wide.iter().all(|w| w.value != value)
            {
                let ty = Ty::Tensor(crate::TensorTy { dtype: DType::F32, ..ty.clone() });
                wide.push(Widened { value, ty, converted: None });
            }
        }
        let mut cx = Widening { inner: cx, wide };
        let mut grads = rule(&mut cx, self)?;
        for grad in grads.iter_mut().flatten() {
            *grad = cx.converted(*grad)?;
        }
        Ok(grads)
    }
}

/// A half as a rule sees it.
struct Widened {
    value: Value,
    ty: Ty,
    /// Once it was read.
    converted: Option<Value>,
}

/// An emitter to which some halves are f32; each is converted when it is read for the first time. Values of which
/// only the type is asked for are left alone.
struct Widening<'a> {
    inner: &'a mut dyn Emit,
    wide: SmallVec<[Widened; 6]>,
}

impl Widening<'_> {
    fn converted(&mut self, value: Value) -> Result<Value> {
        match self.wide.iter_mut().find(|w| w.value == value) {
            None => Ok(value),
            Some(Widened { converted: Some(converted), .. }) => Ok(*converted),
            Some(w) => {
                let converted = self.inner.to(value, DType::F32)?;
                w.converted = Some(converted);
                Ok(converted)
            }
        }
    }
}

impl Emit for Widening<'_> {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let mut wide: SmallVec<[Value; 6]> = SmallVec::new();
        for &arg in args {
            wide.push(self.converted(arg)?);
        }
        self.inner.emit(op, &wide)
    }

    fn ty(&self, value: Value) -> &Ty {
        match self.wide.iter().find(|w| w.value == value) {
            Some(w) => &w.ty,
            None => self.inner.ty(value),
        }
    }
}
