//! The logarithms: log, log2, log10, log1p.
//!
//! x = 2ᵉ·(1 + f) with 1 + f in [⅔, 4/3), log x = e·ln 2 + log(1 + f).

use super::lane::{Lane, Width};

/// P of log(1 + f) = f − f²/2 + f³·P(f) on |f| ≤ ⅓, for f32; relative error 2^-27.7.
const LOG_F32: &[f64] = &[
    0.3333321511745453,
    -0.24999797344207764,
    0.2001040130853653,
    -0.16680514812469482,
    0.140059232711792,
    -0.12183918058872223,
    0.13984280824661255,
    -0.12893034517765045,
];

/// R of log(1 + f) = 2s + s·z·R(z) with s = f/(2 + f), z = s², for f64; error 2^-61.6.
const LOG_F64: &[f64] = &[
    0.666666666666666,
    0.4000000000005693,
    0.2857142855577175,
    0.22222224302500748,
    0.1818166552969239,
    0.15391122881142147,
    0.13173420138127837,
    0.13844228006666817,
];

/// What logarithms are made of: x = 2ᵉ·(1 + f), log(1 + f) = first + rest.
struct Parts<L: Lane> {
    e: L::F,
    first: L::F,
    rest: L::F,
}

/// The parts of a positive finite x, subnormal ones included; of others any numbers. What e times the lower part of
/// ln 2 comes to goes into the rest, where it is given.
#[inline(always)]
fn parts<L: Lane>(cx: &mut L, x: L::F, ln2_low: Option<f64>) -> Parts<L> {
    let mantissa = L::WIDTH.mantissa_bits();
    // Denormal arguments are first made normal.
    let lift = f64::from(mantissa + 2);
    let min_normal = cx.constant(L::WIDTH.min_normal());
    let denormal = cx.lt(x, min_normal);
    let factor = cx.constant(lift.exp2());
    let lifted = cx.mul(x, factor);
    let normal = cx.select(denormal, lifted, x);
    let normal = cx.name("normal", normal);

    let bits = cx.bits(normal);
    let two_thirds = cx.int(match L::WIDTH {
        Width::F32 => i64::from((2.0f32 / 3.0).to_bits()),
        Width::F64 => (2.0f64 / 3.0).to_bits() as i64,
    });
    let above = cx.int_sub(bits, two_thirds);
    let exponent = cx.shr(above, mantissa);
    let shift = cx.shl(exponent, mantissa);
    let bits = cx.int_sub(bits, shift);
    let significand = cx.bits_to_float(bits);
    let one = cx.constant(1.0);
    let f = cx.sub(significand, one);
    let f = cx.name("f", f);
    let e = cx.int_to_float(exponent);
    let zero = cx.constant(0.0);
    let lift = cx.constant(lift);
    let lift = cx.select(denormal, lift, zero);
    let e = cx.sub(e, lift);
    let e = cx.name("e", e);

    let tail = ln2_low.map(|low| {
        let low = cx.constant(low);
        cx.mul(e, low)
    });
    match L::WIDTH {
        Width::F32 => {
            let p = cx.polynomial("p", f, LOG_F32);
            let minus_half = cx.constant(-0.5);
            let u = cx.fma(f, p, minus_half);
            let square = cx.mul(f, f);
            let rest = match tail {
                Some(tail) => cx.fma(square, u, tail),
                None => cx.mul(square, u),
            };
            Parts { e, first: f, rest }
        }
        Width::F64 => {
            // f − (f²/2 − s·(f²/2 + z·R)): the square's rounding error stays small beside f.
            let two = cx.constant(2.0);
            let denominator = cx.add(f, two);
            let s = cx.div(f, denominator);
            let s = cx.name("s", s);
            let z = cx.mul(s, s);
            let z = cx.name("z", z);
            let p = cx.polynomial("p", z, LOG_F64);
            let r = cx.mul(z, p);
            let half = cx.constant(0.5);
            let half_f = cx.mul(half, f);
            let half_square = cx.mul(half_f, f);
            let half_square = cx.name("half_square", half_square);
            let sum = cx.add(half_square, r);
            let tail = match tail {
                Some(tail) => cx.fma(s, sum, tail),
                None => cx.mul(s, sum),
            };
            Parts { e, first: f, rest: cx.sub(tail, half_square) }
        }
    }
}

