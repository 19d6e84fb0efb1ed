//! The exponential and what is made of it: exp, exp2, expm1, tanh, sigmoid.
//!
//! All reduce x = n·ln 2 + r with |r| ≤ ½·ln 2 and share one minimax polynomial
//! expm1(r) = r + r²·Q(r). The accuracies stated are the largest errors found by the sweeps in
//! `accuracy.rs`, in units in the last place of the result.

use super::lane::{Lane, Whole, Width};

/// log₂ e.
const LOG2_E: f64 = std::f64::consts::LOG2_E;

/// ln 2 in two parts, the first one with enough trailing zeros that n times it is exact.
const fn ln2_parts(width: Width) -> (f64, f64) {
    match width {
        Width::F32 => (0.693359375, -0.00021219444170128554),
        Width::F64 => (0.6931471803691238, 1.9082149292705877e-10),
    }
}

/// Q of expm1(r) = r + r²·Q(r) on |r| ≤ 0.3475; relative errors 2^-26.1 and 2^-55.5.
const fn expm1_coefficients(width: Width) -> &'static [f64] {
    match width {
        Width::F32 => &[
            0.4999999701976776,
            0.16666541993618011,
            0.041667208075523376,
            0.008366690948605537,
            0.0013882358325645328,
        ],
        Width::F64 => &[
            0.5000000000000006,
            0.16666666666666588,
            0.0416666666665749,
            0.008333333333390732,
            0.0013888888932225515,
            0.00019841269717079554,
            2.4801504428542043e-05,
            2.755740848159216e-06,
            2.7626391363799826e-07,
            2.505377473551064e-08,
        ],
    }
}

/// −Q(−r), coefficient by coefficient.
const fn mirrored(width: Width) -> &'static [f64] {
    const fn mirror<const N: usize>(coefficients: &[f64]) -> [f64; N] {
        let mut out = [0.0; N];
        let mut k = 0;
        while k < N {
            out[k] = if k % 2 == 0 { -coefficients[k] } else { coefficients[k] };
            k += 1;
        }
        out
    }
    const F32: [f64; 5] = mirror(expm1_coefficients(Width::F32));
    const F64: [f64; 10] = mirror(expm1_coefficients(Width::F64));
    match width {
        Width::F32 => &F32,
        Width::F64 => &F64,
    }
}

/// x = n·ln 2 + r.
#[inline(always)]
fn reduce<L: Lane>(cx: &mut L, x: L::F) -> (Whole<L::F, L::I>, L::F) {
    let log2_e = cx.constant(LOG2_E);
    let n = cx.nearest(x, log2_e);
    let (high, low) = ln2_parts(L::WIDTH);
    let high = cx.constant(-high);
    let low = cx.constant(-low);
    let r = cx.fma(n.float, high, x);
    let r = cx.fma(n.float, low, r);
    (n, cx.name("r", r))
}

/// exp(r) for a reduced r.
#[inline(always)]
fn exp_reduced<L: Lane>(cx: &mut L, r: L::F) -> L::F {
    let one = cx.constant(1.0);
    let q = cx.polynomial("q", r, expm1_coefficients(L::WIDTH));
    let p = cx.fma(q, r, one);
    let p = cx.fma(p, r, one);
    cx.name("p", p)
}

/// expm1(r) for a reduced r, accurate relative to the result.
#[inline(always)]
fn expm1_reduced<L: Lane>(cx: &mut L, r: L::F) -> L::F {
    let q = cx.polynomial("q", r, expm1_coefficients(L::WIDTH));
    let square = cx.mul(r, r);
    let p = cx.fma(q, square, r);
    cx.name("p", p)
}

/// 1 − e⁻ˣ for x in [0, 50], accurate relative to the result: (1 − 2ⁿ) + 2ⁿ·(1 − e⁻ʳ) with x = r − n·ln 2.
#[inline(always)]
pub(super) fn one_minus_exp_minus<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let minus_log2_e = cx.constant(-LOG2_E);
    let n = cx.nearest(x, minus_log2_e);
    // One part of ln 2 is enough: what n times its error amounts to is scaled by 2ⁿ.
    let ln2 = cx.constant(std::f64::consts::LN_2);
    let r = cx.fma(n.float, ln2, x);
    let r = cx.name("r", r);
    // 1 − e⁻ʳ = r − r²·Q(−r), without a negation at run time.
    let q = cx.polynomial("q", r, mirrored(L::WIDTH));
    let square = cx.mul(r, r);
    let p = cx.fma(q, square, r);
    let p = cx.name("p", p);
    let s = cx.power_of_two(n.int);
    let s = cx.name("s", s);
    let one = cx.constant(1.0);
    let rest = cx.sub(one, s);
    cx.fma(s, p, rest)
}

/// Below the first everything rounds to 0 (and is scaled by less than [`Width::vanishing`]), above the second to
/// infinity.
const fn exp_range(width: Width) -> (f64, f64) {
    match width {
        Width::F32 => (-105.5, 89.0),
        Width::F64 => (-747.0, 710.0),
    }
}

/// eˣ, denormal results included. f32 0.90 ulp, f64 0.80 ulp.
#[inline(always)]
pub fn exp<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (low, high) = exp_range(L::WIDTH);
    let high = cx.constant(high);
    let low = cx.constant(low);
    // x is the second operand, so that NaN passes.
    let x = cx.min(high, x);
    let x = cx.max(low, x);
    let x = cx.name("clamped", x);
    let (n, r) = reduce(cx, x);
    let p = exp_reduced(cx, r);
    cx.scale(p, n)
}

