//! A layer's slopes, from the last step to the first.

use std::ops::Range;

use kiln_ir::table::recurrent::{Cell, Sequence};
use kiln_runtime::AllocError;
use kiln_runtime::contract::Panels;

use super::cells::{self, Number, Relu, Sigmoid, Tanh};
use super::{Blocks, Part, has_step, offsets, part, part_mut, rows_of, run, zeros};
use crate::kernels::isa::vectorised;
use crate::kernels::operand::Shared;

/// The operands of a layer's gradient, dense; a projection that is not there is null.
#[derive(Copy, Clone)]
pub struct Gradient<T> {
    pub grad: *const T,
    pub trace: *const T,
    pub weight: *const T,
    pub projection: *const T,
    pub lengths: Option<*const i64>,
}

/// Memory by row, shared by all threads: each has its own rows or columns of it.
#[derive(Copy, Clone)]
struct Carried<T> {
    slopes: *mut T,
    /// What goes to the outputs after a step: products of later slopes, to which the rest is added; and its pitch.
    outputs: *mut T,
    pitch: usize,
    /// What goes to the outputs before a step without a product.
    past: *mut T,
    /// What goes to the cell.
    cell: *mut T,
    /// The cell's tanh, and what goes to the units' outputs where they are projected.
    bent: *mut T,
    units: *mut T,
    units_pitch: usize,
}

/// A step of some rows and one block.
#[derive(Copy, Clone)]
struct Block<'a, T> {
    s: &'a Sequence,
    step: usize,
    block: (usize, usize),
    of: Gradient<T>,
    to: Carried<T>,
}

vectorised! {
    /// What goes to the outputs of a block after a step, or to the initial ones: `outputs` = `outputs` + `past` + grad,
    /// for rows that don't have the step also in `past`.
    ///
    /// # Safety
    /// The operands have the sizes of the sequence; nobody else has the block.
    fn totals [T: Number] [T] (b: &Block<'_, T>, entry: usize, rows: Range<usize>, is_step: bool) {
        let (s, (first, count)) = (b.s, b.block);
        for row in rows {
            // SAFETY: this block of the row.
            unsafe {
                let output = part_mut(b.to.outputs, row * b.to.pitch + first, count);
                let past = part_mut(b.to.past, row * s.outputs + first, count);
                cells::add(output, past);
                cells::add(output, part(b.of.grad, (entry * s.rows + row) * s.trace() + first, count));
                if is_step && has_step(b.of.lengths, row, b.step) {
                    past.fill(T::ZERO);
                } else {
                    past.copy_from_slice(output);
                }
                if is_step && s.projected {
                    let at = (entry * s.rows + row) * s.slopes() + s.cell.slopes() * s.units + first;
                    let slope = part_mut(b.to.slopes, at, count);
                    if has_step(b.of.lengths, row, b.step) {
                        slope.copy_from_slice(output);
                    } else {
                        slope.fill(T::ZERO);
                    }
                }
            }
        }
    }
}

