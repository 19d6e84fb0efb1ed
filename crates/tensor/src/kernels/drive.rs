//! The walk over strided operands: coalesce dims, split over threads, feed contiguous blocks to a loop.
//!
//! [Note: one loop per function]
//! Inner loops exist in one form only: contiguous inputs to contiguous output, not overlapping. Operands
//! with another inner stride pass through a small block on the stack that stays in the first-level cache:
//! gathered before the loop, scattered after. A broadcast scalar fills its block once. So a function needs
//! one loop per dtype, whatever the strides. Arithmetic, which optimizers do in place, has a second one that
//! changes its first input where it lies.

use super::narrow::{narrowing, widening};
use super::operand::{Operand, Shared};
use super::strided::{gather, scatter};
use super::tiles::{TILE_COLUMNS, TILE_ROWS, turn};
use kiln_ir::DType;
use kiln_runtime::threads::GRAIN;
use kiln_runtime::{machine, parallel_for};
use smallvec::SmallVec;
use std::mem::MaybeUninit;

/// Most inputs that a pointwise kernel has.
pub const MAX_INPUTS: usize = 4;

/// Inputs and the output, which comes first.
pub(super) const OPERANDS: usize = MAX_INPUTS + 1;

/// A loop over `n` contiguous elements: output, inputs, n. The output overlaps no input.
pub(super) type Loop = unsafe fn(*mut u8, &[*const u8; MAX_INPUTS], usize);

/// The loops of a function.
#[derive(Clone, Copy)]
pub(super) struct Loops {
    /// Into memory of its own.
    pub apart: Loop,
    /// Into the first input's memory: that input is the output, and read as such; the others overlap it not.
    pub in_place: Option<Loop>,
}

impl From<Loop> for Loops {
    fn from(apart: Loop) -> Loops {
        Loops { apart, in_place: None }
    }
}

/// Elements in a block, which is an array on the stack; of the widest dtype they are 4 KiB, so that the blocks of all
/// operands stay in any first-level cache.
const BLOCK: usize = 512;

/// Inner dims shorter than this are gathered across rows.
const SHORT: usize = 64;

/// How much work an element is, which decides from where on threads pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    /// A few operations: bound by memory.
    Cheap,
    /// A transcendental function.
    Costly,
}

impl Cost {
    /// The least number of elements worth a thread's while.
    pub(super) fn grain(self) -> usize {
        match self {
            Cost::Cheap => GRAIN,
            Cost::Costly => GRAIN / 4,
        }
    }
}

/// What a loop takes from operands of narrow dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Elements as they are in memory.
    Memory,
    /// Elements of the type they are computed in.
    Computing,
}

/// One dim of all operands: strides in bytes.
#[derive(Clone, Copy)]
pub(super) struct Dim {
    pub size: usize,
    pub strides: [isize; OPERANDS],
}

pub(super) struct Walk {
    pub count: usize,
    pub sizes: [usize; OPERANDS],
    pub dims: SmallVec<[Dim; 6]>,
    inner: Loops,
    /// The loops between memory and what `inner` takes; for the output, back.
    conversions: [Option<Loop>; OPERANDS],
    /// The inputs that are contiguous along the last dim but one, and not along the last.
    pub turned: [bool; OPERANDS],
}