/// eˣ/2 for x ≥ 0, finite a little longer than eˣ.
#[inline(always)]
pub(super) fn half_exp<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (_, high) = exp_range(L::WIDTH);
    let high = cx.constant(high + 2.0);
    let x = cx.min(high, x);
    let x = cx.name("clamped", x);
    let (n, r) = reduce(cx, x);
    let p = exp_reduced(cx, r);
    let (one, first) = (cx.constant(1.0), cx.int(1));
    let n = Whole { float: cx.sub(n.float, one), int: cx.int_sub(n.int, first) };
    cx.scale(p, n)
}

/// 2ˣ, exact for whole x, denormal results included. f32 0.95 ulp, f64 0.90 ulp.
#[inline(always)]
pub fn exp2<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (low, high) = match L::WIDTH {
        Width::F32 => (-152.0, 129.0),
        Width::F64 => (-1077.0, 1025.0),
    };
    let high = cx.constant(high);
    let low = cx.constant(low);
    let x = cx.min(high, x);
    let x = cx.max(low, x);
    let x = cx.name("clamped", x);
    let one = cx.constant(1.0);
    let n = cx.nearest(x, one);
    let fraction = cx.sub(x, n.float);
    let ln2 = cx.constant(std::f64::consts::LN_2);
    let r = cx.mul(fraction, ln2);
    let r = cx.name("r", r);
    let p = exp_reduced(cx, r);
    cx.scale(p, n)
}

/// eˣ − 1. f32 1.56 ulp, f64 1.86 ulp.
#[inline(always)]
pub fn expm1<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (low, tiny) = match L::WIDTH {
        Width::F32 => (-20.0, 2f64.powi(-26)),
        Width::F64 => (-40.0, 2f64.powi(-55)),
    };
    let (_, high) = exp_range(L::WIDTH);
    let high = cx.constant(high);
    let low = cx.constant(low);
    let clamped = cx.min(high, x);
    let clamped = cx.max(low, clamped);
    let clamped = cx.name("clamped", clamped);
    let (n, r) = reduce(cx, clamped);
    let p = expm1_reduced(cx, r);
    // 2·(2^(n−1)·p + 2^(n−1) − ½): 2^n itself may not be finite.
    let one = cx.int(1);
    let half_exponent = cx.int_sub(n.int, one);
    let s = cx.power_of_two(half_exponent);
    let s = cx.name("s", s);
    let half = cx.constant(0.5);
    let offset = cx.sub(s, half);
    let result = cx.fma(s, p, offset);
    let result = cx.add(result, result);
    let magnitude = cx.abs(x);
    let tiny = cx.constant(tiny);
    let is_tiny = cx.lt(magnitude, tiny);
    cx.select(is_tiny, x, result)
}

/// tanh(x), from E = expm1(2t) with t = |x|: t + (E − 2t − t·E)/(E + 2) where t is small, so that the
/// quotient's error is one of a small correction, 1 − 2/(E + 2) beyond. f32 1.71 ulp, f64 1.67 ulp.
#[inline(always)]
pub fn tanh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    // From here on tanh rounds to 1.
    let saturation = cx.constant(match L::WIDTH {
        Width::F32 => 10.0,
        Width::F64 => 20.0,
    });
    let magnitude = cx.abs(x);
    let t = cx.min(saturation, magnitude);
    let t = cx.name("t", t);
    let doubled = cx.add(t, t);
    let doubled = cx.name("doubled", doubled);
    let (n, r) = reduce(cx, doubled);
    let p = expm1_reduced(cx, r);
    let s = cx.power_of_two(n.int);
    let s = cx.name("s", s);
    let one = cx.constant(1.0);
    let offset = cx.sub(s, one);
    let e = cx.fma(s, p, offset);
    let e = cx.name("e", e);
    let minus_t = cx.neg(t);
    let excess = cx.sub(e, doubled);
    let correction = cx.fma(minus_t, e, excess);

    let minus_two = cx.constant(-2.0);
    let two = cx.constant(2.0);
    let split = cx.constant(0.55);
    let small = cx.lt(t, split);
    let numerator = cx.select(small, correction, minus_two);
    let start = cx.select(small, t, one);
    let denominator = cx.add(e, two);
    let quotient = cx.div(numerator, denominator);
    let result = cx.add(start, quotient);
    cx.with_sign_of(result, x)
}

/// 1/(1 + e⁻ˣ) = (x < 0 ? z : 1)/(1 + z) with z = exp(−|x|), which never overflows and keeps denormal
/// results. f32 2.28 ulp, f64 1.81 ulp.
#[inline(always)]
pub fn sigmoid<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (low, _) = exp_range(L::WIDTH);
    let low = cx.constant(low);
    let negative = cx.negative_abs(x);
    let clamped = cx.max(low, negative);
    let clamped = cx.name("clamped", clamped);
    let (n, r) = reduce(cx, clamped);
    let p = exp_reduced(cx, r);
    let z = cx.scale(p, n);
    let z = cx.name("z", z);
    let zero = cx.constant(0.0);
    let one = cx.constant(1.0);
    let is_negative = cx.lt(x, zero);
    let numerator = cx.select(is_negative, z, one);
    let denominator = cx.add(z, one);
    cx.div(numerator, denominator)
}
