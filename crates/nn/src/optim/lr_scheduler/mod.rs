//! Learning rate schedules: descriptions ([`StepLR`], [`CosineAnnealingLR`], …) that are put on an optimizer.
//!
//! ```
//! use kiln_nn::{Linear, Module, optim::{Optimizer, SGD}};
//! use kiln_nn::optim::lr_scheduler::{CosineAnnealingLR, LinearLR, Schedule, SequentialLR};
//! # fn main() -> kiln_tensor::Result<()> {
//! let sgd = SGD::new(Linear::new(4, 2)?.parameters(), 0.1)?;
//! let warm_up = LinearLR::new().start_factor(0.1).total_iters(5);
//! let scheduler = SequentialLR::new(warm_up).then(5, CosineAnnealingLR::new(20)).on(&sgd)?;
//! assert!((sgd.lr() - 0.01).abs() < 1e-12);
//! for _ in 0..5 {
//!     sgd.step()?;
//!     scheduler.step()?;
//! }
//! assert_eq!(sgd.lr(), 0.1);
//! # Ok(()) }
//! ```
//!
//! The formulas are PyTorch's chainable ones: a step changes the learning rate that is there, so that schedules can
//! be combined. A learning rate is a number of the host: turning it recompiles nothing.

use parking_lot::Mutex;

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::Result;

use super::Optimizer;
use super::define::check_number;
use crate::StateDict;

mod combined;
mod curves;
mod one_cycle;
mod plateau;

pub use combined::{ChainedScheduler, SequentialLR};
pub use curves::{
    ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, LambdaLR, LinearLR,
    MultiStepLR, MultiplicativeLR, PolynomialLR, StepLR,
};
pub use one_cycle::{Anneal, OneCycleLR};
pub use plateau::{Plateau, PlateauScheduler, ReduceLROnPlateau, ThresholdMode};

/// How learning rates evolve. All lists have one entry per parameter group.
pub trait Schedule: Send + Sync {
    /// The learning rates before the first step, given those that the schedule counts from and those there are, which
    /// stay by default.
    fn begin(&self, base: &[f64], now: &[f64]) -> Vec<f64> {
        let _ = base;
        now.to_vec()
    }

    /// The learning rates after step number `epoch`, from 1.
    fn next(&self, epoch: u64, base: &[f64], now: &[f64]) -> Vec<f64>;

    /// The momentum after this many steps, for a schedule that also cycles momentum.
    fn momentum(&self, epoch: u64) -> Option<f64> {
        let _ = epoch;
        None
    }

    /// The learning rates to count from in the place of the optimizer's.
    fn base(&self, groups: usize) -> Option<Vec<f64>> {
        let _ = groups;
        None
    }

    /// Checks that the schedule makes sense for this many groups.
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        let _ = (groups, loc);
        Ok(())
    }

    /// Whether there is a step of this number.
    fn check_step(&self, epoch: u64, loc: Loc) -> Result<()> {
        let _ = (epoch, loc);
        Ok(())
    }

    /// Puts the schedule on an optimizer, whose learning rates are set at once.
    #[track_caller]
    fn on<O: Optimizer>(self, optimizer: O) -> Result<Scheduler<O>>
    where
        Self: Sized + 'static,
    {
        Scheduler::new(optimizer, Box::new(self), Loc::caller())
    }
}

impl Schedule for Box<dyn Schedule> {
    fn begin(&self, base: &[f64], now: &[f64]) -> Vec<f64> {
        (**self).begin(base, now)
    }
    fn next(&self, epoch: u64, base: &[f64], now: &[f64]) -> Vec<f64> {
        (**self).next(epoch, base, now)
    }
    fn momentum(&self, epoch: u64) -> Option<f64> {
        (**self).momentum(epoch)
    }
    fn base(&self, groups: usize) -> Option<Vec<f64>> {
        (**self).base(groups)
    }
    fn check(&self, groups: usize, loc: Loc) -> Result<()> {
        (**self).check(groups, loc)
    }
    fn check_step(&self, epoch: u64, loc: Loc) -> Result<()> {
        (**self).check_step(epoch, loc)
    }
}

/// A schedule on an optimizer: `step` after each of the optimizer's (or after each epoch).
pub struct Scheduler<O> {
    optimizer: O,
    schedule: Box<dyn Schedule>,
    state: Mutex<State>,
}

struct State {
    epoch: u64,
    base: Vec<f64>,
    last: Vec<f64>,
}