#[repr(align(64))]
pub(super) struct Block(#[allow(dead_code)] [MaybeUninit<u8>; BLOCK * 8]);

impl Block {
    pub const NEW: Block = Block([MaybeUninit::uninit(); BLOCK * 8]);

    fn ptr(&mut self) -> *mut u8 {
        (&raw mut *self).cast()
    }
}

/// Runs `inner` over operands of one shape, giving it their elements in this form.
///
/// # Safety
/// The contract of [`Operand`]; `inner` fits the dtypes. The output's elements are distinct, and an input
/// overlaps the output either not at all or by being the same elements at the same indices.
pub(super) unsafe fn drive(
    inner: impl Into<Loops>,
    form: Form,
    cost: Cost,
    out: &Operand,
    inputs: &[&Operand],
) {
    let inner: Loops = inner.into();
    debug_assert!(inputs.len() <= MAX_INPUTS);
    debug_assert!(inputs.iter().all(|i| i.shape == out.shape));
    let numel = out.numel();
    if numel == 0 {
        return;
    }
    let mut pointers = [out.ptr; OPERANDS];
    for (pointer, input) in pointers[1..].iter_mut().zip(inputs) {
        *pointer = input.ptr;
    }
    let mut conversions = [None; OPERANDS];
    if form == Form::Computing {
        conversions[0] = narrowing(out.dtype);
        for (conversion, input) in conversions[1..].iter_mut().zip(inputs) {
            *conversion = widening(input.dtype);
        }
    }
    let plain = conversions.iter().all(Option::is_none);
    if plain && numel == 1 {
        let mut result = 0u64;
        // SAFETY: one element of each operand, and the result has room for any dtype.
        unsafe {
            (inner.apart)((&raw mut result).cast(), &constant(&pointers), 1);
            std::ptr::copy_nonoverlapping((&raw const result).cast::<u8>(), out.ptr, out.dtype.size());
        }
        return;
    }

    let apart = pointers[1..=inputs.len()].iter().all(|&input| input != out.ptr);
    if plain
        && apart
        && numel < 2 * cost.grain()
        && out.is_contiguous()
        && inputs.iter().all(|i| i.is_contiguous())
    {
        // SAFETY: contiguous, and no input is the output.
        return unsafe { (inner.apart)(out.ptr, &constant(&pointers), numel) };
    }
    let mut sizes = [0; OPERANDS];
    sizes[0] = out.dtype.size();
    for (size, input) in sizes[1..].iter_mut().zip(inputs) {
        *size = input.dtype.size();
    }
    let mut dims = coalesce(out, inputs, &sizes);
    if dims.is_empty() {
        dims.push(Dim { size: 1, strides: sizes.map(|size| size as isize) });
    }
    // What stays in the first-level cache may be read in any order.
    let fits = numel * sizes[0] <= machine().l1;
    let turned = if fits { [false; OPERANDS] } else { turn(&mut dims, &sizes, inputs.len() + 1) };
    let walk = Walk { count: inputs.len() + 1, sizes, dims, inner, conversions, turned };
    let shared = Shared::new(pointers);
    if turned.contains(&true) {
        let tiles = walk.tiles();
        // SAFETY: tiles are disjoint, and all of them are the caller's elements.
        let part = |begin: usize, end: usize| unsafe { walk.tile_range(shared.get(), begin, end) };
        return if numel < 2 * cost.grain() {
            part(0, tiles)
        } else {
            parallel_for(tiles, cost.grain().div_ceil(TILE_ROWS * TILE_COLUMNS), part)
        };
    }
    if numel < 2 * cost.grain() {
        // SAFETY: the whole range, by the caller's contract.
        unsafe { walk.range(pointers, 0, numel) };
        return;
    }
    // SAFETY: ranges are disjoint, so threads write different elements.
    parallel_for(numel, cost.grain(), |begin, end| unsafe { walk.range(shared.get(), begin, end) });
}

/// An input without strides.
#[derive(Clone, Copy, Debug)]
pub enum Dense {
    /// Elements one after the other.
    Elements(*const u8),
    /// One element for all, of the type the row is computed in, little end first.
    Scalar(u64),
}

/// A call on operands whose elements lie one after the other, all of one dtype.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// How many elements the output has.
    pub numel: usize,
    /// Type of all elements.
    pub dtype: DType,
    /// The output's first element.
    pub out: *mut u8,
    /// The inputs, as many as the function takes.
    pub inputs: [Dense; MAX_INPUTS],
}

/// [`drive`] over several dense calls of one function with `arity` inputs: one parallel region for all.
///
/// # Safety
/// That of [`drive`] for each row; no row's output overlaps another row's operands.
pub(super) unsafe fn drive_rows(
    inner: impl Fn(DType) -> Loops + Sync,
    cost: Cost,
    arity: usize,
    rows: &[Row],
) {
    let total: usize = rows.iter().map(|row| row.numel).sum();
    let rows = Shared::new(rows);
    let part = |mut begin: usize, end: usize| {
        let mut start = 0;
        for row in rows.get() {
            let next = start + row.numel;
            if begin < next.min(end) {
                let (inner, to) = (inner(row.dtype), next.min(end));
                // SAFETY: elements of the row; ranges are disjoint, so threads write different elements.
                unsafe { dense(inner, &row.inputs[..arity], row, begin - start, to - begin) };
                begin = to;
            }
            start = next;
        }
    };
    if total < 2 * cost.grain() {
        return part(0, total);
    }
    parallel_for(total, cost.grain(), part);
}

