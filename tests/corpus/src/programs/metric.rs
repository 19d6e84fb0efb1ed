//! Learning what is near what: contrastive and triplet losses, neighbours, recommendations.

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, classifier, gradient, programs, weight};
use crate::{Record, Step};

programs!("metric":
    info_nce, momentum_encoder_with_queue, triplet_hard_mining, siamese_network, prototypes, nearest_neighbours,
    matrix_factorisation, ranking_loss,
);

/// Rows of length one.
fn normalise(x: &Tensor) -> Result<Tensor> {
    x.div(&x.norm_dim(2.0, 1, true)?.clamp_min(1e-8)?)
}

/// Two noisy views of each sample shall find each other among all.
fn info_nce(step: &Step) -> Result<Record> {
    let (model, x) = (classifier(6, 16, 4)?, Tensor::randn([8, 6], &CPU)?);
    let optimizer = optim::AdamW::new(model.parameters(), 0.01)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let view = || normalise(&model.forward(&(&x + x.randn_like()? * 0.2).ok()?)?);
            let scores = view()?.mm(&view()?.t()?)?.div(0.2)?;
            let target = Tensor::arange(0, 8, &CPU)?;
            let loss = ((scores.cross_entropy(&target)? + scores.t()?.cross_entropy(&target)?) * 0.5).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// A slow copy of the encoder fills a queue of keys; the queue is a ring that is written in place.
fn momentum_encoder_with_queue(step: &Step) -> Result<Record> {
    let (model, slow) = (classifier(6, 12, 4)?, classifier(6, 12, 4)?);
    slow.requires_grad_(false)?;
    let queue = normalise(&Tensor::randn([12, 4], &CPU)?)?;
    let optimizer = optim::SGD::new(model.parameters(), 0.2)?;
    let mut record = Record::new();
    for i in 0..6 {
        let (x, at) = (Tensor::randn([4, 6], &CPU)?, i % 3 * 4);
        let loss = step.run(|| {
            optimizer.zero_grad();
            let query = normalise(&model.forward(&x)?)?;
            let key = normalise(&slow.forward(&x)?)?;
            let positive = (&query * &key).ok()?.sum_dim(1, true)?;
            let scores = Tensor::cat([&positive, &query.mm(&queue.t()?)?], 1)?.div(0.3)?;
            let loss = scores.cross_entropy(&Tensor::full_of([4], 0, DType::I64, &CPU)?)?;
            loss.backward()?;
            optimizer.step()?;
            let _guard = no_grad();
            for (slow, quick) in slow.parameters().iter().zip(model.parameters()) {
                slow.lerp_(&quick, 0.1)?;
            }
            queue.narrow(0, at, 4)?.copy_(&key)?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("queue", &queue)?;
    record.tensors("slow", &slow.parameters())?;
    Ok(record)
}

/// For each sample the farthest of its class and the nearest of another one.
fn triplet_hard_mining(step: &Step) -> Result<Record> {
    let (model, x) = (classifier(6, 16, 3)?, Tensor::randn([10, 6], &CPU)?);
    let labels = Tensor::arange(0, 10, &CPU)?.remainder(3)?;
    let optimizer = optim::SGD::new(model.parameters(), 0.1)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let points = model.forward(&x)?;
            let apart = (points.unsqueeze(1)? - points.unsqueeze(0)?).square().ok()?.sum_dim(2, false)?;
            let same = labels.unsqueeze(1)?.eq(&labels.unsqueeze(0)?)?;
            let farthest = apart.masked_fill(&same.logical_not()?, 0.0)?.amax_dim(1, false)?;
            let nearest = apart.masked_fill(&same, f64::INFINITY)?.amin_dim(1, false)?;
            let loss = (farthest - nearest + 0.5).relu().mean().ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// One model sees both of a pair; pairs that belong together come near, others go away.
fn siamese_network(step: &Step) -> Result<Record> {
    let model = classifier(5, 12, 3)?;
    let (a, b) = (Tensor::randn([8, 5], &CPU)?, Tensor::randn([8, 5], &CPU)?);
    let together = Tensor::randint(0, 2, [8], &CPU)?.to_dtype(DType::F32)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let apart = (model.forward(&a)? - model.forward(&b)?).ok()?.norm_dim(2.0, 1, false)?;
            let far = (1.0 - &apart).relu().square();
            let loss = (&together * apart.square()? + (1.0 - &together) * far).mean().ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &model.parameters())?;
    Ok(record)
}

/// Few-shot classification by the mean of each class's few samples.
fn prototypes(step: &Step) -> Result<Record> {
    let model = classifier(6, 16, 4)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (support, query) = (Tensor::randn([3, 4, 6], &CPU)?, Tensor::randn([6, 6], &CPU)?);
        let labels = Tensor::randint(0, 3, [6], &CPU)?;
        let (loss, right) = step.run(|| {
            optimizer.zero_grad();
            let centres = model.forward(&support.view([12, 6])?)?.view([3, 4, 4])?.mean_dim(1, false)?;
            let points = model.forward(&query)?;
            let apart = (points.unsqueeze(1)? - centres).square().ok()?.sum_dim(2, false)?;
            let loss = apart.neg()?.cross_entropy(&labels)?;
            loss.backward()?;
            optimizer.step()?;
            let right = apart.argmin_dim(1, false)?.eq(&labels)?.sum()?;
            Ok::<_, kiln::Error>((loss, right))
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("right", &right)?;
    }
    Ok(record)
}

/// Classes by a vote of the three nearest of a stored set.
fn nearest_neighbours(step: &Step) -> Result<Record> {
    let (stored, labels) = (Tensor::randn([30, 4], &CPU)?, Tensor::randint(0, 3, [30], &CPU)?);
    let mut record = Record::new();
    for _ in 0..3 {
        let x = Tensor::randn([5, 4], &CPU)?;
        let (apart, class) = step.run(|| {
            let products = x.mm(&stored.t()?)?;
            let lengths = (x.square()?.sum_dim(1, true)? + stored.square()?.sum_dim(1, false)?).ok()?;
            let (apart, index) = (lengths - products * 2.0).ok()?.topk(3, 1, false)?;
            let votes = labels.take(&index)?.one_hot(3)?.sum_dim(1, false)?;
            Ok::<_, kiln::Error>((apart, votes.argmax_dim(1, false)?))
        })?;
        record.tensor("apart", &apart)?;
        record.tensor("class", &class)?;
    }
    Ok(record)
}

/// Users and things as vectors: only the rows that a batch names are read and changed.
fn matrix_factorisation(step: &Step) -> Result<Record> {
    let (users, things, bias) = (weight([15, 4], 0.3)?, weight([20, 4], 0.3)?, weight([20], 0.1)?);
    let mut record = Record::new();
    for _ in 0..5 {
        let (user, thing) = (Tensor::randint(0, 15, [10], &CPU)?, Tensor::randint(0, 20, [10], &CPU)?);
        let rating = Tensor::rand([10], &CPU)?.mul(5.0)?;
        let loss = step.run(|| {
            let product = (users.embedding(&user)? * things.embedding(&thing)?).ok()?.sum_dim(1, false)?;
            let guess = (product + bias.index_select(0, &thing)?).ok()?;
            let loss = guess.mse_loss(&rating, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            for parameter in [&users, &things, &bias] {
                parameter.add_scaled_(&gradient(parameter)?, -0.3)?;
                parameter.set_grad(None);
            }
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&users, &things, &bias])?;
    Ok(record)
}

/// Of each pair the one with the higher relevance shall have the higher score; how well is measured by a sort.
fn ranking_loss(step: &Step) -> Result<Record> {
    let (model, x) = (classifier(6, 12, 1)?, Tensor::randn([8, 6], &CPU)?);
    let relevance = Tensor::randint(0, 4, [8], &CPU)?.to_dtype(DType::F32)?;
    let optimizer = optim::Adam::new(model.parameters(), 0.05)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let (loss, gain) = step.run(|| {
            optimizer.zero_grad();
            let scores = model.forward(&x)?.squeeze(1)?;
            let higher = relevance.unsqueeze(1)?.gt(&relevance.unsqueeze(0)?)?;
            let apart = (scores.unsqueeze(1)? - scores.unsqueeze(0)?).ok()?;
            let loss = higher.where_self(&apart.neg()?.exp()?.log1p()?, 0.0)?.sum()?;
            loss.backward()?;
            optimizer.step()?;
            let (_, order) = scores.detach()?.sort(0, true)?;
            let discount = Tensor::arange(2, 10, &CPU)?.to_dtype(DType::F32)?.log2()?;
            Ok::<_, kiln::Error>((loss, relevance.gather(0, &order)?.div(&discount)?.sum()?))
        })?;
        record.tensors("loss and gain", [&loss, &gain])?;
    }
    Ok(record)
}
