//! Sweeps of the scalar functions against wider arithmetic, and their special values.

use super::Function;

/// Distance in units in the last place of `expected`'s f32 neighbourhood.
fn ulps_f32(got: f32, expected: f64) -> f64 {
    ulps(f64::from(got), expected, f64::from(expected as f32), -126, 23)
}

/// The same in f64; exact for a reference that is itself rounded only as far as that goes.
fn ulps_f64(got: f64, expected: f64) -> f64 {
    ulps(got, expected, expected, -1022, 52)
}

fn ulps(got: f64, expected: f64, rounded: f64, lowest: i32, mantissa: i32) -> f64 {
    if expected.is_nan() || got.is_nan() {
        return if expected.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == expected || got == rounded {
        return 0.0;
    }
    if got.is_infinite() || rounded.is_infinite() {
        return f64::INFINITY;
    }
    let exponent = if expected == 0.0 { lowest } else { (expected.abs().log2().floor() as i32).max(lowest) };
    ((got - expected) / f64::from(exponent - mantissa).exp2()).abs()
}

pub(super) fn sigmoid(x: f64) -> f64 {
    let z = (-x.abs()).exp();
    if x < 0.0 { z / (1.0 + z) } else { 1.0 / (1.0 + z) }
}

fn erf(x: f64) -> f64 {
    Function::Erf.eval_f64(&[x])
}

/// The standard library's loses digits next to 1 and beyond the root of the largest number.
pub(super) fn acosh(x: f64) -> f64 {
    let t = x - 1.0;
    match x {
        x if x < 1.0 => f64::NAN,
        x if x > 1e100 => x.ln() + std::f64::consts::LN_2,
        _ => (t + (t * (t + 2.0)).sqrt()).ln_1p(),
    }
}

fn asinh(x: f64) -> f64 {
    if x.abs() < 1e150 { x.asinh() } else { (x.abs().ln() + std::f64::consts::LN_2).copysign(x) }
}

pub(super) fn atanh(x: f64) -> f64 {
    (0.5 * (2.0 * x.abs() / (1.0 - x.abs())).ln_1p()).copysign(x)
}

/// Every 9973rd f32 bit pattern, and a finer grid where the functions bend.
fn sweep_f32(function: Function, reference: fn(f64) -> f64, limit: f64) {
    let patterns = (0..=u32::MAX).step_by(9973).map(f32::from_bits);
    let grid = (-120_000..120_000).map(|i| i as f32 * 1e-3 + 1.7e-4);
    for x in patterns.chain(grid).chain([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]) {
        let (got, expected) = (function.eval_f32(&[x]), reference(f64::from(x)));
        let error = ulps_f32(got, expected);
        assert!(error <= limit, "{function:?}({x:e}) = {got:e}, not {expected:e}: {error:.2} ulp");
    }
}

#[test]
fn f32_sweeps() {
    sweep_f32(Function::Exp, f64::exp, 1.0);
    sweep_f32(Function::Expm1, f64::exp_m1, 2.0);
    sweep_f32(Function::Log, f64::ln, 1.0);
    sweep_f32(Function::Log1p, f64::ln_1p, 2.0);
    sweep_f32(Function::Tanh, f64::tanh, 2.0);
    sweep_f32(Function::Erf, erf, 2.0);
    sweep_f32(Function::Sigmoid, sigmoid, 2.5);
    sweep_f32(Function::Exp2, f64::exp2, 1.0);
    sweep_f32(Function::Asinh, f64::asinh, 3.0);
    sweep_f32(Function::Acosh, acosh, 3.0);
    sweep_f32(Function::Atanh, atanh, 3.0);
    sweep_f32(Function::Erfc, |x| Function::Erfc.eval_f64(&[x]), 4.0);
    sweep_f32(Function::Erfinv, |x| Function::Erfinv.eval_f64(&[x]), 3.0);
}

/// Against libm, which is itself up to one ulp off.
fn sweep_f64(function: Function, reference: fn(f64) -> f64, limit: f64) {
    let patterns = (0..400_000u64).map(|i| f64::from_bits(i.wrapping_mul(46_116_860_184_273)));
    let grid = (-100_000..100_000).map(|i| f64::from(i) * 1e-3 + 1.7e-4);
    for x in patterns.chain(grid).chain([0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]) {
        let (got, expected) = (function.eval_f64(&[x]), reference(x));
        let error = ulps_f64(got, expected);
        assert!(error <= limit, "{function:?}({x:e}) = {got:e}, not {expected:e}: {error:.2} ulp");
    }
}

#[test]
fn f64_sweeps() {
    sweep_f64(Function::Exp, f64::exp, 2.0);
    sweep_f64(Function::Expm1, f64::exp_m1, 3.0);
    sweep_f64(Function::Log, f64::ln, 2.0);
    sweep_f64(Function::Log1p, f64::ln_1p, 3.0);
    sweep_f64(Function::Tanh, f64::tanh, 3.0);
    sweep_f64(Function::Sigmoid, sigmoid, 4.0);
    sweep_f64(Function::Exp2, f64::exp2, 2.0);
    sweep_f64(Function::Asinh, asinh, 4.0);
    sweep_f64(Function::Acosh, acosh, 4.0);
    sweep_f64(Function::Atanh, atanh, 4.0);
}

#[test]
fn erf_f64_against_exact_values() {
    let known: &[(f64, f64)] = &[
        (1e-300, 1.1283791670955126e-300),
        (1e-09, 1.1283791670955127e-09),
        (0.054805519999999996, 0.06177954621777338),
        (0.1, 0.1124629160182849),
        (0.3, 0.3286267594591274),
        (0.7, 0.6778011938374184),
        (0.95, 0.8208908072732779),
        (0.999, 0.8422852702064969),
        (1.0, 0.8427007929497149),
        (1.001, 0.8431154854780762),
        (1.3, 0.9340079449406524),
        (1.9, 0.9927904292352575),
        (2.5, 0.999593047982555),
        (3.3, 0.9999969422902035),
        (4.4, 0.999999999510829),
        (5.5, 0.9999999999999927),
        (5.9, 0.9999999999999999),
        (-0.8, -0.7421009647076605),
        (-2.2, -0.9981371537020182),
    ];
    for &(x, expected) in known {
        let error = ulps_f64(erf(x), expected);
        assert!(error <= 2.0, "erf({x:e}): {error:.2} ulp");
    }
    assert_eq!(erf(f64::INFINITY), 1.0);
    assert_eq!(erf(-7.0), -1.0);
    assert!(erf(f64::NAN).is_nan());
}

#[test]
fn erfc_and_erfinv_f64_against_exact_values() {
    let erfc: &[(f64, f64)] = &[
        (-6.0, 2.0),
        (-1.3, 1.9340079449406524),
        (-0.2, 1.2227025892104784),
        (0.0, 1.0),
        (0.3, 0.6713732405408726),
        (0.499, 0.48037934401053156),
        (0.5, 0.4795001221869535),
        (0.7, 0.32219880616258156),
        (1.1, 0.11979493042591827),
        (1.9, 0.0072095707647425325),
        (2.5, 0.0004069520174449589),
        (4.4, 4.891710270605872e-10),
        (7.7, 1.2942740067717136e-27),
        (12.3, 9.029925149482068e-68),
        (20.1, 9.735977140428878e-178),
        (26.4, 4.4017768588035426e-305),
    ];
    let erfinv: &[(f64, f64)] = &[
        (1e-300, 8.86226925452758e-301),
        (1e-09, 8.86226925452758e-10),
        (0.1, 0.08885599049425769),
        (0.3, 0.2724627147267543),
        (0.499, 0.47582428088309237),
        (0.5, 0.4769362762044699),
        (0.7, 0.7328690779592167),
        (0.9, 1.1630871536766743),
        (0.96, 1.4522197815622466),
        (0.999, 2.3267537655135246),
        (0.999999, 3.458910737275499),
        (0.9999999999990905, 5.05125408524939),
        (0.9999999999999999, 5.8635847487551676),
        (-0.25, -0.2253120550121781),
        (-0.99, -1.8213863677184494),
    ];
    for (function, known) in [(Function::Erfc, erfc), (Function::Erfinv, erfinv)] {
        for &(x, expected) in known {
            let error = ulps_f64(function.eval_f64(&[x]), expected);
            assert!(error <= 4.0, "{function:?}({x:e}): {error:.2} ulp");
        }
    }
    assert_eq!(Function::Erfinv.eval_f64(&[1.0]), f64::INFINITY);
    assert_eq!(Function::Erfinv.eval_f64(&[-1.0]), f64::NEG_INFINITY);
    assert!(Function::Erfinv.eval_f64(&[1.5]).is_nan());
    assert_eq!(Function::Erfc.eval_f64(&[f64::INFINITY]), 0.0);
    assert_eq!(Function::Erfc.eval_f64(&[f64::NEG_INFINITY]), 2.0);
}

#[test]
fn rounding_division() {
    let f = |function: Function, a: f64, b: f64| function.eval_f64(&[a, b]);
    assert_eq!(f(Function::Remainder, -7.0, 3.0), 2.0);
    assert_eq!(f(Function::Remainder, 7.0, -3.0), -2.0);
    assert_eq!(f(Function::Fmod, -7.0, 3.0), -1.0);
    assert_eq!(f(Function::FloorDivide, -7.0, 3.0), -3.0);
    assert_eq!(f(Function::FloorDivide, 1.0, 0.1), 9.0);
    assert_eq!(f(Function::FloorDivide, 1.0, 0.0), f64::INFINITY);
    assert_eq!(f(Function::FloorDivide, -1.0, f64::INFINITY), -1.0);
    assert_eq!(f(Function::DivTrunc, -7.0, 2.0), -3.0);
    assert_eq!(Function::Trunc.eval_f64(&[-0.5]).to_bits(), (-0.0f64).to_bits());
    assert_eq!(Function::Copysign.eval_f64(&[3.0, -0.0]), -3.0);
}

/// gelu cancels left of zero, so its error is measured in ulp of x.
#[test]
fn gelu_sweeps() {
    let exact: fn(f64) -> f64 = |x| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let tanh: fn(f64) -> f64 = |x| 0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x * x * x)).tanh());
    for (function, reference) in [(Function::Gelu, exact), (Function::GeluTanh, tanh)] {
        for i in -120_000..120_000 {
            let x = i as f32 * 1e-4;
            let error = (f64::from(function.eval_f32(&[x])) - reference(f64::from(x))).abs();
            let ulp = f64::from(f32::EPSILON) * f64::from(x.abs()).log2().floor().exp2();
            assert!(error <= 2.0 * ulp, "{function:?}({x})");
        }
    }
}

