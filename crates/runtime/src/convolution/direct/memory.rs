//! How a tensor lies in memory: as the numbers that are computed with, or as halves, which are widened a few planes at
//! a time and rounded once.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::tile::Direct;
use crate::cpu::{self, Isa};
use crate::halves::Half;

/// A tensor in memory, from its first element on.
///
/// # Safety
/// Elements that are named are there; results are in nobody else's hands. There is room for as many elements as
/// [`Memory::room`] says.
pub(crate) trait Memory: Copy {
    /// What is computed with.
    type Number: Direct;

    /// How many numbers take other memory.
    fn room(count: usize) -> usize;
    /// So many elements as numbers.
    unsafe fn read(self, first: usize, count: usize, room: *mut Self::Number) -> *const Self::Number;
    /// Where results are put.
    unsafe fn place(self, first: usize, room: *mut Self::Number) -> *mut Self::Number;
    /// The results of whole planes are there.
    unsafe fn write(self, first: usize, count: usize, room: *mut Self::Number);
}

impl<T: Direct> Memory for *mut T {
    type Number = T;

    fn room(_: usize) -> usize {
        0
    }
    unsafe fn read(self, first: usize, _: usize, _: *mut T) -> *const T {
        self.wrapping_add(first)
    }
    unsafe fn place(self, first: usize, _: *mut T) -> *mut T {
        self.wrapping_add(first)
    }
    unsafe fn write(self, _: usize, _: usize, _: *mut T) {}
}

/// Halves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Halves {
    pub half: Half,
    pub at: *mut u16,
    /// What is added to the planes of results before they are rounded: their elements, and a number for each of so many.
    pub bias: Option<(usize, *const f32, usize)>,
}

impl Memory for Halves {
    type Number = f32;

    fn room(count: usize) -> usize {
        count
    }
    unsafe fn read(self, first: usize, count: usize, room: *mut f32) -> *const f32 {
        // SAFETY: the caller's elements and room.
        unsafe { widen(self.half, self.at.wrapping_add(first), room, count) };
        room
    }
    unsafe fn place(self, _: usize, room: *mut f32) -> *mut f32 {
        room
    }
    unsafe fn write(self, first: usize, count: usize, room: *mut f32) {
        // SAFETY: the caller's elements and room; a number for each plane.
        unsafe {
            if let Some((area, bias, planes)) = self.bias
                && area > 0
            {
                for at in (0..count).step_by(area) {
                    let number = *bias.add((first + at) / area % planes);
                    (f32::loops().wide.add)(room.wrapping_add(at), number, area);
                }
            }
            narrow(self.half, room, self.at.wrapping_add(first), count);
        }
    }
}

/// Numbers, or halves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Either {
    Floats(*mut f32),
    Halves(Halves),
}

impl Memory for Either {
    type Number = f32;

    fn room(count: usize) -> usize {
        count
    }
    unsafe fn read(self, first: usize, count: usize, room: *mut f32) -> *const f32 {
        // SAFETY: the caller's promise is passed on; so below.
        unsafe {
            match self {
                Either::Floats(at) => Memory::read(at, first, count, room),
                Either::Halves(halves) => halves.read(first, count, room),
            }
        }
    }
    unsafe fn place(self, first: usize, room: *mut f32) -> *mut f32 {
        // SAFETY: as above.
        unsafe {
            match self {
                Either::Floats(at) => Memory::place(at, first, room),
                Either::Halves(halves) => halves.place(first, room),
            }
        }
    }
    unsafe fn write(self, first: usize, count: usize, room: *mut f32) {
        // SAFETY: as above.
        unsafe {
            match self {
                Either::Floats(at) => Memory::write(at, first, count, room),
                Either::Halves(halves) => halves.write(first, count, room),
            }
        }
    }
}

/// # Safety
/// So many elements of each are there.
pub(crate) unsafe fn widen(half: Half, from: *const u16, to: *mut f32, count: usize) {
    // SAFETY: the caller's elements.
    let (from, to) =
        unsafe { (std::slice::from_raw_parts(from, count), std::slice::from_raw_parts_mut(to, count)) };
    match half {
        Half::F16 => HalfFloatSliceExt::convert_to_f32_slice(halves(from), to),
        // SAFETY: `isa` never names more than the machine has.
        Half::Bf16 => unsafe {
            match cpu::isa() {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => widen_avx512(from, to),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => widen_avx2(from, to),
                _ => widen_upper(from, to),
            }
        },
    }
}

/// Rounded to nearest even.
///
/// # Safety
/// So many elements of each are there.
pub(crate) unsafe fn narrow(half: Half, from: *const f32, to: *mut u16, count: usize) {
    // SAFETY: the caller's elements.
    let (from, to) =
        unsafe { (std::slice::from_raw_parts(from, count), std::slice::from_raw_parts_mut(to, count)) };
    match half {
        Half::F16 => {
            // SAFETY: an f16 is its bits.
            let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<f16>(), count) };
            HalfFloatSliceExt::convert_from_f32_slice(to, from);
        }
        // SAFETY: `isa` never names more than the machine has.
        Half::Bf16 => unsafe {
            match cpu::isa() {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => narrow_avx512(from, to),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => narrow_avx2(from, to),
                _ => narrow_upper(from, to),
            }
        },
    }
}

fn halves(bits: &[u16]) -> &[f16] {
    // SAFETY: an f16 is its bits.
    unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
}

#[inline(always)]
fn widen_upper(from: &[u16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, &bits)| *to = f32::from_bits(u32::from(bits) << 16));
}

#[inline(always)]
fn narrow_upper(from: &[f32], to: &mut [u16]) {
    for (to, x) in to.iter_mut().zip(from) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // A NaN could be carried into an infinity: it keeps its upper bits and becomes quiet.
        *to = if x.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen_avx512(from: &[u16], to: &mut [f32]) {
    widen_upper(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn widen_avx2(from: &[u16], to: &mut [f32]) {
    widen_upper(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn narrow_avx512(from: &[f32], to: &mut [u16]) {
    narrow_upper(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn narrow_avx2(from: &[f32], to: &mut [u16]) {
    narrow_upper(from, to);
}
