//! The gamma function's family in plain double precision, as the sweeps' reference.
//!
//! All of them move the argument up by their recurrence until Stirling's series holds.

use std::f64::consts::PI;

/// From here on the series below are exact to double precision.
const LARGE: f64 = 12.0;

/// sin πx, exact where x is whole.
fn sin_pi(x: f64) -> f64 {
    let r = x % 2.0;
    (PI * if r.abs() > 0.5 && r.abs() < 1.5 { r.signum() - r } else { r - 2.0 * (r / 2.0).round() }).sin()
}

/// log |Γ(x)|; infinite at zero and the negative integers.
pub fn lgamma(x: f64) -> f64 {
    if x.is_nan() || x.is_infinite() {
        return x.abs();
    }
    if x <= 0.0 && x == x.floor() {
        return f64::INFINITY;
    }
    if x < 0.5 {
        // Γ(x)·Γ(1 − x) = π / sin πx
        return (PI / sin_pi(x).abs()).ln() - lgamma(1.0 - x);
    }
    if (x - 1.0).abs() <= 0.5 {
        return near_one(x - 1.0);
    }
    if (x - 2.0).abs() <= 0.5 {
        return near_one(x - 2.0) + (x - 2.0).ln_1p();
    }
    let (mut z, mut product) = (x, 1.0);
    while z < LARGE {
        product *= z;
        z += 1.0;
    }
    let r = 1.0 / (z * z);
    let series = (1.0 / 12.0
        - r * (1.0 / 360.0
            - r * (1.0 / 1260.0 - r * (1.0 / 1680.0 - r * (1.0 / 1188.0 - r * 691.0 / 360360.0)))))
        / z;
    (z - 0.5) * z.ln() - z + 0.5 * (2.0 * PI).ln() + series - product.ln()
}

/// log Γ(1 + d) for small d, where it passes through zero: −γd + Σ ζ(k)(−d)ᵏ/k.
fn near_one(d: f64) -> f64 {
    const EULER: f64 = 0.577_215_664_901_532_9;
    /// ζ(k) − 1 for k = 2, 3, …
    const ZETA: [f64; 22] = [
        0.6449340668482264,
        0.2020569031595943,
        0.08232323371113819,
        0.03692775514336993,
        0.01734306198444914,
        0.008349277381922827,
        0.00407735619794434,
        0.002008392826082214,
        0.0009945751278180853,
        0.0004941886041194646,
        0.0002460865533080483,
        0.0001227133475784891,
        6.124813505870483e-05,
        3.058823630702049e-05,
        1.528225940865187e-05,
        7.637197637899762e-06,
        3.8172932649998e-06,
        1.908212716553939e-06,
        9.53962033872796e-07,
        4.769329867878065e-07,
        2.384505027277329e-07,
        1.192199259653111e-07,
    ];
    // Σ (−d)ᵏ/k from k = 2 on is d − log(1 + d): only ζ(k) − 1 is summed, which shrinks fast.
    let (mut power, mut sum) = (-d, 0.0);
    for (i, zeta) in ZETA.iter().enumerate() {
        power *= -d;
        sum += zeta * power / (i + 2) as f64;
    }
    sum + (d - d.ln_1p()) - EULER * d
}

