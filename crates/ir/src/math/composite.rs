//! Short functions of exact operations: extrema, roots, and PyTorch's pointwise composites.
//!
//! Each is given as the formula whose single operations, in this order, it performs.

use super::function::{first, library};
use super::lane::{Lane, Rare};

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

/// The smaller one of max and the larger one of x and min; NaN if any is NaN.
#[inline(always)]
pub fn clamp<L: Lane>(cx: &mut L, x: L::F, min: L::F, max: L::F) -> L::F {
    let raised = maximum(cx, x, min);
    minimum(cx, raised, max)
}

/// `(x > 0) - (x < 0)`.
#[inline(always)]
pub fn sign<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (zero, one) = (cx.constant(0.0), cx.constant(1.0));
    let (above, below) = (cx.gt(x, zero), cx.lt(x, zero));
    let above = cx.select(above, one, zero);
    let below = cx.select(below, one, zero);
    cx.sub(above, below)
}

/// `x == -inf ? neginf : x == inf ? posinf : x == x ? x : nan`.
#[inline(always)]
pub fn nan_to_num<L: Lane>(cx: &mut L, x: L::F, nan: L::F, posinf: L::F, neginf: L::F) -> L::F {
    let (most, least) = (cx.constant(f64::INFINITY), cx.constant(f64::NEG_INFINITY));
    let (is_number, is_most, is_least) = (cx.eq(x, x), cx.eq(x, most), cx.eq(x, least));
    let result = cx.select(is_number, x, nan);
    let result = cx.select(is_most, posinf, result);
    cx.select(is_least, neginf, result)
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

/// The integer part: `⌊|x|⌋` with the sign of x.
#[inline(always)]
pub fn trunc<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let size = cx.abs(x);
    let whole = cx.floor(size);
    cx.with_sign_of(whole, x)
}

/// `|x|` with the sign of y.
#[inline(always)]
pub fn copysign<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> L::F {
    let size = cx.abs(x);
    cx.with_sign_of(size, y)
}

/// The rest of x / y with the sign of x, which is exact: x − q·y rounds to itself while the quotient q has no more
/// digits than a number. Longer ones are left to the C library, as exact as this.
#[inline(always)]
pub fn fmod<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let (size, step) = (cx.abs(x), cx.abs(y));
    let size = cx.name("size", size);
    let step = cx.name("step", step);
    let quotient = cx.div(size, step);
    let quotient = cx.floor(quotient);
    let quotient = cx.name("quotient", quotient);
    let minus = cx.neg(quotient);
    let rest = cx.fma(minus, step, size);
    let rest = cx.name("rest", rest);
    // A quotient that was rounded up to a whole number is one too large.
    let above = cx.add(rest, step);
    let over = cx.lt(rest, zero);
    let rest = cx.select(over, above, rest);
    // Also where y is infinite.
    let less = cx.lt(size, step);
    let rest = cx.select(less, size, rest);
    let result = cx.with_sign_of(rest, x);
    let limit = cx.constant(f64::from(L::WIDTH.mantissa_bits()).exp2());
    let long = cx.ge(quotient, limit);
    cx.rarely::<LongFmod, 2>(long, result, [x, y])
}

struct LongFmod;

impl Rare<2> for LongFmod {
    const NAME: &'static str = "long_fmod";

    fn body<L: Lane>(cx: &mut L, [x, y]: [L::F; 2]) -> L::F {
        library!(cx, "fmod", |x, y| x % y)
    }
}

/// fmod(x, y), and whether it is not zero and has not the sign of y.
#[inline(always)]
fn rest<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> (L::F, L::M) {
    let zero = cx.constant(0.0);
    let rest = fmod(cx, x, y);
    let rest = cx.name("rest", rest);
    let below = cx.lt(rest, zero);
    let above = cx.gt(rest, zero);
    let y_below = cx.lt(y, zero);
    let y_above = cx.not(y_below);
    let a = cx.and(below, y_above);
    let b = cx.and(above, y_below);
    (rest, cx.or(a, b))
}

/// fmod(x, y), and y added where its sign is not y's.
#[inline(always)]
pub fn remainder<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> L::F {
    let (rest, differs) = rest(cx, x, y);
    let moved = cx.add(rest, y);
    cx.select(differs, moved, rest)
}

/// ⌊x / y⌋ of the exact quotient: (x − rest) / y, which is nearly whole, put right. x / 0 is the float's.
#[inline(always)]
pub fn floor_divide<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let one = cx.constant(1.0);
    let half = cx.constant(0.5);
    let quotient = cx.div(x, y);
    let quotient = cx.name("quotient", quotient);
    let (rest, differs) = rest(cx, x, y);
    let whole = cx.sub(x, rest);
    let whole = cx.div(whole, y);
    let less = cx.sub(whole, one);
    let whole = cx.select(differs, less, whole);
    let whole = cx.name("whole", whole);
    let floor = cx.floor(whole);
    let above = cx.sub(whole, floor);
    let far = cx.gt(above, half);
    let next = cx.add(floor, one);
    let floor = cx.select(far, next, floor);
    let nothing = cx.abs(floor);
    let nothing = cx.with_sign_of(nothing, quotient);
    let is_nothing = cx.eq(whole, zero);
    let result = cx.select(is_nothing, nothing, floor);
    let by_zero = cx.eq(y, zero);
    cx.select(by_zero, quotient, result)
}

/// The integer part of `x / y`.
#[inline(always)]
pub fn div_trunc<L: Lane>(cx: &mut L, x: L::F, y: L::F) -> L::F {
    let quotient = cx.div(x, y);
    let quotient = cx.name("quotient", quotient);
    trunc(cx, quotient)
}
