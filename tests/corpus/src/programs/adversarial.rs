//! Models against each other, and models of distributions: GANs, auto-encoders, flows, attacks.

use kiln::prelude::*;
use kiln::tensor::{GradOptions, grad};
use kiln::{Error, Result};

use super::{CPU, classifier, gradient, programs, samples, weight};
use crate::{Record, Step};

programs!("adversarial":
    gan_with_two_optimizers, wasserstein_gradient_penalty, variational_autoencoder, vector_quantisation,
    normalising_flow, fast_gradient_sign_attack, domain_adversarial, energy_based_model,
);

/// A generator and a discriminator, each with its optimizer, both updated in one step.
fn gan_with_two_optimizers(step: &Step) -> Result<Record> {
    let generator = nn::seq![nn::Linear::new(2, 16)?, nn::Relu, nn::Linear::new(16, 3)?];
    let discriminator = nn::seq![nn::Linear::new(3, 16)?, nn::Tanh, nn::Linear::new(16, 1)?];
    let first = optim::Adam::options().lr(0.01).betas(0.5, 0.99).build(generator.parameters())?;
    let second = optim::Adam::options().lr(0.02).betas(0.5, 0.99).build(discriminator.parameters())?;
    let judge = |x: &Tensor, real: f64| {
        let scores = discriminator.forward(x)?;
        let target = scores.detach()?.full_like(real)?;
        scores.binary_cross_entropy_with_logits(&target, None, None, Reduction::Mean)
    };
    let mut record = Record::new();
    for _ in 0..4 {
        let real = (Tensor::randn([8, 3], &CPU)? * 0.5 + 2.0).ok()?;
        let (d, g) = step.run(|| {
            let fake = generator.forward(&Tensor::randn([8, 2], &CPU)?)?;
            second.zero_grad();
            let d = (judge(&real, 1.0)? + judge(&fake.detach()?, 0.0)?).ok()?;
            d.backward()?;
            second.step()?;
            first.zero_grad();
            let g = judge(&fake, 1.0)?;
            g.backward()?;
            first.step()?;
            Ok::<_, Error>((d, g))
        })?;
        record.tensors("losses", [&d, &g])?;
    }
    record.tensors("generator", &generator.parameters())?;
    record.tensors("discriminator", &discriminator.parameters())?;
    Ok(record)
}