/// The derivative of log Γ(x); NaN at the negative integers, −∞ at zero.
pub fn digamma(x: f64) -> f64 {
    if x == 0.0 {
        return f64::NEG_INFINITY.copysign(-x);
    }
    if x < 0.0 && x == x.floor() {
        return f64::NAN;
    }
    if x < 0.0 {
        // ψ(x) = ψ(1 − x) − π / tan πx
        let r = x - x.round();
        return digamma(1.0 - x) - PI / (PI * r).tan();
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < LARGE {
        sum -= 1.0 / z;
        z += 1.0;
    }
    let r = 1.0 / (z * z);
    let series = r
        * (1.0 / 12.0
            - r * (1.0 / 120.0
                - r * (1.0 / 252.0 - r * (1.0 / 240.0 - r * (1.0 / 132.0 - r * 691.0 / 32760.0)))));
    sum + z.ln() - 0.5 / z - series
}

/// The derivative of [`digamma`].
pub fn trigamma(x: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        return f64::NAN;
    }
    if x <= 0.0 && x == x.floor() {
        return f64::INFINITY;
    }
    if x < 0.0 {
        // ψ′(x) = π² / sin² πx − ψ′(1 − x)
        let s = sin_pi(x);
        return PI * PI / (s * s) - trigamma(1.0 - x);
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < LARGE {
        sum += 1.0 / (z * z);
        z += 1.0;
    }
    let r = 1.0 / (z * z);
    let series = r
        * (1.0 / 6.0
            - r * (1.0 / 30.0 - r * (1.0 / 42.0 - r * (1.0 / 30.0 - r * (5.0 / 66.0 - r * 691.0 / 2730.0)))));
    sum + (1.0 + 0.5 / z + series) / z
}

/// The derivative of [`trigamma`].
pub fn tetragamma(x: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        return f64::NAN;
    }
    if x <= 0.0 && x == x.floor() {
        return f64::NEG_INFINITY;
    }
    if x < 0.0 {
        // ψ″(x) = ψ″(1 − x) − 2π³ cos πx / sin³ πx
        let (sine, cosine) = (sin_pi(x), sin_pi(x + 0.5));
        return tetragamma(1.0 - x) - 2.0 * PI.powi(3) * cosine / sine.powi(3);
    }
    let (mut z, mut sum) = (x, 0.0);
    while z < LARGE {
        sum -= 2.0 / (z * z * z);
        z += 1.0;
    }
    let r = 1.0 / (z * z);
    let series = r
        * (0.5 - r * (1.0 / 6.0 - r * (1.0 / 6.0 - r * (3.0 / 10.0 - r * (5.0 / 6.0 - r * 691.0 / 210.0)))));
    sum - r * (1.0 + 1.0 / z + series)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() <= 3e-14 * want.abs().max(1e-3), "{got:e}, not {want:e}");
    }

    #[test]
    fn known_values() {
        for (x, want) in LGAMMA {
            close(lgamma(*x), *want);
        }
        for (x, want) in DIGAMMA {
            close(digamma(*x), *want);
        }
        for (x, want) in TRIGAMMA {
            close(trigamma(*x), *want);
        }
        // Multiples of ζ(3), and the slope of trigamma elsewhere.
        for (x, want) in [(0.5, -16.82879664423432), (1.0, -2.4041138063191886), (2.0, -0.4041138063191886)] {
            close(tetragamma(x), want);
        }
        for (x, _) in TRIGAMMA.iter().filter(|(x, _)| x.abs() < 1000.0) {
            let step = 1e-4 * x.abs().min(1.0);
            let slope = (trigamma(x + step) - trigamma(x - step)) / (2.0 * step);
            let got = tetragamma(*x);
            assert!((got - slope).abs() <= 1e-5 * slope.abs(), "{x}: {got:e}, not {slope:e}");
        }
        assert_eq!(tetragamma(-2.0), f64::NEG_INFINITY);
        assert_eq!(lgamma(0.0), f64::INFINITY);
        assert_eq!(lgamma(-3.0), f64::INFINITY);
        assert_eq!(lgamma(f64::NEG_INFINITY), f64::INFINITY);
        assert!(lgamma(f64::NAN).is_nan());
        assert_eq!(digamma(0.0), f64::NEG_INFINITY);
        assert!(digamma(-2.0).is_nan());
        assert_eq!(digamma(f64::INFINITY), f64::INFINITY);
    }

    const LGAMMA: &[(f64, f64)] = &[
        (0.1, 2.252712651734206),
        (0.5, 0.5723649429247001),
        (0.73, 0.22551374969268742),
        (0.999, 0.0005780385328913802),
        (1.0, 0.0),
        (1.0001, -5.771334222047127e-05),
        (1.29, -0.1064259871974564),
        (1.31, -0.10981020447383999),
        (1.7, -0.09580769740706588),
        (1.9999, -4.227520877215346e-05),
        (2.0, 0.0),
        (2.25, 0.1248717148923966),
        (2.31, 0.16021693273922022),
        (3.5, 1.2009736023470743),
        (7.3, 7.147892523022248),
        (11.9, 17.25847745059552),
        (25.5, 56.389167643719944),
        (1000.25, 5906.9472682711175),
        (10000000000.0, 220258509288.81058),
        (-0.3, 1.4648400508576025),
        (-1.5, 0.860047015376481),
        (-4.7, -2.9273024136818373),
    ];

    const DIGAMMA: &[(f64, f64)] = &[
        (0.1, -10.423754940411076),
        (0.5, -1.9635100260214235),
        (1.0, -0.5772156649015329),
        (2.5, 0.7031566406452432),
        (7.3, 1.9178203356379862),
        (12.0, 2.442661679975812),
        (100.5, 4.605174352581845),
        (100000000.0, 18.420680738952367),
        (-0.3, 2.113309779635399),
        (-1.25, 3.714139120213528),
        (-4.7, -0.6323109014236109),
    ];

    const TRIGAMMA: &[(f64, f64)] = &[
        (0.1, 101.43329915079275),
        (0.5, 4.934802200544679),
        (1.0, 1.6449340668482264),
        (2.5, 0.49035775610023485),
        (7.3, 0.1467957681314271),
        (12.0, 0.08690187287176838),
        (100.5, 0.009999916669583104),
        (100000000.0, 1.000000005e-08),
        (-0.3, 13.945160267805722),
        (-1.25, 19.181879647671607),
        (-4.7, 14.887691216772538),
    ];
}
