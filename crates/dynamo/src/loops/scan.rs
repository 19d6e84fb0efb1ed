//! A loop as a scan.

use kiln_aot::trace::Variable;
use kiln_ir::{
    Dims, EmitExt as _, Error, Graph, Loc, Op, Order, Outcome, Result, Shape, Steps, TensorTy, Ty, Value,
    emit_parts_of,
};

use super::find::{Found, Operand};
use super::roll::{Item, Roller};
use super::wanted::Wanted;
use crate::event::{CallEvent, KeyArg, Made};

/// A step of a loop on its way to be the body of a scan.
struct Step<'a> {
    found: &'a Found,
    body: Graph,
    /// By input of the body, what the scan is given.
    operands: Vec<Value>,
    /// By event, its value in the body.
    within: Vec<Option<Value>>,
    carries: Vec<Value>,
    sequences: Vec<(Operand, Value)>,
    captured: Vec<(Variable, Value)>,
}

fn lost() -> Error {
    Error::bug("a value of a loop is lost")
}

impl Step<'_> {
    fn input(&mut self, ty: Ty, operand: Value) -> Value {
        self.operands.push(operand);
        self.body.input(ty)
    }

    fn within(&self, event: usize) -> Result<Value> {
        self.within[event].ok_or_else(lost)
    }
}

