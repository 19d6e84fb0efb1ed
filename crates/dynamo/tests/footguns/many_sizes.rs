//! Sizes that a template was not tried with: those that a constant divides, those that are equal to one.

use kiln_dynamo::{Compile, Region};
use kiln_tensor::{Device, Result, Tensor, manual_seed};

use crate::lab::{assert_close, data, turn};

/// What a function gives and what it did to its operand, or how it failed.
fn outcome(
    x: &Tensor,
    run: impl FnOnce() -> Result<Tensor>,
) -> (std::result::Result<Tensor, String>, Tensor) {
    (run().map_err(|error| error.to_string()), x.clone())
}

/// Runs a function of data of many sizes compiled and eagerly: odd ones first, of which a template could be made that
/// is wrong for the others.
#[track_caller]
fn check(shape: impl Fn(usize) -> Vec<usize>, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Region>> {
    let sizes = [5, 7, 9, 11, 8, 10, 6, 12, 4, 13, 3, 14, 17, 16, 15, 18, 24, 30, 33, 60, 61, 62];
    let mut regions = Vec::new();
    for dynamic in [None, Some(true)] {
        let region = Compile::new().dynamic(dynamic).option("opt_level", 0)?.region();
        for size in sizes {
            let (x, y) = (data(&shape(size))?, data(&shape(size))?);
            let what = format!("{dynamic:?}, {}", x.shape());
            let (want, x) = outcome(&x, || f(&x));
            let (got, y) = outcome(&y, || region.run(|| f(&y)));
            match (got, want) {
                (Ok(got), Ok(want)) => assert_close(&got, &want, &what)?,
                (got, want) => assert_eq!(got.err(), want.err(), "{what}"),
            }
            assert_close(&y, &x, &what)?;
        }
        regions.push(region);
    }
    Ok(regions)
}

/// Segments that were made from templates.
fn made(region: &Region) -> usize {
    region.explain().graphs.iter().filter_map(|graph| graph.sizes.as_ref()).map(|sizes| sizes.made).sum()
}

#[test]
fn pairs_of_an_odd_number_of_rows() -> Result<()> {
    // Of an odd number one is left over: n − 1 elements are summed up then, else n.
    check(|n| vec![n], |x| x.unfold(0, 2, 2)?.exp()?.sum())?;
    Ok(())
}

#[test]
fn rows_of_which_a_half_begins_in_the_middle() -> Result<()> {
    // Where n − 1 is even, the second half begins at the beginning of a row.
    let f = |x: &Tensor| -> Result<Tensor> {
        let rest = x.size(0)? - 1;
        x.narrow(0, 1, rest)?.narrow(1, 0, 2)?.exp()?.reshape([2, rest])?.narrow(1, 0, 2)?.exp()
    };
    check(|n| vec![n, 4], f)?;
    Ok(())
}

#[test]
fn rows_of_which_a_third_begins_in_the_middle() -> Result<()> {
    // Three divides n² − 1 unless it divides n.
    let f = |x: &Tensor| -> Result<Tensor> {
        let all = x.size(0)? * x.size(1)?;
        let rest = x.reshape([all, 6])?.narrow(0, 1, all - 1)?;
        rest.exp()?.narrow(1, 0, 3)?.reshape([3, all - 1])?.narrow(1, 0, 2)?.exp()
    };
    check(|n| vec![n, n, 6], f)?;
    Ok(())
}

#[test]
fn as_many_rows_as_columns() -> Result<()> {
    let weight = data(&[6, 6])?;
    let f = |x: &Tensor| (&x.matmul(&weight)?.softmax(0)? + &weight.sum_dim(0, true)?).ok();
    for region in check(|n| vec![n, 6], f)? {
        assert!(made(&region) >= 10, "{}", region.explain());
    }
    Ok(())
}

#[test]
fn as_many_classes_as_samples() -> Result<()> {
    // Past ten samples there are more targets than classes.
    let f = |x: &Tensor| x.cross_entropy(&Tensor::arange(0, x.size(0)? as i64, &Device::Cpu)?);
    for region in check(|n| vec![n, 10], f)? {
        assert!(made(&region) >= 10, "{}", region.explain());
    }
    Ok(())
}

#[test]
fn random_numbers_of_any_count() -> Result<()> {
    let _turn = turn();
    let f = |x: &Tensor| -> Result<Tensor> {
        manual_seed(3);
        let dropped = x.dropout(0.5, true)?.exp()?;
        (&dropped + &x.rand_like()?).ok()?.add(&Tensor::randn([3], &Device::Cpu)?)
    };
    for region in check(|n| vec![n, 3], f)? {
        assert!(made(&region) >= 15, "{}", region.explain());
    }
    Ok(())
}

#[test]
fn windows_that_meet_in_the_middle() -> Result<()> {
    let f = |x: &Tensor| -> Result<Tensor> {
        let rows = x.size(0)?;
        x.narrow(0, 0, 3)?.mul_(2.0)?;
        let last = x.narrow(0, rows - 3, 3)?;
        last.add_(1.0)?;
        x.narrow(0, 0, 3)?.add_(&last.exp()?)?;
        x.sin()
    };
    for region in check(|n| vec![n, 2], f)? {
        assert!(made(&region) >= 10, "{}", region.explain());
    }
    Ok(())
}

#[test]
fn errors_in_the_middle_of_some_sizes() -> Result<()> {
    let other = data(&[9, 6])?;
    let f = |x: &Tensor| -> Result<Tensor> {
        let y = x.exp()?;
        x.add_(1.0)?;
        if x.size(0)? % 5 == 0 {
            (&y + &other).ok()?;
        }
        y.softmax(0)
    };
    for region in check(|n| vec![n, 6], f)? {
        assert!(made(&region) >= 10, "{}", region.explain());
    }
    Ok(())
}

#[test]
fn what_has_one_size_behind_a_break() -> Result<()> {
    let region = Compile::new().region();
    let weight = data(&[6])?;
    for size in 5..17 {
        let x = data(&[size, 6])?;
        let f = || -> Result<Tensor> {
            let mean = x.tanh()?.mean()?.item::<f32>()?;
            (&weight.mul(f64::from(mean))?.softmax(0)? + &weight.exp()?).ok()
        };
        assert_close(&region.run(f)?, &f()?, &format!("{size}"))?;
    }
    // It has the plan of its first recording, whatever came before, and is recorded no further.
    let explanation = region.explain();
    assert_eq!(made(&region), 10, "{explanation}");
    assert!(explanation.sizes <= 13 && explanation.graphs.len() <= 5, "{explanation}");
    Ok(())
}

#[test]
fn a_reduction_that_is_one_chunk() -> Result<()> {
    for size in [8, 11, 16, 21, 22] {
        let (region, x) = (Compile::new().region(), data(&[size, 3000])?);
        assert_close(&region.run(|| x.exp()?.mean())?, &x.exp()?.mean()?, &format!("{size}"))?;
        let explanation = region.explain().to_string();
        assert!(!explanation.contains("eagerly"), "{explanation}");
    }
    Ok(())
}

/// Sums along rows and over rows of the same matrix: one kernel where rows are many, apart where they are few.
#[test]
fn sums_of_rows_and_over_rows() -> Result<()> {
    let step = |x: &Tensor| -> Result<Vec<Tensor>> {
        let y = x.mul(2.0)?.softmax(-1)?;
        Ok(vec![y.sum_dim(0, false)?, x.amax_dim(0, false)?, y])
    };
    for dynamic in [None, Some(true)] {
        let region = Compile::new().dynamic(dynamic).region();
        for rows in [1000, 1100, 1234, 1002, 20, 1600, 999, 40, 2000, 1601] {
            let x = data(&[rows, 800])?;
            for (got, want) in region.run(|| step(&x))?.iter().zip(step(&x)?) {
                assert_close(got, &want, &format!("{rows}"))?;
            }
        }
        assert!(made(&region) > 0, "{}", region.explain());
    }
    Ok(())
}
