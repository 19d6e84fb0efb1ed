//! The inverse trigonometric functions.
//!
//! An angle is k·π/4 ± atan t with |t| ≤ √2 − 1: t is the smaller side of the triangle over the larger one, or what
//! remains of that beyond an eighth of a turn, (b − a)/(b + a). So there is one division.

use super::lane::{InDouble, Lane, Width};

/// π/4 in two parts.
const QUARTER_PI: [f64; 2] = [std::f64::consts::FRAC_PI_4, 3.061616997868383e-17];

/// P of atan t = t + t³·P(t²) on |t| ≤ √2 − 1; errors 2^-33.5 and 2^-58.1.
const fn atan_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => &[
            -0.3333333327922454,
            0.1999997724823353,
            -0.14284150629730288,
            0.11071354571201351,
            -0.08624598215196126,
            0.05047937432040091,
        ],
        Width::F64 => &[
            -0.3333333333333333,
            0.19999999999999804,
            -0.14285714285659779,
            0.11111111105150588,
            -0.09090908753259112,
            0.07692296368042296,
            -0.0666642476020052,
            0.05878927554473807,
            -0.05230443640686948,
            0.045515447340221615,
            -0.03456931506332609,
            0.016284375050043393,
        ],
    }
}

/// Q of asin t = t + t³·Q(t²) on |t| ≤ ½; errors 2^-34.0 and 2^-57.4.
const fn asin_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => &[
            0.16666666686085643,
            0.07499992404401838,
            0.04464766388813485,
            0.030269138728589183,
            0.023611817008891752,
            0.010574415516912909,
            0.030974540371355073,
        ],
        Width::F64 => &[
            0.16666666666666669,
            0.07499999999998433,
            0.04464285714635543,
            0.030381944138531247,
            0.02237217294214989,
            0.017352392720869973,
            0.013971212973552933,
            0.011479177415184906,
            0.01032281435018578,
            0.005457506718640358,
            0.01740087944269402,
            -0.014851887071247204,
            0.028757851367421566,
        ],
    }
}

/// The angle in [0, π/2] whose tangent is height/width, both ≥ 0: its multiple of π/4, and the rest.
#[inline(always)]
fn angle<L: Lane>(cx: &mut L, height: L::F, width: L::F, target: Width) -> (L::F, L::F) {
    let zero = cx.constant(0.0);
    let one = cx.constant(1.0);
    let two = cx.constant(2.0);
    let steep = cx.gt(height, width);
    let large = cx.select(steep, height, width);
    let small = cx.select(steep, width, height);
    // √2 − 1: an eighth of a turn.
    let limit = cx.constant(std::f64::consts::SQRT_2 - 1.0);
    let limit = cx.mul(large, limit);
    let beyond = cx.gt(small, limit);
    let difference = cx.sub(small, large);
    let sum = cx.add(small, large);
    let numerator = cx.select(beyond, difference, small);
    let denominator = cx.select(beyond, sum, large);
    let t = cx.div(numerator, denominator);
    let t = cx.name("t", t);
    let square = cx.mul(t, t);
    let square = cx.name("square", square);
    let p = cx.polynomial("p", square, atan_coefficients(target));
    let cube = cx.mul(square, t);
    let rest = cx.fma(cube, p, t);
    let rest = cx.name("rest", rest);
    let quarters = cx.select(beyond, one, zero);
    let other = cx.sub(two, quarters);
    let quarters = cx.select(steep, other, quarters);
    let minus = cx.neg(rest);
    (quarters, cx.select(steep, minus, rest))
}

/// quarters·π/4 + rest.
#[inline(always)]
fn turned<L: Lane>(cx: &mut L, quarters: L::F, rest: L::F) -> L::F {
    let [high, low] = QUARTER_PI.map(|part| cx.constant(part));
    let rest = cx.fma(quarters, low, rest);
    cx.fma(quarters, high, rest)
}

/// The angle whose tangent is x.
pub struct Atan;

impl InDouble<1> for Atan {
    const NAME: &'static str = "atan";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        // As good as infinite, which as a side of a triangle is no number.
        let most = cx.constant(2f64.powi(200));
        let one = cx.constant(1.0);
        let size = cx.abs(x);
        let size = cx.min(most, size);
        let (quarters, rest) = angle(cx, size, one, target);
        let result = turned(cx, quarters, rest);
        cx.with_sign_of(result, x)
    }
}

/// The angle of the point (y, x): arguments y, x.
pub struct Atan2;

