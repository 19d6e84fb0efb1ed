//! What keeps models from learning by heart, and what makes them smaller: dropout, smoothing, mixing, pruning,
//! quantisation, norms of weights.

use kiln::prelude::*;
use kiln::tensor::CrossEntropy;
use kiln::{Result, ScatterReduce};

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("regularisation":
    dropout_train_and_eval, label_smoothing, mixup, cutout, knowledge_distillation, self_training,
    magnitude_pruning, straight_through_quantisation, spectral_norm, weight_norm, l1_and_l2_penalty,
    class_weights, stochastic_depth, histogram_of_activations,
);

/// Dropout while training, none while evaluating: the switch is an argument of the same step.
fn dropout_train_and_eval(step: &Step) -> Result<Record> {
    let (first, second) = (nn::Linear::new(8, 32)?, nn::Linear::new(32, 4)?);
    let (x, y) = samples(16, 8, 4)?;
    let optimizer = optim::Adam::new([first.parameters(), second.parameters()].concat(), 0.01)?;
    let mut record = Record::new();
    for i in 0..8 {
        let training = i % 4 != 3;
        let loss = step.run(|| {
            let hidden = first.forward(&x)?.relu()?.dropout(0.3, training)?;
            let loss = second.forward(&hidden)?.cross_entropy(&y)?;
            if training {
                optimizer.zero_grad();
                loss.backward()?;
                optimizer.step()?;
            }
            loss.detach()
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("weight", &second.weight)?;
    Ok(record)
}

/// A tenth of each target goes to all classes.
fn label_smoothing(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 5)?;
    let (x, y) = samples(16, 6, 5)?;
    let optimizer = optim::SGD::new(model.parameters(), 0.3)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let options = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
            let loss = model.forward(&x)?.cross_entropy_of(&y, options)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Samples are mixed in pairs, by another random share in each step.
fn mixup(step: &Step) -> Result<Record> {
    let model = classifier(6, 16, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let targets = y.one_hot(3)?.to_dtype(DType::F32)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let loss = step.run(|| {
            let share = Tensor::rand([16, 1], &CPU)?;
            let order = Tensor::randperm(16, &CPU)?;
            let mixed = x.lerp(&x.index_select(0, &order)?, &share)?;
            let target = targets.lerp(&targets.index_select(0, &order)?, &share)?;
            optimizer.zero_grad();
            let loss =
                (-(target * model.forward(&mixed)?.log_softmax(1)?)).ok()?.sum_dim(1, false)?.mean()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// A random square of each image is painted over, in place.
fn cutout(step: &Step) -> Result<Record> {
    let filters = weight([4, 1, 3, 3], 0.3)?;
    let images = Tensor::rand([6, 1, 12, 12], &CPU)?;
    let mut record = Record::new();
    for i in 0..5 {
        let corners = Tensor::randint(0, 8, [6, 2], &CPU)?;
        let loss = step.run(|| {
            filters.set_grad(None);
            let batch = images.clone_tensor()?;
            let (rows, columns) = (Tensor::arange(0, 12, &CPU)?.view([12, 1])?, Tensor::arange(0, 12, &CPU)?);
            let corner = |at: usize| corners.select(1, at as i64)?.view([6, 1, 1, 1]);
            let inside =
                |line: &Tensor, first: &Tensor| line.ge(first)?.logical_and(&line.lt(&first.add(4)?)?);
            let square = inside(&rows, &corner(0)?)?.logical_and(&inside(&columns, &corner(1)?)?)?;
            batch.masked_fill_(&square, 0.0)?;
            let loss = batch.conv2d(&filters, None, 1, 1, 1, 1)?.square()?.mean()?;
            loss.backward()?;
            let _guard = no_grad();
            filters.add_scaled_(&gradient(&filters)?, -0.1)?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.integer("step", i);
        record.tensor("loss", &loss)?;
    }
    record.tensor("filters", &filters)?;
    Ok(record)
}

/// A small model learns from a large one: the teacher's softened scores and the true classes.
fn knowledge_distillation(step: &Step) -> Result<Record> {
    let (teacher, student) = (classifier(6, 32, 4)?, classifier(6, 4, 4)?);
    let (x, y) = samples(20, 6, 4)?;
    let optimizer = optim::AdamW::new(student.parameters(), 0.02)?;
    let temperature = 3.0;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            let target = {
                let _guard = no_grad();
                (teacher.forward(&x)? / temperature).softmax(1).ok()?
            };
            optimizer.zero_grad();
            let scores = student.forward(&x)?;
            let soft = (&scores / temperature).ok()?.log_softmax(1)?;
            let soft = soft.kl_div(&target, false, Reduction::Sum)?.div(20.0)?;
            let loss = (soft * (0.7 * temperature * temperature) + scores.cross_entropy(&y)? * 0.3).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("student", &student.parameters())?;
    Ok(record)
}

/// Samples without a class get the model's own, where it is sure enough.
fn self_training(step: &Step) -> Result<Record> {
    let model = classifier(6, 16, 3)?;
    let (x, y) = samples(8, 6, 3)?;
    let unlabelled = Tensor::randn([24, 6], &CPU)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.03)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let (loss, sure) = step.run(|| {
            let (confidence, guess) = {
                let _guard = no_grad();
                model.forward(&unlabelled)?.softmax(1)?.max_dim(1, false)?
            };
            let sure = confidence.gt(0.45)?.to_dtype(DType::F32)?;
            optimizer.zero_grad();
            let own = model.forward(&unlabelled)?.cross_entropy_with(&guess, Reduction::None, -100)?;
            let own = (own * &sure).sum().ok()?.div(&sure.sum()?.clamp_min(1.0)?)?;
            let loss = (model.forward(&x)?.cross_entropy(&y)? + own * 0.5).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>((loss, sure.sum()?))
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("sure", &sure)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Half of the weights are cut off in the middle of the training and stay zero.
fn magnitude_pruning(step: &Step) -> Result<Record> {
    let layer = nn::Linear::new(10, 6)?;
    let (x, y) = samples(16, 10, 6)?;
    let optimizer = optim::SGD::options().lr(0.2).momentum(0.9).build(layer.parameters())?;
    let mask = layer.weight.detach()?.ones_like()?;
    let mut record = Record::new();
    for i in 0..6 {
        if i == 3 {
            let sizes = layer.weight.detach()?.abs()?;
            let threshold = sizes.flatten()?.median()?;
            mask.copy_(&sizes.gt(&threshold)?)?;
        }
        let loss = step.run(|| {
            optimizer.zero_grad();
            let loss = x.linear(&layer.weight.mul(&mask)?, layer.bias.as_deref())?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            let _guard = no_grad();
            layer.weight.mul_(&mask)?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("weight", &layer.weight)?;
    record.tensor("mask", &mask.to_dtype(DType::I64)?)?;
    Ok(record)
}

/// Weights rounded to 4 bits in forward, as they are in backward: the detach trick.
fn straight_through_quantisation(step: &Step) -> Result<Record> {
    let (first, second) = (weight([16, 8], 0.4)?, weight([4, 16], 0.4)?);
    let (x, y) = samples(16, 8, 4)?;
    let optimizer = optim::Adam::new(vec![first.clone(), second.clone()], 0.01)?;
    let quantise = |w: &Tensor| {
        let scale = w.detach()?.abs()?.amax_dim(1, true)?.div(7.0)?;
        let rounded = (w / &scale).round().clamp(-8.0, 7.0) * &scale;
        (w + (rounded - w).ok()?.detach()?).ok()
    };
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let hidden = x.linear(&quantise(&first)?, None)?.relu()?;
            let loss = hidden.linear(&quantise(&second)?, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("first", &first)?;
    Ok(record)
}

/// A weight divided by its largest singular value; one power iteration a step, its vector kept across calls.
fn spectral_norm(step: &Step) -> Result<Record> {
    let w = weight([8, 6], 0.5)?;
    let u = Tensor::randn([8], &CPU)?;
    let (x, y) = (Tensor::randn([12, 6], &CPU)?, Tensor::randn([12, 8], &CPU)?);
    let mut record = Record::new();
    for _ in 0..6 {
        let (loss, sigma) = step.run(|| {
            w.set_grad(None);
            let v = {
                let _guard = no_grad();
                let v = w.t()?.mv(&u)?;
                let v = (&v / v.norm(2.0)?).ok()?;
                let next = w.mv(&v)?;
                u.copy_(&next.div(&next.norm(2.0)?)?)?;
                v
            };
            let sigma = u.clone_tensor()?.dot(&w.mv(&v)?)?;
            let loss = x.linear(&(&w / &sigma).ok()?, None)?.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            w.add_scaled_(&gradient(&w)?, -0.2)?;
            Ok::<_, kiln::Error>((loss, sigma))
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("sigma", &sigma)?;
    }
    record.tensors("state", [&w, &u])?;
    Ok(record)
}

/// Direction and length of each row of a weight are trained apart.
fn weight_norm(step: &Step) -> Result<Record> {
    let (direction, length) = (weight([4, 6], 1.0)?, weight([4, 1], 1.0)?);
    let (x, y) = samples(16, 6, 4)?;
    let optimizer = optim::SGD::new(vec![direction.clone(), length.clone()], 0.2)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let w = (&direction / direction.norm_dim(2.0, 1, true)? * &length).ok()?;
            let loss = x.linear(&w, None)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&direction, &length])?;
    Ok(record)
}

/// Penalties summed over all parameters in a loop.
fn l1_and_l2_penalty(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut loss = model.forward(&x)?.cross_entropy(&y)?;
            for parameter in model.parameters() {
                let penalty = parameter.abs()?.sum()?.mul(1e-3)?;
                loss = (loss + penalty + parameter.square()?.sum()? * 1e-2).ok()?;
            }
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Rare classes count more; some samples don't count at all.
fn class_weights(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 3)?;
    let (x, y) = samples(16, 6, 3)?;
    y.set_i(3..6, -1)?;
    let weights = Tensor::from_slice(&[0.2f32, 1.0, 3.0])?;
    let optimizer = optim::Adam::new(model.parameters(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let options =
                CrossEntropy { weight: Some(&weights), ignore_index: -1, ..CrossEntropy::default() };
            let loss = model.forward(&x)?.cross_entropy_of(&y, options)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Layers are left out at random: the host draws, so a call takes one of several ways.
fn stochastic_depth(step: &Step) -> Result<Record> {
    let layers = (0..3).map(|_| nn::Linear::new(8, 8)).collect::<Result<Vec<_>>>()?;
    let (x, y) = samples(12, 8, 8)?;
    let parameters = layers.iter().flat_map(|layer| layer.parameters()).collect();
    let optimizer = optim::SGD::new(parameters, 0.1)?;
    let mut record = Record::new();
    for i in 0..8 {
        // A draw that is the same in every run: which of the layers are kept.
        let kept = [i % 2 == 0, i % 3 != 0, i % 5 != 1];
        let loss = step.run(|| {
            optimizer.zero_grad();
            let mut h = x.clone();
            for (layer, _) in layers.iter().zip(kept).filter(|(_, kept)| *kept) {
                h = (&h + layer.forward(&h)?.tanh()?).ok()?;
            }
            let loss = h.cross_entropy(&y)?;
            if loss.requires_grad() {
                loss.backward()?;
                optimizer.step()?;
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("weights", layers.iter().map(|layer| layer.weight.tensor()))?;
    Ok(record)
}

/// Counts activations in bins, without leaving the graph.
fn histogram_of_activations(step: &Step) -> Result<Record> {
    let model = classifier(6, 12, 8)?;
    let counts = Tensor::full_of([10], 0, DType::I64, &CPU)?;
    let largest = Tensor::zeros([10], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let x = Tensor::randn([32, 6], &CPU)?;
        step.run(|| {
            let _guard = no_grad();
            let values = model.forward(&x)?.flatten()?;
            let bins = ((&values + 1.0) * 5.0).floor().clamp(0.0, 9.0).ok()?.to_dtype(DType::I64)?;
            counts.scatter_add_(0, &bins, &bins.ones_like()?)?;
            let reach = largest.scatter_reduce(0, &bins, &values.abs()?, ScatterReduce::Amax, true)?;
            largest.copy_(&reach)?;
            Ok::<_, kiln::Error>(())
        })?;
        record.tensor("counts", &counts)?;
    }
    record.tensor("largest", &largest)?;
    Ok(record)
}
