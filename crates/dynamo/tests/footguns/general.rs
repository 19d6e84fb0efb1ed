//! One graph for many sizes: what a template gives is what eager gives, whatever the sizes do.

use kiln_dynamo::{Compile, Explanation, Region, SizesInfo};
use kiln_tensor::{Device, Interpolation, Result, Tensor, no_grad};

use crate::lab::{assert_close, data, matrix};

/// Runs a function of data of these shapes compiled and eagerly.
#[track_caller]
fn check(region: &Region, shapes: &[&[usize]], f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
    for shape in shapes {
        let x = data(shape)?;
        let (want, got) = (f(&x)?, region.run(|| f(&x))?);
        assert_close(&got, &want, &format!("{shape:?}"))?;
    }
    Ok(())
}

fn first(explanation: &Explanation) -> SizesInfo {
    explanation.graphs[0].sizes.clone().unwrap_or_default()
}

/// Attention of a sequence to itself, with everything that sizes come into.
fn attention(x: &Tensor) -> Result<Tensor> {
    let (batch, length, width) = (x.size(0)?, x.size(1)?, x.size(2)?);
    let heads = |x: &Tensor| x.reshape([batch, length, 2, width / 2])?.transpose(1, 2);
    let (q, k, v) = (heads(x)?, heads(&x.tanh()?)?, heads(&x.neg()?)?);
    let scores = q.matmul(&k.transpose(2, 3)?)?.mul(0.25)?;
    let places = Tensor::arange(0, length as i64, &Device::Cpu)?;
    let seen = places.reshape([length, 1])?.ge(&places)?;
    let scores = seen.where_self(&scores, &Tensor::full((), f64::NEG_INFINITY, &Device::Cpu)?)?;
    let mixed = scores.softmax(3)?.matmul(&v)?.transpose(1, 2)?.reshape([batch, length, width])?;
    let last = mixed.narrow(1, length - 1, 1)?.expand([batch, length, width])?;
    (&mixed + &last).ok()?.layer_norm(&[width], None, None, 1e-5)
}

#[test]
fn a_sequence_that_grows() -> Result<()> {
    let region = Compile::new().region();
    let shapes: Vec<[usize; 3]> = (4..150).map(|length| [2, length, 8]).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    check(&region, &shapes, attention)?;
    let explanation = region.explain();
    let sizes = first(&explanation);
    // The first size has a plan of its own, the second ran op by op; the few that a template was found with are kept.
    assert!(sizes.made >= 140, "{explanation}");
    assert!(explanation.graphs.len() < 10, "{explanation}");
    assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 145), "{explanation}");
    assert_eq!(sizes.symbols, ["s0 = dim 1 of input 0"]);
    assert!(explanation.to_string().contains("≤ s0 ≤"), "{explanation}");
    assert!(explanation.to_string().contains("from the dynamic-shape plan"), "{explanation}");
    // Sizes that come again are followed like any others.
    check(&region, &shapes[40..44], attention)?;
    let replays = region.explain().replays;
    check(&region, &shapes[40..44], attention)?;
    assert_eq!(region.explain().replays, replays + 4);
    Ok(())
}

/// From some length on, what lies between the products is large enough to be there in bands only.
#[test]
fn attention_that_grows_out_of_the_caches() -> Result<()> {
    let region = Compile::new().region();
    let lengths = [170, 171, 173, 176, 180, 181, 183, 190, 191, 197, 201, 207];
    let shapes: Vec<[usize; 3]> = lengths.iter().map(|&length| [4, length, 8]).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    check(&region, &shapes, attention)?;
    let explanation = region.explain();
    assert!(first(&explanation).made >= 5, "{explanation}");
    Ok(())
}

#[test]
fn announced_sizes_wait_for_nothing() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    check(&region, &[&[2, 9, 8], &[2, 12, 8], &[2, 10, 8]], attention)?;
    let explanation = region.explain();
    assert_eq!(first(&explanation).made, 2, "{explanation}");
    Ok(())
}

