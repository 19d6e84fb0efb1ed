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

mod samples;
mod steps;

use crate::types::{Rule, checked, common_device, float, same_dtype, tensor};
use crate::{DType, Device, Op, Result, Shape, TensorTy, Ty, Why};

pub(crate) use samples::{
    samples_of_gru, samples_of_gru_backward, samples_of_lstm, samples_of_lstm_backward,
    samples_of_lstm_projected, samples_of_lstm_projected_backward, samples_of_rnn, samples_of_rnn_backward,
};
pub(crate) use steps::{backward, forward, gradient};

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

    /// Whether an op is one of this file.
    pub fn is_recurrent(op: &Op) -> bool {
        Sequence::form(op).is_some()
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

fn expect(
    args: &[Ty],
    i: usize,
    argument: &'static str,
    like: &TensorTy,
    shape: &[usize],
) -> Result<(), Why> {
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
    if lengths.shape[..] == [rows] {
        Ok(())
    } else {
        Err(Why::shape("lengths", [rows], lengths.shape.clone()))
    }
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
