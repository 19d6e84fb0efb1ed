//! What the op table's sweeps don't see: functions made of several rows, their options and their errors.
//! Numbers are PyTorch's.

#![allow(clippy::unwrap_used)] // a test may panic

use kiln_tensor::{
    Attention, BatchNorm, CrossEntropy, DType, Device, GradOptions, Interpolation, Padding, Pool, Reduction,
    Result, Shape, Tensor, grad, manual_seed,
};

fn from(shape: impl Into<Shape>, f: impl Fn(f64) -> f64) -> Tensor {
    let shape = shape.into();
    Tensor::from_vec((0..shape.numel()).map(|i| f(i as f64)).collect::<Vec<f64>>(), shape).unwrap()
}

fn close(got: Result<Tensor>, want: &[f64]) {
    let got = got.unwrap().contiguous().unwrap().to_vec_cast::<f64>().unwrap();
    assert_eq!(got.len(), want.len());
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= 1e-12 * w.abs().max(1.0), "{got:?} instead of {want:?}");
    }
}

fn scores() -> Tensor {
    from([3, 4], |i| (i * 0.7).sin())
}

#[test]
fn classification_losses() -> Result<()> {
    let (x, t) = (scores(), Tensor::from_vec(vec![2i64, 0, 3], [3])?);
    let w = Tensor::from_vec(vec![0.5, 1.0, 2.0, 0.25], [4])?;
    let weighted = CrossEntropy { weight: Some(&w), ..Default::default() };
    let options = CrossEntropy { ignore_index: 0, label_smoothing: 0.1, ..weighted };
    close(x.cross_entropy_of(&t, options), &[1.0703723671088412]);
    let options = CrossEntropy { label_smoothing: 0.2, reduction: Reduction::Sum, ..Default::default() };
    close(x.cross_entropy_of(&t, options), &[3.0257837223680406]);
    close(x.cross_entropy_of(&x.mul(2.0)?.softmax(1)?, weighted), &[1.0469204565994439]);
    close(x.nll_loss_with(&t, weighted), &[-0.8674311249178629]);
    // Classes along dim 1 of any number of dims are the same samples.
    let deep = x.unsqueeze(2)?.expand([3, 4, 1])?;
    close(deep.nll_loss_with(&t.unsqueeze(1)?, weighted), &[-0.8674311249178629]);
    let bad = Tensor::from_vec(vec![2i64, 0, 4], [3])?;
    assert!(x.nll_loss_with(&bad, weighted).is_err() && x.nll_loss_with(&x, weighted).is_err());
    Ok(())
}

#[test]
fn other_losses() -> Result<()> {
    let (x, w) = (scores(), Tensor::from_vec(vec![0.5, 1.0, 2.0, 0.25], [4])?);
    let mean = Reduction::Mean;
    let target = x.sigmoid()?;
    close(x.mul(30.0)?.binary_cross_entropy_with_logits(&target, None, Some(&w), mean), &[5.63693186321597]);
    close(x.kl_div(&x.softmax(1)?, false, Reduction::Sum), &[-4.955356384410694]);
    let turned = Tensor::cat([&x.narrow(0, 2, 1)?, &x.narrow(0, 1, 1)?, &x.narrow(0, 0, 1)?], 0)?;
    close(x.huber_loss(&turned, 0.6, mean), &[0.0761589380544341]);
    close(x.smooth_l1_loss(&turned, 0.6, mean), &[0.12693156342405684]);
    // Far from zero the loss is tiny, not zero.
    let far = Tensor::from_vec(vec![50.0f32], [1])?;
    let loss = far.binary_cross_entropy_with_logits(&far.ones_like()?, None, None, mean)?;
    assert!((loss.item::<f32>()? / (-50f32).exp() - 1.0).abs() < 1e-5);
    Ok(())
}

