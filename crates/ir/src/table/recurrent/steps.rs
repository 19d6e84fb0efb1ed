//! Recurrent layers step by step: what the rows mean, and their gradients.

use smallvec::smallvec;

use super::{Cell, Sequence};
use crate::formula::{Paper, Term};
use crate::gradient::{Cx, Grads, g};
use crate::{Dims, EmitExt, GradCall, Op, Pairs, Result, Shape, Value, Values};

/// The sequence of a call whose operands were checked.
fn sequence(cx: Cx<'_>, op: &Op, args: &[Value]) -> Option<Sequence> {
    let shapes: Vec<Shape> = args.iter().map(|&arg| cx.tensor_ty(arg).shape).collect();
    Sequence::of(op, &shapes.iter().collect::<Vec<_>>())
}

/// One entry of a tensor `[entries, rows, columns]`, some of its columns.
fn entry<'p>(x: Term<'p>, at: usize, from: usize, columns: usize) -> Term<'p> {
    let shape = x.shape();
    let whole = from == 0 && columns == shape[2];
    let x = x.slice(0, at, at + 1, 1).reshape(Shape::from([shape[1], shape[2]]));
    if whole { x } else { x.slice(1, from, from + columns, 1) }
}

/// Some columns of a matrix.
fn columns<'p>(x: Term<'p>, from: usize, count: usize) -> Term<'p> {
    x.slice(1, from, from + count, 1)
}

fn transposed(x: Term<'_>) -> Term<'_> {
    x.permute(Dims::from([1, 0]))
}

/// Entries in the order in which they were made, as one tensor.
fn stacked<'p>(sequence: &Sequence, mut entries: Vec<Term<'p>>) -> Term<'p> {
    if sequence.reverse {
        entries.reverse();
    }
    let single = |x: Term<'p>| {
        let shape = x.shape();
        x.reshape(Shape::from([1, shape[0], shape[1]]))
    };
    let entries: Vec<Term<'_>> = entries.into_iter().map(single).collect();
    entries[0].join(&entries[1..], 0)
}

/// Zeros behind the columns of a matrix, to this width.
fn padded(x: Term<'_>, width: usize) -> Term<'_> {
    match width - x.shape()[1] {
        0 => x,
        more => x.constant_pad_nd(0.0, Pairs::new(&[0, 0], &[0, more])),
    }
}

/// Whether each row has this step, as a column.
fn has_step<'p>(lengths: Option<Term<'p>>, step: usize) -> Option<Term<'p>> {
    let lengths = lengths?;
    let rows = lengths.shape()[0];
    Some(lengths.gt(step as i64).reshape(Shape::from([rows, 1])))
}

/// `new` where rows have the step, `old` elsewhere.
fn chosen<'p>(has_step: Option<Term<'p>>, new: Term<'p>, old: Term<'p>) -> Term<'p> {
    has_step.map_or(new, |has| has.where_(new, old))
}

/// `new` where rows have the step, zeros elsewhere.
fn masked<'p>(has_step: Option<Term<'p>>, new: Term<'p>) -> Term<'p> {
    has_step.map_or(new, |has| has.where_(new, 0.0))
}

pub(crate) fn forward(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Some(s) = sequence(cx, op, args) else { return Ok(smallvec![args[0]]) };
    let paper = Paper::new(cx);
    let operands: Vec<Term<'_>> = args.iter().map(|&arg| paper.term(arg)).collect();
    let lengths = operands.get(Sequence::lengths_at(op)).copied();
    let (x, n) = (operands[0], s.units);
    let mut hidden = operands[1];
    let mut cell = if s.cell.has_cell() { Some(operands[2]) } else { None };
    let weight = transposed(operands[if s.cell.has_cell() { 3 } else { 2 }]);
    let states = |hidden: Term<'_>, cell: Option<Term<'_>>| match cell {
        Some(cell) => hidden.join(&[cell], 1).value(),
        None => hidden.value(),
    };
    let initial = paper.term(states(hidden, cell));
    let mut entries = vec![padded(initial, s.trace())];
    for number in 0..s.steps {
        let step = s.step(number);
        let has = has_step(lengths, step);
        let x = entry(x, step, 0, s.cell.gates() * n);
        let product = hidden.mm(weight);
        let mut kept: Vec<Term<'_>> = Vec::new();
        let mut output = match (s.cell, cell) {
            (Cell::Lstm, Some(old)) => {
                let arguments = x + product;
                let gate = |i: usize| columns(arguments, i * n, n);
                let (i, f, g, o) = (gate(0).sigmoid(), gate(1).sigmoid(), gate(2).tanh(), gate(3).sigmoid());
                let new = f * old + i * g;
                cell = Some(chosen(has, new, old));
                kept.extend([i, f, g, o]);
                o * new.tanh()
            }
            (Cell::Gru, _) => {
                let product = product + operands[3];
                let gate = |i: usize| (columns(x, i * n, n), columns(product, i * n, n));
                let ((xr, pr), (xz, pz), (xn, pn)) = (gate(0), gate(1), gate(2));
                let (r, z) = ((xr + pr).sigmoid(), (xz + pz).sigmoid());
                let new = (xn + r * pn).tanh();
                kept.extend([r, z, new, pn]);
                new + z * (hidden - new)
            }
            (Cell::Relu, _) => (x + product).relu(),
            (Cell::Tanh | Cell::Lstm, _) => (x + product).tanh(),
        };
        if s.projected {
            output = output.mm(transposed(operands[4]));
        }
        hidden = chosen(has, output, hidden);
        let mut all: Vec<Term<'_>> = cell.into_iter().collect();
        if s.keep {
            all.extend(kept.into_iter().map(|gate| masked(has, gate)));
        }
        entries.push(hidden.join(&all, 1));
    }
    let trace = stacked(&s, entries).value();
    paper.end()?;
    Ok(smallvec![trace])
}

