//! Stances, reset, counters, warming up.

use kiln_dynamo::{Compile, Stance, compile, counters, is_compiling, set_process_stance, set_stance, stance};
use kiln_tensor::{Error, Result, Tensor, TensorList, foreach};

use crate::{leaf, t};

#[test]
fn force_eager_runs_as_if_nothing_had_been_compiled() -> Result<()> {
    let f = compile(|x: &Tensor| Ok::<_, Error>((x.mul(2.0)?, is_compiling())));
    assert!(f(&t(&[1.0]))?.1);
    {
        let _stance = set_stance(Stance::ForceEager);
        let (y, compiling) = f(&t(&[1.0, 2.0]))?;
        assert_eq!((y.to_vec::<f32>()?, compiling), (vec![2.0, 4.0], false));
        assert_eq!(stance(), Stance::ForceEager);
    }
    assert_eq!(stance(), Stance::Default);
    assert_eq!((f.explain().calls, f.explain().graphs.len()), (1, 1));
    assert!(f(&t(&[1.0]))?.1);
    Ok(())
}

#[test]
fn fail_on_recompile_names_what_is_new() -> Result<()> {
    let f = compile(|x: &Tensor| x.mul(2.0)?.exp());
    let _stance = set_stance(Stance::FailOnRecompile);
    let error = f(&t(&[1.0])).unwrap_err().to_string();
    assert_eq!(error, "stance fail_on_recompile: compiled function was not compiled yet");
    {
        let _stance = set_stance(Stance::Default);
        f.warm_up((&t(&[1.0]),))?;
    }
    f(&t(&[3.0]))?;
    let error = f(&t(&[1.0, 2.0])).unwrap_err().to_string();
    assert!(error.contains("recompile #1 at stances.rs:") && error.ends_with("input 0 was [1], now [2]"));
    // Nothing was learnt from the failures, and what is compiled still runs.
    assert_eq!((f.explain().graphs.len(), f.explain().recompiles.len()), (1, 0));
    f(&t(&[3.0]))?;
    Ok(())
}

#[test]
fn fail_on_recompile_leaves_what_happened_before() -> Result<()> {
    let x = t(&[1.0, 2.0]);
    let region = Compile::new().region();
    let body = |more: bool| {
        region.run(|| {
            x.add_(1.0)?;
            if more { x.exp() } else { Ok(x.clone()) }
        })
    };
    body(false)?;
    let _stance = set_stance(Stance::FailOnRecompile);
    let error = body(true).unwrap_err().to_string();
    assert!(error.contains("exp at stances.rs:") && error.ends_with("was never seen here"), "{error}");
    assert_eq!(x.to_vec::<f32>()?, [3.0, 4.0], "the change before the error is done, as eager does it");
    Ok(())
}

#[test]
fn another_set_of_results_is_something_new_too() -> Result<()> {
    let x = t(&[1.0]);
    let region = Compile::new().region();
    let body = |both: bool| {
        region.run(|| {
            let y = x.exp()?;
            let z = y.neg()?;
            Ok::<_, Error>((both.then_some(y), z))
        })
    };
    body(false)?;
    let _stance = set_stance(Stance::FailOnRecompile);
    body(false)?;
    let error = body(true).err().unwrap().to_string();
    assert!(error.ends_with("keeps a different set of results"), "{error}");
    let _stance = set_stance(Stance::EagerOnRecompile);
    assert_eq!(body(true)?.0.unwrap().item::<f32>()?, 1f32.exp());
    assert_eq!(region.explain().graphs.len(), 1);
    Ok(())
}

#[test]
fn eager_on_recompile_uses_what_is_there() -> Result<()> {
    let w = leaf(&[2.0]);
    let f = compile(|x: &Tensor| x.mul(&w)?.sum());
    f.warm_up((&t(&[1.0]),))?;
    let _stance = set_stance(Stance::EagerOnRecompile);
    let y = f(&t(&[1.0, 2.0, 3.0]))?;
    y.backward()?;
    assert_eq!((y.item::<f32>()?, w.grad().unwrap().item::<f32>()?), (12.0, 6.0));
    f(&t(&[1.0]))?;
    let explanation = f.explain();
    assert_eq!((explanation.graphs.len(), explanation.recompiles.len()), (1, 0), "{explanation}");
    assert!(explanation.fallbacks[0].reason == kiln_dynamo::Reason::Stance, "{explanation}");
    assert!(explanation.fallbacks[0].advice().unwrap().contains("warm"));
    Ok(())
}

#[test]
fn threads_have_stances_of_their_own() -> Result<()> {
    let _stance = set_stance(Stance::FailOnRecompile);
    let other = std::thread::spawn(|| (stance(), compile(|| t(&[1.0]).exp())().map(drop)));
    let (there, outcome) = other.join().unwrap();
    assert_eq!(there, Stance::Default);
    outcome?;
    // The process's stance counts where a thread has none. (It is put back at once: other tests run beside.)
    let _own = set_stance(Stance::Default);
    assert_eq!(set_process_stance(Stance::Default), Stance::Default);
    assert_eq!(stance(), Stance::Default);
    Ok(())
}