#[test]
fn special_values() {
    let nan = f32::NAN;
    assert!(Function::Relu.eval_f32(&[nan]).is_nan());
    assert_eq!(Function::Relu.eval_f32(&[-0.0]).to_bits(), (-0.0f32).to_bits());
    assert_eq!(Function::Relu.eval_f32(&[-3.0]), 0.0);
    for function in [Function::Maximum, Function::Minimum] {
        assert!(function.eval_f32(&[nan, 1.0]).is_nan());
        assert!(function.eval_f32(&[1.0, nan]).is_nan());
    }
    assert_eq!(Function::Maximum.eval_f32(&[1.0, 2.0]), 2.0);
    assert_eq!(Function::Tanh.eval_f32(&[-0.0]).to_bits(), (-0.0f32).to_bits());
    assert_eq!(Function::Tanh.eval_f32(&[f32::INFINITY]), 1.0);
    assert_eq!(Function::Log.eval_f32(&[0.0]), f32::NEG_INFINITY);
    assert_eq!(Function::Log.eval_f32(&[-0.0]), f32::NEG_INFINITY);
    assert_eq!(Function::Exp.eval_f32(&[f32::NEG_INFINITY]), 0.0);
    assert_eq!(Function::Sigmoid.eval_f32(&[f32::NEG_INFINITY]), 0.0);
    assert!(Function::Sigmoid.eval_f32(&[-100.0]) > 0.0);
    assert_eq!(Function::Pow.eval_f32(&[1.0, nan]), 1.0);
    assert_eq!(Function::Pow.eval_f32(&[nan, 0.0]), 1.0);
    assert_eq!(Function::Pow.eval_f32(&[-2.0, 3.0]), -8.0);
    assert!(Function::Pow.eval_f32(&[-2.0, 0.5]).is_nan());
    assert_eq!(Function::Pow.eval_f32(&[0.0, -1.0]), f32::INFINITY);
    assert_eq!(Function::Rsqrt.eval_f32(&[0.0]), f32::INFINITY);
}