#[test]
fn sizes_that_follow_each_other() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    // A product, a sum, a part.
    let f = |x: &Tensor| -> Result<Tensor> {
        let (rows, columns) = (x.size(0)?, x.size(1)?);
        let flat = x.reshape([rows * columns])?;
        let longer = Tensor::cat([&flat, &flat.narrow(0, 0, 3)?], 0)?;
        let halves = x.reshape([rows, 2, columns / 2])?.sum_dim(1, false)?;
        (longer.sum()? + &halves.reshape([rows * columns / 2])?).ok()
    };
    check(&region, &[&[4, 6], &[5, 8], &[7, 12], &[6, 10], &[11, 4], &[3, 20], &[9, 14]], f)?;
    let explanation = region.explain();
    let sizes = first(&explanation);
    assert_eq!(sizes.symbols, ["s0 = dim 0 of input 0", "s1 = dim 1 of input 0 / 2"], "{explanation}");
    assert!(sizes.made >= 4, "{explanation}");
    Ok(())
}

#[test]
fn a_rule_that_was_luck() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    let f = |x: &Tensor| (x.exp()?.mean_dim(0, true)? + &x.transpose(0, 1)?.contiguous()?.sum()?).ok();
    // Columns were twice the rows, then they are not.
    check(&region, &[&[4, 8], &[5, 10], &[6, 12], &[7, 9], &[8, 5], &[11, 6]], f)?;
    let explanation = region.explain();
    assert_eq!(first(&explanation).symbols.len(), 2, "{explanation}");
    assert!(first(&explanation).made >= 2, "{explanation}");
    Ok(())
}

#[test]
fn means_know_how_many_they_are_of() -> Result<()> {
    let region = Compile::new().region();
    let f = |x: &Tensor| -> Result<Tensor> {
        let centred = (x - &x.mean_dim(0, true)?).ok()?;
        (centred.square()?.mean_dim(0, true)? + &x.var()?).ok()
    };
    check(&region, &[&[4, 6], &[5, 6], &[6, 6], &[7, 6], &[12, 6], &[10, 6]], f)?;
    assert!(first(&region.explain()).made >= 3, "{}", region.explain());
    Ok(())
}

#[test]
fn long_reductions_go_in_chunks() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    let f = |x: &Tensor| x.exp()?.mean();
    check(&region, &[&[400, 300], &[420, 300], &[431, 300], &[777, 300], &[1000, 300], &[512, 300]], f)?;
    assert!(first(&region.explain()).made >= 4, "{}", region.explain());
    Ok(())
}

#[test]
fn training_with_a_batch_that_is_new_in_every_step() -> Result<()> {
    for inside in [true, false] {
        let weights = || -> Result<[Tensor; 2]> {
            let weights = [data(&[6, 8])?, data(&[8, 3])?];
            weights.iter().try_for_each(|w| w.requires_grad_(true).map(drop))?;
            Ok(weights)
        };
        let (plain, other) = (weights()?, weights()?);
        let region = Compile::new().region();
        for size in [8, 5, 9, 7, 12, 6, 10, 11, 13, 4] {
            let x = data(&[size, 6])?;
            let loss = |w: &[Tensor; 2]| x.matmul(&w[0])?.gelu()?.matmul(&w[1])?.log_softmax(1)?.mean();
            let update = |w: &[Tensor; 2]| -> Result<()> {
                let _mode = no_grad();
                for w in w {
                    let gradient = w.grad().expect("backward ran");
                    w.sub_(&gradient.mul(0.1)?)?;
                    w.set_grad(None);
                }
                Ok(())
            };
            loss(&plain)?.backward()?;
            update(&plain)?;
            if inside {
                region.run(|| -> Result<()> {
                    loss(&other)?.backward()?;
                    update(&other)
                })?;
            } else {
                region.run(|| loss(&other))?.backward()?;
                update(&other)?;
            }
            for (got, want) in other.iter().zip(&plain) {
                assert_close(got, want, &format!("batch of {size}, inside {inside}"))?;
            }
        }
        let explanation = region.explain();
        assert_eq!(explanation.recompiles, [], "{explanation}");
        assert!(first(&explanation).made >= 6, "{explanation}");
    }
    Ok(())
}

