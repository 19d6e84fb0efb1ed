//! Runs what gradient rules and decompositions emit, on real tensors: at once where gradients are recorded or tensors
//! are small, else when the rule has ended and it is known who reads what.

use smallvec::{SmallVec, smallvec};

use kiln_ir::{Device, Emit, Error, Lifetimes, Loc, Op, Result, Scalar, TensorTy, Ty, Value, Values};

use super::deferred::{self, Deferred};
use super::node::Saved;
use crate::create::spread;
use crate::dispatch::{clone_of, execute};
use crate::hook::{Arg, Call, Output};
use crate::{Tensor, TensorList};

pub(super) enum Item {
    Tensor(Tensor),
    /// A tensor that is one number everywhere, in memory once: what reads it fills its result with it.
    Spread(Tensor),
    Number(Scalar),
    List(TensorList),
    /// Yet to be computed, by the deferred op with this number.
    Pending(usize),
    /// Only the type is known: a rule that reads it says so in its row.
    Nothing,
}

/// An emitter that executes ops.
pub struct EagerEmit {
    pub(super) items: Vec<(Item, Ty)>,
    /// The ops that are yet to run; `None` if each runs at once.
    pub(super) deferred: Option<Deferred>,
    /// When values are let go of, where that is known: how far it was followed, and the ops so far.
    lifetimes: Option<(Lifetimes, usize, u32)>,
    grad_enabled: bool,
    pub(super) loc: Loc,
}

impl EagerEmit {
    /// An emitter whose ops are recorded on the tape, or not.
    pub fn new(grad_enabled: bool, loc: Loc) -> EagerEmit {
        EagerEmit { items: Vec::with_capacity(16), deferred: None, lifetimes: None, grad_enabled, loc }
    }

    /// The operands are there: from now on ops wait for the end if that pays.
    pub(crate) fn begin(&mut self) {
        if !self.grad_enabled && deferred::pays(self.items.iter().map(|(_, ty)| ty)) {
            self.deferred = Some(Deferred::default());
        }
    }

    /// Whether ops run at once, and values can be let go of on the way.
    pub(crate) fn is_immediate(&self) -> bool {
        self.deferred.is_none()
    }

    /// From now on values are let go of when they were read for the last time.
    pub(crate) fn end_values(&mut self, lifetimes: Lifetimes) {
        self.lifetimes = Some((lifetimes, 0, 0));
    }

    /// Another op was emitted.
    fn pass(&mut self) {
        if let Some((lifetimes, at, ops)) = &mut self.lifetimes {
            *ops += 1;
            for value in lifetimes.end_at(at, *ops) {
                // Numbers cost nothing.
                if let Some((item @ (Item::Tensor(_) | Item::Spread(_) | Item::List(_)), _)) =
                    self.items.get_mut(value.index())
                {
                    *item = Item::Nothing;
                }
            }
        }
    }

    pub(super) fn push(&mut self, item: Item, ty: Ty) -> Value {
        self.items.push((item, ty));
        Value(self.items.len() as u32 - 1)
    }

    /// Makes a tensor a value.
    pub fn tensor(&mut self, tensor: &Tensor) -> Value {
        self.push(Item::Tensor(tensor.clone()), tensor.ty().into())
    }

    /// Makes an operand a value.
    pub fn arg(&mut self, arg: &Arg<'_>, ty: &Ty) -> Value {
        let item = match arg {
            Arg::Tensor(t) => Item::Tensor((*t).clone()),
            Arg::Number(x) => Item::Number(*x),
            Arg::List(l) => Item::List((*l).clone()),
        };
        self.push(item, ty.clone())
    }

    /// Makes a saved value of a call, whose result has this type, a value.
    pub(crate) fn saved(&mut self, saved: Saved, result: &TensorTy) -> Value {
        match saved {
            Saved::LikeResult => self.push(Item::Nothing, result.clone().into()),
            Saved::Type(ty) => self.push(Item::Nothing, *ty),
            Saved::Number(x) => self.push(Item::Number(x), Ty::Scalar(x.kind())),
            Saved::Tensor(tensor, _) => {
                let ty = tensor.ty().into();
                self.push(Item::Tensor(tensor), ty)
            }
        }
    }

