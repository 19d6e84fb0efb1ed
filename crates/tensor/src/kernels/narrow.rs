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

/// The two conversions of halves by instructions, `$lanes` at a time, what is left by way of a block.
#[cfg(target_arch = "x86_64")]
macro_rules! by_instructions {
    ($features:literal, $lanes:literal, $widen:ident, $narrow:ident, |$h:ident, $floats_to:ident| $to_floats:expr, |$x:ident, $halves_to:ident| $to_halves:expr $(,)?) => {
        /// # Safety
        /// That of [`Loop`], from f16 to f32, on a machine with the instructions.
        #[target_feature(enable = $features)]
        unsafe fn $widen(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
            let (out, from): (*mut f32, *const u16) = (out.cast(), inputs[0].cast());
            let whole = n / $lanes * $lanes;
            // SAFETY: the caller's promise: n elements each; a block has as many as are converted at a time.
            unsafe {
                let convert = |$h: *const u16, $floats_to: *mut f32| $to_floats;
                for i in (0..whole).step_by($lanes) {
                    convert(from.add(i), out.add(i));
                }
                if whole == n {
                    return;
                }
                let (mut halves, mut floats) = ([0u16; $lanes], [0f32; $lanes]);
                std::ptr::copy_nonoverlapping(from.add(whole), halves.as_mut_ptr(), n - whole);
                convert(halves.as_ptr(), floats.as_mut_ptr());
                std::ptr::copy_nonoverlapping(floats.as_ptr(), out.add(whole), n - whole);
            }
        }

        /// # Safety
        /// That of [`Loop`], from f32 to f16, on a machine with the instructions.
        #[target_feature(enable = $features)]
        unsafe fn $narrow(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
            let (out, from): (*mut u16, *const f32) = (out.cast(), inputs[0].cast());
            let whole = n / $lanes * $lanes;
            // SAFETY: as above.
            unsafe {
                let convert = |$x: *const f32, $halves_to: *mut u16| $to_halves;
                for i in (0..whole).step_by($lanes) {
                    convert(from.add(i), out.add(i));
                }
                if whole == n {
                    return;
                }
                let (mut floats, mut halves) = ([0f32; $lanes], [0u16; $lanes]);
                std::ptr::copy_nonoverlapping(from.add(whole), floats.as_mut_ptr(), n - whole);
                convert(floats.as_ptr(), halves.as_mut_ptr());
                std::ptr::copy_nonoverlapping(halves.as_ptr(), out.add(whole), n - whole);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps,
    _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps,
};

#[cfg(target_arch = "x86_64")]
by_instructions!(
    "avx512f",
    16,
    widen_f16_avx512,
    narrow_f16_avx512,
    |h, to| _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(h.cast()))),
    |x, to| _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(x)))
);

#[cfg(target_arch = "x86_64")]
by_instructions!(
    "avx,f16c",
    8,
    widen_f16_avx2,
    narrow_f16_avx2,
    |h, to| _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(h.cast()))),
    |x, to| _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x)))
);

/// # Safety
/// That of [`Loop`], from f16 to f32.
unsafe fn widen_f16(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
    // SAFETY: the caller's promise, and the machine has the instructions.
    unsafe {
        match kiln_runtime::machine().isa {
            #[cfg(target_arch = "x86_64")]
            kiln_runtime::Isa::Avx512 => widen_f16_avx512(out, inputs, n),
            #[cfg(target_arch = "x86_64")]
            kiln_runtime::Isa::Avx2 => widen_f16_avx2(out, inputs, n),
            _ => from_raw_parts(inputs[0].cast::<f16>(), n)
                .convert_to_f32_slice(from_raw_parts_mut(out.cast::<f32>(), n)),
        }
    }
}

/// # Safety
/// That of [`Loop`], from f32 to f16.
unsafe fn narrow_f16(out: *mut u8, inputs: &[*const u8; MAX_INPUTS], n: usize) {
    // SAFETY: the caller's promise, and the machine has the instructions.
    unsafe {
        match kiln_runtime::machine().isa {
            #[cfg(target_arch = "x86_64")]
            kiln_runtime::Isa::Avx512 => narrow_f16_avx512(out, inputs, n),
            #[cfg(target_arch = "x86_64")]
            kiln_runtime::Isa::Avx2 => narrow_f16_avx2(out, inputs, n),
            _ => from_raw_parts_mut(out.cast::<f16>(), n)
                .convert_from_f32_slice(from_raw_parts(inputs[0].cast::<f32>(), n)),
        }
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
