//! The hyperbolic functions, and their inverses by log1p of what is left after the cancellation is worked out by hand.

use super::exponential::half_exp;
use super::lane::{Lane, Width};
use super::logarithm::log1p;

/// P of sinh x = x + x³·P(x²) on |x| ≤ 1; errors 2^-32.5 and 2^-56.8.
const fn sinh_coefficients(width: Width) -> &'static [f64] {
    match width {
        Width::F32 => {
            &[0.16666666646842135, 0.00833333967591706, 0.00019838101968683888, 2.8062802582276946e-06]
        }
        Width::F64 => &[
            0.16666666666666666,
            0.008333333333333333,
            0.00019841269841269773,
            2.755731922404034e-06,
            2.505210836405804e-08,
            1.6059048396350562e-10,
            7.646625361656657e-13,
            2.8445264169895285e-15,
        ],
    }
}

/// sinh x: ± (h − 1/(4h)) with h = e^|x|/2, an odd polynomial left of 1.
#[inline(always)]
pub fn sinh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let quarter = cx.constant(0.25);
    let size = cx.abs(x);
    let size = cx.name("size", size);
    let half = half_exp(cx, size);
    let half = cx.name("half", half);
    let other = cx.div(quarter, half);
    let far = cx.sub(half, other);
    let square = cx.mul(size, size);
    let square = cx.name("square", square);
    let p = cx.polynomial("p", square, sinh_coefficients(L::WIDTH));
    let cube = cx.mul(square, size);
    let near = cx.fma(cube, p, size);
    let is_near = cx.lt(size, one);
    let result = cx.select(is_near, near, far);
    cx.with_sign_of(result, x)
}

/// cosh x = h + 1/(4h) with h = e^|x|/2.
#[inline(always)]
pub fn cosh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let quarter = cx.constant(0.25);
    let size = cx.abs(x);
    let half = half_exp(cx, size);
    let half = cx.name("half", half);
    let other = cx.div(quarter, half);
    cx.add(half, other)
}

/// From here on x² + 1 is x², and 2x may be taken for x + √(x² + 1).
const fn huge(width: Width) -> f64 {
    match width {
        Width::F32 => 1e9,
        Width::F64 => 1e100,
    }
}

/// log(1 + t), or log 2x where x is huge.
#[inline(always)]
fn log_sum<L: Lane>(cx: &mut L, x: L::F, t: L::F) -> L::F {
    let limit = cx.constant(huge(L::WIDTH));
    let is_huge = cx.gt(x, limit);
    let argument = cx.select(is_huge, x, t);
    let argument = cx.name("argument", argument);
    let log = log1p(cx, argument);
    let log = cx.name("log", log);
    let ln2 = cx.constant(std::f64::consts::LN_2);
    let more = cx.add(log, ln2);
    cx.select(is_huge, more, log)
}

/// asinh x = ± log(1 + a + a²/(1 + √(1 + a²))), a = |x|.
#[inline(always)]
pub fn asinh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let size = cx.abs(x);
    let size = cx.name("size", size);
    let square = cx.mul(size, size);
    let square = cx.name("square", square);
    let root = cx.add(square, one);
    let root = cx.sqrt(root);
    let root = cx.add(root, one);
    let rest = cx.div(square, root);
    let t = cx.add(size, rest);
    let result = log_sum(cx, size, t);
    cx.with_sign_of(result, x)
}

/// acosh x = log(1 + t + √(t·(t + 2))), t = x − 1; NaN below 1.
#[inline(always)]
pub fn acosh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let two = cx.constant(2.0);
    let nan = cx.constant(f64::NAN);
    let t = cx.sub(x, one);
    let t = cx.name("t", t);
    let sum = cx.add(t, two);
    let product = cx.mul(t, sum);
    let root = cx.sqrt(product);
    let t = cx.add(t, root);
    let result = log_sum(cx, x, t);
    let below = cx.lt(x, one);
    cx.select(below, nan, result)
}

/// atanh x = ± ½·log(1 + 2a/(1 − a)), a = |x|.
#[inline(always)]
pub fn atanh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let half = cx.constant(0.5);
    let size = cx.abs(x);
    let size = cx.name("size", size);
    let twice = cx.add(size, size);
    let rest = cx.sub(one, size);
    let argument = cx.div(twice, rest);
    let argument = cx.name("argument", argument);
    let log = log1p(cx, argument);
    let result = cx.mul(half, log);
    let result = cx.abs(result);
    cx.with_sign_of(result, x)
}
