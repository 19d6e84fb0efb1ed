//! xʸ, and the length of a hypotenuse.
//!
//! xʸ = 2^(y·log₂ |x|). The logarithm has as many more digits as y·log₂ |x| has before its point: for floats those of a
//! double, for doubles two of them.

use super::exponential::exp2;
use super::lane::{InDouble, Lane, Width};

/// log₂((1 + s)/(1 − s)) = s·P(s²) on |s| ≤ 0.172; error 2^-44.6.
const LOG2: &[f64] = &[
    2.8853900817778504,
    0.9617966941123595,
    0.5770779426302618,
    0.41220922733052445,
    0.3199066608891474,
    0.28288718263073565,
];

/// (2^f − 1)/f on |f| ≤ ½; error 2^-39.2.
const EXP2: &[f64] = &[
    0.6931471805568324,
    0.24022650695888503,
    0.055504109063258665,
    0.00961812913523614,
    0.0013333478473685416,
    0.00015403475186530786,
    1.5303700711365693e-05,
    1.325080551750225e-06,
];

/// log((1 + s)/(1 − s)) = 2s + s³·(⅔ + z·R(z)), z = s² ≤ 0.0295; error 2^-66.4.
const LOG_TAIL: &[f64] = &[
    0.4,
    0.28571428571429364,
    0.22222222221655885,
    0.18181818335392802,
    0.1538459496251843,
    0.1333480469384731,
    0.11706236339491206,
    0.11723178623876518,
];

const TWO_THIRDS: [f64; 2] = [0.6666666666666666, 3.700743415417188e-17];

const LOG2_E: [f64; 2] = [std::f64::consts::LOG2_E, 2.0355273740931033e-17];

/// size = 2ᵉ·m with m in [√½, √2): m and e. For zero, infinity and NaN any numbers.
#[inline(always)]
fn parts<L: Lane>(cx: &mut L, size: L::F, target: Width) -> (L::F, L::F) {
    const MANTISSA: u32 = Width::F64.mantissa_bits();
    let (mut normal, mut lift) = (size, cx.constant(0.0));
    // Floats are no subnormal doubles.
    if target == Width::F64 {
        let min_normal = cx.constant(f64::MIN_POSITIVE);
        let subnormal = cx.lt(size, min_normal);
        let exponent = cx.constant(54.0);
        let factor = cx.constant(54f64.exp2());
        let lifted = cx.mul(size, factor);
        normal = cx.select(subnormal, lifted, size);
        lift = cx.select(subnormal, exponent, lift);
    }
    let bits = cx.bits(normal);
    let root_half = cx.int(std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64);
    let above = cx.int_sub(bits, root_half);
    let exponent = cx.shr(above, MANTISSA);
    let shift = cx.shl(exponent, MANTISSA);
    let bits = cx.int_sub(bits, shift);
    let m = cx.bits_to_float(bits);
    let e = cx.int_to_float(exponent);
    (cx.name("m", m), cx.sub(e, lift))
}

/// log₂ of a positive normal number, to 44 places behind the point.
#[inline(always)]
pub(super) fn log2_for_f32<L: Lane>(cx: &mut L, size: L::F) -> L::F {
    let one = cx.constant(1.0);
    let (m, e) = parts(cx, size, Width::F32);
    let (f, sum) = (cx.sub(m, one), cx.add(m, one));
    let s = cx.div(f, sum);
    let s = cx.name("s", s);
    let z = cx.mul(s, s);
    let z = cx.name("z", z);
    let p = cx.polynomial("p", z, LOG2);
    cx.fma(s, p, e)
}

/// 2^(y·log₂ size) for a positive finite size and a finite y, in floats' precision.
#[inline(always)]
fn power_for_f32<L: Lane>(cx: &mut L, size: L::F, y: L::F) -> L::F {
    let one = cx.constant(1.0);
    let log = log2_for_f32(cx, size);
    let exponent = cx.mul(y, log);
    // Beyond these results are 0 or ∞.
    let (low, high) = (cx.constant(-160.0), cx.constant(160.0));
    let exponent = cx.min(high, exponent);
    let exponent = cx.max(low, exponent);
    let exponent = cx.name("exponent", exponent);
    let n = cx.nearest(exponent, one);
    let f = cx.sub(exponent, n.float);
    let q = cx.polynomial("q", f, EXP2);
    let p = cx.fma(q, f, one);
    let scale = cx.power_of_two(n.int);
    cx.mul(p, scale)
}

