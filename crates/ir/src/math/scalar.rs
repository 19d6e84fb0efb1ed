//! Scalars as lanes: loops over these instantiations are what eager kernels vectorise.
//!
//! [Note: quick lanes]
//! A branch would keep such a loop from being vectorised. So where functions have [rare](Rare) parts, loops run over
//! [`QuickF32`] or [`QuickF64`], which leave those parts out but take note that one was needed, and a block of elements
//! in which that happens is computed again over [`ScalarF32`] or [`ScalarF64`].

use super::lane::{InDouble, Lane, Libm, Rare, Table, Width};

/// Performs the operations on `f32`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScalarF32;

/// Performs the operations on `f64`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScalarF64;

/// [`ScalarF32`] without the rare parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuickF32 {
    /// Whether a rare part was needed: a result is wrong.
    pub missed: bool,
}

/// [`ScalarF64`] without the rare parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuickF64 {
    /// Whether a rare part was needed: a result is wrong.
    pub missed: bool,
}

/// A rare part, kept out of the loops that hardly ever need it.
#[cold]
#[inline(never)]
fn rare<L: Lane, R: Rare<N>, const N: usize>(cx: &mut L, args: [L::F; N]) -> L::F {
    R::body(cx, args)
}

macro_rules! rarely {
    (whole) => {
        #[inline(always)]
        fn rarely<R: Rare<N>, const N: usize>(
            &mut self,
            mask: bool,
            common: Self::F,
            args: [Self::F; N],
        ) -> Self::F {
            if mask { rare::<Self, R, N>(self, args) } else { common }
        }
    };
    (quick) => {
        #[inline(always)]
        fn rarely<R: Rare<N>, const N: usize>(
            &mut self,
            mask: bool,
            common: Self::F,
            _: [Self::F; N],
        ) -> Self::F {
            self.missed |= mask;
            common
        }
    };
}

macro_rules! in_double {
    (double) => {
        #[inline(always)]
        fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [f64; N]) -> f64 {
            B::body(self, args, Width::F64)
        }
    };
    (whole) => {
        #[inline(always)]
        fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [f32; N]) -> f32 {
            B::body(&mut ScalarF64, args.map(f64::from), Width::F32) as f32
        }
    };
    (quick) => {
        #[inline(always)]
        fn in_double<B: InDouble<N>, const N: usize>(&mut self, args: [f32; N]) -> f32 {
            let mut cx = QuickF64::default();
            let result = B::body(&mut cx, args.map(f64::from), Width::F32) as f32;
            self.missed |= cx.missed;
            result
        }
    };
}

macro_rules! scalar_lane {
    ($lane:ty, $float:ty, $int:ty, $width:expr, $on:ident, $rarely:ident, $in_double:ident) => {
        impl Lane for $lane {
            type F = $float;
            type I = $int;
            type M = bool;
            const WIDTH: Width = $width;

            #[inline(always)]
            fn constant(&mut self, value: f64) -> $float {
                value as $float
            }
            #[inline(always)]
            fn int(&mut self, value: i64) -> $int {
                value as $int
            }
            #[inline(always)]
            fn name(&mut self, _name: &str, value: $float) -> $float {
                value
            }
            #[inline(always)]
            fn add(&mut self, a: $float, b: $float) -> $float {
                a + b
            }
            #[inline(always)]
            fn sub(&mut self, a: $float, b: $float) -> $float {
                a - b
            }
            #[inline(always)]
            fn mul(&mut self, a: $float, b: $float) -> $float {
                a * b
            }
            #[inline(always)]
            fn div(&mut self, a: $float, b: $float) -> $float {
                a / b
            }
            #[inline(always)]
            fn neg(&mut self, a: $float) -> $float {
                -a
            }
            #[inline(always)]
            fn abs(&mut self, a: $float) -> $float {
                a.abs()
            }
            #[inline(always)]
            fn sqrt(&mut self, a: $float) -> $float {
                a.sqrt()
            }
            #[inline(always)]
            fn fma(&mut self, a: $float, b: $float, c: $float) -> $float {
                a.mul_add(b, c)
            }
            #[inline(always)]
            fn min(&mut self, a: $float, b: $float) -> $float {
                if a < b { a } else { b }
            }
            #[inline(always)]
            fn max(&mut self, a: $float, b: $float) -> $float {
                if a > b { a } else { b }
            }
            #[inline(always)]
            fn floor(&mut self, a: $float) -> $float {
                a.floor()
            }
            #[inline(always)]
            fn round_ties_even(&mut self, a: $float) -> $float {
                a.round_ties_even()
            }
            #[inline(always)]
            fn libm(&mut self, function: Libm, args: &[$float]) -> $float {
                (function.$on)(args)
            }
            rarely!($rarely);
            in_double!($in_double);
            #[inline(always)]
            fn lookup(&mut self, table: Table, index: $int) -> $float {
                table.values[index as usize & (table.values.len() - 1)] as $float
            }
            #[inline(always)]
            fn bits(&mut self, a: $float) -> $int {
                a.to_bits() as $int
            }
            #[inline(always)]
            fn bits_to_float(&mut self, a: $int) -> $float {
                <$float>::from_bits(a as _)
            }
            #[inline(always)]
            fn int_add(&mut self, a: $int, b: $int) -> $int {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn int_sub(&mut self, a: $int, b: $int) -> $int {
                a.wrapping_sub(b)
            }
            #[inline(always)]
            fn int_and(&mut self, a: $int, b: $int) -> $int {
                a & b
            }
            #[inline(always)]
            fn int_or(&mut self, a: $int, b: $int) -> $int {
                a | b
            }
            #[inline(always)]
            fn shl(&mut self, a: $int, by: u32) -> $int {
                a.wrapping_shl(by)
            }
            #[inline(always)]
            fn shr(&mut self, a: $int, by: u32) -> $int {
                a.wrapping_shr(by)
            }
            #[inline(always)]
            fn lt(&mut self, a: $float, b: $float) -> bool {
                a < b
            }
            #[inline(always)]
            fn le(&mut self, a: $float, b: $float) -> bool {
                a <= b
            }
            #[inline(always)]
            fn gt(&mut self, a: $float, b: $float) -> bool {
                a > b
            }
            #[inline(always)]
            fn ge(&mut self, a: $float, b: $float) -> bool {
                a >= b
            }
            #[inline(always)]
            fn eq(&mut self, a: $float, b: $float) -> bool {
                a == b
            }
            #[inline(always)]
            fn ne(&mut self, a: $float, b: $float) -> bool {
                a != b
            }
            #[inline(always)]
            fn and(&mut self, a: bool, b: bool) -> bool {
                a & b
            }
            #[inline(always)]
            fn or(&mut self, a: bool, b: bool) -> bool {
                a | b
            }
            #[inline(always)]
            fn not(&mut self, a: bool) -> bool {
                !a
            }
            #[inline(always)]
            fn select(&mut self, mask: bool, a: $float, b: $float) -> $float {
                if mask { a } else { b }
            }
        }
    };
}

scalar_lane!(ScalarF32, f32, i32, Width::F32, single, whole, whole);
scalar_lane!(QuickF32, f32, i32, Width::F32, single, quick, quick);
scalar_lane!(QuickF64, f64, i64, Width::F64, double, quick, double);
scalar_lane!(ScalarF64, f64, i64, Width::F64, double, whole, double);
