//! Worlds on grids and in space: cellular automata, stencils, particles, images by iteration.

use kiln::Result;
use kiln::prelude::*;

use super::{CPU, programs};
use crate::{Record, Step};

programs!("simulation":
    game_of_life, heat_equation, wave_equation, poisson_until_converged, n_body, mandelbrot, ising_model,
    random_walks, reaction_diffusion, differentiable_projectile, flocking, lattice_boltzmann,
);

/// Conway's game on a torus, by rolled copies of the board.
fn game_of_life(step: &Step) -> Result<Record> {
    let mut board = Tensor::rand([12, 12], &CPU)?.lt(0.4)?.to_dtype(DType::I64)?;
    let mut record = Record::new();
    for _ in 0..6 {
        board = step.run(|| {
            let mut neighbours = board.zeros_like()?;
            for (down, right) in [(-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)] {
                neighbours = (neighbours + board.roll(down, 0)?.roll(right, 1)?).ok()?;
            }
            let stays = neighbours.eq(2)?.logical_and(&board.eq(1)?)?;
            neighbours.eq(3)?.logical_or(&stays)?.to_dtype(DType::I64)
        })?;
        record.tensor("board", &board)?;
    }
    Ok(record)
}

/// Heat spreads: a stencil of slices, written into the inside of the plate.
fn heat_equation(step: &Step) -> Result<Record> {
    let plate = Tensor::zeros([10, 10], &CPU)?;
    plate.i((0, ..))?.fill_(1.0)?;
    let mut record = Record::new();
    for _ in 0..6 {
        let total = step.run(|| {
            let at = |row: usize, column: usize| plate.i((row..row + 8, column..column + 8));
            let around = at(0, 1)? + at(2, 1)? + at(1, 0)? + at(1, 2)?;
            let change = (around - at(1, 1)? * 4.0).ok()?;
            at(1, 1)?.add_scaled_(&change, 0.2)?;
            plate.sum()
        })?;
        record.tensor("total", &total)?;
    }
    record.tensor("plate", &plate)?;
    Ok(record)
}

/// Two time levels that change places on the host.
fn wave_equation(step: &Step) -> Result<Record> {
    let start = Tensor::linspace(0.0, std::f64::consts::PI, 24, &CPU)?.sin()?;
    let (mut before, mut now) = (start.clone_tensor()?, start);
    let mut record = Record::new();
    for i in 0..8 {
        step.run(|| {
            let bend = (now.i(2..)? - now.i(1..23)? * 2.0 + now.i(..22)?).ok()?;
            let next = (now.i(1..23)? * 2.0 - before.i(1..23)? + bend * 0.3).ok()?;
            before.i(1..23)?.copy_(&next)?;
            Ok::<_, kiln::Error>(())
        })?;
        std::mem::swap(&mut before, &mut now);
        record.integer("time", i);
        record.tensor("string", &now)?;
    }
    Ok(record)
}

/// Sweeps until the residual is small; the host asks after every fourth.
fn poisson_until_converged(step: &Step) -> Result<Record> {
    let (field, source) = (Tensor::zeros([8, 8], &CPU)?, Tensor::randn([6, 6], &CPU)?);
    let (mut rounds, mut record) = (0, Record::new());
    loop {
        let change = step.run(|| {
            let mut change = Tensor::zeros((), &CPU)?;
            for _ in 0..4 {
                let inside = field.i((1..7, 1..7))?;
                let around = field.i((..6, 1..7))? + field.i((2.., 1..7))? + field.i((1..7, ..6))?;
                let next = ((around + field.i((1..7, 2..))? - &source) / 4.0).ok()?;
                change = (&next - &inside).abs().ok()?.amax()?;
                inside.copy_(&next)?;
            }
            Ok::<_, kiln::Error>(change)
        })?;
        rounds += 1;
        if change.item::<f32>()? < 1e-2 || rounds == 20 {
            break;
        }
    }
    record.integer("rounds", rounds);
    record.tensor("field", &field)?;
    Ok(record)
}

/// Bodies that attract each other, by leapfrog steps.
fn n_body(step: &Step) -> Result<Record> {
    let (place, speed) = (Tensor::randn([6, 3], &CPU)?, Tensor::randn([6, 3], &CPU)?.mul(0.1)?);
    let mass = Tensor::rand([6], &CPU)?.add(0.5)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let energy = step.run(|| {
            let pull = || {
                let apart = (place.unsqueeze(0)? - place.unsqueeze(1)?).ok()?;
                let near = apart.square()?.sum_dim(2, true)?.add(0.1)?;
                (apart * mass.view([1, 6, 1])? / near.pow(1.5)?).ok()?.sum_dim(1, false)
            };
            speed.add_scaled_(&pull()?, 0.01)?;
            place.add_scaled_(&speed, 0.02)?;
            speed.add_scaled_(&pull()?, 0.01)?;
            (speed.square()?.sum_dim(1, false)? * &mass).sum().ok()?.mul(0.5)
        })?;
        record.tensor("energy", &energy)?;
    }
    record.tensors("state", [&place, &speed])?;
    Ok(record)
}

