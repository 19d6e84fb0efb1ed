//! Copies between layouts and dtypes, and the tensors made from a number: `fill`, `arange`.

use super::copy::copy;
use super::drive::{Cost, Form, Loop, MAX_INPUTS, drive};
use super::element::{Bool, Element};
use super::isa::vectorised;
use super::narrow::{copy_loop, narrowing, widening};
use super::operand::{Operand, Shared};
use super::pointwise::{Map, map_loop};
use super::strided::scatter;
use kiln_ir::{DType, Scalar};
use kiln_runtime::parallel_for;
use kiln_runtime::threads::GRAIN;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// `out = input`, element by element, whatever the two layouts and dtypes.
///
/// Casts are C's, except that a float outside i64's range saturates and NaN becomes 0; everything but zero
/// is true. Between narrow dtypes they go by way of the computing types: a float becomes an i64 that is then
/// wrapped, and f64 is rounded to a half by way of f32.
///
/// # Safety
/// The contract of [`Operand`]; equal shapes; the output's elements are distinct, and it overlaps the input
/// either not at all or by being the same elements at the same indices.
pub unsafe fn convert(out: &Operand, input: &Operand) {
    if out.dtype == input.dtype {
        // SAFETY: the caller's contract.
        if unsafe { repeat(out, input) || transpose(out, input) || copy(out, input) } {
            return;
        }
    }
    let (inner, form) = cast(input.dtype, out.dtype);
    // SAFETY: the loop is one for these dtypes in this form; the rest is the caller's contract.
    unsafe { drive(inner, form, Cost::Cheap, out, &[input]) }
}

/// The loop that converts, and what it takes.
pub(super) fn cast(from: DType, to: DType) -> (Loop, Form) {
    if from == to {
        let copy: Loop = match from.size() {
            1 => copy_loop::<u8>,
            2 => copy_loop::<u16>,
            4 => copy_loop::<u32>,
            _ => copy_loop::<u64>,
        };
        return (copy, Form::Memory);
    }
    let direct = match from {
        DType::F32 => f32_truncation(to),
        DType::F64 => f64_truncation(to),
        // Truth values are bytes, 0 or 1.
        DType::Bool | DType::U8 => from_integer::<u8>(to),
        DType::I8 => from_integer::<i8>(to),
        DType::I16 => from_integer::<i16>(to),
        DType::I32 => from_integer::<i32>(to),
        DType::I64 | DType::F16 | DType::BF16 => None,
    };
    if let Some(direct) = direct {
        return (direct, Form::Memory);
    }
    // One step where the other end is what a narrow dtype is computed in.
    let step = match (from.computing() == to, to.computing() == from) {
        (true, _) => widening(from),
        (_, true) => narrowing(to),
        _ => None,
    };
    match step {
        Some(step) => (step, Form::Memory),
        None => (computing_cast(from.computing(), to.computing()), Form::Computing),
    }
}

fn computing_cast(from: DType, to: DType) -> Loop {
    match from {
        DType::Bool => cast_to::<Bool>(to),
        DType::F32 => cast_to::<f32>(to),
        DType::F64 => cast_to::<f64>(to),
        _ => cast_to::<i64>(to),
    }
}

fn cast_to<A: Element>(dtype: DType) -> Loop {
    match dtype {
        DType::Bool => map_loop::<Cast<A, Bool>, 1>,
        DType::F32 => map_loop::<Cast<A, f32>, 1>,
        DType::F64 => map_loop::<Cast<A, f64>, 1>,
        _ => map_loop::<Cast<A, i64>, 1>,
    }
}

struct Cast<A, O>(PhantomData<(A, O)>);

impl<A: Element, O: Element> Map for Cast<A, O> {
    type In = A;
    type Out = O;
    #[inline(always)]
    fn map([a, ..]: [A; MAX_INPUTS]) -> O {
        a.cast()
    }
}