#[test]
fn attention() -> Result<()> {
    let q = from([1, 2, 3, 4], |i| (i * 0.3).cos());
    let rows: Vec<Tensor> = [2, 1, 0].iter().map(|&i| q.narrow(2, i, 1)).collect::<Result<_>>()?;
    let (k, v) = (q.mul(2.0)?, Tensor::cat(&rows, 2)?);
    let total = |y: Result<Tensor>| y?.sum_dim([0, 1, 3], false);
    let causal = Attention { causal: true, ..Default::default() };
    let want = [0.10704849105005154, 0.5906954741001011, 1.5273558451785483];
    close(total(q.scaled_dot_product_attention(&k, &v, causal)), &want);
    // A query that sees nothing gets zeros, and no NaN in the gradient.
    let mask = Tensor::from_vec(vec![true, false, true, false, false, false, true, true, true], [3, 3])?;
    q.requires_grad_(true)?;
    let masked = Attention { mask: Some(&mask), ..Default::default() };
    let y = total(q.scaled_dot_product_attention(&k, &v, masked));
    y.as_ref().unwrap().sum()?.backward()?;
    close(y?.detach(), &[-0.0030176550216007847, 0.0, 1.5273558451785483]);
    assert!(q.grad().unwrap().to_vec_cast::<f64>()?.iter().all(|g| g.is_finite()));
    Ok(())
}

#[test]
fn images() -> Result<()> {
    let x = from([1, 1, 4, 4], |i| i);
    let filter = Tensor::from_vec(vec![1.0, 2.0, 3.0, -1.0], [1, 1, 2, 2])?;
    let same = [9., 14., 19., 24., 29., 34., 39., 40., 49., 54., 59., 56., 38., 41., 44., 15.];
    close(x.conv2d(&filter, None, 1, Padding::Same, 1, 1), &same);
    assert!(x.conv2d(&filter, None, 2, Padding::Same, 1, 1).is_err());
    assert!(x.conv2d(&filter, None, 1, 0, 5, 1).is_err(), "a kernel that does not fit");
    assert!(x.conv2d(&filter, None, 1, 0, 1, 2).is_err(), "groups that don't divide");
    assert!(x.conv2d(&filter, None, 0, 0, 1, 1).is_err(), "no stride");
    let small = [7. / 6., 19. / 6., 6.5, 8.5, 71. / 6., 83. / 6.];
    close(x.interpolate([3, 2], Interpolation::Bilinear { align_corners: false }), &small);
    let picked: Vec<f64> =
        [0, 0, 1, 2, 3].iter().flat_map(|r| [0, 0, 1, 2, 3].map(|c| f64::from(r * 4 + c))).collect();
    close(x.interpolate(1.3, Interpolation::Nearest), &picked);
    let (values, places) = x.max_pool2d_with_indices(Pool::new(3).stride(2).padding(1))?;
    assert_eq!(places.to_vec::<i64>()?, [5, 7, 13, 15]);
    close(Ok(values), &[5.0, 7.0, 13.0, 15.0]);
    let pool = Pool::new(3).stride(2).padding(1).ceil_mode(true).count_include_pad(false);
    close(x.avg_pool2d(pool), &[2.5, 4.0, 5.0, 8.5, 10.0, 11.0, 12.5, 14.0, 15.0]);
    assert!(x.avg_pool2d(Pool::new(3).padding(2)).is_err());
    Ok(())
}

#[test]
fn running_statistics_move() -> Result<()> {
    let x = from([2, 2, 2], |i| i * i);
    let (mean, variance) =
        (Tensor::zeros([2], &Device::Cpu)?.to_dtype(DType::F64)?, Tensor::ones([2], &Device::Cpu)?);
    let variance = variance.to_dtype(DType::F64)?;
    let options =
        BatchNorm { running: Some((&mean, &variance)), training: true, momentum: 0.5, ..Default::default() };
    let y = x.batch_norm(options)?;
    // Channel 0 is 0, 1, 16, 25; channel 1 is 4, 9, 36, 49.
    close(Ok(mean.clone()), &[10.5 / 2.0, 24.5 / 2.0]);
    close(Ok(variance.clone()), &[0.5 + 0.5 * 441.0 / 3.0, 0.5 + 0.5 * 1393.0 / 3.0]);
    close(y.sum_dim([0, 2], false), &[0.0, 0.0]);
    let calm = BatchNorm { training: false, ..options };
    let want: Vec<f64> = (0..8)
        .map(|i| {
            let (m, v) = if i / 2 % 2 == 0 { (5.25, 74.0) } else { (12.25, 0.5 + 0.5 * 1393.0 / 3.0) };
            (f64::from(i * i) - m) / (v + 1e-5f64).sqrt()
        })
        .collect();
    close(x.batch_norm(calm), &want);
    assert!(from([1, 2], |i| i).batch_norm(options).is_err(), "one value a channel");
    Ok(())
}

