//! Runs what gradient rules and decompositions emit, on real tensors.

use smallvec::smallvec;

use kiln_ir::{Device, Emit, Error, Lifetimes, Loc, Op, Result, Scalar, TensorTy, Ty, Value, Values};

use super::node::Saved;
use crate::create::spread;
use crate::dispatch::{clone_of, execute};
use crate::hook::{Arg, Call, Output};
use crate::{Tensor, TensorList};

enum Item {
    Tensor(Tensor),
    /// A tensor that is one number everywhere, in memory once: what reads it fills its result with it.
    Spread(Tensor),
    Number(Scalar),
    List(TensorList),
    /// Only the type is known: a rule that reads it says so in its row.
    Nothing,
}

/// An emitter that executes ops at once.
pub struct EagerEmit {
    items: Vec<(Item, Ty)>,
    /// When values are let go of, where that is known: how far it was followed, and the ops so far.
    lifetimes: Option<(Lifetimes, usize, u32)>,
    grad_enabled: bool,
    loc: Loc,
}

impl EagerEmit {
    /// An emitter whose ops are recorded on the tape, or not.
    pub fn new(grad_enabled: bool, loc: Loc) -> EagerEmit {
        EagerEmit { items: Vec::with_capacity(16), lifetimes: None, grad_enabled, loc }
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

    fn push(&mut self, item: Item, ty: Ty) -> Value {
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

    /// The tensor behind a value.
    pub fn take(&mut self, value: Value) -> Result<Tensor> {
        match &self.items[value.index()].0 {
            Item::Tensor(t) => Ok(t.clone()),
            Item::Spread(t) => clone_of(t, false, self.loc),
            Item::Number(x) => Tensor::scalar(*x, self.loc),
            Item::List(_) | Item::Nothing => Err(self.unsaved("its result")),
        }
    }

    #[track_caller]
    fn unsaved(&self, what: &str) -> Error {
        Error::bug(format!("the gradient rule of an op ({}) reads {what}, which was not saved", self.loc))
    }
}

impl Emit for EagerEmit {
    fn emit(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let values = self.run(op, args)?;
        self.pass();
        Ok(values)
    }

    fn ty(&self, value: Value) -> &Ty {
        &self.items[value.index()].1
    }
}

impl EagerEmit {
    fn run(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        if let Op::Constant { value } = op {
            return Ok(smallvec![self.push(Item::Number(value), Ty::Scalar(value.kind()))]);
        }
        if let (Op::Full { shape, dtype, device: Device::Cpu }, [value]) = (&op, args)
            && let Item::Number(value) = self.items[value.index()].0
            && shape.numel() > 1
        {
            let ty = TensorTy { dtype: *dtype, device: Device::Cpu, shape: shape.clone() };
            let tensor = Tensor::from_ready(spread(&ty, value, self.loc)?);
            return Ok(smallvec![self.push(Item::Spread(tensor), ty.into())]);
        }
        let mut operands: smallvec::SmallVec<[Arg<'_>; 6]> = smallvec![];
        for &value in args {
            operands.push(match &self.items[value.index()].0 {
                Item::Tensor(t) | Item::Spread(t) => Arg::Tensor(t),
                Item::Number(x) => Arg::Number(*x),
                Item::List(l) => Arg::List(l),
                Item::Nothing => return Err(self.unsaved(&format!("%{} in {}", value.0, op.name()))),
            });
        }
        // Arithmetic of numbers stays with the numbers.
        if !operands.is_empty() && operands.iter().all(|a| matches!(a, Arg::Number(_))) {
            let numbers: Vec<Scalar> = operands
                .iter()
                .filter_map(|a| if let Arg::Number(x) = a { Some(*x) } else { None })
                .collect();
            if let Some(x) = op.fold(&numbers) {
                drop(operands);
                return Ok(smallvec![self.push(Item::Number(x), Ty::Scalar(x.kind()))]);
            }
        }
        let call = Call {
            op: &op,
            args: &operands,
            in_place: false,
            grad_enabled: self.grad_enabled,
            loc: self.loc,
        };
        let output = execute(&call)?;
        drop(operands);
        let (item, ty) = match output {
            Output::Tensor(t) => {
                let ty = t.ty().into();
                (Item::Tensor(t), ty)
            }
            Output::List(l) => {
                let tys = l.items()?.iter().map(Tensor::ty).collect();
                (Item::List(l), Ty::List(tys))
            }
        };
        Ok(smallvec![self.push(item, ty)])
    }
}
