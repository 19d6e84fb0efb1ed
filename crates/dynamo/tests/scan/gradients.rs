//! Gradients of scans: beside finite differences and beside the loop that is written by hand.

use kiln_dynamo::{Compile, Scan, compile, scan, while_loop};
use kiln_tensor::{DType, GradOptions, Result, Tensor, grad};

use crate::values::{Weights, cell, sequence, weights};

fn loss(last: &Tensor, ys: &Tensor) -> Result<Tensor> {
    last.square()?.sum()?.add(&ys.mul(&ys.sin()?)?.sum()?)
}

fn by_scan(all: &[Tensor; 5]) -> Result<Tensor> {
    let [h, xs, w, u, b] = all;
    let (last, ys) = scan(h, xs, |h, x| {
        let h = cell(&h, &x, w, u, b)?;
        Ok((h.clone(), h.mul(&h)?))
    })?;
    loss(&last, &ys)
}

fn by_hand(all: &[Tensor; 5]) -> Result<Tensor> {
    let [h, xs, w, u, b] = all;
    let (mut h, mut ys) = (h.clone(), Vec::new());
    for x in xs {
        h = cell(&h, &x?, w, u, b)?;
        ys.push(h.mul(&h)?);
    }
    let ys = if ys.is_empty() {
        Tensor::zeros([0, 2, 4], (DType::F64, kiln_tensor::Device::Cpu))?
    } else {
        Tensor::stack(&ys, 0)?
    };
    loss(&h, &ys)
}

fn all(length: usize) -> Result<[Tensor; 5]> {
    let Weights { w, u, b } = weights(DType::F64)?;
    let (h, xs) = sequence(length, DType::F64)?;
    Ok([h, xs, w, u, b])
}

fn leaves(length: usize) -> Result<[Tensor; 5]> {
    let all = all(length)?;
    for tensor in &all {
        tensor.requires_grad_(true)?;
    }
    Ok(all)
}

fn gradients(of: &[Tensor; 5]) -> Result<Vec<Vec<f64>>> {
    of.iter().map(|t| t.grad().map_or(Ok(Vec::new()), |grad| grad.to_vec::<f64>())).collect()
}

fn near(got: &[Vec<f64>], want: &[Vec<f64>], tolerance: f64, what: &str) {
    for (place, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what} {place}");
        for (got, want) in got.iter().zip(want) {
            assert!(
                (got - want).abs() <= tolerance * want.abs().max(1.0),
                "{what} {place}: {got} is not {want}"
            );
        }
    }
}

#[test]
fn gradients_are_those_of_the_loop() -> Result<()> {
    for length in [0, 1, 2, 6] {
        let want = leaves(length)?;
        by_hand(&want)?.backward()?;
        let mut want = gradients(&want)?;
        let eager = leaves(length)?;
        by_scan(&eager)?.backward()?;
        if length == 0 {
            // What no step uses has no gradient in the loop; a scan's is zero.
            want = gradients(&eager)?;
            assert!(want[2..].iter().flatten().all(|x| *x == 0.0));
        }
        near(&gradients(&eager)?, &want, 1e-13, "eager");
        // The whole step compiled, then a scan whose result leaves with gradients.
        let inside = leaves(length)?;
        compile(|| by_scan(&inside)?.backward())()?;
        near(&gradients(&inside)?, &want, 1e-13, "compiled");
        let leaving = leaves(length)?;
        compile(|| by_scan(&leaving))()?.backward()?;
        near(&gradients(&leaving)?, &want, 1e-13, "leaving");
    }
    Ok(())
}

