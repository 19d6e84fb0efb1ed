//! Activations in one pass: the single operations of their rows' decompositions, in the same order.

use super::composite::{maximum, minimum};
use super::exponential::{exp, expm1, sigmoid, tanh};
use super::lane::Lane;
use super::logarithm::log1p;
use crate::table::activations::{SELU_ALPHA, SELU_SCALE};

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let gate = sigmoid(cx, x);
    cx.mul(x, gate)
}

/// `max(x, 0) + log1p(exp(-|x|))`: log(1 + eˣ).
#[inline(always)]
fn log_one_plus_exp<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let raised = maximum(cx, x, zero);
    let size = cx.abs(x);
    let negative = cx.neg(size);
    let power = exp(cx, negative);
    let rest = log1p(cx, power);
    cx.add(raised, rest)
}

/// `x * tanh(log(1 + eˣ))`.
#[inline(always)]
pub fn mish<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let inner = log_one_plus_exp(cx, x);
    let gate = tanh(cx, inner);
    cx.mul(x, gate)
}

/// `scaled > threshold ? x : log(1 + e^scaled) / beta` of `scaled = x * beta`.
#[inline(always)]
pub fn softplus<L: Lane>(cx: &mut L, x: L::F, beta: L::F, threshold: L::F) -> L::F {
    let scaled = cx.mul(x, beta);
    let bent = log_one_plus_exp(cx, scaled);
    let bent = cx.div(bent, beta);
    let straight = cx.gt(scaled, threshold);
    cx.select(straight, x, bent)
}

/// `-log(1 + e⁻ˣ)`.
#[inline(always)]
pub fn log_sigmoid<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let negative = cx.neg(x);
    let result = log_one_plus_exp(cx, negative);
    cx.neg(result)
}

/// `x > 0 ? x : expm1(min(x, 0)) * alpha`.
#[inline(always)]
pub fn elu<L: Lane>(cx: &mut L, x: L::F, alpha: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let lowered = minimum(cx, x, zero);
    let power = expm1(cx, lowered);
    let bent = cx.mul(power, alpha);
    let positive = cx.gt(x, zero);
    cx.select(positive, x, bent)
}

/// `x > 0 ? x : expm1(min(x, 0) / alpha) * alpha`.
#[inline(always)]
pub fn celu<L: Lane>(cx: &mut L, x: L::F, alpha: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let lowered = minimum(cx, x, zero);
    let share = cx.div(lowered, alpha);
    let power = expm1(cx, share);
    let bent = cx.mul(power, alpha);
    let positive = cx.gt(x, zero);
    cx.select(positive, x, bent)
}

/// `elu(x) * scale`, with selu's factors.
#[inline(always)]
pub fn selu<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (alpha, scale) = (cx.constant(SELU_ALPHA), cx.constant(SELU_SCALE));
    let result = elu(cx, x, alpha);
    cx.mul(result, scale)
}

/// `x > 0 ? x : x * slope`.
#[inline(always)]
pub fn leaky_relu<L: Lane>(cx: &mut L, x: L::F, slope: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let scaled = cx.mul(x, slope);
    let positive = cx.gt(x, zero);
    cx.select(positive, x, scaled)
}

/// `min(max(x + 3, 0), 6)`.
#[inline(always)]
fn ramp<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (zero, three, six) = (cx.constant(0.0), cx.constant(3.0), cx.constant(6.0));
    let moved = cx.add(x, three);
    let raised = maximum(cx, moved, zero);
    minimum(cx, raised, six)
}

/// `ramp(x) / 6`.
#[inline(always)]
pub fn hardsigmoid<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let six = cx.constant(6.0);
    let ramp = ramp(cx, x);
    cx.div(ramp, six)
}

/// `x * ramp(x) / 6`.
#[inline(always)]
pub fn hardswish<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let six = cx.constant(6.0);
    let ramp = ramp(cx, x);
    let product = cx.mul(x, ramp);
    cx.div(product, six)
}

/// `|x| <= lambd ? 0 : x`.
#[inline(always)]
pub fn hardshrink<L: Lane>(cx: &mut L, x: L::F, lambd: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let size = cx.abs(x);
    let small = cx.le(size, lambd);
    cx.select(small, zero, x)
}

/// `x > lambd ? x - lambd : x < -lambd ? x + lambd : x * 0`.
#[inline(always)]
pub fn softshrink<L: Lane>(cx: &mut L, x: L::F, lambd: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let (down, up) = (cx.sub(x, lambd), cx.add(x, lambd));
    let nothing = cx.mul(x, zero);
    let opposite = cx.neg(lambd);
    let (above, below) = (cx.gt(x, lambd), cx.lt(x, opposite));
    let rest = cx.select(below, up, nothing);
    cx.select(above, down, rest)
}