#[test]
fn composites_follow_their_formulas() {
    let (x, a, b, value) = (0.3f32, 1.7f32, -2.9f32, 0.1f32);
    assert_eq!(Function::Addcmul.eval_f32(&[x, a, b, value]), x + (value * a) * b);
    assert_eq!(Function::Addcdiv.eval_f32(&[x, a, b, value]), x + (value * a) / b);
    assert_eq!(Function::Lerp.eval_f32(&[a, b, 0.1]), a + 0.1 * (b - a));
    assert_eq!(Function::Lerp.eval_f32(&[a, b, 0.9]), b - (b - a) * (1.0 - 0.9));
    assert_eq!(Function::AddAlpha.eval_f32(&[x, a, value]), x + value * a);
    assert_eq!(Function::SubAlpha.eval_f32(&[x, a, value]), x - value * a);
}

/// Doubles as hexadecimal bits.
fn bits(text: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(text, 16).unwrap())
}

/// The number that units are counted at where a function of the gamma family is smaller: next to its roots it is what is
/// left of larger terms that cancel, digamma of log 12 and a sum, and left of ½ all of them of what the function is on the
/// other side.
fn cancelling(function: Function, x: f64) -> f64 {
    let own: f64 = if function == Function::Digamma { 2.0 } else { 0.0 };
    if x < 0.5 { own.max(1.0).max(function.eval_f64(&[1.0 - x]).abs()) } else { own }
}

