//! Scalars as lanes: loops over these instantiations are what eager kernels vectorise.

use super::lane::{Lane, Libm, Width};

/// Performs the operations on `f32`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScalarF32;

/// Performs the operations on `f64`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScalarF64;

macro_rules! scalar_lane {
    ($lane:ty, $float:ty, $int:ty, $width:expr, $on:ident) => {
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

scalar_lane!(ScalarF32, f32, i32, Width::F32, single);
scalar_lane!(ScalarF64, f64, i64, Width::F64, double);
