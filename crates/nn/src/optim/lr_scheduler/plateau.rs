//! [`ReduceLROnPlateau`]: smaller steps when a number no longer gets better.

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

use super::schedule;
use crate::StateDict;
use crate::optim::Optimizer;

/// Which way is better.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Plateau {
    /// Smaller.
    #[default]
    Min,
    /// Larger.
    Max,
}

/// How a threshold counts.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum ThresholdMode {
    /// As a share of the best.
    #[default]
    Relative,
    /// As a difference.
    Absolute,
}

schedule! {
    /// Multiplies the learning rate by a factor when a number has not got better for some steps. Options with
    /// PyTorch's names and defaults; [`on`](ReduceLROnPlateau::on) puts it on an optimizer.
    ///
    /// ```
    /// use kiln_nn::{Linear, Module, optim::{Optimizer, SGD}};
    /// use kiln_nn::optim::lr_scheduler::ReduceLROnPlateau;
    /// # fn main() -> kiln_tensor::Result<()> {
    /// let sgd = SGD::new(Linear::new(4, 2)?.parameters(), 0.1)?;
    /// let scheduler = ReduceLROnPlateau::new().factor(0.5).patience(1).on(&sgd)?;
    /// for loss in [1.0, 0.9, 0.9, 0.9] {
    ///     scheduler.step(loss);
    /// }
    /// assert_eq!(sgd.lr(), 0.05);
    /// # Ok(()) }
    /// ```
    ReduceLROnPlateau
    /// With PyTorch's defaults.
    () {
        /// Which way is better, smaller by default.
        mode: Plateau = Plateau::Min,
        /// The factor, 0.1 by default.
        factor: f64 = 0.1,
        /// How many steps without progress are borne, 10 by default.
        patience: u64 = 10,
        /// By how much a number must be better to count, 1e-4 by default.
        threshold: f64 = 1e-4,
        /// How the threshold counts, as a share by default.
        threshold_mode: ThresholdMode = ThresholdMode::Relative,
        /// How many steps after a change nothing is counted, 0 by default.
        cooldown: u64 = 0,
        /// The least learning rate, 0 by default.
        min_lr: f64 = 0.0,
        /// Changes smaller than this are not made, 1e-8 by default.
        eps: f64 = 1e-8,
    }
}

impl ReduceLROnPlateau {
    /// Puts it on an optimizer.
    #[track_caller]
    pub fn on<O: Optimizer>(self, optimizer: O) -> Result<PlateauScheduler<O>> {
        if self.factor.is_nan() || self.factor >= 1.0 {
            let why = Why::Number { argument: "factor", expected: "less than 1", got: self.factor };
            return Err(Error::op("ReduceLROnPlateau", why, Loc::caller()));
        }
        let best = match self.mode {
            Plateau::Min => f64::INFINITY,
            Plateau::Max => f64::NEG_INFINITY,
        };
        let state = State { best, bad: 0, cooling: 0, epoch: 0 };
        Ok(PlateauScheduler { optimizer, options: self, state: Mutex::new(state) })
    }

    fn is_better(&self, number: f64, best: f64) -> bool {
        match (self.mode, self.threshold_mode) {
            (Plateau::Min, ThresholdMode::Relative) => number < best * (1.0 - self.threshold),
            (Plateau::Min, ThresholdMode::Absolute) => number < best - self.threshold,
            (Plateau::Max, ThresholdMode::Relative) => number > best * (self.threshold + 1.0),
            (Plateau::Max, ThresholdMode::Absolute) => number > best + self.threshold,
        }
    }
}

impl Default for ReduceLROnPlateau {
    fn default() -> ReduceLROnPlateau {
        ReduceLROnPlateau::new()
    }
}

/// A [`ReduceLROnPlateau`] on an optimizer.
pub struct PlateauScheduler<O> {
    optimizer: O,
    options: ReduceLROnPlateau,
    state: Mutex<State>,
}

struct State {
    best: f64,
    bad: u64,
    cooling: u64,
    epoch: u64,
}

impl<O: Optimizer> PlateauScheduler<O> {
    /// Takes the number of another step, and reduces the learning rates if it is time.
    pub fn step(&self, number: f64) {
        let options = &self.options;
        let mut state = self.state.lock();
        state.epoch += 1;
        if options.is_better(number, state.best) {
            (state.best, state.bad) = (number, 0)
        } else {
            state.bad += 1
        }
        if state.cooling > 0 {
            state.cooling -= 1;
            state.bad = 0;
        }
        if state.bad > options.patience {
            let reduced = |lr: f64| {
                let less = (lr * options.factor).max(options.min_lr);
                if lr - less > options.eps { less } else { lr }
            };
            let lrs: Vec<f64> = self.optimizer.lrs().into_iter().map(reduced).collect();
            self.optimizer.set_lrs(&lrs);
            state.cooling = options.cooldown;
            state.bad = 0;
        }
    }

    /// The learning rates now.
    pub fn last_lr(&self) -> Vec<f64> {
        self.optimizer.lrs()
    }

    /// What it has seen so far.
    pub fn state_dict(&self) -> Result<StateDict> {
        let state = self.state.lock();
        let mut dict = StateDict::new();
        dict.insert_number("best", state.best)?;
        dict.insert_number("num_bad_epochs", state.bad as f64)?;
        dict.insert_number("cooldown_counter", state.cooling as f64)?;
        dict.insert_number("last_epoch", state.epoch as f64)?;
        Ok(dict)
    }

    /// Goes on from what another has seen.
    pub fn load_state_dict(&self, dict: &StateDict) -> Result<()> {
        let state = State {
            best: dict.number("best")?,
            bad: dict.count("num_bad_epochs")?,
            cooling: dict.count("cooldown_counter")?,
            epoch: dict.count("last_epoch")?,
        };
        *self.state.lock() = state;
        Ok(())
    }
}