#[test]
fn gradients_are_finite_differences() -> Result<()> {
    let at = leaves(4)?;
    by_scan(&at)?.backward()?;
    let step = 1e-6;
    for (place, gradient) in gradients(&at)?.iter().enumerate() {
        for i in [0, gradient.len() / 2, gradient.len() - 1] {
            let moved = |by: f64| -> Result<f64> {
                let mut other = all(4)?;
                let mut elements = other[place].to_vec::<f64>()?;
                elements[i] += by;
                other[place] = Tensor::from_slice(&elements)?.reshape(other[place].shape())?;
                by_scan(&other)?.item::<f64>()
            };
            let slope = (moved(step)? - moved(-step)?) / (2.0 * step);
            assert!(
                (slope - gradient[i]).abs() < 1e-6 * slope.abs().max(1.0),
                "{place} {i}: {slope} {gradient:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn second_derivatives() -> Result<()> {
    let second = |f: &dyn Fn(&[Tensor; 5]) -> Result<Tensor>| -> Result<Vec<Vec<f64>>> {
        let at = leaves(3)?;
        let inputs: Vec<&Tensor> = at.iter().collect();
        let options = GradOptions { create_graph: true, ..GradOptions::default() };
        let grads = grad(&[&f(&at)?], &inputs, &[], options)?;
        let mut sum = Tensor::full((), 0.0, (DType::F64, kiln_tensor::Device::Cpu))?;
        for grad in grads.into_iter().flatten() {
            sum = sum.add(&grad.square()?.sum()?)?;
        }
        sum.backward()?;
        gradients(&at)
    };
    let want = second(&by_hand)?;
    near(&second(&by_scan)?, &want, 1e-12, "eager");
    Ok(())
}

/// Twenty lengths, a training step each, with a learning rate that falls.
#[test]
fn training_steps_of_many_lengths() -> Result<()> {
    use std::cell::Cell;
    let (mine, theirs) = (leaves(1)?, leaves(1)?);
    let rate = Cell::new(0.1);
    let update = |p: &[Tensor; 5]| -> Result<()> {
        let _mode = kiln_tensor::no_grad();
        for tensor in &p[2..] {
            let Some(gradient) = tensor.grad() else { continue };
            tensor.sub_(&gradient.mul(rate.get())?)?;
            tensor.set_grad(None);
        }
        Ok(())
    };
    let step = Compile::new().function(|h: &Tensor, xs: &Tensor| {
        let [_, _, w, u, b] = &mine;
        let loss = by_scan(&[h.clone(), xs.clone(), w.clone(), u.clone(), b.clone()])?;
        loss.backward()?;
        update(&mine)?;
        Ok(loss)
    });
    for length in (3..23).rev() {
        rate.set(0.1 / length as f64);
        let (h, xs) = sequence(length, DType::F64)?;
        let got = step(&h, &xs)?.item::<f64>()?;
        let [_, _, w, u, b] = &theirs;
        let loss = by_hand(&[h, xs, w.clone(), u.clone(), b.clone()])?;
        loss.backward()?;
        update(&theirs)?;
        let want = loss.item::<f64>()?;
        assert!((got - want).abs() < 1e-11 * want.abs().max(1.0), "{length}: {got} is not {want}");
    }
    let explanation = step.explain();
    assert!(explanation.recompiles.len() <= 2, "{explanation}");
    Ok(())
}

/// Several dtypes, integers among them, the other direction, one in another, detached parts, and no_grad in a body.
#[test]
fn gradients_through_the_rest() -> Result<()> {
    let f = |x: &Tensor, w: &Tensor, by_hand: bool| -> Result<Tensor> {
        let count = Tensor::full((), 0, (DType::I64, kiln_tensor::Device::Cpu))?;
        let wide = Tensor::full([2], 0.5, (DType::F64, kiln_tensor::Device::Cpu))?;
        let narrow = Tensor::full([2], 1.0, (DType::F32, kiln_tensor::Device::Cpu))?;
        let step =
            |(n, a, c): (Tensor, Tensor, Tensor), x: Tensor| -> Result<((Tensor, Tensor, Tensor), Tensor)> {
                let cut = {
                    let _mode = kiln_tensor::no_grad();
                    a.mul(w)?
                };
                let n = n.add(1)?;
                let a = a
                    .mul(w)?
                    .add(&x)?
                    .add(&c.to_dtype(DType::F64)?)?
                    .add(&n.to_dtype(DType::F64)?.mul(w)?)?
                    .sin()?;
                let c = c.mul(0.5)?.add(&a.to_dtype(DType::F32)?)?;
                Ok(((n, a.clone(), c), a.mul(&cut)?.add(&a.detach()?.mul(w)?)?))
            };
        let ((_, a, c), ys) = if by_hand {
            let (mut carry, mut ys) = ((count, wide, narrow), Vec::new());
            for t in (0..x.shape()[0]).rev() {
                let (next, y) = step(carry, x.select(0, t as i64)?)?;
                carry = next;
                ys.insert(0, y);
            }
            (carry, Tensor::stack(&ys, 0)?)
        } else {
            Scan::new().reverse().run(&(count, wide, narrow), x, step)?
        };
        a.sum()?.add(&c.to_dtype(DType::F64)?.square()?.sum()?)?.add(&ys.square()?.sum()?)
    };
    let run = |by_hand: bool, compiled: bool| -> Result<Vec<Vec<f64>>> {
        let x = Tensor::from_slice(&[0.1f64, -0.2, 0.3, 0.4, 0.5, -0.6])?.reshape([3, 2])?;
        let w = Tensor::from_slice(&[0.7f64, -1.3])?;
        x.requires_grad_(true)?;
        w.requires_grad_(true)?;
        if compiled {
            compile(|| f(&x, &w, by_hand)?.backward())()?;
        } else {
            f(&x, &w, by_hand)?.backward()?;
        }
        [x, w].iter().map(|t| t.grad().map_or(Ok(Vec::new()), |g| g.to_vec::<f64>())).collect()
    };
    let want = run(true, false)?;
    near(&run(false, false)?, &want, 1e-6, "eager");
    near(&run(false, true)?, &want, 1e-6, "compiled");
    Ok(())
}

#[test]
fn nested_and_bounded_loops_have_gradients() -> Result<()> {
    let outer = |w: &Tensor, xs: &Tensor| -> Result<Tensor> {
        let one = Tensor::full((), 1.0, (DType::F64, kiln_tensor::Device::Cpu))?;
        let (last, ()) = scan(&one, xs, |h, row| {
            let (h, _) = scan(&h, &row, |h, x| {
                let h = h.mul(w)?.add(&x)?.sin()?;
                Ok((h.clone(), h))
            })?;
            Ok((h, ()))
        })?;
        while_loop(&last, 6, |x| x.abs()?.lt(3.0), |x| x.mul(w)?.add(1.0))
    };
    let by_hand = |w: &Tensor, xs: &Tensor| -> Result<Tensor> {
        let mut h = Tensor::full((), 1.0, (DType::F64, kiln_tensor::Device::Cpu))?;
        for x in &xs.reshape([6])? {
            h = h.mul(w)?.add(&x?)?.sin()?;
        }
        for _ in 0..6 {
            if h.abs()?.item::<f64>()? < 3.0 {
                h = h.mul(w)?.add(1.0)?;
            }
        }
        Ok(h)
    };
    let run = |f: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>| -> Result<Vec<Vec<f64>>> {
        let w = Tensor::full((), 1.4, (DType::F64, kiln_tensor::Device::Cpu))?;
        let xs = Tensor::from_slice(&[0.1f64, -0.2, 0.3, 0.4, 0.5, -0.6])?.reshape([2, 3])?;
        w.requires_grad_(true)?;
        xs.requires_grad_(true)?;
        f(&w, &xs)?.backward()?;
        [w, xs].iter().map(|t| t.grad().map_or(Ok(Vec::new()), |g| g.to_vec::<f64>())).collect()
    };
    let want = run(&by_hand)?;
    near(&run(&outer)?, &want, 1e-13, "eager");
    near(&run(&|w, xs| compile(|| outer(w, xs))())?, &want, 1e-13, "compiled");
    Ok(())
}