    /// The tensors behind values: the end of what is emitted.
    pub fn results(mut self, values: Vec<Option<Value>>) -> Result<Vec<Option<Tensor>>> {
        self.run_deferred(&values)?;
        values.into_iter().map(|value| value.map(|value| self.result(value)).transpose()).collect()
    }

    /// The tensor behind a value: the end of what is emitted.
    pub fn take(mut self, value: Value) -> Result<Tensor> {
        self.run_deferred(&[Some(value)])?;
        self.result(value)
    }

    fn result(&self, value: Value) -> Result<Tensor> {
        match &self.items[value.index()].0 {
            Item::Tensor(t) => Ok(t.clone()),
            Item::Spread(t) => clone_of(t, false, self.loc),
            Item::Number(x) => Tensor::scalar(*x, self.loc),
            Item::List(_) | Item::Pending(_) | Item::Nothing => Err(self.unsaved("its result")),
        }
    }

    #[track_caller]
    pub(super) fn unsaved(&self, what: &str) -> Error {
        Error::bug(format!("the gradient rule of an op ({}) reads {what}, which was not saved", self.loc))
    }
}

impl Emit for EagerEmit {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        if let Op::Constant { value } = op {
            self.pass();
            return Ok(smallvec![self.push(Item::Number(value), Ty::Scalar(value.kind()))]);
        }
        if let Some(x) = self.fold(&op, args) {
            self.pass();
            return Ok(smallvec![self.push(Item::Number(x), Ty::Scalar(x.kind()))]);
        }
        if !self.is_immediate() {
            return self.defer(op, args);
        }
        let (item, ty) = self.run(&op, args)?;
        let value = self.push(item, ty);
        self.pass();
        Ok(smallvec![value])
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.items[value.index()].1
    }
}

impl EagerEmit {
    /// Arithmetic of numbers stays with the numbers.
    fn fold(&self, op: &Op, args: &[Value]) -> Option<Scalar> {
        let mut numbers: SmallVec<[Scalar; 4]> = smallvec![];
        for &value in args {
            let Item::Number(x) = self.items[value.index()].0 else { return None };
            numbers.push(x);
        }
        if numbers.is_empty() { None } else { op.fold(&numbers) }
    }

    /// Executes an op now.
    pub(super) fn run(&self, op: &Op, args: &[Value]) -> Result<(Item, Ty)> {
        if let (Op::Full { shape, dtype, device: Device::Cpu }, [value]) = (op, args)
            && let Item::Number(value) = self.items[value.index()].0
            && shape.numel() > 1
        {
            let ty = TensorTy { dtype: *dtype, device: Device::Cpu, shape: shape.clone() };
            let tensor = Tensor::from_ready(spread(&ty, value, self.loc)?);
            return Ok((Item::Spread(tensor), ty.into()));
        }
        let mut operands: SmallVec<[Arg<'_>; 6]> = smallvec![];
        for &value in args {
            operands.push(match &self.items[value.index()].0 {
                Item::Tensor(t) | Item::Spread(t) => Arg::Tensor(t),
                Item::Number(x) => Arg::Number(*x),
                Item::List(l) => Arg::List(l),
                Item::Pending(_) | Item::Nothing => {
                    return Err(self.unsaved(&format!("%{} in {}", value.0, op.name())));
                }
            });
        }
        let call =
            Call { op, args: &operands, in_place: false, grad_enabled: self.grad_enabled, loc: self.loc };
        Ok(match execute(&call)? {
            Output::Tensor(t) => {
                let ty = t.ty().into();
                (Item::Tensor(t), ty)
            }
            Output::List(l) => {
                let tys = l.items()?.iter().map(Tensor::ty).collect();
                (Item::List(l), Ty::List(tys))
            }
        })
    }
}
