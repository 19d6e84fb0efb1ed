//! Rows: recurrent layers over whole sequences, one direction of one layer each, and their gradients.
//!
//! A layer's input takes part by a product of all steps at once, outside of the row: operand `x` holds its part of the
//! gates. The result is a *trace*, an entry of it for the states before the first step and one for each step, in the
//! order of time: the output and the cell after it, then the gates, which only the gradient reads. So the states
//! before all steps are a slice of the trace as well as those after them.
//!
//! The gradient's row gives the *slopes* in the same order: an entry for the initial states, which holds their
//! gradients, and one for each step with the gradients of what its gates are functions of. All other gradients are
//! products and sums of slopes and traces over all steps at once.

use smallvec::smallvec;

use crate::formula::{Paper, Term};
use crate::gradient::{Cx, Grads, g};
use crate::samples::{Domain, FLOATS, Sample, SampleArg, t, with_op};
use crate::types::{Rule, checked, common_device, float, same_dtype, tensor};
use crate::{
    DType, Device, Dims, EmitExt, GradCall, Op, Pairs, Result, Shape, TensorTy, Ty, Value, Values, Why,
};

#[doc(hidden)]
#[macro_export]
macro_rules! rows_recurrent {
    ($callback:ident [$($rows:tt)*]) => {
        $crate::rows_lists! { $callback [
            $($rows)*

            // ---- recurrent layers ------------------------------------------------------------------------------

            /// Long short-term memory from x = input · weight_ihᵀ + biases [T, B, 4·H] on: [T + 1, B, …] of states (and gates); lengths [B]
            [composite lstm _none] "lstm" Lstm (x, hidden, cell, weight) (lengths) { reverse: bool, keep: bool }
                { ty: recurrent::ty, grad: Grad::Fn(recurrent::gradient), decompose: Some(recurrent::forward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_lstm };
            /// The slopes of lstm
            [composite lstm_backward _none] "lstm_backward" LstmBackward (grad, trace, weight) (lengths) { reverse: bool }
                { ty: recurrent::backward_ty, grad: Grad::Decompose, decompose: Some(recurrent::backward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_lstm_backward };
            /// lstm whose outputs are products with a projection [P, H]
            [composite lstm_projected _none] "lstm_projected" LstmProjected (x, hidden, cell, weight, projection) (lengths) { reverse: bool, keep: bool }
                { ty: recurrent::ty, grad: Grad::Fn(recurrent::gradient), decompose: Some(recurrent::forward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_lstm_projected };
            /// The slopes of lstm_projected, behind those of the gates those of the outputs
            [composite lstm_projected_backward _none] "lstm_projected_backward" LstmProjectedBackward (grad, trace, weight, projection) (lengths) { reverse: bool }
                { ty: recurrent::backward_ty, grad: Grad::Decompose, decompose: Some(recurrent::backward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_lstm_projected_backward };
            /// Gated recurrent units from x = input · weight_ihᵀ + bias_ih [T, B, 3·H] on: [T + 1, B, …] of states (and gates); lengths [B]
            [composite gru _none] "gru" Gru (x, hidden, weight, bias) (lengths) { reverse: bool, keep: bool }
                { ty: recurrent::ty, grad: Grad::Fn(recurrent::gradient), decompose: Some(recurrent::forward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_gru };
            /// The slopes of gru
            [composite gru_backward _none] "gru_backward" GruBackward (grad, trace, weight) (lengths) { reverse: bool }
                { ty: recurrent::backward_ty, grad: Grad::Decompose, decompose: Some(recurrent::backward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_gru_backward };
            /// An Elman network (tanh or relu) from x = input · weight_ihᵀ + biases [T, B, H] on: [T + 1, B, H] of states; lengths [B]
            [composite rnn _none] "rnn" Rnn (x, hidden, weight) (lengths) { relu: bool, reverse: bool }
                { ty: recurrent::ty, grad: Grad::Fn(recurrent::gradient), decompose: Some(recurrent::forward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_rnn };
            /// The slopes of rnn
            [composite rnn_backward _none] "rnn_backward" RnnBackward (grad, trace, weight) (lengths) { relu: bool, reverse: bool }
                { ty: recurrent::backward_ty, grad: Grad::Decompose, decompose: Some(recurrent::backward), eval: Eval::Structural,
                  prim: Some(recurrent::is_prim), kernel: true, refuses: Refuses::Nothing, samples: recurrent::samples_of_rnn_backward };
        ]}
    };
}

/// What happens in a step.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Cell {
    /// Gates i, f, g and o: c = f · c + i · g, h = o · tanh c, or a projection of that.
    Lstm,
    /// Gates r, z and n: h = n + z · (h − n).
    Gru,
    /// h = tanh.
    Tanh,
    /// h = relu.
    Relu,
}

impl Cell {
    /// Gates whose arguments are `x` and a product with `weight`.
    pub const fn gates(self) -> usize {
        match self {
            Cell::Lstm => 4,
            Cell::Gru => 3,
            Cell::Tanh | Cell::Relu => 1,
        }
    }

    /// Numbers of a unit that a trace keeps for the gradient: an lstm's gates; a gru's and what r is multiplied with.
    pub const fn kept(self) -> usize {
        match self {
            Cell::Lstm | Cell::Gru => 4,
            Cell::Tanh | Cell::Relu => 0,
        }
    }

    /// Slopes of a unit: those of the gates; of a gru those of the arguments r, z, n, and of what r is multiplied with.
    pub const fn slopes(self) -> usize {
        match self {
            Cell::Lstm | Cell::Gru => 4,
            Cell::Tanh | Cell::Relu => 1,
        }
    }

    const fn has_cell(self) -> bool {
        matches!(self, Cell::Lstm)
    }
}

/// What a recurrent op does, and with how much.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Sequence {
    /// What happens in a step.
    pub cell: Cell,
    /// Whether the last step comes first.
    pub reverse: bool,
    /// Whether the trace holds what the gradient needs.
    pub keep: bool,
    /// Whether outputs are projected.
    pub projected: bool,
    /// Steps.
    pub steps: usize,
    /// Sequences side by side.
    pub rows: usize,
    /// Units of a gate.
    pub units: usize,
    /// Columns of the output: units, but where it is projected.
    pub outputs: usize,
}

impl Sequence {
    /// The cell, `reverse`, `keep`, and whether it is projected, of the ops of this file.
    fn form(op: &Op) -> Option<(Cell, bool, bool, bool)> {
        let network = |relu| if relu { Cell::Relu } else { Cell::Tanh };
        Some(match *op {
            Op::Lstm { reverse, keep } => (Cell::Lstm, reverse, keep, false),
            Op::LstmProjected { reverse, keep } => (Cell::Lstm, reverse, keep, true),
            Op::Gru { reverse, keep } => (Cell::Gru, reverse, keep, false),
            Op::Rnn { relu, reverse } => (network(relu), reverse, true, false),
            Op::LstmBackward { reverse } => (Cell::Lstm, reverse, true, false),
            Op::LstmProjectedBackward { reverse } => (Cell::Lstm, reverse, true, true),
            Op::GruBackward { reverse } => (Cell::Gru, reverse, true, false),
            Op::RnnBackward { relu, reverse } => (network(relu), reverse, true, false),
            _ => return None,
        })
    }

    /// Of one of the ops of this file, whose operands, but for numbers, have these shapes and fit together.
    pub fn of(op: &Op, shapes: &[&Shape]) -> Option<Sequence> {
        let (cell, reverse, keep, projected) = Sequence::form(op)?;
        let is_forward = !Sequence::is_gradient(op);
        let weight = shapes.get(if !is_forward || !cell.has_cell() { 2 } else { 3 })?;
        let (&[entries, rows, _], &[arguments, outputs]) = (&shapes.first()?[..], &weight[..]) else {
            return None;
        };
        let (steps, units) =
            (if is_forward { entries } else { entries.checked_sub(1)? }, arguments / cell.gates());
        Some(Sequence { cell, reverse, keep, projected, steps, rows, units, outputs })
    }

    /// Whether an op of this file is one of the gradients.
    pub fn is_gradient(op: &Op) -> bool {
        matches!(
            op,
            Op::LstmBackward { .. }
                | Op::LstmProjectedBackward { .. }
                | Op::GruBackward { .. }
                | Op::RnnBackward { .. }
        )
    }

    /// How many operands an op of this file has before the lengths.
    pub fn lengths_at(op: &Op) -> usize {
        op.row().args.len()
    }

    /// Columns of a trace that are states: the output, then the cell.
    pub fn states(&self) -> usize {
        self.outputs + if self.cell.has_cell() { self.units } else { 0 }
    }

    /// Columns of a trace.
    pub fn trace(&self) -> usize {
        self.states() + if self.keep { self.cell.kept() * self.units } else { 0 }
    }

    /// Columns of slopes: those of the units, then those of projected outputs.
    pub fn slopes(&self) -> usize {
        self.cell.slopes() * self.units + if self.projected { self.outputs } else { 0 }
    }

    /// The entry of the initial states.
    pub fn first(&self) -> usize {
        if self.reverse { self.steps } else { 0 }
    }

    /// The entry of the states after a step, and of its gates and slopes.
    pub fn after(&self, step: usize) -> usize {
        if self.reverse { step } else { step + 1 }
    }

    /// The entry of the states before a step.
    pub fn before(&self, step: usize) -> usize {
        if self.reverse { step + 1 } else { step }
    }

    /// The number of the step that comes so many steps after the first one.
    pub fn step(&self, number: usize) -> usize {
        if self.reverse { self.steps - 1 - number } else { number }
    }
}

/// Inductor calls the kernel; other devices have none.
pub(crate) fn is_prim(_: &Op, args: &[Ty]) -> bool {
    args[0].as_tensor().is_some_and(|x| x.device == Device::Cpu)
}

/// A matrix whose rows are all gates of all units.
fn weight(args: &[Ty], i: usize, like: &TensorTy, cell: Cell) -> Result<[usize; 2], Why> {
    let weight = float(args, i, "weight")?;
    same_dtype("weight", like, weight)?;
    let &[size, outputs] = &weight.shape[..] else {
        return Err(Why::Rank { argument: "weight", expected: "2", got: weight.shape.rank() });
    };
    if !size.is_multiple_of(cell.gates()) {
        let (what, by) = ("the rows of weight", "the gates");
        return Err(Why::Divisible { what, size, by, parts: cell.gates() });
    }
    Ok([size / cell.gates(), outputs])
}

fn expect(args: &[Ty], i: usize, argument: &'static str, like: &TensorTy, shape: &[usize]) -> Result<(), Why> {
    let operand = float(args, i, argument)?;
    same_dtype(argument, like, operand)?;
    if operand.shape[..] == *shape { Ok(()) } else { Err(Why::shape(argument, shape, operand.shape.clone())) }
}

fn expect_lengths(op: &Op, args: &[Ty], rows: usize) -> Result<(), Why> {
    let at = Sequence::lengths_at(op);
    if at == args.len() {
        return Ok(());
    }
    let lengths = tensor(args, at, "lengths")?;
    if lengths.dtype != DType::I64 {
        return Err(Why::DType { argument: "lengths", expected: "i64", got: lengths.dtype });
    }
    if lengths.shape[..] == [rows] { Ok(()) } else { Err(Why::shape("lengths", [rows], lengths.shape.clone())) }
}

fn three<'a>(args: &'a [Ty], argument: &'static str) -> Result<(&'a TensorTy, [usize; 3]), Why> {
    let x = float(args, 0, argument)?;
    match x.shape[..] {
        [steps, rows, columns] => Ok((x, [steps, rows, columns])),
        _ => Err(Why::Rank { argument, expected: "3", got: x.shape.rank() }),
    }
}

/// Outputs are as many as units, unless there is a projection.
fn expect_outputs(projected: bool, units: usize, outputs: usize) -> Result<(), Why> {
    if projected || units == outputs {
        return Ok(());
    }
    Err(Why::sizes("the columns of weight and the units of a gate", outputs, units))
}

pub(crate) fn ty(op: &Op, args: &[Ty]) -> Rule {
    let device = common_device(args)?;
    let (x, [steps, rows, columns]) = three(args, "x")?;
    let Some((cell, _, keep, projected)) = Sequence::form(op) else { return checked(x.clone()) };
    let at = if cell.has_cell() { 3 } else { 2 };
    let [units, outputs] = weight(args, at, x, cell)?;
    expect_outputs(projected, units, outputs)?;
    if columns != units * cell.gates() {
        return Err(Why::sizes("the last dim of x and the rows of weight", columns, units * cell.gates()));
    }
    expect(args, 1, "hidden", x, &[rows, outputs])?;
    match cell {
        Cell::Lstm => expect(args, 2, "cell", x, &[rows, units])?,
        Cell::Gru => expect(args, 3, "bias", x, &[columns])?,
        Cell::Tanh | Cell::Relu => {}
    }
    if projected {
        expect(args, 4, "projection", x, &[outputs, units])?;
    }
    expect_lengths(op, args, rows)?;
    let entries = steps.checked_add(1).ok_or(Why::TooLarge { shape: x.shape.clone() })?;
    let sequence = Sequence { cell, reverse: false, keep, projected, steps, rows, units, outputs };
    checked(TensorTy { dtype: x.dtype, device, shape: Shape::from([entries, rows, sequence.trace()]) })
}

pub(crate) fn backward_ty(op: &Op, args: &[Ty]) -> Rule {
    let device = common_device(args)?;
    let (trace, [entries, rows, _]) = three(&args[1..], "trace")?;
    let Some((cell, reverse, keep, projected)) = Sequence::form(op) else { return checked(trace.clone()) };
    let [units, outputs] = weight(args, 2, trace, cell)?;
    expect_outputs(projected, units, outputs)?;
    let Some(steps) = entries.checked_sub(1) else { return Err(Why::none("the entries of trace")) };
    let sequence = Sequence { cell, reverse, keep, projected, steps, rows, units, outputs };
    expect(args, 1, "trace", trace, &[entries, rows, sequence.trace()])?;
    expect(args, 0, "grad", trace, &[entries, rows, sequence.trace()])?;
    if projected {
        expect(args, 3, "projection", trace, &[outputs, units])?;
    }
    expect_lengths(op, args, rows)?;
    checked(TensorTy { dtype: trace.dtype, device, shape: Shape::from([entries, rows, sequence.slopes()]) })
}

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
            Cell::Relu => vec![entry(trace, after, 0, n).gt(0.0).where_(own, 0.0)],
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

/// The sizes of samples: steps, rows, units, columns of a projected output; whether the last step comes first, and
/// whether rows have lengths.
const CASES: &[([usize; 4], bool, bool)] = &[
    ([3, 2, 5, 3], false, false),
    ([4, 3, 2, 1], true, false),
    ([3, 4, 3, 2], false, true),
    ([4, 2, 3, 2], true, true),
    ([1, 1, 19, 4], false, false),
    ([0, 2, 3, 2], false, false),
    ([2, 0, 3, 2], true, false),
];

/// Calls of an op, given its sizes and whether the last step comes first; the shapes of its operands follow from the
/// sizes.
fn calls(op: impl Fn(bool, usize) -> Op, shapes: impl Fn([usize; 4]) -> Vec<Shape>) -> Vec<Sample> {
    let case = |(number, &(sizes, reverse, has_lengths)): (usize, &([usize; 4], bool, bool))| {
        let mut args: Vec<SampleArg> = shapes(sizes).iter().map(|shape| t(shape, Domain::Between(-1.5, 1.5))).collect();
        if has_lengths {
            args.push(SampleArg::Fixed(DType::I64, Shape::from([sizes[1]]), Domain::Index(sizes[0] + 1)));
        }
        with_op(op(reverse, number), FLOATS, args)
    };
    CASES.iter().enumerate().map(case).collect()
}

/// Shapes of a trace's gradient and of the trace.
fn traces([steps, rows, ..]: [usize; 4], columns: usize) -> Vec<Shape> {
    vec![Shape::from([steps + 1, rows, columns]); 2]
}

pub(crate) fn samples_of_lstm() -> Vec<Sample> {
    let shapes = |[steps, rows, n, _]: [usize; 4]| {
        vec![[steps, rows, 4 * n].into(), [rows, n].into(), [rows, n].into(), [4 * n, n].into()]
    };
    calls(|reverse, number| Op::Lstm { reverse, keep: number != 1 }, shapes)
}

pub(crate) fn samples_of_lstm_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, 6 * n), vec![[4 * n, n].into()]].concat()
    };
    calls(|reverse, _| Op::LstmBackward { reverse }, shapes)
}

