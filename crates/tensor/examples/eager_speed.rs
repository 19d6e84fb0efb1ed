//! How fast eager tensors are: the list ops of an Adam step over ten 1024 × 1024 tensors, large single ops,
//! and what an op costs when there is nothing to compute.
//!
//! `cargo run --release -p kiln-tensor --example eager_speed [ROUNDS [PART OF A NAME]]`

#![allow(clippy::print_stdout)]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use kiln_runtime::parallel_for;
use kiln_tensor::{Device, Result, Tensor, TensorList, foreach, no_grad};

const CPU: Device = Device::Cpu;
const LIST: usize = 10;
const SIDE: usize = 1024;

/// The shortest and the middle time of `body` over `rounds` calls, after two that warm up.
fn time(rounds: usize, mut body: impl FnMut() -> Result<()>) -> Result<(Duration, Duration)> {
    body()?;
    body()?;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds.max(1) {
        let start = Instant::now();
        body()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok((times[0], times[times.len() / 2]))
}

/// What to measure, and how often.
struct Bench {
    rounds: usize,
    /// Only lines with this in their name.
    filter: String,
}

impl Bench {
    /// A line for work bound by memory; `streams` tensors of `numel` f32 are read or written once.
    fn large(
        &self,
        name: &str,
        streams: usize,
        numel: usize,
        body: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let (best, median) = time(self.rounds, body)?;
        let rate = (streams * numel * size_of::<f32>()) as f64 / best.as_secs_f64() / 1e9;
        let ms = |t: Duration| t.as_secs_f64() * 1e3;
        println!("{name:<34} {:>8.2} ms {:>8.2} ms {rate:>7.1} GB/s", ms(best), ms(median));
        Ok(())
    }

    /// A line for an op's own cost; `body` does it `ops` times.
    fn small(&self, name: &str, ops: usize, mut body: impl FnMut() -> Result<()>) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let calls = 10_000 / ops;
        let (best, median) = time(self.rounds, || (0..calls).try_for_each(|_| body()))?;
        let ns = |t: Duration| t.as_secs_f64() * 1e9 / (calls * ops) as f64;
        println!("{name:<34} {:>8.0} ns {:>8.0} ns", ns(best), ns(median));
        Ok(())
    }
}

/// What memory can do: plain loops over buffers of the same size, with the same threads.
fn floors(bench: &Bench) -> Result<()> {
    let mut x = vec![vec![1f32; SIDE * SIDE]; LIST];
    let mut y = vec![vec![1f32; SIDE * SIDE]; LIST];
    let halves = |x: &mut [f32], y: &[f32], body: fn(&mut [f32], &[f32])| {
        let middle = x.len() / 2;
        let (x, y) = (x.split_at_mut(middle), y.split_at(y.len() / 2));
        let parts = [Mutex::new((x.0, y.0)), Mutex::new((x.1, y.1))];
        parallel_for(parts.len(), 1, |begin, end| {
            for part in &parts[begin..end] {
                let mut part = part.lock().expect("nothing panics while it is held");
                let (x, y) = &mut *part;
                body(x, y);
            }
        });
    };
    bench.large("floor: x = c x", 2, LIST * SIDE * SIDE, || {
        x.iter_mut().for_each(|x| halves(x, &y[0][..0], |x, _| x.iter_mut().for_each(|x| *x *= 0.999)));
        Ok(())
    })?;
    bench.large("floor: y = x", 2, LIST * SIDE * SIDE, || {
        y.iter_mut().zip(&x).for_each(|(y, x)| halves(y, x, |y, x| y.copy_from_slice(x)));
        Ok(())
    })
}

fn list(n: usize, side: usize) -> Result<TensorList> {
    (0..n).map(|_| Tensor::rand([side, side], &CPU)).collect()
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(30);
    let bench = Bench { rounds, filter: std::env::args().nth(2).unwrap_or_default() };
    println!("{:<34} {:>11} {:>11} {:>12}", "", "best", "median", "rate");

    floors(&bench)?;

    let numel = LIST * SIDE * SIDE;
    let [params, grads, exp_avg, exp_avg_sq] = [(); 4].map(|()| list(LIST, SIDE));
    let (params, grads, exp_avg, exp_avg_sq) = (params?, grads?, exp_avg?, exp_avg_sq?);
    let divisor = foreach::sqrt(&exp_avg_sq)?;
    bench.large("foreach lerp_", 3, numel, || foreach::lerp_(&exp_avg, &grads, 0.1))?;
    bench.large("foreach mul_", 2, numel, || foreach::mul_(&exp_avg_sq, 0.999))?;
    bench.large("foreach addcmul_", 3, numel, || foreach::addcmul_(&exp_avg_sq, &grads, &grads, 0.001))?;
    bench.large("foreach sqrt", 2, numel, || foreach::sqrt(&exp_avg_sq).map(drop))?;
    bench.large("foreach div_", 2, numel, || foreach::div_(&divisor, 0.999))?;
    bench.large("foreach add_", 2, numel, || foreach::add_(&divisor, 1e-8))?;
    bench.large("foreach addcdiv_", 4, numel, || foreach::addcdiv_(&params, &exp_avg, &divisor, -1e-3))?;
    drop(divisor);
    bench.large("the whole Adam step", 18, numel, || {
        foreach::lerp_(&exp_avg, &grads, 0.1)?;
        foreach::mul_(&exp_avg_sq, 0.999)?;
        foreach::addcmul_(&exp_avg_sq, &grads, &grads, 0.001)?;
        let divisor = foreach::sqrt(&exp_avg_sq)?;
        foreach::div_(&divisor, 0.999)?;
        foreach::add_(&divisor, 1e-8)?;
        foreach::addcdiv_(&params, &exp_avg, &divisor, -1e-3)
    })?;

    let many = list(1000, 128)?;
    bench.large("foreach mul_, 1,000 x 128 x 128", 2, 1000 * 128 * 128, || foreach::mul_(&many, 0.999))?;
    drop(many);

    let x = Tensor::rand([4096, 1024], &CPU)?;
    bench.large("softmax 4096 x 1024", 2, x.numel(), || x.softmax(-1).map(drop))?;
    bench.large("exp 4096 x 1024", 2, x.numel(), || x.exp().map(drop))?;
    bench.large("clone 4096 x 1024", 2, x.numel(), || x.clone_tensor().map(drop))?;
    bench.large("zeros 4096 x 1024", 1, x.numel(), || x.zeros_like().map(drop))?;

    let one = Tensor::rand([1], &CPU)?;
    let leaf = Tensor::rand([1], &CPU)?;
    leaf.requires_grad_(true)?;
    bench.small("add, one element", 1, || one.add(&one).map(drop))?;
    bench.small("add, one element, recorded", 1, || leaf.add(&one).map(drop))?;
    bench.small("mul, one element, recorded", 1, || leaf.mul(&leaf).map(drop))?;
    bench.small("add_, one element", 1, || one.add_(1.0).map(drop))?;
    bench.small("exp, one element, no_grad", 1, || {
        let _off = no_grad();
        leaf.exp().map(drop)
    })?;
    bench.small("empty, one element", 1, || Tensor::zeros([1], &CPU).map(drop))?;
    let ones = list(1000, 1)?;
    bench.small("foreach mul_, per tensor of 1,000", 1000, || foreach::mul_(&ones, 0.999))?;
    bench.small("foreach sqrt, per tensor of 1,000", 1000, || foreach::sqrt(&ones).map(drop))?;
    Ok(())
}
