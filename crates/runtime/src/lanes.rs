//! Vectors of floats as the processor has them, under one interface.
//!
//! Functions over [`Lanes`] are `#[inline(always)]` and get their instructions from the function they end up in,
//! which names the set by `#[target_feature]`.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A vector register of floats.
///
/// # Safety
/// All functions need a processor with the vector's instruction set.
pub(crate) trait Lanes: Copy {
    /// What it holds.
    type Element: Copy + Default;
    /// How many of them.
    const LANES: usize;

    /// The same number in all lanes.
    unsafe fn splat(x: Self::Element) -> Self;
    /// `LANES` elements from memory.
    unsafe fn load(at: *const Self::Element) -> Self;
    /// `LANES` elements to memory.
    unsafe fn store(self, at: *mut Self::Element);
    /// The first `count` elements, at most `LANES`; zeros behind them. Reads no more than those.
    unsafe fn load_part(at: *const Self::Element, count: usize) -> Self;
    /// The first `count` elements to memory, at most `LANES`. Writes no more than those.
    unsafe fn store_part(self, at: *mut Self::Element, count: usize);
}

#[cfg(target_arch = "x86_64")]
macro_rules! lanes {
    ($vector:ty, $element:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident,
     |$load_at:ident, $load_count:ident| $load_part:expr,
     |$value:ident, $store_at:ident, $store_count:ident| $store_part:expr) => {
        impl Lanes for $vector {
            type Element = $element;
            const LANES: usize = $lanes;

            #[inline(always)]
            unsafe fn splat(x: $element) -> $vector {
                // SAFETY: the instruction set is there; so below.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(at: *const $element) -> $vector {
                // SAFETY: the caller's elements.
                unsafe { $load(at) }
            }
            #[inline(always)]
            unsafe fn store(self, at: *mut $element) {
                // SAFETY: the caller's elements.
                unsafe { $store(at, self) }
            }
            #[inline(always)]
            unsafe fn load_part($load_at: *const $element, $load_count: usize) -> $vector {
                // SAFETY: the caller's elements.
                unsafe { $load_part }
            }
            #[inline(always)]
            unsafe fn store_part(self, $store_at: *mut $element, $store_count: usize) {
                let $value = self;
                // SAFETY: the caller's elements.
                unsafe { $store_part }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
lanes!(
    __m512,
    f32,
    16,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    |at, count| _mm512_maskz_loadu_ps(_bzhi_u32(0xffff, count as u32) as __mmask16, at),
    |value, at, count| _mm512_mask_storeu_ps(at, _bzhi_u32(0xffff, count as u32) as __mmask16, value)
);

#[cfg(target_arch = "x86_64")]
lanes!(
    __m512d,
    f64,
    8,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    |at, count| _mm512_maskz_loadu_pd(_bzhi_u32(0xff, count as u32) as __mmask8, at),
    |value, at, count| _mm512_mask_storeu_pd(at, _bzhi_u32(0xff, count as u32) as __mmask8, value)
);

#[cfg(target_arch = "x86_64")]
lanes!(
    __m256,
    f32,
    8,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    |at, count| _mm256_maskload_ps(at, first_words(count)),
    |value, at, count| _mm256_maskstore_ps(at, first_words(count), value)
);

#[cfg(target_arch = "x86_64")]
lanes!(
    __m256d,
    f64,
    4,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    |at, count| _mm256_maskload_pd(at, first_words(2 * count)),
    |value, at, count| _mm256_maskstore_pd(at, first_words(2 * count), value)
);

/// A mask of the first `count` words of 32 bits.
///
/// # Safety
/// AVX2 is there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn first_words(count: usize) -> __m256i {
    // SAFETY: the instruction set is there.
    unsafe {
        let numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), numbers)
    }
}

/// Vectors for any processor, as the compiler makes them.
#[derive(Clone, Copy)]
pub(crate) struct Plain<T, const N: usize>([T; N]);

impl<T: Copy + Default, const N: usize> Lanes for Plain<T, N> {
    type Element = T;
    const LANES: usize = N;

    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Plain([x; N])
    }
    #[inline(always)]
    unsafe fn load(at: *const T) -> Self {
        // SAFETY: the caller's elements.
        unsafe { Plain(at.cast::<[T; N]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut T) {
        // SAFETY: the caller's elements.
        unsafe { at.cast::<[T; N]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_part(at: *const T, count: usize) -> Self {
        // SAFETY: the caller's elements.
        Plain(std::array::from_fn(|i| if i < count { unsafe { *at.add(i) } } else { T::default() }))
    }
    #[inline(always)]
    unsafe fn store_part(self, at: *mut T, count: usize) {
        for (i, &x) in self.0.iter().enumerate().take(count) {
            // SAFETY: the caller's elements.
            unsafe { *at.add(i) = x }
        }
    }
}

/// Vectors of which sums of products are made.
///
/// # Safety
/// That of [`Lanes`].
pub(crate) trait Sums: Lanes {
    /// `a · b + self`, rounded once if the instruction set can.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// The sum.
    unsafe fn plus(self, other: Self) -> Self;

    /// Of the elements of both in order: those at even places, and those at odd ones.
    #[inline(always)]
    unsafe fn split(a: Self, b: Self) -> (Self, Self) {
        // SAFETY: there is room for both; the caller's instruction set.
        unsafe { Self::rearranged(a, b, |i| 2 * i % (2 * Self::LANES) + i / Self::LANES) }
    }

    /// The elements of both in turn.
    #[inline(always)]
    unsafe fn join(even: Self, odd: Self) -> (Self, Self) {
        // SAFETY: as above.
        unsafe { Self::rearranged(even, odd, |i| i / 2 + i % 2 * Self::LANES) }
    }

    /// The elements of both, each from the place given for its own.
    #[inline(always)]
    unsafe fn rearranged(a: Self, b: Self, from: impl Fn(usize) -> usize) -> (Self, Self) {
        const { assert!(Self::LANES <= 16) };
        let mut before = [Self::Element::default(); 32];
        // SAFETY: there is room for both; the caller's instruction set.
        unsafe {
            a.store(before.as_mut_ptr());
            b.store(before.as_mut_ptr().add(Self::LANES));
            let after: [Self::Element; 32] = std::array::from_fn(|i| before[from(i) % 32]);
            (Self::load(after.as_ptr()), Self::load(after.as_ptr().add(Self::LANES)))
        }
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! sums {
    ($($vector:ty: $multiply_add:ident $add:ident { $($other:item)* })*) => {
        $(impl Sums for $vector {
            #[inline(always)]
            unsafe fn add_product(self, a: $vector, b: $vector) -> $vector {
                // SAFETY: the instruction set is there; so below.
                unsafe { $multiply_add(a, b, self) }
            }
            #[inline(always)]
            unsafe fn plus(self, other: $vector) -> $vector {
                // SAFETY: as above.
                unsafe { $add(self, other) }
            }
            $($other)*
        })*
    };
}

#[cfg(target_arch = "x86_64")]
sums!(
    __m512: _mm512_fmadd_ps _mm512_add_ps {
    #[inline(always)]
    unsafe fn split(a: __m512, b: __m512) -> (__m512, __m512) {
        // SAFETY: the instruction set is there.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        }
    }
    #[inline(always)]
    unsafe fn join(even: __m512, odd: __m512) -> (__m512, __m512) {
        // SAFETY: the instruction set is there.
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_or_si512(low, _mm512_set1_epi32(8));
            (_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd))
        }
    }
    }
    __m512d: _mm512_fmadd_pd _mm512_add_pd {}
    __m256: _mm256_fmadd_ps _mm256_add_ps {
    #[inline(always)]
    unsafe fn split(a: __m256, b: __m256) -> (__m256, __m256) {
        // SAFETY: the instruction set is there.
        unsafe {
            // Both come in quarters of the one and of the other.
            let order = |x: __m256| _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(_mm256_castps_pd(x)));
            (order(_mm256_shuffle_ps::<0x88>(a, b)), order(_mm256_shuffle_ps::<0xdd>(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn join(even: __m256, odd: __m256) -> (__m256, __m256) {
        // SAFETY: the instruction set is there.
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            (_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        }
    }
    }
    __m256d: _mm256_fmadd_pd _mm256_add_pd {}
);

impl<T, const N: usize> Sums for Plain<T, N>
where
    T: Copy + Default + std::ops::Add<Output = T> + std::ops::Mul<Output = T>,
{
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] + a.0[i] * b.0[i]))
    }
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

/// Vectors of f32 that are subtracted, too.
///
/// # Safety
/// That of [`Lanes`].
#[cfg(target_arch = "x86_64")]
pub(crate) trait Numbers: Sums<Element = f32> {
    /// The difference.
    unsafe fn minus(self, other: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
impl Numbers for __m512 {
    #[inline(always)]
    unsafe fn minus(self, other: __m512) -> __m512 {
        // SAFETY: the instruction set is there.
        unsafe { _mm512_sub_ps(self, other) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Numbers for __m256 {
    #[inline(always)]
    unsafe fn minus(self, other: __m256) -> __m256 {
        // SAFETY: the instruction set is there.
        unsafe { _mm256_sub_ps(self, other) }
    }
}
