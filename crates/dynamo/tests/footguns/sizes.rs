//! Other sizes: planned anew, never compiled anew, never wrong.

use kiln_dynamo::{Backend, Compile, Region, Stance, set_stance};
use kiln_tensor::{DType, Device, Result, Tensor, no_grad};

fn batch(size: usize, features: usize) -> Result<Tensor> {
    let numbers: Vec<f32> = (0..size * features).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
    Tensor::from_slice(&numbers)?.reshape([size, features])
}

/// Runs a function compiled and eagerly on batches of these sizes.
fn check(region: &Region, sizes: &[usize], f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
    for &size in sizes {
        let x = batch(size, 6)?;
        let (want, got) = (f(&x)?, region.run(|| f(&x))?);
        assert_eq!(want.shape(), got.shape(), "batch of {size}");
        for (want, got) in want.to_vec::<f32>()?.iter().zip(got.to_vec::<f32>()?) {
            assert!((want - got).abs() <= 1e-5 * want.abs().max(1.0), "batch of {size}: {want} and {got}");
        }
    }
    Ok(())
}

fn compiled_kernels(region: &Region) -> usize {
    region.explain().graphs.iter().map(|graph| graph.compiled_kernels).sum()
}

/// Sizes appear in attributes (reshape, slice, arange, expand), too.
fn network(x: &Tensor) -> Result<Tensor> {
    let (rows, columns) = (x.shape()[0], x.shape()[1]);
    let places = Tensor::arange(0, rows as i64, &Device::Cpu)?.to_dtype(DType::F32)?.reshape([rows, 1])?;
    let y = (x.tanh()? * &places.expand([rows, columns])?).ok()?;
    let halves = y.reshape([rows, 2, columns / 2])?.permute([1, 0, 2])?;
    let first = halves.narrow(0, 0, 1)?.reshape([rows, columns / 2])?;
    (first.softmax(0)? + &y.narrow(1, 0, columns / 2)?).ok()
}

#[test]
fn twenty_sizes_are_no_recompilation() -> Result<()> {
    for dynamic in [None, Some(true)] {
        let region = Compile::new().dynamic(dynamic).region();
        let sizes: Vec<usize> = (2..22).chain(2..22).chain(2..22).collect();
        check(&region, &sizes[..20], network)?;
        let first = compiled_kernels(&region);
        check(&region, &sizes[20..], network)?;
        let explanation = region.explain();
        assert_eq!(explanation.recompiles, [], "{explanation}");
        assert_eq!(explanation.sizes, 19);
        assert_eq!(explanation.graphs.len(), 20);
        assert!(explanation.graphs.iter().skip(1).all(|graph| graph.resizes == Some(0)));
        // The kernels are there after the first plan or two.
        let compiled: Vec<usize> = explanation.graphs.iter().map(|graph| graph.compiled_kernels).collect();
        assert!(compiled[2..].iter().all(|&kernels| kernels == 0), "{compiled:?}, {first} at first");
        // Everything is planned: nothing new is met any more.
        let replays = explanation.replays;
        check(&region, &sizes[..20], network)?;
        assert_eq!(region.explain().replays, replays + 20);
    }
    Ok(())
}

#[test]
fn a_second_size_that_comes_once_is_not_planned() -> Result<()> {
    let region = Compile::new().region();
    check(&region, &[4, 5], network)?;
    assert_eq!(region.explain().graphs.len(), 1);
    check(&region, &[5], network)?;
    assert_eq!(region.explain().graphs.len(), 2);
    Ok(())
}

#[test]
fn without_dynamic_other_sizes_are_other_graphs() -> Result<()> {
    let region = Compile::new().dynamic(false).option("recompile_limit", 2)?.region();
    check(&region, &[4, 5, 6], network)?;
    let explanation = region.explain();
    assert_eq!((explanation.recompiles.len(), explanation.sizes, explanation.given_up), (2, 0, false));
    assert!(
        explanation.to_string().contains("hint: without `dynamic(false)`, one graph serves many sizes"),
        "{explanation}"
    );
    check(&region, &[7, 8], network)?;
    assert!(region.explain().given_up);
    Ok(())
}

#[test]
fn sizes_that_lead_elsewhere_are_recompilations() -> Result<()> {
    let region = Compile::new().region();
    let branch = |x: &Tensor| if x.shape()[0] > 4 { x.exp()?.tanh() } else { x.exp()?.neg() };
    check(&region, &[2, 3, 5, 6, 7, 3, 6], branch)?;
    let explanation = region.explain();
    assert_eq!((explanation.recompiles.len(), explanation.sizes), (1, 3), "{explanation}");
    let reason = explanation.recompiles[0].reason.to_string();
    assert_eq!(reason, "input 0 was [2, 6], now [5, 6], and other ops followed");
    Ok(())
}

#[test]
fn empty_and_single_rows_are_graphs_of_their_own() -> Result<()> {
    let region = Compile::new().dynamic(true).region();
    let f = |x: &Tensor| (x.exp()? + &x.sum_dim(0, true)?).ok();
    check(&region, &[3, 1, 0, 4, 1, 0, 2], f)?;
    let explanation = region.explain();
    assert_eq!((explanation.recompiles.len(), explanation.sizes), (2, 2), "{explanation}");
    Ok(())
}