pub(crate) fn samples_of_lstm_projected() -> Vec<Sample> {
    let shapes = |[steps, rows, n, p]: [usize; 4]| {
        let states = [[rows, p].into(), [rows, n].into()];
        let weights = [[4 * n, p].into(), [p, n].into()];
        [vec![[steps, rows, 4 * n].into()], states.into(), weights.into()].concat()
    };
    calls(|reverse, number| Op::LstmProjected { reverse, keep: number != 2 }, shapes)
}

pub(crate) fn samples_of_lstm_projected_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let [_, _, n, p] = sizes;
        [traces(sizes, p + 5 * n), vec![[4 * n, p].into(), [p, n].into()]].concat()
    };
    calls(|reverse, _| Op::LstmProjectedBackward { reverse }, shapes)
}

pub(crate) fn samples_of_gru() -> Vec<Sample> {
    let shapes = |[steps, rows, n, _]: [usize; 4]| {
        vec![[steps, rows, 3 * n].into(), [rows, n].into(), [3 * n, n].into(), [3 * n].into()]
    };
    calls(|reverse, number| Op::Gru { reverse, keep: number != 1 }, shapes)
}

pub(crate) fn samples_of_gru_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, 5 * n), vec![[3 * n, n].into()]].concat()
    };
    calls(|reverse, _| Op::GruBackward { reverse }, shapes)
}

pub(crate) fn samples_of_rnn() -> Vec<Sample> {
    let shapes = |[steps, rows, n, _]: [usize; 4]| {
        vec![[steps, rows, n].into(), [rows, n].into(), [n, n].into()]
    };
    calls(|reverse, number| Op::Rnn { relu: number % 2 == 1, reverse }, shapes)
}

pub(crate) fn samples_of_rnn_backward() -> Vec<Sample> {
    let shapes = |sizes: [usize; 4]| {
        let n = sizes[2];
        [traces(sizes, n), vec![[n, n].into()]].concat()
    };
    calls(|reverse, number| Op::RnnBackward { relu: number % 2 == 1, reverse }, shapes)
}
