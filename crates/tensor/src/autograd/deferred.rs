//! Ops that wait until the rule that emits them has ended. Then it is known who reads what: runs of pointwise ops
//! become formulas, which go through memory once, and values are let go of when they were read for the last time.
//!
//! ```text
//! s = sigmoid(x); y = x · s    each op's result in memory        formula: s stays in the cache
//! ```

use smallvec::{SmallVec, smallvec};

use kiln_ir::math::Function;
use kiln_ir::{
    Class, DType, Device, Error, Layout, Op, Result, Scalar, Shape, TensorTy, Ty, Value, Values, result_dtype,
};

use super::emit::{EagerEmit, Item};
use crate::Tensor;
use crate::create::allocate;
use crate::eager::{self, number_dtype};
use crate::kernels::formula::{self, Computes, Source, Step};
use crate::kernels::{Bits, Comparison, Logical, Operand};
use crate::storage::Guard;
use crate::tensor::{Held, Ready};

/// Elements of the largest operand from which on it pays to wait: below, finding formulas costs more than they save.
/// Tests look at all.
const LEAST: usize = if cfg!(debug_assertions) { 1 } else { 1 << 11 };

/// Whether it pays to let ops on operands of these types wait.
pub(super) fn pays<'a>(mut tys: impl Iterator<Item = &'a Ty>) -> bool {
    #[cfg(test)]
    if tests::op_by_op() {
        return false;
    }
    tys.any(|ty| matches!(ty, Ty::Tensor(ty) if ty.shape.numel() >= LEAST && ty.device == Device::Cpu))
}

/// The ops that wait, in the order in which they were emitted.
#[derive(Default)]
pub(super) struct Deferred {
    ops: Vec<Waiting>,
}

struct Waiting {
    op: Op,
    args: SmallVec<[Value; 3]>,
    result: Value,
    /// For a pointwise op: what it is in a formula, and the dtype in which it takes its operands.
    step: Option<(Computes, DType)>,
    /// Its place in the formula that is being put together.
    place: usize,
    taken: bool,
}

/// What an op is in a formula, and the dtype in which it takes its operands.
fn step(op: &Op, tys: &[Ty], result: &TensorTy, exponent: Option<Scalar>) -> Option<(Computes, DType)> {
    if eager::division(op).is_some() && !result.dtype.is_float() {
        return None;
    }
    let compare = |comparison| (Computes::Comparison(comparison), result_dtype(tys));
    let bits = |function| (Computes::Bits(function), result.dtype);
    let (computes, taken) = match (eager::function(op, tys.len()), op) {
        (Some(Function::Pow), _)
            if result.dtype.is_float() && exponent.is_some_and(|y| y.as_f64() == 1.0) =>
        {
            (Computes::Conversion, result.dtype)
        }
        (Some(Function::Pow), _) if result.dtype.is_float() => {
            (Computes::Function(exponent.and_then(eager::power).unwrap_or(Function::Pow)), result.dtype)
        }
        (Some(function), _) => (Computes::Function(function), result.dtype),
        (None, Op::Eq {}) => compare(Comparison::Eq),
        (None, Op::Ne {}) => compare(Comparison::Ne),
        (None, Op::Lt {}) => compare(Comparison::Lt),
        (None, Op::Le {}) => compare(Comparison::Le),
        (None, Op::Gt {}) => compare(Comparison::Gt),
        (None, Op::Ge {}) => compare(Comparison::Ge),
        (None, Op::LogicalAnd {}) => (Computes::Logical(Logical::And), DType::Bool),
        (None, Op::LogicalNot {}) => (Computes::Logical(Logical::Not), DType::Bool),
        (None, Op::Where {}) => (Computes::Choice, result.dtype),
        (None, Op::BitwiseAnd {}) => bits(Bits::And),
        (None, Op::BitwiseOr {}) => bits(Bits::Or),
        (None, Op::BitwiseXor {}) => bits(Bits::Xor),
        (None, Op::BitwiseLeftShift {}) => bits(Bits::Left),
        (None, Op::BitwiseRightShift {}) => bits(Bits::Right),
        (None, Op::To { .. } | Op::Clone {} | Op::Full { .. }) => (Computes::Conversion, result.dtype),
        _ => return None,
    };
    (result.device == Device::Cpu && computes.takes(taken)).then_some((computes, taken))
}