#[test]
fn errors_of_other_sizes_are_eagers() -> Result<()> {
    let weight = batch(6, 3)?;
    let f = |x: &Tensor| x.matmul(&weight);
    for dynamic in [None, Some(true)] {
        let region = Compile::new().dynamic(dynamic).region();
        check(&region, &[4, 5], f)?;
        let wrong = batch(4, 5)?;
        let (want, got) = (f(&wrong).unwrap_err(), region.run(|| f(&wrong)).unwrap_err());
        assert_eq!(want.to_string(), got.to_string());
        check(&region, &[4, 5, 8], f)?;
    }
    Ok(())
}

#[test]
fn training_goes_on_whatever_the_batch() -> Result<()> {
    for backend in [Backend::Inductor, Backend::AotEager, Backend::Eager] {
        let (plain, other) = (batch(6, 1)?, batch(6, 1)?);
        let region = Compile::new().backend(backend).region();
        for size in [8, 8, 5, 3, 5, 8, 3, 2, 7, 5] {
            let x = batch(size, 6)?;
            let step = |weight: &Tensor| -> Result<f32> {
                weight.requires_grad_(true)?;
                let loss = x.matmul(weight)?.tanh()?.mean()?;
                loss.backward()?;
                let gradient = weight.grad().expect("backward ran");
                no_grad_step(weight, &gradient)?;
                weight.set_grad(None);
                Ok(0.0)
            };
            step(&plain)?;
            region.run(|| step(&other))?;
            for (want, got) in plain.to_vec::<f32>()?.iter().zip(other.to_vec::<f32>()?) {
                assert!((want - got).abs() < 1e-5, "{backend}, batch of {size}: {want} and {got}");
            }
        }
        assert_eq!(region.explain().recompiles, []);
    }
    Ok(())
}

fn no_grad_step(weight: &Tensor, gradient: &Tensor) -> Result<()> {
    let _mode = no_grad();
    weight.sub_(&gradient.mul(0.1)?)?;
    Ok(())
}

#[test]
fn more_sizes_than_plans_run_eagerly() -> Result<()> {
    // Only inductor's plans are for many sizes.
    let options = Compile::new().backend(Backend::AotEager).dynamic(true).option("size_limit", 3)?;
    let region = options.region();
    check(&region, &[2, 3, 4, 5, 6, 2, 3, 4], network)?;
    let explanation = region.explain();
    assert_eq!((explanation.graphs.len(), explanation.given_up), (3, false));
    assert!(explanation.to_string().contains("more sizes than the size limit"), "{explanation}");
    assert!(explanation.to_string().contains("raise the option size_limit"), "{explanation}");
    Ok(())
}

#[test]
fn a_new_size_is_no_recompilation_for_a_stance() -> Result<()> {
    let region = Compile::new().region();
    check(&region, &[4], network)?;
    let _stance = set_stance(Stance::FailOnRecompile);
    check(&region, &[5, 5, 5], network)
}

#[test]
fn announced_sizes_are_planned_at_once() -> Result<()> {
    let region = Compile::new().region();
    for size in [4, 5, 6] {
        let x = batch(size, 6)?;
        x.mark_dynamic(0, 2..=8)?;
        assert_eq!(region.run(|| network(&x))?.to_vec::<f32>()?.len(), network(&x)?.numel());
    }
    let explanation = region.explain();
    let made = explanation.graphs[0].sizes.as_ref().map(|sizes| sizes.made);
    assert_eq!((made, explanation.recompiles.len()), (Some(2), 0), "{explanation}");
    // What was not announced waits, or is another graph.
    check(&region, &[9], network)?;
    assert_eq!(region.explain().recompiles.len(), 1);
    assert!(batch(9, 6)?.mark_dynamic(0, 2..=8).is_err());
    assert!(batch(1, 6)?.mark_dynamic(0, 1..).is_err());
    assert!(batch(2, 6)?.mark_dynamic(2, 2..).is_err());
    Ok(())
}

#[test]
fn a_divergence_is_counted_once_and_in_order() -> Result<()> {
    let region = Compile::new().region();
    // The first op is the same; then come three segments that are others where there are many rows.
    let f = |x: &Tensor| -> Result<Tensor> {
        let many = x.shape()[0] > 4;
        let step = |x: &Tensor| if many { x.tanh() } else { x.neg() };
        let y = step(&x.abs()?)?;
        y.sum()?.item::<f32>()?;
        let y = step(&y)?;
        y.sum()?.item::<f32>()?;
        if y.dtype() == DType::F64 { y.to_dtype(DType::F32) } else { step(&y) }
    };
    check(&region, &[2, 6], f)?;
    let wide = batch(2, 6)?.to_dtype(DType::F64)?;
    region.run(|| f(&wide))?;
    check(&region, &[7, 3], f)?;
    let explanation = region.explain();
    let numbers: Vec<usize> = explanation.recompiles.iter().map(|recompile| recompile.number).collect();
    let said =
        |r: &kiln_dynamo::Recompile| r.to_string().starts_with(&format!("recompile #{} at ", r.number));
    assert!(explanation.recompiles.iter().all(said), "{explanation}");
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>(), "{explanation}");
    assert_eq!(numbers.len(), 2, "{explanation}");
    Ok(())
}
