//! The logarithm of the gamma function and its derivatives.
//!
//! All of them move the argument up by their recurrence until Stirling's series holds, negative arguments by reflection
//! before that. Next to 1 and 2, where the logarithm passes through zero, it is a polynomial.

use super::lane::{InDouble, Lane, Width};
use super::logarithm::log;
use super::trigonometric::sine_and_cosine_of_pi;

use std::f64::consts::PI;

/// log Γ(2 + d)/d on |d| ≤ ½; errors 2^-33.9 and 2^-55.2.
const fn near_two_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => &[
            0.42278433509846713,
            0.3224670336740658,
            -0.06735230116846887,
            0.02058078848508634,
            -0.0073855418319890166,
            0.0028909539767244677,
            -0.0011929584843006534,
            0.0005056692566204219,
            -0.00022131048050323795,
            0.00011498248215687683,
            -5.208118739066028e-05,
        ],
        Width::F64 => &[
            0.42278433509846713,
            0.3224670334241132,
            -0.06735230105319814,
            0.02058080842778457,
            -0.0073855510286681535,
            0.002890510330738737,
            -0.0011927539120010226,
            0.0005096695248853096,
            -0.00022315475074520367,
            9.945750909889392e-05,
            -4.4926351103833334e-05,
            2.050726741605779e-05,
            -9.438458716242811e-06,
            4.374374916915131e-06,
            -2.0449201467015115e-06,
            9.578663334114758e-07,
            -4.303558760359961e-07,
            2.0304806751615227e-07,
            -1.3412819758517287e-07,
            6.379047507619774e-08,
        ],
    }
}

/// Up to where arguments are moved, and how many terms of a series do from there on.
const fn series(target: Width) -> (u32, usize) {
    match target {
        Width::F32 => (6, 4),
        Width::F64 => (12, 8),
    }
}

/// Where the functions are reflected: at ½, which keeps what is moved up away from the pole.
struct Reflected<L: Lane> {
    /// Whether x < ½.
    is: L::M,
    /// x, or 1 − x.
    z: L::F,
    /// sin πx, 0 where x is whole.
    sine: L::F,
    /// cos πx, both with the sign they have for the fraction of x: right as a quotient.
    cosine: L::F,
}

#[inline(always)]
fn reflected<L: Lane>(cx: &mut L, x: L::F, target: Width) -> Reflected<L> {
    let (one, half) = (cx.constant(1.0), cx.constant(0.5));
    let is = cx.lt(x, half);
    let other = cx.sub(one, x);
    let z = cx.select(is, other, x);
    let z = cx.name("z", z);
    let whole = cx.round_ties_even(x);
    let fraction = cx.sub(x, whole);
    let fraction = cx.name("fraction", fraction);
    let (sine, cosine) = sine_and_cosine_of_pi(cx, fraction, target);
    Reflected { is, z, sine: cx.name("sine", sine), cosine: cx.name("cosine", cosine) }
}

/// 1/z² and, of the terms (highest power last), their polynomial in it.
#[inline(always)]
fn stirling<L: Lane>(cx: &mut L, z: L::F, terms: &[f64], target: Width) -> (L::F, L::F) {
    let one = cx.constant(1.0);
    let inverse = cx.div(one, z);
    let inverse = cx.name("inverse", inverse);
    let square = cx.mul(inverse, inverse);
    let square = cx.name("square", square);
    let (_, count) = series(target);
    let p = cx.polynomial("p", square, &terms[..count]);
    (inverse, p)
}

/// log |Γ(x)|; infinite at zero and the negative integers.
pub struct Lgamma;

