//! Training with every optimizer there is, and with some that users write themselves.

use kiln::Result;
use kiln::prelude::*;

use super::{classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("optimizers": sgd, sgd_momentum, sgd_nesterov, adam, adam_amsgrad, adamw_groups, adagrad, rmsprop, lion, lars);

/// Trains a small classifier with an optimizer and records losses and parameters.
fn train<O: Optimizer>(step: &Step, make: impl FnOnce(Vec<Tensor>) -> Result<O>) -> Result<Record> {
    let model = classifier(8, 16, 4)?;
    let (x, y) = samples(32, 8, 4)?;
    let optimizer = make(model.parameters())?;
    let mut record = Record::new();
    for _ in 0..6 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Stochastic gradient descent.
fn sgd(step: &Step) -> Result<Record> {
    train(step, |parameters| optim::SGD::new(parameters, 0.1))
}

/// Momentum with dampening and weight decay.
fn sgd_momentum(step: &Step) -> Result<Record> {
    let options = optim::SGD::options().lr(0.1).momentum(0.9).dampening(0.1).weight_decay(1e-3);
    train(step, |parameters| options.build(parameters))
}

/// Nesterov's momentum, uphill.
fn sgd_nesterov(step: &Step) -> Result<Record> {
    let options = optim::SGD::options().lr(0.01).momentum(0.9).nesterov(true).maximize(true);
    train(step, |parameters| options.build(parameters))
}

/// Adam.
fn adam(step: &Step) -> Result<Record> {
    train(step, |parameters| optim::Adam::new(parameters, 0.01))
}

/// Adam with the largest second moment so far.
fn adam_amsgrad(step: &Step) -> Result<Record> {
    let options = optim::Adam::options().lr(0.02).betas(0.8, 0.95).amsgrad(true).weight_decay(0.01);
    train(step, |parameters| options.build(parameters))
}

/// AdamW with groups: weights decay, biases don't.
fn adamw_groups(step: &Step) -> Result<Record> {
    train(step, |parameters| {
        let (matrices, biases): (Vec<_>, Vec<_>) = parameters.into_iter().partition(|p| p.rank() > 1);
        let options = optim::AdamW::options().lr(0.01);
        optim::AdamW::from_groups([
            optim::ParamGroup::new(matrices, options.clone().weight_decay(0.1)),
            optim::ParamGroup::new(biases, options.weight_decay(0.0).lr(0.02)),
        ])
    })
}

/// Logistic regression, with an update that the user writes: called with each weight, its gradient and its state.
fn by_hand(step: &Step, update: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<()>) -> Result<Record> {
    let (x, y) = samples(24, 6, 3)?;
    let parameters = [weight([3, 6], 0.5)?, weight([3], 0.5)?];
    let states = [parameters[0].detach()?.zeros_like()?, parameters[1].detach()?.zeros_like()?];
    let mut record = Record::new();
    for _ in 0..6 {
        let loss = step.run(|| {
            let loss = x.linear(&parameters[0], Some(&parameters[1]))?.cross_entropy(&y)?;
            loss.backward()?;
            let _guard = no_grad();
            for (parameter, state) in parameters.iter().zip(&states) {
                update(parameter, &gradient(parameter)?, state)?;
                parameter.set_grad(None);
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    record.tensors("states", &states)?;
    Ok(record)
}

/// Adagrad: steps shrink by the sum of squares.
fn adagrad(step: &Step) -> Result<Record> {
    by_hand(step, |parameter, gradient, sum| {
        sum.addcmul_(gradient, gradient, 1.0)?;
        parameter.addcdiv_(gradient, &sum.sqrt()?.add(1e-10)?, -0.1)?;
        Ok(())
    })
}

/// RMSprop: steps shrink by the moving mean of squares.
fn rmsprop(step: &Step) -> Result<Record> {
    by_hand(step, |parameter, gradient, mean_square| {
        mean_square.mul_(0.99)?.addcmul_(gradient, gradient, 0.01)?;
        let change = (gradient / (mean_square.sqrt()? + 1e-8)).ok()?;
        parameter.sub_(&change.mul(0.01)?)?;
        Ok(())
    })
}

/// Lion: only the sign of the momentum counts.
fn lion(step: &Step) -> Result<Record> {
    by_hand(step, |parameter, gradient, momentum| {
        let direction = momentum.lerp(gradient, 0.1)?.sign()?;
        parameter.mul_(1.0 - 0.01 * 0.1)?.add_scaled_(&direction, -0.01)?;
        momentum.lerp_(gradient, 0.01)?;
        Ok(())
    })
}

/// LARS: each layer's step is as long as its weights allow.
fn lars(step: &Step) -> Result<Record> {
    by_hand(step, |parameter, gradient, momentum| {
        let (own, change) = (parameter.norm(2.0)?, gradient.norm(2.0)?);
        let ratio = change.gt(0.0)?.where_self(&(&own / (&change + 1e-8)).ok()?, 1.0)?;
        momentum.mul_(0.9)?.add_(&gradient.mul(&ratio)?.mul(0.02)?)?;
        parameter.sub_(momentum)?;
        Ok(())
    })
}
