//! The inverse hyperbolic functions, by log1p of what is left after the cancellation is worked out by hand.

use super::lane::{Lane, Width};
use super::logarithm::log1p;

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
