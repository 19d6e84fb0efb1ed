//! Schedules that are a formula of the number of the step.

use std::f64::consts::PI;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

use super::{Schedule, check_number, each, schedule};

schedule! {
    /// Every `step_size` steps the learning rate is multiplied by gamma.
    StepLR
    /// With gamma 0.1.
    (step_size: u64) {
        /// The factor, 0.1 by default.
        gamma: f64 = 0.1,
    }
}

impl Schedule for StepLR {
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        if epoch.is_multiple_of(self.step_size) { each(now, |lr| lr * self.gamma) } else { now.to_vec() }
    }
    fn check(&self, _: usize, loc: Loc) -> Result<()> {
        check_number("StepLR", "step_size", "1 or more", self.step_size as f64, self.step_size > 0, loc)
    }
}

schedule! {
    /// At each milestone the learning rate is multiplied by gamma.
    MultiStepLR
    /// With gamma 0.1.
    (milestones: &[u64]) [milestones: Vec<u64> = milestones.to_vec()] {
        /// The factor, 0.1 by default.
        gamma: f64 = 0.1,
    }
}

impl MultiStepLR {
    fn at(&self, epoch: u64, now: &[f64]) -> Vec<f64> {
        let count = self.milestones.iter().filter(|&&milestone| milestone == epoch).count();
        match count {
            0 => now.to_vec(),
            count => each(now, |lr| lr * self.gamma.powi(count as i32)),
        }
    }
}

impl Schedule for MultiStepLR {
    fn begin(&self, _: &[f64], now: &[f64]) -> Vec<f64> {
        self.at(0, now)
    }
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        self.at(epoch, now)
    }
}

schedule! {
    /// Every step multiplies the learning rate by gamma.
    ExponentialLR
    /// With this factor.
    (gamma: f64) {}
}

impl Schedule for ExponentialLR {
    fn next(&self, _: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        each(now, |lr| lr * self.gamma)
    }
}

schedule! {
    /// The learning rate times a factor for some steps, then as it is.
    ConstantLR
    /// A third for five steps.
    () {
        /// The factor, ⅓ by default.
        factor: f64 = 1.0 / 3.0,
        /// For how many steps, 5 by default.
        total_iters: u64 = 5,
    }
}

impl Default for ConstantLR {
    fn default() -> ConstantLR {
        ConstantLR::new()
    }
}

impl Schedule for ConstantLR {
    fn begin(&self, _: &[f64], now: &[f64]) -> Vec<f64> {
        each(now, |lr| lr * self.factor)
    }
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        if epoch == self.total_iters { each(now, |lr| lr * (1.0 / self.factor)) } else { now.to_vec() }
    }
    fn check(&self, _: usize, loc: Loc) -> Result<()> {
        let holds = self.factor > 0.0 && self.factor <= 1.0;
        check_number("ConstantLR", "factor", "more than 0 and at most 1", self.factor, holds, loc)
    }
}

schedule! {
    /// From one share of the learning rate to another, in equal steps.
    LinearLR
    /// From a third to the whole in five steps.
    () {
        /// The first share, ⅓ by default.
        start_factor: f64 = 1.0 / 3.0,
        /// The last share, 1 by default.
        end_factor: f64 = 1.0,
        /// In how many steps, 5 by default.
        total_iters: u64 = 5,
    }
}

impl Default for LinearLR {
    fn default() -> LinearLR {
        LinearLR::new()
    }
}

impl Schedule for LinearLR {
    fn begin(&self, _: &[f64], now: &[f64]) -> Vec<f64> {
        each(now, |lr| lr * self.start_factor)
    }
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        if epoch > self.total_iters {
            return now.to_vec();
        }
        let way = self.end_factor - self.start_factor;
        let so_far = self.total_iters as f64 * self.start_factor + (epoch - 1) as f64 * way;
        each(now, |lr| lr * (1.0 + way / so_far))
    }
    fn check(&self, _: usize, loc: Loc) -> Result<()> {
        let (start, end) = (self.start_factor, self.end_factor);
        let expected = "more than 0 and at most 1";
        check_number("LinearLR", "start_factor", expected, start, start > 0.0 && start <= 1.0, loc)?;
        check_number("LinearLR", "end_factor", "between 0 and 1", end, (0.0..=1.0).contains(&end), loc)
    }
}

schedule! {
    /// Down to zero by a power of what is left of the steps.
    PolynomialLR
    /// Linearly, in this many steps.
    (total_iters: u64) {
        /// The power, 1 by default.
        power: f64 = 1.0,
    }
}

