//! Methods that are made of several ops, on halves of every magnitude: as exact as a computation in f32 that is
//! rounded once. (Rows are swept by `crates/dynamo/tests/sweep`.)

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_tensor::{Attention, BatchNorm, CrossEntropy, DType, Device, Reduction, Result, Tensor};

type Method = fn(&[Tensor]) -> Result<Tensor>;

/// Name, shapes of the operands, and the method.
const METHODS: &[(&str, &[&[usize]], Method)] = &[
    ("mse_loss", &[&[4, 5], &[4, 5]], |x| x[0].mse_loss(&x[1], Reduction::Mean)),
    ("l1_loss", &[&[4, 5], &[4, 5]], |x| x[0].l1_loss(&x[1], Reduction::Mean)),
    ("smooth_l1_loss", &[&[4, 5], &[4, 5]], |x| x[0].smooth_l1_loss(&x[1], 0.7, Reduction::None)),
    ("huber_loss", &[&[4, 5], &[4, 5]], |x| x[0].huber_loss(&x[1], 0.7, Reduction::Mean)),
    ("binary_cross_entropy", &[&[4, 5], &[4, 5]], |x| {
        x[0].clamp(0.25, 0.75)?.binary_cross_entropy(&x[1].clamp(0.25, 0.5)?, None, Reduction::Mean)
    }),
    ("kl_div", &[&[4, 5], &[4, 5]], |x| x[0].kl_div(&x[1].abs()?, false, Reduction::Mean)),
    ("cosine_similarity", &[&[4, 6], &[4, 6]], |x| x[0].cosine_similarity(&x[1], 1, 1e-8)),
    ("attention", &[&[2, 3, 8], &[2, 5, 8], &[2, 5, 4]], |x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], Attention::default())
    }),
    ("causal attention", &[&[2, 5, 8], &[2, 5, 8], &[2, 5, 4]], |x| {
        x[0].scaled_dot_product_attention(&x[1], &x[2], Attention { causal: true, ..Attention::default() })
    }),
    ("glu", &[&[4, 6]], |x| x[0].glu(1)),
    ("batch_norm", &[&[4, 3, 2], &[3], &[3], &[3], &[3]], |x| {
        let variance = x[2].abs()?.add(0.1)?;
        let running = Some((&x[1], &variance));
        x[0].batch_norm(BatchNorm { running, weight: Some(&x[3]), bias: Some(&x[4]), ..BatchNorm::default() })
    }),
    ("cross_entropy", &[&[4, 5], &[4, 5], &[5]], |x| {
        let target = x[1].softmax(1)?;
        let weight = x[2].abs()?;
        x[0].cross_entropy_of(&target, CrossEntropy { weight: Some(&weight), ..CrossEntropy::default() })
    }),
    ("linear", &[&[2, 3, 7], &[5, 7], &[5]], |x| x[0].linear(&x[1], Some(&x[2]))),
    ("addmm", &[&[3, 5], &[3, 7], &[7, 5]], |x| x[0].addmm(&x[1], &x[2])),
    ("bmm of turned matrices", &[&[2, 7, 3], &[2, 5, 7]], |x| {
        x[0].transpose(1, 2)?.bmm(&x[1].transpose(1, 2)?)
    }),
    ("baddbmm", &[&[2, 3, 4], &[2, 3, 5], &[2, 5, 4]], |x| x[0].baddbmm_scaled(&x[1], &x[2], 0.2, 0.6)),
    ("round", &[&[40]], |x| x[0].round_decimals(2)),
    ("round to thousands", &[&[40]], |x| x[0].round_decimals(-3)),
];

fn operand(shape: &[usize], salt: usize, (factor, offset): (f64, f64), dtype: DType) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let value = |i: usize| factor * ((i * 37 + salt * 11) as f64 * 0.61).sin() * 2.0 + offset;
    Tensor::from_vec((0..n).map(value).collect::<Vec<f64>>(), shape)?.to_dtype(dtype)
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap()
}

#[test]
fn composed_methods_are_rounded_once() {
    let mut failures = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        let (digits, most) = if dtype == DType::F16 { (11, 65504.0) } else { (8, 3.38e38) };
        for magnitude in
            [(1e-4, 0.0), (0.05, 0.0), (1.0, 0.0), (40.0, 0.0), (3e3, 0.0), (2e4, 0.0), (1.0, 100.0)]
        {
            for (name, shapes, method) in METHODS {
                let half: Vec<Tensor> =
                    (0..).zip(*shapes).map(|(i, s)| operand(s, i, magnitude, dtype).unwrap()).collect();
                let wide = |to| half.iter().map(|x| x.to_dtype(to).unwrap()).collect::<Vec<_>>();
                let [got, single, exact] =
                    [half.clone(), wide(DType::F32), wide(DType::F64)].map(|x| method(&x).unwrap());
                assert_eq!(got.dtype(), dtype, "{name}");
                let (got, single, exact) = (values(&got), values(&single), values(&exact));
                let lost = single.iter().zip(&exact).fold(0f64, |a, (s, e)| a.max((s - e).abs()));
                for ((got, single), exact) in got.iter().zip(&single).zip(&exact) {
                    // Operands that the method itself computes (a sigmoid, a softmax) are halves.
                    let allowed = 2.0 * lost + 6.0 * (exact.abs() * 2f64.powi(-digits)).max(2f64.powi(-24));
                    let right = (got - exact).abs() <= allowed;
                    if single.is_finite() && exact.abs() < most && !right {
                        failures.push(format!(
                            "{name} in {dtype} at {magnitude:?}: {got:e} instead of {exact:e}"
                        ));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn norms_and_fillings_at_the_ends_of_halves() {
    let half = |values: Vec<f64>| Tensor::from_vec(values, [2]).unwrap().to_dtype(DType::F16).unwrap();
    let x = half(vec![300.0, 400.0]);
    assert_eq!(values(&x.norm(2).unwrap()), [500.0]);
    assert_eq!(values(&x.var().unwrap()), [5000.0]);
    let infinite = half(vec![f64::INFINITY, f64::NEG_INFINITY]);
    assert_eq!(values(&infinite.nan_to_num(None, None, None).unwrap()), [65504.0, -65504.0]);
    infinite.nan_to_num_(None, None, None).unwrap();
    assert_eq!(values(&infinite), [65504.0, -65504.0]);
    let large = Tensor::new(&[1e25f32, 2e25], &Device::Cpu).unwrap();
    let std = large.std().unwrap().item::<f32>().unwrap();
    assert!((f64::from(std) / (0.5e50f64).sqrt() - 1.0).abs() < 1e-6, "{std}");
}

#[test]
fn errors_of_composed_methods_name_the_users_line() {
    let (x, y) = (Tensor::zeros([2, 3], &Device::Cpu).unwrap(), Tensor::zeros([4], &Device::Cpu).unwrap());
    let line = line!() + 1;
    let error = x.mse_loss(&y, Reduction::Mean).unwrap_err().to_string();
    assert!(error.contains(&format!("halves.rs:{line}")), "{error}");
}
