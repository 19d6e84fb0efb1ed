//! Stochastic gradient descent, with momentum.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, directed};

settings! {
    /// Stochastic gradient descent, with momentum and Nesterov's momentum.
    SGD, SGDOptions, "SGD", {
        /// The learning rate, 0.001 by default.
        lr: f64 = 1e-3,
        /// The momentum factor, 0 by default.
        momentum: f64 = 0.0,
        /// The share of a gradient that does not enter the momentum, 0 by default.
        dampening: f64 = 0.0,
        /// The weight of the parameters' square in what is minimised, 0 by default.
        weight_decay: f64 = 0.0,
        /// Whether to look ahead along the momentum.
        nesterov: bool = false,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl SGD {
    /// The momentum buffer of a parameter, once it has one.
    pub fn momentum_buffer(&self, parameter: &Tensor) -> Option<Tensor> {
        self.groups.state(parameter)?.1.into_iter().next()
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        let numbers = [("lr", self.lr), ("momentum", self.momentum), ("weight_decay", self.weight_decay)];
        check_not_negative("SGD", numbers, loc)?;
        let why = if self.nesterov && self.momentum <= 0.0 {
            Why::Number { argument: "momentum", expected: "more than 0 with nesterov", got: self.momentum }
        } else if self.nesterov && self.dampening != 0.0 {
            Why::Number { argument: "dampening", expected: "0 with nesterov", got: self.dampening }
        } else {
            return Ok(());
        };
        Err(Error::op("SGD", why, loc))
    }

    fn states(&self) -> Vec<&'static str> {
        if self.momentum != 0.0 { vec!["momentum_buffer"] } else { Vec::new() }
    }

    /// The first update is another one only if there is dampening, which it leaves out.
    fn key(&self, steps: u64) -> u64 {
        u64::from(self.momentum != 0.0 && self.dampening != 0.0 && steps > 0)
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let grads = directed(params, grads, self.maximize, self.weight_decay)?;
        let Some(buffer) = state.first() else {
            return foreach::add_scaled_(params, &grads, -self.lr);
        };
        // The first update makes the gradient itself the momentum. From a buffer of zeros that is the general
        // formula without dampening, so that the first step and the others are the same ops.
        let share = if at.number == 1 { 1.0 } else { 1.0 - self.dampening };
        foreach::mul_(buffer, self.momentum)?;
        foreach::add_scaled_(buffer, &grads, share)?;
        if self.nesterov {
            let ahead = foreach::add_scaled(&grads, buffer, self.momentum)?;
            foreach::add_scaled_(params, &ahead, -self.lr)
        } else {
            foreach::add_scaled_(params, buffer, -self.lr)
        }
    }
}