/// The same in doubles' precision.
#[inline(always)]
fn power_for_f64<L: Lane>(cx: &mut L, size: L::F, y: L::F) -> L::F {
    let one = cx.constant(1.0);
    let (m, e) = parts(cx, size, Width::F64);
    // s = f/(2 + f) in two parts; f is exact.
    let f = cx.sub(m, one);
    let f = cx.name("f", f);
    let (sum, sum_lost) = cx.two_sum(m, one);
    let s = cx.div(f, sum);
    let s = cx.name("s", s);
    let minus_s = cx.neg(s);
    let left = cx.fma(minus_s, sum, f);
    let left = cx.fma(minus_s, sum_lost, left);
    let s_low = cx.div(left, sum);
    let s_low = cx.name("s_low", s_low);
    // z = s², s³ and ⅔·s³ in two parts.
    let (z, z_low) = cx.two_product(s, s);
    let twice = cx.add(s, s);
    let z_low = cx.fma(twice, s_low, z_low);
    let (cube, cube_low) = cx.two_product(z, s);
    let cube_low = cx.fma(z_low, s, cube_low);
    let cube_low = cx.fma(z, s_low, cube_low);
    let [third, third_low] = TWO_THIRDS.map(|part| cx.constant(part));
    let (tail, tail_low) = cx.two_product(cube, third);
    let tail_low = cx.fma(cube, third_low, tail_low);
    let tail_low = cx.fma(cube_low, third, tail_low);
    let r = cx.polynomial("r", z, LOG_TAIL);
    let fifth = cx.mul(cube, z);
    let tail_low = cx.fma(fifth, r, tail_low);
    // log m = 2s + tail
    let (log, log_low) = cx.two_sum(twice, tail);
    let twice_low = cx.add(s_low, s_low);
    let log_low = cx.add(log_low, twice_low);
    let log_low = cx.add(log_low, tail_low);
    // Times log₂ e, plus e.
    let [log2_e, log2_e_low] = LOG2_E.map(|part| cx.constant(part));
    let (log2, log2_low) = cx.two_product(log, log2_e);
    let log2_low = cx.fma(log, log2_e_low, log2_low);
    let log2_low = cx.fma(log_low, log2_e, log2_low);
    let (log2, rounding) = cx.two_sum(e, log2);
    let log2_low = cx.add(log2_low, rounding);
    let (log2, log2_low) = cx.two_sum(log2, log2_low);
    // Times y. Beyond the limits results are 0 or ∞; a small y keeps the products finite until then.
    let limit = cx.constant(2f64.powi(70));
    let minus_limit = cx.constant(-2f64.powi(70));
    let y = cx.min(limit, y);
    let y = cx.max(minus_limit, y);
    let (exponent, exponent_low) = cx.two_product(y, log2);
    let exponent_low = cx.fma(y, log2_low, exponent_low);
    let (low, high) = (cx.constant(-1200.0), cx.constant(1200.0));
    let (above, below) = (cx.gt(exponent, high), cx.lt(exponent, low));
    let outside = cx.or(above, below);
    let zero = cx.constant(0.0);
    let exponent = cx.min(high, exponent);
    let exponent = cx.max(low, exponent);
    let exponent = cx.name("exponent", exponent);
    let exponent_low = cx.select(outside, zero, exponent_low);
    // 2^(a + b) is scaled last: p·(1 + b·ln 2) with p in [√½, √2].
    let n = cx.nearest(exponent, one);
    let rest = cx.sub(exponent, n.float);
    let p = exp2(cx, rest);
    let p = cx.name("p", p);
    let ln2 = cx.constant(std::f64::consts::LN_2);
    let more = cx.mul(exponent_low, ln2);
    let p = cx.fma(p, more, p);
    cx.scale(p, n)
}

/// xʸ.
pub struct Pow;

