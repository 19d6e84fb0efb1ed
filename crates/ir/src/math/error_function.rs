//! The error function, its complement and its inverse, and the two forms of gelu.
//!
//! erf |x| = 1 − exp(−(t + t·G(t))) with t = |x|: log erfc is smooth, and the exponential is taken from one before its
//! first digits are lost.

use super::exponential::{exp, one_minus_exp_minus, tanh};
use super::lane::{InDouble, Lane, Width};
use super::logarithm::log;
use super::power::log2_for_f32;

/// From here on erf rounds to 1.
const fn saturation(width: Width) -> f64 {
    match width {
        Width::F32 => 4.0,
        Width::F64 => 6.0,
    }
}

/// G, minimax with the weight t·erfc t/erf t: errors 2^-27.9 and 2^-57.5 relative to erf.
const fn log_erfc_coefficients(width: Width) -> &'static [f64] {
    match width {
        Width::F32 => &[
            0.12837916612625122,
            0.6366193890571594,
            0.10277783125638962,
            -0.019153065979480743,
            -0.0001603922719368711,
            0.0016670232871547341,
            -0.0006328342715278268,
            0.00011764046212192625,
            -9.256164048565552e-06,
        ],
        Width::F64 => &[
            0.12837916709551256,
            0.6366197723675836,
            0.10277260330178865,
            -0.01912844700506838,
            -0.0002091946948653632,
            0.001696206385919983,
            -0.0005901255538137291,
            2.587860772812424e-05,
            6.449185134885162e-05,
            -2.9724026425058165e-05,
            3.4072339226031664e-06,
            2.835179895228863e-06,
            -1.7415872065905155e-06,
            3.3639668164717796e-07,
            1.371612416283786e-07,
            -1.4175097780640084e-07,
            6.572886020743134e-08,
            -2.0961098071584504e-08,
            4.99729357084553e-09,
            -9.081385982280606e-10,
            1.248279441346866e-10,
            -1.2609522080516968e-11,
            8.844422738781983e-13,
            -3.849973964196353e-14,
            7.832957658016349e-16,
        ],
    }
}

/// erf(x). f32 1.82 ulp (of all numbers), f64 1.80 ulp.
#[inline(always)]
pub fn erf<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let saturation = cx.constant(saturation(L::WIDTH));
    let magnitude = cx.abs(x);
    // The magnitude is the second operand, so that NaN passes.
    let t = cx.min(saturation, magnitude);
    let t = cx.name("t", t);
    let g = cx.polynomial("g", t, log_erfc_coefficients(L::WIDTH));
    let exponent = cx.fma(g, t, t);
    let exponent = cx.name("exponent", exponent);
    let result = one_minus_exp_minus(cx, exponent);
    cx.with_sign_of(result, x)
}

/// e^(x²)·erfc x·(1 + 2x) for x ≥ 0.49 as a polynomial in (x − 2)/(x + 2); errors 7.6e-9 and 1.1e-16.
const fn erfc_coefficients(width: Width) -> &'static [f64] {
    match width {
        Width::F32 => &[
            1.2769783865225406,
            -0.09276376464582028,
            -0.1660309667452831,
            0.164048723078164,
            -0.05420932534683546,
            -0.008005430174509113,
            0.008650838824325987,
            0.0011461262492914602,
            -0.0012544126098461591,
            -0.000226325937141718,
        ],
        Width::F64 => &[
            1.2769783815525289,
            -0.09276382658574475,
            -0.16603039761530755,
            0.16405128003324196,
            -0.05422000099069407,
            -0.008034015073289371,
            0.008722653835614378,
            0.0012713387793078683,
            -0.0014568133119761812,
            -0.00045433878678894485,
            0.00020636118274868236,
            0.00015102613603214547,
            -1.4735711858214019e-06,
            -3.637362909216796e-05,
            -1.3633574586966792e-05,
            3.6006297574761343e-06,
            5.570800921031649e-06,
            1.629205106161679e-06,
            -1.2138223309045353e-06,
            -8.799677651706892e-07,
            1.6207878472527306e-07,
            1.2981677284905484e-07,
        ],
    }
}