#[test]
fn dropout_keeps_the_mean() -> Result<()> {
    manual_seed(3);
    let x = Tensor::ones([100, 100], &Device::Cpu)?;
    let y = x.dropout(0.25, true)?;
    let zeros = y.to_vec::<f32>()?.iter().filter(|y| **y == 0.0).count();
    assert!((2300..2700).contains(&zeros), "{zeros} of 10000");
    assert!(y.to_vec::<f32>()?.iter().all(|y| *y == 0.0 || (*y - 4.0 / 3.0).abs() < 1e-6));
    manual_seed(3);
    assert_eq!(x.dropout(0.25, true)?.to_vec::<f32>()?, y.to_vec::<f32>()?);
    assert_eq!(x.dropout(0.25, false)?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    assert_eq!(x.dropout(1.0, true)?.sum()?.item::<f32>()?, 0.0);
    assert!(x.dropout(1.5, true).is_err());
    Ok(())
}

#[test]
fn einsum_equations() -> Result<()> {
    let (a, b) = (from([2, 3], |i| i), from([3, 2], |i| i - 2.0));
    close(Tensor::einsum("ij,jk->ik", &[&a, &b]), &a.mm(&b)?.to_vec_cast::<f64>()?);
    close(Tensor::einsum("ij,jk", &[&a, &b]), &a.mm(&b)?.to_vec_cast::<f64>()?);
    close(Tensor::einsum("ij,ji->", &[&a, &b]), &[a.mul(&b.t()?)?.sum()?.item::<f64>()?]);
    close(Tensor::einsum("ij->j", &[&a]), &[3.0, 5.0, 7.0]);
    close(Tensor::einsum("ba", &[&a]), &a.t()?.contiguous()?.to_vec_cast::<f64>()?);
    close(Tensor::einsum("...j,j...->...", &[&a, &b]), &[4.0, 16.0]);
    close(Tensor::einsum("ii->i", &[&a.mm(&b)?]), &[4.0, 16.0]);
    for bad in ["ij,jk", "ij->k", "ij->ii", "i", "i1", "ijk"] {
        assert!(Tensor::einsum(bad, &[&a]).is_err(), "{bad}");
    }
    assert!(Tensor::einsum("ij,jk->ik", &[&a, &a]).is_err(), "sizes that differ");
    Ok(())
}

/// Batch norm of few pixels goes row by row, with a lane for each element: the same as of transposed memory, group by group.
#[test]
fn batch_norm_of_few_pixels() -> Result<()> {
    manual_seed(3);
    for (batch, channels, pixels) in
        [(3, 3, 1), (5, 1, 1), (300, 7, 1), (700, 130, 1), (9, 70, 3), (33, 5, 15), (2, 9, 16)]
    {
        for dtype in [DType::F32, DType::F64] {
            let shape = [batch, channels, pixels];
            let x = (Tensor::randn(shape, &Device::Cpu)? * 3.0 + 5.0).ok()?.to_dtype(dtype)?;
            let (g, weight) = (Tensor::randn(shape, dtype)?, Tensor::randn([channels], dtype)?);
            let bias = Tensor::randn([channels], dtype)?;
            let results = |x: &Tensor, wide: bool| -> Result<Vec<Vec<f64>>> {
                // As one long row for each channel, or as it is.
                let flat = |t: &Tensor| t.permute([1, 0, 2])?.reshape([channels, batch * pixels]);
                let own = x.detach()?;
                own.requires_grad_(true)?;
                let (weight, bias, g) = if wide {
                    (weight.to_dtype(DType::F64)?, bias.to_dtype(DType::F64)?, g.to_dtype(DType::F64)?)
                } else {
                    (weight.clone(), bias.clone(), g.clone())
                };
                let y = if wide {
                    let rows = flat(&own)?;
                    let mean = rows.mean_dim(1, true)?;
                    let apart = (&rows - &mean).ok()?;
                    let variance = apart.square()?.mean_dim(1, true)?;
                    let unit = (&apart / (variance + 1e-5).sqrt()).ok()?;
                    let y = (unit * weight.reshape([channels, 1])? + bias.reshape([channels, 1])?).ok()?;
                    y.reshape([channels, batch, pixels])?.permute([1, 0, 2])?
                } else {
                    own.batch_norm(BatchNorm {
                        weight: Some(&weight),
                        bias: Some(&bias),
                        training: true,
                        ..BatchNorm::default()
                    })?
                };
                y.mul(&g)?.sum()?.backward()?;
                let gradient = own.grad().expect("a leaf");
                Ok(vec![y.to_vec_cast::<f64>()?, gradient.to_vec_cast::<f64>()?])
            };
            let (got, want) = (results(&x, false)?, results(&x.to_dtype(DType::F64)?, true)?);
            let tolerance = if dtype == DType::F64 { 1e-9 } else { 2e-4 };
            for (a, b) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{a} for {b}: {shape:?} {dtype}");
            }
        }
    }
    Ok(())
}

