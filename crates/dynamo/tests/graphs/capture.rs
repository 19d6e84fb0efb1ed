//! Compiled results are eager's, whatever the program does between calls.

use std::sync::{Mutex, MutexGuard};

use kiln_dynamo::{Backend, Compile, Region, compile};
use kiln_tensor::{
    DType, Device, Error, GradOptions, Result, Tensor, TensorList, foreach, grad, manual_seed, no_grad,
};

const CPU: Device = Device::Cpu;

fn regions() -> Vec<(Backend, Region)> {
    Backend::ALL.iter().map(|&b| (b, Compile::new().backend(b).region())).collect()
}

fn t(data: &[f32]) -> Tensor {
    Tensor::from_slice(data).expect("a small tensor fits")
}

/// The random stream is the process's: whoever seeds it takes turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs `body` eagerly and, several times, in a region of each backend; all results must agree.
fn check(body: impl Fn() -> Result<Vec<Tensor>>) -> Result<()> {
    let _turn = turn();
    manual_seed(7);
    let want: Vec<Vec<f64>> = body()?.iter().map(|t| t.to_vec_cast::<f64>()).collect::<Result<_>>()?;
    for (backend, region) in regions() {
        for call in 0..3 {
            manual_seed(7);
            let got = region.run(&body)?;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let got = got.to_vec_cast::<f64>()?;
                assert_eq!(got.len(), want.len());
                for (g, w) in got.iter().zip(want) {
                    let close =
                        (g - w).abs() <= 1e-6 + 1e-5 * w.abs() || (g.is_nan() && w.is_nan()) || g == w;
                    assert!(
                        close,
                        "{backend}, call {call}, result {i}: {g} instead of {w}\n{}",
                        region.explain()
                    );
                }
            }
        }
        let explanation = region.explain();
        for graph in &explanation.graphs {
            if backend == Backend::Inductor {
                assert_eq!(graph.interpreted, None, "{explanation}");
            }
        }
    }
    Ok(())
}

#[test]
fn pointwise_chain() -> Result<()> {
    let x = Tensor::randn([33, 17], &CPU)?;
    check(|| Ok(vec![((((&x * 2.0 + 1.0).tanh() * &x).sigmoid() + &x).exp() - 1.0).relu().sqrt().ok()?]))
}

#[test]
fn softmax_and_reductions() -> Result<()> {
    let x = Tensor::randn([9, 37], &CPU)?;
    check(|| {
        Ok(vec![
            x.softmax(-1)?,
            x.softmax(0)?,
            x.log_softmax(1)?,
            x.sum()?,
            x.mean_dim(0, true)?,
            x.amax_dim([0, 1], false)?,
            (&x * &x).ok()?.sum_dim(0, false)?,
        ])
    })
}

#[test]
fn views_and_mutation() -> Result<()> {
    check(|| {
        let x = Tensor::arange(0, 24, &CPU)?.to_dtype(DType::F32)?.reshape([4, 6])?;
        let row = x.select(0, 2)?;
        row.mul_(10.0)?;
        let column = x.slice(1, 0, 6, 2)?;
        column.add_(&t(&[1.0, 2.0, 3.0]))?;
        x.t()?.slice(0, 1, 3, 1)?.fill_(-1.0)?;
        Ok(vec![x.clone(), row, column, x.t()?, Tensor::cat([&x, &x], 0)?])
    })
}

#[test]
fn inputs_are_written_back() -> Result<()> {
    for (backend, region) in regions() {
        let x = t(&[1.0, 2.0, 3.0]);
        for call in 1..=3 {
            let y = region.run(|| {
                x.add_(1.0)?;
                let y = x.mul(2.0)?;
                x.slice(0, 0, 1, 1)?.zero_()?;
                Ok::<_, Error>(y)
            })?;
            let n = call as f32;
            let first = if call == 1 { 2.0 } else { 1.0 };
            assert_eq!(y.to_vec::<f32>()?, [2.0 * first, 2.0 * (2.0 + n), 2.0 * (3.0 + n)], "{backend}");
            assert_eq!(x.to_vec::<f32>()?, [0.0, 2.0 + n, 3.0 + n], "{backend}");
        }
    }
    Ok(())
}

#[test]
fn a_training_step_is_one_graph() -> Result<()> {
    let _turn = turn();
    let make = || -> Result<_> {
        manual_seed(1);
        let params = vec![
            Tensor::randn([8, 5], &CPU)?,
            Tensor::randn([8], &CPU)?,
            Tensor::randn([3, 8], &CPU)?,
            Tensor::randn([3], &CPU)?,
        ];
        for p in &params {
            p.requires_grad_(true)?;
        }
        Ok((params, Tensor::randn([6, 5], &CPU)?, Tensor::from_slice(&[0i64, 1, 2, 0, 1, 2])?))
    };
    let step = |params: &[Tensor], x: &Tensor, y: &Tensor| -> Result<Tensor> {
        for p in params {
            p.set_grad(None);
        }
        let hidden = x.linear(&params[0], Some(&params[1]))?.gelu()?;
        let loss = hidden.linear(&params[2], Some(&params[3]))?.cross_entropy(y)?;
        loss.backward()?;
        let _guard = no_grad();
        let list = TensorList::new(params.to_vec());
        let grads: TensorList = params.iter().filter_map(|p| p.grad()).collect();
        foreach::add_scaled_(&list, &grads, -0.1)?;
        Ok(loss)
    };
    let (params, x, y) = make()?;
    let mut want = Vec::new();
    for _ in 0..5 {
        want.push(step(&params, &x, &y)?.item::<f32>()?);
    }
    for (backend, region) in regions() {
        let (again, x, y) = make()?;
        for want in &want {
            let loss = region.run(|| step(&again, &x, &y))?.item::<f32>()?;
            assert!((loss - want).abs() < 1e-5, "{backend}: {loss} instead of {want}\n{}", region.explain());
        }
        for (a, b) in again.iter().zip(&params) {
            for (a, b) in a.to_vec::<f32>()?.iter().zip(b.to_vec::<f32>()?) {
                assert!((a - b).abs() < 1e-5, "{backend}: {a} {b}");
            }
        }
        assert_eq!(region.explain().graphs.len(), 1, "{}", region.explain());
        assert!(region.explain().recompiles.is_empty(), "{}", region.explain());
        if backend == Backend::Inductor {
            assert_eq!(region.explain().graphs[0].interpreted, None, "{}", region.explain());
        }
    }
    Ok(())
}

