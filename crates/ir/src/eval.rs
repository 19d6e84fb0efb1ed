//! What rows compute, element by element, in double precision or 64-bit integers: the plain definition that
//! the reference evaluator of the tests uses. Deliberately independent of [`math`](crate::math).

use smallvec::SmallVec;

use crate::{Approximate, Op, Scalar, ScalarKind, Ty};

/// The element-by-element meaning of a row.
#[derive(Copy, Clone)]
pub enum Eval {
    /// One function for floats, one for integers (truth values are 0 and 1).
    Pointwise {
        /// On doubles.
        float: fn(&[f64]) -> f64,
        /// On integers; `None` if integers are computed as floats.
        int: Option<fn(&[i64]) -> i64>,
    },
    /// A function on doubles that looks at the attributes.
    Attributes(fn(&Op, &[f64]) -> f64),
    /// A comparison.
    Compare {
        /// Of doubles.
        float: fn(&[f64]) -> bool,
        /// Of integers.
        int: fn(&[i64]) -> bool,
    },
    /// A conversion to another dtype.
    Convert,
    /// A reduction; the evaluator has one loop for each.
    Reduce,
    /// Not element by element (views, products, composites): the evaluator says it in loops or decomposes.
    Structural,
}

impl Eval {
    pub(crate) const fn both(float: fn(&[f64]) -> f64, int: fn(&[i64]) -> i64) -> Eval {
        Eval::Pointwise { float, int: Some(int) }
    }

    pub(crate) const fn float(float: fn(&[f64]) -> f64) -> Eval {
        Eval::Pointwise { float, int: None }
    }

    pub(crate) const fn float_op(float: fn(&Op, &[f64]) -> f64) -> Eval {
        Eval::Attributes(float)
    }

    pub(crate) const fn compare(float: fn(&[f64]) -> bool, int: fn(&[i64]) -> bool) -> Eval {
        Eval::Compare { float, int }
    }
}

impl Op {
    /// The result of the op on numbers alone, as a run-time number; `None` if it isn't defined for numbers.
    pub fn fold(&self, args: &[Scalar]) -> Option<Scalar> {
        // Runs on every call of a compiled program: nothing here may allocate.
        let tys: SmallVec<[Ty; 4]> = args.iter().map(|x| Ty::Scalar(x.kind())).collect();
        let Ty::Scalar(kind) = self.infer(&tys).ok()?.first()?.clone() else { return None };
        let floats: SmallVec<[f64; 4]> = args.iter().map(|x| x.as_f64()).collect();
        let ints: SmallVec<[i64; 4]> = args.iter().map(|x| x.as_i64()).collect();
        let any_float = args.iter().any(|x| x.kind() == ScalarKind::Float);
        Some(match self.row().eval {
            Eval::Pointwise { int: Some(int), .. } if kind != ScalarKind::Float => {
                Scalar::Int(int(&ints)).to_kind(kind)
            }
            Eval::Pointwise { float, .. } => Scalar::Float(float(&floats)).to_kind(kind),
            Eval::Attributes(float) => Scalar::Float(float(self, &floats)).to_kind(kind),
            Eval::Compare { float, .. } if any_float => Scalar::Bool(float(&floats)),
            Eval::Compare { int, .. } => Scalar::Bool(int(&ints)),
            Eval::Convert => match self {
                // A number converted to a dtype keeps that dtype's precision.
                Op::To { dtype } => args[0].to_dtype(*dtype),
                _ => args[0].to_kind(kind),
            },
            Eval::Reduce | Eval::Structural => return None,
        })
    }
}

/// The optional third operand of add and sub.
pub(crate) fn alpha(args: &[f64]) -> f64 {
    args.get(2).copied().unwrap_or(1.0)
}

pub(crate) fn alpha_int(args: &[i64]) -> i64 {
    args.get(2).copied().unwrap_or(1)
}

/// The larger, NaN if either is NaN.
pub(crate) fn nan_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// Integer power, wrapping; negative exponents give what exact arithmetic truncates to.
pub(crate) fn int_pow(base: i64, exponent: i64) -> i64 {
    match (base, exponent) {
        (1, _) => 1,
        (-1, e) => {
            if e % 2 == 0 {
                1
            } else {
                -1
            }
        }
        (_, e) if e < 0 => 0,
        (b, e) => {
            let (mut result, mut b, mut e) = (1i64, b, e);
            while e > 0 {
                if e & 1 == 1 {
                    result = result.wrapping_mul(b);
                }
                b = b.wrapping_mul(b);
                e >>= 1;
            }
            result
        }
    }
}

/// The class of a number that an `arange` begins with or goes on by: 1 for the usual ones, 0 and 1.
pub(crate) fn arange_class(operand: usize, value: Scalar) -> u8 {
    u8::from(matches!((operand, value), (0, Scalar::Int(0)) | (1, Scalar::Int(1))))
}

/// Exponents whose power is computed by other means than the general function.
pub(crate) fn power_class(operand: usize, value: Scalar) -> u8 {
    if operand != 1 {
        return 0;
    }
    match value.as_f64() {
        0.0 => 1,
        1.0 => 2,
        2.0 => 3,
        3.0 => 4,
        0.5 => 5,
        -0.5 => 6,
        -1.0 => 7,
        _ => 0,
    }
}

