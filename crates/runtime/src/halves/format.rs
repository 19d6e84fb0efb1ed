//! The formats of halves, and conversions.

use half::f16;

use crate::gemm::Matrix;

/// Elements that are rounded together; panels are as wide as some of them.
const STEP: usize = 8;
/// As many as fill the widest vectors.
const WIDE: usize = 32;

/// The format of a half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// IEEE's.
    F16,
    /// The upper half of an f32.
    Bf16,
}

/// What an operand is made of. Matrices of f32 are given as matrices of halves: their strides count twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Half(Half),
    F32,
}

/// A matrix of f32 as products take it.
pub(crate) fn floats(matrix: Matrix<f32>) -> Matrix<u16> {
    Matrix::new(matrix.pointer.cast(), 2 * matrix.row, 2 * matrix.column)
}

impl Format {
    pub(super) fn half(self) -> Option<Half> {
        match self {
            Format::Half(half) => Some(half),
            Format::F32 => None,
        }
    }

    /// Halves from one element to the next.
    #[inline(always)]
    pub(super) fn unit(self) -> isize {
        match self {
            Format::Half(_) => 1,
            Format::F32 => 2,
        }
    }

    /// An element, as bits of f32.
    ///
    /// # Safety
    /// It is readable.
    #[inline(always)]
    pub(super) unsafe fn load(self, from: *const u16) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Format::Half(half) => half.widen(*from),
                Format::F32 => *from.cast::<u32>(),
            }
        }
    }

    /// Neighbours, as bits of f32.
    ///
    /// # Safety
    /// That of [`Half::widen_all`].
    #[inline(always)]
    pub(super) unsafe fn widen_all<const FAST: bool>(self, from: *const u16, to: &mut [u32]) {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match self {
                Format::Half(half) => half.widen_all::<FAST>(from, to),
                Format::F32 => to.copy_from_slice(std::slice::from_raw_parts(from.cast(), to.len())),
            }
        }
    }
}

impl Half {
    #[inline(always)]
    pub(super) fn widen(self, bits: u16) -> u32 {
        match self {
            Half::F16 => f16::from_bits(bits).to_f32().to_bits(),
            Half::Bf16 => u32::from(bits) << 16,
        }
    }

    /// Neighbours, as bits of f32.
    ///
    /// # Safety
    /// As many are readable as there are places; `FAST` needs AVX2 and F16C.
    #[inline(always)]
    pub(super) unsafe fn widen_all<const FAST: bool>(self, from: *const u16, to: &mut [u32]) {
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if FAST && self == Half::F16 {
            use std::arch::x86_64::*;
            while done + 8 <= to.len() {
                // SAFETY: eight halves, and eight places.
                unsafe {
                    let wide = _mm256_cvtph_ps(_mm_loadu_si128(from.add(done).cast()));
                    _mm256_storeu_ps(to.as_mut_ptr().add(done).cast(), wide);
                }
                done += 8;
            }
        }
        for (i, to) in to.iter_mut().enumerate().skip(done) {
            // SAFETY: the caller's promise.
            *to = self.widen(unsafe { *from.add(i) });
        }
    }

    /// Rounded to nearest even.
    #[inline(always)]
    pub(super) fn narrow(self, x: f32) -> u16 {
        let bits = x.to_bits();
        match self {
            Half::F16 => f16::from_f32(x).to_bits(),
            // A NaN could be carried into an infinity: it keeps its upper bits and becomes quiet.
            Half::Bf16 if x.is_nan() => (bits >> 16 | 0x40) as u16,
            Half::Bf16 => (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16,
        }
    }

    /// The same for neighbours, a multiple of [`STEP`].
    ///
    /// # Safety
    /// `FAST` needs AVX2 and F16C.
    #[inline(always)]
    pub(super) unsafe fn narrow_all<const FAST: bool>(self, from: &[f32], to: &mut [u16]) {
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if FAST && self == Half::F16 {
            use std::arch::x86_64::*;
            while done + 8 <= from.len().min(to.len()) {
                // SAFETY: eight floats, and eight places.
                unsafe {
                    let wide = _mm256_loadu_ps(from.as_ptr().add(done));
                    let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                    _mm_storeu_si128(to.as_mut_ptr().add(done).cast(), narrow);
                }
                done += 8;
            }
        }
        match self {
            Half::F16 => to.iter_mut().zip(from).skip(done).for_each(|(to, x)| *to = Half::F16.narrow(*x)),
            Half::Bf16 => {
                let count = from.len().min(to.len());
                let (to, from) = (to[..count].as_chunks_mut::<WIDE>(), from[..count].as_chunks::<WIDE>());
                for (to, from) in to.0.iter_mut().zip(from.0) {
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = Half::Bf16.narrow(*x));
                }
                let ((to, _), (from, _)) = (to.1.as_chunks_mut::<STEP>(), from.1.as_chunks::<STEP>());
                for (to, from) in to.iter_mut().zip(from) {
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = Half::Bf16.narrow(*x));
                }
            }
        }
    }
}
