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

mod adam;
mod group;
mod sgd;

use std::sync::Arc;

use kiln_tensor::{Result, Tensor};

pub use adam::{Adam, AdamOptions, AdamState, AdamW, AdamWOptions};
pub use group::ParamGroup;
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
        })*
    };
}
delegate_optimizer!(&O, Box<O>, Arc<O>);