/// Runs `inner` over `n` elements of a row.
///
/// # Safety
/// That of [`drive_rows`], for the elements from `begin` on.
pub(super) unsafe fn dense(inner: Loops, inputs: &[Dense], row: &Row, begin: usize, n: usize) {
    let size = row.dtype.size();
    let out = row.out.wrapping_add(begin * size);
    let mut pointers = [out; OPERANDS];
    let mut strides = [0; OPERANDS];
    strides[0] = size as isize;
    let mut conversions = [None; OPERANDS];
    conversions[0] = narrowing(row.dtype);
    let mut sizes = [size; OPERANDS];
    let mut plain = true;
    for (i, input) in inputs.iter().enumerate() {
        match input {
            Dense::Elements(start) => {
                pointers[i + 1] = start.cast_mut().wrapping_add(begin * size);
                strides[i + 1] = size as isize;
                conversions[i + 1] = widening(row.dtype);
                plain &= pointers[i + 1] != out;
            }
            Dense::Scalar(element) => {
                pointers[i + 1] = std::ptr::from_ref(element).cast_mut().cast();
                sizes[i + 1] = row.dtype.computing().size();
                plain = false;
            }
        }
    }
    let natural = conversions[0].is_none();
    if natural && n == 1 {
        let mut result = 0u64;
        // SAFETY: one element of each operand, and the result has room for any dtype.
        unsafe {
            (inner.apart)((&raw mut result).cast(), &constant(&pointers), 1);
            std::ptr::copy_nonoverlapping((&raw const result).cast::<u8>(), out, size);
        }
    } else if natural && plain {
        // SAFETY: contiguous, and no input is the output.
        unsafe { (inner.apart)(out, &constant(&pointers), n) };
    } else {
        let dims = SmallVec::from_iter([Dim { size: n, strides }]);
        let turned = [false; OPERANDS];
        let walk = Walk { count: inputs.len() + 1, sizes, dims, inner, conversions, turned };
        // SAFETY: the caller's contract.
        unsafe { walk.range(pointers, 0, n) };
    }
}

fn constant(pointers: &[*mut u8; OPERANDS]) -> [*const u8; MAX_INPUTS] {
    std::array::from_fn(|i| pointers[i + 1].cast_const())
}

/// Dims with equal steps become one; the output's smallest stride comes last.
pub(super) fn coalesce(out: &Operand, inputs: &[&Operand], sizes: &[usize; OPERANDS]) -> SmallVec<[Dim; 6]> {
    let mut dims: SmallVec<[Dim; 6]> = SmallVec::new();
    for (d, &size) in out.shape.iter().enumerate() {
        if size == 1 {
            continue;
        }
        let mut strides = [0; OPERANDS];
        strides[0] = out.strides[d] * sizes[0] as isize;
        for (i, input) in inputs.iter().enumerate() {
            strides[i + 1] = input.strides[d] * sizes[i + 1] as isize;
        }
        // Insertion keeps the order of equal strides, so a contiguous output needs no move.
        let at = dims
            .iter()
            .rposition(|dim| dim.strides[0].abs() >= strides[0].abs())
            .map_or(0, |position| position + 1);
        dims.insert(at, Dim { size, strides });
    }
    let mut merged: SmallVec<[Dim; 6]> = SmallVec::new();
    for dim in dims {
        match merged.last_mut() {
            Some(last) if (0..OPERANDS).all(|o| last.strides[o] == dim.strides[o] * dim.size as isize) => {
                *last = Dim { size: last.size * dim.size, strides: dim.strides };
            }
            _ => merged.push(dim),
        }
    }
    merged
}

