//! Stochastic gradient descent, with momentum.

use kiln_ir::{Error, Loc, Why};
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{Setting, check_number, optimizer};
use super::group::{Groups, ParamGroup, Rule, Step};

/// Stochastic gradient descent, with momentum and Nesterov's momentum.
pub struct SGD {
    groups: Groups<Settings>,
}

/// The options of [`SGD`], with PyTorch's names and defaults.
#[derive(Clone, Debug, Default)]
pub struct SGDOptions(Settings);

#[derive(Clone, Debug)]
struct Settings {
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }
}

impl SGDOptions {
    /// The learning rate, 0.001 by default.
    pub fn lr(mut self, lr: f64) -> SGDOptions {
        self.0.lr = lr;
        self
    }

    /// The momentum factor, 0 by default.
    pub fn momentum(mut self, momentum: f64) -> SGDOptions {
        self.0.momentum = momentum;
        self
    }

    /// The share of a gradient that does not enter the momentum, 0 by default.
    pub fn dampening(mut self, dampening: f64) -> SGDOptions {
        self.0.dampening = dampening;
        self
    }

    /// The weight of the parameters' square in what is minimised, 0 by default.
    pub fn weight_decay(mut self, weight_decay: f64) -> SGDOptions {
        self.0.weight_decay = weight_decay;
        self
    }

    /// Whether to look ahead along the momentum.
    pub fn nesterov(mut self, nesterov: bool) -> SGDOptions {
        self.0.nesterov = nesterov;
        self
    }

    /// Whether to climb instead of descend.
    pub fn maximize(mut self, maximize: bool) -> SGDOptions {
        self.0.maximize = maximize;
        self
    }
}

optimizer!(SGD, SGDOptions, "SGD");

impl SGD {
    /// The momentum buffer of a parameter, once it has one.
    pub fn momentum_buffer(&self, parameter: &Tensor) -> Option<Tensor> {
        self.groups.state(parameter)?.1.into_iter().next()
    }
}

impl Rule for Settings {
    fn name(&self) -> &'static str {
        "SGD"
    }

    fn check(&self, loc: Loc) -> Result<()> {
        let check = |argument, got| check_number("SGD", argument, "0 or more", got, got >= 0.0, loc);
        check("lr", self.lr)?;
        check("momentum", self.momentum)?;
        check("weight_decay", self.weight_decay)?;
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            let why = Why::Other("nesterov needs momentum > 0 and dampening 0".into());
            return Err(Error::op("SGD", why, loc));
        }
        Ok(())
    }

    fn lr(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn options(&mut self) -> Vec<(&'static str, Setting<'_>)> {
        vec![
            ("lr", Setting::Number(&mut self.lr)),
            ("momentum", Setting::Number(&mut self.momentum)),
            ("dampening", Setting::Number(&mut self.dampening)),
            ("weight_decay", Setting::Number(&mut self.weight_decay)),
            ("nesterov", Setting::Flag(&mut self.nesterov)),
            ("maximize", Setting::Flag(&mut self.maximize)),
        ]
    }

    fn states(&self) -> Vec<&'static str> {
        if self.momentum != 0.0 { vec!["momentum_buffer"] } else { Vec::new() }
    }

    /// The first update is another one only if there is dampening, which it leaves out.
    fn key(&self, steps: u64) -> u64 {
        u64::from(self.momentum != 0.0 && self.dampening != 0.0 && steps > 0)
    }

    fn update(
        &self,
        at: Step,
        params: &TensorList,
        mut grads: TensorList,
        state: &[TensorList],
    ) -> Result<()> {
        if self.maximize {
            grads = foreach::neg(&grads)?;
        }
        if self.weight_decay != 0.0 {
            if self.maximize {
                foreach::add_scaled_(&grads, params, self.weight_decay)?;
            } else {
                grads = foreach::add_scaled(&grads, params, self.weight_decay)?;
            }
        }
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
