//! Numerical work: regression, clustering, linear algebra by iteration, filters, differential equations with nets.

use kiln::prelude::*;
use kiln::tensor::{GradOptions, grad};
use kiln::{Error, Result};

use super::{CPU, constant, gradient, programs, weight};
use crate::{Record, Step};

programs!("scientific":
    logistic_regression, linear_regression_with_line_search, limited_memory_quasi_newton, k_means,
    gaussian_mixture, power_iteration, page_rank, conjugate_gradient, gram_schmidt, principal_components,
    kalman_filter, particle_filter, physics_informed_network, neural_differential_equation, gaussian_process,
    optimal_transport, monte_carlo, convolution_by_unfold, hidden_markov_model,
);

/// Two classes, gradient by hand.
fn logistic_regression(step: &Step) -> Result<Record> {
    let (x, w, b) = (Tensor::randn([30, 4], &CPU)?, Tensor::zeros([4], &CPU)?, Tensor::zeros((), &CPU)?);
    let y = x.sum_dim(1, false)?.gt(0.0)?.to_dtype(DType::F32)?;
    let mut record = Record::new();
    for _ in 0..8 {
        let loss = step.run(|| {
            let p = (x.mv(&w)? + &b).sigmoid().ok()?;
            let error = (&p - &y).ok()?;
            w.add_scaled_(&x.t()?.mv(&error)?, -0.02)?;
            b.add_scaled_(&error.sum()?, -0.02)?;
            let p = p.clamp(1e-6, 1.0 - 1e-6)?;
            (-(&y * p.log()? + (1.0 - &y) * (1.0 - &p).log())).ok()?.mean()
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("parameters", [&w, &b])?;
    Ok(record)
}

/// Steepest descent; the host halves the step until the loss falls enough.
fn linear_regression_with_line_search(step: &Step) -> Result<Record> {
    let (x, y) = (Tensor::randn([20, 5], &CPU)?, Tensor::randn([20], &CPU)?);
    let w = Tensor::zeros([5], &CPU)?;
    let try_out = step.another("try");
    let mut record = Record::new();
    for _ in 0..5 {
        let (loss, slope, length) = step.run(|| {
            let error = (x.mv(&w)? - &y).ok()?;
            let slope = x.t()?.mv(&error)?.div(10.0)?;
            Ok::<_, Error>((error.square()?.mean()?, slope.clone(), slope.dot(&slope)?))
        })?;
        let (loss, length) = (loss.item::<f32>()?, length.item::<f32>()?);
        let mut size = 2.0f32;
        loop {
            let tried = try_out.run(|| {
                let there = w.add_scaled(&slope, -size)?;
                x.mv(&there)?.sub(&y)?.square()?.mean()
            })?;
            if tried.item::<f32>()? <= loss - 0.3 * size * length || size < 1e-3 {
                break;
            }
            size /= 2.0;
        }
        w.add_scaled_(&slope, -size)?;
        record.number("loss", f64::from(loss));
        record.number("size", f64::from(size));
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// L-BFGS: the direction from the last three changes of point and slope, by the two-loop recursion.
fn limited_memory_quasi_newton(step: &Step) -> Result<Record> {
    let (x, y) = (Tensor::randn([24, 5], &CPU)?, Tensor::randn([24], &CPU)?);
    let mut w = weight([5], 0.5)?;
    let direction_of = step.another("direction");
    let mut history: Vec<(Tensor, Tensor)> = Vec::new();
    let (mut last, mut record): (Option<(Tensor, Tensor)>, _) = (None, Record::new());
    for _ in 0..6 {
        let (loss, slope) = step.run(|| {
            w.set_grad(None);
            let loss = x.mv(&w)?.huber_loss(&y, 0.7, Reduction::Mean)?;
            loss.backward()?;
            Ok::<_, Error>((loss, gradient(&w)?))
        })?;
        let point = w.detach()?;
        if let Some((old_point, old_slope)) = &last {
            history.push(((&point - old_point).ok()?, (&slope - old_slope).ok()?));
            history = history.split_off(history.len().saturating_sub(3));
        }
        let moved = direction_of.run(|| {
            let (mut q, mut shares) = (slope.clone(), Vec::new());
            for (s, y) in history.iter().rev() {
                let share = s.dot(&q)?.div(&s.dot(y)?)?;
                q = (&q - y * &share).ok()?;
                shares.push(share);
            }
            if let Some((s, y)) = history.last() {
                q = q.mul(&s.dot(y)?.div(&y.dot(y)?)?)?;
            }
            for ((s, y), share) in history.iter().zip(shares.iter().rev()) {
                let back = y.dot(&q)?.div(&s.dot(y)?)?;
                q = (&q + s * (share - back)).ok()?;
            }
            (&point - q).ok()
        })?;
        last = Some((point, slope));
        w = moved;
        w.requires_grad_(true)?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("w", &w)?;
    Ok(record)
}

/// Centres move to the mean of their points until no point changes sides.
fn k_means(step: &Step) -> Result<Record> {
    let points = Tensor::randn([40, 2], &CPU)?;
    let centres = points.i(..4)?.clone_tensor()?;
    let sides = Tensor::full_of([40], -1, DType::I64, &CPU)?;
    let mut sweeps = 0;
    loop {
        let changed = step.run(|| {
            let apart = (points.unsqueeze(1)? - centres.unsqueeze(0)?).square().ok()?.sum_dim(2, false)?;
            let nearest = apart.argmin_dim(1, false)?;
            let changed = nearest.ne(&sides)?.sum()?;
            sides.copy_(&nearest)?;
            let member = nearest.one_hot(4)?.to_dtype(DType::F32)?.t()?;
            let count = member.sum_dim(1, true)?.clamp_min(1.0)?;
            centres.copy_(&member.mm(&points)?.div(&count)?)?;
            Ok::<_, Error>(changed)
        })?;
        sweeps += 1;
        if changed.item::<i64>()? == 0 || sweeps == 30 {
            break;
        }
    }
    let mut record = Record::new();
    record.integer("sweeps", sweeps);
    record.tensors("result", [&centres, &sides])?;
    Ok(record)
}

/// Expectation and maximisation for a mixture of two normal distributions.
fn gaussian_mixture(step: &Step) -> Result<Record> {
    let x =
        Tensor::cat([&Tensor::randn([20], &CPU)?, &Tensor::randn([20], &CPU)?.add(3.0)?], 0)?.unsqueeze(1)?;
    let (mean, variance) = (Tensor::from_slice(&[-1.0f32, 1.0])?, Tensor::ones([2], &CPU)?);
    let share = Tensor::full([2], 0.5, &CPU)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let likelihood = step.run(|| {
            let density = (&x - &mean).square() / (&variance * -2.0) - variance.log()? * 0.5 + share.log()?;
            let density = density.ok()?;
            let total = density.logsumexp(1, true)?;
            let member = (density - &total).exp().ok()?;
            let count = member.sum_dim(0, false)?;
            mean.copy_(&(&member * &x).ok()?.sum_dim(0, false)?.div(&count)?)?;
            variance.copy_(&(&member * (&x - &mean).square()).ok()?.sum_dim(0, false)?.div(&count)?)?;
            share.copy_(&count.div(40.0)?)?;
            total.sum()
        })?;
        record.tensor("likelihood", &likelihood)?;
    }
    record.tensors("parameters", [&mean, &variance, &share])?;
    Ok(record)
}

/// The largest eigenvalue of a symmetric matrix, five products in each step.
fn power_iteration(step: &Step) -> Result<Record> {
    let half = Tensor::randn([6, 6], &CPU)?;
    let matrix = half.mm(&half.t()?)?;
    let mut v = Tensor::ones([6], &CPU)?;
    let mut record = Record::new();
    for _ in 0..4 {
        let (next, value) = step.run(|| {
            let mut next = v.clone();
            for _ in 0..5 {
                next = matrix.mv(&next)?;
                next = next.div(&next.norm(2.0)?)?;
            }
            let value = next.dot(&matrix.mv(&next)?)?;
            Ok::<_, Error>((next, value))
        })?;
        v = next;
        record.tensor("value", &value)?;
    }
    record.tensor("vector", &v)?;
    Ok(record)
}

/// Ranks flow along links until they settle.
fn page_rank(step: &Step) -> Result<Record> {
    let links = Tensor::rand([10, 10], &CPU)?.lt(0.3)?.to_dtype(DType::F32)?;
    let out = links.sum_dim(0, true)?;
    let flow = out.gt(0.0)?.where_self(&(&links / out.clamp_min(1.0)?).ok()?, 0.1)?;
    let mut rank = Tensor::full([10], 0.1, &CPU)?;
    let (mut rounds, mut record) = (0, Record::new());
    loop {
        let (next, change) = step.run(|| {
            let next = (flow.mv(&rank)? * 0.85 + 0.015).ok()?;
            let change = (&next - &rank).abs().sum().ok()?;
            Ok::<_, Error>((next, change))
        })?;
        rank = next;
        rounds += 1;
        if change.item::<f32>()? < 1e-3 {
            break;
        }
    }
    record.integer("rounds", rounds);
    record.tensor("rank", &rank)?;
    Ok(record)
}

/// Solves a linear system; residual, direction and solution are changed in place.
fn conjugate_gradient(step: &Step) -> Result<Record> {
    let half = Tensor::randn([6, 6], &CPU)?;
    let matrix = (half.mm(&half.t()?)? + Tensor::eye(6, 6, &CPU)? * 4.0).ok()?;
    let right = Tensor::randn([6], &CPU)?;
    let (x, r, p) = (Tensor::zeros([6], &CPU)?, right.clone_tensor()?, right.clone_tensor()?);
    let mut record = Record::new();
    for _ in 0..4 {
        let size = step.run(|| {
            let product = matrix.mv(&p)?;
            let before = r.dot(&r)?;
            let length = before.div(&p.dot(&product)?)?;
            x.add_(&p.mul(&length)?)?;
            r.sub_(&product.mul(&length)?)?;
            let after = r.dot(&r)?;
            p.mul_(&after.div(&before)?)?.add_(&r)?;
            Ok::<_, Error>(after)
        })?;
        record.tensor("residual", &size)?;
    }
    record.tensor("x", &x)?;
    Ok(record)
}

/// Columns made orthogonal, one after the other, in place.
fn gram_schmidt(step: &Step) -> Result<Record> {
    let mut record = Record::new();
    for _ in 0..3 {
        let basis = Tensor::randn([6, 4], &CPU)?;
        let check = step.run(|| {
            for i in 0..4 {
                let column = basis.select(1, i)?;
                for j in 0..i {
                    let other = basis.select(1, j)?;
                    column.sub_(&other.mul(&other.dot(&column)?)?)?;
                }
                column.div_(&column.norm(2.0)?)?;
            }
            (basis.t()?.mm(&basis)? - Tensor::eye(4, 4, &CPU)?).abs().ok()?.lt(1e-4)?.all()
        })?;
        record.tensors("result", [&basis, &check])?;
    }
    Ok(record)
}

/// Principal components by powers and deflation; batches update a running covariance in place.
fn principal_components(step: &Step) -> Result<Record> {
    let (mix, covariance) = (Tensor::randn([5, 5], &CPU)?, Tensor::zeros([5, 5], &CPU)?);
    let mut record = Record::new();
    for i in 0..4 {
        let batch = Tensor::randn([16, 5], &CPU)?.mm(&mix)?;
        let components = step.run(|| {
            let centred = (&batch - batch.mean_dim(0, true)?).ok()?;
            covariance.lerp_(&centred.t()?.mm(&centred)?.div(15.0)?, 1.0 / (i as f64 + 1.0))?;
            let (mut left, mut components) = (covariance.clone_tensor()?, Vec::new());
            for _ in 0..2 {
                let mut v = Tensor::ones([5], &CPU)?;
                for _ in 0..8 {
                    v = left.mv(&v)?;
                    v = v.div(&v.norm(2.0)?)?;
                }
                left = (&left - v.outer(&v)? * v.dot(&left.mv(&v)?)?).ok()?;
                components.push(v);
            }
            Tensor::stack(&components, 0)
        })?;
        record.tensor("components", &components)?;
    }
    record.tensor("covariance", &covariance)?;
    Ok(record)
}

/// Position and speed from noisy positions: predict, then correct.
fn kalman_filter(step: &Step) -> Result<Record> {
    let motion = Tensor::from_vec(vec![1.0f32, 1.0, 0.0, 1.0], [2, 2])?;
    let (noise, eye) = (Tensor::eye(2, 2, &CPU)?.mul(0.01)?, Tensor::eye(2, 2, &CPU)?);
    let seen = Tensor::from_vec(vec![1.0f32, 0.0], [1, 2])?;
    let (mut state, mut spread) = (Tensor::zeros([2, 1], &CPU)?, eye.clone_tensor()?);
    let mut record = Record::new();
    for time in 0..8 {
        let measured = Tensor::randn([1, 1], &CPU)?.mul(0.3)?.add(time as f64)?;
        (state, spread) = step.run(|| {
            let ahead = motion.mm(&state)?;
            let wide = (motion.mm(&spread)?.mm(&motion.t()?)? + &noise).ok()?;
            let surprise = (&measured - seen.mm(&ahead)?).ok()?;
            let scale = (seen.mm(&wide)?.mm(&seen.t()?)? + 0.09).ok()?;
            let gain = wide.mm(&seen.t()?)?.div(&scale)?;
            let corrected = (ahead + gain.mm(&surprise)?).ok()?;
            Ok::<_, Error>((corrected, (&eye - gain.mm(&seen)?).ok()?.mm(&wide)?))
        })?;
        record.tensor("state", &state)?;
    }
    record.tensor("spread", &spread)?;
    Ok(record)
}

/// Many guesses, weighted by how well they fit, drawn again by their weights.
fn particle_filter(step: &Step) -> Result<Record> {
    let mut particles = Tensor::randn([24], &CPU)?;
    let mut record = Record::new();
    for time in 0..5 {
        let measured = 0.5 * time as f64;
        let (next, mean) = step.run(|| {
            let moved = (&particles + 0.5 + particles.randn_like()? * 0.1).ok()?;
            let fit = ((&moved - measured).square() * -2.0).softmax(0).ok()?;
            let mean = moved.dot(&fit)?;
            let ends = fit.cumsum(0)?;
            let draws = Tensor::rand([24, 1], &CPU)?;
            let index =
                ends.unsqueeze(0)?.lt(&draws)?.to_dtype(DType::I64)?.sum_dim(1, false)?.clamp_max(23)?;
            Ok::<_, Error>((moved.index_select(0, &index)?, mean))
        })?;
        particles = next;
        record.tensor("mean", &mean)?;
    }
    record.tensor("particles", &particles)?;
    Ok(record)
}

/// A net whose second derivative is given, with values at both ends: gradients of gradients in the loss.
fn physics_informed_network(step: &Step) -> Result<Record> {
    let net = nn::seq![nn::Linear::new(1, 12)?, nn::Tanh, nn::Linear::new(12, 1)?];
    let optimizer = optim::Adam::new(net.parameters(), 0.02)?;
    let x = Tensor::linspace(0.0, 1.0, 9, &CPU)?.unsqueeze(1)?;
    x.requires_grad_(true)?;
    let source = x.detach()?.mul(std::f64::consts::PI)?.sin()?;
    let ends = Tensor::from_vec(vec![0.0f32, 1.0], [2, 1])?;
    let slope = |of: &Tensor| {
        let options = GradOptions { create_graph: true, ..GradOptions::default() };
        let found = grad(&[&of.sum()?], &[&x], &[], options)?.remove(0);
        found.ok_or_else(|| Error::State("the net depends on its input".into()))
    };
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let second = slope(&slope(&net.forward(&x)?)?)?;
            let inside = (second + &source).square().mean();
            let loss = (inside + net.forward(&ends)?.square()?.mean()? * 10.0).ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
        x.set_grad(None);
    }
    record.tensors("net", &net.parameters())?;
    Ok(record)
}

/// A net as the right side of a differential equation, solved by Runge and Kutta, trained through the solver.
fn neural_differential_equation(step: &Step) -> Result<Record> {
    let net = nn::seq![nn::Linear::new(2, 12)?, nn::Tanh, nn::Linear::new(12, 2)?];
    let optimizer = optim::Adam::new(net.parameters(), 0.02)?;
    let (start, target) = (Tensor::randn([6, 2], &CPU)?, Tensor::randn([6, 2], &CPU)?);
    let mut record = Record::new();
    for _ in 0..3 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut z, h) = (start.clone(), 0.25);
            for _ in 0..4 {
                let a = net.forward(&z)?;
                let b = net.forward(&(&z + &a * (h / 2.0)).ok()?)?;
                let c = net.forward(&(&z + &b * (h / 2.0)).ok()?)?;
                let d = net.forward(&(&z + &c * h).ok()?)?;
                z = (&z + (a + b * 2.0 + c * 2.0 + d) * (h / 6.0)).ok()?;
            }
            let loss = z.mse_loss(&target, Reduction::Mean)?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensors("net", &net.parameters())?;
    Ok(record)
}

/// Predictions by a kernel matrix, the system solved by elimination without pivots, in place.
fn gaussian_process(step: &Step) -> Result<Record> {
    let (x, at) = (Tensor::linspace(0.0, 3.0, 5, &CPU)?, Tensor::linspace(0.2, 2.8, 7, &CPU)?);
    let y = x.sin()?.unsqueeze(1)?;
    let kernel = |a: &Tensor, b: &Tensor, width: f64| {
        ((a.unsqueeze(1)? - b.unsqueeze(0)?).square() * (-0.5 / (width * width))).exp().ok()
    };
    let mut record = Record::new();
    for width in [0.5, 0.8, 1.0] {
        let guess = step.run(|| {
            let matrix = (kernel(&x, &x, width)? + Tensor::eye(5, 5, &CPU)? * 0.05).ok()?;
            let rows = Tensor::cat([&matrix, &y], 1)?;
            for i in 0..5 {
                let pivot = rows.i((i, ..))?;
                pivot.div_(&rows.i((i, i))?.clone_tensor()?)?;
                let others = rows.i((.., i..i + 1))?.clone_tensor()?;
                others.i(i)?.zero_()?;
                rows.sub_(&others.mul(&pivot.unsqueeze(0)?)?)?;
            }
            kernel(&at, &x, width)?.mv(&rows.i((.., 5))?)
        })?;
        record.tensor("guess", &guess)?;
    }
    Ok(record)
}

/// Sinkhorn's iteration between two clouds of points; the clouds' own gradient moves one of them.
fn optimal_transport(step: &Step) -> Result<Record> {
    let (a, b) = (weight([6, 2], 1.0)?, Tensor::randn([7, 2], &CPU)?.add(1.0)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let cost = step.run(|| {
            a.set_grad(None);
            let apart = (a.unsqueeze(1)? - b.unsqueeze(0)?).square().ok()?.sum_dim(2, false)?;
            let plan = {
                let _guard = no_grad();
                let scores = apart.mul(-2.0)?;
                let (mut u, mut v) = (Tensor::zeros([6, 1], &CPU)?, Tensor::zeros([1, 7], &CPU)?);
                for _ in 0..5 {
                    u = ((&scores + &v).ok()?.logsumexp(1, true)? + 6f64.ln()).ok()?.neg()?;
                    v = ((&scores + &u).ok()?.logsumexp(0, true)? + 7f64.ln()).ok()?.neg()?;
                }
                (scores + u + v).exp().ok()?
            };
            let cost = (plan * apart).sum().ok()?;
            cost.backward()?;
            let _guard = no_grad();
            a.add_scaled_(&gradient(&a)?, -0.5)?;
            Ok::<_, Error>(cost)
        })?;
        record.tensor("cost", &cost)?;
    }
    record.tensor("cloud", &a)?;
    Ok(record)
}

/// An option's price and its slope by simulated paths.
fn monte_carlo(step: &Step) -> Result<Record> {
    let price = constant([1], 1.05)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let value = step.run(|| {
            price.set_grad(None);
            let mut path = price.expand([64])?.log()?;
            for _ in 0..6 {
                path = (path + Tensor::randn([64], &CPU)? * 0.08 - 0.0032).ok()?;
            }
            let value = (path.exp()? - 1.0).relu().mean().ok()?;
            value.backward()?;
            Ok::<_, Error>(value)
        })?;
        record.tensors("value and slope", [&value, &gradient(&price)?])?;
    }
    Ok(record)
}

/// A convolution without a convolution: windows by `unfold`, then a product.
fn convolution_by_unfold(step: &Step) -> Result<Record> {
    let filters = weight([4, 2 * 3 * 3], 0.3)?;
    let (x, y) = (Tensor::randn([3, 2, 7, 7], &CPU)?, Tensor::randn([3, 4, 5, 5], &CPU)?);
    let mut record = Record::new();
    for _ in 0..4 {
        let loss = step.run(|| {
            filters.set_grad(None);
            let windows = x.unfold(2, 3, 1)?.unfold(3, 3, 1)?;
            let windows = windows.permute([0, 2, 3, 1, 4, 5])?.reshape([3, 25, 18])?;
            let out = windows.linear(&filters, None)?.transpose(1, 2)?.reshape([3, 4, 5, 5])?;
            let loss = out.mse_loss(&y, Reduction::Mean)?;
            loss.backward()?;
            let _guard = no_grad();
            filters.add_scaled_(&gradient(&filters)?, -0.3)?;
            Ok::<_, Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("filters", &filters)?;
    Ok(record)
}

/// The likelihood of observations by the forward recursion, and the best path by Viterbi's.
fn hidden_markov_model(step: &Step) -> Result<Record> {
    let moves = Tensor::randn([4, 4], &CPU)?.log_softmax(1)?;
    let emits = Tensor::randn([4, 6], &CPU)?.log_softmax(1)?;
    let mut record = Record::new();
    for _ in 0..3 {
        let seen = Tensor::randint(0, 6, [7], &CPU)?;
        let (likelihood, path) = step.run(|| {
            let fits = emits.index_select(1, &seen)?;
            let (mut all, mut best) = (fits.select(1, 0)?, fits.select(1, 0)?);
            let mut from = Vec::new();
            for time in 1..7 {
                let fit = fits.select(1, time)?;
                all = (all.unsqueeze(1)? + &moves).ok()?.logsumexp(0, false)?.add(&fit)?;
                let (value, index) = (best.unsqueeze(1)? + &moves).ok()?.max_dim(0, false)?;
                best = (value + fit).ok()?;
                from.push(index);
            }
            let mut path = vec![best.argmax()?.view([1])?];
            for (step, index) in from.iter().rev().enumerate() {
                path.push(index.index_select(0, &path[step])?);
            }
            Ok::<_, Error>((all.logsumexp_all()?, Tensor::cat(&path, 0)?.flip(0)?))
        })?;
        record.tensors("result", [&likelihood, &path])?;
    }
    Ok(record)
}
