//! Convolutions in compiled programs: what runs on their results as they are finished, and what is kept of their
//! kernels.

use kiln_dynamo::{Compile, Region};
use kiln_ir::{DType, Result};
use kiln_tensor::Tensor;

/// Waves of some shape.
fn waves(shape: &[usize], seed: f64, dtype: DType) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let data = (0..count).map(|i| (i as f64 * seed).sin()).collect::<Vec<f64>>();
    Tensor::from_vec(data, shape.to_vec())?.to_dtype(dtype)
}

fn numbers(t: &Tensor) -> Result<Vec<f64>> {
    t.to_dtype(DType::F64)?.to_vec()
}

/// Batch, channels, filters, size, kernel, stride, padding, groups.
const CASES: [(usize, usize, usize, [usize; 2], usize, usize, usize, usize); 9] = [
    // With fewer multiplications: blocks that end inside of images, odd sizes.
    (1, 32, 40, [56, 56], 3, 1, 1, 1),
    (3, 24, 24, [23, 31], 3, 1, 1, 1),
    // Directly: positions or filters packed, several images a block.
    (1, 3, 64, [40, 40], 7, 2, 3, 1),
    (5, 16, 33, [9, 7], 3, 2, 1, 1),
    (2, 8, 300, [5, 5], 1, 1, 0, 1),
    (2, 12, 18, [20, 11], 3, 1, 0, 3),
    // A plane at a time.
    (2, 10, 20, [17, 13], 3, 1, 1, 10),
    // Planes of one pixel.
    (4, 6, 5, [3, 3], 3, 1, 0, 1),
    // Planes of more pixels than an item of a kernel has.
    (1, 2, 3, [150, 140], 3, 1, 1, 1),
];