/// The result, or what a logarithm is of 0, infinity and negative numbers.
#[inline(always)]
fn with_edges<L: Lane>(cx: &mut L, x: L::F, result: L::F) -> L::F {
    let zero = cx.constant(0.0);
    let infinity = cx.constant(f64::INFINITY);
    let finite = cx.lt(x, infinity);
    let result = cx.select(finite, result, x);
    let minus_infinity = cx.constant(f64::NEG_INFINITY);
    let nan = cx.constant(f64::NAN);
    let is_zero = cx.eq(x, zero);
    let edge = cx.select(is_zero, minus_infinity, nan);
    let positive = cx.gt(x, zero);
    let outside = cx.not(positive);
    cx.select(outside, edge, result)
}

/// log(x), denormal arguments included; log 0 = −∞, log of a negative number is NaN.
/// f32 0.86 ulp, f64 0.74 ulp.
#[inline(always)]
pub fn log<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let (ln2_high, ln2_low) = match L::WIDTH {
        Width::F32 => (0.6931471824645996, -1.904654299957768e-09),
        Width::F64 => (0.6931471803691238, 1.9082149292705877e-10),
    };
    let Parts { e, first, rest } = parts(cx, x, Some(ln2_low));
    let ln2_high = cx.constant(ln2_high);
    let fraction = cx.add(first, rest);
    let result = cx.fma(e, ln2_high, fraction);
    with_edges(cx, x, result)
}

/// The logarithm to a base: e times that of 2, plus log(1 + f) over that of the base, each in two parts.
#[inline(always)]
fn log_to_base<L: Lane>(cx: &mut L, x: L::F, of_two: [f64; 2], factor: [f64; 2]) -> L::F {
    let Parts { e, first, rest } = parts(cx, x, None);
    let [of_two, of_two_low] = of_two.map(|part| cx.constant(part));
    let [factor, factor_low] = factor.map(|part| cx.constant(part));
    // What `first · factor` and the sum lose goes into the lower part.
    let (main, lost) = cx.two_product(first, factor);
    let low = cx.fma(first, factor_low, lost);
    let low = cx.fma(rest, factor, low);
    let low = cx.fma(e, of_two_low, low);
    let whole = cx.mul(e, of_two);
    let (sum, lost) = cx.two_sum(whole, main);
    let low = cx.add(low, lost);
    let result = cx.add(sum, low);
    with_edges(cx, x, result)
}

/// log₂ x; exact for powers of two.
#[inline(always)]
pub fn log2<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let factor = match L::WIDTH {
        Width::F32 => [1.4426950216293335, 1.925963033500011e-08],
        Width::F64 => [std::f64::consts::LOG2_E, 2.0355273740931033e-17],
    };
    log_to_base(cx, x, [1.0, 0.0], factor)
}

/// log₁₀ x.
#[inline(always)]
pub fn log10<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    // The first part of log₁₀ 2 is so short that its product with an exponent is exact.
    let (of_two, factor) = match L::WIDTH {
        Width::F32 => {
            ([0.301025390625, 4.605039066518657e-06], [0.4342944920063019, -1.0103049952192578e-08])
        }
        Width::F64 => {
            ([0.30102999566361177, 3.694239077158931e-13], [std::f64::consts::LOG10_E, 1.098319650216765e-17])
        }
    };
    log_to_base(cx, x, of_two, factor)
}

/// log(1 + x) = log u + c/u, where u = 1 + x rounded and c what the rounding lost.
/// f32 1.44 ulp, f64 1.02 ulp.
#[inline(always)]
pub fn log1p<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let u = cx.add(one, x);
    let u = cx.name("u", u);
    let large = cx.gt(x, one);
    let bigger = cx.select(large, x, one);
    let smaller = cx.select(large, one, x);
    let kept = cx.sub(u, bigger);
    let lost = cx.sub(smaller, kept);
    let correction = cx.div(lost, u);
    let log_u = log(cx, u);
    let log_u = cx.name("log_u", log_u);
    let result = cx.add(log_u, correction);
    let zero = cx.constant(0.0);
    let infinity = cx.constant(f64::INFINITY);
    let above = cx.gt(u, zero);
    let below = cx.lt(u, infinity);
    let inside = cx.and(above, below);
    let result = cx.select(inside, result, log_u);
    // u = 1 would turn −0 into +0.
    let is_zero = cx.eq(x, zero);
    cx.select(is_zero, x, result)
}
