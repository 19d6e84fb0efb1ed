//! Gradients of gradients: learning to learn, curvature, solvers that use it.

use kiln::prelude::*;
use kiln::tensor::{GradOptions, grad};
use kiln::{Error, Result};

use super::{CPU, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("meta":
    maml, reptile, hessian_vector_product, newtons_method, learned_learning_rate, implicit_layer,
);

/// Gradients that are on the tape themselves.
const AGAIN: GradOptions = GradOptions { retain_graph: None, create_graph: true, allow_unused: false };

/// The gradients of a loss, all of which must be there.
fn gradients(loss: &Tensor, parameters: &[&Tensor], options: GradOptions) -> Result<Vec<Tensor>> {
    let found: Option<Vec<Tensor>> = grad(&[loss], parameters, &[], options)?.into_iter().collect();
    found.ok_or_else(|| Error::State("the loss depends on every parameter".into()))
}

/// Weights are learned from which two steps of training do best: backward through the steps.
fn maml(step: &Step) -> Result<Record> {
    let (w, b) = (weight([1, 3], 0.5)?, weight([1], 0.5)?);
    let optimizer = optim::Adam::new(vec![w.clone(), b.clone()], 0.05)?;
    let loss_of = |w: &Tensor, b: &Tensor, (x, y): &(Tensor, Tensor)| {
        x.linear(w, Some(b))?.tanh()?.mse_loss(y, Reduction::Mean)
    };
    let mut record = Record::new();
    for _ in 0..3 {
        let set = || Ok::<_, Error>((Tensor::randn([6, 3], &CPU)?, Tensor::rand([6, 1], &CPU)?));
        let (support, query) = (set()?, set()?);
        let loss = step.run(|| {
            let (mut fast_w, mut fast_b) = (w.clone(), b.clone());
            for _ in 0..2 {
                let slopes = gradients(&loss_of(&fast_w, &fast_b, &support)?, &[&fast_w, &fast_b], AGAIN)?;
                fast_w = (&fast_w - &slopes[0] * 0.3).ok()?;
                fast_b = (&fast_b - &slopes[1] * 0.3).ok()?;
            }
            optimizer.zero_grad();
            let loss = loss_of(&fast_w, &fast_b, &query)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&w, &b])?;
    Ok(record)
}

/// Weights move towards where a few steps of training lead: no second derivative.
fn reptile(step: &Step) -> Result<Record> {
    let w = weight([3, 4], 0.5)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (x, y) = samples(8, 4, 3)?;
        let loss = step.run(|| {
            let fast = w.detach()?.clone_tensor()?;
            let mut loss = Tensor::zeros((), &CPU)?;
            for _ in 0..3 {
                let trained = fast.detach()?.requires_grad_(true)?.clone();
                loss = x.linear(&trained, None)?.cross_entropy(&y)?;
                loss.backward()?;
                fast.add_scaled_(&gradient(&trained)?, -0.2)?;
            }
            let _guard = no_grad();
            w.lerp_(&fast, 0.5)?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// The largest curvature of a loss, by powers of Hessian-vector products.
fn hessian_vector_product(step: &Step) -> Result<Record> {
    let w = weight([4, 5], 0.5)?;
    let (x, y) = samples(12, 5, 4)?;
    let mut v = Tensor::randn([4, 5], &CPU)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let (next, curvature) = step.run(|| {
            let loss = x.linear(&w, None)?.cross_entropy(&y)?;
            let slope = gradients(&loss, &[&w], AGAIN)?.remove(0);
            let along = (slope * &v).sum().ok()?;
            let product = gradients(&along, &[&w], GradOptions::default())?.remove(0);
            let curvature = product.norm(2.0)?;
            Ok::<_, Error>((product.div(&curvature)?, curvature))
        })?;
        v = next;
        record.tensor("curvature", &curvature)?;
    }
    record.tensor("direction", &v)?;
    Ok(record)
}

/// Minimises a function of two numbers by its slope and Hessian, row by row.
fn newtons_method(step: &Step) -> Result<Record> {
    let point = Tensor::from_slice(&[-1.2f32, 1.0])?;
    point.requires_grad_(true)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let value = step.run(|| {
            let (x, y) = (point.select(0, 0)?, point.select(0, 1)?);
            let value = ((1.0 - &x).square() + (&y - x.square()?).square() * 10.0).ok()?;
            let slope = gradients(&value, &[&point], AGAIN)?.remove(0);
            let mut rows = Vec::new();
            for i in 0..2 {
                let options = GradOptions { retain_graph: Some(true), ..GradOptions::default() };
                rows.push(gradients(&slope.select(0, i)?, &[&point], options)?.remove(0));
            }
            let _guard = no_grad();
            let hessian = Tensor::stack(&rows, 0)?;
            let at = |i: usize, j: usize| hessian.i((i, j));
            let determinant = (at(0, 0)? * at(1, 1)? - at(0, 1)? * at(1, 0)?).ok()?;
            let (a, b) = (slope.select(0, 0)?, slope.select(0, 1)?);
            let dx = ((at(1, 1)? * &a - at(0, 1)? * &b) / &determinant).ok()?;
            let dy = ((at(0, 0)? * &b - at(1, 0)? * &a) / &determinant).ok()?;
            point.sub_(&Tensor::stack([&dx, &dy], 0)?)?;
            Ok::<_, Error>(value)
        })?;
        record.tensor("value", &value)?;
        record.tensor("point", &point)?;
    }
    Ok(record)
}

/// The learning rate is trained too: by the product of this gradient and the last one.
fn learned_learning_rate(step: &Step) -> Result<Record> {
    let (w, x) = (weight([5], 0.5)?, Tensor::randn([16, 5], &CPU)?);
    let y = x.mv(&Tensor::ones([5], &CPU)?)?;
    let (lr, last) = (Tensor::full((), 0.01, &CPU)?, Tensor::zeros([5], &CPU)?);
    let mut record = Record::new();
    for _ in 0..8 {
        let loss = step.run(|| {
            w.set_grad(None);
            let loss = x.mv(&w)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            let slope = gradient(&w)?;
            lr.add_(&slope.dot(&last)?.mul(1e-3)?)?.clamp_(1e-4, 0.2)?;
            last.copy_(&slope)?;
            w.sub_(&slope.mul(&lr)?)?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("lr", &lr)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// A fixed point is found without gradients, then one step with them: the cheap gradient of an implicit layer.
fn implicit_layer(step: &Step) -> Result<Record> {
    let (inner, outer, out) = (weight([8, 8], 0.15)?, weight([8, 4], 0.4)?, weight([3, 8], 0.4)?);
    let (x, y) = samples(10, 4, 3)?;
    let optimizer = optim::Adam::new(vec![inner.clone(), outer.clone(), out.clone()], 0.02)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (loss, residual) = step.run(|| {
            optimizer.zero_grad();
            let layer = |z: &Tensor| (z.linear(&inner, None)? + x.linear(&outer, None)?).tanh().ok();
            let mut z = Tensor::zeros([10, 8], &CPU)?;
            {
                let _guard = no_grad();
                for _ in 0..6 {
                    z = layer(&z)?;
                }
            }
            let fixed = layer(&z)?;
            let residual = (&fixed - &z).ok()?.detach()?.norm(2.0)?;
            let loss = fixed.linear(&out, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>((loss, residual))
        })?;
        record.tensors("loss", [&loss, &residual])?;
    }
    record.tensors("parameters", [&inner, &outer, &out])?;
    Ok(record)
}