#[test]
fn graphs_that_break_in_the_middle() -> Result<()> {
    let region = Compile::new().region();
    let f = |x: &Tensor| -> Result<Tensor> {
        let y = x.tanh()?;
        let much = y.abs()?.sum()?.item::<f32>()? > 20.0;
        let z = if much { y.exp()? } else { y.neg()? };
        (&z + &z.mean_dim(0, true)?).ok()
    };
    let shapes: Vec<[usize; 2]> =
        [4, 9, 6, 11, 5, 8, 12, 10, 7, 40, 14, 33, 61, 9, 9, 13].map(|n| [n, 3]).into();
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    check(&region, &shapes, f)?;
    assert!(first(&region.explain()).made >= 8, "{}", region.explain());
    Ok(())
}

#[test]
fn results_are_changed_and_kept() -> Result<()> {
    // What a segment from a template publishes is like anything else: views, changes in place, shapes that are asked.
    let region = Compile::new().dynamic(true).region();
    let mut kept: Vec<(Tensor, Tensor)> = Vec::new();
    for size in [5usize, 8, 11, 9, 6] {
        let (x, same_x) = (data(&[size, 4])?, data(&[size, 4])?);
        let f = |x: &Tensor| -> Result<(Tensor, Tensor)> {
            x.narrow(0, 1, size - 2)?.mul_(2.0)?;
            let y = x.exp()?;
            assert_eq!(y.shape().to_vec(), [size, 4]);
            let view = y.transpose(0, 1)?.narrow(1, size - 2, 2)?;
            Ok((y, view))
        };
        let (want, got) = (f(&x)?, region.run(|| f(&same_x))?);
        assert_close(&same_x, &x, "the input")?;
        assert_close(&got.1, &want.1, "the view")?;
        want.1.fill_(7.0)?;
        got.1.fill_(7.0)?;
        assert_close(&got.0, &want.0, "behind the view")?;
        kept.push((got.0, want.0));
    }
    kept.iter().try_for_each(|(got, want)| assert_close(got, want, "kept"))?;
    assert!(first(&region.explain()).made >= 3, "{}", region.explain());
    Ok(())
}

#[test]
fn threads_with_sizes_of_their_own() -> Result<()> {
    let region = Compile::new().region();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4)
            .map(|t| {
                let region = region.clone();
                scope.spawn(move || -> Result<()> {
                    for round in 0..30 {
                        let x = data(&[2, 4 + (t * 7 + round * 5) % 60, 8])?;
                        assert_close(
                            &region.run(|| attention(&x))?,
                            &attention(&x)?,
                            &format!("{}", x.shape()),
                        )?;
                    }
                    Ok(())
                })
            })
            .collect();
        runs.into_iter().try_for_each(|run| run.join().expect("no panic"))
    })?;
    assert!(first(&region.explain()).made >= 40, "{}", region.explain());
    Ok(())
}

#[test]
fn errors_among_new_sizes_are_eagers() -> Result<()> {
    let region = Compile::new().region();
    let weight = data(&[6, 3])?;
    let table = data(&[10, 6])?;
    let f = |x: &Tensor| -> Result<Tensor> {
        let rows = Tensor::arange(0, x.size(0)? as i64, &Device::Cpu)?;
        (x + &table.index_select(0, &rows)?).ok()?.matmul(&weight)
    };
    check(&region, &[&[4, 6], &[5, 6], &[6, 6], &[7, 6]], f)?;
    // A shape that doesn't fit, and an index that is out of range in this size.
    for shape in [[8, 5], [12, 6]] {
        let x = data(&shape)?;
        let (want, got) = (f(&x).unwrap_err(), region.run(|| f(&x)).unwrap_err());
        assert_eq!(want.to_string(), got.to_string());
    }
    check(&region, &[&[8, 6], &[10, 6], &[3, 6]], f)
}