impl InDouble<2> for Atan2 {
    const NAME: &'static str = "atan2";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [y, x]: [L::F; 2], target: Width) -> L::F {
        let zero = cx.constant(0.0);
        let one = cx.constant(1.0);
        let (mut height, mut width) = (cx.abs(y), cx.abs(x));
        if target == Width::F64 {
            // The sum of the sides must be finite.
            let limit = cx.constant(2f64.powi(1000));
            let quarter = cx.constant(0.25);
            let larger = cx.max(height, width);
            let large = cx.gt(larger, limit);
            let scale = cx.select(large, quarter, one);
            height = cx.mul(height, scale);
            width = cx.mul(width, scale);
        }
        // Two infinities are equal sides, two zeros a flat triangle.
        let same = cx.eq(height, width);
        let nothing = cx.eq(height, zero);
        let height = cx.select(same, one, height);
        let width = cx.select(same, one, width);
        let height = cx.select(nothing, zero, height);
        let (quarters, rest) = angle(cx, height, width, target);
        // Left of the vertical, by the sign of a zero, too.
        let sign = cx.with_sign_of(one, x);
        let left = cx.lt(sign, zero);
        let four = cx.constant(4.0);
        let other = cx.sub(four, quarters);
        let quarters = cx.select(left, other, quarters);
        let minus = cx.neg(rest);
        let rest = cx.select(left, minus, rest);
        let result = turned(cx, quarters, rest);
        let result = cx.with_sign_of(result, y);
        let x_nan = cx.is_nan(x);
        let y_nan = cx.is_nan(y);
        let result = cx.select(x_nan, x, result);
        cx.select(y_nan, y, result)
    }
}

/// asin of |x| near 0, or half of acos |x| near 1: which, and its argument t ≤ ½ and t³·Q(t²).
#[inline(always)]
fn arc<L: Lane>(cx: &mut L, x: L::F, target: Width) -> (L::M, L::F, L::F) {
    let half = cx.constant(0.5);
    let minus_half = cx.constant(-0.5);
    let size = cx.abs(x);
    let size = cx.name("size", size);
    let near_one = cx.gt(size, half);
    let folded = cx.fma(size, minus_half, half);
    let squared = cx.mul(size, size);
    let square = cx.select(near_one, folded, squared);
    let square = cx.name("square", square);
    let root = cx.sqrt(folded);
    let t = cx.select(near_one, root, size);
    let t = cx.name("t", t);
    let q = cx.polynomial("q", square, asin_coefficients(target));
    let cube = cx.mul(square, t);
    (near_one, t, cx.mul(cube, q))
}

/// The angle whose sine is x.
pub struct Asin;

impl InDouble<1> for Asin {
    const NAME: &'static str = "asin";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        let (near_one, t, more) = arc(cx, x, target);
        let half_angle = cx.add(t, more);
        let half_angle = cx.name("half_angle", half_angle);
        let minus_two = cx.constant(-2.0);
        let two = cx.constant(2.0);
        let [high, low] = QUARTER_PI.map(|part| cx.constant(part));
        let high = cx.mul(two, high);
        let low = cx.mul(two, low);
        let rest = cx.fma(minus_two, half_angle, low);
        let far = cx.add(high, rest);
        let result = cx.select(near_one, far, half_angle);
        cx.with_sign_of(result, x)
    }
}

/// The angle whose cosine is x.
pub struct Acos;

impl InDouble<1> for Acos {
    const NAME: &'static str = "acos";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        let (near_one, t, more) = arc(cx, x, target);
        let zero = cx.constant(0.0);
        let one = cx.constant(1.0);
        let two = cx.constant(2.0);
        let four = cx.constant(4.0);
        let angle = cx.add(t, more);
        let angle = cx.name("angle", angle);
        // x > ½: 2·angle; x < −½: π − 2·angle; between: π/2 − the angle with x's sign.
        let negative = cx.lt(x, zero);
        let minus = cx.neg(angle);
        let against = cx.select(negative, angle, minus);
        let twice = cx.add(angle, angle);
        let minus_twice = cx.neg(twice);
        let far = cx.select(negative, minus_twice, twice);
        let rest = cx.select(near_one, far, against);
        let quarters = cx.select(negative, four, zero);
        let quarters = cx.select(near_one, quarters, two);
        let result = turned(cx, quarters, rest);
        let size = cx.abs(x);
        let outside = cx.gt(size, one);
        let nan = cx.constant(f64::NAN);
        cx.select(outside, nan, result)
    }
}