vectorised! {
    /// The slopes of a block of units from what goes to their outputs.
    ///
    /// # Safety
    /// As for [`totals`], which were found before.
    fn slopes [T: Number] [T] (b: &Block<'_, T>, rows: Range<usize>) {
        let (s, (first, count)) = (b.s, b.block);
        let (n, columns) = (s.units, s.trace());
        for row in rows {
            let (after, before) = (s.after(b.step) * s.rows + row, s.before(b.step) * s.rows + row);
            // SAFETY: this block of the row.
            unsafe {
                let slope = |i: usize| part_mut(b.to.slopes, after * s.slopes() + i * n + first, count);
                let kept = |i: usize| part(b.of.trace, after * columns + s.states() + i * n + first, count);
                let grad = |i: usize| part(b.of.grad, after * columns + s.states() + i * n + first, count);
                let output = part(b.to.units, row * b.to.units_pitch + first, count);
                let has = has_step(b.of.lengths, row, b.step);
                if !has {
                    (0..s.cell.slopes()).for_each(|i| slope(i).fill(T::ZERO));
                }
                match s.cell {
                    Cell::Lstm => {
                        let cell = part_mut(b.to.cell, row * n + first, count);
                        let at = s.outputs + first;
                        let cell_grad = part(b.of.grad, after * columns + at, count);
                        if !has {
                            cells::add(cell, cell_grad);
                            continue;
                        }
                        let bent = part_mut(b.to.bent, row * n + first, count);
                        cells::tanh(bent, part(b.of.trace, after * columns + at, count));
                        cells::lstm_inside(cell, cell_grad, output, kept(3), bent);
                        let old = part(b.of.trace, before * columns + at, count);
                        cells::slope::<Sigmoid, T>(slope(0), cell, kept(2), grad(0), kept(0));
                        cells::slope::<Sigmoid, T>(slope(1), cell, old, grad(1), kept(1));
                        cells::slope::<Tanh, T>(slope(2), cell, kept(0), grad(2), kept(2));
                        cells::slope::<Sigmoid, T>(slope(3), output, bent, grad(3), kept(3));
                        cells::scale(cell, kept(1));
                    }
                    _ if !has => {}
                    Cell::Gru => {
                        let old = part(b.of.trace, before * columns + first, count);
                        cells::gru_slope(slope(2), output, kept(1), grad(2), kept(2));
                        cells::slope::<Sigmoid, T>(slope(0), slope(2), kept(3), grad(0), kept(0));
                        cells::gru_update(slope(1), output, [old, kept(2)], grad(1), kept(1));
                        cells::product_and(slope(3), slope(2), kept(0), grad(3));
                        let past = part_mut(b.to.past, row * s.outputs + first, count);
                        cells::product(past, output, kept(1));
                    }
                    Cell::Tanh | Cell::Relu => {
                        let h = part(b.of.trace, after * columns + first, count);
                        if s.cell == Cell::Tanh {
                            cells::rnn_slope::<Tanh, T>(slope(0), output, h);
                        } else {
                            cells::rnn_slope::<Relu, T>(slope(0), output, h);
                        }
                    }
                }
            }
        }
    }
}

