//! Sine, cosine and tangent.
//!
//! sin x = ± sin r with x = n·π + r, cos x = ∓ sin r with x = (n + ½)·π + r, and tan from both with x = n·π/2 + r. π
//! has three parts, enough for |x| < 2³⁰. From there on the fraction of x·2/π comes from as many digits of 2/π as x has
//! places before its point (Payne and Hanek's way): right for every number, and rarely needed.

use super::lane::{InDouble, Lane, Rare, Table, Width};

/// From here on arguments are reduced by [`fraction_of_turn`].
const HUGE: f64 = (1u64 << 30) as f64;

/// π in three parts.
const PI: [f64; 3] = [std::f64::consts::PI, 1.2246467991473532e-16, -2.9947698097183397e-33];

/// π/2 in three parts.
const HALF_PI: [f64; 3] = [std::f64::consts::FRAC_PI_2, 6.123233995736766e-17, -1.4973848049091698e-33];

/// S of sin r = r + r³·S(r²) on |r| ≤ π/2; errors 2^-33.1 and 2^-54.7.
const fn sine_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => &[
            -0.16666666663881236,
            0.008333332768753579,
            -0.000198410865614788,
            2.75364635625748e-06,
            -2.4080190432969638e-08,
        ],
        Width::F64 => &[
            -0.16666666666666666,
            0.008333333333333333,
            -0.0001984126984126984,
            2.755731922398586e-06,
            -2.5052108385432757e-08,
            1.605904383546503e-10,
            -7.647163606775822e-13,
            2.811450117980201e-15,
            -8.218172100265424e-18,
            1.9101323935989302e-20,
        ],
    }
}

/// The same on |r| ≤ π/4; errors 2^-35.6 and 2^-57.1.
const fn short_sine_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => {
            &[-0.16666666663854168, 0.008333331874273714, -0.000198400864995936, 2.7249895230611676e-06]
        }
        Width::F64 => &[
            -0.16666666666666666,
            0.008333333333333331,
            -0.00019841269841265063,
            2.7557319219337312e-06,
            -2.5052106231802837e-08,
            1.6058531516797758e-10,
            -7.586691094197958e-13,
        ],
    }
}

/// C of cos r = 1 − r²/2 + r⁴·C(r²) on |r| ≤ π/4; errors 2^-39.5 and 2^-59.4.
const fn cosine_coefficients(target: Width) -> &'static [f64] {
    match target {
        Width::F32 => {
            &[0.041666666664320264, -0.0013888887671652504, 2.480060018036381e-05, -2.7300933687212943e-07]
        }
        Width::F64 => &[
            0.041666666666666664,
            -0.0013888888888887398,
            2.480158729876456e-05,
            -2.7557317271145144e-07,
            2.087614614655861e-09,
            -1.1382623647474604e-11,
        ],
    }
}

/// x − n·period, and what its rounding lost where the target needs it. n has at most 31 bits, so the first product and
/// difference are exact.
#[inline(always)]
fn rest<L: Lane>(cx: &mut L, x: L::F, n: L::F, period: [f64; 3], target: Width) -> (L::F, L::F) {
    let [first, second, third] = period.map(|part| cx.constant(part));
    let minus_n = cx.neg(n);
    let rest = cx.fma(minus_n, first, x);
    let rest = cx.name("rest", rest);
    match target {
        Width::F32 => (cx.fma(minus_n, second, rest), cx.constant(0.0)),
        Width::F64 => {
            let (product, product_lost) = cx.two_product(minus_n, second);
            let (rest, lost) = cx.two_sum(rest, product);
            let lost = cx.add(lost, product_lost);
            (rest, cx.fma(minus_n, third, lost))
        }
    }
}

/// sin(r + lost).
#[inline(always)]
fn sine<L: Lane>(cx: &mut L, (r, lost): (L::F, L::F), coefficients: &[f64], target: Width) -> L::F {
    let square = cx.mul(r, r);
    let square = cx.name("square", square);
    let s = cx.polynomial("s", square, coefficients);
    let cube = cx.mul(square, r);
    match target {
        Width::F32 => cx.fma(cube, s, r),
        Width::F64 => {
            let one = cx.constant(1.0);
            let minus_half = cx.constant(-0.5);
            let slope = cx.fma(minus_half, square, one);
            let more = cx.mul(lost, slope);
            let more = cx.fma(cube, s, more);
            cx.add(r, more)
        }
    }
}