/// Arguments that faults of reduction show at (multiples of π/2 and their neighbours, up to the largest; subnormals; next
/// to roots, poles and the ends of domains), with exact values in two parts. Each line: function, format, arguments,
/// value.
#[test]
fn hard_arguments() {
    for line in include_str!("hard.txt").lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let function = *Function::ALL.iter().find(|f| f.name() == words[0]).unwrap();
        let numbers: Vec<f64> = words[2..].iter().map(|word| bits(word)).collect();
        let (args, value) = numbers.split_at(function.arity());
        let (lowest, mantissa, got) = match words[1] {
            "f32" => (-126, 23, function.eval(super::Width::F32, args)),
            _ => (-1022, 52, function.eval_f64(args)),
        };
        let (high, low) = (value[0], value[1]);
        let rounded = if words[1] == "f32" { f64::from(high as f32) } else { high };
        let (limit, smallest) = match words[0] {
            "lgamma" | "digamma" | "trigamma" | "tetragamma" => (4.0, cancelling(function, args[0])),
            _ => (2.0, 0.0),
        };
        // The units are those of `high`; what it leaves out counts where they are equal.
        let unit = |of: f64| f64::from((of.abs().log2().floor() as i32).max(lowest) - mantissa).exp2();
        let error = match ulps(got, high, rounded, lowest, mantissa) {
            0.0 => 0.0,
            error if low == 0.0 && high.abs() >= smallest => error,
            _ => ((got - high) - low).abs() / unit(high.abs().max(smallest)),
        };
        assert!(error <= limit, "{line}: {got:e}, not {high:e}: {error:.2} ulp");
        if high == 0.0 {
            assert_eq!(got.to_bits(), high.to_bits(), "{line}");
        }
    }
}
