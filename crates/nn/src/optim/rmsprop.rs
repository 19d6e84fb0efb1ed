//! RMSprop.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, directed};

settings! {
    /// RMSprop: steps divided by a running root mean square of the gradient, with momentum if it is asked for.
    RMSprop, RMSpropOptions, "RMSprop", {
        /// The learning rate, 0.01 by default.
        lr: f64 = 1e-2,
        /// How much the running average of the square keeps, 0.99 by default.
        alpha: f64 = 0.99,
        /// What is added to the divisor, 1e-8 by default.
        eps: f64 = 1e-8,
        /// The weight of the parameters' square in what is minimised, 0 by default.
        weight_decay: f64 = 0.0,
        /// The momentum factor, 0 by default.
        momentum: f64 = 0.0,
        /// Whether to divide by the deviation instead: the square less that of the running average.
        centered: bool = false,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        let numbers = [
            ("lr", self.lr),
            ("eps", self.eps),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
            ("alpha", self.alpha),
        ];
        check_not_negative("RMSprop", numbers, loc)
    }

    fn states(&self) -> Vec<&'static str> {
        let mut states = vec!["square_avg"];
        if self.momentum > 0.0 {
            states.push("momentum_buffer");
        }
        if self.centered {
            states.push("grad_avg");
        }
        states
    }

    fn key(&self, _: u64) -> u64 {
        0
    }

    fn update(&self, _: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let Settings { lr, alpha, eps, weight_decay, momentum, .. } = *self;
        let grads = directed(params, grads, self.maximize, weight_decay)?;
        let square_avg = &state[0];
        foreach::mul_(square_avg, alpha)?;
        foreach::addcmul_(square_avg, &grads, &grads, 1.0 - alpha)?;
        let divisor = match (self.centered, state.last()) {
            (true, Some(grad_avg)) => {
                foreach::lerp_(grad_avg, &grads, 1.0 - alpha)?;
                let spread = foreach::addcmul(square_avg, grad_avg, grad_avg, -1.0)?;
                foreach::sqrt_(&spread)?;
                spread
            }
            _ => foreach::sqrt(square_avg)?,
        };
        foreach::add_(&divisor, eps)?;
        if momentum > 0.0 {
            foreach::mul_(&state[1], momentum)?;
            foreach::addcdiv_(&state[1], &grads, &divisor, 1.0)?;
            foreach::add_scaled_(params, &state[1], -lr)
        } else {
            foreach::addcdiv_(params, &grads, &divisor, -lr)
        }
    }
}
