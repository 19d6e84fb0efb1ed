//! Matrix products in compiled programs: what is kept of operands that stay the same.

use kiln_dynamo::{Compile, Region};
use kiln_ir::{DType, Result};
use kiln_runtime::kept;
use kiln_tensor::Tensor;

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