impl Roller<'_> {
    /// A loop, as a scan.
    pub(super) fn scan(&mut self, of: usize, found: &Found, wanted: &Wanted) -> Result<()> {
        if (wanted.last.is_empty() && wanted.stacked.is_empty()) || self.is_reshape(of, found, wanted)? {
            return Ok(());
        }
        let mut step = Step {
            found,
            body: Graph::new(),
            operands: Vec::new(),
            within: vec![None; found.period],
            carries: Vec::new(),
            sequences: Vec::new(),
            captured: Vec::new(),
        };
        for &(event, init) in &found.init {
            let init = self.known(init)?;
            let carry = step.input(self.made_ty(found, event)?, init);
            step.carries.push(carry);
        }
        for event in 0..found.period {
            self.elements(&mut step, event)?;
        }
        let inputs = step.operands.len() - step.carries.len();
        for event in 0..found.period {
            self.compute(&mut step, event)?;
        }
        for &(event, _) in &found.init {
            step.body.outputs.push(step.within(event)?);
        }
        // What is wanted: an event of the body, whether in the last step, and where that is found.
        let mut asked: Vec<(usize, bool, Outcome)> = Vec::new();
        let mut given: Vec<usize> = Vec::new();
        for (&event, is_last) in
            wanted.last.iter().map(|event| (event, true)).chain(wanted.stacked.iter().map(|e| (e, false)))
        {
            let carry = found.init.iter().position(|(carried, _)| is_last && *carried == event);
            let outcome = carry.map(Outcome::Last).unwrap_or_else(|| {
                let known = given.iter().position(|known| *known == event);
                Outcome::Stacked(known.unwrap_or_else(|| {
                    given.push(event);
                    given.len() - 1
                }))
            });
            asked.push((event, is_last, outcome));
        }
        for event in given {
            step.body.outputs.push(step.within(event)?);
        }
        let Step { body, operands, carries, .. } = step;
        let (carries, length) = (carries.len(), found.steps);
        let steps = Steps { body: &body, carries, inputs, length, order: Order::Forward };
        let saves = self.grad_enabled && operands.iter().any(|operand| self.requires_grad(*operand));
        let outcomes: Vec<Outcome> = asked.iter().map(|(.., outcome)| *outcome).collect();
        let pieces = emit_parts_of(self, &steps.parts(&outcomes, saves), &operands)?;
        for (number, piece) in pieces {
            let (event, is_last, outcome) = asked[number];
            self.leave(of, found, (event, is_last), outcome, piece)?;
        }
        Ok(())
    }

    /// The sequences that an event of the body takes the elements of.
    fn elements(&mut self, step: &mut Step<'_>, event: usize) -> Result<()> {
        let found = step.found;
        if let Some(parts) = &found.parts[event] {
            let value = self.known(parts.base)?;
            let end = parts.start + parts.length * found.steps;
            let whole = self.slice(value, parts.dim, parts.start, end, 1)?;
            let elements = self.cut(whole, parts.dim, found.steps, parts.down)?;
            step.within[event] = Some(step.input(self.made_ty(found, event)?, elements));
            return Ok(());
        }
        for &operand in &found.operands[event] {
            let Operand::Along { of, event, from, down } = operand else { continue };
            if step.sequences.iter().any(|(known, _)| *known == operand) {
                continue;
            }
            let first = if down { from + 1 - found.steps } else { from };
            let steps = self.steps(of, event, first, first + found.steps)?;
            let mut elements = self.value(steps);
            let ty = self.tensor_ty(elements);
            if down {
                elements = self.flip(elements, Dims::all(1))?;
            }
            let input = step.input(TensorTy { shape: ty.shape[1..].into(), ..ty }.into(), elements);
            step.sequences.push((operand, input));
        }
        Ok(())
    }

    /// An event of the body.
    fn compute(&mut self, step: &mut Step<'_>, event: usize) -> Result<()> {
        if step.within[event].is_some() {
            return Ok(());
        }
        let (found, index) = (step.found, step.found.start + event);
        let call = self.recording.call(index).ok_or_else(lost)?;
        let mut hole = self.recording.holes[index];
        let mut args = Vec::with_capacity(call.args.len());
        for (place, &operand) in found.operands[event].iter().enumerate() {
            args.push(match operand {
                Operand::Local(made_by) => step.within(made_by)?,
                Operand::Carry(made_by) => {
                    let carry = found.init.iter().position(|(event, _)| *event == made_by);
                    step.carries[carry.ok_or_else(lost)?]
                }
                Operand::Along { .. } => {
                    let sequence = step.sequences.iter().find(|(known, _)| *known == operand);
                    sequence.ok_or_else(lost)?.1
                }
                Operand::Outside(variable) => {
                    let known = step.captured.iter().find(|(known, _)| *known == variable);
                    if let Some(&(_, known)) = known {
                        known
                    } else {
                        let value = self.known(variable)?;
                        let input = step.input(self.recording.tys[variable as usize].clone(), value);
                        step.captured.push((variable, input));
                        input
                    }
                }
                Operand::Number => {
                    hole += 1;
                    self.number(step, call, place, hole - 1)?
                }
            });
        }
        let ty = self.made_ty(found, event)?;
        step.within[event] = Some(step.body.push(call.op.clone(), &args, [ty], false, call.loc)[0]);
        Ok(())
    }

    fn number(&mut self, step: &mut Step<'_>, call: &CallEvent, place: usize, hole: u32) -> Result<Value> {
        let KeyArg::Number(kind, class) = call.args[place] else { return Err(lost()) };
        match call.op.number_of_class(place, class) {
            Some(value) => {
                let ty = Ty::Scalar(value.kind());
                Ok(step.body.push(Op::Constant { value }, &[], [ty], false, Loc::UNKNOWN)[0])
            }
            // In a body, numbers come as tensors: what it does can't depend on them.
            None if class != 0 => Err(Error::bug("a number that shapes the code of a loop")),
            None => {
                let ty = Ty::Scalar(kind);
                self.items.push((Item::Number(kind, class, hole), ty.clone()));
                Ok(step.input(ty, Value(self.items.len() as u32 - 1)))
            }
        }
    }

    /// What a scan gives becomes what the recording knows.
    fn leave(
        &mut self,
        of: usize,
        found: &Found,
        (event, is_last): (usize, bool),
        outcome: Outcome,
        mut piece: Value,
    ) -> Result<()> {
        if is_last && matches!(outcome, Outcome::Stacked(_)) {
            let shape: Shape = self.tensor_ty(piece).shape[1..].into();
            let last = self.slice(piece, 0, found.steps - 1, found.steps, 1)?;
            piece = self.reshape(last, shape)?;
        }
        let call = self.recording.call(found.start + event);
        let wants = matches!(call.map(|call| &call.made), Some(Made::Variable { requires_grad: true, .. }));
        if self.requires_grad(piece) && !wants {
            piece = self.detach(piece)?;
        }
        if !is_last {
            let variable = self.variable(piece)?;
            self.stacked.insert((of, event), variable);
            return Ok(());
        }
        // What leaves is not a part of something larger.
        piece = self.emit_one(Op::Clone {}, &[piece])?;
        let variable = self.variable(piece)?;
        let last = self.recording.made[found.end() - found.period + event].ok_or_else(lost)?;
        self.rolled.variables[variable as usize] = Some(last);
        self.now.insert(last, variable);
        Ok(())
    }

    /// A loop that does nothing but give another shape to what an earlier one made, as it is before a `stack`.
    fn is_reshape(&mut self, of: usize, found: &Found, wanted: &Wanted) -> Result<bool> {
        let [operands] = &found.operands[..] else { return Ok(false) };
        let &[Operand::Along { of: other, event, from, down: false }] = &operands[..] else {
            return Ok(false);
        };
        let call = self.recording.call(found.start);
        let (Some(Op::Reshape { shape }), true) = (call.map(|call| &call.op), wanted.last.is_empty()) else {
            return Ok(false);
        };
        let steps = self.steps(other, event, from, from + found.steps)?;
        let value = self.value(steps);
        let shape = std::iter::once(found.steps).chain(shape.iter().copied()).collect::<Shape>();
        let value = self.reshape(value, shape)?;
        let variable = self.variable(value)?;
        self.stacked.insert((of, 0), variable);
        Ok(true)
    }

    /// What an event of the body makes.
    fn made_ty(&self, found: &Found, event: usize) -> Result<Ty> {
        let made = self.recording.made[found.start + event].ok_or_else(lost)?;
        Ok(self.recording.tys[made as usize].clone())
    }

    fn requires_grad(&self, value: Value) -> bool {
        match self.items[value.index()].0 {
            Item::Variable(variable) => self.requires[variable as usize],
            Item::Number(..) => false,
        }
    }

    /// A dim cut into so many parts, which become a first one.
    fn cut(&mut self, value: Value, dim: usize, count: usize, down: bool) -> Result<Value> {
        let mut shape = self.tensor_ty(value).shape;
        shape[dim] /= count;
        shape.insert(dim, count);
        let rank = shape.rank();
        let parts = self.reshape(value, shape)?;
        let mut order: Dims = (0..rank).filter(|&d| d != dim).collect();
        order.insert(0, dim);
        let turned = self.permute(parts, order)?;
        if down { self.flip(turned, Dims::all(1)) } else { Ok(turned) }
    }
}