/// The critic's gradient between real and made samples shall have length one: a gradient in the loss.
fn wasserstein_gradient_penalty(step: &Step) -> Result<Record> {
    let critic = nn::seq![nn::Linear::new(3, 12)?, nn::Tanh, nn::Linear::new(12, 1)?];
    let generator = nn::Linear::new(2, 3)?;
    let optimizer = optim::Adam::new(critic.parameters(), 0.02)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let real = Tensor::randn([6, 3], &CPU)?;
        let loss = step.run(|| {
            let fake = generator.forward(&Tensor::randn([6, 2], &CPU)?)?.detach()?;
            let between = real.lerp(&fake, &Tensor::rand([6, 1], &CPU)?)?;
            between.requires_grad_(true)?;
            let score = critic.forward(&between)?.sum()?;
            let options = GradOptions { create_graph: true, ..GradOptions::default() };
            let slope = grad(&[&score], &[&between], &[], options)?.remove(0);
            let slope = slope.ok_or_else(|| Error::State("the score depends on its input".into()))?;
            let penalty = (slope.norm_dim(2.0, 1, false)? - 1.0).square().mean();
            let apart = critic.forward(&fake)?.mean()? - critic.forward(&real)?.mean()?;
            optimizer.zero_grad();
            let loss = (apart + penalty * 10.0).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("critic", &critic.parameters())?;
    Ok(record)
}

/// A code is drawn by mean and variance; the loss has the distance to a normal distribution.
fn variational_autoencoder(step: &Step) -> Result<Record> {
    let (encoder, heads) = (nn::Linear::new(8, 12)?, nn::Linear::new(12, 6)?);
    let decoder = nn::seq![nn::Linear::new(3, 12)?, nn::Relu, nn::Linear::new(12, 8)?];
    let parameters = [encoder.parameters(), heads.parameters(), decoder.parameters()].concat();
    let optimizer = optim::Adam::new(parameters.clone(), 0.01)?;
    let x = Tensor::rand([10, 8], &CPU)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let (loss, distance) = step.run(|| {
            optimizer.zero_grad();
            let halves = heads.forward(&encoder.forward(&x)?.relu()?)?.chunk(2, 1)?;
            let (mean, log_variance) = (&halves[0], &halves[1]);
            let code = (mean + mean.randn_like()? * (log_variance * 0.5).exp()).ok()?;
            let scores = decoder.forward(&code)?;
            let rebuilt = scores.binary_cross_entropy_with_logits(&x, None, None, Reduction::Sum)?;
            let distance = ((log_variance + 1.0 - mean.square()? - log_variance.exp()?) * -0.5).sum().ok()?;
            let loss = (rebuilt + &distance).ok()?.div(10.0)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>((loss, distance))
        })?;
        record.tensors("losses", [&loss, &distance])?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// Codes are replaced by the nearest of a code book; gradients go straight through.
fn vector_quantisation(step: &Step) -> Result<Record> {
    let (encoder, decoder) = (nn::Linear::new(6, 4)?, nn::Linear::new(4, 6)?);
    let (book, x) = (weight([8, 4], 0.5)?, Tensor::randn([12, 6], &CPU)?);
    let parameters = [encoder.parameters(), decoder.parameters(), vec![book.clone()]].concat();
    let optimizer = optim::Adam::new(parameters, 0.02)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let (loss, chosen) = step.run(|| {
            optimizer.zero_grad();
            let code = encoder.forward(&x)?;
            let apart = (code.unsqueeze(1)? - book.unsqueeze(0)?).square().ok()?.sum_dim(2, false)?;
            let chosen = apart.argmin_dim(1, false)?;
            let near = book.embedding(&chosen)?;
            let through = (&code + (&near - &code).ok()?.detach()?).ok()?;
            let rebuilt = decoder.forward(&through)?.mse_loss(&x, Reduction::Mean)?;
            let to_book = near.mse_loss(&code.detach()?, Reduction::Mean)?;
            let loss = (rebuilt + to_book + code.mse_loss(&near.detach()?, Reduction::Mean)? * 0.25).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>((loss, chosen))
        })?;
        record.tensor("loss", &loss)?;
        record.tensor("chosen", &chosen)?;
    }
    record.tensor("book", &book)?;
    Ok(record)
}

/// Two coupling layers that can be undone; the loss is exact likelihood.
fn normalising_flow(step: &Step) -> Result<Record> {
    let make = || Ok::<_, Error>(nn::seq![nn::Linear::new(1, 8)?, nn::Tanh, nn::Linear::new(8, 2)?]);
    let layers = [make()?, make()?];
    let parameters = layers.iter().flat_map(|layer| layer.parameters()).collect::<Vec<_>>();
    let optimizer = optim::Adam::new(parameters.clone(), 0.02)?;
    let x = (Tensor::randn([16, 2], &CPU)? * 0.5 + 1.0).ok()?;
    let mut record = Record::new();
    for _ in 0..5 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut a, mut b) = (x.narrow(1, 0, 1)?, x.narrow(1, 1, 1)?);
            let mut volume = Tensor::zeros([16, 1], &CPU)?;
            for layer in &layers {
                let both = layer.forward(&a)?;
                let (scale, shift) = (both.narrow(1, 0, 1)?.tanh()?, both.narrow(1, 1, 1)?);
                volume = (volume + &scale).ok()?;
                (a, b) = ((b * scale.exp()? + shift).ok()?, a);
            }
            let length = (a.square()? + b.square()?) * 0.5;
            let loss = (length - volume).mean().ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// The input moves against its gradient's sign, within limits; the model stays.
fn fast_gradient_sign_attack(step: &Step) -> Result<Record> {
    let model = classifier(8, 16, 3)?;
    let (x, y) = samples(6, 8, 3)?;
    model.requires_grad_(false)?;
    let mut attacked = x.clone_tensor()?;
    let mut record = Record::new();
    for _ in 0..5 {
        attacked.requires_grad_(true)?;
        let (loss, moved) = step.run(|| {
            let loss = model.forward(&attacked)?.cross_entropy(&y)?;
            loss.backward()?;
            let moved = (attacked.detach()? + gradient(&attacked)?.sign()? * 0.05).ok()?;
            Ok::<_, Error>((loss, moved.clamp(&x.sub(0.1)?, &x.add(0.1)?)?))
        })?;
        attacked = moved;
        record.tensor("loss", &loss)?;
    }
    record.tensor("attacked", &attacked)?;
    Ok(record)
}

/// A second head must not tell two sources apart: its gradient is turned round by the detach trick.
fn domain_adversarial(step: &Step) -> Result<Record> {
    let (body, classes, domain) = (nn::Linear::new(6, 12)?, nn::Linear::new(12, 3)?, nn::Linear::new(12, 2)?);
    let parameters = [body.parameters(), classes.parameters(), domain.parameters()].concat();
    let optimizer = optim::SGD::options().lr(0.1).momentum(0.9).build(parameters.clone())?;
    let (x, y) = samples(8, 6, 3)?;
    let other = (Tensor::randn([8, 6], &CPU)? + 1.0).ok()?;
    let source = Tensor::arange(0, 16, &CPU)?.ge(8)?.to_dtype(DType::I64)?;
    let mut record = Record::new();
    for i in 0..5 {
        let strength = i as f64 / 5.0;
        let loss = step.run(|| {
            optimizer.zero_grad();
            let features = body.forward(&Tensor::cat([&x, &other], 0)?)?.relu()?;
            let right = classes.forward(&features.i(..8)?)?.cross_entropy(&y)?;
            let turned = (features.detach()? * (1.0 + strength) - &features * strength).ok()?;
            let loss = (right + domain.forward(&turned)?.cross_entropy(&source)?).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", &parameters)?;
    Ok(record)
}

/// Samples are drawn by Langevin dynamics on the energy's gradient, in a loop inside the step.
fn energy_based_model(step: &Step) -> Result<Record> {
    let energy = nn::seq![nn::Linear::new(2, 16)?, nn::Tanh, nn::Linear::new(16, 1)?];
    let optimizer = optim::Adam::new(energy.parameters(), 0.02)?;
    let real = (Tensor::randn([8, 2], &CPU)? * 0.3 + 1.0).ok()?;
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            let mut x = Tensor::randn([8, 2], &CPU)?;
            for _ in 0..3 {
                x.requires_grad_(true)?;
                energy.forward(&x)?.sum()?.backward()?;
                let slope = gradient(&x)?;
                x = (x.detach()? - slope * 0.1 + x.randn_like()? * 0.05).ok()?;
            }
            optimizer.zero_grad();
            let loss = (energy.forward(&real)?.mean()? - energy.forward(&x)?.mean()?).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("energy", &energy.parameters())?;
    Ok(record)
}