pub(crate) fn eval_gelu(op: &Op, args: &[f64]) -> f64 {
    let x = args[0];
    match op {
        Op::Gelu { approximate: Approximate::Tanh } => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        _ => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
    }
}

/// The error function to about 1e-15: the Taylor series near zero, the continued fraction of erfc beyond.
pub(crate) fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return f64::NAN;
    }
    let a = x.abs();
    let value = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-17 * sum.abs() {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
            if n > 200.0 {
                break;
            }
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else if a > 6.0 {
        1.0
    } else {
        let mut fraction = 0.0;
        for k in (1..=120).rev() {
            fraction = f64::from(k) * 0.5 / (a + fraction);
        }
        1.0 - (-a * a).exp() / (std::f64::consts::PI.sqrt() * (a + fraction))
    };
    value.copysign(x)
}

/// 1 − erf, to about 1e-15 of itself.
pub(crate) fn erfc(x: f64) -> f64 {
    if x.is_nan() || x < 2.0 {
        return 1.0 - erf(x);
    }
    let mut fraction = 0.0;
    for k in (1..=160).rev() {
        fraction = f64::from(k) * 0.5 / (x + fraction);
    }
    (-x * x).exp() / (std::f64::consts::PI.sqrt() * (x + fraction))
}

/// The number whose erf is x, by bisection and then Newton's method.
pub(crate) fn erfinv(x: f64) -> f64 {
    let size = x.abs();
    if size.is_nan() || size >= 1.0 {
        return if size == 1.0 { f64::INFINITY.copysign(x) } else { f64::NAN };
    }
    let (mut low, mut high) = (0.0, 6.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        let below = if size < 0.5 { erf(middle) < size } else { erfc(middle) > 1.0 - size };
        if below {
            low = middle;
        } else {
            high = middle;
        }
    }
    let mut y: f64 = 0.5 * (low + high);
    for _ in 0..2 {
        let error = if size < 0.5 { erf(y) - size } else { (1.0 - size) - erfc(y) };
        y -= error / (std::f64::consts::FRAC_2_SQRT_PI * (-y * y).exp());
    }
    y.copysign(x)
}

/// log |Γ(x)| as the limit of Gauss's product, with the first terms of its error.
pub(crate) fn lgamma(x: f64) -> f64 {
    if x < 0.0 {
        let turned = std::f64::consts::PI / (std::f64::consts::PI * (x % 2.0)).sin().abs();
        return if x == x.floor() { f64::INFINITY } else { turned.ln() - lgamma(1.0 - x) };
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < 40.0 {
        sum -= z.abs().ln();
        z += 1.0;
    }
    let series = 1.0 / (12.0 * z) - 1.0 / (360.0 * z.powi(3)) + 1.0 / (1260.0 * z.powi(5));
    sum + (z - 0.5) * z.ln() - z + 0.5 * (2.0 * std::f64::consts::PI).ln() + series
}

/// The derivative of [`lgamma`].
pub(crate) fn digamma(x: f64) -> f64 {
    if x < 0.0 {
        let turned = std::f64::consts::PI / (std::f64::consts::PI * (x % 1.0)).tan();
        return if x == x.floor() { f64::NAN } else { digamma(1.0 - x) - turned };
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < 40.0 {
        sum -= 1.0 / z;
        z += 1.0;
    }
    sum + z.ln() - 0.5 / z - 1.0 / (12.0 * z.powi(2)) + 1.0 / (120.0 * z.powi(4)) - 1.0 / (252.0 * z.powi(6))
}

/// The derivative of [`digamma`].
pub(crate) fn trigamma(x: f64) -> f64 {
    if x < 0.0 {
        let turned = std::f64::consts::PI / (std::f64::consts::PI * (x % 1.0)).sin();
        return if x == x.floor() { f64::INFINITY } else { turned * turned - trigamma(1.0 - x) };
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < 40.0 {
        sum += 1.0 / (z * z);
        z += 1.0;
    }
    sum + 1.0 / z + 0.5 / (z * z) + 1.0 / (6.0 * z.powi(3)) - 1.0 / (30.0 * z.powi(5))
        + 1.0 / (42.0 * z.powi(7))
}

/// The derivative of [`trigamma`].
pub(crate) fn tetragamma(x: f64) -> f64 {
    use std::f64::consts::PI;
    if x < 0.0 {
        let (sine, cosine) = (PI * (x % 1.0)).sin_cos();
        let turned = 2.0 * PI.powi(3) * cosine / sine.powi(3);
        return if x == x.floor() { f64::NEG_INFINITY } else { tetragamma(1.0 - x) - turned };
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < 40.0 {
        sum -= 2.0 / z.powi(3);
        z += 1.0;
    }
    sum - z.powi(-2) - z.powi(-3) - 0.5 * z.powi(-4) + z.powi(-6) / 6.0 - z.powi(-8) / 6.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_its_textbook_values() {
        for (x, want) in [(0.5, 0.5204998778130465), (1.0, 0.8427007929497149), (3.0, 0.9999779095030014)] {
            assert!((erf(x) - want).abs() < 1e-14, "erf({x}) = {}", erf(x));
            assert!((erf(-x) + want).abs() < 1e-14);
        }
    }

    #[test]
    fn integer_powers_wrap() {
        assert_eq!(int_pow(3, 4), 81);
        assert_eq!(int_pow(2, 64), 0);
        assert_eq!(int_pow(2, -1), 0);
        assert_eq!(int_pow(-1, -3), -1);
    }
}