/// cos(r + lost) on |r| ≤ π/4.
#[inline(always)]
fn cosine<L: Lane>(cx: &mut L, (r, lost): (L::F, L::F), target: Width) -> L::F {
    let square = cx.mul(r, r);
    let square = cx.name("square", square);
    let c = cx.polynomial("c", square, cosine_coefficients(target));
    let one = cx.constant(1.0);
    let fourth = cx.mul(square, square);
    match target {
        Width::F32 => {
            let minus_half = cx.constant(-0.5);
            let start = cx.fma(minus_half, square, one);
            cx.fma(fourth, c, start)
        }
        Width::F64 => {
            let half = cx.constant(0.5);
            let half = cx.mul(half, square);
            let start = cx.sub(one, half);
            let start_lost = cx.sub(one, start);
            let start_lost = cx.sub(start_lost, half);
            let minus_lost = cx.neg(lost);
            let more = cx.fma(minus_lost, r, start_lost);
            let more = cx.fma(fourth, c, more);
            cx.add(start, more)
        }
    }
}

/// Whether an argument is too large for [`rest`].
#[inline(always)]
fn is_huge<L: Lane>(cx: &mut L, x: L::F) -> L::M {
    let limit = cx.constant(HUGE);
    let size = cx.abs(x);
    cx.ge(size, limit)
}

/// sin x.
pub struct Sin;

impl InDouble<1> for Sin {
    const NAME: &'static str = "sin";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        let per_turn = cx.constant(std::f64::consts::FRAC_1_PI);
        let n = cx.nearest(x, per_turn);
        let r = rest(cx, x, n.float, PI, target);
        let result = sine(cx, r, sine_coefficients(target), target);
        let result = cx.negate_if_odd(result, n.int);
        // −0 stays −0.
        let zero = cx.constant(0.0);
        let is_zero = cx.eq(x, zero);
        let result = cx.select(is_zero, x, result);
        let huge = is_huge(cx, x);
        cx.rarely::<HugeSin, 1>(huge, result, [x])
    }
}

/// cos x.
pub struct Cos;

impl InDouble<1> for Cos {
    const NAME: &'static str = "cos";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        // x = (n − ½)·π + r
        let per_turn = cx.constant(std::f64::consts::FRAC_1_PI);
        let half = cx.constant(0.5);
        let one = cx.constant(1.0);
        let turns = cx.fma(x, per_turn, half);
        let n = cx.nearest(turns, one);
        let places = cx.sub(n.float, half);
        let r = rest(cx, x, places, PI, target);
        let result = sine(cx, r, sine_coefficients(target), target);
        let result = cx.negate_if_odd(result, n.int);
        let huge = is_huge(cx, x);
        cx.rarely::<HugeCos, 1>(huge, result, [x])
    }
}

/// tan x.
pub struct Tan;

impl InDouble<1> for Tan {
    const NAME: &'static str = "tan";

    #[inline(always)]
    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1], target: Width) -> L::F {
        let per_turn = cx.constant(std::f64::consts::FRAC_2_PI);
        let n = cx.nearest(x, per_turn);
        let r = rest(cx, x, n.float, HALF_PI, target);
        let s = sine(cx, r, short_sine_coefficients(target), target);
        let s = cx.name("sine", s);
        let c = cosine(cx, r, target);
        let c = cx.name("cosine", c);
        let odd = cx.is_odd(n.float);
        let numerator = cx.select(odd, c, s);
        let denominator = cx.select(odd, s, c);
        let result = cx.div(numerator, denominator);
        let result = cx.negate_if_odd(result, n.int);
        let zero = cx.constant(0.0);
        let is_zero = cx.eq(x, zero);
        let result = cx.select(is_zero, x, result);
        let huge = is_huge(cx, x);
        cx.rarely::<HugeTan, 1>(huge, result, [x])
    }
}

/// The digits of 2/π, 32 bits each, behind two zeros: places before the point.
const TWO_OVER_PI: Table = Table {
    name: "two_over_pi",
    values: &[
        0, 0, 2734261102, 1313084713, 4230436817, 4113882560, 3680671129, 1011060801, 4266746795, 3736847713,
        3072618042, 1112396512, 105459434, 164729372, 4263373596, 2972297022, 3900847605, 784024708,
        3919343654, 3026157121, 965858873, 2203269620, 2625920907, 3187222587, 536385535, 3724908559,
        4012839307, 1510632735, 1832287951, 667617719, 1330003814, 2657085997, 1965537991, 3957715323,
        1023883767, 2320667370, 1811636145, 529358088, 1443049542, 4235946923, 4040145952, 2599695901, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ],
};

