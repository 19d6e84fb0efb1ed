//! One body, compiled for each instruction set and chosen at run time.

/// Defines a function whose body is compiled for AVX-512, for AVX2 and for the baseline; calls go to the
/// best one that the machine has. The body's loops are vectorised by the compiler.
///
/// Generic parameters are given twice, as declared and as passed on: `[const F: usize] [F]`.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident [$($generics:tt)*] [$($names:tt)*]
     ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis unsafe fn $name<$($generics)*>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            unsafe fn body<$($generics)*>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c,bmi2")]
            unsafe fn avx512<$($generics)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on.
                unsafe { body::<$($names)*>($($arg),*) }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            unsafe fn avx2<$($generics)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise is passed on.
                unsafe { body::<$($names)*>($($arg),*) }
            }

            match kiln_runtime::machine().isa {
                // SAFETY: the machine has the instructions, and the caller's promise is passed on.
                #[cfg(target_arch = "x86_64")]
                kiln_runtime::Isa::Avx512 => unsafe { avx512::<$($names)*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                kiln_runtime::Isa::Avx2 => unsafe { avx2::<$($names)*>($($arg),*) },
                // SAFETY: the caller's promise is passed on.
                _ => unsafe { body::<$($names)*>($($arg),*) },
            }
        }
    };
}

pub(super) use vectorised;
