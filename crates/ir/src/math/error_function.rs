//! The error function, and the two forms of gelu.
//!
//! erf(x) = x + x·S(x²) near zero; beyond, 1 − exp(−Q(|x|)) with Q = −log erfc, a smooth function.

use super::exponential::{exp_normal, tanh};
use super::lane::{Lane, Width};

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