/// Fills a contiguous output with the only element of an input; false if the operands are no such pair.
///
/// # Safety
/// That of [`convert`], for equal dtypes.
unsafe fn repeat(out: &Operand, input: &Operand) -> bool {
    let n = out.numel();
    let is_one = input.shape.iter().zip(input.strides).all(|(&size, &stride)| size == 1 || stride == 0);
    if n < 2 || !is_one || !out.is_contiguous() {
        return false;
    }
    let pointers = Shared::new((out.ptr, input.ptr));
    macro_rules! fill {
        ($ty:ty) => {
            parallel_for(n, 2 * GRAIN, |begin, end| {
                let (to, from) = pointers.get();
                // SAFETY: the input's element, and elements of the output, whose ranges are disjoint.
                unsafe {
                    let (to, value) = (to.cast::<$ty>().add(begin), from.cast::<$ty>().read());
                    if value == 0 {
                        to.write_bytes(0, end - begin);
                    } else {
                        each(std::slice::from_raw_parts_mut(to, end - begin), 0, |_| value);
                    }
                }
            })
        };
    }
    match out.dtype.size() {
        1 => fill!(u8),
        2 => fill!(u16),
        4 => fill!(u32),
        _ => fill!(u64),
    }
    true
}

macro_rules! truncations {
    ($name:ident $float:ty: $($dtype:ident $integer:ty),*) => {
        /// The loop from these floats to integers of a dtype.
        fn $name(to: DType) -> Option<Loop> {
            match to {
                $(DType::$dtype => Some(map_loop::<Truncate<$float, $integer>, 1>),)*
                _ => None,
            }
        }

        $(impl Map for Truncate<$float, $integer> {
            type In = $float;
            type Out = $integer;
            // An i32 is there at once; an i64 is what counts.
            const HAS_RARE: bool = true;
            #[inline(always)]
            fn map([x, ..]: [$float; MAX_INPUTS]) -> $integer {
                x as i64 as $integer
            }
            #[inline(always)]
            fn quick([x, ..]: [$float; MAX_INPUTS], missed: &mut bool) -> $integer {
                const END: $float = 2147483648.0;
                let fits = x.abs() < END;
                *missed |= !fits;
                // SAFETY: what doesn't fit in an i32 is not converted.
                unsafe { (if fits { x } else { 0.0 }).to_int_unchecked::<i32>() as $integer }
            }
        })*
    };
}

/// A float as an i64, wrapped.
struct Truncate<F, I>(PhantomData<(F, I)>);

truncations!(f32_truncation f32: I64 i64, I32 i32, I16 i16, I8 i8, U8 u8);
truncations!(f64_truncation f64: I64 i64, I32 i32, I16 i16, I8 i8, U8 u8);

macro_rules! integer_casts {
    ($($dtype:ident $method:ident $to:ty),*; $($from:ty)*) => {
        /// A narrow integer, which is any of these at once.
        trait Integer: Copy {
            $(fn $method(self) -> $to;)*
        }

        integer_casts!(@each [$($method $to),*] $($from)*);

        /// The loop from these integers to a dtype.
        fn from_integer<A: Integer>(to: DType) -> Option<Loop> {
            match to {
                $(DType::$dtype => Some(map_loop::<Direct<A, $to>, 1>),)*
                _ => None,
            }
        }

        $(impl<A: Integer> Map for Direct<A, $to> {
            type In = A;
            type Out = $to;
            #[inline(always)]
            fn map([x, ..]: [A; MAX_INPUTS]) -> $to {
                x.$method()
            }
        })*
    };
    (@each $list:tt $($from:ty)*) => {
        $(integer_casts!(@one $from $list);)*
    };
    (@one $from:ty [$($method:ident $to:ty),*]) => {
        impl Integer for $from {
            $(#[inline(always)]
            fn $method(self) -> $to {
                self as $to
            })*
        }
    };
}

/// An integer as another number.
struct Direct<A, B>(PhantomData<(A, B)>);

