//! The error function, its complement and its inverse, and the two forms of gelu.
//!
//! erf(x) = x + x·S(x²) near zero; beyond, 1 − exp(−Q(|x|)) with Q = −log erfc, a smooth function.

use super::exponential::{exp, exp_normal, tanh};
use super::lane::{Lane, Width};
use super::logarithm::log;

struct Coefficients {
    /// Where the second form takes over.
    split: f64,
    /// From here on erf rounds to 1.
    saturation: f64,
    /// S, in x².
    near: &'static [f64],
    /// −Q, in |x|.
    far: &'static [f64],
}

/// f32: errors 2^-26.8 and 2^-28.9; f64: 2^-56.9 and 2^-56.8, relative to erf.
const fn coefficients(width: Width) -> Coefficients {
    match width {
        Width::F32 => Coefficients {
            split: 0.875,
            saturation: 4.0,
            near: &[
                0.12837915122509003,
                -0.3761255741119385,
                0.11282524466514587,
                -0.026793956756591797,
                0.005035873502492905,
                -0.0006222421070560813,
            ],
            far: &[
                -0.00012298693764023483,
                -1.127981424331665,
                -0.6366584897041321,
                -0.1043987050652504,
                0.022455519065260887,
                -0.0031013833358883858,
                0.00020194578974042088,
            ],
        },
        Width::F64 => Coefficients {
            split: 1.0,
            saturation: 6.0,
            near: &[
                0.12837916709551256,
                -0.3761263890318355,
                0.11283791670945253,
                -0.02686617064327622,
                0.005223977607423468,
                -0.0008548325989696758,
                0.00012055295320494294,
                -1.4924744663335489e-05,
                1.6447517677871873e-06,
                -1.6209175911748696e-07,
                1.3722976265924504e-08,
                -7.801188874097751e-10,
            ],
            far: &[
                -4.6991318162235746e-07,
                -1.1283743967335467,
                -0.6366422970121856,
                -0.10270699520536228,
                0.01899673719623235,
                0.0004017657291283004,
                -0.0019068601115528605,
                0.0007634314987965178,
                -0.00013056051291802538,
                -2.2470880326401277e-05,
                2.367574576424647e-05,
                -8.926096726490167e-06,
                2.1965228904682884e-06,
                -3.8414164023444164e-07,
                4.783637118125859e-08,
                -4.0614246859235256e-09,
                2.1154337732883366e-10,
                -5.109759362662781e-12,
            ],
        },
    }
}

/// erf(x). f32 1.08 ulp, f64 0.96 ulp.
#[inline(always)]
pub fn erf<L: Lane>(cx: &mut L, x: L::F) -> L::F {
    let Coefficients { split, saturation, near, far } = coefficients(L::WIDTH);
    let magnitude = cx.abs(x);
    let magnitude = cx.name("magnitude", magnitude);
    let square = cx.mul(x, x);
    let square = cx.name("square", square);
    let s = cx.polynomial("s", square, near);
    let small = cx.fma(s, x, x);
    let small = cx.name("small", small);

    let saturation = cx.constant(saturation);
    let t = cx.min(saturation, magnitude);
    let t = cx.name("t", t);
    let g = cx.polynomial("g", t, far);
    let complement = exp_normal(cx, g);
    let one = cx.constant(1.0);
    let large = cx.sub(one, complement);
    let large = cx.with_sign_of(large, x);

    let split = cx.constant(split);
    let is_large = cx.gt(magnitude, split);
    cx.select(is_large, large, small)
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

/// The y whose erf is x: an estimate to six digits and one step of Halley's method, which cubes its error.
#[inline(always)]
pub fn erfinv<L: Lane>(cx: &mut L, x: L::F) -> L::F {
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
/// against |x|: f32 1.51, f64 1.24 ulp of x.
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
