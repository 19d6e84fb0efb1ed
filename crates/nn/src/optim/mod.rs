//! Optimizers, with PyTorch's options, defaults and formulas.
//!
//! An optimizer is a handle: `step` and `set_lr` take `&self`, so that a closure can hold it while a schedule
//! turns the learning rate.
//!
//! ```
//! use kiln_nn::{Linear, Module, optim::{AdamW, Optimizer, ParamGroup, SGD}};
//! # fn main() -> kiln_tensor::Result<()> {
//! let model = Linear::new(4, 2)?;
//! let sgd = SGD::options().lr(0.1).momentum(0.9).nesterov(true).build(model.parameters())?;
//! sgd.set_lr(sgd.lr() * 0.5);
//!
//! // Groups have options of their own: here no decay for the bias.
//! let options = AdamW::options().lr(3e-4);
//! let adam = AdamW::from_groups([
//!     ParamGroup::new(vec![model.weight.tensor().clone()], options.clone().weight_decay(0.1)),
//!     ParamGroup::new(model.bias.iter().map(|bias| bias.tensor().clone()).collect(), options.weight_decay(0.0)),
//! ])?;
//! adam.step()?; // no gradients yet: nothing happens
//! # Ok(()) }
//! ```
//!
//! \[Note: a step as a captured program\]
//! A step is a handful of list ops, one node each however many parameters there are, and it is the same
//! handful in every call: state tensors are made outside of the program (by the eager backend, whatever records),
//! lists of parameters and state are kept from step to step, and everything that depends on the number of the
//! step (bias corrections, the learning rate) is a number on the host that is passed at run time.

mod adadelta;
mod adagrad;
mod adam;
mod adamax;
mod define;
mod group;
pub mod lr_scheduler;
mod nadam;
mod radam;
mod rmsprop;
mod sgd;

use std::sync::Arc;

use kiln_tensor::{Result, Tensor};

use crate::StateDict;

pub use adadelta::{Adadelta, AdadeltaOptions};
pub use adagrad::{Adagrad, AdagradOptions};
pub use adam::{Adam, AdamOptions, AdamState, AdamW, AdamWOptions};
pub use adamax::{Adamax, AdamaxOptions};
pub use group::ParamGroup;
pub use nadam::{NAdam, NAdamOptions};
pub use radam::{RAdam, RAdamOptions};
pub use rmsprop::{RMSprop, RMSpropOptions};
pub use sgd::{SGD, SGDOptions};

/// Updates parameters from their gradients.
pub trait Optimizer: Send + Sync {
    /// One update of every parameter that has a gradient.
    #[track_caller]
    fn step(&self) -> Result<()>;

    /// All parameters, group by group.
    fn parameters(&self) -> Vec<Tensor>;

    /// The learning rate of each group.
    fn lrs(&self) -> Vec<f64>;

    /// Sets the learning rate of each group; groups beyond the list's end keep theirs.
    fn set_lrs(&self, lrs: &[f64]);

    /// The learning rate (of the first group).
    fn lr(&self) -> f64 {
        self.lrs().first().copied().unwrap_or(0.0)
    }

    /// Sets the learning rate of all groups.
    fn set_lr(&self, lr: f64) {
        self.set_lrs(&vec![lr; self.lrs().len()]);
    }

    /// The learning rates that schedules count from: those of the time when the first schedule asked.
    fn initial_lrs(&self) -> Vec<f64> {
        self.lrs()
    }

    /// Sets the learning rates that schedules count from.
    fn set_initial_lrs(&self, lrs: &[f64]) {
        let _ = lrs;
    }

    /// The momentum (or first beta) of each group; empty if the optimizer has none.
    fn momenta(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Sets the momentum (or first beta) of each group.
    fn set_momenta(&self, momenta: &[f64]) {
        let _ = momenta;
    }

    /// Options, counts and state tensors, under PyTorch's names: `param_groups.0.lr`, `state.3.exp_avg`. Parameters
    /// are numbered through all groups. The tensors are the optimizer's own, not copies.
    fn state_dict(&self) -> Result<StateDict>;

    /// Takes a state over, copied into the optimizer's own tensors. If it does not fit, nothing is changed.
    #[track_caller]
    fn load_state_dict(&self, state: &StateDict) -> Result<()>;

    /// Takes the parameters' gradients away.
    fn zero_grad(&self) {
        for parameter in self.parameters() {
            parameter.set_grad(None);
        }
    }
}

macro_rules! delegate_optimizer {
    ($($Pointer:ty),*) => {
        $(impl<O: Optimizer + ?Sized> Optimizer for $Pointer {
            fn step(&self) -> Result<()> {
                (**self).step()
            }
            fn parameters(&self) -> Vec<Tensor> {
                (**self).parameters()
            }
            fn lrs(&self) -> Vec<f64> {
                (**self).lrs()
            }
            fn set_lrs(&self, lrs: &[f64]) {
                (**self).set_lrs(lrs);
            }
            fn initial_lrs(&self) -> Vec<f64> {
                (**self).initial_lrs()
            }
            fn set_initial_lrs(&self, lrs: &[f64]) {
                (**self).set_initial_lrs(lrs);
            }
            fn momenta(&self) -> Vec<f64> {
                (**self).momenta()
            }
            fn set_momenta(&self, momenta: &[f64]) {
                (**self).set_momenta(momenta);
            }
            fn state_dict(&self) -> Result<StateDict> {
                (**self).state_dict()
            }
            fn load_state_dict(&self, state: &StateDict) -> Result<()> {
                (**self).load_state_dict(state)
            }
        })*
    };
}
delegate_optimizer!(&O, Box<O>, Arc<O>);
