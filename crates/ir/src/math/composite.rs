//! Short functions of exact operations: extrema, roots, and PyTorch's pointwise composites.
//!
//! Each is given as the formula whose single operations, in this order, it performs.

use super::lane::Lane;

/// `1 / sqrt(x)`.
#[inline(always)]
pub fn rsqrt<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let root = cx.sqrt(x);
    cx.div(one, root)
}

/// `1 / x`.
#[inline(always)]
pub fn reciprocal<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    cx.div(one, x)
}

/// `0 > x ? 0 : x`: NaN and −0 pass.
#[inline(always)]
pub fn relu<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let zero = cx.constant(0.0);
    cx.max(zero, x)
}

/// The larger one; NaN if either is NaN.
#[inline(always)]
pub fn maximum<L: Lane>(cx: &mut L, a: L::F, b: L::F) -> L::F {
    // Of an unordered pair `max` returns b, so only a NaN in a is to be put right.
    let larger = cx.max(a, b);
    let a_nan = cx.is_nan(a);
    cx.select(a_nan, a, larger)
}

/// The smaller one; NaN if either is NaN.
#[inline(always)]
pub fn minimum<L: Lane>(cx: &mut L, a: L::F, b: L::F) -> L::F {
    let smaller = cx.min(a, b);
    let a_nan = cx.is_nan(a);
    cx.select(a_nan, a, smaller)
}

/// The smallest integer ≥ x: `-floor(-x)`.
#[inline(always)]
pub fn ceil<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let x = cx.neg(x);
    let x = cx.floor(x);
    cx.neg(x)
}

/// `|w| < 0.5 ? a + w * (b - a) : b - (b - a) * (1 - w)`.
#[inline(always)]
pub fn lerp<L: Lane>(cx: &mut L, a: L::F, b: L::F, weight: L::F) -> L::F {
    let half = cx.constant(0.5);
    let one = cx.constant(1.0);
    let difference = cx.sub(b, a);
    let step = cx.mul(weight, difference);
    let from_a = cx.add(a, step);
    let rest = cx.sub(one, weight);
    let step = cx.mul(difference, rest);
    let from_b = cx.sub(b, step);
    let size = cx.abs(weight);
    let near_a = cx.lt(size, half);
    cx.select(near_a, from_a, from_b)
}

/// `x + (value * a) * b`.
#[inline(always)]
pub fn addcmul<L: Lane>(cx: &mut L, x: L::F, a: L::F, b: L::F, value: L::F) -> L::F {
    let scaled = cx.mul(value, a);
    let product = cx.mul(scaled, b);
    cx.add(x, product)
}

/// `x + (value * a) / b`.
#[inline(always)]
pub fn addcdiv<L: Lane>(cx: &mut L, x: L::F, a: L::F, b: L::F, value: L::F) -> L::F {
    let scaled = cx.mul(value, a);
    let quotient = cx.div(scaled, b);
    cx.add(x, quotient)
}

/// `x + alpha * y`.
#[inline(always)]
pub fn add_alpha<L: Lane>(cx: &mut L, x: L::F, y: L::F, alpha: L::F) -> L::F {
    let scaled = cx.mul(alpha, y);
    cx.add(x, scaled)
}

/// `x - alpha * y`.
#[inline(always)]
pub fn sub_alpha<L: Lane>(cx: &mut L, x: L::F, y: L::F, alpha: L::F) -> L::F {
    let scaled = cx.mul(alpha, y);
    cx.sub(x, scaled)
}