/// How long each point of the plane stays near: ten rounds in a step, masked where it has left.
fn mandelbrot(step: &Step) -> Result<Record> {
    let lines = [Tensor::linspace(-1.2, 1.2, 12, &CPU)?, Tensor::linspace(-2.0, 0.6, 14, &CPU)?];
    let grid = Tensor::meshgrid(&[&lines[0], &lines[1]])?;
    let (mut x, mut y) = (Tensor::zeros([12, 14], &CPU)?, Tensor::zeros([12, 14], &CPU)?);
    let count = Tensor::full_of([12, 14], 0, DType::I64, &CPU)?;
    for _ in 0..3 {
        (x, y) = step.run(|| {
            let (mut x, mut y) = (x.clone(), y.clone());
            for _ in 0..10 {
                let near = (&x * &x + &y * &y).ok()?.lt(4.0)?;
                count.add_(&near)?;
                let next = (&x * &x - &y * &y + &grid[1]).ok()?;
                y = near.where_self(&(&x * &y * 2.0 + &grid[0]).ok()?, &y)?;
                x = near.where_self(&next, &x)?;
            }
            Ok::<_, kiln::Error>((x, y))
        })?;
    }
    let mut record = Record::new();
    record.tensor("count", &count)?;
    Ok(record)
}

/// Spins on a checkerboard, flipped at random by their energy.
fn ising_model(step: &Step) -> Result<Record> {
    let spins = Tensor::rand([8, 8], &CPU)?.lt(0.5)?.where_self(&Tensor::ones([8, 8], &CPU)?, -1.0)?;
    let line = Tensor::arange(0, 8, &CPU)?;
    let colour = (line.unsqueeze(1)? + line.unsqueeze(0)?).ok()?.remainder(2)?;
    let mut record = Record::new();
    for _ in 0..5 {
        let magnet = step.run(|| {
            for side in 0..2 {
                let around =
                    spins.roll(1, 0)? + spins.roll(-1, 0)? + spins.roll(1, 1)? + spins.roll(-1, 1)?;
                let cost = (around * &spins * 2.0).ok()?;
                let flips = Tensor::rand([8, 8], &CPU)?.lt(&(cost * -0.5).exp().ok()?)?;
                let flips = flips.logical_and(&colour.eq(side)?)?;
                spins.copy_(&flips.where_self(&spins.neg()?, &spins)?)?;
            }
            spins.mean()
        })?;
        record.tensor("magnet", &magnet)?;
    }
    record.tensor("spins", &spins.to_dtype(DType::I64)?)?;
    Ok(record)
}

/// Walkers on a ring and how often each place was visited.
fn random_walks(step: &Step) -> Result<Record> {
    let places = Tensor::full_of([16], 0, DType::I64, &CPU)?;
    let visits = Tensor::full_of([10], 0, DType::I64, &CPU)?;
    for _ in 0..6 {
        step.run(|| {
            let way = Tensor::randint(0, 2, [16], &CPU)?.mul(2)?.sub(1)?;
            places.copy_(&places.add(&way)?.remainder(10)?)?;
            visits.index_add_(0, &places, &places.ones_like()?)?;
            Ok::<_, kiln::Error>(())
        })?;
    }
    let mut record = Record::new();
    record.tensors("result", [&places, &visits])?;
    Ok(record)
}

/// Two substances by convolution with a fixed stencil.
fn reaction_diffusion(step: &Step) -> Result<Record> {
    let stencil = [0.05f32, 0.2, 0.05, 0.2, -1.0, 0.2, 0.05, 0.2, 0.05];
    let stencil = Tensor::from_vec([stencil, stencil].concat(), [2, 1, 3, 3])?;
    let mut state = Tensor::stack([&Tensor::ones([10, 10], &CPU)?, &Tensor::zeros([10, 10], &CPU)?], 0)?;
    state.i((1, 4..6, 4..6))?.fill_(0.5)?;
    let rates = Tensor::from_vec(vec![1.0f32, 0.5], [2, 1, 1])?;
    let mut record = Record::new();
    for _ in 0..5 {
        state = step.run(|| {
            let spread = state.unsqueeze(0)?.conv2d(&stencil, None, 1, 1, 1, 2)?.squeeze(0)?;
            let (a, b) = (state.select(0, 0)?, state.select(0, 1)?);
            let reacts = (&a * &b * &b).ok()?;
            let change =
                Tensor::stack([&(0.055 * (1.0 - &a) - &reacts).ok()?, &(&reacts - &b * 0.117).ok()?], 0)?;
            (&state + spread * &rates + change).ok()
        })?;
        record.tensor("state", &state)?;
    }
    Ok(record)
}

