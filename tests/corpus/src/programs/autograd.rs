//! Gradients in the hands of the program: leaves made on the way, gradients looked at, changed or defined by the
//! user's own code.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln::prelude::*;
use kiln::{Context, Error, Function, GradOptions, Result, backward_all, grad};

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("autograd":
    saliency_map, projected_gradient_attack, smoothed_gradients, class_activation_map, frozen_critic,
    binary_weights, gradient_reversal_layer, clipped_in_the_middle, swish_differentiated_twice,
    dampened_parameters, noisy_gradients_by_hooks, losses_of_many_tasks, losses_with_weights,
);

/// Which pixels the prediction depends on: the gradient of the winning score with respect to the picture.
fn saliency_map(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 4)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let picture = Tensor::randn([5, 6], &CPU)?;
        let map = step.run(|| {
            let picture = picture.detach()?;
            picture.requires_grad_(true)?;
            model.forward(&picture)?.amax_dim(1, false)?.sum()?.backward()?;
            gradient(&picture)?.abs()
        })?;
        record.tensor("map", &map)?;
    }
    Ok(record)
}

/// An attack in small steps that stays near the picture, and a training step on what it finds.
fn projected_gradient_attack(step: &Step) -> Result<Record> {
    let model = classifier(6, 16, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
    let (x, y) = samples(10, 6, 3)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            let mut near = x.clone_tensor()?;
            for _ in 0..3 {
                near = near.detach()?;
                near.requires_grad_(true)?;
                model.forward(&near)?.cross_entropy(&y)?.backward()?;
                let moved = (&near + gradient(&near)?.sign()? * 0.05).ok()?.detach()?;
                near = (&x + (moved - &x).clamp(-0.1, 0.1)).ok()?;
            }
            optimizer.zero_grad();
            let loss = model.forward(&near.detach()?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Gradients averaged over noisy copies of the input.
fn smoothed_gradients(step: &Step) -> Result<Record> {
    let model = classifier(4, 8, 2)?;
    let x = Tensor::randn([3, 4], &CPU)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let mean = step.run(|| {
            let mut total = x.zeros_like()?;
            for _ in 0..4 {
                let noisy = (&x + x.randn_like()? * 0.1).ok()?;
                noisy.requires_grad_(true)?;
                let score = model.forward(&noisy)?.select(1, 0)?.sum()?;
                let slope = grad(&[&score], &[&noisy], &[], GradOptions::default())?.remove(0);
                total = total.add(&slope.ok_or_else(|| Error::State("the score depends on it".into()))?)?;
            }
            total.div(4.0)
        })?;
        record.tensor("mean", &mean)?;
    }
    Ok(record)
}

/// Feature maps weighted by the mean of their gradients, which are retained.
fn class_activation_map(step: &Step) -> Result<Record> {
    let (kernel, head) = (weight([3, 1, 3, 3], 0.5)?, nn::Linear::new(3, 2)?);
    let mut record = Record::new();
    for class in [0, 1, 0] {
        let picture = Tensor::randn([2, 1, 6, 6], &CPU)?;
        let map = step.run(|| {
            let features = picture.conv2d(&kernel, None, 1, 1, 1, 1)?.relu()?;
            features.retain_grad()?;
            let scores = head.forward(&features.mean_dim(&[2, 3][..], false)?)?;
            scores.select(1, class)?.sum()?.backward()?;
            let weights = gradient(&features)?.mean_dim(&[2, 3][..], true)?;
            features.mul(&weights)?.sum_dim(1, false)?.relu()?.detach()
        })?;
        record.tensor("map", &map)?;
    }
    Ok(record)
}

/// The critic's parameters are frozen while the generator learns through it.
fn frozen_critic(step: &Step) -> Result<Record> {
    let (generator, critic) = (classifier(2, 8, 3)?, classifier(3, 8, 1)?);
    let makers = optim::Adam::new(generator.parameters(), 0.01)?;
    let judges = optim::Adam::new(critic.parameters(), 0.01)?;
    let freeze = |on: bool| critic.parameters().iter().try_for_each(|p| p.requires_grad_(!on).map(drop));
    let mut record = Record::new();
    for _ in 0..4 {
        let (real, noise) = (Tensor::randn([6, 3], &CPU)?, Tensor::randn([6, 2], &CPU)?);
        let (first, second) = step.run(|| {
            let fake = generator.forward(&noise)?;
            judges.zero_grad();
            let first = (critic.forward(&fake.detach()?)?.mean()? - critic.forward(&real)?.mean()?).ok()?;
            first.backward()?;
            judges.step()?;
            freeze(true)?;
            makers.zero_grad();
            let second = critic.forward(&fake)?.mean()?.neg()?;
            second.backward()?;
            makers.step()?;
            freeze(false)?;
            Ok::<_, Error>((first, second))
        })?;
        record.tensors("losses", [&first, &second])?;
    }
    record.tensors("generator", &generator.parameters())?;
    record.tensors("critic", &critic.parameters())?;
    Ok(record)
}

/// Signs, whose gradient is that of a clamp.
struct Sign;

impl Function for Sign {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        context.save_for_backward(inputs);
        Ok(vec![inputs[0].sign()?])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let inside = context.saved()[0].abs()?.le(1.0)?;
        Ok(vec![Some(inside.where_self(&grads[0], 0.0)?)])
    }
}

/// A network whose weights are −1 and 1 when it computes, trained by a straight-through estimator.
fn binary_weights(step: &Step) -> Result<Record> {
    let (first, second) = (weight([16, 6], 0.5)?, weight([3, 16], 0.5)?);
    let optimizer = optim::SGD::new(vec![first.clone(), second.clone()], 0.1)?;
    let (x, y) = samples(12, 6, 3)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let hidden = x.linear(&Sign.apply(&[&first])?, None)?.tanh()?;
            let loss = hidden.linear(&Sign.apply(&[&second])?, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("weights", [&first, &second])?;
    Ok(record)
}

/// The same forwards; the gradient is turned round, as strongly as the schedule says.
struct Reversal(f64);

impl Function for Reversal {
    fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grads[0].mul(-self.0)?)])
    }
}

