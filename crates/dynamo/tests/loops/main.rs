//! Loops that the program writes itself: whatever the number of steps, results are eager's, and a few steps more or
//! less are the same graph.

use kiln_dynamo::{Compile, Numerics};
use kiln_ir::{DType, Device};
use kiln_tensor::{Result, Tensor};
use kiln_testkit::Rng;

mod random;

const CPU: Device = Device::Cpu;

pub(crate) fn normal(rng: &mut Rng, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|_| 0.5 * rng.normal()).collect();
    Tensor::from_vec(values, shape)
}

/// The weights of a cell, which get gradients.
struct Cell {
    w: Tensor,
    u: Tensor,
    b: Tensor,
}

impl Cell {
    fn new(rng: &mut Rng, inner: usize) -> Result<Cell> {
        let leaf = |tensor: Tensor| tensor.requires_grad_(true).cloned();
        Ok(Cell {
            w: leaf(normal(rng, &[3, inner])?)?,
            u: leaf(normal(rng, &[inner, inner])?)?,
            b: leaf(normal(rng, &[inner])?)?,
        })
    }

    fn step(&self, x: &Tensor, h: &Tensor) -> Result<Tensor> {
        x.matmul(&self.w)?.add(&h.matmul(&self.u)?)?.add(&self.b)?.tanh()
    }

    /// What the gradients are; they are gone after.
    fn take_gradients(&self) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for weight in [&self.w, &self.u, &self.b] {
            if let Some(grad) = weight.grad() {
                all.extend(grad.to_vec::<f64>()?);
            }
            weight.set_grad(None);
        }
        Ok(all)
    }
}

#[track_caller]
pub(crate) fn close(eager: &[f64], compiled: &[f64], what: &str) {
    assert_eq!(eager.len(), compiled.len(), "{what}");
    for (a, b) in eager.iter().zip(compiled) {
        assert!(
            (a - b).abs() <= 1e-9 * a.abs().max(1.0) || (a.is_nan() && b.is_nan()),
            "{what}: {a} and {b}"
        );
    }
}

/// Runs a function on sequences of many lengths, eagerly and compiled, and compares results and gradients. Returns how
/// often it was recompiled and how many lengths had a plan made from one for all.
#[track_caller]
fn compare(lengths: &[usize], f: impl Fn(&Cell, &Tensor, &Tensor) -> Result<Vec<Tensor>>) -> (usize, usize) {
    let run = || -> Result<(usize, usize)> {
        let mut rng = Rng::new(7);
        let cell = Cell::new(&mut rng, 4)?;
        let region = Compile::new().region();
        for &length in lengths {
            let (xs, h) = (normal(&mut rng, &[length, 2, 3])?, normal(&mut rng, &[2, 4])?);
            let values = |results: Vec<Tensor>| -> Result<Vec<f64>> {
                let (mut all, mut loss) = (Vec::new(), None::<Tensor>);
                for result in &results {
                    if result.requires_grad() {
                        let sum = result.sum()?;
                        loss = Some(loss.map_or(Ok(sum.clone()), |loss| loss.add(&sum))?);
                    }
                    all.extend(result.to_vec::<f64>()?);
                }
                loss.map_or(Ok(()), |loss| loss.backward())?;
                Ok(all)
            };
            let eager = values(f(&cell, &xs, &h)?)?;
            let eager_gradients = cell.take_gradients()?;
            let compiled = values(region.run(|| f(&cell, &xs, &h))?)?;
            let gradients = cell.take_gradients()?;
            close(&eager, &compiled, &format!("results of {length} steps"));
            close(&eager_gradients, &gradients, &format!("gradients of {length} steps"));
        }
        let explanation = region.explain();
        let made = explanation.graphs.iter().filter_map(|graph| graph.sizes.as_ref()).map(|sizes| sizes.made);
        Ok((explanation.recompiles.len(), made.sum()))
    };
    run().expect("a loop")
}

const LENGTHS: [usize; 12] = [9, 5, 12, 7, 30, 8, 5, 41, 17, 6, 60, 33];

#[test]
fn a_training_step_serves_all_lengths() {
    let (recompiles, made) = compare(&LENGTHS, |cell, xs, h| {
        let (mut h, mut loss) = (h.clone(), Tensor::zeros((), (DType::F64, CPU))?);
        for t in 0..xs.shape()[0] {
            h = cell.step(&xs.select(0, t as i64)?, &h)?;
            loss = loss.add(&h.square()?.sum()?)?;
        }
        loss.backward()?;
        Ok(vec![loss.detach()?, h.detach()?])
    });
    assert!(recompiles == 0 && made >= 8, "{recompiles} recompiles, {made} plans");
}

#[test]
fn gradients_from_outside() {
    let (recompiles, made) = compare(&LENGTHS, |cell, xs, h| {
        let (mut h, mut all) = (h.clone(), Vec::new());
        for x in &xs.transpose(0, 1)?.transpose(0, 1)? {
            h = cell.step(&x?, &h)?;
            all.push(h.clone());
        }
        let first = Tensor::stack(&all, 0)?.mean()?;
        Ok(vec![first.add(&h.sum()?)?])
    });
    assert!(recompiles == 0 && made >= 8, "{recompiles} recompiles, {made} plans");
}