#[test]
fn backward_outside_uses_the_compiled_backward() -> Result<()> {
    for (backend, region) in regions() {
        let w = Tensor::from_vec(vec![0.5f32, -1.0, 2.0, 0.25, 1.0, -0.5], [2, 3])?;
        w.requires_grad_(true)?;
        let x = t(&[1.0, 2.0, 3.0]);
        x.linear(&w, None)?.tanh()?.sum()?.backward()?;
        let want = w.grad().unwrap().to_vec::<f32>()?;
        for _ in 0..2 {
            w.set_grad(None);
            let y = region.run(|| x.linear(&w, None)?.tanh())?;
            assert!(y.requires_grad());
            y.sum()?.backward()?;
            let got = w.grad().unwrap().to_vec::<f32>()?;
            for (g, want) in got.iter().zip(&want) {
                assert!((g - want).abs() < 1e-6, "{backend}: {got:?} instead of {want:?}");
            }
        }
        if backend != Backend::Eager {
            assert!(region.explain().graphs[0].has_backward, "{}", region.explain());
        }
    }
    Ok(())
}

#[test]
fn views_that_leave_with_gradients() -> Result<()> {
    for (backend, region) in regions() {
        let w = Tensor::from_vec(vec![0.5f32, -1.0, 2.0, 0.25, 1.0, -0.5], [2, 3])?;
        w.requires_grad_(true)?;
        let scale = t(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let run = |f: &dyn Fn() -> Result<Tensor>| -> Result<Vec<f32>> {
            w.set_grad(None);
            f()?.reshape([6])?.mul(&scale)?.sum()?.backward()?;
            w.grad().unwrap().to_vec::<f32>()
        };
        let body = || w.exp()?.t()?.reshape([3, 2]);
        let want = run(&body)?;
        for _ in 0..2 {
            assert_eq!(run(&|| region.run(body))?, want, "{backend}");
        }
    }
    Ok(())
}

#[test]
fn functions_of_several_arguments() -> Result<()> {
    let scale = 3.0;
    let f = compile(|x: &Tensor, y: &Tensor| (x * y + scale).ok());
    assert_eq!(f(&t(&[1.0, 2.0]), &t(&[2.0, 2.0]))?.to_vec::<f32>()?, [5.0, 7.0]);
    let counter = std::cell::Cell::new(0);
    let g = compile(|| {
        counter.set(counter.get() + 1);
        t(&[1.0]).add(counter.get())
    });
    assert_eq!(g()?.item::<f32>()?, 2.0);
    assert_eq!(g()?.item::<f32>()?, 3.0);
    Ok(())
}

#[test]
fn gradients_of_gradients() -> Result<()> {
    let x = Tensor::randn([5, 4], &CPU)?;
    x.requires_grad_(true)?;
    let again = GradOptions { create_graph: true, ..GradOptions::default() };
    let body = || -> Result<Vec<Tensor>> {
        let y = (x.tanh()? * &x).sum().ok()?;
        let first = grad(&[&y], &[&x], &[], again)?.remove(0).expect("y depends on x");
        let length = (&first * &first).sum().ok()?;
        let second = grad(&[&length], &[&x], &[], GradOptions::default())?.remove(0);
        let second = second.expect("so does its gradient");
        Ok(vec![y, first, (&second * 2.0 + &x).ok()?])
    };
    check(body)?;
    // The passes are part of the graph.
    let region = Compile::new().region();
    region.run(body)?;
    let explanation = region.explain();
    assert_eq!(explanation.fallbacks, [], "{explanation}");
    assert_eq!((explanation.breaks.len(), explanation.graphs.len()), (0, 1), "{explanation}");
    assert_eq!(explanation.graphs[0].interpreted, None, "{explanation}");
    Ok(())
}

#[test]
fn weights_of_grad_made_inside() -> Result<()> {
    let x = Tensor::randn([6], &CPU)?;
    x.requires_grad_(true)?;
    check(|| {
        let (y, weight) = (x.sin()?, x.detach()?.exp()?);
        let slope = grad(&[&y], &[&x], &[Some(&weight)], GradOptions::default())?.remove(0);
        Ok(vec![slope.expect("y depends on x").mul(3.0)?])
    })
}
