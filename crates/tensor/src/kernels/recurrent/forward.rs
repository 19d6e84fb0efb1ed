//! A layer's steps.

use std::ops::Range;

use kiln_ir::table::recurrent::{Cell, Sequence};
use kiln_runtime::AllocError;
use kiln_runtime::contract::Panels;

use super::cells::{self, Number, Relu, Sigmoid, Tanh};
use super::{Blocks, Part, has_step, offsets, part, part_mut, rows_of, run, zeros};
use crate::kernels::isa::vectorised;
use crate::kernels::operand::Shared;

/// A layer's operands, dense; those of other cells are null.
#[derive(Copy, Clone)]
pub struct Layer<T> {
    pub x: *const T,
    pub hidden: *const T,
    pub cell: *const T,
    pub weight: *const T,
    pub bias: *const T,
    pub projection: *const T,
    pub lengths: Option<*const i64>,
}

/// What a step of some rows and one block of units is computed from, and where it goes.
#[derive(Copy, Clone)]
struct Block<'a, T> {
    s: &'a Sequence,
    step: usize,
    /// The first unit and how many there are.
    units: (usize, usize),
    /// By row and gate, `width` apart: the products, in whose place the gates are computed.
    gates: *mut T,
    pitch: usize,
    width: usize,
    layer: Layer<T>,
    trace: *mut T,
    /// Where outputs go by row.
    outputs: *mut T,
    outputs_pitch: usize,
}

vectorised! {
    /// # Safety
    /// The operands have the sizes of the sequence; the states before the step are there; nobody else has the block.
    fn block [T: Number] [T] (b: &Block<'_, T>, rows: Range<usize>) {
        let (s, (first, count)) = (b.s, b.units);
        let (n, columns, gates) = (s.units, s.trace(), s.cell.gates());
        let (before, after) = (s.before(b.step) * s.rows, s.after(b.step) * s.rows);
        for row in rows {
            let (old, new) = ((before + row) * columns, (after + row) * columns);
            // SAFETY: this block of the row: its states, its gates, its columns of the trace.
            unsafe {
                let at = |gate: usize| part_mut(b.gates, row * b.pitch + gate * b.width, count);
                let state = |from: usize| part(b.trace, old + from + first, count);
                let cell = || part_mut(b.trace, new + s.outputs + first, count);
                if !has_step(b.layer.lengths, row, b.step) {
                    if !s.projected {
                        part_mut(b.trace, new + first, count).copy_from_slice(state(0));
                    }
                    if s.cell == Cell::Lstm {
                        cell().copy_from_slice(state(s.outputs));
                    }
                    for gate in 0..if s.keep { s.cell.kept() } else { 0 } {
                        part_mut(b.trace, new + s.states() + gate * n + first, count).fill(T::ZERO);
                    }
                    continue;
                }
                let x = |gate: usize| {
                    part(b.layer.x, (b.step * s.rows + row) * gates * n + gate * n + first, count)
                };
                let output = part_mut(b.outputs, row * b.outputs_pitch + first, count);
                match s.cell {
                    Cell::Lstm => {
                        cells::gate::<Sigmoid, T>(at(0), x(0));
                        cells::gate::<Sigmoid, T>(at(1), x(1));
                        cells::gate::<Tanh, T>(at(2), x(2));
                        cells::gate::<Sigmoid, T>(at(3), x(3));
                        cells::lstm_cell(cell(), state(s.outputs), [at(0), at(1), at(2)]);
                        cells::lstm_output(output, at(3), cell());
                    }
                    Cell::Gru => {
                        let bias = |gate: usize| part(b.layer.bias, gate * n + first, count);
                        (0..3).for_each(|gate| cells::add(at(gate), bias(gate)));
                        cells::gate::<Sigmoid, T>(at(0), x(0));
                        cells::gate::<Sigmoid, T>(at(1), x(1));
                        // What r is multiplied with is kept behind n.
                        at(3).copy_from_slice(at(2));
                        cells::gru_new(at(2), x(2), at(0), at(3));
                        cells::gru_output(output, state(0), at(1), at(2));
                    }
                    Cell::Tanh => {
                        cells::gate::<Tanh, T>(at(0), x(0));
                        output.copy_from_slice(at(0));
                    }
                    Cell::Relu => {
                        cells::gate::<Relu, T>(at(0), x(0));
                        output.copy_from_slice(at(0));
                    }
                }
                for gate in 0..if s.keep { s.cell.kept() } else { 0 } {
                    let kept = part_mut(b.trace, new + s.states() + gate * n + first, count);
                    kept.copy_from_slice(at(gate));
                }
            }
        }
    }
}

