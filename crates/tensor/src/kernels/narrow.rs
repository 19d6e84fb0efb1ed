//! Narrow dtypes: memory holds the natural type, loops compute in [`DType::computing`]'s.
//!
//! [Note: three computing types]
//! A function has one loop for f32, one for f64 and one for i64. Elements of a narrow dtype pass through a
//! block that stays in the first-level cache: widened before the loop, narrowed after. So a new dtype costs two
//! short loops and no new form of any function.

use super::drive::{Loop, MAX_INPUTS};
use super::pointwise::{Map, map_loop};
use half::f16;
use half::slice::HalfFloatSliceExt;
use kiln_ir::DType;
use std::marker::PhantomData;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// The loop from a narrow dtype's elements to those it is computed in; `None` if the two are the same.
pub(super) fn widening(dtype: DType) -> Option<Loop> {
    Some(match dtype {
        DType::U8 => map_loop::<Widen<u8>, 1>,
        DType::I8 => map_loop::<Widen<i8>, 1>,
        DType::I16 => map_loop::<Widen<i16>, 1>,
        DType::I32 => map_loop::<Widen<i32>, 1>,
        DType::F16 => widen_f16,
        DType::BF16 => map_loop::<Widen<Bf16>, 1>,
        DType::Bool | DType::I64 | DType::F32 | DType::F64 => return None,
    })
}

/// The loop back: integers wrap, floats are rounded to nearest even.
pub(super) fn narrowing(dtype: DType) -> Option<Loop> {
    Some(match dtype {
        DType::U8 => map_loop::<Shorten<u8>, 1>,
        DType::I8 => map_loop::<Shorten<i8>, 1>,
        DType::I16 => map_loop::<Shorten<i16>, 1>,
        DType::I32 => map_loop::<Shorten<i32>, 1>,
        DType::F16 => narrow_f16,
        DType::BF16 => map_loop::<Shorten<Bf16>, 1>,
        DType::Bool | DType::I64 | DType::F32 | DType::F64 => return None,
    })
}

/// An element with a wider form in which it is computed.
trait Narrow: Copy {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! integers {
    ($($ty:ty)*) => {$(
        impl Narrow for $ty {
            type Wide = i64;
            #[inline(always)]
            fn widen(self) -> i64 {
                i64::from(self)
            }
            #[inline(always)]
            fn narrow(wide: i64) -> $ty {
                wide as $ty
            }
        }
    )*};
}
integers!(u8 i8 i16 i32);

/// A bf16 in memory, converted by arithmetic on its bits, which the compiler vectorises.
#[derive(Clone, Copy)]
struct Bf16(u16);

impl Narrow for Bf16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> Bf16 {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // A NaN could be carried into an infinity: it keeps its upper bits and becomes quiet.
        Bf16(if wide.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16)
    }
}

struct Widen<T>(PhantomData<T>);

impl<T: Narrow> Map for Widen<T> {
    type In = T;
    type Out = T::Wide;
    #[inline(always)]
    fn map([x, ..]: [T; MAX_INPUTS]) -> T::Wide {
        x.widen()
    }
}

struct Shorten<T: Narrow>(PhantomData<T>);

impl<T: Narrow> Map for Shorten<T> {
    type In = T::Wide;
    type Out = T;
    #[inline(always)]
    fn map([x, ..]: [T::Wide; MAX_INPUTS]) -> T {
        T::narrow(x)
    }
}

/// # Safety
/// That of [`Loop`], from f16 to f32.
unsafe fn widen_f16(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        from_raw_parts(inputs[0].cast::<f16>(), n)
            .convert_to_f32_slice(from_raw_parts_mut(out.cast::<f32>(), n));
    }
}

/// # Safety
/// That of [`Loop`], from f32 to f16.
unsafe fn narrow_f16(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        from_raw_parts_mut(out.cast::<f16>(), n)
            .convert_from_f32_slice(from_raw_parts(inputs[0].cast::<f32>(), n));
    }
}

/// Copies elements of a size, whatever their dtype.
///
/// # Safety
/// That of [`Loop`], from T to T.
pub(super) unsafe fn copy_loop<T: Copy>(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(inputs[0].cast::<T>(), out.cast::<T>(), n) }
}
