//! What surrounds an optimizer's step: schedules, clipping, accumulation, averaging, mixed precision.

use std::f64::consts::PI;

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("training":
    cosine_schedule, one_cycle, lr_finder, early_stopping, gradient_clipping, value_clipping,
    gradient_accumulation, exponential_moving_average, stochastic_weight_averaging, loss_scaling,
    loss_scaling_with_check, half_precision_forward, freeze_layers, curriculum, log_every_third_step,
    two_heads,
);

/// Warm-up, then half a cosine: the learning rate is another one in every step.
fn cosine_schedule(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::AdamW::new(model.parameters(), 0.0)?;
    let (warm_up, total) = (3, 10);
    let mut record = Record::new();
    for i in 0..total {
        let progress = (i as f64 - warm_up as f64) / (total - warm_up) as f64;
        optimizer.set_lr(if i < warm_up {
            0.05 * (i + 1) as f64 / warm_up as f64
        } else {
            0.025 * (1.0 + (PI * progress).cos())
        });
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

/// One cycle: the learning rate goes up and down, the hand-written momentum down and up.
fn one_cycle(step: &Step) -> Result<Record> {
    let (w, x) = (weight([5], 1.0)?, Tensor::randn([20, 5], &CPU)?);
    let y = x.mv(&Tensor::arange(0, 5, &CPU)?.to_dtype(DType::F32)?)?;
    let velocity = Tensor::zeros([5], &CPU)?;
    let mut record = Record::new();
    for i in 0..8 {
        let up = 1.0 - (i as f64 / 4.0 - 1.0).abs();
        let (lr, momentum) = (0.01 + 0.05 * up, 0.95 - 0.1 * up);
        let loss = step.run(|| {
            w.set_grad(None);
            let loss = x.mv(&w)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            velocity.mul_(momentum)?.add_(&gradient(&w)?)?;
            w.add_scaled_(&velocity, -lr)?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// Raises the learning rate until the loss explodes.
fn lr_finder(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::SGD::new(model.parameters(), 1e-3)?;
    let (mut best, mut record) = (f64::INFINITY, Record::new());
    for _ in 0..20 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        let loss = loss.item::<f64>()?;
        record.number("loss", loss);
        best = best.min(loss);
        if loss > 2.0 * best {
            break;
        }
        optimizer.set_lr(optimizer.lr() * 1.8);
    }
    record.number("lr", optimizer.lr());
    Ok(record)
}

/// Stops when the validation loss has not become better for three epochs.
fn early_stopping(step: &Step) -> Result<Record> {
    let model = classifier(6, 24, 3)?;
    let ((x, y), (x_held_out, y_held_out)) = (samples(12, 6, 3)?, samples(12, 6, 3)?);
    let optimizer = optim::Adam::new(model.parameters(), 0.05)?;
    let validate = step.another("validate");
    let (mut best, mut waited, mut record) = (f64::INFINITY, 0, Record::new());
    for epoch in 0..30 {
        step.run(|| {
            optimizer.zero_grad();
            model.forward(&x)?.cross_entropy(&y)?.backward()?;
            optimizer.step()
        })?;
        let held_out = validate.run(|| {
            let _guard = no_grad();
            model.forward(&x_held_out)?.cross_entropy(&y_held_out)
        })?;
        let held_out = held_out.item::<f64>()?;
        record.number("held out", held_out);
        (best, waited) = if held_out < best { (held_out, 0) } else { (best, waited + 1) };
        if waited == 3 {
            record.integer("stopped", epoch);
            break;
        }
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Gradients are scaled down together if their norm is too large; no value is read for it.
fn gradient_clipping(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::SGD::options().lr(0.5).momentum(0.9).build(model.parameters())?;
    let mut record = Record::new();
    for _ in 0..5 {
        let norm = step.run(|| {
            optimizer.zero_grad();
            (model.forward(&x)? * 5.0).ok()?.cross_entropy(&y)?.backward()?;
            let gradients = model.parameters().iter().map(gradient).collect::<Result<Vec<_>>>()?;
            let norms = gradients.iter().map(|g| g.norm(2.0)).collect::<Result<Vec<_>>>()?;
            let norm = Tensor::stack(&norms, 0)?.norm(2.0)?;
            let scale = (1.0 / (&norm + 1e-6)).clamp_max(1.0).ok()?;
            for gradient in &gradients {
                gradient.mul_(&scale)?;
            }
            optimizer.step()?;
            Ok::<_, kiln::Error>(norm)
        })?;
        record.tensor("norm", &norm)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Gradients are cut off at ±0.05, all lists at once.
fn value_clipping(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            let gradients: TensorList = model.parameters().iter().filter_map(|p| p.grad()).collect();
            foreach::clamp_(&gradients, -0.05, 0.05)?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Four small batches make a large one: the optimizer steps in every fourth call.
fn gradient_accumulation(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let optimizer = optim::AdamW::new(model.parameters(), 0.01)?;
    let mut record = Record::new();
    for i in 0..12 {
        let (x, y) = samples(8, 6, 3)?;
        let loss = step.run(|| {
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            (&loss / 4.0).ok()?.backward()?;
            if i % 4 == 3 {
                optimizer.step()?;
                optimizer.zero_grad();
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// A second set of weights follows the trained one.
fn exponential_moving_average(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let averages =
        model.parameters().iter().map(|p| p.detach()?.clone_tensor()).collect::<Result<Vec<_>>>()?;
    let optimizer = optim::SGD::new(model.parameters(), 0.2)?;
    let mut record = Record::new();
    for _ in 0..5 {
        step.run(|| {
            optimizer.zero_grad();
            model.forward(&x)?.cross_entropy(&y)?.backward()?;
            optimizer.step()?;
            let _guard = no_grad();
            for (average, parameter) in averages.iter().zip(model.parameters()) {
                average.lerp_(&parameter, 0.1)?;
            }
            Ok::<_, kiln::Error>(())
        })?;
    }
    record.tensors("parameters", &model.parameters())?;
    record.tensors("averages", &averages)?;
    Ok(record)
}

/// The mean of the weights over the second half of the training.
fn stochastic_weight_averaging(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::SGD::new(model.parameters(), 0.3)?;
    let averages = model.parameters().iter().map(|p| p.detach()?.zeros_like()).collect::<Result<Vec<_>>>()?;
    let average = step.another("average");
    let mut count = 0;
    for epoch in 0..8 {
        step.run(|| {
            optimizer.zero_grad();
            model.forward(&x)?.cross_entropy(&y)?.backward()?;
            optimizer.step()
        })?;
        if epoch >= 4 {
            count += 1;
            average.run(|| {
                let _guard = no_grad();
                for (mean, parameter) in averages.iter().zip(model.parameters()) {
                    mean.add_(&parameter.sub(mean)?.div(count as f64)?)?;
                }
                Ok::<_, kiln::Error>(())
            })?;
        }
    }
    let mut record = Record::new();
    record.tensors("averages", &averages)?;
    Ok(record)
}

/// The loss is scaled up, gradients down again; where one overflowed the step changes nothing, by `where`.
fn loss_scaling(step: &Step) -> Result<Record> {
    let (w, x) = (weight([4, 6], 0.5)?, Tensor::randn([8, 6], &CPU)?);
    let y = Tensor::randint(0, 4, [8], &CPU)?;
    let (mut scale, mut record) = (1e38, Record::new());
    for _ in 0..6 {
        let (loss, finite) = step.run(|| {
            w.set_grad(None);
            let loss = x.linear(&w, None)?.cross_entropy(&y)?;
            (&loss * scale * 10.0).ok()?.backward()?;
            let _guard = no_grad();
            let scaled = gradient(&w)?;
            let finite = scaled.isfinite()?.all()?;
            let update = finite.where_self(&(&scaled / (scale * 10.0)).ok()?, 0.0)?;
            w.add_scaled_(&update, -0.5)?;
            Ok::<_, kiln::Error>((loss, finite))
        })?;
        scale *= if finite.item::<bool>()? { 1.5 } else { 0.5 };
        record.tensor("loss", &loss)?;
        record.tensor("finite", &finite)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// The same with a scaler as in most libraries: whether to step is decided on the host, inside the step.
fn loss_scaling_with_check(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 4)?;
    let (x, y) = samples(8, 6, 4)?;
    let optimizer = optim::SGD::options().lr(0.1).momentum(0.9).build(model.parameters())?;
    let (mut scale, mut record) = (3e38, Record::new());
    for _ in 0..6 {
        let (loss, stepped) = step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            (&loss * scale * 10.0).ok()?.backward()?;
            let gradients: TensorList = model.parameters().iter().filter_map(|p| p.grad()).collect();
            foreach::mul_(&gradients, 1.0 / (scale * 10.0))?;
            let mut finite = true;
            for parameter in model.parameters() {
                finite &= gradient(&parameter)?.isfinite()?.all()?.item::<bool>()?;
            }
            if finite {
                optimizer.step()?;
            }
            Ok::<_, kiln::Error>((loss, finite))
        })?;
        scale *= if stepped { 1.5 } else { 0.25 };
        record.tensor("loss", &loss)?;
        record.integer("stepped", usize::from(stepped));
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Products in bf16, weights and loss in f32.
fn half_precision_forward(step: &Step) -> Result<Record> {
    let (first, second) = (weight([16, 8], 0.3)?, weight([4, 16], 0.3)?);
    let (x, y) = samples(16, 8, 4)?;
    let optimizer = optim::Adam::new(vec![first.clone(), second.clone()], 0.01)?;
    let half = |t: &Tensor| t.to_dtype(DType::BF16);
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let hidden = half(&x)?.linear(&half(&first)?, None)?.relu()?;
            let scores = hidden.linear(&half(&second)?, None)?.to_dtype(DType::F32)?;
            let loss = scores.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    Ok(record)
}

/// The first layer is trained for three steps, then frozen, then trained again.
fn freeze_layers(step: &Step) -> Result<Record> {
    let body = nn::Linear::new(6, 12)?;
    let head = nn::Linear::new(12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::SGD::new([body.parameters(), head.parameters()].concat(), 0.2)?;
    let mut record = Record::new();
    for i in 0..9 {
        body.requires_grad_(!(3..6).contains(&i))?;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = head.forward(&body.forward(&x)?.relu()?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("weight", &body.weight)?;
    }
    Ok(record)
}

/// Batches grow while the training goes on.
fn curriculum(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
    let mut record = Record::new();
    for size in [4, 4, 8, 8, 16, 16, 4] {
        let (x, y) = samples(size, 6, 3)?;
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

/// Reads the loss in every third step, inside the step.
fn log_every_third_step(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
    let (mut lines, mut record) = (Vec::new(), Record::new());
    for i in 0..7 {
        step.run(|| {
            optimizer.zero_grad();
            let loss = model.forward(&x)?.cross_entropy(&y)?;
            if i % 3 == 0 {
                lines.push(loss.item::<f64>()?);
            }
            loss.backward()?;
            optimizer.step()
        })?;
    }
    lines.iter().for_each(|loss| record.number("loss", *loss));
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Two tasks share a body; the weights of their losses are trained too.
fn two_heads(step: &Step) -> Result<Record> {
    let (body, classes, value) = (nn::Linear::new(6, 12)?, nn::Linear::new(12, 3)?, nn::Linear::new(12, 1)?);
    let uncertainty = weight([2], 0.1)?;
    let (x, y) = samples(16, 6, 3)?;
    let target = x.sum_dim(1, true)?;
    let parameters = [body.parameters(), classes.parameters(), value.parameters(), vec![uncertainty.clone()]];
    let optimizer = optim::Adam::new(parameters.concat(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let losses = step.run(|| {
            optimizer.zero_grad();
            let features = body.forward(&x)?.relu()?;
            let first = classes.forward(&features)?.cross_entropy(&y)?;
            let second = value.forward(&features)?.smooth_l1_loss(&target, 1.0, Reduction::Mean)?;
            let losses = Tensor::stack([&first, &second], 0)?;
            (&losses * (-&uncertainty).exp() + &uncertainty).sum().ok()?.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(losses)
        })?;
        record.tensor("losses", &losses)?;
    }
    record.tensors("parameters", &parameters.concat())?;
    Ok(record)
}