impl InDouble<1> for Lgamma {
    const NAME: &'static str = "lgamma";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        const TERMS: &[f64] = &[
            1.0 / 12.0,
            -1.0 / 360.0,
            1.0 / 1260.0,
            -1.0 / 1680.0,
            1.0 / 1188.0,
            -691.0 / 360360.0,
            1.0 / 156.0,
            -3617.0 / 122400.0,
        ];
        let (one, half) = (cx.constant(1.0), cx.constant(0.5));
        let at = reflected(cx, x, target);
        // Below where Stirling's series holds, Γ(z) = Γ(z − n)·(z − n)·…·(z − 1) with z − n in [1½, 2½), which cancels less
        // than moving z up and taking a large logarithm from another; and Γ(z) = Γ(z + 1)/z below 1½.
        let (limit, _) = series(target);
        let large = cx.constant(f64::from(limit));
        let is_far = cx.ge(at.z, large);
        let (first, second) = (cx.constant(1.5), cx.constant(2.5));
        let is_first = cx.lt(at.z, first);
        let up = cx.add(at.z, one);
        let start = cx.select(is_first, up, at.z);
        let (mut moved, mut product) = (start, one);
        for _ in 2..limit {
            let above = cx.ge(moved, second);
            let next = cx.sub(moved, one);
            moved = cx.select(above, next, moved);
            let next = cx.mul(product, moved);
            product = cx.select(above, next, product);
        }
        let two = cx.constant(2.0);
        let d = cx.sub(moved, two);
        let d = cx.name("d", d);
        let p = cx.polynomial("p", d, near_two_coefficients(target));
        let near = cx.mul(d, p);

        let (inverse, series) = stirling(cx, at.z, TERMS, target);
        let log_z = log(cx, at.z);
        let log_z = cx.name("log_z", log_z);
        let below = cx.sub(at.z, half);
        let root = cx.constant(0.5 * 1.837_877_066_409_345_5);
        let rest = cx.fma(inverse, series, root);
        let rest = cx.sub(rest, at.z);
        let far = cx.fma(below, log_z, rest);
        let main = cx.select(is_far, far, near);

        // −log Γ(x) = log(|sin πx|/π) + log Γ(1 − x), the product under the same logarithm.
        let factor = cx.select(is_far, one, product);
        let divisor = cx.select(is_first, at.z, one);
        let sine = cx.abs(at.sine);
        let pi = cx.constant(PI);
        let above = cx.mul(sine, factor);
        let below = cx.mul(pi, divisor);
        let turned = cx.div(above, below);
        let straight = cx.select(is_first, divisor, factor);
        let factor = cx.select(at.is, turned, straight);
        let factor = log(cx, factor);
        let factor = cx.name("factor", factor);
        let less = cx.sub(main, factor);
        let more = cx.add(main, factor);
        let straight = cx.select(is_first, less, more);
        let turned = cx.neg(more);
        let result = cx.select(at.is, turned, straight);
        // ∞ − ∞ above.
        let infinity = cx.constant(f64::INFINITY);
        let huge = cx.constant(1e306);
        let size = cx.abs(x);
        let is_huge = cx.gt(size, huge);
        cx.select(is_huge, infinity, result)
    }
}

/// What is added by moving z up to [`series`]' limit: Σ 1/zᵏ as a fraction, and where z is then.
#[inline(always)]
fn moved_up<L: Lane>(cx: &mut L, z: L::F, power: u32, target: Width) -> (L::F, L::F) {
    let (zero, one) = (cx.constant(0.0), cx.constant(1.0));
    let (limit, _) = series(target);
    let large = cx.constant(f64::from(limit));
    let (mut moved, mut numerator, mut denominator) = (z, zero, one);
    for _ in 0..limit {
        let small = cx.lt(moved, large);
        let mut term = moved;
        for _ in 1..power {
            term = cx.mul(term, moved);
        }
        let term = cx.name("term", term);
        let next = cx.fma(numerator, term, denominator);
        numerator = cx.select(small, next, numerator);
        let next = cx.mul(denominator, term);
        denominator = cx.select(small, next, denominator);
        let next = cx.add(moved, one);
        moved = cx.select(small, next, moved);
    }
    (cx.div(numerator, denominator), cx.name("moved", moved))
}

/// Whether x is zero or a negative integer, where there is a pole.
#[inline(always)]
fn pole<L: Lane>(cx: &mut L, x: L::F) -> L::M {
    let zero = cx.constant(0.0);
    let whole = cx.floor(x);
    let is_whole = cx.eq(whole, x);
    let below = cx.le(x, zero);
    cx.and(is_whole, below)
}

/// The derivative of log Γ(x); NaN at the negative integers, −∞ at zero (∞ at −0).
pub struct Digamma;

