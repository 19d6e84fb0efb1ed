//! NAdam.

use kiln_ir::Loc;
use kiln_tensor::{Result, Tensor, TensorList, foreach};

use super::define::{check_betas, check_not_negative, optimizer, settings};
use super::group::{Groups, ParamGroup, Rule, Step, average, directed, shrink};

settings! {
    /// NAdam: Adam with Nesterov's momentum, which grows with the steps.
    NAdam, NAdamOptions, "NAdam", betas: (0.9, 0.999), {
        /// The learning rate, 0.002 by default.
        lr: f64 = 2e-3,
        /// What is added to the divisor, 1e-8 by default.
        eps: f64 = 1e-8,
        /// Weight decay, 0 by default.
        weight_decay: f64 = 0.0,
        /// How fast the momentum grows, 0.004 by default.
        momentum_decay: f64 = 4e-3,
        /// Whether weight decay shrinks the parameters themselves rather than adding to their gradients.
        decoupled_weight_decay: bool = false,
        /// Whether to climb instead of descend.
        maximize: bool = false,
    }
}

impl Settings {
    /// The momentum of an update.
    fn mu(&self, step: u64) -> f64 {
        self.betas.0 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * self.momentum_decay))
    }
}

impl Rule for Settings {
    fn check(&self, loc: Loc) -> Result<()> {
        check_not_negative("NAdam", [("lr", self.lr), ("eps", self.eps)], loc)?;
        check_betas("NAdam", self.betas, loc)?;
        let decays = [("weight_decay", self.weight_decay), ("momentum_decay", self.momentum_decay)];
        check_not_negative("NAdam", decays, loc)
    }

    fn states(&self) -> Vec<&'static str> {
        vec!["exp_avg", "exp_avg_sq"]
    }

    /// The product of all momenta so far.
    fn carry(&self, step: u64, product: f64) -> f64 {
        product * self.mu(step)
    }

    fn update(&self, at: Step, params: &TensorList, grads: TensorList, state: &[TensorList]) -> Result<()> {
        let Settings { lr, eps, weight_decay, betas: (_, beta2), .. } = *self;
        let (exp_avg, exp_avg_sq) = (&state[0], &state[1]);
        let added = if self.decoupled_weight_decay { 0.0 } else { weight_decay };
        let grads = directed(params, grads, self.maximize, added)?;
        if self.decoupled_weight_decay {
            shrink(params, lr, weight_decay)?;
        }
        average((exp_avg, exp_avg_sq), &grads, self.betas)?;
        let divisor = foreach::sqrt(exp_avg_sq)?;
        foreach::div_(&divisor, (1.0 - beta2.powf(at.number as f64)).sqrt())?;
        foreach::add_(&divisor, eps)?;
        let (mu, next) = (self.mu(at.number), self.mu(at.number + 1));
        foreach::addcdiv_(params, &grads, &divisor, -(lr * (1.0 - mu) / (1.0 - at.product)))?;
        foreach::addcdiv_(params, exp_avg, &divisor, -(lr * next / (1.0 - at.product * next)))
    }
}