/// A number as an element that a step takes.
fn number(op: &Op, computes: Computes, place: usize, taken: DType, x: Scalar) -> Source {
    let dtype = match computes {
        Computes::Choice if place == 0 => DType::Bool,
        Computes::Choice | Computes::Logical(_) | Computes::Conversion => taken,
        Computes::Function(_) | Computes::Comparison(_) | Computes::Bits(_) => number_dtype(taken),
    };
    Source::Number { element: op.number(x, dtype).to_element(dtype), dtype }
}

impl EagerEmit {
    /// Takes an op that runs later, or the ops that it is made of.
    pub(super) fn defer(&mut self, op: Op, args: &[Value]) -> Result<Values> {
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|&arg| self.items[arg.index()].1.clone()).collect();
        let is_list = |ty: &Ty| matches!(ty, Ty::List(_));
        if op.row().class == Class::Pointwise
            && !eager::has_kernel(&op, args.len())
            && !tys.iter().any(is_list)
        {
            op.infer(&tys).map_err(|why| op.error(&tys, why, self.loc))?;
            if let Some(values) = op.decompose(self, args).map_err(|error| error.named(op.name()))? {
                return Ok(values);
            }
        }
        let result = op.infer(&tys).map_err(|why| op.error(&tys, why, self.loc))?.remove(0);
        let number = |place: usize| match self.items[args.get(place)?.index()].0 {
            Item::Number(x) => Some(x),
            _ => None,
        };
        // What is not chosen is not computed.
        if let (Op::Where {}, Some(condition), Ty::Tensor(like)) = (&op, number(0), &result) {
            let chosen = args[if condition.as_bool() { 1 } else { 2 }];
            match &self.items[chosen.index()] {
                (Item::Pending(_), ty) if *ty == result => return Ok(smallvec![chosen]),
                (Item::Number(_), _) => {
                    let TensorTy { shape, dtype, device, .. } = like.clone();
                    return self.defer(Op::Full { shape, dtype, device }, &[chosen]);
                }
                _ => {}
            }
        }
        let step = match &result {
            Ty::Tensor(result) if !tys.iter().any(is_list) => step(&op, &tys, result, number(1)),
            _ => None,
        };
        let args = args.iter().copied().collect();
        let deferred = self.deferred.get_or_insert_default();
        let number = deferred.ops.len();
        let value = Value(self.items.len() as u32);
        deferred.ops.push(Waiting { op, args, result: value, step, place: 0, taken: false });
        self.push(Item::Pending(number), result);
        Ok(smallvec![value])
    }

    /// Runs what waits, as far as these values and what may fail ask for it.
    pub(super) fn run_deferred(&mut self, wanted: &[Option<Value>]) -> Result<()> {
        let Some(Deferred { ops }) = self.deferred.take() else { return Ok(()) };
        let mut uses = vec![0; self.items.len()];
        wanted.iter().flatten().for_each(|value| uses[value.index()] += 1);
        for waiting in ops.iter().rev() {
            if waiting.step.is_none() || uses[waiting.result.index()] > 0 {
                waiting.args.iter().for_each(|arg| uses[arg.index()] += 1);
            }
        }
        for (item, uses) in self.items.iter_mut().zip(&uses) {
            if *uses == 0 && matches!(item.0, Item::Tensor(_) | Item::Spread(_) | Item::List(_)) {
                item.0 = Item::Nothing;
            }
        }
        let mut run = Run { cx: self, ops, uses };
        for number in 0..run.ops.len() {
            if run.ops[number].step.is_none() {
                let args = run.ops[number].args.clone();
                run.complete(&args)?;
                run.alone(number)?;
            }
        }
        let wanted: SmallVec<[Value; 3]> = wanted.iter().flatten().copied().collect();
        run.complete(&wanted)
    }
}

