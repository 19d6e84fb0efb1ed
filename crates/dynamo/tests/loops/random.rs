//! Random loops: bodies of a few ops on what is carried, on elements, on other tensors and on numbers.

use kiln_dynamo::Compile;
use kiln_tensor::{Result, Tensor};
use kiln_testkit::Rng;

use super::{close, normal};

/// A step of a body: an op, and which values it takes.
#[derive(Clone, Debug)]
struct Step {
    op: usize,
    left: usize,
    right: usize,
    number: f64,
}

/// A program: prologue, loop, epilogue.
#[derive(Clone, Debug)]
struct Program {
    carries: usize,
    body: Vec<Step>,
    /// Which values are carried on, by carry.
    next: Vec<usize>,
    /// Elements are taken from the last to the first.
    reverse: bool,
    /// Which value of each step is kept for after the loop.
    kept: usize,
    dim: usize,
}

impl Program {
    fn random(rng: &mut Rng) -> Program {
        let carries = 1 + rng.below(3);
        let length = 1 + rng.below(6);
        // Values: carries, the element, two tensors of the program, then what steps make.
        let given = carries + 3;
        let step = |rng: &mut Rng, made: usize| Step {
            op: rng.below(8),
            left: rng.below(given + made),
            right: rng.below(given + made),
            number: rng.normal(),
        };
        let body: Vec<Step> = (0..length).map(|made| step(rng, made)).collect();
        let any = |rng: &mut Rng| rng.below(given + length);
        Program {
            carries,
            next: (0..carries).map(|_| any(rng)).collect(),
            reverse: rng.one_in(3),
            kept: any(rng),
            dim: rng.below(3),
            body,
        }
    }

    fn run(&self, xs: &Tensor, others: &[Tensor]) -> Result<Vec<Tensor>> {
        let steps = xs.shape()[0];
        let mut carries: Vec<Tensor> =
            (0..self.carries).map(|i| others[0].mul(i as f64 + 0.5)).collect::<Result<_>>()?;
        let mut kept = Vec::new();
        for t in 0..steps {
            let t = if self.reverse { steps - 1 - t } else { t };
            let mut values = carries.clone();
            values.push(xs.select(0, t as i64)?);
            values.extend(others.iter().cloned());
            for step in &self.body {
                let (left, right) = (&values[step.left], &values[step.right]);
                let value = match step.op {
                    0 => left.add(right)?.mul(0.5)?,
                    1 => left.mul(right)?.tanh()?,
                    2 => left.matmul(right)?.tanh()?,
                    3 => left.mul(step.number)?.sin()?,
                    4 => left.transpose(0, 1)?,
                    5 => left.softmax(-1)?,
                    6 => left.maximum(right)?,
                    _ => left.sum_dim(1, true)?.sigmoid()?.mul(right)?,
                };
                values.push(value);
            }
            carries = self.next.iter().map(|&next| values[next].clone()).collect();
            kept.push(values[self.kept].clone());
        }
        let stacked = Tensor::stack(&kept, self.dim as i64)?;
        let mut results = vec![stacked.mul(2.0)?];
        for carry in &carries {
            results.push(carry.mul(1.5)?);
        }
        Ok(results)
    }
}

#[test]
fn random_loops() {
    let programs = std::env::var("KILN_LOOPS").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let mut rolled = 0;
    for seed in 0..programs {
        let mut rng = Rng::new(seed);
        let program = Program::random(&mut rng);
        let check = |rng: &mut Rng| -> Result<usize> {
            let others = [normal(rng, &[3, 3])?, normal(rng, &[3, 3])?];
            let differentiate = rng.one_in(2);
            if differentiate {
                others.iter().try_for_each(|other| other.requires_grad_(true).map(drop))?;
            }
            let region = Compile::new().region();
            for steps in [6, 9, 14, 7, 23, 14] {
                let xs = normal(rng, &[steps, 3, 3])?;
                let run = || -> Result<Vec<Tensor>> {
                    let results = program.run(&xs, &others)?;
                    if differentiate {
                        let mut loss = results[0].square()?.sum()?;
                        for result in &results[1..] {
                            loss = loss.add(&result.sum()?)?;
                        }
                        if loss.requires_grad() {
                            loss.backward()?;
                        }
                    }
                    results.into_iter().map(|result| result.detach()).collect()
                };
                let values = |results: Vec<Tensor>| -> Result<Vec<f64>> {
                    let mut all = Vec::new();
                    for result in results {
                        all.extend(result.to_vec::<f64>()?);
                    }
                    for other in &others {
                        if let Some(grad) = other.grad() {
                            all.extend(grad.to_vec::<f64>()?);
                        }
                        other.set_grad(None);
                    }
                    Ok(all)
                };
                let eager = values(run()?)?;
                let compiled = values(region.run(run)?)?;
                close(&eager, &compiled, &format!("seed {seed}, {steps} steps of {program:?}"));
            }
            let explanation = region.explain();
            Ok(explanation.graphs.iter().filter_map(|graph| graph.sizes.as_ref()).map(|s| s.made).sum())
        };
        rolled += usize::from(check(&mut rng).expect("a random loop") > 0);
    }
    assert!(rolled * 2 > programs as usize, "{rolled} of {programs} programs had one plan for all lengths");
}