/// What leads to a step's gates: y · (1 − y) · g for the sigmoid y.
fn through_sigmoid<'p>(g: Term<'p>, y: Term<'p>) -> Term<'p> {
    g * (y * (1.0 - y))
}

fn through_tanh<'p>(g: Term<'p>, y: Term<'p>) -> Term<'p> {
    g * (1.0 - y * y)
}

pub(crate) fn backward(cx: Cx<'_>, op: &Op, args: &[Value]) -> Result<Values> {
    let Some(s) = sequence(cx, op, args) else { return Ok(smallvec![args[0]]) };
    let paper = Paper::new(cx);
    let operands: Vec<Term<'_>> = args.iter().map(|&arg| paper.term(arg)).collect();
    let lengths = operands.get(Sequence::lengths_at(op)).copied();
    let (grad, trace, weight, n) = (operands[0], operands[1], operands[2], s.units);
    let add = |sum: Option<Term<'_>>, g: Term<'_>| sum.map_or(g.value(), |sum| (sum + g).value());
    // What later steps give to the output and to the cell.
    let (mut to_output, mut to_cell): (Option<Term<'_>>, Option<Term<'_>>) = (None, None);
    let total = |later: Option<Term<'_>>, at: usize, from: usize, columns: usize| {
        paper.term(add(later, entry(grad, at, from, columns)))
    };
    let mut entries = Vec::new();
    for number in (0..s.steps).rev() {
        let step = s.step(number);
        let (after, before, has) = (s.after(step), s.before(step), has_step(lengths, step));
        let kept = |i: usize| entry(trace, after, s.states() + i * n, n);
        let gate_grad = |i: usize| entry(grad, after, s.states() + i * n, n);
        let output = total(to_output, after, 0, s.outputs);
        let own = if s.projected { output.mm(operands[3]) } else { output };
        // What goes to the output before this step without a product.
        let mut past = None;
        let slopes: Vec<Term<'_>> = match s.cell {
            Cell::Lstm => {
                let (i, f, g, o) = (kept(0), kept(1), kept(2), kept(3));
                let (old, new) = (entry(trace, before, s.outputs, n), entry(trace, after, s.outputs, n));
                let bent = new.tanh();
                let whole = total(to_cell, after, s.outputs, n);
                let inside = whole + through_tanh(own * o, bent);
                to_cell = Some(chosen(has, inside * f, whole));
                vec![
                    through_sigmoid(inside * g + gate_grad(0), i),
                    through_sigmoid(inside * old + gate_grad(1), f),
                    through_tanh(inside * i + gate_grad(2), g),
                    through_sigmoid(own * bent + gate_grad(3), o),
                ]
            }
            Cell::Gru => {
                let (r, z, new, inner) = (kept(0), kept(1), kept(2), kept(3));
                let old = entry(trace, before, 0, n);
                let slope = through_tanh(own * (1.0 - z) + gate_grad(2), new);
                past = Some(own * z);
                vec![
                    through_sigmoid(slope * inner + gate_grad(0), r),
                    through_sigmoid(own * (old - new) + gate_grad(1), z),
                    slope,
                    slope * r + gate_grad(3),
                ]
            }
            Cell::Tanh => vec![through_tanh(own, entry(trace, after, 0, n))],
            Cell::Relu => {
                // Zeros that come from the trace: it has a gradient, if one of zeros.
                let h = entry(trace, after, 0, n);
                vec![h.gt(0.0).where_(own, h * 0.0)]
            }
        };
        let slopes: Vec<Term<'_>> = slopes.into_iter().map(|slope| masked(has, slope)).collect();
        let of_weight = match s.cell {
            Cell::Gru => slopes[0].join(&[slopes[1], slopes[3]], 1),
            _ => slopes[0].join(&slopes[1..], 1),
        };
        let product = of_weight.mm(weight);
        let passed = past.map_or(product, |past| product + past);
        to_output = Some(chosen(has, passed, output));
        let mut all = slopes[1..].to_vec();
        if s.projected {
            all.push(masked(has, output));
        }
        entries.push(slopes[0].join(&all, 1));
    }
    let mut initial = total(to_output, s.first(), 0, s.outputs);
    if s.cell.has_cell() {
        initial = initial.join(&[total(to_cell, s.first(), s.outputs, n)], 1);
    }
    entries.push(padded(initial, s.slopes()));
    entries.reverse();
    let slopes = stacked(&s, entries).value();
    paper.end()?;
    Ok(smallvec![slopes])
}