/// Features that tell classes apart and hide which domain they come from.
fn gradient_reversal_layer(step: &Step) -> Result<Record> {
    let features = nn::seq![nn::Linear::new(6, 12)?, nn::Tanh];
    let (classes, domains) = (nn::Linear::new(12, 3)?, nn::Linear::new(12, 2)?);
    let parameters = [features.parameters(), classes.parameters(), domains.parameters()].concat();
    let optimizer = optim::SGD::new(parameters.clone(), 0.1)?;
    let (x, y) = samples(10, 6, 3)?;
    let domain = Tensor::randint(0, 2, [10], &CPU)?;
    let mut record = Record::new();
    for epoch in 0..5 {
        let strength = 2.0 / (1.0 + (-0.5 * f64::from(epoch)).exp()) - 1.0;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let shared = features.forward(&x)?;
            let hidden = Reversal(strength).apply(&[&shared])?;
            let loss = (classes.forward(&shared)?.cross_entropy(&y)?
                + domains.forward(&hidden)?.cross_entropy(&domain)?)
            .ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// The gradient of the hidden state is clipped on its way back through time.
fn clipped_in_the_middle(step: &Step) -> Result<Record> {
    struct Clip(f64);
    impl Function for Clip {
        fn forward(&mut self, _: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0].clone()])
        }

        fn backward(&self, _: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(grads[0].clamp(-self.0, self.0)?)])
        }
    }
    let (inner, outer) = (weight([4, 4], 1.0)?, weight([4, 3], 0.7)?);
    let optimizer = optim::SGD::new(vec![inner.clone(), outer.clone()], 0.05)?;
    let series = Tensor::randn([5, 2, 3], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut hidden = Tensor::zeros([2, 4], &CPU)?;
            for time in 0..5 {
                let next = series.select(0, time)?.linear(&outer, None)? + hidden.linear(&inner, None)?;
                hidden = Clip(0.05).apply(&[&next.tanh().ok()?])?;
            }
            let loss = hidden.square()?.mean()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("weights", [&inner, &outer])?;
    Ok(record)
}

/// x · sigmoid(x) with a backward of its own, which keeps the input alone.
struct Swish;

impl Function for Swish {
    fn forward(&mut self, context: &mut Context, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        context.save_for_backward(inputs);
        Ok(vec![inputs[0].mul(&inputs[0].sigmoid()?)?])
    }

    fn backward(&self, context: &Context, grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let x = &context.saved()[0];
        let gate = x.sigmoid()?;
        let slope = (&gate + x * &gate * (1.0 - &gate)).ok()?;
        Ok(vec![Some(grads[0].mul(&slope)?)])
    }
}