impl<O: Optimizer> Scheduler<O> {
    fn new(optimizer: O, schedule: Box<dyn Schedule>, loc: Loc) -> Result<Scheduler<O>> {
        let groups = optimizer.lrs().len();
        schedule.check(groups, loc)?;
        if schedule.momentum(0).is_some() && optimizer.momenta().is_empty() {
            let argument = "the optimizer of a schedule that cycles momentum";
            let why = Why::Operand { argument, expected: "one with momentum" };
            return Err(Error::op("lr_scheduler", why, loc));
        }
        if let Some(base) = schedule.base(groups) {
            optimizer.set_initial_lrs(&base);
        }
        let base = optimizer.initial_lrs();
        let lrs = schedule.begin(&base, &optimizer.lrs());
        let scheduler =
            Scheduler { optimizer, schedule, state: Mutex::new(State { epoch: 0, base, last: lrs.clone() }) };
        scheduler.set(0, &lrs);
        Ok(scheduler)
    }

    fn set(&self, epoch: u64, lrs: &[f64]) {
        self.optimizer.set_lrs(lrs);
        if let Some(momentum) = self.schedule.momentum(epoch) {
            self.optimizer.set_momenta(&vec![momentum; lrs.len()]);
        }
    }

    /// Turns the learning rates one step on. An error if the schedule has come to its end, or if the optimizer has
    /// got more groups.
    #[track_caller]
    pub fn step(&self) -> Result<()> {
        let loc = Loc::caller();
        let mut state = self.state.lock();
        let now = self.optimizer.lrs();
        if now.len() != state.base.len() {
            let why = Why::sizes(
                "the number of parameter groups now and when the schedule was made",
                now.len(),
                state.base.len(),
            );
            return Err(Error::op("lr_scheduler", why, loc));
        }
        let epoch = state.epoch + 1;
        self.schedule.check_step(epoch, loc)?;
        state.epoch = epoch;
        state.last = self.schedule.next(epoch, &state.base, &now);
        self.set(epoch, &state.last);
        Ok(())
    }

    /// The learning rates that the last step set.
    pub fn last_lr(&self) -> Vec<f64> {
        self.state.lock().last.clone()
    }

    /// Steps so far.
    pub fn last_epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// Where the schedule is. The learning rates themselves are in the optimizer's state.
    pub fn state_dict(&self) -> Result<StateDict> {
        let state = self.state.lock();
        let mut dict = StateDict::new();
        dict.insert_number("last_epoch", state.epoch as f64)?;
        dict.insert_numbers("base_lrs", &state.base)?;
        dict.insert_numbers("last_lr", &state.last)?;
        Ok(dict)
    }

    /// Goes to where a schedule was. Load the optimizer's state too: it has the learning rates.
    pub fn load_state_dict(&self, dict: &StateDict) -> Result<()> {
        let (epoch, base) = (dict.count("last_epoch")?, dict.numbers("base_lrs")?);
        let last = dict.numbers("last_lr")?;
        let mut state = self.state.lock();
        if base.len() != state.base.len() || last.len() != state.base.len() {
            let message =
                format!("the state has {} parameter groups, the optimizer {}", base.len(), state.base.len());
            return Err(Error::State(message));
        }
        *state = State { epoch, base, last };
        Ok(())
    }
}

fn each(values: &[f64], change: impl Fn(f64) -> f64) -> Vec<f64> {
    values.iter().map(|&value| change(value)).collect()
}

/// A schedule: what `new` takes and what it keeps of that, where it is not the same, then its options with their
/// defaults.
macro_rules! schedule {
    ($(#[$doc:meta])* $Type:ident $(#[$new:meta])* ($($given:ident: $Given:ty),*) { $($options:tt)* }) => {
        schedule! {
            $(#[$doc])* $Type $(#[$new])* ($($given: $Given),*) [$($given: $Given = $given),*] { $($options)* }
        }
    };
    ($(#[$doc:meta])* $Type:ident $(#[$new:meta])*
        ($($given:ident: $Given:ty),*) [$($own:ident: $Own:ty = $kept:expr),*]
        { $($(#[$option:meta])* $field:ident: $Number:ty = $default:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $Type {
            $($own: $Own,)*
            $($field: $Number,)*
        }

        impl $Type {
            $(#[$new])*
            pub fn new($($given: $Given),*) -> $Type {
                $Type { $($own: $kept,)* $($field: $default),* }
            }

            $(
                $(#[$option])*
                pub fn $field(mut self, $field: $Number) -> $Type {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
use schedule;