/// The throw that hits a target, found by the gradient through the flight.
fn differentiable_projectile(step: &Step) -> Result<Record> {
    let throw = Tensor::from_slice(&[1.0f32, 1.0])?;
    throw.requires_grad_(true)?;
    let optimizer = optim::SGD::new(vec![throw.clone()], 0.05)?;
    let target = Tensor::from_slice(&[3.0f32, 0.0])?;
    let pull = Tensor::from_slice(&[0.0f32, -1.0])?;
    let mut record = Record::new();
    for _ in 0..6 {
        let loss = step.run(|| {
            optimizer.zero_grad();
            let (mut place, mut speed) = (Tensor::zeros([2], &CPU)?, throw.clone());
            for _ in 0..10 {
                let drag = speed.mul(&speed.norm(2.0)?)?.mul(0.05)?;
                speed = (speed + (&pull - drag) * 0.2).ok()?;
                place = (place + &speed * 0.2).ok()?;
            }
            let loss = (place - &target).square().sum().ok()?;
            loss.backward()?;
            optimizer.step()?;
            Ok::<_, kiln::Error>(loss)
        })?;
        record.tensor("loss", &loss)?;
    }
    record.tensor("throw", &throw)?;
    Ok(record)
}

/// Birds that follow their neighbours; those are masked by distance.
fn flocking(step: &Step) -> Result<Record> {
    let (place, speed) = (Tensor::rand([10, 2], &CPU)?.mul(4.0)?, Tensor::randn([10, 2], &CPU)?);
    let mut record = Record::new();
    for _ in 0..5 {
        step.run(|| {
            let apart = (place.unsqueeze(0)? - place.unsqueeze(1)?).ok()?;
            let near = apart.norm_dim(2.0, 2, true)?.lt(1.5)?.to_dtype(DType::F32)?;
            let count = near.sum_dim(1, false)?;
            let centre = (&apart * &near).ok()?.sum_dim(1, false)?.div(&count)?;
            let common = (speed.unsqueeze(0)? * &near).ok()?.sum_dim(1, false)?.div(&count)?;
            speed.lerp_(&common, 0.2)?.add_scaled_(&centre, 0.05)?;
            place.add_scaled_(&speed, 0.1)?;
            place.copy_(&place.remainder(4.0)?)?;
            Ok::<_, kiln::Error>(())
        })?;
        record.tensor("speed", &speed)?;
    }
    record.tensor("place", &place)?;
    Ok(record)
}

/// Fluid as streams in nine directions: collide, then move by rolls, each stream written in place.
fn lattice_boltzmann(step: &Step) -> Result<Record> {
    let ways = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)];
    let shares: Vec<f64> =
        ways.iter().map(|(x, y): &(i64, i64)| 4.0 / 9.0 * 0.25f64.powi((x.abs() + y.abs()) as i32)).collect();
    let streams = Tensor::rand([9, 6, 6], &CPU)?.mul(0.02)?;
    for (i, share) in shares.iter().enumerate() {
        streams.i(i)?.add_(*share)?;
    }
    let mut record = Record::new();
    for _ in 0..4 {
        let mass = step.run(|| {
            let density = streams.sum_dim(0, false)?;
            let mut flow = [Tensor::zeros([6, 6], &CPU)?, Tensor::zeros([6, 6], &CPU)?];
            for (i, (x, y)) in ways.iter().enumerate() {
                flow[0] = (&flow[0] + streams.i(i)? * *x).ok()?;
                flow[1] = (&flow[1] + streams.i(i)? * *y).ok()?;
            }
            let (u, v) = (flow[0].div(&density)?, flow[1].div(&density)?);
            let speed = (&u * &u + &v * &v).ok()?;
            for (i, ((x, y), share)) in ways.iter().zip(&shares).enumerate() {
                let along = (&u * *x + &v * *y).ok()?;
                let rest = &along * 3.0 + &along * &along * 4.5 - &speed * 1.5 + 1.0;
                let settled = (rest * &density * *share).ok()?;
                let stream = streams.i(i)?;
                let next = stream.lerp(&settled, 0.6)?.roll(*x, 0)?.roll(*y, 1)?;
                stream.copy_(&next)?;
            }
            streams.sum()
        })?;
        record.tensor("mass", &mass)?;
    }
    record.tensor("streams", &streams)?;
    Ok(record)
}
