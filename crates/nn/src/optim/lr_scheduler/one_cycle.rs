//! [`OneCycleLR`]: up to a largest learning rate and down again, once.

use std::f64::consts::PI;

use kiln_ir::Loc;
use kiln_tensor::Result;

use super::{Schedule, check_number, schedule};

/// The way between two learning rates.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Anneal {
    /// Half a cosine.
    #[default]
    Cos,
    /// A straight line.
    Linear,
}

schedule! {
    /// Up to a largest learning rate and down far below the first, once; momentum goes the other way.
    OneCycleLR
    /// With PyTorch's defaults.
    (max_lr: f64, total_steps: u64) [max_lrs: Vec<f64> = vec![max_lr], total_steps: u64 = total_steps] {
        /// The share of the steps that go up, 0.3 by default.
        pct_start: f64 = 0.3,
        /// The way between two learning rates, a cosine by default.
        anneal_strategy: Anneal = Anneal::Cos,
        /// Whether momentum goes the other way; it does by default.
        cycle_momentum: bool = true,
        /// The least momentum, 0.85 by default.
        base_momentum: f64 = 0.85,
        /// The largest momentum, 0.95 by default.
        max_momentum: f64 = 0.95,
        /// The largest learning rate over the first, 25 by default.
        div_factor: f64 = 25.0,
        /// The first learning rate over the last, 10⁴ by default.
        final_div_factor: f64 = 1e4,
        /// Whether to come down to the first learning rate before going below it; not by default.
        three_phase: bool = false,
    }
}

impl OneCycleLR {
    /// The largest learning rate of each group.
    pub fn max_lrs(mut self, max_lrs: Vec<f64>) -> OneCycleLR {
        self.max_lrs = max_lrs;
        self
    }

    /// At a step: `pick` says which of initial, largest and least value (or both momenta) a phase goes between.
    fn at(&self, epoch: u64, [initial, largest, least]: [f64; 3]) -> f64 {
        let total = self.total_steps as f64;
        let first = self.pct_start * total - 1.0;
        let phases = if self.three_phase {
            vec![
                (first, initial, largest),
                (2.0 * self.pct_start * total - 2.0, largest, initial),
                (total - 1.0, initial, least),
            ]
        } else {
            vec![(first, initial, largest), (total - 1.0, largest, least)]
        };
        let (step, mut begin) = (epoch as f64, 0.0);
        for (i, (end, from, to)) in phases.iter().copied().enumerate() {
            if step <= end || i + 1 == phases.len() {
                let done = (step - begin) / (end - begin);
                return match self.anneal_strategy {
                    Anneal::Cos => to + (from - to) / 2.0 * ((PI * done).cos() + 1.0),
                    Anneal::Linear => (to - from) * done + from,
                };
            }
            begin = end;
        }
        least
    }

    fn lrs(&self, epoch: u64, groups: usize) -> Vec<f64> {
        let largest = |g: usize| self.max_lrs.get(g).or(self.max_lrs.first()).copied().unwrap_or(0.0);
        let lr = |g: usize| {
            let initial = largest(g) / self.div_factor;
            self.at(epoch, [initial, largest(g), initial / self.final_div_factor])
        };
        (0..groups).map(lr).collect()
    }
}

impl Schedule for OneCycleLR {
    fn begin(&self, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.lrs(0, base.len())
    }
    fn next(&self, epoch: u64, base: &[f64], _: &[f64]) -> Vec<f64> {
        self.lrs(epoch, base.len())
    }
    fn momentum(&self, epoch: u64) -> Option<f64> {
        let [least, largest] = [self.base_momentum, self.max_momentum];
        self.cycle_momentum.then(|| self.at(epoch, [largest, least, largest]))
    }
    fn base(&self, groups: usize) -> Option<Vec<f64>> {
        let largest = |g: usize| self.max_lrs.get(g).or(self.max_lrs.first()).copied().unwrap_or(0.0);
        Some((0..groups).map(|g| largest(g) / self.div_factor).collect())
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        let steps = self.total_steps as f64;
        check_number("OneCycleLR", "total_steps", "1 or more", steps, self.total_steps > 0, loc)?;
        let holds = (0.0..=1.0).contains(&self.pct_start);
        check_number("OneCycleLR", "pct_start", "between 0 and 1", self.pct_start, holds, loc)?;
        let count = self.max_lrs.len();
        check_number(
            "OneCycleLR",
            "the number of max_lrs",
            "1 or one per group",
            count as f64,
            count == 1 || count == groups,
            loc,
        )
    }
    fn check_step(&self, epoch: u64, loc: Loc) -> Result<()> {
        check_number(
            "OneCycleLR",
            "the number of steps",
            "at most total_steps",
            epoch as f64,
            epoch <= self.total_steps,
            loc,
        )
    }
}