/// |x| = (4k + n)·π/2 + r + lost for a whole k: n and the two parts of r. Only for |x| ≥ 2³⁰; infinity gives NaN.
#[inline(always)]
fn fraction_of_turn<L: Lane>(cx: &mut L, x: L::F) -> (super::lane::Whole<L::F, L::I>, (L::F, L::F)) {
    // |x| = X·2^32j with X < 2³². Digit i of 2/π counts 2^(−32i − 32): those up to j − 3 give multiples of 4.
    let size = cx.abs(x);
    let bits = cx.bits(size);
    let exponent = cx.shr(bits, 52);
    let bias = cx.int(1023);
    let exponent = cx.int_sub(exponent, bias);
    let place = cx.shr(exponent, 5);
    let nothing = cx.int(0);
    let down = cx.shl(place, 5);
    let down = cx.int_sub(nothing, down);
    let down = cx.power_of_two(down);
    let size = cx.mul(size, down);
    let size = cx.name("size", size);
    let (quarter, minus_four) = (cx.constant(0.25), cx.constant(-4.0));
    let zero = cx.constant(0.0);
    // A sum in three parts, of which the last one is rounded.
    let (mut high, mut middle, mut low) = (zero, zero, zero);
    for k in 0..7 {
        let at = cx.int(k);
        let at = cx.int_add(place, at);
        let digits = cx.lookup(TWO_OVER_PI, at);
        let unit = cx.constant(((1 - k) as f64 * 32.0).exp2());
        let digits = cx.mul(digits, unit);
        let (product, lost) = cx.two_product(size, digits);
        for mut part in [product, lost] {
            if k < 3 {
                // What is left without multiples of 4, exactly.
                let fours = cx.mul(part, quarter);
                let fours = cx.round_ties_even(fours);
                part = cx.fma(fours, minus_four, part);
            }
            let (sum, rest) = cx.two_sum(high, part);
            let (more, rest) = cx.two_sum(middle, rest);
            (high, middle, low) = (sum, more, cx.add(low, rest));
        }
    }
    let one = cx.constant(1.0);
    let n = cx.nearest(high, one);
    let fraction = cx.sub(high, n.float);
    let (fraction, rest) = cx.two_sum(fraction, middle);
    let low = cx.add(rest, low);
    let (fraction, low) = cx.two_sum(fraction, low);
    let [first, second, _] = HALF_PI.map(|part| cx.constant(part));
    let (r, lost) = cx.two_product(fraction, first);
    let lost = cx.fma(fraction, second, lost);
    let lost = cx.fma(low, first, lost);
    (n, cx.two_sum(r, lost))
}

/// sin and cos of |x|, ready but for the sign, and the quarters of a turn.
#[inline(always)]
fn huge<L: Lane>(cx: &mut L, x: L::F) -> (L::F, L::F, super::lane::Whole<L::F, L::I>) {
    let (n, r) = fraction_of_turn(cx, x);
    let s = sine(cx, r, short_sine_coefficients(Width::F64), Width::F64);
    let c = cosine(cx, r, Width::F64);
    (s, c, n)
}

struct HugeSin;

impl Rare<1> for HugeSin {
    const NAME: &'static str = "huge_sin";

    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1]) -> L::F {
        let (s, c, n) = huge(cx, x);
        let odd = cx.is_odd(n.float);
        let result = cx.select(odd, c, s);
        let half_turns = cx.shr(n.int, 1);
        let result = cx.negate_if_odd(result, half_turns);
        let negative = cx.neg(result);
        let zero = cx.constant(0.0);
        let is_negative = cx.lt(x, zero);
        cx.select(is_negative, negative, result)
    }
}

struct HugeCos;

impl Rare<1> for HugeCos {
    const NAME: &'static str = "huge_cos";

    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1]) -> L::F {
        let (s, c, n) = huge(cx, x);
        let odd = cx.is_odd(n.float);
        let result = cx.select(odd, s, c);
        let one = cx.int(1);
        let next = cx.int_add(n.int, one);
        let half_turns = cx.shr(next, 1);
        cx.negate_if_odd(result, half_turns)
    }
}

struct HugeTan;

impl Rare<1> for HugeTan {
    const NAME: &'static str = "huge_tan";

    fn body<L: Lane>(cx: &mut L, [x]: [L::F; 1]) -> L::F {
        let (s, c, n) = huge(cx, x);
        let odd = cx.is_odd(n.float);
        let numerator = cx.select(odd, c, s);
        let denominator = cx.select(odd, s, c);
        let result = cx.div(numerator, denominator);
        let result = cx.negate_if_odd(result, n.int);
        let negative = cx.neg(result);
        let zero = cx.constant(0.0);
        let is_negative = cx.lt(x, zero);
        cx.select(is_negative, negative, result)
    }
}

/// sin πx for the fraction x of a whole number, |x| ≤ ½, and cos πx: for reflections.
#[inline(always)]
pub(super) fn sine_and_cosine_of_pi<L: Lane>(cx: &mut L, x: L::F, target: Width) -> (L::F, L::F) {
    let pi = cx.constant(PI[0]);
    let low = cx.constant(PI[1]);
    let (r, lost) = cx.two_product(x, pi);
    let lost = cx.fma(x, low, lost);
    let sine_of = sine(cx, (r, lost), sine_coefficients(target), target);
    // cos πx = sin π(½ − |x|), whose argument is exact where it is small.
    let size = cx.abs(x);
    let half = cx.constant(0.5);
    let rest = cx.sub(half, size);
    let (r, lost) = cx.two_product(rest, pi);
    let lost = cx.fma(rest, low, lost);
    let cosine_of = sine(cx, (r, lost), sine_coefficients(target), target);
    (sine_of, cosine_of)
}