integer_casts!(U8 to_u8 u8, I8 to_i8 i8, I16 to_i16 i16, I32 to_i32 i32, I64 to_i64 i64, F32 to_f32 f32, F64 to_f64 f64;
    u8 i8 i16 i32);

/// Rows of a transpose's tiles, along which the input is contiguous: enough that a visit to one of its pages
/// pays, since each column may lie in another page.
const TILE_ROWS: usize = 128;
/// Columns of a tile, along which the output is contiguous: two lines of f32.
const TILE_COLUMNS: usize = 32;

/// Copies a matrix whose two sides are contiguous along different dims, tile by tile; false if the operands
/// are no such pair.
///
/// # Safety
/// That of [`convert`], for equal dtypes.
unsafe fn transpose(out: &Operand, input: &Operand) -> bool {
    let mut dims =
        out.shape.iter().zip(out.strides.iter().zip(input.strides)).filter(|(size, _)| **size != 1);
    let (Some(first), Some(second), None) = (dims.next(), dims.next(), dims.next()) else { return false };
    // Rows run along the output's contiguous dim, columns along the input's.
    let (row, column) = match (first, second) {
        ((&rows, (&stride, 1)), (&columns, (1, &step))) => ((rows, stride), (columns, step)),
        ((&columns, (1, &step)), (&rows, (&stride, 1))) => ((rows, stride), (columns, step)),
        _ => return false,
    };
    // What is the same along rows needs no turning.
    if row.0 < 8 || column.0 < 8 || column.1 == 0 {
        return false;
    }
    let size = out.dtype.size();
    let tiles = row.0.div_ceil(TILE_ROWS);
    let pointers = Shared::new((out.ptr, input.ptr));
    let body = |begin: usize, end: usize| {
        let (to, from) = pointers.get();
        for r in (begin..end).map(|tile| tile * TILE_ROWS) {
            for c in (0..column.0).step_by(TILE_COLUMNS) {
                let (rows, columns) = (TILE_ROWS.min(row.0 - r), TILE_COLUMNS.min(column.0 - c));
                let to = to.wrapping_offset((r as isize * row.1 + c as isize) * size as isize);
                let from = from.wrapping_offset((c as isize * column.1 + r as isize) * size as isize);
                // SAFETY: the tile lies inside both operands, and tiles are disjoint.
                unsafe {
                    match size {
                        1 => tile::<u8>(to, row.1, from, column.1, rows, columns),
                        2 => tile::<u16>(to, row.1, from, column.1, rows, columns),
                        4 => tile::<u32>(to, row.1, from, column.1, rows, columns),
                        _ => tile::<u64>(to, row.1, from, column.1, rows, columns),
                    }
                }
            }
        }
    };
    if row.0 * column.0 < 2 * GRAIN {
        body(0, tiles)
    } else {
        parallel_for(tiles, 1, body)
    }
    true
}

/// # Safety
/// `to` can be written at r·to_stride + c and `from` read at c·from_stride + r.
unsafe fn tile<T: Copy>(
    to: *mut u8,
    to_stride: isize,
    from: *const u8,
    from_stride: isize,
    rows: usize,
    columns: usize,
) {
    let (to, from): (*mut T, *const T) = (to.cast(), from.cast());
    // Each line of either side is touched once: with power-of-two strides all lines of a tile fall into one
    // cache set, and would push each other out.
    let mut buffer = [[MaybeUninit::<T>::uninit(); TILE_COLUMNS]; TILE_ROWS];
    for c in 0..columns {
        let line = from.wrapping_offset(c as isize * from_stride);
        for (r, row) in buffer[..rows].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            row[c].write(unsafe { line.add(r).read() });
        }
    }
    for (r, row) in buffer[..rows].iter().enumerate() {
        // SAFETY: the caller's promise; `columns` elements of the row are initialised.
        unsafe {
            let line = to.offset(r as isize * to_stride);
            std::ptr::copy_nonoverlapping(row.as_ptr().cast(), line, columns);
        }
    }
}