/// All steps of a tensor `[entries, rows, columns]`, some of its columns, as a matrix: after the steps, or before them.
fn all_steps<'p>(s: &Sequence, x: Term<'p>, is_after: bool, from: usize, columns: usize) -> Term<'p> {
    let start = usize::from(is_after != s.reverse);
    let x = x.slice(0, start, start + s.steps, 1).slice(2, from, from + columns, 1);
    x.reshape(Shape::from([s.steps.saturating_mul(s.rows), columns]))
}

/// The gradient's row, and the op that keeps what it needs where this one doesn't.
fn backward_of(op: &Op) -> (Option<Op>, Option<Op>) {
    match *op {
        Op::Lstm { reverse, keep } => {
            (Some(Op::LstmBackward { reverse }), (!keep).then_some(Op::Lstm { reverse, keep: true }))
        }
        Op::LstmProjected { reverse, keep } => (
            Some(Op::LstmProjectedBackward { reverse }),
            (!keep).then_some(Op::LstmProjected { reverse, keep: true }),
        ),
        Op::Gru { reverse, keep } => {
            (Some(Op::GruBackward { reverse }), (!keep).then_some(Op::Gru { reverse, keep: true }))
        }
        Op::Rnn { relu, reverse } => (Some(Op::RnnBackward { relu, reverse }), None),
        _ => (None, None),
    }
}

pub(crate) fn gradient(cx: Cx<'_>, call: &GradCall<'_>) -> Grads {
    let (mut g, inputs) = (g!(call), call.inputs);
    let mut grads = vec![None; inputs.len()];
    let (Some(s), (Some(backward), keeping)) = (sequence(cx, call.op, inputs), backward_of(call.op)) else {
        return Ok(grads);
    };
    let s = Sequence { keep: true, ..s };
    let mut trace = call.y();
    if let Some(keeping) = keeping {
        trace = cx.emit_one(keeping, inputs)?;
        let (zero, more) = (cx.number(0.0)?, s.cell.kept() * s.units);
        g = cx.constant_pad_nd(g, zero, Pairs::new(&[0, 0, 0], &[0, 0, more]))?;
    }
    let weight = if s.cell.has_cell() { 3 } else { 2 };
    let mut operands = vec![g, trace, inputs[weight]];
    operands.extend(s.projected.then(|| inputs[4]));
    operands.extend(inputs.get(Sequence::lengths_at(call.op)));
    let slopes = cx.emit_one(backward, &operands)?;
    let (paper, n) = (Paper::new(cx), s.units);
    let (slopes, trace) = (paper.term(slopes), paper.term(trace));
    let slopes_of = |from: usize, gates: usize| all_steps(&s, slopes, true, from * n, gates * n);
    // Both as [T·B, …]: one product for all steps.
    let product = |slopes: Term<'_>, with: Term<'_>| transposed(slopes).mm(with).value();
    let before = || all_steps(&s, trace, false, 0, s.outputs);
    if call.wants(0) {
        let columns = s.cell.gates() * n;
        let x = slopes_of(0, s.cell.gates()).reshape(Shape::from([s.steps, s.rows, columns]));
        grads[0] = Some(x.value());
    }
    if call.wants(1) {
        grads[1] = Some(entry(slopes, s.first(), 0, s.outputs).value());
    }
    if s.cell.has_cell() && call.wants(2) {
        grads[2] = Some(entry(slopes, s.first(), s.outputs, n).value());
    }
    if call.wants(weight) {
        grads[weight] = Some(match s.cell {
            Cell::Gru => {
                let (gates, inner) = (slopes_of(0, 2), slopes_of(3, 1));
                let of_inner = paper.term(product(inner, before()));
                paper.term(product(gates, before())).join(&[of_inner], 0).value()
            }
            Cell::Lstm | Cell::Tanh | Cell::Relu => product(slopes_of(0, s.cell.gates()), before()),
        });
    }
    if s.cell == Cell::Gru && call.wants(3) {
        let sum = |from, gates| slopes_of(from, gates).sum(Dims::from(0), false);
        grads[3] = Some(sum(0, 2).join(&[sum(3, 1)], 0).value());
    }
    if s.projected && call.wants(4) {
        let cell = all_steps(&s, trace, true, s.outputs, n);
        let gate = all_steps(&s, trace, true, s.states() + 3 * n, n);
        let outputs = all_steps(&s, slopes, true, 4 * n, s.outputs);
        grads[4] = Some(product(outputs, gate * cell.tanh()));
    }
    paper.end()?;
    Ok(grads)
}