/// 1 − erf x, accurate relative to the result: 1 − erf x left of ½, e^(−x²)·P/(1 + 2x) beyond.
#[inline(always)]
pub fn erfc<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    // From here on erfc rounds to 0.
    let limit = cx.constant(match L::WIDTH {
        Width::F32 => 11.0,
        Width::F64 => 28.0,
    });
    let one = cx.constant(1.0);
    let two = cx.constant(2.0);
    let half = cx.constant(0.5);
    let near = erf(cx, x);
    let near = cx.sub(one, near);
    let near = cx.name("near", near);

    let clamped = cx.min(limit, x);
    let clamped = cx.max(half, clamped);
    let clamped = cx.name("clamped", clamped);
    let numerator = cx.sub(clamped, two);
    let denominator = cx.add(clamped, two);
    let t = cx.div(numerator, denominator);
    let t = cx.name("t", t);
    let p = cx.polynomial("p", t, erfc_coefficients(L::WIDTH));
    let scale = cx.fma(two, clamped, one);
    let p = cx.div(p, scale);
    let p = cx.name("p", p);
    // e^(−x²) with what the square lost by rounding.
    let square = cx.mul(clamped, clamped);
    let minus = cx.neg(square);
    let minus = cx.name("minus", minus);
    let lost = cx.fma(clamped, clamped, minus);
    let bell = exp(cx, minus);
    let bell = cx.name("bell", bell);
    let lost = cx.neg(lost);
    let bell = cx.fma(lost, bell, bell);
    let far = cx.mul(bell, p);
    let is_far = cx.ge(x, half);
    cx.select(is_far, far, near)
}

/// erfinv(x)/x in w − 2.5, w = −log(1 − x²) < 5; error 1.4e-7.
const ERFINV_NEAR: &[f64] = &[
    1.501409351,
    0.2466407663,
    -0.004177346517,
    -0.001253758885,
    0.0002183129798,
    -4.380346714e-06,
    -3.454779514e-06,
    3.42224709e-07,
    2.260597774e-08,
];

/// The same in √w − 4 beyond; error 7.5e-6.
const ERFINV_FAR: &[f64] = &[
    3.83977758,
    1.009512221,
    0.001323708712,
    -0.0009433336767,
    0.0002180211667,
    -2.788663074e-05,
    0.0001057629313,
    -7.876299566e-05,
    1.592408656e-05,
];

/// erfinv(x)/x in w = −log₂(1 − x²) < 6.25, and in √w from there on to the largest float below 1; errors 2^-33.7 and
/// 2^-32.
const ERFINV_FOR_F32: [&[f64]; 2] = [
    &[
        0.886226925506048,
        0.1608196163716621,
        0.005548934117078207,
        -0.0007776962039899825,
        -2.9489064638630933e-05,
        7.408192868990053e-06,
        2.4285192197211823e-07,
        -7.961021150134782e-08,
        -3.5076363368234022e-09,
        1.5745289292004986e-09,
        -1.2893524462874116e-10,
        3.696199367531417e-12,
    ],
    &[
        7.1764796139356095,
        -23.059692740536434,
        38.35310653371367,
        -37.712544245289706,
        24.684955430290824,
        -11.260641208659633,
        3.6722318003854943,
        -0.8645916772113326,
        0.14623306103802772,
        -0.017368290669540556,
        0.0013777295011137898,
        -6.564086387155341e-05,
        1.4223765936003418e-06,
    ],
];

/// The y whose erf is x.
pub struct Erfinv;

impl InDouble<1> for Erfinv {
    const NAME: &'static str = "erfinv";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        if target == Width::F64 {
            return erfinv(cx, x);
        }
        let one = cx.constant(1.0);
        let minus = cx.neg(x);
        let rest = cx.fma(minus, x, one);
        let rest = cx.name("rest", rest);
        let w = log2_for_f32(cx, rest);
        let w = cx.neg(w);
        let w = cx.name("w", w);
        let root = cx.sqrt(w);
        let root = cx.name("root", root);
        let [near, far] = ERFINV_FOR_F32;
        let near = cx.polynomial("near", w, near);
        let far = cx.polynomial("far", root, far);
        let limit = cx.constant(6.25);
        let is_near = cx.lt(w, limit);
        let ratio = cx.select(is_near, near, far);
        let result = cx.mul(x, ratio);
        let (zero, infinity, nan) = (cx.constant(0.0), cx.constant(f64::INFINITY), cx.constant(f64::NAN));
        let edge = cx.with_sign_of(infinity, x);
        let at_edge = cx.eq(rest, zero);
        let result = cx.select(at_edge, edge, result);
        let inside = cx.ge(rest, zero);
        cx.select(inside, result, nan)
    }
}