#[test]
fn convolutions_of_pictures_of_any_size() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    let weight = data(&[4, 3, 3, 3])?;
    let f = |x: &Tensor| -> Result<Tensor> {
        let y = x.conv2d(&weight, None, [1, 1], [1, 1], [1, 1], 1)?.relu()?;
        y.mean_dim(3, false)?.mean_dim(2, false)
    };
    let shapes = [[1, 3, 16, 16], [2, 3, 18, 20], [3, 3, 17, 15], [2, 3, 24, 31], [5, 3, 14, 14]];
    let shapes: Vec<&[usize]> = shapes.iter().map(|shape| &shape[..]).collect();
    check(&region, &shapes, f)
}

#[test]
fn every_second_pixel_of_pictures() -> Result<()> {
    let weight = data(&[4, 3, 3, 3])?;
    let f = |x: &Tensor| -> Result<Tensor> {
        let y = x.conv2d(&weight, None, [2, 2], [1, 1], [1, 1], 1)?.relu()?;
        (&y * &y.mean_dim(3, true)?).ok()
    };
    let pictures = |sizes: &[usize]| -> Vec<[usize; 4]> { sizes.iter().map(|&n| [2, 3, n, n]).collect() };
    let check = |region: &Region, sizes: &[usize]| -> Result<()> {
        let shapes = pictures(sizes);
        check(region, &shapes.iter().map(|shape| &shape[..]).collect::<Vec<_>>(), f)
    };
    // Rounding shows where sizes are odd; multiples of eight have one plan.
    let region = Compile::new().region();
    check(&region, &[40, 24, 32, 56, 72])?;
    let explanation = region.explain();
    assert_eq!(first(&explanation).symbols, ["s0 = dim 2 of input 0 / 8"], "{explanation}");
    assert_eq!(first(&explanation).made, 3, "{explanation}");
    check(&region, &[33, 34, 33, 48, 33])?;
    let region = Compile::new().region();
    check(&region, &[11, 14, 17, 20, 23, 11])?;
    let explanation = region.explain();
    assert!(explanation.to_string().contains("not a function of its sizes"), "{explanation}");
    Ok(())
}

/// A function that has met too much that is new keeps what it has compiled.
#[test]
fn giving_up_keeps_what_is_compiled() -> Result<()> {
    let region = Compile::new().option("recompile_limit", 2)?.region();
    let x = matrix(3, 4);
    let run =
        |dim: i64| region.run(|| x.mul(2.0)?.softmax(dim)?.transpose(0, 1)?.flip([dim])?.sum_dim(dim, true));
    let compiled = |dim: i64| -> Result<bool> {
        let before = region.explain().replays;
        assert_close(
            &run(dim)?,
            &x.mul(2.0)?.softmax(dim)?.transpose(0, 1)?.flip([dim])?.sum_dim(dim, true)?,
            "y",
        )?;
        Ok(region.explain().replays > before)
    };
    for dim in [0, 1, 0, 1] {
        run(dim)?;
    }
    // Other programs than those.
    for k in 0..6 {
        let y = region.run(|| x.add(1.0)?.narrow(0, 0, 1 + k % 3)?.pow(2.0)?.roll(k as i64, 1))?;
        assert_close(&y, &x.add(1.0)?.narrow(0, 0, 1 + k % 3)?.pow(2.0)?.roll(k as i64, 1)?, "another")?;
    }
    assert!(region.explain().given_up, "{}", region.explain());
    assert!(compiled(0)? && compiled(1)?, "{}", region.explain());
    Ok(())
}

/// A picture of any size, resized to one size.
#[test]
fn resizing_to_one_size_from_many() -> Result<()> {
    for mode in [
        Interpolation::Nearest,
        Interpolation::Bilinear { align_corners: false },
        Interpolation::Bilinear { align_corners: true },
    ] {
        let region = Compile::new().region();
        for size in 5..30 {
            let x = data(&[1, 2, size, size + 3])?;
            let resize = |x: &Tensor| x.mul(2.0)?.interpolate([8, 6], mode)?.add(1.0);
            assert_close(&region.run(|| resize(&x))?, &resize(&x)?, "resized")?;
        }
        let explanation = region.explain();
        assert!(explanation.recompiles.is_empty() && !explanation.given_up, "{explanation}");
    }
    Ok(())
}
