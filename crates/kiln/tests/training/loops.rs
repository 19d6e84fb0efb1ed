//! Loops that go another way: groups of parameters, accumulated gradients, a backward pass outside of what is
//! compiled.

use std::collections::HashSet;

use kiln::prelude::*;
use kiln::{Error, Result};

use crate::compare::{Precision, Record, Step, check, constant, samples, weight};

/// Two layers with their biases.
fn layers(dtype: DType) -> Result<Vec<Tensor>> {
    Ok(vec![
        weight(&[16, 8], 1, dtype)?,
        constant(16, 0.1, dtype)?,
        weight(&[3, 16], 2, dtype)?,
        constant(3, 0.0, dtype)?,
    ])
}

fn forward(layers: &[Tensor], x: &Tensor) -> Result<Tensor> {
    let hidden = x.linear(&layers[0], Some(&layers[1]))?.gelu()?;
    hidden.linear(&layers[2], Some(&layers[3]))
}

/// Weights decay, biases do not and learn faster.
fn groups(step: &Step, dtype: DType) -> Result<Record> {
    let parameters = layers(dtype)?;
    let [w1, b1, w2, b2] = [0, 1, 2, 3].map(|i| parameters[i].clone());
    let options = optim::SGD::options().lr(0.05).momentum(0.9).nesterov(true);
    let optimizer = optim::SGD::from_groups([
        optim::ParamGroup::new(vec![w1, w2], options.clone().weight_decay(0.02)),
        optim::ParamGroup::new(vec![b1, b2], options.lr(0.1)),
    ])?;
    let mut record = Record::default();
    for i in 0..50 {
        record.step(i);
        if i % 20 == 19 {
            let halves: Vec<f64> = optimizer.lrs().iter().map(|lr| lr * 0.5).collect();
            optimizer.set_lrs(&halves);
        }
        let (x, y) = samples(&[12, 8], 3, i % 5, dtype)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = forward(&parameters, &x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
        for (k, parameter) in parameters.iter().enumerate() {
            record.tensor(&format!("momentum {k}"), &optimizer.momentum_buffer(parameter).unwrap())?;
        }
    }
    Ok(record)
}

#[test]
fn groups_with_momentum_and_decay() -> Result<()> {
    for (_, explanation) in check(Precision::Single, groups)? {
        assert!(explanation.breaks.is_empty() && explanation.recompiles.is_empty(), "{explanation}");
        assert_eq!(explanation.graphs.len(), 1, "{explanation}");
    }
    Ok(())
}

/// Gradients of four small batches are added up; the optimizer steps in every fourth call.
fn accumulation(step: &Step, dtype: DType) -> Result<Record> {
    let parameters = layers(dtype)?;
    let optimizer = optim::AdamW::new(parameters.clone(), 0.03)?;
    let mut record = Record::default();
    for i in 0..60 {
        record.step(i);
        let (x, y) = samples(&[6, 8], 3, i % 8, dtype)?;
        let loss = step.run(|| {
            let loss = forward(&parameters, &x)?.cross_entropy(&y)?;
            (&loss / 4.0).ok()?.backward()?;
            if i % 4 == 3 {
                optimizer.step()?;
                optimizer.zero_grad();
            }
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
        let gradients: Vec<Tensor> = parameters.iter().filter_map(Tensor::grad).collect();
        assert_eq!(gradients.len(), if i % 4 == 3 { 0 } else { 4 });
        record.tensors("gradient", &gradients)?;
    }
    Ok(record)
}

#[test]
fn gradients_of_four_batches() -> Result<()> {
    for (_, explanation) in check(Precision::Single, accumulation)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        // The first gradient, a further one, and one that is used at once.
        assert_eq!((explanation.recompiles.len(), explanation.graphs.len()), (2, 3), "{explanation}");
    }
    Ok(())
}

/// The same, in place, with gradients that stay and are zeroed.
fn zeroed(step: &Step, dtype: DType) -> Result<Record> {
    let parameters = layers(dtype)?;
    for parameter in &parameters {
        parameter.set_grad(Some(parameter.detach()?.zeros_like()?));
    }
    let optimizer = optim::Adam::new(parameters.clone(), 0.02)?;
    let mut record = Record::default();
    for i in 0..50 {
        record.step(i);
        let (x, y) = samples(&[6, 8], 3, i % 8, dtype)?;
        let loss = step.run(|| {
            if i % 2 == 0 {
                for parameter in &parameters {
                    parameter.grad().unwrap().zero_()?;
                }
            }
            let loss = forward(&parameters, &x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
        record.tensors("gradient", &parameters.iter().filter_map(Tensor::grad).collect::<Vec<_>>())?;
    }
    Ok(record)
}

#[test]
fn gradients_zeroed_in_place() -> Result<()> {
    for (_, explanation) in check(Precision::Single, zeroed)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.graphs.len()), (1, 2), "{explanation}");
    }
    Ok(())
}

/// Only the middle of the network is compiled: what comes before it, the loss, the backward pass and the
/// optimizer are not.
fn outside(step: &Step, dtype: DType) -> Result<Record> {
    let parameters = layers(dtype)?;
    let table = weight(&[5, 8], 3, dtype)?;
    let mut all = parameters.clone();
    all.push(table.clone());
    let optimizer = optim::Adam::new(all.clone(), 0.02)?;
    let mut record = Record::default();
    for i in 0..50 {
        record.step(i);
        let size = if i % 6 == 5 { 5 } else { 12 };
        let (x, y) = samples(&[size, 8], 3, i % 6, dtype)?;
        let words = Tensor::from_vec((0..size).map(|k| ((k * 3 + i) % 5) as i64).collect(), [size])?;
        optimizer.zero_grad();
        let embedded = (&x + &table.embedding(&words)?).ok()?;
        let (scores, penalty) = step.run(|| {
            let scores = forward(&parameters, &embedded)?;
            Ok::<_, Error>((scores, parameters[0].square()?.mean()?))
        })?;
        let loss = scores.cross_entropy(&y)?.add_scaled(&penalty, 0.01)?;
        loss.backward()?;
        optimizer.step()?;
        record.tensor("loss", &loss.detach()?)?;
        record.tensors("parameter", &all)?;
        record.tensors("gradient", &all.iter().filter_map(Tensor::grad).collect::<Vec<_>>())?;
    }
    Ok(record)
}

#[test]
fn backward_outside() -> Result<()> {
    for (backend, explanation) in check(Precision::Single, outside)? {
        assert!(explanation.breaks.is_empty(), "{explanation}");
        assert_eq!((explanation.recompiles.len(), explanation.sizes), (0, 1), "{explanation}");
        let compiled = backend != Backend::Eager;
        assert!(explanation.graphs.iter().all(|graph| graph.has_backward == compiled), "{explanation}");
    }
    Ok(())
}

/// The loss is read inside, and decides what is done: a graph break in every step.
fn read_inside(step: &Step, dtype: DType) -> Result<Record> {
    let parameters = layers(dtype)?;
    let optimizer = optim::SGD::options().lr(0.2).momentum(0.5).build(parameters.clone())?;
    let mut record = Record::default();
    for i in 0..40 {
        record.step(i);
        let (x, y) = samples(&[12, 8], 3, i % 5, dtype)?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = forward(&parameters, &x)?.cross_entropy(&y)?;
            if loss.item::<f64>()? > 0.7 {
                (&loss * 0.5).ok()?.backward()?
            } else {
                loss.backward()?
            }
            optimizer.step()?;
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
        record.tensors("parameter", &parameters)?;
    }
    Ok(record)
}

#[test]
fn a_loss_that_is_read_inside() -> Result<()> {
    for (_, explanation) in check(Precision::Single, read_inside)? {
        // Where the loss is read, and where a tape that a finished graph left is used up.
        let reasons: HashSet<String> = explanation.breaks.iter().map(|b| b.reason.to_string()).collect();
        let known = ["item needs the value", "the tape continues outside the compiled function"];
        assert_eq!(reasons, known.map(String::from).into(), "{explanation}");
    }
    Ok(())
}
