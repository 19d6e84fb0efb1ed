//! The gradient of a scan: a scan the other way, whose step is the gradient of the step.
//!
//! It carries the gradients of the carries, and sums of the gradients of what is the same in every step; it takes the
//! carries from before each step, from which a step computes again what its gradient reads.

use std::collections::BTreeMap;

use super::{Outcome, Place, Steps, copy, emit_parts, piece};
use crate::gradient::{Cx, Grads};
use crate::{EmitExt, GradCall, Graph, Op, Result, TensorTy, Ty, Value, carries_gradient, differentiate};

/// What an operand of the scan that computes gradients is.
#[derive(Copy, Clone)]
enum Source {
    /// The gradient of something that the scan gave.
    Gradient(Outcome),
    /// Zeros to add to, of the type of this operand of the scan.
    Zeros(usize),
    /// A carry before each step.
    Before(usize),
    /// An operand of the scan.
    Operand(usize),
}

/// The scan that computes gradients, and what is what in it.
struct Reversed {
    body: Graph,
    sources: Vec<Source>,
    carries: usize,
    inputs: usize,
    /// Which of the scan's operands get which of its outcomes as gradient.
    wanted: Vec<(usize, Outcome)>,
}

impl Reversed {
    /// Its inputs, in order: gradients of carries, sums, then sequences, then what is the same in every step.
    fn of(scan: &Steps<'_>, places: &[Place], needs: &dyn Fn(usize) -> bool) -> Result<Reversed> {
        let forward = scan.body;
        let first_same = scan.carries + scan.inputs;
        let is_float = |input: usize| carries_gradient(forward.ty(forward.inputs[input]));
        let is_given = |outcome: Outcome| places.iter().any(|place| place.outcome == outcome);
        let carries: Vec<usize> = (0..scan.carries).filter(|&carry| is_float(carry)).collect();
        let sums: Vec<usize> =
            (first_same..forward.inputs.len()).filter(|&same| needs(same) && is_float(same)).collect();
        let elements: Vec<usize> =
            (scan.carries..first_same).filter(|&input| needs(input) && is_float(input)).collect();

        let mut body = Graph::new();
        let mut sources = Vec::new();
        let mut map = vec![Value(u32::MAX); forward.value_count()];
        let mut input = |body: &mut Graph, source: Source, ty: Ty| {
            sources.push(source);
            body.input(ty)
        };
        let ty = |value: Value| forward.ty(value).clone();
        let mut last = Vec::new();
        for &carry in &carries {
            let source = Source::Gradient(Outcome::Last(carry));
            last.push(input(&mut body, source, ty(forward.inputs[carry])));
        }
        let mut before_sum = Vec::new();
        for &sum in &sums {
            before_sum.push(input(&mut body, Source::Zeros(sum), ty(forward.inputs[sum])));
        }
        let own_carries = body.inputs.len();
        for carry in 0..scan.carries {
            map[forward.inputs[carry].index()] =
                input(&mut body, Source::Before(carry), ty(forward.inputs[carry]));
        }
        for element in scan.carries..first_same {
            map[forward.inputs[element].index()] =
                input(&mut body, Source::Operand(element), ty(forward.inputs[element]));
        }
        let mut seeds: Vec<(usize, Value)> = carries.iter().copied().zip(last).collect();
        for given in 0..scan.given() {
            let outcome = Outcome::Stacked(given);
            if is_given(outcome) {
                let result = scan.carries + given;
                let seed = input(&mut body, Source::Gradient(outcome), ty(forward.outputs[result]));
                seeds.push((result, seed));
            }
        }
        let mut of_saved = BTreeMap::new();
        for &carry in &carries {
            let outcome = Outcome::Before(carry);
            if is_given(outcome) {
                let source = Source::Gradient(outcome);
                of_saved.insert(carry, input(&mut body, source, ty(forward.inputs[carry])));
            }
        }
        let inputs = body.inputs.len() - own_carries;
        for same in first_same..forward.inputs.len() {
            map[forward.inputs[same].index()] =
                input(&mut body, Source::Operand(same), ty(forward.inputs[same]));
        }

        copy(forward, &mut body, &mut map, &|_| true);
        let seeds: Vec<(Value, Value)> =
            seeds.into_iter().map(|(result, seed)| (map[forward.outputs[result].index()], seed)).collect();
        let all: Vec<usize> = carries.iter().chain(&sums).chain(&elements).copied().collect();
        let values: Vec<Value> = all.iter().map(|&input| map[forward.inputs[input].index()]).collect();
        let grads = differentiate(&mut body, &seeds, &values, &|_| true)?;
        let mut grads: BTreeMap<usize, Option<Value>> = all.into_iter().zip(grads).collect();
        let mut outputs = Vec::new();
        for &carry in &carries {
            let grad = grads.remove(&carry).flatten();
            outputs.push(match (grad, of_saved.get(&carry)) {
                (Some(grad), Some(&saved)) => body.add(grad, saved)?,
                (Some(grad), None) => grad,
                (None, Some(&saved)) => saved,
                (None, None) => zeros(&mut body, scan.input_ty(carry))?,
            });
        }
        for (&sum, &before) in sums.iter().zip(&before_sum) {
            outputs.push(match grads.remove(&sum).flatten() {
                Some(grad) => body.add(before, grad)?,
                None => before,
            });
        }
        for &element in &elements {
            outputs.push(match grads.remove(&element).flatten() {
                Some(grad) => grad,
                None => zeros(&mut body, scan.input_ty(element))?,
            });
        }
        body.outputs = outputs;
        let of_carries = carries.iter().chain(&sums).enumerate().map(|(i, &input)| (input, Outcome::Last(i)));
        let of_elements = elements.iter().enumerate().map(|(i, &input)| (input, Outcome::Stacked(i)));
        let wanted = of_carries.chain(of_elements).filter(|(input, _)| needs(*input)).collect();
        Ok(Reversed { body, sources, carries: own_carries, inputs, wanted })
    }
}