/// The trace of a layer.
///
/// # Safety
/// The operands have the sizes of the sequence, and `trace` as many elements as it has; all are dense, and the trace
/// overlaps nothing.
pub unsafe fn forward<T: Number>(s: &Sequence, trace: *mut T, layer: Layer<T>) -> Result<(), AllocError> {
    let (n, columns, gates) = (s.units, s.trace(), s.cell.gates());
    for row in 0..s.rows {
        let at = (s.first() * s.rows + row) * columns;
        // SAFETY: a row of the entry of the initial states, and of these states.
        unsafe {
            part_mut(trace, at, s.outputs).copy_from_slice(part(layer.hidden, row * s.outputs, s.outputs));
            if s.cell == Cell::Lstm {
                part_mut(trace, at + s.outputs, n).copy_from_slice(part(layer.cell, row * n, n));
            }
            part_mut(trace, at + s.states(), columns - s.states()).fill(T::ZERO);
        }
    }
    if s.steps == 0 || s.rows == 0 {
        return Ok(());
    }
    let blocks = Blocks::of::<T>(n);
    let inner = offsets(s.outputs, 1);
    let places = blocks.columns(gates, |gate, unit| (gate * n + unit) * s.outputs);
    // SAFETY: the elements of the weight.
    let weight = unsafe { Panels::pack(rows_of(layer.weight, &inner, &places), n)? };
    // A place beside the gates for what r is multiplied with.
    let places = gates + usize::from(s.cell == Cell::Gru);
    let pitch = blocks.count() * places * blocks.width;
    let products = zeros::<T>(s.rows * pitch)?;
    let projected = if s.projected { Some(Projection::new(s, layer.projection)?) } else { None };
    let rows = offsets(s.rows, columns);
    let shared = Shared::new((trace, layer, products.as_ptr().cast::<T>()));
    let outputs = Shared::new(projected.as_ref().map(|p| p.inputs.as_ptr().cast::<T>()));
    let steps = |turn: usize, of: Range<usize>, range: Range<usize>| {
        let (trace, layer, products) = shared.get();
        let step = s.step(turn);
        // SAFETY: within the trace.
        let states = unsafe { trace.add(s.before(step) * s.rows * columns) };
        // SAFETY: as above.
        let entry = unsafe { trace.add(s.after(step) * s.rows * columns) };
        let (outputs, outputs_pitch) = outputs.get().map_or((entry, columns), |inputs| (inputs, n));
        for number in range {
            let gates_at = products.wrapping_add(number * places * blocks.width);
            let b = Block {
                s,
                step,
                units: blocks.of_block(number),
                gates: gates_at,
                pitch,
                width: blocks.width,
                layer,
                trace,
                outputs,
                outputs_pitch,
            };
            let lhs = rows_of(states, &rows[of.clone()], &inner);
            // SAFETY: the states before the step are there for these rows; the block is this call's.
            unsafe {
                let result = gates_at.add(of.start * pitch);
                weight.multiply(lhs, number * gates..(number + 1) * gates, result, pitch);
                block(&b, of.clone());
            }
        }
    };
    let project = |turn: usize, of: Range<usize>, range: Range<usize>| {
        let ((trace, layer, _), step) = (shared.get(), s.step(turn));
        if let Some(projection) = &projected {
            // SAFETY: the units' outputs of these rows are there; the columns are this call's.
            unsafe { projection.run(s, step, trace, layer.lengths, of, range) };
        }
    };
    let first = Part { blocks: blocks.count(), run: &steps };
    let work = s.rows * gates * n * s.outputs;
    let bytes = gates * n * s.outputs * size_of::<T>();
    match &projected {
        Some(p) => run(s, s.steps, work, bytes, &[first, Part { blocks: p.blocks.count(), run: &project }]),
        None => run(s, s.steps, work, bytes, &[first]),
    }
    Ok(())
}

/// Outputs as products of what the units give.
struct Projection<T> {
    panels: Panels<T>,
    blocks: Blocks,
    /// What the units give, by row.
    inputs: kiln_runtime::Buffer,
    /// The products, by row.
    products: kiln_runtime::Buffer,
    rows: Vec<isize>,
    inner: Vec<isize>,
}

impl<T: Number> Projection<T> {
    fn new(s: &Sequence, projection: *const T) -> Result<Projection<T>, AllocError> {
        let (blocks, inner) = (Blocks::of::<T>(s.outputs), offsets(s.units, 1));
        let columns = blocks.columns(1, |_, output| output * s.units);
        // SAFETY: the elements of the projection.
        let panels = unsafe { Panels::pack(rows_of(projection, &inner, &columns), s.outputs)? };
        let inputs = zeros::<T>(s.rows * s.units)?;
        let products = zeros::<T>(s.rows * blocks.count() * blocks.width)?;
        Ok(Projection { panels, blocks, inputs, products, rows: offsets(s.rows, s.units), inner })
    }

    /// # Safety
    /// The inputs of these rows are there, and these columns of the outputs are nobody else's.
    unsafe fn run(
        &self,
        s: &Sequence,
        step: usize,
        trace: *mut T,
        lengths: Option<*const i64>,
        of: Range<usize>,
        range: Range<usize>,
    ) {
        let (columns, pitch) = (s.trace(), self.blocks.count() * self.blocks.width);
        let inputs = rows_of(self.inputs.as_ptr().cast::<T>(), &self.rows[of.clone()], &self.inner);
        for number in range {
            let (first, count) = self.blocks.of_block(number);
            let products = self.products.as_ptr().cast::<T>().wrapping_add(number * self.blocks.width);
            // SAFETY: the caller's promise.
            unsafe {
                self.panels.multiply(inputs, number..number + 1, products.add(of.start * pitch), pitch);
                for row in of.clone() {
                    let at = |entry: usize| (entry * s.rows + row) * columns + first;
                    let output = part_mut(trace, at(s.after(step)), count);
                    if has_step(lengths, row, step) {
                        output.copy_from_slice(part(products, row * pitch, count));
                    } else {
                        output.copy_from_slice(part(trace, at(s.before(step)), count));
                    }
                }
            }
        }
    }
}