impl Walk {
    /// # Safety
    /// The contract of [`drive`], for the elements `begin..end` in the order of the dims.
    unsafe fn range(&self, base: [*mut u8; OPERANDS], begin: usize, end: usize) {
        let Some((inner, outer)) = self.dims.split_last() else { return };
        if inner.size < SHORT && !outer.is_empty() {
            // SAFETY: passed on.
            return unsafe { self.short_rows(base, begin, end) };
        }
        let mut blocks = [Block::NEW; OPERANDS + 1];
        let mut filled = [std::ptr::null_mut(); OPERANDS];
        let mut at = begin;
        while at < end {
            let (row, column) = (at / inner.size, at % inner.size);
            let length = (inner.size - column).min(end - at);
            let mut pointers = base;
            let mut rest = row;
            for dim in outer.iter().rev() {
                let index = (rest % dim.size) as isize;
                rest /= dim.size;
                for (pointer, stride) in pointers.iter_mut().zip(&dim.strides) {
                    *pointer = pointer.wrapping_offset(index * stride);
                }
            }
            for (pointer, stride) in pointers.iter_mut().zip(&inner.strides) {
                *pointer = pointer.wrapping_offset(column as isize * stride);
            }
            // SAFETY: passed on.
            unsafe { self.row(pointers, &inner.strides, length, &mut blocks, &mut filled) };
            at += length;
        }
    }

    /// One run along the inner dim.
    ///
    /// # Safety
    /// The contract of [`drive`], for these elements.
    pub unsafe fn row(
        &self,
        mut pointers: [*mut u8; OPERANDS],
        strides: &[isize; OPERANDS],
        length: usize,
        blocks: &mut [Block; OPERANDS + 1],
        filled: &mut [*mut u8; OPERANDS],
    ) {
        let dense: [bool; OPERANDS] = std::array::from_fn(|o| strides[o] == self.sizes[o] as isize);
        let in_place = (1..self.count).any(|o| dense[o] && pointers[o] == pointers[0]);
        let direct: [bool; OPERANDS] = std::array::from_fn(|o| dense[o] && self.conversions[o].is_none());
        // The target of an in-place op is its first operand; what else lies there is read from a copy.
        let alone = direct[1]
            && pointers[1] == pointers[0]
            && !(2..self.count).any(|o| dense[o] && pointers[o] == pointers[0]);
        let (inner, direct_out) = match self.inner.in_place {
            Some(changing) if direct[0] && alone => (changing, true),
            _ => (self.inner.apart, direct[0] && !in_place),
        };
        let step = if direct_out && direct[1..self.count].iter().all(|&d| d) { length } else { BLOCK };
        let (blocks, [natural]) = blocks.split_at_mut(OPERANDS) else { return };
        let natural = natural.ptr();
        let mut done = 0;
        while done < length {
            let n = step.min(length - done);
            let mut arguments = pointers;
            for o in 1..self.count {
                if direct[o] {
                    continue;
                }
                let block = blocks[o].ptr();
                arguments[o] = block;
                let mut wanted = n;
                if strides[o] == 0 {
                    if filled[o] == pointers[o] {
                        continue;
                    }
                    // A scalar's block serves all later runs: fill it up for them where there are any.
                    wanted = match &self.dims[..] {
                        [_] if length < BLOCK => n,
                        [.., inner] => inner.size.min(BLOCK),
                        [] => BLOCK,
                    };
                    filled[o] = pointers[o];
                }
                // SAFETY: n elements of the operand are read, or one; the blocks have room.
                unsafe {
                    match self.conversions[o] {
                        None => gather(block, pointers[o], strides[o], wanted, self.sizes[o]),
                        Some(widen) if dense[o] => {
                            widen(block, &[pointers[o]; MAX_INPUTS].map(|p| p.cast_const()), n)
                        }
                        Some(widen) => {
                            gather(natural, pointers[o], strides[o], wanted, self.sizes[o]);
                            widen(block, &[natural.cast_const(); MAX_INPUTS], wanted);
                        }
                    }
                }
            }
            if !direct_out {
                arguments[0] = blocks[0].ptr();
            }
            // SAFETY: n contiguous elements each; the output is a block, or memory that no input overlaps, or
            // only the first one where the loop is the one for that.
            unsafe { inner(arguments[0], &constant(&arguments), n) };
            if !direct_out {
                let results = [arguments[0].cast_const(); MAX_INPUTS];
                // SAFETY: n elements of the output are written; the inputs have been read.
                unsafe {
                    match self.conversions[0] {
                        None => scatter(pointers[0], strides[0], arguments[0], n, self.sizes[0]),
                        Some(narrow) if dense[0] => narrow(pointers[0], &results, n),
                        Some(narrow) => {
                            narrow(natural, &results, n);
                            scatter(pointers[0], strides[0], natural, n, self.sizes[0]);
                        }
                    }
                }
            }
            for (pointer, stride) in pointers[..self.count].iter_mut().zip(strides) {
                *pointer = pointer.wrapping_offset(n as isize * stride);
            }
            done += n;
        }
    }