#[test]
fn reset_of_a_region_starts_afresh() -> Result<()> {
    let f = compile(|x: &Tensor| x.exp());
    for size in [1, 2] {
        f(&t(&vec![1.0; size]))?;
    }
    assert_eq!((f.explain().graphs.len(), f.explain().recompiles.len()), (2, 1));
    // A tensor made before outlives the recordings.
    let kept = f(&t(&[0.0]))?;
    f.reset();
    let explanation = f.explain();
    assert_eq!((explanation.calls, explanation.graphs.len(), explanation.recompiles.len()), (0, 0, 0));
    assert_eq!(kept.item::<f32>()?, 1.0);
    assert_eq!(f(&t(&[0.0]))?.item::<f32>()?, 1.0);
    assert_eq!(f.explain().graphs.len(), 1);
    Ok(())
}

#[test]
fn reset_in_the_middle_of_a_call() -> Result<()> {
    let region = Compile::new().region();
    for _ in 0..3 {
        let y = region.run(|| {
            let y = t(&[1.0, 2.0]).add(1.0)?;
            region.reset();
            y.mul(2.0)
        })?;
        assert_eq!(y.to_vec::<f32>()?, [4.0, 6.0]);
    }
    Ok(())
}

#[test]
fn regions_are_freed() -> Result<()> {
    struct Canary(std::sync::Arc<()>);
    impl kiln_dynamo::CustomBackend for Canary {
        fn compile(
            &self,
            graph: &kiln_ir::Graph,
            _: &kiln_dynamo::GraphContext<'_>,
        ) -> Result<kiln_dynamo::CompiledGraph> {
            let (graph, life) = (graph.clone(), self.0.clone());
            Ok(Box::new(move |inputs| {
                assert!(std::sync::Arc::strong_count(&life) > 0);
                kiln_dynamo::run_graph(&graph, inputs)
            }))
        }
    }
    let life = std::sync::Arc::new(());
    let region = Compile::new().backend(Canary(life.clone())).region();
    for _ in 0..2 {
        region.run(|| t(&[1.0]).exp())?;
    }
    assert!(std::sync::Arc::strong_count(&life) >= 3);
    drop(region);
    assert_eq!(std::sync::Arc::strong_count(&life), 1, "the compiled graph went with its region");
    Ok(())
}

#[test]
fn counters_count() -> Result<()> {
    // Other tests count beside: differences are at least what this one does.
    let before = counters();
    let f = compile(|x: &Tensor| {
        let y = x.mul(2.0)?;
        if y.sum()?.item::<f32>()? > 0.0 { y.exp() } else { y.neg() }
    });
    for value in [1.0, 1.0, -1.0] {
        f(&t(&[value]))?;
    }
    let done = counters() - before;
    assert!(done.calls >= 3 && done.replays >= 1 && done.breaks >= 3 && done.graphs >= 3, "{done}");
    assert!(done.recompiles >= 1 && done.cache_hits + done.cache_misses >= 3, "{done}");
    assert!(done.to_string().contains("of these, calls that met nothing new"));
    let explanation = f.explain();
    assert_eq!((explanation.calls, explanation.replays), (3, 1), "{explanation}");
    Ok(())
}

#[test]
fn warming_up_runs_the_function_once() -> Result<()> {
    let x = t(&[1.0]);
    let step = compile(|| x.add_(1.0).map(drop));
    step.warm_up(())?;
    assert_eq!(x.item::<f32>()?, 2.0, "what the function does stays done");
    step()?;
    assert_eq!((step.explain().graphs.len(), step.explain().replays), (1, 1));
    let region = Compile::new().region();
    region.warm_up(|| t(&[1.0]).exp())?;
    assert_eq!(region.explain().calls, 1);
    Ok(())
}

#[test]
fn fail_on_recompile_with_lists() -> Result<()> {
    let region = Compile::new().region();
    let tensors = [t(&[1.0]), t(&[2.0, 3.0]), t(&[4.0])];
    let step = |many: usize| region.run(|| foreach::add_(&TensorList::new(tensors[..many].to_vec()), 1.0));
    step(2)?;
    let _stance = set_stance(Stance::FailOnRecompile);
    step(2)?;
    let error = step(3).unwrap_err().to_string();
    assert!(error.starts_with("stance fail_on_recompile: "), "{error}");
    step(2)?;
    assert_eq!((tensors[0].item::<f32>()?, tensors[2].item::<f32>()?), (4.0, 4.0));
    assert_eq!(region.explain().graphs.len(), 1);
    Ok(())
}

#[test]
fn fail_on_recompile_with_backward() -> Result<()> {
    let w = leaf(&[2.0]);
    let region = Compile::new().region();
    let step = |cut: bool| {
        region.run(|| {
            if !cut {
                w.set_grad(None);
            }
            w.mul(&w)?.sum()?.backward()
        })
    };
    step(false)?;
    let _stance = set_stance(Stance::FailOnRecompile);
    step(false)?;
    // Now there is a gradient to add to: another program.
    let error = step(true).unwrap_err().to_string();
    assert!(error.ends_with("backward finds a different set of gradients already accumulated"), "{error}");
    assert_eq!(w.grad().unwrap().item::<f32>()?, 4.0, "the gradient is what it was");
    step(false)?;
    assert_eq!(w.grad().unwrap().item::<f32>()?, 4.0);
    Ok(())
}
