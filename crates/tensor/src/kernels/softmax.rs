//! softmax and log_softmax along one dim: one pass over a row that stays in cache.
//!
//! With m the row's maximum and s = Σ exp(x − m): softmax is `exp(x - m) * (1 / s)`, log_softmax
//! `(x - m) - log(s)`.

use super::drive::MAX_INPUTS;
use super::element::Element;
use super::isa::vectorised;
use super::narrow::{narrowing, widening};
use super::operand::{Operand, Shared};
use super::reduce::total;
use super::reducers::{LargestF32, LargestF64, Reducer, SumF32, SumF64};
use super::strided::{gather, scatter};
use super::tiles::{TILE_ROWS, transpose};
use kiln_ir::DType;
use kiln_ir::math::Function;
use kiln_runtime::threads::GRAIN;
use kiln_runtime::{machine, parallel_for};
use smallvec::SmallVec;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// `out = softmax(input)` along `dim`, or its logarithm.
///
/// # Safety
/// The contract of [`Operand`]; both are of one float dtype and one shape; the output's elements are distinct, and
/// it is the input or doesn't overlap it. A 0-d operand has the one dim 0.
pub unsafe fn softmax(logarithm: bool, out: &Operand, input: &Operand, dim: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match out.dtype {
            DType::F64 => lines::<f64>([out, input], dim, |out, x| forward::<f64>(out, x, logarithm)),
            _ => lines::<f32>([out, input], dim, |out, x| forward::<f32>(out, x, logarithm)),
        }
    }
}

/// The two float types, with what the rows need of them.
trait Float:
    Element + std::ops::Sub<Output = Self> + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    /// The maximum where NaN may get lost: a row with NaN has a sum that is NaN.
    type Amax: Reducer<In = Self, Out = Self>;
    type Sum: Reducer<In = Self, Out = Self>;
    fn exp(self) -> Self;
    fn log(self) -> Self;
}

macro_rules! float {
    ($ty:ty, $amax:ty, $sum:ty, $eval:ident) => {
        impl Float for $ty {
            const ZERO: $ty = 0.0;
            const ONE: $ty = 1.0;
            type Amax = $amax;
            type Sum = $sum;
            #[inline(always)]
            fn exp(self) -> $ty {
                Function::Exp.$eval(&[self])
            }
            #[inline(always)]
            fn log(self) -> $ty {
                Function::Log.$eval(&[self])
            }
        }
    };
}

float!(f32, LargestF32, SumF32, eval_f32);
float!(f64, LargestF64, SumF64, eval_f64);

fn sum<T: Float>(x: &[T]) -> <T::Sum as Reducer>::Total {
    // SAFETY: nothing is asked.
    unsafe { total::<T::Sum>(x) }
}

/// Elements that are computed and then summed while in the first-level cache: fixed, since no bit depends on the
/// machine's caches.
const BLOCK: usize = 2048;

fn forward<T: Float>(out: &mut [T], x: &[T], logarithm: bool) {
    // SAFETY: nothing is asked.
    let maximum = <T::Amax as Reducer>::finish(unsafe { total::<T::Amax>(x) });
    let mut total = <T::Sum as Reducer>::TOTAL;
    for (out, x) in out.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
        // SAFETY: equal lengths.
        unsafe { exponentials(out, x, maximum) };
        total = <T::Sum as Reducer>::join(total, sum(out));
    }
    let total = <T::Sum as Reducer>::finish(total);
    // SAFETY: equal lengths.
    unsafe { if logarithm { shift(out, x, maximum, total.log()) } else { scale(out, T::ONE / total) } }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn exponentials [T: Float] [T] (out: &mut [T], x: &[T], maximum: T) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = (x - maximum).exp();
        }
    }
}

vectorised! {
    /// # Safety
    /// None.
    fn scale [T: Float] [T] (out: &mut [T], factor: T) {
        for out in out {
            *out = *out * factor;
        }
    }
}