/// A penalty on the slope of a network whose activation is a custom function: its backward is differentiated.
fn swish_differentiated_twice(step: &Step) -> Result<Record> {
    let (first, second) = (nn::Linear::new(2, 12)?, nn::Linear::new(12, 1)?);
    let parameters = [first.parameters(), second.parameters()].concat();
    let optimizer = optim::Adam::new(parameters.clone(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let points = Tensor::rand([8, 2], &CPU)?;
        let loss = step.run(|| {
            let points = points.detach()?;
            points.requires_grad_(true)?;
            let value = second.forward(&Swish.apply(&[&first.forward(&points)?])?)?;
            let options = GradOptions { create_graph: true, ..GradOptions::default() };
            let slope = grad(&[&value.sum()?], &[&points], &[], options)?.remove(0);
            let slope = slope.ok_or_else(|| Error::State("the value depends on the points".into()))?;
            let loss = (slope.square()?.sum_dim(1, false)? - 1.0).square().mean().ok()?;
            optimizer.zero_grad();
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// Hooks on parameters make the gradients of the first layers smaller.
fn dampened_parameters(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let calls = Arc::new(AtomicUsize::new(0));
    for (depth, parameter) in model.parameters().into_iter().enumerate() {
        let calls = calls.clone();
        parameter.register_hook(move |grad| {
            calls.fetch_add(1, Ordering::Relaxed);
            grad.mul(0.5 + 0.1 * depth as f64).map(Some)
        })?;
    }
    let optimizer = optim::SGD::new(model.parameters(), 0.1)?;
    let (x, y) = samples(9, 6, 3)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.number("calls", calls.load(Ordering::Relaxed) as f64);
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Hooks that add noise to gradients, which are gathered over several batches.
fn noisy_gradients_by_hooks(step: &Step) -> Result<Record> {
    let model = classifier(4, 8, 2)?;
    for parameter in model.parameters() {
        parameter.register_hook(|grad| (grad + grad.randn_like()? * 0.01).ok().map(Some))?;
    }
    let optimizer = optim::SGD::new(model.parameters(), 0.1)?;
    let (x, y) = samples(8, 4, 2)?;
    let mut record = Record::new();
    for _ in 0..3 {
        step.run(|| {
            optimizer.zero_grad();
            for half in 0..2 {
                let (x, y) = (x.narrow(0, half * 4, 4)?, y.narrow(0, half * 4, 4)?);
                model.forward(&x)?.cross_entropy(&y)?.backward()?;
            }
            optimizer.step()
        })?;
        record.tensors("parameters", &model.parameters())?;
    }
    Ok(record)
}

/// One pass for the losses of several heads.
fn losses_of_many_tasks(step: &Step) -> Result<Record> {
    let trunk = nn::seq![nn::Linear::new(5, 10)?, nn::Relu];
    let heads: Vec<nn::Linear> = (2..5).map(|classes| nn::Linear::new(10, classes)).collect::<Result<_>>()?;
    let parameters = [trunk.parameters(), heads.iter().flat_map(Module::parameters).collect()].concat();
    let optimizer = optim::Adam::new(parameters.clone(), 0.01)?;
    let x = Tensor::randn([8, 5], &CPU)?;
    let labels: Vec<Tensor> =
        (2..5).map(|classes| Tensor::randint(0, classes, [8], &CPU)).collect::<Result<_>>()?;
    let mut record = Record::new();
    for _ in 0..4 {
        let losses = step.run(|| {
            optimizer.zero_grad();
            let shared = trunk.forward(&x)?;
            let each = heads.iter().zip(&labels);
            let losses: Vec<Tensor> = each
                .map(|(head, labels)| head.forward(&shared)?.cross_entropy(labels))
                .collect::<Result<_>>()?;
            backward_all(&losses.iter().collect::<Vec<_>>(), &[], GradOptions::default())?;
            optimizer.step()?;
            Ok::<_, Error>(losses)
        })?;
        record.tensors("losses", &losses)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// One pass from tensors of any shape, each with a weight that changes from call to call.
fn losses_with_weights(step: &Step) -> Result<Record> {
    let model = classifier(3, 6, 2)?;
    let x = Tensor::randn([4, 3], &CPU)?;
    let mut record = Record::new();
    for round in 0..4 {
        step.run(|| {
            let scores = model.forward(&x)?;
            let weight = scores.detach()?.softmax(1)?.mul(0.1 * f64::from(round))?;
            let size = scores.square()?.mean()?;
            backward_all(&[&scores, &size], &[Some(&weight), None], GradOptions::default())
        })?;
        for parameter in model.parameters() {
            record.tensor("gradient", &gradient(&parameter)?)?;
        }
    }
    Ok(record)
}