/// A layer's slopes.
///
/// # Safety
/// The operands have the sizes of the sequence, and `to` as many elements as its slopes; all are dense, and `to`
/// overlaps nothing.
pub unsafe fn backward<T: Number>(s: &Sequence, to: *mut T, of: Gradient<T>) -> Result<(), AllocError> {
    let (n, columns) = (s.units, s.slopes());
    // Columns of an entry that take part in products with the weight, in the order of its rows.
    let inner: Vec<isize> = match s.cell {
        Cell::Gru => (0..2 * n).chain(3 * n..4 * n).map(|at| at as isize).collect(),
        Cell::Lstm | Cell::Tanh | Cell::Relu => offsets(s.cell.slopes() * n, 1),
    };
    let blocks = Blocks::of::<T>(s.outputs);
    let places = blocks.columns(1, |_, output| output);
    let weight_rows = offsets(inner.len(), s.outputs);
    // SAFETY: the elements of the weight.
    let weight = unsafe { Panels::pack(rows_of(of.weight, &weight_rows, &places), s.outputs)? };
    let rows = offsets(s.rows, columns);
    let pitch = blocks.count() * blocks.width;
    let products = zeros::<T>(s.rows * pitch)?;
    let (past, cell, bent) =
        (zeros::<T>(s.rows * s.outputs)?, zeros::<T>(s.rows * n)?, zeros::<T>(s.rows * n)?);
    let unit_blocks = Blocks::of::<T>(n);
    let units_pitch = unit_blocks.count() * unit_blocks.width;
    let own = if s.projected { Some(zeros::<T>(s.rows * units_pitch)?) } else { None };
    let projection_rows = offsets(s.outputs, n);
    let output_rows = offsets(s.rows, pitch);
    let output_columns = offsets(s.outputs, 1);
    let projection = if s.projected {
        let places = unit_blocks.columns(1, |_, unit| unit);
        // SAFETY: the elements of the projection.
        Some(unsafe { Panels::pack(rows_of(of.projection, &projection_rows, &places), n)? })
    } else {
        None
    };
    let outputs = products.as_ptr().cast::<T>();
    let shared = Shared::new((
        of,
        Carried {
            slopes: to,
            outputs,
            pitch,
            past: past.as_ptr().cast(),
            cell: cell.as_ptr().cast(),
            bent: bent.as_ptr().cast(),
            units: own.as_ref().map_or(outputs, |own| own.as_ptr().cast()),
            units_pitch: if s.projected { units_pitch } else { pitch },
        },
    ));
    let part_of_step = |turn: usize, range_of: Range<usize>, range: Range<usize>| {
        let (of, to) = shared.get();
        // Behind all steps come the initial states.
        let is_step = turn < s.steps;
        let step = if is_step { s.step(s.steps - 1 - turn) } else { 0 };
        let entry = if is_step { s.after(step) } else { s.first() };
        for number in range {
            let b = Block { s, step, block: blocks.of_block(number), of, to };
            // SAFETY: the slopes of the step behind are there for these rows; the block is this call's.
            unsafe {
                if turn > 0 {
                    let behind = s.after(s.step(s.steps - turn)) * s.rows * columns;
                    let lhs = rows_of(to.slopes.add(behind), &rows[range_of.clone()], &inner);
                    let result = to.outputs.add(range_of.start * pitch + number * blocks.width);
                    weight.multiply(lhs, number..number + 1, result, pitch);
                }
                totals(&b, entry, range_of.clone(), is_step);
                if is_step && !s.projected {
                    slopes(&b, range_of.clone());
                }
            }
        }
    };
    let part_of_units = |turn: usize, range_of: Range<usize>, range: Range<usize>| {
        let (of, to) = shared.get();
        let (Some(projection), true) = (&projection, turn < s.steps) else { return };
        let step = s.step(s.steps - 1 - turn);
        for number in range {
            let b = Block { s, step, block: unit_blocks.of_block(number), of, to };
            let lhs = rows_of(to.outputs, &output_rows[range_of.clone()], &output_columns);
            // SAFETY: what goes to the outputs of these rows is there; the block is this call's.
            unsafe {
                let result = to.units.add(range_of.start * units_pitch + number * unit_blocks.width);
                projection.multiply(lhs, number..number + 1, result, units_pitch);
                slopes(&b, range_of.clone());
            }
        }
    };
    let work = s.rows * inner.len() * s.outputs;
    let bytes = inner.len() * s.outputs * size_of::<T>();
    let first = Part { blocks: blocks.count(), run: &part_of_step };
    let second = Part { blocks: unit_blocks.count(), run: &part_of_units };
    if s.projected {
        run(s, s.steps + 1, work, bytes, &[first, second])
    } else {
        run(s, s.steps + 1, work, bytes, &[first])
    }
    // `past` holds what goes to the initial outputs.
    for row in 0..s.rows {
        let entry = s.first() * s.rows + row;
        // SAFETY: a row of the entry of the initial states.
        unsafe {
            let slopes = part_mut(to, entry * columns, columns);
            slopes.fill(T::ZERO);
            let past = part(past.as_ptr().cast::<T>(), row * s.outputs, s.outputs);
            slopes[..s.outputs].copy_from_slice(past);
            if s.cell == Cell::Lstm {
                let slopes = &mut slopes[s.outputs..][..n];
                slopes.copy_from_slice(part(cell.as_ptr().cast::<T>(), row * n, n));
                cells::add(slopes, part(of.grad, entry * s.trace() + s.outputs, n));
            }
        }
    }
    Ok(())
}