#[test]
fn stacks_cats_and_other_dims() {
    let (recompiles, made) = compare(&LENGTHS, |cell, xs, h| {
        let xs = xs.transpose(0, 1)?;
        let (start, mut h, mut all, mut wide) = (h, h.clone(), vec![h.clone()], Vec::new());
        for t in (0..xs.shape()[1]).rev() {
            let x = xs.slice(1, t as i64, t as i64 + 1, 1)?.squeeze(1)?;
            h = cell.step(&x, &h)?.mul(0.9)?.add(&start.mul(0.1)?)?;
            all.push(h.clone());
            wide.push(h.mul(2.0)?);
        }
        let loss = Tensor::stack(&all, 1)?.square()?.sum()?;
        loss.backward()?;
        Ok(vec![loss.detach()?, Tensor::cat(&wide, 1)?.detach()?.mul(1.0)?])
    });
    assert!(recompiles <= 1 && made >= 6, "{recompiles} recompiles, {made} plans");
}

#[test]
fn one_loop_after_another() {
    let (recompiles, made) = compare(&LENGTHS, |cell, xs, h| {
        let (mut forward, mut all) = (h.clone(), Vec::new());
        for t in 0..xs.shape()[0] {
            forward = cell.step(&xs.select(0, t as i64)?, &forward)?;
            all.push(forward.clone());
        }
        let mut backward = h.clone();
        let mut loss = Tensor::zeros((), (DType::F64, CPU))?;
        for (t, other) in all.iter().enumerate().rev() {
            backward = cell.step(&xs.select(0, t as i64)?, &backward)?;
            loss = loss.add(&backward.mul(other)?.mean()?)?;
        }
        loss.backward()?;
        Ok(vec![loss.detach()?])
    });
    assert!(recompiles == 0 && made >= 8, "{recompiles} recompiles, {made} plans");
}

#[test]
fn steps_without_elements() {
    // An integration whose step is a number of the program.
    let mut rng = Rng::new(3);
    let (a, y) = (normal(&mut rng, &[5, 5]).expect("a"), normal(&mut rng, &[5]).expect("y"));
    let region = Compile::new().region();
    for (call, steps) in [8, 20, 11, 5, 64, 17, 33, 40].into_iter().enumerate() {
        let dt = 0.01 * (call + 1) as f64;
        let f = || -> Result<Tensor> {
            let mut y = y.clone();
            for _ in 0..steps {
                let k = a.matmul(&y)?.sin()?;
                y = y.add(&k.mul(dt)?)?;
            }
            Ok(y)
        };
        let (eager, compiled) = (f().expect("eager"), region.run(f).expect("compiled"));
        close(
            &eager.to_vec().expect("values"),
            &compiled.to_vec().expect("values"),
            &format!("{steps} steps"),
        );
    }
    assert_eq!(region.explain().recompiles.len(), 0);
}

/// What is no loop of equal steps stays what it was.
#[test]
fn what_only_looks_like_a_loop() {
    // A number that is another one in each step.
    compare(&LENGTHS, |cell, xs, h| {
        let mut h = h.clone();
        for t in 0..xs.shape()[0] {
            h = cell.step(&xs.select(0, t as i64)?, &h)?.mul(1.0 / (t as f64 + 1.0))?;
        }
        Ok(vec![h.sum()?])
    });
    // Every state leaves.
    compare(&[9, 5, 12, 7, 9], |cell, xs, h| {
        let (mut h, mut all) = (h.clone(), Vec::new());
        for t in 0..xs.shape()[0] {
            h = cell.step(&xs.select(0, t as i64)?, &h)?;
            all.push(h.clone());
        }
        Ok(all)
    });
    // What comes out is a part of a tensor, and is changed later.
    compare(&LENGTHS, |_, xs, h| {
        let (mut h, mut x, xs) = (h.clone(), h.clone(), xs.clone_tensor()?);
        for t in 0..xs.shape()[0] {
            x = xs.select(0, t as i64)?;
            h = h.mul(0.5)?.add(&x.sum()?)?.sin()?;
        }
        x.add_(1.0)?;
        Ok(vec![h.sum()?, xs.sum()?.add(&x.sum()?)?])
    });
    // Two steps back, and a step that looks at a fixed one.
    compare(&LENGTHS, |cell, xs, h| {
        let (mut before, mut h) = (h.mul(0.5)?, h.clone());
        let mut first = None;
        for t in 0..xs.shape()[0] {
            let next = cell.step(&xs.select(0, t as i64)?, &h)?.add(&before)?;
            let next = next.add(&*first.get_or_insert(next.clone()))?;
            (before, h) = (h, next);
        }
        Ok(vec![h.sum()?])
    });
}

#[test]
fn options_that_want_a_graph_each() {
    for compile in [Compile::new().dynamic(false), Compile::new().numerics(Numerics::Strict)] {
        let region = compile.region();
        let x = Tensor::ones([3], (DType::F64, CPU)).expect("x");
        for steps in [5, 9, 6] {
            let f = || (0..steps).try_fold(x.clone(), |y, _| y.sin()?.mul(1.5));
            let (eager, compiled) = (f().expect("eager"), region.run(f).expect("compiled"));
            assert_eq!(eager.to_vec::<f64>().expect("values"), compiled.to_vec::<f64>().expect("values"));
        }
        assert_eq!(region.explain().graphs.len(), 3);
    }
}