impl InDouble<1> for Digamma {
    const NAME: &'static str = "digamma";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        const TERMS: &[f64] = &[
            1.0 / 12.0,
            -1.0 / 120.0,
            1.0 / 252.0,
            -1.0 / 240.0,
            1.0 / 132.0,
            -691.0 / 32760.0,
            1.0 / 12.0,
            -3617.0 / 8160.0,
        ];
        let zero = cx.constant(0.0);
        let at = reflected(cx, x, target);
        let (sum, moved) = moved_up(cx, at.z, 1, target);
        let (inverse, series) = stirling(cx, moved, TERMS, target);
        let square = cx.mul(inverse, inverse);
        let minus_half = cx.constant(-0.5);
        let log_moved = log(cx, moved);
        let result = cx.fma(minus_half, inverse, log_moved);
        let tail = cx.mul(square, series);
        let tail = cx.add(tail, sum);
        let result = cx.sub(result, tail);
        let result = cx.name("result", result);
        // ψ(x) = ψ(1 − x) − π / tan πx
        let minus_pi = cx.constant(-PI);
        let slope = cx.mul(minus_pi, at.cosine);
        let slope = cx.div(slope, at.sine);
        let turned = cx.add(result, slope);
        let result = cx.select(at.is, turned, result);
        let nan = cx.constant(f64::NAN);
        let is_pole = pole(cx, x);
        let result = cx.select(is_pole, nan, result);
        let minus_infinity = cx.constant(f64::NEG_INFINITY);
        let one = cx.constant(1.0);
        let above = cx.div(one, x);
        let above = cx.neg(above);
        let is_zero = cx.eq(x, zero);
        let result = cx.select(is_zero, above, result);
        let is_last = cx.eq(x, minus_infinity);
        cx.select(is_last, nan, result)
    }
}

/// The derivative of [`Digamma`].
pub struct Trigamma;

impl InDouble<1> for Trigamma {
    const NAME: &'static str = "trigamma";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        const TERMS: &[f64] = &[
            1.0 / 6.0,
            -1.0 / 30.0,
            1.0 / 42.0,
            -1.0 / 30.0,
            5.0 / 66.0,
            -691.0 / 2730.0,
            7.0 / 6.0,
            -3617.0 / 510.0,
        ];
        let at = reflected(cx, x, target);
        let (sum, moved) = moved_up(cx, at.z, 2, target);
        let (inverse, series) = stirling(cx, moved, TERMS, target);
        let (one, half) = (cx.constant(1.0), cx.constant(0.5));
        let square = cx.mul(inverse, inverse);
        let rest = cx.fma(half, inverse, one);
        let rest = cx.fma(square, series, rest);
        let result = cx.fma(inverse, rest, sum);
        let result = cx.name("result", result);
        // ψ′(x) = π² / sin² πx − ψ′(1 − x)
        let pi = cx.constant(PI);
        let quotient = cx.div(pi, at.sine);
        let other = cx.mul(quotient, quotient);
        let turned = cx.sub(other, result);
        let result = cx.select(at.is, turned, result);
        let infinity = cx.constant(f64::INFINITY);
        let is_pole = pole(cx, x);
        let result = cx.select(is_pole, infinity, result);
        last(cx, x, result)
    }
}

/// The derivative of [`Trigamma`].
pub struct Tetragamma;

impl InDouble<1> for Tetragamma {
    const NAME: &'static str = "tetragamma";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        const TERMS: &[f64] =
            &[0.5, -1.0 / 6.0, 1.0 / 6.0, -3.0 / 10.0, 5.0 / 6.0, -691.0 / 210.0, 35.0 / 2.0, -3617.0 / 30.0];
        let at = reflected(cx, x, target);
        let (sum, moved) = moved_up(cx, at.z, 3, target);
        let (inverse, series) = stirling(cx, moved, TERMS, target);
        let (one, minus_two) = (cx.constant(1.0), cx.constant(-2.0));
        let square = cx.mul(inverse, inverse);
        let rest = cx.add(one, inverse);
        let rest = cx.fma(square, series, rest);
        let rest = cx.mul(square, rest);
        let rest = cx.neg(rest);
        let result = cx.fma(minus_two, sum, rest);
        let result = cx.name("result", result);
        // ψ″(x) = ψ″(1 − x) − 2π³ cos πx / sin³ πx
        let pi = cx.constant(PI);
        let quotient = cx.div(pi, at.sine);
        let cube = cx.mul(quotient, quotient);
        let cube = cx.mul(cube, quotient);
        let twice = cx.mul(minus_two, at.cosine);
        let turned = cx.fma(twice, cube, result);
        let result = cx.select(at.is, turned, result);
        let minus_infinity = cx.constant(f64::NEG_INFINITY);
        let is_pole = pole(cx, x);
        let result = cx.select(is_pole, minus_infinity, result);
        last(cx, x, result)
    }
}

/// The result, or NaN at −∞.
#[inline(always)]
fn last<L: Lane>(cx: &mut L, x: L::F, result: L::F) -> L::F {
    let minus_infinity = cx.constant(f64::NEG_INFINITY);
    let nan = cx.constant(f64::NAN);
    let is_last = cx.eq(x, minus_infinity);
    cx.select(is_last, nan, result)
}
