//! Several pointwise calls one after the other, a block of elements at a time: what a call leaves in the
//! first-level cache, the next one finds there.

use std::mem::MaybeUninit;

use kiln_ir::math::Function;
use kiln_runtime::parallel_for;
use smallvec::SmallVec;

use super::drive::{Cost, Dense, Loop, MAX_INPUTS, Row, dense};
use super::operand::Shared;
use super::pointwise::{cost, float_loops};
use super::softmax::prefetch;
use super::strided::gather;

/// Bytes of an operand in a block. The less, the more evenly the operands are asked for from memory; the more,
/// the less it costs to go from one step to the next. A block is an array on the stack.
const BLOCK_BYTES: usize = 1024;

/// How many bytes ahead of their turn elements are asked for: the processor does not see that blocks go on. A
/// page, so that the next one's address is known in time, too.
const AHEAD_BYTES: usize = 4096;

/// The calls of one function, each on operands of its own.
#[derive(Clone, Debug)]
pub struct Step {
    /// What is computed.
    pub function: Function,
    /// On what.
    pub rows: Vec<Row>,
}

#[repr(align(64))]
struct Block(#[allow(dead_code)] [MaybeUninit<u8>; BLOCK_BYTES]);

impl Block {
    const NEW: Block = Block([MaybeUninit::uninit(); BLOCK_BYTES]);

    fn ptr(&mut self) -> *mut u8 {
        (&raw mut *self).cast()
    }
}

/// [`super::pointwise_rows`] of each step, in their order, as far as an element can tell.
///
/// # Safety
/// Each step is a call that `pointwise_rows` can take. All have as many rows, with equal counts and dtypes at one
/// place. What a step writes, a row of any step uses either not at all or as the same elements at the same
/// place of the list and the same indices.
pub unsafe fn pointwise_blocks(steps: &[Step]) {
    let Some(first) = steps.first() else { return };
    debug_assert!(steps.iter().all(|step| step.rows.len() == first.rows.len()));
    let sizes: Vec<usize> = first.rows.iter().map(|row| row.numel).collect();
    let total = sizes.iter().sum();
    let costly = steps.iter().any(|step| cost(step.function) == Cost::Costly);
    let grain = if costly { Cost::Costly } else { Cost::Cheap }.grain();
    let shared = Shared::new(steps);
    let part = |mut begin: usize, end: usize| {
        let mut start = 0;
        for (place, size) in sizes.iter().enumerate() {
            let to = end.min(start + size);
            if begin < to {
                // SAFETY: elements of the rows; ranges are disjoint, so threads write different elements.
                unsafe { run_place(shared.get(), place, begin - start, to - start) };
                begin = to;
            }
            start += size;
        }
    };
    if total < 2 * grain {
        return part(0, total);
    }
    parallel_for(total, grain, part);
}

/// Runs all steps over some elements at one place.
///
/// # Safety
/// That of [`pointwise_blocks`], for these elements.
unsafe fn run_place(steps: &[Step], place: usize, begin: usize, end: usize) {
    let rows: Vec<(Function, &Row)> = steps.iter().map(|step| (step.function, &step.rows[place])).collect();
    let Some(&(_, first)) = rows.first() else { return };
    let size = first.dtype.size();
    let block = BLOCK_BYTES / size;
    if first.dtype.computing() != first.dtype {
        for at in (begin..end).step_by(block) {
            for &(function, row) in &rows {
                let loops = float_loops(function, row.dtype);
                // SAFETY: elements of the row.
                unsafe { dense(loops, &row.inputs[..function.arity()], row, at, block.min(end - at)) };
            }
        }
        return;
    }
    let (mut numbers, mut result) = (Vec::with_capacity(rows.len() * MAX_INPUTS), Block::NEW);
    let mut plain: Vec<Plain> = Vec::with_capacity(rows.len());
    for &(function, row) in &rows {
        let mut next = Plain::of(function, row, begin, &mut numbers);
        let known = |input: &*const u8| {
            plain.iter().any(|step| step.inputs.contains(input) || step.out.cast_const() == *input)
        };
        next.first_uses.retain(|input| !known(input));
        plain.push(next);
    }
    for at in (begin..end).step_by(block) {
        for step in &plain {
            // SAFETY: elements of the row, at most a block.
            unsafe { step.run((at - begin) * size, block.min(end - at), size, &mut result) };
        }
    }
}

/// A step at one place whose elements are computed in their own type.
struct Plain {
    run: Loop,
    /// Whether the result is kept in a block until all inputs are read.
    apart: bool,
    out: *mut u8,
    inputs: [*const u8; MAX_INPUTS],
    /// 0 for a number, which a block is full of.
    strides: [usize; MAX_INPUTS],
    /// The inputs that no step before uses: they come from memory.
    first_uses: SmallVec<[*const u8; MAX_INPUTS]>,
}

impl Plain {
    /// The step from an element on; `numbers` keeps its numbers, and has room for them.
    fn of(function: Function, row: &Row, begin: usize, numbers: &mut Vec<Block>) -> Plain {
        let size = row.dtype.size();
        let loops = float_loops(function, row.dtype);
        let out = row.out.wrapping_add(begin * size);
        let (mut inputs, mut strides) = ([out.cast_const(); MAX_INPUTS], [0; MAX_INPUTS]);
        let (mut first_uses, mut uses_out) = (SmallVec::new(), [false; MAX_INPUTS]);
        for (i, input) in row.inputs[..function.arity()].iter().enumerate() {
            match input {
                Dense::Elements(elements) => {
                    inputs[i] = elements.wrapping_add(begin * size);
                    strides[i] = 1;
                    uses_out[i] = inputs[i] == out;
                    if !first_uses.contains(&inputs[i]) {
                        first_uses.push(inputs[i]);
                    }
                }
                Dense::Scalar(element) => {
                    // Blocks must not move once they are pointed at.
                    assert!(numbers.len() < numbers.capacity());
                    let at = numbers.len();
                    numbers.push(Block::NEW);
                    let block = numbers[at].ptr();
                    // SAFETY: the element's first bytes are a value of the dtype, and the block has room for as many.
                    unsafe { gather(block, (&raw const *element).cast(), 0, BLOCK_BYTES / size, size) };
                    inputs[i] = block;
                }
            }
        }
        let (run, apart) = match loops.in_place {
            Some(change) if uses_out == [true, false, false, false] => (change, false),
            _ => (loops.apart, uses_out.contains(&true)),
        };
        Plain { run, apart, out, inputs, strides, first_uses }
    }

    /// # Safety
    /// There are `count` elements of `size` bytes from byte `at` on, at most a block.
    #[inline]
    unsafe fn run(&self, at: usize, count: usize, size: usize, result: &mut Block) {
        for input in &self.first_uses {
            prefetch(input.wrapping_add(at + AHEAD_BYTES), count * size);
        }
        let out = self.out.wrapping_add(at);
        let inputs = std::array::from_fn(|i| self.inputs[i].wrapping_add(at * self.strides[i]));
        // SAFETY: `count` contiguous elements each. The output is apart from the inputs, or the first of them where
        // the loop is the one for that, or a block.
        unsafe {
            if self.apart {
                (self.run)(result.ptr(), &inputs, count);
                std::ptr::copy_nonoverlapping(result.ptr(), out, count * size);
            } else {
                (self.run)(out, &inputs, count);
            }
        }
    }
}