/// Sets every element to `value`, the bytes of one element (little end first) in the low bytes.
///
/// # Safety
/// The contract of [`Operand`].
pub unsafe fn fill(out: &Operand, value: u64) {
    let strides = [0isize; 16];
    let Some(strides) = strides.get(..out.shape.len()) else {
        let wide = vec![0isize; out.shape.len()];
        let scalar = Operand { ptr: (&raw const value).cast_mut().cast(), strides: &wide, ..*out };
        // SAFETY: the scalar lives through the call and is only read.
        return unsafe { convert(out, &scalar) };
    };
    let scalar = Operand { ptr: (&raw const value).cast_mut().cast(), strides, ..*out };
    // SAFETY: the scalar lives through the call and is only read.
    unsafe { convert(out, &scalar) }
}

/// Sets element i, in row-major order, to start + i·step, computed in f64 for floats and wrapping for
/// integers (which take the integer parts of start and step); bool takes what is not zero as true.
///
/// # Safety
/// The contract of [`Operand`]; the output is one-dimensional.
pub unsafe fn arange(out: &Operand, start: f64, step: f64) {
    debug_assert_eq!(out.shape.len(), 1);
    let (n, size) = (out.shape[0], out.dtype.size());
    let stride = out.strides[0] * size as isize;
    let (first, increment) = (start as i64, step as i64);
    let float = |i: usize| start + i as f64 * step;
    let int = |i: usize| first.wrapping_add(increment.wrapping_mul(i as i64));
    let shared = Shared::new(out.ptr);
    macro_rules! side_by_side {
        ($ty:ty, $value:ident) => {
            parallel_for(n, GRAIN, |begin, end| {
                // SAFETY: the output's elements, which lie side by side; ranges are disjoint.
                unsafe {
                    let to = shared.get().cast::<$ty>().add(begin);
                    let to = std::slice::from_raw_parts_mut(to, end - begin);
                    each(to, begin, |i| $value(i) as $ty);
                }
            })
        };
    }
    match out.dtype {
        _ if stride != size as isize => {}
        DType::F32 => return side_by_side!(f32, float),
        DType::F64 => return side_by_side!(f64, float),
        DType::I64 => return side_by_side!(i64, int),
        DType::I32 => return side_by_side!(i32, int),
        DType::I16 => return side_by_side!(i16, int),
        DType::I8 => return side_by_side!(i8, int),
        DType::U8 => return side_by_side!(u8, int),
        DType::F16 | DType::BF16 | DType::Bool => {}
    }
    if let (DType::F16 | DType::BF16, Some(narrow)) = (out.dtype, narrowing(out.dtype))
        && stride == size as isize
    {
        return parallel_for(n, GRAIN, |begin, end| {
            let mut wide = [0f32; 512];
            for first in (begin..end).step_by(wide.len()) {
                let wide = &mut wide[..(end - first).min(512)];
                // SAFETY: none is asked for.
                unsafe { each(wide, first, |i| float(i) as f32) };
                let from = [wide.as_ptr().cast::<u8>(); MAX_INPUTS];
                // SAFETY: the output's elements, which lie side by side; ranges are disjoint.
                unsafe { narrow(shared.get().add(first * size), &from, wide.len()) };
            }
        });
    }
    for i in 0..n {
        let value = match out.dtype.computing() {
            DType::I64 => Scalar::Int(int(i)),
            _ => Scalar::Float(float(i)),
        };
        let bits = value.to_element(out.dtype);
        let to = out.ptr.wrapping_offset(i as isize * stride);
        // SAFETY: element i of the output.
        unsafe { scatter(to, stride, (&raw const bits).cast(), 1, size) };
    }
}

vectorised! {
    /// # Safety
    /// None.
    fn each [T, F: Fn(usize) -> T] [T, F] (to: &mut [T], begin: usize, value: F) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = value(begin + i);
        }
    }
}