/// What waited, running.
struct Run<'a> {
    cx: &'a mut EagerEmit,
    ops: Vec<Waiting>,
    /// How often each value is yet to be read.
    uses: Vec<usize>,
}

impl Run<'_> {
    fn pending(&self, value: Value) -> Option<usize> {
        match self.cx.items[value.index()].0 {
            Item::Pending(number) => Some(number),
            _ => None,
        }
    }

    fn shape(&self, value: Value) -> Option<&Shape> {
        self.cx.items[value.index()].1.as_tensor().map(|ty| &ty.shape)
    }

    /// A value was read; nobody needs it any more if this was the last time.
    fn read(&mut self, value: Value) {
        let uses = &mut self.uses[value.index()];
        *uses -= 1;
        let item = &mut self.cx.items[value.index()].0;
        if *uses == 0 && matches!(item, Item::Tensor(_) | Item::Spread(_) | Item::List(_)) {
            *item = Item::Nothing;
        }
    }

    /// Runs an op by itself.
    fn alone(&mut self, number: usize) -> Result<()> {
        let Waiting { op, args, result, .. } = &self.ops[number];
        let (args, result) = (args.clone(), *result);
        let (item, ty) = self.cx.run(op, &args)?;
        self.cx.items[result.index()] = (item, ty);
        args.iter().for_each(|&arg| self.read(arg));
        Ok(())
    }

    /// Computes values, with formulas of one shape each.
    fn complete(&mut self, values: &[Value]) -> Result<()> {
        loop {
            let waits = values.iter().copied().filter(|&value| self.pending(value).is_some());
            let Some(last) = waits.max() else { return Ok(()) };
            let Some(shape) = self.shape(last).cloned() else { return Ok(()) };
            let same = |value: &Value| self.shape(*value) == Some(&shape);
            let mut stack: SmallVec<[Value; 8]> = values.iter().copied().filter(same).collect();
            let (mut formula, mut others) = (SmallVec::<[usize; 16]>::new(), SmallVec::<[Value; 4]>::new());
            while let Some(value) = stack.pop() {
                let Some(number) = self.pending(value) else { continue };
                if self.shape(value) != Some(&shape) {
                    // It is smaller, and so is what it is made of.
                    others.push(value);
                } else if !std::mem::replace(&mut self.ops[number].taken, true) {
                    formula.push(number);
                    stack.extend(self.ops[number].args.iter().copied());
                }
            }
            self.complete(&others)?;
            formula.sort_unstable();
            self.formula(&formula, &shape)?;
        }
    }

    /// Runs ops, all of this shape, as one formula; what others read goes to memory.
    fn formula(&mut self, numbers: &[usize], shape: &Shape) -> Result<()> {
        if let &[number] = numbers {
            return self.alone(number);
        }
        for (place, &number) in numbers.iter().enumerate() {
            self.ops[number].place = place;
            for arg in self.ops[number].args.clone() {
                if self.pending(arg).is_some() {
                    self.uses[arg.index()] -= 1;
                }
            }
        }
        let leaves = self.leaves(numbers)?;
        let held = Held::of(leaves.iter().map(|(_, tensor)| tensor));
        let mut readies: SmallVec<[(&Ready, Layout); 6]> = SmallVec::new();
        for (value, tensor) in &leaves {
            let (op, ty) = (&self.ops[numbers[0]].op, &self.cx.items[value.index()].1);
            let ready = held.operand(tensor, Some(ty), op, self.cx.loc)?;
            let layout = if ready.layout.shape == *shape {
                Some(ready.layout.clone())
            } else {
                ready.layout.view(&Op::Expand { shape: shape.clone() })
            };
            let no_broadcast =
                || Error::bug(format!("an operand of {} has no shape for {shape:?}", op.name()));
            readies.push((ready, layout.ok_or_else(no_broadcast)?));
        }
        let strides = Layout::contiguous(shape.clone()).strides;
        let mut copies: SmallVec<[Ready; 2]> = SmallVec::new();
        let mut operands: SmallVec<[Operand<'_>; 6]> = SmallVec::new();
        for (ready, layout) in &readies {
            operands.push(Operand {
                ptr: ready.pointer(),
                dtype: ready.dtype,
                shape: &layout.shape,
                strides: &layout.strides,
            });
        }
        let mut results: SmallVec<[Option<Ready>; 8]> = SmallVec::new();
        let mut steps: SmallVec<[Step; 8]> = SmallVec::new();
        for &number in numbers {
            let Waiting { op, args, result, step, .. } = &self.ops[number];
            let (Some((computes, taken)), Ty::Tensor(ty)) = (*step, &self.cx.items[result.index()].1) else {
                continue;
            };
            let mut sources = SmallVec::new();
            for (i, arg) in args.iter().enumerate().take(computes.arity()) {
                sources.push(match self.cx.items[arg.index()].0 {
                    Item::Number(x) => self::number(op, computes, i, taken, x),
                    Item::Pending(number) => Source::Step(self.ops[number].place),
                    _ => Source::Leaf(leaves.iter().position(|(leaf, _)| leaf == arg).unwrap_or_default()),
                });
            }
            let out = match self.uses[result.index()] {
                0 => None,
                _ => Some(allocate(ty, op.name(), self.cx.loc)?),
            };
            let place = out.as_ref().map(Ready::pointer);
            steps.push(Step { computes, taken, result: ty.dtype, operands: sources, out: place });
            results.push(out);
        }
        let lock = Guard::lock(readies.iter().map(|(ready, _)| (&ready.storage, false)));
        for operand in operands.iter_mut().filter(|operand| formula::is_scattered(operand)) {
            let ty = TensorTy::new(operand.dtype, shape.clone());
            let copy = allocate(&ty, "clone", self.cx.loc)?;
            let dense = Operand { ptr: copy.pointer(), strides: &strides, ..*operand };
            // SAFETY: the operand is locked; the copy is fresh and has its shape.
            unsafe { crate::kernels::convert(&dense, operand) };
            *operand = dense;
            copies.push(copy);
        }
        // SAFETY: operands are locked or copies, broadcast to the shape; steps are in the order of the ops, with the
        // operands that these have; results are fresh and of the shape.
        unsafe { formula::run(shape, &operands, &steps) };
        drop((lock, copies));
        for (&number, result) in numbers.iter().zip(results) {
            self.cx.items[self.ops[number].result.index()].0 = match result {
                Some(ready) => Item::Tensor(Tensor::from_ready(ready)),
                None => Item::Nothing,
            };
        }
        for &number in numbers {
            for arg in self.ops[number].args.clone() {
                if let Item::Tensor(_) | Item::Spread(_) = self.cx.items[arg.index()].0
                    && leaves.iter().any(|(leaf, _)| *leaf == arg)
                {
                    self.read(arg);
                }
            }
        }
        Ok(())
    }

    /// The tensors that ops read from memory.
    fn leaves(&self, numbers: &[usize]) -> Result<SmallVec<[(Value, Tensor); 6]>> {
        let mut leaves: SmallVec<[(Value, Tensor); 6]> = SmallVec::new();
        for &arg in numbers.iter().flat_map(|&number| &self.ops[number].args) {
            if self.pending(arg).is_some() || leaves.iter().any(|(leaf, _)| *leaf == arg) {
                continue;
            }
            match &self.cx.items[arg.index()].0 {
                Item::Tensor(tensor) | Item::Spread(tensor) => leaves.push((arg, tensor.clone())),
                Item::Number(_) => {}
                _ => return Err(self.cx.unsaved(&format!("%{}", arg.0))),
            }
        }
        Ok(leaves)
    }
}

#[cfg(test)]
mod tests;