fn zeros(cx: Cx<'_>, ty: &TensorTy) -> Result<Value> {
    let zero = cx.number(0.0)?;
    cx.full(zero, ty.shape.clone(), ty.dtype, ty.device)
}

pub(crate) fn gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let mut gradients = vec![None; call.inputs.len()];
    let (Some(scan), &Op::Scan { dtype, saves, .. }, Some(flat)) =
        (Steps::of(call.op), call.op, call.grads[0])
    else {
        return Ok(gradients);
    };
    let places = scan.places(dtype, saves);
    let place = |outcome: Outcome| places.iter().find(|place| place.outcome == outcome);
    let reversed = Reversed::of(&scan, &places, &|input| call.wants(input))?;
    let back = Steps {
        body: &reversed.body,
        carries: reversed.carries,
        inputs: reversed.inputs,
        length: scan.length,
        order: scan.order.turned(),
    };
    let wanted: Vec<Outcome> = reversed.wanted.iter().map(|(_, outcome)| *outcome).collect();
    let parts = back.parts(&wanted, false);

    // Carries that were not saved are computed again.
    let mut again: Vec<usize> = Vec::new();
    for &operand in parts.iter().flat_map(|part| &part.operands) {
        if let Source::Before(carry) = reversed.sources[operand]
            && place(Outcome::Before(carry)).is_none()
            && !again.contains(&carry)
        {
            again.push(carry);
        }
    }
    let outcomes: Vec<Outcome> = again.iter().map(|&carry| Outcome::Before(carry)).collect();
    let found = emit_parts(cx, &scan.parts(&outcomes, true), &mut |_, operand| Ok(call.inputs[operand]))?;
    let before: BTreeMap<usize, Value> =
        found.into_iter().map(|(number, value)| (again[number], value)).collect();

    let mut known: BTreeMap<usize, Value> = BTreeMap::new();
    let found = emit_parts(cx, &parts, &mut |cx, operand| {
        if let Some(&value) = known.get(&operand) {
            return Ok(value);
        }
        let value = match reversed.sources[operand] {
            Source::Operand(input) => call.inputs[input],
            Source::Zeros(input) => zeros(cx, scan.input_ty(input))?,
            Source::Before(carry) => match (before.get(&carry), place(Outcome::Before(carry))) {
                (Some(&value), _) => value,
                (None, Some(place)) => piece(cx, call.outputs[0], place)?,
                (None, None) => zeros(cx, scan.input_ty(carry))?, // never: what is not there was computed again
            },
            Source::Gradient(outcome) => match place(outcome) {
                Some(place) => piece(cx, flat, place)?,
                None => zeros(cx, scan.ty(outcome))?,
            },
        };
        known.insert(operand, value);
        Ok(value)
    })?;
    for (number, value) in found {
        gradients[reversed.wanted[number].0] = Some(value);
    }
    Ok(gradients)
}