impl Schedule for PolynomialLR {
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        if epoch > self.total_iters {
            return now.to_vec();
        }
        let left = |epoch: u64| 1.0 - epoch as f64 / self.total_iters as f64;
        let factor = (left(epoch) / left(epoch - 1)).powf(self.power);
        each(now, |lr| lr * factor)
    }
}

schedule! {
    /// Down along half a cosine, and up again.
    CosineAnnealingLR
    /// To zero in this many steps.
    (t_max: u64) {
        /// The least learning rate, 0 by default.
        eta_min: f64 = 0.0,
    }
}

impl Schedule for CosineAnnealingLR {
    fn next(&self, epoch: u64, base: &[f64], now: &[f64]) -> Vec<f64> {
        let (length, least) = (self.t_max as f64, self.eta_min);
        // At the lowest point there is nothing left to scale.
        if (epoch - 1) % (2 * self.t_max) == self.t_max {
            let up = (1.0 - (PI / length).cos()) / 2.0;
            return base.iter().zip(now).map(|(base, lr)| lr + (base - least) * up).collect();
        }
        let height = |epoch: u64| 1.0 + (PI * epoch as f64 / length).cos();
        let factor = height(epoch) / height(epoch - 1);
        each(now, |lr| factor * (lr - least) + least)
    }
    fn check(&self, _: usize, loc: Loc) -> Result<()> {
        check_number("CosineAnnealingLR", "t_max", "1 or more", self.t_max as f64, self.t_max > 0, loc)
    }
}

schedule! {
    /// Down along half a cosine, then anew from the top, each time for longer.
    CosineAnnealingWarmRestarts
    /// So many steps until the first restart, and between any two.
    (t_0: u64) {
        /// How many times as long each run is as the one before, 1 by default.
        t_mult: u64 = 1,
        /// The least learning rate, 0 by default.
        eta_min: f64 = 0.0,
    }
}

impl CosineAnnealingWarmRestarts {
    fn at(&self, epoch: u64, base: &[f64]) -> Vec<f64> {
        let (mut done, mut length) = (epoch, self.t_0);
        while done >= length {
            done -= length;
            length *= self.t_mult;
        }
        let height = (1.0 + (PI * done as f64 / length as f64).cos()) / 2.0;
        each(base, |base| self.eta_min + (base - self.eta_min) * height)
    }
}

impl Schedule for CosineAnnealingWarmRestarts {
    fn begin(&self, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.at(0, base)
    }
    fn next(&self, epoch: u64, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.at(epoch, base)
    }
    fn check(&self, _: usize, loc: Loc) -> Result<()> {
        let name = "CosineAnnealingWarmRestarts";
        check_number(name, "t_0", "1 or more", self.t_0 as f64, self.t_0 > 0, loc)?;
        check_number(name, "t_mult", "1 or more", self.t_mult as f64, self.t_mult > 0, loc)
    }
}

type Factor = Box<dyn Fn(u64) -> f64 + Send + Sync>;

/// The first learning rate times a function of the number of steps.
pub struct LambdaLR(Vec<Factor>);

/// Every step multiplies the learning rate by a function of its number.
pub struct MultiplicativeLR(Vec<Factor>);

macro_rules! by_function {
    ($Type:ident) => {
        impl $Type {
            /// One function for all groups.
            pub fn new(factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> $Type {
                $Type(vec![Box::new(factor)])
            }

            /// A function for each group.
            pub fn each(factors: Vec<Box<dyn Fn(u64) -> f64 + Send + Sync>>) -> $Type {
                $Type(factors)
            }

            fn times(&self, epoch: u64, lrs: &[f64]) -> Vec<f64> {
                match &self.0[..] {
                    [one] => {
                        let factor = one(epoch);
                        each(lrs, |lr| lr * factor)
                    }
                    several => lrs.iter().zip(several).map(|(lr, factor)| lr * factor(epoch)).collect(),
                }
            }

            fn count(&self, groups: usize, loc: Loc) -> Result<()> {
                if self.0.len() == 1 || self.0.len() == groups {
                    Ok(())
                } else {
                    let why = Why::sizes("the number of functions and of groups", self.0.len(), groups);
                    Err(Error::op(stringify!($Type), why, loc))
                }
            }
        }
    };
}
by_function!(LambdaLR);
by_function!(MultiplicativeLR);

impl Schedule for LambdaLR {
    fn begin(&self, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.times(0, base)
    }
    fn next(&self, epoch: u64, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.times(epoch, base)
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        self.count(groups, loc)
    }
}

impl Schedule for MultiplicativeLR {
    fn next(&self, epoch: u64, _: &[f64], now: &[f64]) -> Vec<f64> {
        self.times(epoch, now)
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        self.count(groups, loc)
    }
}
