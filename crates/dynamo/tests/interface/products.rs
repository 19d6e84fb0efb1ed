//! Matrix products in compiled programs: what is kept of operands that stay the same.

use kiln_dynamo::{Compile, Region};
use kiln_ir::{DType, Result};
use kiln_runtime::kept;
use kiln_tensor::{Attention, Tensor};

fn waves(shape: &[usize], seed: f64, dtype: DType) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let data = (0..count).map(|i| (i as f64 * seed).sin()).collect::<Vec<f64>>();
    Tensor::from_vec(data, shape.to_vec())?.to_dtype(dtype)
}

fn bits(t: &Tensor) -> Result<Vec<u64>> {
    let numbers: Vec<f64> = t.to_dtype(DType::F64)?.to_vec()?;
    Ok(numbers.into_iter().map(f64::to_bits).collect())
}

/// Four calls: the operand is the same for the second time, and kept for the third.
fn check(region: &Region, what: &str, program: impl Fn() -> Result<Tensor>) -> Result<()> {
    let want = bits(&program()?)?;
    for call in 0..4 {
        let got = bits(&region.run(&program)?)?;
        assert!(got == want, "{what}, call {call}\n{}", region.explain());
    }
    Ok(())
}

#[test]
fn kept_weights_change_no_bit() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        for (rows, from, to) in [(16, 64, 64), (17, 1100, 40), (32, 200, 1041), (96, 33, 65), (97, 64, 64)] {
            let x = waves(&[rows, from], 0.37, dtype)?;
            let (w, bias) = (waves(&[to, from], 0.73, dtype)?, waves(&[to], 0.11, dtype)?);
            for mode in ["mode=default", "mode=reduce-overhead", "options.keep_weights=false"] {
                let region = mode.parse::<Compile>()?.region();
                let layer = || x.matmul(&w.t()?)?.add(&bias);
                check(&region, &format!("{rows} x {from} x {to} {dtype}"), layer)?;
            }
        }
    }
    Ok(())
}

/// Layers whose rows go through all of them band by band.
#[test]
fn kept_weights_of_several_layers() -> Result<()> {
    let x = waves(&[96, 256], 0.37, DType::F32)?;
    let weights = (0..3).map(|i| waves(&[256, 256], 0.7 + f64::from(i) * 0.01, DType::F32));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let region = Compile::default().region();
    let layers = || {
        let mut y = x.clone();
        for w in &weights {
            y = y.matmul(&w.t()?)?.mul(0.05)?.tanh()?;
        }
        Ok(y)
    };
    check(&region, "layers", layers)?;
    if kiln_runtime::Compiler::find().is_ok() {
        assert!(kept::bytes() >= 3 * 256 * 256 * 4, "{} bytes", kept::bytes());
    }
    weights[1].mul_(0.5)?;
    check(&region, "one of them changed", layers)
}

#[test]
fn kept_weights_follow_every_change() -> Result<()> {
    let x = waves(&[40, 70], 0.37, DType::F32)?;
    let fresh = |seed: f64| waves(&[90, 70], seed, DType::F32);
    let w = fresh(0.73)?;
    let region = Compile::default().region();
    let layer = |w: &Tensor| x.matmul(&w.t()?)?.relu();
    check(&region, "new", || layer(&w))?;
    w.mul_(0.5)?;
    check(&region, "changed in place", || layer(&w))?;
    w.narrow(0, 3, 5)?.add_(1.0)?;
    check(&region, "changed through a view", || layer(&w))?;
    let change = Compile::default().region();
    for _ in 0..3 {
        change.run(|| w.sub_(&w.sin()?.mul(0.1)?).map(|_| ()))?;
        check(&region, "changed by a compiled program", || layer(&w))?;
    }
    let both = Compile::default().region();
    for _ in 0..4 {
        let before = bits(&layer(&w)?)?;
        let got = both.run(|| {
            let y = layer(&w)?;
            w.mul_(0.9)?;
            Ok(y)
        })?;
        assert!(bits(&got)? == before, "changed by the program itself");
    }
    let all = waves(&[3, 90, 70], 0.83, DType::F32)?;
    for part in [0, 1, 2, 1, 0] {
        let w = all.select(0, part)?;
        check(&region, "a part of a tensor", || layer(&w))?;
    }
    // Parts inside of the program: the step knows where they begin.
    check(&region, "two parts", || layer(&all.select(0, 1)?)?.add(&layer(&all.select(0, 2)?)?))?;
    // Others come to lie where they were.
    drop(w);
    for seed in 0..20 {
        let w = fresh(0.1 + f64::from(seed) * 0.01)?;
        check(&region, "others", || layer(&w))?;
    }
    Ok(())
}

/// The outputs and gradients of attention, of operands that lie side by side in one tensor.
fn attend(all: &Tensor, sizes: [usize; 3], causal: bool) -> Result<Vec<Tensor>> {
    let [heads, length, size] = sizes;
    all.set_grad(None);
    let parts = all.split(heads * size, 2)?;
    let split = |x: &Tensor| x.reshape([2, length, heads, size])?.transpose(1, 2);
    let (query, key, value) = (split(&parts[0])?, split(&parts[1])?, split(&parts[2])?);
    let options = Attention { causal, ..Attention::default() };
    let seen = query.scaled_dot_product_attention(&key, &value, options)?;
    let joined = seen.transpose(1, 2)?.reshape([2, length, heads * size])?;
    joined.mul(&joined)?.sum()?.backward()?;
    Ok(vec![joined.detach()?, all.grad().expect("it was asked for")])
}

/// Products of attention read halves, in bands of rows if there are enough: results and gradients are as exact as eager's.
#[test]
fn attention_of_halves() -> Result<()> {
    for (dtype, sizes, causal) in [
        (DType::BF16, [3, 333, 40], true),
        (DType::F16, [3, 333, 40], false),
        (DType::BF16, [2, 17, 5], false),
        (DType::F16, [1, 1, 1], true),
    ] {
        let [heads, length, size] = sizes;
        let run = |dtype: DType, region: Option<&Region>| -> Result<Vec<Vec<f64>>> {
            // The same numbers, halves, in every format.
            let all = waves(&[2, length, 3 * heads * size], 0.37, DType::F16)?.to_dtype(DType::BF16)?;
            let all = all.to_dtype(dtype)?;
            all.requires_grad_(true)?;
            let step = || attend(&all, sizes, causal);
            let results = match region {
                Some(region) => region.run(step)?,
                None => step()?,
            };
            results.iter().map(|t| t.to_dtype(DType::F64)?.to_vec()).collect()
        };
        let region = Compile::default().region();
        let [exact, eager, compiled] =
            [run(DType::F64, None)?, run(dtype, None)?, run(dtype, Some(&region))?];
        let worst = |results: &[f64], exact: &[f64]| {
            results.iter().zip(exact).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
        };
        for ((exact, eager), compiled) in exact.iter().zip(&eager).zip(&compiled) {
            let largest = exact.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            let (eager, compiled) = (worst(eager, exact), worst(compiled, exact));
            assert!(largest > 0.0 && eager < 0.02 * largest, "{dtype} {sizes:?}: {eager} of {largest}");
            assert!(compiled <= 2.0 * eager + 1e-7 * largest, "{dtype} {sizes:?}: {compiled}, eager {eager}");
        }
    }
    Ok(())
}