/// Groups are rows to be normalised, and numbers of channels scale and shift them, wherever channels end.
#[test]
fn group_norm_is_layer_norm_of_groups() -> Result<()> {
    for (shape, groups) in [
        (vec![3, 6], 2),
        (vec![3, 6], 6),
        (vec![2, 6, 1], 3),
        (vec![2, 4, 5], 1),
        (vec![2, 4, 5], 4),
        (vec![3, 8, 7, 9], 2),
        (vec![0, 4, 3], 2),
        (vec![2, 4, 0], 2),
    ] {
        let channels = shape[1];
        for numbers in 0..3 {
            for turned in [false, true] {
                let mut leaves = vec![from(shape.clone(), |i| (i * 0.7).sin() * 3.0 + 5.0)];
                if turned {
                    leaves[0] = leaves[0].transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
                }
                leaves.extend((0..numbers).map(|k| from([channels], move |i| 0.5 + i * (k as f64 - 0.7))));
                leaves.iter().try_for_each(|leaf| leaf.requires_grad_(true).map(drop))?;
                let (x, weight, bias) = (&leaves[0], leaves.get(1), leaves.get(2));
                let by_kernel = x.group_norm(groups, weight, bias, 1e-3)?;
                let length = shape[1..].iter().product::<usize>() / groups;
                let rows = x.reshape([shape[0] * groups, length])?;
                let mut by_rows = rows.layer_norm(&[length], None, None, 1e-3)?.reshape(shape.clone())?;
                let spread: Vec<usize> =
                    (1..shape.len()).map(|d| if d == 1 { channels } else { 1 }).collect();
                if let Some(weight) = weight {
                    by_rows = by_rows.mul(&weight.reshape(spread.clone())?)?;
                }
                if let Some(bias) = bias {
                    by_rows = by_rows.add(&bias.reshape(spread)?)?;
                }
                close(Ok(by_kernel.detach()?), &by_rows.detach()?.to_vec_cast::<f64>()?);
                let weights = from(shape.clone(), |i| (i * 1.3).cos());
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                let gradients = |y: &Tensor| grad(&[y], &inputs, &[Some(&weights)], GradOptions::default());
                for (got, want) in gradients(&by_kernel)?.into_iter().zip(gradients(&by_rows)?) {
                    close(Ok(got.unwrap()), &want.unwrap().contiguous()?.to_vec_cast::<f64>()?);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn ranges_of_every_dtype() -> Result<()> {
    use DType::{BF16, F16, F32, F64, I8, I16, I32, I64, U8};
    for dtype in [F64, F32, F16, BF16, I64, I32, I16, I8, U8] {
        for len in [0, 1, 17, 40_000] {
            let (range, integers) = (Tensor::arange(-3, len - 3, dtype)?, Tensor::arange(-3, len - 3, I64)?);
            let want = integers.to_dtype(dtype)?.to_vec_cast::<f64>()?;
            assert_eq!(range.to_vec_cast::<f64>()?, want, "{len} of {dtype}");
        }
    }
    let steps = Tensor::arange_step(0.5, 9000.0, 0.1, F32)?.to_vec_cast::<f64>()?;
    assert!(steps.iter().zip(0..).all(|(&x, i)| x == f64::from((0.5 + f64::from(i) * 0.1) as f32)));
    Ok(())
}