    /// Many short rows: blocks are gathered across them.
    ///
    /// # Safety
    /// The contract of [`drive`], for the elements `begin..end`.
    unsafe fn short_rows(&self, base: [*mut u8; OPERANDS], begin: usize, end: usize) {
        let mut blocks = [Block::NEW; OPERANDS];
        let mut natural = Block::NEW;
        let natural = natural.ptr();
        let dense: [bool; OPERANDS] = std::array::from_fn(|o| {
            let mut expected = self.sizes[o] as isize;
            self.conversions[o].is_none()
                && self.dims.iter().rev().all(|dim| {
                    let fits = dim.strides[o] == expected;
                    expected *= dim.size as isize;
                    fits
                })
        });
        let in_place = (1..self.count).any(|o| dense[o] && base[o] == base[0]);
        let mut at = begin;
        while at < end {
            let n = BLOCK.min(end - at);
            let mut arguments = base;
            for (o, argument) in arguments.iter_mut().enumerate().take(self.count) {
                if dense[o] && (o > 0 || !in_place) {
                    *argument = argument.wrapping_add(at * self.sizes[o]);
                    continue;
                }
                *argument = blocks[o].ptr();
                if o > 0 {
                    let block = if self.conversions[o].is_some() { natural } else { *argument };
                    // SAFETY: elements at..at + n of the operand are read; the blocks have room.
                    unsafe {
                        self.segments(o, base[o], at, n, block, |memory, stride, block, n, size| {
                            gather(block, memory, stride, n, size)
                        });
                        if let Some(widen) = self.conversions[o] {
                            widen(*argument, &[natural.cast_const(); MAX_INPUTS], n);
                        }
                    };
                }
            }
            // SAFETY: n contiguous elements each; the output is a block, or memory no input overlaps.
            unsafe { (self.inner.apart)(arguments[0], &constant(&arguments), n) };
            at += n;
            if dense[0] && !in_place {
                continue;
            }
            let at = at - n;
            // SAFETY: elements at..at + n of the output are written.
            unsafe {
                let mut block = arguments[0];
                if let Some(narrow) = self.conversions[0] {
                    narrow(natural, &[block.cast_const(); MAX_INPUTS], n);
                    block = natural;
                }
                self.segments(0, base[0], at, n, block, |memory, stride, block, n, size| {
                    scatter(memory, stride, block, n, size)
                })
            };
        }
    }

    /// Calls `each` for the pieces of rows that make up the elements `at..at + n` of an operand.
    ///
    /// # Safety
    /// That of `each`.
    unsafe fn segments(
        &self,
        operand: usize,
        base: *mut u8,
        at: usize,
        n: usize,
        mut block: *mut u8,
        each: unsafe fn(*mut u8, isize, *mut u8, usize, usize),
    ) {
        let size = self.sizes[operand];
        let last = self.dims.len() - 1;
        let inner = &self.dims[last];
        // The odometer over the outer dims.
        let mut index: SmallVec<[usize; 6]> = SmallVec::from_elem(0, last);
        let mut memory = base;
        let (mut row, mut column) = (at / inner.size, at % inner.size);
        for d in (0..last).rev() {
            index[d] = row % self.dims[d].size;
            row /= self.dims[d].size;
            memory = memory.wrapping_offset(index[d] as isize * self.dims[d].strides[operand]);
        }
        let mut left = n;
        while left > 0 {
            let count = (inner.size - column).min(left);
            let start = memory.wrapping_offset(column as isize * inner.strides[operand]);
            // SAFETY: passed on.
            unsafe { each(start, inner.strides[operand], block, count, size) };
            block = block.wrapping_add(count * size);
            left -= count;
            column = 0;
            for d in (0..last).rev() {
                index[d] += 1;
                memory = memory.wrapping_offset(self.dims[d].strides[operand]);
                if index[d] < self.dims[d].size {
                    break;
                }
                memory =
                    memory.wrapping_offset(-(self.dims[d].size as isize) * self.dims[d].strides[operand]);
                index[d] = 0;
            }
        }
    }
}