vectorised! {
    /// # Safety
    /// Equal lengths.
    fn shift [T: Float] [T] (out: &mut [T], x: &[T], maximum: T, log_total: T) {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = (x - maximum) - log_total;
        }
    }
}

/// Bytes of a line of memory.
const LINE: usize = 64;

/// Asks for elements that will be read soon; any address will do. More than half of the first-level cache would push out
/// what is being worked on.
#[inline(always)]
pub(super) fn prefetch(start: *const u8, bytes: usize) {
    for byte in (0..bytes.min(machine().l1 / 2)).step_by(LINE) {
        kiln_runtime::prefetch(start.wrapping_add(byte));
    }
}

/// Lines longer than this are not turned in groups: the group would be in no cache.
const MOST_TURNED: usize = 1 << 14;

/// Calls `body` for every line along `dim`: the output's line and the input's, contiguous. Lines that are not
/// contiguous in memory, of a narrow dtype, or that the output shares with the input, pass through a buffer.
///
/// # Safety
/// That of [`softmax`].
unsafe fn lines<T: Float>(operands: [&Operand; 2], dim: usize, body: impl Fn(&mut [T], &[T]) + Sync) {
    let shape = operands[0].shape;
    let numel: usize = shape.iter().product();
    if numel == 0 {
        return;
    }
    let length = shape.get(dim).copied().unwrap_or(1);
    let stride = |o: &Operand, d: usize| o.strides.get(d).copied().unwrap_or(1);
    let strides: [isize; 2] = operands.map(|o| if length == 1 { 1 } else { stride(o, dim) });
    let outer: SmallVec<[usize; 6]> = (0..shape.len()).filter(|&d| d != dim && shape[d] != 1).collect();
    let pointers = Shared::new(operands.map(|o| o.ptr));
    let (widen, narrow) = (widening(operands[1].dtype), narrowing(operands[0].dtype));
    let outer_strides: [SmallVec<[isize; 6]>; 2] =
        operands.map(|o| outer.iter().map(|&d| stride(o, d)).collect());
    let size = operands[0].dtype.size();
    let bytes = size as isize;

    let ahead = outer_strides[1].last().copied().unwrap_or(0);

    // Lines side by side in memory, as along any dim but the last: a group of them is turned at once, unless what
    // it lies in stays in the first-level cache from one line to the next.
    let side = outer.last().map_or(0, |&d| shape[d]);
    let beside = strides.iter().all(|&stride| stride != 1)
        && outer_strides.iter().all(|strides| strides.last() == Some(&1))
        && side >= TILE_ROWS / 2
        && (2 * TILE_ROWS..MOST_TURNED).contains(&length);
    if beside {
        let per_block = side.div_ceil(TILE_ROWS);
        let groups = numel / length / side * per_block;
        let work = |begin: usize, end: usize| {
            // Natural elements of both operands, and one line of each as it is computed.
            let mut natural: [Vec<T>; 2] = std::array::from_fn(|_| vec![T::ZERO; TILE_ROWS * length]);
            let mut line: [Vec<T>; 2] = std::array::from_fn(|_| vec![T::ZERO; length]);
            let pitch = length * size;
            for group in begin..end {
                let first = group % per_block * TILE_ROWS;
                let height = TILE_ROWS.min(side - first);
                let mut at = pointers.get();
                for o in 0..2 {
                    at[o] = at[o].wrapping_offset(first as isize * bytes);
                    let mut rest = group / per_block;
                    for (&d, &stride) in outer.iter().zip(&outer_strides[o]).rev().skip(1) {
                        at[o] = at[o].wrapping_offset((rest % shape[d]) as isize * stride * bytes);
                        rest /= shape[d];
                    }
                }
                let [result, given] = natural.each_mut().map(|block| block.as_mut_ptr().cast::<u8>());
                // SAFETY: the group's elements of both operands, which are this thread's; the blocks have room for
                // TILE_ROWS lines of natural elements.
                unsafe {
                    transpose((given, pitch as isize), (at[1], strides[1] * bytes), height, length, size);
                    for l in 0..height {
                        let (given, result) = (given.add(l * pitch), result.add(l * pitch));
                        let x: *const T = match widen {
                            Some(widen) => {
                                widen(line[1].as_mut_ptr().cast(), &[given.cast_const(); MAX_INPUTS], length);
                                line[1].as_ptr()
                            }
                            None => given.cast(),
                        };
                        let x = from_raw_parts(x, length);
                        match narrow {
                            Some(narrow) => {
                                body(&mut line[0], x);
                                narrow(result, &[line[0].as_ptr().cast(); MAX_INPUTS], length);
                            }
                            None => body(from_raw_parts_mut(result.cast(), length), x),
                        }
                    }
                    for i in (0..length).step_by(TILE_ROWS) {
                        let to = at[0].wrapping_offset(i as isize * strides[0] * bytes);
                        let from = result.cast_const().add(i * size);
                        transpose(
                            (to, strides[0] * bytes),
                            (from, pitch as isize),
                            TILE_ROWS.min(length - i),
                            height,
                            size,
                        );
                    }
                }
            }
        };
        if numel < GRAIN / 2 {
            work(0, groups)
        } else {
            parallel_for(groups, (GRAIN / 4).div_ceil(length * TILE_ROWS), work)
        }
        return;
    }

    let work = |begin: usize, end: usize| {
        let mut buffer: Vec<T> = Vec::new();
        // A line of narrow elements as it is in memory, narrower than T.
        let mut natural: Vec<T> = Vec::new();
        for line in begin..end {
            let mut at = pointers.get();
            for o in 0..2 {
                let mut rest = line;
                for (&d, &stride) in outer.iter().zip(&outer_strides[o]).rev() {
                    at[o] = at[o].wrapping_offset((rest % shape[d]) as isize * stride * bytes);
                    rest /= shape[d];
                }
            }
            if strides[1] == 1 {
                // The first pass over a line waits for memory, the others compute: fetch one line ahead.
                prefetch(at[1].wrapping_offset(ahead * bytes), length * size);
            }
            let buffered =
                [strides[0] != 1 || narrow.is_some(), strides[1] != 1 || widen.is_some() || at[1] == at[0]];
            if buffered.contains(&true) && buffer.is_empty() {
                buffer.resize(2 * length, T::ZERO);
                natural.resize(if widen.is_some() { length } else { 0 }, T::ZERO);
            }
            let mut place: [*mut T; 2] = at.map(|p| p.cast());
            for o in (0..2).filter(|&o| buffered[o]) {
                place[o] = buffer.as_mut_ptr().wrapping_add(o * length);
            }
            // SAFETY: `length` elements each, of an operand or of a half of the buffer; the output's are
            // apart from the input's.
            unsafe {
                match widen {
                    Some(widen) => {
                        let line: *mut u8 = natural.as_mut_ptr().cast();
                        gather(line, at[1], strides[1] * bytes, length, size);
                        widen(place[1].cast(), &[line.cast_const(); MAX_INPUTS], length);
                    }
                    None if buffered[1] => {
                        gather(place[1].cast(), at[1], strides[1] * bytes, length, size);
                    }
                    None => {}
                }
                body(from_raw_parts_mut(place[0], length), from_raw_parts(place[1], length));
                match narrow {
                    Some(narrow) => {
                        let line: *mut u8 = natural.as_mut_ptr().cast();
                        narrow(line, &[place[0].cast_const().cast(); MAX_INPUTS], length);
                        scatter(at[0], strides[0] * bytes, line, length, size);
                    }
                    None if buffered[0] => {
                        scatter(at[0], strides[0] * bytes, place[0].cast(), length, size);
                    }
                    None => {}
                }
            }
        }
    };
    let count = numel / length;
    if numel < GRAIN / 2 {
        work(0, count);
    } else {
        parallel_for(count, (GRAIN / 4).div_ceil(length), work);
    }
}