/// [`Erfinv`] of doubles: an estimate to six digits and one step of Halley's method, which cubes its error.
#[inline(always)]
fn erfinv<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let one = cx.constant(1.0);
    let half = cx.constant(0.5);
    let size = cx.abs(x);
    let size = cx.name("size", size);
    let rest = cx.sub(one, size);
    let rest = cx.name("rest", rest);
    let plus = cx.add(one, size);
    let product = cx.mul(rest, plus);
    let w = log(cx, product);
    let w = cx.neg(w);
    let w = cx.name("w", w);
    let centre = cx.constant(2.5);
    let t = cx.sub(w, centre);
    let near = cx.polynomial("near", t, ERFINV_NEAR);
    let root = cx.sqrt(w);
    let centre = cx.constant(4.0);
    let t = cx.sub(root, centre);
    let far = cx.polynomial("far", t, ERFINV_FAR);
    let five = cx.constant(5.0);
    let is_near = cx.lt(w, five);
    let estimate = cx.select(is_near, near, far);
    let y = cx.mul(size, estimate);
    let y = cx.name("y", y);

    // erf y − x, taken from the side that does not cancel.
    let central = erf(cx, y);
    let central = cx.sub(central, size);
    let complement = erfc(cx, y);
    let tail = cx.sub(rest, complement);
    let is_central = cx.lt(size, half);
    let error = cx.select(is_central, central, tail);
    let square = cx.mul(y, y);
    let minus = cx.neg(square);
    let bell = exp(cx, minus);
    let scale = cx.constant(std::f64::consts::FRAC_2_SQRT_PI);
    let slope = cx.mul(scale, bell);
    let step = cx.div(error, slope);
    let step = cx.name("step", step);
    let bend = cx.fma(y, step, one);
    let step = cx.div(step, bend);
    let y = cx.sub(y, step);
    let infinity = cx.constant(f64::INFINITY);
    let is_edge = cx.eq(size, one);
    let y = cx.select(is_edge, infinity, y);
    cx.with_sign_of(y, x)
}

/// gelu, erf form: `(x * 0.5) * (1 + erf(x * √½))`.
///
/// Left of zero 1 + erf cancels, as in every implementation of this formula, so the error is measured
/// against |x|: f32 1.41, f64 1.24 ulp of x.
#[inline(always)]
pub fn gelu<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let root_half = cx.constant(std::f64::consts::FRAC_1_SQRT_2);
    let half = cx.constant(0.5);
    let one = cx.constant(1.0);
    let scaled = cx.mul(x, root_half);
    let scaled = cx.name("scaled", scaled);
    let error = erf(cx, scaled);
    let probability = cx.add(one, error);
    let halved = cx.mul(x, half);
    cx.mul(halved, probability)
}

/// gelu, tanh form: `(x * 0.5) * (1 + tanh(√(2/π) * (x + 0.044715 * ((x * x) * x))))`.
///
/// Error against |x|: f32 1.52, f64 1.12 ulp of x.
#[inline(always)]
pub fn gelu_tanh<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let beta = cx.constant(0.7978845608028654);
    let kappa = cx.constant(0.044715);
    let half = cx.constant(0.5);
    let one = cx.constant(1.0);
    let square = cx.mul(x, x);
    let cube = cx.mul(square, x);
    let cubic = cx.mul(kappa, cube);
    let sum = cx.add(x, cubic);
    let inner = cx.mul(beta, sum);
    let inner = cx.name("inner", inner);
    let t = tanh(cx, inner);
    let probability = cx.add(one, t);
    let halved = cx.mul(x, half);
    cx.mul(halved, probability)
}
