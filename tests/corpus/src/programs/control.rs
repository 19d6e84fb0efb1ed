//! What programs do around tensors: branches on values, errors that are caught, hooks, nesting, state on the host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kiln::prelude::*;
use kiln::{Error, Result};

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("control":
    branch_on_a_value, error_in_the_middle, gradient_hooks, retained_gradients, nested_steps, running_statistics,
    views_written_in_place, step_counter_in_a_number, cache_of_results, mixed_dtypes, swapped_parameters,
    outputs_used_later, backward_outside, detached_logging, resumed_training, closures_of_layers,
);

/// The learning rate is halved inside the step if the loss went up: a value decides.
fn branch_on_a_value(step: &Step) -> Result<Record> {
    let (w, x) = (weight([4], 1.0)?, Tensor::randn([12, 4], &CPU)?);
    let y = x.sum_dim(1, false)?;
    let (mut lr, mut last, mut record) = (1.2, f64::INFINITY, Record::new());
    for _ in 0..8 {
        step.run(|| {
            w.set_grad(None);
            let loss = x.mv(&w)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let now = loss.item::<f64>()?;
            if now > last {
                lr /= 2.0;
            }
            last = now;
            let _guard = no_grad();
            w.add_scaled_(&gradient(&w)?, -lr)?;
            Ok::<_, Error>(())
        })?;
        record.number("loss", last);
        record.number("lr", lr);
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// Some batches have the wrong shape: the step ends with `?`, what it did before stays, the loop goes on.
fn error_in_the_middle(step: &Step) -> Result<Record> {
    let (w, seen) = (weight([3, 4], 0.5)?, Tensor::zeros([4], &CPU)?);
    let mut record = Record::new();
    let mut errors = 0;
    for i in 0..7 {
        let width = if i % 3 == 2 { 5 } else { 4 };
        let (x, y) = (Tensor::randn([6, width], &CPU)?, Tensor::randint(0, 3, [6], &CPU)?);
        let outcome = step.run(|| {
            w.set_grad(None);
            seen.add_(1.0)?;
            let loss = x.linear(&w, None)?.cross_entropy(&y)?;
            loss.backward()?;
            let _guard = no_grad();
            w.add_scaled_(&gradient(&w)?, -0.3)?;
            Ok::<_, Error>(loss)
        });
        match outcome {
            Ok(loss) => record.tensor("loss", &loss)?,
            Err(_) => errors += 1,
        }
    }
    record.integer("errors", errors);
    record.tensors("state", [&w, &seen])?;
    Ok(record)
}

/// Gradients are clipped and counted by hooks that were put on the parameters before.
fn gradient_hooks(step: &Step) -> Result<Record> {
    let model = classifier(5, 8, 3)?;
    let (x, y) = samples(10, 5, 3)?;
    let calls = Arc::new(Mutex::new(0));
    for parameter in model.parameters() {
        let calls = calls.clone();
        parameter.register_hook(move |gradient| {
            *calls.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            gradient.clamp(-0.05, 0.05).map(Some)
        })?;
    }
    let optimizer = optim::SGD::new(model.parameters(), 0.5)?;
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
    record.integer("calls", *calls.lock().unwrap_or_else(PoisonError::into_inner));
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// The gradient of something in the middle is kept and looked at.
fn retained_gradients(step: &Step) -> Result<Record> {
    let (first, second) = (weight([8, 4], 0.4)?, weight([3, 8], 0.4)?);
    let (x, y) = samples(6, 4, 3)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let middle = step.run(|| {
            first.set_grad(None);
            second.set_grad(None);
            let hidden = x.linear(&first, None)?.tanh()?;
            hidden.retain_grad()?;
            hidden.linear(&second, None)?.cross_entropy(&y)?.backward()?;
            gradient(&hidden)?.abs()?.mean_dim(0, false)
        })?;
        record.tensors("gradients", [&middle, &gradient(&first)?])?;
    }
    Ok(record)
}

/// A compiled function that calls others: they become part of it.
fn nested_steps(step: &Step) -> Result<Record> {
    let (encode, decode) = (step.another("encode"), step.another("decode"));
    let (down, up) = (nn::Linear::new(6, 3)?, nn::Linear::new(3, 6)?);
    let x = Tensor::randn([8, 6], &CPU)?;
    let optimizer = optim::Adam::new([down.parameters(), up.parameters()].concat(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let code = encode.run(|| down.forward(&x)?.tanh())?;
            let loss = decode.run(|| up.forward(&code))?.mse_loss(&x, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    // On its own a part is a step like any other.
    record.tensor("code", &encode.run(|| down.forward(&x)?.tanh())?)?;
    Ok(record)
}

/// Mean and variance of a stream, by Welford's update in place, used to normalise in the same step.
fn running_statistics(step: &Step) -> Result<Record> {
    let (count, mean, square) =
        (Tensor::zeros((), &CPU)?, Tensor::zeros([4], &CPU)?, Tensor::zeros([4], &CPU)?);
    let mut record = Record::new();
    for i in 0..6 {
        let x = (Tensor::randn([5, 4], &CPU)? * (1.0 + i as f64)).ok()?;
        let normal = step.run(|| {
            for row in x.unbind(0)? {
                count.add_(1.0)?;
                let before = (&row - &mean).ok()?;
                mean.add_(&before.div(&count)?)?;
                square.add_(&(before * (&row - &mean)).ok()?)?;
            }
            let deviation = square.div(&count)?.sqrt()?.add(1e-6)?;
            (&x - &mean).ok()?.div(&deviation)
        })?;
        record.tensor("normal", &normal)?;
    }
    record.tensors("state", [&count, &mean, &square])?;
    Ok(record)
}

/// Rows, columns, diagonals and slices of one matrix, changed through views.
fn views_written_in_place(step: &Step) -> Result<Record> {
    let matrix = Tensor::arange(0, 36, &CPU)?.to_dtype(DType::F32)?.view([6, 6])?;
    let mut record = Record::new();
    for i in 0..4 {
        let sum = step.run(|| {
            matrix.i((0, ..))?.mul_(0.5)?;
            matrix.t()?.i((1, ..))?.add_(&matrix.i((2, ..))?)?;
            matrix.diagonal(0, 0, 1)?.fill_(i as f64)?;
            matrix.slice(1, 0, 6, 2)?.narrow(0, 3, 2)?.neg_()?;
            matrix.view([3, 12])?.i((1, 4..8))?.copy_(&Tensor::ones([4], &CPU)?)?;
            matrix.sum_dim(0, false)
        })?;
        record.tensor("sum", &sum)?;
    }
    record.tensor("matrix", &matrix)?;
    Ok(record)
}

/// A counter of the host goes into the mathematics: bias corrections, annealing, seeds of noise.
fn step_counter_in_a_number(step: &Step) -> Result<Record> {
    let (w, first, second) = (weight([6], 1.0)?, Tensor::zeros([6], &CPU)?, Tensor::zeros([6], &CPU)?);
    let mut record = Record::new();
    for t in 1..=8 {
        let loss = step.run(|| {
            w.set_grad(None);
            let loss = (&w - 1.0).square().sum().ok()?;
            loss.backward()?;
            let _guard = no_grad();
            let slope = gradient(&w)?;
            first.lerp_(&slope, 0.1)?;
            second.lerp_(&slope.square()?, 0.01)?;
            let size = 0.1 * (1.0 - 0.99f64.powi(t)).sqrt() / (1.0 - 0.9f64.powi(t));
            let noise = w.randn_like()?.mul(0.01 / (t as f64))?;
            w.sub_(&(first.mul(size)? / (second.sqrt()? + 1e-8) + noise).ok()?)?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("state", [&w, &first, &second])?;
    Ok(record)
}

/// Results are kept in a map by the host and used again: some calls compute, some look up.
fn cache_of_results(step: &Step) -> Result<Record> {
    let (w, table) = (Tensor::randn([5, 5], &CPU)?, Tensor::randn([4, 5], &CPU)?);
    let mut cache: HashMap<usize, Tensor> = HashMap::new();
    let mut record = Record::new();
    for key in [0, 1, 0, 2, 1, 1, 3, 0] {
        let out = step.run(|| {
            let features = match cache.get(&key) {
                Some(known) => known.clone(),
                None => {
                    let made = table.select(0, key as i64)?.linear(&w, None)?.tanh()?;
                    cache.insert(key, made.clone());
                    made
                }
            };
            (features * 2.0).sum().ok()
        })?;
        record.tensor("out", &out)?;
    }
    record.integer("kept", cache.len());
    Ok(record)
}

/// Integers, truth values, halves and doubles in one step.
fn mixed_dtypes(step: &Step) -> Result<Record> {
    let scale = Tensor::full_of([6], 0.5, DType::F64, &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (x, n) = (Tensor::randn([6], &CPU)?, Tensor::randint(-4, 5, [6], &CPU)?);
        let (wide, count, narrow) = step.run(|| {
            let wide = (x.to_dtype(DType::F64)? * &scale + &n).ok()?;
            let count = n.bitwise_and(1)?.eq(1)?.logical_and(&x.gt(0.0)?)?.sum()?;
            let narrow = x.to_dtype(DType::BF16)?.mul(&x.to_dtype(DType::F16)?)?.to_dtype(DType::F32)?;
            let bytes = narrow.mul(10.0)?.clamp(0.0, 255.0)?.to_dtype(DType::U8)?;
            Ok::<_, Error>((wide, count, bytes))
        })?;
        record.tensors("results", [&wide, &count, &narrow])?;
        scale.mul_(1.5)?;
    }
    Ok(record)
}

/// Parameters are replaced by other tensors between calls: what was captured must not hold on to the old ones.
fn swapped_parameters(step: &Step) -> Result<Record> {
    let (x, y) = samples(8, 4, 3)?;
    let mut w = weight([3, 4], 0.5)?;
    let mut record = Record::new();
    for i in 0..6 {
        let loss = step.run(|| {
            w.set_grad(None);
            let loss = x.linear(&w, None)?.cross_entropy(&y)?;
            loss.backward()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensors("loss and gradient", [&loss, &gradient(&w)?])?;
        if i % 2 == 1 {
            w = weight([3, 4], 0.5)?;
        }
    }
    Ok(record)
}

/// Results of all calls are kept until the end: no call may write into the memory of an earlier one.
fn outputs_used_later(step: &Step) -> Result<Record> {
    let mut kept = vec![Tensor::randn([5], &CPU)?];
    for i in 0..6 {
        let made = step.run(|| {
            let last = &kept[i];
            (last.roll(1, 0)? * 0.5 + last.tanh()?).ok()
        })?;
        kept.push(made);
    }
    let mut record = Record::new();
    record.tensors("kept", &kept)?;
    record.tensor("together", &Tensor::stack(&kept, 0)?.sum_dim(0, false)?)?;
    Ok(record)
}

/// Only forward is compiled; `backward` and the optimizer run outside, on the compiled graph's own backward.
fn backward_outside(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(12, 6, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        optimizer.zero_grad();
        let scores = step.run(|| model.forward(&x))?;
        let loss = scores.cross_entropy(&y)?;
        loss.backward()?;
        optimizer.step()?;
        record.tensors("results", [&loss, &scores])?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Everything worth a log line is given out as detached tensors and read later.
fn detached_logging(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(12, 6, 3)?;
    let optimizer = optim::AdamW::new(model.parameters(), 0.02)?;
    let (mut log, mut record) = (Vec::new(), Record::new());
    for _ in 0..6 {
        log.push(step.run(|| {
            optimizer.zero_grad();
            let scores = model.forward(&x)?;
            let loss = scores.cross_entropy(&y)?;
            loss.backward()?;
            let norms =
                model.parameters().iter().map(|p| gradient(p)?.norm(2.0)).collect::<Result<Vec<_>>>()?;
            optimizer.step()?;
            let accuracy = scores.argmax_dim(1, false)?.eq(&y)?.to_dtype(DType::F32)?.mean()?;
            Ok::<_, Error>([loss.detach()?, accuracy, Tensor::stack(&norms, 0)?.amax()?])
        })?);
    }
    log.iter().try_for_each(|line| record.tensors("line", line))?;
    Ok(record)
}

/// Weights are saved to the host, training goes on, then they are loaded again and the training repeated.
fn resumed_training(step: &Step) -> Result<Record> {
    let model = classifier(5, 8, 3)?;
    let (x, y) = samples(10, 5, 3)?;
    let optimizer = optim::SGD::new(model.parameters(), 0.3)?;
    let train = || {
        step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })
    };
    let mut record = Record::new();
    record.tensor("before", &train()?)?;
    let saved = model.parameters().iter().map(|p| p.to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
    record.tensors("first", [&train()?, &train()?])?;
    for (parameter, values) in model.parameters().iter().zip(&saved) {
        parameter.write_slice(values)?;
    }
    record.tensors("again", [&train()?, &train()?])?;
    Ok(record)
}

/// Layers as boxed closures in a list that the host changes while it trains.
fn closures_of_layers(step: &Step) -> Result<Record> {
    type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
    let w = weight([6, 6], 0.3)?;
    let mut layers: Vec<Layer> = vec![Box::new(|x| x.tanh())];
    let (x, y) = samples(8, 6, 6)?;
    let mut record = Record::new();
    for i in 0..6 {
        if i == 2 {
            layers.push(Box::new(|x| x.mul(1.5)));
        }
        if i == 4 {
            drop(layers.remove(0));
        }
        let loss = step.run(|| {
            w.set_grad(None);
            let start = x.linear(&w, None)?;
            let loss = layers.iter().try_fold(start, |h, layer| layer(&h))?.cross_entropy(&y)?;
            loss.backward()?;
            let _guard = no_grad();
            w.add_scaled_(&gradient(&w)?, -0.2)?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}