#[test]
fn epilogues_change_no_bit() -> Result<()> {
    for (batch, channels, filters, [height, width], size, stride, padding, groups) in CASES {
        for dtype in [DType::F32, DType::F64] {
            let x = waves(&[batch, channels, height, width], 0.37, dtype)?;
            let w = waves(&[filters, channels / groups, size, size], 0.73, dtype)?;
            let v = waves(&[filters, channels / groups, size, size], 0.71, dtype)?;
            let bias = waves(&[filters], 0.11, dtype)?;
            let (scale, shift) =
                (waves(&[filters, 1, 1], 0.13, dtype)?, waves(&[filters, 1, 1], 0.17, dtype)?);
            let convolve = |w: &Tensor, bias: Option<&Tensor>| {
                x.conv2d(w, bias, [stride; 2], [padding; 2], [1, 1], groups)
            };
            let other = convolve(&v, None)?;
            let turned = waves(&[other.shape()[3], batch, filters, other.shape()[2]], 0.3, dtype)?;
            let turned = turned.permute([1, 2, 3, 0])?;
            let layers = || -> Result<Vec<Tensor>> {
                let plain = convolve(&w, Some(&bias))?.relu()?;
                let normalised = convolve(&v, None)?.mul(&scale)?.add(&shift)?;
                // In one loop; beside the result itself; beside what lies in another order.
                let residual = convolve(&w, None)?.add(&other)?.relu()?;
                let product = convolve(&v, None)?;
                let both = product.sub(&other)?.abs()?;
                let crossed = convolve(&w, None)?.mul(&turned)?.add(&bias.reshape([filters, 1, 1])?)?;
                Ok(vec![plain, normalised.relu()?, residual, product, both, crossed])
            };
            let want = layers()?.iter().map(numbers).collect::<Result<Vec<_>>>()?;
            for mode in ["mode=default", "mode=reduce-overhead"] {
                let region = mode.parse::<Compile>()?.region();
                for _ in 0..3 {
                    let got = region.run(layers)?.iter().map(numbers).collect::<Result<Vec<_>>>()?;
                    for (which, (got, want)) in got.iter().zip(&want).enumerate() {
                        let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
                        assert!(
                            got.len() == want.len() && got.iter().zip(want).all(same),
                            "{channels} to {filters}, {size} x {size}, {dtype}: {which}\n{}",
                            region.explain()
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_epilogue_is_named() -> Result<()> {
    let (x, w) = (waves(&[1, 32, 30, 30], 0.3, DType::F32)?, waves(&[32, 32, 3, 3], 0.7, DType::F32)?);
    let bias = waves(&[32], 0.1, DType::F32)?;
    let region = Compile::default().region();
    for _ in 0..2 {
        region.run(|| x.conv2d(&w, Some(&bias), 1, 1, 1, 1)?.relu())?;
    }
    if kiln_runtime::Compiler::find().is_ok() {
        let told = region.explain().to_string();
        assert!(told.contains("convolution (") && told.contains("with the previous step"), "{told}");
    }
    Ok(())
}

/// Kernels that stay the same are transformed once; whatever changes them is seen.
#[test]
fn kept_kernels_follow_every_change() -> Result<()> {
    let x = waves(&[1, 32, 14, 14], 0.37, DType::F32)?;
    let fresh = |seed: f64| waves(&[32, 32, 3, 3], seed, DType::F32);
    let w = fresh(0.73)?;
    let region = Compile::default().region();
    let layer = |w: &Tensor| x.conv2d(w, None, 1, 1, 1, 1)?.relu();
    let check = |w: &Tensor, what: &str| -> Result<()> {
        // The kernels are the same for the second time, and kept for the third.
        let want = numbers(&layer(w)?)?;
        let mut first = None;
        for call in 0..4 {
            let got = numbers(&region.run(|| layer(w))?)?;
            let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-4, "{what}, call {call}: {far}\n{}", region.explain());
            let first = first.get_or_insert_with(|| got.clone());
            assert_eq!(*first, got, "{what}: kept or not, the bits are the same");
        }
        Ok(())
    };
    check(&w, "new")?;
    w.mul_(0.5)?;
    check(&w, "changed in place")?;
    w.narrow(0, 3, 5)?.add_(1.0)?;
    check(&w, "changed through a view")?;
    w.copy_(&fresh(0.9)?)?;
    check(&w, "copied into")?;
    kiln_tensor::foreach::mul_(&[w.clone()].into_iter().collect(), 0.7)?;
    check(&w, "changed in a list")?;
    let change = Compile::default().region();
    for _ in 0..3 {
        change.run(|| w.sub_(&w.sin()?.mul(0.1)?).map(|_| ()))?;
        check(&w, "changed by a compiled program")?;
    }
    let both = Compile::default().region();
    for _ in 0..3 {
        let before = numbers(&layer(&w)?)?;
        let got = both.run(|| {
            let y = layer(&w)?;
            w.mul_(0.9)?;
            Ok(y)
        })?;
        let far = numbers(&got)?.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-4, "changed by the program itself: {far}");
    }
    check(&w, "changed by the program that reads it")?;
    drop(w);
    // Parts of one tensor: the same memory, unchanged.
    let all = waves(&[3, 32, 32, 3, 3], 0.83, DType::F32)?;
    for _ in 0..3 {
        for part in 0..3 {
            let w = all.select(0, part)?;
            let (got, want) = (numbers(&region.run(|| layer(&w))?)?, numbers(&layer(&w)?)?);
            let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-4, "part {part}: {far}");
        }
        check(&all.select(0, 1)?, "a part")?;
    }
    // Others come to lie where they were.
    for seed in 0..20 {
        check(&fresh(0.1 + f64::from(seed) * 0.01)?, "others")?;
    }
    Ok(())
}

/// Planes of halves are widened where they are read: forwards with epilogues and backwards, of inputs that lie in order or
/// don't, results are as exact as eager's.
#[test]
fn planes_of_halves() -> Result<()> {
    for (batch, channels, filters, [height, width], size, stride, padding, groups) in [
        (2, 10, 20, [17, 13], 3, 1, 1, 10),
        (3, 16, 16, [40, 31], 5, 2, 2, 16),
        (2, 12, 18, [20, 11], 3, 1, 0, 3),
    ] {
        for (half, is_turned) in [(DType::BF16, false), (DType::F16, false), (DType::BF16, true)] {
            let run = |dtype: DType, region: Option<&Region>| -> Result<Vec<Vec<f64>>> {
                let leaf = |shape: &[usize], seed: f64| -> Result<Tensor> {
                    let leaf = waves(shape, seed, DType::F16)?.to_dtype(DType::BF16)?.to_dtype(dtype)?;
                    leaf.requires_grad_(true)?;
                    Ok(leaf)
                };
                let x = leaf(&[batch, channels, width, height], 0.37)?;
                let w = leaf(&[filters, channels / groups, size, size], 0.73)?;
                let bias = leaf(&[filters], 0.11)?;
                let step = || {
                    [&x, &w, &bias].into_iter().for_each(|leaf| leaf.set_grad(None));
                    let shape = [batch, channels, height, width];
                    let x = if is_turned { x.transpose(2, 3)? } else { x.reshape(shape)? };
                    let y = x.conv2d(&w, Some(&bias), [stride; 2], [padding; 2], [1, 1], groups)?.relu()?;
                    y.mul(&y)?.mean()?.backward()?;
                    y.detach()
                };
                let y = match region {
                    Some(region) => region.run(step)?,
                    None => step()?,
                };
                let grads = [&x, &w, &bias].map(|leaf| leaf.grad().expect("it was asked for"));
                std::iter::once(&y).chain(&grads).map(numbers).collect()
            };
            let region = Compile::default().region();
            let [exact, eager, compiled] =
                [run(DType::F64, None)?, run(half, None)?, run(half, Some(&region))?];
            let worst = |results: &[f64], exact: &[f64]| {
                results.iter().zip(exact).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
            };
            for (which, exact) in exact.iter().enumerate() {
                let largest = exact.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
                let [eager, compiled] = [&eager, &compiled].map(|results| worst(&results[which], exact));
                let what =
                    format!("{half} {groups} {is_turned}, {which}: {compiled}, eager {eager} of {largest}");
                assert!(largest > 0.0 && eager < 0.03 * largest, "{what}");
                assert!(compiled <= 2.0 * eager + 1e-7 * largest, "{what}");
            }
        }
    }
    Ok(())
}