impl InDouble<2> for Pow {
    const NAME: &'static str = "pow";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x, y]: [L::F; 2], target: Width) -> L::F {
        let zero = cx.constant(0.0);
        let one = cx.constant(1.0);
        let infinity = cx.constant(f64::INFINITY);
        let nan = cx.constant(f64::NAN);
        let size = cx.abs(x);
        let size = cx.name("size", size);
        let result = match target {
            Width::F32 => power_for_f32(cx, size, y),
            Width::F64 => power_for_f64(cx, size, y),
        };
        let result = cx.name("result", result);
        // Eager loops compute these powers, where one serves all elements, by what they are.
        let square = cx.mul(size, size);
        let cube = cx.mul(square, size);
        let mut result = result;
        for (exponent, power) in [(1.0, size), (2.0, square), (3.0, cube)] {
            let exponent = cx.constant(exponent);
            let is_known = cx.eq(y, exponent);
            result = cx.select(is_known, power, result);
        }
        // 0, ∞, and infinite exponents: 0 or ∞, by whether the size and the exponent are on the same side.
        let flat = cx.eq(size, zero);
        let endless = cx.eq(size, infinity);
        let y_size = cx.abs(y);
        let y_endless = cx.eq(y_size, infinity);
        let edge = cx.or(flat, endless);
        let edge = cx.or(edge, y_endless);
        let large = cx.gt(size, one);
        let y_positive = cx.gt(y, zero);
        let grows = cx.select(large, one, zero);
        let rises = cx.select(y_positive, one, zero);
        let same = cx.eq(grows, rises);
        let limit = cx.select(same, infinity, zero);
        let result = cx.select(edge, limit, result);
        // The sign of an odd power; no power of a negative number between whole ones.
        let odd = cx.is_odd(y);
        let whole = cx.floor(y);
        let broken = cx.ne(whole, y);
        let odd_whole = cx.not(broken);
        let odd = cx.and(odd, odd_whole);
        let signed = cx.with_sign_of(result, x);
        let result = cx.select(odd, signed, result);
        let negative = cx.lt(x, zero);
        let finite = cx.lt(size, infinity);
        let undefined = cx.and(negative, finite);
        let undefined = cx.and(undefined, broken);
        let result = cx.select(undefined, nan, result);
        let unit = cx.eq(size, one);
        let forever = cx.and(unit, y_endless);
        let result = cx.select(forever, one, result);
        let x_nan = cx.is_nan(x);
        let y_nan = cx.is_nan(y);
        let result = cx.select(x_nan, x, result);
        let result = cx.select(y_nan, y, result);
        let y_zero = cx.eq(y, zero);
        let x_one = cx.eq(x, one);
        let trivial = cx.or(y_zero, x_one);
        cx.select(trivial, one, result)
    }
}

/// x³, as a power.
pub struct Cube;

impl InDouble<1> for Cube {
    const NAME: &'static str = "cube";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], _: Width) -> L::F {
        let square = cx.mul(x, x);
        cx.mul(square, x)
    }
}

/// √(x² + y²).
pub struct Hypot;

impl InDouble<2> for Hypot {
    const NAME: &'static str = "hypot";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x, y]: [L::F; 2], target: Width) -> L::F {
        let (x, y) = (cx.abs(x), cx.abs(y));
        let (mut a, mut b) = (x, y);
        let one = cx.constant(1.0);
        let mut scale = one;
        if target == Width::F64 {
            // Scaled so that no square leaves the doubles.
            let larger = cx.max(x, y);
            let (high, low) = (cx.constant(2f64.powi(500)), cx.constant(2f64.powi(-450)));
            let (down, up) = (cx.constant(2f64.powi(-600)), cx.constant(2f64.powi(600)));
            let is_large = cx.gt(larger, high);
            let is_small = cx.lt(larger, low);
            let factor = cx.select(is_large, down, one);
            let factor = cx.select(is_small, up, factor);
            scale = cx.select(is_large, up, one);
            scale = cx.select(is_small, down, scale);
            a = cx.mul(a, factor);
            b = cx.mul(b, factor);
        }
        let square = cx.mul(b, b);
        let square = cx.fma(a, a, square);
        let root = cx.sqrt(square);
        let result = match target {
            Width::F32 => root,
            Width::F64 => cx.mul(root, scale),
        };
        // An infinite side wins even over NaN.
        let infinity = cx.constant(f64::INFINITY);
        let x_endless = cx.eq(x, infinity);
        let y_endless = cx.eq(y, infinity);
        let endless = cx.or(x_endless, y_endless);
        cx.select(endless, infinity, result)
    }
}
